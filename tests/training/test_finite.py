"""FiniteGuard: NaN and infinity are named before they reach a weight."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.training.pipeline import FiniteGuard, NonFiniteError
from tests.small_models import BATCH_SIZE, MODELS, NUM_DENSE, SHARDING_TYPES, blocks_for, features, shard_as

BAD = [float("nan"), float("inf"), float("-inf")]


def prepared(name: str = "dlrm", sharding_type: str | None = None) -> nn.Module:
    model = MODELS[name]()
    model = prepare_(model, blocks_for(model))
    return model if sharding_type is None else shard_as(model, sharding_type)


def tables_of(model: nn.Module) -> dict[tuple[str, int], torch.Tensor]:
    shards = [shard for module in collections(model).values() for shard in local_shards(module)]
    return {(shard.table, shard.first_column): shard.weight for shard in shards}


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    return factor * model(dense_features=torch.ones(BATCH_SIZE, NUM_DENSE), sparse_features=features()).sum()


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


def test_the_error_is_an_arithmetic_error() -> None:
    assert issubclass(NonFiniteError, ArithmeticError)


@pytest.mark.parametrize("sharding_type", [None, *SHARDING_TYPES])
@pytest.mark.usefixtures("gloo")
def test_a_bad_gradient_is_found_before_a_table_learns_it(sharding_type: str | None) -> None:
    torch.manual_seed(0)  # of some initial weights every ReLU of the over arch is dead, and swallows the NaN
    model = prepared(sharding_type=sharding_type)
    guard, before = FiniteGuard(model), {key: table.clone() for key, table in tables_of(model).items()}
    message = "^lower step 5, table 'user': expected finite gradients, got nan or inf; lower the learning rate"
    with pytest.raises(NonFiniteError, match=message), guard.watch_gradients("lower step 5"):
        loss_of(model, float("nan")).backward()
    assert all(torch.equal(table, before[key]) for key, table in tables_of(model).items())
    with guard.watch_gradients("lower step 6"):  # and a good one goes through
        loss_of(model).backward()


def test_the_table_whose_gradient_is_bad_is_named() -> None:
    model = prepared("bare")
    with pytest.raises(NonFiniteError, match="table 'genre'"), FiniteGuard(model).watch_gradients("lower step 0"):
        (model(features())["genre_id"] * float("inf")).sum().backward()


def test_gradients_are_watched_inside_only() -> None:
    model = prepared()
    with FiniteGuard(model).watch_gradients("lower step 0"):
        pass
    loss_of(model, float("nan")).backward()


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("sharding_type", [None, "table_wise"])
@pytest.mark.parametrize("bad", BAD)
def test_dense_gradients(bad: float, sharding_type: str | None) -> None:
    model = prepared(sharding_type=sharding_type)
    guard = FiniteGuard(model)
    guard.check_dense_gradients("lower step 1")  # none yet
    loss_of(model).backward()
    guard.check_dense_gradients("lower step 1")
    name, parameter = next((n, p) for n, p in model.named_parameters() if "over_arch" in n)
    parameter.grad.view(-1)[0] = bad
    message = rf"^lower step 1, parameter '{name}': expected finite gradients, got nan or inf"
    with pytest.raises(NonFiniteError, match=message):
        guard.check_dense_gradients("lower step 1")


@pytest.mark.parametrize(("row", "names"), [(1, ["user"]), (2, ["user"]), (3, ["genre"])])
@pytest.mark.parametrize("bad", BAD)
def test_alpha_gradient(row: int, names: list[str], bad: float) -> None:
    """Tables that share the row of alpha are named; those of another D, or with rows of their own, are not."""
    model = MODELS["two_dims"]()
    blocks = blocks_for(model)  # three blocks per table
    guard = FiniteGuard(prepare_(model, blocks))
    gradient = torch.zeros(blocks.alpha_shapes[4])
    guard.check_alpha_gradient(gradient, 4, "upper step 2")
    gradient[row, 2] = bad
    message = f"upper step 2, tables {names}, row {row} of alpha: expected a finite gradient, got nan or inf; lower"
    with pytest.raises(NonFiniteError, match=f"^{re.escape(message)}"):
        guard.check_alpha_gradient(gradient, 4, "upper step 2")
