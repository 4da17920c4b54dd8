"""A process of one cell: ``python -m dnis_torchrec.comparison.worker OUT/cells/CELL [helps]``. It
ends with its parent."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from dnis_torchrec._dependencies import versions
from dnis_torchrec.artifact.export import export
from dnis_torchrec.artifact.predictions import predict_forms
from dnis_torchrec.comparison.cells import (
    HELPS,
    WORK,
    CellResult,
    CellTask,
    TrainedCell,
    write_crash,
)
from dnis_torchrec.comparison.methods.method import (
    HelpIsOverError,
    Method,
    MethodResult,
    MethodTask,
    NotApplicableError,
    SizeNotMetError,
    precisions_of,
    result_row,
)
from dnis_torchrec.comparison.methods.partitioned import is_partitioned
from dnis_torchrec.comparison.methods.precisions import best_precision
from dnis_torchrec.comparison.methods.projected import is_projected
from dnis_torchrec.comparison.registry import load_registry
from dnis_torchrec.comparison.settings import training_rules
from dnis_torchrec.comparison.shared_recipe import SharedRecipe
from dnis_torchrec.comparison.streams import train_on_validation
from dnis_torchrec.data.over_ranks import NotedBatches
from dnis_torchrec.data.recipe import Recipe, build_recipe
from dnis_torchrec.data.users_code import RecipeError
from dnis_torchrec.forms import WRITTEN_BY_DEFAULT
from dnis_torchrec.selection.shards import collections, dense_parameters
from dnis_torchrec.training.settings import Ending, Stopped
from dnis_torchrec.training.shard import process_group

_SECONDS_TO_END = 10


def run_cell(folder: Path) -> CellResult:
    """Runs one cell in this process and writes its result.json."""
    task = CellTask.read(folder)
    cell, rules = task.cell, task.rules
    with process_group() as device, _work_folder(folder) as work:
        method, method_task = _method(task, device, work)
        try:
            made = best_precision(method, method_task, _precisions(task, method))
        except (SizeNotMetError, NotApplicableError) as error:
            result = CellResult(cell=cell, rules=rules, versions=versions(), reason=str(error))
        else:
            recipe = method_task.build(None)
            trained = _measure(task, made, recipe, device)
            result = CellResult(cell=cell, rules=rules, versions=versions(), trained=trained)
            if (
                task.artifact and made.scheme.parameters
            ):  # without embeddings there is nothing to serve
                _export(folder / "artifact", result, trained, made, recipe)
    result.write(folder)
    return result


def help_cell(folder: Path) -> None:
    """Trains trials of a cell that another process leads, as long as some are left."""
    with process_group() as device, suppress(HelpIsOverError):
        task = CellTask.read(folder)
        method, method_task = _method(task, device, folder / WORK)
        best_precision(method, replace(method_task, helps=True), _precisions(task, method))


def _precisions(task: CellTask, method: Method) -> tuple[str, ...]:
    """Those in which a cell's method is run; a comparison of an older version knows float32 alone."""
    return precisions_of(method, task.rules.get("precisions", ["fp32"]))


def _method(task: CellTask, device: torch.device, work: Path) -> tuple[Method, MethodTask]:
    """Returns the method of a cell and its task; seeds all random numbers."""
    cell, rules = task.cell, task.rules

    data = None if task.data is None else Path(task.data)
    build = SharedRecipe(
        lambda dim: build_recipe(rules["recipe"], data, seed=cell.seed, embedding_dim=dim)
    )
    torch.manual_seed(cell.seed)
    return load_registry(task.registry)[cell.method], MethodTask(
        build=(lambda embedding_dim: train_on_validation(build(embedding_dim)))
        if cell.with_validation
        else build,
        build_for_search=build if cell.with_validation else None,
        compression=1 if cell.size is None else cell.size,
        seed=cell.seed,
        device=device,
        folder=work,
        processes=task.processes,
        trained=None if task.trained is None else Path(task.trained),
        **training_rules(rules),
    )


@contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """An empty folder for checkpoints, gone afterwards, with what a killed process left in it."""
    work = folder / WORK
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work)


def _measure(
    task: CellTask, made: MethodResult, recipe: Recipe, device: torch.device
) -> TrainedCell:
    """Evaluates on the test split, and gathers the costs of the method."""
    test = NotedBatches(recipe.data.test)
    row = result_row(task.cell.row_name, made, recipe, test, seed=task.cell.seed, device=device)
    return TrainedCell(
        row=row,
        dense_bytes=4 * dense_parameters(recipe.model),
        form=made.form,
        embedding_bytes=made.embedding_bytes(),
        extra_bytes=made.extra_bytes,
        selection_loss=made.selection_loss,
        trials=made.trials,
        seconds_of_trials=made.seconds_of_trials,
        settings=dict(made.settings),
        device=device.type,
        cells_at_once=task.cells_at_once,
        network_bytes=_weights_beside_tables(made.model) - made.extra_bytes,
        resident_bytes={
            p.form: p.resident_bytes
            for p in predict_forms(made.scheme)
            if p.resident_bytes is not None
        },
        test_fingerprint=test.fingerprint,
    )


def _weights_beside_tables(model: nn.Module) -> int:
    """Float32 bytes of every parameter that is no table's."""
    of_tables = {
        id(table) for module in collections(model).values() for table in module.parameters()
    }
    return 4 * sum(weight.numel() for weight in model.parameters() if id(weight) not in of_tables)


def _export(
    out: Path, result: CellResult, trained: TrainedCell, made: MethodResult, recipe: Recipe
) -> None:
    """Exports a result with all that `dnis evaluate`, `verify` and `package` need to know of it."""
    run = {
        "recipe": result.rules["recipe"],
        "seed": result.cell.seed,
        "embedding_dim": made.embedding_dim,
        "projected": is_projected(made.model),
        "partitioned": is_partitioned(made.model),
        "form": made.form,
        "configuration": {
            "method": result.cell.row_name,
            "size": result.cell.size,
            **trained.settings,
        },
        "versions": dict(result.versions),
        "metrics": dict(trained.row.metrics),
        "notes": list(recipe.notes),
    }
    # The form that is compared, and the exact ones that any other can be made from.
    exact = [] if made.scheme.has_codes else WRITTEN_BY_DEFAULT
    forms = tuple(dict.fromkeys((*exact, made.form)))
    export(made.model, made.scheme, out, forms=forms, run=run, overwrite=True)


def run_process() -> None:
    """Entry point of the process: exit code 0 with a result.json, 1 with a crash.txt; one that
    helps leaves neither."""
    folder = Path(sys.argv[1])
    helps = sys.argv[2:] == [HELPS]
    try:
        with Ending():
            threading.Thread(target=_end_with_parent, daemon=True).start()
            (help_cell if helps else run_cell)(folder)
    except Stopped as stop:
        sys.exit(stop.exit_code)
    except Exception as error:
        if helps:
            raise
        # What the recipe itself raised says more here, in full, than what a command would say of it
        # in short.
        told = error.__cause__ if isinstance(error, RecipeError) and error.__cause__ else error
        write_crash(folder, "".join(traceback.format_exception(told)))
        sys.exit(1)


def _end_with_parent() -> None:
    """Ends this process when the comparison that started it is gone, however it went: its end of
    the pipe closes."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SECONDS_TO_END)
    os._exit(1)


if __name__ == "__main__":
    run_process()
