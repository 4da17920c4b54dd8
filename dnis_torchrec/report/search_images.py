"""SearchImages: how alpha comes along, as images in TensorBoard while the search runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.frequency import FrequencyCounts
from dnis_torchrec.report import figures
from dnis_torchrec.report.of_run import count_searched_rows, named_alpha, searched_summaries

SHARE_OF_TIME = 0.05
"""Images may take this share of the time since the start; where epochs are short, some epochs have none."""


class SearchImages:
    """Draws alpha per block, its distribution, and retained dims against frequency into a TensorBoard log.

    The last is drawn twice: block by block, and as the paper's joint distribution over all rows.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        blocks: the row blocks of the search.
        counts: training frequencies.
    """

    def __init__(self, writer: Any, blocks: RowBlocks, counts: FrequencyCounts) -> None:
        self._writer = writer
        self._blocks, self._counts = blocks, counts
        self._started = time.monotonic()
        self._spent = 0.0

    def is_due(self) -> bool:
        """Returns whether the images drawn so far took less than their share of the time."""
        return self._spent <= SHARE_OF_TIME * (time.monotonic() - self._started)

    def draw(self, alpha: Mapping[int, Tensor], step: int) -> None:
        """Writes the images.

        Args:
            alpha: embedding_dim -> ``(A, D)``.
            step: lower steps that led to it.
        """
        before = time.monotonic()
        named, summaries = named_alpha(alpha, self._blocks), searched_summaries(alpha, self._blocks)
        rows = count_searched_rows(alpha, self._blocks, self._counts)
        drawn = {
            "alpha_per_block": figures.alpha_per_block(named),
            "alpha_distribution": figures.alpha_distribution(named),
            "retained_dims_against_frequency": figures.retained_dims_against_frequency(summaries),
            "joint_distribution": figures.joint_distribution(rows),
        }
        for tag, figure in drawn.items():
            self._writer.add_figure(tag, figure, step)
        self._spent += time.monotonic() - before
