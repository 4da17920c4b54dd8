"""The CSR lookup on a GPU: a Triton kernel with the bits of the CPU's operator.

NOTE: written against Triton 3.9, compiled for sm_90 and tested through Triton's interpreter, on the CPU; it was not run
on a GPU yet.

Shapes: B batch, F features, I ids of a batch, n rows of a shard, D embedding_dim, V values of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.csr_size import RECORD_BYTES, ROWS_PER_RECORD, START_BYTES
from dnis_torchrec.serving.compact_pointers import num_rows_of
from dnis_torchrec.serving.interleaved_rows import RowLayout

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without
    triton = None

COLUMNS_PER_PROGRAM = 128
"""Output columns that one program adds up; wider tables take several programs per bag."""
VALUES_PER_STEP = 16
"""Values of a row that a program takes at a time."""


def triton_csr_embedding_bag(
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    tables: Sequence[Tensor],
    layout: Tensor,
    keys: Sequence[int] | None,
    batch_size: int,
    width: int,
    zero_unknown: bool,
) -> Tensor:
    """`torch_csr_embedding_bag` for tables that lie on a GPU, in one shard each.

    One program per bag and feature adds the rows of the bag in the order of its ids; nothing is added atomically, so
    the result is the same every time. Where a row's values belong is found by comparing its columns with all of the
    output's: no two threads ever write to one place.

    Args:
        ids: ``(I,)``; this and all that follows as for `torch_csr_embedding_bag`, every tensor on the GPU.
        offsets: ``(keys * B + 1,)``; they are trusted.
        per_sample_weights: ``(I,)`` or None.
        tables: buffers of all tables.
        layout: ``(F, 7)``; rather on the CPU, because reading it from the GPU waits for the GPU.
        keys: positions of keys, or None.
        batch_size: B.
        width: output columns.
        zero_unknown: what becomes of unknown ids.

    Returns:
        ``(B, width)`` float32.

    Raises:
        RuntimeError: for an unknown id unless `zero_unknown`; on a GPU later and for the whole process, as an
            asynchronous assertion is.
        NotImplementedError: for tables of several shards.
    """
    out = torch.empty(batch_size, width, device=ids.device)
    for feature, fields in enumerate(layout.tolist()):
        first_shard, num_shards, first_column, embedding_dim, is_mean, *row_layout = fields
        if num_shards != 1:
            raise NotImplementedError(f"feature {feature}: supported on a GPU is one shard per table, got {num_shards}")
        rows, row_pointers = tables[2 * first_shard : 2 * first_shard + 2]
        layout_of_row = RowLayout(*row_layout)
        first_offset = (feature if keys is None else keys[feature]) * batch_size
        num_rows = num_rows_of(row_pointers)
        if not zero_unknown:
            _assert_rows(ids, offsets, first_offset, batch_size, num_rows)
        if batch_size == 0 or embedding_dim == 0:
            continue
        _kernel[(batch_size, triton.cdiv(embedding_dim, COLUMNS_PER_PROGRAM))](
            ids,
            offsets,
            ids if per_sample_weights is None else per_sample_weights,
            rows,
            row_pointers,
            out,
            first_offset,
            num_rows,
            width,
            first_column,
            embedding_dim,
            is_mean=bool(is_mean),
            has_weights=per_sample_weights is not None,
            value_bytes=layout_of_row.value_bytes,
            column_bytes=layout_of_row.column_bytes,
            scale_bytes=layout_of_row.scale_bytes,
            is_compact=row_pointers.dtype == torch.uint8,
            record_bytes=RECORD_BYTES,
            start_bytes=START_BYTES,
            rows_per_record=ROWS_PER_RECORD,
            columns_per_program=COLUMNS_PER_PROGRAM,
            values_per_step=VALUES_PER_STEP,
            enable_fp_fusion=False,  # a fused multiply-add would round otherwise than the CPU's operator
        )
    return out


def _assert_rows(ids: Tensor, offsets: Tensor, first_offset: int, batch_size: int, num_rows: int) -> None:
    """Asserts, without waiting for the GPU, that the ids of one feature are rows of its table."""
    position = torch.arange(ids.numel(), device=ids.device)
    of_others = (position < offsets[first_offset]) | (position >= offsets[first_offset + batch_size])
    torch._assert_async(((ids >= 0) & (ids < num_rows) | of_others).all())


def _number_at(start, mask, num_bytes: tl.constexpr):  # type: ignore[no-untyped-def]  # as below
    """Little-endian integers at any byte, byte by byte, because nothing in a row is aligned; int32."""
    number = tl.load(start, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, num_bytes):
        number |= tl.load(start + byte, mask=mask, other=0).to(tl.int32) << (8 * byte)
    return number


def _row_bounds(  # type: ignore[no-untyped-def]
    row_pointers,
    row,
    is_row,
    is_compact: tl.constexpr,
    record_bytes: tl.constexpr,
    start_bytes: tl.constexpr,
    rows_per_record: tl.constexpr,
):
    """Row pointer of a row, and of the next; of an id that is no row 0 and 0."""
    if is_compact:
        # the bytes of the record's start, little-endian, and the lengths of the rows before this one
        record = row // rows_per_record * record_bytes
        place = tl.arange(0, record_bytes)
        own = tl.where(is_row, start_bytes + row % rows_per_record, 0)
        content = tl.load(row_pointers + record + place, mask=place < own, other=0).to(tl.int64)
        first = tl.sum(content << tl.where(place < start_bytes, 8 * place, 0).to(tl.int64), axis=0)
        last = first + tl.load(row_pointers + record + own, mask=is_row, other=0).to(tl.int64)
    else:
        first = tl.load(row_pointers + row, mask=is_row, other=0).to(tl.int64)
        last = tl.load(row_pointers + row + 1, mask=is_row, other=0).to(tl.int64)
    return first, last


def _as_float(bits, value_bytes: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 of a value's bits, by its width: float32, float16, int8."""
    if value_bytes == 4:
        value = bits.to(tl.float32, bitcast=True)
    elif value_bytes == 2:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = bits.to(tl.int8).to(tl.float32)
    return value


def _jitted(function: Any) -> Any:
    return None if triton is None else triton.jit(function)


_number, _bounds, _float = _jitted(_number_at), _jitted(_row_bounds), _jitted(_as_float)


def _pool_bag(  # type: ignore[no-untyped-def]  # Triton takes every name in an annotation for a value
    ids,
    offsets,
    weights,
    rows,
    row_pointers,
    out,
    first_offset,
    num_rows,
    width,
    first_column,
    embedding_dim,
    is_mean: tl.constexpr,
    has_weights: tl.constexpr,
    value_bytes: tl.constexpr,
    column_bytes: tl.constexpr,
    scale_bytes: tl.constexpr,
    is_compact: tl.constexpr,
    record_bytes: tl.constexpr,
    start_bytes: tl.constexpr,
    rows_per_record: tl.constexpr,
    columns_per_program: tl.constexpr,
    values_per_step: tl.constexpr,
):
    """Pools one bag of one feature, into `columns_per_program` columns of the output."""
    bag = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + first_offset + bag).to(tl.int64)
    end = tl.load(offsets + first_offset + bag + 1).to(tl.int64)
    own_columns = tl.program_id(1) * columns_per_program + tl.arange(0, columns_per_program)
    pooled = tl.zeros((columns_per_program,), tl.float32)
    for i in range(begin, end):
        row = tl.load(ids + i).to(tl.int64)
        is_row = (row >= 0) & (row < num_rows)
        first, last = _bounds(row_pointers, row, is_row, is_compact, record_bytes, start_bytes, rows_per_record)
        count = last - first
        start = rows + first * (value_bytes + column_bytes) + tl.where(is_row, row, 0) * scale_bytes
        factor = 1.0
        if has_weights:
            factor = tl.load(weights + i)
        if scale_bytes > 0:  # a bfloat16 is the upper half of a float32
            factor = factor * (_number(start, is_row, scale_bytes) << 16).to(tl.float32, bitcast=True)
        columns = start + scale_bytes + count * value_bytes
        for k in range(0, count, values_per_step):
            position = k + tl.arange(0, values_per_step)
            inside = position < count
            bits = _number(start + scale_bytes + position * value_bytes, inside, value_bytes)
            value = _float(bits, value_bytes) * factor
            column = _number(columns + position * column_bytes, inside, column_bytes)
            hit = (column[:, None] == own_columns[None, :]) & inside[:, None]
            # columns differ within a row, so at most one value is added to each: no order of additions to choose
            pooled += tl.sum(tl.where(hit, value[:, None], 0.0), axis=0)
    if is_mean:
        length = tl.maximum(end - begin, 1).to(tl.float32)
        pooled = tl.div_rn(pooled, tl.zeros_like(pooled) + length)
    tl.store(out + bag * width + first_column + own_columns, pooled, mask=own_columns < embedding_dim)


_kernel: Any = _jitted(_pool_bag)
