"""`dnis prune`: a finished run, smaller."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.files import PARTIAL
from dnis_torchrec.data.recipe import Recipe, TrainTask, build_recipe_again
from dnis_torchrec.data.urls import Address
from dnis_torchrec.data.users_code import errors_of_its_code
from dnis_torchrec.jobs.model_shards import check_state, fill_, forget_tables_
from dnis_torchrec.jobs.new_run import new_run, task_of_trained
from dnis_torchrec.jobs.run_folder import RunFolder, RunWriteError
from dnis_torchrec.jobs.stored_tensors import StoredTensor
from dnis_torchrec.ranks import Ranks, on_rank_zero, rank_of, together, world_size_of
from dnis_torchrec.report import ReportRow
from dnis_torchrec.report.of_run import scheme_row
from dnis_torchrec.report.provenance import PROVENANCE, Step, steps_of
from dnis_torchrec.scheme import MIXED_DIMENSION, MixedDimensionScheme
from dnis_torchrec.search.budget import Size
from dnis_torchrec.search.pruning import prune
from dnis_torchrec.search.settings import PruneSettings
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.streaming import CountLimits
from dnis_torchrec.streaming.checked_counts import read_before_training
from dnis_torchrec.training.checkpoint import check_shared
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.rounded import RetainedMask
from dnis_torchrec.training.shard import process_group, shard


def check_source_kept(run: Address, out: Address) -> None:
    """Refuses to write a pruned run over the run to prune."""
    expected = "another folder than that of the run to prune"
    check(
        not Path(run).resolve().is_relative_to(Path(out).resolve()),
        f"run folder {out}",
        expected,
        f"the one that holds {run}",
        "choose another --out",
    )


def check_prune_out(run_path: Path, out: Path, *, overwrite: bool = False) -> None:
    """Refuses to write a pruned run where it may not stand."""
    check_source_kept(run_path, out)
    RunFolder.check_free(out, overwrite=overwrite, can_resume=False)


def run_prune(
    run_path: Path,
    data: Path | None,
    out: Path,
    *,
    recipe: str,
    size: Size | None = None,
    settings: PruneSettings | None = None,
    overwrite: bool = False,
) -> ReportRow:
    """Prunes a finished run further, fine-tunes what is left with the mask held, and writes a new
    run folder."""
    how = settings or PruneSettings()
    with process_group() as device:
        step = Step.now("prune", out)
        on_rank_zero(lambda: check_prune_out(run_path, out, overwrite=overwrite))
        check_shared(out.parent)
        with together():
            run = RunFolder.open_searched(run_path)
        with errors_of_its_code(recipe):
            with together():
                source = _Source.read(run, recipe, data)
            tables, ranks = table_configs(source.recipe.model), Ranks.everyone()
            read, _, _ = read_before_training(source.recipe, tables, ranks, CountLimits())
            source = replace(source, recipe=replace(source.recipe, data=read))
            started = time.monotonic()
            task, scheme = _pruned(source, size, how, device, out)
            metrics = evaluate(task.to(device), read.test, task.task, device)
        form = MIXED_DIMENSION if size is None else size.form
        row = scheme_row(
            "dnis", scheme, metrics, source.head["seed"], time.monotonic() - started, form
        )
        _write(source, step, task.model, scheme, row, out, overwrite=overwrite)
    return row


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A finished search: its recipe, whose model is not filled yet, and what fills it."""

    run: RunFolder
    head: Mapping[str, Any]
    recipe: Recipe
    stored: Mapping[str, StoredTensor]
    blocks: RowBlocks
    counts: FrequencyCounts
    alpha: dict[int, Tensor]

    @staticmethod
    def read(run: RunFolder, spec: str, data: Path | None) -> _Source:
        head, stored = run.read_head() | {"recipe": spec}, run.stored()
        recipe = build_recipe_again(spec, data, head)
        if recipe.leave_alone:
            supported, remedy = (
                "supported are recipes without tables to leave alone",
                "search at the smaller size",
            )
            raise NotImplementedError(
                describe(f"recipe {spec!r}", supported, recipe.leave_alone, remedy)
            )
        check_state(recipe.model, stored, str(run.path))
        blocks, counts, alpha = run.blocks(), run.counts(), run.alpha()
        return _Source(
            run=run,
            head=head,
            recipe=recipe,
            stored=stored,
            blocks=blocks,
            counts=counts,
            alpha=alpha,
        )


def _pruned(
    source: _Source, size: Size | None, how: PruneSettings, device: torch.device, out: Path
) -> tuple[TrainTask, MixedDimensionScheme]:
    """The model pruned and fine-tuned: plain on one process, else sharded as it was for the
    training."""
    prune_ = partial(
        prune,
        blocks=source.blocks,
        counts=source.counts,
        size=size,
        threshold=how.threshold,
        structure=how.structure,
        per_table=how.per_table,
    )
    recipe = source.recipe
    plain, is_alone = recipe.model, world_size_of() == 1
    forget_tables_(plain)
    if is_alone:  # a sharded model of one process is for training alone
        fill_(plain, source.stored)
        scheme = prune_(plain)
    task = TrainTask(plain, recipe.task, embedding_l2=recipe.embedding_l2)
    model, optimizer = shard(task, recipe, device)
    if not is_alone:
        spread = cast(TrainTask, get_unwrapped_module(model)).model
        with together():
            fill_(spread, source.stored)
        scheme = prune_(spread)
    torch.manual_seed(source.head["seed"])
    if how.fine_tune_epochs:
        _fine_tune(model, optimizer, recipe, device, how.fine_tune_epochs, out)
    return task_of_trained(model), scheme


def _fine_tune(
    model: DistributedModelParallel,
    optimizer: KeyedOptimizerWrapper,
    recipe: Recipe,
    device: torch.device,
    max_epochs: int,
    out: Path,
) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=".", suffix=PARTIAL) as folder:
        train_plainly(
            model,
            optimizer,
            recipe,
            device,
            max_epochs=max_epochs,
            patience=3,
            folder=Path(folder),
            held=RetainedMask(model),
            starts_trained=True,
        )


def _write(
    source: _Source,
    step: Step,
    model: nn.Module,
    scheme: MixedDimensionScheme,
    row: ReportRow,
    out: Path,
    *,
    overwrite: bool,
) -> None:
    kept = {
        name: value
        for name, value in source.head.items()
        if name not in ("format", "format_version", "status")
    }
    steps = [one.to_json() for one in (*steps_of(source.head, source.run.path), step)]
    head = kept | {"scheme": scheme.to_json(), "metrics": dict(row.metrics), PROVENANCE: steps}
    try:
        with new_run(out, overwrite=overwrite) as run:
            run.save_model(model, scheme, source.alpha)
            with together():
                if rank_of() == 0:
                    run.save_stages(source.counts, source.blocks)
                    run.write_rows([row, *source.run.rows()])
                    run.write_head("finished", head)
    except (OSError, SafetensorError) as error:
        remedy = "make room for it"
        raise RunWriteError(
            describe(f"run folder {out}", "to write the pruned run", str(error), remedy)
        ) from error
