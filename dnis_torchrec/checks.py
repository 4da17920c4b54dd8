"""One wording for errors; and torch, torchrec and fbgemm that go together, without their noise.
The Makefile runs this file before torch is there: it imports the standard library alone."""

import difflib
import errno
import logging
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec

SHOWN = 20
"""Known names that one error lists."""


def describe(place: str, requirement: str, value: object, remedy: str = "") -> str:
    """Words one error."""
    verb = "" if requirement.startswith("supported ") else "expected "
    message = f"{place}: {verb}{requirement}, got {value}"
    return f"{message}; {remedy}" if remedy else message


_SYSTEM = {
    errno.ENOSPC: ("room on the disk", "make room, or choose another place"),
    errno.EROFS: ("a place that can be written to", "choose another place"),
    errno.EACCES: ("the right to read or write it", "change its rights, or choose another place"),
    errno.ENAMETOOLONG: ("a name that the file system takes", "choose a shorter one"),
    errno.ENOTDIR: ("folders on the way to it", "choose another place"),
    errno.EISDIR: ("a file", "choose another name"),
    errno.EEXIST: ("nothing there", "choose another name"),
    errno.ENOENT: ("it to be there", "check the path"),
    errno.EMFILE: ("to open one more file", "allow more of them, as ulimit -n does"),
    errno.ESTALE: ("a file that its server still has", "try again"),
}
_SYSTEM[errno.EDQUOT] = _SYSTEM[errno.ENOSPC]
_SYSTEM[errno.EPERM] = _SYSTEM[errno.EACCES]
_SYSTEM[errno.ENFILE] = _SYSTEM[errno.EMFILE]
"""Requirement and remedy of what the operating system refuses."""


def describe_error(error: BaseException) -> str:
    """Words an error in one line, also one that the operating system has raised."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror is not None:
        requirement, remedy = _SYSTEM.get(error.errno, ("the system to read and write", ""))
        files = (error.filename, error.filename2)
        names = [os.fsdecode(name) for name in files if isinstance(name, str | bytes)]
        return describe(", ".join(names) or "file system", requirement, error.strerror, remedy)
    text = str(error)
    words = [entry for number, entry in _SYSTEM.items() if os.strerror(number) in text]
    if not words or ": expected " in text:
        return text
    return describe("file system", words[0][0], " ".join(text.split()), words[0][1])


def is_of_system(error: BaseException) -> bool:
    """Returns whether the operating system has refused something, whatever wraps its error."""
    text = str(error)
    return isinstance(error, OSError) or any(os.strerror(number) in text for number in _SYSTEM)


def visible(text: str) -> str:
    """A text as a terminal may show it: what would steer the terminal becomes an escape."""
    if text.isprintable():
        return text
    # Escaped as JSON does it, so that escaped JSON has the same meaning.
    codes = ((c, f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}") for c in text)
    return "".join(c if c.isprintable() or c in "\n\t" else code for c, code in codes)


def tell(sentence: str) -> None:
    """Prints the result of a long call on a terminal; elsewhere it goes to the log."""
    if sys.stderr.isatty():
        sys.stderr.write(visible(f"{sentence}\n"))
    else:
        logging.getLogger("dnis_torchrec").info(sentence)


def check(condition: bool, place: str, requirement: str, value: object, remedy: str = "") -> None:
    """Raises a ValueError in the package's wording unless `condition` holds."""
    if not condition:
        raise ValueError(describe(place, requirement, value, remedy))


def nearest(name: str, names: Iterable[str]) -> str:
    """Names the known names that look most like `name`."""
    names = sorted(set(names))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    text = ", ".join(map(repr, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
    return f"known names: {text or 'none'}"


def check_known(kind: str, name: str, names: Iterable[str]) -> None:
    """Checks that `name` is one of `names` and shows the nearest ones if it is not."""
    names = list(names)
    if name not in names:  # looking for near names takes longer than a small lookup
        place, requirement = f"{kind} {name!r}", f"a known {kind}"
        raise ValueError(describe(place, requirement, repr(name), nearest(name, names)))


# What goes together

TORCH_OF_TORCHREC = {"1.6": "2.11", "1.7": "2.12", "1.8": "2.13", "1.9": "2.14"}
"""Releases that go together; fbgemm bears the number of torchrec."""
NEEDED_BY_TORCHREC = ("pyre-extensions", "tensordict", "torchmetrics", "tqdm")
"""Distributions that ``pip install --no-deps torchrec`` leaves out."""
BUILDS = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
PINS = "torch==2.13.0 tensordict==0.15.3 torchmetrics==1.0.3 pyre-extensions==0.0.32 tqdm"


def version() -> str:
    """The version of this package, as it is installed."""
    return metadata.version("dnis-torchrec")


def versions(
    names: Iterable[str] = ("dnis-torchrec", "torch", "torchrec", *BUILDS.values()),
) -> dict[str, str]:
    """Versions of Python and of the distributions, by default those that decide a result."""
    numbers = {"python": platform.python_version()}
    for name in names:
        # An interrupted pip uninstall leaves a folder without a version: None here,
        # FileNotFoundError once the importlib_metadata backport (torchx imports it) is there.
        with suppress(metadata.PackageNotFoundError, FileNotFoundError):
            number = metadata.version(name)
            if number is not None:
                numbers[name] = number
    return numbers


def check_dependencies(
    flavour: str | None = None, *, numbers: Mapping[str, str] | None = None
) -> None:
    """Checks that torch, torchrec and fbgemm are there and go together."""
    needs = ("torch", "torchrec", *NEEDED_BY_TORCHREC)
    numbers = versions((*needs, *BUILDS.values())) if numbers is None else numbers
    builds = [build for build in BUILDS.values() if build in numbers]
    problems = [f"no {name}" for name in needs if name not in numbers]
    if flavour is not None and BUILDS[flavour] not in builds:
        problems.append(f"no {BUILDS[flavour]}")
    elif not builds:
        problems.append("no fbgemm-gpu-cpu (or, on a CUDA machine, fbgemm-gpu)")
    if len(builds) > 1:
        problems.append("both builds of fbgemm, which overwrite each other's files")
    elif builds and getattr(find_spec("fbgemm_gpu"), "origin", None) is None:
        problems.append(f"{builds[0]} without its files, which the other build took along")
    release = _release(numbers.get("torchrec", ""))
    if release and release not in TORCH_OF_TORCHREC:
        problems.append(f"torchrec {release}, where {', '.join(TORCH_OF_TORCHREC)} are supported")
    elif release:
        needs_of_release = {"torch": TORCH_OF_TORCHREC[release]} | dict.fromkeys(builds, release)
        for name, other in needs_of_release.items():
            if name in numbers and _release(numbers[name]) != other:
                problems.append(f"{name} {numbers[name]}, where torchrec {release} needs {other}")
    if problems:
        build = BUILDS[flavour or "cpu"]
        raise ImportError(
            "torch, torchrec and fbgemm: expected releases and builds that go together, got "
            f"{'; '.join(problems)}; in a clone of dnis-torchrec run `make setup`, elsewhere "
            f"`pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install {PINS} {build}==1.8.0 && "
            "pip install --no-deps torchrec==1.8.0`"
        )


def _release(number: str) -> str:
    """``"2.13"`` of ``"2.13.0+cpu"``."""
    return ".".join(re.findall(r"\d+", number)[:2])


WARNINGS: tuple[tuple[str, str], ...] = (
    # The CPU build of fbgemm has no SSD tables.
    (r"\s*\S*\s*Failed to import. fbgemm_gpu", "fbgemm_gpu"),
    # torchrec imports fbgemm by its old module name and compiles with the old compiler.
    (r"\s*\S*\s*The Python module fbgemm_gpu\.split_table_batched_embeddings_ops", "fbgemm_gpu"),
    (r"`torch\.jit\.\w+` is deprecated", r"torch\.jit"),
    # torchx reads its components so, on Python 3.12.
    (r"ast\.Str is deprecated", r"torchx\.specs\.file_linter"),
    # torchrec pins this torchmetrics.
    (r"distutils Version classes are deprecated", "torchmetrics"),
    # The replacement that it names does not know torchrec's own optimizers.
    (r"This API is deprecated\. Please use Pytorch Distributed's _apply", r"torchrec\.optim"),
    # What DistributedModelParallel does by default: wrap in DDP, plan, keep ShardedTensors.
    (r"`broadcast_buffers` is deprecated", r"torchrec\.distributed"),
    (r"HeuristicalStorageReservation is known to cause issues", r"torchrec\.distributed\.planner"),
    (r"Please use DTensor instead and we are", r"torch\.distributed"),
    # How torchrec 1.6 asks which device a process group works on.
    (r"`_get_pg_default_device` will be", r"torchrec\.distributed"),
    (r"Multiple backends are registered with this Process", r"torchrec\.distributed"),
    # Data-parallel tables on CPU; a test holds their gradients against the unsharded model's.
    (r"fbgemm..dense_embedding_codegen_lookup_function. an autograd kernel", r"torch\.autograd"),
)
"""Warnings about a dependency's own inside, which no user can act on: message, module."""

LOGS: tuple[tuple[str, str], ...] = (
    ("", "Could not determine LOCAL_WORLD_SIZE from environment, falling back to WORLD_SIZE"),
    ("", "Sharding spec not found for "),
    # Of fbgemm 1.6, which does not know itself; check_dependencies does.
    ("", "\n            \033[33m\n            _fbgemm_torch_compat_table has no entry for 1.6"),
    ("torch.fx._symbolic_trace", "is_fx_tracing will return true for both "),
    ("torchrec.distributed.planner.storage_reservations", "There is a known issue with TorchRec's"),
    ("torchrec.distributed.planner.types", "The topology was constructed directly rather than"),
    ("torchrec.distributed.train_pipeline.postproc", "Postproc module "),  # no stream on a CPU
    ("torchrec.distributed.utils", "Sharding Type is data_parallel, caching params will be"),
)
"""Log lines of the same sort: logger, how the line begins."""


def silence_noise() -> None:
    """Silences `WARNINGS` and `LOGS`, each by name, and nothing else."""
    for message, module in WARNINGS:
        warnings.filterwarnings("ignore", message=message, module=module)
    for logger, _ in LOGS:
        logging.getLogger(logger or None).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    logger = "" if record.name == "root" else record.name
    return not any(name == logger and record.getMessage().startswith(begin) for name, begin in LOGS)


if __name__ == "__main__":
    try:
        check_dependencies(sys.argv[1])
    except ImportError as error:
        sys.exit(f"error: {error}")
