"""Top-k on leave-one-out files: negatives, splits, candidates and the NeuMF recipes, on generated and on real files."""

from __future__ import annotations

import gzip
import logging
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.rivals.streams import train_on_validation
from dnis_torchrec.data.batches import BatchParts, RankingBatch
from dnis_torchrec.data.task import RANKING_KS, TrainTask
from dnis_torchrec.training.evaluate import evaluate
from examples import ncf
from examples.datasets.implicit import ImplicitBatches, KnownPositives, split_per_user
from examples.datasets.ncf import load_leave_one_out
from tests.test_examples_datasets import write

NUM_USERS, NUM_ITEMS = 12, 40


def interactions() -> list[tuple[int, int]]:
    return [(user, (7 * user + 3 * i) % NUM_ITEMS) for user in range(NUM_USERS) for i in range(10 + user % 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten to twelve interactions per user, one test positive, 15 negatives; user 4's positive is among its own."""
    known = interactions()
    write(tmp_path / "ml-1m.train.rating", [f"{user}\t{item}\t4\t0" for user, item in known])
    tests, negatives = [], []
    for user in range(NUM_USERS):
        free = [item for item in range(NUM_ITEMS) if (user, item) not in known]
        tests.append(f"{user}\t{free[0]}\t5\t0")
        listed = [*free[1:15], free[0] if user == 4 else free[15]]
        negatives.append("\t".join([f"({user},{free[0]})", *map(str, listed)]))
    write(tmp_path / "ml-1m.test.rating", tests)
    write(tmp_path / "ml-1m.test.negative.gz", negatives)
    return tmp_path


def pairs(batch, label: float) -> list[tuple[int, int]]:
    wanted = batch.labels == label
    users, items = (batch.sparse_features[name].values()[wanted].tolist() for name in ("user", "item"))
    return list(zip(users, items, strict=True))


def epoch(batches, label: float) -> list[tuple[int, int]]:
    return [pair for batch in batches for pair in pairs(batch, label)]


class TestKnownPositives:
    @given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=25), st.integers(0, 99))
    def test_draws_every_other_item_and_no_known_one(self, known, seed):
        free = {user: {item for item in range(6) if (user, item) not in known} for user in range(5)}
        known = {pair for pair in known if free[pair[0]]}
        columns = torch.tensor(sorted(known), dtype=torch.int64).view(-1, 2)
        positives = KnownPositives(columns[:, 0], columns[:, 1], num_items=6)
        users = torch.arange(5).repeat(400)
        items = positives.draw_negatives(users, torch.Generator().manual_seed(seed))
        for user in range(5):
            assert set(items[users == user].tolist()) == (free[user] or set(range(6)))

    def test_a_user_who_knows_everything_is_refused(self):
        users, items = torch.tensor([3, 3, 3, 1]), torch.tensor([0, 1, 2, 0])
        with pytest.raises(ValueError, match="user 3: expected an item of 3 left to be a negative, got none"):
            KnownPositives(users, items, num_items=3)
        KnownPositives(users, items, num_items=4)

    def test_another_catalogue_is_not_joined(self):
        one, other = torch.tensor([0]), torch.tensor([1])
        known = KnownPositives(one, other, num_items=3)
        assert known.joined_with(KnownPositives(one, one, num_items=3)).contains(one, one)
        with pytest.raises(ValueError, match="known pairs: expected 3 items, got 4"):
            known.joined_with(KnownPositives(one, one, num_items=4))

    def test_repeated_interactions_count_once(self):
        KnownPositives(torch.zeros(5, dtype=torch.int64), torch.tensor([0, 0, 0, 1, 1]), num_items=3)


class TestImplicitBatches:
    users, items = (torch.tensor(column) for column in zip(*interactions(), strict=True))
    known = KnownPositives(users, items, NUM_ITEMS)

    def batches(self, **changed) -> ImplicitBatches:
        arguments = {"num_negatives": 4, "batch_size": 64, "seed": 1}
        return ImplicitBatches(self.users, self.items, self.known, **arguments | changed)

    def test_every_positive_once_and_four_negatives_of_its_user(self):
        batches = self.batches()
        seen = list(batches)
        assert len(seen) == len(batches) == -(-len(interactions()) // 12)
        assert sorted(epoch(seen, 1.0)) == sorted(interactions())
        for batch in seen:
            assert batch.labels.numel() == batch.dense_features.shape[0] == batch.sparse_features.stride() <= 60
            positives, negatives = pairs(batch, 1.0), pairs(batch, 0.0)
            assert [user for user, _ in negatives] == [user for user, _ in positives for _ in range(4)]
            assert batch.labels.view(-1, 5).tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]] * len(positives)
            assert not set(negatives) & set(interactions())

    def test_parts_of_a_batch_hold_positives_and_negatives_alike(self):
        """An upper step takes a part: one of negatives alone would pull alpha the other way."""
        for num_parts in (2, 3, 4):
            for part in BatchParts(self.batches(), num_parts):
                assert abs(float(part.labels.sum()) - part.labels.numel() / 5) < 1

    def test_new_negatives_and_order_every_epoch_from_the_seed_alone(self):
        first = self.batches()
        epochs = [[batch.sparse_features.values() for batch in first] for _ in range(2)]
        assert not torch.equal(epochs[0][0], epochs[1][0])
        again = self.batches()
        again.epoch = 1
        torch.manual_seed(5)
        assert all(torch.equal(a, b.sparse_features.values()) for a, b in zip(epochs[1], again, strict=True))
        other = next(iter(self.batches(seed=2)))
        assert not torch.equal(epochs[0][0], other.sparse_features.values())

    def test_a_fixed_split_is_the_same_every_time(self):
        fixed = self.batches(is_fixed=True)
        first, second = ([batch.sparse_features.values() for batch in fixed] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match=r"ImplicitBatches\.batch_size: expected at least 5, got 4"):
            self.batches(batch_size=4)
        none = torch.zeros(0, dtype=torch.int64)
        with pytest.raises(ValueError, match="expected at least one interaction, got 0"):
            ImplicitBatches(none, none, self.known, num_negatives=1, batch_size=2, seed=0)


@given(st.lists(st.integers(0, 9), max_size=200), st.integers(0, 3))
def test_split_per_user(users: list[int], seed: int) -> None:
    column = torch.tensor(users, dtype=torch.int64)
    parts = split_per_user(column, seed=seed, held_out_ratio=0.1)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(users)))
    assert all(torch.equal(part, part.sort().values) for part in parts)
    for user in set(users):
        total = users.count(user)
        held_out = max(1, int(0.1 * total)) if total >= 3 else 0
        sizes = [int((column[part] == user).sum()) for part in parts]
        assert sizes == [total - 2 * held_out, held_out, held_out]


def test_split_per_user_depends_on_the_seed() -> None:
    users = torch.zeros(100, dtype=torch.int64)
    assert torch.equal(split_per_user(users, seed=1)[2], split_per_user(users, seed=1)[2])
    assert not torch.equal(split_per_user(users, seed=1)[2], split_per_user(users, seed=2)[2])


class TestNeuMFTopK:
    def test_splits_are_disjoint_and_test_is_the_published_one(self, folder):
        data = ncf.neumf_topk(folder).data
        parts = [set(epoch(split, 1.0)) for split in (data.train, data.validation, data.selection)]
        assert sum(map(len, parts)) == len(set.union(*parts)) == len(interactions())
        assert set.union(*parts) == set(interactions())
        assert all({user for user, _ in part} == set(range(NUM_USERS)) for part in parts)
        protocol = load_leave_one_out(folder)
        test = epoch(data.test, 1.0)
        assert test == list(zip(protocol.test_users.tolist(), protocol.test_items.tolist(), strict=True))
        assert not set(test) & set(interactions())
        # Negatives to measure by are no interaction at all; those to train by may be what is held out, as test's are.
        for split in (data.validation, data.selection):
            assert not set(epoch(split, 0.0)) & set(interactions())
        drawn = {pair for _ in range(20) for pair in epoch(data.train, 0.0)}
        assert not drawn & parts[0]
        assert drawn & (parts[1] | parts[2])

    def test_training_on_validation_too_contradicts_no_label(self, folder):
        recipe = ncf.neumf_topk(folder, seed=3)
        held_out, trained = (set(epoch(split, 1.0)) for split in (recipe.data.validation, recipe.data.train))
        joined = train_on_validation(recipe).data.train
        assert sorted(epoch(joined, 1.0)) == sorted(trained | held_out)
        drawn = {pair for _ in range(20) for pair in epoch(joined, 0.0)}
        assert not drawn & (trained | held_out)
        assert drawn & set(epoch(recipe.data.selection, 1.0))  # still unknown
        whole = recipe.data.train.joined_with(recipe.data.validation)
        assert len(list(whole)) == len(whole)

    def test_every_query_has_its_candidates(self, folder, caplog):
        with caplog.at_level(logging.WARNING):
            recipe = ncf.neumf_topk(folder)
        batches = list(recipe.data.test)
        assert all(isinstance(batch, RankingBatch) for batch in batches)
        queries, labels = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("queries", "labels"))
        sizes = [16] * NUM_USERS
        sizes[4] = 15  # the positive among the negatives was dropped there
        assert queries.bincount().tolist() == sizes
        assert queries[labels == 1].tolist() == list(range(NUM_USERS))
        users = torch.cat([batch.sparse_features["user"].values() for batch in batches])
        assert torch.equal(users, load_leave_one_out(folder).test_users[queries])
        assert "in 1 lines the positive stood among the negatives" in caplog.text

    def test_is_judged_by_ranking(self, folder, gloo):
        recipe = ncf.neumf_topk(folder, embedding_dim=2)
        task = TrainTask(recipe.model, recipe.loss)
        found = evaluate(task, recipe.data.test, recipe.loss, torch.device("cpu"))
        assert {f"ndcg@{k}" for k in RANKING_KS} < set(found)
        assert {"logloss", "auc", "ne"} < set(evaluate(task, recipe.data.selection, recipe.loss, torch.device("cpu")))

    def test_learns(self, folder):
        recipe = ncf.neumf_topk(folder, embedding_dim=4)
        task = TrainTask(recipe.model, recipe.loss)
        optimizer, losses = torch.optim.Adam(recipe.model.parameters(), lr=0.02), []
        for _ in range(40):
            for batch in recipe.data.train:
                loss, (detached, _) = task(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(detached))
        assert losses[-1] < 0.5 * losses[0]

    @pytest.mark.parametrize(("recipe", "dim"), [(ncf.neumf_topk, 16), (ncf.neumf_topk_32, 32)])
    def test_dimensions_change_tables_alone(self, folder, recipe, dim):
        model, small = recipe(folder).model, recipe(folder, embedding_dim=3).model
        dims = [table.embedding_dim for table in model.embedding_bag_collection.embedding_bag_configs()]
        assert dims == [dim, dim, 4 * dim, 4 * dim]
        assert [t.embedding_dim for t in small.embedding_bag_collection.embedding_bag_configs()] == [3, 3, 12, 12]
        sizes = [[layer._linear.out_features for layer in each.tower._mlp] for each in (model, small)]
        assert sizes[0] == sizes[1] == [4 * dim, 2 * dim, dim]

    @pytest.mark.parametrize("recipe", [ncf.mf_topk, ncf.mlp_topk])
    def test_parts_of_it_have_its_splits_and_start_at_the_share_of_positives(self, folder, recipe, gloo):
        whole, part = ncf.neumf_topk(folder, seed=1), recipe(folder, seed=1)
        for split in ("train", "validation", "selection", "test"):
            (theirs, own) = (next(iter(getattr(each.data, split))) for each in (whole, part))
            assert torch.equal(theirs.sparse_features.values(), own.sparse_features.values())
            assert torch.equal(theirs.labels, own.labels)
        batch = next(iter(part.data.train))
        shares = TrainTask(part.model, part.loss)(batch)[1][1].sigmoid()
        torch.testing.assert_close(shares, torch.full_like(shares, 0.2), atol=0.02, rtol=0)
        small = recipe(folder, embedding_dim=3).model
        dims = {table.embedding_dim for table in small.embedding_bag_collection.embedding_bag_configs()}
        assert dims == {3}
        found = evaluate(TrainTask(part.model, part.loss), part.data.test, part.loss, torch.device("cpu"))
        assert {f"ndcg@{k}" for k in RANKING_KS} < set(found)

    def test_weights_and_splits_depend_on_the_seed_alone(self, folder):
        first, again, other = (ncf.neumf_topk(folder, seed=seed, embedding_dim=2) for seed in (1, 1, 2))
        states = [recipe.model.state_dict() for recipe in (first, again, other)]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        assert any(not torch.equal(states[0][key], states[2][key]) for key in states[0])
        batches = [next(iter(recipe.data.train)).sparse_features.values() for recipe in (first, again, other)]
        assert torch.equal(batches[0], batches[1])
        assert not torch.equal(batches[0], batches[2])

    def test_too_few_candidates_are_found_before_training(self, folder):
        lines = (folder / "ml-1m.test.rating").read_text().splitlines()
        cases = [line.split("\t")[:2] for line in lines]
        negatives = [[str((int(item) + step) % NUM_ITEMS) for step in range(1, 13)] for _, item in cases]
        negatives[2] = negatives[2][:8]
        texts = ["\t".join([f"({u},{i})", *own]) for (u, i), own in zip(cases, negatives, strict=True)]
        write(folder / "ml-1m.test.negative.gz", texts)
        with pytest.raises(ValueError, match="ranking, query 2: expected at least k=10 candidates, got 9"):
            ncf.neumf_topk(folder)

    @pytest.mark.parametrize("line", ["(1,2", "(1,2)", "(1,2)\tthree", "1\t2\t3", "(1,2)\t-3"])
    def test_a_malformed_line_of_negatives_is_named(self, folder, line):
        with gzip.open(folder / "ml-1m.test.negative.gz", "rt") as file:
            lines = file.read().splitlines()
        lines[2] = line
        write(folder / "ml-1m.test.negative.gz", lines)
        message = r"^ml-1m\.test\.negative\.gz, line 3: expected \(user,item\) and negative items, tab separated, got"
        with pytest.raises(ValueError, match=message):
            load_leave_one_out(folder)

    def test_a_test_case_without_negatives_is_named(self, folder):
        with gzip.open(folder / "ml-1m.test.negative.gz", "rt") as file:
            lines = file.read().splitlines()
        pair = tuple(map(int, (folder / "ml-1m.test.rating").read_text().splitlines()[5].split("\t")[:2]))
        write(folder / "ml-1m.test.negative.gz", lines[:5] + lines[6:])
        message = f"ml-1m.test.negative.gz, pair {pair}: expected a line of negatives, got none; download it again"
        with pytest.raises(ValueError, match=re.escape(message)):
            load_leave_one_out(folder)

    @pytest.mark.parametrize("recipe", [ncf.neumf_topk, ncf.neumf_topk_32, ncf.mf_topk, ncf.mlp_topk])
    def test_missing_files(self, recipe, tmp_path):
        with pytest.raises(ValueError, match=rf"recipe 'examples\.ncf:{recipe.__name__}': expected a data folder"):
            recipe(None)
        with pytest.raises(
            ValueError, match=r"expected ml-1m\.train\.rating\[\.gz\], got an empty folder; get it from the authors'"
        ):
            recipe(tmp_path)


@pytest.mark.real_data
def test_the_published_files(real_data: Path) -> None:
    recipe = ncf.neumf_topk(real_data / "ncf-ml-1m")
    train, test = next(iter(recipe.data.train)), next(iter(recipe.data.test))
    assert float(train.labels.mean()) == pytest.approx(1 / 5)
    assert isinstance(recipe.loss, nn.BCEWithLogitsLoss)
    for batch in (train, test):
        loss, (_, predictions) = TrainTask(recipe.model, recipe.loss)(batch)
        assert torch.isfinite(predictions).all()
        assert float(loss.detach()) == pytest.approx(0.69, abs=0.2)
