"""Choices that a budget affords: the most probable combination of options, less single columns
where need be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

CELLS = 10_000
"""Parts in which a larger budget is counted, costs rounded up: at most C / CELLS of it stays
unspent by that."""


def most_probable_within(log_probabilities: Sequence[Tensor], costs: Sequence[Tensor], amount: float) -> list[int]:
    """Repairs a choice that is too large: a knapsack with one option of each choice, by dynamic
    programming."""
    amount = int(amount)
    num_cells = min(CELLS, amount)
    cells = [[-(-int(cost) * num_cells // amount) for cost in options] for options in costs]
    best = torch.zeros(num_cells + 1, dtype=torch.float64)  # by what may be spent
    options_by_cell = []
    for log_p, widths in zip(log_probabilities, cells, strict=True):
        reached = torch.full((len(widths), num_cells + 1), -torch.inf, dtype=torch.float64)
        for option, width in enumerate(widths):
            if width <= num_cells:
                reached[option, width:] = best[: num_cells + 1 - width] + float(log_p[option])
        best, option_of_cell = reached.max(dim=0)
        options_by_cell.append(option_of_cell)
    picked, left = [], num_cells
    for option_of_cell, widths in zip(reversed(options_by_cell), reversed(cells), strict=True):
        picked.append(int(option_of_cell[left]))
        left -= widths[picked[-1]]
    return picked[::-1] if left < num_cells else _one_option(log_probabilities, costs, amount)


def _one_option(log_probabilities: Sequence[Tensor], costs: Sequence[Tensor], amount: float) -> list[int]:
    gains = [
        (float(log_p[option] - log_p[0]), -choice, option)
        for choice, (log_p, options) in enumerate(zip(log_probabilities, costs, strict=True))
        for option, cost in enumerate(options.tolist())
        if 0 < cost <= amount
    ]
    _, negative_choice, option = max(gains)
    picked = [0] * len(costs)
    picked[-negative_choice] = option
    return picked


def trim(retained: Mapping[str, Tensor], column_costs: Mapping[str, Tensor], excess: float) -> dict[str, Tensor]:
    """Drops single columns of a combination, until it costs less by `excess`."""
    trimmed = {table: mask.clone() for table, mask in retained.items()}
    while excess > 0:
        last = {table: int(mask.any(1).nonzero().max()) for table, mask in trimmed.items() if bool(mask.any())}
        price = {table: float(column_costs[table][block]) for table, block in last.items()}
        covering = [table for table in price if price[table] >= excess]
        table = min(covering, key=price.__getitem__) if covering else max(price, key=price.__getitem__)
        block = last[table]
        trimmed[table][block, int(trimmed[table][block].nonzero().max())] = False
        excess -= price[table]
    return trimmed
