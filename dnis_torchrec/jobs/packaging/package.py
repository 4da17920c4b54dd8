"""write_package and load_package: a model as one folder that a server runs, and that folder as a
callable again."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.data.files import new_folder
from dnis_torchrec.jobs.packaging.aot_inductor import (
    COMPILED_FILE,
    CONSTANTS_FILE,
    AotInductorModel,
    write_aot_inductor,
)
from dnis_torchrec.jobs.packaging.flat_model import (
    OWN_OPERATORS,
    FlatModel,
    Signature,
    export_graph,
    operator_libraries,
)
from dnis_torchrec.jobs.packaging.folder import PACKAGE, read_package_json, write_package_json
from dnis_torchrec.jobs.packaging.triton import MODEL_FILE, write_triton_model
from dnis_torchrec.ops.csr_operator import load_operator
from dnis_torchrec.ops.native_build import LOOKUPS, built_elsewhere

KINDS = ("aoti", "torchscript")
"""AOTInductor with its constants outside; TorchScript in a Triton model repository."""
RTOL, ATOL = 1e-4, 1e-5
"""Tolerances of a package against the model it came from: matrix products sum in another order."""


class PackagedModel(Protocol):
    """A loaded package: ``model(dense, values, lengths)``, and weights last where bags are
    weighted."""

    def __call__(self, *inputs: Tensor) -> Tensor: ...


def write_package(
    model: nn.Module,
    batch: Batch,
    path: Path | str,
    *,
    kind: str = "aoti",
    name: str = "model",
    described: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Packages a model whose collections serve pruned tables, and checks the package against it
    before it appears."""
    check_known("kind", kind, KINDS)
    check_name(name)
    signature = Signature.of_batch(batch)
    model = model.eval()
    program = export_graph(model, signature)
    with new_folder(path, overwrite=overwrite, kind=PACKAGE) as folder:
        if kind == "aoti":
            write_aot_inductor(program, folder)
        else:
            write_triton_model(program, signature, folder, name)
        libraries = _copy_libraries(program, folder if kind == "aoti" else folder / name, folder)
        difference = _check_equal(
            _load(folder, kind, name), FlatModel(model, signature), signature.flatten(batch)
        )
        write_package_json(
            folder,
            {
                "kind": kind,
                "model": name,
                "inputs": list(signature.input_names),
                "feature_names": list(signature.feature_names),
                "num_dense": signature.num_dense,
                "is_weighted": signature.is_weighted,
                "libraries": libraries,
                "max_difference": difference,
                "torch": str(torch.__version__),
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                **(described or {}),
            },
        )
    return Path(path)


def check_name(name: str) -> None:
    """Checks that a model in Triton can have this name."""
    check(
        re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None,
        "name",
        "letters, digits, _ and -",
        repr(name),
    )


def load_package(path: Path | str, *, check_hashes: bool = True) -> PackagedModel:
    """Loads a package. It runs the machine code in it: load only what you would run."""
    manifest = read_package_json(path, check_hashes=check_hashes)
    signature = Signature(
        feature_names=tuple(manifest["feature_names"]),
        num_dense=manifest["num_dense"],
        is_weighted=manifest["is_weighted"],
    )
    check_known("kind", manifest["kind"], KINDS)
    _check_listed(Path(path), manifest)
    libraries = [Path(path) / library for library in manifest["libraries"]]
    with built_elsewhere(libraries):
        loaded = _load(Path(path), manifest["kind"], manifest["model"])

    def predict(*inputs: Tensor) -> Tensor:
        signature.check_inputs(inputs)
        with torch.inference_mode():
            return loaded(*inputs)

    return predict


def _check_listed(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Is what is to be loaded of the package's files alone, whose places and content were checked?"""
    is_compiled = manifest["kind"] == "aoti"
    model = (
        (COMPILED_FILE, CONSTANTS_FILE) if is_compiled else (f"{manifest['model']}/{MODEL_FILE}",)
    )
    named = [("model", name) for name in model] + [
        ("library", name) for name in manifest["libraries"]
    ]
    for part, name in named:
        place = f"package {str(folder)!r}, {part} {name!r}"
        check(
            name in manifest["files"],
            place,
            "one of the package's files",
            "another",
            "package it again",
        )


def _copy_libraries(program: torch.export.ExportedProgram, owner: Path, folder: Path) -> list[str]:
    """Copies the libraries of operators that are not torch's own; returns their paths within the
    package."""
    if OWN_OPERATORS not in operator_libraries(program):
        return []
    library = LOOKUPS.build()
    (owner / "lib").mkdir()
    copied = owner / "lib" / library.name
    shutil.copyfile(library, copied)
    copied.chmod(0o755)
    return [copied.relative_to(folder).as_posix()]


def _load(folder: Path, kind: str, name: str) -> PackagedModel:
    load_operator()
    if kind == "aoti":
        return AotInductorModel(folder)
    with warnings.catch_warnings():
        # Triton's libtorch backend serves nothing else
        warnings.filterwarnings(
            "ignore", message="`torch.jit.load` is deprecated", category=DeprecationWarning
        )
        return torch.jit.load(folder / name / MODEL_FILE).eval()


@torch.inference_mode()
def _check_equal(packaged: PackagedModel, model: nn.Module, inputs: Sequence[Tensor]) -> float:
    """Compares predictions on a whole batch and on its first sample alone; returns the largest
    difference."""
    largest = 0.0
    for of_batch in (tuple(inputs), first_sample(inputs)):
        expected, found = model(*of_batch), packaged(*of_batch)
        difference = float((expected - found).abs().max())
        equal = found.shape == expected.shape and torch.allclose(
            found, expected, rtol=RTOL, atol=ATOL
        )
        if not equal:
            requirement = f"the model's predictions (rtol {RTOL}, atol {ATOL})"
            raise RuntimeError(
                describe("package", requirement, f"some that differ by {difference}")
            )
        largest = max(largest, difference)
    return largest


def first_sample(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The first sample of a batch of flat inputs."""
    dense, values, lengths, *weights = inputs
    num_features, batch_size = lengths.shape
    is_first = torch.arange(num_features * batch_size) % batch_size == 0
    kept = torch.repeat_interleave(is_first, lengths.flatten().long())
    return (
        dense[:1],
        values[kept],
        lengths[:, :1].contiguous(),
        *(weight[kept] for weight in weights),
    )
