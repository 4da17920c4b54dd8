"""Triton kernels run on numpy: a stand-in for what they use of triton, one program after the other."""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dnis_torchrec.ops import batches_triton

DEVICE, IS_INTERPRETED = "cuda" if torch.cuda.is_available() else "cpu", os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(batches_triton.triton is None, reason="needs Triton, which comes with torch for CUDA")
needs_compilation = pytest.mark.skipif(IS_INTERPRETED, reason="interpreted, nothing is compiled")
needs_device = pytest.mark.skipif(DEVICE == "cpu" and not IS_INTERPRETED, reason="needs CUDA, or TRITON_INTERPRET=1")
KERNEL_WAYS = ["numpy", pytest.param("triton", marks=[needs_triton, needs_device])]
"""Ways to run kernels: one program after the other, and as Triton does, on `DEVICE`."""


class Value(np.ndarray):
    """A block of numbers, or one."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        """Cast, or the same bits under another name; integers become addresses."""
        if isinstance(dtype, PointerType):
            return Pointer(self, dtype.dtype)
        return self.view(dtype) if bitcast else value(self.astype(dtype))


def value(numbers: Any, dtype: Any = None) -> Value:
    return np.asarray(numbers, dtype=dtype).view(Value)


class PointerType:
    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)


class Pointer:
    """Addresses of numbers of one type."""

    def __init__(self, addresses: Any, dtype: np.dtype) -> None:
        self.addresses, self.dtype = value(addresses, np.int64), dtype

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.addresses + np.asarray(steps, np.int64) * self.dtype.itemsize, self.dtype)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.addresses[index], self.dtype)


class Memory:
    """The tensors of a launch: nothing else may be touched, but for the rest of a word that a byte of theirs is in."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.spans = [(tensor.data_ptr() & ~3, (tensor.data_ptr() + tensor.nbytes + 3) & ~3) for tensor in tensors]

    def bytes_at(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """Which tensor every number of so many bytes lies in: its memory, and the positions of its bytes there."""
        assert not (addresses % size).any(), "not aligned"
        tensor, found = np.full(len(addresses), -1), []
        for index, (first, last) in enumerate(self.spans):
            tensor[(tensor < 0) & (addresses >= first) & (addresses + size <= last)] = index
        assert (tensor >= 0).all(), "outside of all tensors"
        for index in np.unique(tensor):
            first, last = self.spans[index]
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first))
            found.append((memory, (addresses[tensor == index] - first)[:, None] + np.arange(size)))
        return tensor, found

    def read(self, addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
        tensor, found = self.bytes_at(addresses, dtype.itemsize)
        numbers = np.empty(len(addresses), dtype)
        for index, (memory, places) in zip(np.unique(tensor), found, strict=True):
            numbers[tensor == index] = np.ascontiguousarray(memory[places]).view(dtype)[:, 0]
        return numbers

    def write(self, addresses: np.ndarray, numbers: np.ndarray) -> None:
        tensor, found = self.bytes_at(addresses, numbers.itemsize)
        for index, (memory, places) in zip(np.unique(tensor), found, strict=True):
            memory[places] = np.ascontiguousarray(numbers[tensor == index]).view(np.uint8).reshape(places.shape)


class Language:
    """The part of `triton.language` that the kernels of the project use."""

    int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
    uint8, uint16, uint32, float16, float32 = np.uint8, np.uint16, np.uint32, np.float16, np.float32
    constexpr = None

    def __init__(self, memory: Memory) -> None:
        self.memory, self.program = memory, (0, 0, 0)

    def program_id(self, axis: int) -> Value:
        return value(self.program[axis], np.int32)

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Value:
        addresses, masks = np.broadcast_arrays(pointer.addresses, mask)
        loaded = np.full(addresses.shape, other, pointer.dtype)
        loaded[masks] = self.memory.read(np.asarray(addresses)[masks], pointer.dtype)
        return value(loaded)

    def store(self, pointer: Pointer, numbers: Any, mask: Any = True) -> None:
        assert np.ndim(mask) <= np.ndim(pointer.addresses), "a block of masks for one address"
        addresses, stored, masks = np.broadcast_arrays(pointer.addresses, numbers, mask)
        self.memory.write(np.asarray(addresses)[masks], np.asarray(stored, pointer.dtype)[masks])

    def arange(self, first: int, last: int) -> Value:
        size = last - first
        assert size & (size - 1) == 0, "blocks are powers of two"
        return value(np.arange(first, last, dtype=np.int32))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Value:
        return value(np.zeros(shape, dtype))

    def sum(self, numbers: Any, axis: int) -> Value:
        return value(np.sum(numbers, axis=axis, dtype=numbers.dtype))

    def max(self, numbers: Any, axis: int) -> Value:
        return value(np.max(numbers, axis=axis))

    def where(self, condition: Any, this: Any, that: Any) -> Value:
        found = np.where(condition, this, that)
        is_literal = isinstance(this, int) and isinstance(that, int)
        return value(found, np.int32 if is_literal else None)

    def div_rn(self, numerator: Any, denominator: Any) -> Value:
        return value(np.divide(numerator, denominator, dtype=np.float32))

    broadcast_to = staticmethod(lambda numbers, shape: value(np.broadcast_to(numbers, shape)))
    abs = staticmethod(lambda numbers: value(np.abs(numbers)))
    zeros_like = staticmethod(lambda like: value(np.zeros_like(like)))
    maximum = staticmethod(lambda this, that: value(np.maximum(this, that)))
    minimum = staticmethod(lambda this, that: value(np.minimum(this, that)))
    static_range = staticmethod(range)
    pointer_type = PointerType


class Launched:
    """A kernel: `kernel[grid](...)` runs every program."""

    def __init__(self, function: Callable[..., None], language: Language) -> None:
        self.function, self.language = function, language

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        names = inspect.signature(self.function).parameters

        def launch(*arguments: Any, **constants: Any) -> None:
            tensors = [part for part in arguments if isinstance(part, torch.Tensor)]
            self.language.memory.spans += Memory(tensors).spans
            taken = [self._pointer(part) if isinstance(part, torch.Tensor) else part for part in arguments]
            options = {name: part for name, part in constants.items() if name in names}
            with np.errstate(invalid="ignore"):  # a GPU does not say that infinity times 0 is no number
                for program in product(*map(range, grid)):
                    self.language.program = program
                    self.function(*taken, **options)

        return launch

    @staticmethod
    def _pointer(tensor: torch.Tensor) -> Pointer:
        assert tensor.is_contiguous()
        return Pointer(tensor.data_ptr(), np.dtype(str(tensor.dtype).removeprefix("torch.")))


def without_triton(patch: pytest.MonkeyPatch, modules: Sequence[ModuleType], tables: Sequence[torch.Tensor]) -> None:
    """Has the kernels of modules run here: their names end in ``_kernel``."""
    language = Language(Memory(list(tables)))
    sizes = {"next_power_of_2": lambda n: 1 << (n - 1).bit_length(), "cdiv": lambda n, by: -(-n // by)}
    patch.setattr(batches_triton, "triton", SimpleNamespace(**sizes))
    for module in (batches_triton, *modules):
        patch.setattr(module, "tl", language, raising=False)
        for name, part in list(vars(module).items()):
            function = getattr(part, "fn", part)  # what Triton compiles; without it there is no more than that
            if name.endswith("_kernel"):
                patch.setattr(module, name, Launched(function, language))
            elif function is not part:
                patch.setattr(module, name, function)


def check_compiled(kernel: Any, types: Mapping[str, str], fixed: Mapping[str, Any], num_warps: int) -> None:
    """Checks that no multiplication is fused into an addition, and that nothing is added atomically."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    parameters = inspect.signature(kernel.fn).parameters.values()
    constants = {part.name: part.default for part in parameters if part.default is not part.empty} | dict(fixed)
    types = {name: part for name, part in types.items() if name not in constants}
    source = ASTSource(fn=kernel, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    options = {"enable_fp_fusion": False, "num_warps": num_warps}  # as the launch says
    assembly = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "st.global" in assembly
    assert "fma" not in assembly
    assert "atom" not in assembly
