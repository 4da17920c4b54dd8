"""Builds the compiled lookups (CSR, mixed-dimension) once per machine, with the C++ compiler that is there.

The first CSR module of a process builds it, unless ``load_operator()`` was called once at installation. The source is
written against torch's stable ABI, so a build takes seconds and needs neither ninja nor the whole of torch's headers.
"""

from __future__ import annotations

from pathlib import Path

from dnis_torchrec.native_build import (
    INSTRUCTION_SETS,
    NO_COMPILE,
    SECONDS_TO_COMPILE,
    NativeLibrary,
    cache_folder,
    chosen_instruction_set,
    find_compiler,
)

__all__ = [
    "INSTRUCTION_SETS",
    "NO_COMPILE",
    "SOURCES",
    "build",
    "cache_folder",
    "find_compiler",
    "instruction_set",
    "load",
]

SOURCES = Path(__file__).parent / "csrc"


def build(*, compiler: str | None = None) -> Path:
    """Gives the compiled library, building it if there is none for this source and this torch yet.

    Args:
        compiler: command of the C++ compiler; by default the variable CXX, else the first there is.

    Returns:
        Path of the library, see `NativeLibrary.build`.

    Raises:
        RuntimeError, OSError: see `NativeLibrary.build`.
    """
    return _library().build(compiler=compiler, seconds=SECONDS_TO_COMPILE)


def load() -> None:
    """Makes the operators there in this process, from what `build` gives.

    Raises:
        RuntimeError, OSError: see `NativeLibrary.load`.
    """
    _library().load()


def _library() -> NativeLibrary:
    return NativeLibrary(name="csr_embedding_bag", place="CSR lookup", sources=SOURCES)


def instruction_set(*, limit: str | None = None) -> str:
    """The instruction set that compiled lookups run on: the widest that the machine has. All give the same bits.

    Args:
        limit: from now on use at most ``"baseline"``, ``"avx2"`` or ``"avx512"``; None leaves it as it is.

    Returns:
        ``"avx512"``, ``"avx2"`` or ``"baseline"``.

    Raises:
        ValueError: for an unknown limit.
        RuntimeError, OSError: see `build`.
    """
    return chosen_instruction_set(build(), "dnis_instruction_set", limit)
