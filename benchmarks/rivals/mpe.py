"""MPE (Li et al. 2024): rows in groups of like frequency learn a distribution over bit widths beside
their values, under a penalty on bits; then values learn through the rounding at the likeliest widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals.int4_qat import Reparametrisation
from benchmarks.rivals.task import Served, Task, UnmetError, best_of, counts_of, plain, shards_of, train
from dnis_torchrec.blocks.codes import pack_fields, unpack_fields
from dnis_torchrec.blocks.routing import RowDirectory, RowRouting
from dnis_torchrec.training.loop import EpochRecord, SearchEvents

WIDTHS = tuple(range(7))
"""Bits of a value."""
GROUPS = 128
EPOCHS, TRIALS = 3, 6
"""Epochs of a search, and searches: between two weights of the penalty the next is their geometric mean."""
FIRST_WEIGHT, FACTOR = 1e-3, 16.0
TRAVEL = 20.0
"""Learning rate times steps: how far Adam can move a logit over a search."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows of all tables in one order of frequency, cut into groups of one size."""

    task: Task
    group_of: Mapping[str, Tensor]  # table -> the group of every row
    rows: Mapping[str, Tensor]  # table -> rows of every group
    dims: Mapping[str, int]

    @staticmethod
    def of(task: Task) -> Groups:
        """Counts the training split."""
        counts, tables = counts_of(task).counts, task.tables()
        names, sizes = [t.name for t in tables], [t.num_embeddings for t in tables]
        order = torch.cat([counts[name] for name in names]).argsort(descending=True, stable=True)
        group = torch.empty_like(order)
        group[order] = torch.arange(len(order)) * GROUPS // len(order)
        group_of = dict(zip(names, group.split(sizes), strict=True))
        rows = {name: torch.bincount(of, minlength=GROUPS) for name, of in group_of.items()}
        return Groups(task, group_of, rows, {t.name: t.embedding_dim for t in tables})

    def code_bytes(self) -> Tensor:
        """Bytes of every group's codes at every width, ``(GROUPS, WIDTHS)``."""
        widths = torch.tensor(WIDTHS)
        return sum(self.rows[name][:, None] * -(-dim * widths // 8) for name, dim in self.dims.items())

    def other_bytes(self) -> int:
        """Bytes of steps, offsets and directories, however widths differ."""
        widths = torch.arange(GROUPS) % len(WIDTHS)
        directories = sum(directory(widths[of]).nbytes for of in self.group_of.values())
        return directories + sum(4 * (len(WIDTHS) - 1 + dim) for dim in self.dims.values())


def directory(width_of_row: Tensor) -> Tensor:
    """What finds the codes of a row: a rank directory, or runs of rows of one width (first row, first
    place, width), whichever takes less."""
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), width_of_row.diff().nonzero()[:, 0] + 1])
    routing = RowRouting.from_map(width_of_row, len(WIDTHS))
    ranks = RowDirectory.of(routing, torch.ones(len(WIDTHS), dtype=torch.bool)).directory
    runs = torch.zeros(len(starts), 3, dtype=torch.int32)
    runs[:, 0], runs[:, 2] = starts, width_of_row[starts]
    for width in WIDTHS:
        of_width = width_of_row == width
        runs[runs[:, 2] == width, 1] = (of_width.cumsum(0) - of_width.long())[starts[runs[:, 2] == width]].int()
    return ranks if ranks.nbytes < runs.nbytes and len(starts) > 1 else runs


def fit_step(values: Tensor, width: int) -> float:
    """A step to begin with (LSQ, Esser et al. 2020)."""
    return float(2 * values.abs().mean() / (1 << width - 1) ** 0.5) or 1.0


def quantise(values: Tensor, step: Tensor, offset: Tensor, width: int) -> Tensor:
    """Values rounded to ``2**width`` levels around an offset; gradients are those of LSQ."""
    largest = 1 << width - 1
    inside = ((values - offset) / step).clamp(-largest, largest)
    level = inside.floor().clamp(-largest, largest - 1) + 0.5
    return (inside + (level - inside).detach()) * step + offset


class MixedPrecision(Reparametrisation):
    """Tables of which the model reads the mean over all widths, by the distributions of their groups, or at fixed
    widths. ``bits_weight`` is that of mean bits in the loss; ``rates`` are of logits, and of steps and offsets."""

    def __init__(
        self,
        groups: Groups,
        scales: Mapping[str, Tensor],
        bits_weight: float,
        rates: tuple[float, float],
        width_of_group: Tensor | None,
        model: nn.Module,
        optimizer: Any,
    ) -> None:
        self._groups, self._bits_weight = groups, bits_weight
        self.logits = torch.zeros(GROUPS, len(WIDTHS), requires_grad=True)
        self._fixed = None if width_of_group is None else functional.one_hot(width_of_group, len(WIDTHS)).float()
        self.steps = {name: scale.clone().requires_grad_() for name, scale in scales.items()}
        self.offsets = {name: torch.zeros(dim, requires_grad=True) for name, dim in groups.dims.items()}
        super().__init__(model, optimizer, self._read)
        numbers = [*self.steps.values(), *self.offsets.values()]
        self._adam = torch.optim.Adam([{"params": [self.logits], "lr": rates[0]}, {"params": numbers, "lr": rates[1]}])
        self.history = [self.state()]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Steps and offsets as they are."""
        return tuple({n: part.detach().clone() for n, part in parts.items()} for parts in (self.steps, self.offsets))

    def _shares(self) -> Tensor:
        return self.logits.softmax(1) if self._fixed is None else self._fixed

    def _read(self, name: str, values: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        share, total = self._shares()[self._groups.group_of[name][rows]], torch.zeros_like(values)
        for width in WIDTHS[1:]:
            if bool(share[:, width].any()):
                rounded = quantise(values, self.steps[name][width - 1], self.offsets[name], width)
                total = total + share[:, width, None] * rounded
        return total

    @torch.enable_grad()
    def before_step(self) -> None:
        """Gradients of all that learns, by those of what the model reads."""
        size = sum(int(self._groups.rows[name].sum()) * dim for name, dim in self._groups.dims.items())
        of_group = sum(self._groups.rows[name] * dim for name, dim in self._groups.dims.items()) / size
        loss = self._bits_weight * (of_group[:, None] * self._shares() * torch.tensor(WIDTHS)).sum()
        leaves = {}
        for name, weight in self.tables.items():
            if weight.grad is not None:
                rows = weight.grad.any(1).nonzero()[:, 0]  # others have no part in the loss
                leaves[name] = rows, self.values[name][rows].requires_grad_()
                loss = loss + (self._read(name, leaves[name][1], rows) * weight.grad[rows]).sum()
        self._adam.zero_grad()
        if loss.requires_grad:
            loss.backward()
        for name, (rows, values) in leaves.items():
            self.tables[name].grad[rows] = 0.0 if values.grad is None else values.grad
        self._adam.step()
        with torch.no_grad():
            for step in self.steps.values():
                step.clamp_(min=1e-8)


def _train(
    groups: Groups, model: nn.Module, bits_weight: float, width_of_group: Tensor | None, num_epochs: int
) -> tuple[nn.Module, MixedPrecision, int]:
    """Trains through the rounding; the model, what stepped it, and its best epoch."""
    task, steppers = groups.task, list[MixedPrecision]()
    recipe, weights = task.build(None), {s.table: s.weight.detach().cpu() for s in shards_of(plain(task)[0])}
    scales = {n: torch.tensor([fit_step(w, width) for width in WIDTHS[1:]]) for n, w in weights.items()}
    steps = num_epochs * sum(1 for _ in recipe.data.train)
    make = partial(MixedPrecision, groups, scales, bits_weight, (TRAVEL / steps, recipe.table_learning_rate))

    def stepper(model: nn.Module, optimizer: Any) -> MixedPrecision:
        steppers.append(make(width_of_group, model, optimizer))
        return steppers[-1]

    def on_epoch(record: EpochRecord) -> None:
        steppers[-1].history.append(steppers[-1].state())

    part = task if width_of_group is not None else replace(task, max_epochs=num_epochs, with_validation=False)
    events, recipe = SearchEvents(on_epoch=on_epoch), replace(recipe, model=model)
    model, training = train(part, recipe, stepper=stepper, events=events)
    return model, steppers[-1], training.best_epoch


def search_widths(groups: Groups) -> Tensor:
    """The likeliest width of every group within the task's bytes, of the search that comes nearest to them."""
    task, costs = groups.task, groups.code_bytes()
    spare = task.num_bytes - groups.other_bytes()
    if spare < int(costs[:, 1].min()):
        raise UnmetError(f"{task.num_bytes} bytes leave none beside directories, steps and offsets")
    weight, low, high, best = FIRST_WEIGHT, 0.0, float("inf"), None
    for _ in range(task.trials or TRIALS):
        _, stepper, _ = _train(groups, plain(task)[0], weight, None, min(EPOCHS, task.max_epochs))
        log_p = stepper.logits.detach().double().log_softmax(1)
        excess = float(costs.gather(1, log_p.argmax(1, keepdim=True)).sum()) / spare
        distance = max(excess, 1 / max(excess, 1e-9))
        if best is None or distance < best[0]:
            best = distance, log_p
        low, high = (weight, high) if excess > 1 else (low, weight)
        weight = (low * high) ** 0.5 if low and high < float("inf") else (high / FACTOR if not low else low * FACTOR)
    return widths_within(best[1], costs, spare)


def widths_within(log_p: Tensor, costs: Tensor, spare: int) -> Tensor:
    """The likeliest widths, where a byte is worth as much to all groups as lets them use the bytes up."""
    low, high, shares = -1e6, 1e6, costs / costs.max()
    for _ in range(60):
        worth = (low + high) / 2
        widths = (log_p + worth * shares).argmax(1, keepdim=True)
        low, high = (worth, high) if int(costs.gather(1, widths).sum()) <= spare else (low, worth)
    return (log_p + low * shares).argmax(1)


def encode(values: Tensor, width_of_row: Tensor, steps: Tensor, offset: Tensor) -> dict[str, Tensor]:
    """A table as it is served: a directory, the codes of the rows of every width, steps and offsets."""
    parts = {"directory": directory(width_of_row), "steps": steps, "offset": offset}
    for width in WIDTHS[1:]:
        rows, largest = values[width_of_row == width], 1 << width - 1
        levels = ((rows - offset) / steps[width - 1]).floor().clamp(-largest, largest - 1) + largest
        parts[f"codes{width}"] = pack_fields(levels.long(), torch.full((values.shape[1],), width))
    return parts


def decode(parts: Mapping[str, Tensor], width_of_row: Tensor) -> Tensor:
    """The table that was encoded."""
    offset = parts["offset"]
    values = torch.zeros(len(width_of_row), len(offset))
    for width in WIDTHS[1:]:
        levels = unpack_fields(parts[f"codes{width}"], torch.full((len(offset),), width)) - (1 << width - 1)
        values[width_of_row == width] = (levels + 0.5) * parts["steps"][width - 1] + offset
    return values


def _serve(groups: Groups, width_of_group: Tensor, is_trained: bool) -> Served:
    task = groups.task
    model = plain(task)[0] if is_trained else task.build(None).model
    model, stepper, best_epoch = _train(groups, model, 0.0, width_of_group, task.max_epochs)
    (steps, offsets), num_bytes = stepper.history[best_epoch + 1], 0
    for shard in shards_of(model):
        widths = width_of_group[groups.group_of[shard.table]]
        parts = encode(shard.weight.detach().cpu(), widths, steps[shard.table], offsets[shard.table])
        num_bytes += sum(part.nbytes for part in parts.values())
        shard.weight.detach().copy_(decode(parts, widths))
    settings = {"widths": width_of_group.tolist(), "is_trained": is_trained}
    return Served(model=model, num_bytes=num_bytes, settings=settings)


def mpe(task: Task) -> Served:
    """Searches the widths, then keeps the better values: the uncompressed model's, or those trained from scratch."""
    groups = Groups.of(task)
    widths = search_widths(groups)
    return best_of(task, [partial(_serve, groups, widths, is_trained) for is_trained in (True, False)])
