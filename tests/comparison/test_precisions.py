"""Precisions of a comparison: bytes as asked for, the best on selection as served, one training for all cells."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec import TrainTask
from dnis_torchrec.comparison import registry
from dnis_torchrec.comparison.cells import Cell, CellTask
from dnis_torchrec.comparison.methods import METHODS, MethodResult, MethodTask, SizeNotMetError, trained_scheme
from dnis_torchrec.comparison.methods.method import needs_validation, served_in
from dnis_torchrec.comparison.methods.precisions import best_precision
from dnis_torchrec.comparison.methods.trained_once import trained_once
from dnis_torchrec.comparison.methods.trained_scheme import (
    Candidate,
    dims_bytes,
    in_precision,
    largest_within,
    row_blocks,
)
from dnis_torchrec.comparison.methods.uniform import largest_dim, uniform_candidate
from dnis_torchrec.comparison.shared_recipe import SharedRecipe
from dnis_torchrec.comparison.worker import run_cell
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search.budget import Budget
from dnis_torchrec.training.evaluate import evaluate
from tests import tiny
from tests.comparison.test_baselines_low_rank import factorization_machine
from tests.comparison.test_baselines_methods import CPU, build, make_task
from tests.tiny import make_recipe

DATA = build(None).data
PRECISIONS = ("fp32", "int8", "int4")
ALL = ("uniform", "low-rank", "hash", "qr", "random", "mde", "magnitude", "pep", "int4-qat", "compress")


def make_of(shapes: list[tuple[int, int]]) -> Callable[[int | None], Recipe]:
    """Tables of so many rows, each so many times as wide as embedding_dim; 0 for one column whatever that is."""

    def make(embedding_dim: int | None) -> Recipe:
        tables = [
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=rows,
                embedding_dim=times * (embedding_dim or 16) or 1,
                feature_names=[f"f{i}"],
            )
            for i, (rows, times) in enumerate(shapes)
        ]
        model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables)})
        return Recipe(model=model, data=DATA, loss=nn.MSELoss())

    return make


def served_bytes(candidate: Candidate, precision: str, widths: dict[str, int]) -> int:
    """Bytes of a candidate once it is trained; the columns that are trained for a kernel's sake have a byte of bits."""
    model, whole = candidate.recipe.model, candidate.scheme
    scheme = in_precision(model, whole, candidate.form, precision)
    beyond = sum(table.embedding_dim - widths[name] for name, table in whole.tables.items())
    return scheme.served_bytes(candidate.form) - (beyond if candidate.form == "packed" else 0)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 4)), min_size=1, max_size=3),
    st.booleans(),
    st.floats(1.0, 40.0),
    st.sampled_from(PRECISIONS),
    st.booleans(),
)
def test_the_embedding_dim_is_the_largest_within_the_bytes(
    shapes: list[tuple[int, int]], has_first_order: bool, compression: float, precision: str, is_cut: bool
) -> None:
    make = make_of([*shapes, *([(50, 0)] if has_first_order else [])])
    task = make_task(Path(), compression, make=make, precision=precision)
    bits, scale, multiple = {"fp32": (32, 0, 1), "int8": (8, 4, 2), "int4": (4, 4, 4)}[precision]

    def num_bytes(dim: int) -> int:
        """Rows as FBGEMM stores them; first columns of wider ones in whole bytes and an index."""
        total, tables = 0, task.tables(dim)
        is_dense = not is_cut and dim % 4 == 0 and all(t.embedding_dim % multiple == 0 for t in tables)
        for table in tables:
            width = table.embedding_dim
            index = 16 + 2 * width if bits == 32 else (4 + 1) * width
            total += table.num_embeddings * (-(-width * bits // 8) + (scale if is_dense else 0))
            total += 0 if is_dense else index
        return total

    budget = 1.02 * task.embedding_bytes()
    fitting = [dim for dim in range(1, 17) if num_bytes(dim) <= budget]
    try:
        found = largest_dim(task, "here", is_cut=is_cut)
    except SizeNotMetError:
        assert not [dim for dim in fitting if dim % multiple == 0]
        return
    assert num_bytes(found) <= budget
    assert num_bytes(found) >= num_bytes(max(dim for dim in fitting if dim % multiple == 0))
    if not is_cut:
        candidate = uniform_candidate(task, found)
        widths = {t.name: t.embedding_dim for t in task.tables(found)}
        assert num_bytes(found) == served_bytes(candidate, precision, widths)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_choices_of_float32_columns_grow_to_the_bytes_of_the_precision(tmp_path: Path, precision: str) -> None:
    task = make_task(tmp_path, 3, precision=precision)
    _, blocks = row_blocks(task)

    def choose(budget: Budget) -> dict[str, torch.Tensor]:
        """The same number of columns for all blocks."""
        price = sum(float(costs.sum()) for costs in budget.column_costs.values())
        if budget.amount < price:
            raise SizeNotMetError("too small")
        dim = min(16, int(budget.amount / price))
        return {name: torch.full_like(seen, dim) for name, seen in blocks.seen_rows.items()}

    num_bytes = partial(dims_bytes, blocks, precision=precision)
    found = largest_within(task, blocks, choose, num_bytes)
    dim = int(next(iter(found.values()))[0])
    assert num_bytes(found) <= task.embedding_bytes()
    assert dim == 16 or num_bytes({name: dims + 1 for name, dims in found.items()}) > task.embedding_bytes()
    assert dim == {"fp32": 3, "int8": 6, "int4": 8}[precision]
    with pytest.raises(SizeNotMetError):
        largest_within(replace(task, compression=100), blocks, choose, num_bytes)


def taught(embedding_dim: int | None) -> Recipe:
    """With a validation split to learn on, for a method that may."""
    recipe = factorization_machine(embedding_dim)
    return replace(recipe, data=replace(recipe.data, validation=recipe.data.train))


@pytest.mark.parametrize("name", ALL)
def test_the_best_precision_is_that_of_the_lowest_selection_loss_as_served(gloo, tmp_path: Path, name: str) -> None:
    make = taught if needs_validation(METHODS[name]) else factorization_machine
    task = make_task(tmp_path, 2.5, make=make, trials=1, max_epochs=1)
    method, losses, made = METHODS[name], {}, {}
    names = {"magnitude": PRECISIONS[:2], "pep": PRECISIONS[:2], "int4-qat": ("int4",), "compress": ("codes",)}
    for precision in names.get(name, PRECISIONS):
        made[precision] = method(replace(task, precision=precision))
        recipe = factorization_machine(None)
        with made[precision].served(CPU) as model:
            found = evaluate(TrainTask(model, recipe.loss), recipe.data.selection, recipe.loss, CPU)
        losses[precision] = found["loss"]
        assert made[precision].precision == precision
        assert made[precision].embedding_bytes() <= 1.02 * task.embedding_bytes()
    best = best_precision(method, task, list(losses))
    assert best.selection_loss == pytest.approx(min(losses.values()), abs=1e-9)
    assert best.precision == min(losses, key=losses.__getitem__)
    assert best.trials == len(losses)
    assert best.seconds_of_trials > best.seconds or len(losses) == 1


def test_precisions_that_cannot_be_met_are_left_out(gloo, tmp_path: Path) -> None:
    @served_in(*PRECISIONS)
    def of_few_bits(task: MethodTask) -> MethodResult:
        if task.precision != "int4" or task.compression > 4:
            raise SizeNotMetError(f"not in {task.compression:g}")
        return METHODS["uniform"](task)

    assert best_precision(of_few_bits, make_task(tmp_path, 3, max_epochs=1), PRECISIONS).precision == "int4"
    with pytest.raises(SizeNotMetError, match=r"^fp32: not in 9; int8: not in 9; int4: not in 9$"):
        best_precision(of_few_bits, make_task(tmp_path, 9), PRECISIONS)
    with pytest.raises(SizeNotMetError, match=r"^not in 9$"):
        best_precision(of_few_bits, make_task(tmp_path, 9), ["int8"])


def test_what_several_cells_want_is_trained_once(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    train = trained_scheme.train_scheme
    monkeypatch.setattr(
        trained_scheme, "train_scheme", lambda task, *rest: trained.append(task.precision) or train(task, *rest)
    )
    task = make_task(tmp_path, 4, make=taught, max_epochs=1, trained=tmp_path / "trained")
    for name in ("dense", "low-rank", "compress", "dense"):
        METHODS[name](task)
    assert len(trained) == 1  # all of them start from the uncompressed model
    first = best_precision(METHODS["uniform-grid"], task, PRECISIONS)
    assert len(trained) == 5  # 4, 8, 12 and 16, once for all precisions
    again = best_precision(METHODS["uniform-grid"], task, PRECISIONS)
    assert (len(trained), again.selection_loss, again.seconds) == (5, first.selection_loss, first.seconds)
    alone = best_precision(METHODS["uniform-grid"], replace(task, trained=None), PRECISIONS)
    assert alone.selection_loss == first.selection_loss
    assert len(trained) == 5 + 12


def test_a_training_that_fails_is_begun_again(tmp_path: Path) -> None:
    def fails() -> None:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        trained_once(tmp_path, "key", nn.Linear(1, 1), fails)
    with pytest.raises(RuntimeError, match="not today"):
        trained_once(tmp_path, "key", nn.Linear(1, 1), fails)
    assert not list(tmp_path.glob("*.safetensors"))


class Counting:
    """Batches that count how often they are iterated, as a stream counts its epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter([tiny.make_batch(8, self.epoch)])


def test_data_are_read_once_and_every_recipe_begins_at_the_first_epoch() -> None:
    calls: list[int | None] = []

    def call(dim: int | None) -> Recipe:
        calls.append(dim)
        recipe = make_recipe(embedding_dim=dim or 8)
        return replace(recipe, data=replace(recipe.data, train=Counting()))

    shared = SharedRecipe(call)
    first, second, narrow, again = shared(None), shared(None), shared(4), shared(4)
    assert calls == [None, 4]
    assert len({id(recipe.model) for recipe in (first, second, narrow, again)}) == 4
    assert narrow.data.selection.batches is first.data.selection.batches
    for recipe in (first, second, narrow):
        assert [next(iter(recipe.data.train)).labels.tolist() for _ in range(2)] == [
            tiny.make_batch(8, epoch).labels.tolist() for epoch in (1, 2)
        ]
    with torch.no_grad():
        first.model.over_arch.model[1].weight.zero_()
    assert bool(shared(None).model.over_arch.model[1].weight.any())


@pytest.mark.parametrize(("name", "most"), [("uniform", 12), ("random", 1), ("qr", 1), ("compress", 1), ("dense", 1)])
def test_a_cell_calls_the_recipe_for_models_of_other_dims_alone(
    gloo, tmp_path: Path, name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    demo = tiny.demo
    monkeypatch.setattr(
        tiny, "demo", lambda *given, **named: calls.append(named["embedding_dim"]) or demo(*given, **named)
    )
    cell = Cell(method=name, size=None if name == "dense" else 3.0, seed=0)
    rules = {"recipe": "tests.tiny:demo", "patience": 1, "max_epochs": 1, "trials": 2, "precisions": list(PRECISIONS)}
    task = CellTask(cell=cell, rules=rules, registry=registry.REGISTRY, cells_at_once=1, artifact=False)
    task.write(tmp_path / "cells" / cell.name)
    result = run_cell(tmp_path / "cells" / cell.name)
    assert result.trained is not None
    assert calls.count(None) == 1
    assert len(calls) <= most
    described = json.loads((tmp_path / "cells" / cell.name / "result.json").read_text())
    assert described["bytes"][described["form"]] == described["embedding_bytes"]
