"""Layouts of pieces on a GPU, in the form that the kernels of select_triton.py read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dnis_torchrec.checks import check


class OutputFields(NamedTuple):
    """The numbers that the kernels read about an output."""

    first_piece: int
    num_pieces: int
    out_column: int
    begin: int  # first column of the output, counted over outputs
    dim: int
    alpha_offset: int
    output: int


class PieceFields(NamedTuple):
    """The numbers that the kernels read about a piece, where alpha's gradient is summed."""

    in_column: int
    out_column: int
    begin: int  # first column of the piece, counted over pieces
    dim: int
    first_row: int
    num_rows: int
    first_sum: int  # sums of (row, column) of the pieces before it
    output: int


class PieceLayout(NamedTuple):
    """A layout of pieces as the kernels read it. Tensors lie on the GPU."""

    output_of_column: Tensor
    outputs: Tensor
    piece_of_column: Tensor
    pieces: Tensor
    alpha_of_sum: Tensor
    most_rows: int
    in_order: bool


def layout_of(layout: Tensor, device: torch.device) -> PieceLayout:
    """Returns a layout as the kernels read it; a module's stays the same, so it is copied to the
    device once."""
    return _described(tuple(map(tuple, layout.tolist())), device)


@functools.lru_cache(maxsize=256)
def _described(fields: tuple[tuple[int, ...], ...], device: torch.device) -> PieceLayout:
    outputs: list[OutputFields] = []
    pieces: list[PieceFields] = []
    alphas, begin, num_sums = [], 0, 0
    for in_column, out_column, dim, alpha_offset, output, first_row, num_rows in fields:
        if outputs and outputs[-1].output == output:
            last = outputs[-1]
            agrees = (last.out_column, last.dim, last.alpha_offset) == (
                out_column,
                dim,
                alpha_offset,
            )
            check(
                agrees,
                "layout",
                f"pieces of output {output} at the same columns and of one alpha",
                "others",
            )
            outputs[-1] = last._replace(num_pieces=last.num_pieces + 1)
        else:
            begins = outputs[-1].begin + outputs[-1].dim if outputs else 0
            outputs.append(
                OutputFields(len(pieces), 1, out_column, begins, dim, alpha_offset, output)
            )
        pieces.append(
            PieceFields(in_column, out_column, begin, dim, first_row, num_rows, num_sums, output)
        )
        alphas.append(torch.arange(num_rows * dim) + alpha_offset + first_row * dim)
        begin, num_sums = begin + dim, num_sums + num_rows * dim
    by_output, by_piece = (
        torch.tensor(outputs, dtype=torch.int32),
        torch.tensor(pieces, dtype=torch.int32),
    )
    return PieceLayout(
        output_of_column=_numbered([output.dim for output in outputs], device),
        outputs=by_output.to(device),
        piece_of_column=_numbered([piece.dim for piece in pieces], device),
        pieces=by_piece.to(device),
        alpha_of_sum=torch.cat([torch.empty(0, dtype=torch.int64), *alphas]).to(device),
        most_rows=max((piece.num_rows for piece in pieces), default=0),
        in_order=all(p.in_column == p.out_column == p.begin for p in pieces)
        and len(pieces) == len(outputs),
    )


def _numbered(sizes: Sequence[int], device: torch.device) -> Tensor:
    numbers = torch.arange(len(sizes), dtype=torch.int32)
    return numbers.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)).to(device)
