"""What ranks do as `dnis export`, and `verify`; judged in test_command_ranks.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from dnis_torchrec.cli import app
from dnis_torchrec.cli.commands import run_export
from dnis_torchrec.cli.settings import ExportCommand
from dnis_torchrec.training import weights
from dnis_torchrec.training.checkpoint import CheckpointFolder, StoredTensor, write_checkpoint
from dnis_torchrec.training.state import Chunk, PlacedTensor, TrainingState
from tests.distributed.compress_job_scenarios import RECIPE
from tests.distributed.harness import Rank, Results
from tests.distributed.pruning_scenarios import outcome_of

COMMANDS: dict[str, tuple[str, ...]] = {
    "packed": ("export", "{run}", "--out", "{out}/packed"),
    "verified": ("evaluate", "{out}/packed", "--verify", "--recipe", RECIPE, "--json", "{out}/verified.json"),
    "damaged": ("evaluate", "{out}/damaged", "--verify"),
}
"""Name -> a command line."""


def spread_run(run: Path, to: Path, *, added: float = 0.0) -> Path:
    """A copy of a run as two ranks write it; a number is added to the second half of its tables."""
    shutil.copytree(run, to)
    tensors = {}
    for name, value in load_file(to / "model.safetensors").items():
        if "embedding_bags" in name:
            first, second = value.tensor_split(2)
            chunks = (Chunk((0, 0), first), Chunk((len(first), 0), second + added))
        else:
            chunks = (Chunk((0,) * value.dim(), value),)
        tensors[name] = PlacedTensor(tuple(value.shape), chunks)
    (to / "model.safetensors").unlink()
    write_checkpoint(CheckpointFolder(to / weights.MODEL), 0, TrainingState(tensors=tensors, tables={}), None)
    return to


def damage(artifact: Path, to: Path) -> None:
    """A copy of an artifact in which one bit of one file is another one."""
    shutil.copytree(artifact, to)
    file = sorted(to.rglob("packed/*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


@contextmanager
def noted() -> Iterator[dict[str, Any]]:
    """Notes how many values of stored tables this process reads, and which it reads whole."""
    found: dict[str, Any] = {"read": 0, "whole": []}
    copy, part = StoredTensor.copy_to_, StoredTensor._part

    def reading(stored: StoredTensor, target: Tensor, first: Any = None) -> None:
        found["read"] += target.numel() if "embedding_bags" in stored.place else 0
        copy(stored, target, first)

    def cutting(stored: StoredTensor, places: tuple[slice, ...]) -> Tensor:
        if "embedding_bags" in stored.place and places == stored._everything:
            found["whole"].append(stored.place)
        return part(stored, places)

    with patch.object(StoredTensor, "copy_to_", reading), patch.object(StoredTensor, "_part", cutting):
        yield found


def run_commands(out: Path, run: Path, another: Path, names: tuple[str, ...]) -> Results:
    """Runs command lines: name -> exit code, what is said, and what is noted."""
    results: Results = {}
    for name in names:
        if name == "damaged" and os.environ.get("RANK", "0") == "0":
            damage(out / "packed", out / "damaged")
        if dist.is_initialized():
            dist.barrier()
        arguments = [text.format(run=run, out=out, another=another) for text in COMMANDS[name]]
        with noted() as found:
            done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        results[name] = {"code": done.exit_code, "said": done.stdout, "error": done.stderr} | found
    return results


@contextmanager
def of_torchrun(at: Rank) -> Iterator[None]:
    """The variables by which ranks know that they are some."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = (at.world_size, at.rank, at.rank, at.world_size)
    with patch.dict(os.environ, {name: str(number) for name, number in zip(names, numbers, strict=True)}):
        yield


def commands(at: Rank, run: Path, another: Path, names: tuple[str, ...]) -> Results:
    """The commands as ranks of torchrun."""
    with of_torchrun(at):
        return run_commands(at.folder, run, another, names)


def refusals(at: Rank, run: Path, another: Path) -> Results:
    """Things that go wrong on rank 1 alone, and what no ranks can do: all of them say so, and nothing is left."""
    missing, target = at.folder / "none", at.folder / "refused"
    own = run if at.rank == 0 else missing
    found: Results = {"exported": outcome_of(lambda: run_export(ExportCommand(run=own, out=target)))}
    dist.barrier()
    found["left"] = sorted(path.name for path in at.folder.iterdir() if "refused" in path.name)
    return found
