"""Several runs of one search, put together: more sizes and seeds, or a metric against a setting
that they differ in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import SAME_BYTES, ReportRow
from dnis_torchrec.report.tables import format_ratio

FREE = ("compression", "num_blocks")
"""Fields of the configuration in which runs of one report may differ; the seed is none of them."""

Series = dict[str, tuple[tuple[float, ReportRow], ...]]


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """The results and settings of a run, by which a report puts it beside others."""

    name: str
    recipe: str
    configuration: dict[str, Any]
    embedding_dim: int
    rows: tuple[ReportRow, ...]

    @property
    def num_blocks(self) -> int:
        """S."""
        return int(self.configuration["num_blocks"])


@dataclass(frozen=True, kw_only=True)
class SeveralRuns:
    """Runs of one search, sorted by what they differ in."""

    rows: tuple[ReportRow, ...]
    by_embedding_dim: Series
    by_num_blocks: Series
    drawn_only: tuple[str, ...]


def combine(runs: Sequence[RunResults]) -> SeveralRuns:
    """Puts runs together; the first one is what the report is about."""
    first = runs[0]
    for run in runs[1:]:
        _check_comparable(first, run)
    alike = [
        run
        for run in runs
        if (run.embedding_dim, run.num_blocks) == (first.embedding_dim, first.num_blocks)
    ]
    same_blocks = [run for run in runs if run.num_blocks == first.num_blocks]
    same_dim = [run for run in runs if run.embedding_dim == first.embedding_dim]
    return SeveralRuns(
        rows=_distinct(row for run in alike for row in run.rows),
        by_embedding_dim=_series(same_blocks, lambda run: run.embedding_dim, ("dnis", "dense")),
        by_num_blocks=_series(same_dim, lambda run: run.num_blocks, ("dnis",)),
        drawn_only=tuple(run.name for run in runs if run not in alike),
    )


def _check_comparable(first: RunResults, run: RunResults) -> None:
    place = f"run {run.name}"
    check(
        run.recipe == first.recipe,
        place,
        f"recipe {first.recipe!r}, as {first.name}",
        repr(run.recipe),
    )
    names = (first.configuration.keys() | run.configuration.keys()) - set(FREE)
    for name in sorted(names):
        value, expected = run.configuration.get(name), first.configuration.get(name)
        requirement = (
            f"{name} = {expected}, as {first.name}; runs may differ in size, seed, D and S"
        )
        check(value == expected, place, requirement, value, "leave it out, or report it alone")


def _series(
    runs: Sequence[RunResults], setting: Callable[[RunResults], int], methods: Sequence[str]
) -> Series:
    if len({setting(run) for run in runs}) < 2:
        return {}
    points = _distinct(
        (setting(run), row) for run in runs for row in run.rows if row.method in methods
    )
    lines: Series = {}
    for method in methods:
        mine = sorted(
            (point for point in points if point[1].method == method),
            key=lambda point: _ratio(point[1]),
        )
        while mine:
            near = [point for point in mine if _ratio(point[1]) <= SAME_BYTES * _ratio(mine[0][1])]
            mine = mine[len(near) :]
            mean = sum(_ratio(row) for _, row in near) / len(near)
            lines[method if method == "dense" else f"{method} at {format_ratio(mean)}"] = (
                _of_shared_seeds(near)
            )
    return lines


def _of_shared_seeds(points: Sequence[tuple[int, ReportRow]]) -> tuple[tuple[int, ReportRow], ...]:
    """Those of the seeds that every setting has; all of them if there is none."""
    seeds: dict[int, set[int]] = {}
    for setting, row in points:
        seeds.setdefault(setting, set()).add(row.seed)
    shared = set.intersection(*seeds.values())
    return tuple(point for point in points if not shared or point[1].seed in shared)


def _ratio(row: ReportRow) -> float:
    return row.compression


def _distinct(items: Any) -> tuple[Any, ...]:
    """Without repetitions, in order: a run pruned further carries the rows of the run it came from."""
    kept: list[Any] = []
    for item in items:
        if item not in kept:
            kept.append(item)
    return tuple(kept)
