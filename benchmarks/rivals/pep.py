"""PEP (Liu et al. 2021): a threshold for every value learns beside it; what it leaves at zero is
gone, and the rest is trained anew."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rivals.int4_qat import Reparametrisation
from benchmarks.rivals.single_values import drop_unseen_, keep_largest_, serve_values, values_within
from benchmarks.rivals.task import Served, Task, shards_of, train
from dnis_torchrec.training.loop import EpochRecord, SearchEvents

START_SHARE = 0.1
"""Threshold at the beginning, as a share of the mean magnitude: hardly anything is below it."""
THRESHOLD_RATE = 3.0
"""Learning rate of thresholds over that of tables: s has to climb by several units."""
THRESHOLD_DECAY = 1e-5
"""That of the authors' code: it takes thresholds from their start, where f has no slope in s."""


class _EndError(Exception):
    """No more values are left than the bytes pay for, or no more epochs."""


class Thresholds(Reparametrisation):
    """Tables of which the model reads sign(V) relu(|V| - sigmoid(s))."""

    def __init__(self, model: nn.Module, optimizer: Any, rate: float) -> None:
        weights = [shard.weight for shard in shards_of(model)]
        mean = torch.cat([w.flatten().abs() for w in weights]).mean().clamp(1e-6, 0.9)
        start = float(torch.logit(START_SHARE * mean))
        self.thresholds = {s.table: torch.full_like(s.weight, start) for s in shards_of(model)}
        super().__init__(model, optimizer, lambda name, v: soft_threshold(v, self.thresholds[name]))
        parameters = list(self.thresholds.values())
        self._adam = torch.optim.Adam(parameters, lr=rate, weight_decay=THRESHOLD_DECAY)

    def number(self) -> int:
        """Values that are not zero."""
        return sum(int(weight.count_nonzero()) for weight in self.tables.values())

    def before_step(self) -> None:
        """Gradients of V and s by that of what the model reads."""
        for name, weight in self.tables.items():
            if weight.grad is not None:
                value, threshold = threshold_gradients(self.values[name], self.thresholds[name], weight.grad)
                weight.grad.copy_(value)
                self.thresholds[name].grad = threshold
        self._adam.step()


def soft_threshold(values: Tensor, thresholds: Tensor) -> Tensor:
    """Values less their thresholds."""
    return values.sign() * (values.abs() - thresholds.sigmoid()).relu()


def threshold_gradients(values: Tensor, thresholds: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of V and s by that of `soft_threshold`."""
    share = thresholds.sigmoid()
    value = gradient * (values.abs() > share)
    return value, -value * values.sign() * share * (1 - share)


def pep(task: Task) -> Served:
    """Learns thresholds until as few values are left as the bytes pay for, and trains these from
    their initial weights."""
    number, first, second = values_within(task), task.build(None), task.build(None)
    for recipe in (first, second):
        drop_unseen_(task, recipe.model)
    model = _learn_thresholds(task, first, number)
    masks = {shard.table: shard.weight.cpu() != 0 for shard in shards_of(model)}
    for shard in shards_of(second.model):
        shard.weight.mul_(masks[shard.table].to(shard.weight.device))
    return serve_values(task, train(task, second, masks=True)[0])


def _learn_thresholds(task: Task, recipe: Any, number: int) -> nn.Module:
    """A model whose tables are zero but for the values to keep."""
    steppers: list[Thresholds] = []

    def stepper(model: nn.Module, optimizer: Any) -> Thresholds:
        rate = THRESHOLD_RATE * recipe.table_learning_rate
        steppers.append(Thresholds(model, optimizer, rate))
        return steppers[0]

    def on_step(*_: float) -> None:
        if steppers[0].number() <= number:
            raise _EndError

    def on_epoch(record: EpochRecord) -> None:
        if record.epoch + 1 == task.max_epochs:
            raise _EndError

    # A model that loses values gets worse: it is not to go back to its best epoch, with more of them.
    events = SearchEvents(on_step=on_step, on_epoch=on_epoch)
    with suppress(_EndError):
        train(task, recipe, stepper=stepper, events=events, patience=task.max_epochs)
    model = task.build(None).model
    for shard in shards_of(model):
        shard.weight.copy_(steppers[0].tables[shard.table].detach())
    keep_largest_(model, number)
    return model
