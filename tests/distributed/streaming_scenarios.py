"""What each rank does in the tests of streams."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.over_ranks import count_over_ranks
from dnis_torchrec.data.parquet import FileBatches, FileSamples, split_files
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.training.loop import SearchEvents, SearchInterrupted
from dnis_torchrec.training.settings import Saving
from tests.distributed.harness import Rank
from tests.tiny import SCHEMA, draw, labels, write_text

NUM_SAMPLES = 61
TABLES = [
    EmbeddingBagConfig(name="small", num_embeddings=9, embedding_dim=4, feature_names=["f", "g"]),
    EmbeddingBagConfig(name="large", num_embeddings=3000, embedding_dim=4, feature_names=["h"]),
]


def make_batches(num_batches: int, seed: int, *, batch_size: int = 50) -> list[KeyedJaggedTensor]:
    """Batches with empty bags; ids of `h` are skewed as real ones are."""
    random = np.random.default_rng(seed)
    batches = []
    for _ in range(num_batches):
        lengths = random.integers(0, 4, 3 * batch_size)
        ends = lengths.reshape(3, -1).sum(1)
        ids = [random.integers(0, 9, ends[0]), random.integers(0, 9, ends[1]), random.zipf(1.3, ends[2]) % 3000]
        batches.append(
            KeyedJaggedTensor(
                keys=["f", "g", "h"],
                values=torch.from_numpy(np.concatenate(ids)).long(),
                lengths=torch.from_numpy(lengths).long(),
            )
        )
    return batches


def serve(rank: Rank) -> dict[str, Any]:
    """Two epochs of a stream, with ranks and world_size taken from the process group."""
    path = rank.folder / f"stream_{rank.rank}.tsv"
    write_text(path, draw(NUM_SAMPLES))
    stream = FileSamples([path], SCHEMA)
    found: dict[str, Any] = {}
    for drop_last in (True, False):
        batches = FileBatches(stream, batch_size=4, drop_last=drop_last, window_batches=2)
        found[str(drop_last)] = [labels(list(batches)) for _ in range(2)]
        found[f"length {drop_last}"] = len(batches)
    return found


def own_batches(rank: int) -> int:
    """Ranks have different numbers of batches, and one of them few."""
    return 1 + 6 * rank


def count(rank: Rank) -> dict[str, Any]:
    """Counts of all ranks together."""
    batches = make_batches(own_batches(rank.rank), seed=rank.rank)
    counts = count_over_ranks(batches, TABLES, process_group=rank.process_group)
    return {"counts": dict(counts.counts), "lengths": dict(counts.max_bag_lengths), "num_samples": counts.num_samples}


SIZE = 2.0
STREAMED = SearchSettings(num_blocks=2, epochs=2, patience=1)
"""How `search_stream` searches."""


def recipe_of(file: Path) -> Recipe:
    """Clicks streamed from a file, and a DLRM for them."""
    stream = FileSamples([file], SCHEMA)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=[name])
        for name, rows in SCHEMA.num_embeddings.items()
    ]
    torch.manual_seed(0)
    return Recipe(
        model=DLRM(EmbeddingBagCollection(tables=tables), len(SCHEMA.dense), [8, 4], [8, 1]),
        data=split_files(stream, batch_size=16, seed=0, fractions=(0.7, 0.1, 0.1, 0.1)),
        loss=torch.nn.BCEWithLogitsLoss(),
        table_optimizer="rowwise_adagrad",
    )


def write_clicks(path: Path) -> Path:
    """The stream that `search_stream` reads."""
    return write_text(path, [replace(sample, y=sample.y % 2) for sample in draw(600)])


def search_stream(rank: Rank) -> dict[str, Any]:
    """A search of data that splits itself, and the same after a stop within its ramp."""
    own = write_clicks(rank.folder / f"clicks_{rank.rank}.tsv")
    seen: list[FrequencyCounts] = []
    events = SearchEvents(on_start=lambda steps, counts, blocks: seen.append(counts))

    def history(name: str, events: SearchEvents, *, resume: bool = False) -> list[dict[str, Any]]:
        folder = rank.folder / name
        folder.mkdir(exist_ok=True)
        saving = Saving(resume=resume)
        found = search(recipe_of(own), SIZE, folder, rank.device, settings=STREAMED, events=events, saving=saving)
        return [asdict(record) for record in found.history]

    whole, steps = history("whole", events), itertools.count()
    try:
        history("stopped", SearchEvents(should_stop=lambda: next(steps) > 44))
        stopped = "no"
    except SearchInterrupted as error:
        stopped = str(error)
    resumed = history("stopped", SearchEvents(), resume=True)
    counts = {name: rows[:] for name, rows in seen[0].counts.items()}
    return {"whole": whole, "resumed": resumed, "stopped": stopped, "counts": counts}


def fail_alone(rank: Rank) -> dict[str, Any]:
    """The last rank meets an id outside its table."""
    batches = make_batches(2, seed=0)
    if rank.rank == rank.world_size - 1:
        values = batches[1].values().clone()
        values[0] = 9
        batches[1]._values = values
    try:
        count_over_ranks(batches, TABLES, process_group=rank.process_group)
    except ValueError as error:
        return {"error": str(error), "sum": int(_sum_of_ranks(rank))}
    return {"error": "", "sum": 0}


def _sum_of_ranks(rank: Rank) -> torch.Tensor:
    """A collective that hangs if the ranks are not at the same place."""
    value = torch.tensor(rank.rank)
    torch.distributed.all_reduce(value, group=rank.process_group)
    return value
