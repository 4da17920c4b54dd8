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

from dnis_torchrec.allocation.allocate import Allocation
from dnis_torchrec.allocation.compress import Measured, measure_, packed_collections
from dnis_torchrec.allocation.curvature import curvature
from dnis_torchrec.allocation.energies import rounding_energies
from dnis_torchrec.allocation.settings import NUM_BLOCKS
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.frequency import FrequencyCounts
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.soft_selection.table_shards import collections, table_configs


class UnmetError(Exception):
    """A method has nothing of so few bytes, or cannot work on the model; the message says why."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """A trained model, measured once for all sizes of `compress`, and how long that took."""

    measured: Measured
    seconds: float

    @property
    def model(self) -> nn.Module:
        """The model, its tables turned or not."""
        return self.measured.model


def prepare(
    model: nn.Module, batches: Iterable[Batch], counts: FrequencyCounts, *, loss: nn.Module, turns: bool
) -> Prepared:
    """Turns the tables of a trained model and measures them, in place, as `dnis_torchrec.compress` does.

    Args:
        model: it keeps its predictions.
        batches: of the training split.
        counts: of the training split.
        loss: of the recipe.
        turns: False leaves the tables in the axes that training has left.
    """
    started = time.monotonic()
    if turns:
        measured = measure_(model, batches, loss=loss, counts=counts)
    else:
        blocks = blocks_from_counts(counts, table_configs(model), num_blocks=NUM_BLOCKS, scope="table")
        worth = curvature(model, batches, blocks, loss=loss)
        measured = Measured(model, counts, blocks, worth, rounding_energies(model, blocks, counts))
    return Prepared(measured=measured, seconds=time.monotonic() - started)


def compress(prepared: Prepared, num_bytes: int) -> tuple[Allocation, dict[str, nn.Module]]:
    """Bits for every column of every block, and the tables in them; the model itself stays as it is.

    Args:
        prepared: the model, and what was measured of it.
        num_bytes: served, at most.

    Returns:
        What was allocated, and FQN -> what is served in place of that collection.

    Raises:
        UnmetError: if there is nothing of so few bytes.
    """
    try:
        found = prepared.measured.allocate(embedding_bytes=num_bytes)
    except ValueError as error:
        raise UnmetError(str(error)) from error
    return found, dict(packed_collections(prepared.model, found.scheme))


Build = Callable[[MixedDimensionScheme, Mapping[str, Tensor]], nn.Module]


def by_collection(model: nn.Module, scheme: MixedDimensionScheme, build: Build) -> dict[str, nn.Module]:
    """FQN -> what is served in place of that collection."""
    made = {}
    for fqn, collection in collections(model).items():
        own = MixedDimensionScheme({name: t for name, t in scheme.tables.items() if t.collection == fqn})
        bags = cast(EmbeddingBagCollection, collection).embedding_bags
        made[fqn] = build(own, {name: cast(Tensor, bags[name].weight).detach() for name in own.tables})
    return made
