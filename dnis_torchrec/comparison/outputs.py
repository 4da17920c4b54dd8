"""A comparison for the terminal, as CSV and as JSON; its page is dnis_torchrec.report.compare_page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from dnis_torchrec.comparison.cells import CellResult
from dnis_torchrec.data.files import write_text
from dnis_torchrec.report.compare_content import ComparisonContent, ComparisonRow
from dnis_torchrec.report.compare_lines import compared_lines
from dnis_torchrec.report.content import json_text
from dnis_torchrec.report.provenance import PROVENANCE
from dnis_torchrec.report.tables import cell


def comparison_table(content: ComparisonContent, metrics: Sequence[str] | None = None) -> Table:
    """A terminal table, size by size; the best mean of every metric at a size is bold."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method")
    metrics = content.metrics if metrics is None else metrics
    headings = (
        "size",
        "parameters",
        "bytes",
        "precision",
        "compression",
        *metrics,
        f"{content.primary_metric} - dense",
        "seeds",
    )
    for heading in (*headings, "one run", "runs", "all runs", "Pareto"):
        table.add_column(cell(heading), justify="right")
    size = content.rows[0].size
    for line in compared_lines(content):
        if line.row.size != size:
            table.add_row()
            size = line.row.size
        if line.row.is_empty:
            table.add_row(cell(line.row.method, "dim"), line.size, *[""] * (len(headings) + 2))
            continue
        told = dict(zip(content.metrics, line.metrics, strict=True))
        table.add_row(
            cell(line.row.method),
            line.size,
            line.parameters,
            line.megabytes,
            line.precision,
            line.ratio,
            *(
                cell(text, "bold" if is_best else "")
                for text, is_best in map(told.__getitem__, metrics)
            ),
            line.difference,
            line.seeds,
            line.seconds,
            line.trials,
            line.seconds_of_trials,
            "*" if line.row.pareto else "",
        )
    return table


def missing_lines(rows: Iterable[ComparisonRow]) -> list[str]:
    """Says why seeds are missing, in one line per row that lacks any."""
    return [
        f"{row.method}{'' if row.size is None else f' at {row.size:g}'}: {row.reason}"
        for row in rows
        if row.missing
    ]


def comparison_frame(rows: Iterable[ComparisonRow]) -> pd.DataFrame:
    """One line per row with the keys of its JSON; nested ones joined by a dot (``metrics.mse``),
    lists by a space."""
    lines = []
    for row in rows:
        fields = row.to_json() | {
            "seeds": " ".join(map(str, row.group.seeds)),
            "reason": row.reason,
        }
        fields.pop("missing", None)
        lines.append(fields)
    frame = pd.json_normalize(lines)
    return frame[[*(name for name in frame if name != "reason"), "reason"]]


def write_frame(path: Path, rows: Iterable[ComparisonRow]) -> Path:
    """Writes a CSV file atomically."""
    return write_text(path, comparison_frame(rows).to_csv(index=False, lineterminator="\n"))


def write_comparison_json(path: Path, content: ComparisonContent) -> Path:
    """Writes recipe, primary_metric, higher_is_better, rules, notes, provenance, versions and rows
    atomically."""
    described: dict[str, Any] = {
        "recipe": content.recipe,
        "primary_metric": content.primary_metric,
        "higher_is_better": content.higher_is_better,
        "rules": dict(content.rules),
        "notes": list(content.notes),
        PROVENANCE: [step.to_json() for step in content.provenance],
        "versions": dict(content.versions),
        "rows": [row.to_json() for row in content.rows],
    }
    return write_text(path, json_text(described, str(path)) + "\n")


def joined_versions(results: Sequence[CellResult]) -> Mapping[str, str]:
    """package -> version of all cells; where they differ, all of them with commas between."""
    versions: dict[str, dict[str, None]] = {}
    for result in results:
        for package, version in result.versions.items():
            versions.setdefault(package, {})[version] = None
    return {package: ", ".join(sorted(found)) for package, found in versions.items()}
