"""An environment that cannot work says so in one message, and dependencies keep their own troubles to themselves."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from dnis_torchrec import _dependencies
from dnis_torchrec._dependencies import (
    LOGS,
    NEEDED_BY_TORCHREC,
    PINNED,
    WARNINGS,
    Installed,
    check_dependencies,
    find_installed,
    silence_noise,
)

ROOT = Path(__file__).parents[1]
HELPERS = {"pyre-extensions": "0.0.32", "tensordict": "0.15.3", "torchmetrics": "1.0.3", "tqdm": "4.70.1"}
CPU = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0", **HELPERS}
CUDA = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0", **HELPERS}


def installed(versions: dict[str, str], *, gpu: bool | None = False, whole: bool = True) -> Installed:
    return Installed(versions=versions, torch_has_gpu=gpu, fbgemm_is_whole=whole)


def without(versions: dict[str, str], *names: str) -> dict[str, str]:
    return {name: version for name, version in versions.items() if name not in names}


@pytest.mark.parametrize(
    ("found", "flavour"),
    [
        (installed(CPU), None),
        (installed(CPU), "cpu"),
        (installed(CUDA, gpu=True), None),
        (installed(CUDA, gpu=True), "cuda"),
        (installed(CPU | {"torch": "2.13.0"}, gpu=True), None),  # works on CPU tensors
        (installed(CPU | {"torch": "2.13.1"}, gpu=None), None),
        (installed(CPU | {"torch": "2.12.0+cpu", "torchrec": "1.7.0", "fbgemm-gpu-cpu": "1.7.0"}), None),
        (installed(CUDA | {"torch": "2.11.0", "torchrec": "1.6.1", "fbgemm-gpu": "1.6.0"}, gpu=True), None),
    ],
)
def test_what_goes_together_is_accepted(found: Installed, flavour: str | None) -> None:
    check_dependencies(flavour, installed=found)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            installed({}, whole=False),
            "no torch, no torchrec, no pyre-extensions, no tensordict, no torchmetrics, no tqdm",
        ),
        (installed(without(CPU, "torch"), gpu=None), "got no torch;"),
        (installed(without(CPU, "torchrec")), "got no torchrec;"),
        (installed(without(CPU, "tensordict")), "got no tensordict;"),
        (
            installed(without(CPU, "fbgemm-gpu-cpu"), whole=False),
            "no fbgemm-gpu-cpu (or, on a CUDA machine, fbgemm-gpu)",
        ),
        (installed(CPU, whole=False), "fbgemm-gpu-cpu 1.8.0 without its files"),
        (installed(CPU | {"torch": "2.12.0+cpu"}), "torch 2.12.0+cpu where torchrec 1.8.0 needs torch 2.13"),
        (installed(CPU | {"torchrec": "1.7.0"}), "torch 2.13.0+cpu where torchrec 1.7.0 needs torch 2.12"),
        (installed(CPU | {"torch": "2.1.3"}), "torch 2.1.3 where"),
        (
            installed(CPU | {"fbgemm-gpu-cpu": "1.7.0"}),
            "fbgemm-gpu-cpu 1.7.0 where torchrec 1.8.0 needs fbgemm-gpu-cpu 1.8",
        ),
        (installed(CPU | {"torchrec": "1.10.0"}), "torchrec 1.10.0, where 1.6, 1.7, 1.8, 1.9 are supported"),
        (installed(CPU | CUDA, gpu=True), "both fbgemm-gpu and fbgemm-gpu-cpu"),
        (installed(CUDA, gpu=False), "fbgemm-gpu 1.8.0, a CUDA build, on a CPU build of torch 2.13.0"),
    ],
)
def test_what_does_not_is_refused_with_the_commands_that_mend_it(found: Installed, said: str) -> None:
    with pytest.raises(ImportError) as caught:
        check_dependencies(installed=found)
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert "`make setup`" in message
    assert "pip install --no-deps torchrec==1.8.0" in message


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = installed({"torch": "2.12.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.7.0"}, gpu=False)
    with pytest.raises(ImportError, match="no pyre-extensions") as caught:
        check_dependencies(installed=found)
    for said in ("torch 2.12.0 where", "fbgemm-gpu 1.7.0 where", "a CUDA build, on a CPU build"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("gpu", "build"), [(True, "fbgemm-gpu=="), (False, "fbgemm-gpu-cpu=="), (None, "fbgemm-gpu-cpu==")]
)
def test_the_remedy_fits_the_build_of_torch(gpu: bool | None, build: str) -> None:
    found = installed(without(CPU, "fbgemm-gpu-cpu", "torchrec"), gpu=gpu)
    with pytest.raises(ImportError) as caught:
        check_dependencies(installed=found)
    assert f" {build}1.8.0 " in str(caught.value)


@pytest.mark.parametrize(
    ("found", "flavour", "said"),
    [
        (installed(CPU | {"torch": "2.13.0"}, gpu=True), "cpu", "a CUDA build of torch 2.13.0 where the cpu flavour"),
        (installed(CPU), "cuda", "a CPU build of torch 2.13.0+cpu where the cuda flavour"),
        (installed(CPU, gpu=None), "cuda", "no fbgemm-gpu where the cuda flavour"),
        (installed(CUDA, gpu=None), "cpu", "no fbgemm-gpu-cpu where the cpu flavour"),
    ],
)
def test_setup_is_told_when_it_got_the_other_flavour(found: Installed, flavour: str, said: str) -> None:
    with pytest.raises(ImportError) as caught:
        check_dependencies(flavour, installed=found)
    assert said in str(caught.value)
    assert f"make setup FLAVOUR={flavour} TORCH_INDEX=" in str(caught.value)


def test_this_environment_is_read_as_it_is() -> None:
    found = find_installed()
    assert found.versions["torch"] == metadata.version("torch")
    assert found.torch_has_gpu == (torch.version.cuda is not None or torch.version.hip is not None)
    assert found.fbgemm_is_whole


def test_half_removed_and_missing_packages_count_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str | None:
        if name == "torchrec":
            return None
        if name == "torch":
            raise FileNotFoundError
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert find_installed().versions == {}


@pytest.mark.parametrize(
    ("source", "has_gpu"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("cuda = None\nhip = '7.0'\n", True),
        ("", None),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(
    source: str, has_gpu: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(source)
    info = tmp_path / "torch-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(info))
    assert find_installed().torch_has_gpu is has_gpu


def test_the_check_imports_nothing_and_runs_as_a_program() -> None:
    code = (
        "import runpy, sys; sys.argv = ['x', 'cpu']\n"
        "try: runpy.run_path(sys.path.pop(), run_name='__main__')\n"
        "except SystemExit as stop: print(stop)\n"
        "print(sorted({'torch', 'torchrec', 'fbgemm_gpu', 'numpy'} & set(sys.modules)))"
    )
    code = f"import sys; sys.path.append({_dependencies.__file__!r}); {code}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    flavour_fits = torch.version.cuda is None
    assert done.stdout.splitlines()[-1] == "[]"
    assert ("error: torch, torchrec and fbgemm" in done.stdout) != flavour_fits


def test_pins_are_those_of_the_requirements() -> None:
    lines = [line for path in (ROOT / "requirements").glob("*.txt") for line in path.read_text().splitlines()]
    assert [pin for pin in PINNED.split() if "==" in pin and pin not in lines] == []
    assert "torchrec==1.8.0" in lines
    assert "fbgemm-gpu-cpu==1.8.0" in lines
    assert "fbgemm-gpu==1.8.0" in lines
    assert [name for name in NEEDED_BY_TORCHREC if name not in PINNED] == []


def test_pytest_silences_what_the_package_silences() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    ours = [f"ignore:{message}:{category.__name__}:{module}" for message, category, module in WARNINGS]
    assert settings["filterwarnings"] == ["error", *ours]


def test_only_the_named_warnings_are_silenced() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_noise()
        for module in ("torchrec.distributed.embeddingbag", "somebody.else"):
            for message in ("`broadcast_buffers` is deprecated. Use another", "your model is wrong"):
                warnings.warn_explicit(message, FutureWarning, "file.py", 1, module=module)
    assert [str(warning.message) for warning in caught] == [
        "your model is wrong",
        "`broadcast_buffers` is deprecated. Use another",
        "your model is wrong",
    ]


@pytest.mark.parametrize(("logger", "begin"), LOGS)
def test_only_the_named_log_lines_are_silenced(logger: str, begin: str, caplog: pytest.LogCaptureFixture) -> None:
    silence_noise()
    with caplog.at_level(logging.WARNING):
        logging.getLogger(logger or None).warning("%s, and more", begin)
        logging.getLogger(logger or None).warning("your model is wrong")
        logging.getLogger("somebody.else").warning(begin)
    assert caplog.messages == ["your model is wrong", begin]


class _Pooled(nn.Module):
    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return self.tables(features)


def test_data_parallel_tables_have_the_gradients_of_the_unsharded_ones(gloo: dist.ProcessGroup) -> None:
    """What the silenced warning about fbgemm's autograd kernel leaves open."""
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=20, feature_names=["f"])
    plain = EmbeddingBagCollection(tables=[config])
    sharded = DistributedModelParallel(
        _Pooled(EmbeddingBagCollection(tables=[config])), device=torch.device("cpu"), sharders=[_DataParallelSharder()]
    )
    sharded.load_state_dict({f"tables.{name}": value for name, value in plain.state_dict().items()})
    features = KeyedJaggedTensor(keys=["f"], values=torch.randint(20, (24,)), lengths=torch.tensor([4, 0, 8, 12]))
    upstream = torch.rand(4, 4)
    for model in (plain, sharded):
        (model(features).values() * upstream).sum().backward()

    (expected,), (actual,) = plain.parameters(), sharded.parameters()
    torch.testing.assert_close(actual.grad, expected.grad)


class _DataParallelSharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["data_parallel"]


def test_a_search_step_on_one_rank_says_nothing(tmp_path: Path) -> None:
    """Everything TorchRec touches in a search, with every warning shown: a new release's noise turns up here."""
    code = f"""
import warnings
warnings.simplefilter("error")
from dnis_torchrec._dependencies import check_dependencies, silence_noise
check_dependencies()
silence_noise()
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import KeyedOptimizerWrapper
dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
tables = [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=20, feature_names=["f"])]
model = DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), 2, [4], [4, 1]))
model = DistributedModelParallel(model, device=torch.device("cpu"))
optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), torch.optim.Adam)
features = KeyedJaggedTensor(keys=["f"], values=torch.arange(8), lengths=torch.ones(8, dtype=torch.int32))
batch = Batch(dense_features=torch.rand(8, 2), sparse_features=features, labels=torch.ones(8))
pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), execute_all_batches=True)
batches = iter([batch] * 3)
for _ in range(3):
    pipeline.progress(batches)
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
