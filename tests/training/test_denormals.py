"""Denormals are flushed while a model trains, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.shard import flushing_denormals, is_flushing, process_group, shard
from examples.synthetic import demo

pytestmark = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush denormals")


class Watched:
    """Batches that note at every epoch whether denormals are flushed where they are read."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches
        self.seen: list[bool] = []

    def __iter__(self) -> Iterator[Batch]:
        self.seen.append(is_flushing())
        return iter(self.batches)


@pytest.fixture
def watched() -> tuple[Recipe, Watched]:
    recipe = demo(None)
    batches = Watched(list(recipe.data.train)[:2])
    return replace(recipe, data=replace(recipe.data, train=batches)), batches


@pytest.mark.parametrize("before", [False, True])
def test_it_is_as_before_afterwards(before: bool) -> None:
    torch.set_flush_denormal(before)
    try:
        with flushing_denormals():
            with flushing_denormals():
                pass
            assert is_flushing()
        assert is_flushing() is before
    finally:
        torch.set_flush_denormal(False)


@flushing_denormals()
def fail() -> None:
    raise KeyError("while flushing")


def test_it_ends_with_an_error() -> None:
    with pytest.raises(KeyError, match="while flushing"):
        fail()
    assert not is_flushing()


def test_a_run_flushes() -> None:
    with process_group():
        assert is_flushing()
    assert not is_flushing()


def test_plain_training_flushes(watched: tuple[Recipe, Watched], tmp_path: Path) -> None:
    recipe, batches = watched
    with process_group() as device:
        torch.set_flush_denormal(False)  # as in a program of somebody else's, whose group it is
        model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, device)
        train_plainly(model, optimizer, recipe, device, max_epochs=1, patience=1)
        assert not is_flushing()
    assert batches.seen == [True]


def test_a_search_flushes(watched: tuple[Recipe, Watched], tmp_path: Path) -> None:
    recipe, batches = watched
    with process_group() as device:
        torch.set_flush_denormal(False)
        search(recipe, 10, tmp_path, device, settings=SearchSettings(num_blocks=3, epochs=1))
        assert not is_flushing()
    assert batches.seen[-3:] == [True] * 3


@pytest.mark.parametrize("is_flushed", [False, True])
def test_adams_averages_of_values_without_gradients(is_flushed: bool) -> None:
    """Without flushing rounding keeps them at a denormal; the day it does not, nothing here is needed."""
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.full((64,), 1e-4)
    with flushing_denormals() if is_flushed else nullcontext():
        for _ in range(1200):
            optimizer.step()
            weight.grad.zero_()
    assert bool(optimizer.state[weight]["exp_avg"].any()) is not is_flushed
