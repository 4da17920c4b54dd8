"""The lookup of packed tables on a GPU: a Triton kernel with the bits of the CPU's operator.

Tests run it, and compare it with that operator, in Triton's interpreter and without Triton on numpy
(tests/triton_on_numpy.py). It has not run on a GPU yet: how fast it is nobody has measured.

Shapes: B batch, F features, I ids of a batch, T tables, N rows of a table, K blocks of a table, D embedding_dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dnis_torchrec.blocks.row_directory import ROWS_PER_START, RecordLayout
from dnis_torchrec.checks import check
from dnis_torchrec.ops import triton_bags
from dnis_torchrec.ops.packed_operator import COLUMNS_PER_GROUP, GROUP_FIELDS
from dnis_torchrec.ops.triton_bags import bag_bounds, check_keys, column_programs, jitted, on_device

if triton_bags.triton is not None:
    import triton.language as tl

BAGS_PER_PROGRAM = 8
"""Bags that a program pools side by side: their rows are asked of memory together."""
NUM_WARPS = 2
NO_DIRECTORY, SORTED, RANKS = 0, 1, 2


class _Directory(NamedTuple):
    """What a kernel is compiled for. Features of equal directories share a launch."""

    kind: int
    num_planes: int
    rows_per_record: int
    most_blocks: int


class _Feature(NamedTuple):
    """The numbers that the kernel reads about a feature. Addresses are of the GPU's memory."""

    rows: int
    directory: int
    records: int
    record_bytes: int
    num_rows: int
    first_block: int
    num_blocks: int
    key: int
    first_column: int
    embedding_dim: int
    is_mean: int


def triton_packed_embedding_bag(
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    tables: Sequence[Tensor],
    feature_layout: Tensor,
    table_layout: Tensor,
    block_layout: Tensor,
    groups: Tensor,
    keys: Sequence[int] | None,
    batch_size: int,
    width: int,
    zero_unknown: bool,
) -> Tensor:
    """`torch_packed_embedding_bag` for tables that lie on a GPU.

    A program pools some bags of one feature side by side, each in the order of its ids; nothing is added atomically, so
    the result is the same every time. What a directory knows of a row is loaded whatever its block is, and chosen from
    then: a row's bytes wait for one load behind its id, not for three. All features whose directories are alike take
    one launch.

    Args:
        ids: ``(I,)``; this and all that follows as for `torch_packed_embedding_bag`, every tensor on the GPU.
        offsets: ``(keys * B + 1,)``, rising from 0 to I.
        per_sample_weights: ``(I,)`` or None.
        tables: rows and directories of all tables.
        feature_layout: ``(F, 4)``; this and the next rather on the CPU, because reading them from the GPU waits for it.
        table_layout: ``(T, 5)``.
        block_layout: ``(blocks, 4)``.
        groups: ``(groups, 96)``.
        keys: positions of keys, or None.
        batch_size: B.
        width: output columns.
        zero_unknown: whether unknown ids give zeros; else they are an error.

    Returns:
        ``(B, width)`` float32.

    Raises:
        ValueError: if a feature has no bags.
        RuntimeError: for offsets that do not rise from 0 to I, a directory of rows that do not exist, and an unknown id
            unless `zero_unknown`; on a GPU later and for the whole process, as an asynchronous assertion is.
    """
    out = torch.empty(batch_size, width, device=ids.device)
    if batch_size == 0:
        return out
    fault = torch.zeros(1, dtype=torch.int32, device=ids.device)
    num_keys = (offsets.numel() - 1) // batch_size
    fits = keys is not None or num_keys == len(feature_layout)
    check(fits, "offsets", "bags for each feature", f"those of {num_keys} keys")
    block_layout, groups = block_layout.to(ids.device), groups.to(ids.device)
    for directory, features in _by_directory(tables, feature_layout, table_layout, keys).items():
        check_keys([feature.key for feature in features], num_keys)
        columns_per_program, programs_per_bag = column_programs([feature.embedding_dim for feature in features])
        grid = (triton_bags.triton.cdiv(batch_size, BAGS_PER_PROGRAM), len(features), programs_per_bag)
        _kernel[grid](
            ids,
            offsets,
            ids if per_sample_weights is None else per_sample_weights,
            on_device(tuple(features), ids.device),
            block_layout,
            groups,
            fault,
            out,
            ids.numel(),
            offsets.numel() - 1,
            batch_size,
            width,
            has_weights=per_sample_weights is not None,
            checks_ids=not zero_unknown,
            kind=directory.kind,
            num_planes=directory.num_planes,
            rows_per_record=directory.rows_per_record,
            most_blocks=directory.most_blocks,
            rows_per_start=ROWS_PER_START,
            group_fields=GROUP_FIELDS,
            columns_per_group=COLUMNS_PER_GROUP,
            fields_per_feature=len(_Feature._fields),
            bags_per_program=BAGS_PER_PROGRAM,
            columns_per_program=columns_per_program,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # a fused multiply-add would round otherwise than the CPU's operator
        )
    torch._assert_async(fault == 0)
    return out


def _by_directory(
    tables: Sequence[Tensor], feature_layout: Tensor, table_layout: Tensor, keys: Sequence[int] | None
) -> dict[_Directory, list[_Feature]]:
    found, of_tables = defaultdict(list), table_layout.tolist()
    for index, (table, first_column, embedding_dim, is_mean) in enumerate(feature_layout.tolist()):
        num_rows, first_block, num_blocks, of_rows, of_directory = of_tables[table]
        kind, layout, directory = NO_DIRECTORY, RecordLayout(2), None
        if of_directory >= 0:
            directory = tables[of_directory]
            kind = SORTED if directory.dtype == torch.int64 else RANKS
        if kind == RANKS:
            layout = RecordLayout(num_blocks)
        most_blocks = triton_bags.triton.next_power_of_2(num_blocks)
        compiled = _Directory(kind, layout.num_planes, layout.rows_per_record, most_blocks)
        start = 0 if directory is None else directory.data_ptr()
        found[compiled].append(
            _Feature(
                rows=tables[of_rows].data_ptr() if of_rows >= 0 else 0,
                directory=start,
                records=start + layout.start_bytes(num_rows),
                record_bytes=layout.record_bytes,
                num_rows=num_rows,
                first_block=first_block,
                num_blocks=num_blocks,
                key=index if keys is None else keys[index],
                first_column=first_column,
                embedding_dim=embedding_dim,
                is_mean=is_mean,
            )
        )
    return found


def _count_of_bits(bits):  # type: ignore[no-untyped-def]  # Triton takes every name in an annotation for a value
    """Bits that are set in each of some numbers below 2^16."""
    bits = bits - ((bits >> 1) & 0x5555)
    bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
    bits = (bits + (bits >> 4)) & 0x0F0F
    return (bits + (bits >> 8)) & 0x1F


def _place_in_record(  # type: ignore[no-untyped-def]  # as above
    record, place, is_row, num_blocks, num_planes: tl.constexpr, rows_per_record: tl.constexpr
):
    """The block of each row by its record, and how many rows of that block stand before it there."""
    number = tl.arange(0, rows_per_record // 16)  # of 16 bits of a plane: records begin at even bytes
    planes = (record + 2 * num_blocks)[:, None] + number[None, :] * 2
    left = place[:, None] - number[None, :] * 16
    inside = tl.minimum(tl.maximum(left, 0), 16)
    same = ((inside * 0 + 1) << inside) - 1  # the bits of rows before it
    block = place * 0
    for plane in tl.static_range(num_planes):
        address = (planes + plane * (rows_per_record // 8)).to(tl.pointer_type(tl.uint16))
        bits = tl.load(address, mask=is_row[:, None], other=0).to(tl.int32)
        own = tl.sum(tl.where((left >= 0) & (left < 16), bits, 0), axis=1)
        bit = (own >> (place % 16)) & 1
        block += bit << plane
        same &= bits ^ ((bit - 1) & 0xFFFF)[:, None]
    return block, tl.sum(_count(same), axis=1)


def _where_rows_stand(  # type: ignore[no-untyped-def]  # as above
    feature,
    row,
    is_row,
    number,
    is_block,
    kind: tl.constexpr,
    num_planes: tl.constexpr,
    rows_per_record: tl.constexpr,
    rows_per_start: tl.constexpr,
):
    """The block of each row, and its position there. Of a rank directory all counts are loaded, one is chosen."""
    block, position = (row * 0).to(tl.int32), row
    if kind == 1:
        bounds = tl.load(tl.load(feature + 1).to(tl.pointer_type(tl.int64)) + number, mask=is_block, other=0)
        is_begun = (bounds[None, :] <= row[:, None]) & is_block[None, :]
        block = tl.sum(tl.where(is_begun, 1, 0), axis=1) - 1
        position = row - tl.max(tl.where(is_begun, bounds[None, :], 0), axis=1)
    if kind == 2:
        num_blocks = tl.load(feature + 6)
        record = tl.load(feature + 2) + row // rows_per_record * tl.load(feature + 3)
        place = (row % rows_per_record).to(tl.int32)
        block, before = _place(record, place, is_row, num_blocks, num_planes, rows_per_record)
        may_load = is_row[:, None] & is_block[None, :]
        starts = tl.load(feature + 1).to(tl.pointer_type(tl.int64)) + number[None, :]
        start = tl.load(starts + (row // rows_per_start * num_blocks)[:, None], mask=may_load, other=0)
        counts = (record[:, None] + number[None, :] * 2).to(tl.pointer_type(tl.uint16))
        count = tl.load(counts, mask=may_load, other=0).to(tl.int64)
        is_own = number[None, :] == block[:, None]
        position = before.to(tl.int64) + tl.sum(tl.where(is_own, start + count, 0), axis=1)
    return block, position


def _fields_at(byte, mask, is_there):  # type: ignore[no-untyped-def]  # as above
    """Four bytes from any address on, of which those with a bit of `mask` are loaded, in aligned words; int32."""
    aligned, bit = byte & -4, ((byte & 3) * 8).to(tl.int64)
    needed = mask.to(tl.int64) & 0xFFFFFFFF
    words = aligned.to(tl.pointer_type(tl.int32))
    low = tl.load(words, mask=is_there & (((needed << bit) & 0xFFFFFFFF) != 0), other=0).to(tl.int64)
    high = tl.load(words + 1, mask=is_there & ((needed << bit) > 0xFFFFFFFF), other=0).to(tl.int64)
    field = ((low & 0xFFFFFFFF) >> bit) | ((high & 0xFFFFFFFF) << (32 - bit))
    return field.to(tl.int32)


def _values_of_rows(  # type: ignore[no-untyped-def]  # as above
    group, lane, byte, is_read, columns_per_group: tl.constexpr
):
    """The values of some columns of rows that begin at the given bytes; 0 where nothing is read."""
    mask = tl.load(lane + columns_per_group, mask=is_read, other=0)
    window = tl.load(group + 5 * columns_per_group, mask=is_read, other=0)
    start = (tl.load(lane, mask=is_read, other=0) & 0xFF) + window
    field = _fields(byte[:, None] + start, mask, is_read & (mask != 0))
    scale = tl.load(lane + 2 * columns_per_group, mask=is_read, other=0).to(tl.float32, bitcast=True)
    bias = tl.load(lane + 3 * columns_per_group, mask=is_read, other=0).to(tl.float32, bitcast=True)
    value = (field & mask).to(tl.float32) * scale + bias
    value = tl.where(mask == -1, field.to(tl.float32, bitcast=True), value)
    return tl.where(is_read, value, 0.0)


def _rows_of_ids(  # type: ignore[no-untyped-def]  # as above
    feature,
    block_layout,
    row,
    is_row,
    kind: tl.constexpr,
    num_planes: tl.constexpr,
    rows_per_record: tl.constexpr,
    most_blocks: tl.constexpr,
    rows_per_start: tl.constexpr,
):
    """Where the bytes of rows begin, their first group (-1: none), and whether the directory tells of such rows."""
    number = tl.arange(0, most_blocks)  # of a block; the layout of all is loaded, so that no row waits for it
    is_block = number < tl.load(feature + 6)
    of_block = block_layout + (tl.load(feature + 5) + number) * 4
    first_bytes, sizes = tl.load(of_block, mask=is_block, other=0), tl.load(of_block + 1, mask=is_block, other=0)
    strides, first_groups = (
        tl.load(of_block + 2, mask=is_block, other=0),
        tl.load(of_block + 3, mask=is_block, other=-1),
    )
    block, position = _locate(feature, row, is_row, number, is_block, kind, num_planes, rows_per_record, rows_per_start)
    is_own = (number[None, :] == block[:, None]) & is_block[None, :]
    first_group = tl.sum(tl.where(is_own, first_groups[None, :] + 1, 0), axis=1) - 1
    is_inside = (position >= 0) & (position < tl.sum(tl.where(is_own, sizes[None, :], 0), axis=1))
    exists = (tl.max(tl.where(is_own, 1, 0), axis=1) > 0) & ((first_group < 0) | is_inside)
    byte = tl.load(feature) + tl.sum(tl.where(is_own, first_bytes[None, :], 0), axis=1)
    return byte + position * tl.sum(tl.where(is_own, strides[None, :], 0), axis=1), first_group, exists


_count, _place, _fields = jitted(_count_of_bits), jitted(_place_in_record), jitted(_fields_at)
_locate, _find, _values = jitted(_where_rows_stand), jitted(_rows_of_ids), jitted(_values_of_rows)


def _pool_bags(  # type: ignore[no-untyped-def]  # as above
    ids,
    offsets,
    weights,
    features,
    block_layout,
    groups,
    fault,
    out,
    num_ids,
    num_bags,
    batch_size,
    width,
    has_weights: tl.constexpr,
    checks_ids: tl.constexpr,
    kind: tl.constexpr,
    num_planes: tl.constexpr,
    rows_per_record: tl.constexpr,
    most_blocks: tl.constexpr,
    rows_per_start: tl.constexpr,
    group_fields: tl.constexpr,
    columns_per_group: tl.constexpr,
    fields_per_feature: tl.constexpr,
    bags_per_program: tl.constexpr,
    columns_per_program: tl.constexpr,
):
    """Pools `bags_per_program` bags of one feature, into `columns_per_program` columns of the output."""
    bag = tl.program_id(0).to(tl.int64) * bags_per_program + tl.arange(0, bags_per_program)
    feature = features + tl.program_id(1) * fields_per_feature  # fields in the order of _Feature
    embedding_dim, is_mean = tl.load(feature + 9), tl.load(feature + 10)
    first_bag = tl.load(feature + 7) * batch_size
    begin, end, is_sound = bag_bounds(offsets, first_bag + tl.minimum(bag, batch_size - 1), num_bags, num_ids)
    end, bad = tl.where(bag < batch_size, end, begin), tl.where(is_sound, 0, 1)
    column = tl.program_id(2) * columns_per_program + tl.arange(0, columns_per_program)
    pooled = tl.zeros((bags_per_program, columns_per_program), tl.float32)
    for step in range(0, tl.max(end - begin, axis=0)):
        is_id = begin + step < end
        row = tl.load(ids + begin + step, mask=is_id, other=0).to(tl.int64)
        is_row = is_id & (row >= 0) & (row < tl.load(feature + 4))
        if checks_ids:
            bad |= tl.where(is_id & (is_row == 0), 1, 0)
        row = tl.where(is_row, row, 0)
        byte, first_group, exists = _find(
            feature, block_layout, row, is_row, kind, num_planes, rows_per_record, most_blocks, rows_per_start
        )
        bad |= tl.where(is_row & (exists == 0), 1, 0)
        group = groups + (first_group[:, None] + (column // columns_per_group)[None, :]) * group_fields
        is_read = (is_row & exists & (first_group >= 0))[:, None] & (column < embedding_dim)[None, :]
        value = _values(group, group + (column % columns_per_group)[None, :], byte, is_read, columns_per_group)
        if has_weights:
            value *= tl.load(weights + begin + step, mask=is_id, other=0.0)[:, None]
        pooled += value
    if is_mean != 0:
        length = tl.maximum(end - begin, 1).to(tl.float32)
        pooled = tl.div_rn(pooled, tl.zeros_like(pooled) + length[:, None])
    tl.store(fault, 1, mask=tl.max(bad, axis=0) != 0)
    place = out + bag[:, None] * width + tl.load(feature + 8) + column[None, :]
    tl.store(place, pooled, mask=(bag < batch_size)[:, None] & (column < embedding_dim)[None, :])


_kernel: Any = jitted(_pool_bags)
