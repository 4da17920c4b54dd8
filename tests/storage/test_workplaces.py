"""Where files and folders are written: out of reach, and gone with their writer, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname

import pytest

from dnis_torchrec.artifact import manifest as artifact
from dnis_torchrec.artifact import write_artifact
from dnis_torchrec.storage import whole_folders, workplaces
from dnis_torchrec.storage.workplaces import OTHER_HOST_SECONDS, remove_left, workplace
from tests.serving_reference import two_tables

WRITER = f"""
import importlib.util, os, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("workplaces", {workplaces.__file__!r})
sys.modules["workplaces"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
with module.workplace(Path(sys.argv[1])) as place:
    place.new.mkdir()
    (place.new / "half").write_text("half")
    if sys.argv[2:]:
        place.set_aside(Path(sys.argv[1]))
    print("writing", flush=True)
    sys.stdin.read()
"""
"""Without the package, which takes seconds to import."""


def writer(path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-c", WRITER, str(path), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    return process


def killed(path: Path, *arguments: str) -> None:
    with writer(path, *arguments) as process:
        process.kill()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_what_a_killed_writer_leaves_is_removed_by_the_next_one_and_a_living_one_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "artifact"
    with writer(path) as living:
        (own,) = names(tmp_path)
        killed(path)
        killed(tmp_path / "another")
        assert len(names(tmp_path)) == 2  # the last one has removed what the one before it left
        with workplace(path) as place:
            assert names(tmp_path) == sorted([own, place.new.parents[1].name])
        assert (tmp_path / own / "new" / "artifact" / "half").read_text() == "half"
        living.communicate()
    assert names(tmp_path) == []


def test_two_writers_of_one_path_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with workplace(path) as first, workplace(path) as second:
        first.new.write_text("first")
        second.new.write_text("second")
        os.replace(second.new, path)
        os.replace(first.new, path)
    assert path.read_text() == "first"
    assert names(tmp_path) == ["a.txt"]


def test_a_workplace_is_its_writers_alone_and_cannot_be_guessed(tmp_path: Path) -> None:
    seen = set()
    for _ in range(2):
        with workplace(tmp_path / ("n" * 255)) as place:
            hidden = place.new.parents[1]
            assert hidden.stat().st_mode & 0o777 == 0o700
            seen.add(hidden.name)
    assert len(seen) == 2


@pytest.mark.parametrize("stands_there", ["nothing", "an empty folder", "a full folder", "a file", "a link"])
def test_a_folder_that_was_set_aside_is_put_back_where_its_place_is_free(tmp_path: Path, stands_there: str) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "years").write_text("of work")
    killed(path, "aside")
    if "folder" in stands_there:
        path.mkdir()
    if stands_there == "a full folder":
        (path / "newer").touch()
    if stands_there == "a file":
        path.touch()
    if stands_there == "a link":
        path.symlink_to(tmp_path)
    remove_left(tmp_path)
    assert names(tmp_path) == ["run"]
    is_free = stands_there in ("nothing", "an empty folder")
    assert (path / "years").exists() is is_free


def test_a_folder_that_cannot_be_put_back_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "years").touch()
    killed(tmp_path / "run", "aside")

    def fails(*_: object) -> None:
        raise OSError(5, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        remove_left(tmp_path)
    remove_left(tmp_path)
    assert names(tmp_path / "run") == ["years"]


def test_nothing_of_a_users_is_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    name, outside, folder = f".mine.{'0' * 32}.partial", tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    killed(outside / "a")
    (left,) = names(outside)
    (folder / left).symlink_to(outside / left)
    (folder / "mine.partial").touch()
    (folder / name).mkdir()
    (folder / name / "thesis").touch()
    (folder / name.replace("0", "1")).mkdir()
    (folder / name.replace("0", "1") / "writer").write_text(f"Jane Austen on {gethostname()}\n")
    (folder / name.replace("0", "2")).touch()
    (folder / name.replace("0", "3")).mkdir()
    os.mkfifo(folder / name.replace("0", "3") / "writer")
    before = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    with workplace(folder / "mine"):
        pass
    assert {path: path.lstat().st_ino for path in tmp_path.rglob("*")} == before


def test_links_in_what_is_left_are_removed_and_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "precious").touch()
    killed(folder / "a")
    (left,) = folder.iterdir()
    (left / "new" / "a" / "link").symlink_to(outside)
    remove_left(folder)
    assert names(folder) == []
    assert names(outside) == ["precious"]


@pytest.mark.parametrize("stage", ["no lock", "empty lock"])
def test_what_a_writer_leaves_that_was_killed_at_once_is_removed(tmp_path: Path, stage: str) -> None:
    left = tmp_path / f".a.{'0' * 32}.partial"
    left.mkdir()
    if stage == "empty lock":
        (left / "writer").touch()
    remove_left(tmp_path)
    assert names(tmp_path) == []


def test_what_another_host_has_left_is_removed_a_day_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(tmp_path / "a")
    monkeypatch.setattr(workplaces, "gethostname", lambda: "elsewhere")
    remove_left(tmp_path)
    (left,) = tmp_path.iterdir()
    long_ago = time.time() - OTHER_HOST_SECONDS - 60
    os.utime(left / "writer", (long_ago, long_ago))
    remove_left(tmp_path)
    assert names(tmp_path) == []


def test_a_disk_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "operation not supported")

    monkeypatch.setattr(workplaces.fcntl, "flock", refuse)
    with workplace(tmp_path / "a") as first, workplace(tmp_path / "a"):
        assert first.new.parent.is_dir()
    assert names(tmp_path) == []


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_of_an_artifact_are_for_whom_the_user_wants(tmp_path: Path, mask: int) -> None:
    tables, scheme = two_tables()
    before = os.umask(mask)
    try:
        path = write_artifact(tables, scheme, tmp_path / "deep" / "artifact", scipy_formats=["csr"])
    finally:
        os.umask(before)
    found = [path.parent, path, *path.rglob("*")]
    assert any(file.suffix == ".npz" for file in found)
    for file in found:
        assert file.stat().st_mode & 0o777 == (0o777 if file.is_dir() else 0o666) & ~mask, file


def test_what_may_be_run_stays_so(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with whole_folders.new_folder(tmp_path / "out", kind=artifact.ARTIFACT) as folder:
            (folder / "library.so").touch()
            (folder / "library.so").chmod(0o755)
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "library.so").stat().st_mode & 0o777 == 0o750
