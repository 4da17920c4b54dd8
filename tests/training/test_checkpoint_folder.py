"""Checkpoints of a whole run on disk: complete or absent, the last ones kept, what is wrong with one said by name."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from dnis_torchrec.data.urls import Address
from dnis_torchrec.training.checkpoint import (
    CheckpointSaver,
    CheckpointWriteError,
    LocalCheckpointFolder,
    PlacedTensor,
    TrainingState,
    checkpoint_folder,
    describe_tables,
    model_tensors,
    optimizer_tensors,
    read_checkpoint,
    write_checkpoint,
)
from dnis_torchrec.training.checkpoint.manifest import Manifest
from dnis_torchrec.training.checkpoint.placement import Chunk, TableDescription
from tests.small_models import MODELS, blocks_for
from tests.training.test_checkpoint import build


def state_of(model: nn.Module, **values) -> TrainingState:
    return TrainingState(tensors=model_tensors(model), tables=describe_tables(model), values=values)


def numbers(value: float, size: int = 3) -> TrainingState:
    """A state of one tensor."""
    return TrainingState(tensors={"model/x": PlacedTensor.of(torch.full((size,), value))}, tables={})


def read(path: Path, size: int = 3) -> list[float]:
    state = numbers(0.0, size)
    read_checkpoint(path, state, None)
    return state.tensors["model/x"].chunks[0].tensor.tolist()


@pytest.fixture(params=["here", "on storage"])
def address(request: pytest.FixtureRequest, remote: MemoryFileSystem, tmp_path: Path) -> Address:
    """Where checkpoints go: a path, or a URL (test_checkpoint_stored.py has what is true of those alone)."""
    return tmp_path / "checkpoints" if request.param == "here" else "memory://run/checkpoints"


def test_tensors_and_values_come_back(gloo, address: Address) -> None:
    torch.manual_seed(0)
    model, other = build("dlrm", prepared=True), build("dlrm", prepared=True)
    folder = checkpoint_folder(address)
    write_checkpoint(folder, 7, state_of(model, epoch=3), None)
    for value in other.state_dict().values():
        value.fill_(-7)
    assert read_checkpoint(folder.latest(), state_of(other), None) == {"epoch": 3}
    expected, found = model.state_dict(), other.state_dict()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_nothing_on_disk_is_pickled(gloo, tmp_path: Path) -> None:
    write_checkpoint(LocalCheckpointFolder(tmp_path), 7, numbers(1.0), None)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"latest.json", "step-00000007/manifest.json", "step-00000007/rank0.safetensors"}


@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 7)),
    written=st.tuples(st.integers(1, 9), st.integers(1, 7)),
    wanted=st.tuples(st.integers(1, 9), st.integers(1, 7)),
)
def test_any_pieces_are_read_from_any_others(gloo, tmp_path_factory, size, written, wanted) -> None:
    """What one rank writes in tiles of one size is read in tiles of another."""
    whole = torch.arange(size[0] * size[1]).view(size)

    def tiles(values: torch.Tensor, tile: tuple[int, int]) -> TrainingState:
        chunks = tuple(
            Chunk((row, column), values[row : row + tile[0], column : column + tile[1]].clone())
            for row in range(0, size[0], tile[0])
            for column in range(0, size[1], tile[1])
        )
        return TrainingState(tensors={"table/t": PlacedTensor(size, chunks)}, tables={})

    folder = LocalCheckpointFolder(tmp_path_factory.mktemp("tiles"))
    write_checkpoint(folder, 1, tiles(whole, written), None)
    found = tiles(torch.zeros_like(whole), wanted)
    read_checkpoint(folder.latest(), found, None)
    expected = tiles(whole, wanted).tensors["table/t"].chunks
    assert all(
        torch.equal(own.tensor, other.tensor)
        for own, other in zip(found.tensors["table/t"].chunks, expected, strict=True)
    )


def test_the_last_ones_and_the_best_are_kept(gloo, address: Address) -> None:
    folder = checkpoint_folder(address, keep_last=2)
    for step in range(1, 7):
        write_checkpoint(folder, step, numbers(step), None, keep=(2,))
    assert folder.steps() == [2, 5, 6]
    assert folder.latest() == folder.path_of(6)
    write_checkpoint(folder, 4, numbers(4.5), None, keep=(2,))  # a run that went back to step 2
    assert folder.steps() == [2, 4]
    assert read(folder.latest()) == [4.5] * 3


@pytest.mark.parametrize("killed_at", range(6))
def test_a_kill_while_the_latest_is_replaced_loses_nothing(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """A run that was stopped at the end of an epoch saves its step once more when it goes on."""
    folder, number = LocalCheckpointFolder(tmp_path), itertools.count()
    write_checkpoint(folder, 1, numbers(1), None)
    manifest = Manifest.read(folder.latest())
    shutil.copytree(folder.latest(), folder.partial_of(1))

    remove = shutil.rmtree

    def until_killed(action: Callable) -> Callable:
        def act(path: Path, *others, **how) -> None:
            if next(number) == killed_at:
                for file in list(Path(path).glob("rank*"))[: action is remove]:
                    file.unlink()
                raise KeyboardInterrupt
            action(path, *others, **how)

        return act

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", until_killed(os.replace))
        patched.setattr(shutil, "rmtree", until_killed(remove))
        with pytest.raises(KeyboardInterrupt):
            folder.publish(1, manifest)
    folder.clean()
    assert read(folder.latest()) == [1.0] * 3
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


def test_a_half_written_checkpoint_does_not_count(gloo, tmp_path: Path) -> None:
    folder = LocalCheckpointFolder(tmp_path)
    write_checkpoint(folder, 1, numbers(1), None)
    folder.begin(2)
    (folder.partial_of(2) / "rank0.safetensors").write_bytes(b"half")
    assert folder.latest() == folder.path_of(1)
    write_checkpoint(folder, 3, numbers(3), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-00000001", "step-00000003"]


def test_a_save_is_of_the_moment_it_was_asked_for(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training changes the tensors while the thread has not begun to write yet; two never write at once."""
    go, writing = threading.Event(), []

    def slow(tensors, path):
        go.wait(timeout=60)
        writing.append(threading.active_count())
        save_file(tensors, path)

    monkeypatch.setattr("dnis_torchrec.training.checkpoint.transfer.save_file", slow)
    state, folder = numbers(1.0), LocalCheckpointFolder(tmp_path)
    with CheckpointSaver(folder) as saver:
        saver.save(1, state)
        state.tensors["model/x"].chunks[0].tensor.fill_(2.0)
        assert folder.latest() is None
        go.set()
        saver.save(2, state)
        assert folder.latest() is not None  # the first was waited for
    assert read(folder.path_of(1)) == [1.0] * 3
    assert read(folder.path_of(2)) == [2.0] * 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("what", ["transfer.save_file", "folder.write_text", "folder.LocalCheckpointFolder.begin"])
def test_a_folder_that_cannot_be_written(gloo, tmp_path: Path, caplog, what: str, code: int) -> None:
    """Full, or read-only from now on: the last good checkpoint stays, and the run goes on as configured."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, "cannot write")

    for on_error in ("stop", "continue"):
        folder = LocalCheckpointFolder(tmp_path / on_error)
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
            saver = CheckpointSaver(folder, on_error=on_error)
            saver.save(1, numbers(1))
            saver.wait()
            patch.setattr(f"dnis_torchrec.training.checkpoint.{what}", refuse)
            saver.save(2, numbers(2))
            message = r"step-00000002: expected to write it, got \w+ on rank 0: .*cannot write.*; the last good one is"
            if on_error == "stop":
                with pytest.raises(CheckpointWriteError, match=message):
                    saver.wait()
            else:
                saver.wait()
                assert re.search("cannot write.*; the last good one is", caplog.text)
                assert saver.failed_steps == {2}
        assert read(folder.latest()) == [1.0] * 3
        assert folder.latest() == folder.path_of(1)
        saver.save(3, numbers(3))
        saver.wait()
        assert read(folder.latest()) == [3.0] * 3


def refused(path: Path, state: TrainingState, message: str) -> None:
    before = {key: placed.copied() for key, placed in state.tensors.items()}
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path, state, None)
    for key, placed in state.tensors.items():
        for own, other in zip(placed.chunks, before[key].chunks, strict=True):
            assert torch.equal(own.tensor, other.tensor)


def test_what_differs_is_said_table_by_table(gloo, tmp_path: Path) -> None:
    model = build("dlrm", prepared=True)
    folder, state = LocalCheckpointFolder(tmp_path), state_of(model)
    tables = {
        "genre": dataclasses.replace(state.tables["genre"], rows=99),
        "movie": dataclasses.replace(state.tables["movie"], blocks="other"),
        "more": TableDescription(rows=1, embedding_dim=4, column_cuts=(0,), blocks=""),
    }
    tensors = {key: value for key, value in state.tensors.items() if "over" not in key}
    write_checkpoint(folder, 1, TrainingState(tensors=tensors, tables=tables), None)
    message = (
        r"step-00000001: expected a checkpoint of this run, got one in which table 'more' is only in the checkpoint; "
        r"table 'user' is only in the run; table 'genre' has rows 99 instead of \d+; "
        r"table 'movie' has other row blocks; model/.*over.* is only in the run.*; "
        r"resume with the recipe, data and settings that the run was started with"
    )
    refused(folder.latest(), state, message)


def test_other_blocks_have_another_fingerprint() -> None:
    first, second = (describe_tables(build("dlrm", prepared=True)) for _ in range(2))
    assert first == second
    plain = MODELS["dlrm"]()
    assert {table.blocks for table in describe_tables(plain).values()} == {""}
    blocks = blocks_for(plain)
    assert len({table.blocks for table in first.values()}) == len(blocks.routings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 1}, "expected format version 3, got 1; use the version of dnis_torchrec that wrote it"),
        ({"format": "other"}, "expected format 'dnis-torchrec-checkpoint', got 'other'"),
        ({"files": {"../rank0.safetensors": 1}}, r"expected names of files in it, got '../rank0.safetensors'"),
        (
            {"files": {"rank3.safetensors": 1}},
            "rank3.safetensors: expected 1 bytes, got no such file; put back what rank 3",
        ),
    ],
)
def test_a_manifest_of_something_else(gloo, tmp_path: Path, change: dict, message: str) -> None:
    folder = LocalCheckpointFolder(tmp_path)
    write_checkpoint(folder, 1, numbers(1), None)
    file = folder.latest() / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(folder.latest(), numbers(0), message)


@pytest.mark.parametrize("keep", [0, 40, -1])
def test_a_file_that_was_cut_short(gloo, tmp_path: Path, keep: int) -> None:
    folder = LocalCheckpointFolder(tmp_path)
    write_checkpoint(folder, 1, numbers(1), None)
    file = folder.latest() / "rank0.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    refused(
        folder.latest(), numbers(0), rf"rank0.safetensors: expected {len(whole)} bytes, got {len(whole[:keep])} bytes"
    )
    file.write_bytes(b"x" * len(whole))
    refused(folder.latest(), numbers(0), "expected whole files, got .*; resume from another checkpoint")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checkpoint": "../x"}', '{"checkpoint": "step-00000009"}'])
def test_a_damaged_name_of_the_latest(gloo, tmp_path: Path, text: str) -> None:
    folder = LocalCheckpointFolder(tmp_path)
    write_checkpoint(folder, 1, numbers(1), None)
    (tmp_path / "latest.json").write_text(text)
    with pytest.raises(ValueError, match=r"latest\.json: expected .*; name a checkpoint of the folder in it"):
        folder.latest()


def test_state_of_torchs_own_optimizer() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = {f"optimizer/{name}/{state}" for name in ("weight", "bias") for state in ("step", "exp_avg", "exp_avg_sq")}
    placed = optimizer_tensors(model, optimizer)
    assert set(placed) == names
    assert placed["optimizer/weight/step"].size == (1,)


@pytest.mark.parametrize("name", ["step-00000001", "step-00000001/rank0.safetensors", "latest.json", "more"])
def test_links_among_checkpoints_are_named(gloo, tmp_path: Path, name: str) -> None:
    folder = LocalCheckpointFolder(tmp_path / "named")
    write_checkpoint(folder, 1, numbers(1), None)
    outside, planted = tmp_path / "outside", tmp_path / "named" / name
    outside.mkdir()
    if planted.exists():
        planted.rename(outside / "moved")
    planted.symlink_to(outside / "moved")
    message = f"expected plain files and folders in it, got the link '{name}'; remove it"
    with pytest.raises(ValueError, match=message):
        folder.latest()
    with pytest.raises(CheckpointWriteError, match=message):
        write_checkpoint(folder, 2, numbers(2), None)
    if name.endswith("safetensors"):
        refused(folder.path_of(1), numbers(0), "got the link 'rank0.safetensors'; remove it")


def test_what_a_killed_writer_left_among_checkpoints_is_removed(gloo, tmp_path: Path) -> None:
    left = tmp_path / f".latest.json.{'0' * 32}.partial"
    left.touch()
    write_checkpoint(LocalCheckpointFolder(tmp_path), 1, numbers(1), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-00000001"]
