"""Examples: data sets, models and recipes, against naive formulas, their files, and what damages them."""

import gzip
import json
import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRMTrain
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import dnis_torchrec as dnis
from benchmarks import data_loading
from benchmarks.rivals.streams import train_on_validation
from dnis_torchrec.artifact.package import Signature, export_graph
from dnis_torchrec.data.batches import Bags, BatchParts, InMemoryBatches, RankingBatch, split_rows
from dnis_torchrec.data.parquet import FileBatches
from dnis_torchrec.data.task import RANKING_KS
from dnis_torchrec.search.prune import uncompressed_scheme
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.serving import ServedEmbeddingCollection, load_operator
from dnis_torchrec.training.evaluate import evaluate
from examples import amazon_sequences, amazon_sports, criteo, criteo_stream, lastfm_tags, models, movielens, ncf
from examples import anime as anime_recipes
from examples.datasets import synthetic as planted
from examples.datasets.amazon_sequences import SequenceBatches, load_sequences
from examples.datasets.amazon_sports import ATTRIBUTES, OF_ITEM, load_amazon_sports
from examples.datasets.criteo import load_criteo, read_lines
from examples.datasets.implicit import ImplicitBatches, KnownPositives, split_per_user
from examples.datasets.in_memory import Samples, frequency_rank
from examples.datasets.movielens import load_clicks, load_ratings
from examples.datasets.ncf import load_leave_one_out
from examples.datasets.scalars import bucketised, weighted
from examples.datasets.tab_separated import load_tab_separated
from examples.datasets.text_files import read_table
from examples.models import sequential
from examples.movielens_tasks import RATING_SHARE, ClickAndRating, mmoe
from examples.own_data import draw_frame, recipe
from examples.streams import amazon, lastfm
from examples.synthetic import demo
from tests.conftest import DATA

NUM_RATINGS = 400


def rating_lines() -> list[str]:
    return [f"{1 + i % 20}::{10 * (1 + i % 7)}::{1 + i % 5}::{978300000 + i}" for i in range(NUM_RATINGS)]


def write(path: Path, lines: list[str], encoding: str = "latin-1") -> Path:
    data = "".join(f"{line}\n" for line in lines).encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture(scope="module")
def ml_1m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder / "ratings.dat.gz", rating_lines())
    write(folder / "users.dat", [f"{i}::{'FM'[i % 2]}::{18 + i % 3}::{i % 4}::{10000 + i}-77" for i in range(1, 21)])
    # Movie 70 is rated but not listed; movie 60 has a title that is not ascii; movie 80 is listed but not rated.
    movies = [f"{10 * i}::Title: {i} (1995)::{'Drama|War' if i % 2 else 'Comedy'}" for i in range(1, 6)]
    write(folder / "movies.dat.gz", [*movies, "60::Léon (1994)::Thriller", "80::Unseen (1999)::Western"])
    return folder


TABLE = {"id": np.int64, "score": np.float64, "kind": str}


def test_a_table_has_blank_lines_crlf_and_no_last_newline(tmp_path):
    path = tmp_path / "table.dat"
    path.write_bytes(b"1::2::a\r\n\r\n2::::b")
    frame = read_table(path, TABLE, "::")
    assert frame["kind"].tolist() == ["a", "b"]
    assert frame["id"].tolist() == [1, 2]
    assert frame["score"].isna().tolist() == [False, True]


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


class TestSplits:
    def test_disjoint_complete_and_seeded(self):
        parts = split_rows(1000, seed=1)
        assert [part.numel() for part in parts] == [800, 50, 50, 100]
        assert torch.cat(parts).sort().values.tolist() == list(range(1000))
        assert all(torch.equal(a, b) for a, b in zip(parts, split_rows(1000, seed=1), strict=True))
        assert not torch.equal(parts[3], split_rows(1000, seed=2)[3])

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


def write_ncf(folder: Path, negatives: list[str]) -> Path:
    write(folder / "ml-1m.train.rating.gz", [f"{i % 3}\t{i}\t4\t{i}" for i in range(9)])
    write(folder / "ml-1m.test.rating", ["0\t10\t5\t1", "1\t11\t3\t1", "2\t12\t4\t1"])
    return write(folder / "ml-1m.test.negative.gz", negatives)


class TestNcf:
    def test_positive_among_the_negatives_is_dropped_and_counted(self, tmp_path, caplog):
        write_ncf(tmp_path, ["(0,10)\t1\t10\t3", "(1,11)\t4\t5\t20", "(2,12)\t10\t11\t7"])
        split = load_leave_one_out(tmp_path)
        assert split.negatives.values.tolist() == [1, 3, 4, 5, 20, 10, 11, 7]
        assert split.negatives.offsets.tolist() == [0, 2, 5, 8]
        assert split.num_positives_among_negatives == 1
        assert "in 1 lines the positive stood among the negatives" in caplog.text
        assert (split.num_users, split.num_items) == (3, 21)
        assert split.test_items.tolist() == [10, 11, 12]
        assert split.train_items.tolist() == list(range(9))


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


class TestGenerator:
    whole = planted.generate(20_000, seed=1)

    def test_frequent_rows_have_more_useful_dims(self):
        samples = self.whole.samples
        for column, name in enumerate(samples.feature_names):
            counts = samples.ids[:, column].bincount(minlength=samples.num_embeddings[name]).float()
            dims = self.whole.useful_dims[name]
            means = [float(counts[dims == num_dims].mean()) for _, num_dims in planted.PLANTED_BLOCKS]
            assert means == sorted(means, reverse=True)
            assert means[0] > 20 * means[-1]
            assert int((dims == 16).sum()) == int(0.02 * samples.num_embeddings[name])

    def test_labels_follow_the_logits(self):
        probabilities, labels = torch.sigmoid(self.whole.logits), self.whole.samples.labels
        for low in (0.0, 0.25, 0.5, 0.75):
            inside = (probabilities >= low) & (probabilities < low + 0.25)
            assert float(labels[inside].mean()) == pytest.approx(float(probabilities[inside].mean()), abs=0.03)


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


REVIEWS_HEADER = "user\titem\ttimestamp\tbrand\tcat1\tcat2\tcat3\tleaf\tattrs"
REVIEWED = [(i % 20, 5 * i % 23) for i in range(230)]
"""User and item of every review."""


def write_tab_separated(folder: Path) -> None:
    """Files of examples.anime, examples.lastfm_tags and examples.amazon_sports."""
    ratings = [f"{1 + i % 10}\t{i % 20}\t{i % 7}\t{i % 3 - 1}\t{i % 2}\t{i % 5}\t{i % 9}" for i in range(400)]
    write(folder / "anime.tsv.gz", ["rating\tuser\titem\tgenre_set\tgenre1\ttype\tepisodes", *ratings])
    clicks = [f"{i % 2}\t{i % 20}\t{i % 11}\t{i % 7}\t{978300000 + i}" for i in range(400)]
    write(folder / "lastfm_tag_ctr.tsv", ["label\tuser\tartist\ttag\ttimestamp", *clicks])
    reviews = [review_line(user, item) for user, item in REVIEWED]
    write(folder / "amazon_sports_seq.tsv.gz", [REVIEWS_HEADER, *reviews])


def review_line(user: int, item: int) -> str:
    """Ids of users and items have gaps; an item's fields follow from it, and every fourth has no attributes."""
    attributes = " ".join(str(30 + item + j) for j in range(item % 4))
    fields = [10 * user, 3 * item, 1015459200, item % 5, item % 2, item % 3, 7 * (item % 4), item % 6]
    return "\t".join([*map(str, fields), attributes])


def anime(folder: Path, *, label: str = "rating", user: str = "user") -> Samples:
    fields = {"user": user, "genres": "genre_set"}
    return load_tab_separated(folder, "anime.tsv", label=label, fields=fields, publisher="them", seed=0)


def test_distinct_values_become_rows_whatever_they_are(tmp_path: Path):
    write_tab_separated(tmp_path)
    samples = anime(tmp_path)
    assert dict(samples.num_embeddings) == {"user": 20, "genres": 3}
    assert samples.labels[:3].tolist() == [1, 2, 3]
    assert [samples.ids[:, column].unique().numel() for column in range(2)] == [20, 3]


OF_MOVIELENS = ("mf", "mlp", "neumf", "ctr_fm", "ctr_wide_deep", "ctr_deepfm", "ctr_dlrm", "ctr_dlrm_dcn")
OF_CRITEO = ("fm", "fm_weighted", "wide_deep", "deepfm", "simple_deepfm", "dlrm")
RECIPES: dict[str, Callable[..., dnis.Recipe]] = {
    **{f"movielens:{name}": getattr(movielens, name) for name in OF_MOVIELENS},
    **{f"criteo:{name}": getattr(criteo, name) for name in OF_CRITEO},
    **{f"anime:{name}": getattr(anime_recipes, name) for name in ("mf", "fm")},
    **{f"amazon_sports:{name}": getattr(amazon_sports, name) for name in ("fm", "deepfm")},
    **{f"lastfm_tags:{name}": getattr(lastfm_tags, name) for name in ("fm", "deepfm", "dlrm")},
    "synthetic:demo": demo,
}
EACH_MODEL = [
    *(f"movielens:{name}" for name in OF_MOVIELENS),
    *("criteo:fm_weighted", "criteo:simple_deepfm", "anime:mf", "amazon_sports:deepfm", "lastfm_tags:dlrm"),
    "synthetic:demo",
]
"""Recipes that have each model and each publisher's data once."""
DEFAULT_DIMS = {"synthetic:demo": 16}


@pytest.fixture(scope="module")
def data(ml_1m: Path) -> Path:
    """Files of all publishers; loaders remember what they have read."""
    write(ml_1m / "train.txt.gz", [criteo_line(i) for i in range(200)])
    write_tab_separated(ml_1m)
    return ml_1m


@pytest.fixture(params=RECIPES)
def build(request: pytest.FixtureRequest, data: Path) -> Callable[..., dnis.Recipe]:
    name = request.param
    folder = None if name == "synthetic:demo" else data
    return lambda **arguments: RECIPES[name](folder, **arguments)


@pytest.mark.parametrize(("build", "of_splits"), [(lastfm, lastfm_tags.fm_by_time), (amazon, amazon_sports.fm_by_time)])
def test_streams_give_all_samples_in_the_order_of_time(build: Callable, of_splits: Callable, data: Path):
    by_time, recipe = of_splits(data), build(data)
    assert recipe.is_stream
    labels = torch.cat([batch.labels for part in splits_of(by_time)[2:] for batch in part])
    assert torch.cat([batch.labels for batch in recipe.data])[-len(labels) :].equal(labels)
    assert sum(len(batch.labels) for batch in recipe.data) == sum(part.rows.numel() for part in splits_of(by_time))


def tables_of(model: nn.Module) -> EmbeddingBagCollection:
    (tables,) = (module for module in model.modules() if isinstance(module, EmbeddingBagCollection))
    return tables


def splits_of(recipe: dnis.Recipe) -> list[InMemoryBatches]:
    return [recipe.data.train, recipe.data.validation, recipe.data.selection, recipe.data.test]


@pytest.mark.parametrize("build", EACH_MODEL, indirect=True)
def test_every_model_learns_at_any_embedding_dim_and_runs_in_torchrecs_pipeline(request, build, gloo):
    default = DEFAULT_DIMS.get(request.node.callspec.params["build"], 64)
    for embedding_dim in (None, 1, 4):
        recipe, dim = build(embedding_dim=embedding_dim), embedding_dim or default
        dims = {config.embedding_dim for config in tables_of(recipe.model).embedding_bag_configs()}
        assert dims == ({dim, 4 * dim} if isinstance(recipe.model, models.NeuMF) else {dim})
        task, batch = dnis.TrainTask(recipe.model, recipe.loss), next(iter(recipe.data.train))
        optimizer, losses = torch.optim.Adam(recipe.model.parameters(), lr=0.01), []
        for _ in range(20 if embedding_dim == 4 else 1):
            optimizer.zero_grad()
            loss, (_, predictions) = task(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert predictions.shape == batch.labels.shape
        assert all(parameter.grad is not None for parameter in recipe.model.parameters())
    assert losses[-1] < 0.97 * losses[0]
    model = DistributedModelParallel(task, device=torch.device("cpu"))
    with torch.no_grad():
        _, (_, want) = model(next(iter(recipe.data.test)))
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.device("cpu"))
    _, predictions = pipeline.progress(iter(recipe.data.test))
    assert torch.equal(predictions, want)
    assert len(pipeline._pipelined_modules) == 1


STARTS = {
    movielens.mf: lambda model: model.global_mean,
    movielens.mlp: lambda model: model.over.bias,
    movielens.neumf: lambda model: model.over.bias,
} | dict.fromkeys(
    (movielens.ctr_fm, movielens.ctr_deepfm, criteo.fm, criteo.wide_deep), lambda model: model.first_order.bias
)


@pytest.mark.parametrize("recipe", STARTS)
def test_models_start_at_the_best_constant_of_the_training_labels(data, recipe):
    found = recipe(data, seed=2)
    mean = torch.cat([batch.labels for batch in found.data.train]).mean()
    best = mean.logit() if isinstance(found.loss, nn.BCEWithLogitsLoss) else mean
    assert float(STARTS[recipe](found.model).detach()) == pytest.approx(float(best), abs=0.05)


def test_predictions_are_logits(build):
    recipe = build()
    if isinstance(recipe.loss, nn.BCEWithLogitsLoss):
        last = recipe.model.first_order if hasattr(recipe.model, "first_order") else recipe.model.over_arch
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.fill_(-5.0)
            batch = next(iter(recipe.data.test))
            assert float(recipe.model(batch.dense_features, batch.sparse_features).max()) < 0


def test_weights_and_splits_depend_on_the_seed_alone(build):
    """Splits are disjoint, and the same at any embedding_dim."""
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = build(seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = build(seed=3), build(seed=4)
    assert same_weights(first.model.state_dict(), again.model.state_dict())
    assert not same_weights(first.model.state_dict(), other.model.state_dict())
    splits = splits_of(first)
    rows = torch.cat([split.rows for split in splits])
    assert rows.unique().numel() == rows.numel()
    for split, narrow in zip(splits, splits_of(build(seed=3, embedding_dim=2)), strict=True):
        batch, same = next(iter(split)), next(iter(narrow))
        assert torch.equal(batch.sparse_features.values(), same.sparse_features.values())
        assert torch.equal(batch.labels, same.labels)
    assert not torch.equal(splits[3].rows, splits_of(other)[3].rows)


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(value.shape == other[key].shape and torch.equal(value, other[key]) for key, value in one.items())


def test_scalars_of_criteo_reach_fm_both_ways(data):
    bucketised, weighted = criteo.fm(data), criteo.fm_weighted(data)
    tables = tables_of(bucketised.model)
    assert not tables.is_weighted()
    assert len(tables.embedding_bags) == 39
    assert next(iter(bucketised.data.train)).dense_features.shape[1] == 0
    tables = tables_of(weighted.model)
    assert tables.is_weighted()
    assert tables.embedding_bags["scalars"].weight.shape == (13, 64)
    batch = next(iter(weighted.data.train))
    for column, name in enumerate(DEFAULT_INT_NAMES):
        assert torch.equal(batch.sparse_features[name].weights(), batch.dense_features[:, column])
    assert set(batch.sparse_features[DEFAULT_CAT_NAMES[0]].weights().tolist()) == {1.0}


FOLDERS = {
    "movielens": "ml-1m",
    "criteo": "criteo-kaggle-137k",
    "anime": "second",
    "lastfm_tags": "second",
    "amazon_sports": "second",
    "ncf": "ncf-ml-1m",
}


def test_scalars_of_held_out_lines_move_no_bucket_of_the_training_lines(tmp_path):
    """Buckets and their order by frequency: so many equal values would be a bucket near the top."""
    lines = [criteo_line(i) for i in range(200)]
    folders = [tmp_path / "published", tmp_path / "changed"]
    for folder in folders:
        folder.mkdir()
    write(folders[0] / "train.txt", lines)
    recipe = criteo.fm(folders[0], embedding_dim=2)
    for row in torch.cat([split.rows for split in splits_of(recipe)[1:]]).tolist():
        label, *rest = lines[row].split("\t")
        lines[row] = "\t".join([label, *["8"] * len(DEFAULT_INT_NAMES), *rest[len(DEFAULT_INT_NAMES) :]])
    write(folders[1] / "train.txt", lines)
    changed = criteo.fm(folders[1], embedding_dim=2)
    for batch, other in zip(recipe.data.train, changed.data.train, strict=True):
        assert torch.equal(batch.sparse_features.values(), other.sparse_features.values())
    held_out = [next(iter(built.data.test)).sparse_features.values() for built in (recipe, changed)]
    assert not torch.equal(*held_out)


@pytest.mark.real_data
@pytest.mark.parametrize(
    "name",
    [
        *("movielens:mf", "movielens:ctr_dlrm", "criteo:fm", "criteo:dlrm"),
        *("anime:fm", "lastfm_tags:dlrm", "amazon_sports:deepfm", "ncf:neumf_topk"),
    ],
)
def test_the_publishers_files(real_data, name):
    recipe = (RECIPES | {"ncf:neumf_topk": ncf.neumf_topk})[name](real_data / FOLDERS[name.split(":")[0]])
    loss, (_, predictions) = dnis.TrainTask(recipe.model, recipe.loss)(next(iter(recipe.data.train)))
    assert torch.isfinite(predictions).all()
    assert float(loss.detach()) < (0.8 if isinstance(recipe.loss, nn.BCEWithLogitsLoss) else 3)


CPU = torch.device("cpu")
ROWS = {"user": 30, "movie": 14, "genre": 5}
PAIR = {name: ROWS[name] for name in ("user", "movie")}
SCALAR_NAMES = ("age", "price")
DIM = 4
NUM_SAMPLES = 60
Sample = dict[str, list[tuple[int, float]]]
"""Feature -> (id, value) of one sample's bag."""


def one_batch(*, multi_hot: bool, scalars: bool = False) -> Batch:
    """Samples of two single-id features, a multi-hot one with empty bags, and two scalars, one of them often 0."""
    generator = torch.Generator().manual_seed(0)
    skewed = torch.rand(NUM_SAMPLES, 2, generator=generator)
    ids = torch.stack([(rows ** skewed[:, i]).long() - 1 for i, rows in enumerate(PAIR.values())], dim=1).clamp(min=0)
    lengths = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    bags = Bags(torch.randint(0, ROWS["genre"], (int(offsets[-1]),), generator=generator), offsets)
    dense = torch.randn(NUM_SAMPLES, len(SCALAR_NAMES), generator=generator)
    dense[::3, 1] = 0.0
    names = {"feature_names": tuple(PAIR), "scalar_names": SCALAR_NAMES if scalars else ()}
    multi_hot_bags = {"genre": bags} if multi_hot else {}
    options = {"batch_size": NUM_SAMPLES, "shuffle": False, "seed": 0}
    return next(
        iter(InMemoryBatches(dense, ids, torch.zeros(NUM_SAMPLES), multi_hot=multi_hot_bags, **names, **options))
    )


OF_PAIRS: dict[str, Callable[[], nn.Module]] = {
    "mf": lambda: models.MatrixFactorization(models.build_tables(PAIR, DIM, init_std=0.3), global_mean=0.5),
    "mlp": lambda: models.MultiLayerPerceptron(
        models.build_tables(PAIR, DIM, init_std=0.3), tower=(6, 3), initial_bias=0.5
    ),
    "neumf": lambda: models.NeuMF(
        models.build_neumf_tables(PAIR, DIM, init_std=0.3), tower=models.ncf_tower(DIM), initial_bias=0.5
    ),
}
OF_FIELDS: dict[str, Callable[..., nn.Module]] = {
    "fm": models.FactorizationMachine,
    "wide_deep": partial(models.WideDeep, tower=(6, 3)),
    "deepfm": partial(models.DeepFM, tower=(6, 3)),
}


def build_model(name: str, **scalars: tuple[str, ...]) -> nn.Module:
    if name in OF_PAIRS:
        return OF_PAIRS[name]()
    return OF_FIELDS[name](models.build_tables(ROWS, DIM, init_std=0.3, **scalars), initial_bias=0.5)


def perceptron(tower: nn.Module, inputs: Tensor) -> Tensor:
    for layer in tower._mlp:
        inputs = (layer._linear.weight @ inputs + layer._linear.bias).clamp(min=0)
    return inputs


def pooled(collection: EmbeddingBagCollection, table: str, bag: list[tuple[int, float]]) -> Tensor:
    weight = collection.embedding_bags[table].weight
    return sum((value * weight[row] for row, value in bag), torch.zeros(weight.shape[1]))


def naive(model: nn.Module, sample: Sample) -> Tensor:
    """The model's formula for one sample, row by row."""
    tables = model.embedding_bag_collection
    if isinstance(model, models.MatrixFactorization):
        biases = sum(model.biases.biases[name].weight[sample[name][0][0]] for name in PAIR)
        left, right = (pooled(tables, name, sample[name]) for name in PAIR)
        return 0.5 + biases + left @ right
    if isinstance(model, models.MultiLayerPerceptron):
        both = torch.cat([pooled(tables, name, sample[name]) for name in PAIR])
        return model.over(perceptron(model.tower, both))
    if isinstance(model, models.NeuMF):
        left, right = (pooled(tables, f"gmf_{name}", sample[name]) for name in PAIR)
        both = torch.cat([pooled(tables, f"mlp_{name}", sample[name]) for name in PAIR])
        return model.over(torch.cat([left * right, perceptron(model.tower, both)]))
    first_rows, start, table_of = {}, 0, {}
    for config in tables.embedding_bag_configs():
        first_rows[config.name] = start
        start += config.num_embeddings
        table_of |= dict.fromkeys(config.feature_names, config.name)
    logit = model.first_order.bias
    for name, bag in sample.items():
        for row, value in bag:
            logit = logit + value * model.first_order.weights[first_rows[table_of[name]] + row]
    fields = [pooled(tables, table_of[name], sample[name]) for name in table_of]
    if not isinstance(model, models.WideDeep):
        logit = logit + sum(a @ b for i, a in enumerate(fields) for b in fields[:i])
    if not isinstance(model, models.FactorizationMachine):
        logit = logit + model.deep[1](perceptron(model.deep[0], torch.cat(fields)))
    return logit


def samples_of(features: KeyedJaggedTensor) -> list[Sample]:
    """What a KJT holds, sample by sample."""
    samples: list[Sample] = [{} for _ in range(features.stride())]
    for name, bags in features.to_dict().items():
        rows = bags.to_dense()
        weights = bags.to_dense_weights() if bags.weights_or_none() is not None else map(torch.ones_like, rows)
        for sample, of_bag, values in zip(samples, rows, weights, strict=True):
            sample[name] = list(zip(of_bag.tolist(), values.tolist(), strict=True))
    return samples


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """Every weight that starts at 0 would hide a mistake."""
    for parameter in model.parameters():
        parameter.add_(0.5 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize(
    ("name", "scalars"), [*((name, ()) for name in OF_PAIRS), *product(OF_FIELDS, [(), SCALAR_NAMES])]
)
def test_models_equal_their_formula(name: str, scalars: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = randomised(build_model(name, **({"scalar_names": scalars} if scalars else {})))
    tables, batch = model.embedding_bag_collection, one_batch(multi_hot=name in OF_FIELDS, scalars=bool(scalars))
    assert tables.is_weighted() == (models.SCALARS in tables.embedding_bags) == bool(scalars)
    model.requires_grad_(False)
    found = model(dense_features=batch.dense_features, sparse_features=batch.sparse_features)
    want = [float(naive(model, sample)) for sample in samples_of(batch.sparse_features)]
    assert found.shape == (NUM_SAMPLES,)
    assert found.tolist() == pytest.approx(want, abs=1e-5)
    assert float(found.std()) > 0.1


@pytest.mark.parametrize("name", [*OF_PAIRS, *OF_FIELDS])
def test_the_order_of_a_collections_keys_does_not_matter(name: str) -> None:
    """A sharded one may return them in another."""

    def reverse(tables: nn.Module, inputs: object, pooled: KeyedTensor) -> KeyedTensor:
        by_key = dict(reversed(pooled.to_dict().items()))
        widths = [part.shape[1] for part in by_key.values()]
        return KeyedTensor(list(by_key), widths, torch.cat(list(by_key.values()), dim=1))

    model, batch = randomised(build_model(name)), one_batch(multi_hot=name in OF_FIELDS)
    before = model(batch.dense_features, batch.sparse_features)
    model.embedding_bag_collection.register_forward_hook(reverse)
    torch.testing.assert_close(model(batch.dense_features, batch.sparse_features), before)


@pytest.mark.skipif(not load_operator(), reason="the lookups are not compiled here")
@pytest.mark.parametrize("name", [*OF_PAIRS, "deepfm"])
def test_models_can_be_packaged(tmp_path: Path, name: str) -> None:
    """A server may have no FBGEMM, which KeyedJaggedTensor's `features[name]` would call."""
    trained, fresh = (build_model(name) for _ in range(2))
    path = dnis.export(trained, uncompressed_scheme(trained), tmp_path / "artifact")
    model, batch = dnis.load_model(fresh, path, form="packed").eval(), one_batch(multi_hot=name in OF_FIELDS)
    signature = Signature.of_batch(batch)
    with torch.no_grad():
        graph = export_graph(model, signature).module()
        expected = model(batch.dense_features, batch.sparse_features)
        torch.testing.assert_close(graph(*signature.flatten(batch)), expected, atol=1e-6, rtol=1e-5)


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

    @pytest.mark.parametrize("recipe", [ncf.neumf_topk, ncf.neumf_topk_32, ncf.mf_topk, ncf.mlp_topk])
    def test_is_judged_by_ranking_on_the_same_splits(self, folder, recipe, gloo):
        whole, part = ncf.neumf_topk(folder, seed=1), recipe(folder, seed=1, embedding_dim=2)
        for split in ("train", "validation", "selection", "test"):
            (theirs, ours) = (next(iter(getattr(each.data, split))) for each in (whole, part))
            assert torch.equal(theirs.sparse_features.values(), ours.sparse_features.values())
            assert torch.equal(theirs.labels, ours.labels)
        task = dnis.TrainTask(part.model, part.loss)
        labels = torch.cat([batch.labels for batch in part.data.train])
        assert float(labels.mean()) == pytest.approx(0.2)  # positives among negatives
        test, selection = (evaluate(task, split, part.loss, CPU) for split in (part.data.test, part.data.selection))
        assert {f"ndcg@{k}" for k in RANKING_KS} < set(test)
        assert {"logloss", "auc", "ne"} < set(selection)
        same, other = (recipe(folder, seed=seed, embedding_dim=2).model.state_dict() for seed in (1, 2))
        assert same_weights(part.model.state_dict(), same)
        assert not same_weights(same, other)


def test_every_review_has_two_items_that_its_user_never_reviewed(data: Path) -> None:
    samples = load_amazon_sports(data, seed=0)
    columns = {name: samples.ids[:, i].view(-1, 3) for i, name in enumerate(samples.feature_names)}
    assert samples.labels.view(-1, 3).tolist() == [[1, 0, 0]] * len(REVIEWED)
    assert (columns["user"] == columns["user"][:, :1]).all()
    positives = set(zip(columns["user"][:, 0].tolist(), columns["item"][:, 0].tolist(), strict=True))
    assert len(positives) == len(set(REVIEWED))
    drawn = set(zip(columns["user"][:, 1:].flatten().tolist(), columns["item"][:, 1:].flatten().tolist(), strict=True))
    assert not positives & drawn
    assert len({item for _, item in drawn}) == 23


def item_numbers(samples: Samples) -> list[int]:
    """What the file has for the item of every sample, read off the reviews: rows are numbered by frequency."""
    rows = samples.ids[:, 1].tolist()
    number_of = dict(zip(rows[::3], (item for _, item in REVIEWED), strict=True))
    assert sorted(number_of.values()) == list(range(23))
    return [number_of[row] for row in rows]


def test_fields_come_with_the_item_drawn_or_not(data: Path) -> None:
    samples = load_amazon_sports(data, seed=0)
    sizes = {"user": 20, "item": 23, "brand": 5, "cat1": 2, "cat2": 3, "cat3": 4, "leaf": 6, ATTRIBUTES: 23}
    assert dict(samples.num_embeddings) == sizes
    numbers = item_numbers(samples)
    for place, name in enumerate(OF_ITEM, start=2):
        field = [number % sizes[name] for number in numbers]
        assert len(set(zip(field, samples.ids[:, place].tolist(), strict=True))) == sizes[name]
    bags = samples.multi_hot[ATTRIBUTES]
    assert bags.offsets.diff().tolist() == [number % 4 for number in numbers]
    attributes = [number + j for number in numbers for j in range(number % 4)]
    assert len(set(zip(attributes, bags.values.tolist(), strict=True))) == sizes[ATTRIBUTES]


def test_negatives_are_in_the_split_of_their_review(data: Path) -> None:
    samples, recipe = load_amazon_sports(data, seed=3), amazon_sports.fm(data, seed=3, embedding_dim=2)
    parts = split_rows(690, seed=3, group_size=3)
    assert [split.rows.tolist() for split in splits_of(recipe)] == [part.tolist() for part in parts]
    for part in parts:
        assert (part.view(-1, 3) == part.view(-1, 3)[:, :1] + torch.arange(3)).all()
    batch = next(iter(recipe.data.test))
    assert torch.equal(batch.labels, samples.labels[parts[3]])
    assert (
        batch.sparse_features[ATTRIBUTES].lengths().tolist()
        == samples.multi_hot[ATTRIBUTES].offsets.diff()[parts[3]].tolist()
    )


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
    model = sequential.SelfAttentiveRecommender(sequential.build_sequence_table(9, 8, init_std=1.0), longest=6).eval()
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


def _as_torch_has_it(block: sequential.SelfAttentionBlock) -> nn.TransformerEncoderLayer:
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
    model = sequential.DeepInterestNetwork(sequential.build_sequence_table(9, 8, init_std=1.0), longest=6).eval()
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
def test_a_recipe_is_compressed_and_searched(name: str, data: Path, monkeypatch, gloo) -> None:
    monkeypatch.setattr(amazon_sequences, "BATCH_SIZE", 64)
    monkeypatch.setattr(amazon_sequences, "NUM_QUERIES", 3)
    monkeypatch.setattr(amazon_sequences, "NUM_RANKED", 12)
    recipe = getattr(amazon_sequences, name)(data, embedding_dim=8)
    metrics = evaluate(dnis.TrainTask(recipe.model, recipe.task), recipe.data.test, recipe.task, CPU)
    assert ("auc" if name == "din" else "ndcg@10") in metrics
    outcome = dnis.search(recipe, 2.0, settings=SearchSettings(num_blocks=2, epochs=1, patience=1))
    assert outcome.scheme.tables["item"].pooling == "none"
    fresh = getattr(amazon_sequences, name)(data, embedding_dim=8)
    dnis.compress(fresh.model, fresh.data.train, loss=fresh.task, compression=2.0)
    assert isinstance(fresh.model.items, ServedEmbeddingCollection)


def scalars_samples_of(dense: torch.Tensor) -> Samples:
    num_samples = dense.shape[0]
    return Samples(
        dense=dense,
        ids=torch.arange(num_samples, dtype=torch.int32).unsqueeze(1),
        labels=torch.zeros(num_samples),
        feature_names=("id",),
        num_embeddings={"id": num_samples},
    )


@given(st.lists(st.integers(-3, 3), min_size=20, max_size=60), st.integers(2, 9))
def test_buckets_keep_the_order_of_values_and_count_training_alone(values, num_buckets):
    dense = torch.tensor(values, dtype=torch.float32).unsqueeze(1)
    train_rows = torch.arange(10)
    found = bucketised(scalars_samples_of(dense), ["x"], train_rows, num_buckets=num_buckets)
    rows = found.num_embeddings["x"]
    ids = found.ids[:, 1]
    assert found.ids.dtype == torch.int32
    assert found.feature_names == ("id", "x")
    assert found.dense.shape == (len(values), 0)
    assert rows <= num_buckets
    assert 0 <= int(ids.min()) <= int(ids.max()) < rows
    # Each bucket is an interval: no value of another bucket lies between two of its own.
    spans = sorted((float(dense[ids == row].min()), float(dense[ids == row].max())) for row in ids.unique())
    assert all(left[1] < right[0] for left, right in pairwise(spans))
    counts = torch.bincount(ids[train_rows], minlength=rows).tolist()
    assert counts == sorted(counts, reverse=True)
    # What only held-out samples hold moves no boundary.
    dense[10:] = 100.0
    again = bucketised(scalars_samples_of(dense), ["x"], train_rows, num_buckets=num_buckets)
    assert torch.equal(again.ids[:10], found.ids[:10])


def tasks_naive(model: models.MultiGateMixtureOfExperts, x: Tensor, task: str) -> Tensor:
    """One sample at a time, one expert at a time, by the equations."""
    first, size = model.experts[0], model.towers[task][0]._mlp[0]._linear.in_features
    predictions = []
    for sample in x:
        shares = torch.softmax(model.gates[task](sample), 0)
        mixed = torch.zeros(size)
        for expert, share in enumerate(shares):
            rows = slice(expert * size, (expert + 1) * size)
            mixed = mixed + share * (first.weight[rows] @ sample + first.bias[rows]).clamp(min=0)
        predictions.append(model.towers[task](mixed.unsqueeze(0))[0, 0])
    return torch.stack(predictions)


@pytest.fixture
def batch(ml_1m: Path):
    return next(iter(mmoe(ml_1m, embedding_dim=4).data.train))


def test_equals_the_equations(ml_1m: Path, batch) -> None:
    model = mmoe(ml_1m, embedding_dim=4).model
    outputs = model(None, batch.sparse_features)
    x = model.embedding_bag_collection(batch.sparse_features).values()
    for task in ("click", "rating"):
        torch.testing.assert_close(outputs[task], tasks_naive(model, x, task))


def test_labels_are_the_click_and_the_rating(ml_1m: Path, batch) -> None:
    click, rating = batch.labels.unbind(1)
    assert torch.equal(click, (rating >= 4).float())
    assert 1 <= float(rating.min()) < float(rating.max()) <= 5
    alone = next(iter(movielens.ctr_fm(ml_1m, embedding_dim=4).data.train))
    assert torch.equal(alone.labels, click)
    outputs = {"click": torch.zeros(len(click)), "rating": torch.zeros(len(click))}
    expected = torch.tensor(2.0).log() + RATING_SHARE * rating.square().mean()
    torch.testing.assert_close(ClickAndRating().loss(batch, outputs), expected)


def test_it_is_searched_from_its_frame_and_from_its_file(gloo, tmp_path: Path) -> None:
    drawn = draw_frame(400)
    assert drawn.equals(draw_frame(400))
    drawn.to_parquet(tmp_path / "clicks.parquet")
    ours = recipe(tmp_path, embedding_dim=8)
    assert ours.data.encoder.num_embeddings.keys() == {"user", "item", "colours"}
    assert ours.data.test.rows.tolist() == list(range(360, 400))  # the latest
    settings = SearchSettings(epochs=1, patience=1, num_blocks=2)
    assert dnis.search(ours, compression=4, settings=settings).compression >= 4


STREAM_ROWS = 600


@pytest.fixture
def stream_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a generated train.txt, small tables, small batches and a cache of its own."""
    monkeypatch.setenv("DNIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(criteo_stream.HASH_ROWS_VARIABLE, "50")
    monkeypatch.setattr(criteo_stream, "BATCH_SIZE", 16)
    monkeypatch.setattr(data_loading, "MAX_VOCABULARY", 1000)
    folder = tmp_path / "data"
    folder.mkdir()
    data_loading.write_criteo_like(folder / "train.txt", STREAM_ROWS)
    return folder


def test_the_recipe_trains_on_all_of_the_stream(stream_data: Path) -> None:
    recipe = criteo_stream.dlrm(stream_data, seed=0, embedding_dim=4)
    assert sum(split.num_samples for split in splits_of(recipe)) == STREAM_ROWS
    batch = next(iter(recipe.data.train))
    assert batch.dense_features.shape == (16, 13)
    assert len(batch.sparse_features.keys()) == 26
    logits = recipe.model(dense_features=batch.dense_features, sparse_features=batch.sparse_features)
    assert recipe.loss(logits.squeeze(-1), batch.labels).isfinite()
    tables = recipe.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    rows = {table.feature_names[0]: table.num_embeddings for table in tables}
    assert max(rows.values()) == 50
    assert rows["cat_8"] == 48


def test_files_are_found_packed_by_day_and_by_address(stream_data: Path) -> None:
    text = (stream_data / "train.txt").read_bytes()
    lines = text.splitlines(keepends=True)
    whole = stream_data.parent / "whole"
    whole.mkdir()
    (whole / "day_7").write_bytes(text)
    days = stream_data.parent / "days"
    days.mkdir()
    for day, part in (("day_0", lines[:100]), ("day_10", lines[300:]), ("day_2", lines[100:300])):
        (days / f"{day}.gz").write_bytes(gzip.compress(b"".join(part)))
    (stream_data / "listed").mkdir()
    (stream_data / "listed" / "urls.txt").write_text(f"file://{stream_data}/train.txt\n\n")
    for folder, same in ((days, whole), (stream_data / "listed", stream_data)):
        wanted = criteo_stream.open_stream(same)
        found = criteo_stream.open_stream(folder)
        rows = [
            torch.cat([batch.sparse_features.values() for batch in FileBatches(samples, batch_size=600)])
            for samples in (found, wanted)
        ]
        assert torch.equal(*(part.sort().values for part in rows))


def test_tables_are_as_large_as_the_fields_of_the_log_that_is_read(stream_data: Path, monkeypatch) -> None:
    """Kaggle's first field has 1,460 categories, that of the 1 TB logs 45.8 million."""
    monkeypatch.setenv(criteo_stream.HASH_ROWS_VARIABLE, "1000000")
    (stream_data / "days").mkdir()
    (stream_data / "days" / "day_0").write_bytes((stream_data / "train.txt").read_bytes())
    (stream_data / "days" / "day_1.gz").write_bytes(gzip.compress((stream_data / "train.txt").read_bytes()))
    (stream_data / "mixed").mkdir()
    (stream_data / "mixed" / "urls.txt").write_text(f"{stream_data}/train.txt\n{stream_data}/days/day_0\n")
    rows = [
        criteo_stream.open_stream(folder).schema.num_embeddings
        for folder in (stream_data, stream_data / "days", stream_data / "mixed")
    ]
    assert [own["cat_0"] for own in rows] == [16 * 1460, 1_000_000, 1_000_000]
    assert [own["cat_12"] for own in rows] == [16 * 3194, 16 * 10, 16 * 3194]
    assert [own["cat_19"] for own in rows] == [16 * 4, 1_000_000, 1_000_000]
    assert [own["cat_2"] for own in rows] == [1_000_000, 16 * 17245, 1_000_000]


def test_a_file_both_plain_and_packed_is_read_once_and_others_not_at_all(tmp_path: Path) -> None:
    for name in ("day_10.gz", "day_2", "day_2.gz", "day_1.gz", "day_2.md5", "day_2_labels.npy", "day_1.gz.part"):
        (tmp_path / name).touch()
    assert [Path(file).name for file in criteo_stream.find_files(tmp_path)] == ["day_1.gz", "day_2", "day_10.gz"]


def checkpoint(data: Path, change: Callable[[dict[str, Tensor]], object] = lambda _: None) -> dict[str, Tensor]:
    """Weights of DLRM beside the data, as a file that is read in place of drawing them."""
    weights = criteo.dlrm(data, embedding_dim=8, seed=0).model.state_dict()
    change(weights)
    save_file(weights, data / "checkpoint.safetensors")
    return weights


def test_dlrm_starts_from_a_checkpoint_of_its_size(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = checkpoint(data, lambda weights: [value.add_(1) for value in weights.values()])
    loaded = criteo.dlrm_from_checkpoint(data).model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in weights.items())
    other = tables_of(criteo.dlrm_from_checkpoint(data, embedding_dim=3).model)  # of another size: from scratch
    assert {config.embedding_dim for config in other.embedding_bag_configs()} == {3}
    wrapped = DLRMTrain(criteo.dlrm(data, embedding_dim=8, seed=0).model)
    torch.save(wrapped.state_dict(), data / "dlrm.pt")
    monkeypatch.setenv("DNIS_CHECKPOINT", str(data / "dlrm.pt"))
    loaded = criteo.dlrm_from_checkpoint(data).model.state_dict()
    assert all(torch.equal(loaded[f"{key}"], value.cpu()) for key, value in wrapped.model.state_dict().items())


NEED_DATA = [
    *(recipe for name, recipe in RECIPES.items() if name != "synthetic:demo"),
    *(criteo.dlrm_from_checkpoint, ncf.neumf_topk, ncf.mf_topk, ncf.mlp_topk, amazon_sequences.din, criteo_stream.dlrm),
]


@pytest.mark.parametrize("recipe", NEED_DATA, ids=lambda recipe: f"{recipe.__module__[9:]}:{recipe.__name__}")
def test_no_data_folder_and_no_file_in_it(recipe, tmp_path):
    with pytest.raises(ValueError, match="expected a (data )?folder"):
        recipe(None)
    for _ in range(2):
        with pytest.raises(ValueError, match="expected"):
            recipe(tmp_path)
        (tmp_path / "other.txt").touch()


NEGATIVES = "ml-1m.test.negative.gz"
GOOD = ["(0,10)\t1", "(1,11)\t4", "(2,12)\t7"]


def in_memory(**changes: Any) -> InMemoryBatches:
    dense, ids = torch.zeros(6, 2), torch.zeros(6, 2, dtype=torch.int32)
    given = {"feature_names": ["a", "b"], "batch_size": 4, "shuffle": False, "seed": 0} | changes
    return InMemoryBatches(dense, ids, torch.zeros(6), **given)


def table(folder: Path, *last: str) -> object:
    return read_table(
        write(folder / "table.dat.gz", [*(f"{i}::1::k{i * i}" for i in range(1000 * bool(last))), *last]), TABLE, "::"
    )


def cut_table(folder: Path, change: Callable[[bytes], bytes]) -> object:
    path = write(folder / "table.dat.gz", [f"{i}::1::k{i * i}" for i in range(1000)])
    path.write_bytes(change(path.read_bytes()))
    return read_table(path, TABLE, "::")


def one_out(folder: Path, *lines: str, change: Callable[[bytes], bytes] = bytes) -> object:
    path = write_ncf(folder, list(lines))
    path.write_bytes(change(path.read_bytes()))
    return load_leave_one_out(folder)


def few_candidates(folder: Path) -> object:
    write_ncf(folder, [f"({i},{10 + i})\t" + "\t".join(map(str, range(20, 35 - 7 * (i == 2)))) for i in range(3)])
    return ncf.neumf_topk(folder)


def clicks_without_users(folder: Path) -> object:
    write(folder / "ratings.dat.gz", rating_lines())
    write(folder / "movies.dat", ["10::A::War"])
    write(folder / "users.dat", ["1::F::1::1::1"])
    return load_clicks(folder, seed=0)


def lines_of_criteo(folder: Path, bad: str) -> object:
    write(folder / "train.txt", [*(criteo_line(i) for i in range(200)), bad])
    return load_criteo(folder, seed=0)


def reviews_with(folder: Path, attributes: str) -> object:
    lines = [review_line(user, item) for user, item in REVIEWED]
    lines[5] = lines[5].rpartition("\t")[0] + "\t" + attributes
    write(folder / "amazon_sports_seq.tsv", [REVIEWS_HEADER, *lines])
    return load_amazon_sports(folder, seed=0)


def all_reviewed(folder: Path) -> object:
    lines = [review_line(user, item) for user, item in REVIEWED if item < 20 or user == 0]
    write(folder / "amazon_sports_seq.tsv", [REVIEWS_HEADER, *lines, *(review_line(0, item) for item in range(23))])
    return load_amazon_sports(folder, seed=0)


def tab_separated(folder: Path, **changes: str) -> object:
    write_tab_separated(folder)
    return anime(folder, **changes)


def other_text(folder: Path) -> object:
    write(folder / "anime.tsv", ["rating\tuser\tgenre_set", "5\tx\t1"])
    return anime(folder)


def wrong_checkpoint(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> object:
    write(folder / "train.txt", [criteo_line(i) for i in range(200)])
    checkpoint(folder, change)
    return criteo.dlrm_from_checkpoint(folder)


def pickled_checkpoint(folder: Path) -> object:
    write(folder / "train.txt", [criteo_line(i) for i in range(200)])
    torch.save(nn.Linear(1, 1), folder / "checkpoint.safetensors")
    return criteo.dlrm_from_checkpoint(folder)


def known(*pairs: tuple[int, int], num_items: int) -> KnownPositives:
    return KnownPositives(*torch.tensor(pairs).unbind(1), num_items=num_items)


NONE = torch.zeros(0, dtype=torch.int64)
CAT_4 = "sparse_arch.embedding_bag_collection.embedding_bags.cat_4.weight"
REFUSED: list[tuple[Callable[[Path], object], str]] = [
    *(
        (lambda f, bad=bad: table(f, bad), "table.dat.gz")
        for bad in ("7::1::a::b::c", "x::1::a", f"{10**20}::1::a", "7:1:a")
    ),
    (lambda f: cut_table(f, lambda data: data[:-20]), "table.dat.gz"),
    (lambda f: cut_table(f, lambda data: data[:300] + b"?" + data[301:]), "table.dat.gz"),
    (table, "table.dat.gz"),
    (lambda _: in_memory(batch_size=0), "batch_size"),
    (lambda _: in_memory(rows=torch.arange(0)), "0 samples"),
    (lambda _: split_rows(19, seed=0), "got 19"),
    (lambda _: split_rows(59, seed=0, group_size=3), "got 19"),
    (clicks_without_users, "users.dat"),
    (lambda f: load_ratings(f / "nowhere", seed=0), "ratings.dat"),
    *(
        (lambda f, bad=bad: one_out(f, GOOD[0], bad, GOOD[2]), f"{NEGATIVES}, line 2")
        for bad in ("1,11\t4", "(1,11", "(1,11)", "(1,11)\tthree", "1\t11\t4", "(1,11)\t-3", f"(1,11)\t{10**20}")
    ),
    (lambda f: one_out(f, GOOD[0], "(1,11)\t11", GOOD[2]), "pair (1, 11)"),
    (lambda f: one_out(f, GOOD[0], GOOD[2]), "pair (1, 11)"),
    (lambda f: one_out(f, *GOOD, *(f"(0,{i})\t1" for i in range(20, 400)), "x"), f"{NEGATIVES}, line 384"),
    (lambda f: one_out(f, *(f"({i % 3},{10 + i % 3})\t{i}" for i in range(1000)), change=lambda b: b[:-20]), NEGATIVES),
    (few_candidates, "query 2"),
    (lambda _: known((3, 0), (3, 1), (3, 2), (1, 0), num_items=3), "user 3"),
    (lambda _: known((0, 1), num_items=3).joined_with(known((0, 0), num_items=4)), "known pairs"),
    (
        lambda _: ImplicitBatches(NONE, NONE, known((0, 1), num_items=3), num_negatives=4, batch_size=4, seed=0),
        "batch_size",
    ),
    (lambda _: ImplicitBatches(NONE, NONE, known((0, 1), num_items=3), num_negatives=1, batch_size=2, seed=0), "got 0"),
    (lambda f: lines_of_criteo(f, criteo_line(0, label="2")), "train.txt"),
    (lambda f: lines_of_criteo(f, criteo_line(1).replace("-1", "1.5x", 1)), "train.txt"),
    *((lambda f, bad=bad: reviews_with(f, bad), "amazon_sports_seq.tsv") for bad in ("3 x", "1.5", "9" * 30)),
    (all_reviewed, "user 0"),
    (lambda f: tab_separated(f, label="stars"), "stars"),
    (lambda f: tab_separated(f, user="colour"), "colour"),
    (other_text, "anime.tsv"),
    (demo, "data folder"),
    (lambda f: wrong_checkpoint(f, lambda w: w.pop("over_arch.model.1.bias")), "over_arch.model.1.bias"),
    (lambda f: wrong_checkpoint(f, lambda w: w.update(extra=torch.zeros(1))), "extra"),
    (lambda f: wrong_checkpoint(f, lambda w: w.update({CAT_4: torch.zeros(2, 8)})), "cat_4"),
    (pickled_checkpoint, "checkpoint.safetensors"),
    (
        lambda _: bucketised(scalars_samples_of(torch.zeros(20, 2)), ["x", "y"], torch.arange(20), num_buckets=1),
        "num_buckets",
    ),
    (lambda _: weighted(scalars_samples_of(torch.zeros(20, 2)), ["x"]), "scalars"),
    (lambda _: bucketised(scalars_samples_of(torch.zeros(20, 2)), ["x"], torch.arange(20)), "scalars"),
    (lambda _: weighted(scalars_samples_of(torch.zeros(20, 0)), []), "scalars"),
    (lambda _: models.MatrixFactorization(models.build_tables(ROWS, 4), 0.0), "MatrixFactorization"),
    (lambda _: models.MultiLayerPerceptron(models.build_tables(ROWS, 4), tower=(2,)), "MultiLayerPerceptron"),
    (lambda _: models.NeuMF(models.build_tables(PAIR, 4), tower=(2,)), "NeuMF"),
    (lambda _: models.FactorizationMachine(models.build_neumf_tables(PAIR, 4)), "embedding_dim"),
    (lambda _: models.build_tables(PAIR, 0), "embedding_dim"),
    (lambda _: models.build_neumf_tables(PAIR, 0), "embedding_dim"),
    (lambda f: criteo_stream.open_stream(f), "urls.txt"),
    (lambda f: criteo_stream.open_stream(f / "nowhere"), "nowhere"),
    (lambda f: criteo_stream.find_files(write(f / "urls.txt", ["", "  "]).parent), "urls.txt"),
]
"""A call that is given a folder, and the place that its refusal names."""


@pytest.mark.parametrize(("call", "place"), REFUSED)
def test_what_does_not_fit_is_refused(call: Callable[[Path], object], place: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(place)):
        call(tmp_path)


def test_the_benchmark_of_loading_reads_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_loading, "MAX_VOCABULARY", 1000)
    data_loading.main(["--rows", "200", "--batch-size", "8,32", "--json", str(tmp_path / "loading.json")])
    rows = json.loads((tmp_path / "loading.json").read_text())["rows"]
    assert len({(row["format"], row["batch_size"], row["shuffle"], row["part"]) for row in rows}) == len(rows) == 14
    assert all(row["samples_per_second"] > 0 for row in rows)
