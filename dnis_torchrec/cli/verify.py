"""`dnis verify`: is an artifact whole and right?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dnis_torchrec.cli.app import (
    ArtifactArgument,
    DataOption,
    RecipeOption,
    arguments,
    check_data,
    check_json,
    is_first_rank,
    print_table,
)
from dnis_torchrec.cli.options import command
from dnis_torchrec.cli.terminal import say

if TYPE_CHECKING:
    from dnis_torchrec.artifact.verify import Finding

WIDTH = 120
MANY = 6
"""Rows of one kind that are counted instead of listed."""


@command
def verify(
    artifact: ArtifactArgument,
    data: DataOption = None,
    recipe: RecipeOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write it here.")] = None,
) -> None:
    """Checks every file's hash, every form's values on hard bags, unknown ids and the metric."""
    from dnis_torchrec.artifact import verify as verification
    from dnis_torchrec.data.files import write_json
    from dnis_torchrec.jobs.artifact_jobs import recipe_of_artifact
    from dnis_torchrec.jobs.recorded import load_recorded
    from dnis_torchrec.training.shard import launched_ranks

    with arguments():
        check_data(data)
        check_json(json_file)
        if recipe is not None:
            load_recorded(artifact, {}, data, recipe)
    has_recipe = data is not None or recipe is not None
    make = partial(recipe_of_artifact, artifact, data, recipe=recipe) if has_recipe else None
    with launched_ranks() as ranks:
        result = verification.verify(artifact, make_recipe=make, ranks=ranks)
    if is_first_rank():
        table = Table(
            "check", "of", "result", "detail", title=f"{result.artifact}: what was checked"
        )
        for cells in _rows(result.findings):
            table.add_row(*cells)
        print_table(table, WIDTH)
        if json_file is not None:
            write_json(json_file, result.to_json())
        for finding in result.failures:
            say(f"error: {finding.check}, {finding.subject}: {finding.detail}", err=True)
    if result.failures:
        raise typer.Exit(1)


def _rows(findings: Sequence[Finding]) -> list[tuple[str, str, str, str]]:
    """A row per finding; of `MANY` and more good ones of a check that are alike, how many they are."""
    alike = Counter((finding.check, finding.status) for finding in findings if _is_plain(finding))
    rows, counted = [], set()
    for finding in findings:
        kind = (finding.check, finding.status)
        if not _is_plain(finding) or alike[kind] < MANY:
            rows.append((finding.check, finding.subject, finding.status, finding.detail))
        elif kind not in counted:
            counted.add(kind)
            rows.append(
                (finding.check, f"{alike[kind]} of them, named by --json", finding.status, "")
            )
    return rows


def _is_plain(finding: Finding) -> bool:
    """Returns whether a finding is good and brings no news, as bytes of a file."""
    from dnis_torchrec.artifact.verify import OK

    return finding.status == OK and finding.check == "checksums"
