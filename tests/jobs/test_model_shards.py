"""What is read of the files that several ranks have written, and what is refused. Writing is tested on ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dnis_torchrec.jobs.model_shards import delete_shards, has_shards, load_shards

TABLE = torch.arange(24.0).view(6, 4)
KEY = "ebc.embedding_bags.t.weight"


def write(folder: Path, rank: int, tensors: dict[str, torch.Tensor], world_size: int = 2) -> None:
    described = {"model_part": json.dumps({"world_size": world_size})}
    save_file(tensors, folder / f"model.rank{rank}.safetensors", metadata=described)


def write_grid(folder: Path) -> None:
    """Four parts of one table, two on each rank, and a dense weight."""
    dense = {"dense/over.weight": torch.ones(2)}
    write(folder, 0, {f"table/0/0/{KEY}": TABLE[:3, :2].clone(), f"table/0/2/{KEY}": TABLE[:3, 2:].clone()} | dense)
    write(folder, 1, {f"table/3/0/{KEY}": TABLE[3:, :2].clone(), f"table/3/2/{KEY}": TABLE[3:, 2:].clone()})


def test_tables_are_put_together(tmp_path: Path) -> None:
    assert not has_shards(tmp_path)
    write_grid(tmp_path)
    assert has_shards(tmp_path)
    state = load_shards(tmp_path)
    assert set(state) == {KEY, "over.weight"}
    assert torch.equal(state[KEY], TABLE)
    delete_shards(tmp_path)
    assert not has_shards(tmp_path)


def test_parts_of_an_earlier_and_larger_job_are_not_read(tmp_path: Path) -> None:
    write_grid(tmp_path)
    write(tmp_path, 2, {f"table/6/0/{KEY}": torch.zeros(1, 4)}, world_size=3)
    assert torch.equal(load_shards(tmp_path)[KEY], TABLE)


def test_holes_damage_and_other_files_are_refused(tmp_path: Path) -> None:
    write_grid(tmp_path)
    second = tmp_path / "model.rank1.safetensors"
    write(tmp_path, 1, {f"table/3/2/{KEY}": TABLE[3:, 2:].clone()})
    with pytest.raises(ValueError, match=r"t\.weight: expected parts of a table of shape \(6, 4\), got 18"):
        load_shards(tmp_path)
    save_file({"x": torch.zeros(1)}, second)
    with pytest.raises(ValueError, match=r"rank1\.safetensors: expected a part of a model, got another file; copy"):
        load_shards(tmp_path)
    second.write_bytes(second.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"rank1\.safetensors: expected a whole safetensors file, got "):
        load_shards(tmp_path)
    second.unlink()
    with pytest.raises(ValueError, match=r"rank1\.safetensors: expected the part of a rank, got none; copy the files"):
        load_shards(tmp_path)
