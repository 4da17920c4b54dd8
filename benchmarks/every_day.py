"""One pass over a stream in ten periods: what is served of the day before, by a refresh a day or by deltas.

    python -m benchmarks.every_day amazon|lastfm|criteo --data FOLDER [--size 20] [--seed 0] [--json FILE]

Before each period a model that was trained on all earlier ones is evaluated on it, in five ways: columns "plain", its
float32 tables; "whole", compressed anew before each; "delta", compressed anew before some and in that scheme otherwise,
each delta on the one before; "frozen", the same without rows born since and without other scales. No sample is held out.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dnis_torchrec.allocation.compress import packed_collections
from dnis_torchrec.artifact import refresh
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.data.batches import InMemoryBatches
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import collections, table_configs
from dnis_torchrec.selection.swap import replace_
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection, PackedTable
from dnis_torchrec.training.evaluate import evaluate
from examples import amazon_sports, criteo, lastfm_tags

PERIODS, BATCH_SIZE, NEWEST = 10, 1024, 16_384
WHOLE = (1, 5)
"""Periods, from 0 on, before which the chains of deltas begin anew."""
STREAMS = {"amazon": (amazon_sports, "fm_by_time"), "lastfm": (lastfm_tags, "fm_by_time"), "criteo": (criteo, "fm")}
"""Name -> module and recipe; samples of all stand in order of time."""


def recipe_of(name: str, data: Path, seed: int) -> tuple[Recipe, list[InMemoryBatches]]:
    """A recipe and its samples, in ten equal periods."""
    module, function = STREAMS[name]
    with patch.object(module, "BATCH_SIZE", BATCH_SIZE):
        recipe = getattr(module, function)(data, seed=seed)
    splits = (recipe.data.train, recipe.data.validation, recipe.data.selection, recipe.data.test)
    rows = torch.cat([split.rows for split in splits]).sort().values
    return recipe, [some_of(recipe.data.test, part) for part in rows.tensor_split(PERIODS)]


def some_of(batches: InMemoryBatches, rows: Tensor) -> InMemoryBatches:
    """Some samples, in their order."""
    some = copy.copy(batches)
    some.rows = rows
    return some


@dataclass
class Served:
    """What stands at the servers."""

    scheme: MixedDimensionScheme
    rows: dict[str, Tensor]
    model: nn.Module


def compressed(model: nn.Module, old: Served | None, size: float, **samples) -> Served:
    """A whole refresh, or the first artifact of all."""
    model = copy.deepcopy(model)
    if old is None:
        measured = refresh.measure_(model, samples["batches"], loss=samples["loss"], counts=samples["counts"])
        allocation = measured.allocate(compression=size)
    else:
        _, allocation = refresh.whole_(model, old.scheme, old.rows, compression=size, **samples)
    modules, rows = packed_collections(model, allocation.scheme), {}
    for fqn, module in modules.items():
        rows |= module.bit_fields()
        replace_(model, model.get_submodule(fqn), module)
    return Served(allocation.scheme, rows, model)


def updated(model: nn.Module, old: Served, **samples) -> tuple[Served, refresh.Refresh]:
    """A delta, applied."""
    model = copy.deepcopy(model)
    result = refresh.delta_(model, old.scheme, old.rows, **samples)
    (fqn,) = collections(model)
    tables = {
        name: PackedTable.from_rows(table, result.rows[name], table.codes.scale, table.codes.shift)
        for name, table in result.scheme.tables.items()
    }
    replace_(model, model.get_submodule(fqn), PackedEmbeddingBagCollection(result.scheme, tables))
    model.load_state_dict(result.dense, strict=False)
    return Served(result.scheme, dict(result.rows), model), result


def main() -> None:
    """Prints a line a period."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", choices=STREAMS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--periods", type=int, default=PERIODS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recipe, periods = recipe_of(options.stream, options.data, options.seed)
    model, task, lines = recipe.model, recipe.task, []
    optimizer = optimizer_of(recipe)
    tables = table_configs(model)
    counts, served = (
        FrequencyCounts({t.name: torch.zeros(t.num_embeddings) for t in tables}, {}, 0),
        dict[str, Served](),
    )

    def loss_of(module: nn.Module, period: InMemoryBatches) -> float:
        return evaluate(TrainTask(module, task), period, task, torch.device("cpu"))["loss"]

    for number, period in enumerate(periods[: options.periods]):
        if number:
            line = {"period": number, "plain": loss_of(model, period)}
            newest = some_of(period, periods[number - 1].rows[-NEWEST:])
            samples = {"batches": newest, "loss": task, "counts": counts}
            is_whole = number in WHOLE
            for name in ("whole", "delta", "frozen"):
                begin, result = time.monotonic(), None
                with ExitStack() as stack:
                    if name == "frozen":
                        for constant in ("LEAST_NEWBORN", "WORST_SCALES"):
                            stack.enter_context(patch.object(refresh, constant, float("inf")))
                    if name == "whole" or is_whole:
                        new = served["whole"] if is_whole and name != "whole" else None
                        served[name] = new or compressed(model, served.get(name), options.size, **samples)
                    else:
                        served[name], result = updated(model, served[name], **samples)
                line |= {name: loss_of(served[name].model, period), f"{name} s": time.monotonic() - begin}
                if result is not None:
                    line |= {f"{name} drift": sum(result.drift.values())}
                    line |= {f"{name} rows": sum(result.num_changed.values()) / sum(map(len, counts.counts.values()))}
                    line |= {f"{name} size": result.scheme.compression("packed")}
            print(json.dumps(line), flush=True)
            lines.append(line)
        train_(TrainTask(model, task, embedding_l2=recipe.embedding_l2), optimizer, period)
        today = count_frequencies([batch.sparse_features for batch in period], tables)
        counts = sum_of(counts, today)
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1))


def optimizer_of(recipe: Recipe) -> torch.optim.Optimizer:
    """Adam at the rates of the recipe."""
    parts = dict[bool, list[nn.Parameter]]()
    for name, weight in recipe.model.named_parameters():
        parts.setdefault(".embedding_bags." in name, []).append(weight)
    rates = {True: recipe.table_learning_rate, False: recipe.dense_learning_rate}
    return torch.optim.Adam([{"params": weights, "lr": rates[of]} for of, weights in parts.items()])


def sum_of(one: FrequencyCounts, other: FrequencyCounts) -> FrequencyCounts:
    """Counts of two streams."""
    longest = {key: max(most, one.max_bag_lengths.get(key, 0)) for key, most in other.max_bag_lengths.items()}
    counts = {name: one.counts[name].long() + more for name, more in other.counts.items()}
    return FrequencyCounts(counts, longest, one.num_samples + other.num_samples)


def train_(task: TrainTask, optimizer: torch.optim.Optimizer, period: InMemoryBatches) -> None:
    """One pass."""
    task.train()
    for batch in period:
        optimizer.zero_grad()
        task(batch)[0].backward()
        optimizer.step()


if __name__ == "__main__":
    main()
