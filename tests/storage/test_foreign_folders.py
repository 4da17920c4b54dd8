"""Folders of strangers: nothing in them is read or written through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dnis_torchrec.artifact.manifest import ARTIFACT
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.storage.foreign_folders import check_plain, file_lock, is_plain_file, make_folder, open_log
from dnis_torchrec.storage.whole_folders import new_folder
from tests.tiny_artifact import write_tiny_artifact


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("years of work")
    return folder


def test_links_and_pipes_are_named_wherever_they_are(tmp_path: Path, outside: Path) -> None:
    run = tmp_path / "run"
    (run / "a" / "b").mkdir(parents=True)
    (run / "a" / "file").touch()
    (tmp_path / "link").symlink_to(run)
    check_plain(run, "run")
    check_plain(tmp_path / "link", "run")  # the user's own word
    check_plain(tmp_path / "gone", "run")
    check_plain(run / "a" / "file", "run")
    for name, target in (("to a folder", outside), ("to a file", outside / "precious"), ("to nothing", "nowhere")):
        (run / "a" / "b" / name).symlink_to(target)
        message = f"^run: expected plain files and folders in it, got the link 'a/b/{name}'; remove it$"
        with pytest.raises(ValueError, match=message):
            check_plain(tmp_path / "link", "run")
        (run / "a" / "b" / name).unlink()
    os.mkfifo(run / "pipe")
    with pytest.raises(ValueError, match="got the special file 'pipe'"):
        check_plain(run, "run")


def test_folders_are_made_through_no_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "named").symlink_to(outside)
    assert make_folder(tmp_path / "named" / "a" / "b", within=tmp_path / "named") == tmp_path / "named" / "a" / "b"
    assert make_folder(tmp_path / "named" / "a" / "b", within=tmp_path / "named").is_dir()
    with pytest.raises(ValueError, match=r"^folder .*/named: expected a plain folder, got a link; remove it$"):
        make_folder(tmp_path / "named" / "c", within=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="expected a plain folder, got something else"):
        make_folder(tmp_path / "file" / "c", within=tmp_path)
    assert not (outside / "c").exists()


def test_a_plain_file_is_no_link_to_one(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "link").symlink_to(outside / "precious")
    found = [is_plain_file(path) for path in (outside / "precious", tmp_path / "link", outside, outside / "precious/x")]
    assert found == [True, False, False, False]


def test_a_lock_says_who_holds_it(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("process 1 on a host of a long name, as an older version has written it\n")
    for _ in range(2):
        with file_lock(tmp_path / "lock") as owner, file_lock(tmp_path / "lock") as other:
            assert owner is None
            assert other.startswith(f"process {os.getpid()} on ")
            assert "older" not in other


@pytest.mark.parametrize("target", ["precious", "missing", "."])
def test_a_lock_that_is_a_link_is_refused(tmp_path: Path, outside: Path, target: str) -> None:
    (tmp_path / "lock").symlink_to(outside / target)
    with pytest.raises(ValueError, match="lock: expected a plain file, got a link"), file_lock(tmp_path / "lock"):
        pass
    assert os.listdir(outside) == ["precious"]
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(ValueError, match="lock: expected a plain file, got something else"):
        file_lock(tmp_path / "lock").__enter__()


def test_a_lock_with_a_second_name_is_not_written(tmp_path: Path, outside: Path) -> None:
    os.link(outside / "precious", tmp_path / "lock")
    with file_lock(tmp_path / "lock") as owner, file_lock(tmp_path / "lock") as other:
        assert (owner, other) == (None, "years of work")
    assert (outside / "precious").read_text() == "years of work"


def test_a_log_is_begun_beside_what_was_there(tmp_path: Path, outside: Path) -> None:
    log = tmp_path / "log.txt"
    for plant in (os.symlink, os.link):
        plant(outside / "precious", log)
        with open_log(log, anew=True) as file:
            file.write(b"first\n")
        with open_log(log, anew=False) as file:
            file.write(b"second\n")
        assert log.read_text() == "first\nsecond\n"
        log.unlink()
    log.symlink_to(outside / "precious")
    with pytest.raises(OSError, match="symbolic link"):
        open_log(log, anew=False)
    assert (outside / "precious").read_text() == "years of work"


@pytest.mark.parametrize("path", [".", "../out", "../../out"])
def test_who_stands_in_what_is_replaced_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The folder would move away with its user, and the new one be written into the old."""
    artifact = write_tiny_artifact(tmp_path / "out")
    before = sorted(artifact.rglob("*"))
    inside = artifact / "csr_fp32" if path.startswith("../..") else artifact
    monkeypatch.chdir(inside)
    refused = pytest.raises(ValueError, match="expected a working folder outside of what is replaced, got")
    with refused, new_folder(path, overwrite=True, kind=ARTIFACT):
        pass
    (artifact / "run.json").touch()
    with pytest.raises(ValueError, match=rf"^run folder {path}: expected a working folder outside of what is replaced"):
        RunFolder.check_free(Path(path), overwrite=True)
    (artifact / "run.json").unlink()
    assert sorted(artifact.rglob("*")) == before
