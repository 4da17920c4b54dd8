"""The summary of `benchmarks.rate_distortion`: a table per recipe, and what was to be shown beside what was found.

Everything is a difference within a seed, to the same trained model uncompressed, averaged over the seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from benchmarks.rate_methods import COMPRESS, RIVALS, ROW_WISE, SEARCH, UNCOMPRESSED
from dnis_torchrec.report.tables import format_difference, format_metric, is_higher_better
from dnis_torchrec.search.search import SEARCHED

COSTS: Mapping[str, tuple[str, Mapping[float, float]]] = {
    "examples.movielens:mf": ("mse", {8: 0.0005, 20: 0.0015, 40: 0.0055, 64: 0.012}),
    "examples.movielens:ctr_fm": ("auc", {8: 0.0002, 20: 0.0010}),
    "examples.movielens:ctr_dlrm": ("auc", {20: 0.0003, 40: 0.0006, 64: 0.0015}),
    "examples.criteo:dlrm": ("logloss", {20: 0.0003}),
    "examples.criteo:deepfm": ("logloss", {20: 0.0003}),
}
"""Recipe -> metric, and size -> by how much it may be worse at most."""
MEASURED_BETWEEN = (0.0005, 0.01)
"""Increases of the loss that are predicted within `FACTOR`."""
FACTOR = 2.0
Key = tuple[str, str, float | str | None]
"""Method, precision and size of a row."""
LEVEL = 1e-5
"""Differences below it are none."""
EPOCHS, NUM_SIZES = 2.0, 3
"""Plain epochs that so many sizes may take."""
TABLES = 1.2
"""Memory beyond the model, over the largest table."""


class Row(TypedDict):
    """A row of the JSON.

    `metrics` are those of the test split, `selection` those of the selection split; ``"loss"`` is among both.
    `shared_seconds` are those that all sizes of a compress share, `epoch_seconds` those of an epoch of the plain
    training with its evaluation.
    """

    recipe: str
    seed: int
    embedding_l2: float
    method: str
    precision: str
    size: float | str | None
    compression: float
    bytes: int
    metrics: dict[str, float]
    selection: dict[str, float]
    predicted_loss_increase: float | None
    seconds: float
    shared_seconds: NotRequired[float]
    epoch_seconds: NotRequired[float]
    epochs: NotRequired[int]
    relative_error: NotRequired[float]
    columns_by_bits: NotRequired[list[int]]
    columns: NotRequired[int]
    origin: NotRequired[str]
    embedding_dim: NotRequired[int]


class MemoryRow(TypedDict):
    """The figures of `--memory`."""

    rows: int
    dim: int
    table_bytes: int
    peak_bytes: int
    ratio: float
    seconds: float


class Differences:
    """Rows of one recipe beside the uncompressed model of their seed.

    Args:
        rows: of the recipe, all seeds.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self.plain = {row["seed"]: row for row in rows if row["method"] == UNCOMPRESSED}
        self.of: dict[Key, list[Row]] = {}
        for row in rows:
            if row["seed"] in self.plain:
                self.of.setdefault((row["method"], row["precision"], row["size"]), []).append(row)

    def of_seeds(self, seeds: Collection[int]) -> Differences:
        """The same of some seeds alone."""
        return Differences(row for rows in self.of.values() for row in rows if row["seed"] in seeds)

    def metrics(self) -> list[str]:
        """The metric that a model is judged by, then its loss by the name that it has there."""
        names = list(next(iter(self.plain.values()))["metrics"])
        return [name for name in ("auc", "ndcg@10", "mse", "logloss") if name in names] or ["loss"]

    def mean(self, rows: Sequence[Row], metric: str) -> float:
        """Mean over seeds of the difference of a test metric."""
        return statistics.fmean(row["metrics"][metric] - self.plain[row["seed"]]["metrics"][metric] for row in rows)

    def worse(self, rows: Sequence[Row], metric: str) -> float:
        """The same with the sign of a loss: above 0 is worse than uncompressed."""
        return self.mean(rows, metric) * (-1 if is_higher_better(metric) else 1)

    def sizes(self) -> list[float]:
        """Compressions that were asked for."""
        return sorted({size for _, _, size in self.of if isinstance(size, int | float)})

    def compressed(self, size: float | str) -> list[Row]:
        """Rows of `compress` at a size."""
        return self.of.get((COMPRESS, "mixed", size), [])

    def searched(self, size: float | str) -> list[Row]:
        """Rows of `search` at a size."""
        return self.of.get((SEARCH, "mixed", size), [])

    def chosen(self) -> set[Key]:
        """Keys of the precision that each rival would choose at each size: the lowest selection loss."""
        best: dict[tuple[str, float | str | None], tuple[float, str]] = {}
        for (method, precision, size), rows in self.of.items():
            if method in RIVALS and method != ROW_WISE:
                loss = _selection_loss(rows)
                best[method, size] = min(best.get((method, size), (loss, precision)), (loss, precision))
        return {(method, precision, size) for (method, size), (_, precision) in best.items()}


def print_summary(rows: Sequence[Row], memory: MemoryRow | None) -> None:
    """Prints a table per recipe, then what was to be shown and what was found."""
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    of_recipes = {name: Differences(row for row in rows if row["recipe"] == name) for name in recipes}
    of_recipes = {name: own for name, own in of_recipes.items() if own.plain}
    for name, own in of_recipes.items():
        print("\n".join(["", *table_lines(name, own)]))
    print("\nMust show, means of differences within each seed, test split:")
    for name, own in of_recipes.items():
        print("\n".join([*cost_lines(name, own), *rival_lines(name, own), *prediction_lines(name, own)]))
        print("\n".join(time_lines(name, own)))
    print("\n".join(search_lines(of_recipes)))
    if memory is not None:
        print(memory_line(memory))


def table_lines(recipe: str, own: Differences) -> list[str]:
    """The table of a recipe; ``*`` marks the precision that a rival would choose on the selection split."""
    metrics, chosen = own.metrics(), own.chosen()
    seeds = ", ".join(map(str, own.plain))
    l2 = next(iter(own.plain.values()))["embedding_l2"]
    heads = [part for name in metrics for part in (name, "to plain")]
    lines = [
        f"{recipe}, seeds {seeds}, L2 {l2:g}",
        " | ".join(["method", "precision", "asked for", "compression", *heads, "predicted loss", "seconds", "seeds"]),
    ]
    for key, rows in own.of.items():
        method, precision, size = key
        cells = [method, precision + ("*" if key in chosen else ""), "-" if size is None else _size(size)]
        cells.append(f"{statistics.fmean(row['compression'] for row in rows):.2f}")
        for name in metrics:
            cells.append(format_metric(statistics.fmean(row["metrics"][name] for row in rows)))
            cells.append("-" if method == UNCOMPRESSED else format_difference(own.mean(rows, name)))
        predicted = [row["predicted_loss_increase"] for row in rows if row["predicted_loss_increase"] is not None]
        cells.append(format_difference(statistics.fmean(predicted)) if predicted else "-")
        cells += [f"{statistics.fmean(row['seconds'] for row in rows):.1f}", str(len(rows))]
        lines.append(" | ".join(cells))
    return lines


def cost_lines(recipe: str, own: Differences) -> list[str]:
    """The costs of compressing, beside what it may cost."""
    metric, costs = COSTS.get(recipe, ("", {}))
    lines = []
    for size, most in costs.items():
        rows = own.compressed(size)
        if rows:
            found = own.worse(rows, metric)
            lines.append(
                f"{recipe} at {size:g}: {metric} worse by {found:+.5f}, wanted {most:g}: {_judged(found, most)}"
            )
    return lines


def rival_lines(recipe: str, own: Differences) -> list[str]:
    """By how much the best rival of a size is behind, in the metric that the recipe is judged by."""
    metric, lines = own.metrics()[0], []
    sizes = [*(size for _, _, size in own.of if isinstance(size, str)), *own.sizes()]
    for size in dict.fromkeys(sizes):
        mine = {row["seed"]: row for row in own.compressed(size)}
        ahead: dict[Key, float] = {}
        for key, rows in own.of.items():
            beside = [mine[row["seed"]] for row in rows if row["seed"] in mine]
            if key[0] in RIVALS and key[2] == size and beside:
                theirs = [row for row in rows if row["seed"] in mine]
                ahead[key] = own.worse(theirs, metric) - own.worse(beside, metric)
        if not ahead:
            continue
        best = min(ahead, key=lambda key: ahead[key])
        verdict = "level" if abs(ahead[best]) < LEVEL else "met" if ahead[best] > 0 else "MISSED"
        lines.append(
            f"{recipe} at {_size(size)}: {metric} ahead of the best of {len(ahead)} rivals "
            f"({best[0]}, {best[1]}) by {ahead[best]:+.5f}: {verdict}"
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Who is how far behind the uncompressed model at one size of a recipe, in the metric that it is judged by.

    Attributes:
        metric: that metric.
        gained: whether the search returned more than the compressed model, for every seed.
        search: what a search costs; below 0 where it is ahead of uncompressed.
        compress: what compress costs.
        rival: what the best rival costs, as the selection split chooses it; None if there is none.
        rival_name: its method and precision.
    """

    metric: str
    gained: bool
    search: float
    compress: float
    rival: float | None
    rival_name: str

    @property
    def lead(self) -> float:
        """Of the search over the better of the two others."""
        return min(self.compress, math.inf if self.rival is None else self.rival) - self.search

    def __str__(self) -> str:
        rival = "" if self.rival is None else f"; {self.rival_name} worse by {self.rival:+.5f}"
        returned = "" if self.gained else " (compress returned)"
        costs = f"search worse by {self.search:+.5f}{returned}; compress worse by {self.compress:+.5f}{rival}"
        return f"{self.metric}: {costs}"


def standing(own: Differences, size: float) -> Standing | None:
    """Search, compress and the best rival of a size; None where nothing was searched.

    Args:
        own: rows of a recipe.
        size: compression asked for.
    """
    searched, metric = own.searched(size), own.metrics()[0]
    own = own.of_seeds({row["seed"] for row in searched})
    compressed = own.compressed(size)
    if not searched or not compressed:
        return None
    rivals = {key: own.of[key] for key in own.chosen() if key[2] == size}
    best = min(rivals, key=lambda key: _selection_loss(rivals[key]), default=None)
    return Standing(
        metric=metric,
        gained=all(row.get("origin") == SEARCHED for row in searched),
        search=own.worse(searched, metric),
        compress=own.worse(compressed, metric),
        rival=own.worse(rivals[best], metric) if best else None,
        rival_name=f"{best[0]}, {best[1]}" if best else "",
    )


def search_lines(of_recipes: Mapping[str, Differences]) -> list[str]:
    """Search, compress and the best rival of each size; then how often who leads, and the search's worst case."""
    found = {f"{recipe} at {size:g}": standing(own, size) for recipe, own in of_recipes.items() for size in own.sizes()}
    standings = {name: one for name, one in found.items() if one is not None}
    if not standings:
        return []
    searched = sum(one.search < one.compress for one in standings.values() if one.gained)
    gained = sum(one.gained for one in standings.values())
    beside = [(one.search, one.compress, one.rival) for one in standings.values() if one.rival is not None]
    worst = min(standings, key=lambda name: standings[name].lead)
    return [
        "",
        *(f"{name}, {one}" for name, one in standings.items()),
        f"search returned more than compress: {gained} of {len(standings)}, ahead on test: {searched}; "
        f"ahead of the best rival: search in {sum(search < rival for search, _, rival in beside)}, compress in "
        f"{sum(compress < rival for _, compress, rival in beside)} of {len(beside)}; the search's worst case: {worst}, "
        f"{standings[worst].lead:+.5f} ahead of the better of the two",
    ]


def prediction_lines(recipe: str, own: Differences) -> list[str]:
    """Predicted over measured increase of the loss on the test split, where that is large enough to be one."""
    lines = []
    for (method, _, size), rows in own.of.items():
        measured = own.mean(rows, "loss")
        predicted = [row["predicted_loss_increase"] or 0.0 for row in rows]
        if method == COMPRESS and MEASURED_BETWEEN[0] <= measured <= MEASURED_BETWEEN[1]:
            ratio = statistics.fmean(predicted) / measured
            verdict = "met" if 1 / FACTOR <= ratio <= FACTOR else "MISSED"
            lines.append(
                f"{recipe} at {_size(size)}: loss {measured:+.5f}, predicted over measured {ratio:.2f}, "
                f"wanted {1 / FACTOR:g} to {FACTOR:g}: {verdict}"
            )
    return lines


def time_lines(recipe: str, own: Differences) -> list[str]:
    """The time of compressing, in epochs of the plain training; without counting rows, which a trained run has done."""
    ratios = []
    for seed, plain in own.plain.items():
        rows = [row for size in own.sizes()[:NUM_SIZES] for row in own.compressed(size) if row["seed"] == seed]
        if len(rows) == NUM_SIZES:
            shared = rows[0].get("shared_seconds", 0.0)
            of_sizes = sum(row["seconds"] - row.get("shared_seconds", 0.0) for row in rows)
            ratios.append((shared + of_sizes) / plain.get("epoch_seconds", float("nan")))
    if not ratios:
        return []
    found = statistics.fmean(ratios)
    return [f"{recipe}: {NUM_SIZES} sizes take {found:.2f} plain epochs, wanted {EPOCHS:g}: {_judged(found, EPOCHS)}"]


def memory_line(memory: MemoryRow) -> str:
    """The memory of compressing beyond the model."""
    found = memory["ratio"]
    return (
        f"memory beyond the model, a table of {memory['rows']:,} x {memory['dim']}: {found:.2f} of it, "
        f"wanted {TABLES:g}: {_judged(found, TABLES)}"
    )


def _selection_loss(rows: Sequence[Row]) -> float:
    return statistics.fmean(row["selection"]["loss"] for row in rows)


def _size(size: float | str | None) -> str:
    return f"{size:g}" if isinstance(size, int | float) else str(size)


def _judged(found: float, most: float) -> str:
    return "met" if found <= most else f"MISSED by {found - most:.5g}"
