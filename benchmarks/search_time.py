"""Quality against search time: shorter searches beside one plain training to its own early stop.

    python -m benchmarks.search_time RECIPE --data DIR --size 4 --seeds 0 --json FILE

Every setting is ``ramp:release:upper_every``: epochs of the ramp, epochs at most of the release, lower steps per upper
step. A fourth part is the tables' learning rate before the release; else it is the recipe's. Plain training and all
searches of a seed run one after the other in this process, so that their ratios compare. Each row is the mean over
seeds: ``{"setting", "selection_loss", "time_ratio", "seconds", <test metrics>}``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path

import torch

from dnis_torchrec import Size
from dnis_torchrec.baselines import METHODS, MethodTask
from dnis_torchrec.jobs import build_recipe, versions
from dnis_torchrec.recipe import TrainTask
from dnis_torchrec.search import SearchConfig, search
from dnis_torchrec.training import evaluate, process_group

SETTINGS = "12:20:1,12:20:2,8:10:1,8:10:2,5:6:1,5:6:2,3:4:1"


def parse_settings(text: str) -> list[str]:
    """Settings with commas between them, each checked before the first training begins.

    Raises:
        argparse.ArgumentTypeError: if one is not three whole numbers above 0, and at most one more number above 0,
            with colons between them.
    """
    settings = text.split(",")
    for setting in settings:
        if not re.fullmatch(r"([1-9]\d*:){2}[1-9]\d*(:0?\.\d*[1-9]\d*)?", setting):
            expected = "expected ramp:release:upper_every[:table rate], as in 8:10:2 or 8:10:2:.01"
            raise argparse.ArgumentTypeError(f"{expected}, got {setting!r}")
    return settings


def settings_of(setting: str) -> dict[str, int | float]:
    """A setting as a search's configuration has it."""
    names = ("ramp_epochs", "release_epochs", "upper_every", "search_table_learning_rate")
    parts = setting.split(":")
    return {name: float(part) if "." in part else int(part) for name, part in zip(names, parts, strict=False)}


def measure_plain(arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """One uncompressed training."""
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        task = MethodTask(
            build=lambda dim: build_recipe(arguments.recipe, arguments.data, seed=seed, embedding_dim=dim),
            compression_ratio=1,
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
    config = SearchConfig.of(recipe, Size(compression_ratio=arguments.size), settings_of(setting))
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        started = time.monotonic()
        outcome = search(recipe, config, Path(folder), device)
        seconds = time.monotonic() - started
        found = TrainTask(outcome.model, recipe.loss)
        selection = evaluate(found, recipe.data.selection, recipe.loss, device)["loss"]
        metrics = evaluate(found, recipe.data.test, recipe.loss, device)
    return {"seconds": seconds, "selection_loss": selection, **metrics}


def main() -> None:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="module:function")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--size", type=float, default=4.0, help="compression ratio in parameters")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    parser.add_argument("--settings", type=parse_settings, default=SETTINGS, help="see above, commas between them")
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in arguments.seeds:
        plain = measure_plain(arguments, seed)
        runs.setdefault("plain", []).append({"time_ratio": 1.0, **plain})
        for setting in arguments.settings:
            measured = measure_search(arguments, setting, seed)
            runs.setdefault(setting, []).append({"time_ratio": measured["seconds"] / plain["seconds"], **measured})
    rows = [
        {"setting": setting, **{name: statistics.mean(run[name] for run in of_seed) for name in of_seed[0]}}
        for setting, of_seed in runs.items()
    ]
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()))
    if arguments.json_file:
        head = {"recipe": arguments.recipe, "size": arguments.size, "seeds": arguments.seeds, "versions": versions()}
        partial = arguments.json_file.with_name(f"{arguments.json_file.name}.partial")
        partial.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, arguments.json_file)


if __name__ == "__main__":
    main()
