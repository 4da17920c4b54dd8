"""What is wrong with data or model is said before the first training step, by split, batch and feature."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.data.final_sigmoid import ends_in_sigmoid
from dnis_torchrec.data.lookup_batches import LookupBatches, for_lookup
from dnis_torchrec.data.over_ranks import SPLITS, SlicedBatches, warn_of_overlaps, with_notes
from dnis_torchrec.data.recipe import DataSplits, Recipe, TrainTask
from dnis_torchrec.data.sample_sketch import SampleSketch, share_found, share_repeated
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.search import started as started_search
from dnis_torchrec.search.search import search
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.streaming import CountLimits, checked_counts
from dnis_torchrec.training.evaluate import evaluate
from tests.searched_runs import QUICK
from tests.tiny import ROWS, Repeatable, make_batch, make_collection, make_recipe, ranked

CPU = torch.device("cpu")
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64)


def changed(batch: Batch, **parts: Any) -> Batch:
    """The batch with other values, lengths or weights of its bags, or other fields of its own."""
    old = batch.sparse_features
    bags = {"values": old.values(), "lengths": old.lengths(), "weights": old.weights_or_none()}
    bags |= {name: parts.pop(name) for name in tuple(parts) if name in bags}
    return dataclasses.replace(batch, sparse_features=KeyedJaggedTensor(keys=old.keys(), **bags), **parts)


def with_split(recipe: Recipe, name: str, change: Callable[[Batch], Batch], *, last_only: bool = False) -> Recipe:
    """The recipe with the batches of one split changed, or the last one alone."""
    batches = list(getattr(recipe.data, name))
    batches = [*batches[:-1], change(batches[-1])] if last_only else [change(batch) for batch in batches]
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **{name: Repeatable(batches)}))


def everywhere(recipe: Recipe, change: Callable[[Batch], Batch]) -> Recipe:
    for name in SPLITS:
        recipe = with_split(recipe, name, change)
    return recipe


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gets so far as to begin to train fails of another error."""
    monkeypatch.setattr(started_search, "shard", None)


def weights(value: float) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        own = torch.ones(batch.sparse_features.values().numel())
        own[64 + 5] = value  # of the second feature
        return changed(batch, weights=own)

    return change


def dense_value(value: float) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        features = batch.dense_features.clone()
        features[3, 1] = value
        return dataclasses.replace(batch, dense_features=features)

    return change


def no_samples(batch: Batch) -> Batch:
    return dataclasses.replace(
        changed(batch, values=torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64)),
        dense_features=batch.dense_features[:0],
        labels=batch.labels[:0],
    )


def float_ids(batch: Batch) -> Batch:
    return changed(batch, values=batch.sparse_features.values().float())


WRONG = [
    (dense_value(math.nan), r", dense_features, sample 3, column 1: expected finite numbers, got nan; clean the data$"),
    (dense_value(-math.inf), r", dense_features, sample 3, column 1: expected finite numbers, got -inf; clean"),
    (weights(math.nan), r", feature 'genre': expected finite weights, got nan; clean the data$"),
    (weights(math.inf), r", feature 'genre': expected finite weights, got inf; clean the data$"),
    (no_samples, r": expected at least one sample, got none; leave empty batches out$"),
    (float_ids, r", feature 'user': expected integer ids, got torch.float32; hash or number what is no integer$"),
]


def fewer_labels(batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=batch.labels[:-1])


def fewer_dense(batch: Batch) -> Batch:
    return dataclasses.replace(batch, dense_features=batch.dense_features[:-1])


def short_lengths(batch: Batch) -> Batch:
    return changed(batch, lengths=batch.sparse_features.lengths().short())


WRONG += [
    (fewer_labels, r", sparse_features: expected 63 samples, one for each label, got 64; leave incomplete samples out"),
    (fewer_dense, r", dense_features: expected 64 samples, one for each label, got 63; leave incomplete samples out"),
    (short_lengths, r", feature 'user': expected int32 or int64 lengths, got torch.int16$"),
]


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize(("change", "message"), WRONG)
def test_bad_batches_of_any_split_are_refused_before_training(
    gloo, tmp_path: Path, untrained: None, name: str, change: Callable[[Batch], Batch], message: str
) -> None:
    recipe = with_split(make_recipe(), name, change, last_only=True)
    index = len(getattr(recipe.data, name).batches) - 1
    with pytest.raises(ValueError, match=f"^{name} batch {index}{message}"):
        search(recipe, 4.0, tmp_path, CPU, settings=QUICK)


def test_a_batch_without_samples_of_a_later_epoch_is_named() -> None:
    batches = LookupBatches(Repeatable([make_batch(4, 0), no_samples(make_batch(4, 1))]), "train")
    with pytest.raises(ValueError, match=r"^train batch 1: expected at least one sample, got none"):
        list(batches)
    sliced = SlicedBatches(Repeatable([no_samples(make_batch(4, 1))]), Ranks(), "train", equal=True)
    with pytest.raises(ValueError, match=r"^train batch 0: expected at least one sample, got none"):
        list(sliced)


def test_a_batch_without_samples_is_passed_over_where_it_is_only_judged(gloo) -> None:
    recipe = make_recipe()
    task, batches = TrainTask(recipe.model, recipe.loss), list(recipe.data.test)
    found = evaluate(task, [no_samples(batches[0]), *batches], recipe.loss, CPU)
    assert found == evaluate(task, batches, recipe.loss, CPU)


# Ids and weights of any type


def narrow(dtype: torch.dtype) -> Callable[[Batch], Batch]:
    return lambda batch: changed(batch, values=batch.sparse_features.values().to(dtype))


class Own(Batch):
    """A user's batch, with an __init__ of its own."""

    def __init__(self, whole: Batch) -> None:
        super().__init__(whole.dense_features, whole.sparse_features, whole.labels)


def test_a_batch_of_a_users_own_is_converted_too() -> None:
    whole = narrow(torch.uint8)(make_batch(8, 0))
    own = Own(whole)
    ready = for_lookup(own)
    assert type(ready) is Own
    assert ready.sparse_features.values().dtype == torch.int64
    assert own.sparse_features is whole.sparse_features


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_of_any_width_are_counted_alike(dtype: torch.dtype) -> None:
    batch, tables = make_batch(20, 0), make_collection().embedding_bag_configs()
    expected = count_frequencies([batch.sparse_features], tables).counts
    found = count_frequencies([narrow(dtype)(batch).sparse_features], tables).counts
    assert {name: counts.tolist() for name, counts in found.items()} == {n: c.tolist() for n, c in expected.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool])
def test_ids_that_are_no_integers_are_refused_by_feature(dtype: torch.dtype) -> None:
    batch = narrow(dtype)(make_batch(20, 0))
    message = rf"^table 'user', feature 'user', batch 0: expected integer ids, got {dtype}; hash or number"
    with pytest.raises(ValueError, match=message):
        count_frequencies([batch.sparse_features], make_collection().embedding_bag_configs())
    with pytest.raises(ValueError, match=rf"^features 'user', 'genre': expected integer ids, got {dtype}"):
        for_lookup(batch)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16])
def test_ids_of_any_width_are_searched_and_evaluated_alike(gloo, tmp_path: Path, dtype: torch.dtype) -> None:
    results = []
    for recipe in (make_recipe(), everywhere(make_recipe(), narrow(dtype))):
        folder = tmp_path / str(len(results))
        torch.manual_seed(0)
        outcome = search(recipe, 4.0, folder, CPU, settings=QUICK)
        metrics = evaluate(TrainTask(outcome.model, recipe.loss), recipe.data.test, recipe.loss, CPU)
        results.append((metrics, outcome.history, outcome.scheme.parameters))
    assert results[0] == results[1]


class Weighted(nn.Module):
    """A model of two weighted tables."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
            for name, rows in ROWS.items()
        ]
        self.embedding_bag_collection = EmbeddingBagCollection(tables=tables, is_weighted=True)
        self.over = nn.Linear(16, 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.embedding_bag_collection(sparse_features).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_labels_and_weights_of_other_precisions_are_taken(gloo, tmp_path: Path, dtype: torch.dtype) -> None:
    results = []
    for of_data in (torch.float32, dtype):

        def change(batch: Batch, of_data: torch.dtype = of_data) -> Batch:
            own = (torch.arange(batch.sparse_features.values().numel()) % 4 / 4 + 0.5).to(of_data)
            return changed(batch, weights=own, labels=batch.labels.to(of_data))

        torch.manual_seed(0)
        recipe = everywhere(dataclasses.replace(make_recipe(), model=Weighted()), change)
        outcome = search(recipe, 4.0, tmp_path / str(of_data), CPU, settings=QUICK)
        results.append(
            (outcome.history, evaluate(TrainTask(outcome.model, recipe.loss), recipe.data.test, recipe.loss, CPU))
        )
    assert results[0] == results[1]


@given(st.sampled_from(INTEGERS), st.booleans(), st.booleans())
def test_what_lookups_take_is_left_as_it_is(dtype: torch.dtype, is_weighted: bool, is_ranked: bool) -> None:
    batch = narrow(dtype)(make_batch(6, 0))
    batch = ranked(batch, 3) if is_ranked else batch
    if is_weighted:
        batch = changed(batch, weights=torch.rand(batch.sparse_features.values().numel()))
    ready = for_lookup(batch)
    assert (ready is batch) == (dtype in (torch.int32, torch.int64))
    assert type(ready) is type(batch)
    assert ready.sparse_features.values().tolist() == batch.sparse_features.values().tolist()
    for part in ("lengths", "stride", "keys", "weights_or_none"):
        got, expected = getattr(ready.sparse_features, part)(), getattr(batch.sparse_features, part)()
        assert torch.equal(got, expected) if isinstance(got, torch.Tensor) else got == expected


# Blocks


def test_no_more_blocks_are_cut_than_can_be_numbered() -> None:
    tables = make_collection().embedding_bag_configs()
    counts = FrequencyCounts({name: torch.ones(rows, dtype=torch.int64) for name, rows in ROWS.items()}, {}, 1)
    with pytest.raises(ValueError, match=r"^num_blocks: expected at most 65535, got 1000000000$"):
        blocks_from_counts(counts, tables, num_blocks=10**9)


# Splits that overlap


def warnings_of(data: DataSplits, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is warned of once all splits were read."""
    noted = with_notes(data)
    for name in SPLITS:
        list(getattr(noted, name))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_overlaps(noted, Ranks())
    return [record.getMessage() for record in caplog.records]


def splits(**batches: Iterable[Batch]) -> DataSplits:
    own = {name: [make_batch(32, 1000 * place + seed) for seed in range(4)] for place, name in enumerate(SPLITS)}
    return DataSplits(**(own | {name: list(of) for name, of in batches.items()}))


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_the_same_batch_in_two_splits_is_warned_of(first: int, second: int, caplog: pytest.LogCaptureFixture) -> None:
    data, (one, other) = splits(), (SPLITS[first], SPLITS[second])
    if one != other:
        getattr(data, other).append(getattr(data, one)[0])
    found = warnings_of(data, caplog)
    assert len(found) == (one != other)
    for message in found:
        assert f"of the {one} split" in message
        assert f"of the {other} split" in message


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_samples_of_test_in_train_are_warned_of_in_whatever_batches(
    share: float, caplog: pytest.LogCaptureFixture
) -> None:
    data = splits()
    taken = [slice_of(batch, 0, int(32 * share)) for batch in data.test if share]
    found = warnings_of(dataclasses.replace(data, train=[*data.train, *taken]), caplog)
    assert len(found) == (share > 0.5)
    for message in found:
        assert message.startswith(
            f"about {int(32 * share) / 32:.0%} of the test split's samples are in the train split"
        )


def test_samples_that_differ_in_dense_features_alone_are_others(caplog: pytest.LogCaptureFixture) -> None:
    data = splits()
    others = [dataclasses.replace(batch, dense_features=batch.dense_features + 1) for batch in data.test]
    assert warnings_of(dataclasses.replace(data, train=others), caplog) == []


def test_a_panel_that_is_asked_every_day_is_no_overlap(caplog: pytest.LogCaptureFixture) -> None:
    """The same samples once a day: they repeat in train, which has many days, and not in the others, of one each."""
    day = [make_batch(64, seed) for seed in range(3)]
    days = [day[index % 3] for index in range(9)]
    copies = {name: [changed(batch) for batch in day] for name in ("validation", "selection", "test")}
    assert not warnings_of(splits(train=[changed(batch) for batch in days], **copies), caplog)


def test_samples_that_repeat_anyway_are_no_overlap(caplog: pytest.LogCaptureFixture) -> None:
    """Forty users and two labels make eighty samples, all of which each split has."""

    def few(batch: Batch) -> Batch:
        lengths = torch.tensor([1, 0]).repeat_interleave(64)
        values = batch.sparse_features["user"].values()
        return changed(batch, values=values, lengths=lengths, dense_features=torch.zeros(64, 0))

    parts = {name: [few(make_batch(64, 1000 * at + s)) for s in range(30)] for at, name in enumerate(SPLITS)}
    assert warnings_of(DataSplits(**parts), caplog) == []


@given(
    st.lists(st.integers(0, 60), max_size=150), st.lists(st.integers(0, 60), max_size=150), st.sampled_from([4, 40, 99])
)
def test_a_sketch_has_the_smallest_samples_and_how_often_they_occur(first: list, second: list, size: int) -> None:
    sketches = []
    for values in (first, second):
        sketch = SampleSketch(size)
        for begin in range(0, len(values), 7):
            sketch.add(np.array(values[begin : begin + 7], np.uint64))
        ids, times = sketch.up_to(sketch.limit)
        distinct = sorted(set(values))[:size]
        assert ids.tolist() == distinct
        assert times.tolist() == [values.count(value) for value in distinct]
        assert all(value in distinct for value in values if value <= sketch.limit)
        sketches.append(sketch)
    limit = min(sketch.limit for sketch in sketches)
    own, others = [v for v in first if v <= limit], [v for v in second if v <= limit]
    found = share_found(*sketches)
    if len(set(own)) < 10 or not others:
        assert found == 0.0
    else:
        assert found == pytest.approx(sum(v in others for v in own) / len(own))
    whole = [value for value in second if value <= sketches[1].limit]
    repeated = sum(whole.count(value) > 1 for value in whole) / max(1, len(whole))
    assert share_repeated(sketches[1]) == pytest.approx(repeated)


# A sigmoid too many


class Ends(nn.Module):
    """A model that ends in some function, with tables, dropout and statistics of its own."""

    def __init__(self, last: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embedding_bag_collection = make_collection()
        self.norm, self.dropout, self.over = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(20, 1)
        self.last = last

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.embedding_bag_collection(sparse_features).values()
        return self.last(self.over(self.dropout(torch.cat([pooled, self.norm(dense_features)], dim=1))))


ENDS = [
    (torch.sigmoid, True),
    (nn.Sigmoid(), True),
    (lambda x: x.sigmoid().squeeze(1), True),
    (lambda x: x.sigmoid().clamp(1e-6, 1 - 1e-6).reshape(-1), True),
    (nn.functional.hardsigmoid, True),
    (lambda x: x, False),
    (lambda x: torch.logit(torch.sigmoid(x), eps=1e-6), False),
    (nn.functional.logsigmoid, False),
    (lambda x: torch.sigmoid(x) * x, False),
    (lambda x: torch.stack([x.sigmoid(), x], 1)[:, 1], False),
    (lambda x: torch.cat([x.sigmoid(), x])[len(x) :], False),
    (lambda x: torch.cat([x.sigmoid()[:1], x.sigmoid()[1:]]), True),
    (lambda x: x.detach(), False),
    (lambda x: x @ torch.zeros(7, 7), False),
]


@pytest.mark.parametrize(("last", "expected"), ENDS)
def test_a_final_sigmoid_is_seen_and_nothing_else_is_changed(last: Callable, expected: bool) -> None:
    model = Ends(last)
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, batch, random_numbers = [m.training for m in model.modules()], make_batch(8, 0), torch.get_rng_state()
    assert ends_in_sigmoid(model, batch) == expected
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert batch.sparse_features._jt_dict is None


def deepfm(loss: nn.Module) -> Recipe:
    model = SimpleDeepFMNN(4, make_collection(), hidden_layer_size=8, deep_fm_dimension=4)
    return dataclasses.replace(make_recipe(), model=model, loss=loss)


@pytest.mark.parametrize(("loss", "warned"), [(nn.BCEWithLogitsLoss(), 1), (nn.MSELoss(), 0)])
def test_a_search_warns_of_it_once(gloo, loss: nn.Module, warned: int, caplog: pytest.LogCaptureFixture) -> None:
    recipe = deepfm(loss)
    tables = table_configs(recipe.model)
    with caplog.at_level(logging.WARNING):
        checked_counts.read_before_training(recipe, tables, Ranks(), CountLimits())
    messages = [record.getMessage() for record in caplog.records]
    assert (
        sum("the model ends in a sigmoid, and BCEWithLogitsLoss applies another" in text for text in messages) == warned
    )
    assert len(messages) == warned
