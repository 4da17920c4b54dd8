"""Mixed dimensions: every block of rows keeps columns of its own, served as bit fields of one
width, `packed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from benchmarks.rivals.rows import BITS
from benchmarks.rivals.task import Served, Task, counts_of, shards_of, train
from dnis_torchrec.allocation.compress import packed_collections
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.codes import ColumnCodes, fit_codes
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.prune import uncompressed_scheme
from dnis_torchrec.selection.shards import collections, table_configs
from dnis_torchrec.selection.swap import replace_

SAMPLE = 4096
"""Rows of a block that its scales are fitted to, evenly spread over it."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a recipe's tables, without the rows that training never reads."""

    task: Task
    blocks: RowBlocks
    routings: Mapping[str, RowRouting]

    @staticmethod
    def of(task: Task) -> Blocks:
        """Counts the training split."""
        counts = counts_of(task)
        blocks = blocks_from_counts(counts, task.tables())
        routings = {}
        for name, routing in blocks.routings.items():
            block_of_row = routing.all_blocks().clone()
            block_of_row[counts.never_seen(name)] = routing.num_blocks
            routings[name] = _routing(block_of_row, routing.num_blocks)
        return Blocks(task, blocks, routings)

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Table -> rows of every block."""
        return {name: routing.row_counts() for name, routing in self.routings.items()}

    def masks(self, dims: Mapping[str, Tensor], widths: Mapping[str, int]) -> dict[str, Tensor]:
        """The columns to keep where block s keeps its first ``dims[s]``; none of a block without
        rows."""
        return {
            name: (torch.arange(widths[name]) < dim.unsqueeze(1)) & (self.rows[name] > 0)[:, None]
            for name, dim in dims.items()
        }

    def num_bytes(self, masks: Mapping[str, Tensor]) -> int:
        """Bytes that are served where blocks keep these columns in the task's precision."""
        return mixed_scheme(self.frame(masks), self.routings, masks, self.bits).served_bytes("packed")

    @property
    def bits(self) -> int:
        """Of a value."""
        return BITS[self.task.precision]

    def frame(self, masks: Mapping[str, Tensor]) -> MixedDimensionScheme:
        """The scheme of the whole tables, as wide as the masks."""
        return _at_widths(self._whole, {name: mask.shape[1] for name, mask in masks.items()})

    @cached_property
    def _whole(self) -> MixedDimensionScheme:
        return uncompressed_scheme(self.task.build(None).model)


def _at_widths(scheme: MixedDimensionScheme, widths: Mapping[str, int]) -> MixedDimensionScheme:
    tables = {}
    for name, table in scheme.tables.items():
        mask = torch.ones(1, widths[name], dtype=torch.bool)
        number = table.num_embeddings * widths[name]
        tables[name] = replace(table, embedding_dim=widths[name], retained=mask, num_retained=number)
    return MixedDimensionScheme(tables)


def _routing(block_of_row: Tensor, num_blocks: int) -> RowRouting:
    if bool((block_of_row.diff() >= 0).all()):
        cuts = torch.searchsorted(block_of_row, torch.arange(num_blocks + 1))
        return RowRouting(block_of_row.numel(), num_blocks, boundaries=cuts)
    return RowRouting.from_map(block_of_row, num_blocks)


def mixed_scheme(
    whole: MixedDimensionScheme,
    routings: Mapping[str, RowRouting],
    masks: Mapping[str, Tensor],
    bits: int,
    rows: Mapping[str, Tensor] | None = None,  # that scales are fitted to; none where bytes alone are asked for
) -> MixedDimensionScheme:
    """The scheme of tables whose blocks keep these columns in so many bits."""
    tables = {}
    for name, table in whole.tables.items():
        mask, routing = masks[name], routings[name]
        widths = (mask.byte() * bits).to(torch.uint8)
        scale, shift = torch.ones(mask.shape), torch.zeros(mask.shape, dtype=torch.int16)
        if rows is not None and bits < 32:
            _fit_(scale, shift, mask, routing, rows[name], bits)
        base = replace(table, routing=routing, retained=torch.zeros_like(mask), num_retained=0)
        tables[name] = base.with_codes(ColumnCodes(widths, scale, shift))
    return MixedDimensionScheme(tables)


def _fit_(scale: Tensor, shift: Tensor, mask: Tensor, routing: RowRouting, rows: Tensor, bits: int) -> None:
    blocks = routing.all_blocks()
    for s in range(len(mask)):
        here, columns = (blocks == s).nonzero()[:, 0], mask[s].nonzero()[:, 0]
        if len(here) and len(columns):
            values = rows[here[:: -(-len(here) // SAMPLE)]][:, columns]
            codes = fit_codes(values, torch.ones(len(values)), [bits])
            scale[s, columns], shift[s, columns] = codes.scale[0], codes.shift[0]


@torch.no_grad()
def zero_dropped_(model: nn.Module, routings: Mapping[str, RowRouting], masks: Mapping[str, Tensor]) -> None:
    """Sets dropped values to zero. A kept value of zero becomes the smallest positive float.

    So zero always means dropped."""
    for shard in shards_of(model):
        mask = masks[shard.table]
        or_none = torch.cat([mask, torch.zeros(1, mask.shape[1], dtype=torch.bool)])
        keep = or_none[routings[shard.table].all_blocks()].to(shard.weight.device)
        tiny = torch.finfo(shard.weight.dtype).tiny
        shard.weight.masked_fill_(shard.weight == 0, tiny).mul_(keep)


def train_mixed(blocks: Blocks, recipe: Recipe, masks: Mapping[str, Tensor], **settings: object) -> Served:
    """Trains the kept columns from scratch, then packs them into bit fields."""
    zero_dropped_(recipe.model, blocks.routings, masks)
    model, _ = train(blocks.task, recipe, masks=True)
    return pack(model, blocks.routings, masks, blocks.bits, **settings)


def pack(
    model: nn.Module, routings: Mapping[str, RowRouting], masks: Mapping[str, Tensor], bits: int, **settings: object
) -> Served:
    """Replaces the model's tables by tables of bit fields."""
    rows = {shard.table: shard.weight.cpu() for shard in shards_of(model)}
    scheme = mixed_scheme(uncompressed_scheme(model), routings, masks, bits, rows)
    if any(bool(mask.any()) for mask in masks.values()):
        model = put_in_place(model.cpu(), scheme)
    return Served(model=model, num_bytes=scheme.served_bytes("packed"), settings=dict(settings))


def put_in_place(model: nn.Module, scheme: MixedDimensionScheme) -> nn.Module:
    """A model with its tables as a scheme with codes says."""
    own = collections(model)
    for fqn, module in packed_collections(model, scheme).items():
        model = replace_(model, own[fqn], module)
    return model


def widths_of(model: nn.Module) -> dict[str, int]:
    """Table -> embedding_dim."""
    return {table.name: table.embedding_dim for table in table_configs(model)}
