"""AOTInductor packages: the model compiled for this kind of CPU, its constants outside,
memory-mapped by who loads it."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.export import ExportedProgram

from dnis_torchrec.checks import describe
from dnis_torchrec.ops.native_build import find_compiler

COMPILED_FILE = "model.pt2"
CONSTANTS_FILE = "constants.safetensors"
INDEX_FILE = "constants.index"

DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Spelling of dtypes in safetensors -> spelling in the index."""


def write_aot_inductor(program: ExportedProgram, folder: Path) -> None:
    """Compiles a program and writes model.pt2, constants.safetensors and constants.index. Takes
    about half a minute."""
    if find_compiler() is None:
        remedy = "install one, for example the package g++, or take format 'torchscript'"
        raise RuntimeError(describe("AOTInductor", "a C++ compiler", "none", remedy))
    file = folder / COMPILED_FILE
    with warnings.catch_warnings():
        # what torch's compiler says about torch
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(file),
            inductor_configs={"aot_inductor.package_constants_in_so": False},
        )
    held = {**program.state_dict, **program.constants}
    names = torch._inductor.aoti_load_package(str(file)).get_constant_fqns()
    constants = {name: held[name].detach().contiguous() for name in sorted(names)}
    save_file(_unshared(constants), folder / CONSTANTS_FILE)
    write_index(folder / CONSTANTS_FILE, folder / INDEX_FILE)


def write_index(constants: Path, index: Path) -> None:
    """Writes where each tensor of a safetensors file stands: lines of ``dtype offset bytes dims
    size .. size name``."""
    with constants.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(header_bytes))
    lines = []
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            sizes = entry["shape"]
            fields = [
                DTYPES[entry["dtype"]],
                8 + header_bytes + first,
                last - first,
                len(sizes),
                *sizes,
                name,
            ]
            lines.append(" ".join(str(field) for field in fields))
    index.write_text("\n".join(lines) + "\n", encoding="utf-8")


class AotInductorModel:
    """A loaded AOTInductor package. Safe to call from several threads, which then take turns."""

    def __init__(self, folder: Path) -> None:
        self._loaded = torch._inductor.aoti_load_package(str(folder / COMPILED_FILE))
        # kept, because the compiled model reads these very tensors, which lie in the mapped file
        self._constants = load_file(folder / CONSTANTS_FILE)
        self._loaded.load_constants(self._constants, check_full_update=True, user_managed=True)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Predicts. What is compiled reads memory in the order that it was traced with, whatever
        the strides."""
        return self._loaded(*(tensor.contiguous() for tensor in inputs))


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory, as tied weights do."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        shared = tensor.untyped_storage().data_ptr() in seen and tensor.numel() > 0
        seen.add(tensor.untyped_storage().data_ptr())
        out[name] = tensor.clone() if shared else tensor
    return out
