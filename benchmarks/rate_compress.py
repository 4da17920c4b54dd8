"""Compress as `benchmarks.rate_distortion` measures it: bits for every column of every block of a trained model.

Shapes: N rows of a table, D embedding_dim, S blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.allocation.bits import Allocation
from dnis_torchrec.allocation.compress import Measured, measure_
from dnis_torchrec.allocation.curvature import curvature
from dnis_torchrec.allocation.energies import rounding_energies
from dnis_torchrec.allocation.held_out import LossSample, output_bias
from dnis_torchrec.allocation.settings import NUM_BLOCKS
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.task import Task
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.shards import table_configs


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
    model: nn.Module,
    batches: Iterable[Batch],
    counts: FrequencyCounts,
    *,
    loss: Task,
    turns: bool,
    held_out: Iterable[Batch] | None = None,
) -> Prepared:
    """Turns the tables of a trained model and measures them, in place, as `dnis_torchrec.compress` does.

    Args:
        model: it keeps its predictions.
        batches: of the training split.
        counts: of the training split.
        loss: the recipe's task.
        turns: False leaves the tables in the axes that training has left.
        held_out: of the validation split.
    """
    started = time.monotonic()
    if turns:
        measured = measure_(model, batches, loss=loss, counts=counts, held_out=held_out)
    else:
        blocks = blocks_from_counts(counts, table_configs(model), num_blocks=NUM_BLOCKS)
        worth = curvature(model, batches, blocks, loss=loss)
        energies = rounding_energies(model, blocks, counts)
        bias = output_bias(model, next(iter(batches)), loss, Ranks())
        judged, is_held_out = (batches, False) if held_out is None else (held_out, True)
        sample = LossSample(model, judged, blocks, loss=loss, is_held_out=is_held_out, bias=bias)
        measured = Measured(model, counts, blocks, worth, energies, sample)
    return Prepared(measured=measured, seconds=time.monotonic() - started)


def compress(prepared: Prepared, num_bytes: int) -> Allocation:
    """Bits for every column of every block; the model itself stays as it is.

    Args:
        prepared: the model, and what was measured of it.
        num_bytes: served, at most.

    Raises:
        UnmetError: if there is nothing of so few bytes.
    """
    try:
        return prepared.measured.allocate(embedding_bytes=num_bytes)
    except ValueError as error:
        raise UnmetError(str(error)) from error
