"""Results: a row for each model as served, in results.json, as a frame, and as a table."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pandas as pd
from rich.table import Table
from rich.text import Text

from dnis_torchrec.data.files import read_json, write_json

UNCOMPRESSED, COMPRESS, SEARCH = "uncompressed", "compress", "search"
"""Methods of the rows that commands write."""
TOLERANCE = 0.001
"""Rise of the loss at the size in the headline, at most, over the loss of the uncompressed one."""
LOWER_IS_BETTER = {"mse", "rmse", "mae", "loss", "logloss", "entropy", "ne"}
HIGHER_IS_BETTER = {"auc", "accuracy", "hit", "ndcg", "recall", "precision", "map", "mrr"}
MINUS, PLUS_MINUS, TIMES = "\N{MINUS SIGN}", "\N{PLUS-MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One model as it is served: its bytes, and its metrics on the test and the selection split."""

    method: str
    compression: float
    num_bytes: int
    metrics: Mapping[str, float]
    seed: int
    seconds: float
    selection: Mapping[str, float] = field(default_factory=dict)
    predicted_loss_increase: float | None = None
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that a report shows: rows, the epochs behind them, and what every block retains."""

    recipe: str
    rows: tuple[ResultRow, ...]
    primary_metric: str
    higher_is_better: bool
    history: tuple[Mapping[str, float | str], ...] = ()
    blocks: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    split: str = "test"
    """What metrics are those of: of a stream "window", or "recent" samples."""

    @property
    def headline(self) -> str:
        """The largest size whose loss is within `TOLERANCE`, in sentences, beside the uncompressed
        model and the other sizes."""
        frame = rows_frame(self.rows, self.primary_metric)
        metric, best = f"{self.split} {self.primary_metric}", headline_size(frame)
        plain = frame[frame["method"] == UNCOMPRESSED]["metric"]
        if best is None:
            value = format_metric(frame["metric"].iloc[0])
            return f"The {metric} of the {frame['method'].iloc[0]} model is {value}."
        direction = "higher" if self.higher_is_better else "lower"
        text = f"The tables are {format_count(best['compression'])} times smaller. "
        text += f"The {metric} is {format_metric(best['metric'])}"
        if len(plain):
            change = format_difference(best["metric"] - plain.iloc[0])
            text += f", uncompressed it is {format_metric(plain.iloc[0])}: {change}"
        text += f" ({direction} is better)."
        sizes = frame[frame["method"].isin([SEARCH, COMPRESS])]
        if not math.isnan(best["excess"]):
            of_loss = f"the {best['judge']}"
            limit = f"rises by at most {TOLERANCE} of its value"
            is_within = best["excess"] <= TOLERANCE
            text += f" The {best['judge']} {limit}." if is_within and len(sizes) == 1 else ""
            if is_within and len(sizes) > 1:
                text += f" This is the largest size at which {of_loss} {limit}."
            if not is_within:
                text += f" At no size {of_loss} {limit}; this size comes closest."
        rest = [
            f"{format_metric(row.metric)} at {format_count(row.compression)} times"
            for row in sizes.drop(best.name).itertuples()
        ]
        return text + (f" Other sizes: {', '.join(rest)}." if rest else "")


class _StoredRow(TypedDict):
    method: str
    compression: float
    num_bytes: int
    metrics: dict[str, float]
    seed: int
    seconds: float
    selection: dict[str, float]
    predicted_loss_increase: float | None
    name: str


class _StoredResults(TypedDict):
    recipe: str
    rows: list[_StoredRow]
    primary_metric: str
    higher_is_better: bool
    history: NotRequired[list[dict[str, float | str]]]
    blocks: NotRequired[list[dict[str, Any]]]
    notes: NotRequired[list[str]]
    commands: NotRequired[list[str]]
    versions: NotRequired[dict[str, str]]
    split: NotRequired[str]


def write_results(path: Path, results: Results) -> Path:
    """Writes results.json whole or not at all."""
    return write_json(path, json.loads(json.dumps(asdict(results), default=dict)))


def read_results(path: Path) -> Results:
    """Reads what `write_results` wrote; ValueError where it holds something else."""
    content: dict[str, Any] = {**read_json(path, _StoredResults)}
    rows = tuple(ResultRow(**row) for row in content.pop("rows"))
    if not rows:
        raise ValueError(f"{path}: expected at least one row, got none")
    texts: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    return Results(rows=rows, **texts)


def join_results(runs: Sequence[Results]) -> Results:
    """The rows of several runs of one recipe on one page; the epochs are those of the first run."""
    first = runs[0]
    for run in runs[1:]:
        if run.primary_metric != first.primary_metric:
            metrics = f"the metric {first.primary_metric!r}, got {run.primary_metric!r}"
            raise ValueError(f"runs: expected {metrics}")
        if run.split != first.split:
            splits = f"metrics of one split, {first.split}, got {run.split}; report them apart"
            raise ValueError(f"runs: expected {splits}")
    rows: dict[tuple[Any, ...], ResultRow] = {}
    others: dict[str, None] = {}
    for row in (row for run in runs for row in run.rows):
        old = rows.get(key := (row.method, row.name, row.seed, row.num_bytes), row)
        losses = [f"{of.metrics.get('loss', math.nan):.4f}" for of in (old, row)]
        if losses[0] != losses[1]:
            others[f"{row.method} ({' and '.join(losses)})"] = None
        rows[key] = row
    notes = {note: None for run in runs for note in run.notes}
    if others:
        text = f"Runs have models of one name with other losses: {', '.join(others)}."
        warnings.warn(f"{text} Only the last of each is shown.", stacklevel=2)
        notes[f"{text} Only the last of each is shown."] = None
    commands = tuple(dict.fromkeys(command for run in runs for command in run.commands))
    return replace(first, rows=tuple(rows.values()), notes=tuple(notes), commands=commands)


def rows_frame(rows: Iterable[ResultRow], metric: str) -> pd.DataFrame:
    """One line a method and size, least compression first: means over seeds, and their spread."""
    frame = pd.DataFrame(
        {
            "method": row.method,
            "size": row.name or f"{row.compression:.1f}",
            "compression": row.compression,
            "num_bytes": row.num_bytes,
            "metric": row.metrics.get(metric, math.nan),
            "selection": row.selection.get(metric, math.nan),
            "loss": row.metrics.get("loss", math.nan),
            "selection_loss": row.selection.get("loss", math.nan),
            "predicted": math.nan
            if row.predicted_loss_increase is None
            else row.predicted_loss_increase,
            "seconds": row.seconds,
            "seed": row.seed,
        }
        for row in rows
    )
    plain = frame[frame["method"] == UNCOMPRESSED].drop_duplicates("seed").set_index("seed")
    frame["loss_increase"] = frame["loss"] - frame["seed"].map(plain["loss"])
    # Sizes are chosen on the selection split where all have it: test is for what was chosen.
    choice = "selection_loss" if frame["selection_loss"].notna().all() else "loss"
    of_plain = frame["seed"].map(plain[choice])
    frame["excess"] = (frame[choice] - of_plain) / of_plain.abs()
    groups = frame.groupby(["method", "size"], sort=False)
    mean = groups.mean(numeric_only=True).drop(columns="seed")
    mean["spread"], mean["seeds"] = groups["metric"].std(), groups["seed"].nunique()
    mean["judge"] = choice.replace("_", " ")
    return mean.reset_index().sort_values(["compression", "method"], ignore_index=True)


def headline_size(frame: pd.DataFrame) -> pd.Series | None:
    """The row of `rows_frame` that is the largest size within `TOLERANCE`, or comes closest."""
    sizes = frame[frame["method"].isin([SEARCH, COMPRESS])]
    within = sizes[sizes["excess"] <= TOLERANCE]
    if len(within) or not sizes["excess"].notna().any():
        return None if sizes.empty else (within if len(within) else sizes).iloc[-1]
    return sizes.loc[sizes["excess"].idxmin()]


def table_lines(results: Results) -> list[list[str]]:
    """Headings, then a line for each row of `rows_frame`, as text; no column without a value."""
    metric = results.primary_metric
    headings = ["model", "compression", "bytes", f"{results.split} {metric}", f"selection {metric}"]
    lines = [[*headings, "loss increase", "predicted", "seeds", "time"]]
    for row in rows_frame(results.rows, metric).to_dict("records"):
        spread = (
            "" if math.isnan(row["spread"]) else f" {PLUS_MINUS} {format_metric(row['spread'])}"
        )
        name = row["method"]
        cells = [name, f"{format_count(row['compression'])}{TIMES}", f"{row['num_bytes']:,.0f}"]
        cells += [format_metric(row["metric"]) + spread, format_metric(row["selection"])]
        cells += [
            "-" if name == UNCOMPRESSED else format_difference(value, lambda size: f"{size:.5f}")
            for value in (row["loss_increase"], row["predicted"])
        ]
        seconds = format_seconds(row["seconds"]) if row["seconds"] else "-"
        lines.append([*cells, f"{row['seeds']:.0f}", seconds])
    columns = [c for c in zip(*lines, strict=True) if any(cell != "-" for cell in c[1:])]
    return [list(line) for line in zip(*columns, strict=True)]


def terminal_table(results: Results) -> Table:
    """The same for a terminal; neither markup nor control codes have an effect."""
    headings, *lines = table_lines(results)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(headings):
        table.add_column(_printable(title), justify="left" if index == 0 else "right")
    for line in lines:
        table.add_row(*(_printable(cell) for cell in line))
    return table


def _printable(text: str) -> Text:
    """A cell in which nothing steers the terminal."""
    return Text("".join(c if c.isprintable() else "?" for c in text))


def is_higher_better(metric: str) -> bool | None:
    """Direction of a metric by its name, a prefix such as ``test_`` or a suffix ``@10`` aside."""
    words = set(metric.lower().split("@")[0].split("_"))
    return True if words & HIGHER_IS_BETTER else False if words & LOWER_IS_BETTER else None


def format_metric(value: float) -> str:
    """A metric with four decimals, or four digits from 10 on; a dash where there is none."""
    if math.isnan(value):
        return "-"
    return (
        f"{value:.4f}"
        if abs(value) < 10
        else f"{value:.4g}"
        if abs(value) < 1e3
        else f"{value:.0f}"
    )


def format_difference(value: float, text_of: Callable[[float], str] = format_metric) -> str:
    """A difference with its sign; none where it is printed as zero, a dash where there is none."""
    size = "-" if math.isnan(value) else text_of(abs(value))
    return size if size == "-" or float(size) == 0 else f"{'+' if value > 0 else MINUS}{size}"


def format_count(value: float) -> str:
    """A count with three digits and k, M or G."""
    digits = float(f"{value:.3g}")  # first, so that 999,600 is 1M and not 1000k
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(digits) >= factor:
            return f"{format_number(value / factor)}{unit}"
    return format_number(value)


def format_number(value: float) -> str:
    """A number with three digits, or all of them before the point; never with an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{Decimal(f'{value:.3g}'):f}"


def format_megabytes(num_bytes: float) -> str:
    """Bytes in megabytes (10^6 bytes)."""
    return f"{format_number(num_bytes / 1e6)} MB"


def format_seconds(seconds: float) -> str:
    """A duration."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
