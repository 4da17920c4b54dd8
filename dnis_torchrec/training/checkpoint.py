"""What a run is made of, and its checkpoints: a safetensors file a rank, and a manifest last."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from socket import gethostname
from tempfile import NamedTemporaryFile
from typing import Any, TypedDict
from uuid import uuid4

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data import urls
from dnis_torchrec.data.files import PARTIAL, Positive, check_plain, conform, parse_json
from dnis_torchrec.ranks import on_rank_zero, rank_of, together, union_over_ranks, world_size_of
from dnis_torchrec.selection.shards import collections, lookup_of, table_weight_names, tables_under
from dnis_torchrec.selection.torchrec import (
    ShardedTensor,
    forget_cached_rows,
    lookups,
    writing_to_tables,
)
from dnis_torchrec.selection.wrapper import SoftSelectionModule

CHECKPOINT_MANIFEST = "manifest.json"
_FORMAT = {"format": "dnis-torchrec-checkpoint", "format_version": 3}
_OTHER, _INCOMPLETE = "use another checkpoint", "copy all files of it"


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written on some rank; the ones before are as they were."""


# What a run is made of, live

ITERATIONS = "fused/iterations"  # key of the number of steps that fused kernels have counted


@dataclass(frozen=True, eq=False)
class Chunk:
    """A local part of a tensor."""

    offset: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class PlacedTensor:
    """A tensor of which this rank holds some chunks, or none."""

    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @staticmethod
    def of(value: Tensor | ShardedTensor) -> PlacedTensor:
        """A tensor that every rank holds whole, or the local shards of a sharded one."""
        if isinstance(value, ShardedTensor):
            shards = value.local_shards()
            chunks = (Chunk(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in shards)
            return PlacedTensor(tuple(value.metadata().size), tuple(chunks))
        whole = value.detach().view(1) if value.dim() == 0 else value.detach()
        return PlacedTensor(tuple(whole.shape), (Chunk((0,) * whole.dim(), whole),))

    def copy(self) -> PlacedTensor:
        """The same chunks in memory of their own, on the CPU."""
        chunks = (Chunk(part.offset, part.tensor.to("cpu", copy=True)) for part in self.chunks)
        return PlacedTensor(self.size, tuple(chunks))


@dataclass(frozen=True, kw_only=True)
class TableDescription:
    """Description of a table, equal in a checkpoint and in a model that it fits."""

    rows: int
    embedding_dim: int
    column_cuts: list[int]
    blocks: str


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingState:
    """A whole run at one moment."""

    tensors: Mapping[str, PlacedTensor]
    tables: Mapping[str, TableDescription]
    values: Mapping[str, Any] = field(default_factory=dict)

    def copy(self) -> TrainingState:
        """A snapshot on the CPU that further steps do not change."""
        return replace(self, tensors={key: value.copy() for key, value in self.tensors.items()})


def model_tensors(model: nn.Module) -> dict[str, PlacedTensor]:
    """Tables, dense weights, alpha and buffers of a model, sharded or not."""
    tensors = {f"table/{name}": PlacedTensor.of(value) for name, value in _tables(model)}
    addresses: set[int] = set()  # wrappers share one alpha: it is saved once
    of_tables = table_weight_names(model)
    for name, value in model.state_dict().items():
        is_plain = type(value) in (Tensor, nn.Parameter) and name not in of_tables
        if is_plain and value.data_ptr() not in addresses:
            addresses.add(value.data_ptr())
            tensors[f"model/{name}"] = PlacedTensor.of(value)
    return tensors


def snapshot(model: nn.Module) -> TrainingState:
    """A copy on the CPU of what a model has learnt, to go back to within a run."""
    return TrainingState(tensors=model_tensors(model), tables={}).copy()


@torch.no_grad()
def take_(model: nn.Module, state: TrainingState) -> None:
    """Goes back to a snapshot of the same model."""
    with writing_to_tables(model):
        for key, value in model_tensors(model).items():
            for chunk, source in zip(value.chunks, state.tensors[key].chunks, strict=True):
                chunk.tensor.copy_(source.tensor)


def optimizer_tensors(model: nn.Module, optimizer: Any) -> dict[str, PlacedTensor]:
    """State of the optimizers, both those fused into the tables' backward and the others."""
    tensors = {}
    if isinstance(model, DistributedModelParallel):
        for fqn, states in model.fused_optimizer.state_dict()["state"].items():
            for name, value in states.items():
                table, _, state = name.rpartition(".")
                tensors[f"fused/{table or fqn}/{state}"] = PlacedTensor.of(value)
        counters = _iteration_counters(model)
        if counters:
            steps = torch.stack([part.cpu().max() for part in counters]).max()
            tensors[ITERATIONS] = PlacedTensor.of(steps)
    tables = [PlacedTensor.of(v) for _, v in _tables(model) if isinstance(v, ShardedTensor)]
    shards = {chunk.tensor.data_ptr(): (t.size, chunk) for t in tables for chunk in t.chunks}
    for name, parameter in _parameters(model, optimizer).items():
        size, shard = shards.get(parameter.data_ptr(), ((), None))
        for state, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            part = PlacedTensor.of(value)
            if shard is not None and value.numel() != 1:
                if not value.shape == parameter.shape == shard.tensor.shape:
                    place = f"optimizer state {state!r} of {name!r}"
                    limit = "a state of the shard's shape, in a sharded dense compute kernel"
                    raise NotImplementedError(describe(place, limit, tuple(value.shape)))
                part = PlacedTensor(size, (Chunk(shard.offset, value.detach()),))
            tensors[f"optimizer/{name}/{state}"] = part
    return tensors


def finish_load_(model: nn.Module, tensors: Mapping[str, PlacedTensor]) -> None:
    """Tells kernels that weights were written: caches forget, step counters are set."""
    forget_cached_rows(model)
    if ITERATIONS in tensors:
        for counter in _iteration_counters(model):
            counter.fill_(int(tensors[ITERATIONS].chunks[0].tensor))


def describe_tables(model: nn.Module) -> dict[str, TableDescription]:
    """Describes every table of a model, for comparison with a checkpoint."""
    blocks = {
        table: _fingerprint(module.blocks, table)
        for module in collections(model).values()
        if isinstance(module, SoftSelectionModule)
        for table in module.blocks.routings
    }
    tables = {}
    for name, value in _tables(model):
        cuts = {0}
        if isinstance(value, ShardedTensor):
            cuts = {part.shard_offsets[1] for part in value.metadata().shards_metadata}
        rows, dim = PlacedTensor.of(value).size
        tables[name] = TableDescription(
            rows=rows, embedding_dim=dim, column_cuts=sorted(cuts), blocks=blocks.get(name, "")
        )
    return tables


def rng_tensors(device: torch.device) -> dict[str, PlacedTensor]:
    """State of this rank's random number generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rank{rank_of()}/rng/{kind}": PlacedTensor.of(states[kind]) for kind in states}


def set_rng_(tensors: Mapping[str, PlacedTensor], device: torch.device) -> None:
    """Gives this rank's random number generators the states that `rng_tensors` named."""
    prefix = f"rank{rank_of()}/rng"
    torch.set_rng_state(tensors[f"{prefix}/cpu"].chunks[0].tensor)
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"{prefix}/cuda"].chunks[0].tensor, device)


def _tables(model: nn.Module) -> Iterator[tuple[str, Tensor | ShardedTensor]]:
    for module in collections(model).values():
        for key, value in lookup_of(module).state_dict().items():
            parts = key.split(".")
            if parts[0] == tables_under(module) and parts[-1] == "weight":
                yield ".".join(parts[1:-1]), value


def _parameters(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """FQN -> parameter of an optimizer."""
    if isinstance(optimizer, KeyedOptimizer):
        return dict(optimizer.params)
    steps = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {name: weight for name, weight in model.named_parameters() if weight in steps}


def _iteration_counters(model: nn.Module) -> list[Tensor]:
    """Counters of fused kernels, by which Adam corrects its bias; all count the same steps."""
    modules = (module for lookup in lookups(model) for module in lookup.modules())
    kernels = (k for k in modules if isinstance(k, SplitTableBatchedEmbeddingBagsCodegen))
    return [counter for kernel in kernels for counter in (kernel.iter, kernel.iter_cpu)]


def _fingerprint(blocks: RowBlocks, table: str) -> str:
    routing = blocks.routings[table]
    head = [blocks.first_alpha_row(table), routing.num_embeddings, routing.num_blocks]
    digest = sha256(repr(head).encode())
    for name, tensor in sorted(routing.to_tensors().items()):
        values = tensor.detach().cpu().contiguous().view(torch.uint8)
        digest.update(name.encode() + values.numpy().tobytes())
    return digest.hexdigest()[:16]


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
    kind: str  # a dtype of torch, or in a word what else is there in place of numbers

    @classmethod
    def of(cls, place: str, tensor: Tensor) -> StoredTensor:
        """A tensor that is there as a whole, mapped from its file or not."""
        shape = tuple(tensor.shape)
        chunk = StoredChunk((0,) * len(shape), shape, lambda: tensor)
        return cls(place, shape, (chunk,), dtype_name(tensor))

    def copy_to_(self, target: Tensor, first: Sequence[int] | None = None) -> None:
        """Copies the part of the tensor that is as large as `target`, and reads no more. Local."""
        begin, size, num_values = tuple(first or (0,) * len(self.shape)), target.numel(), 0
        for chunk in self.chunks:
            low = list(map(max, begin, chunk.first))
            ends = zip(begin, target.shape, chunk.first, chunk.shape, strict=True)
            high = [min(a + extent, b + of_chunk) for a, extent, b, of_chunk in ends]
            if all(start < stop for start, stop in zip(low, high, strict=True)):
                part = target[_within(low, high, begin)]
                part.copy_(chunk.open()[_within(low, high, chunk.first)])
                num_values += part.numel()
        check(num_values == size, self.place, f"chunks of {size} values", num_values, _INCOMPLETE)

    def rows(self, first: int, last: int) -> Tensor:
        """Rows ``first <= i < last``; mapped from their file where that is one chunk's."""
        return self._part([(first, last), *((0, size) for size in self.shape[1:])])

    def whole(self) -> Tensor:
        """The whole tensor; mapped from its file where that holds it in one chunk."""
        return self._part([(0, size) for size in self.shape])

    def _part(self, spans: Sequence[tuple[int, int]]) -> Tensor:
        check(bool(self.chunks), self.place, "chunks of it", "none", _INCOMPLETE)
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

    @staticmethod
    def read(folder: urls.Address) -> Manifest:
        """Reads the manifest, and looks whether every file that it names is there and whole."""
        place, file = f"checkpoint {folder}", urls.path_in(folder, CHECKPOINT_MANIFEST)
        here = urls.local_path(folder)
        if here is not None:
            check_plain(here, place)
        check(
            urls.file_size(file) is not None,
            place,
            "a checkpoint",
            f"no {CHECKPOINT_MANIFEST} in it",
        )
        head = parse_json(urls.read_bytes(file), dict[str, Any], str(file), remedy=_OTHER)
        form = {key: head.pop(key, None) for key in _FORMAT}
        check(form == _FORMAT, place, str(_FORMAT), form, "use the version that wrote it")
        conform(head, Manifest, str(file), remedy=_OTHER)
        for name, size in head["files"].items():
            check(os.path.basename(name) == name, place, "names of files in it", repr(name))
            bytes_there = urls.file_size(urls.path_in(folder, name))
            rank = name.removeprefix("rank").partition(".")[0]
            remedy = f"put back what rank {rank} wrote, or {_OTHER}"
            check(bytes_there == size, f"{place}, {name}", f"{size} bytes", bytes_there, remedy)
        for key, entry in head["tensors"].items():
            _check_tensor(entry, head["files"], f"{file}, tensor {key!r}")
        tables = {name: TableDescription(**table) for name, table in head["tables"].items()}
        return Manifest(**{**head, "tables": tables})

    def stored(self, folder: urls.Address) -> dict[str, StoredTensor]:
        """The tensors, not read yet, in files of the folder."""
        path_of = cache(lambda name: urls.fetch(urls.path_in(folder, name)))
        tensors: dict[str, StoredTensor] = {}
        for key, entry in self.tensors.items():
            place, chunks = f"checkpoint {folder}, {key}", []
            for chunk in entry["chunks"]:
                read = partial(_open, path_of, chunk["file"], _chunk_name(key, chunk["offset"]))
                chunks.append(StoredChunk(tuple(chunk["offset"]), tuple(chunk["size"]), read))
            tensors[key] = StoredTensor(place, tuple(entry["size"]), tuple(chunks), entry["dtype"])
        return tensors


def _open(path_of: Callable[[str], Path], file: str, name: str) -> Tensor:
    """Opens a tensor of a safetensors file, mapped into memory."""
    try:
        with safe_open(path_of(file), framework="pt") as tensors:
            return tensors.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(describe(file, "a whole file", str(error), _OTHER)) from error


def _chunk_name(key: str, offset: Iterable[int]) -> str:
    """The name of a chunk in its file."""
    return f"{key}@{','.join(map(str, offset))}"


def _check_tensor(entry: _Tensor, files: Mapping[str, int], place: str) -> None:
    whole = entry["size"]
    for chunk in entry["chunks"]:
        file, offset, size = chunk["file"], chunk["offset"], chunk["size"]
        check(file in files, place, "a file of the checkpoint", repr(file), _OTHER)
        spans = zip(offset, size, whole, strict=False)
        fits = len(offset) == len(size) == len(whole)
        fits = fits and all(0 <= first <= first + n <= most for first, n, most in spans)
        check(fits, place, f"chunks inside of {whole}", f"{size} at {offset}", _OTHER)


def _check_fits(
    manifest: Manifest,
    tables: Mapping[str, TableDescription],
    sizes: Mapping[str, tuple[int, ...]],
    place: str,
) -> None:
    """Checks that a checkpoint is one of the same tables, blocks, weights and optimizers. Local."""
    past_sizes = {key: tuple(entry["size"]) for key, entry in manifest.tensors.items()}
    past, now = _facts(manifest.tables, past_sizes), _facts(tables, sizes)
    names = [name for name in sorted({*past, *now}) if past.get(name) != now.get(name)]
    differences = [f"{n}: {past.get(n, 'none')} instead of {now.get(n, 'none')}" for n in names[:8]]
    text = f"one with {'; '.join(differences)}"
    remedy = "resume with recipe, data, settings and, for row-wise optimizers, ranks of the run"
    check(not names, place, "a checkpoint of this run", text, remedy)


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
            # The state of a row-wise optimizer is one for each column shard.
            is_row_wise = key.startswith("fused/") and len(size) == 1
            facts[key] = "one for each column shard" if is_row_wise else size
            for name in tables:
                if is_row_wise and key.startswith(f"fused/{name}/"):
                    facts[f"column shards of table {name!r}"] = tables[name].column_cuts
    return facts


# Folders of checkpoints


class CheckpointFolder:
    """Checkpoints of one run at a path that all ranks see, or at a URL. No collective."""

    def __init__(self, path: urls.Address, *, keep_last: int = 2) -> None:
        here = urls.local_path(path)
        self.path: urls.Address = str(path) if here is None else here
        self._here, self._keep_last = here, keep_last

    def path_of(self, step: int) -> urls.Address:
        """Returns the address of the checkpoint of a step, once it is whole."""
        return urls.path_in(self.path, f"step-{step:08d}")

    def latest(self) -> urls.Address | None:
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
        for name in urls.file_names(self.path):
            if name.endswith(PARTIAL):
                urls.remove_file(urls.path_in(self.path, name))

    def add(self, step: int, rank: int, write: Callable[[Path], object]) -> tuple[str, int]:
        """Writes the file of a rank, on that rank, before `publish`; returns its name and bytes."""
        # By a name of its own: a checkpoint of the same step stays until the manifest is another.
        name = f"rank{rank}.{uuid4().hex[:8]}.safetensors"
        if self._here is not None:
            Path(self.path_of(step)).mkdir(parents=True, exist_ok=True)
        return name, urls.put_file(urls.path_in(self.path_of(step), name), write)

    def publish(self, step: int, manifest: Manifest, keep: Collection[int] = ()) -> None:
        """Makes a checkpoint whole and the latest, and removes those that nobody needs any more."""
        files = self._files()
        for other in sorted(files):  # later steps are of a future that going back has undone
            if other > step:
                self._remove(other, files.pop(other))
        text = json.dumps(_FORMAT | asdict(manifest)) + "\n"
        file = urls.path_in(self.path_of(step), CHECKPOINT_MANIFEST)
        urls.put_file(file, lambda path: path.write_text(text, encoding="utf-8"))
        for name in set(files[step]) - {CHECKPOINT_MANIFEST, *manifest.files}:
            urls.remove_file(urls.path_in(self.path_of(step), name))
        for other in set(files) - {*sorted(files)[-self._keep_last :], *keep}:
            self._remove(other, files[other])

    def remove(self, *, but_latest: bool = False) -> None:
        """Removes all checkpoints, or all but the last whole one."""
        latest = self.steps()[-1:] if but_latest else []
        for step, names in self._files().items():
            if step not in latest:
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
        for path in urls.file_names(self.path):
            folder, name = posixpath.split(path)
            match = re.fullmatch(r"step-(\d{8,})", folder)
            if match is not None:
                files.setdefault(int(match[1]), []).append(name)
        return files

    def _remove(self, step: int, names: Collection[str]) -> None:
        """The manifest first, so that a kill leaves either a whole checkpoint or none."""
        for name in sorted(names, key=lambda name: name != CHECKPOINT_MANIFEST):
            urls.remove_file(urls.path_in(self.path_of(step), name))
        if self._here is not None:
            with suppress(OSError):
                Path(self.path_of(step)).rmdir()


def check_shared(path: Path) -> None:
    """Checks that all ranks see one folder: on several hosts a path may name one on each."""
    if world_size_of() == 1:
        return
    with ExitStack() as stack:

        def write() -> str:
            path.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(NamedTemporaryFile(dir=path, suffix=PARTIAL))
            return os.path.basename(file.name)

        name = on_rank_zero(write)
        with together():  # all have looked when it is left
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
        with suppress(RuntimeError, OSError, ValueError):  # storage may be away for that, too
            on_rank_zero(folder.clean, process_group)
        place, cause = f"checkpoint {folder.path_of(step)}", f"{type(error).__name__}: {error}"
        remedy = "what was written before is whole"
        raise CheckpointWriteError(describe(place, "to write it", cause, remedy)) from error


def _write(
    folder: CheckpointFolder,
    step: int,
    state: TrainingState,
    process_group: dist.ProcessGroup | None,
) -> Manifest:
    """Writes the files of all ranks; what several hold, the first of them writes."""
    rank, part, local = rank_of(process_group), {}, {}
    for key, value in state.tensors.items():
        for chunk in (chunk for chunk in value.chunks if chunk.tensor.numel()):
            name, tensor = _chunk_name(key, chunk.offset), chunk.tensor
            part[name] = tensor
            local[name] = rank, key, value.size, chunk.offset, tensor.shape, dtype_name(tensor)
    of_ranks = union_over_ranks(local, process_group)
    part = {name: part[name].contiguous() for name in part if of_ranks[name][0] == rank}
    with together(process_group):
        file = folder.add(step, rank, partial(save_file, part))
    files = union_over_ranks({str(rank): file}, process_group)
    tensors: dict[str, _Tensor] = {}
    for writer, key, whole, offset, size, kind in of_ranks.values():
        entry = tensors.setdefault(key, {"dtype": kind, "size": list(whole), "chunks": []})
        name = files[str(writer)][0]
        entry["chunks"].append({"offset": list(offset), "size": list(size), "file": name})
    return Manifest(
        world_size=world_size_of(process_group),
        files=dict(files.values()),
        tables=state.tables,
        values=state.values,
        tensors=tensors,
    )


@torch.no_grad()
def read_checkpoint(
    path: urls.Address,
    model: nn.Module,
    tensors: Mapping[str, PlacedTensor],
    process_group: dist.ProcessGroup | None,
    *,
    kinds: tuple[str, ...] = (),
    is_plain: bool = False,
) -> Mapping[str, Any]:
    """Copies a checkpoint, of any sharding, into live tensors; a plain one leaves alpha alone."""
    with together(process_group):
        manifest = Manifest.read(path)
    entries = {k: v for k, v in manifest.tensors.items() if not kinds or k.split("/")[0] in kinds}
    manifest = replace(manifest, tensors=entries)
    sizes = union_over_ranks({key: value.size for key, value in tensors.items()}, process_group)
    tables = describe_tables(model)
    if is_plain:
        tables = {name: replace(table, blocks="") for name, table in tables.items()}
        sizes = {key: size for key, size in sizes.items() if key in entries}
    # From the same facts on all ranks.
    _check_fits(manifest, tables, sizes, f"checkpoint {path}")
    with together(process_group):
        parts = manifest.stored(path)
        for key, value in tensors.items():
            for chunk in value.chunks if key in parts else ():
                parts[key].copy_to_(chunk.tensor, chunk.offset)
    finish_load_(model, tensors)
    return manifest.values


def tensors_under(path: urls.Address, prefix: str) -> dict[str, Tensor]:
    """Reads the tensors whose keys begin with a prefix, which their names then lack. Local."""
    parts = Manifest.read(path).stored(path)
    keys = (key for key in parts if key.startswith(prefix))
    # A copy: they outlive the file that they are mapped from.
    return {key.removeprefix(prefix): parts[key].whole().clone() for key in keys}


def warm_up_(model: nn.Module, optimizer: Any, batch: Any, past_steps: int) -> None:
    """Takes steps that a checkpoint then overwrites: they give the optimizers their state, and
    DistributedDataParallel the buckets that an uninterrupted run of so many steps has."""
    # With a static graph, as TorchRec asks for it, buckets are made anew before the third step, in
    # the order in which gradients came in the second.
    for _ in range(max(1, min(past_steps, 2))):
        optimizer.zero_grad()
        model(batch)[0].sum().backward()
        optimizer.step()
    optimizer.zero_grad()


class CheckpointSaver:
    """Copies a run's state to the CPU and writes it in a thread; never two at once."""

    def __init__(self, folder: CheckpointFolder) -> None:
        here = urls.local_path(folder.path)
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
