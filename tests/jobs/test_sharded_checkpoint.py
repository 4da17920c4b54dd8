"""Folders of torch.distributed.checkpoint: read back value by value, and nothing in them is run."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint

from dnis_torchrec.jobs.sharded_checkpoint import ShardedCheckpoint
from dnis_torchrec.soft_selection.sharding import CpuEmbeddingBagCollectionSharder, shard_model
from tests.distributed.harness import Rank, Results, run_on_ranks
from tests.distributed.model import CPU, plan_as, task

STATE = {
    "weight": torch.arange(12.0).view(4, 3),
    "scale": torch.tensor(2.0),
    "ids": torch.tensor([3, 1], dtype=torch.int32),
}


def save(folder: Path) -> Path:
    checkpoint.save({"model": STATE, "epoch": 3, "optimizer": [torch.ones(2)]}, checkpoint_id=folder)
    return folder


def test_tensors_are_read_back_with_their_names_and_dtypes(gloo, tmp_path: Path) -> None:
    found = ShardedCheckpoint(save(tmp_path / "saved"))
    assert sorted(found) == ["model.ids", "model.scale", "model.weight", "optimizer.0"]
    for name, value in STATE.items():
        torch.testing.assert_close(found[f"model.{name}"], value, rtol=0, atol=0)


def save_sharded(kind: str, rank: Rank) -> Results:
    """A sharded model's state_dict, saved by both ranks; what it was before comes back."""
    whole, sharders = task(), [CpuEmbeddingBagCollectionSharder()]
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    plan = plan_as(whole, kind, rank.process_group, CPU, sharders)
    sharded = shard_model(whole, CPU, plan, sharders, process_group=rank.process_group)
    checkpoint.save(sharded.state_dict(), checkpoint_id=rank.folder / kind, process_group=rank.process_group)
    return before


def test_what_several_ranks_have_saved_is_put_together(tmp_path: Path) -> None:
    kinds = ("row_wise", "column_wise", "mixed")
    results = run_on_ranks(2, {kind: partial(save_sharded, kind) for kind in kinds}, tmp_path)
    for kind in kinds:
        before, found = results[kind][0], ShardedCheckpoint(tmp_path / kind)
        assert set(found) == set(before)
        for name, value in before.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_a_tensor_with_holes_is_refused(gloo, tmp_path: Path) -> None:
    found = ShardedCheckpoint(save(tmp_path / "saved"))
    found._shapes["model.weight"] = (5, 3)
    with pytest.raises(ValueError, match=r"model\.weight: expected chunks of 15 values, got 12; copy all files of it"):
        _: Tensor = found["model.weight"]


def with_code(folder: Path) -> None:
    """Metadata that, unpickled, would make a folder."""
    path = str(folder / "made").encode()
    called = b"\x80\x02cos\nmkdir\nX" + len(path).to_bytes(4, "little") + path + b"\x85R."
    assert [opcode.name for opcode, _, _ in pickletools.genops(called)][-2:] == ["REDUCE", "STOP"]
    (folder / ".metadata").write_bytes(called)


def cut(folder: Path) -> None:
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content[: len(content) // 2])


def emptied(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.write_bytes(b"")


def linked(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.rename(folder.parent / file.name)
        file.symlink_to(folder.parent / file.name)


def renamed(name: bytes, to: bytes) -> Callable[[Path], None]:
    def rename(folder: Path) -> None:
        content = (folder / ".metadata").read_bytes()
        assert name in content
        (folder / ".metadata").write_bytes(content.replace(name, to))

    return rename


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_code, "expected metadata of torch.distributed.checkpoint, got another object; save it again"),
        (cut, "expected metadata of torch.distributed.checkpoint, got"),
        (emptied, "model.weight: expected a tensor at byte .* of '__0_0.distcp', got EOFError; it was damaged"),
        (linked, "model.weight: expected plain files of the folder, got '__0_0.distcp'"),
        (
            renamed(b"__0_0.distcp", b"../../passwd"),
            "model.weight: expected plain files of the folder, got '../../passwd'",
        ),
        (lambda folder: (folder / ".metadata").unlink(), "expected a plain file .metadata, got none"),
    ],
)
def test_what_was_damaged_or_made_to_harm_is_refused(
    gloo, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = save(tmp_path / "saved")
    damage(folder)
    with pytest.raises(ValueError, match=f"^checkpoint {folder}.*{message}"):
        _: Tensor = ShardedCheckpoint(folder)["model.weight"]
    assert not (folder / "made").exists()
