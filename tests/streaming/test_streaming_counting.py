"""Counting in bounded memory: exact while it can be, never too low, too high by no more than stated."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec import blocks_from_counts, count_frequencies
from dnis_torchrec.blocks.sketch import BoundedCounter, CountMinSketch
from dnis_torchrec.streaming import CountLimits, count_stream

TABLES = [
    EmbeddingBagConfig(name="small", num_embeddings=9, embedding_dim=4, feature_names=["f", "g"]),
    EmbeddingBagConfig(name="large", num_embeddings=3000, embedding_dim=4, feature_names=["h"]),
]
ROUGH = CountLimits(exact_rows=10, exact_ids=64, epsilon=0.01, delta=0.001)


def make_batches(num_batches: int, seed: int, *, batch_size: int = 50) -> list[KeyedJaggedTensor]:
    """Batches with empty bags; ids of `h` are skewed as real ones are."""
    random = np.random.default_rng(seed)
    batches = []
    for _ in range(num_batches):
        lengths = random.integers(0, 4, 3 * batch_size)
        ends = lengths.reshape(3, -1).sum(1)
        ids = [random.integers(0, 9, ends[0]), random.integers(0, 9, ends[1]), random.zipf(1.3, ends[2]) % 3000]
        batches.append(
            KeyedJaggedTensor(
                keys=["f", "g", "h"],
                values=torch.from_numpy(np.concatenate(ids)).long(),
                lengths=torch.from_numpy(lengths).long(),
            )
        )
    return batches


def test_the_sketch_errs_upwards_and_by_no_more_than_stated() -> None:
    random = np.random.default_rng(0)
    true = np.bincount(random.zipf(1.2, 50_000) % 5000, minlength=5000)
    ids = np.arange(5000)
    sketch = CountMinSketch(epsilon=0.005, delta=0.01)
    sketch.add(ids, true)
    assert sketch.table.shape == (5, 544)
    assert sketch.total == 50_000
    errors = sketch.estimate(ids) - true
    assert errors.min() >= 0
    assert errors.max() > 0
    assert np.mean(errors > 0.005 * 50_000) <= 0.01


def test_sketches_add_up() -> None:
    ids, one, two = np.arange(40), np.arange(40) % 7, np.arange(40) % 5
    first, second, both = (CountMinSketch(epsilon=0.1, delta=0.1) for _ in range(3))
    first.add(ids, one)
    second.add(ids, two)
    both.add(ids, one + two)
    assert (first.table + second.table == both.table).all()


@given(batches=st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=12), exact_ids=st.integers(2, 40))
def test_a_bounded_counter_keeps_its_bounds(batches: list[list[int]], exact_ids: int) -> None:
    counter, true = BoundedCounter(exact_ids=exact_ids, epsilon=0.2, delta=0.1), Counter[int]()
    for ids in batches:
        counter.add(np.array(ids, dtype=np.int64))
        true.update(ids)
    everything = np.arange(32)
    wanted = np.array([true[int(row)] for row in everything])
    exact, sketched = counter.parts(everything)
    assert (exact <= wanted).all()
    assert (exact + sketched >= wanted).all()
    assert (counter.estimate(everything) == exact + sketched).all()
    assert ((exact + sketched == wanted) | (sketched > 0)).all()
    assert len(counter.ids) <= exact_ids
    if len(true) <= exact_ids:
        assert counter.is_exact
        assert counter.error_bound == 0
        assert (exact == wanted).all()


def test_frequent_ids_stay_exact() -> None:
    random = np.random.default_rng(1)
    ids = random.zipf(1.3, 40_000) % 20_000
    counter = BoundedCounter(exact_ids=512, epsilon=0.001, delta=0.01)
    for part in np.array_split(ids, 40):
        counter.add(part)
    true = np.bincount(ids, minlength=20_000)
    top = np.argsort(-true)[:50]
    exact, sketched = counter.parts(top)
    assert (exact == true[top]).all()
    assert (sketched == 0).all()
    # Only what is rare went to the sketch, so its error is that much smaller.
    assert 0 < counter.error_bound < 0.001 * len(ids) / 3
    errors = counter.estimate(np.arange(20_000)) - true
    assert errors.min() >= 0
    assert np.mean(errors > counter.error_bound) <= 0.01


def test_a_stream_within_the_limits_is_counted_as_count_frequencies_does() -> None:
    batches = make_batches(6, seed=0)
    wanted = count_frequencies(batches, TABLES)
    for limits in (CountLimits(), CountLimits(exact_rows=10, exact_ids=3000)):
        counts = count_stream(batches, TABLES, limits=limits)
        assert counts.error_bounds() == {"small": 0.0, "large": 0.0}
        assert list(counts.counts) == ["small", "large"]
        assert all(torch.equal(counts.counts[name][:], wanted.counts[name]) for name in wanted.counts)
        assert counts.max_bag_lengths == wanted.max_bag_lengths
        assert counts.num_samples == wanted.num_samples == 300


def test_a_stream_beyond_the_limits_is_counted_with_the_stated_error_and_makes_blocks() -> None:
    batches = make_batches(20, seed=1)
    wanted = count_frequencies(batches, TABLES).counts
    counts = count_stream(batches, TABLES, limits=ROUGH)
    assert torch.equal(counts.counts["small"], wanted["small"])
    found = counts.counts["large"][:]
    errors = found - wanted["large"]
    bound = counts.error_bounds()["large"]
    assert 0 < bound < 0.01 * int(wanted["large"].sum())
    assert int(errors.min()) >= 0
    assert float((errors > bound).float().mean()) <= 0.001
    assert torch.equal(counts.never_seen("large"), found == 0)
    blocks = blocks_from_counts(counts, TABLES, num_blocks=4)
    occurrences = blocks.occurrences["large"].tolist()
    assert occurrences == sorted(occurrences, reverse=True)
    assert sum(occurrences) == int(found.sum())


def test_bad_ids_and_empty_streams_are_refused() -> None:
    kjt = KeyedJaggedTensor(keys=["f", "g", "h"], values=torch.tensor([1, 9]), lengths=torch.tensor([1, 1, 0]))
    with pytest.raises(ValueError, match=r"table 'small', feature 'g', batch 0: expected ids in 0..8, got 9"):
        count_stream([kjt], TABLES)
    with pytest.raises(ValueError, match="training stream: expected at least one sample"):
        count_stream([], TABLES)
    with pytest.raises(ValueError, match="feature of table 'large' in batch 0 'h'"):
        count_stream(
            [KeyedJaggedTensor(keys=["f", "g"], values=torch.tensor([1]), lengths=torch.tensor([1, 0]))], TABLES
        )
    with pytest.raises(ValueError, match="epsilon"):
        CountLimits(epsilon=0)
