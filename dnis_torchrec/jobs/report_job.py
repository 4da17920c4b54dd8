"""`dnis report`: the page of one run, with rows and figures of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dnis_torchrec.checks import check
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.report import (
    ReportContent,
    RunResults,
    SeveralRuns,
    block_summaries,
    combine,
    count_rows,
    named_alpha,
    write_report,
)


def run_report(run_path: Path, others: Sequence[Path] = ()) -> Path:
    """Writes RUN/report.html, and its figures as PNG and SVG in RUN/figures.

    Args:
        run_path: the finished run that the report is about.
        others: further finished runs of the same recipe. Those that differ in size or seed add rows; those that differ
            in embedding_dim or in the number of blocks make the figures of the metric against D and against S.

    Returns:
        The path of the page.

    Raises:
        ValueError: if a run is none, is not finished, or differs from the first in something else.
    """
    run = RunFolder.open_searched(run_path)
    head, scheme, blocks = run.read_head(), run.scheme(), run.blocks()
    runs = read_runs([run_path, *others])
    has_holes = not all(table.is_block_structured for table in scheme.tables.values())
    tables = run.tables() if has_holes else None
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
        row_distribution=count_rows(scheme, run.counts(), tables),
        by_embedding_dim=runs.by_embedding_dim,
        by_num_blocks=runs.by_num_blocks,
        notes=tuple(head["notes"]),
        versions=head["versions"],
    )
    return write_report(run_path / "report.html", content, figure_folder=run_path / "figures")


def read_runs(paths: Sequence[Path]) -> SeveralRuns:
    """Reads what a report shows of several finished runs. The report is about the first one.

    Args:
        paths: run folders, at least one.

    Raises:
        ValueError: as `run_report`.
    """
    return combine([_run_results(path) for path in paths])


def _run_results(path: Path) -> RunResults:
    run = RunFolder.open_searched(path)
    head = run.read_head()
    remedy = "it was damaged; run `dnis search` again"
    check(
        "num_blocks" in head["configuration"], f"run folder {path}", "num_blocks in its configuration", "none", remedy
    )
    return RunResults(
        name=str(path),
        recipe=head["recipe"],
        configuration=head["configuration"],
        embedding_dim=max(table["embedding_dim"] for table in head["scheme"].values()),
        rows=run.rows(),
    )
