"""Scalar features as ids of buckets and as weighted bags."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.data.batches import Bags, InMemoryBatches
from examples.datasets.in_memory import Samples
from examples.datasets.scalars import bucketised, weighted


def samples_of(dense: torch.Tensor) -> Samples:
    num_samples = dense.shape[0]
    return Samples(
        dense=dense,
        ids=torch.arange(num_samples, dtype=torch.int32).unsqueeze(1),
        labels=torch.zeros(num_samples),
        feature_names=("id",),
        num_embeddings={"id": num_samples},
    )


@given(st.lists(st.integers(-3, 3), min_size=20, max_size=60), st.integers(2, 9))
def test_buckets_keep_the_order_of_values_and_count_training_alone(values, num_buckets):
    dense = torch.tensor(values, dtype=torch.float32).unsqueeze(1)
    train_rows = torch.arange(10)
    found = bucketised(samples_of(dense), ["x"], train_rows, num_buckets=num_buckets)
    rows = found.num_embeddings["x"]
    ids = found.ids[:, 1]
    assert found.ids.dtype == torch.int32
    assert found.feature_names == ("id", "x")
    assert found.dense.shape == (len(values), 0)
    assert rows <= num_buckets
    assert 0 <= int(ids.min()) <= int(ids.max()) < rows
    # Each bucket is an interval: no value of another bucket lies between two of its own.
    spans = sorted((float(dense[ids == row].min()), float(dense[ids == row].max())) for row in ids.unique())
    assert all(left[1] < right[0] for left, right in pairwise(spans))
    counts = torch.bincount(ids[train_rows], minlength=rows).tolist()
    assert counts == sorted(counts, reverse=True)
    # What only held-out samples hold moves no boundary.
    dense[10:] = 100.0
    again = bucketised(samples_of(dense), ["x"], train_rows, num_buckets=num_buckets)
    assert torch.equal(again.ids[:10], found.ids[:10])


def test_quantiles_fill_buckets_evenly():
    found = bucketised(samples_of(torch.randperm(1000).float().unsqueeze(1)), ["x"], torch.arange(1000), num_buckets=5)
    assert found.num_embeddings["x"] == 5
    assert torch.bincount(found.ids[:, 1]).tolist() == pytest.approx([200] * 5, abs=1)


def test_weighted_bags_hold_the_value():
    dense = torch.randn(6, 2)
    samples = weighted(samples_of(dense), ["x", "y"])
    bags = Bags(torch.tensor([4, 5, 6]), torch.tensor([0, 2, 2, 2, 3, 3, 3]))
    batches = InMemoryBatches(
        samples.dense,
        samples.ids,
        samples.labels,
        feature_names=samples.feature_names,
        multi_hot={"m": bags},
        scalar_names=samples.scalar_names,
        batch_size=4,
        shuffle=True,
        seed=0,
    )
    for batch in batches:
        features = batch.sparse_features
        assert features.keys() == ["id", "m", "x", "y"]
        rows = features["id"].values()
        assert torch.equal(batch.dense_features, dense[rows])
        for column, name in enumerate("xy"):
            assert features[name].values().tolist() == [column] * len(rows)
            assert features[name].lengths().tolist() == [1] * len(rows)
            assert torch.equal(features[name].weights(), dense[rows, column])
        for name in ("id", "m"):
            assert set(features[name].weights().tolist()) <= {1.0}
        assert features.length_per_key() == [len(features[key].values()) for key in features.keys()]  # noqa: SIM118


def test_bad_arguments():
    samples = samples_of(torch.randn(20, 2))
    with pytest.raises(ValueError, match=r"num_buckets: expected an integer >= 2, got 1"):
        bucketised(samples, ["x", "y"], torch.arange(20), num_buckets=1)
    for turn in (lambda names: weighted(samples, names), lambda names: bucketised(samples, names, torch.arange(20))):
        with pytest.raises(ValueError, match=r"scalars: expected 2 names of at least one scalar, got 1"):
            turn(["x"])
    with pytest.raises(ValueError, match=r"scalars: expected 0 names of at least one scalar, got 0"):
        weighted(samples_of(torch.randn(20, 0)), [])
    with pytest.raises(ValueError, match=r"InMemoryBatches\.scalar_names: expected 2 names, or none, got 1"):
        InMemoryBatches(
            samples.dense,
            samples.ids,
            samples.labels,
            feature_names=("id",),
            scalar_names=("x",),
            batch_size=4,
            shuffle=False,
            seed=0,
        )
