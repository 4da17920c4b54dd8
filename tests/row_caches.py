"""A cache for FBGEMM's CPU kernels, which have none: it keeps no rows, but every promise about them.

What is looked up is what was prefetched last, and a prefetched row is locked until a backward pass unlocks it, or
whoever has none. FBGEMM caches, and prefetches, on GPUs only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from dnis_torchrec.selection.torchrec import lookups


class Cache:
    """What FBGEMM promises of a kernel's cache, and what it has to be promised: every row of a table is a line."""

    def __init__(self, kernel: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self.kernel, self.events, self.wrong = kernel, [], 0
        kernel.prefetch_pipeline = True
        kernel.lxu_cache_weights = torch.zeros(1, 1)
        kernel.lxu_cache_locking_counter = torch.zeros(sum(kernel.rows_per_table), dtype=torch.int32)
        kernel.prefetch = lambda indices, **_: self.prefetch(indices)
        kernel._prefetch = lambda indices, *_, **__: self.prefetch(indices)
        kernel.flush = lambda: self.events.append("flush")
        kernel.reset_cache_states = lambda: self.events.append("purge")
        kernel.register_forward_hook(self.looked_up, with_kwargs=True)

    def prefetch(self, indices: torch.Tensor) -> None:
        self.events.append("prefetch")
        self.kernel.timesteps_prefetched.append(0)
        self.kernel.lxu_cache_locations_list.append(indices.clone())
        self.kernel.lxu_cache_locking_counter.index_add_(0, indices, torch.ones_like(indices, dtype=torch.int32))

    def looked_up(self, kernel, _args, inputs: dict, output: torch.Tensor) -> None:
        self.events.append("forward")
        if output.requires_grad:
            output.register_hook(self.backward)
        self.wrong += not torch.equal(kernel.lxu_cache_locations, inputs["indices"])

    def backward(self, _gradient) -> None:
        self.events.append("backward")
        kernel = self.kernel
        torch.ops.fbgemm.lxu_cache_locking_counter_decrement(
            kernel.lxu_cache_locking_counter, kernel.lxu_cache_locations
        )

    def of_next_batch(self) -> torch.Tensor:
        """The locks as they have to be: those of what was prefetched and not looked up yet."""
        locks = torch.zeros_like(self.kernel.lxu_cache_locking_counter)
        for indices in self.kernel.lxu_cache_locations_list:
            locks.index_add_(0, indices, torch.ones_like(indices, dtype=torch.int32))
        return locks


@contextmanager
def counting_locks() -> Iterator[None]:
    """Lets locks be counted down on a CPU: FBGEMM declares the operator for GPUs only."""
    library = torch.library.Library("fbgemm", "IMPL")

    def decrement(counter: torch.Tensor, locations: torch.Tensor) -> None:
        counter.index_add_(0, locations, -torch.ones_like(locations, dtype=torch.int32))

    library.impl("lxu_cache_locking_counter_decrement", decrement, "CPU")
    try:
        yield
    finally:
        library._destroy()


CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING


def plan_caches_(model: nn.Module) -> None:
    """Has a model that was sharded without caches say that all its tables are cached, and their rows prefetched."""
    for module in (own for own in model.modules() if isinstance(own, ShardedEmbeddingBagCollection)):
        for info in (info for infos in module.sharding_type_to_sharding_infos.values() for info in infos):
            info.param_sharding.compute_kernel = CACHED.value
            info.fused_params = {**(info.fused_params or {}), "prefetch_pipeline": True}
    for kernel in fused_kernels(model):
        for table in kernel.config.embedding_tables:
            table.compute_kernel = CACHED


def caches_of(model: nn.Module) -> list[Cache]:
    """Gives this rank's kernels of cached tables their caches."""
    kernels = fused_kernels(model)
    cached = [own for own in kernels if all(table.compute_kernel == CACHED for table in own.config.embedding_tables)]
    return [Cache(kernel.emb_module) for kernel in cached]


def fused_kernels(model: nn.Module) -> list[BatchedFusedEmbeddingBag]:
    """This rank's."""
    parts = (part for lookup in lookups(model) for part in lookup.modules())
    return [part for part in parts if isinstance(part, BatchedFusedEmbeddingBag)]
