"""RetainedMask: pruned values stay zero while the retained ones train on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.torchrec import writing_to_tables
from dnis_torchrec.training.held_tables import HeldTables


class RetainedMask(HeldTables):
    """Holds pruned values at zero while the retained ones train on (masked fine-tuning)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shards = [
            shard for module in collections(model).values() for shard in local_shards(module)
        ]
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
