"""Reviews as sequences: histories are what came before, splits are in the order of time, models read one table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.data.batches import Bags, RankingBatch
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.serving import ServedEmbeddingCollection
from dnis_torchrec.training.evaluate import evaluate
from examples import amazon_sequences
from examples.datasets.amazon_sequences import SequenceBatches, load_sequences
from examples.datasets.in_memory import frequency_rank
from examples.models.sequential import (
    DeepInterestNetwork,
    SelfAttentionBlock,
    SelfAttentiveRecommender,
    build_sequence_table,
)
from tests.tab_separated_files import REVIEWED, write_tab_separated

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tab_separated(tmp_path)
    return tmp_path


def _ranks() -> list[int]:
    """Items' places by frequency in the training part."""
    held_out = int(0.05 * 230) * 2 + 23
    return frequency_rank(torch.tensor([item for _, item in REVIEWED[: 230 - held_out]]), 23).tolist()


def test_histories_are_the_latest_items_that_came_before(data: Path) -> None:
    found = load_sequences(data, longest=4)
    rank = _ranks()
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
    clicks = found.clicks(num_negatives=2, batch_size=16, seed=0)
    served = (clicks.train, clicks.validation, clicks.selection, clicks.test)
    for part, batches in zip(found.parts(), served, strict=True):
        labels, candidates, _ = _samples(batches)
        assert labels.view(-1, 3).tolist() == [[1.0, 0.0, 0.0]] * len(part)
        assert sorted(ids[0] for ids in candidates[::3]) == sorted(found.items[part].tolist())
    splits = found.next_items(num_negatives=1, batch_size=16, seed=0, num_queries=5, num_ranked=7)
    test = list(splits.test)
    assert all(isinstance(batch, RankingBatch) for batch in test)
    assert torch.cat([batch.queries for batch in test]).unique(return_counts=True)[1].tolist() == [7] * 5
    assert sum(float(batch.labels.sum()) for batch in test) == 5
    assert sum(len(batch.labels) for batch in splits.selection) == 2 * len(found.parts()[2])


def test_training_has_every_item_of_a_sequence_with_the_one_that_followed(data: Path) -> None:
    found = load_sequences(data, longest=4)
    train = found.parts()[0]
    number = 1 + int(train[-1]) + len(set(found.users.tolist()))  # the first review of a user has no history
    rank = _ranks()
    reviewed: dict[int, list[int]] = {}
    for user, item in REVIEWED[:number]:
        reviewed.setdefault(user, []).append(rank[item])
    users, history, following = found.whole_sequences(train)
    for row, user in enumerate(users.tolist()):
        bag = slice(int(history.offsets[row]), int(history.offsets[row + 1]))
        assert history.values[bag].tolist() == reviewed[user][-5:-1]
        assert following.values[bag].tolist() == reviewed[user][-4:]
    assert users.tolist() == sorted(reviewed)


def test_negatives_are_new_in_every_epoch_and_no_items_of_their_user(data: Path) -> None:
    found = load_sequences(data, longest=4)
    train = found.parts()[0]
    users, history, following = found.whole_sequences(train)
    known = found.known_in(train)
    whole = {"history": history, "following": following, "known": known, "num_negatives": 1, "batch_size": 6}
    learnt, fixed = (SequenceBatches(users, **whole, seed=0, is_fixed=is_fixed) for is_fixed in (False, True))
    epochs = [_samples(learnt), _samples(learnt)]
    for labels, candidates, histories in epochs:
        assert labels.tolist() == [1.0, 0.0] * len(users)
        assert histories[::2] == histories[1::2]
        order = [_lists(history).index(own) for own in histories[::2]]
        assert candidates[::2] == [_lists(following)[row] for row in order]
        for row, drawn in zip(order, candidates[1::2], strict=True):
            assert len(drawn) == len(histories[2 * order.index(row)])
            assert not known.contains(users[row].expand(len(drawn)), torch.tensor(drawn)).any()
    assert sorted(epochs[0][1][::2]) == sorted(epochs[1][1][::2])
    assert epochs[0][1] != epochs[1][1]
    assert _samples(fixed)[1:] == _samples(fixed)[1:]
    assert learnt.epoch == 2


def _lists(bags: Bags) -> list[list[int]]:
    return [part.tolist() for part in bags.values.split(bags.offsets.diff().tolist())]


def _samples(batches: Iterable[Batch]) -> tuple[Tensor, list[list[int]], list[list[int]]]:
    """Labels, candidates and histories of all samples."""
    labels, candidates, histories = [], [], []
    for batch in batches:
        labels.append(batch.labels)
        for name, found in (("candidate", candidates), ("history", histories)):
            bags = batch.sparse_features[name]
            found += _lists(Bags(bags.values(), bags.offsets()))
    return torch.cat(labels), candidates, histories


HISTORIES = [[5, 1, 2], [7], [], [3, 3, 8, 0]]
CANDIDATES = [[4, 6, 1], [2], [5], [1, 7]]
"""For the last items of each history; of the empty one, too."""


def bags_of(candidates: list[list[int]], histories: list[list[int]]) -> KeyedJaggedTensor:
    bags = [*candidates, *histories]
    return KeyedJaggedTensor(
        keys=["candidate", "history"],
        values=torch.tensor([item for bag in bags for item in bag]),
        lengths=torch.tensor([len(bag) for bag in bags]),
    )


def test_sasrec_has_the_logit_of_each_candidate_as_if_its_prefix_were_alone() -> None:
    torch.manual_seed(0)
    model = SelfAttentiveRecommender(build_sequence_table(9, 8, init_std=1.0), longest=6).eval()
    layers = [_as_torch_has_it(block) for block in model.blocks]
    table = model.items.embeddings["item"].weight

    def logit(prefix: list[int], candidate: int) -> Tensor:
        states = (table[prefix] + model.positions[: len(prefix)]).unsqueeze(0)
        for layer in layers:
            states = layer(states, src_mask=nn.Transformer.generate_square_subsequent_mask(len(prefix)))
        return model.norm(states[0, -1]) @ table[candidate]

    found = model(None, bags_of(CANDIDATES, HISTORIES))
    assert found.shape == (4, 3)
    for row, (history, candidates) in enumerate(zip(HISTORIES, CANDIDATES, strict=True)):
        for column, candidate in enumerate(candidates if history else []):
            prefix = history[: len(history) - len(candidates) + 1 + column]
            torch.testing.assert_close(found[row, column], logit(prefix, candidate))
        assert not found[row, len(candidates) :].any()
    assert found[2].tolist() == [0.0] * 3, "nothing is known of who has no history"


def _as_torch_has_it(block: SelfAttentionBlock) -> nn.TransformerEncoderLayer:
    dim = block.attend.in_features
    layer = nn.TransformerEncoderLayer(dim, 1, dim, 0.0, batch_first=True, norm_first=True).eval()
    norm, first, _, _, second = block.feed_forward
    pairs = {
        "norm1": block.norm,
        "norm2": norm,
        "linear1": first,
        "linear2": second,
        "self_attn.out_proj": block.attend,
    }
    of_layer = {f"{name}.{key}": value for name, own in pairs.items() for key, value in own.state_dict().items()}
    read = {f"self_attn.in_proj_{key}": value for key, value in block.read.state_dict().items()}
    layer.load_state_dict(of_layer | read)
    return layer


def test_din_weighs_every_item_of_the_history_by_the_candidate() -> None:
    torch.manual_seed(0)
    model = DeepInterestNetwork(build_sequence_table(9, 8, init_std=1.0), longest=6).eval()
    table = model.items.embeddings["item"].weight
    candidates = [[4], [2], [5], [1]]
    found = model(None, bags_of(candidates, HISTORIES))
    for row, (history, (candidate,)) in enumerate(zip(HISTORIES, candidates, strict=True)):
        target, interest = table[candidate], torch.zeros(8)
        for item in table[history]:
            interest = interest + model.weigh(torch.cat([item, target, item - target, item * target])) * item
        torch.testing.assert_close(found[row], model.over(torch.cat([interest, target, interest * target])).squeeze())


def test_the_loss_of_next_items_is_the_mean_over_candidates_and_the_last_is_judged() -> None:
    task, labels = amazon_sequences.NextItem(), torch.tensor([1.0, 0.0, 1.0, 0.0])
    batch = Batch(None, bags_of(CANDIDATES, HISTORIES), labels)
    outputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    each = [
        binary_cross_entropy_with_logits(outputs[row, column], labels[row])
        for row, candidates in enumerate(CANDIDATES)
        for column in range(len(candidates))
    ]
    torch.testing.assert_close(task.loss(batch, outputs), torch.stack(each).mean())
    (found,) = task.predictions(batch, outputs).values()
    assert found.values.flatten().tolist() == [outputs[0, 2], outputs[1, 0], outputs[2, 0], outputs[3, 1]]
    ranked = RankingBatch(None, batch.sparse_features, labels, torch.zeros(4, dtype=torch.int64))
    assert [task.kinds_of(each) for each in (batch, ranked)] == [{"next": "binary"}, {"": "ranking"}]
    assert task.predictions(ranked, outputs)[""].queries is ranked.queries


@pytest.mark.parametrize("name", ["din", "sasrec"])
def test_a_recipe_is_compressed_and_searched(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gloo: object
) -> None:
    monkeypatch.setattr(amazon_sequences, "BATCH_SIZE", 64)
    monkeypatch.setattr(amazon_sequences, "NUM_QUERIES", 3)
    monkeypatch.setattr(amazon_sequences, "NUM_RANKED", 12)
    recipe = getattr(amazon_sequences, name)(data, embedding_dim=8)
    metrics = evaluate(TrainTask(recipe.model, recipe.task), recipe.data.test, recipe.task, CPU)
    assert ("auc" if name == "din" else "ndcg@10") in metrics
    outcome = search(recipe, 2.0, tmp_path / "run", CPU, settings=SearchSettings(num_blocks=2, epochs=1, patience=1))
    assert outcome.scheme.tables["item"].pooling == "none"
    fresh = getattr(amazon_sequences, name)(data, embedding_dim=8)
    dnis.compress(fresh.model, fresh.data.train, loss=fresh.task, compression=2.0)
    assert isinstance(fresh.model.items, ServedEmbeddingCollection)
