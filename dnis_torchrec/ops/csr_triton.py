"""The CSR lookup on a GPU: a Triton kernel with the bits of the CPU's operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dnis_torchrec.checks import check
from dnis_torchrec.ops import triton_bags
from dnis_torchrec.ops.compact_pointers import (
    RECORD_BYTES,
    ROWS_PER_RECORD,
    START_BYTES,
    num_rows_of,
)
from dnis_torchrec.ops.interleaved_rows import RowLayout
from dnis_torchrec.ops.triton_bags import bag_bounds, check_keys, column_programs, jitted, on_device

if triton_bags.triton is not None:
    import triton.language as tl

VALUES_PER_STEP = 4
"""Values of a row that a program takes at a time."""
WARPS_PER_PROGRAM = 1
"""A bag is a chain of loads that wait for each other: many small programs hide that, large ones do
not."""


class _Encoding(NamedTuple):
    """Sizes of stored numbers, for which the kernel is compiled. Features of equal sizes share a
    launch."""

    value_bytes: int
    column_bytes: int
    pointer_bytes: int


class _Feature(NamedTuple):
    """The numbers that the kernel reads about a feature. Addresses are of the GPU's memory."""

    rows: int
    row_pointers: int
    num_rows: int
    key: int
    first_column: int
    embedding_dim: int
    is_mean: int


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
    """`torch_csr_embedding_bag` for tables that lie on a GPU, in one shard each."""
    out = torch.empty(batch_size, width, device=ids.device)
    fault = torch.zeros(1, dtype=torch.int32, device=ids.device)
    for encoding, features in _by_encoding(tables, layout, keys).items():
        if batch_size == 0:
            break
        num_keys = (offsets.numel() - 1) // batch_size
        check(
            keys is not None or num_keys == len(layout),
            "offsets",
            "bags for each feature",
            f"those of {num_keys} keys",
        )
        check_keys([feature.key for feature in features], num_keys)
        columns_per_program, programs_per_bag = column_programs(
            [feature.embedding_dim for feature in features]
        )
        _kernel[(batch_size, len(features), programs_per_bag)](
            ids,
            offsets,
            ids if per_sample_weights is None else per_sample_weights,
            on_device(tuple(features), ids.device),
            fault,
            out,
            ids.numel(),
            offsets.numel() - 1,
            batch_size,
            width,
            has_weights=per_sample_weights is not None,
            checks_ids=not zero_unknown,
            value_bytes=encoding.value_bytes,
            column_bytes=encoding.column_bytes,
            scale_bytes=RowLayout(encoding.value_bytes, encoding.column_bytes).scale_bytes,
            pointer_bytes=encoding.pointer_bytes,
            record_bytes=RECORD_BYTES,
            start_bytes=START_BYTES,
            rows_per_record=ROWS_PER_RECORD,
            fields_per_feature=len(_Feature._fields),
            columns_per_program=columns_per_program,
            values_per_step=VALUES_PER_STEP,
            num_warps=WARPS_PER_PROGRAM,
            enable_fp_fusion=False,  # a fused multiply-add would round otherwise than the CPU's operator
        )
    torch._assert_async(fault == 0)
    return out


def _by_encoding(
    tables: Sequence[Tensor], layout: Tensor, keys: Sequence[int] | None
) -> dict[_Encoding, list[_Feature]]:
    features = defaultdict(list)
    for index, fields in enumerate(layout.tolist()):
        first_shard, num_shards, first_column, embedding_dim, is_mean, *row_layout = fields
        if num_shards != 1:
            raise NotImplementedError(
                f"feature {index}: supported on a GPU is one shard per table, got {num_shards}"
            )
        rows, row_pointers = tables[2 * first_shard : 2 * first_shard + 2]
        value_bytes, column_bytes = row_layout
        features[_Encoding(value_bytes, column_bytes, row_pointers.element_size())].append(
            _Feature(
                rows=rows.data_ptr(),
                row_pointers=row_pointers.data_ptr(),
                num_rows=num_rows_of(row_pointers),
                key=index if keys is None else keys[index],
                first_column=first_column,
                embedding_dim=embedding_dim,
                is_mean=is_mean,
            )
        )
    return features


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
    pointer_bytes: tl.constexpr,
    record_bytes: tl.constexpr,
    start_bytes: tl.constexpr,
    rows_per_record: tl.constexpr,
):
    """Row pointer of a row, and of the next, from the address of all; of an id that is no row 0 and
    0."""
    if pointer_bytes == 1:
        # compact: the bytes of the record's start, little-endian, and the lengths of the rows
        # before this one
        records = row_pointers.to(tl.pointer_type(tl.uint8))
        record = row // rows_per_record * record_bytes
        place = tl.arange(0, record_bytes)
        own = tl.where(is_row, start_bytes + row % rows_per_record, 0)
        content = tl.load(records + record + place, mask=place < own, other=0).to(tl.int64)
        first = tl.sum(content << tl.where(place < start_bytes, 8 * place, 0).to(tl.int64), axis=0)
        last = first + tl.load(records + record + own, mask=is_row, other=0).to(tl.int64)
    else:
        if pointer_bytes == 4:
            pointers = row_pointers.to(tl.pointer_type(tl.int32))
        else:
            pointers = row_pointers.to(tl.pointer_type(tl.int64))
        first = tl.load(pointers + row, mask=is_row, other=0).to(tl.int64)
        last = tl.load(pointers + row + 1, mask=is_row, other=0).to(tl.int64)
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


_number, _bounds, _float = jitted(_number_at), jitted(_row_bounds), jitted(_as_float)


def _pool_bag(  # type: ignore[no-untyped-def]  # Triton takes every name in an annotation for a value
    ids,
    offsets,
    weights,
    features,
    fault,
    out,
    num_ids,
    num_bags,
    batch_size,
    width,
    has_weights: tl.constexpr,
    checks_ids: tl.constexpr,
    value_bytes: tl.constexpr,
    column_bytes: tl.constexpr,
    scale_bytes: tl.constexpr,
    pointer_bytes: tl.constexpr,
    record_bytes: tl.constexpr,
    start_bytes: tl.constexpr,
    rows_per_record: tl.constexpr,
    fields_per_feature: tl.constexpr,
    columns_per_program: tl.constexpr,
    values_per_step: tl.constexpr,
):
    """Pools one bag of one feature, into `columns_per_program` columns of the output."""
    bag = tl.program_id(0).to(tl.int64)
    feature = features + tl.program_id(1) * fields_per_feature  # fields in the order of _Feature
    rows = tl.load(feature).to(tl.pointer_type(tl.uint8))
    row_pointers, num_rows = tl.load(feature + 1), tl.load(feature + 2)
    first_column, embedding_dim, is_mean = (
        tl.load(feature + 4),
        tl.load(feature + 5),
        tl.load(feature + 6),
    )
    begin, end, is_sound = bag_bounds(
        offsets, tl.load(feature + 3) * batch_size + bag, num_bags, num_ids
    )
    tl.store(fault, 1, mask=is_sound == 0)
    own_columns = tl.program_id(2) * columns_per_program + tl.arange(0, columns_per_program)
    pooled = tl.zeros((columns_per_program,), tl.float32)
    for i in range(begin, end):
        row = tl.load(ids + i).to(tl.int64)
        is_row = (row >= 0) & (row < num_rows)
        if checks_ids:
            tl.store(fault, 1, mask=is_row == 0)
        first, last = _bounds(
            row_pointers, row, is_row, pointer_bytes, record_bytes, start_bytes, rows_per_record
        )
        count = last - first
        start = rows + first * (value_bytes + column_bytes) + tl.where(is_row, row, 0) * scale_bytes
        factor = 1.0
        if has_weights:
            factor = tl.load(weights + i)
        if scale_bytes > 0:  # a bfloat16 is the upper half of a float32
            factor = factor * (_number(start, is_row, scale_bytes) << 16).to(
                tl.float32, bitcast=True
            )
        columns = start + scale_bytes + count * value_bytes
        for k in range(0, count, values_per_step):
            position = k + tl.arange(0, values_per_step)
            inside = position < count
            bits = _number(start + scale_bytes + position * value_bytes, inside, value_bytes)
            value = _float(bits, value_bytes) * factor
            column = _number(columns + position * column_bytes, inside, column_bytes)
            hit = (column[:, None] == own_columns[None, :]) & inside[:, None]
            # columns differ within a row, so at most one value is added to each: no order of
            # additions to choose
            pooled += tl.sum(tl.where(hit, value[:, None], 0.0), axis=0)
    if is_mean != 0:
        length = tl.maximum(end - begin, 1).to(tl.float32)
        pooled = tl.div_rn(pooled, tl.zeros_like(pooled) + length)
    tl.store(
        out + bag * width + first_column + own_columns, pooled, mask=own_columns < embedding_dim
    )


_kernel: Any = jitted(_pool_bag)
