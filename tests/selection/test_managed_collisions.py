"""Models with managed collisions: wrapped, searched, merged, compressed, exported and served, by remapped rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule

from dnis_torchrec.allocation.compress import compress, measure_
from dnis_torchrec.artifact.export import drop_in_, export
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.search.prune import Size, prune
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, table_configs
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.torchrec_inputs import remapped
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from tests.managed import (
    BATCHES,
    CPU,
    ITEMS,
    NEW,
    ROWS,
    USERS,
    Model,
    StandIn,
    check_served_as_exported,
    mpzch,
    predictions,
    rows_of,
    trained,
    zch,
)

TABLES = [USERS, ITEMS]
Kind = Callable[[], ManagedCollisionModule]
KINDS = pytest.mark.parametrize("kind", [zch, mpzch, StandIn])


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "_managed_collision" in name}


def counted(model: Model) -> tuple[FrequencyCounts, RowBlocks]:
    counts = count_frequencies([remapped(model, own.sparse_features) for own in BATCHES], TABLES)
    return counts, blocks_from_counts(counts, TABLES, num_blocks=4)


@KINDS
def test_counts_are_of_the_rows_that_the_collection_is_called_with(kind: Kind) -> None:
    model = trained(kind)
    before = state_of(model)
    expected = {table.name: [0] * ROWS for table in TABLES}
    for own in BATCHES:
        rows = rows_of(model, own.sparse_features)
        for table in TABLES:
            for row in (row for feature in table.feature_names for row in rows[feature]):
                expected[table.name][row] += 1
    counts, _ = counted(model.train())
    assert model.tables._managed_collision_collection.training
    assert {name: of_table.tolist() for name, of_table in counts.counts.items()} == expected
    assert counts.max_bag_lengths == {"user": 1, "item": 1, "history": 3}
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())  # counting learns no id


@KINDS
def test_a_wrapped_model_predicts_and_learns_as_the_plain_one_and_comes_back(kind: Kind) -> None:
    model, plain = trained(kind), trained(kind)
    prepare_(model, counted(model)[1])
    wrapper = model.tables._embedding_module
    assert isinstance(wrapper, SoftSelectionEmbeddingBagCollection)
    for own in (model, plain):
        for part in BATCHES[:2]:
            own(part.dense_features, part.sparse_features).square().mean().backward()
    torch.testing.assert_close(predictions(model), predictions(plain))
    weights = [
        (wrapper.embedding_bags[name].weight.grad, plain.tables._embedding_module.embedding_bags[name].weight.grad)
        for name in ("user", "item")
    ]
    for found, expected in weights:
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        wrapper.alpha.of(16).uniform_(0.5, 1)
    before = predictions(model)
    assert not torch.allclose(before, predictions(plain), atol=1e-3)
    merged = merge_(model)
    assert merged is model
    assert type(model.tables._embedding_module) is EmbeddingBagCollection
    torch.testing.assert_close(predictions(model), before)


def test_rows_keep_their_ids_while_the_model_is_prepared() -> None:
    model = trained()
    prepare_(model, counted(model)[1])
    before = state_of(model)
    model.train()
    predictions(model, NEW)
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    merge_(model)
    predictions(model, NEW)
    assert any(not torch.equal(value, before[name]) for name, value in state_of(model).items())


def test_sharded_on_one_rank_it_comes_back_plain_and_goes_on(gloo: dist.ProcessGroup) -> None:
    model, plain = trained(), trained()
    sharded = shard_model(prepare_(model, counted(model)[1]), CPU)
    torch.testing.assert_close(predictions(sharded, NEW), predictions(plain, NEW))
    merged = merge_(sharded)
    assert type(merged.tables._embedding_module) is EmbeddingBagCollection
    torch.testing.assert_close(predictions(merged), predictions(plain))
    before = state_of(merged)
    predictions(merged.train(), NEW)
    assert any(not torch.equal(value, before[name]) for name, value in state_of(merged).items())


def test_a_row_that_is_evicted_and_reused_begins_in_the_cold_block() -> None:
    model = trained()
    predictions(model.train(), NEW)
    reused = sorted({row for own in NEW for row in rows_of(model.eval(), own.sparse_features)["user"]} - {ROWS - 1})
    assert reused
    counts, blocks = counted(model)  # of data that reads none of the new ids
    assert counts.counts["user"][reused].tolist() == [0] * len(reused)
    block = blocks.routings["user"].all_blocks()
    assert block[reused].min() >= block[counts.counts["user"] > 0].max()
    assert (block[reused] == blocks.routings["user"].num_blocks - 1).sum() >= len(reused) - 1


@KINDS
def test_compressed_tables_are_those_of_remapped_rows(kind: Kind) -> None:
    model, counts = trained(kind), counted(trained(kind))[0]
    measured = measure_(trained(kind), BATCHES, loss=nn.MSELoss())
    assert all(torch.equal(own, counts.counts[name]) for name, own in measured.counts.counts.items())
    before = predictions(model)
    found = compress(model, BATCHES, loss=nn.MSELoss(), compression=4)
    assert isinstance(model.tables._embedding_module, PackedEmbeddingBagCollection)
    assert found.compression >= 4
    assert float((predictions(model) - before).std() / before.std()) < 0.2
    assert {table.collection for table in found.scheme.tables.values()} == {"tables._embedding_module"}


@KINDS
def test_an_artifact_maps_raw_ids_as_the_model_did(tmp_path: Path, kind: Kind) -> None:
    model = trained(kind)
    scheme = measure_(model, BATCHES, loss=nn.MSELoss()).allocate(compression=4).scheme
    served = check_served_as_exported(model, scheme, tmp_path / "artifact", Model(kind))
    assert isinstance(served.tables._embedding_module, PackedEmbeddingBagCollection)


def test_a_pruned_model_is_exported_exactly(tmp_path: Path) -> None:
    model = trained()
    counts, blocks = counted(model)
    merge_(prepare_(model, blocks))
    scheme = prune(model, blocks, counts, size=Size(compression=2))
    served = drop_in_(Model(), export(model, scheme, tmp_path / "artifact")).eval()
    torch.testing.assert_close(predictions(served), predictions(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="multi-probe ZCH learns ids on GPUs only")
def test_multi_probe_modules_that_learn_are_counted_as_they_look_up() -> None:
    device = torch.device("cuda")
    model = Model(lambda: mpzch(device)).to(device)
    batches = [own.to(device) for own in BATCHES]
    predictions(model.train(), batches)
    counts = count_frequencies([remapped(model, own.sparse_features) for own in batches], TABLES)
    expected = torch.zeros(ROWS, dtype=torch.int64)
    for own in batches:
        expected += torch.bincount(torch.tensor(rows_of(model.eval(), own.sparse_features)["user"]), minlength=ROWS)
    assert counts.counts["user"].tolist() == expected.tolist()


def test_a_remapping_without_ids_is_refused() -> None:
    model = Model()
    for attempt in (
        lambda: remapped(model, BATCHES[0].sparse_features),
        lambda: measure_(model, BATCHES, loss=nn.MSELoss()),
    ):
        with pytest.raises(
            ValueError, match=r"FQN 'tables', table 'user': expected ids that have rows.* train the model"
        ):
            attempt()
    blocks = counted(trained())[1]
    with pytest.raises(ValueError, match="expected ids that have rows"):
        prepare_(model, blocks)
    assert type(model.tables._embedding_module) is EmbeddingBagCollection


def test_a_feature_of_two_tables_is_refused() -> None:
    model = trained()
    model.other = EmbeddingBagCollection(
        tables=[type(USERS)(**vars(USERS) | {"name": "raw", "feature_names": ["item"]})]
    )
    with pytest.raises(NotImplementedError, match=r"table 'item': supported are features of one table.*\['raw'\]"):
        remapped(model, BATCHES[0].sparse_features)


def test_sharding_and_jobs_that_count_raw_ids_refuse_it_by_name(gloo: dist.ProcessGroup) -> None:
    model = trained()
    place = "FQN 'tables._embedding_module': supported in "
    with pytest.raises(NotImplementedError, match=place + "jobs that count.*call prepare_, compress or prune"):
        table_configs(model)
    with pytest.raises(NotImplementedError, match=place + "sharding .*call prepare_ first"):
        make_sharding_plan(model, CPU, [CpuEmbeddingBagCollectionSharder()])


def test_a_model_without_managed_collisions_is_given_its_bags_back() -> None:
    features = BATCHES[0].sparse_features
    assert remapped(nn.Linear(1, 1), features) is features


def test_a_model_that_is_the_module_itself() -> None:
    managed = trained().tables
    assert list(collections(managed)) == ["_embedding_module"]
    features = BATCHES[0].sparse_features
    assert remapped(managed, features).keys() == features.keys()
    blocks = counted(trained())[1]
    prepared = prepare_(managed, blocks)
    assert type(prepared) is ManagedCollisionEmbeddingBagCollection
    assert isinstance(prepared._managed_collision_collection, ManagedCollisionCollection)
    assert type(merge_(prepared)._embedding_module) is EmbeddingBagCollection
