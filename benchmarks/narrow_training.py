"""Training in the scheme of an artifact beside plain training: bytes, CPU time of a step, metric.

    python -m benchmarks.narrow_training --data FOLDER [--recipes mf ...] [--compression 20] [--epochs N]

A plain model trains N epochs on the first half of a recipe's training data and is compressed. It then trains on plainly
through the second half, and its narrow twin takes the same steps in turns with it, from the same weights and states.
Bytes are those of tables and of the states of their optimizer. A time is the median CPU time of a step. Both models are
compressed at the end and evaluated on the test split. Prints a line of JSON for each recipe.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torchrec.datasets.utils import Batch

from dnis_torchrec import Recipe, TrainTask, compress, export
from dnis_torchrec.artifact.narrow import narrow_for_training_, widened_
from dnis_torchrec.data.recipe import build_recipe
from dnis_torchrec.selection.swap import unshard_
from dnis_torchrec.training.checkpoint import StoredTensor, model_tensors, optimizer_tensors, snapshot, take_, warm_up_
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.shard import process_group, shard
from dnis_torchrec.training.weights import fill_state_

RECIPES = {
    "mf": ("examples.movielens:mf", "ml-1m"),
    "clicks-dlrm": ("examples.movielens:ctr_dlrm", "ml-1m"),
    "criteo-dlrm": ("examples.criteo:dlrm", "criteo-kaggle-137k"),
}


def num_bytes(model: Any, optimizer: Any) -> int:
    """Bytes of tables and of the states of their optimizers."""
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    parts = [
        value for key, value in tensors.items() if key.startswith(("table/", "fused/")) or ".embedding_bags." in key
    ]
    return sum(chunk.tensor.nbytes for value in parts for chunk in value.chunks)


def step(model: Any, optimizer: Any, batch: Batch) -> float:
    """Takes a step; its seconds of CPU."""
    begin = time.process_time()
    optimizer.zero_grad()
    model(batch)[0].backward()
    optimizer.step()
    return time.process_time() - begin


def metrics(model: Any, recipe: Recipe, compression: float, device: torch.device) -> dict[str, float]:
    """Metrics on the test split of a model that is compressed anew."""
    plain = widened_(unshard_(model)).model
    held_out = recipe.data.validation
    compress(plain, [*recipe.data.train], loss=recipe.task, compression=compression, held_out=held_out)
    return evaluate(TrainTask(plain, recipe.task), recipe.data.test, recipe.task, device)


def measure(name: str, data: Path, compression: float, epochs: int, device: torch.device) -> dict[str, Any]:
    """All figures of a recipe."""
    function, folder = RECIPES[name]
    first, second, twin = (build_recipe(function, data / folder, seed=0) for _ in range(3))
    batches = [batch.to(device) for batch in first.data.train]
    past = len(batches) // 2
    torch.manual_seed(0)
    plain, optimizer = shard(TrainTask(first.model, first.task), first, device)
    plain.train()
    for batch in batches[:past] * epochs:
        step(plain, optimizer, batch)
    copy = snapshot(plain)
    state = {k: StoredTensor.of(k, v.copy().chunks[0].tensor) for k, v in optimizer_tensors(plain, optimizer).items()}
    state |= {key: StoredTensor.of(key, value.chunks[0].tensor) for key, value in copy.tensors.items()}
    for key, value in model_tensors(torch.nn.ModuleDict({"model": second.model})).items():
        value.chunks[0].tensor.copy_(state[key].whole())
    loss, held_out = second.task, second.data.validation
    result = compress(second.model, batches[:past], loss=loss, compression=compression, held_out=held_out)
    with tempfile.TemporaryDirectory() as place:
        artifact = export(second.model, result.scheme, Path(place) / "artifact")
        model, states = narrow_for_training_(twin.model, artifact, state, prefix="model.")
    narrow, rest = shard(TrainTask(model, twin.task), twin, device)
    narrow.train()
    values = snapshot(narrow)
    warm_up_(narrow, rest, batches[0], 2)
    take_(narrow, values)
    fill_state_(narrow, rest, states)
    sizes = [num_bytes(narrow, rest), num_bytes(plain, optimizer)]
    seconds = [(step(plain, optimizer, batch), step(narrow, rest, batch)) for batch in batches[past:]]
    of_plain, of_narrow = (statistics.median(times) for times in zip(*seconds, strict=True))
    return {
        "recipe": name,
        "compression": result.compression,
        "bytes": sizes[0] / sizes[1],
        "step_time": of_narrow / of_plain,
        "plain_step_ms": 1000 * of_plain,
        "steps": len(seconds),
        "plain": metrics(plain, first, compression, device),
        "narrow": metrics(narrow, first, compression, device),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with ml-1m and criteo-kaggle-137k")
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES], default=[*RECIPES])
    parser.add_argument("--compression", type=float, default=20)
    parser.add_argument("--epochs", type=int, default=4, help="epochs of the first half")
    options = parser.parse_args()
    with process_group() as device:
        for name in options.recipes:
            print(json.dumps(measure(name, options.data, options.compression, options.epochs, device)), flush=True)


if __name__ == "__main__":
    main()
