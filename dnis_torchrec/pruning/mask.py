"""RetainedMask: pruned values stay zero while the retained ones train on."""

from __future__ import annotations

import torch
from torch import nn

from dnis_torchrec.cached_tables import writing_to_tables
from dnis_torchrec.table_shards import collections, local_shards


class RetainedMask:
    """Holds pruned values at zero while the retained ones train on (masked fine-tuning).

    One bool per value of this rank's shards; of tables in the dense kernel on a CPU a value of the tables' own dtype,
    since there torch copies a mask of bools to that dtype in every product. Gradients of dense tables are masked before
    the optimizer sees them, so its state stays clean; fused optimizers apply their update inside backward, so their
    result is masked afterwards. NOTE[DIFF]: the row-wise state of a fused row-wise optimizer still averages over pruned
    columns.

    Args:
        model: a pruned model, sharded or not; what is zero now stays zero.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shards = [shard for module in collections(model).values() for shard in local_shards(module)]
        self._masks = [shard.weight != 0 for shard in self._shards]
        storages = {shard.weight.data_ptr(): index for index, shard in enumerate(self._shards)}
        self._dense = [(p, storages[p.data_ptr()]) for p in model.parameters() if p.data_ptr() in storages]
        for parameter, index in self._dense:
            if parameter.device.type == "cpu":
                self._masks[index] = self._masks[index].to(parameter.dtype)

    @torch.no_grad()
    def hold_gradients_(self) -> None:
        """Zeroes the gradients of pruned values; call before the optimizer's step."""
        for parameter, index in self._dense:
            if parameter.grad is not None:
                parameter.grad.mul_(self._masks[index])

    @torch.no_grad()
    def hold_(self) -> None:
        """Zeroes pruned values; call after the optimizer's step."""
        with writing_to_tables(self._model):
            for shard, mask in zip(self._shards, self._masks, strict=True):
                shard.weight.mul_(mask)
