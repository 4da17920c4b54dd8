r"""Error feedback: what one column of a row loses in rounding, the columns that are rounded after
it make good."""

from __future__ import annotations

import torch
from torch import Tensor

from dnis_torchrec.blocks.bit_fields import FLOAT_BITS

TABLE_SHARE, DIAGONAL_SHARE = 0.1, 0.3
"""Weight of the whole table's couplings, and of equal ones of every column with itself, beside a
block's own."""
CACHED_ROWS = 2048
"""So many rows of 64 columns stay in a processor's cache."""


def feedback_of(couplings: Tensor, bits: Tensor) -> Tensor:
    r"""The shares :math:`U_{jk} / U_{jj}` of a column's error that later ones take up. Local and
    deterministic."""
    num_columns = bits.shape[1]
    own, table = _of_trace_one(couplings), _of_trace_one(couplings.sum(0, keepdim=True))
    diagonal = torch.eye(num_columns, dtype=torch.float64) / num_columns
    order = rounding_order(bits)
    shrunk = own + TABLE_SHARE * table + DIAGONAL_SHARE * diagonal
    shrunk = shrunk.gather(1, order[:, :, None].expand_as(shrunk)).gather(
        2, order[:, None, :].expand_as(shrunk)
    )
    upper = torch.linalg.cholesky(torch.linalg.inv(shrunk), upper=True)
    shares = upper / upper.diagonal(dim1=1, dim2=2)[:, :, None]
    return shares.triu(diagonal=1).float()


def rounding_order(bits: Tensor) -> Tensor:
    """``(S, D)`` int64: which column is rounded when."""
    return bits.int().argsort(dim=1, stable=True)


def _of_trace_one(couplings: Tensor) -> Tensor:
    traces = couplings.diagonal(dim1=1, dim2=2).sum(1)
    return couplings / torch.where(traces > 0, traces, 1.0)[:, None, None]


def fed_back(
    rows: Tensor,
    blocks: Tensor,
    feedback: Tensor,
    bits: Tensor,
    scale: Tensor,
    half_shift: Tensor,
    largest: Tensor,
) -> Tensor:
    """Moves rows to where nearest rounding gives every column the code that error feedback chooses.
    Local."""
    moved, order = rows.clone(), rounding_order(bits)
    for block in blocks.unique().tolist():
        if block == len(bits) or not bool(feedback[block].any()):
            continue
        first_to_last = order[block]
        of_columns = [
            part[block, first_to_last].tolist() for part in (bits, scale, half_shift, largest)
        ]
        for places in (blocks == block).nonzero().squeeze(1).split(CACHED_ROWS):
            columns = rows[places].T[first_to_last].contiguous()
            _feed_back_(columns, feedback[block], *of_columns)
            moved[places] = columns[first_to_last.argsort()].T
    return moved


def _feed_back_(
    columns: Tensor,
    feedback: Tensor,
    bits: list[int],
    scale: list[float],
    half_shift: list[float],
    largest: list[float],
) -> None:
    """The same of one block, ``(D, n)`` in the order of rounding, in place."""
    for index, width in enumerate(bits):
        if width == FLOAT_BITS:
            return  # and so are all that follow: nothing is lost any more
        own, later = columns[index], columns[index + 1 :]
        rounded = (own / scale[index]).sub_(half_shift[index]).round_().clamp_(0, largest[index])
        rounded.add_(half_shift[index]).mul_(scale[index] if width else 0.0)
        # a product, then a difference, never fused: a row moves alike in every chunk
        later.sub_(feedback[index, index + 1 :, None] * (own - rounded))
