"""Recipes on Amazon's Sports and Outdoors as sequences: DIN on clicks, SASRec on the next item.

The data are those of `examples.amazon_sports`. History and candidate read one unpooled table of items; splits are by
time. DIN is judged by AUC, SASRec by recall and NDCG among a hundred candidates, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingCollection

from dnis_torchrec.data.recipe import Recipe
from examples.datasets.amazon_sequences import load_sequences
from examples.datasets.amazon_sports import PUBLISHER
from examples.datasets.text_files import require_folder
from examples.models import draws
from examples.models.sequential import DeepInterestNetwork, SelfAttentiveRecommender, build_sequence_table

BATCH_SIZE = 2048
EMBEDDING_DIM = 32
LONGEST = 20
NUM_QUERIES, NUM_RANKED = 2000, 100
NOTES = (
    "Amazon Sports sequences: splits by time. Two negatives a review in training, drawn once and uniformly from what "
    "its user never reviewed.",
)
RANKED = "Amazon Sports sequences: test ranks 2,000 reviews, each among 99 uniform negatives, as its paper does."


def din(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """DIN: will this user review this item?

    Args:
        data: folder with ``amazon_sports_seq.tsv``, plain or ``.gz``.
        seed: of the negatives, the order of the batches and the initial weights.
        embedding_dim: D, 32 by default.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    return _of_sequences(
        data, "din", lambda items: DeepInterestNetwork(items, longest=LONGEST), seed, embedding_dim, num_queries=0
    )


def sasrec(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """SASRec: which item comes next?

    Args:
        data: see `din`.
        seed: see `din`.
        embedding_dim: D, 32 by default.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    return _of_sequences(
        data,
        "sasrec",
        lambda items: SelfAttentiveRecommender(items, longest=LONGEST),
        seed,
        embedding_dim,
        num_queries=NUM_QUERIES,
    )


def _of_sequences(
    data: Path | None,
    name: str,
    build: Callable[[EmbeddingCollection], nn.Module],
    seed: int,
    embedding_dim: int | None,
    *,
    num_queries: int,
) -> Recipe:
    folder = require_folder(data, f"examples.amazon_sequences:{name}", PUBLISHER)
    sequences = load_sequences(folder, longest=LONGEST)
    draw = draws(lambda: build(build_sequence_table(sequences.num_items, embedding_dim or EMBEDDING_DIM)), seed)
    return Recipe(
        model=draw(0),
        redraw=draw,
        data=sequences.split(batch_size=BATCH_SIZE, seed=seed, num_queries=num_queries, num_ranked=NUM_RANKED),
        loss=nn.BCEWithLogitsLoss(),
        embedding_l2=0.001,  # every item of a history counts, so less than for a few fields; chosen by nothing
        notes=(*NOTES, RANKED) if num_queries else NOTES,
    )
