"""Time of a lower step on an EmbeddingCollection, over that of a plain step.

    python -m benchmarks.sequence_step [--rounds 100]

DIN (`examples.models`) on one process and one thread, a history of up to 20 of 20,000 made-up items, D = 32, batches of
1,024. The two models take turns on the same batches. Printed are the median ratio of all rounds and its quartiles, for
row-wise Adagrad and for Adam, of processor time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.training.shard import process_group, shard
from examples.models.sequential import DeepInterestNetwork, build_sequence_table

NUM_ITEMS, EMBEDDING_DIM, LONGEST, BATCH_SIZE, NUM_BLOCKS, NUM_BATCHES = 20_000, 32, 20, 1024, 8, 4
WARM_UP_ROUNDS = 3
OPTIMIZERS = ("rowwise_adagrad", "adam")


def make_batch(generator: torch.Generator) -> Batch:
    """A candidate and a history of each sample; small ids are frequent."""
    lengths = torch.randint(1, LONGEST + 1, (BATCH_SIZE,), generator=generator)
    lengths = torch.cat([torch.ones(BATCH_SIZE, dtype=torch.int64), lengths])
    ids = (torch.rand(int(lengths.sum()), generator=generator).square() * NUM_ITEMS).long()
    features = KeyedJaggedTensor(["candidate", "history"], ids, lengths=lengths)
    return Batch(torch.zeros(BATCH_SIZE, 1), features, torch.randint(0, 2, (BATCH_SIZE,), generator=generator).float())


def step_of(model: nn.Module, recipe: Recipe, device: torch.device) -> Callable[[Batch], None]:
    """A training step of a model, ready to be called."""
    sharded, optimizer = shard(TrainTask(model, recipe.task), recipe, device)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        sharded(batch)[0].backward()
        optimizer.step()

    return step


def ratios(optimizer: str, rounds: int, device: torch.device) -> list[float]:
    """Time of a lower step over that of the plain step behind it, round by round."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    batches = [make_batch(generator) for _ in range(NUM_BATCHES)]
    plain = DeepInterestNetwork(build_sequence_table(NUM_ITEMS, EMBEDDING_DIM), longest=LONGEST)
    prepared, data = (
        copy.deepcopy(plain),
        DataSplits(train=batches, validation=batches, selection=batches, test=batches),
    )
    tables = table_configs(prepared)
    counts = count_frequencies([batch.sparse_features for batch in batches], tables)
    prepare_(prepared, blocks_from_counts(counts, tables, num_blocks=NUM_BLOCKS))
    recipe = Recipe(model=plain, data=data, loss=nn.BCEWithLogitsLoss(), table_optimizer=optimizer)
    steps, found = [step_of(model, recipe, device) for model in (prepared, plain)], []
    for index in range(WARM_UP_ROUNDS + rounds):
        taken = []
        for step in steps:
            started = time.process_time()
            step(batches[index % NUM_BATCHES])
            taken.append(time.process_time() - started)
        found.append(taken[0] / taken[1])
    return found[WARM_UP_ROUNDS:]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with process_group() as device:
        for optimizer in OPTIMIZERS:
            low, median, high = statistics.quantiles(ratios(optimizer, arguments.rounds, device), n=4)
            print(f"{optimizer}: lower step {median:.3f} [{low:.3f}, {high:.3f}] of the plain step", flush=True)


if __name__ == "__main__":
    main()
