"""NaN and infinity stop a run before they reach a weight, at once or read late; denormals; signals that end it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.training import settings as signals
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.pipeline import FiniteGuard, NonFiniteError
from dnis_torchrec.training.settings import REQUESTS, Ending, Stopped, StopRequest
from dnis_torchrec.training.shard import flushing_denormals, is_flushing, launched_ranks, process_group, shard
from tests import models
from tests.tiny import make_recipe, read_late

BAD = [float("nan"), float("inf"), float("-inf")]


def prepared(name: str = "dlrm", sharding_type: str | None = None) -> nn.Module:
    model = models.MODELS[name]()
    model = prepare_(model, models.blocks_for(model))
    return model if sharding_type is None else models.shard_as(model, sharding_type)


def tables_of(model: nn.Module) -> dict[tuple[str, int], torch.Tensor]:
    shards = [shard for module in collections(model).values() for shard in local_shards(module)]
    return {(shard.table, shard.first_column): shard.weight for shard in shards}


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    return (
        factor
        * model(dense_features=torch.ones(models.BATCH_SIZE, models.NUM_DENSE), sparse_features=models.features()).sum()
    )


@pytest.mark.parametrize("bad", BAD)
def test_loss(bad: float) -> None:
    model = prepared()
    guard = FiniteGuard(model)
    guard.check_loss(torch.tensor(1e30), "lower step 3")
    message = rf"^lower step 3 \(every table is finite\): expected a finite loss, got {bad}; lower the learning rate"
    with pytest.raises(NonFiniteError, match=message):
        guard.check_loss(torch.tensor(bad), "lower step 3")
    tables_of(model)["movie", 0][8, 7] = bad
    message = rf"^lower step 3, table 'movie': expected a finite loss, got {bad}; .*last good"
    with pytest.raises(NonFiniteError, match=message):
        guard.check_loss(torch.tensor(bad), "lower step 3")


def test_finite_numbers_whose_sum_is_not_are_no_error() -> None:
    model, large = prepared(), torch.full((2,), 3e38)
    guard = FiniteGuard(model)
    guard.check_loss(large, "lower step 3")
    guard.check_alpha_gradient(large.expand(2, 2), 8, "upper step 3")
    dense = [weight for name, weight in model.named_parameters() if ".embedding_bags." not in name]
    assert dense
    for parameter in dense:
        parameter.grad = torch.full_like(parameter, 1e20)
    guard.check_dense_gradients("lower step 3")


@pytest.mark.parametrize(("row", "names"), [(1, ["user"]), (2, ["user"]), (3, ["genre"])])
@pytest.mark.parametrize("bad", BAD)
def test_alpha_gradient(row: int, names: list[str], bad: float) -> None:
    """Tables that share the row of alpha are named; those of another D, or with rows of their own, are not."""
    model = models.MODELS["two_dims"]()
    blocks = models.blocks_for(model)  # three blocks per table
    guard = FiniteGuard(prepare_(model, blocks))
    gradient = torch.zeros(blocks.alpha_shapes[4])
    guard.check_alpha_gradient(gradient, 4, "upper step 2")
    gradient[row, 2] = bad
    message = f"upper step 2, tables {names}, row {row} of alpha: expected a finite gradient, got nan or inf; lower"
    with pytest.raises(NonFiniteError, match=f"^{re.escape(message)}"):
        guard.check_alpha_gradient(gradient, 4, "upper step 2")


@pytest.fixture
def late() -> Iterator[None]:
    """Everything in a test is read late."""
    with read_late():
        yield


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize(
    ("sharding_type", "compiled"), [*((kind, True) for kind in (None, *models.SHARDING_TYPES)), ("table_wise", False)]
)
@pytest.mark.usefixtures("gloo")
def test_no_table_learns_a_bad_gradient(sharding_type: str | None, compiled: bool, is_late: bool) -> None:
    torch.manual_seed(0)  # of some initial weights every ReLU of the over arch is dead, and swallows the NaN
    with models.operators(compiled), read_late() if is_late else nullcontext():
        model = prepared(sharding_type=sharding_type)
        guard, before = FiniteGuard(model), {key: table.clone() for key, table in tables_of(model).items()}
        message = "^lower step 5, table 'user': expected finite gradients, got nan or inf; lower the learning rate"
        with pytest.raises(NonFiniteError, match=message):
            with guard.watch_gradients("lower step 5"):
                loss_of(model, float("nan")).backward()
            assert is_late
            guard.settle()
        assert all(torch.equal(table, before[key]) for key, table in tables_of(model).items())
        if is_late and sharding_type is None:
            grads = [p.grad for name, p in model.named_parameters() if ".embedding_bags." in name]
            assert grads
            assert not any(bool(grad.any()) for grad in grads)
        with guard.watch_gradients("lower step 6"):  # and a good one goes through
            loss_of(model).backward()
        guard.settle()
        if is_late and sharding_type not in (None, "data_parallel"):  # those have fused optimizers
            assert any(not torch.equal(table, before[key]) for key, table in tables_of(model).items())


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_table_whose_gradient_is_bad_is_named(compiled: bool, is_late: bool) -> None:
    with models.operators(compiled), read_late() if is_late else nullcontext():
        model = prepared("bare")
        guard = FiniteGuard(model)
        with pytest.raises(NonFiniteError, match="lower step 0, table 'genre'"):
            with guard.watch_gradients("lower step 0"):
                (model(models.features())["genre_id"] * float("inf")).sum().backward()
            guard.settle()


@pytest.mark.parametrize("is_late", [True, False])
def test_the_table_of_a_sequence_is_named(is_late: bool) -> None:
    model = models.sequences()
    guard = FiniteGuard(model)

    def backward() -> None:
        with guard.watch_gradients("lower step 1"):
            (model["tables"](models.sequence_features(0))["visits"].values() * float("nan")).sum().backward()

    with read_late() if is_late else nullcontext():
        if is_late:
            backward()
            shop = next(p for name, p in model.named_parameters() if "shop" in name)
            assert not bool(shop.grad.any())
        with pytest.raises(NonFiniteError, match="lower step 1, table 'shop'"):
            guard.settle() if is_late else backward()


def test_where_parts_are_not_told_apart_all_tables_are_named() -> None:
    """As where a kernel on a GPU tells in one number whether a gradient is finite."""
    model = prepared()
    guard = FiniteGuard(model)
    (wrapper,) = guard._wrappers.values()
    message = "lower step 7, one of 3 tables, 'user' to 'genre': expected finite gradients"
    with guard.watch_gradients("lower step 7"):
        wrapper.selection._check_gradient(torch.ones(1, dtype=torch.bool), torch.ones(1, 1))
        with pytest.raises(NonFiniteError, match=message):
            wrapper.selection._check_gradient(torch.zeros(1, dtype=torch.bool), torch.ones(1, 1))


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(("is_late", "sharding_type"), [(True, None), (False, None), (False, "table_wise")])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_dense_gradient_is_named_and_late_ones_are_made_zero(
    bad: float, sharding_type: str | None, is_late: bool
) -> None:
    with read_late() if is_late else nullcontext():
        model = prepared(sharding_type=sharding_type)
        guard = FiniteGuard(model)
        guard.check_dense_gradients("lower step 1")  # none yet
        loss_of(model).backward()
        dense = {
            name: p for name, p in model.named_parameters() if ".embedding_bags." not in name and p.grad is not None
        }
        name, parameter = next((n, p) for n, p in dense.items() if "over_arch" in n)
        before = {own: p.grad.clone() for own, p in dense.items()}
        guard.check_dense_gradients("lower step 2")
        assert all(torch.equal(p.grad, before[own]) for own, p in dense.items())
        parameter.grad.view(-1)[0] = bad
        message = rf"^lower step 3, parameter '{name}': expected finite gradients, got nan or inf"
        with pytest.raises(NonFiniteError, match=message):
            guard.check_dense_gradients("lower step 3")
            assert all(not bool(p.grad.any()) for p in dense.values())
            guard.check_loss(torch.tensor(1.0), "upper step 3")


@pytest.mark.usefixtures("late")
def test_finite_gradients_whose_squares_are_not_stay() -> None:
    model = prepared()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    guard = FiniteGuard(model)
    guard.check_dense_gradients("lower step 1")
    guard.settle()
    assert all(bool((parameter.grad == 1e30).all()) for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_gradients_of_every_width_are_made_zero(late: None, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 2).to(dtype), nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -0.0)
    model[1].weight.grad[0] = float("nan")
    guard = FiniteGuard(model)
    guard.check_dense_gradients("lower step 1")
    assert all(not bool(parameter.grad.any()) for parameter in model.parameters())
    with pytest.raises(NonFiniteError, match=r"parameter '1\.weight'"):
        guard.settle()


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
    recipe = make_recipe()
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
        search(recipe, 10, tmp_path, device, settings=SearchSettings(num_blocks=3, epochs=1, patience=1))
        assert not is_flushing()
    assert batches.seen[-3:] == [True] * 3


class SearchEndedError(Exception):
    """Whoever looked at the request has stopped."""


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """Signals that come to whoever had the handlers before."""
    found: list[int] = []
    before = {number: signal.signal(number, lambda number, _: found.append(number)) for number in REQUESTS}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", REQUESTS)
def test_a_request_is_noted_and_handed_on_if_nobody_looks_at_it(seen: list[int], number: int) -> None:
    with StopRequest() as request:
        assert not request.is_requested()
        signal.raise_signal(number)
        assert request.is_requested()
        assert request.number == number
        assert seen == []
    assert seen == [number]


def test_a_request_that_was_looked_at_is_over(seen: list[int]) -> None:
    with suppress(SearchEndedError), StopRequest():
        signal.raise_signal(signal.SIGTERM)
        raise SearchEndedError
    assert seen == []


def test_a_second_signal_is_for_whoever_was_there_before(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(SearchEndedError), StopRequest():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # the same one: the terminal's and the shell's
        signal.raise_signal(signal.SIGTERM)
        assert seen == []
        monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGTERM, signal.SIGINT]
        raise SearchEndedError


def test_torchrun_passes_on_what_its_ranks_may_have_been_sent(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)
    with suppress(SearchEndedError), StopRequest():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        raise SearchEndedError
    assert seen == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_what_ends_ends_where_the_signal_strikes(seen: list[int], number: int, code: int) -> None:
    cleaned = []

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # the same request does not come between
            cleaned.append(True)

    with pytest.raises(Stopped, match=f"stopped by {signal.Signals(number).name}") as stopped, Ending():
        work()
    assert stopped.value.exit_code == code
    assert cleaned == [True]
    assert seen == []
    assert not isinstance(stopped.value, Exception)


def test_a_signal_while_all_is_ending_ends_the_process() -> None:
    if (child := os.fork()) == 0:
        signals.SAME_REQUEST_SECONDS = 0.0
        try:
            with Ending():
                try:
                    signal.raise_signal(signal.SIGTERM)
                finally:
                    signal.raise_signal(signal.SIGHUP)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGHUP


@pytest.mark.parametrize(("number", "ended_by"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, 0)])
@pytest.mark.parametrize("handlers", [StopRequest, Ending])
def test_a_forked_process_is_ended_by_sigterm_alone(handlers, number: int, ended_by: int) -> None:
    """Pools end their workers so; Ctrl-C is sent to all of a terminal's processes, and the parent's to deal with."""
    with handlers():
        if (child := os.fork()) == 0:
            signal.raise_signal(number)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == ended_by


@pytest.mark.parametrize("group", [process_group, launched_ranks])
def test_a_rank_without_torchrun_looks_for_the_others_too(
    group: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mpirun and srun start ranks: one that took itself for the only process would do the work of all of them."""

    def meet(backend: str, **of_its_own: Any) -> None:
        assert "store" not in of_its_own, "it would meet nobody"
        raise ConnectionError("nobody there yet")

    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # whatever ran before
    monkeypatch.setattr(dist, "init_process_group", meet)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConnectionError), group():
        pass
