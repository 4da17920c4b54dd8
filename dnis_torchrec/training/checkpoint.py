"""Checkpoints of a run, which may go on with other ranks: a safetensors file a rank and a manifest.

A checkpoint is whole when its manifest is there, which is written last; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from socket import gethostname
from tempfile import NamedTemporaryFile
from typing import Any, TypedDict
from uuid import uuid4

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.files import PARTIAL, Positive, check_plain, conform, parse_json
from dnis_torchrec.data.urls import (
    Address,
    fetch,
    file_names,
    file_size,
    local_path,
    path_in,
    put_file,
    read_bytes,
    remove_file,
)
from dnis_torchrec.ranks import on_rank_zero, rank_of, together, union_over_ranks, world_size_of
from dnis_torchrec.training.state import (
    ITERATIONS,
    PlacedTensor,
    TableDescription,
    TrainingState,
    describe_tables,
    finish_load_,
)

CHECKPOINT_MANIFEST = "manifest.json"
_FORMAT, _FORMAT_VERSION = "dnis-torchrec-checkpoint", 3
_OTHER = "use another checkpoint"
_DIFFERENCES = 8
"""How many differences one error names."""


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written on some rank; the ones before are as they were."""


# Tensors in files, read as far as they are asked for: of a table, a rank reads its own shards.


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor; what `open` gives is mapped from its file."""

    first: tuple[int, ...]
    shape: tuple[int, ...]
    open: Callable[[], Tensor]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files."""

    place: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]
    kind: str
    """A dtype of torch, or in a word what else is there in place of numbers."""

    @classmethod
    def of(cls, place: str, tensor: Tensor) -> StoredTensor:
        """A tensor that is there as a whole, mapped from its file or not."""
        shape = tuple(tensor.shape)
        chunk = StoredChunk((0,) * len(shape), shape, lambda: tensor)
        return cls(place, shape, (chunk,), dtype_name(tensor))

    def copy_to_(self, target: Tensor, first: Sequence[int] | None = None) -> None:
        """Copies the part of the tensor that is as large as `target`, and reads no more. Local."""
        begin, num_values = tuple(first or (0,) * len(self.shape)), 0
        for chunk in self.chunks:
            low = list(map(max, begin, chunk.first))
            ends = zip(begin, target.shape, chunk.first, chunk.shape, strict=True)
            high = [min(at + extent, of_chunk + size) for at, extent, of_chunk, size in ends]
            if all(start < stop for start, stop in zip(low, high, strict=True)):
                part = target[_within(low, high, begin)]
                part.copy_(chunk.open()[_within(low, high, chunk.first)])
                num_values += part.numel()
        requirement, remedy = f"chunks of {target.numel()} values", "copy all files of it"
        check(num_values == target.numel(), self.place, requirement, num_values, remedy)

    def rows(self, first: int, last: int) -> Tensor:
        """Rows ``first <= i < last``; mapped from their file where that is one chunk's."""
        return self._part([(first, last), *((0, size) for size in self.shape[1:])])

    def whole(self) -> Tensor:
        """The whole tensor; mapped from its file where that holds it in one chunk."""
        return self._part([(0, size) for size in self.shape])

    def _part(self, spans: Sequence[tuple[int, int]]) -> Tensor:
        check(bool(self.chunks), self.place, "chunks of it", "none", "copy all files of it")
        first = self.chunks[0].open()
        if self.chunks[0].shape == self.shape:
            return first[tuple(slice(*span) for span in spans)]
        target = torch.empty([stop - start for start, stop in spans], dtype=first.dtype)
        self.copy_to_(target, [start for start, _ in spans])
        return target


def dtype_name(tensor: Tensor) -> str:
    """The name of a dtype, as files have it."""
    return str(tensor.dtype).removeprefix("torch.")


def _within(low: Sequence[int], high: Sequence[int], first: Sequence[int]) -> tuple[slice, ...]:
    """Spans of a tensor as those of a part of it that begins at `first`."""
    spans = zip(low, high, first, strict=True)
    return tuple(slice(start - at, stop - at) for start, stop, at in spans)


# The manifest


class _Chunk(TypedDict):
    offset: list[int]
    size: list[int]
    file: str


class _Tensor(TypedDict):
    dtype: str
    size: list[int]
    chunks: list[_Chunk]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Manifest of a checkpoint: its files, tables, values and tensors."""

    world_size: Positive
    files: Mapping[str, int]
    tables: Mapping[str, TableDescription]
    values: Mapping[str, Any]
    tensors: Mapping[str, _Tensor]

    def text(self) -> str:
        """The content of manifest.json."""
        head = {"format": _FORMAT, "format_version": _FORMAT_VERSION, **asdict(self)}
        return json.dumps(head) + "\n"

    @staticmethod
    def read(folder: Address) -> Manifest:
        """Reads the manifest, and looks whether every file that it names is there and whole."""
        place, file = f"checkpoint {folder}", path_in(folder, CHECKPOINT_MANIFEST)
        here = local_path(folder)
        if here is not None:
            check_plain(here, place)
        check(file_size(file) is not None, place, "a checkpoint", f"no {CHECKPOINT_MANIFEST} in it")
        head = parse_json(read_bytes(file), dict[str, Any], str(file), remedy=_OTHER)
        check(head.get("format") == _FORMAT, place, f"format {_FORMAT!r}", repr(head.get("format")))
        version, remedy = head.get("format_version"), "use the version that wrote it"
        requirement = f"format version {_FORMAT_VERSION}"
        check(version == _FORMAT_VERSION, place, requirement, version, remedy)
        del head["format"], head["format_version"]
        conform(head, Manifest, str(file), remedy=_OTHER)
        for name, size in head["files"].items():
            check(os.path.basename(name) == name, place, "names of files in it", repr(name))
            bytes_there = file_size(path_in(folder, name))
            rank = name.removeprefix("rank").partition(".")[0]
            amount = "no such file" if bytes_there is None else f"{bytes_there} bytes"
            remedy = f"put back what rank {rank} wrote, or resume from another checkpoint"
            check(bytes_there == size, f"{place}, {name}", f"{size} bytes", amount, remedy)
        for key, entry in head["tensors"].items():
            _check_tensor(entry, head["files"], f"{file}, tensor {key!r}")
        tables = {
            name: TableDescription(**{**table, "column_cuts": tuple(table["column_cuts"])})
            for name, table in head["tables"].items()
        }
        return Manifest(**{**head, "tables": tables})

    def stored(
        self, folder: Address, path_of: Callable[[str], Path] | None = None
    ) -> dict[str, StoredTensor]:
        """The tensors, not read yet, in files of the folder or at `path_of` their name."""
        path_of = path_of or (lambda name: Path(path_in(folder, name)))
        tensors: dict[str, StoredTensor] = {}
        for key, entry in self.tensors.items():
            chunks = [
                StoredChunk(
                    tuple(chunk["offset"]),
                    tuple(chunk["size"]),
                    partial(_open, path_of, chunk["file"], _chunk_name(key, chunk["offset"])),
                )
                for chunk in entry["chunks"]
            ]
            place = f"checkpoint {folder}, {key}"
            size, kind = tuple(entry["size"]), entry["dtype"]
            tensors[key] = StoredTensor(place, size, tuple(chunks), kind)
        return tensors


def _open(path_of: Callable[[str], Path], file: str, name: str) -> Tensor:
    """Opens a tensor of a safetensors file, mapped into memory."""
    try:
        with safe_open(path_of(file), framework="pt") as tensors:
            return tensors.get_tensor(name)
    except SafetensorError as error:
        remedy = "resume from another checkpoint"
        raise ValueError(describe(file, "a whole file", str(error), remedy)) from error


def _chunk_name(key: str, offset: Iterable[int]) -> str:
    """The name of a chunk in its file."""
    return f"{key}@{','.join(map(str, offset))}"


def _check_tensor(entry: _Tensor, files: Mapping[str, int], place: str) -> None:
    is_dtype = isinstance(getattr(torch, entry["dtype"], None), torch.dtype)
    check(is_dtype, place, "a dtype of torch", repr(entry["dtype"]), _OTHER)
    whole = entry["size"]
    for chunk in entry["chunks"]:
        file, offset, size = chunk["file"], chunk["offset"], chunk["size"]
        check(file in files, place, "a file of the checkpoint", repr(file), _OTHER)
        fits = len(offset) == len(size) == len(whole)
        fits = fits and all(
            0 <= o <= o + s <= w for o, s, w in zip(offset, size, whole, strict=True)
        )
        check(fits, place, f"chunks inside of {whole}", f"{size} at {offset}", _OTHER)


def _check_fits(
    manifest: Manifest,
    tables: Mapping[str, TableDescription],
    sizes: Mapping[str, tuple[int, ...]],
    place: str,
) -> None:
    """Checks that a checkpoint is one of the same tables, blocks, weights and optimizers. Local."""
    sizes_then = {key: tuple(entry["size"]) for key, entry in manifest.tensors.items()}
    past, now = _facts(manifest.tables, sizes_then), _facts(tables, sizes)
    differences = [
        f"{name}: {past.get(name, 'none')} instead of {now.get(name, 'none')}"
        for name in sorted({*past, *now})
        if past.get(name) != now.get(name)
    ]
    more = len(differences) - _DIFFERENCES
    text = "; ".join(differences[:_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    remedy = "resume with the recipe, data and settings that the run was started with"
    check(not differences, place, "a checkpoint of this run", f"one with {text}", remedy)
    for name, table in tables.items():
        cuts, cuts_now = manifest.tables[name].column_cuts, table.column_cuts
        is_per_shard = any(k.startswith(f"fused/{name}/") and len(sizes[k]) == 1 for k in sizes)
        if is_per_shard and cuts != cuts_now:
            requirement = f"for row-wise optimizers the checkpoint's {len(cuts)} column shards"
            remedy = "resume with the sharding plan or number of ranks of the checkpoint"
            text = f"{len(cuts_now)} column shards"
            place = f"{place}, table {name!r}"
            raise NotImplementedError(describe(place, requirement, text, remedy))


def _facts(
    tables: Mapping[str, TableDescription], sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, object]:
    """What is equal in a checkpoint and a run, whatever ranks and kernels they have."""
    facts: dict[str, object] = {
        f"table {name!r}": (table.rows, table.embedding_dim, table.blocks)
        for name, table in tables.items()
    }
    for key, size in sizes.items():
        if not key.startswith(("rank", "table/")) and key != ITERATIONS:
            is_per_shard = key.startswith("fused/") and len(size) == 1
            facts[key] = "one for each shard" if is_per_shard else size
    return facts


# Folders of checkpoints


class CheckpointFolder:
    """Checkpoints of one run at a path that all ranks see, or at a URL. No collective."""

    def __init__(self, path: Address, *, keep_last: int = 2) -> None:
        check(keep_last >= 1, "keep_last", "at least 1", keep_last)
        here = local_path(path)
        self.path: Address = str(path) if here is None else here
        self._here, self._keep_last = here, keep_last

    def path_of(self, step: int) -> Address:
        """Returns the address of the checkpoint of a step, once it is whole."""
        return path_in(self.path, f"step-{step:08d}")

    def latest(self) -> Address | None:
        """The last whole checkpoint, or None."""
        self._check_plain()
        steps = self.steps()
        return self.path_of(steps[-1]) if steps else None

    def steps(self) -> list[int]:
        """Numbers of the whole checkpoints, rising."""
        return sorted(step for step, names in self._files().items() if CHECKPOINT_MANIFEST in names)

    def clean(self) -> None:
        """Removes checkpoints that were not written to their end, or are partly deleted."""
        self._check_plain()
        for step, names in self._files().items():
            if CHECKPOINT_MANIFEST not in names:
                self._remove(step, names)
        for name in file_names(self.path):
            if name.endswith(PARTIAL):
                remove_file(path_in(self.path, name))

    def add(self, step: int, rank: int, write: Callable[[Path], object]) -> tuple[str, int]:
        """Writes the file of a rank, on that rank, before `publish`; returns its name and bytes."""
        # By a name of its own: a checkpoint of the same step stays until the manifest is another.
        name = f"rank{rank}.{uuid4().hex[:8]}.safetensors"
        if self._here is not None:
            Path(self.path_of(step)).mkdir(parents=True, exist_ok=True)
        return name, put_file(path_in(self.path_of(step), name), write)

    def publish(self, step: int, manifest: Manifest, keep: Collection[int] = ()) -> None:
        """Makes a checkpoint whole and the latest, and removes those that nobody needs any more."""
        files = self._files()
        for other in sorted(files):  # later steps are of a future that going back has undone
            if other > step:
                self._remove(other, files.pop(other))
        text, file = manifest.text(), path_in(self.path_of(step), CHECKPOINT_MANIFEST)
        put_file(file, lambda path: path.write_text(text, encoding="utf-8"))
        for name in set(files[step]) - {CHECKPOINT_MANIFEST, *manifest.files}:
            remove_file(path_in(self.path_of(step), name))
        for other in set(files) - {*sorted(files)[-self._keep_last :], *keep}:
            self._remove(other, files[other])

    def remove(self) -> None:
        """Removes all checkpoints."""
        for step, names in self._files().items():
            self._remove(step, names)
        if self._here is not None:
            with suppress(OSError):
                self._here.rmdir()

    def _check_plain(self) -> None:
        if self._here is not None:
            check_plain(self._here, f"checkpoints {self.path}")

    def _files(self) -> dict[int, list[str]]:
        """Step -> names of its files."""
        files: dict[int, list[str]] = {}
        for path in file_names(self.path):
            folder, name = posixpath.split(path)
            match = re.fullmatch(r"step-(\d{8,})", folder)
            if match is not None:
                files.setdefault(int(match[1]), []).append(name)
        return files

    def _remove(self, step: int, names: Collection[str]) -> None:
        """The manifest first, so that a kill leaves either a whole checkpoint or none."""
        for name in sorted(names, key=lambda name: name != CHECKPOINT_MANIFEST):
            remove_file(path_in(self.path_of(step), name))
        if self._here is not None:
            with suppress(OSError):
                Path(self.path_of(step)).rmdir()


def check_shared(path: Path, process_group: dist.ProcessGroup | None = None) -> None:
    """Checks that all ranks see one folder: on several hosts a path may name one on each."""
    if world_size_of(process_group) == 1:
        return
    with ExitStack() as stack:

        def write() -> str:
            path.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(NamedTemporaryFile(dir=path, suffix=PARTIAL))
            return os.path.basename(file.name)

        name = on_rank_zero(write, process_group)
        with together(process_group):  # all have looked when it is left
            requirement = "the folder that rank 0 writes to, on storage that all hosts have mounted"
            content = "another one" if path.is_dir() else "no such folder"
            remedy = "choose a path that leads to the same folder on all hosts"
            place = f"folder {path} on {gethostname()}"
            check((path / name).is_file(), place, requirement, content, remedy)


# Writing and reading


def write_checkpoint(
    folder: CheckpointFolder,
    step: int,
    state: TrainingState,
    process_group: dist.ProcessGroup | None,
    *,
    keep: Collection[int] = (),
) -> None:
    """Writes a checkpoint and makes it the latest."""
    try:
        on_rank_zero(folder.clean, process_group)
        manifest = _write(folder, step, state, process_group)
        on_rank_zero(lambda: folder.publish(step, manifest, keep), process_group)
    except Exception as error:
        remains = _clean_up(folder, process_group)
        place, cause = f"checkpoint {folder.path_of(step)}", f"{type(error).__name__}: {error}"
        raise CheckpointWriteError(describe(place, "to write it", cause, remains)) from error


def _write(
    folder: CheckpointFolder,
    step: int,
    state: TrainingState,
    process_group: dist.ProcessGroup | None,
) -> Manifest:
    """Writes the files of all ranks; what several hold, the one with the fewest values writes."""
    rank, num_values = rank_of(process_group), [0] * world_size_of(process_group)
    chunks = {
        (key, chunk.offset): chunk.tensor
        for key, value in state.tensors.items()
        for chunk in value.chunks
        if chunk.tensor.numel()
    }
    local = {
        at: (state.tensors[at[0]].size, part.shape, dtype_name(part)) for at, part in chunks.items()
    }
    of_ranks = union_over_ranks({str(rank): local}, process_group)
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for holder in range(len(num_values)):
        for at in of_ranks[str(holder)]:
            holders.setdefault(at, []).append(holder)
    writers = {}
    for at, candidates in holders.items():
        writers[at] = min(candidates, key=num_values.__getitem__)
        num_values[writers[at]] += of_ranks[str(writers[at])][at][1].numel()
    part = {_chunk_name(*at): chunks[at].contiguous() for at in chunks if writers[at] == rank}
    with together(process_group):
        file = folder.add(step, rank, partial(save_file, part))
    files = union_over_ranks({str(rank): file}, process_group)
    tensors: dict[str, _Tensor] = {}
    for at, writer in writers.items():
        size, shape, kind = of_ranks[str(writer)][at]
        entry = tensors.setdefault(at[0], {"dtype": kind, "size": list(size), "chunks": []})
        chunk: _Chunk = {"offset": list(at[1]), "size": list(shape), "file": files[str(writer)][0]}
        entry["chunks"].append(chunk)
    return Manifest(
        world_size=len(num_values),
        files=dict(files.values()),
        tables=state.tables,
        values=state.values,
        tensors=tensors,
    )


def _clean_up(folder: CheckpointFolder, process_group: dist.ProcessGroup | None) -> str:
    """Removes the remains of a failed write, and says which checkpoint is good."""
    try:
        on_rank_zero(folder.clean, process_group)
        with together(process_group):
            latest = folder.latest()
    except (RuntimeError, OSError, ValueError) as error:  # storage may be away for that, too
        return f"what is left there could not be looked at ({error})"
    return "no earlier one is there" if latest is None else f"the last good one is {latest}"


@torch.no_grad()
def read_checkpoint(
    path: Address,
    model: nn.Module,
    tensors: Mapping[str, PlacedTensor],
    process_group: dist.ProcessGroup | None,
    *,
    kinds: tuple[str, ...] = (),
) -> Mapping[str, Any]:
    """Copies a checkpoint, of any sharding, into live tensors of a model and what trains it."""
    with together(process_group):
        manifest = Manifest.read(path)
    entries = {k: v for k, v in manifest.tensors.items() if not kinds or k.split("/")[0] in kinds}
    manifest = replace(manifest, tensors=entries)
    sizes = union_over_ranks({key: value.size for key, value in tensors.items()}, process_group)
    # From the same facts on all ranks.
    _check_fits(manifest, describe_tables(model), sizes, f"checkpoint {path}")
    with together(process_group):
        parts = manifest.stored(path, cache(lambda name: fetch(path_in(path, name))))
        for key, value in tensors.items():
            for chunk in value.chunks if key in parts else ():
                if chunk.tensor.numel():
                    parts[key].copy_to_(chunk.tensor, chunk.offset)
    finish_load_(model, tensors)
    return manifest.values


STEPS_UNTIL_BUCKETS_ARE_MADE_ANEW = 2
"""Steps after which DistributedDataParallel makes its buckets anew, with a static graph, as
TorchRec asks for it."""


def warm_up_(model: nn.Module, optimizer: Any, batch: Any, past_steps: int) -> None:
    """Takes steps that a checkpoint then overwrites: they give the optimizers their state, and
    DistributedDataParallel the buckets that an uninterrupted run of so many steps has."""
    # It makes those anew before its third step, in the order in which gradients came in the second.
    for _ in range(max(1, min(past_steps, STEPS_UNTIL_BUCKETS_ARE_MADE_ANEW))):
        optimizer.zero_grad()
        model(batch)[0].sum().backward()
        optimizer.step()
    optimizer.zero_grad()


class CheckpointSaver:
    """Copies a run's state to the CPU and writes it in a thread; never two at once."""

    def __init__(self, folder: CheckpointFolder) -> None:
        here = local_path(folder.path)
        if here is not None:
            check_shared(here)
        self._folder = folder
        self._process_group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._write: Future[None] | None = None

    def save(self, step: int, state: TrainingState, *, keep: Collection[int] = ()) -> None:
        """Starts to write a checkpoint, after waiting for the one before."""
        self.wait()
        write = partial(write_checkpoint, keep=frozenset(keep))
        self._write = self._executor.submit(
            write, self._folder, step, state.copy(), self._process_group
        )

    def wait(self) -> None:
        """Waits until nothing is being written."""
        write, self._write = self._write, None
        if write is not None:
            write.result()

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._executor.shutdown()
            if self._process_group is not None and error is None:
                dist.destroy_process_group(self._process_group)
