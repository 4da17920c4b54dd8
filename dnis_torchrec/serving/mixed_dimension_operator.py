"""The operator ``dnis_torchrec::mixed_dimension_bag``: all features of a collection, from a table per block of rows.

Compiled for the CPU (csrc/mixed_dimension_bag.cpp); it reads stock tables where they lie, so nothing is stored for it.
Without it, on other devices, and while training, the same modules go through TorchRec's and FBGEMM's own kernels.

Shapes: B batch, F features, I ids of a batch, N rows of a table, D embedding_dim, S blocks, R retained dims of a block.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.serving.csr_operator import NAMESPACE, load_operator
from dnis_torchrec.serving.logical_tables import LogicalTables

NAME = "mixed_dimension_bag"
LANES = 16
"""Columns of one mask."""

_lock = threading.Lock()


def load_mixed_dimension_operator() -> bool:
    """Makes ``torch.ops.dnis_torchrec.mixed_dimension_bag`` there, compiling it if need be; modules do so themselves.

    Returns:
        Whether there is one; see `load_operator` for when there is not.

    Example:
        >>> load_mixed_dimension_operator() == load_operator()
        True
    """
    with _lock:
        return _load_operator()


@functools.cache
def _load_operator() -> bool:
    compiled = load_operator()
    if compiled:
        torch.library.register_fake(f"{NAMESPACE}::{NAME}", _fake)
    return compiled


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockLayout:
    """Where the operator finds everything: five tensors on the CPU, small beside the tables.

    Attributes:
        features: ``(F, 4)`` int64: per feature its table, its first output column, D, and 1 for MEAN.
        tables: ``(T, 4)`` int64: per table N, its first block, S, and its place among the maps of positions or -1.
        blocks: ``(blocks, 5)`` int64: where the block ends once rows are ordered by block, its place among the stored
            tables or -1, R, its first mask, and how many it has, D / 16 rounded up.
        masks: ``(masks,)`` int16: bit k of a block's mask j is set if column 16 j + k is retained.
        positions: maps of the tables whose rows are not ordered by block, ``(N,)`` int32 or longer.
        width: output columns, the sum of D over features.
    """

    features: Tensor
    tables: Tensor
    blocks: Tensor
    masks: Tensor
    positions: list[Tensor]
    width: int

    @staticmethod
    def of(logical: LogicalTables, stored: Sequence[tuple[str, int]], maps: Sequence[Tensor | None]) -> BlockLayout:
        """Lays a collection out.

        Args:
            logical: its tables.
            stored: (table, block) of every stored table, in the order in which the operator is given them.
            maps: per feature the map of positions of its table, or None.
        """
        index_of, position_of = {block: index for index, block in enumerate(stored)}, dict[str, int]()
        positions: list[Tensor] = []
        table_rows: list[list[int]] = []
        blocks: list[list[int]] = []
        masks: list[Tensor] = []
        for table, positions_of_table in zip(logical.tables, maps, strict=True):
            if table.name in position_of:
                continue
            position_of[table.name] = len(table_rows)
            at, num_blocks, dims = -1, table.routing.num_blocks, table.dims.tolist()
            if positions_of_table is not None:
                at = len(positions)
                positions.append(positions_of_table)
            table_rows.append([table.num_embeddings, len(blocks), num_blocks, at])
            of_table = _masks(table.retained)
            for s, end in enumerate(table.routing.row_counts().cumsum(0).tolist()):
                first = sum(map(len, masks))
                blocks.append([end, index_of.get((table.name, s), -1), dims[s], first, len(of_table[s])])
                masks.append(of_table[s])
        features = [
            [position_of[table.name], first, table.embedding_dim, int(table.pooling == "mean")]
            for table, first in zip(logical.tables, logical.first_columns, strict=True)
        ]
        return BlockLayout(
            features=torch.tensor(features),
            tables=torch.tensor(table_rows),
            blocks=torch.tensor(blocks),
            masks=torch.cat(masks),
            # never none: AOTInductor hands an empty list of tensors over as None, which no operator takes
            positions=positions or [torch.zeros(1, dtype=torch.int32)],
            width=sum(logical.dims),
        )

    def lookup(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        tables: list[Tensor],
        keys: list[int] | None,
        *,
        batch_size: int,
        bits: int,
        zero_unknown: bool,
    ) -> Tensor:
        """Pools the bags of all features with the compiled operator.

        For feature f read from table t, with ids i_1 .. i_L of a bag and weights w (1 if there are none), ``out[bag] =
        sum over i of w_i * scatter(row of i)``, where scatter puts the R values of a row on the columns that its block
        retains; MEAN divides by L. Ids are added in their order, so the result depends neither on the number of threads
        nor on the instruction set.

        Args:
            ids: ``(I,)`` int32 or int64, the bags of one key after those of another.
            offsets: ``(keys * B + 1,)`` int32 or int64: bag b of key k holds ids ``offsets[k * B + b]`` up to the next.
            weights: ``(I,)`` float32, or None.
            tables: the stored tables: ``(rows, R or more)`` float32, or ``(rows, bytes)`` uint8 as FBGEMM's inference
                kernels keep them.
            keys: per feature the position of its key among those of `offsets`; None: the features in order.
            batch_size: B.
            bits: of a stored value: 32, 16, 8 or 4.
            zero_unknown: ids outside a table contribute zero (and count in L); otherwise they raise.

        Returns:
            ``(B, width)`` float32.

        Raises:
            ValueError: for an id outside its table, and for a layout that does not fit the tables.
        """
        return torch.ops.dnis_torchrec.mixed_dimension_bag.default(
            ids.contiguous(),
            offsets.contiguous(),
            None if weights is None else weights.contiguous(),
            tables,
            self.positions,
            self.features,
            self.tables,
            self.blocks,
            self.masks,
            keys,
            batch_size,
            self.width,
            bits,
            zero_unknown,
        )


def _masks(retained: Tensor) -> Tensor:
    """Bits of the retained columns of every block: ``(S, D / 16 rounded up)`` int16."""
    num_blocks, dim = retained.shape
    num_masks = -(-dim // LANES)
    padded = torch.zeros(num_blocks, num_masks * LANES, dtype=torch.int32)
    padded[:, :dim] = retained
    bits = (padded.view(num_blocks, num_masks, LANES) << torch.arange(LANES, dtype=torch.int32)).sum(2)
    return bits.to(torch.int32).to(torch.int16)  # from 2^15 on it wraps around: the operator reads bits


def _fake(
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    tables: Sequence[Tensor],
    positions: Sequence[Tensor],
    feature_layout: Tensor,
    table_layout: Tensor,
    block_layout: Tensor,
    masks: Tensor,
    keys: Sequence[int] | None,
    batch_size: int,
    width: int,
    bits: int,
    zero_unknown: bool,
) -> Tensor:
    return ids.new_empty((batch_size, width), dtype=torch.float32)
