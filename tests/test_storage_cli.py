"""Every command takes URLs where it takes folders: the session of the README, on storage alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dnis_torchrec.storage import access, claim
from tests.test_cli import SHORT, dnis


@pytest.fixture
def remote(gloo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MemoryFileSystem]:
    """Storage in memory with a folder of data, a cache of its own, and no waiting."""
    monkeypatch.setenv("DNIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(access, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(claim, "SETTLE_SECONDS", 0.0)
    files = MemoryFileSystem()
    files.pipe("/cli/data/readme.txt", b"generated")
    yield files
    monkeypatch.undo()
    files.rm("/cli", recursive=True)


def names(files: MemoryFileSystem, folder: str) -> set[str]:
    return {name.removeprefix(f"{folder}/") for name in files.find(folder)}


def test_a_session_on_storage(remote: MemoryFileSystem, tmp_path: Path) -> None:
    data = ("--data", "memory://cli/data")
    run, pruned, artifact = "memory://cli/run", "memory://cli/pruned", "memory://cli/artifact"
    done = dnis("search", "tests.tiny:demo", "--compression", 4, "--out", run, *data, *SHORT)
    assert done.returncode == 0, done.stderr
    assert f"run: {run}" in done.stdout
    assert {"run.json", "model.safetensors", "report.json"} <= names(remote, "/cli/run")
    assert any(name.startswith("checkpoints/") for name in names(remote, "/cli/run"))
    again = dnis("search", "tests.tiny:demo", "--compression", 4, "--out", run, *data, *SHORT)
    assert again.returncode == 2
    assert "expected a folder that does not exist" in again.stderr
    steps = (
        ("prune", run, "--compression", 8, "--fine-tune-epochs", 0, "--out", pruned, *data),
        ("export", pruned, "--out", artifact),
        ("evaluate", artifact, *data),
        ("plan", artifact, "--hbm", "1GB"),
        ("report", run, pruned),
    )
    for step in steps:
        done = dnis(*step)
        assert done.returncode == 0, (step, done.stderr)
        if step[0] == "evaluate":
            assert json.loads(done.stdout)["kind"] == "artifact"
    assert "manifest.json" in names(remote, "/cli/artifact")
    assert "report.html" in names(remote, "/cli/run")
    assert "report.html" not in names(remote, "/cli/pruned")
    assert f"report: {run}/report.html" in done.stdout
    overwritten = dnis("export", run, "--out", artifact, "--overwrite")
    assert overwritten.returncode == 0, overwritten.stderr
    assert not list((tmp_path / "cache" / "outputs").iterdir())


def test_wrong_addresses_are_wrong_arguments(remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (("evaluate", "memory://cli/none"), ("export", "nope://x", "--out", "a")):
        done = dnis(*step)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: address {step[1]}: expected")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    done = dnis("search", "tests.tiny:demo", "--compression", 4, "--out", "memory://cli/run")
    assert done.returncode == 2
    assert "expected all ranks on one host, where they share a folder, got 1 of 2 ranks" in done.stderr


def test_storage_that_stays_away_is_one_line(remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionResetError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "find", unreachable)
    done = dnis("evaluate", "memory://cli/run")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "address memory://cli/run: expected storage that answers (5 of 5 attempts made)" in line
    assert "check address, credentials and network" in line
