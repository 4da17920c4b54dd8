"""What this project does itself: compress, and search."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.rivals.mixed import put_in_place
from benchmarks.rivals.task import Served, Task, UnmetError, plain
from dnis_torchrec.allocation.compress import compress as compress_
from dnis_torchrec.search.search import search as search_
from dnis_torchrec.search.settings import SearchSettings


def compress(task: Task) -> Served:
    """The uncompressed model with its tables in codes; scales learn on the validation split."""
    return in_codes(task, plain(task)[0])


def in_codes(task: Task, model: nn.Module) -> Served:
    """A trained model with its tables in codes."""
    recipe = task.build(None)
    try:
        result = compress_(
            model.eval(),
            recipe.data.train,
            loss=recipe.task,
            compression=task.size,
            held_out=recipe.data.validation,
            leave_alone=recipe.leave_alone,
        )
    except ValueError as error:
        raise UnmetError(str(error)) from error
    settings = {"predicted_loss_increase": result.predicted_loss_increase}
    return Served(model=model, num_bytes=result.num_bytes, settings=settings)


def search(task: Task) -> Served:
    """A search at its own defaults, from the plain training that methods share."""
    model, best_epoch = plain(task)
    recipe, settings = replace(task.build(None), model=model), SearchSettings()
    torch.manual_seed(task.seed)
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = search_(
                recipe,
                task.size,
                Path(folder),
                task.device,
                settings=replace(settings, patience=task.patience),
                trained_epochs=best_epoch + 1,
            )
        except ValueError as error:
            raise UnmetError(str(error)) from error
    num_bytes = outcome.scheme.served_bytes("packed")
    model = put_in_place(outcome.model.cpu(), outcome.scheme)
    return Served(model=model, num_bytes=num_bytes, settings={"origin": outcome.origin})
