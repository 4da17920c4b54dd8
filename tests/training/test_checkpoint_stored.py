"""Checkpoints at a URL: complete or absent without a rename, the last ones kept, what is wrong said by name."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dnis_torchrec.training.checkpoint import (
    CheckpointSaver,
    CheckpointWriteError,
    LocalCheckpointFolder,
    Manifest,
    StoredCheckpointFolder,
    checkpoint_folder,
    write_checkpoint,
)
from tests.training.test_checkpoint_folder import numbers, read, refused

URL = "memory://stored/run/checkpoints"
ROOT = "/stored/run/checkpoints"


class Flaky:
    """Fails a number of times."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error = failures, error

    def __call__(self, *_: object, **__: object) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise self.error


pytestmark = pytest.mark.usefixtures("gloo")


def names(files: MemoryFileSystem) -> list[str]:
    """Of the files there, without what tells one writing of a file from another."""
    found = [name.removeprefix(f"{ROOT}/").split(".") for name in files.find(ROOT)]
    return sorted(f"{parts[0]}.{parts[-1]}" for parts in found)


def test_an_address_decides_where_checkpoints_are() -> None:
    assert type(checkpoint_folder("runs/checkpoints")) is LocalCheckpointFolder
    assert type(checkpoint_folder(Path("runs/checkpoints"))) is LocalCheckpointFolder
    assert type(checkpoint_folder("file:///runs/checkpoints")) is LocalCheckpointFolder
    assert type(checkpoint_folder("s3://bucket/checkpoints")) is StoredCheckpointFolder
    assert checkpoint_folder("s3://bucket/checkpoints/").path_of(7) == "s3://bucket/checkpoints/step-00000007"


def test_nothing_that_was_copied_stays_and_all_can_be_removed(remote: MemoryFileSystem, tmp_path: Path) -> None:
    folder = StoredCheckpointFolder(URL)
    assert folder.latest() is None
    assert folder.steps() == []
    write_checkpoint(folder, 7, numbers(1), None)
    assert read(folder.latest()) == [1.0] * 3
    assert list((tmp_path / "cache").iterdir()) == []
    folder.remove()
    assert remote.find(ROOT) == []


def test_one_that_is_written_again_is_replaced_by_its_manifest(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a run that is stopped twice at one step: until the new manifest is there, the old one counts."""
    folder = StoredCheckpointFolder(URL)
    write_checkpoint(folder, 1, numbers(1), None)
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "text", Flaky(1, OSError("gone")))  # when all ranks have put their files there
        with pytest.raises(CheckpointWriteError, match="gone"):
            write_checkpoint(folder, 1, numbers(2), None)
    assert len(remote.find(f"{ROOT}/step-00000001")) == 3
    assert read(folder.latest()) == [1.0] * 3
    write_checkpoint(folder, 1, numbers(3), None)
    assert read(folder.latest()) == [3.0] * 3
    assert names(remote) == ["latest.json", "step-00000001/manifest.json", "step-00000001/rank0.safetensors"]


def test_a_half_written_checkpoint_does_not_count(remote: MemoryFileSystem) -> None:
    folder = StoredCheckpointFolder(URL)
    write_checkpoint(folder, 1, numbers(1), None)
    folder.add(2, 0, lambda path: path.write_bytes(b"whole, but without a manifest"))
    assert folder.steps() == [1]
    assert folder.latest() == folder.path_of(1)
    write_checkpoint(folder, 3, numbers(3), None)
    assert {name.split("/")[0] for name in names(remote)} == {"latest.json", "step-00000001", "step-00000003"}


def save_in_vain(saver: CheckpointSaver, on_error: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """Saves step 2, which fails: told as an error or, where the run goes on, in the log."""
    saver.save(2, numbers(2))
    if on_error == "stop":
        with pytest.raises(CheckpointWriteError, match=message):
            saver.wait()
    else:
        saver.wait()
        assert re.search(message, caplog.text)
        assert saver.failed_steps == {2}


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_storage_that_stays_away_leaves_the_last_good_one(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_error: str
) -> None:
    folder = StoredCheckpointFolder(URL)
    message = r"step-00000002: expected to write it, got \w+ on rank 0: .*no route.*; the last good one is memory://"
    with caplog.at_level(logging.WARNING):
        saver = CheckpointSaver(folder, on_error=on_error)
        saver.save(1, numbers(1))
        saver.wait()
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, "put_file", Flaky(99, ConnectionResetError("no route")))
            save_in_vain(saver, on_error, message, caplog)
    assert read(folder.latest()) == [1.0] * 3
    saver.save(3, numbers(3))
    saver.wait()
    assert read(folder.latest()) == [3.0] * 3


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_storage_that_answers_nothing_at_all_is_one_checkpoint_less(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_error: str
) -> None:
    """Looking what is left there fails, too."""
    saver = CheckpointSaver(StoredCheckpointFolder(URL), on_error=on_error)
    saver.save(1, numbers(1))
    saver.wait()
    message = r"step-00000002: expected to write it, got .*no route.*; what is left there could not be looked at"
    with monkeypatch.context() as patch:
        for name in ("put_file", "pipe_file", "find", "ls", "info", "cat_file", "rm_file", "rm", "exists"):
            patch.setattr(MemoryFileSystem, name, Flaky(10**6, ConnectionResetError("no route")))
        save_in_vain(saver, on_error, message, caplog)
    saver.save(3, numbers(3))
    saver.wait()
    assert read(StoredCheckpointFolder(URL).latest()) == [3.0] * 3


def test_what_is_missing_or_cut_short_is_named(remote: MemoryFileSystem) -> None:
    folder = StoredCheckpointFolder(URL)
    write_checkpoint(folder, 1, numbers(1), None)
    (file,) = [name for name in remote.find(ROOT) if name.endswith(".safetensors")]
    whole = remote.cat_file(file)
    remote.pipe_file(file, whole[:-1])
    refused(folder.latest(), numbers(0), rf"safetensors: expected {len(whole)} bytes, got {len(whole) - 1} bytes")
    remote.rm_file(file)
    refused(folder.latest(), numbers(0), "expected .* bytes, got no such file; put back what rank 0 wrote")
    remote.pipe_file(f"{ROOT}/step-00000001/manifest.json", b"{")
    refused(folder.latest(), numbers(0), "step-00000001/manifest.json: expected JSON")


@pytest.mark.parametrize("text", ["", "[]", '{"checkpoint": "../x"}', '{"checkpoint": "step-00000009"}', "\udcff"])
def test_a_damaged_name_of_the_latest(remote: MemoryFileSystem, text: str) -> None:
    folder = StoredCheckpointFolder(URL)
    write_checkpoint(folder, 1, numbers(1), None)
    assert json.loads(remote.cat_file(f"{ROOT}/latest.json")) == {"checkpoint": "step-00000001"}
    remote.pipe_file(f"{ROOT}/latest.json", text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"latest\.json: expected .*; name a checkpoint of the folder in it"):
        folder.latest()
