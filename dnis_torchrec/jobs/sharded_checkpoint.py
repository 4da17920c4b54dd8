"""Folders of torch.distributed.checkpoint, read without unpickling: what a sharded model was saved as.

.metadata              a pickle: names, shapes, and where in which file each chunk of a tensor stands
__0_0.distcp, ..       chunks, each as torch.save writes a tensor, one after the other

A pickle is a program that makes objects by calling what it names. Here its opcodes are walked through by the standard
library's disassembler and nothing is called: what the pickle would have made by a call becomes a `_Made`, a record of
what was named and with which arguments. Chunks are read by torch.load with weights_only.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.storage.foreign_folders import is_plain_file

METADATA = ".metadata"
_MARK = object()


@dataclass(eq=False)
class _Made:
    """A record of a call: of a class, or of a function."""

    what: str
    arguments: tuple[Any, ...]
    state: Any = None

    def __getitem__(self, name: str) -> Any:
        return _value(self.state, name)


@dataclass(eq=False)
class _Pairs:
    """A dict, whose keys may be objects that were never made."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


def _value(pairs: _Pairs, name: str) -> Any:
    return next((value for key, value in pairs.items if key == name), None)


@dataclass(frozen=True)
class _Chunk:
    """Where a chunk of a tensor stands: its first place in the tensor; its file, first byte and number of bytes."""

    offsets: tuple[int, ...]
    file: str
    first_byte: int
    num_bytes: int


class ShardedCheckpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint, read when they are asked for; what is no tensor is passed over.

    Args:
        folder: what ``torch.distributed.checkpoint.save`` wrote.

    Raises:
        ValueError: if it is damaged, links or leads out of the folder, or is in a layout that is not known.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        place, file = f"checkpoint {folder}", folder / METADATA
        check(is_plain_file(file), place, "a plain file .metadata", "none")
        try:
            self._read(_walked(file.read_bytes()))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            requirement, remedy = "metadata of torch.distributed.checkpoint", "save it again, or as a .safetensors file"
            raise ValueError(describe(place, requirement, str(error) or type(error).__name__, remedy)) from error

    def _read(self, metadata: _Made) -> None:
        for name, stored in metadata["state_dict_metadata"].items:
            if stored.what.endswith(".TensorStorageMetadata"):
                self._shapes[str(name)] = _numbers(stored["size"])
                self._chunks[str(name)] = []
        for index, info in metadata["storage_data"].items:
            name = str(index["fqn"])
            if name not in self._shapes:
                continue
            offsets = index["offset"]
            at = (0,) * len(self._shapes[name]) if offsets is None else _numbers(offsets)
            if info["transform_descriptors"]:
                raise ValueError(f"chunks of {name!r} that are compressed")
            first_byte, num_bytes = _numbers((info["offset"], info["length"]))
            self._chunks[name].append(_Chunk(at, str(info["relative_path"]), first_byte, num_bytes))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, name: str) -> Tensor:
        """Puts a tensor together from its chunks."""
        shape, place = self._shapes[name], f"checkpoint {self._folder}, {name}"
        parts = [(chunk, self._read_chunk(chunk, place)) for chunk in self._chunks[name]]
        held = sum(part.numel() for _, part in parts)
        size = torch.Size(shape).numel()
        check(bool(parts) and held == size, place, f"chunks of {size} values", held, "copy all files of it")
        whole = torch.empty(shape, dtype=parts[0][1].dtype)
        for chunk, part in parts:
            ends = [first + extent for first, extent in zip(chunk.offsets, part.shape, strict=True)]
            fits = all(end <= extent for end, extent in zip(ends, shape, strict=True))
            check(fits, place, f"chunks within {shape}", f"one that ends at {ends}")
            whole[tuple(map(slice, chunk.offsets, ends))] = part
        return whole

    def _read_chunk(self, chunk: _Chunk, place: str) -> Tensor:
        file = self._folder / chunk.file
        is_inside = Path(chunk.file).name == chunk.file and is_plain_file(file)
        check(is_inside, place, "plain files of the folder", repr(chunk.file), "copy all files of it")
        with file.open("rb") as stream:
            stream.seek(chunk.first_byte)
            content = io.BytesIO(stream.read(chunk.num_bytes))
        try:
            part = torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # of damaged bytes torch says so in many ways
            requirement = f"a tensor at byte {chunk.first_byte} of {chunk.file!r}"
            raise ValueError(describe(place, requirement, type(error).__name__, "it was damaged")) from error
        fits = isinstance(part, Tensor) and part.dim() == len(chunk.offsets)
        check(fits, place, f"a tensor of {len(chunk.offsets)} dims", type(part).__name__)
        return part


def _numbers(size: Any) -> tuple[int, ...]:
    """A torch.Size that was never made, or a tuple."""
    numbers = size.arguments[0] if isinstance(size, _Made) else size
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"sizes that are none: {numbers}")
    return tuple(numbers)


def _walked(content: bytes) -> _Made:
    """Reads a pickle as records of what it would make."""
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(content):
        machine.step(opcode.name, argument)
    (root,) = machine.stack
    if not isinstance(root, _Made) or not root.what.endswith(".Metadata"):
        raise ValueError("another object")
    return root


class _Machine:
    """The stack and the memo of a pickle that is walked through."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Takes one opcode."""
        stack = self.stack
        if name in _VALUES:
            stack.append(_VALUES[name](argument))
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[int(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(argument)])
        elif name in _ON_TOP:
            count, make = _ON_TOP[name]
            taken = [stack.pop() for _ in range(count)][::-1]
            stack.append(make(*taken))
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name == "APPENDS":
            values = self._since_mark()
            stack[-1].extend(values)
        elif name == "SETITEMS":
            values = self._since_mark()
            stack[-1].items.extend(zip(values[::2], values[1::2], strict=True))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"the opcode {name}")

    def _since_mark(self) -> list[Any]:
        taken: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            taken.append(value)
        return taken[::-1]


def _built(made: _Made, state: Any) -> _Made:
    made.state = state
    return made


def _with_value(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


def _with_item(pairs: _Pairs, key: Any, value: Any) -> _Pairs:
    pairs.items.append((key, value))
    return pairs


_VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"), lambda text: text),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "BINFLOAT"), lambda number: number),
    "GLOBAL": lambda name: name.replace(" ", "."),
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "NONE": lambda _: None,
    "EMPTY_DICT": lambda _: _Pairs(),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "MARK": lambda _: _MARK,
}
"""Opcodes that put a value on the stack."""
_ON_TOP: dict[str, tuple[int, Callable[..., Any]]] = {
    "STACK_GLOBAL": (2, lambda module, name: f"{module}.{name}"),
    "NEWOBJ": (2, _Made),
    "REDUCE": (2, _Made),
    "BUILD": (2, _built),
    "TUPLE1": (1, lambda *values: values),
    "TUPLE2": (2, lambda *values: values),
    "TUPLE3": (3, lambda *values: values),
    "APPEND": (2, _with_value),
    "SETITEM": (3, _with_item),
}
"""Opcodes that replace what is on top: how many values they take, and what becomes of them."""
