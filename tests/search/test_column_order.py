"""Scores of all orders against a value-by-value oracle; lambda that is never negative grows, shrinks, leaves zero."""

from __future__ import annotations

import pytest
import torch

from dnis_torchrec.search.column_order import (
    ADAPTATION,
    CORRECTED_AT_ONCE,
    FIRST_PRESSURE,
    LOWEST_MEAN,
    AlphaOrder,
    FreeImportanceOrder,
    ImportanceOrder,
    RampState,
)
from dnis_torchrec.soft_selection.alpha import Alpha

COSTS = {2: torch.tensor([3.0, 1.0]), 3: torch.tensor([10.0])}


def make_order(column_sharing: float = 0.0) -> tuple[Alpha, AlphaOrder]:
    alpha = Alpha({2: (2, 2), 3: (1, 3)})
    alpha.of(2).copy_(torch.tensor([[1.0, 0.5], [0.25, 0.75]]))
    alpha.of(3).copy_(torch.tensor([[0.1, 0.2, 0.3]]))
    return alpha, AlphaOrder(alpha, COSTS, column_sharing=column_sharing)


def next_pressure(now: float, excess: float) -> float:
    _, order = make_order()
    return order.next_pressure(now, ramp_at(0.5 + excess))


def ramp_at(mean: float, *, line: float = 0.5, progress: float = 0.5) -> RampState:
    return RampState(progress=progress, mean=mean, line=line, mean_gradient=7.0, learning_rate=0.01)


@pytest.mark.parametrize("column_sharing", [0.0, 3.0])
def test_scores_are_scaled_alphas_with_their_blocks_mean_beside(column_sharing: float) -> None:
    alpha, order = make_order(column_sharing)
    scales = {2: torch.tensor([[1.0, 2.0], [3.0, 6.0]]), 3: torch.tensor([[100.0, 200.0, 600.0]])}
    order.scale_columns(scales)
    for dim, scale in scales.items():
        scaled = [
            [float(a) * float(s / scale.mean()) for a, s in zip(*rows, strict=True)]
            for rows in zip(alpha.of(dim), scale, strict=True)
        ]
        expect_shared(order.scores(dim), scaled, COSTS[dim].tolist(), column_sharing)


@pytest.mark.parametrize("column_sharing", [0.0, 3.0])
@pytest.mark.parametrize("by_importance", [ImportanceOrder, FreeImportanceOrder])
def test_scores_are_losses_over_costs_with_their_blocks_mean_beside(
    by_importance: type[FreeImportanceOrder], column_sharing: float
) -> None:
    """In the order of importance: alpha squared times the variance of its gradients +g and -g: g squared."""
    alpha, _ = make_order()
    order = by_importance(alpha, COSTS, ramp_steps=100, column_sharing=column_sharing)
    gradients = {2: torch.tensor([[1.0, 2.0], [3.0, 0.0]]), 3: torch.tensor([[1.0, 5.0, 2.0]])}
    for step in range(2000):
        order.observe({dim: gradient * (-1) ** step for dim, gradient in gradients.items()})
    for dim, gradient in gradients.items():
        costs = COSTS[dim].tolist()
        lost = [
            [float(a * g) ** 2 / cost for a, g in zip(*rows, strict=True)]
            for *rows, cost in zip(alpha.of(dim), gradient, costs, strict=True)
        ]
        expect_shared(order.scores(dim), lost, costs, column_sharing, rel=0.01)


def expect_shared(
    scores: torch.Tensor, own: list[list[float]], costs: list[float], column_sharing: float, rel: float = 1e-6
) -> None:
    for row, values in enumerate(own):
        for column, value in enumerate(values):
            of_all = sum(cost * other[column] for cost, other in zip(costs, own, strict=True)) / sum(costs)
            assert float(scores[row, column]) == pytest.approx(value + column_sharing * of_all, rel=rel)


def test_tables_of_one_dim_are_not_judged_by_larger_scales_than_those_of_another() -> None:
    """Embeddings of different D are trained to different sizes: a scale counts beside the others of its D."""
    alpha, order = make_order()
    for dim in alpha.dims:
        alpha.of(dim).fill_(1.0)
    order.scale_columns({2: torch.full((2, 2), 0.01), 3: torch.full((1, 3), 50.0)})
    assert order.scores(2).flatten().tolist() == pytest.approx([1.0] * 4)
    assert order.scores(3).flatten().tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("now", [FIRST_PRESSURE, 2.0])
def test_lambda_grows_above_the_line_and_shrinks_on_it_by_a_share_of_itself(now: float) -> None:
    assert next_pressure(now, 1e-6) == pytest.approx(now * (1 + ADAPTATION))
    assert next_pressure(now, 0.0) == next_pressure(now, -0.5) == pytest.approx(now * (1 - ADAPTATION))


def test_lambda_leaves_zero_again_and_is_never_below() -> None:
    assert next_pressure(0.0, 0.1) == pytest.approx(ADAPTATION * FIRST_PRESSURE)
    assert next_pressure(0.001, -0.1) == 0.0


@pytest.mark.parametrize("line", [0.5, LOWEST_MEAN**0.6], ids=["the lowest line", "a line below it"])
def test_validation_is_free_to_take_alpha_down_to_the_lowest_line_and_is_stopped_there(line: float) -> None:
    order = FreeImportanceOrder(make_order()[0], COSTS, ramp_steps=100)
    lowest = min(line, LOWEST_MEAN**0.5)
    assert order.next_pressure(2.0, ramp_at(1.01 * lowest, line=line)) > 1.9
    below = ramp_at(0.9 * lowest, line=line)
    assert order.next_pressure(2.0, below) == pytest.approx(-CORRECTED_AT_ONCE * 0.1 * lowest / 0.01 - 7)


def test_a_restored_order_has_the_scales() -> None:
    _, order = make_order()
    order.scale_columns({2: torch.rand(2, 2), 3: torch.rand(1, 3)})
    _, restored = make_order()
    assert not torch.equal(restored.scores(2), order.scores(2))
    restored.load_state_dict({name: value.clone() for name, value in order.state_dict().items()})
    for dim in (2, 3):
        assert torch.equal(restored.scores(dim), order.scores(dim))
