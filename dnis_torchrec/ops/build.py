"""Builds the compiled operators once per machine, with the C++ compiler that is there."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dnis_torchrec.checks import check_known, describe

CSRC = Path(__file__).parent / "csrc"
NAMESPACE = "dnis_torchrec"
"""Namespace of all operators, as in ``torch.ops.dnis_torchrec``."""
COMPILERS = ("c++", "g++", "clang++")
"""Names tried where the variable CXX gives none."""
FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",  # else loops would round otherwise than torch does
    "-fPIC",
    "-shared",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the oldest torch: 2.11
)
NO_COMPILE = "DNIS_NO_COMPILE"
"""Environment variable: set to anything but 0, nothing is compiled or loaded, and torch's own
operators do the work."""
SECONDS_TO_COMPILE = 300
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
"""Instruction sets from narrow to wide. A library holds its loops for each, so that one serves
every machine."""
ELF_MAGIC = b"\x7fELF"
ELF_HEADER = struct.Struct("=40xQ10xHH2x")
"""Header of a 64-bit ELF file: offset of the section headers, size of one, and their number."""

logger = logging.getLogger(__name__)

_fallback_libraries: ContextVar[tuple[Path, ...]] = ContextVar("fallback_libraries", default=())


@dataclass(frozen=True, kw_only=True)
class NativeLibrary:
    """A shared library, and the sources that it is compiled from."""

    name: str
    place: str
    sources: tuple[Path, ...]
    without: str

    def is_there(self) -> bool:
        """Loads the operators, building them if need be; False where they cannot be, or
        `NO_COMPILE` forbids it."""
        if os.environ.get(NO_COMPILE, "0") not in ("", "0"):
            return False
        try:
            self.load()
        except (OSError, RuntimeError) as error:
            words = f"{error}\n{self.without}; {NO_COMPILE}=1 silences this"
            warnings.warn(words, RuntimeWarning, stacklevel=5)
            return False
        return True

    def load(self) -> None:
        """Makes the operators there in this process. A library that cannot be loaded is built
        again, once."""
        library = self.build()
        try:
            torch.ops.load_library(library)
        except OSError as error:  # most often of a machine with another C library or torch
            logger.info("building %s again, for it cannot be loaded: %s", library, error)
            torch.ops.load_library(self.build(again=True))

    def instruction_set(self, *, limit: str | None = None) -> str:
        """The instruction set that its loops run on: the widest that the machine has. All give the
        same bits."""
        if limit is not None:
            check_known("instruction set", limit, INSTRUCTION_SETS)
        function = ctypes.CDLL(str(self.build())).dnis_instruction_set
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
        return function(None if limit is None else limit.encode()).decode()

    def build(self, *, again: bool = False) -> Path:
        """Gives the library, building it if there is none for these sources and this torch yet, or
        no whole one."""
        try:
            return self._build(again)
        except (OSError, RuntimeError) as error:
            for library in _fallback_libraries.get():
                if library.name.rpartition("_")[0] == self.name:
                    logger.info("taking %s, for here: %s", library, error)
                    return library
            raise

    def _build(self, again: bool) -> Path:
        library = library_folder() / f"{self.name}_{self._key()}.so"
        if again or not library.exists() or _is_cut_off(library):
            compiler = find_compiler()
            if compiler is None:
                requirement = f"a C++ compiler: CXX or one of {COMPILERS}"
                raise self._error(requirement, "none", "install one, for example the package g++")
            library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._compile(compiler, library)
        self._check_owner(library)
        return library

    def _compile(self, compiler: str, library: Path) -> None:
        root = Path(torch.__file__).parent
        sources = [str(source) for source in self.sources if source.suffix == ".cpp"]
        where = ["-isystem", str(root / "include"), f"-L{root / 'lib'}"]

        logger.info(
            "compiling operators, once for this machine, which takes up to a minute: %s", library
        )

        with TemporaryDirectory(dir=library.parent) as folder:
            draft = Path(folder, library.name)
            command = [compiler, *FLAGS, *where, *sources, "-o", str(draft), "-ltorch_cpu", "-lc10"]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE
                )
            except subprocess.TimeoutExpired as error:
                requirement = f"{compiler} to compile it within {SECONDS_TO_COMPILE} s"
                remedy = f"set {NO_COMPILE}=1"
                raise self._error(requirement, "nothing by then", remedy) from error
            if done.returncode:
                words = "\n".join(done.stderr.strip().splitlines()[-20:])
                remedy = f"try another compiler with CXX=..., or set {NO_COMPILE}=1 and go without"
                raise self._error(f"{compiler} to compile it", f"\n{words}\n", remedy)
            os.chmod(draft, 0o755)
            os.replace(draft, library)

    def _key(self) -> str:
        """Hash of the sources, not of the compiler, so that a library outlives it, as in a slim
        serving image."""
        parts = [str(torch.__version__), platform.machine(), *FLAGS]
        digest = hashlib.sha256("\0".join(parts).encode())
        for source in self.sources:
            digest.update(source.read_bytes())
        return digest.hexdigest()[:16]

    def _check_owner(self, library: Path) -> None:
        """Code is loaded only from a file that nobody but its reader, or root, can have written."""
        status = library.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
            requirement = "a library that only you or root can write"
            raise self._error(requirement, "another", f"remove {str(library)!r}")

    def _error(self, requirement: str, value: str, remedy: str) -> RuntimeError:
        return RuntimeError(describe(self.place, requirement, value, remedy))


def _is_cut_off(library: Path) -> bool:
    """Returns whether an ELF file ends before its section headers do, its last part. Loading it
    would raise SIGBUS."""
    with library.open("rb") as stream:
        header = stream.read(ELF_HEADER.size)
    if not ELF_MAGIC.startswith(header[: len(ELF_MAGIC)]):
        return False
    if len(header) < ELF_HEADER.size:
        return True
    first_byte, header_bytes, num_headers = ELF_HEADER.unpack(header)
    return library.stat().st_size < first_byte + header_bytes * num_headers


@contextmanager
def fallback_libraries(libraries: Sequence[Path]) -> Iterator[None]:
    """Has `NativeLibrary.build` give libraries that were built elsewhere, where it cannot build
    them itself."""
    token = _fallback_libraries.set(tuple(library.resolve() for library in libraries))
    try:
        yield
    finally:
        _fallback_libraries.reset(token)


def find_compiler() -> str | None:
    """Command of the C++ compiler that builds, or None."""
    variable = os.environ.get("CXX")
    names = [variable] if variable else COMPILERS
    return next((path for name in names if (path := shutil.which(name))), None)


def library_folder() -> Path:
    """Returns the folder of libraries: ``$XDG_CACHE_HOME/dnis_torchrec``, by default
    ``~/.cache/dnis_torchrec``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dnis_torchrec"


def once(function: Callable[[], bool]) -> Callable[[], bool]:
    """Runs a function in the first call of a process, whatever thread that is in; later calls give
    what it gave."""
    lock, memo = threading.Lock(), functools.cache(function)

    @functools.wraps(function)
    def in_turn() -> bool:
        with lock:
            return memo()

    return in_turn


PACKED_SOURCES = "packed.cpp", "levels.h", "packed_kernel.h", "encode_kernel.h"
SELECT_SOURCES = "select.cpp", "blocks.h", "levels.h", "row_kernel.h"
LOOKUPS = NativeLibrary(
    name="packed",
    place="packed lookup",
    sources=tuple(map(CSRC.joinpath, PACKED_SOURCES)),
    without="lookups and codes run on torch's operators, many times slower",
)
SELECTION = NativeLibrary(
    name="select",
    place="block operators",
    sources=tuple(map(CSRC.joinpath, SELECT_SOURCES)),
    without="training steps run on torch's operators, somewhat slower",
)
