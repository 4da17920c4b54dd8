"""W ranks equal one: commands, whole searches and streams, and no more of a table on a rank than its shards.

What ranks do and report stands first, then the tests that judge it.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import save
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from typer.testing import CliRunner

from dnis_torchrec.artifact.export import export, load_model
from dnis_torchrec.artifact.write import FileOfRows
from dnis_torchrec.cli import app, commands
from dnis_torchrec.cli.commands import run_compress, run_evaluate, run_export, run_search, run_train
from dnis_torchrec.cli.settings import CompressCommand, EvaluateCommand, ExportCommand, SearchCommand, TrainCommand
from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.data.over_ranks import count_training_data, split_over_ranks
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.stream import Stream
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ranks import Ranks, rank_of, world_size_of
from dnis_torchrec.report.rows import COMPRESS, UNCOMPRESSED
from dnis_torchrec.search.search import SearchOutcome, search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training import weights as weight_files
from dnis_torchrec.training.checkpoint import StoredTensor
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import SearchEvents, SearchInterrupted, TrainLoop
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.weights import check_state, fill_, write_model, written_model
from examples.models import FactorizationMachine
from tests.distributed.harness import Part, Rank, RankResults, Results, Scenario, joined, running_ranks
from tests.distributed.model import (
    CPU,
    assert_outcome,
    assert_same,
    assert_same_scheme,
    described,
    outcome_of,
    shards_of,
    spread,
)
from tests.tiny import EMBEDDING_DIM, Repeatable, demo, files_of, make_batch, make_collection, make_recipe, ranked

ROWS = {"user": 41, "genre": 13}
"""That two ranks cannot divide."""
RECIPE, UNFILLED, BROKEN, DAY, SPLIT = (
    f"{__name__}:{name}" for name in ("recipe", "unfilled", "broken", "day", "split")
)
FILES = {"w.pt": "row_wise", "w.dcp": "grid_shard"}
"""Files of weights, and how the tables that are read from them are sharded."""
SIZES = (3.0, 6.0)


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
    sizes = {
        "train": ((25, 1), (7, 2)),
        "validation": ((9, 100),),
        "selection": ((33, 200),),
        "test": ((29, 3), (6, 4)),
    }
    data = {name: Repeatable([make_batch(*batch) for batch in batches]) for name, batches in sizes.items()}
    model = DLRM(EmbeddingBagCollection(tables=tables, device=device), 4, [8, EMBEDDING_DIM], [8, 1])
    return Recipe(model=model, data=DataSplits(**data), loss=nn.BCEWithLogitsLoss())


def unfilled(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """`recipe`, its tables on the meta device: no process ever holds them as the recipe makes them."""
    return recipe(data, seed=seed, device=torch.device("meta"))


def broken(data: Path | None, *, seed: int, embedding_dim: int | None) -> Recipe:
    """A recipe that fails on rank 1 alone."""
    return replace(make_recipe(), stop_on={0: "loss"}[dist.get_rank()])


def save_weights(folder: Path) -> dict[str, Path]:
    """A state_dict whose tables matter, as those of a trained model do, in files of every kind."""
    generator, files = torch.Generator().manual_seed(5), {kind: folder / kind for kind in ("w.safetensors", *FILES)}
    state = recipe(None).model.state_dict()
    state = {name: torch.randn(value.shape, generator=generator) / 2 for name, value in state.items()}
    save_file(state, files["w.safetensors"])
    torch.save({"model": state}, files["w.pt"])
    save({"model": state}, checkpoint_id=files["w.dcp"])
    return files


def job(out: Path, **fields: Any) -> CompressCommand:
    return CompressCommand(**{"recipe": RECIPE, "compression": ",".join(map(str, SIZES)), "out": out} | fields)


@contextmanager
def watched() -> Iterator[Results]:
    """Notes what this rank reads of stored tables, ``[weight, first place, shape]``, and what it holds of them."""
    notes: Results = {"read": [], "held": [], "whole": []}
    copy, measure, part = StoredTensor.copy_to_, commands.measure_, StoredTensor._part

    def copying(stored: StoredTensor, target: Tensor, first: Any = None) -> None:
        if "embedding_bags" in stored.place:
            notes["read"].append([stored.place.rpartition("embedding_bags.")[2], list(first), list(target.shape)])
        copy(stored, target, first)

    def cutting(stored: StoredTensor, spans: list[tuple[int, int]]) -> Tensor:
        if "embedding_bags" in stored.place and list(spans) == [(0, size) for size in stored.shape]:
            notes["whole"].append(stored.place)
        return part(stored, spans)

    def measuring(model: nn.Module, *args: Any, **settings: Any) -> Any:
        notes["held"] += [
            [f"{shard.table}.weight", [shard.first_row, shard.first_column], list(shard.weight.shape)]
            for shard in shards_of(model)
        ]
        return measure(model, *args, **settings)

    with (
        patch.object(StoredTensor, "copy_to_", copying),
        patch.object(StoredTensor, "_part", cutting),
        patch.object(commands, "measure_", measuring),
    ):
        yield notes


def compress_over(kind: str, file: Path, at: Rank) -> Results:
    """The rows of a job with every table in one sharding type, and what this rank has read of tables and holds."""

    def in_kind(model: nn.Module, _: torch.device) -> nn.Module:
        return spread(model, dict.fromkeys(ROWS, kind), at)

    with patch.object(weight_files, "spread_tables", in_kind), watched() as notes:
        content = run_compress(job(at.folder / f"{kind} {file.name}", source=file, recipe=UNFILLED))
    return {"rows": [asdict(row) for row in content.rows]} | notes


COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", RECIPE, "--out", "{run}/plain", "--epochs", "2"),
    "compress": ("compress", RECIPE, "--from", "{run}/plain", "--compression", "3,6", "--out", "{out}/sizes"),
    "search": ("search", RECIPE, "--out", "{run}/searched", "--epochs", "1", "--compression", "3"),
    "evaluate": ("evaluate", "{run}/plain", "--recipe", RECIPE),
    "export": ("export", "{run}/searched", "--out", "{out}/packed"),
    "verify": ("evaluate", "{out}/packed", "--verify", "--recipe", RECIPE, "--json", "{out}/verified.json"),
    "verify damage": ("evaluate", "{out}/damaged", "--verify"),
}
"""Name -> a command line."""


def damage(artifact: Path, to: Path) -> None:
    """A copy of an artifact in which one bit of one file is another one."""
    shutil.copytree(artifact, to)
    file = sorted(to.rglob("packed/*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


def run_commands(out: Path, run: Path, names: tuple[str, ...]) -> Results:
    """Runs command lines: name -> exit code, what is said, and what is noted."""
    results: Results = {}
    for name in names:
        if name == "verify damage" and os.environ.get("RANK", "0") == "0":
            damage(out / "packed", out / "damaged")
        dist.barrier()
        arguments = [text.format(run=run, out=out) for text in COMMANDS[name]]
        with watched() as notes:
            done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        results[name] = {"code": done.exit_code, "said": done.stdout, "error": done.stderr} | notes
    return results


def commands_over(at: Rank) -> Results:
    """The commands as ranks of torchrun."""
    names_of = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = (at.world_size, at.rank, at.rank, at.world_size)
    with patch.dict(os.environ, {name: str(number) for name, number in zip(names_of, numbers, strict=True)}):
        return run_commands(at.folder, at.folder, tuple(COMMANDS))


def refuse_jobs(file: Path, at: Rank) -> Results:
    """What goes wrong on rank 1 alone, and a job over what stands there; nothing is left behind."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def attempt(*patches: Any, out: str = "refused", **fields: Any) -> str:
        settings = job(at.folder / out, **{"source": file} | fields)
        if not patches or at.rank == 0:
            return outcome_of(lambda: run_compress(settings))
        with patch.object(*patches, full):
            return outcome_of(lambda: run_compress(settings))

    bad, target = at.rank == 1, at.folder / "refused"
    (at.folder / "stands").mkdir(exist_ok=True)
    dist.barrier()
    outcomes = {
        "weights": attempt(source=file.with_name("none.safetensors") if bad else file),
        "write": attempt(FileOfRows, "fill"),
        "serve": attempt(commands, "load_model"),
        "size": attempt(compression="900"),
        "other folders": attempt(out=f"apart{at.rank}/out"),
        "a folder that stands": attempt(out="stands"),
        "run": outcome_of(lambda: run_export(ExportCommand(run=at.folder / "none", out=target))),
        "recipe": outcome_of(lambda: run_search(SearchCommand(recipe=BROKEN, out=target, compression=4.0))),
    }
    dist.barrier()
    return outcomes | {"left": sorted(path.name for path in at.folder.iterdir() if "refused" in path.name)}


SIZE = 10.0


def search_recipe() -> Recipe:
    """What can be turned, with a training batch at the end that several ranks cannot halve."""
    tiny = turnable()
    odd = Repeatable([*tiny.data.train.batches, make_batch(1, 50)])
    return replace(tiny, data=replace(tiny.data, train=odd, test=Repeatable([make_batch(63, 300), make_batch(7, 301)])))


def turnable() -> Recipe:
    """A model whose tables are turned behind plain training, with what Adam knows of them."""
    torch.manual_seed(0)
    return replace(make_recipe(optimizer="adam"), model=FactorizationMachine(make_collection()))


def searched(
    recipe: Recipe,
    folder: Path,
    events: SearchEvents | None = None,
    *,
    compression: float = SIZE,
    resume: bool = False,
    **settings: Any,
) -> SearchOutcome:
    folder.mkdir(exist_ok=True)
    return search(
        *(recipe, compression, folder, CPU),
        settings=replace(SearchSettings(num_blocks=3, epochs=2, patience=2), **settings),
        events=events,
        policy=Saving(resume=resume),
    )


def history_of(outcome: SearchOutcome) -> list[Results]:
    return [asdict(record) for record in outcome.history]


def held_by(model: nn.Module) -> list[list[Any]]:
    """``[table, values]`` of this rank's shards."""
    return [[part.table, part.weight.numel()] for part in shards_of(model)]


def whole_search(at: Rank) -> Results:
    ranks, own = Ranks(dist.group.WORLD), search_recipe()
    outcome = searched(own, at.folder / "checkpoints")
    test = split_over_ranks(own.data, ranks).test
    metrics = evaluate(TrainTask(outcome.model, own.loss), test, own.loss, CPU)
    (at.folder / "model").mkdir(exist_ok=True)
    write_model(at.folder / "model", outcome.model, ranks)
    export(outcome.model, outcome.scheme, at.folder / "artifact")
    return {
        "counts": {name: value.clone() for name, value in outcome.counts.counts.items()},
        "num_samples": outcome.counts.num_samples,
        "history": history_of(outcome),
        "alpha": {str(dim): value for dim, value in outcome.alpha.items()},
        "scheme": described(outcome.scheme),
        "compression": outcome.scheme.compression(),
        "metrics": metrics,
        "held": held_by(outcome.model),
    }


def search_turned(at: Rank) -> Results:
    """A search that turns its tables, stopped by rank 1 in the midst of its ramp, and what cannot go on."""
    folder, steps = at.folder / "stopped", itertools.count()
    events = SearchEvents(should_stop=lambda: at.rank == 1 and next(steps) > 22)
    stop = outcome_of(lambda: searched(turnable(), folder, events))
    other = turnable()
    other.data.selection.batches[0].sparse_features.values()[0] += 1  # a sample of rank 0
    return {"stop": stop, "other data": outcome_of(lambda: searched(other, folder, resume=True))}


class OwnBatches(Repeatable):
    """This rank's own batches, as data that splits itself gives them."""

    is_split_over_ranks = True


UNEVEN: dict[str, dict[str, tuple[list[int], list[int]]]] = {
    "a smaller last batch": {"train": ([16, 16], [16, 7])},
    "fewer batches": {"train": ([16, 16], [16])},
    "a batch of none": {"train": ([16, 16], [16, 0])},
    "a smaller batch of validation": {"validation": ([16, 16], [9, 16])},
    "fewer batches of test": {"test": ([16, 16], [16])},
    "smaller batches of test": {"test": ([16, 16], [16, 7])},
}
"""What is uneven -> split -> sizes of the batches of each of two ranks."""


def refuse_searches(at: Rank) -> Results:
    """What only one rank meets, or what differs between ranks, stops all; most of it before training."""
    folder, bad = at.folder / "refused", at.rank == 1
    label, order, small, few, diverging = (make_recipe() for _ in range(5))
    label.data.selection.batches[1].labels[40] = 5.0  # in the second half: rank 1 alone gets it
    if bad:
        order.data.train.batches.reverse()
    small.data.test.batches[0] = make_batch(1, 60)
    few.data.test.batches[0] = ranked(make_batch(27, 60), 9)  # five of the second query on rank 0, four on rank 1

    def poison(record: Any) -> None:
        if record.epoch == 1 and bad:
            diverging.data.train.batches[4].dense_features[:] = float("nan")

    tries = {
        "label": partial(searched, label, folder),
        "order": partial(searched, order, folder),
        "start": partial(searched, make_recipe(), folder, SearchEvents(on_start=lambda *_: 1 / int(not bad))),
        "small": partial(searched, small, folder),
        "candidates": partial(searched, few, folder),
        "size": partial(searched, make_recipe(), folder, compression=900),
        "nan": partial(searched, diverging, at.folder / "diverging", SearchEvents(on_epoch=poison), epochs=3),
    }
    for what, sizes_of in UNEVEN.items():
        parts, uneven = {}, make_recipe()
        for name, sizes in sizes_of.items():
            batches = [make_batch(max(size, 1), 10 * at.rank + place) for place, size in enumerate(sizes[at.rank])]
            parts[name] = OwnBatches([slice_of(b, 0, n) for b, n in zip(batches, sizes[at.rank], strict=True)])
        uneven = replace(uneven, data=replace(uneven.data, **parts))
        tries[what] = partial(searched, uneven, at.folder / what, SearchEvents(should_stop=lambda: True))
    return {name: outcome_of(attempt) for name, attempt in tries.items()}


SEARCHES: dict[str, Scenario] = {"whole": whole_search, "turned": search_turned, "refused": refuse_searches}


STREAM_STEPS = 12


def stream_batches() -> Iterator[Batch]:
    """With one that has no sample for every rank, and one of an odd number."""
    return (make_batch({7: 1, 8: 33}.get(index, 32), index) for index in range(STREAM_STEPS + 1))


def day(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    return replace(demo(data, seed=seed, embedding_dim=embedding_dim), data=stream_batches())


class OwnStream:
    """A stream that gives each rank batches of its own."""

    is_split_over_ranks = True

    def __iter__(self) -> Iterator[Batch]:
        for index in range(STREAM_STEPS):
            batch, size = make_batch(32, index), 32 // world_size_of()
            yield slice_of(batch, size * rank_of(), size * (rank_of() + 1))


def split(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    return replace(demo(data, seed=seed, embedding_dim=embedding_dim), data=OwnStream())


def train_stream(recipe: str, name: str, rank: Rank, **settings: Any) -> Results:
    run_train(TrainCommand(recipe=recipe, out=rank.folder / name, **({"steps": STREAM_STEPS} | settings)))
    return {}


def train_stream_twice(rank: Rank) -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainLoop, "_is_stop_requested", lambda self: self._steps == 9)
        with pytest.raises(SearchInterrupted):
            train_stream(DAY, "again", rank)
    return train_stream(DAY, "again", rank, resume=True)


def end_streams_apart(rank: Rank) -> Results:
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
            next(Stream(replace(day(None), data=data), tables))
        except ValueError as error:
            results[name] = str(error)
    return results


STREAMS: dict[str, Scenario] = {
    "day": partial(train_stream, DAY, "day"),
    "split": partial(train_stream, SPLIT, "split"),
    "again": train_stream_twice,
    "apart": end_streams_apart,
}


def manifest_of(artifact: Path) -> dict[str, Any]:
    """The manifest but for its own hash, the recipe's name and metrics, which are rounded otherwise."""
    manifest = json.loads((artifact / "manifest.json").read_text())
    for name in ("metrics", "recipe"):
        manifest["run"].pop(name)
    return manifest | {"sha256": ""}


# ---- what is judged

WITH_METRICS = {"manifest.json", "run.json", "results.json", "report.html", "MODEL_CARD.md"}
Files = tuple[Path, list[Results]]


@pytest.fixture(scope="module")
def weights(gloo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def two(weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    file = weights["w.safetensors"]
    jobs = {name: partial(compress_over, kind, weights[name]) for name, kind in FILES.items()}
    things = {
        "commands": {"all": commands_over},
        "jobs": jobs,
        "refused": {"all": partial(refuse_jobs, file)},
        "searches": SEARCHES,
        "streams": STREAMS,
    }
    with running_ranks(2, joined(**things), tmp_path_factory.mktemp("two")) as running:
        yield running


@pytest.fixture(scope="module")
def alone(weights: dict[str, Path]) -> Files:
    out = weights["w.safetensors"].parent / "alone"
    return out, rows_of(run_compress(job(out, source=weights["w.safetensors"])).rows)


def rows_of(rows: Any) -> list[Results]:
    return [asdict(row) for row in rows if row.method in (COMPRESS, UNCOMPRESSED)]


def assert_same_files(folder: Path, rows: list[Results], alone: Files) -> None:
    for row, other in zip(rows, alone[1], strict=True):
        for name in ("metrics", "selection", "predicted_loss_increase"):
            assert row[name] == (other[name] and pytest.approx(other[name], abs=1e-6))
        for name in ("method", "compression", "num_bytes", "seed", "name"):
            assert row[name] == other[name]
    files, expected = files_of(folder), files_of(alone[0])
    assert files.keys() == expected.keys()
    same = [name for name in expected if Path(name).name not in WITH_METRICS]
    assert {f"x{size:g}/packed/000_user.safetensors" for size in SIZES} <= set(same)
    assert [name for name in same if files[name] != expected[name]] == []
    for size in SIZES:
        assert manifest_of(folder / f"x{size:g}") == manifest_of(alone[0] / f"x{size:g}")


def assert_reads_and_holds_shards(results: list[Results]) -> None:
    values = dict.fromkeys(ROWS, 0)
    for own in results:
        assert own["read"][: len(own["held"])] == own["held"]
        assert own["whole"] == []
        for table, _, (rows, columns) in own["held"]:
            values[table.removesuffix(".weight")] += rows * columns
    assert values == {name: rows * EMBEDDING_DIM for name, rows in ROWS.items()}


@pytest.mark.parametrize("file", FILES)
def test_compress_leaves_the_files_and_rows_of_one_process(two: RankResults, alone: Files, file: str) -> None:
    part = two.part("jobs")
    for own in part[file]:
        assert_same_files(part.folder / f"{FILES[file]} {file}", own["rows"], alone)
    assert_reads_and_holds_shards(part[file])


def metrics_of(path: Path) -> dict[str, float]:
    return run_evaluate(EvaluateCommand(path=path, recipe=RECIPE))["metrics"]


def test_commands_go_through_as_ranks_of_torchrun(two: RankResults, tmp_path: Path) -> None:
    first, second = two.part("commands")["all"]
    folder = two.part("commands").folder
    for own in (first, second):
        assert {name: done["code"] for name, done in own.items() if done["code"]} == {"verify damage": 1}
    assert {done["said"] for done in second.values()} == {""}
    assert not [line for done in second.values() for line in done["error"].splitlines() if line.startswith("error")]
    assert f"artifact: {folder}/sizes/x3" in first["compress"]["said"]
    assert_reads_and_holds_shards([first["compress"], second["compress"]])
    rows = json.loads((folder / "sizes" / "results.json").read_text())["rows"]
    again = run_compress(job(tmp_path / "alone", source=folder / "plain"))
    assert_same_files(folder / "sizes", rows, (tmp_path / "alone", rows_of(again.rows)))
    said = json.loads(first["evaluate"]["said"])["metrics"]
    assert said == pytest.approx(metrics_of(folder / "plain"), abs=1e-6)
    assert metrics_of(folder / "packed") == pytest.approx(metrics_of(folder / "searched"), abs=1e-6)


def test_an_artifact_is_verified_as_by_one_process(gloo, two: RankResults, tmp_path: Path) -> None:
    part = two.part("commands")
    part["all"]
    shutil.copytree(part.folder / "packed", tmp_path / "packed")
    run_commands(tmp_path, part.folder, ("verify",))
    verdicts = [json.loads((folder / "verified.json").read_text()) for folder in (part.folder, tmp_path)]
    checks, expected = (
        {(finding["check"], finding["subject"]): finding["status"] for finding in verdict["findings"]}
        for verdict in verdicts
    )
    assert checks == expected
    assert {"checksums", "parity", "unknown ids", "metric"} == {check for check, _ in checks}
    assert verdicts[0]["ok"]


def test_an_artifact_is_written_to_the_same_bytes(gloo, two: RankResults, tmp_path: Path) -> None:
    part = two.part("commands")
    results = part["all"]
    run_commands(tmp_path, part.folder, ("export",))
    assert files_of(part.folder / "packed") == files_of(tmp_path / "packed")
    read = [sum(rows * columns for _, _, (rows, columns) in own["export"]["read"]) for own in results]
    assert sum(read) == EMBEDDING_DIM * sum(ROWS.values())  # together ranks read each value of a table once
    assert max(read) < sum(read)
    assert [own["export"]["whole"] for own in results] == len(results) * [[]]


REFUSED = {
    "weights": ("ValueError", "none.safetensors", 1),
    "write": ("OSError", "No space left", None),
    "serve": ("OSError", "No space left", None),
    "size": ("ValueError", "compression", None),
    "other folders": ("ValueError", "folder ", 1),
    "a folder that stands": ("ValueError", "stands", 0),
    "run": ("ValueError", "run folder ", None),
    "recipe": ("RecipeError", "test_command_ranks:broken", 1),
}
"""Command -> kind, place, and the rank that is named on the others where one alone says it."""


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_wrong_on_one_rank_stops_commands_on_all(two: RankResults, command: str) -> None:
    kind, place, rank = REFUSED[command]
    results = two.part("refused")["all"]
    assert_outcome([own[command] for own in results], kind, place, rank)
    assert [own["left"] for own in results] == [[], []]


@pytest.fixture(scope="module")
def searches(two: RankResults) -> Part:
    return two.part("searches")


@pytest.fixture(scope="module")
def searched_alone(gloo, tmp_path_factory: pytest.TempPathFactory) -> SearchOutcome:
    """What this process finds without the batch that several ranks do not train on."""
    return searched(turnable(), tmp_path_factory.mktemp("alone"))


def assert_learnt_alike(history: list[Results], alone: SearchOutcome) -> None:
    """Not for ever: sums are rounded in another order, and Adam enlarges that."""
    for own, expected in zip(history[:4], alone.history, strict=False):
        for name in ("step", "train_loss", "selection_loss", "alpha_mean", "alpha_density"):
            assert own[name] == pytest.approx(getattr(expected, name), abs=1e-4), (expected.epoch, name)


def test_both_ranks_find_the_same_and_what_one_process_does(searches: Part, searched_alone) -> None:
    first, second = searches["whole"]
    assert first["history"] == second["history"]
    assert first["metrics"] == second["metrics"]
    assert_same_scheme(first["scheme"], second["scheme"])
    for part in ("alpha", "counts"):
        assert_same(first[part], second[part])
    assert SIZE <= first["compression"] <= 1.4 * SIZE
    assert_learnt_alike(first["history"], searched_alone)
    assert first["compression"] == pytest.approx(searched_alone.scheme.compression(), rel=0.05)
    own = search_recipe()
    counts = count_training_data(own.data, own.loss, table_configs(own.model))
    assert first["num_samples"] == counts.num_samples == 641  # that of a batch which no rank trains on is counted too
    assert_same(first["counts"], dict(counts.counts))


def test_no_rank_holds_what_another_holds(searches: Part) -> None:
    """Adam's tables neither, though FBGEMM has no fused kernel for it on a CPU."""
    held = [own["held"] for own in searches["whole"]]
    assert all(held)
    for table in table_configs(search_recipe().model):
        size = sum(size for own in held for name, size in own if name == table.name)
        assert size == table.num_embeddings * table.embedding_dim


def test_what_ranks_wrote_has_the_same_metric_in_one_process(searches: Part, tmp_path: Path) -> None:
    expected, folder = searches["whole"][0]["metrics"], searches.folder
    own, fresh = search_recipe(), search_recipe()
    weights = written_model(folder / "model")
    check_state(own.model, weights, "model")
    fill_(own.model, weights)
    load_model(fresh.model, folder / "artifact")
    for model in (own.model, fresh.model):
        metrics = evaluate(TrainTask(model, own.loss), own.data.test, own.loss, CPU)
        assert metrics == pytest.approx(expected, abs=1e-6)
    shutil.copytree(folder / "model" / "model", tmp_path / "model")
    next((tmp_path / "model").glob("*/rank1.*.safetensors")).unlink()
    with pytest.raises(ValueError, match="rank 1"):
        [stored.whole() for stored in written_model(tmp_path).values()]


def test_one_process_goes_on_with_a_search_of_two_ranks(searches: Part, searched_alone) -> None:
    """With Adam's states of spread tables that were turned, and an epoch of which two ranks have seen a part each."""
    results, alone = searches["turned"], searched_alone
    assert_outcome([own["stop"] for own in results], "SearchInterrupted", "epoch 2, lower step 24")
    assert_outcome([own["other data"] for own in results], "ValueError", "selection", 0)
    resumed = searched(turnable(), searches.folder / "stopped", resume=True)
    assert len(resumed.history) == len(alone.history)
    assert_learnt_alike(history_of(resumed), alone)


STOPPED = {
    "label": ("ValueError", "selection batch 1", 1),
    "order": ("ValueError", "train stream", None),
    "start": ("ZeroDivisionError", "division by zero", 1),
    "small": ("ValueError", "test batch 0", None),
    "candidates": ("ValueError", "test split, query 0", None),
    "size": ("SizeOutOfReachError", "compression", None),
    "nan": ("NonFiniteError", "lower step 24", None),
    "a smaller last batch": ("ValueError", "train batch 1", None),
    "fewer batches": ("ValueError", "train stream", None),
    "a batch of none": ("ValueError", "train batch 1", None),
    "a smaller batch of validation": ("ValueError", "validation batch 0", None),
    "fewer batches of test": ("ValueError", "test stream", None),
    "smaller batches of test": ("SearchInterrupted", "epoch 0, lower step 8", None),
}
"""Search -> kind, place, and rank, as above; batches that are only judged may be of any size."""


@pytest.mark.parametrize("search", STOPPED)
def test_what_one_rank_meets_stops_searches_on_all(searches: Part, search: str) -> None:
    kind, place, rank = STOPPED[search]
    assert_outcome([own[search] for own in searches["refused"]], kind, place, rank)


@pytest.fixture
def streams(two: RankResults) -> Part:
    return two.part("streams")


@pytest.mark.parametrize(("recipe", "name"), [(DAY, "day"), (SPLIT, "split")])
def test_a_pass_leaves_what_that_of_one_process_leaves(
    gloo, streams: Part, recipe: str, name: str, tmp_path: Path
) -> None:
    streams[name]
    run_train(TrainCommand(recipe=recipe, out=tmp_path / "run", steps=STREAM_STEPS + (name == "day")))
    files, alone = files_of(streams.folder / name), files_of(tmp_path / "run")
    assert files["counts.safetensors"] == alone["counts.safetensors"]
    recent, expected = (load_file(path / "recent.safetensors") for path in (streams.folder / name, tmp_path / "run"))
    assert recent["of/labels"].sort().values.equal(expected["of/labels"].sort().values)
    if name == "day":
        assert files["recent.safetensors"] == alone["recent.safetensors"]
    else:  # the same samples in every step
        assert metrics_in(streams.folder / name) == pytest.approx(metrics_in(tmp_path / "run"), abs=1e-4)


def metrics_in(folder: Path) -> dict[str, float]:
    return json.loads((folder / "results.json").read_text())["rows"][0]["metrics"]


def test_a_pass_that_was_stopped_goes_on_to_the_same_result(streams: Part) -> None:
    streams["again"]
    one, other = files_of(streams.folder / "day"), files_of(streams.folder / "again")
    for name in ("counts", "recent"):
        assert one[f"{name}.safetensors"] == other[f"{name}.safetensors"]
    assert metrics_in(streams.folder / "day") == metrics_in(streams.folder / "again")


def test_ranks_end_together(streams: Part) -> None:
    results = streams["apart"]
    assert results[0]["given"] == results[1]["given"] == 3
    assert all("the same batches" in own["others"] for own in results)
    assert "finite" in results[1]["bad"]
    assert "rank 1" in results[0]["bad"]
