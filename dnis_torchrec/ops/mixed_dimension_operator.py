"""The operator ``dnis_torchrec::mixed_dimension_bag``: all features of a collection, from a table per block of rows.

Compiled for the CPU (csrc/lookups/mixed_dimension_bag.cpp); it reads stock tables where they lie, so nothing is stored
for it. Without it, on other devices, and while training, the same modules go through TorchRec's and FBGEMM's own
kernels.

Shapes: B batch, F features, I ids of a batch, N rows of a table, D embedding_dim, S blocks, R retained dims of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dnis_torchrec.ops.native_build import NAMESPACE

_NAME = "mixed_dimension_bag"
LANES = 16
"""Columns of one mask."""


def register_mixed_dimension_bag() -> None:
    """Lets torch.export through the operator; `load_operator` does so, once in a process."""
    torch.library.register_fake(f"{NAMESPACE}::{_NAME}", _fake)


def _fake(
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    tables: Sequence[Tensor],
    positions: Sequence[Tensor],
    feature_layout: Tensor,
    table_layout: Tensor,
    block_layout: Tensor,
    masks: Tensor,
    keys: Sequence[int] | None,
    batch_size: int,
    width: int,
    zero_unknown: bool,
) -> Tensor:
    return ids.new_empty((batch_size, width), dtype=torch.float32)
