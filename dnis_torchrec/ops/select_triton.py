"""Soft selection on a GPU: Triton kernels that mean what the compiled operators of select.py mean
on a CPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dnis_torchrec.checks import check
from dnis_torchrec.ops import batches_triton
from dnis_torchrec.ops.batches_triton import jit, on_device

if batches_triton.triton is not None:
    import triton.language as tl

SELECTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Of pooled embeddings; the kernels calculate in float32."""
SAMPLES_PER_PROGRAM, COLUMNS_PER_PROGRAM, WARPS_PER_TILE = 16, 128, 4
"""A thread has 16 numbers on their way from memory at a time."""
SAMPLES_PER_STEP, COLUMNS_PER_SUM, MOST_BLOCKS_PER_SUM = 8, 64, 16
"""Of a program that sums alpha's gradient: up to 16 blocks, comparing a number with each is hidden
behind its load."""
MOST_SUMS, LEAST_SAMPLES_PER_SUM = 2048, 64
"""Programs that fill a GPU, and samples that are worth one."""
ZEROS_PER_STEP = 1024
"""Of a program that makes zeros."""
SAMPLES_PER_FILL, ENDS_PER_STEP = 256, 16
"""Of a program that finds rows of alpha; the ends of 16 blocks are compared with at a time."""


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


OUTPUT_FIELDS, PIECE_FIELDS = len(OutputFields._fields), len(PieceFields._fields)


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
    return _describe_layout(tuple(map(tuple, layout.tolist())), device)


@functools.lru_cache(maxsize=256)
def _describe_layout(fields: tuple[tuple[int, ...], ...], device: torch.device) -> PieceLayout:
    outputs: list[OutputFields] = []
    pieces: list[PieceFields] = []
    alphas, begin, num_sums = [], 0, 0
    for in_column, out_column, dim, alpha_offset, output, first_row, num_rows in fields:
        if outputs and outputs[-1].output == output:
            last = outputs[-1]
            same = last._replace(out_column=out_column, dim=dim, alpha_offset=alpha_offset)
            requirement = f"pieces of output {output} at the same columns and of one alpha"
            check(last == same, "layout", requirement, "others")
            outputs[-1] = last._replace(num_pieces=last.num_pieces + 1)
        else:
            begins = outputs[-1].begin + outputs[-1].dim if outputs else 0
            fields_of_output = (len(pieces), 1, out_column, begins, dim, alpha_offset, output)
            outputs.append(OutputFields(*fields_of_output))
        piece = (in_column, out_column, begin, dim, first_row, num_rows, num_sums, output)
        pieces.append(PieceFields(*piece))
        alphas.append(torch.arange(num_rows * dim) + alpha_offset + first_row * dim)
        begin, num_sums = begin + dim, num_sums + num_rows * dim
    return PieceLayout(
        output_of_column=_number_columns([output.dim for output in outputs], device),
        outputs=torch.tensor(outputs, dtype=torch.int32).to(device),
        piece_of_column=_number_columns([piece.dim for piece in pieces], device),
        pieces=torch.tensor(pieces, dtype=torch.int32).to(device),
        alpha_of_sum=torch.cat([torch.empty(0, dtype=torch.int64), *alphas]).to(device),
        most_rows=max((piece.num_rows for piece in pieces), default=0),
        in_order=all(p.in_column == p.out_column == p.begin for p in pieces)
        and len(pieces) == len(outputs),
    )


def _number_columns(sizes: Sequence[int], device: torch.device) -> Tensor:
    numbers = torch.arange(len(sizes), dtype=torch.int32)
    return numbers.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)).to(device)


def select_pooled(
    bag_sums: Tensor,
    alpha: Tensor,
    rows: Tensor,
    divisors: Tensor | None,
    layout: Tensor,
    out: Tensor,
) -> None:
    """Writes pooled embeddings times alpha, summed over the pieces of an output, with the bits of
    the CPU's operator."""
    tensors = (bag_sums, alpha, rows, divisors, out)
    _for_tiles(_select_kernel, layout_of(layout, out.device), *tensors)


def spread_gradient(
    grad: Tensor,
    alpha: Tensor,
    rows: Tensor,
    divisors: Tensor | None,
    layout: Tensor,
    keep_empty: bool,
    grad_pooled: Tensor,
) -> Tensor:
    """Writes the gradient of the pooled embeddings, with the bits of the CPU's operator, and tests
    it on the way."""
    fault = torch.zeros(1, dtype=torch.int32, device=grad.device)
    tensors = (grad_pooled, alpha, rows, divisors, grad, fault)
    _for_tiles(_spread_kernel, layout_of(layout, grad.device), *tensors, keep_empty=keep_empty)
    return fault == 0


def _for_tiles(
    kernel: Any,
    columns: PieceLayout,
    wide: Tensor,
    alpha: Tensor,
    rows: Tensor,
    divisors: Tensor | None,
    narrow: Tensor,
    *more: Tensor,
    **constants: bool,
) -> None:
    """Runs a kernel on tiles of outputs: those side by side in memory follow one another, for they
    share its pages."""
    num_columns = len(columns.output_of_column)
    column_tiles = batches_triton.triton.cdiv(num_columns, COLUMNS_PER_PROGRAM)
    sample_tiles = batches_triton.triton.cdiv(len(narrow), SAMPLES_PER_PROGRAM)
    if not column_tiles * sample_tiles:
        return
    inputs = (wide, alpha, rows, alpha if divisors is None else divisors)
    of_columns = (columns.output_of_column, columns.outputs, columns.pieces)
    num_outputs = 0 if divisors is None else divisors.shape[1]
    sizes = (len(narrow), num_columns, wide.shape[1], narrow.shape[1], rows.shape[1], num_outputs)
    kernel[(column_tiles * sample_tiles,)](
        *inputs,
        *of_columns,
        narrow,
        *more,
        *sizes,
        column_tiles,
        has_divisors=divisors is not None,
        in_order=columns.in_order,
        **constants,
        num_warps=WARPS_PER_TILE,
        enable_fp_fusion=False,  # else it would round otherwise than on the CPU
    )


def sum_alpha_gradient(
    grad: Tensor,
    bag_sums: Tensor,
    rows: Tensor,
    divisors: Tensor | None,
    layout: Tensor,
    grad_alpha: Tensor,
) -> None:
    """Writes the gradient of alpha, the same in every run: programs sum chunks of samples, then
    chunks are summed."""
    columns = layout_of(layout, grad.device)
    grad_alpha.zero_()
    num_columns, batch_size = len(columns.piece_of_column), len(grad)
    cdiv = batches_triton.triton.cdiv
    if not num_columns * batch_size * columns.most_rows:
        return
    blocks = min(MOST_BLOCKS_PER_SUM, batches_triton.triton.next_power_of_2(columns.most_rows))
    column_tiles = cdiv(num_columns, COLUMNS_PER_SUM)
    num_chunks = max(1, min(MOST_SUMS // column_tiles, cdiv(batch_size, LEAST_SAMPLES_PER_SUM)))
    samples_per_chunk = cdiv(batch_size, num_chunks)
    sums = grad_alpha.new_empty(cdiv(batch_size, samples_per_chunk), len(columns.alpha_of_sum))
    inputs = (grad, bag_sums, rows, grad if divisors is None else divisors)
    num_outputs = 0 if divisors is None else divisors.shape[1]
    of_columns, sizes = (columns.piece_of_column, columns.pieces), (batch_size, samples_per_chunk)
    widths = (
        num_columns,
        bag_sums.shape[1],
        grad.shape[1],
        rows.shape[1],
        num_outputs,
        sums.shape[1],
    )
    _sum_kernel[(column_tiles, len(sums), cdiv(columns.most_rows, blocks))](
        *inputs,
        *of_columns,
        sums,
        *sizes,
        *widths,
        has_divisors=divisors is not None,
        blocks_per_program=blocks,
        num_warps=WARPS_PER_TILE,
    )
    # a GPU sorts, and adds in that order
    grad_alpha.index_put_((columns.alpha_of_sum,), sums.sum(0), accumulate=True)


def zero_unless_(values: Tensor, is_kept: Tensor) -> None:
    """Makes values zero unless a flag says that they are to be kept: then no memory but the flag's
    is read or written."""
    num_programs = min(MOST_SUMS, batches_triton.triton.cdiv(values.numel(), ZEROS_PER_STEP))
    if num_programs:
        flag, sizes = is_kept.view(torch.uint8), (values.numel(), num_programs * ZEROS_PER_STEP)
        _zero_kernel[(num_programs,)](values, flag, *sizes, num_warps=WARPS_PER_TILE)


def fill_rows(
    ids: Tensor, lengths: Tensor, routings: Sequence[Tensor], places: Sequence[int], rows: Tensor
) -> None:
    """Writes rows of alpha of single-id features, -1 for empty bags and for ids that a map does not
    have."""
    if not rows.numel() or not routings:
        return
    features = [
        (
            routing.data_ptr(),
            0 if routing.dtype == torch.int64 else routing.itemsize,
            routing.numel(),
            *places[at : at + 3],
        )
        for routing, at in zip(routings, range(0, len(places), 3), strict=True)
    ]
    of_features, ends_of_bags = on_device(tuple(features), ids.device), lengths.cumsum(0)
    _fill_kernel[(batches_triton.triton.cdiv(len(rows), SAMPLES_PER_FILL), len(features))](
        ids, lengths, ends_of_bags, of_features, rows, *rows.shape, num_warps=WARPS_PER_TILE
    )


def _tile_of_outputs(
    output_of_column,
    outputs,
    batch_size,
    num_columns,
    column_tiles,
    in_order: tl.constexpr,
    fields_per_output: tl.constexpr = OUTPUT_FIELDS,
    samples_per_program: tl.constexpr = SAMPLES_PER_PROGRAM,
    columns_per_program: tl.constexpr = COLUMNS_PER_PROGRAM,
):
    """Samples and columns of a program, where both are inside, and what is known of the columns'
    outputs."""
    first_sample = (tl.program_id(0) // column_tiles).to(tl.int64) * samples_per_program
    sample = first_sample + tl.arange(0, samples_per_program)
    first_column = tl.program_id(0) % column_tiles * columns_per_program
    column = first_column + tl.arange(0, columns_per_program)
    is_column = column < num_columns
    number = tl.load(output_of_column + column, mask=is_column, other=0)
    fields = outputs + number * fields_per_output
    inside = (sample < batch_size)[:, None] & is_column[None, :]
    within = column - tl.load(fields + 3, mask=is_column, other=0)
    dim = tl.load(fields + 4, mask=is_column, other=0)
    first_alpha = tl.load(fields + 5, mask=is_column, other=0) + within
    first_piece = tl.load(fields, mask=is_column, other=0)
    count = tl.load(fields + 1, mask=is_column, other=0)
    output, place = tl.load(fields + 6, mask=is_column, other=0), column
    if not in_order:
        place = tl.load(fields + 2, mask=is_column, other=0) + within
    return sample, column, inside, within, dim, first_alpha, first_piece, count, output, place


def _place_of_piece(
    pieces,
    piece,
    inside,
    number,
    count,
    column,
    within,
    in_order: tl.constexpr,
    fields_per_piece: tl.constexpr = PIECE_FIELDS,
):
    """Columns of the pooled embeddings that a piece has, and where there are any."""
    place, is_there = column, inside
    if not in_order:
        is_there = inside & (number < count)[None, :]
        place = tl.load(pieces + piece * fields_per_piece, mask=number < count, other=0) + within
    return place, is_there


def _rows_and_factors(alpha, rows, sample, num_pieces, piece, first_alpha, dim, is_there):
    """Rows of alpha, -1 for empty bags, and alpha itself."""
    row = tl.load(rows + sample[:, None] * num_pieces + piece[None, :], mask=is_there, other=-1)
    factor = tl.load(alpha + first_alpha[None, :] + row * dim[None, :], mask=row >= 0, other=0.0)
    return row, factor


_tile, _factors, _place = (jit(_tile_of_outputs), jit(_rows_and_factors), jit(_place_of_piece))


def _select_tile(
    bag_sums,
    alpha,
    rows,
    divisors,
    output_of_column,
    outputs,
    pieces,
    out,
    batch_size,
    num_columns,
    in_width,
    out_width,
    num_pieces,
    num_outputs,
    column_tiles,
    has_divisors: tl.constexpr,
    in_order: tl.constexpr,
    samples_per_program: tl.constexpr = SAMPLES_PER_PROGRAM,
    columns_per_program: tl.constexpr = COLUMNS_PER_PROGRAM,
):
    """Writes one tile of the output."""
    sample, column, inside, within, dim, first_alpha, first_piece, count, output, place = _tile(
        output_of_column, outputs, batch_size, num_columns, column_tiles, in_order
    )
    total = tl.zeros((samples_per_program, columns_per_program), tl.float32)
    for number in range(0, tl.max(count, axis=0)):
        piece = first_piece + number
        at, is_there = _place(pieces, piece, inside, number, count, column, within, in_order)
        source = bag_sums + sample[:, None] * in_width + at[None, :]
        value = tl.load(source, mask=is_there, other=0.0)
        row, factor = _factors(alpha, rows, sample, num_pieces, piece, first_alpha, dim, is_there)
        total += tl.where(row >= 0, value.to(tl.float32) * factor, 0.0)
    if has_divisors:
        by_sample = divisors + sample[:, None] * num_outputs
        divisor = tl.load(by_sample + output[None, :], mask=inside, other=1.0)
        total = tl.div_rn(total, divisor)
    tl.store(out + sample[:, None] * out_width + place[None, :], total, mask=inside)


def _spread_tile(
    grad_pooled,
    alpha,
    rows,
    divisors,
    output_of_column,
    outputs,
    pieces,
    grad,
    fault,
    batch_size,
    num_columns,
    in_width,
    out_width,
    num_pieces,
    num_outputs,
    column_tiles,
    has_divisors: tl.constexpr,
    in_order: tl.constexpr,
    keep_empty: tl.constexpr,
):
    """Reads one tile of the output's gradient once, and writes the gradient of all pieces of those
    outputs."""
    sample, column, inside, within, dim, first_alpha, first_piece, count, output, place = _tile(
        output_of_column, outputs, batch_size, num_columns, column_tiles, in_order
    )
    source = grad + sample[:, None] * out_width + place[None, :]
    gradient = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if has_divisors:
        by_sample = divisors + sample[:, None] * num_outputs
        divisor = tl.load(by_sample + output[None, :], mask=inside, other=1.0)
    for number in range(0, tl.max(count, axis=0)):
        piece = first_piece + number
        at, is_there = _place(pieces, piece, inside, number, count, column, within, in_order)
        row, factor = _factors(alpha, rows, sample, num_pieces, piece, first_alpha, dim, is_there)
        value = gradient * factor
        if has_divisors:
            value = tl.div_rn(value, divisor)
        if keep_empty:
            is_there = is_there & (row >= 0)
        to = grad_pooled + sample[:, None] * in_width + at[None, :]
        tl.store(to, tl.where(row >= 0, value, 0.0), mask=is_there)
    is_bad = tl.where(tl.abs(gradient) < float("inf"), 0, 1)
    tl.store(fault, 1, mask=tl.max(tl.max(is_bad, axis=1), axis=0) != 0)


def _sum_chunk(
    grad,
    bag_sums,
    rows,
    divisors,
    piece_of_column,
    pieces,
    sums,
    batch_size,
    samples_per_chunk,
    num_columns,
    in_width,
    out_width,
    num_pieces,
    num_outputs,
    num_sums,
    has_divisors: tl.constexpr,
    blocks_per_program: tl.constexpr,
    fields_per_piece: tl.constexpr = PIECE_FIELDS,
    samples_per_step: tl.constexpr = SAMPLES_PER_STEP,
    columns_per_program: tl.constexpr = COLUMNS_PER_SUM,
):
    """Sums the products of some columns over a chunk of samples, for each of some blocks."""
    column = tl.program_id(0) * columns_per_program + tl.arange(0, columns_per_program)
    is_column = column < num_columns
    piece = tl.load(piece_of_column + column, mask=is_column, other=0)
    fields = pieces + piece * fields_per_piece
    within, num_rows = column - tl.load(fields + 2), tl.where(is_column, tl.load(fields + 5), 0)
    in_column, out_column = tl.load(fields) + within, tl.load(fields + 1) + within
    first_row, output = tl.load(fields + 4), tl.load(fields + 7)
    first_block = tl.program_id(2) * blocks_per_program
    block = first_block + tl.arange(0, blocks_per_program)
    begin = tl.program_id(1).to(tl.int64) * samples_per_chunk
    end = tl.minimum(begin + samples_per_chunk, batch_size)
    # none of these columns may have such blocks
    end = tl.where(first_block < tl.max(num_rows, axis=0), end, begin)
    total = tl.zeros((blocks_per_program, columns_per_program), tl.float32)
    for first in range(begin, end, samples_per_step):
        sample = first + tl.arange(0, samples_per_step)
        inside = (sample < end)[:, None] & is_column[None, :]
        of_grad = grad + sample[:, None] * out_width + out_column[None, :]
        grad_value = tl.load(of_grad, mask=inside, other=0.0)
        of_bags = bag_sums + sample[:, None] * in_width + in_column[None, :]
        bag_sum = tl.load(of_bags, mask=inside, other=0.0)
        row = tl.load(rows + sample[:, None] * num_pieces + piece[None, :], mask=inside, other=-1)
        product = grad_value.to(tl.float32) * bag_sum.to(tl.float32)
        if has_divisors:
            by_sample = divisors + sample[:, None] * num_outputs
            divisor = tl.load(by_sample + output[None, :], mask=inside, other=1.0)
            product = product / divisor
        is_own = (row - first_row[None, :])[None, :, :] == block[:, None, None]
        total += tl.sum(tl.where(is_own, product[None, :, :], 0.0), axis=1)
    place = (tl.load(fields + 6) + within)[None, :] + block[:, None] * tl.load(fields + 3)[None, :]
    to = sums + tl.program_id(1).to(tl.int64) * num_sums + place
    tl.store(to, total, mask=is_column[None, :] & (block[:, None] < num_rows[None, :]))


def _zero_values(
    values,
    is_kept,
    num_values,
    values_of_all_programs,
    values_per_step: tl.constexpr = ZEROS_PER_STEP,
):
    """Writes zeros to every so many values, or to none."""
    begin = tl.program_id(0).to(tl.int64) * values_per_step
    end = tl.where(tl.load(is_kept) != 0, begin, num_values)
    for first in range(begin, end, values_of_all_programs):
        place = first + tl.arange(0, values_per_step)
        tl.store(values + place, tl.zeros((values_per_step,), tl.float32), mask=place < num_values)


def _fill_feature(
    ids,
    lengths,
    ends_of_bags,
    features,
    rows,
    batch_size,
    num_pieces,
    fields_per_feature: tl.constexpr = 6,
    samples_per_program: tl.constexpr = SAMPLES_PER_FILL,
    ends_per_step: tl.constexpr = ENDS_PER_STEP,
):
    """Writes the rows of alpha of some bags of one feature."""
    sample = tl.program_id(0).to(tl.int64) * samples_per_program + tl.arange(0, samples_per_program)
    feature, is_bag = features + tl.program_id(1) * fields_per_feature, sample < batch_size
    routing, width, size = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
    bag = tl.load(feature + 4) * batch_size + sample
    is_id = is_bag & (tl.load(lengths + bag, mask=is_bag, other=0) > 0)
    place = tl.load(ends_of_bags + bag, mask=is_id, other=1) - 1
    row_id = tl.load(ids + place, mask=is_id, other=0).to(tl.int64)
    is_row = is_id & (row_id >= 0) & ((width == 0) | (row_id < size))
    # a table has a map of one width, or ends: of the other ways nothing is loaded, and none is
    # branched to
    of_byte = routing.to(tl.pointer_type(tl.uint8)) + row_id
    block = tl.load(of_byte, mask=is_row & (width == 1), other=0).to(tl.int32)
    of_short = routing.to(tl.pointer_type(tl.uint16)) + row_id
    block += tl.load(of_short, mask=is_row & (width == 2), other=0).to(tl.int32)
    for first in range(0, tl.where(width == 0, size, 0), ends_per_step):
        number = first + tl.arange(0, ends_per_step)
        end = tl.load(routing.to(tl.pointer_type(tl.int64)) + number, mask=number < size, other=0)
        is_behind = (end[None, :] <= row_id[:, None]) & (number < size)[None, :]
        block += tl.sum(tl.where(is_behind, 1, 0), axis=1)
    row = tl.where(is_row, tl.load(feature + 5) + block, -1)
    tl.store(rows + sample * num_pieces + tl.load(feature + 3), row, mask=is_bag)


_select_kernel: Any = jit(_select_tile)
_spread_kernel: Any = jit(_spread_tile)
_sum_kernel: Any = jit(_sum_chunk)
_zero_kernel: Any = jit(_zero_values)
_fill_kernel: Any = jit(_fill_feature)
