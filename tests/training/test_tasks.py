"""Tasks: metrics by name and weight, the loss that stops, and what is said of a task that does not fit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import Predictions, Task, TrainTask, check_task, possible_metrics
from dnis_torchrec.training.evaluate import (
    AreaUnderCurve,
    Calibration,
    LogLoss,
    NormalizedEntropy,
    WeightedSquaredError,
    evaluate,
    primary_metric,
    selection_loss,
)
from tests.distributed.harness import Rank, Results, run_on_ranks
from tests.tiny import make_recipe as make_plain_recipe
from tests.tiny_tasks import METRICS, SHARE, ClickAndRating, make_recipe, two_sided

CPU = torch.device("cpu")
SAMPLES = st.lists(
    st.tuples(st.integers(-3, 3).map(lambda z: z / 2), st.integers(0, 1), st.integers(0, 3).map(lambda w: w / 2)),
    min_size=1,
    max_size=12,
)


@given(SAMPLES, st.integers(1, 5))
def test_weighted_metrics_are_those_of_the_definitions(samples: list[tuple[float, int, float]], batch_size: int):
    """A weight counts as so many samples; ties count half."""
    scores, labels, weights = (torch.tensor(column) for column in zip(*samples, strict=True))
    chances = scores.double().sigmoid()
    given_to = {
        AreaUnderCurve(): scores,
        NormalizedEntropy(): chances,
        Calibration(): chances,
        LogLoss(): scores,
        WeightedSquaredError(): scores,
    }
    for metric, values in given_to.items():
        for parts in zip(*(c.split(batch_size) for c in (values, labels, weights)), strict=True):
            metric.update(*parts)
    found = [float(metric.compute()) for metric in given_to]
    total, clicks = sum(w for *_, w in samples), sum(w for _, y, w in samples if y)
    pairs = [(w * v, (z > x) + (z == x) / 2) for z, y, w in samples if y for x, n, v in samples if not n]
    losses = [(w, math.log1p(math.exp(-z if y else z))) for z, y, w in samples]
    has_both = 0 < clicks < total
    area = sum(w * won for w, won in pairs) / sum(w for w, _ in pairs) if has_both else math.nan
    loss = sum(w * own for w, own in losses) / total if total else math.nan
    rate = clicks / total if total else math.nan
    natural = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if has_both else math.nan
    predicted = sum(w / (1 + math.exp(-z)) for z, _, w in samples)
    squared = sum(w * (z - y) ** 2 for z, y, w in samples) / total if total else math.nan
    wanted = [area, loss / natural, predicted / clicks if has_both else math.nan, loss, squared]
    assert found == pytest.approx(wanted, abs=1e-6, nan_ok=True)


def by_hand(recipe: Recipe) -> dict[str, float]:
    """Metrics of the test split in one piece, by their definitions."""
    with torch.no_grad():
        outputs = [recipe.model.eval()(batch.sparse_features, batch.candidates) for batch in recipe.data.test]
    click, rating = (torch.cat([own[name] for own in outputs]).squeeze(1) for name in ("click", "rating"))
    labels, weights = (
        torch.cat([getattr(batch, part) for batch in recipe.data.test]) for part in ("labels", "weights")
    )
    positive, negative = click[labels[:, 0] == 1], click[labels[:, 0] == 0]
    squared = torch.where(weights > 0, weights * (rating - labels[:, 1]).square(), 0)
    of_clicks = nn.functional.binary_cross_entropy_with_logits(click, labels[:, 0])
    return {
        "loss": float(of_clicks + SHARE * squared.mean()),
        "click_auc": float(((positive[:, None] > negative) + (positive[:, None] == negative) / 2).double().mean()),
        "click_logloss": float(of_clicks),
        "rating_mse": float(squared.sum() / weights.sum()),
    }


def test_every_prediction_is_judged_by_its_kind_and_weights() -> None:
    recipe = make_recipe()
    found = evaluate(TrainTask(recipe.model, recipe.task), recipe.data.test, recipe.task, CPU)
    assert set(found) == METRICS == set(possible_metrics(recipe.task))
    assert {name: found[name] for name in by_hand(recipe)} == pytest.approx(by_hand(recipe), abs=1e-5)
    assert primary_metric(recipe.task, recipe.data.test) == ("click_auc", True)


def evaluated_halves(at: Rank) -> Results:
    recipe = make_recipe()
    halves = [two_sided(40, 1), two_sided(30, 2)]
    return evaluate(TrainTask(recipe.model, recipe.task), [halves[at.rank]], recipe.task, CPU)


def test_two_ranks_get_the_metrics_of_all_samples(tmp_path: Path) -> None:
    recipe = make_recipe()
    alone = evaluate(TrainTask(recipe.model, recipe.task), [two_sided(40, 1), two_sided(30, 2)], recipe.task, CPU)
    first, second = run_on_ranks(2, {"halves": evaluated_halves}, tmp_path)["halves"]
    assert first == second == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize(("stop_on", "sign"), [("loss", 1), ("click_auc", -1), ("rating_mse", 1), ("click_ne", 1)])
def test_a_named_metric_stops(stop_on: str, sign: int) -> None:
    recipe = make_recipe(stop_on=stop_on)
    task = TrainTask(recipe.model, recipe.task)
    metrics = evaluate(task, recipe.data.selection, recipe.task, CPU)
    assert selection_loss(task, recipe, CPU) == sign * metrics[stop_on]


def test_a_metric_that_the_selection_split_has_not_is_named() -> None:
    recipe = make_plain_recipe()
    for batch in recipe.data.selection:
        batch.labels.fill_(1)
    recipe = Recipe(model=recipe.model, data=recipe.data, loss=recipe.loss, stop_on="auc")
    with pytest.raises(ValueError, match=r"expected Recipe\.stop_on to be one of loss, logloss, got 'auc'$"):
        selection_loss(TrainTask(recipe.model, recipe.task), recipe, CPU)


class Unfinished(Task):
    kinds: Mapping[str, str] = {"click": "binary"}
    outputs = ClickAndRating.outputs


class Learning(ClickAndRating):
    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.ones(()))


class Unknown(ClickAndRating):
    kinds: Mapping[str, str] = {"click": "ordinal"}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"task": None}, ValueError, "Recipe: expected a loss or a task, got neither"),
        ({"loss": nn.MSELoss()}, ValueError, "Recipe: expected a loss or a task, got both; leave the loss to the task"),
        ({"task": nn.MSELoss()}, TypeError, "Recipe.task: expected a dnis_torchrec.Task, got MSELoss; derive it from"),
        ({"task": Task()}, ValueError, "task Task.kinds: expected at least one name with its kind, got {}"),
        ({"task": Unknown()}, ValueError, "task Unknown, prediction 'click': expected a kind of binary, regression, "),
        ({"task": Learning()}, ValueError, "task Learning: expected no weights of its own, got ['share']; hold in the"),
        (
            {"stop_on": "auc"},
            ValueError,
            "metric 'auc': expected one of loss, click_auc, click_logloss, click_ne, click_calibration, rating_mse",
        ),
        (
            {"stop_on": "click_calibration"},
            ValueError,
            "Recipe.stop_on: expected a metric that is better the higher or the lower, got 'click_calibration'",
        ),
    ],
)
def test_a_recipe_refuses(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        make_recipe(**fields)


def changed(**parts: Any) -> Task:
    """The task with other parts of its rating's predictions; a part of None is left out altogether."""

    class Changed(ClickAndRating):
        def predictions(self, batch: Batch, outputs: Any) -> dict[str, Predictions]:
            whole = super().predictions(batch, outputs)
            rating = whole["rating"]
            given_parts = {name: make(batch, getattr(rating, name)) for name, make in parts.items() if name != "name"}
            own = {"values": rating.values, "labels": rating.labels, "weights": rating.weights} | given_parts
            return {"click": whole["click"], parts.get("name", "rating"): Predictions(**own)}

    return Changed()


def first_is(value: float) -> Any:
    def change(batch: Batch, part: Tensor) -> Tensor:
        part = part.clone()
        part[0] = value
        return part

    return change


class SumOfSamples(ClickAndRating):
    def loss(self, batch: Batch, outputs: Any) -> Tensor:
        return outputs["click"].square()


PLACE = "selection batch 0"
RATING = f"{PLACE}, prediction 'rating': expected"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Unfinished(), "task Unfinished: expected a method 'loss', got none"),
        (SumOfSamples(), f"{PLACE}, task SumOfSamples: expected a loss that is a scalar, got (64, 1); take its mean"),
        (changed(name="stars"), f"{PLACE}, task Changed: expected the predictions ['click', 'rating'], as its "),
        (changed(labels=lambda *_: None), f"{RATING} labels (64,), one for each sample, g"),
        (changed(values=lambda _, v: v[1:]), f"{RATING} values (64,), one for each sampl"),
        (changed(weights=first_is(-1)), f"{RATING} weights that are finite and >= 0, got "),
        (changed(weights=first_is(math.nan)), f"{RATING} weights that are finite and >= "),
        (changed(weights=lambda *_: None), f"{RATING} finite labels, got nan; give sampl"),
    ],
)
def test_what_is_wrong_with_a_task_is_said_before_training(task: Task, message: str) -> None:
    recipe = make_recipe(loss=task)
    with pytest.raises((ValueError, NotImplementedError), match=f"^{re.escape(message)}"):
        check_task(recipe.model, recipe.task, recipe.data.selection.batches[0], PLACE)
    assert recipe.model.training


def test_outputs_have_to_be_tensors() -> None:
    class Pair(ClickAndRating):
        def outputs(self, model: nn.Module, batch: Batch) -> Any:
            return tuple(super().outputs(model, batch).values())

    with pytest.raises(
        TypeError, match="outputs: expected a tensor, or tensors by name, of the model, got tuple; return"
    ):
        recipe = make_recipe(loss=Pair())
        check_task(recipe.model, recipe.task, recipe.data.selection.batches[0], PLACE)


def test_a_batch_of_torchrec_needs_no_dense_features() -> None:
    recipe = make_recipe()
    (click, _), users = recipe.data.test.batches[0].labels.T, recipe.data.test.batches[0].sparse_features

    class Users(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users = recipe.model.users

        def forward(self, dense_features: None, sparse_features: KeyedJaggedTensor) -> Tensor:
            assert dense_features is None
            return self.users(sparse_features).values().sum(1)

    loss = nn.BCEWithLogitsLoss()
    found = evaluate(TrainTask(Users(), loss), [Batch(None, users, click)], loss, CPU)
    expected = loss(recipe.model.users(users).values().sum(1), click).item()
    assert found["loss"] == pytest.approx(expected, abs=1e-6)
