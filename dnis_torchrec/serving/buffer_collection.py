"""BufferCollection: what collections have in common whose tables are buffers, read by one operator
and by nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.checks import describe
from dnis_torchrec.ops.packed import load_operator
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.logical_tables import OperatorCollection


class BufferCollection(OperatorCollection):
    """A collection that serves and never trains: its operator runs everywhere, compiled or not."""

    def __init__(self, scheme: MixedDimensionScheme, *, unknown_ids: str) -> None:
        super().__init__(scheme, unknown_ids=unknown_ids)
        load_operator()
        self._dims = self._logical.dims
        self._width = sum(self._dims)
        self._needs_int64 = any(table.num_embeddings > 2**31 for table in self._logical.tables)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up."""
        pooled = self._of_batch(features)
        return KeyedTensor(keys=self._logical.names, length_per_key=self._dims, values=pooled)

    def lookup(
        self, ids: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Looks bags up from plain tensors, as nn.EmbeddingBag takes them: for callers that have no
        KeyedJaggedTensor."""
        batch_size = self._logical.batch_size_of(offsets, per_sample_weights)
        return self._pooled(
            ids, offsets, per_sample_weights, None, batch_size, self._logical.features
        )

    def _by_operator(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        keys: list[int] | None,
        batch_size: int,
    ) -> Tensor:
        if self._needs_int64 and ids.dtype == torch.int32:
            requirement = "int64 ids, because a table has more than 2^31 rows"
            raise TypeError(describe("KeyedJaggedTensor", requirement, ids.dtype, "hash to int64"))
        weights = None if weights is None else weights.contiguous()
        return self._read(ids.contiguous(), offsets.contiguous(), weights, keys, batch_size)

    def _read(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        keys: list[int] | None,
        batch_size: int,
    ) -> Tensor:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the operator there in a process that received the module from another."""
        super().__setstate__(state)
        load_operator()
