"""Reads and writes the weights of models in files. Runs no code that a file contains."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dnis_torchrec.allocation.axes import has_axes, with_axes_
from dnis_torchrec.blocks.counts import table_name
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.urls import Address, path_in
from dnis_torchrec.ranks import Ranks, together, world_size_of
from dnis_torchrec.selection.shards import (
    collections,
    dense_state,
    holders_of_tables,
    local_shards,
    table_configs_of,
    tables_under,
)
from dnis_torchrec.selection.torchrec import ShardedTensor, file_view, writing_to_tables
from dnis_torchrec.training.checkpoint import (
    CheckpointFolder,
    CheckpointWriteError,
    Manifest,
    StoredChunk,
    StoredTensor,
    write_checkpoint,
)
from dnis_torchrec.training.shard import spread_tables
from dnis_torchrec.training.state import Chunk, PlacedTensor, TrainingState

MODEL = "model"
"""Folder in a run of several ranks, into which each rank writes its shards."""
_NAMES = 3
"""How many names an error message lists."""


# The model of a run


def write_model(folder: Address, model: nn.Module, ranks: Ranks) -> None:
    """Writes a merged model under the plain model's names; each rank writes its own shards."""
    tensors = {}
    for fqn, module in collections(model).items():
        for config in table_configs_of(module):
            chunks = tuple(
                Chunk((shard.first_row, shard.first_column), shard.weight)
                for shard in local_shards(module)
                if shard.table == config.name
            )
            size = (config.num_embeddings, config.embedding_dim)
            tensors[_key_of_table(fqn, module, config.name)] = PlacedTensor(size, chunks)
    for name, value in dense_state(model).items():
        whole = Chunk((0,) * value.dim(), value.detach())
        tensors[name] = PlacedTensor(tuple(value.shape), (whole,))
    state = TrainingState(tensors=tensors, tables={})
    try:
        write_checkpoint(CheckpointFolder(path_in(folder, MODEL)), 0, state, ranks.group)
    except CheckpointWriteError as error:
        raise OSError(str(error)) from error  # as by a model that one process writes


def remove_model(folder: Address) -> None:
    """Removes what several ranks have written: it is not the model of a later attempt."""
    CheckpointFolder(path_in(folder, MODEL)).remove()


def written_model(folder: Path) -> dict[str, StoredTensor] | None:
    """The model that several ranks have written, of which nothing is read yet, or None."""
    latest = CheckpointFolder(folder / MODEL).latest()
    return None if latest is None else Manifest.read(latest).stored(latest)


def weight_name(name: str) -> str:
    """The name of a weight in a state_dict, its table named as in its collection."""
    for part in (".embedding_bags.", ".embeddings."):
        fqn, is_table, rest = f".{name}".rpartition(part)
        if is_table:
            table = table_name(rest.removesuffix(".weight"), fqn.removeprefix("."))
            return f"{fqn}{part}{table}.weight".removeprefix(".")
    return name


def _key_of_table(fqn: str, module: nn.Module, table: str) -> str:
    return weight_name(f"{fqn}.{tables_under(module)}.{table}.weight".removeprefix("."))


# Filling a model


def check_state(
    model: nn.Module,
    state: Mapping[str, StoredTensor],
    place: str,
    remedy: str = "use the recipe and data of the run",
) -> None:
    """Checks that weights fit a model, naming what does not."""
    if has_axes(state):
        with_axes_(model)
    weights = {weight_name(name): value for name, value in model.state_dict().items()}
    absent, more = sorted(set(weights) - set(state)), sorted(set(state) - set(weights))
    differences = ", ".join(
        f"{len(names)} {what}, such as {names[:_NAMES]}"
        for names, what in ((absent, "missing"), (more, "that it does not have"))
        if names
    )
    check(not differences, place, "the names of the model's own parameters", differences, remedy)
    for name, value in weights.items():
        shape, size = tuple(value.shape), state[name].shape
        check(shape == size, f"{place}, {name}", f"shape {shape}", size, remedy)


@torch.no_grad()
def fill_(model: nn.Module, weights: Mapping[str, StoredTensor]) -> None:
    """Fills a model with weights that fit it; of tables this rank's shards alone are read."""
    for name, value in dense_state(model).items():
        if not isinstance(value, ShardedTensor):  # else a collection under a second name
            weights[name].copy_to_(value)
    with writing_to_tables(model):
        for fqn, module in collections(model).items():
            for shard in local_shards(module):
                table = weights[_key_of_table(fqn, module, shard.table)]
                table.copy_to_(shard.weight, (shard.first_row, shard.first_column))


def spread_filled(
    model: nn.Module, weights: Mapping[str, StoredTensor] | None, device: torch.device
) -> nn.Module:
    """Spreads the tables of a model over all ranks, each of which then reads its shards."""
    if weights is None:
        return spread_tables(model, device)
    # No rank holds whole tables meanwhile.
    empty_on = "cpu" if world_size_of() == 1 else "meta"
    for module in collections(model).values():
        for holder in holders_of_tables(module).values():
            weight = cast(Tensor, holder.weight)
            if weight.is_meta or empty_on == "meta":
                empty = torch.empty_like(weight, device=empty_on)
                holder.weight = nn.Parameter(empty, requires_grad=weight.requires_grad)
    model = spread_tables(model, device)
    with together():
        fill_(model, weights)
    return model


# A user's weights


def weights_for_(model: nn.Module, path: Path) -> dict[str, StoredTensor]:
    """Finds the weights of a model in files; but names and shapes nothing is read yet."""
    state = _state(path)
    if has_axes(state):
        with_axes_(model)
    tensors = _behind_prefix(model.state_dict(), state)
    check_state(model, tensors, f"weights {path}", "use the weights of the recipe's model")
    return tensors


def _state(path: Path) -> Mapping[str, StoredTensor]:
    """All tensors of a file by name, those of dicts within dicts joined by dots."""
    place = f"weights {path}"
    if path.is_dir():
        return distributed_checkpoint(path)
    check(path.is_file(), place, "a file", "none")
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            is_mapped = zipfile.is_zipfile(path)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except SafetensorError as error:
        raise ValueError(describe(place, "a whole safetensors file", str(error))) from error
    except Exception as error:  # what is wrong with a file of any kind, torch says in many ways
        requirement = "a state_dict, read with weights_only"
        remedy = "save model.state_dict(), or a .safetensors file"
        raise ValueError(describe(place, requirement, type(error).__name__, remedy)) from error
    check(isinstance(content, Mapping), place, "a state_dict", type(content).__name__)
    tensors = _flat(content)
    return {name: StoredTensor.of(f"{place}, {name}", tensors[name]) for name in tensors}


def _flat(state: Mapping[Any, object], prefix: str = "") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            tensors |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            tensors[f"{prefix}{name}"] = value
    return tensors


def _behind_prefix(
    weights: Mapping[str, Tensor], state: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Drops the prefix behind which most of the model's names stand; of several the shortest."""
    first = next(iter(weights), "")
    prefixes = [name.removesuffix(first) for name in state if f".{name}".endswith(f".{first}")]
    prefix = min(
        prefixes,
        key=lambda prefix: (sum(prefix + name not in state for name in weights), len(prefix)),
        default="",
    )
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


# Folders of torch.distributed.checkpoint, whose metadata is a pickle, here walked through


@dataclass(eq=False)
class _Record:
    """A call that a pickle would make: of a class, or of a function."""

    what: str
    arguments: Any
    state: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.state.get(name)


def distributed_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint, each read when asked for; skips all other values."""
    place, file = f"checkpoint {folder}", folder / ".metadata"
    check(file.is_file() and not file.is_symlink(), place, "a plain file .metadata", "none")
    try:
        return _tensors(_walk(file.read_bytes()), folder)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        requirement = "metadata of torch.distributed.checkpoint"
        cause, remedy = str(error) or type(error).__name__, "save it as a .safetensors file"
        raise ValueError(describe(place, requirement, cause, remedy)) from error


def _tensors(metadata: _Record, folder: Path) -> dict[str, StoredTensor]:
    files: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for index, info in metadata["storage_data"].items():
        if info["transform_descriptors"]:
            raise ValueError(f"chunks of {index['fqn']!r} that are compressed")
        first = () if index["offset"] is None else _numbers(index["offset"])
        begin, length = _numbers((info["offset"], info["length"]))
        files[str(index["fqn"]), first] = str(info["relative_path"]), begin, length
    tensors = {}
    for name, entry in metadata["state_dict_metadata"].items():
        if entry.what.endswith(".TensorStorageMetadata"):
            place, shape = f"checkpoint {folder}, {name}", _numbers(entry["size"])
            chunks = []
            for chunk in entry["chunks"]:
                first, size = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
                if any(at + n > whole for at, n, whole in zip(first, size, shape, strict=True)):
                    raise ValueError(f"a chunk of {name!r} that ends outside of {shape}")
                read = partial(_open, folder, place, size, *files[str(name), first])
                chunks.append(StoredChunk(first, size, read))
            tensors[str(name)] = StoredTensor(place, shape, tuple(chunks))
    return tensors


def _open(
    folder: Path, place: str, shape: tuple[int, ...], name: str, first_byte: int, num_bytes: int
) -> Tensor:
    """Reads a chunk: torch's loader gives the layout of the tensor, a memory map its values."""
    file = folder / name
    is_inside = Path(name).name == name and file.is_file() and not file.is_symlink()
    check(is_inside, place, "plain files of the folder", repr(name), "copy all files of it")
    requirement, remedy = f"a tensor at byte {first_byte} of {name!r}", "it was damaged"
    try:
        with file.open("rb") as stream:
            view = cast(IO[bytes], file_view(stream, first_byte, num_bytes))
            tensor = torch.load(view, map_location="meta", weights_only=True)
        size, first = tensor.element_size(), tensor.untyped_storage()._checkpoint_offset
        # Private to this process: torch takes no memory that must not be written.
        content = np.memmap(file, np.uint8, "c", first_byte, (num_bytes,))
        values = torch.from_numpy(content[first : first + tensor.untyped_storage().nbytes()])
        strides = (*(size * stride for stride in tensor.stride()), 1)
        parts = values.as_strided((*tensor.shape, size), strides, size * tensor.storage_offset())
    except Exception as error:  # of damaged bytes torch says so in many ways
        raise ValueError(describe(place, requirement, type(error).__name__, remedy)) from error
    is_whole = tuple(tensor.shape) == shape
    check(is_whole, place, f"a tensor of shape {shape}", tuple(tensor.shape), remedy)
    # Values may begin at any byte of the file: a copy is aligned.
    return parts.clone(memory_format=torch.contiguous_format).view(tensor.dtype).squeeze(-1)


def _numbers(size: Any) -> tuple[int, ...]:
    """Returns the numbers of a tuple, or of a record that stands for a torch.Size."""
    numbers = size.arguments[0] if isinstance(size, _Record) else size
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"sizes that are none: {numbers}")
    return tuple(numbers)


_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": (), "MARK": ...}
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "GLOBAL")
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")


def _walk(content: bytes) -> _Record:
    """Reads a pickle as records of what it would make: nothing is looked up, nothing is called."""
    stack: list[Any] = []
    memo: list[Any] = []
    for opcode, argument, _ in pickletools.genops(content):
        match opcode.name:
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if name in _TEXTS or name in _NUMBERS:
                stack.append(argument)
            case "MEMOIZE":
                memo.append(stack[-1])
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int(cast(int, argument))])
            case "STACK_GLOBAL":
                stack[-2:] = [f"{stack[-2]}.{stack[-1]}"]
            case "NEWOBJ" | "REDUCE":
                stack[-2:] = [_Record(*stack[-2:])]
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case "EMPTY_DICT" | "EMPTY_LIST" as name:
                stack.append({} if name == "EMPTY_DICT" else [])
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                size = int(name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "TUPLE":
                stack.append(tuple(_since_mark(stack)))
            case "APPEND" | "APPENDS" as name:
                values = [stack.pop()] if name == "APPEND" else _since_mark(stack)
                stack[-1].extend(values)
            case "SETITEM" | "SETITEMS" as name:
                values = _since_mark(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                stack[-1].update(zip(values[::2], values[1::2], strict=True))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case name:
                raise ValueError(f"the opcode {name}")
    (root,) = stack
    if not isinstance(root, _Record) or not root.what.endswith(".Metadata"):
        raise ValueError("another object")
    return root


def _since_mark(stack: list[Any]) -> list[Any]:
    values: list[Any] = []
    while (value := stack.pop()) is not ...:
        values.append(value)
    return values[::-1]
