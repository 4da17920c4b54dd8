"""Batches: cut, sliced over ranks, made ready for lookups, and checked before the first training step."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.batches import BatchParts, LookupBatches, features_of, for_lookup, samples_where, slice_of
from dnis_torchrec.data.over_ranks import (
    JUDGE,
    LEARN,
    JoinedBatches,
    RankBatches,
    SeenSamples,
    SplitSummary,
    all_samples,
    check_same,
    count_training_data,
    samples_to_measure,
    split_over_ranks,
)
from dnis_torchrec.data.recipe import SPLITS, DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.search import search as search_module
from dnis_torchrec.search.search import search
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training.evaluate import evaluate
from examples.models import FactorizationMachine
from tests import tiny


@given(st.lists(tiny.samples, min_size=1, max_size=9), st.data(), st.booleans())
def test_a_slice_holds_just_its_samples(of: list[tiny.Sample], data: st.DataObject, weighted: bool) -> None:
    first = data.draw(st.integers(0, len(of) - 1))
    last = data.draw(st.integers(first + 1, len(of)))
    sliced = slice_of(tiny.to_batch(of, weighted=weighted), first, last)
    assert sliced.sparse_features.stride() == last - first
    assert sliced.sparse_features.lengths().is_contiguous()  # as collectives want it
    assert tiny.to_samples(sliced) == of[first:last]


def test_train_and_validation_are_joined_in_the_same_order_whenever_an_epoch_begins() -> None:
    frame = {"user": [row % 9 for row in range(200)], "liked": [0.0, 1.0] * 100, "age": range(200)}
    data, other = (DataSplits.from_frame(frame, label="liked", ids=["user"], dense=["age"], batch_size=4) for _ in "ab")
    joined = JoinedBatches(data.train, data.validation)
    sizes = [sum(1 for _ in part) for part in (data.train, data.validation)]
    joined.epoch = 0
    epochs = [[batch.dense_features for batch in joined] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [sum(sizes)] * 2
    assert not torch.cat(epochs[0]).equal(torch.cat(epochs[1]))
    resumed = JoinedBatches(other.train, other.validation)
    resumed.epoch = 1
    assert torch.cat([batch.dense_features for batch in resumed]).equal(torch.cat(epochs[1]))
    every = sorted(torch.cat([batch.dense_features for batch in all_samples(joined)]).flatten().tolist())
    parts = [[batch.dense_features for batch in part] for part in (data.train, data.validation)]
    assert every == sorted(torch.cat([*parts[0], *parts[1]]).flatten().tolist())
    held_out = torch.cat(parts[1])
    places = [place for place, dense in enumerate(epochs[0]) if bool(torch.isin(dense, held_out).all())]
    step = sum(sizes) / sizes[1]  # validation batches are spread evenly over an epoch
    assert all(abs(place - (index + 0.5) * step) <= 1.5 for index, place in enumerate(places)), places
    assert len(places) == sizes[1]


@given(st.lists(tiny.samples, min_size=1, max_size=9), st.data(), st.booleans())
def test_samples_are_chosen_one_by_one(of: list[tiny.Sample], data: st.DataObject, weighted: bool) -> None:
    keeps = data.draw(st.lists(st.booleans(), min_size=len(of), max_size=len(of)).filter(any))
    chosen = samples_where(tiny.to_batch(of, weighted=weighted), torch.tensor(keeps))
    assert tiny.to_samples(chosen) == [sample for sample, keep in zip(of, keeps, strict=True) if keep]


@given(st.lists(tiny.samples, min_size=1, max_size=9), st.data())
def test_samples_are_seen_where_training_has_seen_all_their_rows(of: list[tiny.Sample], data: st.DataObject) -> None:
    rows = 1 + max([0, *(row for _, _, bags in of for bag in bags for row in bag)])
    counts = {name: torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))) for name in "ab"}
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=4, feature_names=[f]) for n, f in ("af", "bg")
    ]
    is_seen = [all(counts[n][row] for n, bag in zip("ab", bags, strict=True) for row in bag) for _, _, bags in of]
    for are_seen in (True, False):
        part = SeenSamples([tiny.to_batch(of, weighted=False)], counts, tables, are_seen=are_seen)
        expected = [sample for sample, seen in zip(of, is_seen, strict=True) if seen == are_seen]
        assert [sample for batch in part for sample in tiny.to_samples(batch)] == expected


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^batch: expected a dataclass, "):
        slice_of([1], 0, 1)  # type: ignore[arg-type]
    features = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2]],
    )
    with pytest.raises(NotImplementedError, match=r"^batch: supported is one batch size, got several"):
        slice_of(Batch(torch.zeros(2, 1), features, torch.zeros(2)), 0, 1)


@given(st.lists(tiny.samples, min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_the_parts_are_the_batch(of: list[tiny.Sample], num_parts: int, at_least: int, weighted: bool) -> None:
    parts = list(BatchParts([tiny.to_batch(of, weighted=weighted)], num_parts, at_least))
    sizes = [part.labels.numel() for part in parts]
    assert len(parts) == max(1, min(num_parts, len(of) // at_least))
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(at_least, len(of))
    assert [sample for part in parts for sample in tiny.to_samples(part)] == of


@dataclass
class Counting:
    """Batches that count their epochs, as those of the examples do."""

    batches: list[Batch]
    epoch: int = 0

    def __iter__(self) -> Iterator[Batch]:
        self.epoch += 1
        return iter(self.batches)


def of_rank(batches: Iterable[Batch]) -> RankBatches:
    return RankBatches(batches, tiny.OneOf(0, 2), "train", LEARN)


@pytest.mark.parametrize("cut", [partial(BatchParts, num_parts=2), of_rank])
def test_the_epoch_is_that_of_the_batches(cut: Callable[[Iterable[Batch]], Any]) -> None:
    whole = Counting(splits(of=SAMPLES).train)
    parts = cut(whole)
    assert (len(list(parts)) > 0, parts.epoch) == (True, 1)
    parts.epoch = 7
    assert whole.epoch == 7
    assert not hasattr(cut([]), "epoch")


def test_what_is_split_over_ranks_stays_so() -> None:
    """Else every rank would take a slice of what is its own already."""
    own = Counting(splits(of=SAMPLES).train)
    own.is_split_over_ranks = True
    data = DataSplits(train=own, validation=BatchParts(own, 2), selection=[], test=BatchParts([], 2))
    split = split_over_ranks(data, tiny.OneOf(0, 2))
    assert (split.train, split.validation) == (own, data.validation)
    assert isinstance(split.test, RankBatches)
    assert all_samples(own) is own
    assert split_over_ranks(data, Ranks()) is data


batches = st.lists(st.lists(tiny.samples, min_size=1, max_size=9), min_size=1, max_size=4)


@given(batches, st.integers(2, 4))
def test_learning_takes_equal_slices_on_all_ranks(of: list[list[tiny.Sample]], world_size: int) -> None:
    whole = [tiny.to_batch(part, weighted=False) for part in of]
    taken = [list(RankBatches(whole, tiny.OneOf(r, world_size), "train", LEARN)) for r in range(world_size)]
    kept = [part for part in of if len(part) >= world_size]
    for own in taken:
        assert [batch.labels.numel() for batch in own] == [len(part) // world_size for part in kept]
    for number, part in enumerate(kept):
        together = [sample for own in taken for sample in tiny.to_samples(own[number])]
        assert together == part[: len(part) // world_size * world_size]


@given(batches, st.integers(2, 4))
def test_judging_and_counting_leave_nothing_out(of: list[list[tiny.Sample]], world_size: int) -> None:
    whole = [tiny.to_batch(part, weighted=False) for part in of]
    ranks = [tiny.OneOf(rank, world_size) for rank in range(world_size)]
    counted = [list(all_samples(RankBatches(whole, own, "train", LEARN))) for own in ranks]
    together = [sample for own in counted for batch in own for sample in tiny.to_samples(batch)]
    assert sorted(together) == sorted(sample for part in of for sample in part)
    judged = [RankBatches(whole, own, "test", JUDGE) for own in ranks]
    short = next((number for number, part in enumerate(of) if len(part) < world_size), None)
    for own in judged:
        if short is not None:
            with pytest.raises(ValueError, match=f"^test batch {short}: expected at least one sample for each of"):
                list(own)
    if short is None:
        for number, part in enumerate(of):
            assert [sample for own in judged for sample in tiny.to_samples(list(own)[number])] == part


@given(batches, st.integers(2, 4))
def test_measuring_takes_all_of_what_every_rank_has_a_sample_of(of: list[list[tiny.Sample]], world_size: int) -> None:
    whole = [tiny.to_batch(part, weighted=False) for part in of]
    learned = [RankBatches(whole, tiny.OneOf(r, world_size), "train", LEARN) for r in range(world_size)]
    measured = [samples_to_measure(own) for own in learned]
    kept = [part for part in of if len(part) >= world_size]
    for _ in range(2):  # again and again
        taken = [list(own) for own in measured]
        assert [len(own) for own in taken] == [len(kept)] * world_size
        for number, part in enumerate(kept):
            assert [sample for own in taken for sample in tiny.to_samples(own[number])] == part
    assert samples_to_measure(whole) is whole


@pytest.mark.parametrize("split", ["train", "validation"])
def test_no_sample_of_what_is_learned_on_stays_unchecked(split: str) -> None:
    """Sample 6 of 7 is in no rank's third, but in a rank's share of the second half, which is what an upper step takes.

    An error that one rank met in training would leave the others waiting.
    """
    recipe = tiny.make_recipe()
    batch = tiny.make_batch(7, seed=0)
    batch.sparse_features.values()[6] = 40
    data = split_over_ranks(replace(recipe.data, **{split: [batch]}), tiny.OneOf(2, 3))
    with pytest.raises(ValueError, match=r"table 'user', feature 'user'.*: expected ids in 0\.\.39, got 40"):
        count_training_data(data, recipe.loss, table_configs(recipe.model))


def splits(*names: str, of: list[tiny.Sample]) -> DataSplits:
    """The same batch in every split; those named hold it twice."""
    batch = tiny.to_batch(of, weighted=False)
    made = {name: [batch] * (1 + (name in names)) for name in ("train", "validation", "selection", "test")}
    return DataSplits(**made)


SAMPLES: list[tiny.Sample] = [(0.0, 0.0, ((1, 2), ())), (1.0, 1.0, ((3,), (4,)))]


def test_another_label_id_or_order_is_seen() -> None:
    def fingerprint(of: list[list[tiny.Sample]]) -> int | None:
        sliced = RankBatches([tiny.to_batch(part, weighted=False) for part in of], tiny.OneOf(0, 2), "train", LEARN)
        assert sliced.fingerprint is None
        list(all_samples(sliced))
        return sliced.fingerprint

    (first, second), other = SAMPLES, (0.0, 1.0, ((3,), (5,)))
    variants = [[[first, second]], [[second, first]], [[first, other]], [[first], [second]], [[second], [first]]]
    assert len({fingerprint(of) for of in variants}) == len(variants)
    assert fingerprint(variants[0]) == fingerprint(variants[0])


def test_other_batches_on_another_rank_are_named() -> None:
    class Talking(tiny.OneOf):
        def max_(self, values: torch.Tensor) -> torch.Tensor:
            return torch.maximum(values, torch.tensor([5, -5]))

    data = split_over_ranks(splits(of=SAMPLES), Talking(0, 2))
    for part in (data.train, data.validation, data.selection, data.test):
        list(part)
    message = "^train stream: expected the same batches in the same order on every rank, got others$"
    with pytest.raises(ValueError, match=message):
        check_same(data, Talking(0, 2))
    check_same(data, tiny.OneOf(0, 2))


def fingerprint_of(batches: Iterable[Batch]) -> int:
    summary = SplitSummary()
    for batch in all_samples(batches):
        summary.add(batch)
    return summary.fingerprint


def noted_of(of: list[list[tiny.Sample]], ranks: Ranks | None = None) -> int:
    """The fingerprint of what a rank counts; of one process if None."""
    whole = [tiny.to_batch(part, weighted=False) for part in of]
    return fingerprint_of(whole if ranks is None else RankBatches(whole, ranks, "train", LEARN))


@given(batches, st.integers(2, 4), st.randoms(use_true_random=False))
def test_the_same_samples_have_one_fingerprint_however_they_come(
    of: list[list[tiny.Sample]], world_size: int, order
) -> None:
    together = [sample for part in of for sample in part]
    expected = noted_of(of)
    order.shuffle(together)
    assert noted_of([together]) == expected
    assert sum(noted_of(of, tiny.OneOf(rank, world_size)) for rank in range(world_size)) % (1 << 40) == expected


def test_other_samples_have_another_fingerprint() -> None:
    first, second = SAMPLES
    variants = {
        "as they are": [first, second],
        "another label": [first, (0.0, *second[1:])],
        "labels swapped": [(1.0, *first[1:]), (0.0, *second[1:])],
        "another id": [first, (*second[:2], ((3,), (5,)))],
        "an id of row 0 more": [first, (*second[:2], ((3, 0), (4,)))],
        "ids swapped between samples": [(*first[:2], ((1, 3), ())), (*second[:2], ((2,), (4,)))],
        "ids swapped between features": [first, (*second[:2], ((4,), (3,)))],
        "a sample more": [first, second, second],
        "a sample less": [first],
    }
    found = {name: noted_of([of]) for name, of in variants.items()}
    assert len(set(found.values())) == len(found), found


def test_batches_of_two_labels_and_two_sides_are_sliced_and_told_apart() -> None:
    whole = tiny.two_sided(7, seed=1)
    parts = [list(RankBatches([whole], tiny.OneOf(rank, 2), "test", JUDGE)) for rank in range(2)]
    first, second = parts[0][0], parts[1][0]
    assert (first.labels.shape, second.labels.shape) == ((3, 2), (4, 2))
    joined = torch.cat([first.labels, second.labels]).nan_to_num(-1)
    assert torch.equal(joined, whole.labels.nan_to_num(-1))
    for rank, part in enumerate((first, second)):
        rows = slice(0, 3) if rank == 0 else slice(3, 7)
        assert torch.equal(part.weights, whole.weights[rows])
        lengths = whole.candidates.lengths()[rows]
        assert torch.equal(part.candidates.lengths(), lengths)

    ratings, genres = whole.labels.clone(), whole.candidates.values().clone()
    ratings[2, 1] = 9.0
    genres[0] = (genres[0] + 1) % 12
    other = KeyedJaggedTensor(whole.candidates.keys(), genres, lengths=whole.candidates.lengths())
    changed = [replace(whole, labels=ratings), replace(whole, candidates=other)]
    assert len({fingerprint_of([batch]) for batch in (whole, *changed)}) == 3


def test_a_feature_belongs_to_one_side() -> None:
    whole = tiny.two_sided(4, seed=1)
    assert features_of(whole).keys() == ["user", "genre"]
    with pytest.raises(ValueError, match=r"^batch: expected features in one KeyedJaggedTensor each, got \['user'\]"):
        features_of(replace(whole, candidates=whole.sparse_features))


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
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **{name: tiny.Repeatable(batches)}))


def everywhere(recipe: Recipe, change: Callable[[Batch], Batch]) -> Recipe:
    for name in SPLITS:
        recipe = with_split(recipe, name, change)
    return recipe


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gets so far as to begin to train fails of another error."""
    monkeypatch.setattr(search_module, "shard", None)


def with_weight(batch: Batch, value: float) -> Batch:
    own = torch.ones(batch.sparse_features.values().numel())
    own[64 + 5] = value  # of the second feature
    return changed(batch, weights=own)


def with_dense_value(batch: Batch, value: float) -> Batch:
    features = batch.dense_features.clone()
    features[3, 1] = value
    return changed(batch, dense_features=features)


def no_samples(batch: Batch) -> Batch:
    none = torch.zeros(0, dtype=torch.int64)
    return changed(batch, values=none, lengths=none, dense_features=batch.dense_features[:0], labels=none.float())


FEWER = "expected {} samples, one for each label, got {}; leave incomplete samples out"
WRONG: list[tuple[Callable[[Batch], Batch], str]] = [
    *(
        (partial(change, value=value), f"{place}, got {value}; clean the data$")
        for change, place in (
            (with_dense_value, ", dense_features, sample 3, column 1: expected finite numbers"),
            (with_weight, ", feature 'genre': expected finite weights"),
        )
        for value in (math.nan, -math.inf)
    ),
    (no_samples, r": expected at least one sample, got none; leave empty batches out$"),
    (
        lambda b: changed(b, values=b.sparse_features.values().float()),
        r", feature 'user': expected integer ids, got torch.float32; hash or number what is no integer$",
    ),
    (lambda b: changed(b, labels=b.labels[:-1]), f", sparse_features: {FEWER.format(63, 64)}"),
    (lambda b: changed(b, dense_features=b.dense_features[:-1]), f", dense_features: {FEWER.format(64, 63)}"),
    (
        lambda b: changed(b, lengths=b.sparse_features.lengths().short()),
        r", feature 'user': expected int32 or int64 lengths, got torch.int16$",
    ),
    (lambda b: changed(b, labels=b.labels * math.inf), ": expected finite labels, got (nan|inf)"),
    (lambda b: changed(b, labels=b.labels.int() - 1), r": expected labels in \[0, 1\] .*, got -1.0"),
    (lambda b: changed(b, labels=b.labels[:, None]), r": expected labels of shape \(B,\)"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *wrong) for name, wrong in zip(cycle(SPLITS), WRONG, strict=False)]
)
def test_bad_batches_of_any_split_are_refused_before_training(
    gloo, tmp_path: Path, untrained: None, name: str, change: Callable[[Batch], Batch], message: str
) -> None:
    recipe = with_split(tiny.make_recipe(), name, change, last_only=True)
    index = len(getattr(recipe.data, name).batches) - 1
    with pytest.raises(ValueError, match=f"^{name} batch {index}{message}"):
        search(recipe, 4.0, tmp_path, CPU, settings=tiny.QUICK)


def test_a_batch_without_samples_of_a_later_epoch_is_named() -> None:
    batches = LookupBatches(tiny.Repeatable([tiny.make_batch(4, 0), no_samples(tiny.make_batch(4, 1))]), "train")
    with pytest.raises(ValueError, match=r"^train batch 1: expected at least one sample, got none"):
        list(batches)
    sliced = RankBatches(tiny.Repeatable([no_samples(tiny.make_batch(4, 1))]), Ranks(), "train", LEARN)
    with pytest.raises(ValueError, match=r"^train batch 0: expected at least one sample, got none"):
        list(sliced)


def test_a_batch_without_samples_is_passed_over_where_it_is_only_judged(gloo) -> None:
    recipe = tiny.make_recipe()
    task, batches = TrainTask(recipe.model, recipe.loss), list(recipe.data.test)
    found = evaluate(task, [no_samples(batches[0]), *batches], recipe.loss, CPU)
    assert found == evaluate(task, batches, recipe.loss, CPU)


def narrow(dtype: torch.dtype) -> Callable[[Batch], Batch]:
    return lambda batch: changed(batch, values=batch.sparse_features.values().to(dtype))


class Own(Batch):
    """A user's batch, with an __init__ of its own."""

    def __init__(self, whole: Batch) -> None:
        super().__init__(whole.dense_features, whole.sparse_features, whole.labels)


def test_a_batch_of_a_users_own_is_converted_too() -> None:
    whole = narrow(torch.uint8)(tiny.make_batch(8, 0))
    own = Own(whole)
    ready = for_lookup(own)
    assert type(ready) is Own
    assert ready.sparse_features.values().dtype == torch.int64
    assert own.sparse_features is whole.sparse_features


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_of_any_width_are_counted_alike(dtype: torch.dtype) -> None:
    batch, tables = tiny.make_batch(20, 0), tiny.make_collection().embedding_bag_configs()
    expected = count_frequencies([batch.sparse_features], tables).counts
    found = count_frequencies([narrow(dtype)(batch).sparse_features], tables).counts
    assert {name: counts.tolist() for name, counts in found.items()} == {n: c.tolist() for n, c in expected.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool])
def test_ids_that_are_no_integers_are_refused_by_feature(dtype: torch.dtype) -> None:
    batch = narrow(dtype)(tiny.make_batch(20, 0))
    message = rf"^table 'user', feature 'user', batch 0: expected integer ids, got {dtype}; hash or number"
    with pytest.raises(ValueError, match=message):
        count_frequencies([batch.sparse_features], tiny.make_collection().embedding_bag_configs())
    with pytest.raises(ValueError, match=rf"^features 'user', 'genre': expected integer ids, got {dtype}"):
        for_lookup(batch)


def searched(recipe: Recipe, folder: Path) -> tuple[object, ...]:
    torch.manual_seed(0)
    outcome = search(recipe, 4.0, folder, CPU, settings=tiny.QUICK)
    metrics = evaluate(TrainTask(outcome.model, recipe.loss), recipe.data.test, recipe.loss, CPU)
    return metrics, outcome.history, outcome.scheme.parameters


def test_ids_labels_and_weights_of_other_widths_are_searched_and_evaluated_alike(gloo, tmp_path: Path) -> None:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
        for name, rows in tiny.ROWS.items()
    ]
    results = []
    for of_data, of_ids in ((torch.float32, torch.int64), (torch.bfloat16, torch.uint16)):

        def change(batch: Batch, of_data: torch.dtype = of_data, of_ids: torch.dtype = of_ids) -> Batch:
            ids = batch.sparse_features.values().to(of_ids)
            own = (torch.arange(ids.numel()) % 4 / 4 + 0.5).to(of_data)
            return changed(batch, values=ids, weights=own, labels=batch.labels.to(of_data))

        torch.manual_seed(0)
        recipe = everywhere(
            dataclasses.replace(
                tiny.make_recipe(), model=FactorizationMachine(EmbeddingBagCollection(tables=tables, is_weighted=True))
            ),
            change,
        )
        results.append(searched(recipe, tmp_path / str(of_data)))
        assert results[-1] == results[0], of_data


@given(st.sampled_from(INTEGERS), st.booleans(), st.booleans())
def test_what_lookups_take_is_left_as_it_is(dtype: torch.dtype, is_weighted: bool, is_ranked: bool) -> None:
    batch = narrow(dtype)(tiny.make_batch(6, 0))
    batch = tiny.ranked(batch, 3) if is_ranked else batch
    if is_weighted:
        batch = changed(batch, weights=torch.rand(batch.sparse_features.values().numel()))
    ready = for_lookup(batch)
    assert (ready is batch) == (dtype in (torch.int32, torch.int64))
    assert type(ready) is type(batch)
    assert ready.sparse_features.values().tolist() == batch.sparse_features.values().tolist()
    for part in ("lengths", "stride", "keys", "weights_or_none"):
        got, expected = getattr(ready.sparse_features, part)(), getattr(batch.sparse_features, part)()
        assert torch.equal(got, expected) if isinstance(got, torch.Tensor) else got == expected
