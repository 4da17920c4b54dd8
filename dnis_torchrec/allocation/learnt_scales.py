r"""Learnt scales: what codes stand for is learnt on held-out samples, in two steps of soft selection; weights stay.

Codes of a column (block s, column c) stand for multiples of its scale. To multiply the scale is to choose alpha, as in
the paper's upper level: on samples that weights were not trained on, by the gradient of the loss. `curvature` gives it
for all columns at once, and with it how far to go:

.. math:: \alpha_{sc} = 1 - \eta \, \frac{G_{sc}}{H_{sc}} \left(1 - 2 \, \frac{\sigma^2_{sc}}{G_{sc}^2}\right)_+,
    \quad \sigma^2_{sc} = \frac{\varphi H_{sc}}{N}, \quad \varphi = \frac{\sum_n L_n'^2}{\sum_n L_n''}

A Newton step of each column by itself, shortened by eta because columns move predictions together, and by what the
gradient may be by chance (James and Stein, 1961): G is a mean over N samples, whose variance is that of L' times what a
column does; for the logistic loss phi is 1, for squared error twice the mean squared residual. A column whose gradient
is no more than chance stays where it is.

NOTE[DIFF]: the paper steps along the normalised gradient, and stays within [0, 1]. Here alpha may be above 1: what is
dropped of two embeddings is missing in their product.

Shapes: N samples, S blocks, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.allocation.curvature import curvature
from dnis_torchrec.allocation.loss_derivatives import Loss
from dnis_torchrec.allocation.whole_rows import WholeRows
from dnis_torchrec.blocks.bit_fields import is_coded
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.data.task import Task
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.soft_selection.cached_tables import writing_to_tables

ALPHA_STEPS, NEWTON_SHARE, LONGEST_ALPHA_STEP = 2, 0.3, 0.2
"""Steps, eta, and how far alpha moves in one at most."""
CHANCE = 2.0
"""Times the variance of a gradient that its square has to be for a column to move at all."""


def learnt_gains(
    model: nn.Module,
    tables: Mapping[str, WholeRows],
    scheme: MixedDimensionScheme,
    batches: Sequence[Batch],
    rows: Mapping[str, Tensor],
    blocks: RowBlocks,
    *,
    loss: Loss | Task,
    noise: float,
) -> dict[str, Tensor]:
    """Learns what the scales of all columns are to be multiplied by; the rows that batches read move along.

    Distributed: that of `curvature`; all ranks get the same.

    Args:
        model: as `curvature` takes it, its rows in codes.
        tables: all of it, see `whole_rows`.
        scheme: with these codes.
        batches: of this rank; held out.
        rows: table -> which rows they read, ``(n,)`` int64.
        blocks: of the codes.
        loss: see `curvature`.
        noise: phi over N.

    Returns:
        Table -> ``(S, D)`` float64; 1 where a column has no codes.
    """
    gains = {name: torch.ones(scheme.tables[name].codes.bits.shape, dtype=torch.float64) for name in tables}
    for _ in range(ALPHA_STEPS):
        found = curvature(model, batches, blocks, loss=loss, num_samples=None, warns=False, couplings=False)
        for name, whole in tables.items():
            gradient, bend = (part[name].double().cpu() for part in (found.gradient, found.curvature))
            factor = torch.where(is_coded(scheme.tables[name].codes.bits), 1 - alpha_step(gradient, bend, noise), 1.0)
            gains[name] *= factor
            _multiply_(model, whole, scheme.tables[name], rows[name], factor)
    return gains


def alpha_step(gradient: Tensor, curvature: Tensor, noise: float) -> Tensor:
    """How far alpha goes down in a step, see the top of this module.

    Args:
        gradient: G, any shape.
        curvature: H, at least 0.
        noise: phi over N.

    Returns:
        Of the same shape.

    Example:
        >>> alpha_step(torch.tensor([0.2, 0.01, -9.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 0.0]), 1e-3).tolist()
        [0.05700000002980232, 0.0, -0.20000000298023224, 0.0]
    """
    is_more_than_chance = gradient.square() > CHANCE * noise * curvature
    moves = is_more_than_chance & (curvature > 0)
    square, bend = torch.where(moves, gradient.square(), 1.0), torch.where(moves, curvature, 1.0)
    step = NEWTON_SHARE * gradient / bend * (1 - CHANCE * noise * bend / square)
    return torch.where(moves, step.clamp(-LONGEST_ALPHA_STEP, LONGEST_ALPHA_STEP), 0.0)


@torch.no_grad()
def _multiply_(model: nn.Module, whole: WholeRows, table: TableScheme, rows: Tensor, factor: Tensor) -> None:
    """Multiplies some rows of a table, where this rank holds parts of them."""
    of_rows = torch.cat([factor, torch.ones(1, factor.shape[1], dtype=factor.dtype)])[table.routing.block_of(rows)]
    with writing_to_tables(model):
        for shard in whole.shards:
            is_here = (rows >= shard.first_row) & (rows < shard.first_row + len(shard.weight))
            place = (rows[is_here] - shard.first_row).to(shard.weight.device)
            columns = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
            shard.weight[place] *= of_rows[is_here, columns].to(shard.weight)


def with_gains(scheme: MixedDimensionScheme, gains: Mapping[str, Tensor]) -> MixedDimensionScheme:
    """The scheme with its scales multiplied.

    Args:
        scheme: with codes.
        gains: of its tables, see `learnt_gains`.
    """
    tables = {
        name: table.with_codes(table.codes.with_gain(gains[name].float())) for name, table in scheme.tables.items()
    }
    return MixedDimensionScheme(tables)
