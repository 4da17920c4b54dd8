"""SoftSelectionEmbeddingBagCollection against the naive dense oracle: forward and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection
from tests.reference import ReferenceTable, pooled_reference

FEATURES = ("single", "multi", "shared")


class SharedBlocks(RowBlocks):
    """Tables of one embedding_dim share rows of alpha, as in the paper."""

    def first_alpha_row(self, table: str) -> int:
        return 0


@st.composite
def cases(draw):
    """Tables of several dims and poolings, shared features, bags that may be empty, KJT keys in any order."""
    weighted = draw(st.booleans())
    batch_size = draw(st.integers(1, 5))
    tables = [
        EmbeddingBagConfig(
            name=f"t{index}",
            num_embeddings=draw(st.integers(2, 9)),
            embedding_dim=draw(st.sampled_from([1, 3, 4])),
            feature_names=features,
            pooling=draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN])),
        )
        for index, features in enumerate([["single", "shared"], ["multi"], ["shared"]])
    ]
    smallest = min(table.num_embeddings for table in tables)
    longest = {"single": 1, "multi": 4, "shared": draw(st.sampled_from([1, 4]))}
    bags, weights = {}, {}
    for feature in FEATURES:
        bag = st.lists(st.integers(0, smallest - 1), max_size=longest[feature])
        bags[feature] = draw(st.lists(bag, min_size=batch_size, max_size=batch_size))
        weights[feature] = [[draw(st.floats(-2, 2, width=32)) for _ in b] for b in bags[feature]]
    counts = {
        table.name: torch.tensor(
            draw(st.lists(st.integers(0, 3), min_size=table.num_embeddings, max_size=table.num_embeddings))
        )
        for table in tables
    }
    blocks = blocks_from_counts(FrequencyCounts(counts, longest, 10), tables, num_blocks=draw(st.integers(1, 3)))
    if draw(st.booleans()):
        blocks = SharedBlocks(**vars(blocks))
    order = draw(st.permutations(FEATURES))
    return tables, blocks, bags, weights if weighted else None, order


def make_features(bags, weights, order) -> KeyedJaggedTensor:
    values = [row for feature in order for bag in bags[feature] for row in bag]
    flat = [w for feature in order for bag in weights[feature] for w in bag] if weights else None
    return KeyedJaggedTensor(
        keys=list(order),
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor([len(bag) for feature in order for bag in bags[feature]]),
        weights=torch.tensor(flat, dtype=torch.float32) if weights else None,
    )


def make_wrapper(tables, blocks: RowBlocks, weighted: bool) -> SoftSelectionEmbeddingBagCollection:
    collection = EmbeddingBagCollection(tables=tables, is_weighted=weighted)
    wrapper = SoftSelectionEmbeddingBagCollection(collection, blocks)
    for dim in wrapper.alpha.dims:
        wrapper.alpha.of(dim).uniform_(0, 1)
    return wrapper


def reference_tables(tables, blocks: RowBlocks, wrapper) -> dict[str, ReferenceTable]:
    made = {}
    alphas = {dim: wrapper.alpha.of(dim).detach().double().requires_grad_() for dim in wrapper.alpha.dims}
    for table in tables:
        weight = wrapper.embedding_bag_collection.embedding_bags[table.name].weight
        made[table.name] = ReferenceTable(
            weight=weight.detach().double().requires_grad_(),
            alpha=alphas[table.embedding_dim],
            alpha_row_of_row=blocks.first_alpha_row(table.name) + blocks.routings[table.name].all_blocks(),
            is_mean=table.pooling == PoolingType.MEAN,
        )
    return made


@given(cases())
def test_forward_and_every_gradient_match_the_oracle(case) -> None:
    tables, blocks, bags, weights, order = case
    wrapper = make_wrapper(tables, blocks, weights is not None)
    references = reference_tables(tables, blocks, wrapper)
    outputs = [(o.feature, o.table) for o in wrapper.outputs]
    expected = torch.cat(
        [pooled_reference(references[t], bags[f], weights[f] if weights else None) for f, t in outputs], dim=1
    )
    features = make_features(bags, weights, order)
    coefficients = torch.randn_like(expected)

    got = wrapper(features)
    assert got.keys() == ["single", "shared@t0", "multi", "shared@t2"]
    torch.testing.assert_close(got.values().double(), expected, atol=1e-6, rtol=1e-5)

    (got.values() * coefficients.float()).sum().backward()
    if expected.requires_grad:  # not if every bag is empty
        (expected * coefficients).sum().backward()
    for name, reference in references.items():
        grad = wrapper.embedding_bag_collection.embedding_bags[name].weight.grad
        torch.testing.assert_close(grad.double(), _grad(reference.weight), atol=1e-6, rtol=1e-5)

    with wrapper.alpha.upper_level() as hits:
        loss = (wrapper(features).values() * coefficients.float()).sum()
        dims = wrapper.alpha.dims
        grads = torch.autograd.grad(loss, [wrapper.alpha.of(dim) for dim in dims], materialize_grads=True)
        assert not any(p.requires_grad and p.grad is None for p in wrapper.parameters())
    for dim, grad in zip(dims, grads, strict=True):
        alphas = [r.alpha for name, r in references.items() if blocks.embedding_dims[name] == dim]
        torch.testing.assert_close(grad.double(), _grad(alphas[0]), atol=2e-6, rtol=1e-5)
        touched = torch.zeros(len(grad), dtype=torch.bool)
        for feature, table in outputs:
            if blocks.embedding_dims[table] == dim:
                rows = [row for bag in bags[feature] for row in bag]
                touched[references[table].alpha_row_of_row[rows]] = True
        assert torch.equal(hits[dim], touched)


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def simple(max_bag_length: int = 1, **table_fields):
    fields = dict(name="movie", num_embeddings=4, embedding_dim=2, feature_names=["movie"]) | table_fields
    table = EmbeddingBagConfig(**fields)
    counts = FrequencyCounts({table.name: torch.tensor([4, 3, 2, 1])}, {"movie": max_bag_length}, 10)
    return table, blocks_from_counts(counts, [EmbeddingBagConfig(**(fields | {"num_embeddings": 4}))], num_blocks=2)


def test_long_bag_in_a_single_id_feature_is_refused() -> None:
    table, blocks = simple()
    wrapper = SoftSelectionEmbeddingBagCollection(EmbeddingBagCollection(tables=[table]), blocks)
    features = KeyedJaggedTensor(keys=["movie"], values=torch.tensor([0, 1]), lengths=torch.tensor([2]))
    with pytest.raises(
        ValueError, match=r"table 'movie', feature 'movie': expected bags of at most one id, got a bag of 2"
    ):
        wrapper(features)


@pytest.mark.parametrize("bad", [-1, 4])
@pytest.mark.parametrize("max_bag_length", [1, 2])
def test_ids_out_of_range_are_refused_before_the_lookup(bad: int, max_bag_length: int) -> None:
    table, blocks = simple(max_bag_length)
    wrapper = SoftSelectionEmbeddingBagCollection(EmbeddingBagCollection(tables=[table]), blocks)
    features = KeyedJaggedTensor(keys=["movie"], values=torch.tensor([bad]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=rf"expected ids in 0\.\.3, got {bad}"):
        wrapper(features)


def test_blocks_of_other_rows_are_refused() -> None:
    table, blocks = simple(num_embeddings=5)
    with pytest.raises(ValueError, match=r"expected blocks of num_embeddings=5 rows, got 4"):
        SoftSelectionEmbeddingBagCollection(EmbeddingBagCollection(tables=[table]), blocks)


def test_unknown_names_show_the_nearest() -> None:
    table, blocks = simple(name="moive")
    with pytest.raises(ValueError, match=r"table 'moive'.*did you mean 'movie'"):
        SoftSelectionEmbeddingBagCollection(EmbeddingBagCollection(tables=[table]), _renamed(blocks))
    table, blocks = simple()
    with pytest.raises(ValueError, match=r"feature 'genre'.*known names: 'movie'"):
        SoftSelectionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=[table]), blocks, multi_hot_features=["genre"]
        )


def _renamed(blocks: RowBlocks) -> RowBlocks:
    routings = {"movie": blocks.routings["movie" if "movie" in blocks.routings else "moive"]}
    occurrences = {"movie": next(iter(blocks.occurrences.values()))}
    dims = {"movie": 2}
    return replace(blocks, routings=routings, embedding_dims=dims, occurrences=occurrences, seen_rows=occurrences)


def test_anything_but_a_collection_is_refused() -> None:
    _, blocks = simple()
    with pytest.raises(TypeError, match="expected an EmbeddingBagCollection, got Linear"):
        SoftSelectionEmbeddingBagCollection(torch.nn.Linear(1, 1), blocks)


def test_an_upper_level_backward_cannot_reach_a_table() -> None:
    table, blocks = simple()
    wrapper = SoftSelectionEmbeddingBagCollection(EmbeddingBagCollection(tables=[table]), blocks)
    features = KeyedJaggedTensor(keys=["movie"], values=torch.tensor([0, 3]), lengths=torch.tensor([1, 1]))
    with wrapper.alpha.upper_level():
        wrapper(features).values().sum().backward()  # even a careless one, without torch.autograd.grad
        alpha_gradient = wrapper.alpha.of(2).grad
    assert alpha_gradient is not None
    assert wrapper.embedding_bag_collection.embedding_bags["movie"].weight.grad is None
