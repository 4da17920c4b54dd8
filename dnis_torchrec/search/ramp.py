"""Ramp: columns die while the weights train on, the least worthwhile for their bytes first."""

import logging

import torch
from torch import nn

from dnis_torchrec.allocation.bits import retained_columns
from dnis_torchrec.allocation.curvature import curvature
from dnis_torchrec.allocation.energies import BITS, ModelTable, blocked_tables
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.ranks import rank_of
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.prune import SizeOutOfReachError
from dnis_torchrec.search.schedule import BilevelStream, OnePass

logger = logging.getLogger(__name__)

COUNTED_BITS = 4
"""Of a value, when the columns that stay are counted: about what these deserve in the end."""
FEWEST_BITS = min(bits for bits in BITS if bits > 0)
STAGES = 16
"""Times at most that columns die."""
LEAST_STEPS = 8
"""Lower steps of a stage at least, in which weights adapt. Where data is small, less is measured
so."""


class Ramp:
    """Which columns stay, stage by stage. Every rank calls it alike; a stage has the collectives of
    `curvature`."""

    def __init__(
        self,
        pipeline: BilevelTrainPipeline,
        stream: BilevelStream,
        blocks: RowBlocks,
        loss: nn.Module,
        compression: float,
    ) -> None:
        self._pipeline, self._stream, self._blocks, self._loss = pipeline, stream, blocks, loss
        self._compression, self._start = compression, _compression_of_all(blocks)
        self._followed, self._has_warned = 0, False

    def follow(self, done: int, steps: int) -> None:
        """Lets columns die where a lower step ends a stage; `done` of `steps` are taken. Before the
        ramp, after it and between its steps none do."""
        stages, is_new = num_stages(steps), done != self._followed
        stage = done * stages // steps
        self._followed = done
        if is_new and 0 < done <= steps and stage > (done - 1) * stages // steps:
            self._narrow(stage, stages)

    def _narrow(self, stage: int, stages: int) -> None:
        start = self._start
        size = start * (self._compression / start) ** (stage / stages)
        if size <= start:
            return
        with self._pipeline.detached() as model:
            sample, quiet = self._stream.sample(stage), {"warns": False, "couplings": False}
            worth = curvature(model, sample, self._blocks, loss=self._loss, **quiet)
            tables = blocked_tables(model, self._blocks)
        if worth.is_zero:
            if rank_of() == 0 and not self._has_warned:
                logger.warning(
                    "stage %d of %d of the ramp drops no column: none moves a prediction on "
                    "validation data; bits alone make the tables smaller",
                    *(stage, stages),
                )
            self._has_warned = True
            return
        by_table = retained_columns(
            tables, self._blocks, worth.curvature, bits=COUNTED_BITS, compression=size
        )
        columns = {
            dim: torch.ones_like(alpha, dtype=torch.bool, device="cpu")
            for dim, alpha in self._pipeline.alphas().items()
        }
        for table, of_table in by_table.items():
            rows = int(self._blocks.routings[table].row_counts()[-1])
            if isinstance(self._stream, OnePass) and self._blocks.seen_rows[table][-1] < rows:
                of_table[-1] = True  # there rows learn that the stream has not had so far
            first = self._blocks.first_alpha_row(table)
            columns[of_table.shape[1]][first : first + len(of_table)] = of_table
        self._pipeline.alpha_optimizer.retain_(columns)


def num_stages(steps: int) -> int:
    """Returns how many times columns die in a ramp: `STAGES`, fewer in one that is short."""
    return max(1, min(STAGES, steps // LEAST_STEPS))


def _compression_of_all(blocks: RowBlocks) -> float:
    """c_0: at this compression all columns fit."""
    values = {
        name: routing.num_embeddings * blocks.embedding_dims[name]
        for name, routing in blocks.routings.items()
    }
    bits = {name: 32 if name in blocks.left_alone else COUNTED_BITS for name in values}
    return 32 * sum(values.values()) / sum(values[name] * bits[name] for name in values)


def check_reachable(tables: list[ModelTable], blocks: RowBlocks, compression: float) -> None:
    """Checks before any training that a size can be met. Local."""
    worth = {}
    for table in tables:
        num_blocks = blocks.routings[table.name].num_blocks
        worth[table.name] = torch.ones(num_blocks, table.shape[1])
    try:
        retained_columns(tables, blocks, worth, bits=FEWEST_BITS, compression=compression)
    except ValueError as error:
        raise SizeOutOfReachError(str(error)) from error
