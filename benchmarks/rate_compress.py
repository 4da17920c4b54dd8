"""Compress as `benchmarks.rate_distortion` measures it: bits for every column of every block of a trained model.

Shapes: N rows of a table, D embedding_dim, S blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.allocation.allocate import Allocation, allocate
from dnis_torchrec.allocation.curvature import Curvature, curvature
from dnis_torchrec.allocation.energies import RoundingEnergies, rounding_energies
from dnis_torchrec.allocation.rotation import rotate_
from dnis_torchrec.allocation.torchrec_models import with_axes_
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.frequency import FrequencyCounts
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from dnis_torchrec.serving.packed_table import PackedTable, pack_rows
from dnis_torchrec.soft_selection.table_shards import collections, table_configs

NUM_BLOCKS = 8
"""S of every table, for all recipes."""


class UnmetError(Exception):
    """A method has nothing of so few bytes, or cannot work on the model; the message says why."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """A trained model, measured once for all sizes of `compress`."""

    model: nn.Module
    blocks: RowBlocks
    curvature: Curvature
    energies: RoundingEnergies
    seconds: float


def prepare(
    model: nn.Module, batches: Iterable[Batch], counts: FrequencyCounts, *, loss: nn.Module, turns: bool
) -> Prepared:
    """Turns the tables of a trained model and measures them, in place.

    Args:
        model: it keeps its predictions.
        batches: of the training split.
        counts: of the training split.
        loss: of the recipe.
        turns: False leaves the tables in the axes that training has left.
    """
    started = time.monotonic()
    if turns:
        rotate_(with_axes_(model), counts)
    blocks = blocks_from_counts(counts, table_configs(model), num_blocks=NUM_BLOCKS, scope="table")
    found = curvature(model, batches, blocks, loss=loss)
    energies = rounding_energies(model, blocks, counts)
    return Prepared(model=model, blocks=blocks, curvature=found, energies=energies, seconds=time.monotonic() - started)


def compress(prepared: Prepared, counts: FrequencyCounts, num_bytes: int) -> tuple[Allocation, dict[str, nn.Module]]:
    """Bits for every column of every block, and the tables in them; the model itself stays as it is.

    Args:
        prepared: the model, and what was measured of it.
        counts: of the training split.
        num_bytes: served, at most.

    Returns:
        What was allocated, and FQN -> what is served in place of that collection.

    Raises:
        UnmetError: if there is nothing of so few bytes.
    """
    p = prepared
    try:
        found = allocate(p.model, p.blocks, counts, p.curvature, embedding_bytes=num_bytes, energies=p.energies)
    except ValueError as error:
        raise UnmetError(str(error)) from error

    def build(scheme: MixedDimensionScheme, tables: Mapping[str, Tensor]) -> nn.Module:
        packed = {name: packed_table(table, tables[name]) for name, table in scheme.tables.items()}
        return PackedEmbeddingBagCollection(scheme, packed)

    return found, by_collection(p.model, found.scheme, build)


def packed_table(table: TableScheme, weight: Tensor) -> PackedTable:
    """A table in the codes of its scheme, read a chunk of rows at a time."""
    rows = pack_rows(table, weight.split(rows_per_chunk(table.embedding_dim)), table.routing.row_counts())
    return PackedTable.from_rows(table, rows, table.codes.scale, table.codes.shift)


Build = Callable[[MixedDimensionScheme, Mapping[str, Tensor]], nn.Module]


def by_collection(model: nn.Module, scheme: MixedDimensionScheme, build: Build) -> dict[str, nn.Module]:
    """FQN -> what is served in place of that collection."""
    made = {}
    for fqn, collection in collections(model).items():
        own = MixedDimensionScheme({name: t for name, t in scheme.tables.items() if t.collection == fqn})
        bags = cast(EmbeddingBagCollection, collection).embedding_bags
        made[fqn] = build(own, {name: cast(Tensor, bags[name].weight).detach() for name in own.tables})
    return made
