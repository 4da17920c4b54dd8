"""Quality against search time: shorter searches beside one plain training to its own early stop.

    python -m benchmarks.search_time RECIPE --data DIR --size 4 --seeds 0 --json FILE --figure FILE.png

Every setting is ``ramp:release:upper_every``: epochs of the ramp, epochs at most of the release, lower steps per upper
step. A fourth part is the tables' learning rate before the release; else it is the recipe's. ``recipe`` is the search
as the recipe has it. Plain training and all searches of a seed run one after the other in this process, so that their
ratios compare. Each row is the mean over seeds: ``{"setting", "time_ratio", "seconds", "selection_loss", <test
metrics>, "spread"}``; the spread is the sample standard deviation of each, empty for one seed. The figure is the curve
of the metric that the recipe is judged by. ``--size`` counts parameters; `dnis compare` counts bytes, those of the
indices too, so that its searches keep some columns fewer and their figures differ in the fourth digit.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.files import output_file
from dnis_torchrec import Size
from dnis_torchrec._dependencies import versions
from dnis_torchrec.comparison.methods import METHODS, MethodTask
from dnis_torchrec.data.recipe import TrainTask, build_recipe
from dnis_torchrec.report.content import json_text
from dnis_torchrec.report.figures import save_png
from dnis_torchrec.report.figures.style import FIGURE_WIDTH, METHOD_STYLES, metric_axis, styled
from dnis_torchrec.report.tables import PLUS_MINUS
from dnis_torchrec.search.config import SearchConfig
from dnis_torchrec.search.search import search
from dnis_torchrec.storage.whole_files import write_text
from dnis_torchrec.training.evaluation import evaluate, primary_metric
from dnis_torchrec.training.process_group import process_group

SETTINGS = "12:20:1,12:20:2,8:10:1,8:10:2,5:6:1,5:6:2,3:4:1"
RECIPE = "recipe"
"""The setting that changes nothing."""
WANTED_RATIO = 3.0
"""Plain trainings that a search may take."""


def parse_settings(text: str) -> list[str]:
    """Settings with commas between them, each checked before the first training begins.

    Raises:
        argparse.ArgumentTypeError: if one is neither `RECIPE` nor three whole numbers above 0, and at most one more
            number above 0, with colons between them; or if one stands there twice.
    """
    settings = _each_once(text)
    for setting in settings:
        if setting != RECIPE and not re.fullmatch(r"([1-9]\d*:){2}[1-9]\d*(:0?\.\d*[1-9]\d*)?", setting):
            expected = f"expected {RECIPE} or ramp:release:upper_every[:table rate], as in 8:10:2 or 8:10:2:.01"
            raise argparse.ArgumentTypeError(f"{expected}, got {setting!r}")
    return settings


def parse_seeds(text: str) -> list[int]:
    """Seeds with commas between them.

    Raises:
        argparse.ArgumentTypeError: if one is no whole number from 0 on, or stands there twice.
    """
    for seed in _each_once(text):
        if not seed.isdecimal():
            raise argparse.ArgumentTypeError(f"expected whole numbers from 0 on with commas between them, got {seed!r}")
    return [int(seed) for seed in text.split(",")]


def parse_size(text: str) -> float:
    """A compression.

    Raises:
        argparse.ArgumentTypeError: if it is no number above 1.
    """
    try:
        return Size(compression=float(text)).given[1]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a number above 1, got {text!r}") from error


def _each_once(text: str) -> list[str]:
    parts = text.split(",")
    if len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"expected each once, got {text!r}")
    return parts


def settings_of(setting: str) -> dict[str, int | float]:
    """Returns the fields that a setting changes in the configuration of the recipe's search."""
    if setting == RECIPE:
        return {}
    names = ("ramp_epochs", "release_epochs", "upper_every", "search_table_learning_rate")
    parts = setting.split(":")
    return {name: float(part) if "." in part else int(part) for name, part in zip(names, parts, strict=False)}


def measure_plain(arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """One uncompressed training."""
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        task = MethodTask(
            build=lambda dim: build_recipe(arguments.recipe, arguments.data, seed=seed, embedding_dim=dim),
            compression=1,
            seed=seed,
            device=device,
            folder=Path(folder),
        )
        result = METHODS["dense"](task)
        recipe = task.build(None)
        metrics = evaluate(TrainTask(result.model, recipe.loss), recipe.data.test, recipe.loss, device)
    return {"seconds": result.seconds, "selection_loss": result.selection_loss, **metrics}


def measure_search(arguments: argparse.Namespace, setting: str, seed: int) -> dict[str, float]:
    """One search with the epochs of a setting."""
    recipe = build_recipe(arguments.recipe, arguments.data, seed=seed)
    config = SearchConfig.of(recipe, Size(compression=arguments.size), settings_of(setting))
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        started = time.monotonic()
        outcome = search(recipe, config, Path(folder), device)
        seconds = time.monotonic() - started
        found = TrainTask(outcome.model, recipe.loss)
        selection = evaluate(found, recipe.data.selection, recipe.loss, device)["loss"]
        metrics = evaluate(found, recipe.data.test, recipe.loss, device)
    return {"seconds": seconds, "selection_loss": selection, **metrics}


def mean_over_seeds(setting: str, of_seeds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Returns a row of the table: means over the seeds, and how far seeds differ."""
    names = [name for name in of_seeds[0] if all(name in measured for measured in of_seeds)]
    columns = {name: [measured[name] for measured in of_seeds] for name in names}
    spread = {name: statistics.stdev(values) for name, values in columns.items() if len(values) > 1}
    return {"setting": setting, **{name: statistics.mean(values) for name, values in columns.items()}, "spread": spread}


def line_of(row: Mapping[str, Any]) -> str:
    """The row in the terminal."""
    spread = row["spread"]
    numbers = {name: f"{value:.4g}" for name, value in row.items() if isinstance(value, float)}
    deviations = {name: f" {PLUS_MINUS} {value:.2g}" for name, value in spread.items()}
    return " | ".join([row["setting"], *(text + deviations.get(name, "") for name, text in numbers.items())])


@styled
def quality_against_time(
    rows: Sequence[Mapping[str, Any]], metric: str, size: float, *, higher_is_better: bool
) -> Figure:
    """The curve: a metric over the time of a search, in plain trainings.

    Args:
        rows: the plain training first, then searches, as `main` measures them.
        metric: its name.
        size: compression of the searches.
        higher_is_better: its direction; the line joins the searches that no quicker one beats.
    """
    figure = Figure(figsize=(FIGURE_WIDTH, 3.8), layout="constrained")
    axis = figure.subplots()
    axis.axvline(WANTED_RATIO, color="#999999", linewidth=1, linestyle=":")
    colour, marker = METHOD_STYLES["dense"]
    axis.axhline(float(rows[0][metric]), color=colour, linewidth=1, linestyle="--")
    axis.plot([1], [float(rows[0][metric])], color=colour, marker=marker, linestyle="none", label="plain, uncompressed")
    searches = sorted((float(row["time_ratio"]), float(row[metric]), str(row["setting"])) for row in rows[1:])
    sign, best, front = 1 if higher_is_better else -1, float("-inf"), []
    for time_ratio, value, setting in searches:
        axis.annotate(setting, (time_ratio, value), xytext=(5, -11), textcoords="offset points", fontsize=8)
        if sign * value > best:
            best = sign * value
            front.append((time_ratio, value))
    colour, marker = METHOD_STYLES["dnis"]
    times, values = [place[0] for place in searches], [place[1] for place in searches]
    axis.plot(times, values, color=colour, marker=marker, linestyle="none", label=f"searched, compression {size:g}")
    axis.plot(*zip(*front, strict=True), color=colour, linewidth=1.8)
    axis.set_xlim(0, max(WANTED_RATIO, *times) * 1.1)
    metric_axis(axis, metric, higher_is_better)
    axis.set_xlabel(
        "time in plain trainings to their own early stop; ramp:release:upper_every[:table rate] at each point"
    )
    axis.legend(loc="best", fontsize=8.5)
    return figure


def main() -> None:
    """Measures, prints a table, writes the JSON and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="module:function")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--size", type=parse_size, default=4.0, help="compression in parameters")
    parser.add_argument("--seeds", type=parse_seeds, default="0", help="which, commas between them")
    parser.add_argument("--settings", type=parse_settings, default=SETTINGS, help="see above, commas between them")
    parser.add_argument("--json", type=output_file, dest="json_file")
    parser.add_argument("--figure", type=output_file, help="where to draw the curve, a PNG")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in arguments.seeds:
        plain = measure_plain(arguments, seed)
        runs.setdefault("plain", []).append({"time_ratio": 1.0, **plain})
        for setting in arguments.settings:
            measured = measure_search(arguments, setting, seed)
            runs.setdefault(setting, []).append({"time_ratio": measured["seconds"] / plain["seconds"], **measured})
    rows = [mean_over_seeds(setting, of_seeds) for setting, of_seeds in runs.items()]
    print(" | ".join(name for name in rows[0] if name != "spread"))
    for row in rows:
        print(line_of(row))
    if arguments.json_file:
        head = {"recipe": arguments.recipe, "size": arguments.size, "seeds": arguments.seeds, "versions": versions()}
        write_text(arguments.json_file, json_text({**head, "rows": rows}, str(arguments.json_file)) + "\n")
    if arguments.figure:
        recipe = build_recipe(arguments.recipe, arguments.data, seed=arguments.seeds[0])
        metric, higher_is_better = primary_metric(recipe.loss, recipe.data.test)
        save_png(
            quality_against_time(rows, metric, arguments.size, higher_is_better=higher_is_better), arguments.figure
        )


if __name__ == "__main__":
    main()
