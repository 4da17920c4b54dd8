"""How long compress and its gains take, compared with one epoch of plain training (CPU seconds, one thread).

    python -m benchmarks.compress_time RECIPE [--data DIR] [--rows 1,10] [--epochs 60]

The model trains until it stops early; an epoch holds an evaluation on the selection split. Then it is measured once and
compressed to 8, 20 and 64 times, with gains for each. With `--rows 1,10` that is repeated with ten times the
rows, which no sample reads. Each number of rows is a line of JSON: seconds of an epoch, and each part in such epochs.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.gpu.timing import wait_for
from benchmarks.rivals.task import Recipes, Task, shards_of, train
from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.allocation.curvature import device_of
from dnis_torchrec.allocation.gains import LossSample
from dnis_torchrec.data.recipe import Recipe, build_recipe
from dnis_torchrec.selection.shards import collections, table_configs_of
from dnis_torchrec.training.shard import process_group

SIZES = (8, 20, 64)
T = TypeVar("T")


def seconds_of(call: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Times a call in CPU seconds, or by the clock where a GPU works, and returns its result too."""
    clock = process_time if device.type == "cpu" else perf_counter
    wait_for(device)
    start, result = clock(), call()
    wait_for(device)
    return clock() - start, result


def add_rows_(model: nn.Module, factor: int) -> None:
    """Gives every table `factor` times its rows. The new rows are zeros."""
    for collection in collections(model).values():
        bags = collection.embedding_bags if hasattr(collection, "embedding_bags") else collection.embeddings
        for config in table_configs_of(collection):
            table = bags[config.name]
            more = table.weight.new_zeros((factor - 1) * config.num_embeddings, config.embedding_dim)
            table.weight = nn.Parameter(torch.cat([table.weight.detach(), more]))
            config.num_embeddings = table.num_embeddings = len(table.weight)


def measure(
    spec: str, data: Path | None, factors: Sequence[int], epochs: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Trains the model and yields one result for each size of the tables."""
    build = Recipes(lambda dim: build_recipe(spec, data, seed=0, embedding_dim=dim))
    task = Task(build=build, max_epochs=epochs, device=device)
    recipe = task.build(None)
    training, (model, trained) = seconds_of(lambda: train(task, recipe), device)
    epoch = training / len(trained.history)
    for factor in factors:
        larger = copy.deepcopy(model)
        add_rows_(larger, factor)
        yield {"recipe": spec, "epoch_seconds": epoch} | compress_seconds(larger.to(device), recipe, epoch)


def compress_seconds(model: nn.Module, recipe: Recipe, epoch: float) -> dict[str, Any]:
    """The seconds of gains and of compress for all sizes, in epochs."""
    fits, fit, device = [], LossSample.fit, device_of(model)

    def timed_fit(sample: LossSample, *given: Any, **named: Any) -> Any:
        seconds, gains = seconds_of(lambda: fit(sample, *given, **named), device)
        fits.append(seconds)
        return gains

    def compress() -> list[float]:
        held_out = recipe.data.validation
        measured = measure_(model.eval(), recipe.data.train, loss=recipe.task, held_out=held_out)
        return [measured.allocate(compression=size).compression for size in SIZES]

    with patch.object(LossSample, "fit", timed_fit):
        whole, compressions = seconds_of(compress, device)
    return {
        "rows": sum(len(shard.weight) for shard in shards_of(model)),
        "compressions": [round(each, 1) for each in compressions],
        "gains_in_epochs": [round(each / epoch, 2) for each in fits],
        "compress_in_epochs": round(whole / epoch, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one line of JSON for each factor in `--rows`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rows", default="1,10", help="factors of the number of rows, with commas between them")
    parser.add_argument("--epochs", type=int, default=60, help="most epochs of the training")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with process_group() as device:
        factors = list(map(int, options.rows.split(",")))
        for line in measure(options.recipe, options.data, factors, options.epochs, device):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
