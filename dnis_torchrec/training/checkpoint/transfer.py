"""Writes and reads a TrainingState with torch.distributed.checkpoint: who writes what, who reads
what, from which file."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dnis_torchrec.checks import describe
from dnis_torchrec.data.urls import Address, local_file, path_in
from dnis_torchrec.ranks import rank_of, together, union_over_ranks, world_size_of
from dnis_torchrec.selection.wrapper import SOFT_SELECTION
from dnis_torchrec.training.checkpoint.folder import CheckpointFolder
from dnis_torchrec.training.checkpoint.manifest import (
    Manifest,
    check_fits,
    chunk_name,
    tensor_entries,
)
from dnis_torchrec.training.checkpoint.placement import Chunk, PlacedTensor, TrainingState


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written on some rank; the ones before are as they were."""


def write_checkpoint(
    folder: CheckpointFolder,
    step: int,
    state: TrainingState,
    process_group: dist.ProcessGroup | None,
    *,
    keep: Collection[int] = (),
) -> None:
    """Writes a checkpoint and makes it the latest."""
    writer = _Writer(folder, step, state, process_group, keep)
    try:
        dcp.save(
            dict(state.tensors),
            storage_writer=writer,
            planner=_Saves(),
            process_group=process_group,
        )
    except CheckpointException as error:
        kept = _left_clean(folder, process_group)
        failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
        rank, cause = next(iter(failures.items()))
        received = f"{type(cause).__name__} on rank {rank}: {cause}"
        place = f"checkpoint {folder.path_of(step)}"
        raise CheckpointWriteError(describe(place, "to write it", received, kept)) from cause


def _left_clean(folder: CheckpointFolder, process_group: dist.ProcessGroup | None) -> str:
    """Removes the remains of a failed write, and says which are still there; storage may be away
    for that, too."""
    try:
        with together(process_group):
            if rank_of(process_group) == 0:
                folder.clean()
        with together(process_group):
            latest = folder.latest()
    except (RuntimeError, OSError, ValueError) as error:
        return f"what is left there could not be looked at ({error})"
    return "no earlier one is there" if latest is None else f"the last good one is {latest}"


def read_checkpoint(
    path: Address,
    state: TrainingState,
    process_group: dist.ProcessGroup | None,
    *,
    kinds: tuple[str, ...] | None = None,
) -> Mapping[str, Any]:
    """Copies a checkpoint into the tensors of a run, whatever the world size and sharding that it
    was written with."""
    with together(process_group):
        manifest = Manifest.read(path)
        if kinds is not None:
            chosen = {
                key: entry for key, entry in manifest.tensors.items() if key.split("/")[0] in kinds
            }
            manifest = replace(manifest, tensors=chosen)
    tensors = {_stored_key(key, manifest): placed for key, placed in state.tensors.items()}
    sizes = union_over_ranks({key: placed.size for key, placed in tensors.items()}, process_group)
    check_fits(
        manifest, state.tables, sizes, f"checkpoint {path}"
    )  # from the same facts on all ranks
    wanted = {key: placed for key, placed in tensors.items() if key in manifest.tensors}
    metadata = manifest.to_metadata()
    try:
        dcp.load(
            wanted,
            storage_reader=_Reader(path, metadata),
            planner=_Loads(metadata),
            process_group=process_group,
        )
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        remedy = "resume from another checkpoint"
        raise ValueError(
            describe(f"checkpoint {path}", "whole files", str(failure), remedy)
        ) from failure
    return manifest.values


def _stored_key(key: str, manifest: Manifest) -> str:
    """The key in the checkpoint: those written before wrappers had the names of the plain model say
    it longer."""
    longer = key.replace(f".{SOFT_SELECTION}.", ".alpha.")
    longer = longer.replace(".embedding_bags.", ".embedding_bag_collection.embedding_bags.")
    return longer if key not in manifest.tensors and longer in manifest.tensors else key


class _Saves(DefaultSavePlanner):
    """Plans to write this rank's chunks; of those that several ranks hold, one writes each."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(key, chunk.offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_extent(chunk),
                    properties=TensorProperties(dtype=chunk.tensor.dtype),
                    size=torch.Size(placed.size),
                ),
            )
            for key, placed in self.state_dict.items()
            for chunk in placed.chunks
            if chunk.tensor.numel()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _chunk_at(self.state_dict[index.fqn], index)


class _Loads(DefaultLoadPlanner):
    """Plans to read this rank's chunks."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = metadata.state_dict_metadata

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, placed in self.state_dict.items():
            chunks = [_extent(chunk) for chunk in placed.chunks if chunk.tensor.numel()]
            items += create_read_items_for_chunk_list(key, self._tensors[key], chunks)  # type: ignore[arg-type]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _chunk_at(self.state_dict[index.fqn], index)


class _Writer(StorageWriter):
    """One safetensors file per rank, then the manifest, then the name by which a checkpoint counts."""

    def __init__(
        self,
        folder: CheckpointFolder,
        step: int,
        state: TrainingState,
        process_group: dist.ProcessGroup | None,
        keep: Collection[int],
    ) -> None:
        self._folder, self._step, self._state, self._keep = folder, step, state, keep
        self._rank, self._world_size = rank_of(process_group), world_size_of(process_group)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._folder.clean()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._folder.begin(self._step)  # on the coordinator, before any rank writes
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = {_key(item.index): planner.resolve_data(item).contiguous() for item in plan.items}  # type: ignore[union-attr]
        name, size = self._folder.add(self._step, self._rank, lambda path: save_file(tensors, path))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, size, name) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for own in results for result in own]
        metadata.storage_data = {
            MetadataIndex(r.index.fqn, r.index.offset): r.storage_data for r in written
        }
        manifest = Manifest(
            world_size=self._world_size,
            files={result.storage_data: result.size_in_bytes for result in written},
            tables=self._state.tables,
            values=self._state.values,
            tensors=tensor_entries(metadata),
        )
        self._folder.publish(self._step, manifest, self._keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Reader(StorageReader):
    """Reads slices of safetensors files by the manifest."""

    def __init__(self, path: Address, metadata: Metadata) -> None:
        self._path, self._metadata = path, metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one load to the next."""

    def read_metadata(self) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """The files were looked at before."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            index = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
            per_file.setdefault(self._metadata.storage_data[index], []).append(item)
        for name, items in per_file.items():
            with (
                local_file(path_in(self._path, name)) as path,
                safe_open(path, framework="pt") as file,
            ):
                for item in items:
                    part = tuple(
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    target = planner.resolve_tensor(item)
                    target.copy_(file.get_slice(_key(item.storage_index))[part])
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _extent(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offset), sizes=chunk.tensor.shape)


def _chunk_at(placed: PlacedTensor, index: MetadataIndex) -> Tensor:
    return next(chunk.tensor for chunk in placed.chunks if torch.Size(chunk.offset) == index.offset)


def _key(index: MetadataIndex) -> str:
    return chunk_name(index.fqn, index.offset or ())
