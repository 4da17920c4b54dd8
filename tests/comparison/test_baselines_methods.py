"""Every method without an upper level, through the one interface: its size, what it reads, its export, its errors."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.rivals.methods import (
    METHODS,
    MethodResult,
    MethodTask,
    SizeNotMetError,
    low_rank,
    magnitude,
    trained_scheme,
)
from benchmarks.rivals.methods.nis.supernet import Supernet
from dnis_torchrec import TrainTask, export
from dnis_torchrec.artifact.export import drop_in_
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.training.evaluate import evaluate
from tests.tiny import ROWS, BagsOnly, Repeatable, make_batch, make_collection, make_recipe

CPU = torch.device("cpu")
DIM = 16
SIZED = ("uniform-grid", "random", "mde", "magnitude", "magnitude-iterative")
PLAIN = ("dense", "no-embeddings", "uniform", *SIZED)
"""Methods that learn on training data alone."""


def build(embedding_dim: int | None, **how) -> Recipe:
    """A fresh tiny recipe of whose validation and test splits nothing but bags can be read."""
    recipe = make_recipe(embedding_dim=embedding_dim or DIM, **how)
    return replace(recipe, data=replace(recipe.data, validation=BagsOnly(), test=BagsOnly()))


def make_task(folder: Path, ratio: float, *, make: Callable[[int | None], Recipe] = build, **fields) -> MethodTask:
    """A cell that trains in a fraction of a second."""
    defaults = {"seed": 0, "patience": 1, "max_epochs": 2, "trials": 2}
    return MethodTask(build=make, compression=ratio, device=CPU, folder=folder, **defaults | fields)


def saying_otherwise(batch: Batch) -> Batch:
    """Bags of the same lengths with other ids, and the opposite labels."""
    features = batch.sparse_features
    ids = features.values().flip(0) % min(ROWS.values())
    other = KeyedJaggedTensor(keys=features.keys(), values=ids, lengths=features.lengths())
    return replace(batch, sparse_features=other, labels=1 - batch.labels)


def served(result: MethodResult, artifact: Path) -> nn.Module:
    """The result's model with every weight lost and taken back from its artifact, tables in their serving form."""
    export(result.model, result.scheme, artifact)
    lost = copy.deepcopy(result.model)
    with torch.no_grad():
        for parameter in lost.parameters():
            parameter.fill_(7.0)
    return drop_in_(lost, artifact)


@pytest.mark.parametrize("name", PLAIN)
def test_a_result_is_within_its_budget_and_serves_what_was_selected(gloo, tmp_path: Path, name: str) -> None:
    for ratio in (1.7, 4.0):
        task = make_task(tmp_path, ratio)
        result = METHODS[name](task)
        if name == "dense":
            assert result.embedding_bytes() == task.dense_bytes()
        elif name == "no-embeddings":
            assert result.scheme.parameters == 0
        elif name == "uniform":
            assert task.embedding_bytes() - 4 * 52 < result.embedding_bytes() <= 1.02 * task.embedding_bytes()
        else:
            assert 0.6 * task.embedding_bytes() < result.embedding_bytes() <= task.embedding_bytes()
        recipe = make_recipe()
        selection_loss = evaluate(TrainTask(result.model, recipe.loss), recipe.data.selection, recipe.loss, CPU)["loss"]
        assert selection_loss == pytest.approx(result.selection_loss, abs=1e-6)
        assert 0 < result.seconds <= result.seconds_of_trials + 1e-3
        batch = make_batch(32, 9)
        assert result.embedding_bytes() == result.scheme.served_bytes(result.form) + result.extra_bytes
        if name == "no-embeddings":  # there is nothing to serve
            with pytest.raises(ValueError, match=r"^export: expected a scheme that retains a value, got none"):
                served(result, tmp_path / f"artifact_{ratio}")
            continue
        with torch.no_grad():
            expected = result.model(batch.dense_features, batch.sparse_features)
            again = served(result, tmp_path / f"artifact_{ratio}")(batch.dense_features, batch.sparse_features)
        torch.testing.assert_close(again, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["uniform", "mde", "random", "magnitude-iterative"])
def test_fused_tables_train_too(gloo, tmp_path: Path, name: str) -> None:
    task = make_task(tmp_path, 3, make=lambda dim: build(dim, optimizer="rowwise_adagrad"), trials=1)
    result = METHODS[name](task)
    assert result.selection_loss < 0.75
    for table in result.scheme.tables.values():
        bag = result.model.get_submodule(table.collection).embedding_bags[table.name]
        dropped = ~torch.cat([table.retained, torch.zeros(1, table.embedding_dim, dtype=torch.bool)])
        assert not bool(bag.weight[dropped[table.routing.all_blocks()]].any())


@pytest.mark.parametrize("name", SIZED)
def test_an_impossible_size_is_refused_before_anything_is_trained(
    gloo, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (trained_scheme, magnitude):
        monkeypatch.setattr(module, "train_plainly", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SizeNotMetError, match="expected at least"):
        METHODS[name](make_task(tmp_path, 60))


@pytest.mark.parametrize("name", [*(name for name in PLAIN if name != "mde"), "nis-me"])  # mde divides sums itself
def test_bags_that_the_plain_model_could_not_pool_are_refused_before_anything_is_trained(
    gloo, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weighted(dim: int | None) -> Recipe:
        return replace(build(dim), model=nn.ModuleDict({"tables": make_collection(dim or DIM, is_weighted=True)}))

    for module, train in ((trained_scheme, "train_plainly"), (magnitude, "train_plainly"), (Supernet, "train")):
        monkeypatch.setattr(module, train, lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(ValueError, match="table 'genre': expected SUM pooling of bags with weights, got MEAN"):
        METHODS[name](make_task(tmp_path, 2, make=weighted))


@pytest.mark.parametrize("name", [*PLAIN, "low-rank", "nis-me", "nis-se", "dnis"])
def test_tables_of_one_name_are_refused_before_anything_is_trained(
    gloo, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(dim: int | None) -> Recipe:
        model = nn.ModuleDict({side: make_collection(dim or DIM) for side in ("left", "right")})
        return replace(build(dim), model=model)

    for module in (trained_scheme, magnitude, low_rank):
        monkeypatch.setattr(module, "train_plainly", lambda *_, **__: pytest.fail("trained"))
    message = r"table names: expected distinct names over all collections, got \['genre', 'user'\]; rename tables"
    with pytest.raises(ValueError, match=message):
        METHODS[name](make_task(tmp_path, 2, make=twice))


class Dropping(nn.Module):
    """A model with dropout, so that training itself draws random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense_features: torch.Tensor, sparse_features) -> torch.Tensor:
        return nn.functional.dropout(self.model(dense_features, sparse_features), 0.3, self.training)


@pytest.mark.parametrize("name", ["random", "mde", "magnitude"])
def test_the_same_seed_gives_the_same_result(gloo, tmp_path: Path, name: str) -> None:
    def dropping(dim: int | None) -> Recipe:
        recipe = build(dim)
        torch.seed()  # a recipe may leave the global generator anywhere
        return replace(recipe, model=Dropping(recipe.model))

    first, second = (METHODS[name](make_task(tmp_path, 2, make=dropping)) for _ in range(2))
    assert first.selection_loss == second.selection_loss
    assert first.settings == second.settings
    assert first.trials == second.trials == (1 if name == "magnitude" else 2)
    assert first.seconds_of_trials >= first.seconds


def with_short_bags(batch: Batch) -> Batch:
    """The batch with the first genre of every bag alone."""
    user, genre = batch.sparse_features["user"], batch.sparse_features["genre"]
    lengths = genre.lengths().clamp(max=1)
    first = genre.values()[genre.offsets()[:-1][lengths > 0]]
    features = KeyedJaggedTensor(
        keys=["user", "genre"],
        values=torch.cat([user.values(), first]),
        lengths=torch.cat([user.lengths(), lengths.to(user.lengths().dtype)]),
    )
    return replace(batch, sparse_features=features)


@pytest.mark.parametrize("part", ["validation", "selection", "test"])
@pytest.mark.parametrize("name", ["mde", "nis-me", "random", "dnis"])
def test_a_feature_may_hold_several_ids_in_one_split_alone(gloo, tmp_path: Path, name: str, part: str) -> None:
    def one_split(dim: int | None) -> Recipe:
        recipe = make_recipe(embedding_dim=dim or DIM)
        others = {"train", "validation", "selection", "test"} - {part}
        short = {own: Repeatable([with_short_bags(b) for b in getattr(recipe.data, own)]) for own in others}
        return replace(recipe, data=replace(recipe.data, **short))

    result = METHODS[name](make_task(tmp_path, 2, make=one_split, trials=1, max_epochs=3))
    recipe = one_split(None)
    assert evaluate(TrainTask(result.model, recipe.loss), recipe.data.test, recipe.loss, CPU)["loss"] > 0


@pytest.mark.parametrize("name", ["dense", "random", "mde", "magnitude", "nis-se", "dnis"])
def test_seconds_are_those_of_training_whatever_the_data_takes_to_load(gloo, tmp_path: Path, name: str) -> None:
    loading = 100.0
    clock, loaded = time.monotonic, []

    def loads(dim: int | None) -> Recipe:
        loaded.append(loading)
        return make_recipe(embedding_dim=dim or DIM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock() + sum(loaded))
        result = METHODS[name](make_task(tmp_path, 2, make=loads, max_epochs=3))
    assert 0 < result.seconds <= result.seconds_of_trials < loading


@pytest.mark.parametrize("name", ["dnis", "dnis-paper", "dnis-unrolled"])
def test_a_search_comes_to_the_same_whatever_the_test_split_says(gloo, tmp_path: Path, name: str) -> None:
    """It reads that split to check its labels and the lengths of its bags; of other methods the split is `BagsOnly`."""
    results = []
    for part, says_otherwise in (("as it is", False), ("otherwise", True)):
        (tmp_path / part).mkdir()

        def make(dim: int | None, says_otherwise: bool = says_otherwise) -> Recipe:
            recipe = make_recipe(embedding_dim=dim or DIM)
            test = [saying_otherwise(batch) if says_otherwise else batch for batch in recipe.data.test]
            return replace(recipe, data=replace(recipe.data, test=Repeatable(test)))

        results.append(METHODS[name](make_task(tmp_path / part, 2, make=make, max_epochs=3)))
    first, second = results
    assert first.selection_loss == second.selection_loss
    for own, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_random_search_draws_by_the_seed(gloo, tmp_path: Path) -> None:
    drawn = [METHODS["random"](make_task(tmp_path, 2, seed=seed, trials=1)).settings for seed in (0, 1)]
    assert drawn[0] != drawn[1]
