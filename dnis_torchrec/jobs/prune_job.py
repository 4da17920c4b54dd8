"""`dnis prune`: a finished run, smaller."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.recipe import Recipe, TrainTask
from dnis_torchrec.data.users_code import errors_of_its_code
from dnis_torchrec.forms import DEFAULT_FORM
from dnis_torchrec.jobs.model_shards import load_state_
from dnis_torchrec.jobs.recorded import build_recorded, load_recorded
from dnis_torchrec.jobs.run_folder import RunFolder, RunWriteError
from dnis_torchrec.report import ReportRow
from dnis_torchrec.report.of_run import scheme_row
from dnis_torchrec.search.budget import Size
from dnis_torchrec.search.pruning import prune
from dnis_torchrec.search.settings import PruneSettings
from dnis_torchrec.soft_selection.swap import unshard_
from dnis_torchrec.storage.files import Address, holds
from dnis_torchrec.storage.workplaces import workplace
from dnis_torchrec.training.evaluation import evaluate
from dnis_torchrec.training.plain import train_plainly
from dnis_torchrec.training.process_group import process_group
from dnis_torchrec.training.retained_mask import RetainedMask
from dnis_torchrec.training.sharded import shard


def check_source_kept(run: Address, out: Address) -> None:
    """Refuses to write a pruned run over the run to prune.

    Args:
        run: the run to prune, a path or the URL that it was fetched from.
        out: run folder to make, a path or the URL that it goes to.

    Raises:
        ValueError: if `out` is the run to prune, or a folder that holds it.
    """
    expected = "another folder than that of the run to prune"
    check(not holds(out, run), f"run folder {out}", expected, f"the one that holds {run}", "choose another --out")


def check_prune_out(run_path: Path, out: Path, *, overwrite: bool = False) -> None:
    """Refuses to write a pruned run where it may not stand.

    Args:
        run_path: the run to prune.
        out: run folder to make.
        overwrite: replace a run that stands at `out`.

    Raises:
        ValueError: if something stands at `out` that may not be overwritten, or the run to prune, or a folder of it.
    """
    check_source_kept(run_path, out)
    RunFolder.check_free(out, overwrite=overwrite, can_resume=False)


def run_prune(
    run_path: Path,
    data: Path | None,
    out: Path,
    *,
    recipe: str | None = None,
    size: Size | None = None,
    settings: PruneSettings | None = None,
    overwrite: bool = False,
) -> ReportRow:
    """Prunes a finished run further, fine-tunes what is left with the mask held, and writes a new run folder.

    Nothing at `out` is touched before a whole run is written beside it; fine-tuning keeps its best epoch in a folder
    there, too.

    Args:
        run_path: a finished run.
        data: folder of its data.
        out: run folder to make.
        recipe: ``module:function``; None for the run's own, where that is the user's own code.
        size: see `prune`; None where the settings have a threshold.
        settings: how to prune and fine-tune; the default ones if not given.
        overwrite: replace a run that stands at `out`.

    Returns:
        The row of the pruned model; the new report.json holds it in front of the source's rows.

    Raises:
        ValueError: for a bad size, or if the run cannot be written to `out` (see `check_prune_out`), and as
            `load_recorded`; before training.
        NotImplementedError: for a recipe with tables to leave alone.
        RunWriteError: if the pruned run could not be written; what stood at `out` is as it was.
    """
    how = settings or PruneSettings()
    check_prune_out(run_path, out, overwrite=overwrite)
    source = RunFolder.open_searched(run_path)
    head = source.read_head()
    spec = load_recorded(run_path, head, data, recipe)
    built = build_recorded(run_path, head, data, recipe)
    if built.leave_alone:
        supported, remedy = "supported are recipes without tables to leave alone", "search at the smaller size"
        raise NotImplementedError(describe(f"recipe {spec!r}", supported, built.leave_alone, remedy))
    load_state_(built.model, source.state(), str(run_path))
    counts, blocks = source.counts(), source.blocks()
    form = DEFAULT_FORM if size is None else size.form
    started = time.monotonic()
    scheme = prune(
        built.model,
        blocks,
        counts,
        size=size,
        threshold=how.threshold,
        structure=how.structure,
        per_table=how.per_table,
    )
    with process_group() as device, errors_of_its_code(spec):
        torch.manual_seed(head["seed"])
        task = TrainTask(built.model, built.task, embedding_l2=built.embedding_l2)
        if how.fine_tune_epochs:
            out.parent.mkdir(parents=True, exist_ok=True)
            with workplace(out) as place:
                place.new.mkdir()
                task = _fine_tune(task, built, device, how.fine_tune_epochs, place.new)
        metrics = evaluate(task.to(device), built.data.test, built.task, device)
    row = scheme_row("dnis", scheme, metrics, head["seed"], time.monotonic() - started, form)
    fields = {name: value for name, value in head.items() if name not in ("format", "format_version", "status")}
    try:
        with RunFolder.whole(out, overwrite=overwrite) as run:
            run.save_stages(counts, blocks)
            run.save_model(task.model, scheme, source.alpha())
            run.write_rows([row, *source.rows()])
            run.write_head("finished", fields | {"recipe": spec, "scheme": scheme.to_json(), "metrics": metrics})
    except (OSError, SafetensorError) as error:
        remedy = "make room for it"
        raise RunWriteError(describe(f"run folder {out}", "to write the pruned run", str(error), remedy)) from error
    return row


def _fine_tune(task: TrainTask, recipe: Recipe, device: torch.device, max_epochs: int, folder: Path) -> TrainTask:
    model, optimizer = shard(task, recipe, device)
    mask = RetainedMask(model)
    train_plainly(
        model,
        optimizer,
        recipe,
        device,
        max_epochs=max_epochs,
        patience=3,
        folder=folder,
        held=mask,
        starts_trained=True,
    )
    return cast(TrainTask, unshard_(model))
