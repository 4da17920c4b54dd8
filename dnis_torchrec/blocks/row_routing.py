"""Row routing: from a row id to the block that the row belongs to, and to its position in that
block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dnis_torchrec.checks import check

MAX_NUM_BLOCKS = 65_535
ROWS_AT_A_TIME = 1 << 20
"""Rows that are looked at together: bounds what that takes beside a byte or two per row, and its
count."""


@dataclass(frozen=True, eq=False)
class RowRouting:
    """Map from each of N rows to its block, in the smaller of two forms."""

    num_embeddings: int
    num_blocks: int
    boundaries: Tensor | None = None
    block_of_row: Tensor | None = None

    def __post_init__(self) -> None:
        check(
            0 < self.num_blocks <= MAX_NUM_BLOCKS,
            "RowRouting.num_blocks",
            f"1..{MAX_NUM_BLOCKS}",
            self.num_blocks,
        )
        check(
            (self.boundaries is None) != (self.block_of_row is None),
            "RowRouting",
            "exactly one of boundaries and block_of_row",
            "both" if self.boundaries is not None else "neither",
        )
        if self.boundaries is not None:
            cuts = self.boundaries
            rising = cuts.numel() == self.num_blocks + 1 and bool((cuts.diff() >= 0).all())
            check(
                rising and int(cuts[0]) == 0 and int(cuts[-1]) <= self.num_embeddings,
                "RowRouting.boundaries",
                f"{self.num_blocks + 1} rising row numbers from 0 to at most {self.num_embeddings}",
                cuts.tolist(),
            )
        elif self.block_of_row is not None:
            rows = self.block_of_row
            check(
                rows.dim() == 1 and rows.numel() == self.num_embeddings,
                "RowRouting.block_of_row",
                f"one block for each of {self.num_embeddings} rows",
                tuple(rows.shape),
            )

    @staticmethod
    def from_map(block_of_row: Tensor, num_blocks: int) -> RowRouting:
        """Builds a routing from one block number per row, stored as uint8 or uint16."""
        wide = block_of_row.long()
        within = wide.numel() == 0 or (int(wide.min()) >= 0 and int(wide.max()) <= num_blocks)
        check(within, "block_of_row", f"values in 0..{num_blocks}", "a value outside")
        return RowRouting(
            block_of_row.numel(), num_blocks, block_of_row=wide.to(_map_dtype(num_blocks))
        )

    def block_of(self, ids: Tensor) -> Tensor:
        """Blocks of the given rows."""
        cuts = None if self.boundaries is None else self.boundaries[1:].contiguous()
        return _block_of(ids, cuts, self.block_of_row)

    def all_blocks(self) -> Tensor:
        """The block of every row, ``(N,)`` int64."""
        if self.block_of_row is not None:
            return self.block_of_row.long()
        sizes = self.row_counts(include_unassigned=True)
        return torch.repeat_interleave(torch.arange(self.num_blocks + 1), sizes)

    def blocks_of_all(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, their blocks as int64) of all rows, `ROWS_AT_A_TIME` at a time."""
        for first in range(0, self.num_embeddings, ROWS_AT_A_TIME):
            rows = slice(first, min(first + ROWS_AT_A_TIME, self.num_embeddings))
            yield rows, self.block_of(torch.arange(rows.start, rows.stop))

    @cached_property
    def largest_block(self) -> int:
        """The largest number among the rows' blocks, at most S unless a file is damaged: walks all
        rows, but once."""
        if self.block_of_row is None or not self.num_embeddings:
            return 0
        return max(int(blocks.max()) for _, blocks in self.blocks_of_all())

    def row_counts(self, *, include_unassigned: bool = False) -> Tensor:
        """Rows per block."""
        return self._row_counts if include_unassigned else self._row_counts[: self.num_blocks]

    @cached_property
    def _row_counts(self) -> Tensor:
        """``(S + 1,)``: walks all rows, but once."""
        if self.boundaries is not None:
            return torch.cat([self.boundaries, torch.tensor([self.num_embeddings])]).diff()
        counts = torch.zeros(self.num_blocks + 1, dtype=torch.int64)
        for _, blocks in self.blocks_of_all():
            counts += torch.bincount(blocks, minlength=self.num_blocks + 1)
        return counts

    def positions(self) -> Tensor | None:
        """Returns each row's position once rows are ordered by block: the id remap of the
        mixed-dimension form."""
        if self.block_of_row is None:
            return None
        remedy = "sort the rows by frequency: then no remap is needed"
        check(
            self.num_embeddings < 2**31,
            "id remap",
            "fewer than 2^31 rows",
            self.num_embeddings,
            remedy,
        )
        order = torch.argsort(self.block_of_row.long(), stable=True)
        positions = torch.empty(self.num_embeddings, dtype=torch.int32)
        positions[order] = torch.arange(self.num_embeddings, dtype=torch.int32)
        return positions

    def without_rows(self, dropped: Tensor) -> RowRouting:
        """The same routing with some rows moved to "no block"."""
        if not bool(dropped.any()):
            return self
        if self.boundaries is not None:
            first = int(dropped.nonzero()[0])
            if bool(dropped[first:].all()):
                return RowRouting(
                    self.num_embeddings,
                    self.num_blocks,
                    boundaries=self.boundaries.clamp(max=first),
                )
        block_of_row = torch.empty(self.num_embeddings, dtype=_map_dtype(self.num_blocks))
        for rows, blocks in self.blocks_of_all():
            block_of_row[rows] = blocks.masked_fill(dropped[rows], self.num_blocks)
        return RowRouting(self.num_embeddings, self.num_blocks, block_of_row=block_of_row)

    def with_unassigned_in(self, block: int) -> RowRouting:
        """The same routing with the rows of "no block" moved to one."""
        if self.boundaries is not None and block == self.num_blocks - 1:
            ends = torch.tensor([self.num_embeddings])
            return RowRouting(
                self.num_embeddings,
                self.num_blocks,
                boundaries=torch.cat([self.boundaries[:-1], ends]),
            )
        block_of_row = torch.empty(self.num_embeddings, dtype=_map_dtype(self.num_blocks))
        for rows, blocks in self.blocks_of_all():
            block_of_row[rows] = blocks.masked_fill(blocks == self.num_blocks, block)
        return RowRouting(self.num_embeddings, self.num_blocks, block_of_row=block_of_row)

    def to_tensors(self) -> dict[str, Tensor]:
        """The tensors that say everything, for a safetensors file; `from_tensors` reads them back."""
        either = {"boundaries": self.boundaries, "block_of_row": self.block_of_row}
        return {name: tensor for name, tensor in either.items() if tensor is not None}

    @staticmethod
    def from_tensors(
        num_embeddings: int, num_blocks: int, tensors: dict[str, Tensor]
    ) -> RowRouting:
        """Rebuilds a routing from `to_tensors`."""
        return RowRouting(
            num_embeddings,
            num_blocks,
            boundaries=tensors.get("boundaries"),
            block_of_row=tensors.get("block_of_row"),
        )


class RowRouter(nn.Module):
    """A RowRouting inside a model: its tensors move with the model's device and stay out of its
    state_dict."""

    cuts: Tensor | None
    block_of_row: Tensor | None

    def __init__(self, routing: RowRouting) -> None:
        super().__init__()
        cuts = None if routing.boundaries is None else routing.boundaries[1:].contiguous()
        self.register_buffer("cuts", cuts, persistent=False)
        self.register_buffer("block_of_row", routing.block_of_row, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Blocks of the given rows, as `RowRouting.block_of`."""
        return _block_of(ids, self.cuts, self.block_of_row)

    def routing_tensor(self) -> Tensor:
        """All of it in one tensor: ends of the blocks (int64), or the block of every row (uint8,
        uint16)."""
        if self.cuts is not None:
            return self.cuts
        assert self.block_of_row is not None  # RowRouting has one of the two
        return self.block_of_row


def _map_dtype(num_blocks: int) -> torch.dtype:
    return torch.uint8 if num_blocks < 256 else torch.uint16


def _block_of(ids: Tensor, cuts: Tensor | None, block_of_row: Tensor | None) -> Tensor:
    if cuts is not None:
        return torch.bucketize(ids, cuts, right=True)
    assert block_of_row is not None  # RowRouting has one of the two
    if block_of_row.dtype == torch.uint16:  # torch gathers uint16 only through its signed twin
        return block_of_row.view(torch.int16)[ids].long() & 0xFFFF
    if ids.dim() == 1:  # index_select costs a tenth of indexing here
        return block_of_row.index_select(0, ids).long()
    return block_of_row[ids].long()


def map_bytes(num_embeddings: int) -> int:
    """Bytes of the map that finds a table's rows where they are not sorted: 4 per row, and 4 for
    unknown ids."""
    return 4 * (num_embeddings + 1)


def routing_bytes(routing: RowRouting) -> int:
    """Bytes that find the block of a row: 8 per boundary, and a map where rows are not sorted by
    block."""
    is_sorted = routing.boundaries is not None
    return 8 * (routing.num_blocks + 1) + (0 if is_sorted else map_bytes(routing.num_embeddings))
