"""A small recipe that trains in a second, one of two tasks, and what searches and artifacts of them leave behind."""

import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.datasets.utils import Batch
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.codes import WIDTHS
from dnis_torchrec.blocks.hashing import hash_values
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.cli.settings import SearchCommand
from dnis_torchrec.data.batches import RankingBatch, WholeBatch
from dnis_torchrec.data.parquet import FileSchema
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import Predictions, Task, TrainTask
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import collections
from dnis_torchrec.training import pipeline as late_values
from dnis_torchrec.training.evaluate import evaluate
from examples.models import DeepFM
from tests.reference import pruned, rounded, table_scheme, with_codes

EMBEDDING_DIM = 8
ROWS = {"user": 40, "genre": 12}


def ranked(batch: Batch, num_candidates: int) -> RankingBatch:
    """The samples of a batch as candidates of queries, so many each."""
    queries = torch.arange(batch.labels.numel()) // num_candidates
    return RankingBatch(batch.dense_features, batch.sparse_features, batch.labels, queries=queries)


@dataclass
class Repeatable:
    """A list of batches, fresh at every iteration."""

    batches: list[Batch]

    def __iter__(self):
        return iter(self.batches)


def make_batch(size: int, seed: int, *, empty_bags: bool = True) -> Batch:
    """One single-id feature, one multi-hot feature with empty bags, labels that depend on both."""
    generator = torch.Generator().manual_seed(seed)
    user = (ROWS["user"] ** torch.rand(size, generator=generator)).long().sub(1).clamp(0, ROWS["user"] - 1)
    lengths = torch.randint(0 if empty_bags else 1, 4, (size,), generator=generator)
    genre = torch.randint(0, ROWS["genre"], (int(lengths.sum()),), generator=generator)
    features = KeyedJaggedTensor(
        keys=["user", "genre"],
        values=torch.cat([user, genre]),
        lengths=torch.cat([torch.ones(size, dtype=torch.int64), lengths]),
    )
    dense = torch.rand(size, 4, generator=generator)
    signal = ((user % 3) - 1.0) + dense[:, 0] - 0.5
    labels = (torch.sigmoid(3 * signal) > torch.rand(size, generator=generator)).float()
    return Batch(dense_features=dense, sparse_features=features, labels=labels)


def bag_config(
    name: str, rows: int, dim: int, *features: str, pooling: PoolingType = PoolingType.SUM
) -> EmbeddingBagConfig:
    """A config, read by the feature of its name unless others are given."""
    shape = {"num_embeddings": rows, "embedding_dim": dim, "pooling": pooling}
    return EmbeddingBagConfig(name=name, feature_names=list(features or [name]), **shape)


def make_collection(embedding_dim: int = EMBEDDING_DIM, *, is_weighted: bool = False) -> EmbeddingBagCollection:
    tables = [
        bag_config("user", ROWS["user"], embedding_dim),
        bag_config("genre", ROWS["genre"], embedding_dim, pooling=PoolingType.MEAN),
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def make_model(kind: str, embedding_dim: int = EMBEDDING_DIM) -> nn.Module:
    """torchrec's own models, unmodified."""
    collection = make_collection(embedding_dim)
    if kind == "dlrm":
        return DLRM(collection, 4, [8, embedding_dim], [8, 1])
    if kind == "dlrm_dcn":
        return DLRM_DCN(collection, 4, [8, embedding_dim], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=4)
    return SimpleDeepFMNN(4, collection, hidden_layer_size=8, deep_fm_dimension=4)


class Sigmoidless(nn.Module):
    """SimpleDeepFMNN ends in a sigmoid; this undoes it, as a user would for BCEWithLogitsLoss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.logit(self.model(dense_features, sparse_features), eps=1e-6)


def splits_of(make: Callable[[int, int], Batch], test: list[Batch]) -> DataSplits:
    """The splits, which depend on nothing but the seeds of batches."""
    return DataSplits(
        train=Repeatable([make(64, s) for s in range(10)]),
        validation=Repeatable([make(64, 100 + s) for s in range(3)]),
        selection=Repeatable([make(64, 200 + s) for s in range(2)]),
        test=Repeatable(test),
    )


def make_recipe(
    kind: str = "dlrm", *, seed: int = 0, embedding_dim: int | None = None, optimizer: str = "adam"
) -> Recipe:
    torch.manual_seed(seed)
    model = make_model(kind, embedding_dim or EMBEDDING_DIM)
    return Recipe(
        model=Sigmoidless(model) if kind == "deepfm" else model,
        data=splits_of(make_batch, [make_batch(64, 300 + s) for s in range(2)]),
        loss=nn.BCEWithLogitsLoss(),
        table_optimizer=optimizer,
        table_learning_rate=1e-2,
        dense_learning_rate=1e-2,
    )


def demo(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe function, as the command line finds it: ``tests.tiny:demo``."""
    del data
    return make_recipe(seed=seed, embedding_dim=embedding_dim)


SHARE = 0.5
"""Of the rating in the loss."""
METRICS = {"loss", "click_auc", "click_logloss", "click_ne", "click_calibration", "rating_mse"}


@dataclass
class TwoSidedBatch(WholeBatch):
    """User's bags in `sparse_features`, genres in `candidates`; labels ``(B, 2)``, click and rating."""

    candidates: KeyedJaggedTensor
    weights: Tensor


class TwoTasks(nn.Module):
    """A tower for each prediction on what two collections look up."""

    def __init__(self, embedding_dim: int = EMBEDDING_DIM) -> None:
        super().__init__()
        self.users, self.genres = (
            EmbeddingBagCollection(tables=[bag_config(name, rows, embedding_dim)]) for name, rows in ROWS.items()
        )
        self.towers = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(2 * embedding_dim, 8), nn.Tanh(), nn.Linear(8, 1)) for name in TASKS}
        )

    def forward(self, users: KeyedJaggedTensor, candidates: KeyedJaggedTensor) -> dict[str, Tensor]:
        """``(B, 1)`` for each task, and a probability that the loss does not depend on."""
        pooled = torch.cat([self.users(users).values(), self.genres(candidates).values()], dim=1)
        outputs = {name: tower(pooled) for name, tower in self.towers.items()}
        return outputs | {"share": outputs["click"].sigmoid()}


TASKS = ("click", "rating")


class ClickAndRating(Task):
    """A click and a rating; a sample of weight 0 has no rating."""

    kinds: Mapping[str, str] = {"click": "binary", "rating": "regression"}

    def outputs(self, model: nn.Module, batch: TwoSidedBatch) -> Mapping[str, Tensor]:
        return model(batch.sparse_features, batch.candidates)

    def loss(self, batch: TwoSidedBatch, outputs: Mapping[str, Tensor]) -> Tensor:
        click, rating = (outputs[name].squeeze(1) for name in TASKS)
        of_clicks = binary_cross_entropy_with_logits(click, batch.labels[:, 0])
        known = torch.where(batch.weights > 0, batch.labels[:, 1], 0.0)
        return of_clicks + SHARE * (batch.weights * mse_loss(rating, known, reduction="none")).mean()

    def predictions(self, batch: TwoSidedBatch, outputs: Mapping[str, Tensor]) -> dict[str, Predictions]:
        return {
            "click": Predictions(outputs["click"], batch.labels[:, 0]),
            "rating": Predictions(outputs["rating"], batch.labels[:, 1:], batch.weights),
        }


def two_sided(size: int, seed: int, *, empty_bags: bool = True) -> TwoSidedBatch:
    """Samples of `tests.tiny.make_batch`; some have no rating, a NaN."""
    batch, generator = make_batch(size, seed, empty_bags=empty_bags), torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 3, (size,), generator=generator) / 2
    ratings = torch.where(weights > 0, 3 + batch.labels + batch.dense_features[:, 0], torch.nan)
    users, candidates = batch.sparse_features.split([1, 1])
    return TwoSidedBatch(None, users, torch.stack([batch.labels, ratings], 1), candidates=candidates, weights=weights)


def tasks_make_recipe(*, seed: int = 0, embedding_dim: int | None = None, **fields: Any) -> Recipe:
    torch.manual_seed(seed)
    data = splits_of(two_sided, [two_sided(64, 300), two_sided(63, 301)])
    given = {"loss": ClickAndRating(), "table_learning_rate": 1e-2, "dense_learning_rate": 1e-2, "embedding_l2": 1e-3}
    return Recipe(model=TwoTasks(embedding_dim or EMBEDDING_DIM), data=data, **(given | fields))


def two_tasks(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe function, as the command line finds it: ``tests.tiny:two_tasks``."""
    del data
    return tasks_make_recipe(seed=seed, embedding_dim=embedding_dim, stop_on="click_auc")


def deepfm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe of tests/py with DeepFM, whose first-order weights read the KeyedJaggedTensor themselves."""
    recipe = demo(data, seed=seed, embedding_dim=embedding_dim)
    torch.manual_seed(seed)
    model = DeepFM(make_collection(embedding_dim or EMBEDDING_DIM), tower=(8,))
    nn.init.normal_(model.first_order.weights)
    return Recipe(model=model, data=recipe.data, loss=recipe.loss)


class DotProduct(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        pooled = self.tables(sparse_features)
        return (pooled["user"] * pooled["genre"]).sum(dim=1)


def tables_alone(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe of tests/py with a model that has no dense weights."""
    recipe = demo(data, seed=seed, embedding_dim=embedding_dim)
    torch.manual_seed(seed)
    model = DotProduct(make_collection(embedding_dim or EMBEDDING_DIM))
    return Recipe(model=model, data=recipe.data, loss=recipe.loss)


RECIPES = {"tests.tiny:demo": demo, "tests.tiny:deepfm": deepfm, "tests.tiny:tables_alone": tables_alone}


def write_tiny_artifact(
    path: Path, *, recipe: str = "tests.tiny:demo", forms: tuple[str, ...] = ("mixed_dimension",), codes: bool = False
) -> Path:
    """Prunes a recipe's model at random, or gives it codes, evaluates it, and exports it as it was not rounded yet."""
    built = RECIPES[recipe](None, seed=0)
    (fqn, collection), *_ = collections(built.model).items()
    schemes, tables = {}, {}
    for index, config in enumerate(collection.embedding_bag_configs()):
        rows = config.num_embeddings
        routing = RowRouting.from_map(torch.arange(rows) % 3, 3)
        if index == 0:
            routing = RowRouting(rows, 3, boundaries=torch.tensor([0, rows // 4, rows // 2, rows - 1]))
        retained = torch.rand(3, config.embedding_dim, generator=torch.Generator().manual_seed(index)) < 0.4
        parameter = collection.embedding_bags[config.name].weight
        weight = pruned(parameter.detach() * 5, routing, retained)
        scheme = table_scheme(
            config.name,
            routing,
            retained,
            feature_names=tuple(config.feature_names),
            pooling=config.pooling.value.lower(),
            collection=fqn,
        )
        if codes:
            scheme, weight = with_codes(scheme, seed=index, widths=WIDTHS), parameter.detach() * 5
        schemes[config.name], tables[config.name] = scheme, weight
        parameter.data.copy_(rounded(scheme, weight) if codes else weight)
    task = TrainTask(built.model, built.loss)
    metrics = evaluate(task, built.data.test, built.loss, torch.device("cpu"))
    dense = {key: value for key, value in built.model.state_dict().items() if ".embedding_bags." not in key}
    run = {"recipe": recipe, "seed": 0, "metrics": metrics}
    return write_artifact(tables, MixedDimensionScheme(schemes), path, forms=forms, dense_state=dense, run=run)


QUICK = SearchSettings(num_blocks=3, epochs=1, patience=1)


ROLES = ("--label", "liked", "--ids", "user,item", "--dense", "price", "--bags", "tags", "--time", "day")
"""Of the columns of `write_table`."""


def write_table(path: Path, *, num_rows: int = 6000) -> Path:
    """Clicks as CSV or Parquet, by the ending of the path."""
    random = np.random.default_rng(0)
    users, items = random.integers(0, 40, num_rows), random.integers(0, 90, num_rows)
    tags = [[f"t{item % 5}", f"t{item % 3}"][: item % 3] for item in items]
    frame = pd.DataFrame({"user": users, "item": [f"i{item}" for item in items], "day": np.arange(num_rows)})
    frame["price"] = random.integers(0, 50, num_rows) / 4
    frame["liked"] = (random.random(num_rows) < 0.2 + 0.6 * ((users + items) % 2)).astype(int)
    frame["tags"] = ["|".join(of_row) for of_row in tags] if path.suffix.lower() == ".csv" else tags
    if path.suffix.lower() == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return path


def quick_search(out: Path, **changes: Any) -> SearchCommand:
    """A search of the tiny recipe; `changes` are other fields of its settings."""
    settings = SearchCommand(recipe="tests.tiny:demo", out=out, compression=4.0, epochs=1)
    return dataclasses.replace(settings, **changes)


def files_of(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def read_late() -> Iterator[None]:
    """Has everything read a step late that would be on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_values, "is_read_late", lambda device: True)
        yield


Sample = tuple[float, float, tuple[tuple[int, ...], ...]]
"""Label, query and the bag of each of two features."""


class OneOf(Ranks):
    """A rank of several that has nobody to talk to."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        return values


samples = st.tuples(
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 3).map(float),
    st.tuples(*[st.lists(st.integers(0, 9), max_size=3).map(tuple)] * 2),
)


def to_batch(of: list[Sample], *, weighted: bool) -> RankingBatch:
    bags = [bag for feature in range(2) for _, _, pair in of for bag in (pair[feature],)]
    values = torch.tensor([row for bag in bags for row in bag], dtype=torch.int64)
    features = KeyedJaggedTensor(
        keys=["f", "g"],
        values=values,
        weights=values / 7 if weighted else None,
        lengths=torch.tensor([len(bag) for bag in bags]),
        stride=len(of),
    )
    labels, queries = torch.tensor([label for label, _, _ in of]), torch.tensor([int(query) for _, query, _ in of])
    return RankingBatch(labels.unsqueeze(1) + 2, features, labels, queries)


def to_samples(batch: RankingBatch) -> list[Sample]:
    assert torch.equal(batch.dense_features.squeeze(1), batch.labels + 2)
    features = batch.sparse_features
    if features.weights_or_none() is not None:
        torch.testing.assert_close(features.weights(), features.values() / 7)
    columns = [features[key].to_dense() for key in ("f", "g")]
    pairs = [tuple(tuple(bag.tolist()) for bag in bags) for bags in zip(*columns, strict=True)]
    return list(zip(batch.labels.tolist(), batch.queries.float().tolist(), pairs, strict=True))


COLUMNS = ("y", "x0", "unused", "a", "b", "x1", "tags")
SCHEMA = FileSchema(
    label="y",
    dense=("x0", "x1"),
    single_id={"b": 11, "a": 7},
    multi_hot={"tags": 13},
    log_dense=True,
    text_columns=COLUMNS,
    list_separator=",",
)


@dataclass(frozen=True)
class FileSample:
    """One raw sample; None is a missing value. `y` is unique, so that samples can be told apart."""

    y: float
    x: tuple[float | None, float | None]
    a: str | None
    b: str | None
    tags: tuple[str, ...]


def draw(num_samples: int, seed: int = 0) -> list[FileSample]:
    """Samples with labels 0, 1, 2, ..., missing values and empty bags."""
    random = np.random.default_rng(seed)

    def value(names: str) -> str | None:
        return None if random.random() < 0.2 else str(random.choice(list(names)))

    return [
        FileSample(
            y=float(number),
            x=tuple(None if random.random() < 0.2 else float(random.integers(-2, 9)) for _ in range(2)),
            a=value("pqrstuv"),
            b=value("ABCDE"),
            tags=tuple(str(tag) for tag in random.choice(list("klmno"), random.integers(0, 4))),
        )
        for number in range(num_samples)
    ]


def write_text(path: Path, samples: Sequence[FileSample], *, last_newline: bool = True) -> Path:
    def line(sample: FileSample) -> str:
        x0, x1 = ("" if x is None else str(x) for x in sample.x)
        return "\t".join([str(sample.y), x0, "zzz", sample.a or "", sample.b or "", x1, ",".join(sample.tags)])

    path.write_text("\n".join(map(line, samples)) + "\n" * last_newline)
    return path


def write_parquet(path: Path, samples: Sequence[FileSample], *, row_group: int) -> Path:
    """The samples as Parquet; an empty bag is a missing list in every second row."""
    tags = [list(sample.tags) or (None if number % 2 else []) for number, sample in enumerate(samples)]
    columns = {
        "tags": pa.array(tags, pa.list_(pa.string())),
        "a": [sample.a for sample in samples],
        "b": [sample.b for sample in samples],
        "x0": pa.array([sample.x[0] for sample in samples], pa.float64()),
        "x1": pa.array([sample.x[1] for sample in samples], pa.float64()),
        "y": [sample.y for sample in samples],
    }
    pq.write_table(pa.table(columns), path, row_group_size=row_group)
    return path


def expected(sample: FileSample) -> dict[str, object]:
    """What a sample has to become, by the definitions."""

    def row(value: str | None, num_embeddings: int) -> int:
        return 0 if value is None else 1 + int(hash_values(pa.array([value]))[0]) % (num_embeddings - 1)

    return {
        "dense": [math.log1p(max(x or 0.0, 0.0)) for x in sample.x],
        "b": [row(sample.b, 11)],
        "a": [row(sample.a, 7)],
        "tags": [row(tag, 13) for tag in sample.tags],
    }


def labels(batches: Sequence[Batch]) -> list[list[int]]:
    """The samples of each batch, by their labels."""
    return [batch.labels.int().tolist() for batch in batches]


def contents(batch: Batch) -> dict[int, dict[str, object]]:
    """Label -> the sample as a batch has it."""
    bags = {key: batch.sparse_features[key].to_dense() for key in batch.sparse_features.keys()}  # noqa: SIM118
    return {
        int(label): {
            "dense": batch.dense_features[number].tolist(),
            **{key: bags[key][number].tolist() for key in bags},
        }
        for number, label in enumerate(batch.labels.tolist())
    }


class AllocatedPeak(TorchDispatchMode):
    """The most bytes that tensors made inside the block held at one time, but for temporaries within one operator."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._holders: dict[int, int] = {}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._known or not size or tensor.is_meta:
            return
        if not self._holders.get(address):
            self._now += size
            self.peak = max(self.peak, self._now)
        self._holders[address] = self._holders.get(address, 0) + 1
        weakref.finalize(tensor, self._release, address, size).atexit = False

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self._now -= size


def batches_of_day(day: int, number: int = 30) -> Iterator[Batch]:
    """A stream: a generator, which can be read once."""
    return (make_batch(64, 1000 * day + index) for index in range(number))


def stream(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe on the stream of a day, ``tests.tiny:stream``."""
    return dataclasses.replace(demo(data, seed=seed, embedding_dim=embedding_dim), data=batches_of_day(0))


def next_day(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The same of the day after it, ``tests.tiny:next_day``."""
    return dataclasses.replace(demo(data, seed=seed, embedding_dim=embedding_dim), data=batches_of_day(1))


def two_days(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The same of both, ``tests.tiny:two_days``."""
    batches = itertools.chain(batches_of_day(0), batches_of_day(1))
    return dataclasses.replace(demo(data, seed=seed, embedding_dim=embedding_dim), data=batches)
