"""Search in one pass beside what else one would do: train plainly on the same stream, then compress.

    python -m benchmarks.one_pass amazon|lastfm --data FOLDER [--size 20] [--seed 0]

Both read nine tenths of the samples in the order of time, once; printed is the log loss on the last tenth, of which
nothing has learnt, of the plain model and of both as they are served.
"""

from __future__ import annotations

import argparse
import json
from copy import copy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dnis_torchrec.cli import commands, settings
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.training.shard import process_group
from examples import streams

SHARE = 0.9


def part(name: str, data: Path | None, options: dict[str, Any], *, is_test: bool) -> Recipe:
    """The recipe of a stream on its first nine tenths, or on the last one."""
    recipe = getattr(streams, name)(data, **options)
    batches = copy(recipe.data)
    number = int(SHARE * len(batches.rows))
    batches.rows = batches.rows[number:] if is_test else batches.rows[:number]
    return replace(recipe, data=batches)


def amazon(data: Path | None, **options: Any) -> Recipe:
    """Nine tenths of Amazon's Sports and Outdoors."""
    return part("amazon", data, options, is_test=False)


def amazon_test(data: Path | None, **options: Any) -> Recipe:
    """The last tenth."""
    return part("amazon", data, options, is_test=True)


def lastfm(data: Path | None, **options: Any) -> Recipe:
    """Nine tenths of Last.fm's tags."""
    return part("lastfm", data, options, is_test=False)


def lastfm_test(data: Path | None, **options: Any) -> Recipe:
    """The last tenth."""
    return part("lastfm", data, options, is_test=True)


def main() -> None:
    """Prints the losses as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", choices=("amazon", "lastfm"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    name = f"benchmarks.one_pass:{options.stream}"
    with TemporaryDirectory() as folder, process_group():
        plain, small, run, artifact = (Path(folder) / part for part in ("plain", "small", "run", "artifact"))
        batches = part(options.stream, options.data, {}, is_test=False).data
        steps = sum(1 for _ in batches)
        of_all: Any = {"recipe": name, "data": options.data}
        of_pass = {**of_all, "steps": steps, "seed": options.seed}
        commands.run_train(settings.TrainCommand(out=plain, **of_pass))
        size = f"{options.size:g}"
        commands.run_compress(settings.CompressCommand(source=plain, out=small, compression=size, **of_all))
        commands.run_search(settings.SearchCommand(out=run, compression=options.size, **of_pass))
        commands.run_export(settings.ExportCommand(run=run, out=artifact))
        test: Any = {"recipe": f"{name}_test", "data": options.data}
        paths = {"plain": plain, "train, compress": small / f"x{size}", "search": artifact}
        for method, path in paths.items():
            loss = commands.run_evaluate(settings.EvaluateCommand(path=path, **test))["metrics"]["loss"]
            print(json.dumps({"method": method, "steps": steps, "loss": round(loss, 5)}), flush=True)


if __name__ == "__main__":
    main()
