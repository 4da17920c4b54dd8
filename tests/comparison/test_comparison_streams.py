"""The validation split as training data: every batch of both, and blocks as without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.comparison.methods import MethodTask
from dnis_torchrec.comparison.methods.trained_scheme import row_blocks
from dnis_torchrec.comparison.streams import InterleavedBatches, train_on_validation
from dnis_torchrec.data.over_ranks import all_samples
from tests.tiny import make_recipe


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any))
def test_interleaving_keeps_each_stream_whole_in_order_and_spread(lengths: list[int]) -> None:
    streams = [[(stream, index) for index in range(length)] for stream, length in enumerate(lengths)]
    merged = InterleavedBatches(*streams)
    first = list(merged)
    assert sorted(first) == sorted(item for stream in streams for item in stream)
    assert list(merged) == first
    for stream, items in enumerate(streams):
        places = [place for place, item in enumerate(first) if item[0] == stream]
        assert [first[place] for place in places] == items
        for index, place in enumerate(places):  # each lies where its share of the epoch is, give or take the others
            assert abs(place / len(first) - index / len(items)) <= (len(streams) / len(first)) + 1 / len(items)


def test_interleaving_has_the_new_order_of_every_epoch() -> None:
    class Reversing:
        """[0, 1, 2], then [2, 1, 0], and so on; it does not know its length."""

        order = (2, 1, 0)

        def __iter__(self):
            self.order = self.order[::-1]
            return iter(self.order)

    merged = InterleavedBatches(Reversing(), "x")
    first, second = list(merged), list(merged)
    assert first != second
    assert {*first} == {*second} == {0, 1, 2, "x"}


class DroppingTail(list):
    """Says of itself what an epoch leaves out."""

    def counted(self):
        return iter([*self, "tail"])


class Joining(DroppingTail):
    """Takes another stream in by itself."""

    def joined_with(self, validation):
        return Joining([*self, *validation])


@pytest.mark.parametrize("kind", [DroppingTail, Joining])
def test_rows_are_counted_in_the_training_split_alone(kind: type[DroppingTail]) -> None:
    recipe = make_recipe()
    data = replace(recipe.data, train=kind(["a"]), validation=["x"])
    train = train_on_validation(replace(recipe, data=data)).data.train
    assert list(train) == ["a", "x"]
    assert list(all_samples(train)) == ["a", "tail"]


def test_validation_data_leaves_rows_in_their_blocks(tmp_path: Path) -> None:
    """Or blocks of ids in the order of training frequencies would need bytes for saying which row is where."""
    recipe = make_recipe()
    rows = torch.arange(40)

    def batch_of(ids: torch.Tensor) -> Batch:
        lengths = torch.cat([torch.ones(len(ids), dtype=torch.int64), torch.zeros(len(ids), dtype=torch.int64)])
        features = KeyedJaggedTensor(keys=["user", "genre"], values=ids, lengths=lengths)
        return Batch(torch.zeros(len(ids), 4), features, torch.zeros(len(ids)))

    falling = [batch_of(rows.repeat_interleave(rows.flip(0) + 1))]
    data = replace(recipe.data, train=falling, validation=[batch_of(rows[20:].repeat(30))])
    recipe = replace(recipe, data=data)
    blocks = []
    for each in (recipe, train_on_validation(recipe)):
        task = MethodTask(
            build=lambda _, each=each: each, compression=2, seed=0, device=torch.device("cpu"), folder=tmp_path
        )
        blocks.append(row_blocks(task)[1])
    routings = [each.routings["user"] for each in blocks]
    assert routings[0].boundaries is not None
    assert torch.equal(routings[1].boundaries, routings[0].boundaries)
