"""Content of a report: rows of results, blocks, alpha, history, as plain frozen values. report.json
holds the rows."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.files import read_json, write_text
from dnis_torchrec.report.provenance import Step
from dnis_torchrec.report.row_distribution import RowDistribution

DENSE, NO_EMBEDDINGS = "dense", "no-embeddings"
"""The methods that have no size: the uncompressed model, and the model with every embedding zero.
"""
UNCOMPRESSED = "uncompressed"
"""The very model whose tables another row has made smaller."""
UNCOMPRESSED_ROWS = (UNCOMPRESSED, DENSE)
WITH_VALIDATION = "+validation"
"""Suffix of a row's name whose method was trained on the alpha-validation split as well."""
SAME_BYTES = 1.02
"""Compressions that differ by no more than this factor are those of the same bytes."""


def rows_name(precision: str) -> str:
    """A row's name of the uncompressed model with its rows stored in fewer bits."""
    return f"{precision} rows"


def base_method(name: str) -> str:
    """A row's method, whether it was trained on the validation split as well or not."""
    return name.removesuffix(WITH_VALIDATION)


def _check_number(
    place: str, value: object, *, integer: bool = False, above_zero: bool = False
) -> None:
    kinds = (int,) if integer else (int, float)
    kind = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(describe(place, f"{kind}", f"{value!r} of type {type(value).__name__}"))
    requirement = f"{'a finite number' if not integer else kind} {'>' if above_zero else '>='} 0"
    check(
        math.isfinite(value) and (value > 0 if above_zero else value >= 0),
        place,
        requirement,
        value,
    )


def _check_name(place: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(describe(place, "a string", f"{value!r} of type {type(value).__name__}"))
    check(bool(value.strip()), place, "a non-empty string", repr(value))


def _check_named_numbers(place: str, values: object) -> None:
    if not isinstance(values, Mapping):
        raise TypeError(describe(place, "a mapping from name to number", type(values).__name__))
    for name in values:
        _check_name(f"{place} name", name)


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """One trained model: how large its tables are and how well it predicts."""

    method: str
    compression: float
    parameters: int
    dense_parameters: int
    bytes: dict[str, int]
    metrics: dict[str, float]
    seed: int
    seconds: float

    def __post_init__(self) -> None:
        _check_name("ReportRow.method", self.method)
        _check_number("ReportRow.compression", self.compression, above_zero=True)
        _check_number("ReportRow.parameters", self.parameters, integer=True)
        _check_number("ReportRow.dense_parameters", self.dense_parameters, integer=True)
        _check_named_numbers("ReportRow.bytes", self.bytes)
        for form, size in self.bytes.items():
            _check_number(f"ReportRow.bytes[{form!r}]", size, integer=True)
        _check_named_numbers("ReportRow.metrics", self.metrics)
        for name, value in self.metrics.items():
            place = f"ReportRow.metrics[{name!r}]"
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(
                    describe(place, "a number", f"{value!r} of type {type(value).__name__}")
                )
            check(
                math.isfinite(value),
                place,
                "a finite number",
                value,
                "leave out what was not computed",
            )
        _check_number("ReportRow.seed", self.seed, integer=True)
        _check_number("ReportRow.seconds", self.seconds)

    def to_json(self) -> dict[str, Any]:
        """The row as report.json holds it."""
        return {
            "method": self.method,
            "compression": float(self.compression),
            "parameters": self.parameters,
            "dense_parameters": self.dense_parameters,
            "bytes": dict(self.bytes),
            "metrics": {name: float(value) for name, value in self.metrics.items()},
            "seed": self.seed,
            "seconds": float(self.seconds),
        }

    @staticmethod
    def from_json(described: object, *, place: str = "report row") -> ReportRow:
        """Reads a row back; keys that a row does not have are ignored."""
        if not isinstance(described, Mapping):
            raise ValueError(describe(place, "an object", type(described).__name__))
        names = tuple(ReportRow.__dataclass_fields__)
        missing = [name for name in names if name not in described]
        check(not missing, place, f"the keys {', '.join(names)}", f"none of {', '.join(missing)}")
        try:
            return ReportRow(**{name: described[name] for name in names})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: {error}") from error


def write_rows(path: Path, rows: Iterable[ReportRow], **extra: Any) -> Path:
    """Writes report.json atomically: ``{"rows": [...], **extra}``."""
    return write_text(
        path, json_text({"rows": [row.to_json() for row in rows], **extra}, str(path)) + "\n"
    )


class _Rows(TypedDict):
    rows: list[dict[str, Any]]


def read_report_rows(path: Path) -> tuple[ReportRow, ...]:
    """Reads the rows of a report.json, or of a comparison.json, whose empty rows are left out."""
    path = Path(path)
    check(path.is_file(), str(path), "a report.json", "no such file")
    rows = read_json(path, _Rows)["rows"]
    places = {f"{path} rows[{index}]": row for index, row in enumerate(rows)}
    return tuple(
        ReportRow.from_json(row, place=place) for place, row in places.items() if not _is_empty(row)
    )


def _is_empty(row: object) -> bool:
    """Returns whether it is a row of a comparison that has a reason instead of results."""
    return isinstance(row, Mapping) and "reason" in row and not row.get("metrics")


def json_text(value: object, place: str) -> str:
    """Indented JSON of `value`, strict: no NaN, no infinity."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(describe(place, "JSON-able values", str(error))) from error


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """The same experiment under several seeds: rows of one method and one size."""

    method: str
    rows: tuple[ReportRow, ...]

    @property
    def compression(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(row.compression for row in self.rows)

    @property
    def parameters(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(row.parameters for row in self.rows)

    @property
    def dense_parameters(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(row.dense_parameters for row in self.rows)

    @property
    def seconds(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(row.seconds for row in self.rows)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds, rising."""
        return tuple(sorted(row.seed for row in self.rows))

    def mean(self, metric: str) -> float | None:
        """Mean of a metric over the seeds that have it, None if none has."""
        values = self._values(metric)
        return statistics.fmean(values) if values else None

    def deviation(self, metric: str) -> float | None:
        """Sample standard deviation of a metric over the seeds, None below two of them."""
        values = self._values(metric)
        return statistics.stdev(values) if len(values) > 1 else None

    def difference(self, other: RowGroup, metric: str) -> tuple[float, int] | None:
        """Mean over the shared seeds of this group's metric minus the other's; levels differ
        between splits."""
        theirs = {row.seed: row.metrics[metric] for row in other.rows if metric in row.metrics}
        mine = {row.seed: row.metrics[metric] for row in self.rows if metric in row.metrics}
        pairs = [value - theirs[seed] for seed, value in mine.items() if seed in theirs]
        return (statistics.fmean(pairs), len(pairs)) if pairs else None

    def _values(self, metric: str) -> list[float]:
        return [row.metrics[metric] for row in self.rows if metric in row.metrics]


def seed_groups(rows: Iterable[ReportRow]) -> tuple[RowGroup, ...]:
    """Groups rows of one method, of the same bytes within 2 %, and of different seeds; sorted by
    compression."""
    groups: dict[str, list[list[ReportRow]]] = {}
    for row in sorted(rows, key=lambda row: (row.compression, row.seed)):
        for group in groups.setdefault(row.method, []):
            near = row.compression <= SAME_BYTES * group[0].compression
            if near and all(row.seed != other.seed for other in group):
                group.append(row)
                break
        else:
            groups[row.method].append([row])
    merged = [
        RowGroup(method=method, rows=tuple(rows))
        for method, parts in groups.items()
        for rows in parts
    ]
    return tuple(sorted(merged, key=lambda group: (group.compression, group.method)))


@dataclass(frozen=True, kw_only=True)
class BlockSummary:
    """Rows, occurrences and retained dims of one block of one table."""

    table: str
    block: int
    num_rows: int
    occurrences: int
    retained_dims: float
    embedding_dim: int

    def __post_init__(self) -> None:
        _check_name("BlockSummary.table", self.table)
        place = f"table {self.table!r} block {self.block}"
        for name in ("block", "num_rows", "occurrences"):
            _check_number(f"{place} {name}", getattr(self, name), integer=True)
        _check_number(f"{place} retained_dims", self.retained_dims)
        _check_number(f"{place} embedding_dim", self.embedding_dim, integer=True, above_zero=True)
        requirement = f"retained_dims <= embedding_dim = {self.embedding_dim}"
        check(self.retained_dims <= self.embedding_dim, place, requirement, self.retained_dims)

    @property
    def occurrences_per_row(self) -> float:
        """Mean occurrences of a row of the block; 0 for a block without rows."""
        return self.occurrences / self.num_rows if self.num_rows else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportContent:
    """Everything that a report shows."""

    title: str
    recipe: str
    configuration: dict[str, Any]
    rows: tuple[ReportRow, ...]
    primary_metric: str
    higher_is_better: bool
    alpha: dict[str, Tensor] = field(default_factory=dict)
    blocks: tuple[BlockSummary, ...] = ()
    history: tuple[dict[str, float | str], ...] = ()
    stop_on: str = "loss"
    stop_on_higher_is_better: bool = False
    row_distribution: RowDistribution | None = None
    by_embedding_dim: Mapping[str, Sequence[tuple[float, ReportRow]]] = field(default_factory=dict)
    by_num_blocks: Mapping[str, Sequence[tuple[float, ReportRow]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    provenance: tuple[Step, ...] = ()
    reproduce: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("title", "recipe", "primary_metric"):
            _check_name(f"ReportContent.{name}", getattr(self, name))
        check(
            len(self.rows) > 0,
            "ReportContent.rows",
            "at least one row",
            "none",
            "evaluate the model first",
        )
        json_text(self.configuration, "ReportContent.configuration")
        check_alpha(self.alpha)

    @property
    def groups(self) -> tuple[RowGroup, ...]:
        """The rows, grouped over seeds."""
        return seed_groups(self.rows)

    @property
    def subject(self) -> RowGroup:
        """The group that the report is about: that of the first row of method ``"dnis"``, else of
        the first row."""
        row = next((row for row in self.rows if row.method == "dnis"), self.rows[0])
        return next(group for group in self.groups if any(row is other for other in group.rows))


def check_alpha(alpha: Mapping[str, Tensor]) -> None:
    """Checks that each alpha is an ``(S, D)`` matrix of values in [0, 1]."""
    for key, values in alpha.items():
        place = f"alpha {key!r}"
        check(
            values.dim() == 2 and values.numel() > 0,
            place,
            "a non-empty (S, D)",
            tuple(values.shape),
        )
        low, high = (float(bound) for bound in torch.aminmax(values.detach()))
        check(low >= 0 and high <= 1, place, "values in [0, 1]", f"values from {low:g} to {high:g}")
