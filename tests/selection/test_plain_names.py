"""A prepared model has the plain model's names; a plain checkpoint fits it strictly, and the other way round."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import dnis_torchrec as dnis
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.wrapper import plain_state_dict
from dnis_torchrec.training.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint
from dnis_torchrec.training.state import TrainingState, describe_tables, model_tensors, optimizer_tensors
from tests.small_models import MODELS, ROWS, alpha_of, blocks_for, features, predict, randomise_alpha_, shard_as

SHARDED_AS = (None, "table_wise", "column_wise", "data_parallel")


def prepared_and_plain(name: str, sharding_type: str | None) -> tuple[nn.Module, nn.Module]:
    """Two models of other weights, one with alpha below 1."""
    plain, prepared = MODELS[name](), MODELS[name]()
    prepared = prepare_(prepared, blocks_for(prepared))
    randomise_alpha_(prepared)
    if sharding_type is None:
        return prepared, plain
    return shard_as(prepared, sharding_type), shard_as(plain, sharding_type)


@pytest.mark.parametrize("name", ["dlrm", "two_dims", "bare"])
@pytest.mark.parametrize("sharding_type", SHARDED_AS)
@pytest.mark.usefixtures("gloo")
def test_names_are_the_plain_models(name: str, sharding_type: str | None) -> None:
    prepared, plain = prepared_and_plain(name, sharding_type)
    assert list(plain_state_dict(prepared)) == list(plain.state_dict())
    added = set(prepared.state_dict()) - set(plain.state_dict())
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in added} == {"soft_selection"}
    assert [own for own, _ in prepared.named_parameters()] == [own for own, _ in plain.named_parameters()]
    assert {own for own, _ in plain.named_modules()} <= {own for own, _ in prepared.named_modules()}
    inner = prepared.module if isinstance(prepared, DistributedModelParallel) else prepared
    for own, weight in prepared.named_parameters():
        assert inner.get_parameter(own) is weight


@pytest.mark.parametrize("name", ["dlrm", "two_dims", "bare"])
@pytest.mark.parametrize("sharding_type", SHARDED_AS)
@pytest.mark.usefixtures("gloo")
def test_a_plain_state_fits_strictly(name: str, sharding_type: str | None) -> None:
    prepared, plain = prepared_and_plain(name, sharding_type)
    assert not torch.allclose(predict(prepared), predict(plain))
    loaded = prepared.load_state_dict(plain.state_dict(), strict=True)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    torch.testing.assert_close(predict(prepared), predict(plain), atol=1e-6, rtol=0)
    alpha = alpha_of(prepared)
    assert all(bool((alpha.of(dim) == 1).all()) for dim in alpha.dims)


@pytest.mark.parametrize("sharding_type", SHARDED_AS)
@pytest.mark.usefixtures("gloo")
def test_a_prepared_state_comes_back_with_alpha(sharding_type: str | None) -> None:
    prepared, plain = prepared_and_plain("two_dims", sharding_type)
    kept = copy.deepcopy(prepared.state_dict()) if sharding_type is None else prepared.state_dict()
    other, _ = prepared_and_plain("two_dims", sharding_type)
    other.load_state_dict(kept)
    assert torch.equal(predict(other), predict(prepared))
    merged = merge_(prepared)
    plain.load_state_dict(plain_state_dict(merged))
    torch.testing.assert_close(predict(plain), predict(merged), atol=1e-6, rtol=0)


def test_alpha_stays_where_a_state_has_no_tables() -> None:
    prepared, _ = prepared_and_plain("two_dims", None)
    before = predict(prepared)
    dense = {name: value for name, value in prepared.state_dict().items() if name.startswith("over.")}
    prepared.load_state_dict(dense, strict=False)
    assert torch.equal(predict(prepared), before)


def test_what_does_not_fit_is_named_as_in_the_plain_model() -> None:
    prepared, plain = prepared_and_plain("dlrm", None)
    name = "sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"
    state = plain.state_dict()
    state[name.format("other")] = state.pop(name.format("user"))
    differences = prepared.load_state_dict(state, strict=False)
    assert differences.missing_keys == [name.format("user")]
    assert differences.unexpected_keys == [name.format("other")]


def test_a_checkpoint_with_the_names_of_wrappers_is_read(tmp_path: Path) -> None:
    model, _ = prepared_and_plain("dlrm", None)
    optimizer = torch.optim.Adam(model.parameters())
    sum(weight.sum() for weight in model.parameters()).backward()
    optimizer.step()
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    longer = {
        key.replace(".soft_selection.", ".alpha.").replace(
            ".embedding_bags.", ".embedding_bag_collection.embedding_bags."
        ): placed.copy()
        for key, placed in tensors.items()
    }
    assert len(set(longer) - set(tensors)) > 3
    folder = CheckpointFolder(tmp_path)
    write_checkpoint(folder, 1, TrainingState(tensors=longer, tables=describe_tables(model)), None)
    before = {key: placed.copy() for key, placed in tensors.items()}
    for placed in tensors.values():
        placed.chunks[0].tensor.zero_()
    read_checkpoint(folder.path_of(1), TrainingState(tensors=tensors, tables=describe_tables(model)), None)
    assert all(torch.equal(placed.chunks[0].tensor, before[key].chunks[0].tensor) for key, placed in tensors.items())


@pytest.mark.usefixtures("gloo")
def test_the_warm_start_of_the_docs_runs_as_written(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    prepared, plain = prepared_and_plain("two_dims", None)
    for model in (prepared, plain):
        for collection in (own for own in model.modules() if isinstance(own, EmbeddingBagCollection)):
            apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    whole, other = (dnis.TrainTask(own, nn.BCEWithLogitsLoss()) for own in (plain, prepared))
    cpu, sharders = torch.device("cpu"), [dnis.CpuEmbeddingBagCollectionSharder()]
    constraints = dict.fromkeys(ROWS, ParameterConstraints(sharding_types=["table_wise"]))
    plans = [dnis.make_sharding_plan(task, cpu, sharders, constraints=constraints) for task in (whole, other)]
    trained = dnis.shard_model(whole, cpu, plans[0])
    trained.module.model(torch.zeros(5, 3), features()).sum().backward()
    saved = {"model": trained.state_dict(), "fused": trained.fused_optimizer.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated|`torch.distributed")
        dcp.save(saved, checkpoint_id=tmp_path / "plain")
        names: dict[str, Any] = {"dnis": dnis, "task": other, "device": cpu, "plan": plans[1]}
        names["folder"] = tmp_path / "plain"
        exec(block, names)
    found = names["sharded"]
    torch.testing.assert_close(predict(found.module.model), predict(trained.module.model), atol=1e-6, rtol=0)
    states, expected = (own.fused_optimizer.state_dict()["state"] for own in (found, trained))
    assert states.keys() == expected.keys()
    for name, of_table in expected.items():
        for kind, value in of_table.items():
            again = states[name][kind]
            if isinstance(value, ShardedTensor):
                value, again = (own.local_shards()[0].tensor for own in (value, again))
            assert torch.equal(again, value)
            assert "momentum" not in kind or bool(value.any())
