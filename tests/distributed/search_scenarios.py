"""What one rank does of a whole search; judged in test_search_ranks.py."""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from dnis_torchrec.artifact.export import export
from dnis_torchrec.cli.commands import run_search, run_train
from dnis_torchrec.cli.settings import SearchCommand, TrainCommand
from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.data.over_ranks import split_over_ranks
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.report.rows import Results
from dnis_torchrec.scheme import PACKED
from dnis_torchrec.search.search import SearchOutcome, search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import SearchEvents
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.weights import write_model
from examples.models import FactorizationMachine
from tests.distributed.harness import Rank
from tests.distributed.pruning_scenarios import described, outcome_of
from tests.programs import register
from tests.tiny import Repeatable, make_batch, make_collection, make_recipe, ranked

SIZE = 10.0
SHORT = SearchSettings(num_blocks=3, epochs=2, patience=2)
CPU = torch.device("cpu")


def recipe(optimizer: str) -> Recipe:
    """The tiny recipe, with a training batch at the end that several ranks cannot halve."""
    tiny = make_recipe(optimizer=optimizer)
    odd = Repeatable([*tiny.data.train.batches, make_batch(1, 50)])
    return replace(tiny, data=replace(tiny.data, train=odd, test=Repeatable([make_batch(63, 300), make_batch(7, 301)])))


def found_by(
    recipe: Recipe,
    folder: Path,
    events: SearchEvents | None = None,
    saving: Saving | None = None,
    *,
    compression: float = SIZE,
    trained_epochs: int | None = None,
    **settings: Any,
) -> SearchOutcome:
    """A search of a second."""
    return search(
        *(recipe, compression, folder, CPU),
        settings=replace(SHORT, **settings),
        trained_epochs=trained_epochs,
        events=events,
        saving=saving,
    )


def whole_search(optimizer: str, rank: Rank) -> dict[str, Any]:
    """From data to artifact."""
    ranks = Ranks(dist.group.WORLD)
    own, folder = recipe(optimizer), rank.folder / f"checkpoints_{optimizer}"
    folder.mkdir(exist_ok=True)
    started: list[int] = []
    events = SearchEvents(on_start=lambda steps, counts, blocks: started.append(steps))
    outcome = found_by(own, folder, events)
    test = split_over_ranks(own.data, ranks).test
    metrics = evaluate(TrainTask(outcome.model, own.loss), test, own.loss, CPU)
    target = rank.folder / f"model_{optimizer}"
    target.mkdir(exist_ok=True)
    write_model(target, outcome.model, ranks)
    export(outcome.model, outcome.scheme, rank.folder / f"artifact_{optimizer}", forms=(PACKED,))
    return {
        "steps_per_epoch": started,
        "counts": {name: value.clone() for name, value in outcome.counts.counts.items()},
        "num_samples": outcome.counts.num_samples,
        "history": [asdict(record) for record in outcome.history],
        "alpha": {str(dim): value for dim, value in outcome.alpha.items()},
        "scheme": described(outcome.scheme),
        "compression": outcome.scheme.compression(PACKED),
        "origin": outcome.origin,
        "selection_losses": outcome.selection_losses,
        "metrics": metrics,
        "held": held_by(outcome.model),
    }


def held_by(model: nn.Module) -> list[list[Any]]:
    """``[table, values]`` of this rank's shards."""
    return [
        [part.table, part.weight.numel()] for module in collections(model).values() for part in local_shards(module)
    ]


def rotatable() -> Recipe:
    """A model whose tables are turned behind plain training, with what Adam knows of them."""
    torch.manual_seed(0)
    return replace(make_recipe(optimizer="adam"), model=FactorizationMachine(make_collection()))


def rotated(rank: Rank) -> dict[str, Any]:
    """A search that turns its tables."""
    folder = rank.folder / "rotated"
    folder.mkdir(exist_ok=True)
    outcome = found_by(rotatable(), folder)
    return {"history": [asdict(record) for record in outcome.history], "held": held_by(outcome.model)}


def given(rank: Rank) -> dict[str, Any]:
    """A search of a model that is taken for a trained one, stopped while the search finishes, and what goes on."""
    folder, phases, steps = rank.folder / "given", [], itertools.count(1)
    folder.mkdir(exist_ok=True)
    events = SearchEvents(
        on_alpha=lambda record, alpha, is_last: phases.append((record.phase, is_last)),
        should_stop=lambda: ("release", True) in phases and rank.rank == 1 and next(steps) > 2,
    )
    told = outcome_of(lambda: found_by(make_recipe(), folder, events, trained_epochs=2))
    outcome = found_by(make_recipe(), folder, saving=Saving(resume=True), trained_epochs=2)
    return {"told": told, "history": [asdict(record) for record in outcome.history]}


def stopped(rank: Rank) -> dict[str, Any]:
    """The same search, stopped in the midst of its ramp, and what is told that wants to go on otherwise."""
    folder, steps = rank.folder / "stopped", itertools.count()
    folder.mkdir(exist_ok=True)
    events = SearchEvents(should_stop=lambda: next(steps) > 22)
    outcome = outcome_of(lambda: found_by(rotatable(), folder, events))
    other, resumed = rotatable(), Saving(resume=True)
    other.data.selection.batches[0].sparse_features.values()[0] += 1  # a sample of rank 0
    refusal = outcome_of(lambda: found_by(other, folder, saving=resumed))
    longer = outcome_of(lambda: found_by(rotatable(), folder, saving=resumed, patience=9))
    return {"outcome": outcome, "refusal": refusal, "refusal of a configuration": longer}


class OwnBatches(Repeatable):
    """This rank's own batches, as data that splits itself gives them."""

    is_split_over_ranks = True


UNEVEN = {
    "a smaller last batch": {"train": ([16, 16], [16, 7])},
    "fewer batches": {"train": ([16, 16], [16])},
    "a batch of none": {"train": ([16, 16], [16, 0])},
    "a smaller batch of validation": {"validation": ([16, 16], [9, 16])},
    "fewer batches of test": {"test": ([16, 16], [16])},
    "smaller batches of test": {"test": ([16, 16], [16, 7])},
}
"""What is uneven -> split -> sizes of the batches of each of two ranks."""


def uneven(rank: Rank) -> dict[str, Any]:
    """Searches of data that splits itself unevenly; one that is not refused is stopped at once."""
    outcomes, at_once = {}, SearchEvents(should_stop=lambda: True)
    for place, (what, sizes_of) in enumerate(UNEVEN.items()):
        recipe, folder = make_recipe(), rank.folder / f"uneven{place}"
        folder.mkdir(exist_ok=True)
        parts = {}
        for name, sizes in sizes_of.items():
            whole = [make_batch(max(size, 1), 10 * rank.rank + at) for at, size in enumerate(sizes[rank.rank])]
            parts[name] = OwnBatches([slice_of(b, 0, n) for b, n in zip(whole, sizes[rank.rank], strict=True)])
        recipe = replace(recipe, data=replace(recipe.data, **parts))
        outcomes[what] = outcome_of(lambda r=recipe, f=folder: found_by(r, f, at_once))
    return outcomes


def jobs(rank: Rank) -> dict[str, Any]:
    """`dnis search` as the launcher runs it on every rank; again over its own run."""

    def job(name: str) -> Results:
        return run_search(search_command(rank.folder / name))

    row = job("run").rows[0]
    return {
        "metrics": dict(row.metrics),
        "again": outcome_of(lambda: job("run")),
        "apart": outcome_of(lambda: job(f"apart{rank.rank}")),
        "is_left": (rank.folder / "apart0").exists(),
    }


def search_command(out: Path, **fields: Any) -> SearchCommand:
    """A short search of the tiny recipe."""
    return SearchCommand(recipe="tests.tiny:demo", out=out, compression=SIZE, epochs=2, **fields)


def train_command(out: Path) -> TrainCommand:
    """A short training of the tiny recipe."""
    return TrainCommand(recipe="tests.tiny:demo", out=out, epochs=3)


def trained(rank: Rank) -> dict[str, Any]:
    """`dnis train` as the launcher runs it on every rank; again over its own run, and without a folder in common."""
    row = run_train(train_command(rank.folder / "trained")).rows[0]
    return {
        "metrics": dict(row.metrics),
        "again": outcome_of(lambda: run_train(train_command(rank.folder / "trained"))),
        "apart": outcome_of(lambda: run_train(train_command(rank.folder / f"alone{rank.rank}" / "trained"))),
    }


def hosts(rank: Rank) -> dict[str, Any]:
    """`dnis search` on two hosts that reach one URL and share no disk: stopped in the midst, and gone on with."""
    url, own = f"shared://{rank.folder}/stored", rank.folder / f"host{rank.rank}"
    steps = itertools.count()
    register()

    def job(**options: Any) -> Results:
        return run_search(search_command(own / "run", **options))

    with patch.dict(os.environ, {"DNIS_CACHE": str(own / "cache")}), patch.object(SearchCommand, "url", url):
        with patch("dnis_torchrec.cli.progress._SearchStop.is_requested", lambda _: next(steps) > 34):
            stopped = outcome_of(job)
        checkpoints = len(list((rank.folder / "stored" / "checkpoints").glob("step-*")))
        row = job(resume=True).rows[0]
        again = job(resume=True).rows[:1]
    return {
        "stopped": stopped,
        "checkpoints": checkpoints,
        "metrics": dict(row.metrics),
        "again": [dict(row.metrics) for row in again],
        "own": sorted(path.relative_to(own).as_posix() for path in own.rglob("*") if path.is_file()),
    }


def broken(data: Path | None, *, seed: int, embedding_dim: int | None) -> Recipe:
    """A recipe that fails on rank 1 alone."""
    recipe = make_recipe()
    return replace(recipe, stop_on={0: "loss"}[dist.get_rank()])


def refused(rank: Rank) -> dict[str, Any]:
    """What only one rank meets, or what differs between ranks, stops all before training."""
    folder = rank.folder / "refused"
    folder.mkdir(exist_ok=True)
    bad_label = make_recipe()
    bad_label.data.selection.batches[1].labels[40] = 5.0  # in the second half: rank 1 alone gets it
    bad_order = make_recipe()
    if rank.rank == 1:
        bad_order.data.train.batches.reverse()
    bad_start = SearchEvents(on_start=lambda *_: 1 / (0 if rank.rank == 0 else 1))
    small = make_recipe()
    small.data.test.batches[0] = make_batch(1, 60)
    few = make_recipe()
    few.data.test.batches[0] = ranked(make_batch(27, 60), 9)  # five of the second query on rank 0, four on rank 1
    job = SearchCommand(recipe="tests.distributed.search_scenarios:broken", out=folder / "run")
    return {
        "recipe": outcome_of(lambda: run_search(job)),
        "candidates": outcome_of(lambda: found_by(few, folder)),
        "label": outcome_of(lambda: found_by(bad_label, folder)),
        "order": outcome_of(lambda: found_by(bad_order, folder)),
        "start": outcome_of(lambda: found_by(make_recipe(), folder, bad_start)),
        "small": outcome_of(lambda: found_by(small, folder)),
        "size": outcome_of(lambda: found_by(make_recipe(), folder, compression=900)),
    }


def diverges(rank: Rank) -> dict[str, Any]:
    """NaN on one rank stops all; the last good checkpoint stays."""
    folder = rank.folder / "diverges"
    folder.mkdir(exist_ok=True)
    own = make_recipe()

    def poison(record: Any) -> None:
        if record.epoch == 1 and rank.rank == 1:
            own.data.train.batches[4].dense_features[:] = float("nan")

    return {"outcome": outcome_of(lambda: found_by(own, folder, SearchEvents(on_epoch=poison), epochs=3))}
