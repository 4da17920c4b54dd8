"""Files that are written whole or not at all: what fails, or is under way, leaves the old one to be read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dnis_torchrec.storage.whole_files import read_tensors, write_json, write_tensors, write_text, written_whole


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.txt", "old")
    with path.open() as reader:
        with written_whole(path) as unfinished:
            unfinished.write_text("new")
            assert path.read_text() == "old"
            assert unfinished.name == "a.txt"
            assert unfinished.relative_to(tmp_path).parts[0].endswith(".partial")
        assert path.read_text() == "new"
        assert reader.read() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.txt", "old")

    def run_out_of_room() -> None:
        with written_whole(path) as unfinished:
            unfinished.write_text("ne")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        run_out_of_room()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="expected an existing folder"):
        write_text(tmp_path / "gone" / "a.txt", "new")


def test_durable_content_is_on_disk_before_the_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "a.txt", []

    def note(_: int) -> None:
        seen.append(sorted(own.read_text() for own in tmp_path.rglob("a.txt")))

    monkeypatch.setattr(os, "fsync", note)
    write_text(path, "1")
    assert seen == []
    write_text(path, "2", durable=True)
    assert seen == [["1", "2"]]
    assert path.read_text() == "2"


def test_json_is_a_document_that_ends_its_line(tmp_path: Path) -> None:
    content = {"a": [1, None], "b": "ü"}
    text = write_json(tmp_path / "a.json", content).read_text(encoding="utf-8")
    assert json.loads(text) == content
    assert text.endswith("}\n")


def test_tensors_come_back_with_their_head(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.safetensors", {"a": torch.arange(3), "b/c": torch.ones(2, 1)}
    write_tensors(path, tensors, "row_blocks", {"tables": {"a": 3}})
    found, head = read_tensors(path, "row_blocks", dict[str, Any])
    assert head == {"tables": {"a": 3}}
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in tensors.items()}
    with pytest.raises(ValueError, match="expected a file of frequency counts, got another file"):
        read_tensors(path, "frequency_counts", dict[str, Any])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="expected a whole safetensors file"):
        read_tensors(path, "row_blocks", dict[str, Any])


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_a_file_is_readable_by_whom_the_user_wants(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "a.txt", "a")
        write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1)}, "row_blocks", {"a": 1})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~mask}


@pytest.mark.parametrize("planted", ["a.txt", "a.txt.partial"])
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_what_is_outside_stays(tmp_path: Path, planted: str, plant: Callable[[Path, Path], None]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside").write_text("years of work")
    plant(tmp_path / "outside", folder / planted)
    path = write_text(folder / "a.txt", "new")
    assert (path.read_text(), path.is_symlink()) == ("new", False)
    assert (tmp_path / "outside").read_text() == "years of work"
