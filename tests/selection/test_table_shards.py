"""Local shards of plain, wrapped and sharded collections, and merging alpha into them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.selection import shards as shards_module
from dnis_torchrec.selection.shards import TableShard, collections, local_shards, multiply_by_alpha_
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection, soft_selection_modules
from tests.small_models import (
    MODELS,
    ROWS,
    SHARDING_TYPES,
    TwoCollections,
    alpha_of,
    blocks_for,
    collection,
    dlrm,
    randomise_alpha_,
    shard_as,
)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 5), st.integers(0, 5))
def test_chunks_cover_the_shard(rows: int, columns: int, first_row: int, first_column: int) -> None:
    table = torch.arange(20 * 20).view(20, 20)
    view = table[first_row : first_row + rows, first_column : first_column + columns]
    seen = torch.zeros_like(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "ROWS_PER_CHUNK", 2)
        for part, of_rows, of_columns in TableShard("t", view, first_row, first_column).chunks():
            assert len(part) <= 2
            assert torch.equal(part, table[of_rows, of_columns])
            assert part.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
            seen[of_rows, of_columns] += 1
    assert seen.sum() == rows * columns
    assert (seen[first_row : first_row + rows, first_column : first_column + columns] == 1).all()


def test_collections_are_found_by_fqn() -> None:
    model = TwoCollections()
    assert {fqn: type(m) for fqn, m in collections(model).items()} == {
        "first": EmbeddingBagCollection,
        "module.second": EmbeddingBagCollection,
    }
    assert soft_selection_modules(model) == {}
    prepare_(model, blocks_for(model))
    for found in (collections(model), soft_selection_modules(model)):
        assert {fqn: type(m) for fqn, m in found.items()} == {
            "first": SoftSelectionEmbeddingBagCollection,
            "module.second": SoftSelectionEmbeddingBagCollection,
        }
    assert list(collections(collection())) == [""]
    assert collections(nn.Linear(1, 1)) == {}


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.usefixtures("gloo")
def test_fqns_of_a_sharded_model_are_those_of_the_plain_one(sharding_type: str) -> None:
    """Also where the user's own model has a child called `module`, as DistributedDataParallel has."""
    plain = shard_as(TwoCollections(), sharding_type)
    assert {fqn: type(m) for fqn, m in collections(plain).items()} == {
        "first": ShardedEmbeddingBagCollection,
        "module.second": ShardedEmbeddingBagCollection,
    }
    model = TwoCollections()
    sharded = shard_as(prepare_(model, blocks_for(model)), sharding_type)
    assert list(soft_selection_modules(sharded)) == list(collections(sharded)) == ["first", "module.second"]
    bare = shard_as(prepare_(collection(), blocks_for(collection())), sharding_type)
    assert list(soft_selection_modules(bare)) == [""]


@pytest.mark.parametrize("sharding_type", [None, *SHARDING_TYPES])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.usefixtures("gloo")
def test_local_shards_are_live_views_of_whole_tables(sharding_type: str | None, prepared: bool) -> None:
    model = dlrm()
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    tables = {name: bag.weight.detach().clone() for name, bag in bags.items()}
    if prepared:
        prepare_(model, blocks_for(model))
    if sharding_type is not None:
        model = shard_as(model, sharding_type)
    [found] = collections(model).values()
    shards = local_shards(found)
    assert len(shards) == (6 if sharding_type == "column_wise" else 3)
    covered = {name: torch.zeros_like(table) for name, table in tables.items()}
    for shard in shards:
        rows, columns = shard.weight.shape
        window = slice(shard.first_row, shard.first_row + rows), slice(shard.first_column, shard.first_column + columns)
        assert not shard.weight.requires_grad
        assert torch.equal(shard.weight, tables[shard.table][window])
        covered[shard.table][window] += 1
        shard.weight.add_(1)
    assert all((cover == 1).all() for cover in covered.values())
    for shard in local_shards(found):  # what was written is there when asked again
        window = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
        assert torch.equal(shard.weight, tables[shard.table][:, window] + 1)


def test_anything_but_a_collection_is_refused() -> None:
    message = "local_shards: expected an EmbeddingBagCollection, plain or sharded, got Linear"
    with pytest.raises(TypeError, match=message):
        local_shards(nn.Linear(1, 1))


@pytest.mark.parametrize("sharding_type", [None, *SHARDING_TYPES])
@pytest.mark.usefixtures("gloo")
def test_multiply_by_alpha(sharding_type: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "ROWS_PER_CHUNK", 4)
    model = MODELS["two_dims"]()
    blocks = blocks_for(model)
    before = {
        name: bag.weight.detach().clone()
        for module in (model.first, model.module["second"])
        for name, bag in module.embedding_bags.items()
    }
    prepare_(model, blocks)
    randomise_alpha_(model)
    if sharding_type is not None:
        model = shard_as(model, sharding_type)
    alpha = {dim: alpha_of(model).of(dim).clone() for dim in (4, 8)}
    for wrapper in soft_selection_modules(model).values():
        multiply_by_alpha_(wrapper)
    expected = {}
    for name, table in before.items():
        of_row, dim = blocks.routings[name].all_blocks().tolist(), table.shape[1]
        rows = [alpha[dim][blocks.first_alpha_row(name) + of_row[row]] * table[row] for row in range(len(table))]
        expected[name] = torch.stack(rows)
    shards = [shard for wrapper in soft_selection_modules(model).values() for shard in local_shards(wrapper)]
    assert {shard.table for shard in shards} == set(ROWS)
    for shard in shards:
        window = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
        torch.testing.assert_close(shard.weight, expected[shard.table][:, window], rtol=0, atol=1e-7)
    assert all(torch.equal(alpha_of(model).of(dim), alpha[dim]) for dim in (4, 8))
