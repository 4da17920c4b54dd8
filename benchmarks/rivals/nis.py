"""NIS (Joglekar et al. 2020): a controller chooses, for every table, which blocks of its
vocabulary are kept at which width, by what weights shared by all choices predict on the validation
split; the choice is then trained from scratch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.datasets.utils import Batch

from benchmarks.rivals.mixed import Blocks, train_mixed
from benchmarks.rivals.task import Served, Task, UnmetError
from dnis_torchrec.data.batches import LookupBatches
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training.shard import shard

WARM_UP_EPOCHS, EPOCHS = 2, 12
"""Epochs of the supernet's weights alone, and of weights and controller."""
WIDTHS = 4
"""T: dimension blocks of a table."""
SLACK = 0.01
"""Share of the budget by which a choice may overshoot it before columns are taken off."""
SAMPLES = 4
"""Combinations that a controller's step compares on a batch (the workers of A2C)."""
COST_WEIGHT = 0.1
"""lambda: the reward is ``quality - lambda * max(0, bytes / budget - 1)``."""
TRAVEL = 50.0
"""Learning rate times steps: how far Adam can move a logit over a search."""
ENTROPY_WEIGHT, SCALE_DECAY, SMALLEST_SCALE = 0.01, 0.95, 1e-6
CELLS = 10_000
"""Parts in which a larger budget is counted, costs rounded up."""


def nis_se(task: Task) -> Served:
    """Single size: each table keeps its v most frequent blocks at one width."""
    return _run(task, is_single=True)


def nis_me(task: Task) -> Served:
    """Multi size: each dimension block is kept for its own v most frequent blocks."""
    return _run(task, is_single=False)


@dataclass(frozen=True, eq=False)
class Choice:
    """One decision: which of its options, ``(n, S, D)`` masks, a table follows; option 0 keeps
    nothing."""

    table: str
    options: Tensor
    costs: Tensor


@dataclass(frozen=True, eq=False)
class Grid:
    """All choices. Those of one table never keep the same value twice."""

    blocks: Blocks
    choices: tuple[Choice, ...]
    amount: float

    def cost(self, pick: Sequence[int]) -> float:
        """What a combination of options takes of the amount."""
        return sum(float(c.costs[option]) for c, option in zip(self.choices, pick, strict=True))

    def masks(self, pick: Sequence[int]) -> dict[str, Tensor]:
        """Table -> ``(S, D)``: what a combination keeps."""
        masks: dict[str, Tensor] = {}
        for choice, option in zip(self.choices, pick, strict=True):
            mask = choice.options[option]
            masks[choice.table] = masks[choice.table] | mask if choice.table in masks else mask
        return masks


def column_costs(blocks: Blocks) -> dict[str, Tensor]:
    """Table -> ``(S,)``: bytes of a column of each block, its scale counted."""
    scale = 0 if blocks.bits == 32 else 4
    return {name: rows.double() * blocks.bits / 8 + scale for name, rows in blocks.rows.items()}


def make_grid(blocks: Blocks, *, is_single: bool) -> Grid:
    """The choices of a model, and what they may cost together."""
    choices, costs = [], column_costs(blocks)
    for table, dim in blocks.blocks.embedding_dims.items():
        number, parts = blocks.routings[table].num_blocks, min(WIDTHS, dim)
        cuts = [part * dim // parts for part in range(parts + 1)]
        spans = [(0, end) for end in cuts[1:]] if is_single else list(pairwise(cuts))
        options_of_spans = []
        for first, last in spans:
            options = torch.zeros(number + 1, number, dim, dtype=torch.bool)
            for rows in range(1, number + 1):
                options[rows, :rows, first:last] = True
            options_of_spans.append(options & (blocks.rows[table] > 0).view(1, -1, 1))
        if is_single:  # one choice of all spans; keeping nothing is an option once
            rest = [options[1:] for options in options_of_spans]
            options_of_spans = [torch.cat([options_of_spans[0][:1], *rest])]
        for options in options_of_spans:
            choices.append(Choice(table, options, options.sum(2).double() @ costs[table]))
    smallest = min(float(c.costs[c.costs > 0].min()) for c in choices)
    widest = Grid(blocks, tuple(choices), 0.0)
    full = [len(choice.options) - 1 for choice in choices]
    index = blocks.num_bytes(widest.masks(full)) - widest.cost(full)
    amount = blocks.task.num_bytes - max(0.0, index)
    if smallest > amount:
        raise UnmetError(f"expected at least {smallest:.0f} bytes beside the index, got {amount}")
    return Grid(blocks, tuple(choices), amount)


class Controller:
    """A distribution over combinations: independent softmaxes, learnt by advantage actor-critic."""

    def __init__(self, numbers: Sequence[int], *, steps: int, seed: int) -> None:
        absent = torch.arange(max(numbers)) >= torch.tensor(numbers).unsqueeze(1)
        self._absent = torch.zeros(absent.shape).masked_fill(absent, -torch.inf)
        self._logits = torch.zeros(absent.shape, requires_grad=True)
        self._adam = torch.optim.Adam([self._logits], lr=TRAVEL / steps, betas=(0.9, 0.98))
        self._generator = torch.Generator().manual_seed(seed)
        self._mean_square: Tensor | None = None

    def log_probabilities(self) -> Tensor:
        """``(C, n)``; minus infinity where a choice has no such option."""
        return torch.log_softmax(self._logits + self._absent, dim=1)

    def sample(self, number: int) -> Tensor:
        """``(number, C)`` combinations."""
        shares = self.log_probabilities().detach().exp()
        return torch.multinomial(shares, number, replacement=True, generator=self._generator).T

    def learn(self, picks: Tensor, rewards: Tensor) -> None:
        """One step; what others of the same batch got is the critic."""
        log_p = self.log_probabilities()
        entropy = -(log_p.exp() * log_p.masked_fill(self._absent < 0, 0.0)).sum()
        advantages = rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
        square = advantages.square().mean()
        if self._mean_square is not None:
            square = SCALE_DECAY * self._mean_square + (1 - SCALE_DECAY) * square
        self._mean_square = square
        gains = advantages / (square.sqrt() + SMALLEST_SCALE)
        loss = -(gains * log_p.gather(1, picks.T).sum(0)).mean() - ENTROPY_WEIGHT * entropy
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()


class Supernet:
    """The model with soft selection, run under one combination at a time: alpha is its mask."""

    def __init__(self, recipe: Recipe, grid: Grid, device: torch.device) -> None:
        model = prepare_(recipe.model, grid.blocks.blocks)
        whole = TrainTask(model, recipe.task, embedding_l2=recipe.embedding_l2)
        self.model, self._optimizer = shard(whole, recipe, device)
        self._alpha = next(iter(soft_selection_modules(self.model).values())).alpha
        self._grid, self._device = grid, device
        self._is_binary = isinstance(recipe.loss, nn.BCEWithLogitsLoss)
        labels = torch.cat([batch.labels.float().cpu() for batch in recipe.data.validation])
        self._variance = max(float(labels.var(unbiased=False)), 1e-30)

    @torch.no_grad()
    def _select_(self, pick: Sequence[int]) -> None:
        blocks = self._grid.blocks.blocks
        for table, mask in self._grid.masks(pick).items():
            first, alpha = blocks.first_alpha_row(table), self._alpha
            alpha.of(blocks.embedding_dims[table])[first : first + len(mask)].copy_(mask)

    def train(self, batch: Batch, pick: Sequence[int]) -> None:
        """One step of the weights under a combination."""
        self._select_(pick)
        self.model.train()
        self._optimizer.zero_grad()
        self.model(batch.to(self._device))[0].backward()
        self._optimizer.step()

    @torch.no_grad()
    def qualities(self, batch: Batch, picks: Sequence[Sequence[int]]) -> list[float]:
        """Of each combination on a batch: AUC for a binary loss, else ``-MSE / variance``."""
        self.model.eval()
        batch, qualities = batch.to(self._device), []
        labels = batch.labels.float()
        for pick in picks:
            self._select_(pick)
            predictions = self.model(batch)[1][1]
            if not isinstance(predictions, Tensor):
                raise UnmetError("supported are recipes with a loss of one prediction")
            if not self._is_binary:
                error = float((predictions - labels).square().mean())
                qualities.append(-error / self._variance)
            elif bool((labels == labels[0]).all()):
                qualities.append(0.5)
            else:
                qualities.append(float(binary_auroc(predictions.sigmoid(), labels.long())))
        return qualities


def _without_end(batches: LookupBatches) -> Iterator[Batch]:
    while True:
        yield from batches


def train_controller(task: Task, recipe: Recipe, grid: Grid) -> Controller:
    """Trains weights under sampled combinations, and after a warm-up the controller with them."""
    train = LookupBatches(recipe.data.train, "train")
    validation = _without_end(LookupBatches(recipe.data.validation, "validation"))
    steps = sum(1 for _ in recipe.data.train)
    epochs = max(1, min(EPOCHS, task.max_epochs - WARM_UP_EPOCHS))
    numbers = [len(choice.options) for choice in grid.choices]
    controller = Controller(numbers, steps=epochs * steps, seed=task.seed)
    supernet = Supernet(recipe, grid, task.device)
    for epoch in range(WARM_UP_EPOCHS + epochs):
        for batch in train:
            supernet.train(batch, controller.sample(1)[0].tolist())
            if epoch >= WARM_UP_EPOCHS:
                picks = controller.sample(SAMPLES)
                qualities = supernet.qualities(next(validation), picks.tolist())
                over = [(grid.cost(pick) - grid.amount) / grid.amount for pick in picks.tolist()]
                pairs = zip(qualities, over, strict=True)
                rewards = [quality - COST_WEIGHT * max(0.0, excess) for quality, excess in pairs]
                controller.learn(picks, torch.tensor(rewards, dtype=torch.float64))
    return controller


def _run(task: Task, *, is_single: bool) -> Served:
    blocks = Blocks.of(task)
    grid = make_grid(blocks, is_single=is_single)
    # Weights that a choice is judged by never train on the validation split.
    controller = train_controller(task, task.build(None), grid)
    masks = trim(choose(grid, controller.log_probabilities().detach()), blocks)
    dims = {table: " ".join(map(str, mask.sum(1).tolist())) for table, mask in masks.items()}
    return train_mixed(blocks, task.build(None), masks, dims=dims)


def choose(grid: Grid, log_p: Tensor) -> dict[str, Tensor]:
    """The most probable combination, or the most probable one that the amount pays for."""
    pick, limit = log_p.argmax(dim=1).tolist(), grid.amount * (1 + SLACK)
    if not 0 < grid.cost(pick) <= limit:
        pairs = zip(log_p, grid.choices, strict=True)
        rows = [row[: len(choice.costs)] for row, choice in pairs]
        pick = most_probable_within(rows, [choice.costs for choice in grid.choices], limit)
    return grid.masks(pick)


def most_probable_within(log_p: Sequence[Tensor], costs: Sequence[Tensor], amount: float) -> list[int]:
    """A knapsack with one option of each choice, by dynamic programming."""
    number = min(CELLS, int(amount))
    cells = [[-(-int(cost) * number // int(amount)) for cost in options] for options in costs]
    best, options_by_cell = torch.zeros(number + 1, dtype=torch.float64), []
    for row, widths in zip(log_p, cells, strict=True):
        reach = torch.full((len(widths), number + 1), -torch.inf, dtype=torch.float64)
        for option, width in enumerate(widths):
            if width <= number:
                reach[option, width:] = best[: number + 1 - width] + float(row[option])
        best, option_of_cell = reach.max(dim=0)
        options_by_cell.append(option_of_cell)
    pick, left = [], number
    for option_of_cell, widths in zip(reversed(options_by_cell), reversed(cells), strict=True):
        pick.append(int(option_of_cell[left]))
        left -= widths[pick[-1]]
    if left < number:
        return pick[::-1]
    gains = [  # nothing at all is no choice: the likeliest single option
        (float(row[option] - row[0]), -choice, option)
        for choice, (row, options) in enumerate(zip(log_p, costs, strict=True))
        for option, cost in enumerate(options.tolist())
        if 0 < cost <= amount
    ]
    _, choice, option = max(gains)
    return [option if index == -choice else 0 for index in range(len(costs))]


def trim(masks: dict[str, Tensor], blocks: Blocks) -> dict[str, Tensor]:
    """Takes single columns off, the cheapest that suffices, until the bytes are met."""
    masks, costs = {table: mask.clone() for table, mask in masks.items()}, column_costs(blocks)
    while (excess := blocks.num_bytes(masks) - blocks.task.num_bytes) > 0:
        last = {t: int(m.any(1).nonzero().max()) for t, m in masks.items() if bool(m.any())}
        price = {table: float(costs[table][block]) for table, block in last.items()}
        enough = [table for table in price if price[table] >= excess]
        table = min(enough, key=price.__getitem__) if enough else max(price, key=price.__getitem__)
        masks[table][last[table], int(masks[table][last[table]].nonzero().max())] = False
        if not any(bool(mask.any()) for mask in masks.values()):
            raise UnmetError(f"{blocks.task.num_bytes} bytes pay for no column of the choice")
    return masks
