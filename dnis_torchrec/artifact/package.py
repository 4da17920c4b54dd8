"""Packages: a whole model as one folder that a server runs without TorchRec and without Python.
AOTInductor compiles it; its constants stay outside, memory-mapped."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.nn.functional import pad
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact import manifest as manifests
from dnis_torchrec.artifact.manifest import File, describe_file
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.files import FolderKind, new_folder, unshare
from dnis_torchrec.ops.build import LOOKUPS, fallback_libraries, find_compiler
from dnis_torchrec.ops.packed import bag_offsets, load_operator, names_tensor

AOTI = "aoti"
"""The kind of package that package.json names: compiled by AOTInductor. Others are refused."""
INPUTS = ("dense", "values", "lengths", "weights")
"""Inputs of a packaged model, in order; weights only where bags are weighted."""
RTOL, ATOL = 1e-4, 1e-5
"""Tolerances of a package against the model it came from: matrix products sum in another order."""

_FORMAT, _FORMAT_VERSION = "dnis-torchrec-package", "1.0"
_MANIFEST = "package.json"
_COMPILED, _CONSTANTS, _INDEX = "model.pt2", "constants.safetensors", "constants.index"
_LIBRARIES = "lib"
_OPERATORS_OF_TORCH, _OPERATORS_OF_US = ("aten", "prim", "prims"), "dnis_torchrec"
_EXAMPLE_BATCH = 3  # neither 0 nor 1, which torch.export would take for constants
PACKAGE = FolderKind("package", _MANIFEST, _FORMAT)

PackagedModel = Callable[..., Tensor]
"""``model(dense, values, lengths)``, and weights last where bags are weighted."""


class _Package(TypedDict):
    kind: str
    inputs: Any
    feature_names: list[str]
    num_dense: int
    is_weighted: bool
    libraries: list[str]
    files: dict[str, File]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs of a packaged model."""

    feature_names: tuple[str, ...]
    num_dense: int
    is_weighted: bool

    @staticmethod
    def of_batch(batch: Batch) -> Signature:
        """The signature of a model that takes batches like this one."""
        features = batch.sparse_features
        return Signature(
            feature_names=tuple(features.keys()),
            num_dense=batch.dense_features.shape[1],
            is_weighted=features.weights_or_none() is not None,
        )

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of `INPUTS` that the model takes."""
        return INPUTS if self.is_weighted else INPUTS[:-1]

    def flatten(self, batch: Batch) -> tuple[Tensor, ...]:
        """A batch of these features as the packaged model takes it."""
        features = batch.sparse_features
        lengths = features.lengths().int().view(len(self.feature_names), -1)
        inputs = batch.dense_features.float(), features.values().long(), lengths
        return (*inputs, features.weights()) if self.is_weighted else inputs

    def kinds(self, batch_size: int, num_ids: int) -> dict[str, tuple[torch.dtype, Any]]:
        """Dtype and shape of each input of the model, by its name."""
        kinds: dict[str, tuple[torch.dtype, Any]] = {
            "dense": (torch.float32, (batch_size, self.num_dense)),
            "values": (torch.int64, (num_ids,)),
            "lengths": (torch.int32, (len(self.feature_names), batch_size)),
            "weights": (torch.float32, (num_ids,)),
        }
        return {name: kinds[name] for name in self.input_names}

    def example(self, batch_size: int) -> tuple[Tensor, ...]:
        """Inputs of the right kind: every bag holds id 0 once."""
        kinds = self.kinds(batch_size, len(self.feature_names) * batch_size).items()
        ones = ("lengths", "weights")
        return tuple(torch.full(shape, name in ones, dtype=dtype) for name, (dtype, shape) in kinds)

    def check_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Checks the inputs of a packaged model, which would read wrong ones as others."""
        names = self.input_names
        check(len(inputs) == len(names), "inputs", f"{names}", f"{len(inputs)} of them")
        kinds = self.kinds(inputs[0].shape[0], inputs[1].numel())
        for (name, (dtype, shape)), tensor in zip(kinds.items(), inputs, strict=True):
            place = f"input {name!r}"
            if tensor.dtype != dtype:
                raise TypeError(describe(place, f"{dtype}", tensor.dtype, "convert it"))
            check(tuple(tensor.shape) == shape, place, f"shape {shape}", tuple(tensor.shape))
        bag_offsets(inputs[2], inputs[1], names_tensor(self.feature_names))


class FlatModel(nn.Module):
    """A model that takes a KeyedJaggedTensor, called with plain tensors."""

    feature_names: Tensor

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model = model
        self._keys = list(signature.feature_names)
        self.register_buffer("feature_names", names_tensor(self._keys))
        load_operator()

    def forward(
        self, dense: Tensor, values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Predicts."""
        # given along, so that TorchRec does not reach for FBGEMM to sum lengths up; lengths are
        # read from them, so that nothing in a graph reads any that have not been checked
        offsets = bag_offsets(lengths, values, self.feature_names)
        features = KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weights,
            lengths=offsets.diff(),
            offsets=offsets,
            stride=dense.shape[0],
        )
        return self.model(dense_features=dense, sparse_features=features)


class TransposedLinear(nn.Module):
    """nn.Linear with its weight stored as (K, N), faster for the small batches of serving."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous(), requires_grad=False)
        self.bias: nn.Parameter | None = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiplies and adds the bias."""
        if self.bias is None:
            return inputs @ self.weight
        if inputs.dim() == 2:
            return torch.addmm(self.bias, inputs, self.weight)
        return inputs @ self.weight + self.bias


def write_package(
    model: nn.Module,
    batch: Batch,
    path: Path | str,
    *,
    notes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Packages a model that takes `batch`, and compares the package with it before it appears."""
    signature = Signature.of_batch(batch)
    model = model.eval()
    with torch.no_grad():
        program = export_graph(model, signature)
    with new_folder(path, overwrite=overwrite, kind=PACKAGE) as folder:
        _compile(program, folder)
        libraries = _copy_libraries(program, folder)
        flat, inputs = FlatModel(model, signature), signature.flatten(batch)
        difference = _check_equal(_load(folder), flat, inputs)
        fields = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "kind": AOTI,
            "inputs": list(signature.input_names),
            **asdict(signature),
            "libraries": libraries,
            "max_difference": difference,
            "torch": str(torch.__version__),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            **(notes or {}),
        }
        files = [file for file in folder.rglob("*") if file.is_file()]
        names = sorted(file.relative_to(folder).as_posix() for file in files)
        fields["files"] = {name: describe_file(folder, name) for name in names}
        text = json.dumps(fields, indent=2, allow_nan=False) + "\n"
        (folder / _MANIFEST).write_text(text, encoding="utf-8")
    return Path(path)


def load_package(path: Path | str) -> PackagedModel:
    """Loads a package. It runs the machine code in it: load only what you would run."""
    folder, again = Path(path), "package the model again"
    place, _, manifest = manifests.read_description(folder, PACKAGE, _FORMAT_VERSION, _Package)
    check(manifest["kind"] == AOTI, place, f"kind {AOTI!r}", repr(manifest["kind"]), again)
    for name, entry in manifest["files"].items():
        place = f"package {str(path)!r}, file {name!r}"
        manifests.file_inside(folder, name, place, again)
        for field, value in describe_file(folder, name).items():
            check(value == entry[field], place, f"{field} {entry[field]}", value, again)
    signature = Signature(
        feature_names=tuple(manifest["feature_names"]),
        num_dense=manifest["num_dense"],
        is_weighted=manifest["is_weighted"],
    )
    # what is loaded are files that package.json lists, whose places and content were checked
    for name in (_COMPILED, _CONSTANTS, *manifest["libraries"]):
        place, is_listed = f"package {str(path)!r}, {name!r}", name in manifest["files"]
        check(is_listed, place, "one of the package's files", "another", again)
    with fallback_libraries([folder / library for library in manifest["libraries"]]):
        model = _load(folder)

    def predict(*inputs: Tensor) -> Tensor:
        signature.check_inputs(inputs)
        with torch.inference_mode():
            return model(*inputs)

    return predict


def export_graph(model: nn.Module, signature: Signature) -> ExportedProgram:
    """Traces a model whose collections torch.export takes; batch and number of ids stay free."""
    place, inputs = f"model {type(model).__name__}", signature.example(_EXAMPLE_BATCH)
    free = [{0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}, {1: Dim.DYNAMIC}, {0: Dim.DYNAMIC}]
    # torch.export swaps the parameters of what it traces, which modules that remember theirs do not
    # survive: it gets a copy, of everything but the tensors, with linear layers as small batches
    # want them
    tensors = (*model.parameters(), *model.buffers())
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    memo |= {id(linear): TransposedLinear(linear) for linear in linears}
    flat = FlatModel(copy.deepcopy(model, memo), signature)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            for about_torch in (".*isinstance.treespec, LeafSpec.*", ".*guard_size_oblivious"):
                warnings.filterwarnings("ignore", message=about_torch, category=FutureWarning)
            shapes = tuple(free[: len(inputs)])
            program = torch.export.export(flat, inputs, dynamic_shapes=shapes, strict=False)
            program = _without_fbgemm(program)
    except Exception as error:  # torch.export has no class of its own for what it cannot trace
        line = next(iter(str(error).strip().splitlines()), "")
        requirement = (
            "supported are tables in forms of dnis_torchrec with their compiled lookups, and "
            "models whose forward depends on shapes alone, not on ids or lengths"
        )
        actual = f"{type(error).__name__}: {line}"
        raise NotImplementedError(describe(place, requirement, actual)) from error
    for spec in program.graph_signature.input_specs:
        # a tensor that no module registered: AOTInductor would rename it
        if spec.kind == InputKind.CONSTANT_TENSOR:
            spec.kind, spec.persistent = InputKind.BUFFER, False
    foreign = sorted(operator_libraries(program) - {*_OPERATORS_OF_TORCH, _OPERATORS_OF_US})
    if foreign:
        requirement = "supported are the operators of torch and of dnis_torchrec"
        remedy = "write what calls them in operators of torch"
        actual = f"some of {foreign}, which a server may not have"
        raise NotImplementedError(describe(place, requirement, actual, remedy))
    return program


def operator_libraries(program: ExportedProgram) -> set[str]:
    """Namespaces of the operators that a program calls."""
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return {target.namespace for target in targets if isinstance(target, torch._ops.OpOverload)}


def first_sample(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The first sample of a batch of flat inputs."""
    dense, values, lengths, *weights = inputs
    num_features, batch_size = lengths.shape
    is_first = torch.arange(num_features * batch_size) % batch_size == 0
    of_first = torch.repeat_interleave(is_first, lengths.flatten().long())
    parts = [part[of_first] for part in (values, *weights)]
    return (dense[:1], parts[0], lengths[:, :1].contiguous(), *parts[1:])


def _compile(program: ExportedProgram, folder: Path) -> None:
    """Writes model.pt2, constants.safetensors and constants.index. Takes about half a minute."""
    if find_compiler() is None:
        remedy = "install one, for example the package g++"
        raise RuntimeError(describe("AOTInductor", "a C++ compiler", "none", remedy))
    file = str(folder / _COMPILED)
    with warnings.catch_warnings():
        # what torch's compiler says about torch
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        configs = {"aot_inductor.package_constants_in_so": False}
        torch._inductor.aoti_compile_and_package(
            program, package_path=file, inductor_configs=configs
        )
    tensors = {**program.state_dict, **program.constants}
    names = torch._inductor.aoti_load_package(file).get_constant_fqns()
    constants = unshare({name: tensors[name] for name in sorted(names)})
    save_file(constants, folder / _CONSTANTS)
    _write_index(folder, constants)


def _write_index(folder: Path, constants: Mapping[str, Tensor]) -> None:
    """Writes a line a constant: ``dtype offset bytes dims size .. size name``."""
    lines = []
    for name, entry in manifests.read_header(folder / _CONSTANTS, _CONSTANTS).items():
        sizes, num_bytes = entry["shape"], constants[name].nbytes
        fields = [entry["dtype"], entry["offset"], num_bytes, len(sizes), *sizes, name]
        lines.append(" ".join(map(str, fields)))
    (folder / _INDEX).write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")


def _copy_libraries(program: ExportedProgram, folder: Path) -> list[str]:
    """Copies the libraries of operators that torch lacks; returns their paths in the package."""
    if _OPERATORS_OF_US not in operator_libraries(program):
        return []
    library = LOOKUPS.build()
    (folder / _LIBRARIES).mkdir()
    shutil.copyfile(library, folder / _LIBRARIES / library.name)
    (folder / _LIBRARIES / library.name).chmod(0o755)
    return [f"{_LIBRARIES}/{library.name}"]


def _load(folder: Path) -> PackagedModel:
    load_operator()
    runner = torch._inductor.aoti_load_package(str(folder / _COMPILED))
    constants = load_file(folder / _CONSTANTS)
    runner.load_constants(constants, check_full_update=True, user_managed=True)

    def predict(*inputs: Tensor, used: Mapping[str, Tensor] = constants) -> Tensor:
        # it reads `used` where they lie, so they live as long; and memory of its inputs in the
        # order that it was traced with, whatever the strides
        return runner(*(tensor.contiguous() for tensor in inputs))

    return predict


@torch.inference_mode()
def _check_equal(package: PackagedModel, model: nn.Module, inputs: Sequence[Tensor]) -> float:
    """Compares predictions on a batch and its first sample; returns the largest difference."""
    largest = 0.0
    for batch in (tuple(inputs), first_sample(inputs)):
        target, prediction = model(*batch), package(*batch)
        difference = float((target - prediction).abs().max())
        is_equal = prediction.shape == target.shape
        if not is_equal or not torch.allclose(prediction, target, rtol=RTOL, atol=ATOL):
            requirement = f"the model's predictions (rtol {RTOL}, atol {ATOL})"
            actual = f"some that differ by {difference}"
            raise RuntimeError(describe("package", requirement, actual))
        largest = max(largest, difference)
    return largest


def _without_fbgemm(program: ExportedProgram) -> ExportedProgram:
    """Replaces FBGEMM's operators for bags and sequences in a program by torch's own."""
    fbgemm = torch.ops.fbgemm  # which TorchRec has loaded
    in_torch: dict[Any, Callable[..., Any]] = {
        fbgemm.asynchronous_complete_cumsum.default: complete_cumsum,
        fbgemm.offsets_range.default: offsets_range,
        fbgemm.jagged_to_padded_dense.default: padded_dense,
    }
    calls = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return program.run_decompositions(in_torch) if calls & in_torch.keys() else program


def complete_cumsum(lengths: Tensor) -> Tensor:
    """``fbgemm::asynchronous_complete_cumsum``: where each bag begins, and the number of ids."""
    return pad(lengths.cumsum(-1, dtype=lengths.dtype), (1, 0))


def offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    """``fbgemm::offsets_range``: the place of every id in its bag."""
    ids = torch.arange(range_size, dtype=offsets.dtype, device=offsets.device)
    bags = torch.searchsorted(offsets, ids, right=True) - 1
    return ids - offsets.index_select(0, bags)


def padded_dense(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding: float = 0.0
) -> Any:
    """``fbgemm::jagged_to_padded_dense``: bags cut or filled up to one length."""
    if len(offsets) != 1:
        return NotImplemented
    (begins,), (length,) = offsets, max_lengths
    rows = begins[:-1, None] + torch.arange(length, dtype=begins.dtype, device=begins.device)
    filler = values.shape[0]  # the row after the last one
    rows = torch.where(rows < begins[1:, None], rows, filler)
    with_filler = torch.cat([values, values.new_full((1, *values.shape[1:]), padding)])
    return with_filler.index_select(0, rows.flatten()).unflatten(0, rows.shape)
