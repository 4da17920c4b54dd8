"""The operator ``dnis_torchrec::mixed_dimension_bag``: all features of a collection, from a table
per block of rows."""

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
