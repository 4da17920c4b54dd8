"""Memory that compressing one large table takes beyond the model, for `benchmarks.rate_distortion --memory`."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import cast

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.pruning_memory import rise_of_memory
from benchmarks.rate_compress import compress, prepare
from benchmarks.rate_summary import MemoryRow
from dnis_torchrec.allocation.axes import RotationGroup
from dnis_torchrec.allocation.compress import packed_collections
from dnis_torchrec.blocks.counts import FrequencyCounts

DIM, COMPRESSION = 64, 20.0
BATCH_SIZE, NUM_BATCHES = 4096, 16


class OneTable(nn.Module):
    """The squared length of a pooled embedding, which no rotation changes.

    Args:
        num_embeddings: rows of the table.
        dim: its columns.
        device: where the table is made; "meta" leaves it to others.
    """

    def __init__(self, num_embeddings: int, dim: int = DIM, device: str = "cpu") -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=num_embeddings, embedding_dim=dim, feature_names=["f"], init_fn=falling
        )
        self.tables = EmbeddingBagCollection(tables=[table], device=torch.device(device))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts.

        Args:
            dense_features: not read.
            sparse_features: stride B.

        Returns:
            ``(B,)``.
        """
        del dense_features
        return cast(Tensor, self.tables(sparse_features).values().square().sum(1))

    def rotation_groups(self) -> list[RotationGroup]:
        """The table turns by itself."""
        return [RotationGroup(tables=("t",))]


def falling(weight: Tensor) -> Tensor:
    """Fills columns that carry less and less, as those of trained tables do.

    Args:
        weight: ``(rows, columns)``.

    Returns:
        `weight`.
    """
    for column, part in enumerate(weight.data.unbind(1), start=1):
        part.normal_(std=0.1 / column)
    return weight


def measure_memory(num_embeddings: int) -> MemoryRow:
    """Compresses a table of so many rows, 64 wide, 20 times, in a fresh process.

    Args:
        num_embeddings: N.

    Returns:
        The rise of its resident memory, what is served counted, over the bytes of the table.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        mp.spawn(measure_here, args=(num_embeddings, str(path)), nprocs=1)
        return cast(MemoryRow, json.loads(path.read_text(encoding="utf-8")))


def measure_here(rank: int, num_embeddings: int, path: str) -> None:
    """Compresses one table in this process, and leaves the figures in a file."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    _compress(1000)  # libraries and code do not count
    model, counts, batches = _problem(num_embeddings)
    table_bytes = 4 * num_embeddings * DIM
    started = time.monotonic()
    peak = rise_of_memory(lambda: _compress_model(model, counts, batches, int(table_bytes / COMPRESSION)))
    measured = MemoryRow(
        rows=num_embeddings,
        dim=DIM,
        table_bytes=table_bytes,
        peak_bytes=peak,
        ratio=peak / table_bytes,
        seconds=time.monotonic() - started,
    )
    Path(path).write_text(json.dumps(measured), encoding="utf-8")


def _compress(num_embeddings: int) -> None:
    _compress_model(*_problem(num_embeddings), 4 * num_embeddings * DIM // 8)


def _compress_model(model: nn.Module, counts: FrequencyCounts, batches: list[Batch], num_bytes: int) -> None:
    prepared = prepare(model, batches, counts, loss=nn.MSELoss(), turns=True)
    packed_collections(prepared.model, compress(prepared, num_bytes).scheme)


def _problem(num_embeddings: int) -> tuple[nn.Module, FrequencyCounts, list[Batch]]:
    """Rows in no order of frequency, ids that follow Zipf's law."""
    scattered = torch.randperm(num_embeddings)
    counts = (num_embeddings / (1 + scattered)).long()
    rows, lengths = scattered.argsort(), torch.ones(BATCH_SIZE, dtype=torch.int64)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = rows[(num_embeddings ** torch.rand(BATCH_SIZE)).long() - 1]
        features = KeyedJaggedTensor(["f"], ids, lengths=lengths)
        batches.append(Batch(torch.zeros(BATCH_SIZE, 1), features, torch.rand(BATCH_SIZE)))
    return OneTable(num_embeddings), FrequencyCounts({"t": counts}, {"f": 1}, int(counts.sum())), batches
