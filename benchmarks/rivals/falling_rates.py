"""Rates that fall: the uncompressed model trained on at lower and lower rates. Much of what a search
gains may be that."""

from dataclasses import replace

from torch import nn

from benchmarks.rivals.ours import in_codes
from benchmarks.rivals.task import Served, Task, keep, plain, train
from dnis_torchrec.training.loop import PlainTraining

RATES = (0.3, 0.1, 0.03)
"""Shares of the recipe's rates; each begins with the best epoch so far."""


def _train(task: Task) -> tuple[nn.Module, PlainTraining]:
    model, _ = plain(task)
    for share in RATES:
        recipe = task.build(None)
        rates = {name: share * getattr(recipe, name) for name in ("table_learning_rate", "dense_learning_rate")}
        model, training = train(task, replace(recipe, model=model, **rates), starts_trained=True)
    return model, training


def falling_rates(task: Task) -> Served:
    """Trains on at falling rates and serves float32 tables."""
    return Served(model=keep(task, "+falling", lambda: _train(task))[0], num_bytes=task.dense_bytes)


def compressed(task: Task) -> Served:
    """Trains on at falling rates, then compresses the tables."""
    return in_codes(task, falling_rates(task).model)
