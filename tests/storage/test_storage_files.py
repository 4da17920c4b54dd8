"""Single files at an address: whole or not there, on this machine and on storage alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dnis_torchrec.storage import access, files, outputs
from tests.storage.test_storage import Flaky


@pytest.fixture(params=["here", "on storage"])
def folder(request: pytest.FixtureRequest, remote: MemoryFileSystem, tmp_path: Path) -> files.Address:
    """An existing folder of this machine, or one on storage, which need not exist."""
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" if request.param == "here" else "memory://files/folder"


def test_a_file_is_written_read_listed_and_removed(folder: files.Address, tmp_path: Path) -> None:
    address = files.inside(folder, "a.bin")
    assert files.file_names(folder) == []
    assert files.file_size(address) is None
    assert files.put_file(address, lambda path: path.write_bytes(b"four")) == 4
    assert files.put_file(address, lambda path: path.write_bytes(b"three")) == 5
    assert files.file_size(address) == 5
    assert files.file_names(folder) == ["a.bin"]
    with files.local_file(address) as path:
        assert path.read_bytes() == b"three"
    files.remove_file(address)
    files.remove_file(address)
    assert files.file_names(folder) == []
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


def test_what_fails_leaves_the_file_as_it_was(folder: files.Address) -> None:
    address = files.inside(folder, "a.bin")
    files.put_file(address, lambda path: path.write_bytes(b"whole"))

    def half(path: Path) -> None:
        path.write_bytes(b"ha")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        files.put_file(address, half)
    assert access.read_bytes(address) == b"whole"


def test_names_are_those_of_all_files_below(remote: MemoryFileSystem) -> None:
    remote.pipe({"/files/folder/b/c.bin": b"", "/files/folder/a.bin": b"", "/files/folder2/d.bin": b""})
    assert files.file_names("memory://files/folder") == ["a.bin", "b/c.bin"]
    assert files.file_names("memory://files/folder/") == ["a.bin", "b/c.bin"]
    assert files.file_size("memory://files/folder/b") is None
    assert files.file_names("memory://files/folder/a.bin") == []  # no folder


def test_storage_that_fails_for_a_moment_is_tried_again(
    remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Flaky(access.ATTEMPTS - 1, ConnectionResetError("gone"))
    monkeypatch.setattr(MemoryFileSystem, "put_file", put)
    files.put_file("memory://files/a.bin", lambda path: path.write_bytes(b"x"))
    assert put.calls == access.ATTEMPTS
    monkeypatch.setattr(MemoryFileSystem, "put_file", Flaky(99, ConnectionResetError("gone")))
    with pytest.raises(access.StorageError, match=r"address memory://files/a\.bin: expected storage that answers"):
        files.put_file("memory://files/a.bin", lambda path: path.write_bytes(b"x"))


def test_what_others_put_there_is_neither_fetched_nor_touched(remote: MemoryFileSystem) -> None:
    """As rank 0's folder leaves alone what every rank puts at the URL by itself."""
    others = {"/files/run/parts/1.bin": b"1", "/files/run/model.rank1.bin": b"2"}
    remote.pipe({**others, "/files/run/run.json": b"{}"})
    with outputs.output("memory://files/run", skip=("parts/*", "model.rank*.bin")) as here:
        assert sorted(path.name for path in here.rglob("*.*")) == [".fetched.json", "run.json"]
        (here / "run.json").write_text("{1}")
    assert {name: remote.cat_file(name) for name in remote.find("/files/run")} == {
        **others,
        "/files/run/run.json": b"{1}",
    }
    remote.rm_file("/files/run/run.json")
    with outputs.output("memory://files/run", skip=("parts/*", "model.rank*.bin")) as here:
        assert not here.exists()  # no folder of one's own
        here.mkdir()
    assert sorted(remote.find("/files/run")) == sorted(others)
