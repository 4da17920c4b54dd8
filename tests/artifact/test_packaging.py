"""Packages predict what the model predicts, whatever the batch and the loader; damage and wrong inputs are refused."""

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.utils.cpp_extension import CUDA_HOME
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.artifact.export import load_model
from dnis_torchrec.artifact.package import (
    FlatModel,
    Signature,
    TransposedLinear,
    complete_cumsum,
    export_graph,
    first_sample,
    load_package,
    offsets_range,
    operator_libraries,
    padded_dense,
    write_package,
)
from dnis_torchrec.serving import load_operator
from examples.serving import load_package as minimal_loader
from tests import tiny
from tests.programs import run_python
from tests.test_models_page import NUM_DENSE, SUPPORTED, make_batch
from tests.tiny import RECIPES, files_of, write_tiny_artifact

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"
SIGNATURE = Signature(feature_names=("user", "genre"), num_dense=4, is_weighted=False)
NOTHING = (torch.rand(3, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32))

QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
needs_compiler = pytest.mark.skipif(not load_operator(), reason="no C++ compiler here")
Inputs = tuple[Tensor, ...]


def inputs_of(batch_size: int, seed: int) -> Inputs:
    return SIGNATURE.flatten(tiny.make_batch(batch_size, seed))


# ---- graphs: no compilation


@needs_compiler
@pytest.mark.parametrize(
    ("recipe", "form"), [*((recipe, "packed") for recipe in RECIPES), ("tests.tiny:demo", "mixed_dimension")]
)
def test_a_graph_predicts_what_the_model_predicts(recipe: str, form: str, tmp_path: Path) -> None:
    """The other form is made packed."""
    artifact = write_tiny_artifact(tmp_path / form, recipe=recipe, forms=(form,), codes=form == "packed")
    model = load_model(RECIPES[recipe](None, seed=0).model, artifact, form="packed").eval()
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    program = export_graph(model, SIGNATURE)
    assert operator_libraries(program) == {"aten", "dnis_torchrec"}
    # AOTInductor renames constants that no module holds, so that nobody could give them back
    kinds = {spec.kind for spec in program.graph_signature.input_specs}
    assert InputKind.CONSTANT_TENSOR not in kinds
    for name in linears:  # which the model itself keeps
        weight = model.get_submodule(name).weight
        assert program.state_dict[f"model.{name}.weight"].shape == weight.T.shape
    graph, flat = program.module(), FlatModel(model, SIGNATURE)
    with torch.inference_mode():
        for inputs in (inputs_of(37, 1), inputs_of(1, 2), inputs_of(2, 3), NOTHING):
            torch.testing.assert_close(graph(*inputs), flat(*inputs))
        dense, values, lengths = inputs_of(4, 0)
        first, second = lengths[:1], lengths[1:]
        for wrong in (torch.cat([first, second + 2**30]), torch.cat([first, -second]), lengths * 0):
            for packaged in (graph, flat):  # nobody checks a request before: the error is theirs
                with pytest.raises((ValueError, RuntimeError), match=r"features? 'genre|features? 'user"):
                    packaged(dense, values, wrong)


@functools.cache
def served(name: str) -> nn.Module:
    """A model of the page, compressed."""
    torch.manual_seed(0)
    model = SUPPORTED[name].build()
    batches = [make_batch(seed, is_weighted=SUPPORTED[name].is_weighted) for seed in range(3)]
    dnis.compress(model, batches, loss=nn.BCEWithLogitsLoss(), compression=3)
    return model.eval()


@needs_compiler
@pytest.mark.parametrize("name", ["DIN", "Feature processors"])
def test_a_graph_of_sequences_and_feature_processors(name: str) -> None:
    """No operator of FBGEMM is left in it."""
    batch = make_batch(9, is_weighted=SUPPORTED[name].is_weighted)
    signature = Signature.of_batch(batch)
    usual = signature.flatten(batch)
    lengths = torch.zeros(len(signature.feature_names), 3, dtype=torch.int32)
    nothing = (torch.rand(3, NUM_DENSE), torch.zeros(0, dtype=torch.int64), lengths, *(part[:0] for part in usual[3:]))
    program, flat = export_graph(served(name), signature), FlatModel(served(name), signature)
    assert operator_libraries(program) == {"aten", "dnis_torchrec"}
    with torch.inference_mode():
        for inputs in (usual, first_sample(usual), nothing):
            torch.testing.assert_close(program.module()(*inputs), flat(*inputs))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from([(), (3,)]),
    st.floats(-1, 1, width=32),
)
def test_operators_of_torch_do_what_fbgemms_do(
    lengths: list[int], longest: int, of_id: tuple[int, ...], padding: float
) -> None:
    of_bags, values = torch.tensor(lengths), torch.randn(sum(lengths), *of_id)
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(of_bags)
    assert torch.equal(complete_cumsum(of_bags), offsets)
    assert complete_cumsum(of_bags.int()).dtype == torch.int32
    assert torch.equal(offsets_range(offsets, sum(lengths)), torch.ops.fbgemm.offsets_range(offsets, sum(lengths)))
    expected = JaggedTensor(values, lengths=of_bags).to_padded_dense(longest, padding)
    assert torch.equal(padded_dense(values, [offsets], [longest], padding), expected)


@pytest.mark.parametrize("shape", [(5, 3), (1, 3), (0, 3), (2, 4, 3), (3,)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_transposed_linear_is_the_linear(shape: tuple[int, ...], bias: bool) -> None:
    linear, inputs = nn.Linear(3, 7, bias=bias), torch.randn(shape)
    torch.testing.assert_close(TransposedLinear(linear)(inputs), linear(inputs))


class ReadsIds(nn.Module):
    """A model whose shape of computation depends on ids: nothing that a graph can hold."""

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        return dense_features[:, : int(sparse_features.values().max()) % 2 + 1].sum(dim=1)


class Pads(nn.Module):
    """Bags of bags, padded in two dimensions: one operator of FBGEMM that stays."""

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        offsets, values = torch.arange(sparse_features.stride() + 1), dense_features[:, :1]
        padded = torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets, offsets], [2, 2], 0.0)
        return padded.flatten(1).sum(1)


class SumsDense(nn.Module):
    """The least model."""

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        return dense_features.sum(dim=1)


@needs_compiler
@pytest.mark.parametrize("model", [ReadsIds(), Pads()])
def test_what_cannot_be_exported_leaves_nothing(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=f"model {type(model).__name__}"):
        write_package(model, tiny.make_batch(4, 0), tmp_path / "package")
    assert list(tmp_path.iterdir()) == []


def test_batches_and_first_samples() -> None:
    batch = tiny.make_batch(6, 5)
    dense, values, lengths = first_sample(SIGNATURE.flatten(batch))
    whole = batch.sparse_features.to_dict()
    assert dense.shape == (1, 4)
    assert values.tolist() == [i for f in ("user", "genre") for i in whole[f].to_dense()[0].tolist()]
    assert lengths.shape == (2, 1)


# ---- one compiled package for all that follows


@pytest.fixture(scope="module", autouse=True)
def quick_compiler() -> Iterator[None]:
    """The compiler does not optimise what calls the kernels: it would take three times as long."""
    with torch._inductor.config.patch(QUICK):
        yield


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not load_operator():
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("package")
    artifact = write_tiny_artifact(folder / "artifact", forms=("packed",), codes=True)
    model = load_model(tiny.make_recipe().model, artifact)
    return write_package(model, tiny.make_batch(16, 0), folder / "package", notes={"form": "packed"})


def expected(package: Path, inputs: Inputs) -> Tensor:
    model = load_model(tiny.make_recipe().model, package.parent / "artifact").eval()
    with torch.inference_mode():
        return FlatModel(model, SIGNATURE)(*inputs).flatten()


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(package, tmp_path / "copy"))


def restate(package: Path, **fields: Any) -> None:
    """Changes package.json, which has no hash of itself."""
    manifest = json.loads((package / "package.json").read_text())
    (package / "package.json").write_text(json.dumps(manifest | fields, indent=2))


def test_a_package_takes_any_batch(package: Path) -> None:
    model = load_package(package)
    for inputs in [*(inputs_of(size, size) for size in (1, 2, 64, 333)), NOTHING]:
        torch.testing.assert_close(model(*inputs).flatten(), expected(package, inputs))
    dense, values, lengths = inputs_of(5, 4)
    strided = torch.cat([dense, dense], dim=1)[:, :4]  # a slice would be read as its neighbours
    torch.testing.assert_close(model(strided, values, lengths).flatten(), expected(package, (dense, values, lengths)))
    manifest = json.loads((package / "package.json").read_text())
    assert (manifest["feature_names"], manifest["form"]) == (["user", "genre"], "packed")


def test_constants_stay_outside_and_are_indexed(package: Path) -> None:
    tensors = {}
    content = (package / "constants.safetensors").read_bytes()
    for line in (package / "constants.index").read_text().splitlines():
        dtype, offset, num_bytes, dims, *rest = line.split(" ")
        sizes, name = [int(size) for size in rest[: int(dims)]], " ".join(rest[int(dims) :])
        part = bytearray(content[int(offset) : int(offset) + int(num_bytes)])
        tensors[name] = torch.frombuffer(part, dtype=getattr(torch, dtype)).view(sizes)
    state = load_model(tiny.make_recipe().model, package.parent / "artifact").state_dict()
    table = "sparse_arch.embedding_bag_collection.tables.user/rows"
    assert tensors[f"model.{table}"].equal(state[table])
    assert tensors[f"model.{table}"].numpy().tobytes() not in (package / "model.pt2").read_bytes()


@pytest.mark.parametrize(
    ("change", "error", "place"),
    [
        (lambda d, v, n: (d.double(), v, n), TypeError, "input 'dense'"),
        (lambda d, v, n: (d, v.int(), n), TypeError, "input 'values'"),
        (lambda d, v, n: (d, v, n.long()), TypeError, "input 'lengths'"),
        (lambda d, v, n: (d, v, n[:1]), ValueError, "input 'lengths'"),
        (lambda d, v, n: (d[:, :3], v, n), ValueError, "input 'dense'"),
        (lambda d, v, n: (d, torch.cat([v, v[:1]]), n), ValueError, "features 'user', 'genre'"),
        (lambda d, v, n: (d, v, torch.cat([n[:1], 2**30 + n[1:]])), ValueError, "feature 'genre'"),
        (lambda d, v, n: (d, v, torch.cat([n[:, :2] - 9, n[:, 2:3] + 18, n[:, 3:]], dim=1)), ValueError, "'user'"),
        (lambda d, v, n: (d, v), ValueError, "inputs"),
        (lambda d, v, n: (d, torch.cat([torch.tensor([40]), v[1:]]), n), (ValueError, RuntimeError), "40"),
    ],
)
def test_wrong_inputs_are_refused(
    package: Path, change: Callable[..., Inputs], error: type[Exception], place: str
) -> None:
    with pytest.raises(error, match=place):
        load_package(package)(*change(*inputs_of(5, 0)))


def flip(package: Path) -> None:
    content = bytearray((package / "model.pt2").read_bytes())
    content[100] ^= 1
    (package / "model.pt2").write_bytes(content)


def truncate(package: Path) -> None:
    (package / "model.pt2").write_bytes((package / "model.pt2").read_bytes()[:-1])


def link(package: Path) -> None:
    (package / "model.pt2").rename(package / "another")
    (package / "model.pt2").symlink_to("another")


def list_outside(package: Path) -> None:
    (package.parent / "outside").write_bytes(b"x")
    files = json.loads((package / "package.json").read_text())["files"]
    restate(package, files=files | {"../outside": {"bytes": 1, "sha256": "0"}})


def unlist(package: Path) -> None:
    files = json.loads((package / "package.json").read_text())["files"]
    del files["model.pt2"]
    restate(package, files=files)


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (flip, "model.pt2"),
    (truncate, "model.pt2"),
    (link, "model.pt2"),
    (unlist, "model.pt2"),
    (lambda package: (package / "model.pt2").unlink(), "model.pt2"),
    (lambda package: restate(package, format_version="2.0"), "update"),
    (lambda package: restate(package, format="other"), "format"),
    (lambda package: restate(package, kind="torchscript"), "kind"),
    (lambda package: restate(package, num_dense="4"), "num_dense"),
    (list_outside, r"\.\./outside"),
    (lambda package: (package / "package.json").write_text("{"), "JSON"),
    (lambda package: restate(package, libraries=["../other.so"]), r"\.\./other.so"),
    (lambda package: restate(package, libraries=["lib/missing.so"]), "lib/missing.so"),
    (lambda package: restate(package, libraries=["/other.so"]), "/other.so"),
]


@pytest.mark.parametrize("number", range(len(DAMAGE)))
def test_damage_is_refused(copy: Path, number: int) -> None:
    damage, place = DAMAGE[number]
    damage(copy)
    with pytest.raises(ValueError, match=place):
        load_package(copy)


def test_only_an_old_package_is_replaced(copy: Path, tmp_path: Path) -> None:
    before = files_of(tmp_path)
    for path, overwrite in ((copy, False), (tmp_path, True)):
        with pytest.raises(ValueError, match=path.name):
            write_package(SumsDense(), tiny.make_batch(2, 0), path, overwrite=overwrite)
    assert files_of(tmp_path) == before


def test_packages_bring_their_operators_where_none_can_be_built(package: Path, tmp_path: Path) -> None:
    inputs = inputs_of(5, 0)
    torch.save(inputs, tmp_path / "inputs")
    script = (
        "import sys, torch; from dnis_torchrec.artifact.package import load_package\n"
        "assert not [path for path in torch.ops.loaded_libraries if 'dnis_torchrec' in path]\n"
        "from dnis_torchrec.serving import load_operator\n"
        "inputs = torch.load(sys.argv[1], weights_only=True)\n"
        "print(*load_package(sys.argv[2])(*inputs).flatten().tolist())\n"
        "print(load_operator())"
    )
    variables = {"XDG_CACHE_HOME": str(tmp_path / "empty"), "CXX": "/nowhere/c++"}
    done = run_python(tmp_path, script, tmp_path / "inputs", package, **variables)
    assert done.returncode == 0, done.stderr
    predictions, is_compiled = done.stdout.splitlines()
    values = torch.tensor([float(word) for word in predictions.split()])
    torch.testing.assert_close(values, expected(package, inputs))
    assert (is_compiled, "RuntimeWarning" in done.stderr) == ("True", False)


# ---- the minimal loaders of examples/serving, in processes of their own


def request_of(inputs: Inputs) -> str:
    dense, values, lengths = inputs
    head = [len(dense), dense.shape[1], len(lengths), values.numel()]
    numbers = [*head, *dense.flatten().tolist(), *lengths.flatten().tolist(), *values.tolist()]
    return " ".join(f"{number:.9g}" if isinstance(number, float) else str(number) for number in numbers)


def run(command: list[str], inputs: Inputs) -> Tensor:
    done = subprocess.run(command, input=request_of(inputs), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return torch.tensor([float(line) for line in done.stdout.split()])


def test_the_python_loader_needs_no_torchrec(package: Path) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torchrec', 'fbgemm_gpu', 'dnis_torchrec')))"
    script = f"{blocked}; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    path = str(EXAMPLES / "load_package.py")
    program = f"import sys; sys.argv = [{path!r}, {str(package)!r}]; {script}"
    inputs = inputs_of(5, 1)
    torch.testing.assert_close(run([sys.executable, "-c", program], inputs), expected(package, inputs))


def test_the_python_loader_refuses_files_that_are_not_the_packages(copy: Path, tmp_path: Path) -> None:
    # without libraries, which would be loaded into this process a second time
    restate(copy, libraries=[])
    unlist(copy)
    with pytest.raises(ValueError, match="model.pt2"):
        minimal_loader.load(copy)
    files = json.loads((copy / "package.json").read_text())["files"]
    (copy / "model.pt2").rename(tmp_path / "model.pt2")
    (copy / "model.pt2").symlink_to(tmp_path / "model.pt2")
    restate(copy, files=files | {"model.pt2": {}})
    with pytest.raises(ValueError, match="model.pt2"):
        minimal_loader.load(copy)


def test_the_python_loader_reads_requests() -> None:
    request = "2 1 1 3  0.5 -1  1 2  7 8 9  1 1 0.5"
    dense, values, lengths, weights = minimal_loader.read_request(request, is_weighted=True)
    assert dense.tolist() == [[0.5], [-1.0]]
    assert (lengths.tolist(), values.tolist(), weights.tolist()) == ([[1, 2]], [7, 8, 9], [1.0, 1.0, 0.5])
    for text, is_weighted in (
        ("1 0 1 3  3  7 8", False),
        ("1 0 1 3  3  7 8 9", True),
        ("1 0 1 3  3  7 8 9  1 1 0.5", False),
        ("1 0 1", False),
    ):
        with pytest.raises(ValueError, match="request: too"):
            minimal_loader.read_request(text, is_weighted=is_weighted)


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for program in ("cmake", "g++"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here")
    if torch.version.cuda and CUDA_HOME is None:
        pytest.skip("torch for CUDA compiles nothing without a CUDA toolkit, and none is here")
    build = tmp_path_factory.mktemp("loader")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (
        ["cmake", "-S", str(EXAMPLES / "cpp"), "-B", str(build), prefix, "-DCMAKE_CXX_COMPILER=g++"],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return build / "load_package"


def test_the_cpp_loader_predicts_the_same_and_refuses(package: Path, copy: Path, loader: Path, tmp_path: Path) -> None:
    inputs = inputs_of(7, 2)
    torch.testing.assert_close(run([str(loader), str(package)], inputs), expected(package, inputs))
    dense, values, lengths = inputs_of(3, 2)
    request = request_of((dense, values, lengths))
    restate(copy, is_weighted=True)
    for folder, text, place in (
        (package, request_of((dense, torch.cat([torch.tensor([40]), values[1:]]), lengths)), "feature 0"),
        (package, request_of((dense, values, torch.cat([lengths[:1], lengths[1:] + 7]))), "feature 'genre'"),
        (tmp_path, "", "constants.safetensors"),
        (package, "3 4 2", "request: too short"),
        (package, request.rsplit(" ", 1)[0], "request: too short"),
        (package, f"{request} 1", "request: too long"),
        (copy, request, "request: too short"),
    ):
        done = subprocess.run([str(loader), str(folder)], input=text, capture_output=True, text=True)
        assert done.returncode == 1
        assert place in done.stderr
