"""Folders of torch.distributed.checkpoint: read back value by value, and nothing in them is run."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint

from dnis_torchrec.jobs.sharded_checkpoint import ShardedCheckpoint
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, shard_model
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
        torch.testing.assert_close(found[f"model.{name}"].whole(), value, rtol=0, atol=0)


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
            torch.testing.assert_close(found[name].whole(), value, rtol=0, atol=0)
    (tmp_path / "row_wise" / "__1_0.distcp").unlink()  # which rank 0, that holds the first rows, does not read
    of_user = next(tensor for name, tensor in ShardedCheckpoint(tmp_path / "row_wise").items() if "user.weight" in name)
    of_user.copy_to_(first := torch.zeros(20, 8))
    name = next(name for name in before if "user.weight" in name)
    assert first.equal(before[name][:20])
    with pytest.raises(ValueError, match=r"user\.weight: expected plain files of the folder, got '__1_0\.distcp'"):
        of_user.copy_to_(torch.zeros(30, 8))


def test_strides_and_halves_are_read_as_they_were_saved(gloo, tmp_path: Path) -> None:
    """Of a view of a larger tensor, of a turned one, and of one whose first byte is at no multiple of its size."""
    large = torch.arange(60.0).view(6, 10)
    state = {"ids": torch.ones(3).bool(), "turned": large.T, "view": large[2:5, 3:7].bfloat16(), "row": large[1]}
    checkpoint.save(state, checkpoint_id=tmp_path / "saved")
    found = ShardedCheckpoint(tmp_path / "saved")
    for name, value in state.items():
        torch.testing.assert_close(found[name].whole(), value, rtol=0, atol=0)


def test_of_a_chunk_no_more_is_read_than_is_asked_for(gloo, tmp_path: Path) -> None:
    checkpoint.save({"weight": torch.arange(200_000.0).view(-1, 8)}, checkpoint_id=tmp_path / "saved")
    stored, target = ShardedCheckpoint(tmp_path / "saved")["weight"], torch.zeros(100, 4)
    read: list[int] = []
    copy = Tensor.copy_
    with pytest.MonkeyPatch.context() as context:
        context.setattr(
            Tensor, "copy_", lambda own, other: read.append(other.untyped_storage().nbytes()) or copy(own, other)
        )
        stored.copy_to_(target, (20_000, 2))
    assert target[0].tolist() == [160_002.0, 160_003.0, 160_004.0, 160_005.0]
    assert read == [target.nbytes]


def test_a_tensor_with_holes_is_refused(gloo, tmp_path: Path) -> None:
    found = ShardedCheckpoint(save(tmp_path / "saved"))
    larger = replace(found["model.weight"], shape=(5, 3))
    with pytest.raises(ValueError, match=r"model\.weight: expected chunks of 15 values, got 12; copy all files of it"):
        larger.whole()


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
        (emptied, "model.weight: expected a tensor at byte .* of '__0_0.distcp', got ValueError; it was damaged"),
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
        ShardedCheckpoint(folder)["model.weight"].whole()
    assert not (folder / "made").exists()
