"""The search as methods of a comparison: each within its bytes, exported, loaded, and the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.frequency import count_frequencies
from dnis_torchrec.comparison.methods import METHODS, MethodTask, NotApplicableError, SizeNotMetError
from dnis_torchrec.comparison.methods.dnis import RATE_FACTORS
from dnis_torchrec.comparison.methods.method import MethodResult
from dnis_torchrec.comparison.settings import TrainingRules
from dnis_torchrec.comparison.streams import train_on_validation
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.search.budget import SizeOutOfReachError
from dnis_torchrec.search.config import SearchConfig
from dnis_torchrec.soft_selection.table_shards import table_configs
from dnis_torchrec.training.process_group import process_group
from tests import tiny

RATIO = 3.0


def run(
    name: str,
    folder: Path,
    ratio: float = RATIO,
    *,
    max_epochs: int = TrainingRules.max_epochs,
    trials: int | None = 1,
    searches: DataSplits | None = None,
    **changes: Any,
) -> MethodResult:
    def build(dim: int | None) -> Recipe:
        return replace(tiny.demo(None, seed=0, embedding_dim=dim), **changes)

    with process_group() as device:
        task = MethodTask(
            build=build,
            build_for_search=None if searches is None else lambda dim: replace(build(dim), data=searches),
            compression=ratio,
            seed=0,
            device=device,
            folder=folder,
            max_epochs=max_epochs,
            trials=trials,
        )
        return METHODS[name](task)


@pytest.mark.parametrize("name", ["dnis", "dnis-paper", "dnis-unrolled", "dnis-retrained"])
def test_a_result_is_within_its_bytes_and_nearly_uses_them(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path)
    dense = result.scheme.served_bytes("dense_fp32")
    assert 0.85 * dense / RATIO < result.embedding_bytes() <= dense / RATIO
    tables = dict(result.model.named_parameters())
    stored = sum(int((tables[k] != 0).sum()) for k in tables if ".embedding_bags." in k)
    assert stored == result.scheme.parameters


@pytest.mark.parametrize("max_epochs", [3, 7])
def test_a_search_takes_no_more_epochs_than_a_training_may(max_epochs: int, tmp_path: Path) -> None:
    result = run("dnis", tmp_path, max_epochs=max_epochs)
    assert result.settings["epochs"] <= max_epochs


def test_the_best_of_searches_at_several_rates_is_chosen_on_selection(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "all").mkdir()
    one = run("dnis-tuned", tmp_path / "one", max_epochs=3)
    assert one.trials == 1
    tuned = run("dnis-tuned", tmp_path / "all", max_epochs=3, trials=None)
    rate = tiny.demo(None).table_learning_rate
    factor = tuned.settings["table_rate_factor"]
    losses = {}
    for other in RATE_FACTORS:
        folder = tmp_path / f"{other}"
        folder.mkdir()
        losses[other] = run("dnis", folder, max_epochs=3, search_table_learning_rate=rate * other).selection_loss
    assert losses[1.0] == one.selection_loss
    assert len(set(losses.values())) > 1
    assert (tuned.selection_loss, factor) == min((loss, other) for other, loss in losses.items())
    assert tuned.trials == len(RATE_FACTORS) == 5
    assert tuned.seconds_of_trials > 2 * tuned.seconds
    assert list((tmp_path / "all").iterdir()) == []
    assert tuned.embedding_bytes() <= tuned.scheme.served_bytes("dense_fp32") / RATIO
    assert "initial_weights" not in tuned.settings


def test_a_search_is_tuned_over_initial_weights_too(tmp_path: Path) -> None:
    def redraw(number: int) -> nn.Module:
        torch.manual_seed(number)
        return tiny.make_model("dlrm")

    rate = tiny.demo(None).table_learning_rate
    losses = []
    for number, factor in enumerate((*RATE_FACTORS, *RATE_FACTORS[:2])):
        (tmp_path / f"{number}").mkdir()
        changes = {"search_table_learning_rate": rate * factor} | ({"model": redraw(number)} if number else {})
        losses.append(run("dnis", tmp_path / f"{number}", max_epochs=3, **changes).selection_loss)
    best = min(range(7), key=losses.__getitem__)
    assert len(set(losses)) == 7
    (tmp_path / "all").mkdir()
    tuned = run("dnis-tuned", tmp_path / "all", max_epochs=3, trials=7, redraw=redraw)
    assert tuned.selection_loss == losses[best]
    chosen = (tuned.settings["initial_weights"], tuned.settings["table_rate_factor"])
    assert chosen == (best, RATE_FACTORS[best % 5])
    assert tuned.trials == 7


def test_without_other_weights_there_are_no_more_searches_than_rates(tmp_path: Path) -> None:
    assert run("dnis-tuned", tmp_path, max_epochs=3, trials=16).trials == len(RATE_FACTORS)


def test_the_paper_prunes_single_values_and_never_releases(tmp_path: Path) -> None:
    result = run("dnis-paper", tmp_path)
    assert result.form == "csr_fp32"
    assert not all(table.is_block_structured for table in result.scheme.tables.values())


@pytest.mark.parametrize(("name", "warm_up"), [("dnis", 5), ("dnis-paper", 1), ("dnis-unrolled", 1)])
def test_without_pressure_both_levels_learn_from_the_second_epoch_on(
    name: str, warm_up: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[SearchConfig] = []

    def stop(recipe: Recipe, config: SearchConfig, *_: object) -> None:
        configs.append(config)
        raise SizeOutOfReachError("seen enough")

    monkeypatch.setattr("dnis_torchrec.comparison.methods.dnis.search", stop)
    with pytest.raises(SizeNotMetError):
        run(name, tmp_path, warm_up_epochs=5, ramp_epochs=2, release_epochs=4)
    (config,) = configs
    assert (config.warm_up_epochs, config.epochs) == (warm_up, 11)


def test_a_recipe_may_press_farther_than_it_is_asked_to(tmp_path: Path) -> None:
    result = run("dnis", tmp_path / "pressed", 2.0, least_compression=4.0)
    dense = result.scheme.served_bytes("dense_fp32")
    assert 0.85 * dense / 4 < result.embedding_bytes() <= dense / 4
    paper = run("dnis-paper", tmp_path / "paper", 2.0, least_compression=4.0)  # pruned only: to the size itself
    assert paper.embedding_bytes() > dense / 4


@pytest.mark.parametrize(
    ("name", "scope"),
    [("dnis", "table"), ("random", "table"), ("nis-me", "table"), ("dnis-paper", "global"), ("mde", "global")],
)
def test_blocks_have_the_recipes_scope_but_for_the_paper_and_for_popularity(
    name: str, scope: str, tmp_path: Path
) -> None:
    recipe = replace(tiny.demo(None), scope="table")
    tables = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), tables)
    expected = blocks_from_counts(counts, tables, num_blocks=recipe.num_blocks, scope=scope)
    num_kept = 0
    for table in run(name, tmp_path, max_epochs=3, scope=recipe.scope).scheme.tables.values():
        blocks = table.routing.all_blocks()
        kept = blocks < table.routing.num_blocks  # rows of blocks that lost all columns are in none
        assert torch.equal(blocks[kept], expected.routings[table.name].all_blocks()[kept])
        num_kept += int(kept.sum())
    assert num_kept > 0


def test_unrolled_is_another_gradient(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first, second = run("dnis-paper", tmp_path / "first"), run("dnis-unrolled", tmp_path / "second")
    assert first.selection_loss != second.selection_loss


def test_retraining_keeps_the_scheme_and_not_the_weights(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    (tmp_path / "anew").mkdir()
    found, anew = run("dnis", tmp_path / "found"), run("dnis-retrained", tmp_path / "anew")
    for name, table in found.scheme.tables.items():
        assert torch.equal(table.retained, anew.scheme.tables[name].retained)
    assert found.selection_loss != anew.selection_loss
    assert anew.seconds > 0


@pytest.mark.parametrize("name", ["dnis-retrained", "nis-se", "nis-me"])
def test_a_scheme_is_found_without_the_split_that_its_weights_then_train_on(name: str, tmp_path: Path) -> None:
    plain = tiny.demo(None)
    both = train_on_validation(plain)
    results = []
    for folder, recipe in ((tmp_path / "alone", plain), (tmp_path / "both", both)):
        folder.mkdir()
        results.append(run(name, folder, searches=plain.data, data=recipe.data))
    alone, with_validation = results
    assert with_validation.selection_loss != alone.selection_loss
    for table, found in alone.scheme.tables.items():
        assert torch.equal(with_validation.scheme.tables[table].retained, found.retained)


@pytest.mark.parametrize("name", ["dnis", "dnis-paper"])
def test_a_size_out_of_reach_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(SizeNotMetError, match="embedding_bytes: expected at least"):
        run(name, tmp_path, ratio=60)


def test_what_no_method_foresees_is_no_reason_to_leave_a_row_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another_backend(*_: object) -> None:
        raise NotImplementedError("Could not run 'fbgemm::dense_embedding' with arguments from the 'CUDA' backend")

    monkeypatch.setattr("dnis_torchrec.comparison.methods.dnis.search", of_another_backend)
    with pytest.raises(NotImplementedError, match="Could not run") as raised:
        run("dnis", tmp_path)
    assert not isinstance(raised.value, NotApplicableError)


def test_unrolled_says_that_fused_tables_are_not_for_it(tmp_path: Path) -> None:
    with pytest.raises(NotApplicableError, match="fused"):
        run("dnis-unrolled", tmp_path, table_optimizer="rowwise_adagrad")
