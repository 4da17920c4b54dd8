"""A data frame as batches: columns of any type become dense features, rows of tables and labels, in
four splits; and a recipe of it, for who has no model yet."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypedDict

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor, nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check, check_known, describe, visible
from dnis_torchrec.data.batches import Bags, InMemoryBatches, features_of_samples, split_rows
from dnis_torchrec.data.columns import (
    Frame,
    Ids,
    frame_of,
    id_bags_of,
    ids_of,
    numbers_of,
    order_in_time,
    warn,
)
from dnis_torchrec.data.files import NotNegative, Positive, parse_json
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.ranks import rank_of

UNSEEN_ROW = 0
"""The row of all ids that no training sample has, in every table."""
SMALLEST_SPREAD = 1e-6
"""A dense feature whose spread is a smaller share of its size counts as constant: float32 cannot
hold the differences."""
_SHOWN_IDS = 5
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FrameSplits(DataSplits):
    """The splits of a frame, see `DataSplits.from_frame`."""

    encoder: FrameEncoder
    is_binary: bool
    columns: pd.DataFrame = field(compare=False)
    """What became of every column, as it was printed."""


def splits_of_frame(
    frame: Frame,
    label: Hashable,
    dense: Sequence[Hashable],
    ids: Sequence[str],
    bags: Sequence[str],
    time: Hashable | None,
    batch_size: int,
    seed: int,
) -> FrameSplits:
    """See `DataSplits.from_frame`."""
    for name, value in {"dense": dense, "ids": ids, "bags": bags}.items():
        if isinstance(value, str):
            raise TypeError(describe(name, "a list of columns", repr(value), f"give [{value!r}]"))
    _check_names(label, list(dense), [*ids, *bags])
    times = [] if time is None else [time]
    frame = frame_of(frame, [label, *dense, *ids, *bags, *times])
    labels, columns = _labels_of(frame[label]), _Columns(frame, dense, ids, bags)
    parts: Sequence[Tensor] = split_rows(len(frame), seed=seed)
    if time is not None:
        order = torch.from_numpy(order_in_time(frame[time]))
        parts = order.split([len(part) for part in parts])
    encoder = FrameEncoder.learn(columns, np.isin(np.arange(len(frame)), parts[0].numpy()))
    dense_values, single, of_bags = encoder.tensors(columns)
    splits = {
        name: InMemoryBatches(
            dense_values,
            single,
            torch.from_numpy(labels.astype(np.float32)),
            feature_names=list(ids),
            multi_hot=dict(zip(bags, of_bags, strict=True)),
            rows=rows,
            batch_size=batch_size,
            shuffle=name in ("train", "validation"),
            seed=seed,
        )
        for name, rows in zip(("train", "validation", "selection", "test"), parts, strict=True)
    }
    rows = dict(zip(ids, single[parts[1]].unbind(1), strict=True))
    rows |= {name: bag.select(parts[1]).values for name, bag in zip(bags, of_bags, strict=True)}
    facts = _facts_of(columns, encoder, rows)
    facts |= {str(name): ("time", "", 0.0, "", "") for name in times if str(name) not in facts}
    facts[str(label)] = ("label", "", 0.0, "", _note_of_label(label, labels))
    names = ["kind", "rows", "missing", "unseen in validation", "note"]
    table = pd.DataFrame.from_dict(facts, orient="index", columns=names)
    if rank_of() == 0:
        text = f"{len(frame)} samples\n{table.to_string()}"
        logger.info(text)
        if not logger.isEnabledFor(logging.INFO):
            sys.stderr.write(visible(f"{text}\n"))
    is_binary = bool(np.isin(labels, (0, 1)).all())
    return FrameSplits(**splits, encoder=encoder, is_binary=is_binary, columns=table)


def _note_of_label(label: Hashable, labels: np.ndarray) -> str:
    """The loss that labels ask for, and why."""
    values = np.unique(labels)
    if np.isin(values, (0, 1)).all():
        return "BCEWithLogitsLoss: all labels are 0 or 1"
    if len(values) == 2:
        words = "map them to 0 and 1 if they are classes"
        warn(f"label column {label!r}: two values, {values[0]:g} and {values[1]:g}: {words}")
    span = f"{values[0]:g} to {values[-1]:g}"
    return f"MSELoss: {len(values)} values from {span}, not 0 and 1"


def _facts_of(
    columns: _Columns, encoder: FrameEncoder, rows: Mapping[str, Tensor]
) -> dict[str, tuple[Any, ...]]:
    """What is said of each column; `rows` are those that the validation split looks up."""
    facts: dict[str, tuple[Any, ...]] = {
        str(name): ("dense", "", np.isnan(values).mean(), "", "")
        for name, values in columns.dense.items()
    }
    for name, ids in (columns.single | columns.bags).items():
        kind, share = "ids", (ids.codes < 0).mean()
        if name in columns.bags:
            kind, share = "bags", (ids.lengths == 0).mean()
        share_unseen = float((rows[name] == UNSEEN_ROW).sum()) / max(1, len(rows[name]))
        note = ""
        if kind == "ids" and len(ids.texts) == columns.num_rows:
            note = "an id of its own in every row"
            warn(f"column {name!r}: {note}: there is nothing to learn about any of them")
        if ids.spellings:
            note = "{!r} and {!r} are one id".format(*ids.spellings)
            warn(f"column {name!r}: {note}; put a letter in front if they are two")
        facts[name] = (kind, encoder.num_embeddings[name], share, share_unseen, note)
    for name in (name for name, row in facts.items() if row[2] == 1):
        warn(f"column {name!r}: missing in all rows")
    return facts


class _Settings(TypedDict):
    """What stands beside the ids in an encoder's file."""

    dense: list[tuple[str | int, float, float]]
    features: list[tuple[str, NotNegative]]
    bags: list[str]
    model: str | None
    embedding_dim: Positive | None


@dataclass(frozen=True, eq=False)
class FrameEncoder:
    """What turns rows of a frame into what a model reads, as learned of training samples."""

    scales: Mapping[Hashable, tuple[float, float]]
    """Dense column -> mean and deviation."""
    rows: Mapping[str, Mapping[str | None, int]]
    """Feature -> text of an id -> its row, in the order of rows."""
    bags: tuple[str, ...]
    """The features that have any number of ids."""
    model: str | None = None
    """Name of the model that `recipe_from_frame` built, with tables of `embedding_dim`."""
    embedding_dim: int | None = None

    @classmethod
    def learn(cls, columns: _Columns, is_train: np.ndarray) -> Self:
        """Learns scales and rows of training samples."""
        scales = {name: _scale_of(name, of[is_train]) for name, of in columns.dense.items()}
        features = columns.single | columns.bags
        rows = {name: _rows_of(ids, is_train) for name, ids in features.items()}
        return cls(scales, rows, tuple(columns.bags))

    @property
    def num_embeddings(self) -> dict[str, int]:
        """Feature -> rows of its table."""
        return {name: len(rows) + 1 for name, rows in self.rows.items()}

    @property
    def num_dense(self) -> int:
        """Dense features; one of zeros where the frame has none."""
        return max(1, len(self.scales))

    def __call__(self, frame: Frame) -> tuple[Tensor, KeyedJaggedTensor]:
        """What a model reads of a frame, such as new samples to be served."""
        names, single = list(self.rows), [n for n in self.rows if n not in self.bags]
        frame = frame_of(frame, [*self.scales, *names])
        columns = _Columns(frame, list(self.scales), single, self.bags)
        for name, ids in (columns.single | columns.bags).items():
            codes = ids.codes[ids.codes >= 0]
            is_new = np.array([text not in self.rows[name] for text in ids.texts], bool)[codes]
            if is_new.sum() * 2 > len(codes):
                new = [ids.texts[code] for code in dict.fromkeys(codes[is_new].tolist())]
                examples = ", ".join(map(repr, new[:_SHOWN_IDS]))
                number = f"{is_new.sum()} of {len(codes)} ids were not in the training samples"
                warn(f"column {name!r}: {number}, such as {examples}: they share one row")
        dense, ids_of_one, bags = self.tensors(columns)
        return dense, features_of_samples(names, ids_of_one, bags)

    def tensors(self, columns: _Columns) -> tuple[Tensor, Tensor, list[Bags]]:
        """Dense features, ids of one each and bags of ids."""
        dense = [
            torch.from_numpy(np.nan_to_num((columns.dense[name] - mean) / deviation)).float()
            for name, (mean, deviation) in self.scales.items()
        ]
        single = [self._look_up(name, ids) for name, ids in columns.single.items()]
        bags = [
            Bags.of_lengths(self._look_up(name, ids), torch.from_numpy(ids.lengths))
            for name, ids in columns.bags.items()
        ]
        return (
            torch.stack(dense, dim=1) if dense else torch.zeros(columns.num_rows, 1),
            torch.stack(single, dim=1) if single else torch.zeros(columns.num_rows, 0),
            bags,
        )

    def _look_up(self, feature: str, ids: Ids) -> Tensor:
        rows = [self.rows[feature].get(text, UNSEEN_ROW) for text in (None, *ids.texts)]
        return torch.from_numpy(np.array(rows, np.int32)[ids.codes + 1])

    def to_bytes(self) -> bytes:
        """An Arrow file: the ids of one feature after the other, settings as JSON beside them."""
        for name in self.scales:
            is_fit = isinstance(name, str | int)
            check(is_fit, f"dense column {name!r}", "text or an integer as its name", repr(name))
        settings: _Settings = {
            "dense": [(name, *scale) for name, scale in self.scales.items()],  # type: ignore[misc]
            "features": [(name, len(rows)) for name, rows in self.rows.items()],
            "bags": list(self.bags),
            "model": self.model,
            "embedding_dim": self.embedding_dim,
        }
        texts = pa.array([text for rows in self.rows.values() for text in rows], pa.large_string())
        table = pa.table({"id": texts}).replace_schema_metadata({"encoder": json.dumps(settings)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
        return sink.getvalue().to_pybytes()

    @classmethod
    def from_bytes(cls, content: bytes, place: str) -> Self:
        """The encoder of such a file, which may be somebody else's."""
        try:
            table = pa.ipc.open_file(content).read_all()
            table.validate(full=True)
            texts = table["id"].cast(pa.large_string()).to_pylist()
            text = (table.schema.metadata or {})[b"encoder"]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError, OSError) as error:
            raise ValueError(describe(place, "the Arrow file of an encoder", str(error))) from error
        settings = parse_json(text, _Settings, place)
        rows, first = {}, 0
        for name, number in settings["features"]:
            rows[name] = {t: row for row, t in enumerate(texts[first : first + number], 1)}
            check(len(rows[name]) == number, place, f"{number} ids of {name!r}", len(rows[name]))
            first += number
        check(first == len(texts), place, f"{first} ids", len(texts))
        scales: dict[Hashable, tuple[float, float]]
        scales = {name: (mean, deviation) for name, mean, deviation in settings["dense"]}
        deviations = [deviation for _, deviation in scales.values()]
        check(min(deviations, default=1) > 0, place, "deviations above 0", deviations)
        bags, dim = tuple(settings["bags"]), settings["embedding_dim"]
        return cls(scales, rows, bags, settings["model"], dim)


class _Columns:
    """Columns of a frame, before anything is learned of them."""

    def __init__(
        self,
        frame: pd.DataFrame,
        dense: Sequence[Hashable],
        ids: Sequence[str],
        bags: Sequence[str],
    ) -> None:
        self.num_rows = len(frame)
        self.single = {name: ids_of(frame[name]) for name in ids}
        self.bags = {name: id_bags_of(frame[name]) for name in bags}
        self.dense = {name: numbers_of(frame[name]) for name in dense}


def _scale_of(name: Hashable, values: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of a dense feature; 1 where it hardly varies."""
    values = values[~np.isnan(values)]
    if not len(values):
        return 0.0, 1.0
    mean, deviation = float(values.mean()), float(values.std())
    if deviation > SMALLEST_SPREAD * np.abs(values).max():
        return mean, deviation
    words = f"not divided by its spread, {deviation:.2g} around {mean:.9g}"
    warn(f"dense column {name!r}: {words}; leave it out, or take off its mean")
    return mean, 1.0


def _rows_of(ids: Ids, is_train: np.ndarray) -> dict[str | None, int]:
    """Text of an id -> its row: row 1 is that of the most frequent one, missing ids have one,
    too."""
    texts = (None, *ids.texts)
    codes = ids.codes[np.repeat(is_train, ids.lengths)]
    counts = np.bincount(codes + 1, minlength=len(texts))
    order = np.argsort(-counts, kind="stable")
    return {texts[code]: row for row, code in enumerate(order[counts[order] > 0], UNSEEN_ROW + 1)}


def _check_names(label: Hashable, dense: list[Hashable], features: list[str]) -> None:
    remedy = "tables are made of them"
    check(bool(features), "from_frame", "at least one column in ids or bags", "none", remedy)
    requirement, remedy = "a name of a feature: text without a dot", "rename it"
    for name in features:
        is_fit = isinstance(name, str) and name != "" and "." not in name
        check(is_fit, f"column {name!r}", requirement, repr(name), remedy)
    kinds: dict[str, list[Any]] = {"ids and bags": list(features), "dense": dense}
    for kind, names in kinds.items():
        twice = [name for name in names if names.count(name) > 1]
        check(not twice, f"{kind} columns", "every column once", repr(twice[:1])[1:-1])
    is_apart = label not in (*dense, *features)
    check(is_apart, f"column {label!r}", "a label that is no feature", "both", "leave it out")


def _labels_of(column: pd.Series) -> np.ndarray:
    labels, place = numbers_of(column), f"label column {column.name!r}"
    absent = np.flatnonzero(np.isnan(labels)).tolist()
    number = f"{len(absent)} missing, the first in row {next(iter(absent), 0)}"
    check(not absent, place, "a label in every row", number, "leave those rows out")
    value, remedy = f"{labels[0]:g} in all rows", "there is nothing to predict"
    check(not (labels == labels[0]).all(), place, "labels that differ", value, remedy)
    return labels


EMBEDDING_DIM = 64
"""D of all tables, unless told otherwise."""
INIT_STD = 0.01
"""Standard deviation of the initial weights of tables."""
DENSE_LAYERS, OVER_LAYERS = [128], [128, 64]
"""Hidden sizes of the networks in front of dense features, and behind the tables."""


def recipe_from_frame(
    frame: Frame,
    *,
    model: str,
    label: Hashable,
    dense: Sequence[Hashable] = (),
    ids: Sequence[str] = (),
    bags: Sequence[str] = (),
    time: Hashable | None = None,
    embedding_dim: int | None = None,
    batch_size: int = 1024,
    seed: int = 0,
) -> Recipe:
    """Makes a recipe of a data frame, with one of TorchRec's models as it is.

    Every column of ids or bags has a table of its own, with SUM pooling; the row of ids that
    training never saw is zero. Learning rates and L2 are the defaults of `Recipe`: replace them by
    ``dataclasses.replace``. The loss is BCEWithLogitsLoss where all labels are 0 or 1, else
    MSELoss.

    Args:
        frame: see `DataSplits.from_frame`, as all columns.
        model: ``"dlrm"``, ``"dlrm_dcn"``, or ``"deepfm"``, torchrec's SimpleDeepFMNN without its
            last sigmoid.
        label: column of what the model predicts: 0 and 1, or any numbers.
        dense: columns of numbers, which become dense features.
        ids: columns with one id a row.
        bags: columns with any number of ids a row.
        time: column to split by, or None to split at random.
        embedding_dim: columns of every table; 64 if None.
        batch_size: samples in a batch of every split.
        seed: of the split, the order of the batches and the initial weights.

    Returns:
        The recipe; its data are `FrameSplits`.

    Raises:
        ValueError: as `DataSplits.from_frame`; also for an unknown model, or an `embedding_dim`
            below 1.
        TypeError: for the reasons of `DataSplits.from_frame`.
        FileNotFoundError: if there is no such file.

    Example:
        >>> import pandas as pd
        >>> columns = {"user": list("abcd") * 10, "item": list("vwxyz") * 8}
        >>> frame = pd.DataFrame(columns | {"liked": [0, 1] * 20})
        >>> recipe = recipe_from_frame(frame, model="dlrm", label="liked", ids=["user", "item"])
        >>> type(recipe.model).__name__, recipe.loss, recipe.data.encoder.num_embeddings
        ('DLRM', BCEWithLogitsLoss(), {'user': 5, 'item': 6})
    """
    check_known("model", model, MODELS)
    dim = EMBEDDING_DIM if embedding_dim is None else embedding_dim
    check(dim >= 1, "embedding_dim", "an integer >= 1", dim)
    columns: Any = {"label": label, "dense": dense, "ids": ids, "bags": bags, "time": time}
    data = DataSplits.from_frame(frame, **columns, batch_size=batch_size, seed=seed)
    encoder = replace(data.encoder, model=model, embedding_dim=dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = model_of(encoder)
    data = replace(data, encoder=encoder)
    loss = nn.BCEWithLogitsLoss() if data.is_binary else nn.MSELoss()
    return Recipe(model=network, data=data, loss=loss)


def model_of(encoder: FrameEncoder, device: str = "cpu") -> nn.Module:
    """The model that an encoder names, with tables on the device."""
    name, dim = str(encoder.model), int(encoder.embedding_dim or 0)
    check_known("model", name, MODELS)
    return MODELS[name](_tables(encoder.num_embeddings, dim, device), dim, encoder.num_dense)


def _tables(num_embeddings: Mapping[str, int], dim: int, device: str) -> EmbeddingBagCollection:
    """One table a feature; its name is no attribute that a module has, as ``"type"`` is."""
    tables = [
        EmbeddingBagConfig(rows, dim, f"{feature}_table", feature_names=[feature])
        for feature, rows in num_embeddings.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device(device))
    with torch.no_grad():
        for bag in collection.embedding_bags.values():
            bag.weight.normal_(std=INIT_STD)[UNSEEN_ROW] = 0
    return collection


def _dlrm(tables: EmbeddingBagCollection, dim: int, num_dense: int) -> nn.Module:
    return DLRM(tables, num_dense, [*DENSE_LAYERS, dim], [*OVER_LAYERS, 1])


def _dlrm_dcn(tables: EmbeddingBagCollection, dim: int, num_dense: int) -> nn.Module:
    return DLRM_DCN(tables, num_dense, [*DENSE_LAYERS, dim], [*OVER_LAYERS, 1], 2, 32)


def _deepfm(tables: EmbeddingBagCollection, dim: int, num_dense: int) -> nn.Module:
    model = SimpleDeepFMNN(num_dense, tables, DENSE_LAYERS[0], OVER_LAYERS[-1])
    # Behind it comes a sigmoid, and losses here take logits.
    model.over_arch.model = model.over_arch.model[:1]
    return model


MODELS: Mapping[str, Callable[[EmbeddingBagCollection, int, int], nn.Module]] = {
    "dlrm": _dlrm,
    "dlrm_dcn": _dlrm_dcn,
    "deepfm": _deepfm,
}
"""Name -> what builds a model of its tables, their D and the number of dense features."""
