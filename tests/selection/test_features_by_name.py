"""Sharded collections read the features of every batch by name, and weights as the unsharded collection does."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.selection.on_shards import select_on_shards_
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.torchrec import read_by_name_

CPU = torch.device("cpu")
SHARDERS = [CpuEmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
ROWS, BATCH = 20, 6
FEATURES = ("a", "b", "c")
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
ORDERS = [
    *itertools.permutations(FEATURES),
    *(order for order in itertools.permutations(("a", "x", "b", "c")) if order.index("a") > 0),
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def tables() -> list[EmbeddingBagConfig]:
    """One table reads two features, and one feature is read by two tables."""
    read = {"one": ["a", "b"], "two": ["c"], "three": ["a"]}
    return [EmbeddingBagConfig(name=n, num_embeddings=ROWS, embedding_dim=8, feature_names=f) for n, f in read.items()]


def bags(keys: tuple[str, ...] = FEATURES, *, longest: int = 1, weighted: bool = False) -> KeyedJaggedTensor:
    """A batch; the bags of a key are the same whatever the others."""
    values, lengths = [], []
    for key in keys:
        generator = torch.Generator().manual_seed(ord(key))
        length = torch.randint(0, longest + 1, (BATCH,), generator=generator)
        lengths.append(length)
        values.append(torch.randint(0, ROWS, (int(length.sum()),), generator=generator))
    ids = torch.cat(values)
    weights = 2 + ids.float() if weighted else None
    return KeyedJaggedTensor(keys=list(keys), values=ids, lengths=torch.cat(lengths), weights=weights)


def sharded(model: nn.Module, kind: str) -> nn.Module:
    constraint = ParameterConstraints(sharding_types=[kind], min_partition=4)
    constraints = {table.name: constraint for table in tables()}
    return shard_model(model, CPU, make_sharding_plan(model, CPU, SHARDERS, constraints=constraints), SHARDERS)


def prepared(model: nn.Module, longest: int) -> nn.Module:
    counts = count_frequencies([bags(longest=longest)], tables())
    return prepare_(model, blocks_from_counts(counts, tables(), num_blocks=3))


def collection(*, weighted: bool = False) -> nn.ModuleDict:
    return nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables(), is_weighted=weighted)})


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("longest", [1, 3])
@every_kind
def test_any_order_and_other_keys_give_what_the_unsharded_collection_does(
    gloo: dist.ProcessGroup, kind: str, longest: int, searched: bool
) -> None:
    model = collection()
    expected = model["ebc"](bags(longest=longest)).to_dict()
    model = sharded(prepared(model, longest) if searched else model, kind)
    for order in (FEATURES, *ORDERS):
        pooled = get_unwrapped_module(model)["ebc"](bags(order, longest=longest)).to_dict()
        assert pooled.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(pooled[name], value, atol=1e-6, rtol=0, msg=f"{name} of {order}")


@every_kind
def test_a_first_batch_with_another_key_is_read_right(gloo: dist.ProcessGroup, kind: str) -> None:
    model = collection()
    expected = model["ebc"](bags()).to_dict()
    read = get_unwrapped_module(sharded(model, kind))["ebc"]
    for order in (("x", "c", "b", "a"), FEATURES):
        torch.testing.assert_close(read(bags(order)).to_dict(), expected, atol=1e-6, rtol=0)


def test_a_batch_in_the_right_order_is_passed_on_as_it_is(gloo: dist.ProcessGroup) -> None:
    ebc = get_unwrapped_module(sharded(collection(), "table_wise"))["ebc"]
    seen: list[KeyedJaggedTensor] = []
    vars(ebc)["input_dist"]._input_dist = lambda ctx, features: seen.append(features)
    first, later = bags(), bags()
    for features in (first, later):
        ebc.input_dist(None, features)
    assert seen[0] is first
    assert seen[1] is later


def test_a_missing_feature_is_named(gloo: dist.ProcessGroup) -> None:
    ebc = get_unwrapped_module(sharded(collection(), "table_wise"))["ebc"]
    for order in (("a", "c"), FEATURES, ("a", "c")):
        if order == FEATURES:
            ebc(bags(order))
            continue
        with pytest.raises(ValueError, match="feature 'b': expected a known feature"):
            ebc(bags(order))


def test_a_tensor_dict_is_read_by_name(gloo: dist.ProcessGroup) -> None:
    model = collection()
    expected = model["ebc"](bags()).to_dict()
    read = get_unwrapped_module(sharded(model, "table_wise"))["ebc"]
    for order in (FEATURES, ("c", "a", "b")):
        by_key = {
            key: torch.nested.nested_tensor_from_jagged(jagged.values(), jagged.offsets().long())
            for key, jagged in bags(order).to_dict().items()
        }
        pooled = read(TensorDict(by_key, batch_size=[BATCH])).to_dict()
        torch.testing.assert_close(pooled, expected, atol=1e-6, rtol=0)


def test_sequence_embeddings_are_read_by_name_and_keep_their_weights(gloo: dist.ProcessGroup) -> None:
    configs = [EmbeddingConfig(name=n, num_embeddings=ROWS, embedding_dim=8, feature_names=[n]) for n in ("a", "b")]
    model = nn.ModuleDict({"ec": EmbeddingCollection(tables=configs)})
    expected = {name: jagged.values() for name, jagged in model["ec"](bags()).items()}
    read = get_unwrapped_module(shard_model(model, CPU, make_sharding_plan(model, CPU, SHARDERS), SHARDERS))["ec"]
    for order in (FEATURES, ("b", "x", "a"), ("x", "a", "b")):
        found = {name: jagged.values() for name, jagged in read(bags(order)).items()}
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("longest", [1, 3])
@every_kind
def test_an_unweighted_collection_ignores_weights_in_a_search_and_in_training(
    gloo: dist.ProcessGroup, kind: str, longest: int
) -> None:
    features = bags(longest=longest, weighted=True)
    model = collection()
    expected = model["ebc"](features).values()
    trained = sharded(copy.deepcopy(model), kind)
    read_by_name_(trained)  # as training.shard does
    for ready in (trained, sharded(prepared(model, longest), kind)):
        pooled = get_unwrapped_module(ready)["ebc"](features).to_dict()
        torch.testing.assert_close(torch.cat(list(pooled.values()), 1), expected, atol=1e-6, rtol=0)
    assert features.weights_or_none() is not None


def test_an_unweighted_collection_that_is_not_prepared_refuses_weights_after_shard_model(
    gloo: dist.ProcessGroup,
) -> None:
    ebc = get_unwrapped_module(sharded(collection(), "table_wise"))["ebc"]
    with pytest.raises(ValueError, match=r"\['one', 'two', 'three'\]: expected bags without per-sample weights"):
        ebc(bags(weighted=True))


@pytest.mark.parametrize("searched", [False, True])
def test_a_weighted_collection_refuses_bags_without_weights(gloo: dist.ProcessGroup, searched: bool) -> None:
    model = collection(weighted=True)
    ebc = get_unwrapped_module(sharded(prepared(model, 1) if searched else model, "table_wise"))["ebc"]
    with pytest.raises(ValueError, match="expected per-sample weights, got none"):
        ebc(bags())


@pytest.mark.parametrize(
    ("kind", "order"), [("row_wise", FEATURES), ("table_wise", FEATURES), ("data_parallel", "cab")]
)
def test_weights_that_learn_are_refused_where_torchrec_drops_their_gradient(
    gloo: dist.ProcessGroup, kind: str, order: str
) -> None:
    """Also in table_wise sharding, because a feature that two tables read is copied."""
    ebc = get_unwrapped_module(sharded(collection(weighted=True), kind))["ebc"]
    features = bags(tuple(order), weighted=True)
    ebc(features)
    features.weights().requires_grad_()
    with pytest.raises(NotImplementedError, match="supported are per-sample weights that learn on one rank"):
        ebc(features)
    with torch.no_grad():
        ebc(features)


@every_kind
@pytest.mark.parametrize("decided", [True, False])
def test_a_collection_that_was_called_before_reads_by_name_from_then_on(
    gloo: dist.ProcessGroup, kind: str, decided: bool
) -> None:
    """A user's own DistributedModelParallel has noted the places of its first batch by then."""
    model = collection()
    expected = model["ebc"](bags()).to_dict()
    model = sharded(model, kind)
    ebc = get_unwrapped_module(model)["ebc"]
    del vars(ebc)["input_dist"]
    ebc(bags(("x", *FEATURES)))
    read_by_name_(model, refuse_weights=False if decided else None)
    for order in (("c", "b", "a"), FEATURES):
        torch.testing.assert_close(ebc(bags(order)).to_dict(), expected, atol=1e-6, rtol=0)
    if not decided:  # its kernels may have learnt by weights
        with pytest.raises(ValueError, match="expected bags without per-sample weights"):
            ebc(bags(weighted=True))


def test_sequence_embeddings_that_were_called_before(gloo: dist.ProcessGroup) -> None:
    configs = [EmbeddingConfig(name=n, num_embeddings=ROWS, embedding_dim=8, feature_names=[n]) for n in ("a", "b")]
    model = nn.ModuleDict({"ec": EmbeddingCollection(tables=configs)})
    expected = {name: jagged.values() for name, jagged in model["ec"](bags()).items()}
    read = get_unwrapped_module(shard_model(model, CPU, make_sharding_plan(model, CPU, SHARDERS), SHARDERS))["ec"]
    del vars(read)["input_dist"]
    read(bags(("x", "b", "a")))
    read_by_name_(read)
    found = {name: jagged.values() for name, jagged in read(bags(("a", "b", "x"))).items()}
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_wrapper_reads_by_name_also_where_a_pipeline_calls_its_child(gloo: dist.ProcessGroup) -> None:
    """DistributedModelParallel puts the sharded child into the wrapper."""
    model = prepared(collection(), 1)
    constraints = {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables()}
    plan = make_sharding_plan(model, CPU, SHARDERS, constraints=constraints)
    child = get_unwrapped_module(DistributedModelParallel(model, device=CPU, plan=plan, sharders=SHARDERS))["ebc"]
    child = child.embedding_bag_collection
    pooled = []
    for order in (FEATURES, ("x", "c", "b", "a")):
        context = child.create_context()
        features = child.input_dist(context, bags(order)).wait().wait()
        pooled.append(child.compute_and_output_dist(context, features).to_dict())
    torch.testing.assert_close(pooled[1], pooled[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("order", [FEATURES, ("x", "c", "a", "b")])
def test_a_batch_size_per_feature_is_read_by_name_too(gloo: dist.ProcessGroup, order: tuple[str, ...]) -> None:
    """As TorchRec's sharded collections read it."""
    model = collection()
    weights = {name: bag.weight.detach().clone() for name, bag in model["ebc"].embedding_bags.items()}
    ebc = get_unwrapped_module(sharded(model, "table_wise"))["ebc"]
    sample_of = {key: torch.tensor([ord(key) % 2, 1, 1, 0]) for key in order}
    ids = {key: torch.tensor([ord(key) % ROWS, 3]) for key in order}
    features = KeyedJaggedTensor(
        keys=list(order),
        values=torch.cat(list(ids.values())),
        lengths=torch.ones(2 * len(order), dtype=torch.int64),
        stride_per_key_per_rank=[[2]] * len(order),
        inverse_indices=(list(order), torch.stack(list(sample_of.values()))),
    )
    pooled = ebc(features).to_dict()
    for table in tables():
        for key in table.feature_names:
            name = key if key in pooled else f"{key}@{table.name}"
            torch.testing.assert_close(pooled[name], weights[table.name][ids[key][sample_of[key]]])


def test_a_prepared_model_that_was_called_is_searched_all_the_same(gloo: dist.ProcessGroup) -> None:
    """Called alone it reads a key for every block; selected on the shards, whole bags."""
    model = sharded(prepared(collection(), 3), "table_wise")
    ebc = get_unwrapped_module(model)["ebc"]
    features = bags(longest=3)
    expected = ebc(features).values()
    select_on_shards_(model)
    torch.testing.assert_close(ebc(features).values(), expected, atol=1e-6, rtol=0)
