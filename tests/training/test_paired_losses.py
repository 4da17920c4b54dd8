"""Tests for whether a state is ahead of another by more than chance."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.data.task import Task, TrainTask, task_of
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.training.evaluate import LOSSES_PER_BATCH, evaluate, is_ahead, part_losses
from tests.tiny import make_batch, make_recipe

CPU = torch.device("cpu")
NUMBERS = st.floats(-2, 2, allow_nan=False, width=32)


def naive_lead(losses: Tensor, rival: Tensor) -> tuple[float, float]:
    """The mean of all samples' differences, each part's standing for its own; and its standard error."""
    pairs = [(n, theirs - own) for (n, own), (_, theirs) in zip(losses.tolist(), rival.tolist(), strict=True)]
    total = sum(n for n, _ in pairs)
    mean = sum(n * d for n, d in pairs) / total
    if len(pairs) == 1:
        return mean, 0.0
    squares = sum((n / total) ** 2 * (d - mean) ** 2 for n, d in pairs)
    return mean, math.sqrt(squares * len(pairs) / (len(pairs) - 1))


@given(st.lists(st.tuples(st.integers(1, 50), NUMBERS, NUMBERS), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_ahead_is_a_lead_of_more_than_one_standard_error(batches: list[tuple[int, float, float]]) -> None:
    losses = torch.tensor([(n, own) for n, own, _ in batches], dtype=torch.float64)
    rival = torch.tensor([(n, theirs) for n, _, theirs in batches], dtype=torch.float64)
    lead, error = naive_lead(losses, rival)
    if abs(lead - error) > 1e-9:
        assert is_ahead(losses, rival, Ranks()) == (lead > error)


@pytest.mark.parametrize(("gap", "expected"), [(0.1, True), (0.0, False), (-0.1, False)])
def test_one_part_has_no_error_and_the_lead_decides(gap: float, expected: bool) -> None:
    losses = torch.tensor([[7.0, 0.5]], dtype=torch.float64)
    assert is_ahead(losses, losses + torch.tensor([0.0, gap]), Ranks()) is expected


def of_parts(task: Task | nn.Module, batches: list[Batch], model: nn.Module) -> Tensor:
    """Losses of parts of a split, and that no mode has changed."""
    whole = TrainTask(model, task).train()
    found = part_losses(whole, batches, whole.task, CPU)
    assert whole.training
    assert found.dtype == torch.float64
    return found


@torch.no_grad()
def loss_of(task: Task, model: nn.Module, batch: Batch) -> float:
    """The loss of a batch, looked up by itself."""
    return float(task.loss(batch, task.outputs(model, batch)))


@pytest.mark.parametrize("sizes", [(64, 64), (5, 40), (1,), (3, 0, 17)])
def test_losses_of_parts_are_those_of_their_samples(sizes: tuple[int, ...]) -> None:
    model, criterion = make_recipe().model.eval(), nn.BCEWithLogitsLoss()
    batches = [slice_of(make_batch(max(size, 1), seed), 0, size) for seed, size in enumerate(sizes)]
    found = of_parts(criterion, batches, model)
    of_samples = [
        loss_of(task_of(criterion), model, one)
        for batch in batches
        for one in (slice_of(batch, place, place + 1) for place in range(len(batch.labels)))
    ]
    assert len(found) == sum(min(LOSSES_PER_BATCH, size) for size in sizes)
    assert found[:, 0].sum() == sum(sizes)
    ends = found[:, 0].cumsum(0).int().tolist()
    for (size, loss), end in zip(found.tolist(), ends, strict=True):
        own = of_samples[end - int(size) : end]
        assert loss == pytest.approx(sum(own) / len(own), rel=1e-5)


def test_losses_of_parts_average_to_that_of_the_split() -> None:
    recipe: Any = make_recipe()
    found = of_parts(nn.BCEWithLogitsLoss(), recipe.data.selection, recipe.model)
    whole = evaluate(TrainTask(recipe.model, recipe.task), recipe.data.selection, recipe.task, CPU)["loss"]
    assert float((found[:, 0] * found[:, 1]).sum() / found[:, 0].sum()) == pytest.approx(whole, rel=1e-6)


class RatedClicks(Task):
    """Two outputs by name, a constant beside them, and samples that weigh nothing."""

    kinds: ClassVar = {"click": "binary"}

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Outputs of several shapes."""
        return {"click": super().outputs(model, batch), "temperature": torch.tensor(2.0), "name": "clicks"}

    def loss(self, batch: Batch, outputs: dict[str, Any]) -> Tensor:
        """A weighted mean, which is 0 / 0 for samples that all weigh nothing."""
        weights = batch.dense_features[:, :1]
        logits, labels = outputs["click"].reshape(-1, 1) / outputs["temperature"], batch.labels.float().reshape(-1, 1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (weights * losses).sum() / weights.sum()


def test_outputs_by_name_are_cut_with_the_batch() -> None:
    model, batch = make_recipe().model.eval(), make_batch(32, 0)
    found = of_parts(RatedClicks(), [batch], model)
    first = slice_of(batch, 0, 2)
    assert found[0].tolist() == pytest.approx([2, loss_of(RatedClicks(), model, first)])


def test_a_batch_stays_whole_where_a_part_weighs_nothing() -> None:
    model, batch = make_recipe().model.eval(), make_batch(32, 0)
    batch.dense_features[:5, 0] = 0.0
    found = of_parts(RatedClicks(), [batch, make_batch(32, 1)], model)
    assert len(found) == 1 + LOSSES_PER_BATCH
    assert found[0].tolist() == pytest.approx([32, loss_of(RatedClicks(), model, batch)])


def test_two_batches_are_enough_to_see_a_lead() -> None:
    """Of two batches alone that differ, as those of a small split do, one error is as large as the lead or larger."""
    task, model = task_of(nn.BCEWithLogitsLoss()), make_recipe().model.eval()
    batches = [make_batch(512, 0), make_batch(512, 1)]
    losses = of_parts(task, batches, model)
    gaps = torch.linspace(-0.05, 0.1, LOSSES_PER_BATCH, dtype=torch.float64)
    rival = losses + torch.stack([torch.zeros(2 * LOSSES_PER_BATCH), torch.cat([gaps + 0.035, gaps - 0.035])], dim=1)
    assert is_ahead(losses, rival, Ranks())
    whole = [part.reshape(2, LOSSES_PER_BATCH, 2).mean(dim=1) for part in (losses, rival)]
    assert not is_ahead(*whole, Ranks())
