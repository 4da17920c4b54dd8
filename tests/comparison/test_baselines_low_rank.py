"""The low-rank baseline: the cut of a rotated model, trained on only where that helps, through the one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.rivals.methods import METHODS, NotApplicableError, SizeNotMetError, low_rank, trained_scheme
from dnis_torchrec import TrainTask
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import PlainTraining, train_plainly
from dnis_torchrec.training.shard import set_learning_rates_
from examples.models import FactorizationMachine, NeuMF, build_neumf_tables
from tests.comparison.test_baselines_methods import CPU, build, make_task, served
from tests.tiny import ROWS, make_batch, make_collection, make_recipe


def factorization_machine(embedding_dim: int | None) -> Recipe:
    """The tiny recipe's data with a model that may be rotated."""
    torch.manual_seed(0)
    recipe = build(embedding_dim)
    return replace(recipe, model=FactorizationMachine(make_collection(embedding_dim or 16)))


def cross_layers(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """A recipe whose model no axes are known for."""
    del data
    return make_recipe("dlrm_dcn", seed=seed, embedding_dim=embedding_dim)


@pytest.mark.parametrize("make", [factorization_machine, build], ids=["fm", "torchrec's DLRM"])
def test_a_result_has_the_bytes_of_uniform_and_serves_what_was_selected(
    make: Callable[[int | None], Recipe], gloo, tmp_path: Path
) -> None:
    task = make_task(tmp_path, 4, make=make)
    result = METHODS["low-rank"](task)
    assert result.embedding_bytes() <= 1.02 * task.embedding_bytes() < result.embedding_bytes() + 4 * 52 + 4
    assert {int(table.dims.max()) for table in result.scheme.tables.values()} == {3}
    recipe = make_recipe()
    loss = evaluate(TrainTask(result.model, recipe.loss), recipe.data.selection, recipe.loss, CPU)["loss"]
    assert loss == pytest.approx(result.selection_loss, abs=1e-6)
    batch = make_batch(32, 9)
    with torch.no_grad():
        expected = result.model(batch.dense_features, batch.sparse_features)
        again = served(result, tmp_path / "artifact")(batch.dense_features, batch.sparse_features)
    torch.testing.assert_close(again, expected, atol=1e-6, rtol=0)


def test_the_cut_itself_is_kept_where_training_on_does_not_help(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_no_rate_that_helps(model, optimizer, *, held=None, **options) -> PlainTraining:
        if held is not None:
            set_learning_rates_(model, optimizer, tables=10.0, dense=10.0, rows=10.0)
        return train_plainly(model, optimizer, held=held, **options)

    monkeypatch.setattr(low_rank, "train_plainly", at_no_rate_that_helps)
    result = METHODS["low-rank"](make_task(tmp_path, 4, make=factorization_machine))
    recipe = make_recipe()
    loss = evaluate(TrainTask(result.model, recipe.loss), recipe.data.selection, recipe.loss, CPU)["loss"]
    assert loss == pytest.approx(result.selection_loss, abs=1e-6)
    assert result.settings["trained_on"] == "False"


def test_a_model_that_may_not_be_rotated_is_refused_before_training(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (low_rank, trained_scheme):
        monkeypatch.setattr(module, "train_plainly", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(NotImplementedError, match="supported are models that may be rotated"):
        METHODS["low-rank"](make_task(tmp_path, 4, make=lambda dim: cross_layers(None, embedding_dim=dim)))


def test_a_model_of_which_some_tables_may_not_be_rotated_is_refused_before_training(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their first columns would be any columns."""

    def turning_its_mlp_alone(embedding_dim: int | None) -> Recipe:
        tables = build_neumf_tables(ROWS, embedding_dim or 16)
        return replace(build(embedding_dim), model=NeuMF(tables, tower=(8, 4), turns_gmf=False))

    for module in (low_rank, trained_scheme):
        monkeypatch.setattr(module, "train_plainly", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(
        NotApplicableError, match=r"every table of them, got \['gmf_user', 'gmf_genre'\] that may not be"
    ):
        METHODS["low-rank"](make_task(tmp_path, 4, make=turning_its_mlp_alone))


def test_one_dimension_is_above_a_size(tmp_path: Path) -> None:
    with pytest.raises(SizeNotMetError, match=r"low-rank: expected at least 244, .* embedding_dim 1, got 195"):
        METHODS["low-rank"](make_task(tmp_path, 17, make=factorization_machine))
