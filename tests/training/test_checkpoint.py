"""Checkpoints of a whole run, complete or absent, in any sharding; weights in files of every kind, of which nothing is
run."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import threading
import time
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as load_distributed
from torch.distributed.checkpoint import save as save_distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.data.urls import Address, file_names, path_in, put_file, read_bytes, remove_file
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.on_shards import select_on_shards_
from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.training import checkpoint
from dnis_torchrec.training.weights import (
    distributed_checkpoint,
    remove_model,
    weights_for_,
    write_model,
    written_model,
)
from tests import models

pytestmark = pytest.mark.usefixtures("gloo")


def build(name: str, *, prepared: bool, sharding_type: str | None = None) -> nn.Module:
    model = models.MODELS[name]()
    if prepared:
        model = prepare_(model, models.blocks_for(model))
        models.randomise_alpha_(model)
    return model if sharding_type is None else models.shard_as(model, sharding_type)


def state_of(model: nn.Module, **values) -> checkpoint.TrainingState:
    return checkpoint.TrainingState(
        tensors=checkpoint.model_tensors(model), tables=checkpoint.describe_tables(model), values=values
    )


def numbers(value: float, size: int = 3) -> checkpoint.TrainingState:
    return checkpoint.TrainingState(
        tensors={"model/x": checkpoint.PlacedTensor.of(torch.full((size,), value))}, tables={}
    )


def read(path: Address) -> list[float]:
    state = numbers(0.0)
    checkpoint.read_checkpoint(path, nn.Identity(), state.tensors, None)
    return state.tensors["model/x"].chunks[0].tensor.tolist()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in models.state_tensors(model).items()}


def names(address: Address) -> list[str]:
    """Of the files there, without what tells one writing of a file from another."""
    parts = [name.split(".") for name in file_names(address)]
    return sorted(f"{part[0]}.{part[-1]}" for part in parts)


@pytest.fixture(params=["here", "on storage"])
def address(request: pytest.FixtureRequest, remote: MemoryFileSystem, tmp_path: Path) -> Address:
    """Where checkpoints go: a path, or a URL."""
    return tmp_path / "checkpoints" if request.param == "here" else "memory://run/checkpoints"


@pytest.fixture
def folder(address: Address) -> checkpoint.CheckpointFolder:
    return checkpoint.CheckpointFolder(address)


@pytest.mark.parametrize(("name", "sharding_type"), models.SHARDED_MODELS)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_model_comes_back(name: str, prepared: bool, sharding_type: str | None, tmp_path: Path) -> None:
    """From a file, and from a snapshot, which further steps do not change."""
    saved, other = (build(name, prepared=prepared, sharding_type=sharding_type) for _ in range(2))
    assert not torch.allclose(models.predict(saved), models.predict(other))
    expected, outputs, state = values_of(saved), models.predict(saved), checkpoint.snapshot(saved)
    folder = checkpoint.CheckpointFolder(tmp_path)
    checkpoint.write_checkpoint(folder, 7, state_of(saved, epoch=3), None)
    assert checkpoint.read_checkpoint(folder.latest(), other, checkpoint.model_tensors(other), None) == {"epoch": 3}
    assert torch.equal(models.predict(other), outputs)
    with torch.no_grad():
        for value in models.state_tensors(saved).values():
            value.fill_(-7)
    checkpoint.take_(saved, state)
    for model in (saved, other):
        found = models.state_tensors(model)
        assert found.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_everything_is_saved_once() -> None:
    """Tables by name, shared alpha once, dense weights and buffers; nothing twice."""
    model = models.TwoCollections()
    model.register_buffer("steps", torch.tensor([3.0]))
    prepare_(model, models.blocks_for(model))
    expected = ["table/user", "table/genre", "table/movie", "model/steps", "model/first.soft_selection.dim8"]
    assert sorted(checkpoint.model_tensors(model)) == sorted([*expected, "model/over.weight", "model/over.bias"])


def test_nothing_is_pickled_and_all_can_be_removed(folder: checkpoint.CheckpointFolder) -> None:
    assert folder.latest() is None
    checkpoint.write_checkpoint(folder, 7, numbers(1.0), None)
    assert names(folder.path) == ["step-00000007/manifest.json", "step-00000007/rank0.safetensors"]
    folder.remove()
    assert file_names(folder.path) == []


def test_the_last_ones_and_the_best_are_kept(folder: checkpoint.CheckpointFolder) -> None:
    for step in range(1, 7):
        checkpoint.write_checkpoint(folder, step, numbers(step), None, keep=(2,))
    assert folder.steps() == [2, 5, 6]
    assert folder.latest() == folder.path_of(6)
    checkpoint.write_checkpoint(folder, 4, numbers(4.5), None, keep=(2,))  # a run that went back to step 2
    assert folder.steps() == [2, 4]
    assert read(folder.latest()) == [4.5] * 3


@pytest.mark.parametrize("killed_at", range(9))
def test_a_kill_while_the_latest_is_replaced_loses_nothing(
    folder: checkpoint.CheckpointFolder, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """A run that was stopped at the end of an epoch saves its step once more when it goes on."""
    checkpoint.write_checkpoint(folder, 1, numbers(1), None)
    checkpoint.write_checkpoint(folder, 2, numbers(2), None)
    number = itertools.count()

    def until_killed(act):
        def acting(*given):
            if next(number) == killed_at:
                raise KeyboardInterrupt
            return act(*given)

        return acting

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.urls, "put_file", until_killed(put_file))
        patch.setattr(checkpoint.urls, "remove_file", until_killed(remove_file))
        try:
            for step in (2, 3):
                checkpoint.write_checkpoint(folder, step, numbers(step), None)
        except KeyboardInterrupt:
            pass
    folder.clean()
    assert read(folder.latest())[0] in (2, 3)
    for step in folder.steps():
        assert read(folder.path_of(step)) == [step] * 3
    assert 2 in folder.steps()


def test_what_a_killed_writer_left_does_not_count_and_is_removed(folder: checkpoint.CheckpointFolder) -> None:
    checkpoint.write_checkpoint(folder, 1, numbers(1), None)
    folder.add(2, 0, lambda path: path.write_bytes(b"whole, but without a manifest"))
    put_file(path_in(folder.path, ".x.0123.partial"), lambda path: path.write_bytes(b"half"))
    assert folder.latest() == folder.path_of(1)
    assert folder.steps() == [1]
    checkpoint.write_checkpoint(folder, 3, numbers(3), None)
    assert {name.split("/")[0] for name in file_names(folder.path)} == {"step-00000001", "step-00000003"}


def test_a_save_is_of_the_moment_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training changes the tensors while the thread has not begun to write yet; two never write at once."""
    go = threading.Event()

    def slow(tensors, path):
        go.wait(timeout=60)
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    state, folder = numbers(1.0), checkpoint.CheckpointFolder(tmp_path)
    with checkpoint.CheckpointSaver(folder) as saver:
        saver.save(1, state)
        state.tensors["model/x"].chunks[0].tensor.fill_(2.0)
        assert folder.latest() is None
        go.set()
        saver.save(2, state)
        assert folder.latest() is not None  # the first was waited for
    assert read(folder.path_of(1)) == [1.0] * 3
    assert read(folder.path_of(2)) == [2.0] * 3


@pytest.mark.parametrize("what", ["save_file", "urls.put_file", "CheckpointFolder.publish", "storage"])
def test_a_place_that_cannot_be_written(folder: checkpoint.CheckpointFolder, what: str) -> None:
    """Full, or away from now on: the last good checkpoint stays, and the run stops."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "cannot write")

    saver = checkpoint.CheckpointSaver(folder)
    saver.save(1, numbers(1))
    saver.wait()
    with pytest.MonkeyPatch.context() as patch:
        # Where storage is away, looking what is left there fails, too.
        module = "dnis_torchrec.data.urls" if what == "storage" else "dnis_torchrec.training.checkpoint"
        patch.setattr(f"{module}.{what}", refuse)
        saver.save(2, numbers(2))
        with pytest.raises(checkpoint.CheckpointWriteError, match="step-00000002.*cannot write"):
            saver.wait()
    assert folder.latest() == folder.path_of(1)
    assert read(folder.latest()) == [1.0] * 3
    saver.save(3, numbers(3))
    saver.wait()
    assert read(folder.latest()) == [3.0] * 3


def refused(path: Address, state: checkpoint.TrainingState, place: str, model: nn.Module | None = None) -> None:
    """Reading fails with an error that names the place, and changes nothing."""
    before = state.copy()
    with pytest.raises(ValueError, match=place):
        checkpoint.read_checkpoint(path, model or nn.Identity(), state.tensors, None)
    for key, value in state.tensors.items():
        for chunk, other in zip(value.chunks, before.tensors[key].chunks, strict=True):
            assert torch.equal(chunk.tensor, other.tensor)


def test_what_differs_is_named_table_by_table(tmp_path: Path) -> None:
    folder, model = checkpoint.CheckpointFolder(tmp_path), build("dlrm", prepared=True)
    state = state_of(model)
    tables = {
        "genre": dataclasses.replace(state.tables["genre"], rows=99),
        "movie": dataclasses.replace(state.tables["movie"], blocks="other"),
        "more": checkpoint.TableDescription(rows=1, embedding_dim=4, column_cuts=[0], blocks=""),
    }
    tensors = {key: value for key, value in state.tensors.items() if "over" not in key}
    checkpoint.write_checkpoint(folder, 1, checkpoint.TrainingState(tensors=tensors, tables=tables), None)
    refused(folder.latest(), state, "step-00000001.*model/.*over.*'genre'.*99.*'more'.*'movie'.*'user'", model)


def test_other_blocks_have_another_fingerprint() -> None:
    first, second = (checkpoint.describe_tables(build("dlrm", prepared=True)) for _ in range(2))
    assert first == second
    plain = models.MODELS["dlrm"]()
    assert {table.blocks for table in checkpoint.describe_tables(plain).values()} == {""}
    assert len({table.blocks for table in first.values()}) == len(models.blocks_for(plain).routings)


CHUNK = {"offset": [0], "size": [3], "file": "rank0.safetensors"}
MANIFESTS = {
    "not JSON": b"{",
    "another version": {"format_version": 1},
    "another format": {"format": "other"},
    "a file elsewhere": {"files": {"../rank0.safetensors": 1}},
    "a file that is missing": {"files": {"rank3.safetensors": 1}},
    "a chunk of another file": {"tensors": {"model/x": {"dtype": "float32", "size": [3], "chunks": [CHUNK]}}},
    "no dtype": {"tensors": {"model/x": {"size": [3], "chunks": []}}},
    "no chunks": {"tensors": {"model/x": {"dtype": "float32", "size": [3], "chunks": []}}},
    "no table": {"tables": {"t": {"rows": 3}}},
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=list(MANIFESTS))
def test_a_manifest_of_something_else(folder: checkpoint.CheckpointFolder, change: dict | bytes) -> None:
    checkpoint.write_checkpoint(folder, 1, numbers(1), None)
    file = path_in(folder.latest(), "manifest.json")
    text = change if isinstance(change, bytes) else json.dumps(json.loads(read_bytes(file)) | change).encode()
    put_file(file, lambda path: path.write_bytes(text))
    refused(folder.latest(), numbers(0), "step-00000001")


@pytest.mark.parametrize("keep", [None, 0, 40, -1])
def test_a_file_that_was_cut_short(folder: checkpoint.CheckpointFolder, keep: int | None) -> None:
    checkpoint.write_checkpoint(folder, 1, numbers(1), None)
    (name,) = [name for name in file_names(folder.latest()) if name.endswith(".safetensors")]
    file = path_in(folder.latest(), name)
    whole = read_bytes(file)
    if keep is None:
        remove_file(file)
    else:
        put_file(file, lambda path: path.write_bytes(whole[:keep]))
    refused(folder.latest(), numbers(0), "rank0.*rank 0")
    put_file(file, lambda path: path.write_bytes(b"x" * len(whole)))
    refused(folder.latest(), numbers(0), "rank0")


@pytest.mark.parametrize("name", ["step-00000001", "step-00000001/manifest.json", "more"])
def test_links_among_checkpoints_are_named(tmp_path: Path, name: str) -> None:
    folder = checkpoint.CheckpointFolder(tmp_path / "named")
    checkpoint.write_checkpoint(folder, 1, numbers(1), None)
    outside, planted = tmp_path / "outside", tmp_path / "named" / name
    outside.mkdir()
    if planted.exists():
        planted.rename(outside / "moved")
    planted.symlink_to(outside / "moved")
    with pytest.raises(ValueError, match=f"plain files .* got the link '{name}'"):
        folder.latest()
    with pytest.raises(checkpoint.CheckpointWriteError, match=f"plain files .* got the link '{name}'"):
        checkpoint.write_checkpoint(folder, 2, numbers(2), None)
    if name.endswith("manifest.json"):
        refused(folder.path_of(1), numbers(0), "plain files .* got the link 'manifest.json'")


def stored_in(tensor: torch.Tensor, cuts: list[list[int]]) -> checkpoint.StoredTensor:
    """The tensor in a grid of chunks, cut at these places of each dimension."""
    spans = [list(itertools.pairwise([0, *inner, size])) for inner, size in zip(cuts, tensor.shape, strict=True)]
    chunks = []
    for grid in itertools.product(*spans):
        part = tensor[tuple(slice(*span) for span in grid)].clone()
        chunks.append(
            checkpoint.StoredChunk(tuple(start for start, _ in grid), tuple(part.shape), lambda part=part: part)
        )
    return checkpoint.StoredTensor("t", tuple(tensor.shape), tuple(reversed(chunks)), "int64")


@given(st.lists(st.integers(1, 6), max_size=3), st.data())
def test_any_part_of_any_chunks_is_copied(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    inner = [st.lists(st.integers(1, size - 1), unique=True).map(sorted) if size > 1 else st.just([]) for size in shape]
    stored = stored_in(tensor, [data.draw(cuts) for cuts in inner])
    first = [data.draw(st.integers(0, size - 1)) for size in shape]
    last = [data.draw(st.integers(begin + 1, size)) for begin, size in zip(first, shape, strict=True)]
    part = tensor[tuple(map(slice, first, last))]
    stored.copy_to_(found := torch.full_like(part, -1), first)
    assert found.equal(part)
    assert stored.whole().equal(tensor)


def test_what_no_chunk_holds_is_missed_where_it_is_asked_for() -> None:
    stored = stored_in(torch.arange(6).view(3, 2), [[1], []])
    first_row = checkpoint.StoredTensor("table 't'", (3, 2), stored.chunks[1:], "int64")
    first_row.copy_to_(found := torch.zeros(1, 2, dtype=torch.int64))
    assert found.tolist() == [[0, 1]]
    with pytest.raises(ValueError, match=r"^table 't': expected chunks of 4 values, got 0; copy all files of it"):
        first_row.copy_to_(torch.zeros(2, 2), (1, 0))
    for of_none in (first_row, checkpoint.StoredTensor("table 't'", (3, 2), (), "int64")):
        with pytest.raises(ValueError, match=r"^table 't': expected chunks of"):
            of_none.whole()


def test_the_model_of_a_run_is_put_together(gloo, tmp_path: Path) -> None:
    """By one process here; what several ranks write is tested with the commands."""
    model = models.MODELS["dlrm"]()
    assert written_model(tmp_path) is None
    for _ in range(2):  # the second one replaces the first
        with torch.no_grad():
            for value in model.parameters():
                value.add_(1)
        write_model(tmp_path, model, Ranks())
    expected = model.state_dict()
    found = {name: stored.whole() for name, stored in written_model(tmp_path).items()}
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    remove_model(tmp_path)
    assert written_model(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


LARGE = torch.arange(60.0).view(6, 10)
STATE = {
    "weight": torch.arange(12.0).view(4, 3),
    "scale": torch.tensor(2.0),
    "ids": torch.tensor([3, 1], dtype=torch.int32),
    "flags": torch.ones(3).bool(),  # the next one's first byte is at no multiple of its size
    "turned": LARGE.T,
    "view": LARGE[2:5, 3:7].bfloat16(),
    "row": LARGE[1],
}


def save(folder: Path) -> Path:
    save_distributed({"model": STATE, "epoch": 3, "optimizer": [torch.ones(2)]}, checkpoint_id=folder)
    return folder


def test_tensors_are_read_back_as_they_were_saved(gloo, tmp_path: Path) -> None:
    """With their names, dtypes and strides."""
    found = distributed_checkpoint(save(tmp_path / "saved"))
    assert sorted(found) == sorted(["optimizer.0", *(f"model.{name}" for name in STATE)])
    for name, value in STATE.items():
        torch.testing.assert_close(found[f"model.{name}"].whole(), value, rtol=0, atol=0)


def pooled_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(models.BATCH_SIZE, models.NUM_DENSE, generator=generator)
    return Batch(dense, models.features(seed), torch.rand(models.BATCH_SIZE, generator=generator).round())


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], RowBlocks], Callable[[int], Batch]]] = {
    "pooled": (models.MODELS["dlrm"], models.blocks_for, pooled_batch),
    "two collections": (models.MODELS["two_collections"], models.blocks_for, pooled_batch),
    "sequences": (
        models.interest,
        lambda model: models.blocks_of(model, [models.make_batch(1), models.make_batch(2)]),
        models.make_batch,
    ),
    "positions": (models.Net, lambda _: models.position_blocks(), models.position_batch),
}
"""A model, its blocks, and a batch of it."""


class Trainee:
    """A model, sharded as told or not at all, with the optimizers that it learns by."""

    def __init__(self, name: str, sharding: str | None, *, is_keyed: bool, is_prepared: bool = True) -> None:
        make, blocks, self._batch = NETS[name]
        net = make()
        with torch.no_grad():
            for weight in net.parameters():
                weight.uniform_(-0.5, 0.5)
        if is_prepared:
            net = prepare_(net, blocks(net))
            models.randomise_alpha_(net)
        self.model = task = TrainTask(net, nn.BCEWithLogitsLoss())
        if sharding is not None:
            constraint = ParameterConstraints(sharding_types=[sharding], min_partition=4)
            constraints = {table.name: constraint for table in table_configs(task)}
            sharders = default_sharders({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1})
            plan = make_sharding_plan(task, torch.device("cpu"), sharders, constraints=constraints)
            self.model = select_on_shards_(shard_model(task, torch.device("cpu"), plan, sharders))
        rest = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self._is_keyed = is_keyed
        adam = torch.optim.Adam(rest.values(), lr=0.01)
        self._optimizer = KeyedOptimizerWrapper(rest, lambda _: adam) if is_keyed else adam

    def step(self, seed: int) -> float:
        self._optimizer.zero_grad()
        loss = self.model(self._batch(seed))[0]
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def state(self) -> dict:
        """Everything, as it goes to a folder: the optimizer's states, too, by the names of the model."""
        module = get_unwrapped_module(self.model)
        if self._is_keyed:
            if not self._optimizer.state:
                self._optimizer.init_state()
            state = {"model": get_state_dict(module, ())[0], "optimizer": self._optimizer.state_dict()}
        else:
            state = dict(zip(("model", "optimizer"), get_state_dict(module, self._optimizer), strict=True))
        if isinstance(self.model, DistributedModelParallel):
            state["fused"] = self.model.fused_optimizer.state_dict()
        return state

    def take(self, state: dict) -> None:
        module, others = get_unwrapped_module(self.model), () if self._is_keyed else self._optimizer
        set_state_dict(module, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if self._is_keyed:
            self._optimizer.load_state_dict(state["optimizer"])
        if isinstance(self.model, DistributedModelParallel):
            self.model.fused_optimizer.load_state_dict(state["fused"])


@pytest.mark.parametrize("sharding", [None, "table_wise", "column_wise"])
@pytest.mark.parametrize(("name", "is_keyed"), [*((name, True) for name in NETS), ("two collections", False)])
def test_torchs_functions_of_states_know_no_wrapper_and_training_goes_on(
    gloo, tmp_path: Path, name: str, sharding: str | None, is_keyed: bool
) -> None:
    """A KeyedOptimizer names its states itself; torch's functions would number them, of a plain model as well."""
    first, second = (Trainee(name, sharding, is_keyed=is_keyed) for _ in range(2))
    plain = Trainee(name, sharding, is_keyed=is_keyed, is_prepared=False)
    for seed in range(3):
        first.step(seed)
        plain.step(seed)
    state, expected = first.state(), plain.state()
    assert {key for key in state["model"] if ".soft_selection." not in key} == set(expected["model"])
    assert state["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys() <= set(expected["model"])
    save_distributed(state, checkpoint_id=tmp_path / "saved")
    load_distributed(fresh := second.state(), checkpoint_id=tmp_path / "saved")
    second.take(fresh)
    assert [first.step(seed) for seed in range(3, 8)] == [second.step(seed) for seed in range(3, 8)]
    found = models.state_tensors(second.model)
    assert [key for key, value in models.state_tensors(first.model).items() if not torch.equal(found[key], value)] == []


SHAPES = {"user.weight": (6, 4), "over.weight": (1, 4), "over.bias": (1,), "norm.num_batches_tracked": ()}
State = dict[str, Any]


def model() -> nn.Module:
    norm = nn.ModuleDict()
    norm.register_buffer("num_batches_tracked", torch.tensor(0))
    return nn.ModuleDict({"user": nn.EmbeddingBag(6, 4), "over": nn.Linear(4, 1), "norm": norm})


def weights(prefix: str = "", table: object = None) -> State:
    """The model's weights behind a prefix, perhaps with another table."""
    generator = torch.Generator().manual_seed(3)
    state: State = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state["norm.num_batches_tracked"] = torch.tensor(7)
    state["user.weight"] = state["user.weight"] if table is None else table
    return {prefix + name: value for name, value in state.items()}


def save_safetensors(state: State, path: Path) -> Path:
    save_file(state, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def save_zip(state: object, path: Path) -> Path:
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def save_folder(state: State, path: Path) -> Path:
    save_distributed(state, checkpoint_id=path.with_suffix(".dcp"))
    return path.with_suffix(".dcp")


Save = Callable[[Any, Path], Path]
KINDS: dict[str, Save] = {"safetensors": save_safetensors, "zip": save_zip, "folder": save_folder}


class Attributes(OrderedDict):
    """A dict of one's own, which nobody imports who reads it."""


def as_parameters(state: State) -> State:
    table = nn.Parameter(state["user.weight"])
    table.owner = "a user"
    return state | {"user.weight": table}


FORMS: dict[str, Callable[[State], Any]] = {
    "plain": lambda state: state,
    "behind a prefix": lambda state: {f"module.{name}": value for name, value in state.items()},
    "in a dict": lambda state: {"epoch": 3, "state_dict": state, "optimizer": {"state": {0: {"step": torch.ones(())}}}},
    "of half width": lambda state: state | {"user.weight": state["user.weight"].half()},
    "a view": lambda state: state | {"user.weight": torch.cat([torch.ones(2, 6), state["user.weight"].T]).T[:, 2:]},
}
FORMS_OF_ZIPS: dict[str, Callable[[State], Any]] = {
    "parameters": as_parameters,
    "a dict of one's own": lambda state: Attributes(state, more=Attributes()),
    "one dict twice": lambda state: {"args": (args := {"lr": 0.1}), "again": args, "state_dict": state},
    "float64": lambda state: state | {"user.weight": state["user.weight"].double()},
}


@pytest.mark.parametrize(
    ("kind", "form"), [*itertools.product(KINDS, FORMS), *(("zip", form) for form in FORMS_OF_ZIPS)]
)
def test_weights_are_read_as_they_were_saved(gloo, tmp_path: Path, kind: str, form: str) -> None:
    if form in FORMS_OF_ZIPS:
        path = save_zip(FORMS_OF_ZIPS[form](weights()), tmp_path / "w")
    else:
        state = FORMS["plain" if kind == "safetensors" and form in ("in a dict", "a view") else form](weights())
        path = KINDS[kind](state, tmp_path / "w")
    result, wanted = weights_for_(model(), path), weights()
    assert {name for name in result if name in wanted} == set(wanted)
    for name, value in wanted.items():
        tolerance = 1e-3 if form == "of half width" else 0
        torch.testing.assert_close(result[name].whole(), value, rtol=tolerance, atol=0, check_dtype=False)


def cyclic() -> State:
    state: State = weights()
    state["self"] = state
    return state


def doubled() -> State:
    state: State = {"x": torch.ones(1)}
    for _ in range(64):
        state = {"a": state, "b": state}
    return weights() | {"more": state}


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(4, 4)])


def zipped_anew(compression: int = zipfile.ZIP_STORED, **files: bytes) -> Save:
    """What another program makes of the same files, but for some."""

    def save(state: State, path: Path) -> Path:
        stored = save_zip(state, path.with_name("stored"))
        with zipfile.ZipFile(stored) as old, zipfile.ZipFile(path.with_suffix(".pt"), "w", compression) as new:
            for name in old.namelist():
                new.writestr(name, files.get(name.rpartition("/")[2], old.read(name)))
        return path.with_suffix(".pt")

    return save


def with_pickle(*opcodes: bytes) -> Save:
    """A zip as torch.save makes it, with a pickle of another's own."""

    def save(_: State, path: Path) -> Path:
        with zipfile.ZipFile(path.with_suffix(".pt"), "w") as file:
            file.writestr("w/data.pkl", b"\x80\x02" + b"".join(opcodes) + b".")
        return path.with_suffix(".pt")

    return save


def cut_zip(state: State, path: Path) -> Path:
    path = save_zip(state, path)
    path.write_bytes(path.read_bytes()[:-300])
    return path


def of_old_torch(state: State, path: Path) -> Path:
    torch.save(state, path.with_suffix(".pt"), _use_new_zipfile_serialization=False)
    return path.with_suffix(".pt")


def with_metadata(*opcodes: bytes) -> Save:
    """Saves a checkpoint folder, then replaces its metadata by a pickle of these opcodes."""

    def save(state: State, path: Path) -> Path:
        folder = save_folder(state, path)
        (folder / ".metadata").write_bytes(b"\x80\x04" + b"".join(opcodes) + b".")
        return folder

    return save


def changed(change: Callable[[Path], object]) -> Save:
    """Saves a checkpoint folder, then changes something in it."""

    def save(state: State, path: Path) -> Path:
        change(folder := save_folder(state, path))
        return folder

    return save


def replace_in_metadata(name: bytes, to: bytes) -> Save:
    return changed(
        lambda folder: (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes().replace(name, to))
    )


def of_files(change: Callable[[Path], object]) -> Save:
    return changed(lambda folder: [change(file) for file in folder.glob("*.distcp")])


def link(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


def with_chunk(table: Tensor) -> Save:
    """In place of the one that the folder tells of."""

    def change(folder: Path) -> None:
        chunk = save_zip(table, folder.with_name("chunk")).read_bytes()
        places = FileSystemReader(folder).read_metadata().storage_data
        (place,) = [place for at, place in places.items() if at.fqn == "user.weight"]
        file = folder / place.relative_path
        content = bytearray(file.read_bytes())
        content[place.offset : place.offset + place.length] = chunk.rjust(place.length, b"\0")  # a zip may begin later
        assert len(content) == file.stat().st_size
        file.write_bytes(content)

    return changed(change)


def record(name: str, state: bytes) -> bytes:
    """A record of a class with this state, as opcodes."""
    return text("torch.distributed.checkpoint") + text(name) + b"\x93)\x81" + state + b"b"


def fields(**values: bytes) -> bytes:
    return b"}(" + b"".join(text(name) + value for name, value in values.items()) + b"u"


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def tuples(depth: int) -> bytes:
    """A tuple of two of itself, and so on: few bytes, 2 ** depth places."""
    opcodes = b"K\x01"
    for number in range(depth):
        opcodes += b"\x94h" + bytes([number]) + b"\x86"
    return opcodes


def chained(depth: int) -> bytes:
    """A name made of two of itself, and so on."""
    opcodes = text("ab")
    for number in range(depth):
        opcodes += b"\x94h" + bytes([number]) + b"\x93"
    return opcodes


def index(**values: bytes) -> bytes:
    return record("MetadataIndex", fields(**{"fqn": text("user.weight"), "index": b"K\x00", "offset": b"N"} | values))


def info(**values: bytes) -> bytes:
    place = {"relative_path": text("__0_0.distcp"), "offset": b"K\x00", "length": b"K\x09"}
    return record("_StorageInfo", fields(**place | values))


def tensor(**values: bytes) -> bytes:
    properties = record("TensorProperties", text("torch.float32") + b"\x85")
    entries = {"properties": properties, "size": b"K\x06K\x04\x86", "chunks": b"]"} | values
    return b"}" + text("user.weight") + record("TensorStorageMetadata", fields(**entries)) + b"s"


def metadata(*, storage: bytes = b"}", state: bytes = b"}") -> Save:
    return with_metadata(record("Metadata", fields(state_dict_metadata=state, storage_data=storage)))


TABLE = r"user\.weight"
BOTH = r"ema\.\*, model\.\*"
HUGE = b"\x8a\xff" + b"\xff" * 254 + b"\x01"
SHARED: dict[str, tuple[Callable[[], State], str]] = {
    "two models": (lambda: weights("model.") | weights("ema."), BOTH),
    "a model beside another": (lambda: weights() | weights("ema."), r"\*, ema\.\*"),
    "integers": (lambda: weights(table=torch.ones(6, 4).long()), f"{TABLE}.*int64"),
    "bytes": (lambda: weights(table=torch.ones(6, 4).byte()), f"{TABLE}.*uint8"),
    "flags": (lambda: weights(table=torch.ones(6, 4).bool()), f"{TABLE}.*bool"),
    "complex numbers": (lambda: weights(table=torch.ones(6, 4, dtype=torch.complex64)), f"{TABLE}.*complex64"),
    "numbers that have a scale": (lambda: weights(table=torch.ones(6, 4).to(torch.float8_e4m3fn)), f"{TABLE}.*float8"),
    "a count of floats": (lambda: weights() | {"norm.num_batches_tracked": torch.tensor(7.0)}, "num_batches.*float32"),
    "another shape": (lambda: weights(table=torch.ones(4, 6)), rf"{TABLE}.*\(4, 6\)"),
}
OF_ZIPS: dict[str, tuple[Callable[[], object], str]] = {
    "sparse": (lambda: weights(table=torch.ones(6, 4).to_sparse()), f"{TABLE}.*sparse"),
    "sparse rows": (lambda: weights(table=torch.ones(6, 4).to_sparse_csr()), f"{TABLE}.*sparse"),
    "quantized": (
        lambda: weights(table=torch.quantize_per_tensor(torch.ones(6, 4), 0.1, 0, torch.qint8)),
        f"{TABLE}.*qtensor",
    ),
    "meta": (lambda: weights(table=torch.ones(6, 4, device="meta")), f"{TABLE}.*meta"),
    "tensors in a tensor": (lambda: weights(table=nested()), f"{TABLE}.*nested"),
    "a negative view": (lambda: weights(table=torch._neg_view(torch.ones(6, 4))), f"{TABLE}.*view"),
    "a dict that holds itself": (cyclic, "w.pt"),
    "dicts that double": (doubled, "w.pt"),
    "no dict": (lambda: [1, 2], "w.pt"),
    "no tensor": (lambda: {"user.weight": 3}, "missing"),
}
FILES: dict[str, tuple[Save, str]] = {
    "compressed": (zipped_anew(zipfile.ZIP_DEFLATED), "w.pt.*compressed"),
    "another order of bytes": (zipped_anew(byteorder=b"big"), "w.pt.*order"),
    "cut": (cut_zip, "w.pt"),
    "before zips": (of_old_torch, "w.pt"),
    "a call that takes memory": (with_pickle(b"c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x40\x85R"), "w.pt"),
    "dicts in dicts": (with_pickle((b"}" + text("a")) * 20_000, b"}", b"s" * 20_000), "w.pt"),
    "a name of names": (with_pickle(chained(100)), "w.pt"),
    "a tensor without a storage": (
        with_pickle(
            b"}" + text("user.weight") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + tuples(60) + b"K\x00))\x89NtRs"
        ),
        "w.pt",
    ),
    "metadata: a name of names": (with_metadata(chained(100)), r"w\.dcp.*characters"),
    "metadata: a tuple as a key": (with_metadata(b"}", tuples(60), b"K\x01s"), "w.dcp"),
    "metadata: tuples in a field": (metadata(storage=tuples(60)), "w.dcp"),
    "metadata: a chunk of tuples": (metadata(storage=b"}" + index(fqn=tuples(60)) + info() + b"s"), r"w\.dcp.*text"),
    "metadata: a file of tuples": (
        metadata(storage=b"}" + index() + info(relative_path=tuples(60)) + b"s"),
        r"w\.dcp.*text",
    ),
    "metadata: a place out of reach": (
        metadata(storage=b"}" + index() + info(offset=HUGE, length=HUGE) + b"s"),
        r"w\.dcp.*sizes",
    ),
    "metadata: tuples as a size": (metadata(state=tensor(size=tuples(60))), r"w\.dcp.*sizes"),
    "metadata: tuples as a kind": (
        metadata(state=tensor(properties=record("TensorProperties", tuples(60)))),
        r"w\.dcp.*text",
    ),
    "metadata: a huge table": (metadata(state=tensor(size=HUGE + HUGE + b"\x86")), r"w\.dcp.*sizes"),
    "metadata: a large table": (metadata(state=tensor(size=b"\x8a\x06\0\0\0\0\0\x01" * 2 + b"\x86")), "w.dcp.*missing"),
    "metadata: a chunk in no file": (
        metadata(
            state=tensor(chunks=b"](" + record("Chunk", fields(offsets=b"K\0K\0\x86", sizes=b"K\x06K\x04\x86")) + b"e")
        ),
        "w.dcp",
    ),
    "metadata: lists in lists": (with_metadata(b"]" * 20_000, b"a" * 19_999), "w.dcp"),
    "metadata: a text without an end": (with_metadata(b"\x8d\xff\xff\xff\xff\xff\xff\xff\x0f"), "w.dcp"),
    "metadata: nothing remembered": (with_metadata(b"j\xff\xff\xff\xff"), "w.dcp"),
    "metadata: empty": (with_metadata(), "w.dcp"),
    "metadata: a call": (with_metadata(b"cos\nmkdir\n" + text("made") + b"\x85R"), r"w\.dcp.*another object"),
    "metadata: cut": (changed(lambda folder: os.truncate(folder / ".metadata", 99)), r"w\.dcp.*metadata"),
    "metadata: none": (changed(lambda folder: (folder / ".metadata").unlink()), r"w\.dcp.*\.metadata"),
    "metadata: a file elsewhere": (
        replace_in_metadata(b"__0_0.distcp", b"../../passwd"),
        rf"{TABLE}.*\.\./\.\./passwd",
    ),
    "an empty file": (of_files(lambda file: file.write_bytes(b"")), rf"{TABLE}.*__0_0\.distcp"),
    "a link": (of_files(link), rf"{TABLE}.*__0_0\.distcp"),
    "a chunk without values": (with_chunk(torch.ones(6, 4, device="meta")), f"{TABLE}.*meta"),
    "a chunk of half width": (with_chunk(torch.ones(6, 4).half()), f"{TABLE}.*float16"),
}
Case = tuple[Callable[[Path], Path], str]
CASES: dict[str, Case] = {
    **{
        f"{kind}: {name}": (lambda path, save=save, make=make: save(make(), path), place)
        for kind, save in KINDS.items()
        for name, (make, place) in SHARED.items()
    },
    **{
        f"zip: {name}": (lambda path, make=make: save_zip(make(), path), place)
        for name, (make, place) in OF_ZIPS.items()
    },
    **{name: (lambda path, save=save: save(weights(), path), place) for name, (save, place) in FILES.items()},
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch advises against some of these kinds
@pytest.mark.parametrize("case", list(CASES))
def test_what_does_not_fit_or_was_made_to_harm_ends_in_one_line(gloo, tmp_path: Path, case: str) -> None:
    """Quickly, and before memory is asked for that the file does not have."""
    write, place = CASES[case]
    path = write(tmp_path / "w")
    begin = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"^(weights|checkpoint) {tmp_path}.*{place}") as caught:
            weights_for_(model(), path)["user.weight"].whole()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not Path("made").exists()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert time.monotonic() - begin < 60
    assert peak < 1 << 28
