"""Pruning value by value (paper, eq. 7: ``|E~| < eps -> 0``), with eps as a size wants it, and training on under a
mask."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check, describe
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.prune import Size, SizeOutOfReachError, drop_zeros_
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.torchrec import writing_to_tables
from dnis_torchrec.training.rounded import HeldTables

VALUE_BYTES, POINTER_BYTES = 4, 4
"""A value in float32, and where a row begins."""


def column_bytes(embedding_dim: int) -> int:
    """Bytes of the column number of a value."""
    return 1 if embedding_dim <= 256 else 2


def num_values(size: Size, shapes: Sequence[tuple[int, int]], *, at_least: int = 1) -> int:
    """Single values that a size pays for in compressed sparse rows: value, column, and a pointer per row.

    Args:
        size: of all tables together.
        shapes: N and D of every table.
        at_least: fewer are refused.
    """
    fixed = sum(POINTER_BYTES * (num_rows + 1) for num_rows, _ in shapes)
    total = sum(num_rows * dim for num_rows, dim in shapes)
    of_value = VALUE_BYTES + max(column_bytes(dim) for _, dim in shapes)
    num_keep = int(size.num_bytes(total) - fixed) // of_value
    if num_keep < at_least:
        (name, received), smallest = size.given, fixed + at_least * of_value
        limit = f"at least {smallest}"
        if name == "compression":
            limit = f"at most {math.floor(100 * 4 * total / smallest) / 100:.2f}"
        raise SizeOutOfReachError(describe(name, f"{limit} for these tables", received))
    return min(num_keep, total)


@torch.no_grad()
def keep_largest_(tables: Sequence[Tensor], num_keep: int) -> None:
    """Zeroes all but the largest magnitudes, exactly; among equals earlier ones (table, row, column) stay."""
    magnitudes = torch.cat([table.abs().flatten() for table in tables])
    kept = torch.zeros(len(magnitudes), dtype=torch.bool, device=magnitudes.device)
    if 0 < num_keep < len(magnitudes):
        eps = magnitudes.kthvalue(len(magnitudes) - num_keep + 1).values
        kept = magnitudes > eps
        equal = (magnitudes == eps).nonzero().flatten()
        kept[equal[: num_keep - int(kept.sum())]] = True
    elif num_keep > 0:
        kept.fill_(True)
    for table, of_table in zip(tables, kept.split([table.numel() for table in tables]), strict=True):
        table.mul_(of_table.view(table.shape))


@torch.no_grad()
def prune_values_(model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts, size: Size) -> MixedDimensionScheme:
    """Zeroes rows never seen and all but the largest values of a merged model, and says which columns hold any.

    Args:
        model: on one process; its tables change.
        blocks: of its tables.
        counts: of its training data.
        size: in compressed sparse rows; met to a value.
    """
    tables = {
        shard.table: shard.weight
        for module in collections(model).values()
        for shard in local_shards(module)
        if shard.table in blocks.routings
    }
    for name, weight in tables.items():
        check(bool(weight.isfinite().all()), f"table {name!r}", "finite values", "NaN or infinity")
    num_keep = num_values(size, [(weight.shape[0], weight.shape[1]) for weight in tables.values()])
    for name, weight in tables.items():
        weight[(counts.counts[name][:] == 0).to(weight.device)] = 0
    keep_largest_(list(tables.values()), num_keep)
    return drop_zeros_(model, blocks, counts)


class ValueMask(HeldTables):
    """Holds pruned values at zero while the retained ones train on (masked fine-tuning)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shards = [shard for module in collections(model).values() for shard in local_shards(module)]
        self._masks = [self._mask(shard.weight) for shard in self._shards]
        storages = {shard.weight.data_ptr(): index for index, shard in enumerate(self._shards)}
        not_fused = dict(in_backward_optimizer_filter(model.named_parameters())).values()
        self._dense = [(p, storages[p.data_ptr()]) for p in not_fused if p.data_ptr() in storages]
        self._fused = sorted(set(range(len(self._shards))) - {index for _, index in self._dense})

    @staticmethod
    def _mask(weight: Tensor) -> Tensor:
        mask = weight != 0
        return mask.to(weight.dtype) if weight.device.type == "cpu" else mask

    @torch.no_grad()
    def before_step_(self) -> None:
        """Zeroes the gradients of pruned values."""
        for parameter, index in self._dense:
            if parameter.grad is not None:
                parameter.grad.mul_(self._masks[index])

    @torch.no_grad()
    def hold_(self) -> None:
        """Zeroes pruned values; call after the optimizer's step."""
        self._hold_(range(len(self._shards)))

    @torch.no_grad()
    def after_step_(self) -> None:
        """Zeroes pruned values of tables that kernels step inside backward."""
        if self._fused:
            self._hold_(self._fused)

    def _hold_(self, indices: Iterable[int]) -> None:
        with writing_to_tables(self._model):
            for index in indices:
                self._shards[index].weight.mul_(self._masks[index])
