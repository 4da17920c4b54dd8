"""Where the rows of a batch's ids stand in packed tables: the first of the two kernels of
packed_triton.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from dnis_torchrec.blocks.routing import ROWS_PER_START
from dnis_torchrec.ops import triton_bags
from dnis_torchrec.ops.triton_bags import jitted

if triton_bags.triton is not None:
    import triton.language as tl

NO_DIRECTORY, SORTED, RANKS = 0, 1, 2
BAGS_PER_SEGMENT, IDS_PER_STEP, WARPS_PER_SEARCH = 64, 128, 4
"""Bags whose ids, side by side in memory, one program takes, and how many ids at a time."""
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
    records: int
    record_bytes: int
    num_rows: int
    first_block: int
    num_blocks: int
    key: int
    first_column: int
    embedding_dim: int
    is_mean: int
    layer: int


def find_rows_(
    found: Tensor,
    fault: Tensor,
    ids: Tensor,
    offsets: Tensor,
    features: Tensor,
    block_layout: Tensor,
    sizes: tuple[int, int, int],
    directory: Directory,
    *,
    checks_ids: bool,
) -> None:
    """Finds the rows of all ids of some features. Local; the GPU alone waits for it."""
    _search_kernel[(triton_bags.triton.cdiv(sizes[2], BAGS_PER_SEGMENT), len(features))](
        ids,
        offsets,
        features,
        block_layout,
        found,
        fault,
        *sizes,
        checks_ids=checks_ids,
        kind=directory.kind,
        num_planes=directory.num_planes,
        rows_per_record=directory.rows_per_record,
        rows_per_start=ROWS_PER_START,
        fields_per_feature=len(Feature._fields),
        bags_per_segment=BAGS_PER_SEGMENT,
        ids_per_step=IDS_PER_STEP,
        group_bits=GROUP_BITS,
        num_warps=WARPS_PER_SEARCH,
    )


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
    number = tl.arange(
        0, rows_per_record // 16
    )  # of 16 bits of a plane: records begin at even bytes
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
    kind: tl.constexpr,
    num_planes: tl.constexpr,
    rows_per_record: tl.constexpr,
    rows_per_start: tl.constexpr,
):
    """The block of each row, and its position there."""
    block, position, num_blocks = (row * 0).to(tl.int32), row, tl.load(feature + 6)
    if kind == 1:
        bounds = tl.load(feature + 1).to(tl.pointer_type(tl.int64))
        first = row * 0
        block -= 1
        for number in range(0, num_blocks):
            bound = tl.load(bounds + number)
            block += tl.where(bound <= row, 1, 0)
            first = tl.where(bound <= row, tl.maximum(first, bound), first)
        position = row - first
    if kind == 2:
        record = tl.load(feature + 2) + row // rows_per_record * tl.load(feature + 3)
        place = (row % rows_per_record).to(tl.int32)
        block, before = _place(record, place, is_row, num_blocks, num_planes, rows_per_record)
        is_block = is_row & (block < num_blocks)
        starts = (
            tl.load(feature + 1).to(tl.pointer_type(tl.int64)) + row // rows_per_start * num_blocks
        )
        start = tl.load(starts + block, mask=is_block, other=0)
        count = tl.load((record + 2 * block).to(tl.pointer_type(tl.uint16)), mask=is_block, other=0)
        position = start + count.to(tl.int64) + before
    return block, position


def _segment_of_bags(  # type: ignore[no-untyped-def]  # as above
    offsets, feature, segment, num_ids, num_bags, batch_size, bags_per_segment: tl.constexpr
):
    """Where the ids of a segment begin and end, and whether that can be: where not, both are 0."""
    first, last = (
        segment * bags_per_segment,
        tl.minimum((segment + 1) * bags_per_segment, batch_size),
    )
    bags = offsets + tl.load(feature + 7) * batch_size
    begin, end = tl.load(bags + first).to(tl.int64), tl.load(bags + last).to(tl.int64)
    is_sound = (begin >= 0) & (begin <= end) & (end <= num_ids)
    is_sound = is_sound & (tl.load(offsets) == 0) & (tl.load(offsets + num_bags) == num_ids)
    return tl.where(is_sound, begin, 0), tl.where(is_sound, end, 0), is_sound


_count, _place, _locate = (
    jitted(_count_of_bits),
    jitted(_place_in_record),
    jitted(_where_rows_stand),
)
segment_of_bags = jitted(_segment_of_bags)


def _find_rows(  # type: ignore[no-untyped-def]  # as above
    ids,
    offsets,
    features,
    blocks,
    found,
    fault,
    num_ids,
    num_bags,
    batch_size,
    checks_ids: tl.constexpr,
    kind: tl.constexpr,
    num_planes: tl.constexpr,
    rows_per_record: tl.constexpr,
    rows_per_start: tl.constexpr,
    fields_per_feature: tl.constexpr,
    bags_per_segment: tl.constexpr,
    ids_per_step: tl.constexpr,
    group_bits: tl.constexpr,
):
    """Writes, for every id of a segment, where its row's bytes begin and its first group; -1 for
    nothing to read."""
    feature = features + tl.program_id(1) * fields_per_feature  # fields in the order of Feature
    segment = tl.program_id(0).to(tl.int64)
    begin, end, is_sound = segment_of_bags(
        offsets, feature, segment, num_ids, num_bags, batch_size, bags_per_segment
    )
    bad, layer = tl.where(is_sound, 0, 1), found + tl.load(feature + 11) * num_ids
    of_blocks, num_rows, num_blocks = (
        blocks + tl.load(feature + 5) * 4,
        tl.load(feature + 4),
        tl.load(feature + 6),
    )
    for first in range(begin, end, ids_per_step):
        position = first + tl.arange(0, ids_per_step)
        is_id = position < end
        row = tl.load(ids + position, mask=is_id, other=0).to(tl.int64)
        is_row = is_id & (row >= 0) & (row < num_rows)
        row = tl.where(is_row, row, 0)
        block, within = _locate(
            feature, row, is_row, kind, num_planes, rows_per_record, rows_per_start
        )
        is_block = is_row & (block >= 0) & (block < num_blocks)
        of_block = of_blocks + block * 4
        first_byte, size = (
            tl.load(of_block, mask=is_block, other=0),
            tl.load(of_block + 1, mask=is_block, other=0),
        )
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


_search_kernel: Any = jitted(_find_rows)
