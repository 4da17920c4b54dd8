"""The search as published: alpha's gradient of first order, or through one unrolled step of the
weights; the largest values of what it comes to are kept one by one, and trained on."""

from dataclasses import replace

import torch

from benchmarks.rivals.single_values import drop_unseen_, keep_largest_, serve_values, values_within
from benchmarks.rivals.task import Served, Task, UnmetError, check_pooled, train
from examples.paper.search import PaperSettings, search_as_published


def first_order(task: Task) -> Served:
    """Alpha's gradient takes the weights for constants."""
    return _search(task, is_unrolled=False)


def unrolled(task: Task) -> Served:
    """Alpha's gradient through one step of the weights (second order)."""
    return _search(task, is_unrolled=True)


def _search(task: Task, *, is_unrolled: bool) -> Served:
    number, recipe = values_within(task), task.build(None)
    check_pooled(recipe.model)
    epochs = max(2, task.max_epochs)
    settings = PaperSettings(epochs=epochs, patience=task.patience, is_unrolled=is_unrolled)
    torch.manual_seed(task.seed)
    try:
        outcome = search_as_published(recipe, settings, task.device)
    except NotImplementedError as error:
        raise UnmetError(str(error)) from error
    drop_unseen_(task, outcome.model)
    keep_largest_(outcome.model, number)
    recipe = replace(task.build(None), model=outcome.model)
    model, _ = train(task, recipe, masks=True, starts_trained=True)
    return serve_values(task, model, best_epoch=outcome.best_epoch)
