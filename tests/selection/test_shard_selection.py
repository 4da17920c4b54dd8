"""Selection on the shards, on one rank; tests/distributed/test_shard_selection_ranks.py has two."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.selection.alpha import SelectPooled
from dnis_torchrec.selection.on_shards import SelectSums, ShardSelection, select_on_shards_
from dnis_torchrec.selection.swap import prepare_
from tests.distributed.shard_selection_scenarios import (
    ROWS,
    SHARDINGS,
    WHOLE_FEATURES,
    compare,
    look_up_nothing,
    loss_of,
    make_features,
    make_model,
    shard,
    tables,
    upper_gradients,
)
from tests.small_models import kernels_of, lookups_of, operators


class OwnLookup(GroupedPooledEmbeddingsLookup):
    """What a sharder of somebody else may have put in."""


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        *itertools.product(["table_wise", "grid_shard", "mixed", "kernel_per_table"], [True, False]),
        *((kind, True) for kind in WHOLE_FEATURES if kind in SHARDINGS),
    ],
)
def test_it_computes_what_the_unsharded_collection_does(
    gloo: dist.ProcessGroup, compiled: bool, kind: str, weighted: bool
) -> None:
    with operators(compiled):
        found = compare(kind, weighted, 0, 1, gloo)
    assert found["keys"]
    assert found["state"]
    assert found["columns"] == 36
    assert max(found["value_error"], found["alpha_error"], found["table_error"]) < 1e-6
    assert found["hit_errors"] == 0


@pytest.mark.parametrize("kind", ["data_parallel", "table_wise"])
def test_weights_that_learn_get_the_gradient_of_the_unsharded_collection(gloo: dist.ProcessGroup, kind: str) -> None:
    """Compiled or not. Without table b: FBGEMM has no gradient for the weights of a feature of two tables."""
    features, gradients = make_features(0, True), []
    for on_shards, compiled in ((False, True), (True, True), (True, False)):
        model = make_model(True, names="ac")
        wrapper = select_on_shards_(shard(model, kind, gloo)).module["ebc"] if on_shards else model["ebc"]
        weights = features.weights().clone().requires_grad_()
        bags = type(features)(
            keys=features.keys(), values=features.values(), lengths=features.lengths(), weights=weights
        )
        with operators(compiled):
            loss_of(wrapper(bags)).backward()
        gradients.append(weights.grad)
    expected, *others = gradients
    assert expected.any()
    for gradient in others:
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", SHARDINGS)
def test_a_batch_without_ids(gloo: dist.ProcessGroup, kind: str) -> None:
    wrapper = select_on_shards_(shard(make_model(False), kind, gloo)).module["ebc"]
    features = make_features(0, False)
    empty = type(features)(
        keys=features.keys(), values=features.values()[:0], lengths=torch.zeros_like(features.lengths())
    )
    pooled = wrapper(empty).values()
    assert not pooled.any()
    pooled.sum().backward()
    gradients, hits = upper_gradients(wrapper, empty)
    assert not any(gradient.any() for gradient in gradients)
    assert not any(hit.any() for hit in hits.values())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("kind", "on_shards", "compiled"),
    [
        *itertools.product([kind for kind in SHARDINGS if kind not in WHOLE_FEATURES], [True, False], [True, False]),
        *((kind, True, True) for kind in WHOLE_FEATURES if kind in SHARDINGS),
    ],
)
def test_a_batch_of_no_samples(
    gloo: dist.ProcessGroup, kind: str, weighted: bool, compiled: bool, on_shards: bool
) -> None:
    """TorchRec's sharded collections take one, as the last batch of a rank may be."""
    with operators(compiled):
        sharded = shard(make_model(weighted), kind, gloo)
        wrapper = (select_on_shards_(sharded) if on_shards else sharded).module["ebc"]
        found = look_up_nothing(wrapper, weighted)
    assert found["keys"]
    assert found["shape"] == [0, 36]
    assert found["alpha_values"] == [wrapper.alpha.of(dim).numel() for dim in wrapper.alpha.dims]
    assert found["table_change"] == found["gradient"] == found["alpha_gradient"] == found["hits"] == 0


def test_a_second_time_changes_nothing(gloo: dist.ProcessGroup) -> None:
    model = select_on_shards_(shard(make_model(False), "mixed", gloo))
    wrapper = model.module["ebc"]
    selection, forwards = wrapper.selection, [kernel.forward for kernel in kernels_of(model)]
    assert isinstance(selection, SelectSums)
    assert select_on_shards_(model) is model
    assert wrapper.selection is selection
    assert [kernel.forward for kernel in kernels_of(model)] == forwards


@pytest.mark.parametrize(
    ("kind", "in_ddp", "num_kernels"),
    [("table_wise", False, 1), ("kernel_per_table", False, 3), ("data_parallel", False, 1), ("data_parallel", True, 0)],
)
def test_every_kernel_selects_for_itself(gloo: dist.ProcessGroup, kind: str, in_ddp: bool, num_kernels: int) -> None:
    """So that the pieces of one table at a time are in memory; a lookup within DDP selects as a whole."""
    sharded = shard(make_model(False), kind, gloo)
    lookups = sharded.module["ebc"].embedding_bag_collection._lookups
    if in_ddp:  # as on several ranks
        lookups[0] = DistributedDataParallel(lookups[0], process_group=gloo)
    select_on_shards_(sharded)
    (lookup,) = lookups
    kernels = getattr(lookup, "module", lookup)._emb_modules
    assert sum(isinstance(kernel.forward, ShardSelection) for kernel in kernels) == num_kernels
    assert isinstance(lookup.forward, ShardSelection) == in_ddp


def test_what_cannot_be_moved_selects_behind_the_collection(gloo: dist.ProcessGroup) -> None:
    features = make_features(1, False)
    unsharded = make_model(False)
    expected = unsharded["ebc"](features).values()
    assert select_on_shards_(unsharded) is unsharded
    sharded = shard(make_model(False), "table_wise", gloo)
    wrapper = sharded.module["ebc"]
    for lookup in lookups_of(sharded):
        lookup.__class__ = OwnLookup
    select_on_shards_(sharded)
    for own in (unsharded["ebc"], wrapper):
        assert own.bag_splitter is not None
        assert isinstance(own.selection, SelectPooled)
        torch.testing.assert_close(own(features).values(), expected, atol=1e-6, rtol=0)
    single = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables())})
    counts = FrequencyCounts({name: torch.ones(rows, dtype=torch.int64) for name, rows in ROWS.items()}, {}, 30)
    prepare_(single, blocks_from_counts(counts, tables(), num_blocks=3), multi_hot_features=[])
    assert isinstance(select_on_shards_(shard(single, "table_wise", gloo)).module["ebc"].selection, SelectPooled)
