"""Tensors in files, read as far as they are asked for, and folders of torch.distributed.checkpoint, of which nothing is run."""

from __future__ import annotations

import itertools
import pickletools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import checkpoint

from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, shard_model
from dnis_torchrec.training.checkpoint import Cut, StoredChunk, StoredTensor
from dnis_torchrec.training.weights import (
    distributed_checkpoint,
    has_written_model,
    remove_model,
    write_model,
    written_model,
)
from tests.distributed.harness import Rank, Results, run_on_ranks
from tests.distributed.model import CPU, plan_as, task
from tests.small_models import MODELS

STATE = {
    "weight": torch.arange(12.0).view(4, 3),
    "scale": torch.tensor(2.0),
    "ids": torch.tensor([3, 1], dtype=torch.int32),
}


def save(folder: Path) -> Path:
    checkpoint.save({"model": STATE, "epoch": 3, "optimizer": [torch.ones(2)]}, checkpoint_id=folder)
    return folder


def test_tensors_are_read_back_with_their_names_and_dtypes(gloo, tmp_path: Path) -> None:
    found = distributed_checkpoint(save(tmp_path / "saved"))
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
        before, found = results[kind][0], distributed_checkpoint(tmp_path / kind)
        assert set(found) == set(before)
        for name, value in before.items():
            torch.testing.assert_close(found[name].whole(), value, rtol=0, atol=0)
    (tmp_path / "row_wise" / "__1_0.distcp").unlink()  # which rank 0, that holds the first rows, does not read
    of_user = next(
        tensor for name, tensor in distributed_checkpoint(tmp_path / "row_wise").items() if "user.weight" in name
    )
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
    found = distributed_checkpoint(tmp_path / "saved")
    for name, value in state.items():
        torch.testing.assert_close(found[name].whole(), value, rtol=0, atol=0)


def test_of_a_chunk_no_more_is_read_than_is_asked_for(gloo, tmp_path: Path) -> None:
    checkpoint.save({"weight": torch.arange(200_000.0).view(-1, 8)}, checkpoint_id=tmp_path / "saved")
    stored, target = distributed_checkpoint(tmp_path / "saved")["weight"], torch.zeros(100, 4)
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
    found = distributed_checkpoint(save(tmp_path / "saved"))
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
    ("damage", "place"),
    [
        (with_code, "another object"),
        (cut, "metadata"),
        (emptied, r"model\.weight.*__0_0\.distcp"),
        (linked, r"model\.weight.*__0_0\.distcp"),
        (renamed(b"__0_0.distcp", b"../../passwd"), r"model\.weight.*\.\./\.\./passwd"),
        (lambda folder: (folder / ".metadata").unlink(), r"\.metadata"),
    ],
)
def test_what_was_damaged_or_made_to_harm_is_refused(
    gloo, tmp_path: Path, damage: Callable[[Path], None], place: str
) -> None:
    folder = save(tmp_path / "saved")
    damage(folder)
    with pytest.raises(ValueError, match=f"^checkpoint {folder}.*{place}"):
        distributed_checkpoint(folder)["model.weight"].whole()
    assert not (folder / "made").exists()


def opened(part: torch.Tensor) -> Cut:
    return part.__getitem__


def stored_in(tensor: torch.Tensor, cuts: list[list[int]]) -> StoredTensor:
    """The tensor in a grid of chunks, cut at these places of each dimension."""
    spans = [list(itertools.pairwise([0, *inner, size])) for inner, size in zip(cuts, tensor.shape, strict=True)]
    chunks = []
    for grid in itertools.product(*spans):
        part = tensor[tuple(slice(*span) for span in grid)].clone()
        chunks.append(StoredChunk(tuple(start for start, _ in grid), tuple(part.shape), partial(opened, part)))
    return StoredTensor("t", tuple(tensor.shape), tuple(reversed(chunks)))


@given(st.lists(st.integers(1, 6), max_size=3), st.data())
def test_any_part_of_any_chunks_is_copied(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    inner = [st.lists(st.integers(1, size - 1), unique=True).map(sorted) if size > 1 else st.just([]) for size in shape]
    stored = stored_in(tensor, [data.draw(cuts) for cuts in inner])
    first = [data.draw(st.integers(0, size - 1)) for size in shape]
    last = [data.draw(st.integers(begin + 1, size)) for begin, size in zip(first, shape, strict=True)]
    part = tensor[tuple(map(slice, first, last))]
    stored.copy_to_(found := torch.full_like(part, -1), first)
    assert found.equal(part)
    assert stored.whole().equal(tensor)


def test_what_no_chunk_holds_is_missed_where_it_is_asked_for() -> None:
    stored = stored_in(torch.arange(6).view(3, 2), [[1], []])
    first_row = StoredTensor("table 't'", (3, 2), stored.chunks[1:])
    first_row.copy_to_(found := torch.zeros(1, 2, dtype=torch.int64))
    assert found.tolist() == [[0, 1]]
    with pytest.raises(ValueError, match=r"^table 't': expected chunks of 4 values, got 0; copy all files of it"):
        first_row.copy_to_(torch.zeros(2, 2), (1, 0))
    for of_none in (first_row, StoredTensor("table 't'", (3, 2), ())):
        with pytest.raises(ValueError, match=r"^table 't': expected chunks of"):
            of_none.whole()


def test_the_model_of_a_run_is_put_together(gloo, tmp_path: Path) -> None:
    """By one process here; what several ranks write is tested with the commands."""
    model = MODELS["dlrm"]()
    assert not has_written_model(tmp_path)
    for _ in range(2):  # the second one replaces the first
        with torch.no_grad():
            for value in model.parameters():
                value.add_(1)
        write_model(tmp_path, model, Ranks())
    expected = model.state_dict()
    found = {name: stored.whole() for name, stored in written_model(tmp_path).items()}
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    remove_model(tmp_path)
    assert not has_written_model(tmp_path)
    assert list(tmp_path.iterdir()) == []
