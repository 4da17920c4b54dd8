"""Soft selection of an EmbeddingCollection: what it computes, what it learns, how it goes in and out of a model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.search.prune import uncompressed_scheme
from dnis_torchrec.selection import alpha
from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, table_weight_names
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingCollection, soft_selection_modules
from dnis_torchrec.serving import ServedEmbeddingCollection
from dnis_torchrec.serving.tables import LogicalTables
from tests import sequence_models
from tests.reference import ReferenceTable, pooled_reference
from tests.sequence_models import (
    DIM,
    KEYS,
    bags_of_one,
    blocks,
    blocks_of,
    features,
    interest,
    make_batch,
    sequences,
    tables,
    values_of,
    wrapper_of,
)


@pytest.fixture(params=[True, False], ids=["compiled", "not compiled"])
def _operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(alpha, "can_select", lambda values: False)


def reference(model: nn.Module, kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Naive embeddings, in float64; leaves for alpha and the tables that they come from."""
    wrapper, own = wrapper_of(model), blocks()
    alpha = wrapper.alpha.of(DIM).double().requires_grad_()
    weights = {name: table.weight.detach().double() for name, table in wrapper.lookup.embeddings.items()}
    leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
    found = []
    for key in KEYS:
        feature, _, table = key.partition("@")
        table = table or next(name for name, read in sequence_models.FEATURES.items() if feature in read)
        rows = own.first_alpha_row(table) + own.routings[table].all_blocks()
        naive = ReferenceTable(leaves[table], alpha, rows, is_mean=False)
        bags = [[row] for row in kjt[feature].values().tolist()]
        found += [pooled_reference(naive, bags)] if bags else []
    return torch.cat(found), alpha, leaves


def loss_of(values: Tensor) -> Tensor:
    coefficients = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view(values.shape)
    return (values * coefficients).sin().sum()


@pytest.mark.usefixtures("_operators")
def test_it_computes_and_learns_what_the_oracle_does() -> None:
    model, kjt = sequences(), features(3)
    wanted, _, leaves = reference(model, kjt)
    wrapper = wrapper_of(model)
    got = wrapper(kjt)
    assert list(got) == KEYS
    torch.testing.assert_close(values_of(got).double(), wanted, atol=1e-6, rtol=0)
    for key in KEYS:
        torch.testing.assert_close(got[key].lengths(), kjt[key.partition("@")[0]].lengths())
    loss_of(values_of(got)).backward()
    loss_of(wanted).backward()
    for name, table in wrapper.lookup.embeddings.items():
        torch.testing.assert_close(table.weight.grad.double(), leaves[name].grad, atol=1e-6, rtol=0)
    assert wrapper.alpha.of(DIM).grad is None


@pytest.mark.usefixtures("_operators")
def test_in_an_upper_step_alpha_alone_learns() -> None:
    model, kjt = sequences(), features(3)
    wanted, leaf, _ = reference(model, kjt)
    wrapper = wrapper_of(model)
    with wrapper.alpha.upper_level() as hits:
        loss_of(values_of(wrapper(kjt))).backward()
        gradient, wrapper.alpha.of(DIM).grad = wrapper.alpha.of(DIM).grad, None
    expected = torch.autograd.grad(loss_of(wanted), leaf)[0]
    torch.testing.assert_close(gradient.double(), expected, atol=1e-6, rtol=0)
    assert hits[DIM].tolist() == (expected.abs().sum(1) > 0).tolist()
    assert all(table.weight.grad is None for table in wrapper.lookup.embeddings.values())


@given(
    lengths=st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=5), compiled=st.booleans(), seed=st.integers(0, 99)
)
def test_bags_of_any_shape(lengths: list[tuple[int, ...]], compiled: bool, seed: int) -> None:
    """No samples, no ids of a feature, no ids at all."""
    generator = torch.Generator().manual_seed(seed)
    counted = torch.tensor(lengths, dtype=torch.int64).view(len(lengths), 3).t().flatten()
    ids = torch.randint(0, 17, (int(counted.sum()),), generator=generator)
    kjt = KeyedJaggedTensor(keys=["visits", "candidate", "history"], values=ids, lengths=counted, stride=len(lengths))
    model = sequences()
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(alpha, "can_select", lambda values: False)
        if lengths:
            wanted, leaf, leaves = reference(model, kjt) if len(ids) else (torch.zeros(0, DIM), None, {})
            got = values_of(wrapper_of(model)(kjt))
            torch.testing.assert_close(got.double(), wanted.double(), atol=1e-6, rtol=0)
            loss_of(got).backward()
            with wrapper_of(model).alpha.upper_level() as hits:
                values = values_of(wrapper_of(model)(kjt))
                found = torch.autograd.grad(loss_of(values), wrapper_of(model).alpha.of(DIM))[0]
            if len(ids):
                gradients = torch.autograd.grad(loss_of(wanted), [leaf, *leaves.values()], materialize_grads=True)
                torch.testing.assert_close(found.double(), gradients[0], atol=1e-6, rtol=0)
                tables = wrapper_of(model).lookup.embeddings
                for name, gradient in zip(leaves, gradients[1:], strict=True):
                    torch.testing.assert_close(tables[name].weight.grad.double(), gradient, atol=1e-6, rtol=0)
            else:
                assert not found.any()
                assert not hits[DIM].any()


def test_it_equals_the_pooled_collection_at_bag_length_one() -> None:
    kjt, both = features(5, of_one=True), []
    for model in (sequences(), bags_of_one()):
        wrapper = wrapper_of(model)
        output = wrapper(kjt)
        values = torch.cat([output[key] if isinstance(output[key], Tensor) else output[key].values() for key in KEYS])
        loss_of(values).backward()
        weights = [parameter.grad for _, parameter in sorted(wrapper.lookup.named_parameters())]
        both.append([values.detach(), *weights])
    for got, wanted in zip(*both, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def test_preparing_and_merging_keep_what_the_model_computes_and_its_names() -> None:
    model, batch = interest(), make_batch(0)
    before = model(batch.dense_features, batch.sparse_features)
    names = set(model.state_dict())
    prepare_(model, blocks_of(model, [make_batch(seed) for seed in range(4)]))
    assert [type(wrapper).__name__ for wrapper in soft_selection_modules(model).values()] == [
        "SoftSelectionEmbeddingCollection",
        "SoftSelectionEmbeddingBagCollection",
    ]
    torch.testing.assert_close(model(batch.dense_features, batch.sparse_features), before)
    alpha = soft_selection_modules(model)["sequences"].alpha
    assert alpha is soft_selection_modules(model)["users"].alpha
    for dim in alpha.dims:
        alpha.of(dim).uniform_(0.1, 1)
    selected = model(batch.dense_features, batch.sparse_features)
    assert not torch.allclose(selected, before, atol=0.01)
    merged = merge_(model)
    assert type(merged.sequences) is EmbeddingCollection
    assert type(merged.users) is EmbeddingBagCollection
    assert set(merged.state_dict()) == names
    torch.testing.assert_close(merged(batch.dense_features, batch.sparse_features), selected)


def test_indices_are_passed_on_where_they_are_needed() -> None:
    kjt = features(3)
    model = sequences(need_indices=True)
    output = wrapper_of(model)(kjt)
    assert output["visits"].weights().equal(kjt["visits"].values())
    assert merge_(model)["tables"].need_indices()
    assert sequences()["tables"](kjt)["visits"].weights_or_none() is None


def test_names_of_tables_are_those_and_no_others() -> None:
    model = nn.ModuleDict({"embeddings": nn.ModuleDict({"a": nn.Embedding(3, 2)}), "ec": sequences()["tables"]})
    assert table_weight_names(model) == {f"ec.embeddings.{name}.weight" for name in ("item", "shop")}


def test_an_id_outside_of_its_table() -> None:
    kjt = KeyedJaggedTensor(
        keys=["history", "candidate", "visits"], values=torch.tensor([1, 2, 17]), lengths=torch.tensor([1, 1, 1])
    )
    with pytest.raises(ValueError, match=r"table 'shop', feature 'visits': expected ids in 0\.\.16, got 17"):
        wrapper_of(sequences())(kjt)


class Doubling(EmbeddingCollection):
    """Changes what it looks up."""

    def forward(self, features: KeyedJaggedTensor) -> dict:
        return super().forward(features)


def hooked() -> EmbeddingCollection:
    collection = EmbeddingCollection(tables=tables())
    collection.register_forward_hook(lambda *_: None)
    return collection


def padded() -> EmbeddingCollection:
    collection = EmbeddingCollection(tables=tables())
    collection.embeddings["item"] = nn.Embedding(23, DIM, padding_idx=0)
    return collection


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Doubling(tables=tables()), "EmbeddingCollections that the model calls themselves, got Doubling with"),
        (hooked, "got one with hooks"),
        (padded, "table 'item': supported are tables as TorchRec makes them, got padding_idx=0"),
    ],
)
def test_what_it_would_not_compute_is_refused(build: object, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        prepare_(nn.ModuleDict({"tables": build()}), blocks())


def test_what_is_no_embedding_collection() -> None:
    with pytest.raises(TypeError, match="SoftSelection: expected an EmbeddingCollection, got Linear"):
        SoftSelectionEmbeddingCollection(nn.Linear(1, 1), blocks())


def test_tables_of_other_sizes_than_their_blocks() -> None:
    config = EmbeddingConfig(name="item", num_embeddings=5, embedding_dim=DIM, feature_names=["history"])
    with pytest.raises(ValueError, match="table 'item': expected blocks of num_embeddings=5 rows, got 23"):
        SoftSelectionEmbeddingCollection(EmbeddingCollection(tables=[config]), blocks())


def test_a_prepared_model_has_its_collections_once() -> None:
    assert list(collections(sequences())) == ["tables"]
    with pytest.raises(RuntimeError, match="expected a model not yet prepared"):
        prepare_(sequences(), blocks())


def test_a_sharding_type_that_sequences_do_not_have(gloo: object) -> None:
    constraints = {"item": ParameterConstraints(sharding_types=["table_row_wise"])}
    message = r"table 'item': expected a sharding type that the sharder offers on cpu: .*row_wise, got \['table_row_wi"
    with pytest.raises(ValueError, match=message):
        make_sharding_plan(sequences(), torch.device("cpu"), default_sharders(), constraints=constraints)


def test_columns_of_several_widths(gloo: object) -> None:
    """TorchRec would put the columns of the second table together as if they were as wide as those of the first."""
    constraints = {
        name: ParameterConstraints(sharding_types=["column_wise"], min_partition=width)
        for name, width in (("item", 4), ("shop", 8))
    }
    model, sharders = sequences(), default_sharders()
    plan = make_sharding_plan(model, torch.device("cpu"), sharders, constraints=constraints)
    message = r"table 'shop': expected columns in shards of 4, as .* other tables, got \[8\]; give all of them one"
    with pytest.raises(ValueError, match=message):
        shard_model(model, torch.device("cpu"), plan, sharders)


def test_pooled_serving_takes_no_unpooled_table() -> None:
    scheme = uncompressed_scheme(sequences(prepared=False))
    with pytest.raises(
        ValueError, match="table 'item': expected a table that is pooled, got none; serve it by a Served"
    ):
        LogicalTables.of(scheme)
    pooled = uncompressed_scheme(bags_of_one())
    with pytest.raises(ValueError, match="table 'item': expected one that is not pooled, got sum"):
        ServedEmbeddingCollection(pooled, {})
    with pytest.raises(ValueError, match="table 'item': expected a known table"):
        ServedEmbeddingCollection(scheme, {})
