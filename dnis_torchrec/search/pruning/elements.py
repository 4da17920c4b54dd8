"""Element structure: single values are retained, the largest magnitudes, exactly as many as wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import describe
from dnis_torchrec.forms import CANONICAL_FORM, FORMS, Csr, form_named
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.search.budget import Size, SizeOutOfReachError
from dnis_torchrec.search.pruning.tables import PrunedTable
from dnis_torchrec.selection.shards import TableShard

DIGIT_BITS = 16
MAGNITUDE_BITS = 31


@dataclass(frozen=True, eq=False)
class PlacedShard:
    """A shard, and where its values stand in the order of all values."""

    shard: TableShard
    first: int
    stride: int

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Walks the shard a few rows at a time."""
        for chunk, rows, _ in self.shard.chunks():
            numbers = torch.arange(
                rows.start - self.shard.first_row, rows.stop - self.shard.first_row
            )
            yield chunk, (self.first + numbers * self.stride).to(chunk.device)


def keep_largest_(shards: list[TableShard], num_keep: int) -> None:
    """Zeroes all but the `num_keep` largest magnitudes, exactly; among equals, earlier ones (shard,
    row, column) stay."""
    placed_shards, first = [], 0
    for shard in shards:
        placed_shards.append(PlacedShard(shard, first, shard.weight.shape[1]))
        first += shard.weight.numel()
    _keep_largest_(placed_shards, placed_shards, first, num_keep, Ranks())


def keep_largest_of_tables_(tables: list[PrunedTable], num_keep: int, ranks: Ranks) -> None:
    """Zeroes all but the `num_keep` largest magnitudes; among equals, earlier ones (table, row,
    column) stay."""
    held, counted, first = [], [], 0
    for table in tables:
        dim = table.config.embedding_dim
        for shard in table.shards:
            placed = PlacedShard(shard, first + shard.first_row * dim + shard.first_column, dim)
            held.append(placed)
            counted += [placed] if shard in table.counted else []
        first += table.num_values
    _keep_largest_(held, counted, first, num_keep, ranks)


@torch.no_grad()
def keep_above_(tables: list[PrunedTable], threshold: float) -> None:
    """Zeroes magnitudes up to a threshold. Local, no collective."""
    for table in tables:
        for chunk, _, _ in table.chunks():
            chunk.mul_(chunk.abs() > threshold)


def check_form_of_elements(form: str) -> Csr:
    """Checks that single values can be counted in a form."""
    known = form_named(form)
    if not isinstance(known, Csr):
        supported = [name for name, other in FORMS.items() if isinstance(other, Csr)]
        remedy = f"say form={CANONICAL_FORM!r}"
        raise NotImplementedError(
            describe("form", f"supported for single values are {supported}", repr(form), remedy)
        )
    return known


def num_elements(size: Size, blocks: RowBlocks, *, at_least: int = 1) -> int:
    """Returns the number of single values that a size affords."""
    shapes = [
        (routing.num_embeddings, blocks.embedding_dims[table])
        for table, routing in blocks.routings.items()
    ]
    return affordable_values(size, shapes, at_least=at_least)


def affordable_values(size: Size, shapes: Sequence[tuple[int, int]], *, at_least: int = 1) -> int:
    """As `num_elements`, of tables of which only the shapes are known."""
    form, total = check_form_of_elements(size.form), sum(num_rows * dim for num_rows, dim in shapes)
    fixed = sum(form.row_index_bytes(num_rows, dim) for num_rows, dim in shapes)
    per_value = max(form.bytes_per_value(dim) for _, dim in shapes)
    affordable = int(size.num_bytes(total) - fixed) // per_value
    if affordable < at_least:
        (name, received), smallest = size.given, fixed + at_least * per_value
        limit = f"at least {smallest}"
        if name == "compression":
            limit = f"at most {math.floor(100 * 4 * total / smallest) / 100:.2f}"
        raise SizeOutOfReachError(describe(name, f"{limit} for these tables", received))
    return min(affordable, total)


@torch.no_grad()
def _keep_largest_(
    held: list[PlacedShard],
    counted: list[PlacedShard],
    num_values: int,
    num_keep: int,
    ranks: Ranks,
) -> None:
    """Zeroes the values in `held` that are not among the largest; over all ranks, `counted` has
    every value once."""
    if num_keep <= 0:
        threshold, last = (1 << MAGNITUDE_BITS) - 1, -1
    else:
        threshold, last = _cut(counted, num_values, min(num_keep, num_values), ranks)
    for placed in held:
        for chunk, starts in placed.chunks():
            bits = _magnitude_bits(chunk)
            positions = starts.unsqueeze(1) + torch.arange(chunk.shape[1], device=chunk.device)
            keep = (bits > threshold) | ((bits == threshold) & (positions <= last))
            chunk.mul_(keep)


def _cut(
    counted: list[PlacedShard], num_values: int, num_keep: int, ranks: Ranks
) -> tuple[int, int]:
    """(bits of the smallest magnitude to keep, position of the last value to keep among those that
    tie with it)."""

    def magnitudes() -> Iterator[Tensor]:
        for placed in counted:
            for chunk, _ in placed.chunks():
                yield _magnitude_bits(chunk).flatten()

    threshold, above, ties = _select(magnitudes, MAGNITUDE_BITS, num_keep, ranks)
    wanted = num_keep - above
    if wanted == ties:
        return threshold, num_values

    def places_from_the_end() -> Iterator[Tensor]:
        for placed in counted:
            for chunk, starts in placed.chunks():
                row, column = (_magnitude_bits(chunk) == threshold).nonzero(as_tuple=True)
                yield num_values - (starts[row] + column)

    place, _, _ = _select(places_from_the_end, num_values.bit_length(), wanted, ranks)
    return threshold, num_values - place


def _select(
    keys: Callable[[], Iterator[Tensor]], num_bits: int, nth: int, ranks: Ranks
) -> tuple[int, int, int]:
    """The key of a rank from the top (1 is the largest), over all ranks, digit by digit from the
    highest."""
    found, above, equal = 0, 0, 0
    num_digits = -(-num_bits // DIGIT_BITS)
    for digit in reversed(range(num_digits)):
        histogram = torch.zeros(1 << DIGIT_BITS, dtype=torch.int64)
        shift = digit * DIGIT_BITS
        for chunk in keys():
            is_highest = digit == num_digits - 1
            matching = chunk if is_highest else chunk[(chunk >> (shift + DIGIT_BITS)) == found]
            digits = (matching >> shift) & ((1 << DIGIT_BITS) - 1)
            histogram += torch.bincount(digits, minlength=1 << DIGIT_BITS).cpu()
        ranks.sum_(histogram)
        from_top = histogram.flip(0).cumsum(0)
        position = int(torch.searchsorted(from_top, nth - above))
        equal = int(from_top[position] - (from_top[position - 1] if position else 0))
        above += int(from_top[position]) - equal
        found = (found << DIGIT_BITS) | (len(histogram) - 1 - position)
    return found, above, equal


def _magnitude_bits(chunk: Tensor) -> Tensor:
    return chunk.float().abs().contiguous().view(torch.int32)
