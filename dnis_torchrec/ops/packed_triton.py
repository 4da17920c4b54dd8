"""The lookup of packed tables on a GPU: Triton kernels with the bits of the CPU's operator."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dnis_torchrec.blocks.routing import ROWS_PER_START, RecordLayout
from dnis_torchrec.checks import check
from dnis_torchrec.ops import batches_triton
from dnis_torchrec.ops.batches_triton import check_keys, column_programs, jit, on_device
from dnis_torchrec.ops.packed import COLUMNS_PER_GROUP, GROUP_FIELDS

if batches_triton.triton is not None:
    import triton.language as tl

NO_DIRECTORY, SORTED, RANKS, SPARSE = 0, 1, 2, 3
BAGS_PER_SEGMENT, IDS_PER_STEP, WARPS_PER_SEARCH = 64, 128, 4
"""Bags whose ids, side by side in memory, one program takes, and how many ids at a time."""
BAGS_PER_PROGRAM, NUM_WARPS = 8, 4
"""Bags that a program pools side by side: their rows are asked of memory together. They divide a
segment."""
GROUP_BITS = 24
"""Of what is found about an id: the lowest bits are its row's first group, those above count bytes
to the row."""


class Directory(NamedTuple):
    """What a kernel is compiled for. Features of equal directories share a launch."""

    kind: int
    num_planes: int
    rows_per_record: int


class Feature(NamedTuple):
    """The numbers that the kernels read about a feature. Addresses are of the GPU's memory."""

    rows: int
    directory: int
    record_bytes: int
    num_rows: int
    first_block: int
    num_blocks: int
    key: int
    first_column: int
    embedding_dim: int
    is_mean: int
    layer: int


FEATURE_FIELDS = len(Feature._fields)


def _count_of_bits(bits):
    """Bits that are set in each of some numbers below 2^16."""
    bits = bits - ((bits >> 1) & 0x5555)
    bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
    bits = (bits + (bits >> 4)) & 0x0F0F
    return (bits + (bits >> 8)) & 0x1F


def _place_in_record(
    record, place, is_row, num_blocks, num_planes: tl.constexpr, rows_per_record: tl.constexpr
):
    """The block of each row by its record, and how many of its rows stand before it there."""
    # of 16 bits of a plane: records begin at even bytes
    number = tl.arange(0, rows_per_record // 16)
    planes = (record + 2 * num_blocks)[:, None] + number[None, :] * 2
    offset = place[:, None] - number[None, :] * 16
    inside = tl.minimum(tl.maximum(offset, 0), 16)
    same = ((inside * 0 + 1) << inside) - 1  # the bits of rows before it
    block = place * 0
    for plane in tl.static_range(num_planes):
        address = (planes + plane * (rows_per_record // 8)).to(tl.pointer_type(tl.uint16))
        bits = tl.load(address, mask=is_row[:, None], other=0).to(tl.int32)
        word = tl.sum(tl.where((offset >= 0) & (offset < 16), bits, 0), axis=1)
        bit = (word >> (place % 16)) & 1
        block += bit << plane
        same &= bits ^ ((bit - 1) & 0xFFFF)[:, None]
    return block, tl.sum(_count(same), axis=1)


def _row_among_stored(directory, row, is_row, num_rows):
    """Whether each row is stored by a sparse directory, how many stored ones stand before it, and
    where their ranks begin."""
    head = directory.to(tl.pointer_type(tl.int32))
    num_stored, num_groups = tl.load(head), tl.load(head + 1)
    record = directory + 8 + row // 1024 * 24
    of_record = record.to(tl.pointer_type(tl.int32))
    rank = tl.load(of_record, mask=is_row, other=0)
    first = tl.load(of_record + 1, mask=is_row, other=0)
    group, number = (row // 8 % 128).to(tl.int32), tl.arange(0, 8)
    address = ((record + 8)[:, None] + number[None, :] * 2).to(tl.pointer_type(tl.uint16))
    bits = tl.load(address, mask=is_row[:, None], other=0).to(tl.int32)
    offset = group[:, None] - number[None, :] * 16
    inside = tl.minimum(tl.maximum(offset, 0), 16)
    num_ahead = tl.sum(_count(bits & (((inside * 0 + 1) << inside) - 1)), axis=1)
    word = tl.sum(tl.where((offset >= 0) & (offset < 16), bits, 0), axis=1)
    is_stored = is_row & (((word >> (group % 16)) & 1) != 0)
    is_stored = is_stored & (first >= 0) & (first < num_groups - num_ahead)
    groups = directory + 8 + (num_rows + 1023) // 1024 * 24
    of_row = groups + first
    address = (of_row + num_ahead).to(tl.pointer_type(tl.uint8))
    byte, place = tl.load(address, mask=is_stored, other=0).to(tl.int32), (row % 8).to(tl.int32)
    rank += _count(byte & (((place * 0 + 1) << place) - 1))
    for start in range(0, 128, 32):
        step = start + tl.arange(0, 32)
        bytes_ahead = (of_row[:, None] + step[None, :]).to(tl.pointer_type(tl.uint8))
        is_ahead = is_stored[:, None] & (step[None, :] < num_ahead[:, None])
        rank += tl.sum(_count(tl.load(bytes_ahead, mask=is_ahead, other=0).to(tl.int32)), axis=1)
    is_stored = is_stored & (((byte >> place) & 1) != 0) & (rank >= 0) & (rank < num_stored)
    ranks = groups + ((num_groups + 7) // 8 + 1) * 8
    return is_stored, tl.where(is_stored, rank, 0).to(tl.int64), num_stored, ranks


def _where_rows_stand(
    feature,
    row,
    is_row,
    kind: tl.constexpr,
    num_planes: tl.constexpr,
    rows_per_record: tl.constexpr,
    rows_per_start: tl.constexpr = ROWS_PER_START,
):
    """The block of each row, and its position there."""
    block, position, num_blocks = (row * 0).to(tl.int32), row, tl.load(feature + 5)
    if kind == 1:
        bounds = tl.load(feature + 1).to(tl.pointer_type(tl.int64))
        first = row * 0
        block -= 1
        for number in range(0, num_blocks):
            bound = tl.load(bounds + number)
            block += tl.where(bound <= row, 1, 0)
            first = tl.where(bound <= row, tl.maximum(first, bound), first)
        position = row - first
    if kind >= 2:
        ranks, is_ranked, num_rows = tl.load(feature + 1), is_row, tl.load(feature + 3)
        if kind == 3:
            num_blocks -= 1  # the last one is of rows that are not stored
            is_ranked, position, num_rows, ranks = _stored(ranks, row, is_row, num_rows)
        row = position
    if num_planes > 0:
        starts = (num_rows + rows_per_start - 1) // rows_per_start
        record = ranks + starts * num_blocks * 8 + row // rows_per_record * tl.load(feature + 2)
        place = (row % rows_per_record).to(tl.int32)
        block, rank = _place(record, place, is_ranked, num_blocks, num_planes, rows_per_record)
        is_block = is_ranked & (block < num_blocks)
        starts = ranks.to(tl.pointer_type(tl.int64)) + row // rows_per_start * num_blocks
        start = tl.load(starts + block, mask=is_block, other=0)
        count = tl.load((record + 2 * block).to(tl.pointer_type(tl.uint16)), mask=is_block, other=0)
        position = start + count.to(tl.int64) + rank
    if kind == 3:
        block = tl.where(is_ranked, block, num_blocks)
    return block, position


def _segment_of_bags(
    offsets,
    feature,
    segment,
    num_ids,
    num_bags,
    batch_size,
    bags_per_segment: tl.constexpr = BAGS_PER_SEGMENT,
):
    """Where the ids of a segment begin and end, and whether that can be: where not, both are 0."""
    first = segment * bags_per_segment
    last = tl.minimum(first + bags_per_segment, batch_size)
    bags = offsets + tl.load(feature + 6) * batch_size
    begin, end = tl.load(bags + first).to(tl.int64), tl.load(bags + last).to(tl.int64)
    is_sound = (begin >= 0) & (begin <= end) & (end <= num_ids)
    is_sound = is_sound & (tl.load(offsets) == 0) & (tl.load(offsets + num_bags) == num_ids)
    return tl.where(is_sound, begin, 0), tl.where(is_sound, end, 0), is_sound


_count, _place, _stored = jit(_count_of_bits), jit(_place_in_record), jit(_row_among_stored)
_locate = jit(_where_rows_stand)
segment_of_bags = jit(_segment_of_bags)


def _find_rows(
    ids,
    offsets,
    features,
    blocks,
    places,
    fault,
    num_ids,
    num_bags,
    batch_size,
    checks_ids: tl.constexpr,
    kind: tl.constexpr,
    num_planes: tl.constexpr,
    rows_per_record: tl.constexpr,
    fields_per_feature: tl.constexpr = FEATURE_FIELDS,
    ids_per_step: tl.constexpr = IDS_PER_STEP,
    group_bits: tl.constexpr = GROUP_BITS,
):
    """Writes, for every id of a segment, where its row's bytes begin and its first group; -1 for
    nothing to read."""
    feature = features + tl.program_id(1) * fields_per_feature  # fields in the order of Feature
    segment = tl.program_id(0).to(tl.int64)
    begin, end, is_sound = segment_of_bags(offsets, feature, segment, num_ids, num_bags, batch_size)
    bad, layer = tl.where(is_sound, 0, 1), places + tl.load(feature + 10) * num_ids
    num_rows, num_blocks = tl.load(feature + 3), tl.load(feature + 5)
    of_blocks = blocks + tl.load(feature + 4) * 4
    for first in range(begin, end, ids_per_step):
        position = first + tl.arange(0, ids_per_step)
        is_id = position < end
        row = tl.load(ids + position, mask=is_id, other=0).to(tl.int64)
        is_row = is_id & (row >= 0) & (row < num_rows)
        row = tl.where(is_row, row, 0)
        block, within = _locate(feature, row, is_row, kind, num_planes, rows_per_record)
        is_block = is_row & (block >= 0) & (block < num_blocks)
        of_block = of_blocks + block * 4
        first_byte = tl.load(of_block, mask=is_block, other=0)
        size = tl.load(of_block + 1, mask=is_block, other=0)
        stride = tl.load(of_block + 2, mask=is_block, other=0)
        group = tl.load(of_block + 3, mask=is_block, other=-1)
        exists = is_block & ((group < 0) | ((within >= 0) & (within < size)))
        place = ((first_byte + within * stride) << group_bits) | group
        tl.store(layer + position, tl.where(exists & (group >= 0), place, -1), mask=is_id)
        is_bad = is_row & (exists == 0)
        if checks_ids:
            is_bad = is_bad | (is_id & (is_row == 0))
        bad |= tl.max(tl.where(is_bad, 1, 0), axis=0)
    tl.store(fault, 1, mask=bad != 0)


_search_kernel: Any = jit(_find_rows)


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
    """`torch_packed_embedding_bag` for tables that lie on a GPU."""
    out = torch.empty(batch_size, width, device=ids.device)
    if batch_size == 0:
        return out
    num_keys, num_features = (offsets.numel() - 1) // batch_size, len(feature_layout)
    fits = keys is not None or num_keys == num_features
    check(fits, "offsets", "bags for each feature", f"those of {num_keys} keys")
    limit = f"at most {1 << GROUP_BITS:,} groups of columns"
    check(len(groups) <= 1 << GROUP_BITS, "tables", limit, len(groups))
    launches = _launches(
        tuple((table.data_ptr(), table.dtype) for table in tables),
        tuple(map(tuple, feature_layout.tolist())),
        tuple(map(tuple, table_layout.tolist())),
        tuple(range(num_features) if keys is None else keys),
    )
    every = [feature for features in launches.values() for feature in features]
    check_keys([feature.key for feature in every], num_keys)
    layers = 1 + max((feature.layer for feature in every), default=0)
    places = torch.empty(layers, ids.numel(), dtype=torch.int64, device=ids.device)
    fault = torch.zeros(1, dtype=torch.int32, device=ids.device)
    block_layout, columns = block_layout.to(ids.device), _column_constants(groups, ids.device)
    sizes = (ids.numel(), offsets.numel() - 1, batch_size)
    weights = places if per_sample_weights is None else per_sample_weights
    for directory, features in launches.items():
        of_features = on_device(features, ids.device)
        num_segments = batches_triton.triton.cdiv(batch_size, BAGS_PER_SEGMENT)
        constants = {"checks_ids": not zero_unknown, "num_warps": WARPS_PER_SEARCH}
        search = _search_kernel[(num_segments, len(features))]
        inputs = (ids, offsets, of_features, block_layout)
        search(*inputs, places, fault, *sizes, **constants, **directory._asdict())
        widths = [feature.embedding_dim for feature in features]
        columns_per_program, programs_per_bag = column_programs(widths)
        num_programs = batches_triton.triton.cdiv(batch_size, BAGS_PER_PROGRAM)
        tensors = (places, offsets, weights, of_features, block_layout, columns, fault, out)
        _kernel[(num_programs, len(features), programs_per_bag)](
            *tensors,
            *sizes,
            width,
            has_weights=per_sample_weights is not None,
            is_one_block=directory.kind == NO_DIRECTORY,
            columns_per_program=columns_per_program,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # else it would round otherwise than on the CPU
        )
    torch._assert_async(fault == 0)
    return out


_columns_of_groups: Any = WeakTensorKeyDictionary()


def _column_constants(groups: Tensor, device: torch.device) -> Tensor:
    """All that a lookup reads about a column, ``(groups, 16, 2)`` int32; of groups as
    `field_groups` has them."""
    version = (device, None if groups.is_inference() else groups._version)
    entry = _columns_of_groups.get(groups)
    if entry is None or entry[0] != version or version[1] is None:
        columns = torch.empty(len(groups), COLUMNS_PER_GROUP, 2, dtype=torch.int32, device=device)
        if len(groups):
            _constants_kernel[(len(groups),)](groups.to(device), columns, num_warps=1)
        if columns.is_cuda:  # once: another stream may be the next to read them
            torch.cuda.current_stream(device).synchronize()
        entry = _columns_of_groups[groups] = (version, columns)
    return entry[1]


@functools.lru_cache(maxsize=256)
def _launches(
    tables: tuple[tuple[int, torch.dtype], ...],
    feature_layout: tuple[tuple[int, ...], ...],
    table_layout: tuple[tuple[int, ...], ...],
    keys: tuple[int, ...],
) -> dict[Directory, tuple[Feature, ...]]:
    """Features of equal directories; a module's stay where they are, so few calls find out
    anything."""
    launches: dict[Directory, list[Feature]] = defaultdict(list)
    for index, (table, first_column, embedding_dim, is_mean) in enumerate(feature_layout):
        num_rows, first_block, num_blocks, of_rows, of_directory = table_layout[table]
        kind, num_ranked, start = NO_DIRECTORY, 1, 0
        if of_directory >= 0:
            start, dtype = tables[of_directory]
            kind = {torch.int64: SORTED, torch.int32: SPARSE}.get(dtype, RANKS)
            num_ranked = {RANKS: num_blocks, SPARSE: num_blocks - 1}.get(kind, 1)
        layout = RecordLayout(num_ranked)
        launches[Directory(kind, layout.num_planes, layout.rows_per_record)].append(
            Feature(
                rows=tables[of_rows][0] if of_rows >= 0 else 0,
                directory=start,
                record_bytes=layout.record_bytes,
                num_rows=num_rows,
                first_block=first_block,
                num_blocks=num_blocks,
                key=keys[index],
                first_column=first_column,
                embedding_dim=embedding_dim,
                is_mean=is_mean,
                layer=keys[:index].count(keys[index]),
            )
        )
    return {directory: tuple(features) for directory, features in launches.items()}


def _bags_of_program(
    offsets,
    feature,
    num_ids,
    num_bags,
    batch_size,
    columns_per_program: tl.constexpr,
    bags_per_segment: tl.constexpr = BAGS_PER_SEGMENT,
    bags_per_program: tl.constexpr = BAGS_PER_PROGRAM,
):
    """Bags of a program, and where the ids of each begin and end: in their segment, or nowhere, and
    then not sound."""
    first = tl.program_id(0).to(tl.int64) * bags_per_program
    segment = first // bags_per_segment
    lowest, highest, is_segment = segment_of_bags(
        offsets, feature, segment, num_ids, num_bags, batch_size
    )
    bag = tl.broadcast_to(
        (first + tl.arange(0, bags_per_program))[:, None], (bags_per_program, columns_per_program)
    )
    place = offsets + tl.load(feature + 6) * batch_size + tl.minimum(bag, batch_size - 1)
    begin, end = tl.load(place).to(tl.int64), tl.load(place + 1).to(tl.int64)
    is_sound = (begin >= lowest) & (begin <= end) & (end <= highest) & is_segment
    length = tl.where(is_sound & (bag < batch_size), end - begin, 0).to(tl.int32)
    return bag, begin, length, is_sound


def _words_of_rows(low, byte):
    """The two aligned words that each field of rows may lie in, the second where it reaches there,
    and its bit."""
    first, is_there = ((byte & 3) * 8).to(tl.int32) + (low & 0xFFFFFF), (low & (1 << 30)) != 0
    place, bit = (byte >> 2 << 2).to(tl.pointer_type(tl.int32)) + (first >> 5), first & 31
    # neighbouring columns load the same word: to the memory it is one
    word = tl.load(place, mask=is_there, other=0)
    return word, tl.load(place + 1, mask=is_there & (bit > (low >> 24 & 31)), other=0), bit


def _values_of_words(low, high, word, next_word, bit):
    """The values of some columns of rows; 0 where both constants are."""
    spare_bits = low >> 24 & 31
    both = (word.to(tl.int64) & 0xFFFFFFFF) | (next_word.to(tl.int64) << 32)
    left_end = ((both >> bit).to(tl.int32) << spare_bits).to(tl.uint32, bitcast=True)
    field = (left_end >> spare_bits.to(tl.uint32)).to(tl.int32, bitcast=True)
    # a bfloat16 is the upper half of a float32
    scale = (high & -65536).to(tl.float32, bitcast=True)
    value = ((field << 1) + (high << 16 >> 16)).to(tl.float32) * 0.5 * scale
    return tl.where((low & (1 << 29)) != 0, field.to(tl.float32, bitcast=True), value)


def _constants_of_group(
    groups,
    columns,
    group_fields: tl.constexpr = GROUP_FIELDS,
    columns_per_group: tl.constexpr = COLUMNS_PER_GROUP,
):
    """Packs the constants of one group, see `_column_constants`."""
    column = tl.arange(0, columns_per_group)
    group = groups + tl.program_id(0).to(tl.int64) * group_fields
    start = (tl.load(group + column) & 0xFF) + tl.load(group + 5 * columns_per_group)
    mask = tl.load(group + columns_per_group + column)
    scale = tl.load(group + 2 * columns_per_group + column).to(tl.float32, bitcast=True)
    bias = tl.load(group + 3 * columns_per_group + column).to(tl.float32, bitcast=True)
    # a power of two: its exponent is the field's bit
    lowest = tl.where(mask == 0, 1, mask & -mask).to(tl.float32)
    bit = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
    width = (((mask >> bit) + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    is_float = mask == -1
    # bits of a word that the field leaves unused, whether it is a float32, and whether there is a
    # field at all
    kind = tl.where(is_float, 3 << 5, tl.where(mask == 0, 0, (2 << 5) + 32 - width))
    scale = scale * lowest
    shift = tl.div_rn(bias * 2.0, tl.where(scale == 0.0, 1.0, scale)).to(tl.int32)
    constants = columns + (tl.program_id(0).to(tl.int64) * columns_per_group + column) * 2
    tl.store(constants, tl.where(mask == 0, 0, (kind << 24) | (start * 8 + bit)))
    tl.store(constants + 1, (scale.to(tl.int32, bitcast=True) & -65536) | (shift & 0xFFFF))


_bags, _words, _values = jit(_bags_of_program), jit(_words_of_rows), jit(_values_of_words)


def _pool_bags(
    places,
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
    is_one_block: tl.constexpr,
    columns_per_program: tl.constexpr,
    columns_per_group: tl.constexpr = COLUMNS_PER_GROUP,
    fields_per_feature: tl.constexpr = FEATURE_FIELDS,
    bags_per_program: tl.constexpr = BAGS_PER_PROGRAM,
    group_bits: tl.constexpr = GROUP_BITS,
):
    """Pools `bags_per_program` bags of one feature, into `columns_per_program` columns of the
    output."""
    feature = features + tl.program_id(1) * fields_per_feature  # fields in the order of Feature
    bag, begin, length, is_sound = _bags(
        offsets, feature, num_ids, num_bags, batch_size, columns_per_program
    )
    bad = tl.max(tl.max(tl.where(is_sound, 0, 1), axis=1), axis=0)
    tl.store(fault, 1, mask=bad != 0)
    column = tl.program_id(2) * columns_per_program + tl.arange(0, columns_per_program)
    is_column = (column < tl.load(feature + 8))[None, :]
    lanes = columns + 2 * column[None, :]  # groups follow one another: their columns do, too
    rows, here = tl.load(feature), places + tl.load(feature + 10) * num_ids + begin
    if is_one_block:  # then rows differ in nothing but their bytes, and constants are loaded once
        group = tl.load(blocks + tl.load(feature + 4) * 4 + 3)
        constants = lanes + 2 * group * columns_per_group
        low_of_all = tl.load(constants, mask=is_column & (group >= 0), other=0)
        high_of_all = tl.load(constants + 1, mask=is_column & (group >= 0), other=0)
    sums = tl.zeros((bags_per_program, columns_per_program), tl.float32)
    next_place = tl.load(here, mask=length > 0, other=-1)
    for step in range(0, tl.max(tl.max(length, axis=1), axis=0)):
        place = next_place  # the next one is asked for before this one's bytes are there
        next_place = tl.load(here + (step + 1), mask=step + 1 < length, other=-1)
        is_read, byte = place >= 0, rows + (place >> group_bits)
        if is_one_block:
            low, high = tl.where(is_read, low_of_all, 0), tl.where(is_read, high_of_all, 0)
        else:
            group = (place & ((1 << group_bits) - 1)).to(tl.int32)
            constants = lanes + group * (2 * columns_per_group)
            low = tl.load(constants, mask=is_read & is_column, other=0)
            high = tl.load(constants + 1, mask=is_read & is_column, other=0)
        word, next_word, bit = _words(low, byte)
        value = _values(low, high, word, next_word, bit)
        if has_weights:
            value *= tl.load(weights + begin + step, mask=place >= 0, other=0.0)
        sums += value
    # MEAN divides
    count = tl.where(tl.load(feature + 9) != 0, tl.maximum(length, 1), 1).to(tl.float32)
    to = out + bag * width + tl.load(feature + 7) + column[None, :]
    tl.store(to, tl.div_rn(sums, count), mask=(bag < batch_size) & is_column)


_kernel: Any = jit(_pool_bags)
_constants_kernel: Any = jit(_constants_of_group)
