"""Packaged models predict what the model predicts, whatever the batch; damage and wrong inputs are named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.jobs.artifact_jobs import drop_in_
from dnis_torchrec.jobs.packaging import Signature, export_graph, load_package, run_package, write_package
from dnis_torchrec.jobs.packaging.aot_inductor import AotInductorModel
from dnis_torchrec.jobs.packaging.flat_model import FlatModel, operator_libraries
from dnis_torchrec.jobs.packaging.package import first_sample
from dnis_torchrec.jobs.packaging.torchscript import to_torchscript
from dnis_torchrec.jobs.packaging.transposed_linear import TransposedLinear
from dnis_torchrec.jobs.packaging.triton import triton_config
from dnis_torchrec.serving import load_operator
from examples.serving import load_package as minimal_loader
from tests import tiny
from tests.tiny_artifact import RECIPES, write_tiny_artifact

FORMS = ("csr_fp32", "csr_int8", "mixed_dimension_fp32")
MADE_FORMS = ("csr_fp16",)
"""Not held by the artifact: made of its sparse rows as it is loaded."""
SIGNATURE = Signature(feature_names=("user", "genre"), num_dense=4, is_weighted=False)

needs_operator = pytest.mark.skipif(not load_operator(), reason="the lookups are not compiled here")


@pytest.fixture(scope="module", params=list(RECIPES), ids=["dlrm", "deepfm", "tables_alone"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tables in every form, in a DLRM, in a DeepFM and on their own."""
    path = tmp_path_factory.mktemp("packaging") / "artifact"
    return write_tiny_artifact(path, recipe=request.param, forms=FORMS)


def model_of(artifact: Path, form: str) -> nn.Module:
    """The artifact's model, serving."""
    recipe = json.loads((artifact / "manifest.json").read_text())["run"]["recipe"]
    return drop_in_(RECIPES[recipe](None, seed=0).model, artifact, form=form).eval()


def inputs_of(batch_size: int, seed: int) -> tuple[Tensor, ...]:
    """Flat inputs of the tiny data."""
    return SIGNATURE.flatten(tiny.make_batch(batch_size, seed))


def batches() -> list[tuple[Tensor, ...]]:
    """A usual batch, one sample, two, and bags without a single id."""
    nothing = (torch.rand(3, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32))
    return [inputs_of(37, 1), inputs_of(1, 2), inputs_of(2, 3), nothing]


@needs_operator
@pytest.mark.parametrize("form", [*FORMS, *MADE_FORMS])
def test_graph_and_torchscript_predict_what_the_model_predicts(artifact: Path, form: str) -> None:
    model = model_of(artifact, form)
    program = export_graph(model, SIGNATURE)
    assert operator_libraries(program) == {"aten", "dnis_torchrec"}
    # AOTInductor renames constants that no module holds, so that nobody could give them back when it is loaded
    assert InputKind.CONSTANT_TENSOR not in {spec.kind for spec in program.graph_signature.input_specs}
    graph, script, flat = program.module(), to_torchscript(program), FlatModel(model, SIGNATURE)
    with torch.inference_mode():
        for inputs in batches():
            expected = flat(*inputs)
            torch.testing.assert_close(graph(*inputs), expected)
            torch.testing.assert_close(script(*inputs), expected)
        dense, values, lengths = inputs_of(4, 0)
        for wrong, message in (
            (torch.cat([lengths[:1], lengths[1:] + 2**30]), "feature 'genre': expected no more ids than there are"),
            (torch.cat([lengths[:1], -lengths[1:]]), "feature 'genre': expected lengths of at least 0, got -"),
            (torch.zeros_like(lengths), "features 'user', 'genre': expected as many ids as their lengths add up to"),
        ):
            for packaged in (graph, script, flat):  # nobody checks a request before: the error is theirs
                with pytest.raises((ValueError, RuntimeError), match=message):
                    packaged(dense, values, wrong)


@pytest.mark.parametrize("shape", [(5, 3), (1, 3), (0, 3), (2, 4, 3), (3,)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_transposed_linear_is_the_linear(shape: tuple[int, ...], bias: bool) -> None:
    linear, inputs = nn.Linear(3, 7, bias=bias), torch.randn(shape)
    transposed = TransposedLinear(linear)
    assert transposed.weight.is_contiguous()
    assert transposed.weight.shape == (3, 7)
    torch.testing.assert_close(transposed(inputs), linear(inputs))


@needs_operator
def test_exporting_leaves_the_model_its_linear_layers(artifact: Path) -> None:
    model = model_of(artifact, "csr_fp32")
    before = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    program = export_graph(model, SIGNATURE)
    assert before == [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert all(
        program.state_dict[f"model.{name}.weight"].shape == model.get_submodule(name).weight.T.shape for name in before
    )


@needs_operator
def test_a_torchscript_package_is_a_triton_repository(artifact: Path, tmp_path: Path) -> None:
    out = run_package(artifact, tmp_path / "package", form="csr_fp32", kind="torchscript", name="ranker")
    assert {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()} >= {
        "package.json",
        "ranker/config.pbtxt",
        "ranker/1/model.pt",
    }
    manifest = json.loads((out / "package.json").read_text())
    assert manifest["feature_names"] == ["user", "genre"]
    assert [Path(library).parent.as_posix() for library in manifest["libraries"]] == ["ranker/lib"]
    inputs = inputs_of(5, 4)
    with torch.inference_mode():
        expected = FlatModel(model_of(artifact, "csr_fp32"), SIGNATURE)(*inputs)
    torch.testing.assert_close(load_package(out)(*inputs), expected)


def test_a_batch_that_is_not_what_the_model_takes_is_named() -> None:
    batch = tiny.make_batch(4, seed=0)
    assert [part.shape[0] for part in SIGNATURE.flatten(batch)[::2]] == [4, 2]
    with pytest.raises(ValueError, match="batch: expected a weight for every id, got none; the model's bags are"):
        replace(SIGNATURE, is_weighted=True).flatten(batch)
    with pytest.raises(ValueError, match=r"batch: expected features \['genre', 'user'\], got \['user', 'genre'\]"):
        replace(SIGNATURE, feature_names=("genre", "user")).flatten(batch)


def test_the_triton_config_names_inputs_by_position() -> None:
    weighted = Signature(feature_names=("a", "b", "c"), num_dense=13, is_weighted=True)
    assert triton_config("dlrm", weighted, 2) == (
        'name: "dlrm"\n'
        'platform: "pytorch_libtorch"\n'
        "max_batch_size: 0\n"
        "input [\n"
        '  { name: "dense__0" data_type: TYPE_FP32 dims: [ -1, 13 ] },\n'
        '  { name: "values__1" data_type: TYPE_INT64 dims: [ -1 ] },\n'
        '  { name: "lengths__2" data_type: TYPE_INT32 dims: [ 3, -1 ] },\n'
        '  { name: "weights__3" data_type: TYPE_FP32 dims: [ -1 ] }\n'
        "]\n"
        "output [\n"
        '  { name: "prediction__0" data_type: TYPE_FP32 dims: [ -1, 1 ] }\n'
        "]\n"
        "instance_group [ { kind: KIND_CPU } ]\n"
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TorchScript package of the tiny DLRM."""
    folder = tmp_path_factory.mktemp("package")
    artifact = write_tiny_artifact(folder / "artifact")
    return run_package(artifact, folder / "package", kind="torchscript")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d, v, n: (d.double(), v, n), TypeError, "input 'dense': expected torch.float32"),
        (lambda d, v, n: (d, v.int(), n), TypeError, "input 'values': expected torch.int64"),
        (lambda d, v, n: (d, v, n.long()), TypeError, "input 'lengths': expected torch.int32"),
        (lambda d, v, n: (d, v, n[:1]), ValueError, r"input 'lengths': expected shape \(2, 5\), got \(1, 5\)"),
        (lambda d, v, n: (d[:, :3], v, n), ValueError, r"input 'dense': expected shape \(5, 4\)"),
        (
            lambda d, v, n: (d, torch.cat([v, v[:1]]), n),
            ValueError,
            "features 'user', 'genre': expected as many ids as their lengths add up to",
        ),
        (
            lambda d, v, n: (d, v, torch.cat([n[:1], 2**30 + n[1:]])),
            ValueError,
            "feature 'genre': expected no more ids than there are, got a bag of 1073741",
        ),
        (
            lambda d, v, n: (d, v, torch.cat([n[:, :2] - 9, n[:, 2:3] + 18, n[:, 3:]], dim=1)),
            ValueError,
            "feature 'user': expected lengths of at least 0, got -",
        ),
        (lambda d, v, n: (d, v), ValueError, "expected .'dense', 'values', 'lengths'."),
    ],
)
def test_wrong_inputs_are_named(
    package: Path, change: Callable[..., tuple[Tensor, ...]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_package(package)(*change(*inputs_of(5, 0)))


def test_compiled_models_are_given_contiguous_inputs() -> None:
    """They read memory in the order that they were traced with: a slice of columns would be read as its neighbours."""
    model = AotInductorModel.__new__(AotInductorModel)
    model._loaded = lambda *inputs: [tensor.is_contiguous() for tensor in inputs]
    assert model(torch.rand(5, 8)[:, :4], torch.arange(6), torch.ones(5, 2).t()) == [True, True, True]


def test_an_unknown_id_is_an_error_and_no_guess(package: Path) -> None:
    dense, values, lengths = inputs_of(5, 0)
    with pytest.raises((ValueError, RuntimeError), match=r"expected ids in 0\.\.39, got 40"):
        load_package(package)(dense, torch.cat([torch.tensor([40]), values[1:]]), lengths)


@pytest.mark.parametrize(
    "damage", ["flipped", "truncated", "missing", "version", "foreign", "outside", "link", "no JSON"]
)
def test_damage_is_named(package: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    for file in package.rglob("*"):
        if file.is_file():
            (copy / file.relative_to(package)).parent.mkdir(parents=True, exist_ok=True)
            (copy / file.relative_to(package)).write_bytes(file.read_bytes())
    model, manifest = copy / "demo" / "1" / "model.pt", copy / "package.json"
    content, fields = model.read_bytes(), json.loads(manifest.read_text())
    match damage:
        case "flipped":
            model.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        case "truncated":
            model.write_bytes(content[:-1])
        case "missing":
            model.unlink()
        case "version":
            manifest.write_text(json.dumps(fields | {"format_version": "2.0"}))
        case "foreign":
            manifest.write_text(json.dumps(fields | {"format": "other"}))
        case "outside":
            (tmp_path / "outside").write_bytes(b"x")
            entry = {"bytes": 1, "sha256": "0"}
            manifest.write_text(json.dumps(fields | {"files": fields["files"] | {"../outside": entry}}))
        case "link":
            model.rename(model.with_name("another"))
            model.symlink_to("another")
        case "no JSON":
            manifest.write_text("{")
    named = {"version": "update", "foreign": "format", "outside": "../outside", "no JSON": "JSON"}
    with pytest.raises(ValueError, match=named.get(damage, "model.pt")):
        load_package(copy)


@needs_operator
def test_packages_bring_their_operators_where_none_can_be_built(tmp_path: Path) -> None:
    forms = ("csr_fp32", "mixed_dimension_fp32")
    artifact = write_tiny_artifact(tmp_path / "artifact", forms=forms)
    for form in forms:
        run_package(artifact, tmp_path / form, form=form, kind="torchscript")
    torch.save(inputs_of(5, 0), tmp_path / "inputs")
    script = (
        "import sys, torch; from dnis_torchrec.jobs.packaging import load_package\n"
        "from dnis_torchrec.serving import load_operator\n"
        "for package in sys.argv[2:]:\n"
        "    print(*load_package(package)(*torch.load(sys.argv[1])).flatten().tolist())\n"
        "print(load_operator())"
    )
    variables = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "empty"), "CXX": "/nowhere/c++"}
    command = [sys.executable, "-c", script, str(tmp_path / "inputs"), *forms]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *predictions, compiled = done.stdout.splitlines()
    for form, of_form in zip(forms, predictions, strict=True):
        with torch.inference_mode():
            expected = FlatModel(model_of(artifact, form), SIGNATURE)(*inputs_of(5, 0)).flatten()
        torch.testing.assert_close(torch.tensor([float(word) for word in of_form.split()]), expected)
    assert (compiled, "RuntimeWarning" in done.stderr) == ("True", False)


@pytest.mark.parametrize("library", ["../other.so", "demo/lib/missing.so", "/other.so"])
def test_operators_that_are_no_file_of_the_package_are_refused(package: Path, tmp_path: Path, library: str) -> None:
    shutil.copytree(package, tmp_path / "copy")
    (tmp_path / "other.so").write_bytes(b"machine code")
    manifest = json.loads((package / "package.json").read_text())
    (tmp_path / "copy" / "package.json").write_text(json.dumps(manifest | {"libraries": [library]}))
    with pytest.raises(ValueError, match=rf"library '{library}': expected one of the package's files"):
        load_package(tmp_path / "copy")


@pytest.mark.parametrize("load", [load_package, minimal_loader.load], ids=["package", "minimal loader"])
@pytest.mark.parametrize("fields", [{"model": "../elsewhere"}, {"model": "unlisted"}, {"kind": "aoti"}])
def test_a_model_that_is_no_file_of_the_package_is_refused(
    package: Path, tmp_path: Path, load: Callable[[Path], object], fields: dict[str, str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(package, copy)
    for folder in (tmp_path / "elsewhere", copy / "unlisted"):
        shutil.copytree(package / "demo", folder)
    for name in ("model.pt2", "constants.safetensors"):
        shutil.copyfile(package / "demo" / "1" / "model.pt", copy / name)
    manifest = json.loads((package / "package.json").read_text())
    # without libraries, which the minimal loader would load into this process a second time
    (copy / "package.json").write_text(json.dumps(manifest | fields | {"libraries": []}))
    with pytest.raises(ValueError, match="expected one of the package's files, got"):
        load(copy)


def test_the_minimal_loader_refuses_a_listed_file_outside_the_package(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "copy")
    shutil.copytree(package / "demo", tmp_path / "elsewhere")
    manifest = json.loads((package / "package.json").read_text())
    fields = {"libraries": [], "model": "../elsewhere", "files": manifest["files"] | {"../elsewhere/1/model.pt": {}}}
    (tmp_path / "copy" / "package.json").write_text(json.dumps(manifest | fields))
    with pytest.raises(ValueError, match=r"one of the package's files, got '\.\./elsewhere/1/model\.pt'"):
        minimal_loader.load(tmp_path / "copy")


def test_what_stands_there_is_not_replaced(package: Path, tmp_path: Path) -> None:
    artifact = write_tiny_artifact(tmp_path / "artifact")
    before = (package / "package.json").read_bytes()
    with pytest.raises(ValueError, match="does not exist"):
        run_package(artifact, package, kind="torchscript")
    assert (package / "package.json").read_bytes() == before


def test_an_old_package_is_replaced_where_wanted_and_nothing_else_is(tmp_path: Path) -> None:
    artifact, out = write_tiny_artifact(tmp_path / "artifact"), tmp_path / "package"
    run_package(artifact, out, kind="torchscript", name="old")
    served = load_package(out)
    run_package(artifact, out, kind="torchscript", name="new", overwrite=True)
    inputs = inputs_of(5, 0)
    torch.testing.assert_close(load_package(out)(*inputs), served(*inputs))
    assert not (out / "old").exists()
    before = (out / "package.json").read_bytes()
    with pytest.raises(RuntimeError, match="expected the model's predictions"):
        write_package(Wrong(), tiny.make_batch(4, 0), out, kind="torchscript", overwrite=True)
    assert (out / "package.json").read_bytes() == before
    for other in (artifact, tmp_path):
        with pytest.raises(ValueError, match="expected an old package to overwrite, got something else"):
            run_package(artifact, other, kind="torchscript", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "package"]


class ReadsIds(nn.Module):
    """A model whose shape of computation depends on ids: nothing that a graph can hold."""

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        return dense_features[:, : int(sparse_features.values().max()) % 2 + 1].sum(dim=1)


def test_a_model_that_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="model ReadsIds: supported are"):
        write_package(ReadsIds(), tiny.make_batch(4, 0), tmp_path / "package")
    assert list(tmp_path.iterdir()) == []


class Wrong(nn.Module):
    """Predicts one thing while it is traced and another later."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        del sparse_features
        return dense_features.sum(dim=1) + (0 if torch.compiler.is_exporting() else 1)


def test_forms_on_other_kernels_are_refused_by_name(tmp_path: Path) -> None:
    artifact = write_tiny_artifact(tmp_path / "artifact", forms=("csr_fp32",))
    with pytest.raises(
        NotImplementedError, match=r"^form 'dense_int8': supported .* choose one of csr_fp32, csr_fp16, "
    ):
        run_package(artifact, tmp_path / "package", form="dense_int8")
    assert not (tmp_path / "package").exists()


def test_a_package_that_predicts_something_else_never_appears(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="package: expected the model's predictions"):
        write_package(Wrong(), tiny.make_batch(4, 0), tmp_path / "package", kind="torchscript")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind"):
        write_package(ReadsIds(), tiny.make_batch(4, 0), tmp_path / "package", kind="onnx")
    with pytest.raises(ValueError, match="name: expected letters"):
        write_package(ReadsIds(), tiny.make_batch(4, 0), tmp_path / "package", name="../x")


def test_the_first_sample_of_a_batch_is_the_batch_of_the_first_sample() -> None:
    dense, values, lengths = first_sample(inputs_of(6, 5))
    whole = tiny.make_batch(6, 5).sparse_features.to_dict()
    assert dense.shape == (1, 4)
    assert values.tolist() == [i for f in ("user", "genre") for i in whole[f].to_dense()[0].tolist()]
    assert lengths.shape == (2, 1)


def test_the_minimal_loader_reads_requests() -> None:
    request = "2 1 1 3  0.5 -1  1 2  7 8 9  1 1 0.5"
    dense, values, lengths, weights = minimal_loader.read_request(request, is_weighted=True)
    assert dense.tolist() == [[0.5], [-1.0]]
    assert lengths.tolist() == [[1, 2]]
    assert values.tolist() == [7, 8, 9]
    assert weights.tolist() == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("request_text", "is_weighted", "message"),
    [
        ("1 0 1 3  3  7 8", False, "request: too short"),
        ("1 0 1 3  3  7 8 9", True, "request: too short"),
        ("1 0 1 3  3  7 8 9  1 1 0.5", False, "request: too long"),
        ("1 0 1", False, "request: too short"),
    ],
)
def test_the_minimal_loader_refuses_requests_of_another_length(
    request_text: str, is_weighted: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        minimal_loader.read_request(request_text, is_weighted=is_weighted)


class AddsWeights(nn.Module):
    """The least model that takes weighted bags."""

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        return dense_features.sum(dim=1) + sparse_features.weights().sum()


@needs_operator
def test_the_minimal_loader_gives_empty_bags_their_weights_where_the_package_is_weighted(tmp_path: Path) -> None:
    features = KeyedJaggedTensor(
        keys=["f"], values=torch.tensor([1, 2, 0]), lengths=torch.tensor([2, 1]), weights=torch.tensor([1.0, 0.5, 2.0])
    )
    batch = Batch(dense_features=torch.rand(2, 1), sparse_features=features, labels=torch.zeros(2))
    package = write_package(AddsWeights(), batch, tmp_path / "package", kind="torchscript")
    # in a process of its own: the package brings its operators, which here are already there
    command = [sys.executable, "-W", "ignore", minimal_loader.__file__, str(package)]
    done = subprocess.run(command, input="2 1 1 0  0.5 -1  0 0", capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0.5", "-1"], done.stderr
