"""Results as tables: for a terminal (rich) and for a data frame (pandas, then CSV); and how numbers are printed."""

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
    """Makes the text of a cell or heading of a terminal's table: neither markup nor control codes have an effect.

    Args:
        text: with names of others in it.
        style: rich's.
    """
    return Text(visible(text), style)


def rows_frame(rows: Iterable[ReportRow]) -> pd.DataFrame:
    """One line per row, one column per field, form (``bytes.<form>``) and metric (``metrics.<name>``); for CSV.

    A form or metric that a row does not have is NaN. Columns stand in a fixed order: fields, forms, metrics.

    Args:
        rows: in the order of the lines.

    Example:
        >>> row = ReportRow(method="dnis", compression=4.0, parameters=10, dense_parameters=90, bytes={"csr_fp32": 90},
        ...     metrics={"auc": 0.8}, seed=0, seconds=1.5)
        >>> list(rows_frame([row]))  # doctest: +NORMALIZE_WHITESPACE
        ['method', 'seed', 'compression', 'parameters', 'seconds', 'bytes.csr_fp32', 'metrics.auc']
    """
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
    columns += [f"bytes.{form}" for form in form_names(rows)] + [f"metrics.{name}" for name in metric_names(rows)]
    return pd.DataFrame(lines, columns=columns)


def rows_table(rows: Iterable[ReportRow], metrics: Sequence[str] | None = None) -> Table:
    """A terminal table, smallest compression first, the seeds of one experiment in one line as mean and deviation.

    The best value of every metric whose direction is known by name is bold.

    Args:
        rows: the results to show.
        metrics: those to show; all of them if not given.
    """
    rows = list(rows)
    groups = seed_groups(rows)
    metrics = metric_names(rows) if metrics is None else metrics
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method")
    for heading in ("compression", "parameters", "smallest form", *metrics, "seeds", "time"):
        table.add_column(cell(heading), justify="right")
    directions = {name: is_higher_better(name) for name in metrics}
    best = {name: best_groups(groups, name, up) for name, up in directions.items() if up is not None}
    for index, group in enumerate(groups):
        cells = [cell(group_metric(group, name), "bold" if index in best.get(name, ()) else "") for name in metrics]
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
    """Mean of a metric, with its standard deviation over seeds if there are several; a dash where it is absent.

    Args:
        group: rows of one method and size, a seed each.
        metric: its name; seeds that lack it are left out.
    """
    mean, deviation = group.mean(metric), group.deviation(metric)
    if mean is None:
        return "-"
    return format_metric(mean) + (f" {PLUS_MINUS} {format_metric(deviation)}" if deviation is not None else "")


def smallest_form(group: RowGroup) -> str:
    """Size and name of the smallest export form of the group's first row; a dash if there is none."""
    sizes = group.rows[0].bytes
    if not sizes:
        return "-"
    form = min(sizes, key=lambda name: sizes[name])
    return f"{format_megabytes(sizes[form])} {form}"


def of_fewer_seeds(num_seeds: int, num_rows: int) -> str:
    """Returns the note behind a mean over fewer seeds than its row has, or an empty text.

    Args:
        num_seeds: seeds of the mean.
        num_rows: seeds of its row.

    Example:
        >>> of_fewer_seeds(2, 3), of_fewer_seeds(3, 3)
        (' (2 seeds)', '')
    """
    return f" ({num_seeds} seed{'s' * (num_seeds > 1)})" if num_seeds < num_rows else ""


def format_seeds(seeds: Sequence[int]) -> str:
    """The seeds, or how many when there are more than four.

    Example:
        >>> format_seeds([0, 1]), format_seeds(range(5))
        ('0, 1', '5 seeds')
    """
    return ", ".join(map(str, seeds)) if len(seeds) <= 4 else f"{len(seeds)} seeds"


def is_higher_better(metric: str) -> bool | None:
    """Direction of a metric known by name, a prefix such as ``test_`` or a suffix such as ``@10`` aside.

    Args:
        metric: its name, in upper or lower case.

    Returns:
        True, False, or None for a name that is not known.

    Example:
        >>> [is_higher_better(name) for name in ("test_auc", "logloss", "ndcg@10", "x")]
        [True, False, True, None]
    """
    words = metric.lower().split("@")[0].split("_")
    if {"auc", "accuracy", "hit", "ndcg", "recall", "precision", "map", "mrr"} & set(words):
        return True
    return False if {"mse", "rmse", "mae", "loss", "logloss", "entropy", "ne"} & set(words) else None


def best_groups(groups: Sequence[RowGroup], metric: str, higher_is_better: bool) -> frozenset[int]:
    """Positions of the groups with the best mean of a metric, as it is printed, so that ties share the first place.

    Args:
        groups: to choose from.
        metric: its name.
        higher_is_better: its direction.

    Returns:
        Positions in `groups`; none where no group has the metric.
    """
    means = {index: mean for index, group in enumerate(groups) if (mean := group.mean(metric)) is not None}
    if not means:
        return frozenset()
    best = format_metric(max(means.values()) if higher_is_better else min(means.values()))
    return frozenset(index for index, mean in means.items() if format_metric(mean) == best)


def format_metric(value: float) -> str:
    """A metric with four decimals, or four digits from 10 on.

    Example:
        >>> format_metric(0.72631), format_metric(1234.5)
        ('0.7263', '1234')
    """
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}" if abs(value) < 1e3 else f"{value:.0f}"


def format_difference(value: float) -> str:
    """A difference of metrics with its sign; none where it is printed as zero.

    Example:
        >>> format_difference(0.0123), format_difference(-0.00001), format_difference(-0.5) == f"{MINUS}0.5000"
        ('+0.0123', '0.0000', True)
    """
    size = format_metric(abs(value))
    return size if float(size) == 0 else f"{'+' if value > 0 else MINUS}{size}"


def format_ratio(value: float) -> str:
    """A compression.

    Example:
        >>> [format_ratio(value).replace(TIMES, " times") for value in (5.3333, 1, 123.4, 1333)]
        ['5.33 times', '1 times', '123 times', '1.33k times']
    """
    return f"{format_count(value)}{TIMES}"


def format_count(value: float) -> str:
    """A count with three digits and k, M or G.

    Example:
        >>> format_count(0.5), format_count(999), format_count(999.6), format_count(6_600_000)
        ('0.5', '999', '1k', '6.6M')
    """
    rounded = float(f"{value:.3g}")  # first, so that 999,600 is 1M and not 1000k
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(rounded) >= factor:
            return f"{format_number(value / factor)}{unit}"
    return format_number(value)


def format_number(value: float) -> str:
    """A number with three digits, or all of them before the point; never with an exponent.

    Example:
        >>> format_number(3.14159), format_number(0.000032), format_number(12_345.6)
        ('3.14', '0.000032', '12,346')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{Decimal(f'{value:.3g}'):f}"


def format_megabytes(num_bytes: float) -> str:
    """Bytes in megabytes (10^6 bytes), always, so that sizes can be compared at a glance.

    Example:
        >>> format_megabytes(26_412_000), format_megabytes(32), format_megabytes(12_345_678_901)
        ('26.4 MB', '0.000032 MB', '12,346 MB')
    """
    return f"{format_number(num_bytes / 1e6)} MB"


def format_seconds(seconds: float) -> str:
    """A duration.

    Example:
        >>> format_seconds(3.21), format_seconds(125), format_seconds(7300)
        ('3.2 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
