"""A pass over a stream on two ranks: what it leaves is what one process leaves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchrec.datasets.utils import Batch

from dnis_torchrec.cli.commands import run_compress, run_evaluate, run_train
from dnis_torchrec.cli.settings import CompressCommand, EvaluateCommand, TrainCommand
from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.stream import Stream
from dnis_torchrec.ranks import rank_of, world_size_of
from dnis_torchrec.training.loop import SearchInterrupted, TrainLoop
from tests.distributed.harness import Rank, RankResults, Results, running_ranks
from tests.tiny import demo, files_of, make_batch, make_collection

DAY, SPLIT = (f"tests.distributed.test_stream_ranks:{name}" for name in ("day", "split"))
STEPS = 20


def batches() -> Iterator[Batch]:
    """With one that has no sample for every rank, and one of an odd number."""
    return (make_batch({7: 1, 8: 33}.get(index, 32), index) for index in range(STEPS + 1))


def day(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    return dataclasses.replace(demo(data, seed=seed, embedding_dim=embedding_dim), data=batches())


class OwnBatches:
    """A stream that gives each rank batches of its own."""

    is_split_over_ranks = True

    def __iter__(self) -> Iterator[Batch]:
        for index in range(STEPS):
            batch, size = make_batch(32, index), 32 // world_size_of()
            yield slice_of(batch, size * rank_of(), size * (rank_of() + 1))


def split(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    return dataclasses.replace(demo(data, seed=seed, embedding_dim=embedding_dim), data=OwnBatches())


def train(recipe: str, name: str, rank: Rank, **settings: Any) -> Results:
    run_train(TrainCommand(recipe=recipe, out=rank.folder / name, **({"steps": STEPS} | settings)))
    return {}


def train_twice(rank: Rank) -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainLoop, "_is_stop_requested", lambda self: self._steps == 9)
        with pytest.raises(SearchInterrupted):
            train(DAY, "again", rank)
    return train(DAY, "again", rank, resume=True)


def compress(rank: Rank) -> Results:
    settings = CompressCommand(recipe=DAY, source=rank.folder / "day", out=rank.folder / "small", compression="3")
    rows = run_compress(settings).rows
    metrics = run_evaluate(EvaluateCommand(path=rank.folder / "small" / "x3", recipe=SPLIT))["metrics"]
    return {"loss": rows[-1].metrics["loss"], "evaluated": metrics["loss"]}


def end_apart(rank: Rank) -> Results:
    """One rank's clock is ahead, another's stream is another, a third has a bad batch."""
    tables = make_collection().embedding_bag_configs()
    stream = Stream(day(None), tables, is_time_over=lambda: rank.rank == 1 and stream._num_read >= 3)
    results: Results = {"given": sum(1 for _ in stream)}
    others = (make_batch(32, 100 * rank.rank + index) for index in range(3))
    bad = make_batch(32, 1)
    if rank.rank == 1:
        bad.labels[0] = torch.nan
    for name, data in {"others": others, "bad": iter([bad])}.items():
        try:
            next(Stream(dataclasses.replace(day(None), data=data), tables))
        except ValueError as error:
            results[name] = str(error)
    return results


SCENARIOS = {
    "day": partial(train, DAY, "day"),
    "split": partial(train, SPLIT, "split"),
    "again": train_twice,
    "compress": compress,
    "apart": end_apart,
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    with running_ranks(2, SCENARIOS, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.mark.parametrize(("recipe", "name"), [(DAY, "day"), (SPLIT, "split")])
def test_a_pass_leaves_what_that_of_one_process_leaves(
    gloo, two: RankResults, recipe: str, name: str, tmp_path: Path
) -> None:
    two[name]
    run_train(TrainCommand(recipe=recipe, out=tmp_path / "run", steps=STEPS + (name == "day")))
    files, alone = files_of(two.folder / name), files_of(tmp_path / "run")
    for file in ("counts",):
        assert files[f"{file}.safetensors"] == alone[f"{file}.safetensors"]
    recent, expected = (load_file(path / "recent.safetensors") for path in (two.folder / name, tmp_path / "run"))
    assert recent["of/labels"].sort().values.equal(expected["of/labels"].sort().values)
    if name == "day":
        assert files["recent.safetensors"] == alone["recent.safetensors"]
    else:  # the same samples in every step
        assert metrics_of(two.folder / name) == pytest.approx(metrics_of(tmp_path / "run"), abs=1e-4)


def metrics_of(folder: Path) -> dict[str, float]:
    return json.loads((folder / "results.json").read_text())["rows"][0]["metrics"]


def test_a_pass_that_was_stopped_goes_on_to_the_same_result(two: RankResults) -> None:
    two["again"]
    one, other = files_of(two.folder / "day"), files_of(two.folder / "again")
    for name in ("counts", "recent"):
        assert one[f"{name}.safetensors"] == other[f"{name}.safetensors"]
    assert metrics_of(two.folder / "day") == metrics_of(two.folder / "again")


def test_ranks_compress_and_evaluate_what_a_stream_has_left(gloo, two: RankResults) -> None:
    first, second = two["compress"]
    assert first == second
    alone = run_evaluate(EvaluateCommand(path=two.folder / "small" / "x3", recipe=SPLIT))
    assert first["evaluated"] == pytest.approx(alone["metrics"]["loss"], abs=1e-6)


def test_ranks_end_together(two: RankResults) -> None:
    results = two["apart"]
    assert results[0]["given"] == results[1]["given"] == 3
    assert all("the same batches" in own["others"] for own in results)
    assert "finite" in results[1]["bad"]
    assert "rank 1" in results[0]["bad"]
