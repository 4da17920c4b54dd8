"""docs/models.md: each of its rows is wrapped, searched, merged, compressed and served by its own code, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.test_utils.test_model import ModelInput
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.selection.plan import default_sharders
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.swap import replace_, unshard_
from dnis_torchrec.serving import PackedEmbeddingBagCollection
from dnis_torchrec.serving.sequences import ServedEmbeddingCollection
from tests import managed
from tests.documents import blocks, table_rows
from tests.known_models import CLICK_AND_RATING, OF_MODEL_INPUT, SUPPORTED, Kind, make_batch
from tests.selection.test_plan import TwoDimensional
from tests.selection.test_shards import model_with
from tests.selection.test_shards import one_blocks as blocks_of_unsupported
from tests.sequence_models import rounded

CPU, PAGE = torch.device("cpu"), "docs/models.md"
COMPRESSIONS = {"compress": 3, "measure": 3, "loop": 10}
"""Sizes that tiny tables can reach; a search counts no scales."""
CODE = dict(
    zip(
        ("compress", "wrap", "loop", "step", "merge", OF_MODEL_INPUT, CLICK_AND_RATING, "measure"),
        blocks(PAGE, "python"),
        strict=True,
    )
)
SEARCH = ("wrap", "loop", "step", "merge")
SERVED = {PackedEmbeddingBagCollection: "bags", ServedEmbeddingCollection: "sequences"}


def run(code: str, names: dict[str, Any]) -> None:
    """Runs code of the page, at a size that tiny tables can reach."""
    exec(CODE[code].replace("compression=20", f"compression={COMPRESSIONS.get(code)}"), names)


def num_lines(*names: str) -> int:
    """Lines of code."""
    return sum(bool(line.strip()) for name in names for line in CODE[name].splitlines())


def names_for(kind: Kind) -> dict[str, Any]:
    """What stands before the page's code: a model, its data and its loss."""
    torch.manual_seed(0)
    model = kind.build()
    for name, weight in model.named_parameters():
        if "embedding" in name:
            nn.init.normal_(weight, std=0.5)
    batches = [
        make_batch(seed, is_weighted=kind.is_weighted, is_rated=kind.task == CLICK_AND_RATING) for seed in range(4)
    ]
    names: dict[str, Any] = {"dnis": dnis, "ModelInput": ModelInput, "mse_loss": mse_loss}
    names |= {"binary_cross_entropy_with_logits": binary_cross_entropy_with_logits, "loss": nn.BCEWithLogitsLoss()}
    if kind.task:
        run(kind.task, names)
        names["loss"] = names[kind.task]()
    names |= {"batches": batches[:3], "held_out": batches[3:], "leave_alone": kind.leave_alone}
    return names | {"model": model, "tables": table_configs(model), "steps": 3}


@torch.no_grad()
def predictions(task: nn.Module, names: Mapping[str, Any]) -> Tensor:
    """Of the batch that was held out; leaves a `TrainTask`, or what shards it, in evaluation mode."""
    _, (_, found) = task.eval()(names["held_out"][0])
    return torch.cat([part.flatten() for part in found.values()]) if isinstance(found, dict) else found


@torch.no_grad()
def of_nearest_codes(model: nn.Module, names: Mapping[str, Any]) -> Tensor:
    """Predictions of a plain model, value by value in its codes."""
    return predictions(dnis.TrainTask(rounded(model, names["found"].scheme), names["loss"]), names)


def table_values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the tables of a plain model."""
    return {own.table: own.weight.clone() for each in collections(model).values() for own in local_shards(each)}


def test_each_row_has_a_test_and_its_number_of_lines() -> None:
    found = table_rows(PAGE, "What goes through")
    assert list(found) == list(SUPPORTED)
    assert len(found) >= 20
    for name, kind in SUPPORTED.items():
        expected = [num_lines("compress"), *([num_lines(kind.task)] if kind.task else [])]
        assert [int(lines) for lines in found[name][-1].split(" + ")] == expected, name
        assert sum(expected) <= 10, name
    assert num_lines(*SEARCH) == 8
    assert list(table_rows(PAGE, "What is refused")) == list(REFUSED)
    (sharded,) = table_rows(PAGE, "What is sharded").values()
    assert sharded[1] == f"yes, {num_lines('measure')} lines"


@pytest.mark.parametrize("name", list(SUPPORTED))
def test_it_is_compressed_and_served(name: str) -> None:
    names = names_for(SUPPORTED[name])
    model, plain = names["model"], collections(names["model"])
    before, values = predictions(dnis.TrainTask(model, names["loss"]), names), table_values(model)
    run("compress", names)
    served = {fqn: model.get_submodule(fqn) for fqn in plain}
    found = predictions(dnis.TrainTask(model, names["loss"]), names)
    for fqn, collection in plain.items():
        replace_(model, served[fqn], collection)
    kinds = [SERVED[kind] for kind in SERVED if kind in {type(module) for module in served.values()}]
    assert table_rows(PAGE, "What goes through")[name][-2] == f"packed {' and '.join(kinds)}"
    assert names["found"].compression >= COMPRESSIONS["compress"]
    torch.testing.assert_close(found, of_nearest_codes(model, names), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, before, rtol=1e-5, atol=1e-5)  # the codes are seen
    for table in names["leave_alone"]:
        assert torch.equal(table_values(model)[table], values[table])
        assert set(names["found"].scheme.tables[table].codes.bits.flatten().tolist()) == {32}


@pytest.mark.parametrize("name", list(SUPPORTED))
def test_it_is_wrapped_searched_and_merged(gloo: dist.ProcessGroup, name: str) -> None:
    names = names_for(SUPPORTED[name])
    task = dnis.TrainTask(names["model"], names["loss"])
    before, values = predictions(task, names), table_values(names["model"])
    run("wrap", names)
    torch.testing.assert_close(predictions(task, names), before, rtol=1e-5, atol=1e-5)
    by_dense_kernels = {own.name: ParameterConstraints(compute_kernels=["dense"]) for own in names["tables"]}
    plan = dnis.make_sharding_plan(task.train(), CPU, default_sharders(), constraints=by_dense_kernels)
    names["sharded"] = dnis.shard_model(task, CPU, plan)
    parameters = dict(names["sharded"].named_parameters())
    names["optimizer"] = KeyedOptimizerWrapper(parameters, lambda own: torch.optim.Adam(own, lr=0.01))
    run("loop", names)
    for _ in range(3):
        run("step", names)
    soft = predictions(names["loop"].detach(), names)
    run("merge", names)
    torch.testing.assert_close(predictions(names["merged"], names), soft, rtol=1e-5, atol=1e-5)
    merged = table_values(names["merged"].model)
    assert {type(module) for module in collections(names["merged"].model).values()} <= {
        EmbeddingBagCollection,
        EmbeddingCollection,
    }
    searched = [table for table in merged if table not in names["leave_alone"]]
    assert any(bool((merged[table] == 0).any(1).any()) for table in searched)  # columns died
    assert all(bool((merged[table] != 0).all()) for table in names["leave_alone"])
    assert any(not torch.equal(merged[table], values[table]) for table in searched)


def test_what_is_sharded_is_measured_where_it_lies(gloo: dist.ProcessGroup) -> None:
    names = names_for(SUPPORTED["DLRM"])
    names["sharded"] = dnis.shard_model(names["model"], CPU)
    with pytest.raises(NotImplementedError, match="supported is a plain embedding collection"):
        dnis.compress(names["sharded"], names["batches"], loss=names["loss"])
    run("measure", names)
    assert names["found"].compression >= COMPRESSIONS["measure"]
    plain = unshard_(names["sharded"])
    expected = of_nearest_codes(plain, names)
    ((fqn, packed),) = dnis.packed_collections(plain, names["found"].scheme).items()
    replace_(plain, plain.get_submodule(fqn), packed)
    found = predictions(dnis.TrainTask(plain, names["loss"]), names)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def refuses_collections(kind: str) -> Callable[[], None]:
    """Both ways into the project, with a model of `UNSUPPORTED`."""

    def attempt() -> None:
        model, _ = model_with(kind)
        with pytest.raises(NotImplementedError) as wrapped:
            dnis.prepare_(model, blocks_of_unsupported())
        with pytest.raises(NotImplementedError, match=re.escape(str(wrapped.value))):
            dnis.compress(model, [], loss=nn.MSELoss())
        raise wrapped.value

    return attempt


def sizes_that_vary() -> None:
    """A prepared collection is given two bags of one feature and one of another."""
    names = names_for(SUPPORTED["Weighted bags"])
    run("wrap", names)
    lengths = torch.ones(4, dtype=torch.int64)
    features = KeyedJaggedTensor(["user", "item", "genre"], lengths, lengths=lengths, stride_per_key_per_rank=STRIDES)
    names["model"](None, features)


def two_dimensional() -> None:
    """The pipeline is given a model in replicas of shards."""
    names = names_for(SUPPORTED["DLRM"])
    run("wrap", names)
    names |= {"sharded": TwoDimensional(names["model"]), "optimizer": None}
    run("pipeline", names)


def managed_and_sharded() -> None:
    """A model with managed collisions is sharded before it is prepared."""
    dnis.shard_model(managed.trained(), CPU)


STRIDES = [[2], [1], [1]]
REFUSED: Mapping[str, Callable[[], None]] = {
    "Managed collisions, sharded while they learn ids": managed_and_sharded,
    "Rows pruned in training (ITEP)": refuses_collections("pruning in training"),
    "A subclass with a forward of its own": refuses_collections("subclass"),
    "A collection with hooks": refuses_collections("hook"),
    "Batch sizes that vary by feature (VBE)": sizes_that_vary,
    "DMPCollection": two_dimensional,
}
"""Row of the page -> what raises its error."""


@pytest.mark.parametrize("name", list(REFUSED))
def test_it_is_refused(gloo: dist.ProcessGroup, name: str) -> None:
    error = table_rows(PAGE, "What is refused")[name][0].strip("`")
    with pytest.raises(NotImplementedError, match=re.escape(error)):
        REFUSED[name]()
