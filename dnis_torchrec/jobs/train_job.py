"""`dnis train`: from a recipe to a run folder that holds its plain model, trained to its own early
stop."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from dnis_torchrec._dependencies import versions
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import describe
from dnis_torchrec.data.over_ranks import read_before_training
from dnis_torchrec.data.recipe import Recipe, build_recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.jobs.new_run import new_run, task_of_trained
from dnis_torchrec.jobs.progress import plain_progress
from dnis_torchrec.jobs.run_folder import TRAINED, RunFolder, RunWriteError
from dnis_torchrec.ranks import Ranks, on_rank_zero, rank_of, together
from dnis_torchrec.report import ReportRow
from dnis_torchrec.report.content import UNCOMPRESSED
from dnis_torchrec.report.provenance import PROVENANCE, Step
from dnis_torchrec.search.prune import uncompressed_scheme
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training.checkpoint import check_shared
from dnis_torchrec.training.evaluate import evaluate, primary_metric
from dnis_torchrec.training.loop import PlainTraining, train_plainly
from dnis_torchrec.training.settings import TrainSettings
from dnis_torchrec.training.shard import process_group, shard


@dataclass(frozen=True, kw_only=True)
class TrainJob(TrainSettings):
    """Arguments of `dnis train`, with its settings."""

    recipe: str
    data: Path | None
    out: Path
    overwrite: bool = False


def run_train(job: TrainJob) -> ReportRow:
    """Trains a recipe's plain model, evaluates it on the test split and writes the run folder."""
    with process_group() as device:
        with together():
            recipe = build_recipe(
                job.recipe, job.data, seed=job.seed, embedding_dim=job.embedding_dim
            )
            if job.embedding_l2 is not None:
                recipe = replace(recipe, embedding_l2=job.embedding_l2)
        on_rank_zero(
            lambda: RunFolder.check_free(job.out, overwrite=job.overwrite, can_resume=False)
        )
        check_shared(job.out.parent)
        data, counts, _ = read_before_training(
            recipe, table_configs(recipe.model), Ranks.everyone()
        )
        recipe = replace(recipe, data=data)
        return _train(job, recipe, counts, device)


def _train(
    job: TrainJob, recipe: Recipe, counts: FrequencyCounts, device: torch.device
) -> ReportRow:
    scheme = uncompressed_scheme(recipe.model)
    torch.manual_seed(job.seed)
    started = time.monotonic()
    task = TrainTask(recipe.model, recipe.task, embedding_l2=recipe.embedding_l2)
    model, optimizer = shard(task, recipe, device)
    job.out.parent.mkdir(parents=True, exist_ok=True)
    progress = plain_progress(recipe, counts.num_samples, job.epochs)
    with progress as (events, train):
        trained = train_plainly(
            model,
            optimizer,
            replace(recipe, data=replace(recipe.data, train=train)),
            device,
            max_epochs=job.epochs,
            patience=job.patience,
            events=events,
        )
    metrics = evaluate(model, recipe.data.test, recipe.task, device)
    row = uncompressed_row(model, metrics, job.seed, time.monotonic() - started)
    head = _head(job, recipe, trained) | {
        "notes": [],
        "scheme": scheme.to_json(),
        "metrics": metrics,
    }
    try:
        with new_run(job.out, overwrite=job.overwrite) as run:
            run.save_model(task_of_trained(model).model, scheme)
            with together():
                if rank_of() == 0:
                    run.save_stages(counts)
                    run.write_rows([row])
                    run.write_head("finished", head)
    except (OSError, SafetensorError) as error:
        requirement = "to write the trained run"
        raise RunWriteError(
            describe(f"run folder {job.out}", requirement, str(error), "make room for it")
        ) from error
    return row


def uncompressed_row(
    model: nn.Module, metrics: dict[str, float], seed: int, seconds: float = 0.0
) -> ReportRow:
    """The row of a model whose tables are as training left them."""
    parameters = uncompressed_scheme(model).parameters
    return ReportRow(
        method=UNCOMPRESSED,
        compression=1.0,
        parameters=parameters,
        dense_parameters=parameters,
        bytes={"dense_fp32": 4 * parameters},
        metrics=metrics,
        seed=seed,
        seconds=seconds,
    )


_CURVES = ("epoch", "step", "train_loss", "selection_loss")
"""What a training says of its epochs; there is no alpha in it."""


def _head(job: TrainJob, recipe: Recipe, trained: PlainTraining) -> dict[str, Any]:
    metric, higher = primary_metric(recipe.task, recipe.data.test)
    return {
        "kind": TRAINED,
        "recipe": job.recipe,
        "seed": job.seed,
        "embedding_dim": job.embedding_dim,
        "configuration": {
            "embedding_l2": recipe.embedding_l2,
            "max_epochs": job.epochs,
            "patience": job.patience,
        },
        "primary_metric": metric,
        "higher_is_better": higher,
        "versions": versions(),
        PROVENANCE: [Step.now("train", job.out).to_json()],
        "history": [{name: getattr(one, name) for name in _CURVES} for one in trained.history],
        "best_epoch": trained.best_epoch,
    }
