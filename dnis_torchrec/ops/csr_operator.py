"""The operator ``dnis_torchrec::csr_embedding_bag``: all features of a collection, from compressed
sparse rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.ops.bag_offsets import register_bag_offsets
from dnis_torchrec.ops.batch_checks import INTEGERS
from dnis_torchrec.ops.compact_pointers import num_rows_of, row_bounds
from dnis_torchrec.ops.interleaved_rows import RowLayout, read_rows
from dnis_torchrec.ops.mixed_dimension_operator import register_mixed_dimension_bag
from dnis_torchrec.ops.native_build import LOOKUPS, NAMESPACE, once
from dnis_torchrec.ops.packed_operator import register_packed_embedding_bag

CSR_EMBEDDING_BAG = "csr_embedding_bag"
CSR_SCHEMA = (
    f"{CSR_EMBEDDING_BAG}(Tensor ids, Tensor offsets, Tensor? per_sample_weights, Tensor[] tables, Tensor layout, "
    "int[]? keys, SymInt batch_size, int width, bool zero_unknown) -> Tensor"
)
"""The same as in the C++ source, which defines it where the library is loaded without Python."""


@once
def load_operator() -> bool:
    """Makes the operators of lookups there, compiling them if need be; modules do so by themselves."""
    compiled = LOOKUPS.is_there()
    if not compiled:
        torch.library.define(
            f"{NAMESPACE}::{CSR_EMBEDDING_BAG}", CSR_SCHEMA.removeprefix(CSR_EMBEDDING_BAG)
        )
    # on the CPU the compiled implementation goes before this one
    torch.library.impl(
        f"{NAMESPACE}::{CSR_EMBEDDING_BAG}", "CompositeExplicitAutograd", torch_csr_embedding_bag
    )
    if torch.cuda.is_available():
        from dnis_torchrec.ops import csr_triton, triton_bags  # Triton takes seconds to load

        if triton_bags.triton is not None:
            implementation = partial(_cuda_csr_embedding_bag, csr_triton.triton_csr_embedding_bag)
            torch.library.impl(f"{NAMESPACE}::{CSR_EMBEDDING_BAG}", "CUDA", implementation)
    torch.library.register_fake(f"{NAMESPACE}::{CSR_EMBEDDING_BAG}", _fake_csr_embedding_bag)
    register_bag_offsets(compiled=compiled)
    if compiled:
        register_mixed_dimension_bag()
    register_packed_embedding_bag(compiled=compiled)
    return compiled


def torch_csr_embedding_bag(
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
    """The operator's meaning, from torch's own operators; same arguments and result as the compiled
    one."""
    check(ids.dtype in INTEGERS, f"{CSR_EMBEDDING_BAG}: ids", "int32 or int64", ids.dtype)
    shards, bounds = split_shards(tables), offsets.long()
    ends = (int(bounds[0]), int(bounds[-1])) if bounds.numel() else None
    rises = ends == (0, ids.numel()) and bool((bounds.diff() >= 0).all())
    check(
        rises, f"{CSR_EMBEDDING_BAG}: offsets", "them to rise from 0 to the number of ids", "others"
    )
    num_bags = bounds.numel() - 1
    fits = keys is not None or not batch_size or num_bags == len(layout) * batch_size
    check(fits, f"{CSR_EMBEDDING_BAG}: offsets", "bags for each feature and for no other", num_bags)
    out = torch.zeros(batch_size, width, device=ids.device)
    for feature, fields in enumerate(layout.tolist()):
        first_shard, num_shards, first_column, embedding_dim, is_mean, *row_layout = fields
        key, place = (
            feature if keys is None else keys[feature],
            f"{CSR_EMBEDDING_BAG}: feature {feature}",
        )
        table = shards[first_shard : first_shard + num_shards]
        bags = bounds[key * batch_size : (key + 1) * batch_size + 1]
        first, last, lengths = int(bags[0]), int(bags[-1]), bags.diff()
        bag = torch.repeat_interleave(lengths, output_size=last - first)
        row, num_rows = ids[first:last].long(), sum(num_rows_of(pointers) for _, pointers in table)
        is_row = (row >= 0) & (row < num_rows)
        if not zero_unknown:
            _check_all(is_row, place, f"ids in 0..{num_rows - 1}", row)
        known = is_row.nonzero().squeeze(1)
        weights = None if per_sample_weights is None else per_sample_weights[first:last][known]
        entry, column, value = _values_of_table(
            table, RowLayout(*row_layout), row[known], weights, place
        )
        _check_all(column < embedding_dim, place, "columns below embedding_dim", column)
        pooled = out.new_zeros(batch_size * embedding_dim)
        pooled.index_add_(0, bag[known][entry] * embedding_dim + column, value)
        pooled = pooled.view(batch_size, embedding_dim)
        if is_mean:
            pooled /= lengths.clamp(min=1).unsqueeze(1)
        out[:, first_column : first_column + embedding_dim] = pooled
    return out


def _cuda_csr_embedding_bag(by_triton: Callable[..., Tensor], *arguments: Any) -> Tensor:
    layout = arguments[4]
    whole = all(num_shards == 1 for num_shards in layout[:, 1].tolist())
    return (by_triton if whole else torch_csr_embedding_bag)(*arguments)


def split_shards(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Rows and row pointers of each shard, from the operator's list."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _check_all(condition: Tensor, place: str, requirement: str, values: Tensor) -> None:
    """Raises a ValueError with the first of `values` for which `condition` does not hold."""
    if not bool(condition.all()):
        raise ValueError(describe(place, requirement, int(values[~condition][0])))


def _values_of_table(
    shards: Sequence[tuple[Tensor, Tensor]],
    layout: RowLayout,
    rows: Tensor,
    weights: Tensor | None,
    place: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_values_of_rows`, of a table that may lie in several shards; in the order of the rows that
    were asked for."""
    if len(shards) == 1:
        return _values_of_rows(shards[0], layout, rows, weights, place)
    parts, first = [], 0
    for shard in shards:
        num_rows = num_rows_of(shard[1])
        inside = ((rows >= first) & (rows < first + num_rows)).nonzero().squeeze(1)
        own_weights = None if weights is None else weights[inside]
        entry, column, value = _values_of_rows(
            shard, layout, rows[inside] - first, own_weights, place
        )
        parts.append((inside[entry], column, value))
        first += num_rows
    entry, column, value = (torch.cat(found) for found in zip(*parts, strict=True))
    order = entry.argsort(stable=True)
    return entry[order], column[order], value[order]


def _values_of_rows(
    shard: tuple[Tensor, Tensor],
    layout: RowLayout,
    rows: Tensor,
    weights: Tensor | None,
    place: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """All values of the given rows, one row after the other: which row (by position), which column,
    and the value."""
    interleaved_rows, row_pointers = shard
    begin, end = row_bounds(row_pointers, rows)
    # the first part keeps the second from overflowing
    rising = (begin >= 0) & (begin <= end) & (end <= interleaved_rows.numel())
    rising &= (rows + 1) * layout.scale_bytes + end * layout.entry_bytes <= interleaved_rows.numel()
    _check_all(rising, place, "rising row pointers up to the number of values", rows)
    entry, column, value, scale = read_rows(interleaved_rows, layout, rows, begin, end - begin)
    factor = scale if weights is None else weights * scale
    return entry, column, value * factor[entry]


def _fake_csr_embedding_bag(
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
    return ids.new_empty((batch_size, width), dtype=torch.float32)
