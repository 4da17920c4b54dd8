"""A recipe tried out on a batch before any training: what would stop it after an epoch stops it in
a second."""

from __future__ import annotations

from dnis_torchrec.data.final_sigmoid import warn_of_sigmoid
from dnis_torchrec.data.lookup_batches import for_lookup
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import check_task


def try_out(recipe: Recipe, *, warns: bool = True) -> None:
    """Runs a recipe's model on its first selection batch, in evaluation mode; nothing of the model
    changes. Local."""
    batch = next(iter(recipe.data.selection))
    if recipe.loss is None:
        check_task(recipe.model, recipe.task, for_lookup(batch), "selection batch 0")
    elif warns:
        warn_of_sigmoid(recipe.model, recipe.loss, batch)
