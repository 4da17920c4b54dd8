"""Reviews as sequences: histories are what came before, splits are in the order of time, models read one table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.data.labels import RankingBatch
from dnis_torchrec.data.recipe import TrainTask
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.serving import ServedEmbeddingCollection
from dnis_torchrec.training.evaluation import evaluate
from examples import amazon_sequences
from examples.datasets.amazon_sequences import load_sequences
from examples.datasets.in_memory import frequency_rank
from examples.models.sequential import SelfAttentiveRecommender, build_sequence_table
from tests.tab_separated_files import REVIEWED, write_tab_separated

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tab_separated(tmp_path)
    return tmp_path


def test_histories_are_the_latest_items_that_came_before(data: Path) -> None:
    found = load_sequences(data, longest=4)
    held_out = int(0.05 * 230) * 2 + 23
    rank = frequency_rank(torch.tensor([item for _, item in REVIEWED[: 230 - held_out]]), 23).tolist()
    before: dict[int, list[int]] = {}
    wanted = []
    for user, item in REVIEWED:
        if before.get(user):
            wanted.append((user, rank[item], before[user][-4:]))
        before.setdefault(user, []).append(rank[item])
    offsets = found.history.offsets.tolist()
    got = [
        (user, item, found.history.values[begin:end].tolist())
        for user, item, begin, end in zip(
            found.users.tolist(), found.items.tolist(), offsets[:-1], offsets[1:], strict=True
        )
    ]
    assert got == wanted


def test_splits_are_in_the_order_of_time_and_test_ranks(data: Path) -> None:
    found = load_sequences(data, longest=4)
    rows = torch.cat(found.parts())
    assert rows.tolist() == list(range(len(found.items)))
    splits = found.split(batch_size=16, seed=0, num_queries=5, num_ranked=7)
    test = list(splits.test)
    assert all(isinstance(batch, RankingBatch) for batch in test)
    assert sum(len(batch.labels) for batch in test) == 35
    assert sum(float(batch.labels.sum()) for batch in test) == 5
    clicks = list(splits.train)
    assert sum(len(batch.labels) for batch in clicks) == 3 * len(found.parts()[0])
    assert min(int(batch.sparse_features["history"].lengths().min()) for batch in clicks) > 0


def test_sasrec_does_not_look_behind_the_end_of_a_history() -> None:
    torch.manual_seed(0)
    model = SelfAttentiveRecommender(build_sequence_table(9, 8, init_std=1.0), longest=6).eval()
    longer = SelfAttentiveRecommender(build_sequence_table(9, 8), longest=9).eval()
    longer.load_state_dict(
        model.state_dict() | {"positions": nn.functional.pad(model.positions.data, (0, 0, 0, 3), value=5.0)}
    )
    bags = KeyedJaggedTensor(
        keys=["candidate", "history"], values=torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([1, 1, 1, 2])
    )
    torch.testing.assert_close(model(None, bags), longer(None, bags))


@pytest.mark.parametrize("name", ["din", "sasrec"])
def test_a_recipe_is_compressed_and_searched(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_images: None, gloo: object
) -> None:
    monkeypatch.setattr(amazon_sequences, "BATCH_SIZE", 64)
    monkeypatch.setattr(amazon_sequences, "NUM_QUERIES", 3)
    monkeypatch.setattr(amazon_sequences, "NUM_RANKED", 12)
    recipe = getattr(amazon_sequences, name)(data, embedding_dim=8)
    metrics = evaluate(TrainTask(recipe.model, recipe.loss), recipe.data.test, recipe.loss, CPU)
    assert ("auc" if name == "din" else "ndcg@10") in metrics
    outcome = search(recipe, 2.0, tmp_path / "run", CPU, settings=SearchSettings(num_blocks=2, epochs=1, patience=1))
    assert outcome.scheme.tables["item"].pooling == "none"
    fresh = getattr(amazon_sequences, name)(data, embedding_dim=8)
    dnis.compress(fresh.model, fresh.data.train, loss=fresh.loss, compression=2.0)
    assert isinstance(fresh.model.items, ServedEmbeddingCollection)
