"""Models around served tables as files, in a process that has torch and the compiled operators, and no TorchRec."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.fx import symbolic_trace
from torchrec.inference.modules import PredictModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.serving.test_contract import ROWS, SHARED, UNPOOLED, model_pair, pair

pytestmark = [
    # what TorchScript and torch.export say of TorchRec's own modules and of every KeyedJaggedTensor
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

INPUTS = ("dense", "values", "lengths", "weights")
KEYS = ["f2", "no", "f3", "f1"]
SIZES = (5, 1, 3, 1024, 0)
"""Batch sizes; the first is the one that graphs are made of."""
READER = """
import sys, torch
sys.modules.update(dict.fromkeys(("torchrec", "fbgemm_gpu", "dnis_torchrec")))
folder, *libraries = sys.argv[1:]
for library in libraries:
    torch.ops.load_library(library)
names, batches = torch.load(f"{folder}/batches", weights_only=True)
outputs = {}
for name in names:
    is_graph = name.startswith("export")
    model = torch.export.load(f"{folder}/{name}.pt2").module() if is_graph else torch.jit.load(f"{folder}/{name}.pt2")
    outputs[name] = []
    for batch in batches:
        try:
            output = model(batch)["default"] if name.startswith("predict") else model(*batch.values())
            outputs[name].append(output.detach())
        except Exception as error:
            outputs[name].append(str(error))
torch.save(outputs, f"{folder}/outputs")
"""


class OnTensors(nn.Module):
    """A model called with plain tensors, as servers have them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.keys: list[str] = KEYS

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        bags = KeyedJaggedTensor(self.keys, values, weights, lengths=lengths.flatten(), stride=dense.shape[0])
        return self.model(dense, bags)


class Sequences(nn.Module):
    """The values of every sequence, one under the other."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, _: Tensor, features: KeyedJaggedTensor) -> Tensor:
        return torch.cat([sequence.values() for sequence in self.tables(features).values()])


class Predictor(PredictModule):
    """What TorchRec's predict factories trace and then script."""

    def predict_forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        bags = KeyedJaggedTensor(KEYS, batch["values"], batch["weights"], lengths=batch["lengths"].flatten())
        return {"default": self.predict_module(batch["dense"], bags)}


def batch_of(size: int, *, first_id: int | None = None, extra: int = 0) -> dict[str, Tensor]:
    """Inputs by name; a feature without any id in a batch of 3."""
    draw = torch.Generator().manual_seed(size)
    lengths = torch.randint(5, (len(KEYS), size), generator=draw, dtype=torch.int32)
    if size == 3:
        lengths[3] = 0
    values = torch.randint(ROWS, (int(lengths.sum()),), generator=draw)
    if first_id is not None:
        values[0] = first_id
    lengths[0, :1] += extra
    tensors = (torch.rand(size, 6, generator=draw), values, lengths, torch.rand(len(values), generator=draw))
    return dict(zip(INPUTS, tensors, strict=True))


def write(folder: Path, name: str, model: nn.Module) -> None:
    """Writes a model in one of the ways that a name begins with."""
    file, way = str(folder / f"{name}.pt2"), name.partition(" ")[0]
    if way == "export":
        free = tuple({dim: torch.export.Dim.DYNAMIC} for dim in (0, 0, 1, 0))
        inputs = tuple(batch_of(SIZES[0]).values())
        torch.export.save(torch.export.export(OnTensors(model), inputs, dynamic_shapes=free), file)
        return
    modules = {
        "script": lambda: OnTensors(model),
        "trace": lambda: OnTensors(symbolic_trace(model)),
        "predict": lambda: symbolic_trace(Predictor(model, "cpu")),
    }
    torch.jit.save(torch.jit.script(modules[way]().eval()), file)


PACKED, NARROW = "packed", "mixed_dimension"
MODELS = {
    f"{way} {kind} {form} {'weighted' if is_weighted else 'plain'}": (kind, form, is_weighted)
    for way, kind, form, is_weighted in (
        ("script", "dlrm", NARROW, True),  # every way has every model and every form, and not every pair
        ("script", "deepfm", PACKED, False),
        ("trace", "dlrm", PACKED, True),
        ("trace", "deepfm", NARROW, False),
        ("predict", "dlrm", NARROW, True),
        ("predict", "deepfm", PACKED, False),
        ("export", "dlrm", PACKED, False),
        ("export", "deepfm", NARROW, True),
    )
} | {f"{way} sequences": ("sequences", form, False) for way, form in zip(("script", "export"), UNPOOLED, strict=True)}
BATCHES = [*map(batch_of, SIZES), batch_of(5, first_id=ROWS), batch_of(5, first_id=-1)]
BATCHES += [batch_of(5, extra=1), batch_of(5, extra=-9), batch_of(5, extra=2**20)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[nn.Module, list[Any]]]:
    """Name -> TorchRec's model, and what one process without it gave for every batch."""
    folder, models = tmp_path_factory.mktemp("files"), {}
    with torch.no_grad():
        for name, (kind, form, is_weighted) in MODELS.items():
            if kind == "sequences":
                models[name], served = map(Sequences, pair(form, tables=SHARED, need_indices=False))
            else:
                models[name], served = model_pair(kind, form, is_weighted=is_weighted)
            write(folder, name, served.eval())
    torch.save((list(MODELS), BATCHES), folder / "batches")
    names = ("packed_", "fbgemm_gpu_py")
    libraries = [path for path in torch.ops.loaded_libraries if Path(path).name.startswith(names)]
    command = [sys.executable, "-W", "ignore", "-c", READER, str(folder), *libraries]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = torch.load(folder / "outputs", weights_only=True)
    return {name: (model.eval(), results[name]) for name, model in models.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_process_without_torchrec_predicts_the_same(
    name: str, outputs: dict[str, tuple[nn.Module, list[Any]]]
) -> None:
    model, results = outputs[name]
    for size, batch, result in zip(SIZES, BATCHES, results, strict=False):
        assert isinstance(result, Tensor), f"batch of {size}: {result}"
        if size:  # TorchRec's models take no batch of 0 samples
            torch.testing.assert_close(result, OnTensors(model)(*batch.values()).detach(), rtol=0, atol=1e-6)
    for result in results[len(SIZES) :]:
        assert isinstance(result, str), "expected what is no batch to be refused"
