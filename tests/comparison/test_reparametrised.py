"""Tables behind a function: gradients by finite differences and by autograd, codes by FBGEMM, bytes as asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.rivals.methods import METHODS, NotApplicableError, pep
from benchmarks.rivals.methods.reparametrised import (
    RoundedRows,
    ThresholdedTables,
    rounded,
    table_parameters,
    threshold_gradients,
    thresholded,
)
from benchmarks.rivals.quantized_rows import stored_rows
from dnis_torchrec import TrainTask
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.selection.shards import TableShard
from dnis_torchrec.training.shard import shard
from examples.paper.pruning import keep_largest_
from tests.comparison.test_baselines_methods import CPU, build, make_task
from tests.tiny import make_batch, make_recipe

values = st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=40)


@given(values, st.floats(-4, 2))
def test_gradients_of_thresholds_are_finite_differences(drawn: list[float], start: float) -> None:
    learnt = torch.tensor(drawn, dtype=torch.float64)
    thresholds = torch.linspace(start, start + 1, len(drawn), dtype=torch.float64)
    step = 1e-6
    is_smooth = (learnt.abs() - thresholds.sigmoid()).abs() > 10 * step
    gradient = torch.linspace(-1, 1, len(drawn), dtype=torch.float64)
    of_value, of_threshold = threshold_gradients(learnt, thresholds, gradient)

    def slope(d_value: float, d_threshold: float) -> Tensor:
        above = thresholded(learnt + d_value, thresholds + d_threshold)
        below = thresholded(learnt - d_value, thresholds - d_threshold)
        return gradient * (above - below) / (2 * step)

    away = is_smooth & (learnt.abs() > 10 * step)
    torch.testing.assert_close(of_value[away], slope(step, 0)[away], atol=1e-6, rtol=0)
    torch.testing.assert_close(of_threshold[away], slope(0, step)[away], atol=1e-6, rtol=0)


def stepped(make_stepper, num_steps: int = 3) -> tuple[dict[str, Tensor], list]:
    """Table weights after some steps, and the batches of these."""
    recipe = make_recipe(embedding_dim=8)
    torch.manual_seed(0)
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss, embedding_l2=0.1), recipe, CPU)
    tables = table_parameters(model, "here")
    stepper, batches = make_stepper(optimizer, tables, recipe), [make_batch(16, seed) for seed in range(num_steps)]
    model.train()
    for batch in batches:
        stepper.zero_grad()
        model(batch)[0].backward()
        stepper.step()
    return {name: weight.detach().clone() for name, weight in tables.items()}, batches


def naive_steps(
    read, extra: dict[str, Tensor], rates: list[float], batches: list, decay: float = 0.0
) -> dict[str, Tensor]:
    """The same by autograd through the whole tables: every weight is replaced by a function of leaves in each step."""
    recipe = make_recipe(embedding_dim=8)
    model = TrainTask(recipe.model, recipe.loss, embedding_l2=0.1).train()
    names = {name.split(".")[-2]: name for name, _ in model.named_parameters() if ".embedding_bags." in name}
    leaves = {table: model.get_parameter(name).detach().clone().requires_grad_() for table, name in names.items()}
    rest = {name: p for name, p in model.named_parameters() if name not in names.values()}
    groups = [
        {"params": list(leaves.values()), "lr": rates[0]},
        {"params": list(rest.values()), "lr": recipe.dense_learning_rate},
        *([{"params": list(extra.values()), "lr": rates[1], "weight_decay": decay}] if extra else []),
    ]
    optimizer = torch.optim.Adam(groups)
    for batch in batches:
        optimizer.zero_grad()
        tables = {names[table]: read(table, leaf) for table, leaf in leaves.items()}
        torch.func.functional_call(model, tables, (batch,))[0].backward()
        optimizer.step()
    with torch.no_grad():
        return {table: read(table, leaf) for table, leaf in leaves.items()}


def test_steps_of_thresholds_are_those_of_autograd(gloo) -> None:
    start, rate, decay = -3.0, 0.05, 1e-4
    found, batches = stepped(
        lambda optimizer, tables, recipe: ThresholdedTables(
            optimizer, tables, start=start, learning_rate=rate, decay=decay
        )
    )
    extra = {name: torch.full_like(weight, start).requires_grad_() for name, weight in found.items()}
    own_rate = make_recipe().table_learning_rate
    expected = naive_steps(lambda table, leaf: thresholded(leaf, extra[table]), extra, [own_rate, rate], batches, decay)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)
        assert 0 < int(weight.count_nonzero()) < weight.numel()


def test_steps_through_the_rounding_are_those_of_autograd(gloo) -> None:
    found, batches = stepped(lambda optimizer, tables, recipe: RoundedRows(optimizer, tables, "int4"))

    def straight_through(table: str, leaf: Tensor) -> Tensor:
        return leaf + (rounded(leaf.detach(), "int4") - leaf.detach())

    expected = naive_steps(straight_through, {}, [make_recipe().table_learning_rate], batches)
    for name, weight in found.items():
        near = (weight - expected[name]).abs() < 1e-5
        assert float(near.float().mean()) > 0.99  # a value on the edge of two codes may go either way
        assert len(weight[0].unique()) <= 16


@given(
    st.lists(st.lists(st.floats(-3, 3, width=32), min_size=8, max_size=8), min_size=1, max_size=6),
    st.sampled_from(["int8", "int4"]),
)
def test_what_is_rounded_is_served_as_it_is(rows: list[list[float]], precision: str) -> None:
    once = rounded(torch.tensor(rows), precision)
    torch.testing.assert_close(rounded(once, precision), once, atol=2e-7, rtol=1e-3)


def test_codes_that_are_served_are_fbgemms_of_what_was_trained(gloo, tmp_path: Path) -> None:
    task = make_task(tmp_path, 5)
    made = METHODS["int4-qat"](task)
    assert made.form == "dense_int4"
    assert made.embedding_bytes() <= task.embedding_bytes()
    assert made.settings["embedding_dim"] == 16
    batch = make_batch(32, 9)
    collection = next(iter(made.scheme.tables.values())).collection
    weights = {name: made.model.get_submodule(collection).embedding_bags[name].weight for name in made.scheme.tables}
    with torch.no_grad():
        trained = made.model(batch.dense_features, batch.sparse_features)
        with made.served(CPU) as model:
            found = model(batch.dense_features, batch.sparse_features)
            stored = dict(zip(weights, stored_rows(model.get_submodule(collection).tables), strict=True))
    torch.testing.assert_close(found, trained, atol=1e-5, rtol=0)
    for name, weight in weights.items():
        codes = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight.detach(), 4)
        scale_first = torch.cat([codes[:, -4:], codes[:, :-4]], dim=1)  # as inference kernels hold a row
        assert torch.equal(stored[name][:, : codes.shape[1]], scale_first)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("ratio", [2.3, 8.0])
def test_pep_keeps_as_many_values_as_the_bytes_pay_for(gloo, tmp_path: Path, precision: str, ratio: float) -> None:
    task = make_task(tmp_path, ratio, precision=precision)
    made = METHODS["pep"](task)
    per_value = {"fp32": 5, "int8": 2}[precision]
    assert 0 <= task.embedding_bytes() - made.embedding_bytes() < per_value
    assert made.form == f"csr_{precision}"
    batch = make_batch(32, 9)
    with torch.no_grad():
        trained = made.model(batch.dense_features, batch.sparse_features)
        with made.served(CPU) as model:
            found = model(batch.dense_features, batch.sparse_features)
    torch.testing.assert_close(found, trained, atol=1e-6 if precision == "fp32" else 0.02, rtol=0)


def test_most_values_die_by_thresholds_before_the_smallest_go(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[float] = []

    def noting(tables: list[TableShard], num_keep: int) -> None:
        shares = [float((table.weight != 0).float().mean()) for table in tables]
        alive.append(max(shares))
        keep_largest_(tables, num_keep)

    def quick(embedding_dim: int | None) -> Recipe:
        return replace(build(embedding_dim), table_learning_rate=0.03)

    monkeypatch.setattr(pep, "keep_largest_", noting)
    METHODS["pep"](make_task(tmp_path, 8.0, make=quick, max_epochs=60))
    assert len(alive) == 1
    assert alive[0] < 0.6


@pytest.mark.parametrize("name", ["pep", "int4-qat"])
def test_fused_tables_are_refused(gloo, tmp_path: Path, name: str) -> None:
    task = make_task(tmp_path, 4, make=lambda dim: build(dim, optimizer="rowwise_adagrad"))
    with pytest.raises(NotApplicableError, match=f"{name}: supported are tables whose gradients can be seen"):
        METHODS[name](task)
