"""Every command takes URLs where it takes folders: the session of the README, on storage alone."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.cli.test_cli import SHORT, dnis
from tests.shared_storage import register
from tests.started import Started, start_dnis

pytestmark = pytest.mark.usefixtures("no_images")


@pytest.fixture
def remote(gloo, remote: MemoryFileSystem) -> MemoryFileSystem:
    """With a folder of data."""
    remote.pipe("/cli/data/readme.txt", b"generated")
    return remote


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
    before = {name: remote.cat_file(name) for name in remote.find("/cli/run")}
    bad = dnis("search", "tests.tiny:demo", "--compression", 4000, "--out", run, *data, *SHORT, "--overwrite")
    assert bad.returncode == 1
    assert "compression: expected at most" in bad.stderr
    assert before.keys() == set(remote.find("/cli/run"))
    assert all(remote.cat_file(name) == content for name, content in before.items() if not name.endswith("/lock"))
    for place in (run, f"{run}/", "memory:///cli/run"):
        over = dnis("prune", run, "--compression", 5, "--fine-tune-epochs", 0, "--out", place, "--overwrite", *data)
        assert over.returncode == 2
        assert f"error: run folder {place}: expected another folder than that of the run to prune" in over.stderr
    assert all(remote.cat_file(name) == content for name, content in before.items() if not name.endswith("/lock"))
    steps = (
        ("prune", run, "--compression", 5, "--fine-tune-epochs", 0, "--out", pruned, *data),
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
    steps = json.loads(remote.cat_file("/cli/pruned/run.json"))["provenance"]
    assert [step["folder"] for step in steps] == [run, pruned]  # as they were typed: copies are gone
    assert "manifest.json" in names(remote, "/cli/artifact")
    assert "report.html" in names(remote, "/cli/run")
    assert "report.html" not in names(remote, "/cli/pruned")
    assert f"report: {run}/report.html" in done.stdout
    overwritten = dnis("export", run, "--out", artifact, "--overwrite")
    assert overwritten.returncode == 0, overwritten.stderr
    assert not list((tmp_path / "cache" / "outputs").iterdir())


def test_a_lock_that_was_left_keeps_no_search_from_its_url(remote: MemoryFileSystem) -> None:
    remote.pipe("/cli/run/lock", b"process 1 on a host that is gone")
    done = dnis("search", "tests.tiny:demo", "--compression", 4000, "--out", "memory://cli/run", *SHORT)
    assert done.returncode == 1
    assert "compression: expected at most" in done.stderr
    assert names(remote, "/cli/run") == set()


def test_wrong_addresses_are_wrong_arguments(remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (("evaluate", "memory://cli/none"), ("export", "nope://x", "--out", "a")):
        done = dnis(*step)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: address {step[1]}: expected")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    done = dnis("search", "tests.tiny:demo", "--compression", 4, "--out", "memory://cli/run")
    assert done.returncode == 2
    assert "expected RANK, LOCAL_RANK, LOCAL_WORLD_SIZE of every rank, got no RANK, LOCAL_RANK; start it" in done.stderr


def start_hosts(folder: Path, *arguments: object) -> list[Started]:
    """A rank on each of two hosts, as torchrun starts them: with a cache, and so a disk, of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "hosts"}
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    of_ranks = [{"RANK": str(rank), "DNIS_CACHE": str(folder / f"cache{rank}")} for rank in range(2)]
    return [start_dnis(folder / f"said{rank}", *arguments, **common, **own) for rank, own in enumerate(of_ranks)]


def test_hosts_put_one_run_on_storage_and_go_on_with_it(gloo, tmp_path: Path, monkeypatch) -> None:
    """Both are told to stop in the midst; what they have put there is enough to go on, and for one process to read."""
    run, stored = f"shared://{tmp_path}/run", tmp_path / "run"
    command = ("search", "tests.tiny:demo", "--compression", 4, "--out", run, *SHORT, "--epochs", 12)
    hosts = start_hosts(tmp_path, *command)
    deadline = time.monotonic() + 120
    while not (stored / "checkpoints" / "latest.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    for host in hosts:
        host.send_signal(signal.SIGINT)
    for host in hosts:
        code, _, said = host.ended(timeout=120)
        assert code == 130, said
        assert f"everything is saved in {run}/checkpoints/step-" in said
    assert json.loads((stored / "run.json").read_text())["status"] == "interrupted"
    first, second = [host.ended(timeout=120) for host in start_hosts(tmp_path, *command, "--resume")]
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert f"run: {run}" in first[1]
    assert "resumed after lower step" in first[2]
    assert second[1] == ""
    assert {"model.rank0.safetensors", "model.rank1.safetensors", "run.json", "scheme.safetensors"} <= {
        path.name for path in stored.iterdir()
    }
    assert not list((tmp_path / "cache0" / "outputs").iterdir())
    assert list((tmp_path / "cache1").iterdir()) == []
    monkeypatch.setenv("DNIS_CACHE", str(tmp_path / "reader"))
    register()
    done = dnis("evaluate", run)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "run"


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
