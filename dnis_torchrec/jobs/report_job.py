"""`dnis report`: the page of one run, with rows and figures of others."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dnis_torchrec.checks import check
from dnis_torchrec.data.files import conform
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.report import (
    ReportContent,
    ReportRow,
    RunResults,
    SeveralRuns,
    block_summaries,
    combine,
    count_rows,
    named_alpha,
    write_report,
)
from dnis_torchrec.report.content import seed_groups
from dnis_torchrec.report.provenance import commands, steps_of
from dnis_torchrec.report.verdict import ONE_SEED, group_sentence
from dnis_torchrec.search.settings import SearchSettings


def run_report(run_path: Path, others: Sequence[Path] = ()) -> Path:
    """Writes RUN/report.html."""
    run = RunFolder.open_searched(run_path)
    head, scheme, blocks = run.read_head(), run.scheme(), run.blocks()
    runs = read_runs([run_path, *others])
    steps = steps_of(head, run_path)
    has_holes = not all(table.is_block_structured for table in scheme.tables.values())
    tables = {name: stored.whole() for name, stored in run.tables().items()} if has_holes else None
    content = ReportContent(
        title=f"{head['recipe']}: {'bits' if scheme.has_codes else 'embedding dimensions'} found by search",
        recipe=head["recipe"],
        configuration=head["configuration"],
        rows=runs.rows,
        primary_metric=head["primary_metric"],
        higher_is_better=head["higher_is_better"],
        alpha=named_alpha(run.alpha(), blocks),
        blocks=block_summaries(scheme, blocks, tables),
        history=tuple(head["history"]),
        stop_on=head.get("stop_on", "loss"),
        stop_on_higher_is_better=head.get("stop_on_higher_is_better", False),
        row_distribution=count_rows(scheme, run.counts(), tables),
        by_embedding_dim=runs.by_embedding_dim,
        by_num_blocks=runs.by_num_blocks,
        notes=tuple(head["notes"]),
        doubts=tuple(head.get("doubts", ())),
        provenance=steps,
        reproduce=commands(steps) or _commands(head),
        versions=head["versions"],
    )
    return write_report(run_path / "report.html", content)


def verdict_of(run_path: Path, rows: Sequence[ReportRow]) -> tuple[str, list[str]]:
    """What a search has gained, in one sentence, and what is uncertain about it."""
    head, groups = RunFolder.open_searched(run_path).read_head(), seed_groups(rows)
    subject = next(group for group in groups if rows[0] in group.rows)
    metric, higher = head["primary_metric"], head["higher_is_better"]
    told = group_sentence(subject, groups, metric, higher_is_better=higher)
    return told, [*([ONE_SEED] if len(subject.rows) == 1 else []), *head.get("doubts", ())]


def read_runs(paths: Sequence[Path]) -> SeveralRuns:
    """Reads what a report shows of several finished runs. The report is about the first one."""
    return combine([_run_results(path) for path in paths])


def _commands(head: Mapping[str, Any]) -> tuple[str, ...]:
    """The command of a search, as its settings tell it; none where it began with a model that lies
    elsewhere."""
    told = head["configuration"]
    options = {
        "compression": told.get("compression"),
        "seed": head["seed"],
        "embedding_dim": head.get("embedding_dim"),
    }
    options |= {field.name: told.get(field.name) for field in fields(SearchSettings)}
    for name, value in options.items():
        conform(value, int | float | None, f"run.json, configuration.{name}")
    given = [
        (f"--{name.replace('_', '-')}", f"{value:g}")
        for name, value in options.items()
        if value is not None
    ]
    if told.get("compression") is None or "given" in told:
        return ()
    words = ["dnis", "search", head["recipe"], *(word for pair in given for word in pair)]
    return (f"{shlex.join(words)} --data DATA --out RUN",)


def _run_results(path: Path) -> RunResults:
    run = RunFolder.open_searched(path)
    head = run.read_head()
    remedy = "it was damaged; run `dnis search` again"
    check(
        "num_blocks" in head["configuration"],
        f"run folder {path}",
        "num_blocks in its configuration",
        "none",
        remedy,
    )
    return RunResults(
        name=str(path),
        recipe=head["recipe"],
        configuration=head["configuration"],
        embedding_dim=max(table["embedding_dim"] for table in head["scheme"].values()),
        rows=run.rows(),
    )
