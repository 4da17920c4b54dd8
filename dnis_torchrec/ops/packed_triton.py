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
    then: a row's bytes wait for one load behind its id, not for three. The next id's row is looked for before the
    bytes of this one's are there, so that both are waited for at once. All features whose directories are alike take
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
    block_layout, columns = block_layout.to(ids.device), _column_constants(groups.to(ids.device))
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
            columns,
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
            columns_per_group=COLUMNS_PER_GROUP,
            fields_per_feature=len(_Feature._fields),
            bags_per_program=BAGS_PER_PROGRAM,
            columns_per_program=columns_per_program,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # a fused multiply-add would round otherwise than the CPU's operator
        )
    torch._assert_async(fault == 0)
    return out


def _column_constants(groups: Tensor) -> Tensor:
    """All that a lookup reads about a column, in 8 bytes, ``(groups, 16)`` int64; of groups as `field_groups` has them.

    From the lowest bit on: where its field begins in the row (24 bits), width of the field (8), shift (16), and scale
    (16, a bfloat16). One load for five, for every id and column, pays for a launch over the groups alone.
    """
    columns = torch.empty(len(groups), COLUMNS_PER_GROUP, dtype=torch.int64, device=groups.device)
    if len(groups):
        _constants_kernel[(len(groups),)](
            groups, columns, group_fields=GROUP_FIELDS, columns_per_group=COLUMNS_PER_GROUP, num_warps=1
        )
    return columns


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
        may_load = is_row[:, None] & is_block[None, :]
        starts = tl.load(feature + 1).to(tl.pointer_type(tl.int64)) + number[None, :]
        start = tl.load(starts + (row // rows_per_start * num_blocks)[:, None], mask=may_load, other=0)
        counts = (record[:, None] + number[None, :] * 2).to(tl.pointer_type(tl.uint16))
        count = tl.load(counts, mask=may_load, other=0).to(tl.int64)
        place = (row % rows_per_record).to(tl.int32)
        block, before = _place(record, place, is_row, num_blocks, num_planes, rows_per_record)
        is_own = number[None, :] == block[:, None]
        position = before.to(tl.int64) + tl.sum(tl.where(is_own, start + count, 0), axis=1)
    return block, position


def _bags_of_program(  # type: ignore[no-untyped-def]  # as above
    offsets, feature, num_ids, num_bags, batch_size, bags_per_program: tl.constexpr
):
    """Bags of a program, where the ids of each begin and end, and 1 where offsets are wrong."""
    bag = tl.program_id(0).to(tl.int64) * bags_per_program + tl.arange(0, bags_per_program)
    first = tl.load(feature + 7) * batch_size
    begin, end, is_sound = bag_bounds(offsets, first + tl.minimum(bag, batch_size - 1), num_bags, num_ids)
    return bag, begin, tl.where(bag < batch_size, end, begin), tl.where(is_sound, 0, 1)


def _words_of_rows(constants, byte, is_read):  # type: ignore[no-untyped-def]  # as above
    """The two aligned words that each field of rows may lie in; the second where it does."""
    width, first = constants.to(tl.int32) >> 24, byte[:, None] * 8 + (constants.to(tl.int32) & 0xFFFFFF)
    words, is_there = (first >> 5 << 2).to(tl.pointer_type(tl.int32)), is_read & (width != 0)
    # neighbouring columns load the same word: to the memory it is one
    word = tl.load(words, mask=is_there, other=0)
    return word, tl.load(words + 1, mask=is_there & ((first & 31) + width > 32), other=0)


def _values_of_words(constants, byte, is_read, word, next_word):  # type: ignore[no-untyped-def]  # as above
    """The values of some columns of rows that begin at the given bytes; 0 where nothing is read."""
    low, high = constants.to(tl.int32), (constants >> 32).to(tl.int32)
    width, bit = low >> 24, (byte[:, None] * 8 + (low & 0xFFFFFF)) & 31
    both = (word.to(tl.int64) & 0xFFFFFFFF) | (next_word.to(tl.int64) << 32)
    field = ((both >> bit) & (((bit * 0 + 1) << width) - 1)).to(tl.int32)
    scale = (high & -65536).to(tl.float32, bitcast=True)  # a bfloat16 is the upper half of a float32
    value = field.to(tl.float32) * scale + scale * ((high << 16 >> 16).to(tl.float32) * 0.5)
    value = tl.where(width == 32, field.to(tl.float32, bitcast=True), value)
    return tl.where(is_read & (width != 0), value, 0.0)


def _rows_of_ids(  # type: ignore[no-untyped-def]  # as above
    feature,
    blocks,
    row,
    is_id,
    checks_ids: tl.constexpr,
    kind: tl.constexpr,
    num_planes: tl.constexpr,
    rows_per_record: tl.constexpr,
    most_blocks: tl.constexpr,
    rows_per_start: tl.constexpr,
):
    """Where the bytes of rows begin, their first group (-1: nothing to read), and 1 where something is wrong."""
    is_row = is_id & (row >= 0) & (row < tl.load(feature + 4))
    row = tl.where(is_row, row, 0)
    number = tl.arange(0, most_blocks)  # of a block; the layout of all is loaded, so that no row waits for it
    is_block = number < tl.load(feature + 6)
    of_block = blocks + (tl.load(feature + 5) + number) * 4
    first_bytes, sizes = tl.load(of_block, mask=is_block, other=0), tl.load(of_block + 1, mask=is_block, other=0)
    strides = tl.load(of_block + 2, mask=is_block, other=0)
    first_groups = tl.load(of_block + 3, mask=is_block, other=-1)
    block, position = _locate(feature, row, is_row, number, is_block, kind, num_planes, rows_per_record, rows_per_start)
    is_own = (number[None, :] == block[:, None]) & is_block[None, :]
    group = tl.sum(tl.where(is_own, first_groups[None, :] + 1, 0), axis=1) - 1
    is_inside = (position >= 0) & (position < tl.sum(tl.where(is_own, sizes[None, :], 0), axis=1))
    exists = (tl.max(tl.where(is_own, 1, 0), axis=1) > 0) & ((group < 0) | is_inside)
    byte = tl.load(feature) + tl.sum(tl.where(is_own, first_bytes[None, :], 0), axis=1)
    byte += position * tl.sum(tl.where(is_own, strides[None, :], 0), axis=1)
    is_bad = is_row & (exists == 0)
    if checks_ids:
        is_bad = is_bad | (is_id & (is_row == 0))
    return byte, tl.where(is_row & exists, group, -1), tl.where(is_bad, 1, 0)


def _constants_of_group(  # type: ignore[no-untyped-def]  # as above
    groups, columns, group_fields: tl.constexpr, columns_per_group: tl.constexpr
):
    """Packs the constants of one group, see `_column_constants`."""
    column = tl.arange(0, columns_per_group)
    group = groups + tl.program_id(0).to(tl.int64) * group_fields
    start = (tl.load(group + column) & 0xFF) + tl.load(group + 5 * columns_per_group)
    mask = tl.load(group + columns_per_group + column)
    scale = tl.load(group + 2 * columns_per_group + column).to(tl.float32, bitcast=True)
    bias = tl.load(group + 3 * columns_per_group + column).to(tl.float32, bitcast=True)
    lowest = tl.where(mask == 0, 1, mask & -mask).to(tl.float32)  # a power of two: its exponent is the field's bit
    bit = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
    width = (((mask >> bit) + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    width = tl.where(mask == -1, 32, tl.where(mask == 0, 0, width))
    scale = scale * lowest
    shift = tl.div_rn(bias * 2.0, tl.where(scale == 0.0, 1.0, scale)).to(tl.int32)
    high = (scale.to(tl.int32, bitcast=True) & -65536) | (shift & 0xFFFF)
    low = (width << 24) | (start * 8 + bit)
    constants = (high.to(tl.int64) << 32) | low.to(tl.int64)
    tl.store(columns + tl.program_id(0).to(tl.int64) * columns_per_group + column, constants)


_count, _place = jitted(_count_of_bits), jitted(_place_in_record)
_locate, _find = jitted(_where_rows_stand), jitted(_rows_of_ids)
_bags, _words, _values = jitted(_bags_of_program), jitted(_words_of_rows), jitted(_values_of_words)


def _pool_bags(  # type: ignore[no-untyped-def]  # as above
    ids,
    offsets,
    weights,
    features,
    blocks,
    columns,
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
    columns_per_group: tl.constexpr,
    fields_per_feature: tl.constexpr,
    bags_per_program: tl.constexpr,
    columns_per_program: tl.constexpr,
):
    """Pools `bags_per_program` bags of one feature, into `columns_per_program` columns of the output."""
    feature = features + tl.program_id(1) * fields_per_feature  # fields in the order of _Feature
    bag, begin, end, bad = _bags(offsets, feature, num_ids, num_bags, batch_size, bags_per_program)
    column = tl.program_id(2) * columns_per_program + tl.arange(0, columns_per_program)
    is_column = (column < tl.load(feature + 9))[None, :]
    lanes = columns + column[None, :]  # groups follow one another: their columns do, too
    if most_blocks == 1:  # then rows differ in nothing but their bytes, and constants are loaded once
        group = tl.load(blocks + tl.load(feature + 5) * 4 + 3)
        constants = tl.load(lanes + group * columns_per_group, mask=is_column & (group >= 0), other=0)
    pooled = tl.zeros((bags_per_program, columns_per_program), tl.float32)
    byte, groups = begin * 0, begin * 0 - 1  # in front of the first row there is none
    for step in range(0, tl.max(end - begin, axis=0) + 1):
        is_id, is_read = begin + step < end, (groups >= 0)[:, None] & is_column
        row = tl.load(ids + begin + step, mask=is_id, other=0).to(tl.int64)
        if most_blocks > 1:
            constants = tl.load(lanes + groups[:, None] * columns_per_group, mask=is_read, other=0)
        # between the bytes of the row before and what is made of them the next row is looked for: one wait for both
        word, next_word = _words(constants, byte, is_read)
        next_byte, next_groups, is_bad = _find(
            feature, blocks, row, is_id, checks_ids, kind, num_planes, rows_per_record, most_blocks, rows_per_start
        )
        value = _values(constants, byte, is_read, word, next_word)
        if has_weights:
            value *= tl.load(weights + begin + (step - 1), mask=groups >= 0, other=0.0)[:, None]
        pooled += value
        byte, groups, bad = next_byte, next_groups, bad | is_bad
    tl.store(fault, 1, mask=tl.max(bad, axis=0) != 0)
    length = tl.where(tl.load(feature + 10) != 0, tl.maximum(end - begin, 1), 1).to(tl.float32)  # MEAN divides
    place = out + bag[:, None] * width + tl.load(feature + 8) + column[None, :]
    pooled = tl.div_rn(pooled, tl.zeros_like(pooled) + length[:, None])
    tl.store(place, pooled, mask=(bag < batch_size)[:, None] & is_column)


_kernel: Any = jitted(_pool_bags)
_constants_kernel: Any = jitted(_constants_of_group)
