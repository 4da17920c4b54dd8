"""Metrics: equal to naive loops and to torchmetrics' own, in any order, batches and ranks; evaluate picks them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.batches import RankingBatch
from dnis_torchrec.data.task import RANKING_KS, TrainTask, check_candidates
from dnis_torchrec.training.evaluate import Calibration, NormalizedEntropy, RankingMetrics, evaluate, primary_metric
from tests.distributed.harness import Rank, Results, run_on_ranks

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

    def test_equals_torchmetrics_where_nothing_ties(self):
        generator = torch.Generator().manual_seed(0)
        queries = torch.randint(0, 30, (900,), generator=generator)
        preds = torch.randperm(900, generator=generator).float()
        labels = (torch.rand(900, generator=generator) < 0.1).long()
        metric = RankingMetrics()
        metric.update(preds, labels, queries)
        found = computed(metric)
        for k in RANKING_KS:
            for name, theirs in (("recall", RetrievalRecall(top_k=k)), ("ndcg", RetrievalNormalizedDCG(top_k=k))):
                assert found[f"{name}@{k}"] == pytest.approx(float(theirs(preds, labels, queries)), abs=1e-6)
        k = int(queries.bincount().min())
        metric = RankingMetrics(ks=(k,))
        small = torch.isin(queries, queries.bincount().argmin())
        metric.update(preds[small], labels[small], queries[small])
        assert computed(metric)[f"mrr@{k}"] == pytest.approx(
            float(RetrievalMRR()(preds[small], labels[small], queries[small])), abs=1e-6
        )

    def test_a_model_that_tells_nothing_apart_gets_nothing(self):
        metric = RankingMetrics()
        metric.update(torch.zeros(100), torch.arange(100) == 0, torch.zeros(100))
        assert set(computed(metric).values()) == {0.0}

    def test_starts_anew_after_reset(self):
        metric = RankingMetrics(ks=(1,))
        metric.update(torch.tensor([0.0, 1.0]), torch.tensor([1, 0]), torch.tensor([0, 0]))
        metric.reset()
        metric.update(torch.tensor([1.0, 0.0]), torch.tensor([1, 0]), torch.tensor([0, 0]))
        assert computed(metric) == {"recall@1": 1.0, "mrr@1": 1.0, "ndcg@1": 1.0}

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


class TestClicks:
    @given(st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(0, 1)), min_size=2, max_size=30), st.integers(1, 9))
    def test_equals_the_definitions(self, samples, batch_size):
        samples = [*samples, (0.3, 0), (0.6, 1)]
        p, y = np.array([s[0] for s in samples]), np.array([s[1] for s in samples])
        entropy, calibration = NormalizedEntropy(), Calibration()
        for start in range(0, len(samples), batch_size):
            part = slice(start, start + batch_size)
            for metric in (entropy, calibration):
                metric.update(torch.from_numpy(p[part]), torch.from_numpy(y[part]))
        rate = y.mean()
        logloss = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
        natural = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        assert float(entropy.compute()) == pytest.approx(logloss / natural, rel=1e-9)
        assert float(calibration.compute()) == pytest.approx(p.sum() / y.sum(), rel=1e-9)

    @pytest.mark.parametrize("label", [0, 1])
    def test_one_class_is_no_calibration(self, label: int):
        calibration = Calibration()
        calibration.update(torch.tensor([0.5, 0.25]), torch.tensor([label, label]))
        assert math.isnan(float(calibration.compute()))
        calibration.update(torch.tensor([0.5]), torch.tensor([1 - label]))
        assert float(calibration.compute()) == pytest.approx(1.25 / (1 + label))


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

    def test_refuses_a_query_with_fewer_candidates_than_k(self):
        batches = [*ranking_batches(2, 12), *ranking_batches(3, 9)[2:]]
        with pytest.raises(ValueError, match="ranking, query 2: expected at least k=10 candidates, got 9"):
            evaluate(TrainTask(FirstDense(), self.loss), batches, self.loss, CPU)

    def test_clicks(self):
        logits, labels = torch.randn(50, 1), (torch.arange(50) % 3 == 0).float()
        batch = Batch(logits, KeyedJaggedTensor.empty(), labels)
        found = evaluate(TrainTask(FirstDense(), self.loss), [batch], self.loss, CPU)
        assert set(found) == {"loss", "logloss", "auc", "ne", "calibration"}
        rate = float(labels.mean())
        natural = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        assert found["ne"] == pytest.approx(found["logloss"] / natural, abs=1e-6)
        assert found["calibration"] == pytest.approx(float(logits.sigmoid().mean()) / rate, abs=1e-6)

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


def metrics_of_rank(at: Rank) -> Results:
    """Evaluates this rank's batches: the queries go across ranks, and rank 0 has three batches more than rank 1."""
    loss, parts = nn.BCEWithLogitsLoss(), _parts()
    own = parts[:5] if at.rank == 0 else parts[5:]
    ranking = evaluate(TrainTask(FirstDense(), loss), own, loss, CPU)
    clicks = evaluate(TrainTask(FirstDense(), loss), [_as_clicks(part) for part in own], loss, CPU)
    return {"ranking": ranking, "clicks": clicks}


def _parts() -> list[RankingBatch]:
    """Seven batches of 20 queries, cut across the queries."""
    whole = ranking_batches(20, 13)
    order = torch.randperm(260, generator=torch.Generator().manual_seed(1))
    columns = [torch.cat([getattr(batch, name) for batch in whole])[order] for name in ("dense_features", "labels")]
    queries = torch.cat([batch.queries for batch in whole])[order]
    sizes = (50, 40, 10, 60, 20, 70, 10)
    cut = zip(columns[0].split(sizes), columns[1].split(sizes), queries.split(sizes), strict=True)
    return [RankingBatch(dense, KeyedJaggedTensor.empty(), labels, query) for dense, labels, query in cut]


def _as_clicks(batch: RankingBatch) -> Batch:
    return Batch(batch.dense_features, batch.sparse_features, batch.labels)


def test_two_ranks_get_the_metrics_of_all_samples(tmp_path: Path) -> None:
    loss, task = nn.BCEWithLogitsLoss(), TrainTask(FirstDense(), nn.BCEWithLogitsLoss())
    first, second = run_on_ranks(2, {"metrics": metrics_of_rank}, tmp_path)["metrics"]
    assert first == second
    assert first["ranking"] == pytest.approx(evaluate(task, _parts(), loss, CPU), abs=1e-6)
    alone = evaluate(task, [_as_clicks(part) for part in _parts()], loss, CPU)
    assert first["clicks"] == pytest.approx(alone, abs=1e-6)
