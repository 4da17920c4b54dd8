"""Loaders against files in the publishers' formats, whole and damaged; batches, splits and the generator."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES

from dnis_torchrec.data.batches import Bags, InMemoryBatches, split_rows
from examples.datasets import synthetic
from examples.datasets.criteo import load_criteo, read_lines
from examples.datasets.in_memory import Samples
from examples.datasets.movielens import load_clicks, load_ratings
from examples.datasets.ncf import load_leave_one_out
from examples.datasets.text_files import read_table
from tests.conftest import DATA

NUM_RATINGS = 400


def rating_lines() -> list[str]:
    return [f"{1 + i % 20}::{10 * (1 + i % 7)}::{1 + i % 5}::{978300000 + i}" for i in range(NUM_RATINGS)]


def write(path: Path, lines: list[str], encoding: str = "latin-1") -> Path:
    data = "".join(f"{line}\n" for line in lines).encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def ml_1m(tmp_path: Path) -> Path:
    write(tmp_path / "ratings.dat.gz", rating_lines())
    write(tmp_path / "users.dat", [f"{i}::{'FM'[i % 2]}::{18 + i % 3}::{i % 4}::{10000 + i}-77" for i in range(1, 21)])
    # Movie 70 is rated but not listed; movie 60 has a title that is not ascii; movie 80 is listed but not rated.
    movies = [f"{10 * i}::Title: {i} (1995)::{'Drama|War' if i % 2 else 'Comedy'}" for i in range(1, 6)]
    write(tmp_path / "movies.dat.gz", [*movies, "60::Léon (1994)::Thriller", "80::Unseen (1999)::Western"])
    return tmp_path


class TestReadTable:
    dtypes: ClassVar = {"id": np.int64, "score": np.float64, "kind": str}

    def read(self, path: Path):
        return read_table(path, self.dtypes, "::")

    def test_lines_blank_lines_crlf_and_no_last_newline(self, tmp_path):
        path = tmp_path / "table.dat"
        path.write_bytes(b"1::2::a\r\n\r\n2::::b")
        frame = self.read(path)
        assert frame["kind"].tolist() == ["a", "b"]
        assert frame["id"].tolist() == [1, 2]
        assert frame["score"].isna().tolist() == [False, True]

    @pytest.mark.parametrize("bad", ["7::1.5::a::b::c", "x::1.5::a", "99999999999999999999::1.5::a", "7:1.5:a"])
    def test_a_malformed_line_is_refused_with_the_file(self, tmp_path, bad):
        path = write(tmp_path / "table.dat.gz", [*(f"{i}::1::k" for i in range(100)), bad])
        with pytest.raises(ValueError, match=r"table\.dat\.gz: expected fields .*; download it again"):
            self.read(path)

    @pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data[:300] + b"?" + data[301:]])
    def test_a_damaged_file_is_refused(self, tmp_path, damage):
        path = write(tmp_path / "table.dat.gz", [f"{i}::1::k{i * i}" for i in range(1000)])
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ValueError, match="expected a whole gzip file"):
            self.read(path)

    def test_an_empty_file_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="expected fields"):
            self.read(write(tmp_path / "table.dat", []))


class TestInMemoryBatches:
    bags = Bags(torch.arange(20), torch.tensor([0, 3, 3, 7, 12, 13, 20]))

    def batches(self, **changed) -> InMemoryBatches:
        ids = torch.stack([torch.arange(6), torch.arange(6) + 100], dim=1).int()
        arguments = {
            "feature_names": ["a", "b"],
            "multi_hot": {"m": self.bags},
            "batch_size": 4,
            "shuffle": True,
            "seed": 3,
        }
        return InMemoryBatches(torch.arange(6.0).unsqueeze(1), ids, torch.arange(6.0), **arguments | changed)

    @given(st.lists(st.integers(0, 5), max_size=12))
    def test_bags_select_as_slicing_does(self, rows):
        bags = self.bags.select(torch.tensor(rows, dtype=torch.int64))
        cuts = self.bags.offsets.tolist()
        want = [list(range(cuts[row], cuts[row + 1])) for row in rows]
        assert [part.tolist() for part in bags.values.split(bags.lengths.tolist())] == want

    def test_every_sample_is_served_once_with_its_own_features(self):
        batches = self.batches()
        seen = []
        for batch in batches:
            features = batch.sparse_features
            assert features.keys() == ["a", "b", "m"]
            assert features.values().dtype == features.lengths().dtype == torch.int64
            assert features.length_per_key() == [features[key].values().numel() for key in features.keys()]  # noqa: SIM118
            rows = batch.labels.long()
            assert torch.equal(batch.dense_features, batch.labels.unsqueeze(1))
            assert torch.equal(features["a"].values(), rows)
            assert torch.equal(features["b"].values(), rows + 100)
            bags = self.bags.select(rows)
            assert torch.equal(features["m"].values(), bags.values)
            assert torch.equal(features["m"].lengths(), bags.lengths)
            seen += rows.tolist()
        assert sorted(seen) == list(range(6))
        assert len(batches) == 2

    def test_epochs_differ_and_come_again(self):
        def labels(batches):
            return torch.cat([batch.labels for batch in batches]).tolist()

        batches = self.batches()
        first, second = labels(batches), labels(batches)
        assert first != second
        again = self.batches()
        again.epoch = 1
        assert labels(again) == second
        assert labels(self.batches(seed=4)) != first
        fixed = self.batches(shuffle=False, rows=torch.tensor([1, 4, 5]))
        assert labels(fixed) == labels(fixed) == [1, 4, 5]

    def test_drop_last(self):
        batches = self.batches(drop_last=True)
        assert [batch.labels.numel() for batch in batches] == [4]
        assert len(batches) == 1

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"feature_names": ["a"]}, "expected 1 columns, got 2"),
            ({"feature_names": ["a", "m"]}, "expected distinct names"),
            ({"batch_size": 0}, "batch_size: expected an integer >= 1"),
            ({"rows": torch.arange(0)}, "expected at least one batch, got 0 samples"),
            ({"multi_hot": {"m": Bags(torch.arange(2), torch.tensor([0, 2]))}}, "feature 'm': expected 6 bags, got 1"),
        ],
    )
    def test_bad_arguments(self, changed, message):
        with pytest.raises(ValueError, match=message):
            self.batches(**changed)


class TestSplits:
    def test_disjoint_complete_and_seeded(self):
        parts = split_rows(1000, seed=1)
        assert [part.numel() for part in parts] == [800, 50, 50, 100]
        assert torch.cat(parts).sort().values.tolist() == list(range(1000))
        assert all(torch.equal(a, b) for a, b in zip(parts, split_rows(1000, seed=1), strict=True))
        assert not torch.equal(parts[3], split_rows(1000, seed=2)[3])

    @pytest.mark.parametrize("rows", [19, 59])
    def test_too_few(self, rows):
        with pytest.raises(ValueError, match=r"at least 20 .*, got 19"):
            split_rows(rows, seed=0, group_size=1 + 2 * (rows > 19))

    def test_groups_stay_together(self):
        parts = split_rows(300, seed=1, group_size=3)
        for part, groups in zip(parts, split_rows(100, seed=1), strict=True):
            assert part.view(-1, 3).tolist() == [[3 * group, 3 * group + 1, 3 * group + 2] for group in groups.tolist()]

    def test_rows_sorted_by_training_frequency_only(self):
        samples = Samples(
            dense=torch.zeros(5, 0),
            ids=torch.tensor([[0], [2], [2], [1], [1]]),
            labels=torch.zeros(5),
            feature_names=("a",),
            multi_hot={"m": Bags(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 3, 3, 3, 4]))},
            num_embeddings={"a": 4, "m": 2},
        )
        ordered = samples.sorted_by_frequency(torch.tensor([0, 1, 2]))
        assert ordered.ids.flatten().tolist() == [1, 0, 0, 2, 2]
        assert ordered.multi_hot["m"].values.tolist() == [1, 0, 0, 1]
        assert samples.ids.flatten().tolist() == [0, 2, 2, 1, 1]


class TestMovieLens:
    def test_ratings(self, ml_1m):
        samples = load_ratings(ml_1m, seed=0)
        assert samples.feature_names == ("user", "movie")
        assert samples.num_embeddings == {"user": 20, "movie": 7}
        assert samples.labels.tolist() == [1 + i % 5 for i in range(NUM_RATINGS)]
        users = torch.arange(NUM_RATINGS) % 20
        assert torch.equal(samples.ids[:, 0], samples.ids[:20, 0][users])
        assert samples.dense.shape == (NUM_RATINGS, 0)

    def test_rows_fall_in_training_frequency(self, ml_1m):
        samples = load_ratings(ml_1m, seed=5)
        train_rows = split_rows(NUM_RATINGS, seed=5)[0]
        for column in range(2):
            counts = samples.ids[train_rows, column].bincount()
            assert bool((counts.diff() <= 0).all())

    def test_clicks(self, ml_1m):
        samples = load_clicks(ml_1m, seed=0)
        assert samples.labels.tolist() == [float(1 + i % 5 >= 4) for i in range(NUM_RATINGS)]
        assert samples.feature_names == ("user", "movie", "gender", "age", "occupation", "zip")
        assert samples.num_embeddings["gender"] == 2
        assert samples.num_embeddings["zip"] == 20
        assert samples.num_embeddings["genres"] == 5
        lengths = samples.multi_hot["genres"].offsets.diff()
        of_movie = [2, 1, 2, 1, 2, 1, 0]
        assert lengths.tolist() == [of_movie[i % 7] for i in range(NUM_RATINGS)]
        assert bool((samples.dense == 1).all())

    def test_20m(self, tmp_path):
        ratings = [f"{1 + i % 9},{1 + i % 4},{0.5 + i % 5 * 0.5},{i}" for i in range(100)]
        write(tmp_path / "ratings.csv.gz", ["userId,movieId,rating,timestamp", *ratings])
        movies = ['1,"American President, The (1995)",Comedy|Drama', "2,Néro,(no genres listed)", "3,C,War", "4,D,War"]
        write(tmp_path / "movies.csv", ["movieId,title,genres", *movies], "utf-8")
        samples = load_clicks(tmp_path, seed=0)
        assert samples.num_embeddings == {"user": 9, "movie": 4, "genres": 3}
        assert samples.multi_hot["genres"].offsets.diff()[:4].tolist() == [2, 0, 1, 1]

    def test_unknown_user(self, ml_1m):
        write(ml_1m / "users.dat", ["1::F::1::1::1"])
        with pytest.raises(ValueError, match=r"user 2: expected a line in users\.dat"):
            load_clicks(ml_1m, seed=0)

    def test_missing_files(self, tmp_path):
        with pytest.raises(ValueError, match=r"expected ratings\.dat\[\.gz\] or ratings\.csv\[\.gz\].*GroupLens"):
            load_ratings(tmp_path / "nowhere", seed=0)


class TestNcf:
    def write_files(self, folder: Path, negatives: list[str]) -> None:
        write(folder / "ml-1m.train.rating.gz", [f"{i % 3}\t{i}\t4\t{i}" for i in range(9)])
        write(folder / "ml-1m.test.rating", ["0\t10\t5\t1", "1\t11\t3\t1", "2\t12\t4\t1"])
        write(folder / "ml-1m.test.negative.gz", negatives)

    def test_positive_among_the_negatives_is_dropped_and_counted(self, tmp_path, caplog):
        self.write_files(tmp_path, ["(0,10)\t1\t10\t3", "(1,11)\t4\t5\t20", "(2,12)\t10\t11\t7"])
        split = load_leave_one_out(tmp_path)
        assert split.negatives.values.tolist() == [1, 3, 4, 5, 20, 10, 11, 7]
        assert split.negatives.offsets.tolist() == [0, 2, 5, 8]
        assert split.num_positives_among_negatives == 1
        assert "in 1 lines the positive stood among the negatives" in caplog.text
        assert (split.num_users, split.num_items) == (3, 21)
        assert split.test_items.tolist() == [10, 11, 12]
        assert split.train_items.tolist() == list(range(9))

    def test_malformed_negatives(self, tmp_path):
        self.write_files(tmp_path, ["(0,10)\t1", "1,11\t4", "(2,12)\t7"])
        with pytest.raises(ValueError, match=r"ml-1m\.test\.negative\.gz, line 2: expected \(user,item\)"):
            load_leave_one_out(tmp_path)

    def test_negatives_that_are_the_positive_alone(self, tmp_path):
        self.write_files(tmp_path, ["(0,10)\t1", "(1,11)\t11", "(2,12)\t7"])
        with pytest.raises(ValueError, match=r"pair \(1, 11\): expected negatives beside the positive, got none"):
            load_leave_one_out(tmp_path)

    def test_an_id_beyond_any_table(self, tmp_path):
        self.write_files(tmp_path, ["(0,10)\t1", "(1,11)\t99999999999999999999", "(2,12)\t7"])
        with pytest.raises(ValueError, match=r"ml-1m\.test\.negative\.gz, line 2: expected \(user,item\)"):
            load_leave_one_out(tmp_path)

    def test_one_malformed_line_of_many_is_too_much(self, tmp_path):
        self.write_files(
            tmp_path, ["(0,10)\t1", "(1,11)\t4", "(2,12)\t7", *(f"(0,{i})\t1" for i in range(20, 400)), "x"]
        )
        with pytest.raises(ValueError, match=r"ml-1m\.test\.negative\.gz, line 384: expected .*; download it again"):
            load_leave_one_out(tmp_path)

    def test_cut_off_negatives(self, tmp_path):
        self.write_files(tmp_path, [f"({i % 3},{10 + i % 3})\t{i}" for i in range(1000)])
        path = tmp_path / "ml-1m.test.negative.gz"
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ValueError, match=rf"{path}: expected a whole gzip file"):
            load_leave_one_out(tmp_path)

    def test_case_without_negatives(self, tmp_path):
        self.write_files(tmp_path, ["(0,10)\t1", "(2,12)\t7"])
        with pytest.raises(ValueError, match=r"pair \(1, 11\): expected a line of negatives"):
            load_leave_one_out(tmp_path)


def criteo_line(number: int, *, label: str | None = None) -> str:
    integers = ["" if (number + field) % 5 == 0 else str(number % 11 - 2) for field in range(13)]
    categories = ["" if field == 3 and number % 2 else f"{number % (field + 2):08x}" for field in range(26)]
    return "\t".join([str(number % 2) if label is None else label, *integers, *categories])


class TestCriteo:
    def test_dense_and_categories(self, tmp_path):
        write(tmp_path / "train.txt", [criteo_line(i) for i in range(200)])
        samples = load_criteo(tmp_path, seed=0)
        assert samples.dense.shape == (200, 13)
        assert samples.feature_names == tuple(DEFAULT_CAT_NAMES)
        assert samples.dense[0, 0] == 0  # missing
        assert samples.dense[1, 0] == 0  # -1
        assert samples.dense[7, 0] == pytest.approx(torch.log(torch.tensor(6.0)).item())
        # 5 categories, one of which is hidden by the missing ones, which are a category, and the shared row.
        assert samples.num_embeddings["cat_3"] == 5 + 1 + 1
        assert samples.labels.tolist() == [i % 2 for i in range(200)]

    def test_rare_and_unseen_categories_share_a_row(self, tmp_path):
        lines = [criteo_line(i).split("\t") for i in range(200)]
        train_rows, *_, test_rows = (part.tolist() for part in split_rows(200, seed=0))
        once, unseen, twice = train_rows[0], test_rows[0], train_rows[1:3]
        lines[once][14], lines[unseen][14] = "aaaaaaaa", "bbbbbbbb"
        for row in twice:
            lines[row][14] = "cccccccc"
        for row in (train_rows[3], test_rows[1]):
            lines[row][14] = "dddddddd"
        write(tmp_path / "train.txt.gz", ["\t".join(fields) for fields in lines])
        ids = load_criteo(tmp_path, seed=0).ids[:, 0]
        assert ids[once] == ids[unseen]
        assert ids[twice[0]] == ids[twice[1]] != ids[once]
        assert (ids == ids[once]).nonzero().flatten().tolist() == sorted([once, unseen, train_rows[3], test_rows[1]])
        alone = load_criteo(tmp_path, seed=0, min_count=1).ids[:, 0]
        assert alone[once] != alone[unseen]

    def test_ids_do_not_depend_on_chunks(self, tmp_path, monkeypatch):
        write(tmp_path / "train.txt", [criteo_line(i) for i in range(200)])
        whole = read_lines(tmp_path)
        read_lines.cache_clear()
        monkeypatch.setattr("examples.datasets.text_files.LINES_AT_A_TIME", 7)
        assert torch.equal(read_lines(tmp_path).codes, whole.codes)

    @pytest.mark.parametrize("bad", [criteo_line(0, label="2"), criteo_line(1).replace("-1", "1.5x", 1)])
    def test_a_malformed_line_is_refused(self, tmp_path, bad):
        write(tmp_path / "train.txt", [*(criteo_line(i) for i in range(200)), bad])
        with pytest.raises(ValueError, match=r"train\.txt: expected .*download it again"):
            load_criteo(tmp_path, seed=0)


class TestGenerator:
    planted = synthetic.generate(20_000, seed=1)

    def test_shapes_and_id_ranges(self):
        samples = self.planted.samples
        assert samples.dense.shape == (20_000, 13)
        for column, name in enumerate(samples.feature_names):
            assert (
                0
                <= int(samples.ids[:, column].min())
                <= int(samples.ids[:, column].max())
                < samples.num_embeddings[name]
            )
        lengths = samples.multi_hot["multi_0"].offsets.diff()
        assert lengths.unique().tolist() == list(range(synthetic.MAX_BAG_LENGTH + 1))

    def test_frequent_rows_have_more_useful_dims(self):
        samples = self.planted.samples
        for column, name in enumerate(samples.feature_names):
            counts = samples.ids[:, column].bincount(minlength=samples.num_embeddings[name]).float()
            dims = self.planted.useful_dims[name]
            means = [float(counts[dims == planted].mean()) for _, planted in synthetic.PLANTED_BLOCKS]
            assert means == sorted(means, reverse=True)
            assert means[0] > 20 * means[-1]
            assert int((dims == 16).sum()) == int(0.02 * samples.num_embeddings[name])

    def test_ids_are_skewed(self):
        counts = self.planted.samples.ids[:, 0].bincount().sort(descending=True).values
        assert counts[:40].sum() > 0.8 * counts.sum()
        assert counts[0] < 0.25 * counts.sum()

    def test_labels_follow_the_logits(self):
        probabilities, labels = torch.sigmoid(self.planted.logits), self.planted.samples.labels
        for low in (0.0, 0.25, 0.5, 0.75):
            inside = (probabilities >= low) & (probabilities < low + 0.25)
            assert float(labels[inside].mean()) == pytest.approx(float(probabilities[inside].mean()), abs=0.03)

    def test_seeded(self):
        again, other = synthetic.generate(100, seed=1), synthetic.generate(100, seed=2)
        synthetic.generate.cache_clear()
        assert torch.equal(synthetic.generate(100, seed=1).samples.ids, again.samples.ids)
        assert not torch.equal(other.samples.ids, again.samples.ids)


@pytest.mark.real_data
class TestRealData:
    def test_movielens_1m(self):
        samples = load_ratings(DATA / "ml-1m", seed=0)
        assert samples.num_embeddings == {"user": 6040, "movie": 3706}
        assert samples.labels.long().bincount()[1:].tolist() == [56174, 107557, 261197, 348971, 226310]

    def test_ncf(self):
        split = load_leave_one_out(DATA / "ncf-ml-1m")
        assert split.num_positives_among_negatives == 156
        assert split.train_users.numel() == 994_169
        assert split.negatives.offsets.diff().bincount()[98:].tolist() == [156, 5884]

    def test_criteo(self):
        lines = read_lines(DATA / "criteo-kaggle-137k")
        assert lines.labels.numel() == 137_139
        assert float(lines.labels.mean()) == pytest.approx(0.2568, abs=5e-5)
