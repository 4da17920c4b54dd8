"""Content of a comparison's files: one row per method and size, as plain frozen values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dnis_torchrec.checks import check
from dnis_torchrec.forms import FORMS
from dnis_torchrec.report.content import RowGroup
from dnis_torchrec.report.pareto_points import Difference, ParetoPoint
from dnis_torchrec.report.provenance import Step
from dnis_torchrec.report.tables import form_names, metric_names


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One method at one size, over all seeds; numbers are means over the seeds that finished."""

    method: str
    size: float | None
    group: RowGroup
    missing: Mapping[int, str] = field(default_factory=dict)
    forms: tuple[str, ...] = ()
    embedding_bytes: float = 0.0
    extra_bytes: float = 0.0
    network_bytes: float = 0.0
    resident_bytes: Mapping[str, float] = field(default_factory=dict)
    trials: float = 0.0
    seconds_of_trials: float = 0.0
    cells_at_once: int = 1
    difference: Mapping[str, Difference] = field(default_factory=dict)
    pareto: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no seed finished."""
        return not self.group.rows

    @property
    def precision(self) -> str:
        """What values are stored in; several where seeds differ in it, ``""`` of an empty row."""
        return ", ".join(
            dict.fromkeys(
                FORMS[form].precision.name if form in FORMS else form for form in self.forms
            )
        )

    @property
    def reason(self) -> str:
        """Why seeds are missing, each reason once with its seeds; ``""`` if none is."""
        seeds: dict[str, list[str]] = {}
        for seed, reason in self.missing.items():
            seeds.setdefault(reason, []).append(str(seed))
        if self.is_empty and len(seeds) == 1:
            return next(iter(seeds))
        return "; ".join(
            f"seed {', '.join(numbers)}: {reason}" for reason, numbers in seeds.items()
        )

    def num_seeds(self, metric: str) -> int:
        """Returns the number of seeds that have a metric."""
        return sum(metric in row.metrics for row in self.group.rows)

    def is_whole(self, metric: str) -> bool:
        """Returns whether every seed has a metric. A mean over fewer is one of other splits, which
        differ in level."""
        return (
            not self.is_empty
            and not self.missing
            and self.num_seeds(metric) == len(self.group.rows)
        )

    def point(self, metric: str) -> ParetoPoint | None:
        """The row's place in the Pareto chart, None for a row that is not whole."""
        mean = self.group.mean(metric)
        if not self.is_whole(metric) or mean is None or self.embedding_bytes <= 0:
            return None
        return ParetoPoint(
            method=self.method,
            bytes=self.embedding_bytes,
            mean=mean,
            deviation=self.group.deviation(metric),
            compression=self.group.compression,
            num_seeds=len(self.group.rows),
            precision=self.precision,
            difference=self.difference.get(metric),
        )

    def bytes(self) -> dict[str, int]:
        """Export form -> bytes of all tables, mean over the seeds that have it."""
        sizes = {
            form: [row.bytes[form] for row in self.group.rows if form in row.bytes]
            for form in self.form_names()
        }
        return {form: round(statistics.fmean(values)) for form, values in sizes.items()}

    def form_names(self) -> list[str]:
        """Names of the export forms that a seed has."""
        return form_names(self.group.rows)

    def to_json(self) -> dict[str, Any]:
        """The row as comparison.json holds it: a row of report.json with means over seeds, and more
        keys."""
        head = {"method": self.method, "size": self.size, "seeds": list(self.group.seeds)}
        if self.is_empty:
            return head | {
                "metrics": {},
                "spread": {},
                "trials": 0,
                "pareto": False,
                "reason": self.reason,
            }
        metrics = metric_names(self.group.rows)
        spread = {name: self.group.deviation(name) for name in metrics}
        row = {
            "compression": self.group.compression,
            "parameters": round(self.group.parameters),
            "dense_parameters": round(self.group.dense_parameters),
            "bytes": self.bytes(),
            "metrics": {name: self.group.mean(name) for name in metrics},
            "seed": self.group.seeds[0],
            "seconds": self.group.seconds,
            "spread": {name: value for name, value in spread.items() if value is not None},
            "difference": {name: vars(value) for name, value in self.difference.items()},
            "form": ", ".join(self.forms),
            "precision": self.precision,
            "embedding_bytes": round(self.embedding_bytes),
            "extra_bytes": round(self.extra_bytes),
            "network_bytes": round(self.network_bytes),
            "resident_bytes": {form: round(size) for form, size in self.resident_bytes.items()},
            "trials": round(self.trials),
            "seconds_of_trials": self.seconds_of_trials,
            "cells_at_once": self.cells_at_once,
            "pareto": self.pareto,
        }
        missing = (
            {"missing": {str(seed): reason for seed, reason in self.missing.items()}}
            if self.missing
            else {}
        )
        return head | row | missing


@dataclass(frozen=True, kw_only=True)
class ComparisonContent:
    """Everything that the page of a comparison shows."""

    recipe: str
    rows: tuple[ComparisonRow, ...]
    primary_metric: str
    higher_is_better: bool
    rules: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    provenance: tuple[Step, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(len(self.rows) > 0, "ComparisonContent.rows", "at least one row", "none")

    @property
    def filled(self) -> tuple[ComparisonRow, ...]:
        """Rows that have at least one seed."""
        return tuple(row for row in self.rows if not row.is_empty)

    @property
    def metrics(self) -> list[str]:
        """Metrics to show: the primary one first; ``"loss"`` only where there is nothing else,
        being one of them."""
        names = metric_names(row for entry in self.rows for row in entry.group.rows)
        shown = [name for name in names if name != "loss"] or names
        return sorted(shown, key=lambda name: name != self.primary_metric)
