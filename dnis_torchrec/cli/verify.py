"""`dnis verify`: is an artifact whole, right, small and fast?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dnis_torchrec.cli.addresses import fetched_settings
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
    from dnis_torchrec.jobs.verification import Verification
    from dnis_torchrec.jobs.verification.findings import Finding

WIDTH = 120
MANY = 6
"""Rows of one kind that are counted instead of listed."""
MIB = 2**20


@command
def verify(
    artifact: ArtifactArgument,
    against: Annotated[
        Path | None,
        typer.Option(
            help="The run that it came from: same tables, same dense weights.", **fetched_settings
        ),
    ] = None,
    data: DataOption = None,
    recipe: RecipeOption = None,
    measure: Annotated[bool, typer.Option(help="Measure memory and latency too.")] = True,
    rounds: Annotated[
        int, typer.Option(help="Lookups timed per form and batch size.", min=1)
    ] = 100,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write it here.")] = None,
) -> None:
    """Checks every file's hash, every form's values on hard bags, unknown ids and the metric;
    measures RSS and latency."""
    from dnis_torchrec.data.files import write_json
    from dnis_torchrec.jobs import verification
    from dnis_torchrec.jobs.recorded import load_recorded
    from dnis_torchrec.jobs.run_folder import RunFolder

    with arguments():
        check_data(data)
        check_json(json_file)
        if recipe is not None:
            load_recorded(artifact, {}, data, recipe)
        if against is not None:
            RunFolder.open(against)
    found = verification.verify(
        artifact, against=against, recipe=recipe, data=data, measure=measure, rounds=rounds
    )
    if is_first_rank():
        _print(found)
        if json_file is not None:
            write_json(json_file, found.to_json())
        for finding in found.failures:
            say(f"error: {finding.check}, {finding.subject}: {finding.detail}", err=True)
    if found.failures:
        raise typer.Exit(1)


def _print(found: Verification) -> None:
    checks = Table("check", "of", "result", "detail", title=f"{found.artifact}: what was checked")
    for cells in _rows(found.findings):
        checks.add_row(*cells)
    print_table(checks, WIDTH)
    if found.resident:
        dense = next(row.touched_bytes for row in found.resident if row.form == "uncompressed_fp32")
        memory = Table(
            "form",
            "RSS loaded, MiB",
            "RSS with every row used, MiB",
            "uncompressed fp32 over it",
            title="memory",
        )
        for row in found.resident:
            smaller = f"{dense / row.touched_bytes:.1f}" if row.touched_bytes > 0 else "-"
            memory.add_row(
                row.form, f"{row.loaded_bytes / MIB:.2f}", f"{row.touched_bytes / MIB:.2f}", smaller
            )
        print_table(memory, WIDTH)
    if found.latency:
        latency = Table(
            "form",
            "batch",
            "p50, ms",
            "p99, ms",
            "over uncompressed fp32",
            title="latency of lookups",
        )
        for timed in found.latency:
            figures = f"{timed.p50_ms:.3f}", f"{timed.p99_ms:.3f}", f"{timed.ratio:.2f}"
            latency.add_row(timed.form, str(timed.batch_size), *figures)
        print_table(latency, WIDTH)


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
    """Returns whether a finding is good and brings no news; bytes of a file and figures of the
    metric are none."""
    from dnis_torchrec.jobs.verification.findings import OK

    return finding.status == OK and finding.check in ("checksums", "run")
