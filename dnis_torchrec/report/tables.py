"""Results as tables: for a terminal (rich) and for a data frame (pandas, then CSV); and how numbers
are printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal

import pandas as pd
from rich.table import Table
from rich.text import Text

from dnis_torchrec.checks import visible
from dnis_torchrec.report.content import ReportRow, RowGroup, seed_groups

TIMES = "\N{MULTIPLICATION SIGN}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
MINUS = "\N{MINUS SIGN}"


def cell(text: str, style: str = "") -> Text:
    """Makes the text of a cell or heading of a terminal's table: neither markup nor control codes
    have an effect."""
    return Text(visible(text), style)


def rows_frame(rows: Iterable[ReportRow]) -> pd.DataFrame:
    """One line per row, one column per field, form (``bytes.<form>``) and metric
    (``metrics.<name>``); for CSV."""
    rows = list(rows)
    lines = [
        {
            "method": row.method,
            "seed": row.seed,
            "compression": float(row.compression),
            "parameters": row.parameters,
            "seconds": float(row.seconds),
        }
        | {f"bytes.{form}": size for form, size in row.bytes.items()}
        | {f"metrics.{name}": float(value) for name, value in row.metrics.items()}
        for row in rows
    ]
    columns = ["method", "seed", "compression", "parameters", "seconds"]
    columns += [f"bytes.{form}" for form in form_names(rows)] + [
        f"metrics.{name}" for name in metric_names(rows)
    ]
    return pd.DataFrame(lines, columns=columns)


def rows_table(rows: Iterable[ReportRow], metrics: Sequence[str] | None = None) -> Table:
    """A terminal table, smallest compression first, the seeds of one experiment in one line as mean
    and deviation."""
    rows = list(rows)
    groups = seed_groups(rows)
    metrics = metric_names(rows) if metrics is None else metrics
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method")
    for heading in ("compression", "parameters", "smallest form", *metrics, "seeds", "time"):
        table.add_column(cell(heading), justify="right")
    directions = {name: is_higher_better(name) for name in metrics}
    best = {
        name: best_groups(groups, name, up) for name, up in directions.items() if up is not None
    }
    for index, group in enumerate(groups):
        cells = [
            cell(group_metric(group, name), "bold" if index in best.get(name, ()) else "")
            for name in metrics
        ]
        table.add_row(
            cell(group.method),
            format_ratio(group.compression),
            format_count(group.parameters),
            smallest_form(group),
            *cells,
            format_seeds(group.seeds),
            format_seconds(group.seconds),
        )
    return table


def metric_names(rows: Iterable[ReportRow]) -> list[str]:
    """Names of all metrics, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


def form_names(rows: Iterable[ReportRow]) -> list[str]:
    """Names of all export forms, in order of first appearance."""
    return list(dict.fromkeys(form for row in rows for form in row.bytes))


def group_metric(group: RowGroup, metric: str) -> str:
    """Mean of a metric, with its standard deviation over seeds if there are several; a dash where
    it is absent."""
    mean, deviation = group.mean(metric), group.deviation(metric)
    if mean is None:
        return "-"
    return format_metric(mean) + (
        f" {PLUS_MINUS} {format_metric(deviation)}" if deviation is not None else ""
    )


def smallest_form(group: RowGroup) -> str:
    """Size and name of the smallest export form of the group's first row; a dash if there is none."""
    sizes = group.rows[0].bytes
    if not sizes:
        return "-"
    form = min(sizes, key=lambda name: sizes[name])
    return f"{format_megabytes(sizes[form])} {form}"


def of_fewer_seeds(num_seeds: int, num_rows: int) -> str:
    """Returns the note behind a mean over fewer seeds than its row has, or an empty text."""
    return f" ({num_seeds} seed{'s' * (num_seeds > 1)})" if num_seeds < num_rows else ""


def format_seeds(seeds: Sequence[int]) -> str:
    """The seeds, or how many when there are more than four."""
    return ", ".join(map(str, seeds)) if len(seeds) <= 4 else f"{len(seeds)} seeds"


def is_higher_better(metric: str) -> bool | None:
    """Direction of a metric known by name, a prefix such as ``test_`` or a suffix such as ``@10``
    aside."""
    words = metric.lower().split("@")[0].split("_")
    if {"auc", "accuracy", "hit", "ndcg", "recall", "precision", "map", "mrr"} & set(words):
        return True
    return (
        False if {"mse", "rmse", "mae", "loss", "logloss", "entropy", "ne"} & set(words) else None
    )


def best_groups(groups: Sequence[RowGroup], metric: str, higher_is_better: bool) -> frozenset[int]:
    """Positions of the groups with the best mean of a metric, as it is printed, so that ties share
    the first place."""
    means = {
        index: mean
        for index, group in enumerate(groups)
        if (mean := group.mean(metric)) is not None
    }
    if not means:
        return frozenset()
    best = format_metric(max(means.values()) if higher_is_better else min(means.values()))
    return frozenset(index for index, mean in means.items() if format_metric(mean) == best)


def format_metric(value: float) -> str:
    """A metric with four decimals, or four digits from 10 on."""
    return (
        f"{value:.4f}"
        if abs(value) < 10
        else f"{value:.4g}"
        if abs(value) < 1e3
        else f"{value:.0f}"
    )


def format_difference(value: float) -> str:
    """A difference of metrics with its sign; none where it is printed as zero."""
    size = format_metric(abs(value))
    return size if float(size) == 0 else f"{'+' if value > 0 else MINUS}{size}"


def format_ratio(value: float) -> str:
    """A compression."""
    return f"{format_count(value)}{TIMES}"


def format_count(value: float) -> str:
    """A count with three digits and k, M or G."""
    rounded = float(f"{value:.3g}")  # first, so that 999,600 is 1M and not 1000k
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(rounded) >= factor:
            return f"{format_number(value / factor)}{unit}"
    return format_number(value)


def format_number(value: float) -> str:
    """A number with three digits, or all of them before the point; never with an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{Decimal(f'{value:.3g}'):f}"


def format_megabytes(num_bytes: float) -> str:
    """Bytes in megabytes (10^6 bytes), always, so that sizes can be compared at a glance."""
    return f"{format_number(num_bytes / 1e6)} MB"


def format_seconds(seconds: float) -> str:
    """A duration."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
