"""Magnitude pruning through the interface: exact sizes, stages that only ever drop, masks that hold in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.rivals.methods import METHODS, SizeNotMetError, magnitude, trained_scheme
from benchmarks.rivals.methods.magnitude import NUM_STAGES, stage_sizes
from benchmarks.rivals.methods.trained_scheme import row_blocks
from benchmarks.rivals.streams import train_on_validation
from dnis_torchrec import TrainTask
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.training.evaluate import evaluate
from tests.comparison.test_baselines_methods import CPU, DIM, make_task
from tests.tiny import Repeatable, make_batch, make_recipe

POINTERS = (40 + 8) + (12 + 8)
"""Compact: a byte a row, and eight for every 56 rows of a table."""
BYTES_PER_VALUE = 4 + 1


@pytest.mark.parametrize(("name", "num_stages"), [("magnitude", 1), ("magnitude-iterative", NUM_STAGES)])
def test_stages_prune_on_from_what_the_stage_before_left(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_stages: int
) -> None:
    seen: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []

    def watched(shards, num_keep: int) -> None:
        before = [part.weight != 0 for part in shards]
        keep_largest_(shards, num_keep)
        seen.append((num_keep, before, [part.weight != 0 for part in shards]))

    keep_largest_ = magnitude.keep_largest_
    monkeypatch.setattr(magnitude, "keep_largest_", watched)
    task = make_task(tmp_path, 4)
    counts, _ = row_blocks(task)
    num_seen = sum(int((~counts.never_seen(table)).sum()) for table in counts.counts) * DIM
    result = METHODS[name](task)
    num_keep = (task.embedding_bytes() - POINTERS) // BYTES_PER_VALUE
    assert [size for size, _, _ in seen] == stage_sizes(num_seen, num_keep, num_stages)
    assert len(seen) == num_stages
    for (_, before, _), (_, _, left) in zip(seen[1:], seen[:-1], strict=True):
        assert all(not bool((b & ~kept).any()) for b, kept in zip(before, left, strict=True))
    last = seen[-1][2]
    assert sum(int(mask.sum()) for mask in last) == num_keep == result.scheme.parameters
    for mask, table in zip(last, result.scheme.tables.values(), strict=True):
        weight = result.model.get_submodule(table.collection).embedding_bags[table.name].weight
        assert torch.equal(weight != 0, mask)
        assert not bool(weight[counts.never_seen(table.name)].any())


def test_stages_train_from_the_pruned_weights_with_the_early_stopping_of_a_whole_training(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = []

    def watched(*arguments, **options):
        rules.append(
            (options["patience"], options["max_epochs"], options["held"] is not None, "starts_trained" in options)
        )
        return train_plainly(*arguments, **options)

    train_plainly = magnitude.train_plainly
    for module in (magnitude, trained_scheme):
        monkeypatch.setattr(module, "train_plainly", watched)
    METHODS["magnitude-iterative"](make_task(tmp_path, 4, patience=1, max_epochs=1))
    assert rules == [(1, 1, True, False)] + NUM_STAGES * [(1, 1, True, True)]


def test_a_budget_beyond_all_values_keeps_those_that_were_seen(gloo, tmp_path: Path) -> None:
    task = make_task(tmp_path, 1)
    counts, _ = row_blocks(task)
    num_seen = sum(int((~counts.never_seen(table)).sum()) for table in counts.counts) * DIM
    num_paid_for = (task.embedding_bytes() - POINTERS) // BYTES_PER_VALUE
    assert METHODS["magnitude"](task).scheme.parameters == min(num_seen, num_paid_for)


@pytest.mark.parametrize("name", ["magnitude", "magnitude-iterative"])
@pytest.mark.parametrize("ratio", [2.3, 4, 7.9])
def test_as_many_values_are_kept_as_the_bytes_pay_for(gloo, tmp_path: Path, name: str, ratio: float) -> None:
    task = make_task(tmp_path, ratio)
    assert 0 <= task.embedding_bytes() - METHODS[name](task).embedding_bytes() < BYTES_PER_VALUE


@pytest.mark.parametrize("name", ["magnitude", "magnitude-iterative"])
def test_bytes_that_do_not_pay_for_one_value_are_refused(gloo, tmp_path: Path, name: str) -> None:
    smallest = POINTERS + BYTES_PER_VALUE
    task = make_task(tmp_path, make_task(tmp_path, 1).dense_bytes() / (smallest - 0.5))
    with pytest.raises(SizeNotMetError, match=f"expected at least {smallest} .*, got {smallest - 1}$"):
        METHODS[name](task)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
@pytest.mark.parametrize("name", ["magnitude", "magnitude-iterative"])
def test_rows_that_validation_alone_has_take_no_place_among_the_values_kept(
    gloo, tmp_path: Path, name: str, optimizer: str
) -> None:
    def on_both(dim: int | None) -> Recipe:
        recipe = make_recipe(embedding_dim=dim or DIM, optimizer=optimizer)
        few = Repeatable([make_batch(8, 0), make_batch(8, 1)])
        return train_on_validation(replace(recipe, data=replace(recipe.data, train=few)))

    task = make_task(tmp_path, 3, make=on_both)
    result, recipe = METHODS[name](task), on_both(None)
    selected = evaluate(TrainTask(result.model, recipe.loss), recipe.data.selection, recipe.loss, CPU)["loss"]
    assert selected == pytest.approx(result.selection_loss, abs=1e-6)
    assert 0 <= task.embedding_bytes() - result.embedding_bytes() < BYTES_PER_VALUE
