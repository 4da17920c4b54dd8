"""The operators of rows of bit fields: bags pooled from them, where bags begin, and encoding."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dnis_torchrec.blocks import codes as column_codes
from dnis_torchrec.blocks.codes import FLOAT_BITS, ColumnCodes, row_strides
from dnis_torchrec.checks import check
from dnis_torchrec.ops.batches import INTEGERS, are_sound, name_features, refuse_bags
from dnis_torchrec.ops.build import LOOKUPS, NAMESPACE, once

PACKED_EMBEDDING_BAG = "packed_embedding_bag"
PACKED_SCHEMA = (
    f"{PACKED_EMBEDDING_BAG}(Tensor ids, Tensor offsets, Tensor? per_sample_weights, "
    "Tensor[] tables, Tensor feature_layout, Tensor table_layout, Tensor block_layout, "
    "Tensor groups, int[]? keys, SymInt batch_size, int width, bool zero_unknown) -> Tensor"
)
OFFSETS_SCHEMA = "bag_offsets(Tensor lengths, Tensor ids, Tensor features) -> Tensor"
ENCODE_SCHEMA = (
    "encode_rows(Tensor values, Tensor blocks, Tensor bits, Tensor scale, Tensor shift, "
    "Tensor? gain, Tensor? feedback, Tensor(a!) out) -> bool"
)
"""The C++ source has the same schemas, for processes that load the library without Python."""

NUM_LAYOUTS = 4
"""Tensors that describe features, tables, blocks and groups of columns, behind the tables."""
COLUMNS_PER_GROUP = 16
COLUMNS_PER_QUAD = 4
GROUP_FIELDS = 96
"""int32 numbers that describe a group, see `field_groups`."""
_EMPTY, _CODES, _WITH_FLOATS = 0, 1, 2
_WINDOW_BYTES, _QUAD_BYTES = 64, 16


@once
def load_operator() -> bool:
    """Makes the operators of lookups there, compiling them if need be. Modules call it."""
    is_compiled = LOOKUPS.is_there()
    for schema, meaning, fake in (
        (PACKED_SCHEMA, torch_packed_embedding_bag, _fake),
        (OFFSETS_SCHEMA, torch_bag_offsets, _fake_offsets),
        (ENCODE_SCHEMA, torch_encode_rows, _fake_encoding),
    ):
        operator, _, arguments = schema.partition("(")
        name = f"{NAMESPACE}::{operator}"
        # nothing is compiled, or the library comes with a package that is older than the operator
        if not hasattr(torch.ops.dnis_torchrec, operator):
            torch.library.define(name, f"({arguments}")
        # on the CPU the compiled implementation goes before this one
        torch.library.impl(name, "CompositeExplicitAutograd", meaning)
        torch.library.register_fake(name, fake)
    if torch.cuda.is_available():
        from dnis_torchrec.ops import batches_triton, packed_triton  # Triton takes seconds to load

        if batches_triton.triton is not None:
            name = f"{NAMESPACE}::{PACKED_EMBEDDING_BAG}"
            torch.library.impl(name, "CUDA", packed_triton.triton_packed_embedding_bag)
    return is_compiled


class OpenedCollection:
    """A collection whose layouts the compiled operator has read; lookups name it by a number."""

    number: int | None = None

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        operators = torch.ops.dnis_torchrec
        is_here = all(buffer.is_cpu and buffer.numel() != 1 for buffer in buffers)
        if is_here and hasattr(operators, "open_collection"):
            tables, layouts = buffers[:-NUM_LAYOUTS], buffers[-NUM_LAYOUTS:]
            self.number = operators.open_collection.default(tables, *layouts)
            close = weakref.finalize(self, operators.close_collection.default, self.number)
            close.atexit = False

    def has(self, buffers: list[Tensor]) -> bool:
        """Whether these are the very buffers that were read."""
        # Lists compare their items by identity first, a twentieth of the time that a loop of `is`
        # takes. Other tensors raise, but for those of one value, with which nothing is opened.
        try:
            return self._buffers == buffers
        except RuntimeError:
            return False


def field_groups(bits: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Describes the columns of blocks for a lookup, 16 columns in a group, 24 bytes for each
    column."""
    padding = (0, -bits.shape[1] % COLUMNS_PER_GROUP)
    offset, width = pad(column_codes.field_offsets(bits), padding), pad(bits.long(), padding)
    is_code = (width > 0) & (width < FLOAT_BITS)
    start, bit = (part.view(-1, COLUMNS_PER_GROUP) for part in (offset // 8, offset % 8))
    has_field = (width > 0).view(-1, COLUMNS_PER_GROUP)
    # read as 16 bytes of the row where they lie in it: another cache line costs most of a lookup
    row_ends = (row_strides(bits) - _QUAD_BYTES).clamp(min=0)
    last = row_ends.repeat_interleave(start.shape[0] // len(bits)).unsqueeze(1)
    window = torch.minimum(_first(start, has_field), last)
    in_window = torch.where(has_field, start - window, 0)
    by_quad = in_window.view(-1, COLUMNS_PER_QUAD)
    quad = _first(by_quad, has_field.view(-1, COLUMNS_PER_QUAD))
    in_quad = torch.where(has_field, (by_quad - quad).view_as(start), 0)
    mask = ((1 << width) - 1).view_as(start) << torch.where(has_field, bit, 0)
    is_float = (width == FLOAT_BITS).view_as(start)
    mask = torch.where(is_float, -1, mask)
    power = torch.where(is_code.view_as(start), bit, 0)
    scales = torch.where(is_code, pad(scale, padding), 0.0).view(start.shape)
    biases = scales * (torch.where(is_code, pad(shift, padding), 0).view(start.shape) / 2)
    ends = torch.where(has_field, (bit + width.view_as(start) + 7) // 8 + in_window, 0)
    kind = torch.where(is_float.any(1), _WITH_FLOATS, torch.where(has_field.any(1), _CODES, _EMPTY))
    integers = [
        _bytes_from(in_window, _WINDOW_BYTES),
        mask,
        (scales / (1 << power)).view(torch.int32),
        biases.view(torch.int32),
        _bytes_from(in_quad, _QUAD_BYTES),
        window,
        quad.view(-1, COLUMNS_PER_GROUP // COLUMNS_PER_QUAD),
        kind.unsqueeze(1),
        ends.amax(dim=1, keepdim=True),
    ]
    groups = torch.cat([part.to(torch.int32) for part in integers], dim=1)
    return pad(groups, (0, GROUP_FIELDS - groups.shape[1]))


def _first(start: Tensor, has_field: Tensor) -> Tensor:
    """Where the first field of each row of a matrix starts; 0 where there is none."""
    first = torch.where(has_field, start, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
    return torch.where(has_field.any(1, keepdim=True), first, 0)


def _bytes_from(start: Tensor, num_bytes: int) -> Tensor:
    """Four bytes from `start` on, in one number; beyond the window stands what is masked out."""
    parts = [(start + byte) % num_bytes << 8 * byte for byte in range(4)]
    return torch.stack(parts).sum(0)


def torch_packed_embedding_bag(
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
    """The operator's meaning, from torch's own operators; same arguments and result as the compiled
    one."""
    place = PACKED_EMBEDDING_BAG
    check(ids.dtype in INTEGERS, f"{place}: ids", "int32 or int64", ids.dtype)
    bounds = offsets.long()
    ends = (int(bounds[0]), int(bounds[-1])) if bounds.numel() else None
    rises = ends == (0, ids.numel()) and bool((bounds.diff() >= 0).all())
    check(rises, f"{place}: offsets", "them to rise from 0 to the number of ids", "others")
    num_bags = bounds.numel() - 1
    fits = keys is not None or not batch_size or num_bags == len(feature_layout) * batch_size
    check(fits, f"{place}: offsets", "bags for each feature and for no other", num_bags)
    out = torch.zeros(batch_size, width, device=ids.device)
    for feature, fields_of_feature in enumerate(feature_layout.tolist()):
        table, first_column, embedding_dim, is_mean = fields_of_feature
        key = feature if keys is None else keys[feature]
        bags = bounds[key * batch_size : (key + 1) * batch_size + 1]
        first, last, lengths = int(bags[0]), int(bags[-1]), bags.diff()
        fields, rows = table_layout[table].tolist(), ids[first:last].long()
        is_row = (rows >= 0) & (rows < fields[0])
        if not zero_unknown and not bool(is_row.all()):
            requirement = f"ids in 0..{fields[0] - 1}"
            check(False, f"{place}: feature {feature}", requirement, int(rows[~is_row][0]))
        places = is_row.nonzero().squeeze(1)
        values = _rows_of_table(tables, fields, block_layout, groups, rows[places], embedding_dim)
        if per_sample_weights is not None:
            values = values * per_sample_weights[first:last][places].unsqueeze(1)
        bag = torch.repeat_interleave(lengths, output_size=last - first)[places]
        sums = out.new_zeros(batch_size, embedding_dim).index_add_(0, bag, values)
        if is_mean:
            sums /= lengths.clamp(min=1).unsqueeze(1)
        out[:, first_column : first_column + embedding_dim] = sums
    return out


def _rows_of_table(
    tables: Sequence[Tensor],
    fields: Sequence[int],
    block_layout: Tensor,
    groups: Tensor,
    rows: Tensor,
    dim: int,
) -> Tensor:
    """The given rows of a table, ``(rows, D)`` float32."""
    # most lookups are compiled, and need none of it
    from dnis_torchrec.blocks.routing import RowDirectory

    num_rows, first_block, num_blocks, of_rows, of_directory = fields
    directory = rows.new_empty(0, dtype=torch.uint8) if of_directory < 0 else tables[of_directory]
    num_known = num_blocks - (directory.dtype == torch.int64)
    directory_of_rows = RowDirectory(
        num_embeddings=num_rows,
        num_blocks=num_known,
        blocks=tuple(range(num_blocks)),
        directory=directory,
    )
    blocks, positions = directory_of_rows.locate(rows)
    values = torch.zeros(len(rows), dim, device=rows.device)
    for block in blocks.unique().tolist():
        begin, size, stride, first_group = block_layout[first_block + block].tolist()
        if first_group < 0:
            continue
        here = (blocks == block).nonzero().squeeze(1)
        position = positions[here]
        is_there = (position >= 0) & (position < size)
        requirement = "a directory of rows that exist"
        check(bool(is_there.all()), PACKED_EMBEDDING_BAG, requirement, "others")
        of_block = groups[first_group : first_group + -(-dim // COLUMNS_PER_GROUP)].to(rows.device)
        values[here] = _values(tables[of_rows], begin + position * stride, of_block)[:, :dim]
    return values


def _values(rows: Tensor, start: Tensor, groups: Tensor) -> Tensor:
    """Values of the rows that start at the given bytes: ``(rows, 16 * groups)`` float32."""
    wide, masks, scales, biases = groups[:, : 4 * COLUMNS_PER_GROUP].split(COLUMNS_PER_GROUP, dim=1)
    window = groups[:, 5 * COLUMNS_PER_GROUP]
    byte = (window.unsqueeze(1) + (wide & 0xFF)).flatten().long()
    four = start.view(-1, 1, 1) + byte.unsqueeze(1) + torch.arange(4, device=rows.device)
    # what lies beyond the last row is masked out
    bits = torch.arange(0, 32, 8, device=rows.device).int()
    field = rows[four.clamp(max=rows.numel() - 1)].int() << bits
    field, masks = field.sum(2, dtype=torch.int64).to(torch.int32), masks.flatten()
    scales, biases = (part.view(torch.float32).flatten() for part in (scales, biases))
    values = (field & masks).float() * scales + biases
    return torch.where(masks == -1, field.view(torch.float32), values)


def _fake(ids: Tensor, *arguments: Any) -> Tensor:
    return ids.new_empty(arguments[-3:-1], dtype=torch.float32)


def names_tensor(features: Sequence[str]) -> Tensor:
    """Names as the operator takes them: a tensor, because torch loses the memory of every string
    that it hands over."""
    text = "\n".join(name.replace("\n", " ") for name in features)
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def bag_offsets(lengths: Tensor, ids: Tensor, features: Tensor) -> Tensor:
    """Returns the offsets at which the bags of a batch begin. `load_operator` has to be called
    before."""
    return torch.ops.dnis_torchrec.bag_offsets.default(lengths.contiguous(), ids, features)


def torch_bag_offsets(lengths: Tensor, ids: Tensor, features: Tensor) -> Tensor:
    """The operator's meaning, from torch's own operators; same arguments and result as the compiled
    one."""
    names = bytes(features.tolist()).decode().split("\n")
    fits = lengths.dim() == 2 and len(lengths) == len(names)
    check(fits, name_features(names), "contiguous lengths of shape (F, B) on the CPU", "others")
    check(lengths.dtype in INTEGERS, name_features(names), "int32 or int64 lengths", "others")
    if not are_sound(lengths, lengths.numel(), ids.numel()):
        refuse_bags(names, lengths, [lengths.shape[1]] * len(names), ids.flatten())
    return pad(lengths.flatten().cumsum(0, dtype=torch.int64), (1, 0))


def _fake_offsets(lengths: Tensor, ids: Tensor, features: Tensor) -> Tensor:
    return lengths.new_empty(lengths.shape[0] * lengths.shape[1] + 1, dtype=torch.int64)


def pack_values(
    values: Tensor, blocks: Tensor, codes: ColumnCodes, *, place: str
) -> tuple[Tensor, Tensor]:
    """(rows in bit fields, ``(bytes,)`` uint8, those of one block behind those of another; how many
    each block has)."""
    row_counts = torch.bincount(blocks, minlength=len(codes.bits) + 1)[:-1]
    fields = torch.empty(int(row_counts @ row_strides(codes.bits)), dtype=torch.uint8)
    _encode_to(fields, values, blocks, codes, place)
    return fields, row_counts


def values_in_codes(values: Tensor, blocks: Tensor, codes: ColumnCodes, *, place: str) -> Tensor:
    """What rows are in codes, ``(n, D)``; those of no block are 0."""
    out = torch.zeros(values.shape)
    _encode_to(out, values, blocks, codes, place)
    return out


def _encode_to(out: Tensor, values: Tensor, blocks: Tensor, codes: ColumnCodes, place: str) -> None:
    """Encodes rows to bit fields, or to what they stand for, as the dtype says."""
    load_operator()
    values = values.detach().cpu().float().contiguous()
    parts = codes.bits, codes.scale, codes.shift, codes.gain, codes.feedback
    of_columns = [None if part is None else part.contiguous() for part in parts]
    if not torch.ops.dnis_torchrec.encode_rows.default(values, blocks, *of_columns, out):
        column_codes.check_finite(values, blocks, place)


def torch_encode_rows(
    values: Tensor,
    blocks: Tensor,
    bits: Tensor,
    scale: Tensor,
    shift: Tensor,
    gain: Tensor | None,
    feedback: Tensor | None,
    out: Tensor,
) -> bool:
    """The operator's meaning, from torch's own operators; same arguments and result as the compiled
    one."""
    if not bool(values.isfinite().all()):
        return False
    codes = ColumnCodes(bits, scale, shift, feedback, gain)
    fields = column_codes.encode_rows(values, blocks, codes)
    if out.dtype == torch.float32:
        out.copy_(column_codes.decode_rows(fields, blocks, codes))
        return True
    present = [s for s in blocks.unique().tolist() if s < len(bits)]
    parts = [column_codes.pack_fields(fields[blocks == s], bits[s]).flatten() for s in present]
    out.copy_(torch.cat([out.new_empty(0), *parts]))
    return True


def _fake_encoding(*arguments: Any) -> bool:
    return True
