"""The operator ``dnis_torchrec::mixed_dimension_bag``: all features of a collection, from a table per block of rows.

Compiled for the CPU (csrc/lookups/mixed_dimension_bag.cpp); it reads stock tables where they lie, so nothing is stored
for it. Without it, on other devices, and while training, the same modules go through TorchRec's and FBGEMM's own
kernels.

Shapes: B batch, F features, I ids of a batch, N rows of a table, D embedding_dim, S blocks, R retained dims of a block.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from dnis_torchrec.ops.csr_operator import NAMESPACE, load_operator

NAME = "mixed_dimension_bag"
LANES = 16
"""Columns of one mask."""

_lock = threading.Lock()


def load_mixed_dimension_operator() -> bool:
    """Makes ``torch.ops.dnis_torchrec.mixed_dimension_bag`` there, compiling it if need be; modules do so themselves.

    Returns:
        Whether there is one; see `load_operator` for when there is not.

    Example:
        >>> load_mixed_dimension_operator() == load_operator()
        True
    """
    with _lock:
        return _load_operator()


@functools.cache
def _load_operator() -> bool:
    compiled = load_operator()
    if compiled:
        torch.library.register_fake(f"{NAMESPACE}::{NAME}", _fake)
    return compiled


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
    bits: int,
    zero_unknown: bool,
) -> Tensor:
    return ids.new_empty((batch_size, width), dtype=torch.float32)
