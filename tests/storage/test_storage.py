"""Storage: fetched once, published whole, tried again when it stumbles, and named when it stays away."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dnis_torchrec.storage import access, claim, fetching, files, outputs


class Flaky:
    """Fails a number of times, then does what it was made for."""

    def __init__(self, failures: int, error: Exception, result: object = None) -> None:
        self.failures, self.error, self.result, self.calls = failures, error, result, 0

    def __call__(self, *_: object, **__: object) -> object:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return self.result


@pytest.mark.usefixtures("remote")
def test_what_fails_for_a_moment_is_tried_again() -> None:
    action = Flaky(access.ATTEMPTS - 1, ConnectionResetError("gone"), "read")
    assert access.retrying(action, "address s3://b") == "read"
    assert action.calls == access.ATTEMPTS


@pytest.mark.usefixtures("remote")
def test_what_stays_away_is_named_with_what_to_do() -> None:
    action = Flaky(99, ConnectionResetError("gone"))
    message = r"address s3://b: .* \(5 of 5 attempts made\), got ConnectionResetError: gone; check address"
    with pytest.raises(access.StorageError, match=message):
        access.retrying(action, "address s3://b")
    assert action.calls == access.ATTEMPTS


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (PermissionError("no"), access.StorageError),
        (FileNotFoundError("no"), FileNotFoundError),
        (TypeError("no"), TypeError),
    ],
)
def test_what_waiting_cannot_mend_is_not_tried_again(error: Exception, raised: type[Exception]) -> None:
    action = Flaky(99, error)
    with pytest.raises(raised):
        access.retrying(action, "address s3://b")
    assert action.calls == 1


def test_waits_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(access.time, "sleep", waits.append)
    access.retrying(Flaky(4, OSError("busy")), "address s3://b")
    assert waits == [0.5, 1.0, 2.0, 4.0]


def test_a_missing_package_and_an_unknown_protocol_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    with pytest.raises(ValueError, match=r"address nope://x: expected a protocol that fsspec knows, got 'nope'"):
        access.filesystem("nope://x")
    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ValueError, match=r"address s3://b: .*got no s3fs; pip install s3fs"):
        access.filesystem("s3://b")
    with pytest.raises(ValueError, match=r"pip install gcsfs"):
        access.filesystem("gs://b")


def test_local_addresses_are_paths(tmp_path: Path) -> None:
    assert fetching.fetch("data") == Path("data")
    assert fetching.fetch(f"file://{tmp_path}") == tmp_path
    with outputs.output(tmp_path / "run") as folder:
        assert folder == tmp_path / "run"
    with outputs.output(f"file://{tmp_path}/run") as folder:
        assert folder == tmp_path / "run"
    assert not access.is_url("C:/data")


def test_a_folder_is_fetched_once_and_follows_changes(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.pipe({"/bucket/data/a.txt": b"one", "/bucket/data/sub/b.txt": b"two", "/bucket/other": b"3"})
    folder = fetching.fetch("memory://bucket/data")
    assert {path.name: path.read_text() for path in folder.rglob("*.txt")} == {"a.txt": "one", "b.txt": "two"}
    copied: list[str] = []
    real = MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "get_file",
        lambda self, path, *rest, **more: (copied.append(path), real(self, path, *rest))[1],
    )
    assert fetching.fetch("memory://bucket/data/") == folder
    assert copied == []
    remote.pipe("/bucket/data/a.txt", b"three")
    remote.rm("/bucket/data/sub/b.txt")
    fetching.fetch("memory://bucket/data")
    assert copied == ["/bucket/data/a.txt"]
    assert [path.read_text() for path in folder.rglob("*.txt")] == ["three"]
    assert fetching.fetch("memory://bucket/other").read_text() == "3"
    with pytest.raises(ValueError, match="address memory://bucket/none: expected a file or a folder with files, got"):
        fetching.fetch("memory://bucket/none")


def test_no_name_leads_out_of_the_folder(remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"name": "/bucket/data/../../evil", "size": 1}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: {info["name"]: info})
    with pytest.raises(ValueError, match="expected names inside the folder"):
        fetching.fetch("memory://bucket/data")


def test_nobody_but_the_copy_says_what_it_holds(remote: MemoryFileSystem, tmp_path: Path) -> None:
    """Else storage could name files of this machine that the next fetch removes."""
    victim = tmp_path / "victim.txt"
    victim.write_text("kept")
    planted = json.dumps({"../../../victim.txt": "1:"}).encode()
    remote.pipe({"/bucket/data/a.txt": b"one", "/bucket/data/.fetched.json": planted})
    folder = fetching.fetch("memory://bucket/data")
    record = folder / ".fetched.json"
    assert list(json.loads(record.read_text())) == ["a.txt"]
    with pytest.raises(ValueError, match=r"expected no \.fetched\.json, which a copy keeps for itself, got"):
        fetching.fetch("memory://bucket/data/.fetched.json")
    record.write_bytes(planted)
    with pytest.raises(ValueError, match=r"file .*: expected names inside the folder, got '\.\./.*victim\.txt'"):
        fetching.fetch("memory://bucket/data")
    assert victim.read_text() == "kept"


def test_no_spelling_of_its_name_replaces_what_the_copy_says(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = {name: {"name": name, "size": 3} for name in ("/bucket/data/a.txt", "/bucket/data/./.fetched.json")}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: infos)
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda _, path, local: Path(local).write_text("{}"))
    with pytest.raises(ValueError, match=r"expected no \.fetched\.json, .* got '\./\.fetched\.json'"):
        fetching.fetch("memory://bucket/data")


def test_an_output_is_published_with_what_names_it_last(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order: list[str] = []
    real = MemoryFileSystem.put_file
    monkeypatch.setattr(
        MemoryFileSystem, "put_file", lambda self, local, path, **more: (order.append(path), real(self, local, path))[1]
    )
    with outputs.output("memory://bucket/run") as folder:
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        (folder / "model.safetensors").write_text("m")
        (folder / "checkpoints" / "last").write_text("c")
        (folder / "model.safetensors.partial").write_text("half")
        (folder / "checkpoints" / "next.partial").mkdir()
        (folder / "checkpoints" / "next.partial" / "rank0").write_text("half")
    assert order[-1] == "/bucket/run/run.json"
    assert len(order) == 3
    assert sorted(remote.find("/bucket/run")) == sorted(order)
    assert not folder.exists()
    assert not list((tmp_path / "cache" / "outputs").iterdir())


def test_an_output_that_exists_is_seen_and_only_what_changed_is_published(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.pipe({"/bucket/run/manifest.json": b"{}", "/bucket/run/old.txt": b"1", "/bucket/run/keep.txt": b"2"})
    events: list[str] = []
    put, remove = MemoryFileSystem.put_file, MemoryFileSystem.rm_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "put_file",
        lambda self, local, path, **more: (events.append(f"put {path[12:]}"), put(self, local, path))[1],
    )
    monkeypatch.setattr(
        MemoryFileSystem, "rm_file", lambda self, path: (events.append(f"rm {path[12:]}"), remove(self, path))[1]
    )
    with outputs.output("memory://bucket/run") as folder:
        assert (folder / "keep.txt").read_text() == "2"
    released = "rm writer"  # the claim, beside the folder
    assert events == [released]
    with outputs.output("memory://bucket/run") as folder:
        (folder / "old.txt").unlink()
        (folder / "new.txt").write_text("3")
    assert events == [released, "rm manifest.json", "put new.txt", "put manifest.json", "rm old.txt", released]
    names = sorted(name.rsplit("/", 1)[1] for name in remote.find("/bucket/run"))
    assert names == ["keep.txt", "manifest.json", "new.txt"]


class Killed(BaseException):
    """Ends a process in the middle of what it publishes."""


@pytest.mark.parametrize(
    ("status", "again", "stays"),
    [
        ("searching", "interrupted", b"searching"),  # resumable, as after a kill
        ("finished", "finished", b"finished"),  # a report beside it changes nothing of what it says
        ("finished", "searching", None),  # --overwrite: the old one vouches for what is being replaced
    ],
)
def test_a_run_whose_job_is_killed_while_it_publishes_can_be_found_again(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, again: str, stays: bytes
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model").write_text("m")
    mirror = outputs.Mirror(folder, "memory://bucket/run")
    (folder / "run.json").write_text(json.dumps({"status": status}))
    mirror.push()
    (folder / "model").write_text("another")
    if again != status:
        (folder / "run.json").write_text(json.dumps({"status": again}))

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(MemoryFileSystem, "put_file", killed)
        mirror.push()
    if stays is None:
        assert not remote.exists("/bucket/run/run.json")
    else:
        assert stays in remote.cat_file("/bucket/run/run.json")
    mirror.push()
    assert again.encode() in remote.cat_file("/bucket/run/run.json")


def test_a_pointer_that_changes_while_others_are_published_waits_for_what_it_points_to(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    mirror, put = outputs.Mirror(folder, "memory://bucket/run"), MemoryFileSystem.put_file
    (folder / "step-1").write_text("1")
    (folder / "latest.json").write_text("step-1")
    mirror.push()

    def and_the_next(self: MemoryFileSystem, local: str, path: str, **_: object) -> None:
        put(self, local, path)
        if path.endswith("step-2"):
            (folder / "step-3").write_text("3")
            (folder / "latest.json").write_text("now step-3")

    (folder / "step-2").write_text("2")
    os.utime(folder / "step-2", ns=(1, 1))
    (folder / "latest.json").write_text("then step-2")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", and_the_next)
        mirror.push()
    assert remote.cat_file("/bucket/run/latest.json") == b"step-1"
    mirror.push()
    assert remote.cat_file("/bucket/run/latest.json") == b"now step-3"
    assert remote.cat_file("/bucket/run/step-3") == b"3"


def test_a_job_that_has_lost_its_claim_publishes_nothing_more(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.002)
    output = outputs.output("memory://bucket/run")
    folder = output.__enter__()
    folder.mkdir()
    (folder / "a").write_text("mine")
    taken = json.dumps({"writer": "process 7 on far", "job": "another", "sign": "0"}).encode()
    renewing = next(thread for thread in threading.enumerate() if thread.name == "dnis-claim")
    for _ in range(100):  # a sign of life that was on its way goes over the first
        if renewing.is_alive():
            remote.pipe_file("/bucket/run.writer", taken)
            renewing.join(0.05)
    message = (
        r"expected to keep the claim to it.*taken over by process 7 on far; end one.*nothing is lost: .*/run has it"
    )
    with pytest.raises(access.StorageError, match=message):
        output.__exit__(None, None, None)
    assert not remote.exists("/bucket/run/a")
    assert remote.cat_file("/bucket/run.writer") == taken


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), ValueError("of some library")])
def test_checkpoints_are_mirrored_while_the_caller_works(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Whatever one pass meets, the next one tries again."""
    monkeypatch.setattr(outputs, "MIRROR_SECONDS", 0.01)
    put, fails = MemoryFileSystem.put_file, threading.Event()
    fails.set()

    def put_file(self: MemoryFileSystem, local: str, path: str, **_: object) -> None:
        if fails.is_set():
            raise error
        put(self, local, path)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    with outputs.output("memory://bucket/run") as folder:
        folder.mkdir(parents=True)
        (folder / "last").write_text("state")
        wait_until(lambda: "the next pass tries again" in caplog.text)
        assert not remote.exists("/bucket/run/last")
        fails.clear()
        wait_until(lambda: remote.exists("/bucket/run/last"))
        assert remote.cat_file("/bucket/run/last") == b"state"


def test_a_folder_that_vanishes_while_it_is_listed_is_none(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, listed, gone = tmp_path / "run", os.scandir, [True]
    mirror = outputs.Mirror(folder, "memory://bucket/run")
    for name in ("step-1.partial", "step-2", "step-3"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)

    def renamed_meanwhile(path: str | int) -> object:
        if path == str(folder / "step-2") and gone:
            raise FileNotFoundError(gone.pop())
        return listed(path)

    monkeypatch.setattr(os, "scandir", renamed_meanwhile)
    for steps in (["step-3"], ["step-2", "step-3"]):
        mirror.push()
        assert sorted(remote.find("/bucket/run")) == [f"/bucket/run/{step}/file" for step in steps]


def test_what_vanishes_while_it_is_published_is_left_out_and_a_missing_bucket_is_not(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(outputs, "SMALL_BYTES", 0)
    mirror = outputs.Mirror(tmp_path / "run", "memory://bucket/run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "gone").write_text("1")
    put = MemoryFileSystem.put_file

    def vanish(self: MemoryFileSystem, local: str, path: str, **_: object) -> None:
        Path(local).unlink()
        put(self, local, path)

    monkeypatch.setattr(MemoryFileSystem, "put_file", vanish)
    mirror.push()
    assert not remote.exists("/bucket/run/gone")
    (tmp_path / "run" / "stays").write_text("1")
    monkeypatch.setattr(MemoryFileSystem, "put_file", Flaky(99, FileNotFoundError("no such bucket")))
    with pytest.raises(access.StorageError, match="memory://bucket/run: expected a place to write to, got no such"):
        mirror.push()


def test_an_output_that_cannot_be_published_is_kept_and_named(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "put_file", Flaky(99, ConnectionResetError("gone")))
    output = outputs.output("memory://bucket/run")
    folder = output.__enter__()
    folder.mkdir()
    (folder / "a").write_text("x")
    with pytest.raises(access.StorageError, match=r"address memory://bucket/run/a: .*nothing is lost: .*/run has it"):
        output.__exit__(None, None, None)
    assert (folder / "a").read_text() == "x"


def test_an_error_of_the_caller_passes_and_what_there_is_is_published(remote: MemoryFileSystem) -> None:
    with suppress(KeyboardInterrupt), outputs.output("memory://bucket/run") as folder:
        folder.mkdir()
        (folder / "last").write_text("state")
        raise KeyboardInterrupt
    assert remote.cat_file("/bucket/run/last") == b"state"
    assert not folder.exists()


def test_processes_of_one_machine_fill_one_folder(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(outputs, "SHARED_POLL_SECONDS", 0.001)
    remote.pipe("/bucket/run/run.json", b"{}")

    def second() -> None:
        with outputs.shared_output("memory://bucket/run", job="1", attempt="0", is_first=False) as folder:
            assert (folder / "run.json").is_file()
            (folder / "shard.rank1").write_text("1")

    with ThreadPoolExecutor() as pool:
        other = pool.submit(second)
        with outputs.shared_output("memory://bucket/run", job="1", attempt="0", is_first=True) as folder:
            (folder / "shard.rank0").write_text("0")
            other.result(timeout=60)
    names = sorted(name.rsplit("/", 1)[1] for name in remote.find("/bucket/run"))
    assert names == ["run.json", "shard.rank0", "shard.rank1"]
    assert not list((tmp_path / "cache" / "outputs").iterdir())
    monkeypatch.setattr(outputs, "SHARED_WAIT_SECONDS", 0.0)
    alone = outputs.shared_output("memory://bucket/run", job="2", attempt="0", is_first=False)
    with pytest.raises(access.StorageError, match="expected the first process to prepare it within 0 s"):
        alone.__enter__()


def test_files_of_addresses(remote: MemoryFileSystem, tmp_path: Path) -> None:
    for name in ("b.tsv", "a.tsv", "c.parquet"):
        (tmp_path / name).write_text("x")
    remote.pipe({"/bucket/2.tsv": b"x", "/bucket/1.tsv": b"x"})
    assert access.expand([tmp_path / "*.tsv"]) == (str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv"))
    assert access.expand([tmp_path / "c.parquet", tmp_path])[0] == str(tmp_path / "c.parquet")
    assert access.expand(["memory://bucket/*.tsv"]) == ("memory:///bucket/1.tsv", "memory:///bucket/2.tsv")
    assert access.read_bytes("memory://bucket/1.tsv") == b"x"
    with pytest.raises(ValueError, match="expected at least one file, got none"):
        access.expand(["memory://bucket/*.csv"])


@pytest.mark.parametrize("folder", ["d[1]", "d*", "d[1]/e?"])
def test_what_is_there_is_no_glob(remote: MemoryFileSystem, tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "d1").mkdir()
    for name in (f"{folder}/a[1].tsv", f"{folder}/b.tsv", "d1/a1.tsv"):
        (tmp_path / name).write_text("x")
    files = (f"{tmp_path}/{folder}/a[1].tsv", f"{tmp_path}/{folder}/b.tsv")
    assert access.expand([tmp_path / folder]) == files
    assert access.expand(files) == files
    remote.pipe({f"/bucket/{folder}/a[1].tsv": b"x", "/bucket/d1/a1.tsv": b"x"})
    stored = (f"memory:///bucket/{folder}/a[1].tsv",)
    assert access.expand([f"memory://bucket/{folder}"]) == access.expand(stored) == stored
    assert access.expand([f"{tmp_path}/d[0-9]/*"]) == (f"{tmp_path}/d1/a1.tsv",)


def test_a_copy_in_the_cache_is_written_through_no_link(remote: MemoryFileSystem, tmp_path: Path) -> None:
    remote.pipe({"/bucket/run/a/b.bin": b"new", "/bucket/run/c.bin": b"new"})
    outside, copy = tmp_path / "outside", fetching.local_copy_of("memory://bucket/run")
    outside.mkdir()
    (outside / "b.bin").write_text("years of work")
    for planted in (copy.parent, copy, copy / "a", copy / "a" / "b.bin", copy / ".fetched.json"):
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.symlink_to(outside / "b.bin" if planted.suffix else outside)
        with pytest.raises(ValueError, match=r"got a link; remove it|got the link '.*'; remove it"):
            fetching.fetch("memory://bucket/run")
        planted.unlink()
        assert {path.name: path.read_text() for path in outside.iterdir()} == {"b.bin": "years of work"}
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").rename(tmp_path / "disk" / "cache")
    (tmp_path / "cache").symlink_to(tmp_path / "disk" / "cache")  # the user's own word
    assert (fetching.fetch("memory://bucket/run") / "a" / "b.bin").read_bytes() == b"new"


def test_a_link_in_an_output_is_not_published(remote: MemoryFileSystem, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with outputs.output("memory://bucket/run") as folder:
        folder.mkdir()
        (folder / "own").touch()
        (folder / "link").symlink_to(tmp_path / "secret")
    assert files.file_names("memory://bucket/run") == ["own"]
