"""Search in one pass beside what else one would do: train plainly on the same stream, then compress.

    python -m benchmarks.one_pass amazon|lastfm --data FOLDER [--size 20]
    python -m benchmarks.one_pass endless --steps 200000

All read nine tenths of the samples in the order of time, once; printed is the log loss on the last tenth, of which
nothing has learnt, of the plain model and of both as they are served. Take train and compress: it is ahead on both
streams, by .0047 and .0039 at 20 times, for columns that died early are missed by what comes later.

The second command trains a small model on a stream without end, and prints the memory of the process as it goes.
"""

import argparse
import json
import resource
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from torchrec.datasets.utils import Batch

from dnis_torchrec.cli import commands, settings
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.training.shard import process_group
from examples import amazon_sports, lastfm_tags, streams, synthetic

MODULES = {"amazon": amazon_sports, "lastfm": lastfm_tags}
BATCH_SIZE, SHARE = 1024, 0.9
PAGE_SIZE = resource.getpagesize()


def part(name: str, data: Path | None, *, is_test: bool = False, **options: Any) -> Recipe:
    """The recipe of a stream on its first nine tenths, or on the last one."""
    with patch.object(MODULES[name], "BATCH_SIZE", BATCH_SIZE):
        recipe = getattr(streams, name)(data, **options)
    batches, number = copy(recipe.data), int(SHARE * len(recipe.data.rows))
    batches.rows = batches.rows[number:] if is_test else batches.rows[:number]
    return replace(recipe, data=batches)


amazon, lastfm = partial(part, "amazon"), partial(part, "lastfm")
amazon_test, lastfm_test = partial(amazon, is_test=True), partial(lastfm, is_test=True)


def endless(data: Path | None, **options: Any) -> Recipe:
    """The synthetic recipe on batches that never end. Every 20,000 steps it prints the memory of the process."""
    recipe = synthetic.demo(data, **options)

    def batches() -> Iterator[Batch]:
        for step, batch in enumerate(chain.from_iterable(repeat(recipe.data.train))):
            if step % 20_000 == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                print(json.dumps({"step": step, "mib": round(pages * PAGE_SIZE / 2**20)}), flush=True)
            yield batch

    return replace(recipe, data=batches())


def main() -> None:
    """Prints lines of JSON: the losses, or the memory of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", choices=[*MODULES, "endless"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=20)
    options = parser.parse_args()
    name, size = f"benchmarks.one_pass:{options.stream}", options.size
    if options.stream == "endless":
        with TemporaryDirectory() as folder:
            command = settings.TrainCommand(recipe=name, out=Path(folder) / "run", steps=options.steps)
            commands.run_train(command)
        return
    steps = sum(1 for _ in part(options.stream, options.data).data)
    of_all: Any = {"recipe": name, "data": options.data}
    with TemporaryDirectory() as folder, process_group():
        plain, small, run, artifact = (Path(folder) / part for part in ("plain", "small", "run", "artifact"))
        commands.run_train(settings.TrainCommand(out=plain, steps=steps, **of_all))
        commands.run_compress(settings.CompressCommand(source=plain, out=small, compression=str(size), **of_all))
        commands.run_search(settings.SearchCommand(out=run, steps=steps, compression=size, **of_all))
        commands.run_export(settings.ExportCommand(run=run, out=artifact))
        for method, path in {"plain": plain, "train, compress": small / f"x{size}", "search": artifact}.items():
            judged = settings.EvaluateCommand(path=path, recipe=f"{name}_test", data=options.data)
            loss = commands.run_evaluate(judged)["metrics"]["loss"]
            print(json.dumps({"method": method, "steps": steps, "loss": round(loss, 5)}), flush=True)


if __name__ == "__main__":
    main()
