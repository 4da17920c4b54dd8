"""`dnis prune`: a finished run, smaller."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import torch

from dnis_torchrec.budget import Size
from dnis_torchrec.jobs.common import build_recipe, scheme_row
from dnis_torchrec.pruning import RetainedMask, prune
from dnis_torchrec.recipe import Recipe, TrainTask
from dnis_torchrec.report import ReportRow
from dnis_torchrec.run_folder import RunFolder, load_state_
from dnis_torchrec.swap import unshard_
from dnis_torchrec.training import evaluate, process_group, shard, train_plainly


def run_prune(
    run_path: Path,
    data: Path | None,
    out: Path,
    *,
    size: Size | None = None,
    threshold: float | None = None,
    structure: str = "block",
    scope: str = "global",
    max_epochs: int = 10,
    overwrite: bool = False,
) -> ReportRow:
    """Prunes a finished run further, fine-tunes what is left with the mask held, and writes a new run folder.

    Args:
        run_path: a finished run.
        data: folder of its data.
        out: run folder to make.
        size: see `prune`.
        threshold: see `prune`.
        structure: see `prune`.
        scope: see `prune`.
        max_epochs: epochs of fine-tuning at most; 0 prunes only.
        overwrite: replace a run that stands at `out`.

    Returns:
        The row of the pruned model; the new report.json holds it in front of the source's rows.
    """
    source = RunFolder.open(run_path)
    head = source.read_head()
    recipe = build_recipe(head["recipe"], data, seed=head["seed"], embedding_dim=head.get("embedding_dim"))
    load_state_(recipe.model, source.state(), str(run_path))
    counts, blocks = source.counts(), source.blocks()
    started = time.monotonic()
    scheme = prune(recipe.model, blocks, counts, size=size, threshold=threshold, structure=structure, scope=scope)
    run = RunFolder.create(out, overwrite=overwrite)
    with process_group() as device:
        torch.manual_seed(head["seed"])
        task = TrainTask(recipe.model, recipe.loss)
        if max_epochs:
            task = _fine_tune(task, recipe, device, max_epochs, run)
        metrics = evaluate(task, recipe.data.test, recipe.loss, device)
    row = scheme_row("dnis", scheme, metrics, head["seed"], time.monotonic() - started)
    run.save_stages(counts, blocks)
    run.save_model(task.model, scheme, source.alpha())
    run.write_rows([row, *source.rows()])
    fields = {name: value for name, value in head.items() if name not in ("format", "format_version", "status")}
    run.write_head("finished", fields | {"scheme": scheme.to_json(), "metrics": metrics})
    return row


def _fine_tune(task: TrainTask, recipe: Recipe, device: torch.device, max_epochs: int, run: RunFolder) -> TrainTask:
    model, optimizer = shard(task, recipe, device)
    mask = RetainedMask(model)
    train_plainly(
        model, optimizer, recipe, device, max_epochs=max_epochs, patience=3, folder=run.path / "checkpoints", mask=mask
    )
    return cast(TrainTask, unshard_(model))
