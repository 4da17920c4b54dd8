"""`dnis search`: from a recipe to a run folder, also in several attempts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dnis_torchrec._dependencies import versions
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.over_ranks import split_over_ranks
from dnis_torchrec.data.recipe import Recipe, build_recipe
from dnis_torchrec.data.task import TrainTask, direction_of
from dnis_torchrec.jobs.given_model import TRAINED_EPOCHS, GivenModel
from dnis_torchrec.jobs.progress import console_events, tell_tensorboard
from dnis_torchrec.jobs.run_folder import RunFolder, RunWriteError
from dnis_torchrec.jobs.stored_rows import ROWS, in_rows, table_bytes
from dnis_torchrec.jobs.train_job import uncompressed_row
from dnis_torchrec.ranks import Ranks, on_rank_zero, rank_of, together, world_size_of
from dnis_torchrec.report import ReportRow
from dnis_torchrec.report.content import UNCOMPRESSED
from dnis_torchrec.report.of_run import scheme_row
from dnis_torchrec.report.provenance import PROVENANCE, Step, steps_of
from dnis_torchrec.report.test_split import CountedLabels
from dnis_torchrec.report.verdict import doubts
from dnis_torchrec.scheme import PACKED
from dnis_torchrec.search.search import COMPRESSED, SEARCHED, SearchOutcome, search
from dnis_torchrec.search.settings import SearchSettings, check_compression
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training.checkpoint import check_shared
from dnis_torchrec.training.evaluate import evaluate, primary_metric
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.shard import process_group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """Arguments of `dnis search`."""

    recipe: str
    data: Path | None
    out: Path
    compression: float = 20.0
    settings: SearchSettings = field(default_factory=SearchSettings)
    embedding_dim: int | None = None
    seed: int = 0
    given: GivenModel | None = None
    stored_rows: bool = True
    overwrite: bool = False
    saving: Saving = field(default_factory=Saving)
    url: str | None = None

    def __post_init__(self) -> None:
        check(self.seed >= 0, "seed", "an integer >= 0", self.seed)
        dim = self.embedding_dim
        check(
            dim is None or dim >= 1,
            "embedding_dim",
            "an integer >= 1",
            dim,
            "leave it out for the recipe's",
        )
        contradiction = self.overwrite and self.saving.resume
        check(not contradiction, "--resume", "no --overwrite", "both", "give one of them")
        if self.given is not None:
            self.given.check_apart(self.out)
        check_compression(self.compression)


def run_search(job: SearchJob) -> list[ReportRow]:
    """Searches, evaluates on the test split and writes the run folder."""
    with process_group() as device:
        with together():
            recipe = build_recipe(
                job.recipe, job.data, seed=job.seed, embedding_dim=job.embedding_dim
            )
            trained = (
                None
                if job.given is None
                else job.given.fill_(recipe.model, _identity(job), job.settings.epochs)
            )
            head = _head(job, recipe, trained)
        with _run_folder(job, head) as run:
            if on_rank_zero(run.status) != "finished":
                _search(job, recipe, trained, head, run, device)
            rows = list(on_rank_zero(run.rows))
            if (
                job.stored_rows
                and world_size_of() == 1
                and UNCOMPRESSED not in {row.method for row in rows}
            ):
                rows += _stored_rows(job, run, device)
                run.write_rows(rows)
    return rows


@contextmanager
def _run_folder(job: SearchJob, head: dict[str, Any]) -> Iterator[RunFolder]:
    """The folder of a new run, or of the one to go on with; locked by rank 0 until this job ends."""
    run = RunFolder(job.out, url=job.url)
    with ExitStack() as stack:
        with together():
            if rank_of() == 0:
                if not (job.saving.resume and run.status()):
                    RunFolder.create(job.out, url=job.url, overwrite=job.overwrite)
                stack.enter_context(run.lock())
                if run.status():
                    run.check_same(head)
                    begun = steps_of(
                        run.read_head(), run.path
                    )  # what is resumed comes of the command that began it
                    head[PROVENANCE] = [step.to_json() for step in begun]
        with _left_in_order(run, head):
            if run.is_shared:
                check_shared(run.path)
            with together():
                if rank_of() == 0 and run.status() != "finished":
                    run.write_head("searching", head)
                    run.announce()
            yield run


def _search(
    job: SearchJob,
    recipe: Recipe,
    trained_epochs: int | None,
    head: dict[str, Any],
    run: RunFolder,
    device: torch.device,
) -> None:
    """The search itself; leaves a finished run with its row."""
    with console_events(run, recipe) as events:
        torch.manual_seed(job.seed)
        started = time.monotonic()
        outcome = search(
            recipe,
            job.compression,
            run.checkpoints,
            device,
            settings=job.settings,
            trained_epochs=trained_epochs,
            events=events,
            saving=job.saving,
        )
        seconds = outcome.seconds_before + time.monotonic() - started
    task = TrainTask(outcome.model, recipe.task)
    test = CountedLabels(split_over_ranks(recipe.data, Ranks.everyone()).test)
    metrics = evaluate(task, test, recipe.task, device)
    history = [asdict(record) for record in outcome.history]
    found = {"doubts": doubts(test.of(Ranks.everyone()), metrics, history, job.settings.epochs)}
    rows = [scheme_row("dnis", outcome.scheme, metrics, job.seed, seconds, PACKED)]
    try:
        run.save_model(outcome.model, outcome.scheme, outcome.alpha)
        with together():
            if rank_of() == 0:
                settings = {"recipe": job.recipe, "seed": job.seed} | head["configuration"]
                tell_tensorboard(run, settings, metrics, outcome.history[-1].step)
                run.write_rows(rows)
                run.write_head(
                    "finished", head | found | _results(recipe, head["notes"], outcome, metrics)
                )
                run.drop_replaced()
    except (OSError, SafetensorError) as error:
        requirement, remedy = "to write what the search found", "make room for it, then --resume"
        raise RunWriteError(
            describe(f"run folder {run.path}", requirement, str(error), remedy)
        ) from error


@contextmanager
def _left_in_order(run: RunFolder, head: Mapping[str, Any]) -> Iterator[None]:
    """Leaves a run to resume after an error in the block, or what was there before if nothing was
    trained."""
    try:
        yield
    except BaseException:
        if rank_of() == 0:
            with suppress(
                OSError
            ):  # a full disk, or storage that is away, must not hide what went wrong
                _keep_or_delete(run, head)
        raise


def _keep_or_delete(run: RunFolder, head: Mapping[str, Any]) -> None:
    if run.status() == "finished":
        return
    if run.has_checkpoint():
        run.write_head("interrupted", head)
        run.drop_replaced()
    else:
        run.delete()


def _stored_rows(job: SearchJob, run: RunFolder, device: torch.device) -> list[ReportRow]:
    """Rows of the model that plain training ended with, or that was given: as it is, and in fewer
    bits a value."""
    recipe = build_recipe(job.recipe, job.data, seed=job.seed, embedding_dim=job.embedding_dim)
    trained = job.given or GivenModel(run=run.path)
    trained.fill_(recipe.model, _identity(job), job.settings.epochs)
    metrics = evaluate(
        TrainTask(recipe.model.to(device), recipe.task), recipe.data.test, recipe.task, device
    )
    rows = [uncompressed_row(recipe.model, metrics, job.seed)]
    tables, parameters = table_configs(recipe.model), rows[0].parameters
    for name, bits in ROWS.items():
        with in_rows(recipe.model, bits, leave_alone=recipe.leave_alone) as model:
            task = TrainTask(model, recipe.task)
            metrics = evaluate(task, recipe.data.test, recipe.task, device)
        num_bytes = table_bytes(tables, bits, leave_alone=recipe.leave_alone)
        rows.append(
            ReportRow(
                method=name,
                compression=4 * parameters / num_bytes,
                parameters=parameters,
                dense_parameters=parameters,
                bytes={"rows": num_bytes},
                metrics=metrics,
                seed=job.seed,
                seconds=0.0,
            )
        )
    return rows


def _identity(job: SearchJob) -> dict[str, Any]:
    """Facts that decide which model it is, and on which samples it learns."""
    return {"recipe": job.recipe, "seed": job.seed, "embedding_dim": job.embedding_dim}


def _head(job: SearchJob, recipe: Recipe, trained_epochs: int | None) -> dict[str, Any]:
    metric, higher = primary_metric(recipe.task, recipe.data.test)
    given = {} if job.given is None else {"given": str(job.given), TRAINED_EPOCHS: trained_epochs}
    begun_with = None if job.given is None else job.given.run
    earlier = () if begun_with is None else steps_of(RunFolder(begun_with).read_head(), begun_with)
    size = {"compression": job.compression, "embedding_l2": recipe.embedding_l2}
    return _identity(job) | {
        "configuration": asdict(job.settings) | size | given,
        "primary_metric": metric,
        "higher_is_better": higher,
        "notes": [],
        "versions": versions(),
        PROVENANCE: [step.to_json() for step in (*earlier, Step.now("search", job.out))],
    }


def _note_of_origin(recipe: Recipe, outcome: SearchOutcome) -> list[str]:
    """Says of a search that gained nothing what is served instead."""
    if outcome.origin != COMPRESSED:
        return []
    losses, sign = outcome.selection_losses, -1 if direction_of(recipe.task, recipe.stop_on) else 1
    searched, compressed = (f"{sign * losses[name]:.5f}" for name in (SEARCHED, COMPRESSED))
    return [
        f"The search gained nothing: at the same bytes its selection {recipe.stop_on} is {searched}, that of plain "
        f"training, compressed, {compressed}. The latter is what this run holds."
    ]


def _results(
    recipe: Recipe, notes: list[str], outcome: SearchOutcome, metrics: dict[str, float]
) -> dict[str, Any]:
    return {
        "notes": [*notes, *_note_of_origin(recipe, outcome)],
        "origin": outcome.origin,
        "selection_losses": outcome.selection_losses,
        "scheme": outcome.scheme.to_json(),
        "history": [asdict(record) for record in outcome.history],
        "stop_on": recipe.stop_on,
        "stop_on_higher_is_better": bool(direction_of(recipe.task, recipe.stop_on)),
        "best_epoch": outcome.best_epoch,
        "metrics": metrics,
    }
