"""Every way in meets every way out: what was compressed in one process predicts the same in another one.

A row is a way in: it compresses, and writes what each way out needs, in a process of its own. A cell is a way out: a
fresh process that has those files alone. Where a cell is refused, the remedy of the error is executed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.inference.modules import quantize_inference_model
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from tests import programs
from tests.distributed.harness import Rank, Results, running_ranks
from tests.models import load_operator, measure_

BCE = nn.BCEWithLogitsLoss()
ROWS, DIM, BATCH, COMPRESSION = 300, 16, 64, 4.0
CPU = torch.device("cpu")


def make_batch(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    ids = (ROWS ** torch.rand(2 * BATCH, generator=draw)).long() - 1
    features = KeyedJaggedTensor(["user", "item"], ids, lengths=torch.ones(2 * BATCH, dtype=torch.int64))
    return Batch(torch.rand(BATCH, 4, generator=draw), features, labels=(ids[:BATCH] % 2).float())


TRAIN, HELD_OUT = [make_batch(seed) for seed in range(4)], [make_batch(seed) for seed in range(10, 12)]


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    names = ("user", "item")
    tables = [EmbeddingBagConfig(name=n, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[n]) for n in names]
    return DLRM(EmbeddingBagCollection(tables=tables), 4, [32, DIM], [32, 1])


def recipe(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> dnis.Recipe:
    """For the command line."""
    del data, embedding_dim
    splits = dnis.DataSplits(train=TRAIN, validation=HELD_OUT, selection=HELD_OUT, test=HELD_OUT)
    return dnis.Recipe(model=make_model(seed), data=splits, loss=BCE)


def inputs() -> tuple[Tensor, KeyedJaggedTensor]:
    """Of a program that takes the bags with their offsets."""
    dense, features = TRAIN[0].dense_features, TRAIN[0].sparse_features
    features.offsets()
    return dense, features


@torch.no_grad()
def predict(model: nn.Module) -> Tensor:
    model = model.model if isinstance(model, DLRMTrain) else model
    logits: Tensor = model.eval()(TRAIN[0].dense_features, TRAIN[0].sparse_features)
    return logits.flatten()


@dataclass(frozen=True)
class Files:
    """What a way in leaves for the ways out."""

    folder: Path

    def write(self, model: nn.Module, scheme: Any) -> None:
        """Everything that the ways out read of a compressed model."""
        torch.save(predict(model), self.folder / "expected")
        dnis.export(model, scheme, self.folder / "artifact")
        self.write_states(model)

    def write_states(self, model: nn.Module) -> None:
        """Those that a model in memory alone has."""
        torch.save(model.state_dict(), self.folder / "state")
        dcp.save(model.state_dict(), checkpoint_id=self.folder / "dcp")
        inner = model.model if isinstance(model, DLRMTrain) else model
        exported = torch.export.export(inner.eval(), inputs())
        torch.export.save(exported, self.folder / "program.pt2")
        torch.jit.script(inner.eval()).save(str(self.folder / "script.pt"))

    def read(self) -> nn.Module:
        """A fresh model, filled from the artifact."""
        model = make_model(1)
        model = DLRMTrain(model) if (self.folder / "wrapped").exists() else model
        return dnis.load_model(model, self.folder / "artifact")

    def of_twin(self) -> nn.Module:
        """A model of the same codes that mean other values: one that a state_dict has to correct."""
        model = self.read()
        state = {name: part.clone() for name, part in model.state_dict().items()}
        name = next(name for name in state if name.endswith("outputs.groups"))
        state[name] = state[name].flip(0)
        model.load_state_dict(state)
        return model


# ---- ways in


def one_process() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def from_plain_model(files: Files) -> None:
    one_process()
    model = make_model()
    result = dnis.compress(model, TRAIN, loss=BCE, compression=COMPRESSION, held_out=HELD_OUT)
    files.write(model, result.scheme)


def from_one_rank(files: Files) -> None:
    one_process()
    model = DistributedModelParallel(DLRMTrain(make_model()), device=CPU)
    result = dnis.compress(model, TRAIN, loss=BCE, compression=COMPRESSION, held_out=HELD_OUT)
    (files.folder / "wrapped").touch()
    files.write(model.module, result.scheme)


def half(batches: list[Batch], rank: int) -> list[Batch]:
    return [part for index, part in enumerate(batches) if index % 2 == rank]


def over_two_ranks(folder: Path, at: Rank) -> Results:
    """`compress` is refused, and what its remedy names is called."""
    model = dnis.shard_model(make_model(), at.device)
    batches = {"batches": half(TRAIN, at.rank), "loss": BCE, "held_out": half(HELD_OUT, at.rank)}
    try:
        dnis.compress(model, **batches)
    except NotImplementedError as error:
        remedy = str(error)
    assert "measure_(model, ...).allocate(...) and export" in remedy
    measured = measure_(model, **batches)
    result = measured.allocate(compression=COMPRESSION)
    measured.shift_(result)
    dnis.export(model, result.scheme, folder / "artifact")
    return {"bytes": result.num_bytes}


def from_weights(files: Files) -> None:
    one_process()
    state = make_model().state_dict()
    writers: dict[str, Callable[[Path], Any]] = {
        "weights.safetensors": lambda path: save_file(state, path),
        "weights.pt": lambda path: torch.save(state, path),
        "weights.dcp": lambda path: dcp.save(state, checkpoint_id=path),
    }
    predictions = []
    for name, write in writers.items():
        source, out = files.folder / name, files.folder / f"{name} out"
        write(source)
        sizes = ("--compression", COMPRESSION)
        assert not programs.dnis("compress", f"{__name__}:recipe", "--from", source, *sizes, "--out", out).returncode
        (artifact,) = (path for path in out.iterdir() if (path / "manifest.json").is_file())
        predictions.append(predict(dnis.load_model(make_model(1), artifact)))
    assert predictions[0].equal(predictions[1])
    assert predictions[0].equal(predictions[2])
    artifact.rename(files.folder / "artifact")
    torch.save(predictions[0], files.folder / "expected")
    files.write_states(files.read())


def frame_of_raw_rows() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({name: draw.zipf(1.3, 600) % 90 * 7 + 3 for name in ("user", "item")})
    frame["price"], frame["click"] = draw.gamma(2, 10, 600), (frame.user + frame.item) % 2
    return frame


def from_csv(files: Files) -> None:
    """Raw rows, whose ids have rows by a vocabulary that the artifact holds."""
    one_process()
    path = files.folder / "log.csv"
    frame_of_raw_rows().to_csv(path, index=False)
    roles = {"label": "click", "ids": ["user", "item"], "dense": ["price"], "model": "dlrm"}
    recipe = dnis.recipe_from_frame(path, **roles, seed=0)
    result = dnis.compress(recipe.model, list(recipe.data.train), loss=recipe.task, compression=3)
    encoder = recipe.data.encoder
    dnis.export(recipe.model, result.scheme, files.folder / "artifact", encoder=encoder)
    with torch.no_grad():
        expected = recipe.model.eval()(*encoder(frame_of_raw_rows().head(8))).flatten()
    torch.save(expected, files.folder / "expected")


def from_two_ranks(files: Files) -> None:
    """No rank holds the model: a process that loads the artifact does."""
    one_process()
    model = files.read()
    torch.save(predict(model), files.folder / "expected")
    files.write_states(model)


WAYS_IN: dict[str, Callable[[Files], None]] = {
    "plain model": from_plain_model,
    "DistributedModelParallel, one rank": from_one_rank,
    "two ranks": from_two_ranks,
    "safetensors, state_dict, DCP": from_weights,
}


# ---- ways out


def through_state_dict(files: Files) -> Tensor:
    model = files.of_twin()
    model.load_state_dict(torch.load(files.folder / "state", weights_only=True))
    return predict(model)


def through_dcp(files: Files) -> Tensor:
    one_process()
    model = files.of_twin()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=files.folder / "dcp")
    model.load_state_dict(state)
    return predict(model)


def through_torch_export(files: Files) -> Tensor:
    load_operator()
    program = torch.export.load(files.folder / "program.pt2").module()
    logits: Tensor = program(*inputs())
    return logits.detach().flatten()


def through_torchscript(files: Files) -> Tensor:
    load_operator()
    logits: Tensor = torch.jit.load(files.folder / "script.pt")(*inputs())
    return logits.detach().flatten()


def through_raw_rows(files: Files) -> Tensor:
    predictor = dnis.load_predictor(files.folder / "artifact")
    columns = {name: list(part) for name, part in frame_of_raw_rows().head(8).items() if name != "click"}
    assert predictor(frame_of_raw_rows().head(8)).equal(predictor(columns))
    return predictor(columns)


WAYS_OUT: dict[str, Callable[[Files], Tensor]] = {
    "artifact": lambda files: predict(files.read()),
    "state_dict": through_state_dict,
    "DCP": through_dcp,
    "torch.export": through_torch_export,
    "TorchScript": through_torchscript,
    # TorchRec quantizes what it knows: no packed table
    "quantize_inference_model": lambda files: predict(quantize_inference_model(files.read())),
}


# ---- the matrix


def run_in(way: str, folder: Path) -> None:
    {**WAYS_IN, "raw rows": from_csv}[way](Files(folder))


def run_out(way: str, folder: Path) -> None:
    predict_by = {**WAYS_OUT, "raw rows": through_raw_rows}[way]
    torch.save(predict_by(Files(folder)), folder / f"of {way}")


def in_a_process(function: Callable[[str, Path], None], way: str, folder: Path) -> None:
    process = get_context("forkserver").Process(target=function, args=(way, folder))
    process.start()
    process.join(120)
    assert process.exitcode == 0, f"{way}: exit code {process.exitcode}, see standard error"


@pytest.fixture(scope="module", params=WAYS_IN)
def row(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    files = Files(tmp_path_factory.mktemp("row"))
    if request.param == "two ranks":
        with running_ranks(2, {"export": partial(over_two_ranks, files.folder)}, files.folder) as ranks:
            first, second = ranks["export"]
        assert first == second
    in_a_process(run_in, request.param, files.folder)
    return files


@pytest.mark.parametrize("way", WAYS_OUT)
def test_predictions_are_the_same_in_a_fresh_process(row: Files, way: str) -> None:
    in_a_process(run_out, way, row.folder)
    expected = torch.load(row.folder / "expected", weights_only=True)
    torch.testing.assert_close(torch.load(row.folder / f"of {way}", weights_only=True), expected, rtol=0, atol=1e-6)


def test_raw_rows_are_predicted_in_a_fresh_process(tmp_path: Path) -> None:
    in_a_process(run_in, "raw rows", tmp_path)
    in_a_process(run_out, "raw rows", tmp_path)
    files = (torch.load(tmp_path / name, weights_only=True) for name in ("of raw rows", "expected"))
    torch.testing.assert_close(*files, rtol=0, atol=1e-6)
