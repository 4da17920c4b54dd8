"""Tests for whether a state is ahead of another by more than chance."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from dnis_torchrec.data.recipe import TrainTask
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.training.evaluation import evaluate
from dnis_torchrec.training.paired_losses import batch_losses, is_ahead
from tests.tiny import make_recipe

NUMBERS = st.floats(-2, 2, allow_nan=False, width=32)


def naive_lead(losses: Tensor, rival: Tensor) -> tuple[float, float]:
    """The mean of all samples' differences, each batch's standing for its own; and its standard error."""
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
def test_one_batch_has_no_error_and_the_lead_decides(gap: float, expected: bool) -> None:
    losses = torch.tensor([[7.0, 0.5]], dtype=torch.float64)
    assert is_ahead(losses, losses + torch.tensor([0.0, gap]), Ranks()) is expected


def test_the_losses_of_batches_average_to_that_of_the_split_and_the_mode_stays() -> None:
    recipe: Any = make_recipe()
    model = TrainTask(recipe.model, nn.BCEWithLogitsLoss()).train()
    found = batch_losses(model, recipe.data.selection, torch.device("cpu"))
    whole = evaluate(model, recipe.data.selection, recipe.task, torch.device("cpu"))["loss"]
    assert len(found) == len(list(recipe.data.selection)) > 1
    assert float((found[:, 0] * found[:, 1]).sum() / found[:, 0].sum()) == pytest.approx(whole, rel=1e-6)
    assert model.training
