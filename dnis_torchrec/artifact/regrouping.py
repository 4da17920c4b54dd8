"""Regrouping: rows that were pruned value by value, gathered into few groups that share their
columns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dnis_torchrec.artifact.forms import Rows
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.checks import check
from dnis_torchrec.scheme import TableScheme, rows_per_chunk

NUM_SAMPLED_ROWS = 4096
"""Rows whose masks the search looks at; the others are only assigned."""
COLUMN_COST = 1e-3
"""Cost, in columns, of a column that rounding hides: it lets the search cross the steps of
`dim_multiple`."""


def regroup_table(
    table: TableScheme, rows: Rows, *, num_groups: int = 16, dim_multiple: int = 1, seed: int = 0
) -> TableScheme:
    """Regroups the rows of one table, reading them three times, a chunk at a time."""
    check(num_groups >= 1, "num_groups", "an integer >= 1", num_groups)
    check(dim_multiple >= 1, "dim_multiple", "an integer >= 1", dim_multiple)
    if table.is_block_structured:
        return table
    sample, union = _sample(table, rows, seed)
    sets = column_sets(sample, union, num_groups=num_groups, dim_multiple=dim_multiple)
    group_of_row, used = _assign(table, rows, sets)
    widths = used.sum(dim=1)
    groups = widths.argsort(descending=True, stable=True)[: max(1, int((widths > 0).sum()))]
    number = torch.full((len(sets) + 1,), len(groups), dtype=torch.int64)
    number[groups] = torch.arange(len(groups))
    routing = RowRouting.from_map(number[group_of_row], len(groups))
    return TableScheme(**{**vars(table), "routing": routing, "retained": used[groups]})


def column_sets(masks: Tensor, union: Tensor, *, num_groups: int, dim_multiple: int = 1) -> Tensor:
    """Finds sets of columns such that the narrowest set around each mask is narrow on the whole."""
    distinct, counts = torch.unique(masks & union, dim=0, return_counts=True)
    search = _Search(distinct.double(), counts.double(), union, dim_multiple)
    full = union.expand(num_groups - 1, -1).clone()
    best = min(
        (
            search.descend(sets)
            for sets in (full, _unions_by_size(distinct, counts, num_groups - 1))
        ),
        key=search.cost,
    )
    sets = torch.unique(torch.cat([union.unsqueeze(0), best]), dim=0)
    return sets[sets.sum(dim=1).argsort(descending=True, stable=True)]


class _Search:
    """The local search: what a set of column sets costs, and the way down from there."""

    def __init__(self, masks: Tensor, counts: Tensor, union: Tensor, dim_multiple: int) -> None:
        self._masks, self._counts, self._union = masks, counts, union
        columns = torch.arange(masks.shape[1] + 2, dtype=torch.float64)
        self._width = (columns / dim_multiple).ceil() * dim_multiple + COLUMN_COST * columns
        self._widest = self._width[int(union.sum())].expand(len(masks))

    def cost(self, sets: Tensor) -> float:
        """The sum over all rows of the width of the narrowest set around it."""
        return float((self._counts * self._narrowest(sets)).sum())

    def _narrowest(self, sets: Tensor) -> Tensor:
        """Width of the narrowest set around each mask, ``(n,)``."""
        missing = self._masks @ (~sets).double().T
        widths = torch.where(missing == 0, self._width[sets.sum(dim=1)], torch.inf)
        return torch.cat([widths, self._widest.unsqueeze(1)], dim=1).amin(dim=1)

    def descend(self, sets: Tensor) -> Tensor:
        """Flips columns of one set after the other, each time the one that saves most, until none
        saves anything."""
        improved = True
        while improved:
            improved = False
            for group in range(len(sets)):
                others = self._narrowest(torch.cat([sets[:group], sets[group + 1 :]]))
                while (column := self._best_flip(sets[group], others)) is not None:
                    sets[group, column] = ~sets[group, column]
                    improved = True
        return sets

    def _best_flip(self, columns: Tensor, others: Tensor) -> int | None:
        """The column whose flip saves most, or None. `others`: width of the narrowest of the other
        sets, by mask."""
        size = int(columns.sum())
        missing = self._masks * ~columns
        num_missing = missing.sum(dim=1)
        inside, nearly = num_missing == 0, num_missing == 1
        now = float(self._saved(others, size)[inside].sum())
        wider, narrower = self._saved(others, size + 1), self._saved(others, max(size - 1, 0))
        added = wider[inside].sum() + missing[nearly].T @ wider[nearly]
        removed = narrower[inside].sum() - self._masks[inside].T @ narrower[inside]
        after = torch.where(columns, removed, torch.where(self._union, added, -torch.inf))
        best = int(after.argmax())
        return best if float(after[best]) > now + 1e-6 else None

    def _saved(self, others: Tensor, size: int) -> Tensor:
        """Returns what a set of `size` columns saves on each mask, if the mask lies within it,
        ``(n,)``."""
        return self._counts * (others - self._width[size]).clamp(min=0)


def _unions_by_size(masks: Tensor, counts: Tensor, num_groups: int) -> Tensor:
    """Masks in order of their size, cut into groups of equal row counts: the union of each."""
    order = masks.sum(dim=1).argsort(stable=True)
    before = counts[order].cumsum(0) - counts[order]
    group = before * max(num_groups, 1) // counts.sum()
    return (
        torch.stack([masks[order][group == g].any(dim=0) for g in range(num_groups)])
        if num_groups
        else masks[:0]
    )


def _chunks(table: TableScheme, rows: Rows) -> Iterator[tuple[int, Tensor]]:
    """(first row, mask of the rows from there on) for all rows of a table."""
    step = rows_per_chunk(table.embedding_dim)
    for first in range(0, table.num_embeddings, step):
        yield first, (rows(first, min(first + step, table.num_embeddings)) != 0).cpu()


def _sample(table: TableScheme, rows: Rows, seed: int) -> tuple[Tensor, Tensor]:
    """Masks of some rows that retain something, ``(rows, D)``, and the union of all, ``(D,)``."""
    generator = torch.Generator().manual_seed(seed)
    union, sizes = torch.zeros(table.embedding_dim, dtype=torch.bool), []
    for _, mask in _chunks(table, rows):
        union |= mask.any(dim=0)
        sizes.append(mask.any(dim=1))
    filled = torch.cat(sizes).nonzero().squeeze(1)
    chosen = (
        filled[torch.randperm(len(filled), generator=generator)[:NUM_SAMPLED_ROWS]].sort().values
    )
    picked = [
        mask[chosen[(chosen >= first) & (chosen < first + len(mask))] - first]
        for first, mask in _chunks(table, rows)
    ]
    return torch.cat(picked), union


def _assign(table: TableScheme, rows: Rows, sets: Tensor) -> tuple[Tensor, Tensor]:
    """The narrowest set around every row, ``(N,)``, G for rows of no value; and the columns that a
    group's rows use."""
    num_sets, outside = len(sets), (~sets).float().T
    used, groups = torch.zeros_like(sets), []
    for _, mask in _chunks(table, rows):
        fits = mask.float() @ outside == 0
        # sets go from wide to narrow, so the last that fits is the narrowest
        group = num_sets - 1 - fits.flip(1).int().argmax(dim=1)
        group[~mask.any(dim=1)] = num_sets
        for g in group.unique().tolist():
            if g < num_sets:
                used[g] |= mask[group == g].any(dim=0)
        groups.append(group)
    return torch.cat(groups), used
