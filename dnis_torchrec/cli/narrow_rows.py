"""A trained model with its rows in int8 or int4, of all columns or of its first principal axes:
what users try first, shown beside what a command makes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.torchrec import writing_to_tables

ROWS = {"int8 rows": 8, "int4 rows": 4}
"""Name of a result -> bits of a value."""
CUT_AXES = "cut axes"
SCALE_BYTES = 4  # of a row: scale and bias, a float16 each


def table_bytes(
    tables: Sequence[EmbeddingBagConfig],
    bits: int,
    columns: int | None = None,
    leave_alone: Collection[str] = (),
) -> int:
    """Bytes of tables whose first columns are stored in so many bits, all others in float32."""
    total = 0
    for table in tables:
        width = min(table.embedding_dim, columns or table.embedding_dim)
        row = 2 * -(-width * bits // 16) + SCALE_BYTES  # FBGEMM's rows end on two bytes
        if table.name in leave_alone:
            row = 4 * table.embedding_dim
        total += table.num_embeddings * row
    return total


def columns_within(
    tables: Sequence[EmbeddingBagConfig], bits: int, num_bytes: int, leave_alone: Collection[str]
) -> int:
    """The most columns, below all of them, that take at most so many bytes; 0 if none does."""
    widest = max(table.embedding_dim for table in tables)
    widths = range(16 // bits, widest, 16 // bits)
    fit = (w for w in widths if table_bytes(tables, bits, w, leave_alone) <= num_bytes)
    return max(fit, default=0)


def rounded_rows(weight: Tensor, bits: int) -> Tensor:
    """Rows as FBGEMM's inference kernels read them: rounded to codes with a scale each."""
    rows, filler = weight.detach().float().cpu(), -weight.shape[1] % (16 // bits)
    if filler:  # the last column again, which leaves a row's range as it is
        rows = torch.cat([rows, rows[:, -1:].expand(-1, filler)], dim=1)
    codes = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows.contiguous(), bits)
    values = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(codes, bits)
    return values[:, : weight.shape[1]].to(weight.device)


@contextmanager
def in_rows(
    model: nn.Module, bits: int, columns: int | None = None, leave_alone: Collection[str] = ()
) -> Iterator[None]:
    """Gives the model its rows as they are served, for the block. Local, no collective."""
    shards = [s for module in collections(model).values() for s in local_shards(module)]
    weights = [shard.weight for shard in shards if shard.table not in leave_alone]
    copies = [weight.clone() for weight in weights]
    try:
        with writing_to_tables(model):
            for weight in weights:
                weight[:, :columns] = rounded_rows(weight[:, :columns], bits)
                weight[:, columns or weight.shape[1] :] = 0
        yield
    finally:
        with writing_to_tables(model):
            for weight, copy in zip(weights, copies, strict=True):
                weight.copy_(copy)
