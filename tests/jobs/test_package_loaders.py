"""Compiled packages, and the minimal loaders of examples/serving in processes of their own. One compilation for all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import CUDA_HOME

from dnis_torchrec.jobs.artifact_jobs import drop_in_
from dnis_torchrec.jobs.packaging import Signature, load_package, run_package
from dnis_torchrec.jobs.packaging.flat_model import FlatModel
from dnis_torchrec.serving import load_operator
from tests import tiny
from tests.tiny_artifact import write_tiny_artifact

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "serving"
SIGNATURE = Signature(feature_names=("user", "genre"), num_dense=4, is_weighted=False)

pytestmark = pytest.mark.skipif(not load_operator(), reason="no C++ compiler here: the lookups are not compiled")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An AOTInductor package of the tiny DLRM with tables of bit fields."""
    folder = tmp_path_factory.mktemp("compiled")
    artifact = write_tiny_artifact(folder / "artifact", forms=("packed",), codes=True)
    return run_package(artifact, folder / "package", kind="aoti")


def expected(package: Path, inputs: tuple[Tensor, ...]) -> Tensor:
    """What the model of a package predicts, flat."""
    model = drop_in_(tiny.make_recipe().model, package.parent / "artifact").eval()
    with torch.inference_mode():
        return FlatModel(model, SIGNATURE)(*inputs).flatten()


def request_of(inputs: tuple[Tensor, ...]) -> str:
    """Inputs as the loaders read them."""
    dense, values, lengths = inputs
    head = [len(dense), dense.shape[1], len(lengths), values.numel()]
    numbers = [*head, *dense.flatten().tolist(), *lengths.flatten().tolist(), *values.tolist()]
    return " ".join(f"{number:.9g}" if isinstance(number, float) else str(number) for number in numbers)


def run(command: list[str], inputs: tuple[Tensor, ...]) -> Tensor:
    """Predictions that a loader prints."""
    done = subprocess.run(command, input=request_of(inputs), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return torch.tensor([float(line) for line in done.stdout.split()])


def test_a_compiled_package_takes_any_batch(package: Path) -> None:
    model = load_package(package)
    nothing = (torch.rand(3, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32))
    for inputs in [*(SIGNATURE.flatten(tiny.make_batch(size, size)) for size in (1, 2, 64, 333)), nothing]:
        torch.testing.assert_close(model(*inputs).flatten(), expected(package, inputs))


def test_constants_stay_outside_and_are_indexed(package: Path) -> None:
    tensors = {}
    content = (package / "constants.safetensors").read_bytes()
    for line in (package / "constants.index").read_text().splitlines():
        dtype, offset, num_bytes, dims, *rest = line.split(" ")
        sizes, name = [int(size) for size in rest[: int(dims)]], " ".join(rest[int(dims) :])
        part = bytearray(content[int(offset) : int(offset) + int(num_bytes)])
        tensors[name] = torch.frombuffer(part, dtype=getattr(torch, dtype)).view(sizes)
    stored = drop_in_(tiny.make_recipe().model, package.parent / "artifact").state_dict()
    table = "sparse_arch.embedding_bag_collection.tables.user/rows"
    assert tensors[f"model.{table}"].equal(stored[table])
    assert tensors[f"model.{table}"].numpy().tobytes() not in (package / "model.pt2").read_bytes()


def test_the_python_loader_needs_no_torchrec(package: Path) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torchrec', 'fbgemm_gpu', 'dnis_torchrec')))"
    script = f"{blocked}; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    path = str(EXAMPLES / "load_package.py")
    program = f"import sys; sys.argv = [{path!r}, {str(package)!r}]; {script}"
    inputs = SIGNATURE.flatten(tiny.make_batch(5, 1))
    torch.testing.assert_close(run([sys.executable, "-c", program], inputs), expected(package, inputs))


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The loader in C++, compiled."""
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


def test_the_cpp_loader_predicts_the_same(package: Path, loader: Path) -> None:
    inputs = SIGNATURE.flatten(tiny.make_batch(7, 2))
    torch.testing.assert_close(run([str(loader), str(package)], inputs), expected(package, inputs))


def test_the_cpp_loader_says_what_is_wrong(package: Path, loader: Path, tmp_path: Path) -> None:
    dense, values, lengths = SIGNATURE.flatten(tiny.make_batch(3, 2))
    wrong = (dense, torch.cat([torch.tensor([40]), values[1:]]), lengths)
    done = subprocess.run([str(loader), str(package)], input=request_of(wrong), capture_output=True, text=True)
    assert done.returncode == 1
    assert "feature 0: expected ids in 0..39, got 40" in done.stderr
    wrong = (dense, values, torch.cat([lengths[:1], lengths[1:] + 7]))
    done = subprocess.run([str(loader), str(package)], input=request_of(wrong), capture_output=True, text=True)
    assert done.returncode == 1
    assert "feature 'genre': expected no more ids than there are, got a bag of" in done.stderr
    done = subprocess.run([str(loader), str(tmp_path)], input="", capture_output=True, text=True)
    assert done.returncode == 1
    assert "constants.safetensors: expected a file that can be read" in done.stderr


def test_the_cpp_loader_takes_the_numbers_that_the_package_takes(package: Path, loader: Path, tmp_path: Path) -> None:
    """As tests/jobs/test_packaging.py has it of the loader in Python."""
    weighted = tmp_path / "weighted"
    weighted.mkdir()
    for entry in package.iterdir():
        (weighted / entry.name).symlink_to(entry)
    manifest = json.loads((package / "package.json").read_text()) | {"is_weighted": True}
    (weighted / "package.json").unlink()
    (weighted / "package.json").write_text(json.dumps(manifest, indent=2))
    request = request_of(SIGNATURE.flatten(tiny.make_batch(3, 2)))
    for folder, text, message in (
        (package, "3 4 2", "request: too short"),
        (package, request.rsplit(" ", 1)[0], "request: too short"),
        (package, f"{request} 1", "request: too long"),
        (weighted, request, "request: too short"),
    ):
        done = subprocess.run([str(loader), str(folder)], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (1, f"error: {message}\n")
