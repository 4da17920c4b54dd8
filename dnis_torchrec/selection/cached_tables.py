"""Tables in host memory behind a cache on the GPU (FBGEMM's UVM caching), and what whoever trains
them owes the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding

TRAINED_LOOKUPS = (GroupedPooledEmbeddingsLookup, GroupedEmbeddingsLookup)
"""TorchRec's lookups that train, of pooled collections and of sequences."""


def lookups(model: nn.Module) -> list[nn.Module]:
    """TorchRec's lookups, which a sharded collection keeps in a plain list, unseen by `modules()`.
    Local."""
    kinds = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
    sharded = [module for module in model.modules() if isinstance(module, kinds)]
    found = [lookup for module in sharded for lookup in module._lookups]
    return [
        lookup.module if isinstance(lookup, DistributedDataParallel) else lookup for lookup in found
    ]


@contextmanager
def writing_to_tables(model: nn.Module) -> Iterator[None]:
    """Lets weights be written to where they lie: caches write back what they hold before, and hold
    nothing after."""
    of_torchrec = [lookup for lookup in lookups(model) if isinstance(lookup, TRAINED_LOOKUPS)]
    for lookup in of_torchrec:
        lookup.flush()
    try:
        yield
    finally:
        forget_cached_rows(model)


def forget_cached_rows(model: nn.Module) -> None:
    """Empties the caches of a model whose weights were written from outside, what they hold lost.
    Local."""
    for lookup in lookups(model):
        if isinstance(lookup, TRAINED_LOOKUPS):
            lookup.purge()


class PrefetchedTables:
    """The tables of a model whose rows are to be prefetched:
    ``CacheParams(prefetch_pipeline=True)``. Local."""

    def __init__(self, model: nn.Module) -> None:
        sharded = [
            module
            for module in model.modules()
            if isinstance(module, ShardedEmbeddingBagCollection)
        ]
        infos = [
            info
            for module in sharded
            for own in module.sharding_type_to_sharding_infos.values()
            for info in own
        ]
        self.names = [info.embedding_config.name for info in infos if _is_prefetched(info)]
        for module in model.modules():
            if isinstance(module, ShardedEmbeddingCollection):
                self.names += [
                    table
                    for table, own in module.module_sharding_plan.items()
                    if _is_planned_so(own)
                ]
        parts = (part for lookup in lookups(model) for part in lookup.modules())
        kernels = [
            part for part in parts if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen)
        ]
        self.kernels = [
            kernel
            for kernel in kernels
            if kernel.prefetch_pipeline and kernel.lxu_cache_weights.numel()
        ]

    def __bool__(self) -> bool:
        return bool(self.names)

    def unlock(self) -> None:
        """Unlocks the lines of the batch that was looked up last, which has no backward pass to do
        so."""
        for kernel in self.kernels:
            _unlock(kernel, [kernel.lxu_cache_locations])

    def forget(self) -> None:
        """Unlocks and forgets what was prefetched and not looked up yet."""
        for kernel in self.kernels:
            _unlock(kernel, kernel.lxu_cache_locations_list)
            kernel.lxu_cache_locations_list, kernel.timesteps_prefetched = [], []

    @contextmanager
    def unlocking_every_lookup(self) -> Iterator[None]:
        """Unlocks behind every lookup: nothing in here has a backward pass."""
        hooks = [
            kernel.register_forward_hook(
                lambda own, _inputs, _output: _unlock(own, [own.lxu_cache_locations])
            )
            for kernel in self.kernels
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _is_prefetched(info: EmbeddingShardingInfo) -> bool:
    is_cached = info.param_sharding.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    return is_cached and bool((info.fused_params or {}).get("prefetch_pipeline"))


def _is_planned_so(planned: ParameterSharding) -> bool:
    is_cached = planned.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    return (
        is_cached
        and planned.cache_params is not None
        and bool(planned.cache_params.prefetch_pipeline)
    )


def _unlock(kernel: nn.Module, locations: list[Tensor]) -> None:
    """Counts every line's lock down by one, while nothing is prefetched, as FBGEMM does before a
    backward pass."""
    own = cast(SplitTableBatchedEmbeddingBagsCodegen, kernel)
    if own.prefetch_stream is not None:
        torch.cuda.current_stream().wait_stream(own.prefetch_stream)
    for of_batch in locations:
        torch.ops.fbgemm.lxu_cache_locking_counter_decrement(
            own.lxu_cache_locking_counter, of_batch
        )
    if own.prefetch_stream is not None:
        own.prefetch_stream.wait_stream(torch.cuda.current_stream())
