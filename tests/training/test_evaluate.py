"""Losses and metrics of a split, of one task and of several, against oracles."""

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.gains import is_ahead
from dnis_torchrec.data.batches import RankingBatch, slice_of
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import (
    RANKING_KS,
    Predictions,
    Task,
    TrainTask,
    check_candidates,
    check_task,
    possible_metrics,
    task_of,
)
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.training.evaluate import (
    LOSSES_PER_BATCH,
    ClickMetrics,
    RankingMetrics,
    SquaredError,
    evaluate,
    part_losses,
    primary_metric,
    selection_loss,
)
from dnis_torchrec.training.pipeline import NonFiniteError
from tests.tiny import METRICS, SHARE, ClickAndRating, make_batch
from tests.tiny import make_recipe as make_plain_recipe
from tests.tiny import tasks_make_recipe as make_recipe

CPU = torch.device("cpu")
RANKING_NAMES = {f"{name}@{k}" for name in ("recall", "mrr", "ndcg") for k in RANKING_KS}


def naive_ranking(preds: list[float], labels: list[int], queries: list[int], k: int) -> dict[str, float]:
    """One query at a time, by the definitions; among equal predictions the negatives come first."""
    values: dict[str, list[float]] = {"recall": [], "mrr": [], "ndcg": []}
    for query in set(queries):
        own = sorted((-p, y) for p, y, q in zip(preds, labels, queries, strict=True) if q == query)
        ranked = [y for _, y in own]
        gains = [y / math.log2(place + 2) for place, y in enumerate(ranked)]
        ideal = [y / math.log2(place + 2) for place, y in enumerate(sorted(ranked, reverse=True))]
        places = [place for place, y in enumerate(ranked[:k], start=1) if y]
        values["recall"].append(sum(ranked[:k]) / sum(ranked) if any(ranked) else 0.0)
        values["mrr"].append(1 / places[0] if places else 0.0)
        values["ndcg"].append(sum(gains[:k]) / sum(ideal[:k]) if any(ranked) else 0.0)
    return {f"{name}@{k}": float(np.mean(each)) for name, each in values.items()}


@st.composite
def rankings(draw: st.DrawFn) -> tuple[list[float], list[int], list[int]]:
    """Queries of 3 to 8 candidates in any order, with ties, several positives or none."""
    candidates = [
        (draw(st.integers(-3, 3)) / 2, draw(st.integers(0, 1)), 10 * query)
        for query in range(draw(st.integers(1, 5)))
        for _ in range(draw(st.integers(3, 8)))
    ]
    shuffled = draw(st.permutations(candidates))
    preds, labels, queries = (list(column) for column in zip(*shuffled, strict=True))
    return preds, labels, queries


def computed(metric: RankingMetrics) -> dict[str, float]:
    return {name: float(value) for name, value in metric.compute().items()}


class TestRanking:
    @given(rankings(), st.integers(1, 9))
    def test_equals_the_definitions_in_any_order_and_batches(self, ranking, batch_size):
        preds, labels, queries = ranking
        metric = RankingMetrics(ks=(1, 2, 3))
        columns = (torch.tensor(preds), torch.tensor(labels).float(), torch.tensor(queries))
        for parts in zip(*(column.split(batch_size) for column in columns), strict=True):
            metric.update(*parts)
        want = {name: value for k in (1, 2, 3) for name, value in naive_ranking(*ranking, k).items()}
        assert computed(metric) == pytest.approx(want, abs=1e-12)

    def test_too_few_candidates(self):
        queries = torch.tensor([4] * 10 + [7] * 9)
        message = r"^ranking, query 7: expected at least k=10 candidates, got 9; add negatives, or leave the query out$"
        with pytest.raises(ValueError, match=message):
            check_candidates(queries)
        check_candidates(queries, k=9)
        metric = RankingMetrics()
        metric.update(torch.rand(19), torch.zeros(19), queries)
        with pytest.raises(ValueError, match=message):
            metric.compute()

    def test_no_query_odd_labels_odd_cut_offs(self):
        with pytest.raises(ValueError, match="ranking: expected at least one query, got 0"):
            check_candidates(torch.zeros(0, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"ranking: expected labels 0 or 1, got 4\.0"):
            RankingMetrics().update(torch.rand(2), torch.tensor([0.0, 4.0]), torch.zeros(2))
        for ks in ((), (0, 5)):
            with pytest.raises(ValueError, match=r"RankingMetrics\.ks: expected cut-offs >= 1"):
                RankingMetrics(ks)


class FirstDense(nn.Module):
    """Predicts the first dense feature."""

    def forward(self, dense_features: Tensor, sparse_features: object) -> Tensor:
        return dense_features[:, 0]


def ranking_batches(num_queries: int, num_candidates: int) -> list[RankingBatch]:
    """The positive of query q has the score q, its candidate c the score c - 0.5: the query's rank falls with q."""
    features = KeyedJaggedTensor.empty()
    batches = []
    for query in range(num_queries):
        scores = torch.tensor([float(query), *(c + 0.5 for c in range(num_candidates - 1))])
        labels, queries = torch.zeros(num_candidates), torch.full((num_candidates,), query)
        labels[0] = 1.0
        batches.append(RankingBatch(scores.unsqueeze(1), features, labels, queries))
    return batches


class TestEvaluate:
    loss = nn.BCEWithLogitsLoss()

    def test_ranks_a_split_of_ranking_batches(self):
        found = evaluate(TrainTask(FirstDense(), self.loss), ranking_batches(15, 12), self.loss, CPU)
        assert set(found) == {"loss"} | RANKING_NAMES
        ranks = [12 - min(query, 11) for query in range(15)]
        for k in RANKING_KS:
            assert found[f"recall@{k}"] == pytest.approx(np.mean([rank <= k for rank in ranks]))
            assert found[f"mrr@{k}"] == pytest.approx(np.mean([(rank <= k) / rank for rank in ranks]))
            assert found[f"ndcg@{k}"] == pytest.approx(np.mean([(rank <= k) / math.log2(rank + 1) for rank in ranks]))

    def test_batches_without_samples_are_an_empty_split(self):
        empty = Batch(torch.zeros(0, 1), KeyedJaggedTensor.empty(), torch.zeros(0))
        with pytest.raises(ValueError, match="evaluation split: expected at least one sample"):
            evaluate(TrainTask(FirstDense(), nn.MSELoss()), [], nn.MSELoss(), CPU)
        with pytest.raises(ValueError, match="evaluation split: expected at least one sample"):
            evaluate(TrainTask(FirstDense(), nn.MSELoss()), [empty], nn.MSELoss(), CPU)
        full = Batch(torch.tensor([[3.0], [1.0]]), KeyedJaggedTensor.empty(), torch.zeros(2))
        found = evaluate(TrainTask(FirstDense(), nn.MSELoss()), [empty, full, empty], nn.MSELoss(), CPU)
        assert found == {"loss": 5.0, "mse": 5.0}

    def test_primary_metric(self):
        plain = [Batch(torch.zeros(1, 1), KeyedJaggedTensor.empty(), torch.zeros(1))]
        assert primary_metric(self.loss) == primary_metric(self.loss, plain) == ("auc", True)
        assert primary_metric(nn.MSELoss(), plain) == ("mse", False)
        assert primary_metric(self.loss, ranking_batches(1, 2)) == ("ndcg@10", True)


class TestRankingBatch:
    def test_moves_as_a_whole(self):
        (batch,) = ranking_batches(1, 3)
        moved = batch.to(torch.device("meta"), non_blocking=True)
        assert isinstance(moved, RankingBatch)
        parts = (moved.dense_features, moved.labels, moved.queries, moved.sparse_features.values())
        assert {part.device.type for part in parts} == {"meta"}
        assert torch.equal(batch.to(CPU).queries, batch.queries)

    def test_pins_and_records_all_parts(self, monkeypatch):
        (batch,) = ranking_batches(1, 3)
        pinned, recorded = [], []
        monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self.data_ptr()) or self.clone())
        monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: recorded.append((self.data_ptr(), stream)))
        copy = batch.pin_memory()
        assert isinstance(copy, RankingBatch)
        assert torch.equal(copy.queries, batch.queries)
        batch.record_stream("stream")
        own = {part.data_ptr() for part in (batch.dense_features, batch.labels, batch.queries)}
        assert own <= set(pinned)
        assert {(pointer, "stream") for pointer in own} <= set(recorded)


SAMPLES = st.lists(
    st.tuples(st.integers(-3, 3).map(lambda z: z / 2), st.integers(0, 1), st.integers(0, 3).map(lambda w: w / 2)),
    min_size=1,
    max_size=12,
)


@given(SAMPLES, st.integers(1, 5))
def test_weighted_metrics_are_those_of_the_definitions(samples: list[tuple[float, int, float]], batch_size: int):
    """A weight counts as so many samples; ties count half."""
    scores, labels, weights = (torch.tensor(column) for column in zip(*samples, strict=True))
    found: dict[str, float] = {}
    for metric in (ClickMetrics(), SquaredError()):
        for parts in zip(*(c.split(batch_size) for c in (scores, labels, weights)), strict=True):
            metric.update(*parts)
        found |= metric.compute()
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
    values = [float(found[name]) for name in ("auc", "ne", "calibration", "logloss", "mse")]
    assert values == pytest.approx(wanted, abs=1e-6, nan_ok=True)


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
    ("fields", "place"),
    [
        ({"loss": Task()}, "task Task.kinds"),
        ({"loss": Unknown()}, "task Unknown, prediction 'click'"),
        ({"loss": Learning()}, "task Learning"),
        ({"stop_on": "auc"}, "metric 'auc'"),
        ({"stop_on": "click_calibration"}, "Recipe.stop_on"),
    ],
)
def test_a_recipe_refuses(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(place)}"):
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


class Pair(ClickAndRating):
    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        return tuple(super().outputs(model, batch).values())


class SumOfSamples(ClickAndRating):
    def loss(self, batch: Batch, outputs: Any) -> Tensor:
        return outputs["click"].square()


PLACE = "selection batch 0"
RATING = f"{PLACE}, prediction 'rating'"


@pytest.mark.parametrize(
    ("task", "place"),
    [
        (Unfinished(), "task Unfinished"),
        (Pair(), f"{PLACE}, outputs"),
        (SumOfSamples(), f"{PLACE}, task SumOfSamples"),
        (changed(name="stars"), f"{PLACE}, task Changed"),
        (changed(labels=lambda *_: None), f"{RATING}: expected labels"),
        (changed(values=lambda _, v: v[1:]), f"{RATING}: expected values"),
        *((changed(weights=first_is(weight)), f"{RATING}: expected weights") for weight in (-1, math.nan)),
        (changed(weights=lambda *_: None), f"{RATING}: expected finite labels"),
    ],
)
def test_what_is_wrong_with_a_task_is_said_before_training(task: Task, place: str) -> None:
    recipe = make_recipe(loss=task)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=f"^{re.escape(place)}"):
        check_task(recipe.model, recipe.task, recipe.data.selection.batches[0], PLACE)
    assert recipe.model.training


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
@settings(max_examples=50, deadline=None)
def test_ahead_is_a_lead_of_more_than_one_standard_error(batches: list[tuple[int, float, float]]) -> None:
    losses = torch.tensor([(n, own) for n, own, _ in batches], dtype=torch.float64)
    rival = torch.tensor([(n, theirs) for n, _, theirs in batches], dtype=torch.float64)
    lead, error = naive_lead(losses, rival)
    if abs(lead - error) > 1e-9:
        assert is_ahead(losses, rival, Ranks()) == (lead > error)


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
    model, criterion = make_plain_recipe().model.eval(), nn.BCEWithLogitsLoss()
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


def test_outputs_by_name_are_cut_with_a_batch_that_stays_whole_where_a_part_weighs_nothing() -> None:
    model, batch, other = make_plain_recipe().model.eval(), make_batch(32, 0), make_batch(32, 1)
    batch.dense_features[:5, 0] = 0.0
    found = of_parts(RatedClicks(), [batch, other], model)
    assert len(found) == 1 + LOSSES_PER_BATCH
    assert found[0].tolist() == pytest.approx([32, loss_of(RatedClicks(), model, batch)])
    assert found[1].tolist() == pytest.approx([2, loss_of(RatedClicks(), model, slice_of(other, 0, 2))])


def test_two_batches_are_enough_to_see_a_lead() -> None:
    """Of two batches alone that differ, as those of a small split do, one error is as large as the lead or larger."""
    task, model = task_of(nn.BCEWithLogitsLoss()), make_plain_recipe().model.eval()
    batches = [make_batch(512, 0), make_batch(512, 1)]
    losses = of_parts(task, batches, model)
    gaps = torch.linspace(-0.05, 0.1, LOSSES_PER_BATCH, dtype=torch.float64)
    rival = losses + torch.stack([torch.zeros(2 * LOSSES_PER_BATCH), torch.cat([gaps + 0.035, gaps - 0.035])], dim=1)
    assert is_ahead(losses, rival, Ranks())
    whole = [part.reshape(2, LOSSES_PER_BATCH, 2).mean(dim=1) for part in (losses, rival)]
    assert not is_ahead(*whole, Ranks())


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_labels_that_are_no_classes_have_no_auc(share: float, gloo) -> None:
    recipe = make_plain_recipe()
    batch = make_batch(3, 1)
    batch.labels = torch.tensor([0.0, 1.0, share])
    task = TrainTask(recipe.model, recipe.loss)
    message = rf"^evaluation split: expected labels 0 or 1, got {share}"
    with pytest.raises(ValueError, match=message):
        evaluate(task, [batch], recipe.loss, CPU)
    assert evaluate(TrainTask(recipe.model, nn.MSELoss()), [batch], nn.MSELoss(), CPU)["mse"] > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.MSELoss()])
def test_a_prediction_that_is_not_finite_is_refused(gloo, loss: nn.Module, bad: float) -> None:
    recipe = make_plain_recipe()
    batches = [make_batch(8, seed) for seed in range(2)]
    batches[1].dense_features[3] = bad
    with pytest.raises(NonFiniteError, match="evaluation split: expected finite predictions, got nan or inf"):
        evaluate(TrainTask(recipe.model, loss), batches, loss, CPU)
