"""Recipes on Amazon's Sports and Outdoors as sequences: DIN on clicks, SASRec on the next item.

The data are those of `examples.amazon_sports`. History and candidate read one unpooled table of items; splits are by
time. DIN is judged by AUC, and SASRec by NDCG and recall among a hundred candidates. Both stop by AUC, which goes on
rising when their loss does: they become too sure of themselves before they have learnt to order items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.batches import RankingBatch
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import BINARY, RANKING, Predictions, Task
from examples.datasets.amazon_sequences import Sequences, load_sequences
from examples.datasets.amazon_sports import NUM_NEGATIVES, PUBLISHER
from examples.datasets.text_files import require_folder
from examples.models import network_of_seed
from examples.models.sequential import DeepInterestNetwork, SelfAttentiveRecommender, build_sequence_table

BATCH_SIZE = 2048
SEQUENCE_BATCH_SIZE = 512
EMBEDDING_DIM = 32
LONGEST = 20
EMBEDDING_L2 = 0.001
"""Every item of a history counts, so less than for a few fields; the best of two that were tried for SASRec."""
SEQUENCES_RATE = 0.002
"""Of table and transformer: an epoch has few batches of sequences."""
NUM_QUERIES, NUM_RANKED = 4000, 100


class NextItem(Task):
    """The cross entropy of every candidate, as SASRec has it; its last candidate is what a sample is judged by."""

    kinds: Mapping[str, str] = {"": RANKING, "next": BINARY}

    def kinds_of(self, batch: Batch | None) -> Mapping[str, str]:
        """Candidates of one query are ranked; others are told apart."""
        name = "" if isinstance(batch, RankingBatch) else "next"
        return {name: self.kinds[name]}

    def loss(self, batch: Batch, outputs: Tensor) -> Tensor:
        """Mean over the candidates of all samples."""
        lengths = batch.sparse_features["candidate"].lengths().unsqueeze(1)
        is_there = torch.arange(outputs.shape[1], device=outputs.device) < lengths
        labels = batch.labels.to(outputs).unsqueeze(1).expand_as(outputs)
        return binary_cross_entropy_with_logits(outputs, labels, is_there.to(outputs), reduction="sum") / lengths.sum()

    def predictions(self, batch: Batch, outputs: Tensor) -> Mapping[str, Predictions]:
        """The logit of the last candidate."""
        last = batch.sparse_features["candidate"].lengths().unsqueeze(1) - 1
        queries = batch.queries if isinstance(batch, RankingBatch) else None
        (name,) = self.kinds_of(batch)
        return {name: Predictions(outputs.gather(1, last), batch.labels, queries=queries)}


def din(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """DIN: will this user review this item?

    Args:
        data: folder with ``amazon_sports_seq.tsv``, plain or ``.gz``.
        seed: of the negatives, the order of the batches and the initial weights.
        embedding_dim: D, 32 by default.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    sequences = _load(data, "din")
    network = _network(sequences, DeepInterestNetwork, seed, embedding_dim)
    return Recipe(
        model=network,
        data=sequences.clicks(num_negatives=NUM_NEGATIVES, batch_size=BATCH_SIZE, seed=seed),
        loss=nn.BCEWithLogitsLoss(),
        stop_on="auc",
        embedding_l2=EMBEDDING_L2,
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
    sequences = _load(data, "sasrec")
    network = _network(sequences, SelfAttentiveRecommender, seed, embedding_dim)
    splits = sequences.next_items(
        num_negatives=1, batch_size=SEQUENCE_BATCH_SIZE, seed=seed, num_queries=NUM_QUERIES, num_ranked=NUM_RANKED
    )
    return Recipe(
        model=network,
        data=splits,
        loss=NextItem(),
        stop_on="next_auc",
        table_learning_rate=SEQUENCES_RATE,
        dense_learning_rate=SEQUENCES_RATE,
        embedding_l2=EMBEDDING_L2,
    )


def _load(data: Path | None, name: str) -> Sequences:
    folder = require_folder(data, f"examples.amazon_sequences:{name}", PUBLISHER)
    return load_sequences(folder, longest=LONGEST)


def _network(sequences: Sequences, build: Callable[..., nn.Module], seed: int, embedding_dim: int | None) -> nn.Module:
    dim = embedding_dim or EMBEDDING_DIM
    return network_of_seed(lambda: build(build_sequence_table(sequences.num_items, dim), longest=LONGEST), seed)
