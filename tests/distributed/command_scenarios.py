"""What ranks do, and report, as commands and as whole searches; judged in test_command_ranks.py."""

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

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import save
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from typer.testing import CliRunner

from dnis_torchrec.artifact.export import export
from dnis_torchrec.artifact.write import PackedFile
from dnis_torchrec.cli import app, commands
from dnis_torchrec.cli.commands import run_compress, run_export, run_search
from dnis_torchrec.cli.settings import CompressCommand, ExportCommand, SearchCommand
from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.data.over_ranks import split_over_ranks
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.search.search import SearchOutcome, search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.training import weights as weight_files
from dnis_torchrec.training.checkpoint import StoredTensor
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import SearchEvents
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.weights import write_model
from examples.models import FactorizationMachine
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import CPU, described, outcome_of, shards_of, spread
from tests.tiny import EMBEDDING_DIM, Repeatable, make_batch, make_collection, make_recipe, ranked

ROWS = {"user": 41, "genre": 13}
"""That neither two nor four ranks can divide."""
RECIPE, UNFILLED, BROKEN = (f"{__name__}:{name}" for name in ("recipe", "unfilled", "broken"))
EVEN = "tests.tiny:demo"
"""A recipe whose batches ranks can halve."""
KINDS = ("table_wise", "row_wise", "column_wise", "grid_shard")
FILES = {"w.safetensors": "row_wise", "w.pt": "column_wise", "w.dcp": "grid_shard"}
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
    generator, files = torch.Generator().manual_seed(5), {kind: folder / kind for kind in FILES}
    state = recipe(None).model.state_dict()
    state = {name: torch.randn(value.shape, generator=generator) / 2 for name, value in state.items()}
    save_file(state, files["w.safetensors"])
    torch.save({"model": state}, files["w.pt"])
    save({"model": state}, checkpoint_id=files["w.dcp"])
    return files


def job(out: Path, **fields: Any) -> CompressCommand:
    """A request of two sizes."""
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


def compress_over(kind: str, file: Path, at: Rank, *, recipe: str = RECIPE) -> Results:
    """The rows of a job with every table in one sharding type, and what this rank has read of tables and holds."""

    def in_kind(model: nn.Module, _: torch.device) -> nn.Module:
        return spread(model, dict.fromkeys(ROWS, kind), at)

    with patch.object(weight_files, "spread_tables", in_kind), watched() as notes:
        content = run_compress(job(at.folder / f"{kind} {file.name}", source=file, recipe=recipe))
    return {"rows": [asdict(row) for row in content.rows]} | notes


COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", RECIPE, "--out", "{run}/plain", "--epochs", "2"),
    "compress": ("compress", RECIPE, "--from", "{run}/plain", "--compression", "3,6", "--out", "{out}/sizes"),
    "train evenly": ("train", EVEN, "--out", "{run}/even", "--epochs", "2"),
    "search": ("search", RECIPE, "--out", "{run}/searched", "--epochs", "1", "--compression", "3"),
    "evaluate": ("evaluate", "{run}/plain", "--recipe", RECIPE),
    "evaluate size": ("evaluate", "{out}/sizes/x6", "--recipe", RECIPE),
    "export": ("export", "{run}/searched", "--out", "{out}/packed"),
    "evaluate run": ("evaluate", "{run}/searched", "--recipe", RECIPE),
    "verify": ("evaluate", "{out}/packed", "--verify", "--recipe", RECIPE, "--json", "{out}/verified.json"),
    "verify damage": ("evaluate", "{out}/damaged", "--verify"),
}
"""Name -> a command line."""
OF_A_RUN = ("export", "evaluate run", "verify")
"""What other numbers of processes do with the run of two ranks."""


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


def commands_over(names: tuple[str, ...], run: Path | None, at: Rank) -> Results:
    """The commands as ranks of torchrun."""
    names_of = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = (at.world_size, at.rank, at.rank, at.world_size)
    with patch.dict(os.environ, {name: str(number) for name, number in zip(names_of, numbers, strict=True)}):
        return run_commands(at.folder, run or at.folder, names)


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
        "write": attempt(PackedFile, "fill"),
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
    """The tiny recipe, with a training batch at the end that several ranks cannot halve."""
    tiny = make_recipe(optimizer="rowwise_adagrad")
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
    """A search of a second."""
    folder.mkdir(exist_ok=True)
    return search(
        *(recipe, compression, folder, CPU),
        settings=replace(SearchSettings(num_blocks=3, epochs=2, patience=2), **settings),
        events=events,
        saving=Saving(resume=resume),
    )


def history_of(outcome: SearchOutcome) -> list[Results]:
    """Of every epoch."""
    return [asdict(record) for record in outcome.history]


def held_by(model: nn.Module) -> list[list[Any]]:
    """``[table, values]`` of this rank's shards."""
    return [[part.table, part.weight.numel()] for part in shards_of(model)]


def whole_search(at: Rank) -> Results:
    """From data to artifact."""
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
    """A search that turns its tables; the same, stopped by rank 1 in the midst of its ramp, and what cannot go on."""
    outcome, folder, steps = searched(turnable(), at.folder / "turned"), at.folder / "stopped", itertools.count()
    events = SearchEvents(should_stop=lambda: at.rank == 1 and next(steps) > 22)
    results = {"history": history_of(outcome), "held": held_by(outcome.model)}
    results["stop"] = outcome_of(lambda: searched(turnable(), folder, events))
    other = turnable()
    other.data.selection.batches[0].sparse_features.values()[0] += 1  # a sample of rank 0
    results["other data"] = outcome_of(lambda: searched(other, folder, resume=True))
    results["other settings"] = outcome_of(lambda: searched(turnable(), folder, resume=True, patience=9))
    return results


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


def manifest_of(artifact: Path) -> dict[str, Any]:
    """The manifest but for its own hash, the recipe's name and metrics, which are rounded otherwise."""
    manifest = json.loads((artifact / "manifest.json").read_text())
    for name in ("metrics", "recipe"):
        manifest["run"].pop(name)
    return manifest | {"sha256": ""}
