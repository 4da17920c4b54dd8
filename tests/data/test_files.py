"""Files appear whole or not at all, JSON is held against types, storage is fetched and published."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dnis_torchrec.data import files, urls

KIND = files.FolderKind("box", "box.json", "test-box")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(folder: Path, text: str) -> None:
    files.write_json(folder / "box.json", {"format": "test-box"})
    (folder / "content").write_text(text)


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_a_file_that_breaks_off_stays_what_it_was(tmp_path: Path, error: BaseException) -> None:
    files.write_text(tmp_path / "a", "old")
    with pytest.raises(type(error)), files.write_whole(tmp_path / "a") as unfinished:
        unfinished.write_text("new, and half")
        raise error
    assert names_in(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_file_has_the_mode_that_the_user_wants(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    files.write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_error_names_the_file_itself(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        files.write_text(tmp_path / "none" / "a", "x")
    assert raised.value.filename == str(tmp_path / "none" / "a")


def test_a_folder_is_put_back_where_the_new_one_cannot_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with files.new_folder(tmp_path / "box", kind=KIND) as folder:
        fill(folder, "old")
    rename, calls = os.rename, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(files.os, "rename", second_fails)
    with pytest.raises(OSError, match="no"), files.new_folder(tmp_path / "box", overwrite=True, kind=KIND) as folder:
        fill(folder, "new")
    assert (tmp_path / "box" / "content").read_text() == "old"
    assert names_in(tmp_path) == ["box"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_reader_always_finds_a_folder_where_the_system_exchanges_two(tmp_path, monkeypatch, exchanges: bool) -> None:
    with files.new_folder(tmp_path / "box", kind=KIND) as folder:
        fill(folder, "old")
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    rename, gone = os.rename, []

    def watched(source: Path, target: Path) -> None:
        rename(source, target)
        gone.append(not (tmp_path / "box").exists())

    monkeypatch.setattr(files.os, "rename", watched)
    with files.new_folder(tmp_path / "box", overwrite=True, kind=KIND) as folder:
        fill(folder, "new")
    assert (tmp_path / "box" / "content").read_text() == "new"
    assert names_in(tmp_path) == ["box"]
    assert gone == ([] if exchanges else [True, False])


def killed(path: Path) -> None:
    with files.new_folder(path, overwrite=True, kind=KIND) as folder:
        fill(folder, "new")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_is_killed_leaves_the_last_good_state(tmp_path: Path) -> None:
    with files.new_folder(tmp_path / "box", kind=KIND) as folder:
        fill(folder, "old")
    child = multiprocessing.get_context("forkserver").Process(target=killed, args=(tmp_path / "box",))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert (tmp_path / "box" / "content").read_text() == "old"
    with files.new_folder(tmp_path / "box", overwrite=True, kind=KIND) as folder:
        fill(folder, "new")
    assert (tmp_path / "box" / "content").read_text() == "new"


def of_another_format(path: Path) -> None:
    path.mkdir()
    files.write_json(path / "box.json", {"format": "other"})


def link(path: Path) -> None:
    with files.new_folder(path.with_name("real"), kind=KIND) as folder:
        fill(folder, "old")
    path.symlink_to(path.with_name("real"))


@pytest.mark.parametrize("make", [Path.mkdir, of_another_format, link, Path.touch])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_folder_of_its_kind_is_not_replaced(
    tmp_path: Path, make: Callable[[Path], object], overwrite: bool
) -> None:
    make(tmp_path / "box")
    before = names_in(tmp_path)
    with pytest.raises(ValueError, match="^box "), files.new_folder(tmp_path / "box", overwrite=overwrite, kind=KIND):
        pass
    assert names_in(tmp_path) == before


@pytest.mark.parametrize("make", [lambda p: p.symlink_to("/etc"), lambda p: p.symlink_to("/etc/passwd"), os.mkfifo])
def test_links_and_special_files_of_others_are_refused_at_any_depth(tmp_path: Path, make: Callable) -> None:
    files.check_plain(tmp_path / "none", "folder")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "file").touch()
    files.check_plain(tmp_path, "folder")
    make(tmp_path / "deep" / "er" / "x")
    with pytest.raises(ValueError, match="^folder: .*'deep/er/x'"):
        files.check_plain(tmp_path, "folder")


def test_a_lock_is_held_by_one_and_names_it(tmp_path: Path) -> None:
    with files.file_lock(tmp_path / "lock") as owner:
        assert owner is None
        with files.file_lock(tmp_path / "lock") as other:
            assert other is not None
            assert other.startswith(f"process {os.getpid()} on ")
    with files.file_lock(tmp_path / "lock") as owner:
        assert owner is None


def test_a_lock_writes_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    os.link(tmp_path / "mine", tmp_path / "second")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with files.file_lock(tmp_path / "second"):
        pass
    with pytest.raises(OSError), files.file_lock(tmp_path / "link"):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


class Head(TypedDict):
    rows: files.NotNegative
    name: NotRequired[str]


@dataclass
class Settings:
    seed: int
    rate: float = 0.1


GOOD: list[tuple[Any, Any]] = [
    ({"rows": 3, "more": [1]}, Head),
    ({"rows": 0, "name": "a"}, Head),
    ({"seed": 1}, Settings),
    ({"seed": 1, "rate": 2}, Settings),
    ([1, "a"], tuple[int, str]),
    ([], list[int]),
    ({"a": [None, 1]}, dict[str, list[int | None]]),
    (True, bool),
    (1, float),
    ({"a": {"b": [1.5]}}, Any),
]
BAD: list[tuple[Any, Any, str]] = [
    ({}, Head, "box"),
    ({"rows": -1}, Head, "box, field rows"),
    ({"rows": True}, Head, "box, field rows"),
    ({"rows": 1.0}, Head, "box, field rows"),
    ({"rows": 2**63}, Head, "box, field rows"),
    ({"rows": 1, "name": None}, Head, "box, field name"),
    ([], Head, "box"),
    ({"seed": 1, "sead": 2}, Settings, "box"),
    ({"rate": 0.5}, Settings, "box"),
    ({"seed": 1, "rate": float("inf")}, Settings, "box, field rate"),
    ([1], tuple[int, str], "box"),
    ([1, 2], tuple[int, str], "box, field [1]"),
    ({"a": [None, "1"]}, dict[str, list[int | None]], "box, field a[1]"),
    ("x", int | None, "box"),
    (1, bool, "box"),
    (10**400, float, "box"),
    ({"a": [{"rows": "x"}]}, dict[str, list[Head]], "box, field a[0].rows"),
]


@pytest.mark.parametrize(("value", "kind"), GOOD)
def test_what_conforms_is_let_through(value: Any, kind: Any) -> None:
    files.conform(value, kind, "box")


@pytest.mark.parametrize(("value", "kind", "place"), BAD)
def test_what_does_not_conform_is_named_by_its_field(value: Any, kind: Any, place: str) -> None:
    with pytest.raises(ValueError) as raised:
        files.conform(value, kind, "box", remedy="mend it")
    assert str(raised.value).startswith(f"{place}: expected ")
    assert str(raised.value).endswith("; mend it")
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"NaN", b"[Infinity]", b"1e999", b'{"a": 1, "a": 2}', b"[" * 10**5, b"1" * 5000, b"{} {}"],
)
def test_what_is_no_json_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^box: expected "):
        files.parse_json(content, Any, "box")


# Storage


def test_a_local_path_is_fetched_as_it_is(tmp_path: Path) -> None:
    assert urls.fetch(tmp_path) == urls.fetch(f"file://{tmp_path}") == tmp_path
    assert urls.address_of(tmp_path) == str(tmp_path)
    assert urls.url_of(tmp_path) is None


def test_what_is_fetched_is_fetched_once_and_anew_when_it_has_changed(remote, monkeypatch) -> None:
    remote.pipe({"/bucket/box/a": b"1", "/bucket/box/deep/b": b"2"})
    first = urls.fetch("memory://bucket/box/")
    assert (first.name, (first / "a").read_bytes(), (first / "deep" / "b").read_bytes()) == ("box", b"1", b"2")
    assert urls.address_of(first) == "memory://bucket/box"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", None)
        assert urls.fetch("memory://bucket/box") == first
    remote.pipe("/bucket/box/a", b"3")
    assert (urls.fetch("memory://bucket/box") / "a").read_bytes() == b"3"
    assert (first / "a").read_bytes() == b"1"  # who reads it goes on reading it
    assert urls.fetch("memory://bucket/box/a").read_bytes() == b"3"
    with pytest.raises(ValueError, match="^address memory://bucket/none: expected "):
        urls.fetch("memory://bucket/none")


def test_an_output_is_what_was_there_and_is_published_however_it_ends(remote: MemoryFileSystem) -> None:
    remote.pipe({"/bucket/run/run.json": b"1", "/bucket/run/old": b"2", "/bucket/run/checkpoints/x": b"3"})
    with pytest.raises(KeyboardInterrupt), urls.output("memory://bucket/run", "1", skip=["checkpoints/*"]) as folder:
        assert names_in(folder) == ["old", "run.json"]
        assert folder == urls.output_folder("memory://bucket/run", "1")
        (folder / "old").unlink()
        (folder / "run.json").write_bytes(b"4")
        (folder / "deep").mkdir()
        (folder / "deep" / "new").write_bytes(b"5")
        (folder / "link").symlink_to("/etc/passwd")
        (folder / ".x.partial").touch()
        raise KeyboardInterrupt
    stored = {name.removeprefix("/bucket/run/"): remote.cat_file(name) for name in remote.find("/bucket/run")}
    assert stored == {"run.json": b"4", "deep/new": b"5", "checkpoints/x": b"3"}
    assert not folder.exists()


def test_an_output_that_cannot_be_published_is_left_here(remote, monkeypatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise ConnectionResetError("no route")

    monkeypatch.setattr(MemoryFileSystem, "put_file", away)
    with pytest.raises(OSError, match="no route") as raised, urls.output("memory://bucket/run", "1") as folder:
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_bytes(b"1")
    assert (folder / "run.json").read_bytes() == b"1"
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("folder", ["memory://bucket/x", "."])
def test_single_files_are_put_read_listed_and_removed(remote, tmp_path, monkeypatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    address = urls.path_in(folder, "a")
    assert urls.file_size(address) is None
    assert urls.put_file(address, lambda path: path.write_bytes(b"123")) == 3
    assert (urls.file_size(address), urls.read_bytes(address)) == (3, b"123")
    assert "a" in urls.file_names(folder)
    local = urls.fetch(address)
    assert local.read_bytes() == b"123"
    for _ in range(2):
        urls.remove_file(address)
    assert urls.file_size(address) is None
    assert not [name for name in urls.file_names(folder) if not name.startswith("cache")]


def test_a_protocol_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="^address nosuch://x: expected a protocol that fsspec knows"):
        urls.fetch("nosuch://x")
