"""What ranks do as `dnis compress`; judged in test_compress_job_ranks.py."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from typer.testing import CliRunner

from dnis_torchrec.artifact.write import PackedFile
from dnis_torchrec.cli import app, commands
from dnis_torchrec.cli.commands import run_compress
from dnis_torchrec.cli.settings import CompressCommand
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.training import weights as weight_files
from dnis_torchrec.training.checkpoint import StoredTensor
from tests.distributed.harness import Rank, Results
from tests.distributed.pruning_scenarios import outcome_of
from tests.tiny import EMBEDDING_DIM, Repeatable, make_batch

ROWS = {"user": 41, "genre": 13}
"""That neither two nor four ranks can divide."""
RECIPE, UNFILLED = f"{__name__}:recipe", f"{__name__}:unfilled"
KINDS = (
    *("table_wise", "row_wise", "column_wise", "data_parallel"),
    *("table_row_wise", "table_column_wise", "grid_shard"),
)
SIZES = (3.0, 6.0)


def unfilled(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """`recipe`, its tables on the meta device: no process ever holds them as the recipe makes them."""
    return recipe(data, seed=seed, device=torch.device("meta"))


def recipe(
    data: Path | None, *, seed: int = 0, embedding_dim: int | None = None, device: torch.device | None = None
) -> Recipe:
    """A DLRM, which can be turned; no batch has as many samples for every rank."""
    del data
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=EMBEDDING_DIM, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    return Recipe(
        model=DLRM(EmbeddingBagCollection(tables=tables, device=device), 4, [8, EMBEDDING_DIM], [8, 1]),
        data=DataSplits(
            train=Repeatable([make_batch(25, 1), make_batch(7, 2)]),
            validation=Repeatable([make_batch(9, 100)]),
            selection=Repeatable([make_batch(33, 200)]),
            test=Repeatable([make_batch(29, 300), make_batch(6, 301)]),
        ),
        loss=nn.BCEWithLogitsLoss(),
    )


def weights() -> dict[str, Tensor]:
    """A state_dict whose tables matter, as those of a trained model do."""
    state = recipe(None).model.state_dict()
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(value.shape, generator=generator) / 2 for name, value in state.items()}


def job(out: Path, **fields: Any) -> CompressCommand:
    """A request of two sizes."""
    return CompressCommand(**{"recipe": RECIPE, "compressions": SIZES, "out": out} | fields)


def spread_as(kind: str, model: nn.Module, device: torch.device) -> nn.Module:
    """Takes the place of `training.shard.spread_tables`: every table in one sharding type."""
    sharders = [CpuEmbeddingBagCollectionSharder()]
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name in ROWS}
    plan = make_sharding_plan(model, device, sharders, constraints=constraints)
    return shard_model(model, device, plan, sharders)


@contextmanager
def in_kind(kind: str) -> Iterator[None]:
    """Every table in one sharding type meanwhile."""

    def spread(model: nn.Module, device: torch.device) -> nn.Module:
        return spread_as(kind, model, device)

    with patch.object(weight_files, "spread_tables", spread):
        yield


def compressed(at: Rank, kind: str, file: Path) -> Results:
    """The rows of a job."""
    with in_kind(kind):
        content = run_compress(job(at.folder / kind, source=file))
    return {"rows": [asdict(row) for row in content.rows]}


@contextmanager
def watched() -> Iterator[dict[str, list[list[Any]]]]:
    """Notes what this rank reads of stored tables, ``[weight, first place, shape]``, and what it holds of them."""
    found: dict[str, list[list[Any]]] = {"read": [], "held": [], "whole": []}
    copy, measure, spread = StoredTensor.copy_to_, commands.measure_, weight_files.spread_tables

    def reading(stored: StoredTensor, target: Tensor, first: Any = None) -> None:
        if "embedding_bags" in stored.place:
            found["read"].append([stored.place.rpartition("embedding_bags.")[2], list(first), list(target.shape)])
        copy(stored, target, first)

    def spreading(model: nn.Module, device: torch.device) -> nn.Module:
        found["whole"] += [
            [s.table] for m in collections(model).values() for s in local_shards(m) if not s.weight.is_meta
        ]
        return spread(model, device)

    def measuring(model: nn.Module, *args: Any, **settings: Any) -> Any:
        shards = [shard for module in collections(model).values() for shard in local_shards(module)]
        found["held"] += [[f"{s.table}.weight", [s.first_row, s.first_column], list(s.weight.shape)] for s in shards]
        return measure(model, *args, **settings)

    with (
        patch.object(StoredTensor, "copy_to_", reading),
        patch.object(StoredTensor, "whole", lambda stored: 1 / 0),
        patch.object(weight_files, "spread_tables", spreading),
        patch.object(commands, "measure_", measuring),
    ):
        yield found


def from_files(at: Rank, kind: str, file: Path) -> Results:
    """A job on weights in other files, and all that this rank has read of tables and holds of them."""
    with in_kind(kind), watched() as found:
        content = run_compress(job(at.folder / f"from_{file.name}", source=file, recipe=UNFILLED))
    return {"rows": [asdict(row) for row in content.rows]} | found


def trained(at: Rank) -> Results:
    """`dnis train`, `compress` of its run and `evaluate` of both, as the command line runs them on every rank."""
    run, out = at.folder / "run", at.folder / "of_run"
    train = ("train", RECIPE, "--out", run, "--epochs", 2)
    compress = ("compress", RECIPE, "--from", run, "--compression", "3,6", "--out", out)
    evaluated = ("evaluate", run, "--recipe", RECIPE), ("evaluate", out / "x6", "--recipe", RECIPE)
    variables = {"WORLD_SIZE": str(at.world_size), "RANK": str(at.rank), "LOCAL_RANK": str(at.rank)}
    said = []
    with patch.dict(os.environ, variables), watched() as found:
        for command in (train, compress, *evaluated):
            done = CliRunner().invoke(app, [str(argument) for argument in command], catch_exceptions=False)
            said.append([done.exit_code, done.stdout])
    return {"said": said} | found


def refusals(at: Rank, file: Path) -> Results:
    """Things that go wrong on rank 1 alone, and a job over what stands there: nothing is left behind."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    own = file if at.rank == 0 else file.with_name("none.safetensors")
    found: Results = {"weights": outcome_of(lambda: run_compress(job(at.folder / "refused", source=own)))}
    with patch.object(PackedFile, "fill", full if at.rank == 1 else PackedFile.fill):
        found["full"] = outcome_of(lambda: run_compress(job(at.folder / "refused", source=file)))
    with patch.object(commands, "drop_in_", full if at.rank == 1 else commands.drop_in_):
        found["serving"] = outcome_of(lambda: run_compress(job(at.folder / "refused", source=file)))
    found["size"] = outcome_of(lambda: run_compress(job(at.folder / "refused", source=file, compressions=(900.0,))))
    found["apart"] = outcome_of(lambda: run_compress(job(at.folder / f"apart{at.rank}" / "out", source=file)))
    at.folder.joinpath("stands").mkdir(exist_ok=True)
    found["stands"] = outcome_of(lambda: run_compress(job(at.folder / "stands", source=file)))
    dist.barrier()
    found["left"] = sorted(path.name for path in at.folder.iterdir() if "refused" in path.name)
    return found


def save_weights(folder: Path) -> dict[str, Path]:
    """The same weights in files of every kind."""
    state, files = weights(), {kind: folder / kind for kind in ("w.safetensors", "w.pt")}
    save_file(state, files["w.safetensors"])
    torch.save({"model": state}, files["w.pt"])
    return files


def manifest_of(artifact: Path) -> dict[str, Any]:
    """The manifest but for its own hash, the recipe's name and metrics, which are rounded otherwise."""
    manifest = json.loads((artifact / "manifest.json").read_text())
    for name in ("metrics", "recipe"):
        manifest["run"].pop(name)
    return manifest | {"sha256": ""}
