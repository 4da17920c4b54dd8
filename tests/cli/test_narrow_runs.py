"""`dnis train --scheme`: narrow tables day after day, in runs that other commands read as those of plain tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dnis_torchrec.artifact.load import read_scheme
from dnis_torchrec.cli import streams
from dnis_torchrec.cli.commands import run_compress, run_train
from dnis_torchrec.cli.run import RunFolder
from dnis_torchrec.cli.settings import CompressCommand, TrainCommand
from dnis_torchrec.training.checkpoint import Manifest

DAY, NEXT, BOTH = (f"tests.tiny:{name}" for name in ("stream", "next_day", "two_days"))


def trained(out: Path, recipe: str, **settings: object) -> RunFolder:
    run_train(TrainCommand(recipe=recipe, out=out, **settings))
    return RunFolder.open(out)


class World:
    """A plain run of a day and the artifact that was made of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.day = trained(folder / "day", DAY, steps=30)
        run_compress(CompressCommand(recipe=DAY, source=self.day.path, compression="3", out=folder / "small"))
        (self.artifact,) = (path.parent for path in (folder / "small").glob("*/manifest.json"))
        self.narrow = self.next("narrow", DAY, self.day, steps=30)

    def next(self, name: str, recipe: str, past: RunFolder, **settings: object) -> RunFolder:
        return trained(self.folder / name, recipe, source=past.path, scheme=self.artifact, **settings)


@pytest.fixture(scope="module")
def world(gloo, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def shapes(run: RunFolder) -> dict[str, list[int]]:
    tensors = Manifest.read(run.latest_checkpoint()).tensors.items()
    return {key: entry["size"] for key, entry in tensors if not key.startswith("rank") and not key.endswith(".axes")}


def test_a_run_of_narrow_tables_looks_like_a_plain_one(world: World) -> None:
    assert shapes(world.narrow) == shapes(world.day)
    assert len(list(Path(world.narrow.checkpoints).iterdir())) == 1
    head = world.narrow.read_head()
    assert head["configuration"]["scheme"] == str(world.artifact)
    weights, stored = load_file(world.narrow.path / "model.safetensors"), {}
    for name in world.narrow.scheme().tables:
        key = next(key for key in weights if key.endswith(f".embedding_bags.{name}.weight"))
        stored[name] = weights[key]
        assert not stored[name].equal(load_file(world.day.path / "model.safetensors")[key])
    assert torch.isfinite(torch.cat([weight.flatten() for weight in stored.values()])).all()
    assert world.narrow.counts().num_samples == 2 * world.day.counts().num_samples


def test_two_days_in_one_scheme_are_one_run_of_both(world: World) -> None:
    """The second day stands in the axes of the artifact already; nothing is turned twice."""
    second = world.next("second", NEXT, world.narrow, steps=30)
    both = world.next("both", BOTH, world.day, steps=60)
    one, other = (load_file(run.path / "model.safetensors") for run in (second, both))
    assert one.keys() == other.keys()
    for key, value in other.items():
        torch.testing.assert_close(one[key], value, atol=1e-6, rtol=1e-5)


def test_plain_training_and_compress_go_on_with_it(world: World) -> None:
    plain = trained(world.folder / "plain", NEXT, source=world.narrow.path, steps=5)
    assert shapes(plain) == shapes(world.day)
    out = world.folder / "again"
    run_compress(CompressCommand(recipe=DAY, source=world.narrow.path, compression="3", out=out))
    (artifact,) = (path.parent for path in out.glob("*/manifest.json"))
    assert read_scheme(artifact).compression() >= 3


def test_epochs_of_splits_train_narrow_tables_too(world: World, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "tests.tiny:demo", epochs=2, scheme=world.artifact)
    tables = load_file(run.path / "model.safetensors")
    assert {key for key in tables if not key.endswith(".axes")} == {
        key for key in load_file(world.day.path / "model.safetensors") if not key.endswith(".axes")
    }


def test_a_kill_is_gone_on_with(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are narrow again, and nothing is trained twice."""
    whole = world.next("whole", NEXT, world.day, steps=12)

    def stop(*values: object) -> None:
        raise RuntimeError("the power went")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the power went"):
        patch.setattr(streams.NarrowTraining, "plain_model", stop)
        world.next("killed", NEXT, world.day, steps=12)
    killed = world.next("killed", NEXT, world.day, steps=12, resume=True)
    one, other = (load_file(run.path / "model.safetensors") for run in (killed, whole))
    assert [key for key in other if not one[key].equal(other[key])] == []
