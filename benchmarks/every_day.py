"""One pass over a stream in ten periods: what is served of the day before, by a refresh a day or by deltas.

    python -m benchmarks.every_day amazon|lastfm|criteo --data FOLDER [--size 20] [--seed 0] [--json FILE]

A model trained on all earlier periods is evaluated on each, in four ways: "plain", its float32 tables; "whole",
compressed anew before each; "delta", compressed anew before periods 2 and 6 and in that scheme otherwise, each delta on
the one before; "frozen", the same without rows born since and without other scales. No sample is held out. "share" is
bytes of a delta over those of the artifact that it stands on, "size" how many times smaller tables are.
"""

import argparse
import copy
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dnis_torchrec.allocation.compress import measure_, packed_collections
from dnis_torchrec.artifact import refresh
from dnis_torchrec.artifact.delta import ServedState, read_state, write_delta, write_state
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.data.batches import InMemoryBatches
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.selection.shards import collections, dense_state, table_configs
from dnis_torchrec.selection.swap import replace_
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection, PackedTable
from dnis_torchrec.training.evaluate import evaluate
from examples import amazon_sports, criteo, lastfm_tags

PERIODS, BATCH_SIZE, NEWEST, WHOLE = 10, 1024, 16_384, (1, 5)
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


def whole_state(model: nn.Module, old: ServedState | None, size: float, samples: dict[str, Any]) -> ServedState:
    """A whole refresh, or the first artifact of all."""
    model = copy.deepcopy(model)
    if old is None:
        allocation = measure_(model, **samples).allocate(compression=size)
    else:
        _, allocation = refresh.whole_(model, old.scheme, old.rows, compression=size, **samples)
    (module,) = packed_collections(model, allocation.scheme).values()
    return ServedState(scheme=allocation.scheme, rows=module.bit_fields(), dense=dense_state(model), run={})


def loss_of(model: nn.Module, recipe: Recipe, period: InMemoryBatches, state: ServedState | None = None) -> float:
    """What a model loses on a period, with its own tables or as it is served."""
    model = copy.deepcopy(model)
    if state is not None:
        tables = {
            name: PackedTable.from_rows(table, state.rows[name], table.codes.scale, table.codes.shift)
            for name, table in state.scheme.tables.items()
        }
        (fqn,) = collections(model)
        replace_(model, model.get_submodule(fqn), PackedEmbeddingBagCollection(state.scheme, tables))
        model.load_state_dict(dict(state.dense), strict=False)
    return evaluate(TrainTask(model, recipe.task), period, recipe.task, torch.device("cpu"))["loss"]


def share_of_delta(old: ServedState, new: ServedState) -> float:
    """Bytes of a delta over those of the artifact."""
    with TemporaryDirectory() as folder:
        base, delta = Path(folder) / "base", Path(folder) / "delta"
        order = read_state(write_state(old, base)).dense
        write_delta(base, replace(new, dense={name: new.dense[name] for name in order}), delta)
        sizes = [sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) for path in (delta, base)]
    return sizes[0] / sizes[1]


def main() -> None:
    """Prints a line a period."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", choices=STREAMS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recipe, periods = recipe_of(options.stream, options.data, options.seed)
    model, lines, states = recipe.model, [], dict[str, ServedState]()
    task = TrainTask(model, recipe.task, embedding_l2=recipe.embedding_l2)
    tables, optimizer = table_configs(model), optimizer_of(recipe)
    counts: FrequencyCounts | None = None
    for number, period in enumerate(periods):
        line: dict[str, Any] = {"period": number + 1}
        if counts is not None:
            newest = some_of(period, periods[number - 1].rows[-NEWEST:])
            samples = {"batches": newest, "loss": recipe.task, "counts": counts}
            line["plain"] = loss_of(model, recipe, period)
            for name in ("whole", "delta", "frozen"):
                begin, old = time.monotonic(), states.get(name)
                if name == "whole" or number in WHOLE:
                    states[name] = (
                        states["whole"] if name != "whole" else whole_state(model, old, options.size, samples)
                    )
                else:
                    states[name], more = delta_state(model, states[name], samples, is_frozen=name == "frozen")
                    line |= {f"{name} {key}": value for key, value in more.items()}
                line[f"{name} seconds"] = time.monotonic() - begin
                line[name] = loss_of(model, recipe, period, states[name])
            print(json.dumps({key: round(value, 5) for key, value in line.items()}), flush=True)
            lines.append(line)
        train_(task, optimizer, period)
        today = count_frequencies([batch.sparse_features for batch in period], tables)
        counts = today if counts is None else sum_of(counts, today)
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1))


def delta_state(
    model: nn.Module, old: ServedState, samples: dict[str, Any], *, is_frozen: bool
) -> tuple[ServedState, dict[str, float]]:
    """A delta, and its figures; a frozen scheme has no new block and no other scales."""
    with ExitStack() as stack:
        for constant in ("LEAST_NEWBORN", "WORST_SCALES") if is_frozen else ():
            stack.enter_context(patch.object(refresh, constant, float("inf")))
        result = refresh.delta_(copy.deepcopy(model), old.scheme, old.rows, **samples)
    new = replace(old, scheme=result.scheme, rows=result.rows, dense=result.dense)
    return new, {"share": share_of_delta(old, new), "size": new.scheme.compression("packed")}


def sum_of(one: FrequencyCounts, other: FrequencyCounts) -> FrequencyCounts:
    """Counts of two streams."""
    longest = {key: max(most, one.max_bag_lengths[key]) for key, most in other.max_bag_lengths.items()}
    counts = {name: one.counts[name].long() + more for name, more in other.counts.items()}
    return FrequencyCounts(counts, longest, one.num_samples + other.num_samples)


def optimizer_of(recipe: Recipe) -> torch.optim.Optimizer:
    """Adam at the rates of the recipe."""
    parts: dict[float, list[nn.Parameter]] = {}
    for name, weight in recipe.model.named_parameters():
        is_table = ".embedding_bags." in name
        parts.setdefault(recipe.table_learning_rate if is_table else recipe.dense_learning_rate, []).append(weight)
    return torch.optim.Adam([{"params": weights, "lr": rate} for rate, weights in parts.items()])


def train_(task: TrainTask, optimizer: torch.optim.Optimizer, period: InMemoryBatches) -> None:
    """One pass."""
    task.train()
    for batch in period:
        optimizer.zero_grad()
        task(batch)[0].backward()
        optimizer.step()


if __name__ == "__main__":
    main()
