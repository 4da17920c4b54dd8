"""Lookups of sequences in dense kernels on a CPU: every id gets the row that it names."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import describe


def read_rows_in_order_(collection: ShardedEmbeddingCollection) -> None:
    """Lets the dense kernels of a sharded collection return the rows of its ids in their order.
    Local, no collective."""
    for lookup in collection._lookups:
        own = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        for kernel in cast(Any, own)._emb_modules:
            if (
                isinstance(kernel, BatchedDenseEmbedding)
                and kernel.emb_module.weights.device.type == "cpu"
            ):
                # as TorchRec's pipelines replace forwards: no module, and so no name, changes
                vars(kernel)["forward"] = RowsInOrder(kernel)


class RowsInOrder:
    """Replacement of a dense kernel's forward. A plain callable, so that it adds no name to the
    state_dict."""

    def __init__(self, kernel: BatchedDenseEmbedding) -> None:
        self._kernel: nn.Module = kernel.emb_module
        tables = kernel.config.embedding_tables
        widths = sorted({table.local_cols for table in tables})
        if len(widths) != 1:
            supported = "supported in one dense kernel are tables of one width"
            raise NotImplementedError(
                describe(f"tables {[table.name for table in tables]}", supported, widths)
            )
        self._width = widths[0]
        begins = itertools.accumulate((table.local_rows for table in tables), initial=0)
        first_rows = [
            first for first, table in zip(begins, tables, strict=False) for _ in table.feature_names
        ]
        self._first_rows = torch.tensor(first_rows)

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Looks ids up."""
        weights = cast(Tensor, self._kernel.weights).view(-1, self._width)
        num_ids = torch.tensor(features.length_per_key())
        rows = features.values().long() + self._first_rows.repeat_interleave(num_ids)
        return functional.embedding(rows, weights).float()
