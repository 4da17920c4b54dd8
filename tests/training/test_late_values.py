"""Numbers that are read a step late, and the guard that keeps NaN and infinity from weights before it reads of them.

On a CPU they are late by a stand-in (`tests.late`); the tests marked gpu have the real thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.training.pipeline import FiniteGuard, LateValues, NonFiniteError
from tests.late import read_late
from tests.sequence_models import features as sequence_features
from tests.sequence_models import sequences
from tests.small_models import MODELS, SHARDING_TYPES, blocks_for, operators
from tests.training.test_finite import BAD, features, loss_of, prepared, tables_of


@pytest.fixture
def late() -> Iterator[None]:
    """Everything in a test is read late."""
    with read_late():
        yield


def test_on_a_cpu_values_are_read_at_once() -> None:
    values, found = LateValues(), []
    assert values.read(torch.tensor([1.0, 2.0]), lambda read: found.append(read.tolist()))
    assert found == [[1.0, 2.0]]
    values.settle()
    assert found == [[1.0, 2.0]]


def test_late_values_are_those_of_their_time_and_read_in_order(late: None) -> None:
    values, found, number = LateValues(), [], torch.tensor([1.0])
    for _ in range(3):
        assert not values.read(number, lambda read: found.append(read.item()))
        number += 1
    assert found == []
    values.settle()
    assert found == [1.0, 2.0, 3.0]
    values.settle()
    assert found == [1.0, 2.0, 3.0]


def test_what_follows_a_reader_that_raises_is_not_read_again(late: None) -> None:
    def fail(read: torch.Tensor) -> None:
        raise NonFiniteError(str(read.item()))

    values = LateValues()
    for number in (1.0, 2.0):
        values.read(torch.tensor(number), fail)
    with pytest.raises(NonFiniteError, match=r"1\.0"):
        values.settle()
    values.settle()  # the run that met it has ended; one that goes on has other values


@pytest.mark.parametrize("bad", BAD)
def test_a_loss_is_named_when_the_next_one_is_checked(late: None, bad: float) -> None:
    model = prepared()
    guard = FiniteGuard(model)
    guard.check_loss(torch.tensor(1e30), "lower step 2")
    guard.check_loss(torch.tensor(bad), "lower step 3")
    tables_of(model)["movie", 0][8, 7] = bad
    message = rf"^lower step 3, table 'movie': expected a finite loss, got {bad}; .*last good"
    with pytest.raises(NonFiniteError, match=message):
        guard.check_loss(torch.tensor(1.0), "lower step 4")
    guard.settle()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("sharding_type", [None, *SHARDING_TYPES])
@pytest.mark.usefixtures("gloo", "late")
def test_no_table_learns_a_bad_gradient_that_is_read_late(sharding_type: str | None, compiled: bool) -> None:
    torch.manual_seed(0)
    with operators(compiled):
        model = prepared(sharding_type=sharding_type)
        guard, before = FiniteGuard(model), {key: table.clone() for key, table in tables_of(model).items()}
        with guard.watch_gradients("lower step 5"):
            loss_of(model, float("nan")).backward()
        assert all(torch.equal(table, before[key]) for key, table in tables_of(model).items())
        if sharding_type is None:
            tables = {name: p for name, p in model.named_parameters() if ".embedding_bags." in name}
            assert tables
            assert all(not bool(table.grad.any()) for table in tables.values())
        message = "^lower step 5, table 'user': expected finite gradients, got nan or inf; lower the learning rate"
        with pytest.raises(NonFiniteError, match=message):
            guard.settle()
        with guard.watch_gradients("lower step 6"):  # and a good one goes through
            loss_of(model).backward()
        guard.settle()
        if sharding_type not in (None, "data_parallel"):  # those have fused optimizers
            assert any(not torch.equal(table, before[key]) for key, table in tables_of(model).items())


@pytest.mark.parametrize("compiled", [True, False])
def test_a_good_gradient_is_the_same_late_and_at_once(compiled: bool) -> None:
    def gradients() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = prepared()
        guard = FiniteGuard(model)
        with guard.watch_gradients("lower step 0"):
            loss_of(model).backward()
        guard.check_dense_gradients("lower step 0")
        guard.settle()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    with operators(compiled):
        expected = gradients()
        with read_late():
            found = gradients()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_table_whose_gradient_was_bad_is_named(late: None, compiled: bool) -> None:
    with operators(compiled):
        model = prepared("bare")
        guard = FiniteGuard(model)
        with guard.watch_gradients("lower step 0"):
            (model(features())["genre_id"] * float("inf")).sum().backward()
    with pytest.raises(NonFiniteError, match="lower step 0, table 'genre'"):
        guard.settle()


@pytest.mark.parametrize("is_late", [True, False])
def test_the_table_of_a_sequence_is_named(is_late: bool) -> None:
    model = sequences()
    guard = FiniteGuard(model)

    def backward() -> None:
        with guard.watch_gradients("lower step 1"):
            (model["tables"](sequence_features(0))["visits"].values() * float("nan")).sum().backward()

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


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("bad", BAD)
def test_dense_gradients_are_made_zero_if_one_is_bad(bad: float) -> None:
    model = prepared()
    guard = FiniteGuard(model)
    guard.check_dense_gradients("lower step 1")  # none yet
    loss_of(model).backward()
    dense = {name: p for name, p in model.named_parameters() if ".embedding_bags." not in name}
    name, parameter = next((n, p) for n, p in dense.items() if "over_arch" in n)
    before = {own: p.grad.clone() for own, p in dense.items()}
    guard.check_dense_gradients("lower step 2")
    assert all(torch.equal(p.grad, before[own]) for own, p in dense.items())
    parameter.grad.view(-1)[0] = bad
    guard.check_dense_gradients("lower step 3")
    assert all(not bool(p.grad.any()) for p in dense.values())
    message = rf"^lower step 3, parameter '{name}': expected finite gradients, got nan or inf"
    with pytest.raises(NonFiniteError, match=message):
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


@pytest.mark.usefixtures("late")
def test_alpha_is_told_not_to_take_a_bad_gradient() -> None:
    model = MODELS["two_dims"]()
    blocks = blocks_for(model)
    guard = FiniteGuard(prepare_(model, blocks))
    gradient = torch.zeros(blocks.alpha_shapes[4])
    assert bool(guard.check_alpha_gradient(gradient, 4, "upper step 1"))
    gradient[3, 2] = float("nan")
    assert not bool(guard.check_alpha_gradient(gradient, 4, "upper step 2"))
    with pytest.raises(NonFiniteError, match=re.escape("upper step 2, tables ['genre'], row 3 of alpha")):
        guard.settle()
