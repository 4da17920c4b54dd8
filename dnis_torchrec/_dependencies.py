"""The ground the package stands on: torch, torchrec and fbgemm fit together, and do not talk about
themselves."""

from __future__ import annotations

import logging
import platform
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

TORCH_OF_TORCHREC = {"1.6": "2.11", "1.7": "2.12", "1.8": "2.13", "1.9": "2.14"}
"""Releases that go together; fbgemm bears the number of torchrec."""

NEEDED_BY_TORCHREC = ("pyre-extensions", "tensordict", "torchmetrics", "tqdm")
"""Distributions that torchrec imports; a bare ``pip install --no-deps torchrec`` leaves them out.
"""

PINNED = "torch==2.13.0 tensordict==0.15.3 torchmetrics==1.0.3 pyre-extensions==0.0.32 tqdm"
BUILDS = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}

WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    # The CPU build of fbgemm has no SSD tables.
    (r"\s*\S*\s*Failed to import. fbgemm_gpu", DeprecationWarning, "fbgemm_gpu"),
    # torchrec imports fbgemm by its old module name and compiles with the old compiler.
    (
        r"\s*\S*\s*The Python module fbgemm_gpu\.split_table_batched_embeddings_ops is now DEPRECATED",
        DeprecationWarning,
        "fbgemm_gpu",
    ),
    (r"`torch\.jit\.(script|interface)` is deprecated", DeprecationWarning, r"torch\.jit"),
    (
        r"`torch\.jit\.\w+` is deprecated",
        FutureWarning,
        r"torch\.jit",
    ),  # the same and more since torch 2.14
    # torchx reads its components so, on Python 3.12.
    (r"ast\.Str is deprecated", DeprecationWarning, r"torchx\.specs\.file_linter"),
    # torchrec pins this torchmetrics.
    (r"distutils Version classes are deprecated", DeprecationWarning, "torchmetrics"),
    # The replacement it names does not know torchrec's own optimizers.
    (
        r"This API is deprecated\. Please use Pytorch Distributed's _apply_optimizer_in_backward",
        DeprecationWarning,
        r"torchrec\.optim",
    ),
    # What DistributedModelParallel does by default: wrap in DDP, plan, keep ShardedTensors in
    # state_dict.
    (r"`broadcast_buffers` is deprecated", FutureWarning, r"torchrec\.distributed"),
    (
        r"HeuristicalStorageReservation is known to cause issues",
        FutureWarning,
        r"torchrec\.distributed\.planner",
    ),
    (
        r"Please use DTensor instead and we are deprecating ShardedTensor",
        FutureWarning,
        r"torch\.distributed",
    ),
    # How torchrec 1.6 asks which device a process group works on.
    (
        r"(`_get_pg_default_device` will be deprecated|Multiple backends are registered with this ProcessGroup)",
        UserWarning,
        r"torchrec\.distributed",
    ),
    # Data-parallel tables on CPU. Their gradients are those of the unsharded model:
    # tests/test_dependencies.py.
    (
        r"fbgemm..dense_embedding_codegen_lookup_function. an autograd kernel was not registered",
        UserWarning,
        r"torch\.autograd",
    ),
)
"""Warnings about a dependency's own inside, which no user can act on: (message, category, module),
as regexes."""

LOGS: tuple[tuple[str, str], ...] = (
    ("", "Could not determine LOCAL_WORLD_SIZE from environment, falling back to WORLD_SIZE"),
    ("", "Sharding spec not found for "),
    # Of fbgemm 1.6, which does not know itself; check_dependencies does.
    ("", "\n            \033[33m\n            _fbgemm_torch_compat_table has no entry for 1.6"),
    ("torch.fx._symbolic_trace", "is_fx_tracing will return true for both "),
    (
        "torchrec.distributed.planner.storage_reservations",
        "There is a known issue with TorchRec's dense tensor size",
    ),
    (
        "torchrec.distributed.planner.types",
        "The topology was constructed directly rather than via TopologyFactory",
    ),
    (
        "torchrec.distributed.train_pipeline.postproc",
        "Postproc module ",
    ),  # "has no dist stream": there is none on a CPU
    (
        "torchrec.distributed.utils",
        "Sharding Type is data_parallel, caching params will be ignored",
    ),
)
"""Log lines of the same sort: (logger, how the line begins)."""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The distributions of an environment, and the state of its torch and fbgemm."""

    versions: Mapping[str, str]
    torch_has_gpu: bool | None
    fbgemm_is_whole: bool


def find_installed() -> Installed:
    """Reads the metadata of this environment; imports nothing."""
    versions = {}
    for name in ("torch", "torchrec", *BUILDS.values(), *NEEDED_BY_TORCHREC):
        try:
            version = metadata.version(name)
        except (metadata.PackageNotFoundError, FileNotFoundError):
            continue
        # An interrupted pip uninstall leaves a folder without a version: None here,
        # FileNotFoundError once the importlib_metadata backport (torchx imports it) has taken over
        # the search.
        if version is not None:
            versions[name] = version
    spec = find_spec("fbgemm_gpu")
    return Installed(
        versions=versions,
        torch_has_gpu=_torch_has_gpu() if "torch" in versions else None,
        fbgemm_is_whole=spec is not None and spec.origin is not None,
    )


def _torch_has_gpu() -> bool | None:
    """Reads torch/version.py: the version number itself says nothing, as the default Linux build
    bears no local tag."""
    try:
        source = str(metadata.distribution("torch").locate_file("torch/version.py"))
        with open(source, encoding="utf-8") as lines:
            values = dict(
                re.findall(r"^(cuda|hip)\b[^=\n]*=[ \t]*(.+?)[ \t]*$", lines.read(), re.MULTILINE)
            )
    except OSError:
        return None
    return any(value != "None" for value in values.values()) if values else None


def check_dependencies(flavour: str | None = None, *, installed: Installed | None = None) -> None:
    """Checks that torch, torchrec and fbgemm are there and go together."""
    installed = find_installed() if installed is None else installed
    problems = _missing(installed) + _mismatched(installed) + _wrong_build(installed, flavour)
    if problems:
        raise ImportError(
            "torch, torchrec and fbgemm: expected releases and builds that go together, got "
            f"{'; '.join(problems)}; {_remedy(installed, flavour)}"
        )


def _missing(installed: Installed) -> list[str]:
    versions = installed.versions
    names = [name for name in ("torch", "torchrec", *NEEDED_BY_TORCHREC) if name not in versions]
    if not any(build in versions for build in BUILDS.values()):
        names.append("fbgemm-gpu-cpu (or, on a CUDA machine, fbgemm-gpu)")
    return [f"no {', no '.join(names)}"] if names else []


def _mismatched(installed: Installed) -> list[str]:
    versions, problems = installed.versions, []
    torchrec = versions.get("torchrec")
    if torchrec is None:
        return []
    release = _release(torchrec)
    torch_release = TORCH_OF_TORCHREC.get(release)
    if torch_release is None:
        return [f"torchrec {torchrec}, where {', '.join(TORCH_OF_TORCHREC)} are supported"]
    if "torch" in versions and _release(versions["torch"]) != torch_release:
        problems.append(
            f"torch {versions['torch']} where torchrec {torchrec} needs torch {torch_release}"
        )
    for build in BUILDS.values():
        if build in versions and _release(versions[build]) != release:
            problems.append(
                f"{build} {versions[build]} where torchrec {torchrec} needs {build} {release}"
            )
    return problems


def _wrong_build(installed: Installed, flavour: str | None) -> list[str]:
    versions, has_gpu = installed.versions, installed.torch_has_gpu
    torch = f"torch {versions.get('torch')}"
    if all(build in versions for build in BUILDS.values()):
        return ["both fbgemm-gpu and fbgemm-gpu-cpu, which overwrite each other's files"]
    found = [build for build in BUILDS.values() if build in versions]
    if found and not installed.fbgemm_is_whole:
        return [
            f"{found[0]} {versions[found[0]]} without its files, which the other build took along when it went"
        ]
    if flavour == "cpu" and has_gpu:
        return [f"a CUDA build of {torch} where the cpu flavour was asked for"]
    if flavour == "cuda" and has_gpu is False:
        return [f"a CPU build of {torch} where the cuda flavour was asked for"]
    if flavour is not None and BUILDS[flavour] not in versions and not _missing(installed):
        return [f"no {BUILDS[flavour]} where the {flavour} flavour was asked for"]
    if "fbgemm-gpu" in versions and has_gpu is False:
        return [f"fbgemm-gpu {versions['fbgemm-gpu']}, a CUDA build, on a CPU build of {torch}"]
    return []


def _remedy(installed: Installed, flavour: str | None) -> str:
    if flavour is not None:
        wheels = "CPU wheels" if flavour == "cpu" else "CUDA wheels"
        return f"run `rm -rf .venv && make setup FLAVOUR={flavour} TORCH_INDEX=<the address of PyTorch's {wheels}>`"
    build = BUILDS[
        "cuda" if installed.torch_has_gpu and "fbgemm-gpu-cpu" not in installed.versions else "cpu"
    ]
    return (
        "in a clone of dnis-torchrec run `make setup`, elsewhere `pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && "
        f"pip install {PINNED} {build}==1.8.0 && pip install --no-deps torchrec==1.8.0`"
    )


def _release(version: str) -> str:
    """``"2.13"`` of ``"2.13.0+cpu"``."""
    return ".".join(re.findall(r"\d+", version)[:2])


def silence_noise() -> None:
    """Silences `WARNINGS` and `LOGS`, each by name, and nothing else. Calling it again changes
    nothing."""
    for message, category, module in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    for logger, _ in LOGS:
        logging.getLogger(logger or None).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    logger = "" if record.name == "root" else record.name
    return not any(name == logger and record.getMessage().startswith(begin) for name, begin in LOGS)


def version() -> str:
    """The version of this package, as it is installed."""
    return metadata.version("dnis-torchrec")


def versions() -> dict[str, str]:
    """Returns the versions of the distributions that decide a result."""
    names = ("dnis-torchrec", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    try:
        check_dependencies(sys.argv[1])
    except ImportError as error:
        sys.exit(f"error: {error}")
