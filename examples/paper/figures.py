"""The paper's figures: rows by frequency, alpha of every block, and quality against size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

from dnis_torchrec.blocks.counts import FrequencyCounts
from examples.paper.search import Epoch

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def draw_frequencies(counts: FrequencyCounts, path: Path) -> None:
    """Rows of every table by falling frequency, both axes logarithmic."""
    figure, axes = plt.subplots()
    for name, of_table in counts.counts.items():
        falling = of_table[:].sort(descending=True).values
        axes.loglog(torch.arange(1, len(falling) + 1), falling.clamp(min=0.5), label=name)
    _finish(figure, axes, path, "row, most frequent first", "occurrences in the training data")


def draw_alpha(alpha: Mapping[str, Tensor], path: Path) -> None:
    """Distribution of alpha within every block, zeros counted, a row of boxes for each embedding_dim."""
    by_dim = {values.shape[1]: values for values in alpha.values()}
    figure, rows = plt.subplots(len(by_dim), squeeze=False)
    for axes, (dim, values) in zip(rows[:, 0], by_dim.items(), strict=True):
        axes.boxplot(values.T.numpy(), showfliers=False)
        axes.set_ylim(-0.04, 1.04)
        axes.set_title(f"tables of {dim} dimensions", fontsize="small")
    _finish(figure, rows[-1, 0], path, "block, most frequent first", "alpha of its dimensions", has_legend=False)


def draw_history(history: Sequence[Epoch], path: Path) -> None:
    """Losses and alpha over the epochs."""
    figure, (losses, alphas) = plt.subplots(2, sharex=True)
    numbers = [epoch.epoch for epoch in history]
    losses.plot(numbers, [epoch.train_loss for epoch in history], label="training loss")
    losses.plot(numbers, [epoch.selection_loss for epoch in history], label="selection loss")
    losses.legend()
    alphas.plot(numbers, [epoch.alpha_density for epoch in history], label="share of alpha above 0")
    alphas.plot(numbers, [epoch.alpha_mean for epoch in history], label="mean of alpha")
    _finish(figure, alphas, path, "epoch", "alpha")


def draw_quality(rows: Sequence[Mapping[str, Any]], metric: str, path: Path) -> None:
    """A metric of the test split over the compression, whose axis is logarithmic."""
    figure, axes = plt.subplots()
    by_size = sorted(rows, key=lambda row: row["compression"])
    axes.semilogx([row["compression"] for row in by_size], [row[metric] for row in by_size], "o-", label="DNIS")
    _finish(figure, axes, path, "bytes of the float32 tables over bytes served", metric)


def _finish(figure: Any, axes: Any, path: Path, x: str, y: str, *, has_legend: bool = True) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if has_legend:
        axes.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
