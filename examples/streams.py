"""Recipes whose data are a stream in the order of time: `dnis train examples.streams:lastfm --steps N` reads it once.

Rows of tables are numbered, and the first bias is set, as in the recipes by time: of the first 80 % of the samples.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dnis_torchrec.data.recipe import Recipe
from examples import amazon_sports, lastfm_tags


def lastfm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """FM on Last.fm's tags as clicks, by their time: 134 batches.

    Args:
        data: see `examples.lastfm_tags.fm_by_time`.
        seed: of the initial weights.
        embedding_dim: D, 64 by default.
    """
    return as_stream(lastfm_tags.fm_by_time(data, seed=seed, embedding_dim=embedding_dim))


def amazon(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """FM on Amazon's Sports and Outdoors as clicks, by their time: 218 batches.

    Args:
        data: see `examples.amazon_sports.fm_by_time`.
        seed: of the negatives and the initial weights.
        embedding_dim: D, 64 by default.
    """
    return as_stream(amazon_sports.fm_by_time(data, seed=seed, embedding_dim=embedding_dim))


def as_stream(recipe: Recipe) -> Recipe:
    """All samples of a recipe in memory by time, as one stream.

    Args:
        recipe: with `InMemoryBatches` of samples in the order of time as its splits.
    """
    return replace(recipe, data=recipe.data.train.in_order())
