"""Curvature of unpooled tables against the dense oracle, and one budget for a model that also pools."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchrec.datasets.utils import Batch

import dnis_torchrec as dnis
from dnis_torchrec.allocation.curvature import curvature
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.serving import PackedEmbeddingBagCollection, ServedEmbeddingCollection
from tests.models import NAMES, ClickAndRating, Interest, interest, make_batch, of_two, rounded, two_outputs
from tests.reference import curvature_reference

LOSS = nn.BCEWithLogitsLoss()


def make_blocks(model: nn.Module, num_blocks: int = 3) -> RowBlocks:
    batches = [make_batch(seed).sparse_features for seed in range(4)]
    tables = table_configs(model)
    return blocks_from_counts(count_frequencies(batches, tables), tables, num_blocks=num_blocks)


def expected(
    model: Interest, batches: list[Batch], blocks: RowBlocks, loss: Any = LOSS
) -> dict[str, tuple[Tensor, Tensor]]:
    """What the oracle finds for a model whose every row is multiplied by its block's alpha."""
    naive = copy.deepcopy(model).eval()
    weights = {name: dict(naive.named_parameters())[key].detach() for name, key in NAMES.items()}
    alpha = {
        name: torch.ones(blocks.routings[name].num_blocks, weight.shape[1], dtype=torch.float64)
        for name, weight in weights.items()
    }
    labels = torch.cat([batch.labels for batch in batches])

    def predict(leaves: dict[str, Tensor]) -> Tensor:
        multiplied = {
            NAMES[name]: weight * leaves[name][blocks.routings[name].all_blocks().long()].float()
            for name, weight in weights.items()
        }
        found = [functional_call(naive, multiplied, (batch.dense_features, batch.sparse_features)) for batch in batches]
        return torch.cat(found).double().view(len(labels), -1)

    return curvature_reference(predict, alpha, labels.double(), loss)


@pytest.mark.parametrize("wrapped", [False, True])
def test_it_is_what_the_oracle_finds(wrapped: bool) -> None:
    model, batches = interest(), [make_batch(seed) for seed in (1, 2)]
    blocks = make_blocks(model)
    wanted = expected(model, batches, blocks)
    if wrapped:
        prepare_(model, blocks)
    found = curvature(model, batches, blocks, loss=LOSS)
    assert list(found.curvature) == list(NAMES)
    for name, (gradient, bend) in wanted.items():
        torch.testing.assert_close(found.gradient[name], gradient, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.curvature[name], bend, rtol=1e-4, atol=1e-6)
        assert float(bend.max()) > 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_of_a_task_of_two_outputs_it_is_what_the_oracle_finds(wrapped: bool) -> None:
    model, batches = two_outputs(), [make_batch(seed) for seed in (1, 2)]
    blocks = make_blocks(model)
    wanted = expected(model, batches, blocks, of_two)
    if wrapped:
        prepare_(model, blocks)
    found = curvature(dnis.TrainTask(model, ClickAndRating()), batches, blocks, loss=ClickAndRating())
    for name, (gradient, bend) in wanted.items():
        torch.testing.assert_close(found.gradient[name], gradient, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.curvature[name], bend, rtol=1e-4, atol=1e-6)


def test_compress_serves_sequences_and_bags_from_one_budget() -> None:
    model, batches = interest(), [make_batch(seed) for seed in range(12)]
    plain = copy.deepcopy(model)
    found = dnis.compress(model, batches, loss=LOSS, compression=2.5)
    assert found.compression >= 2.5
    assert isinstance(model.sequences, ServedEmbeddingCollection)
    assert isinstance(model.users, PackedEmbeddingBagCollection)
    assert model.sequences.embedding_names_by_table() == plain.sequences.embedding_names_by_table()
    assert model.sequences.embedding_configs()[1].feature_names == ["candidate", "visits"]
    nearest = rounded(plain, found.scheme)
    for batch in batches[:3]:
        served, wanted = (own.sequences(batch.sparse_features) for own in (model, nearest))
        assert list(served) == list(wanted)
        for key, jagged in wanted.items():
            torch.testing.assert_close(served[key].values(), jagged.values())
            torch.testing.assert_close(served[key].lengths(), jagged.lengths())
        both = [own(batch.dense_features, batch.sparse_features) for own in (model, nearest)]
        torch.testing.assert_close(both[0], both[1] + found.output_shift)
