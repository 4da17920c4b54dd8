"""Tables that train in codes: after every step they are what straight-through training by hand comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.compress import measure_, packed_collections
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.codes import WIDTHS, decode_rows, unpacked_fields
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import prepare_, unshard_
from dnis_torchrec.serving.packed import pack_rows, split_blocks
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.rounded import RoundedTables
from dnis_torchrec.training.shard import shard
from dnis_torchrec.training.state import snapshot, take_
from tests import models
from tests.models import kernels_of, shard_as
from tests.reference import (
    RowWiseAdagradByHand,
    StraightThrough,
    distance,
    latent_tables,
    loss_by_hand,
    rounded,
    scheme_of,
    tables_of,
    without_codes,
)
from tests.tiny import make_recipe

CPU = torch.device("cpu")
STEPS = 4
ROWS = {"user": 9, "genre": 6, "one": 1}
FEATURES = {"user": ["user", "friends"], "genre": ["genre"], "one": ["one"]}
"""Two features share a table; friends and genre are multi-hot."""
ROUTINGS = {
    "user": RowRouting(9, 3, boundaries=torch.tensor([0, 2, 5, 8])),
    "genre": RowRouting.from_map(torch.tensor([1, 0, 2, 0, 1, 0]), 2),
    "one": RowRouting(1, 1, boundaries=torch.tensor([0, 1])),
}
"""Rows of no block among them."""


def configs(dim: int = 8) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=FEATURES[name],
            pooling=PoolingType.MEAN if name == "genre" else PoolingType.SUM,
        )
        for name, rows in ROWS.items()
    ]


def collection(dim: int = 8, seed: int = 0) -> EmbeddingBagCollection:
    torch.manual_seed(seed)
    tables = EmbeddingBagCollection(tables=configs(dim))
    for bag in tables.embedding_bags.values():
        nn.init.normal_(bag.weight)
    return tables


def features(seed: int, batch_size: int = 5) -> KeyedJaggedTensor:
    """Bags of all features; not every row of a table is in them."""
    generator = torch.Generator().manual_seed(seed)
    rows = {name: rows for table, rows in ROWS.items() for name in FEATURES[table]}
    lengths = {
        name: torch.randint(0, 4 if name in ("friends", "genre") else 2, (batch_size,), generator=generator)
        for name in rows
    }
    ids = [torch.randint(0, rows[name], (int(own.sum()),), generator=generator) for name, own in lengths.items()]
    return KeyedJaggedTensor(list(rows), torch.cat(ids), lengths=torch.cat(list(lengths.values())))


def counts() -> FrequencyCounts:
    drawn = {name: torch.arange(rows, 0, -1) for name, rows in ROWS.items()}
    return FrequencyCounts(drawn, dict.fromkeys(("user", "friends", "genre", "one"), 3), 50)


def blocks() -> RowBlocks:
    """Blocks of alpha, for tables of D = 8."""
    return blocks_from_counts(counts(), configs(), num_blocks=2)


def step_(model: nn.Module, optimizer: torch.optim.Optimizer | None, held: RoundedTables, seed: int) -> None:
    model.zero_grad()
    distance(model(features(seed)).to_dict()).backward()
    if optimizer is not None:
        optimizer.step()
    held.after_step_()


def assert_follows(model: nn.Module, held: RoundedTables, oracle: StraightThrough) -> None:
    expected = oracle.weights()
    for name, weight in tables_of(model).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4)  # a step of 16 bits, where they tie
        assert weight.equal(rounded(held.scheme.tables[name], weight))
    with latent_tables(model, held):
        for name, latent in tables_of(model).items():
            torch.testing.assert_close(latent, oracle.latents[name].data, rtol=0, atol=1e-5)


bits = st.one_of(st.sampled_from([(0,), (32,), (1,), (16,), (0, 32)]), st.just(WIDTHS))


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 4]), bits, st.sampled_from([torch.optim.SGD, torch.optim.Adam]))
def test_whole_tables_follow_latent_weights(
    seed: int, dim: int, widths: tuple[int, ...], kind: type[torch.optim.Optimizer]
) -> None:
    model = collection(dim, seed)
    scheme = scheme_of(configs(dim), ROUTINGS, seed=seed, widths=widths)
    oracle, held = StraightThrough(scheme, tables_of(model)), RoundedTables(model, scheme)
    own, theirs = kind(model.parameters(), lr=0.2), kind(oracle.latents.values(), lr=0.2)
    for at in range(seed, seed + STEPS):
        step_(model, own, held, at)
        oracle.step(loss_by_hand(configs(dim), features(at)), theirs)
        assert_follows(model, held, oracle)


FUSED = {
    "table_wise": (torch.optim.SGD, torch.optim.SGD),
    "column_wise": (torch.optim.SGD, torch.optim.SGD),
    "table_wise adagrad": (RowWiseAdagrad, RowWiseAdagradByHand),
    "data_parallel": (None, torch.optim.Adam),
}
"""Sharding type -> optimizer of the tables' kernel, and what it does by hand; both at rate 1."""


@pytest.mark.parametrize("kind", FUSED)
def test_kernels_follow_latent_weights(gloo, kind: str) -> None:
    fused, by_hand = FUSED[kind]
    model = models.shard_as(collection(), kind.split()[0], fused=fused)
    scheme = scheme_of(configs(), ROUTINGS, seed=3)
    oracle, held = StraightThrough(scheme, tables_of(model)), RoundedTables(model, scheme)
    theirs = by_hand(list(oracle.latents.values()), lr=1.0)
    own = None if fused else torch.optim.Adam(model.parameters(), lr=1.0)
    before = oracle.weights()
    for seed in range(STEPS):
        step_(model, own, held, seed)
        oracle.step(loss_by_hand(configs(), features(seed)), theirs)
        assert_follows(model, held, oracle)
    assert not before["user"].equal(tables_of(model)["user"])


@pytest.mark.parametrize("kind", ["plain", "table_wise", "data_parallel"])
def test_a_prepared_model_follows_latent_weights(gloo, kind: str) -> None:
    model = prepare_(collection(), blocks())
    rate = 0.2 if kind == "plain" else 1.0
    if kind != "plain":
        model = models.shard_as(model, kind)
    scheme = scheme_of(configs(), blocks().routings, seed=3)
    oracle, held = StraightThrough(scheme, tables_of(model)), RoundedTables(model, scheme)
    dense = [] if kind == "table_wise" else list(model.parameters())
    own = torch.optim.SGD(dense, lr=rate) if dense else None
    theirs = torch.optim.SGD(oracle.latents.values(), lr=rate)
    for seed in range(STEPS):
        step_(model, own, held, seed)
        oracle.step(loss_by_hand(configs(), features(seed)), theirs)
        assert_follows(model, held, oracle)


def trained(scheme: MixedDimensionScheme) -> tuple[EmbeddingBagCollection, RoundedTables, dict[str, Tensor]]:
    """A collection after some steps in codes, and its latent weights."""
    model = collection()
    held = RoundedTables(model, scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for seed in range(STEPS):
        step_(model, optimizer, held, seed)
    with latent_tables(model, held):
        return model, held, tables_of(model)


def assert_holds(model: nn.Module, scheme: MixedDimensionScheme, latents: Mapping[str, Tensor]) -> None:
    for name, weight in tables_of(model).items():
        assert weight.equal(rounded(scheme.tables[name], latents[name])), name


def test_tables_stay_as_they_are_rounded_once_nothing_is_rounded_any_more() -> None:
    """And nobody notes what is looked up, for no step will round it."""
    scheme = scheme_of(configs(), ROUTINGS)
    sharded = shard_as(collection(), "table_wise")
    held = RoundedTables(sharded, scheme)
    before, kernels = tables_of(sharded), kernels_of(sharded)
    assert all(kernel.emb_module._forward_pre_hooks for kernel in kernels)
    held.stop_()
    assert not any(kernel.emb_module._forward_pre_hooks for kernel in kernels)
    assert all(weight.equal(before[name]) for name, weight in tables_of(sharded).items())
    assert_holds(sharded, held.scheme, before)
    for module in collections(sharded).values():
        for own in local_shards(module):
            own.weight.add_(0.25)
    moved = tables_of(sharded)
    held.after_step_()
    assert all(weight.equal(moved[name]) for name, weight in tables_of(sharded).items())


def test_a_checkpoint_holds_residuals_and_codes(tmp_path: Path) -> None:
    model, held, _ = trained(scheme_of(configs(), ROUTINGS, seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    saved = snapshot(model, held.tensors())
    scheme = held.scheme
    step_(model, optimizer, held, 7)
    after = tables_of(model)
    other = collection(seed=9)
    resumed = RoundedTables(other, scheme_of(configs(), ROUTINGS, seed=8))
    take_(other, saved, resumed.tensors())
    resumed.finish_load_()
    for name, table in resumed.scheme.tables.items():
        assert table.num_retained == scheme.tables[name].num_retained
    wanted = scheme.to_tensors()
    assert all(value.equal(wanted[name]) for name, value in resumed.scheme.to_tensors().items())
    step_(other, torch.optim.SGD(other.parameters(), lr=0.2), resumed, 7)
    assert all(weight.equal(after[name]) for name, weight in tables_of(other).items())


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_training_in_codes_lowers_the_loss_and_packs_as_it_is(gloo, tmp_path: Path, optimizer: str) -> None:
    recipe = make_recipe(optimizer=optimizer)
    task = TrainTask(recipe.model, recipe.loss)
    model, rest = shard(task, recipe, CPU)
    train_plainly(model, rest, recipe, CPU, max_epochs=4, patience=2)
    plain = unshard_(model).model
    found = measure_(plain, recipe.data.train, loss=recipe.loss, num_blocks=2).allocate(compression=12)
    model, rest = shard(TrainTask(plain, recipe.loss), recipe, CPU)
    held = RoundedTables(model, found.scheme)
    rounded_loss = evaluate(model, recipe.data.selection, recipe.loss, CPU)["loss"]
    done = train_plainly(model, rest, recipe, CPU, max_epochs=4, patience=4, held=held, starts_trained=True)
    assert done.best_epoch >= 0
    assert done.selection_loss < rounded_loss - 0.002
    assert evaluate(model, recipe.data.selection, recipe.loss, CPU)["loss"] == pytest.approx(done.selection_loss)
    trained_tables = tables_of(model)
    with latent_tables(model, held):
        latents = tables_of(model)
    assert_holds(model, held.scheme, latents)
    plain = unshard_(model).model
    packed = packed_collections(plain, held.scheme)
    for name, weight in trained_tables.items():
        table = held.scheme.tables[name]
        assert dense_of(table, weight).equal(weight)
        ids = torch.arange(table.num_embeddings)
        lengths = torch.cat([torch.full_like(ids, feature == name) for feature in ("user", "genre")])
        one_each = KeyedJaggedTensor(["user", "genre"], ids, lengths=lengths)
        torch.testing.assert_close(packed[table.collection](one_each)[name], weight, rtol=0, atol=1e-6)


def dense_of(table: TableScheme, weight: Tensor) -> Tensor:
    """A table packed, and unpacked again."""
    dense = torch.zeros_like(weight)
    sizes = table.routing.row_counts()
    packed = pack_rows(table, [weight], sizes)
    for block, rows in enumerate(split_blocks(packed, sizes, table.codes.bits)):
        own = (table.routing.all_blocks() == block).nonzero().flatten()
        fields = unpacked_fields(rows, table.codes.bits[block])
        dense[own] = decode_rows(fields, torch.full_like(own, block), table.codes)
    return dense


def nan(scheme: MixedDimensionScheme, model: EmbeddingBagCollection) -> MixedDimensionScheme:
    model.embedding_bags["genre"].weight.data[4, 2] = float("nan")
    return scheme


def renamed(scheme: MixedDimensionScheme, model: EmbeddingBagCollection) -> MixedDimensionScheme:
    del model
    return MixedDimensionScheme({"users": replace(scheme.tables["user"], name="users")})


def doubles(scheme: MixedDimensionScheme, model: EmbeddingBagCollection) -> MixedDimensionScheme:
    model.double()
    return scheme


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (nan, ValueError, "^table 'genre': expected finite values, got nan in block 1, column 2"),
        (renamed, ValueError, "^table 'users': expected a known table"),
        (doubles, TypeError, r"^table 'user': expected float32 weights, got torch\.float64"),
        (lambda scheme, _: without_codes(scheme), ValueError, "^table 'user': expected bits, scales and shifts"),
        (
            lambda *_: scheme_of(configs(4), ROUTINGS),
            ValueError,
            r"^table 'user': expected a scheme of N, D = \(9, 8\), got \(9, 4\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_table_is_rounded(
    spoil: Callable[[MixedDimensionScheme, nn.Module], MixedDimensionScheme], error: type[Exception], message: str
) -> None:
    model = collection()
    scheme = spoil(scheme_of(configs(), ROUTINGS), model)
    before = tables_of(model)
    with pytest.raises(error, match=message):
        RoundedTables(model, scheme)
    assert all(weight.nan_to_num().equal(before[name].nan_to_num()) for name, weight in tables_of(model).items())
