"""Files that are written whole or not at all: who reads one sees what it was or what it is, never a
part."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.storage.json_files import parse_json
from dnis_torchrec.storage.workplaces import PARTIAL, workplace

_T = TypeVar("_T")


@contextmanager
def written_whole(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Lends a path to write a file to, which takes the file's place once the block has ended well."""
    try:
        with workplace(path) as place:
            yield place.new
            place.settle_modes()
            if durable:
                with place.new.open("rb") as file:
                    os.fsync(file.fileno())
            os.replace(place.new, path)
    except SafetensorError as error:  # its way to tell of a full disk
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    except OSError as error:
        if error.errno is not None and (error.filename is None or PARTIAL in str(error.filename)):
            error.filename, error.filename2 = str(path), None
        raise


def write_bytes(path: Path, content: bytes, *, durable: bool = False) -> Path:
    """Writes a file whole or not at all."""
    path = Path(path)
    check(
        path.parent.is_dir(), str(path), "an existing folder", str(path.parent), "create it first"
    )
    with written_whole(path, durable=durable) as unfinished:
        unfinished.write_bytes(content)
    return path


def write_text(path: Path, text: str, *, durable: bool = False) -> Path:
    """Writes UTF-8 text as `write_bytes` does; returns `path`."""
    return write_bytes(path, text.encode("utf-8"), durable=durable)


def write_json(path: Path, content: Any) -> Path:
    """Writes an indented JSON document and a newline whole or not at all, see `written_whole`;
    returns `path`."""
    return write_text(path, json.dumps(content, indent=1) + "\n")


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors without shared storage (tied weights), as safetensors wants them."""
    seen: set[int] = set()
    owned = {}
    for name, value in tensors.items():
        is_shared = value.data_ptr() in seen
        seen.add(value.data_ptr())
        owned[name] = value.detach().clone() if is_shared else value.detach().contiguous()
    return owned


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], kind: str, head: Mapping[str, Any]
) -> None:
    """Writes a safetensors file with a JSON head whole or not at all, see `written_whole`."""
    with written_whole(path) as unfinished:
        save_file(dict(tensors), unfinished, metadata={kind: json.dumps(head)})


def read_tensors(path: Path, kind: str, head: type[_T]) -> tuple[dict[str, Tensor], _T]:
    """Reads a file that `write_tensors` wrote."""
    with path.open("rb"):  # safetensors says of a file that it cannot open not even which
        pass
    try:
        with safe_open(path, framework="pt") as file:
            described = (file.metadata() or {}).get(kind, "")
            check(bool(described), str(path), f"a file of {kind.replace('_', ' ')}", "another file")
            tensors = _TensorsOf(path, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(
            describe(str(path), "a whole safetensors file", str(error), "use another one")
        ) from error
    return tensors, parse_json(described, head, str(path), remedy="use another one")


class _TensorsOf(dict[str, Tensor]):
    """The tensors of a file, which a head may name wrongly."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._path = path

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(describe(str(self._path), f"a tensor {name!r}", "none", "use another one"))
