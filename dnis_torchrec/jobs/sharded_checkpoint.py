"""Folders of torch.distributed.checkpoint, read without unpickling: what a sharded model was saved
as."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from dnis_torchrec.checks import check, describe
from dnis_torchrec.jobs.stored_tensors import Cut, StoredChunk, StoredTensor

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


class _Content(io.RawIOBase):
    """Bytes of a mapped file as a stream: what is not read stays in the file."""

    def __init__(self, content: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[
            whence
        ] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any, /) -> int:
        part = self._content[self._at : self._at + len(target)]
        target[: len(part)] = part.tobytes()
        self._at += len(part)
        return len(part)


class ShardedCheckpoint(Mapping[str, StoredTensor]):
    """The tensors of a checkpoint, read as they are asked for; what is no tensor is passed over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, StoredTensor] = {}
        place, file = f"checkpoint {folder}", folder / METADATA
        check(file.is_file() and not file.is_symlink(), place, "a plain file .metadata", "none")
        try:
            self._read(_walked(file.read_bytes()))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            requirement, remedy = (
                "metadata of torch.distributed.checkpoint",
                "save it again, or as a .safetensors file",
            )
            raise ValueError(
                describe(place, requirement, str(error) or type(error).__name__, remedy)
            ) from error

    def _read(self, metadata: _Made) -> None:
        places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
        for index, info in metadata["storage_data"].items:
            if info["transform_descriptors"]:
                raise ValueError(f"chunks of {index['fqn']!r} that are compressed")
            first = () if index["offset"] is None else _numbers(index["offset"])
            first_byte, num_bytes = _numbers((info["offset"], info["length"]))
            places[str(index["fqn"]), first] = str(info["relative_path"]), first_byte, num_bytes
        for name, stored in metadata["state_dict_metadata"].items:
            if not stored.what.endswith(".TensorStorageMetadata"):
                continue
            place, shape = f"checkpoint {self._folder}, {name}", _numbers(stored["size"])
            chunks = []
            for described in stored["chunks"]:
                first, size = _numbers(described["offsets"]), _numbers(described["sizes"])
                if any(
                    begin + extent > whole
                    for begin, extent, whole in zip(first, size, shape, strict=True)
                ):
                    raise ValueError(f"a chunk of {name!r} that ends outside of {shape}")
                open_chunk = partial(self._open, place, size, *places[str(name), first])
                chunks.append(StoredChunk(first, size, open_chunk))
            self._tensors[str(name)] = StoredTensor(place, shape, tuple(chunks))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> StoredTensor:
        """The tensor of that name, of which nothing was read yet."""
        return self._tensors[name]

    def _open(
        self, place: str, shape: tuple[int, ...], name: str, first_byte: int, num_bytes: int
    ) -> Cut:
        """Maps a chunk into memory; torch's loader, which is given no storage, says where in it the
        values stand."""
        file = self._folder / name
        is_inside = Path(name).name == name and file.is_file() and not file.is_symlink()
        check(is_inside, place, "plain files of the folder", repr(name), "copy all files of it")
        requirement, remedy = f"a tensor at byte {first_byte} of {name!r}", "it was damaged"
        try:
            # Private to this process: torch takes no memory that must not be written.
            content = np.memmap(file, np.uint8, "c", first_byte, (num_bytes,))
            described = torch.load(
                cast(IO[bytes], _Content(content)), map_location="meta", weights_only=True
            )
            size, first = described.element_size(), described.untyped_storage()._checkpoint_offset
            values = torch.from_numpy(content[first : first + described.untyped_storage().nbytes()])
            strides = (*(size * stride for stride in described.stride()), 1)
            parts = values.as_strided(
                (*described.shape, size), strides, size * described.storage_offset()
            )
        except Exception as error:  # of damaged bytes torch says so in many ways
            raise ValueError(describe(place, requirement, type(error).__name__, remedy)) from error
        check(
            tuple(described.shape) == shape,
            place,
            f"a tensor of shape {shape}",
            tuple(described.shape),
            remedy,
        )
        # Values may begin at any byte of the file, and are aligned when they are copied.
        return lambda at: (
            parts[at].clone(memory_format=torch.contiguous_format).view(described.dtype).squeeze(-1)
        )


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
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"), lambda text: text
    ),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "BINFLOAT"), lambda number: number
    ),
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
