"""Reads and writes the weights of models in files. Runs no code that a file contains."""

from __future__ import annotations

import pickletools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from mmap import ACCESS_COPY, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from struct import unpack
from typing import IO, Any, cast
from zipfile import ZIP_STORED, ZipFile

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dnis_torchrec.allocation.axes import has_axes, with_axes_
from dnis_torchrec.blocks.counts import table_name
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.urls import Address, path_in
from dnis_torchrec.ranks import Ranks, together, union_over_ranks, world_size_of
from dnis_torchrec.selection import shards
from dnis_torchrec.selection.torchrec import ShardedTensor, writing_to_tables
from dnis_torchrec.training import checkpoint
from dnis_torchrec.training.shard import spread_tables

MODEL = "model"  # folder in a run of several ranks, into which each rank writes its shards
_FLOATS = ("float64", "float32", "float16", "bfloat16")  # numbers to which no scale belongs


# The model of a run


def write_model(folder: Address, model: nn.Module, ranks: Ranks) -> None:
    """Writes a merged model by the plain model's names. Each rank writes the shards it holds."""
    state = checkpoint.TrainingState(tensors=_tensors_by_name(model), tables={})
    try:
        checkpoint.write_checkpoint(
            checkpoint.CheckpointFolder(path_in(folder, MODEL)), 0, state, ranks.group
        )
    except checkpoint.CheckpointWriteError as error:
        raise OSError(str(error)) from error  # as by a model that one process writes


def _tensors_by_name(model: nn.Module) -> dict[str, checkpoint.PlacedTensor]:
    """Weights that this rank holds, by the plain model's names."""
    tensors = {}
    for fqn, module in shards.collections(model).items():
        for config in shards.table_configs_of(module):
            local = [s for s in shards.local_shards(module) if s.table == config.name]
            chunks = tuple(checkpoint.Chunk((s.first_row, s.first_column), s.weight) for s in local)
            name = weight_name(f"{fqn}.{shards.tables_under(module)}.{config.name}.weight")
            size = (config.num_embeddings, config.embedding_dim)
            tensors[name.removeprefix(".")] = checkpoint.PlacedTensor(size, chunks)
    for name, value in shards.dense_state(model).items():
        if not isinstance(value, ShardedTensor):  # else a collection under a second name
            whole = checkpoint.Chunk((0,) * value.dim(), value.detach())
            tensors[name] = checkpoint.PlacedTensor(tuple(value.shape), (whole,))
    return tensors


def remove_model(folder: Address) -> None:
    """Removes what several ranks have written: it is not the model of a later attempt."""
    checkpoint.CheckpointFolder(path_in(folder, MODEL)).remove()


def written_model(folder: Path) -> dict[str, checkpoint.StoredTensor] | None:
    """The model that several ranks have written, of which nothing is read yet, or None."""
    latest = checkpoint.CheckpointFolder(folder / MODEL).latest()
    return None if latest is None else checkpoint.Manifest.read(latest).stored(latest)


def weight_name(name: str) -> str:
    """The name of a weight in a state_dict, its table named as in its collection."""
    for part in (".embedding_bags.", ".embeddings."):
        fqn, is_table, rest = f".{name}".rpartition(part)
        if is_table:
            table = table_name(rest.removesuffix(".weight"), fqn.removeprefix("."))
            return f"{fqn}{part}{table}.weight".removeprefix(".")
    return name


# Filling a model


def check_state(
    model: nn.Module,
    state: Mapping[str, checkpoint.StoredTensor],
    place: str,
    remedy: str = "use the recipe and data of the run",
) -> None:
    """Checks that weights fit a model, naming what does not."""
    if has_axes(state):
        with_axes_(model)
    weights = {weight_name(name): value for name, value in model.state_dict().items()}
    absent, more = sorted(set(weights) - set(state)), sorted(set(state) - set(weights))
    parts = {"missing": absent, "that it does not have": more}.items()
    texts = [f"{len(names)} {what}, such as {names[:3]}" for what, names in parts if names]
    differences = ", ".join(texts)
    check(not differences, place, "the names of the model's own parameters", differences, remedy)
    for name, value in weights.items():
        where, shape, tensor = f"{place}, {name}", tuple(value.shape), state[name]
        kinds = _FLOATS if value.is_floating_point() else (checkpoint.dtype_name(value),)
        check(tensor.kind in kinds, where, f"values of {' or '.join(kinds)}", tensor.kind, remedy)
        check(tensor.shape == shape, where, f"shape {shape}", tensor.shape, remedy)


@torch.no_grad()
def fill_(model: nn.Module, weights: Mapping[str, checkpoint.StoredTensor]) -> None:
    """Fills a model with weights that fit it; of tables this rank's shards alone are read."""
    with writing_to_tables(model):
        for name, tensor in _tensors_by_name(model).items():
            for chunk in tensor.chunks:
                weights[name].copy_to_(chunk.tensor, chunk.offset)


@torch.no_grad()
def fill_state_(
    model: nn.Module,
    optimizer: Any,
    state: Mapping[str, Tensor],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Copies whole tensors, by the keys of a checkpoint, into a model of any sharding and into its
    optimizers, which have their state: see `warm_up_`. All ranks call it."""
    tensors = checkpoint.model_tensors(model) | checkpoint.optimizer_tensors(model, optimizer)
    local = {key: value.size for key, value in tensors.items()}
    sizes, remedy = union_over_ranks(local, process_group), "train with the optimizers of the run"
    for key, value in state.items():
        whole = value.reshape(-1) if value.dim() == 0 else value
        size = sizes.get(key, ())
        if len(size) == whole.dim() == 1 and len(whole) and size[0] % len(whole) == 0:
            # A row-wise optimizer has one number for each row of every column shard.
            whole = whole.repeat(size[0] // len(whole))
        check(
            size == tuple(whole.shape), key, f"shape {tuple(whole.shape)}", size or "none", remedy
        )
        for chunk in tensors[key].chunks if key in tensors else ():
            checkpoint.StoredTensor.of(key, whole).copy_to_(chunk.tensor, chunk.offset)
    checkpoint.finish_load_(
        model, {key: checkpoint.PlacedTensor.of(value) for key, value in state.items()}
    )


def spread_filled(
    model: nn.Module, weights: Mapping[str, checkpoint.StoredTensor] | None, device: torch.device
) -> nn.Module:
    """Spreads the tables of a model over all ranks, each of which then reads its shards."""
    if weights is None:
        return spread_tables(model, device)
    # No rank holds whole tables meanwhile.
    empty_on = "cpu" if world_size_of() == 1 else "meta"
    for module in shards.collections(model).values():
        for holder in shards.holders_of_tables(module).values():
            weight = cast(Tensor, holder.weight)
            if weight.is_meta or empty_on == "meta":
                empty = torch.empty_like(weight, device=empty_on)
                holder.weight = nn.Parameter(empty, requires_grad=weight.requires_grad)
    model = spread_tables(model, device)
    with together():
        fill_(model, weights)
    return model


# A user's weights


def weights_for_(model: nn.Module, path: Path) -> dict[str, checkpoint.StoredTensor]:
    """Finds the weights of a model in files; but names and shapes nothing is read yet."""
    tensors = _behind_prefix(model.state_dict(), _state(path), f"weights {path}")
    check_state(model, tensors, f"weights {path}", "use the weights of the recipe's model")
    return tensors


def _state(path: Path) -> Mapping[str, checkpoint.StoredTensor]:
    """All tensors of a file by name, those of dicts within dicts joined by dots."""
    place = f"weights {path}"
    if path.is_dir():
        return distributed_checkpoint(path)
    check(path.is_file(), place, "a file", "none")
    if path.suffix == ".safetensors":
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(describe(place, "a whole safetensors file", str(error))) from error
        return {
            name: checkpoint.StoredTensor.of(f"{place}, {name}", tensors[name]) for name in tensors
        }
    remedy = "save model.state_dict() anew, or a .safetensors file"
    with _reading(place, "a state_dict that torch.save has written", remedy):
        content, parts = _unzip(path, 0, path.stat().st_size)
        records = _flat(content)
        return {name: _tensor_of(f"{place}, {name}", records[name], parts) for name in records}


def _behind_prefix(
    weights: Mapping[str, Tensor], state: Mapping[str, checkpoint.StoredTensor], place: str
) -> dict[str, checkpoint.StoredTensor]:
    """Drops the prefix behind which all of the model's names stand, or else most of them."""
    first = next(iter(weights), "")
    prefixes = [name.removesuffix(first) for name in state if f".{name}".endswith(f".{first}")]
    num_absent = {
        prefix: sum(prefix + name not in state for name in weights) for prefix in prefixes
    }
    matches = [f"{prefix}*" for prefix in num_absent if not num_absent[prefix]]
    remedy = "save the state_dict of one of them alone"
    check(len(matches) < 2, place, "one model that fits", ", ".join(sorted(matches)), remedy)
    prefix = min(num_absent, key=lambda prefix: (num_absent[prefix], len(prefix)), default="")
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


# Folders of torch.distributed.checkpoint, whose metadata is a pickle


def distributed_checkpoint(folder: Path) -> dict[str, checkpoint.StoredTensor]:
    """Returns the tensors of a checkpoint, each read when asked for; skips all other values."""
    place, file = f"checkpoint {folder}", folder / ".metadata"
    check(file.is_file() and not file.is_symlink(), place, "a plain file .metadata", "none")
    requirement = "metadata of torch.distributed.checkpoint"
    with _reading(place, requirement, "save it as a .safetensors file"):
        metadata = _walk(file.read_bytes())
        if not metadata.what.endswith(".Metadata"):
            raise ValueError("another object")
        return _tensors(metadata, folder)


def _tensors(metadata: _Record, folder: Path) -> dict[str, checkpoint.StoredTensor]:
    files: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for index, info in metadata["storage_data"].entries.items():
        name = _text(index["fqn"])
        if info["transform_descriptors"]:
            raise ValueError(f"chunks of {name!r} that are compressed")
        first = () if index["offset"] is None else _numbers(index["offset"])
        begin, length = _numbers((info["offset"], info["length"]))
        files[name, first] = _text(info["relative_path"]), begin, length
    tensors = {}
    for name, entry in metadata["state_dict_metadata"].entries.items():
        if entry.what.endswith(".TensorStorageMetadata"):
            place, shape = f"checkpoint {folder}, {_text(name)}", _numbers(entry["size"])
            kind = _text(entry["properties"].state[0]).removeprefix("torch.")
            chunks = []
            for chunk in entry["chunks"]:
                first, size = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
                if any(at + n > whole for at, n, whole in zip(first, size, shape, strict=True)):
                    raise ValueError(f"a chunk of {name!r} that ends outside of {shape}")
                # Each chunk has bytes of its own: there are no more of them than the file names.
                read = partial(_open, folder, place, kind, size, *files.pop((name, first)))
                chunks.append(checkpoint.StoredChunk(first, size, read))
            tensors[name] = checkpoint.StoredTensor(place, shape, tuple(chunks), kind)
    return tensors


def _open(
    folder: Path, place: str, kind: str, shape: tuple[int, ...], name: str, begin: int, length: int
) -> Tensor:
    """Reads a chunk, which is a tensor that torch.save has written."""
    file = folder / name
    is_inside = Path(name).name == name and file.is_file() and not file.is_symlink()
    check(is_inside, place, "plain files of the folder", repr(name), "copy all files of it")
    with _reading(place, f"a tensor of {kind}, {shape} at byte {begin} of {name!r}", _DAMAGED):
        tensor = _tensor_of(place, *_unzip(file, begin, length))
        if (tensor.kind, tensor.shape) != (kind, shape):
            raise ValueError(f"one of {tensor.kind}, {tensor.shape}")
        return tensor.chunks[0].open()


def _numbers(size: Any) -> tuple[int, ...]:
    """Returns the numbers of a tuple, or of a record that stands for a torch.Size."""
    numbers = size.arguments[0] if isinstance(size, _Record) else size
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("sizes that are none")
    return tuple(numbers)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("names that are no text")
    return value


# What torch.save has written: tensors in a zip, and a pickle that is walked through


@dataclass(eq=False, repr=False)
class _Record:
    """A call that a pickle would make, of a class or a function, and what a dict then takes."""

    what: str
    arguments: Any = ()
    state: Any = None
    entries: dict[Any, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.state.entries.get(name)


@contextmanager
def _reading(place: str, requirement: str, remedy: str) -> Iterator[None]:
    """Says in one line what is wrong with a file of others."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of damaged bytes libraries say so in many ways
        text = str(error) if isinstance(error, ValueError) else ""
        cause = " ".join(text.split())[:_LONGEST_NAME] or type(error).__name__
        raise ValueError(describe(place, requirement, cause, remedy)) from error


def _unzip(file: Path, begin: int, length: int) -> tuple[Any, dict[str, memoryview]]:
    """Returns the content as records, and bytes of storages by name, mapped from the file."""
    page, parts = begin - begin % ALLOCATIONGRANULARITY, {}
    with file.open("rb") as stream:
        # Private to this process: torch takes no memory that must not be written.
        view = mmap(stream.fileno(), begin + length - page, offset=page, access=ACCESS_COPY)
    for info in ZipFile(cast(IO[bytes], view)).infolist():
        if info.compress_type != ZIP_STORED or info.flag_bits & 1:
            raise ValueError("a zip that was compressed or encrypted")
        # A local header ends in the lengths of two fields that follow it.
        at = info.header_offset + 30
        at += sum(unpack("<HH", view[at - 4 : at]))
        parts[info.filename.partition("/")[2]] = memoryview(view)[at : at + info.file_size]
    if parts.get("byteorder", b"little") != b"little":
        raise ValueError("numbers in another order of bytes")
    return _walk(bytes(parts["data.pkl"])), parts


def _flat(state: _Record) -> dict[str, _Record]:
    """Tensors of a state by name, those of dicts within dicts joined by dots."""
    tensors, dicts, num_characters = {}, [("", state)], 0
    while dicts:
        prefix, outer = dicts.pop()
        for key, value in outer.entries.items():
            name = f"{prefix}{key}" if isinstance(key, str) else ""
            # A dict may hold itself, or another one many times.
            num_characters += len(name) + 1
            if num_characters > _MOST_CHARACTERS:
                raise ValueError("dicts within dicts that do not end")
            if name and isinstance(value, _Record):
                if value.what.startswith((_REBUILD, _OF_CLASS)):
                    tensors[name] = value
                else:
                    dicts.append((f"{name}.", value))
    return tensors


def _tensor_of(
    place: str, record: _Record, parts: Mapping[str, memoryview]
) -> checkpoint.StoredTensor:
    """The tensor that a record stands for, not read yet."""
    if record.what == _OF_CLASS:
        record = _Record(record.arguments[0], record.arguments[2])
    if record.what in (f"{_REBUILD}parameter", f"{_REBUILD}parameter_with_state"):
        record = record.arguments[0]
    name = record.what.removeprefix(_REBUILD)
    if name not in ("tensor", "tensor_v2", "tensor_v3"):
        return checkpoint.StoredTensor(place, (), (), name)
    storage, offset, size, stride, *more = record.arguments
    kind = _text(storage.arguments[1]).removeprefix("torch.").removesuffix("Storage")
    kind = _KINDS.get(kind, "numbers of an unknown kind")
    if name == "tensor_v3":
        kind = _text(more.pop(2)).removeprefix("torch.")
    if more[2:]:  # flags of what is still to be done to the numbers
        return checkpoint.StoredTensor(place, (), (), "a view of other numbers")
    shape, part = _numbers(size), parts.get(f"data/{_text(storage.arguments[2])}")
    read = partial(_view, place, kind, part, shape, _numbers(stride), offset)
    return checkpoint.StoredTensor(
        place, shape, (checkpoint.StoredChunk((0,) * len(shape), shape, read),), kind
    )


def _view(place: str, kind: str, part: memoryview | None, *layout: Any) -> Tensor:
    """Bytes of a storage as a tensor; they are copied only where they begin at an odd place."""
    with _reading(place, "a tensor that torch.save has written", _DAMAGED):
        dtype: torch.dtype = getattr(torch, kind)
        if 0 in layout[0]:
            return torch.empty(layout[0], dtype=dtype)
        content = torch.frombuffer(part, dtype=torch.uint8)
        if content.data_ptr() % dtype.itemsize:
            content = content.clone()
        return content.view(dtype).as_strided(*layout)


_DAMAGED = "it was damaged"
_LONGEST_NAME = 1000
_MOST_CHARACTERS = 1 << 24  # of all names in a file
_REBUILD, _OF_CLASS = "torch._utils._rebuild_", "torch._tensor._rebuild_from_type_v2"
_KINDS = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"},
    **{"Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
"""Dtypes by the names of torch's classes of storage, between ``torch.`` and ``Storage``."""
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": (), "MARK": ...}
_VALUES = (
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"),
    *("BINBYTES", "SHORT_BINBYTES", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
)


def _walk(content: bytes) -> Any:
    """Reads a pickle as records of what it would make: nothing is looked up, nothing is called."""
    # Everything made here is as long as what the pickle says of it, and nothing in it is compared,
    # hashed or printed that may hold itself.
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(content):
        match opcode.name:
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if name in _VALUES:
                stack.append(argument)
            case "GLOBAL":
                stack.append(cast(str, argument).replace(" ", "."))
            case "STACK_GLOBAL":
                name = ".".join(stack[-2:])
                if len(name) > _LONGEST_NAME:  # names made of names double
                    raise ValueError(f"a name of {len(name)} characters")
                stack[-2:] = [name]
            case "BINPERSID":
                stack.append(_Record("persistent", stack.pop()))
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "NEWOBJ" | "REDUCE":
                stack[-2:] = [_Record(_text(stack[-2]), stack[-1])]
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case "EMPTY_DICT":
                stack.append(_Record("dict"))
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                size = int(name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "TUPLE":
                stack.append(tuple(_since_mark(stack)))
            case "APPEND" | "APPENDS" | "ADDITEMS" as name:
                values = [stack.pop()] if name == "APPEND" else _since_mark(stack)
                stack[-1].extend(values)
            case "SETITEM" | "SETITEMS" as name:
                values = _since_mark(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                pairs = zip(values[::2], values[1::2], strict=True)
                stack[-1].entries.update(pair for pair in pairs if not isinstance(pair[0], tuple))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case name:
                raise ValueError(f"the opcode {name}")
    (root,) = stack
    return root


def _since_mark(stack: list[Any]) -> list[Any]:
    values: list[Any] = []
    while (value := stack.pop()) is not ...:
        values.append(value)
    return values[::-1]
