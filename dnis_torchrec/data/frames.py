"""A data frame as batches: columns of any type become dense features, rows of tables and labels, in
four splits; and a recipe of it, for who has no model yet."""

from __future__ import annotations

import gzip
import math
import os
import re
import string
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from pandas.api import types
from torch import Tensor, nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check, check_known, describe, nearest
from dnis_torchrec.data.batches import Bags, InMemoryBatches, split_rows
from dnis_torchrec.data.recipe import DataSplits, Recipe

Frame: TypeAlias = "pd.DataFrame | str | os.PathLike[str]"

SEPARATOR = "|"
"""Between the ids of a bag that is given as text, as a CSV file has to."""
LARGEST_NUMBER = 1e30
"""Numbers below it fit into float32."""

_DAMAGED = (
    pa.ArrowInvalid,
    pd.errors.ParserError,
    pd.errors.EmptyDataError,
    UnicodeDecodeError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
)
"""What readers raise of files that are damaged or of another kind."""
_WHOLE_FLOAT = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0")


@dataclass(frozen=True, kw_only=True)
class FrameColumns:
    """Which columns of a frame are what."""

    label: Hashable
    dense: tuple[Hashable, ...]
    ids: tuple[str, ...]
    bags: tuple[str, ...]
    time: Hashable | None

    def __post_init__(self) -> None:
        features = (*self.ids, *self.bags)
        check(
            bool(features),
            "from_frame",
            "at least one column in ids or bags",
            "none",
            "tables are made of them",
        )
        for name in features:
            is_fit = isinstance(name, str) and name != "" and "." not in name
            remedy = "rename it, as frame.rename(columns={...}) does"
            check(
                is_fit,
                f"column {name!r}",
                "a name of a feature: text without a dot",
                repr(name),
                remedy,
            )
        for kind, names in (("ids and bags", features), ("dense", self.dense)):
            twice = [name for name in names if names.count(name) > 1]
            check(not twice, f"{kind} columns", "every column once", repr(twice[:1])[1:-1])
        is_leaked = self.label in (*self.dense, *features)
        check(
            not is_leaked,
            f"column {self.label!r}",
            "a label that is no feature",
            "both",
            "leave it out of them",
        )

    @property
    def features(self) -> tuple[str, ...]:
        """Of the tables, in the order of the KJT's keys."""
        return (*self.ids, *self.bags)

    @property
    def all(self) -> tuple[Hashable, ...]:
        """Every column that is needed, each once."""
        time = () if self.time is None else (self.time,)
        return tuple(dict.fromkeys((self.label, *self.dense, *self.features, *time)))


def names_of(place: str, given: Sequence[Any]) -> tuple[Any, ...]:
    """Returns names of columns as a tuple."""
    if isinstance(given, str):
        raise TypeError(describe(place, "a list of columns", repr(given), f"give [{given!r}]"))
    return tuple(given)


def frame_of(source: Frame, columns: Sequence[Hashable], texts: Iterable[str]) -> pd.DataFrame:
    """A frame, or the columns of a file that are needed."""
    if isinstance(source, pd.DataFrame):
        frame, place = source, "frame"
    elif isinstance(source, str | os.PathLike):
        place = os.fspath(source)
        frame = _file(place, columns, set(texts))
    else:
        requirement, remedy = (
            "a pandas DataFrame or the path of a file",
            "call its to_pandas() if it has one",
        )
        raise TypeError(describe("frame", requirement, type(source).__name__, remedy))
    _check_columns(place, frame.columns, columns)
    for name in columns:
        found = list(frame.columns).count(name)
        check(
            found == 1,
            f"column {name!r}",
            "a name that one column has",
            f"{found} of them",
            "rename the others",
        )
    check(len(frame) > 0, place, "at least one row", "none")
    return frame.loc[:, list(columns)].reset_index(drop=True)


def _file(place: str, columns: Sequence[Hashable], texts: set[str]) -> pd.DataFrame:
    kinds, is_folder = PurePath(place).suffixes[-2:], os.path.isdir(place)
    if not os.path.exists(place):
        raise FileNotFoundError(describe(place, "a file", "none", "check the path"))
    is_known = is_folder or ".csv" in kinds or kinds[-1:] in ([".parquet"], [".pq"])
    received = "".join(kinds) or "no ending"
    check(
        is_known,
        place,
        "a file that ends in .parquet or .csv",
        received,
        "read it, and give its frame",
    )
    try:
        return (
            _csv(place, columns, texts)
            if ".csv" in kinds and not is_folder
            else _parquet(place, columns)
        )
    except _DAMAGED as error:
        requirement, told = (
            "whole files of Parquet, or one of CSV in UTF-8",
            str(error).split("\n")[0],
        )
        raise ValueError(
            describe(place, requirement, told, "read it, and give its frame")
        ) from error


def _csv(place: str, columns: Sequence[Hashable], texts: set[str]) -> pd.DataFrame:
    _check_columns(place, pd.read_csv(place, nrows=0).columns, columns)
    return pd.read_csv(
        place, usecols=list(columns), dtype=dict.fromkeys(texts, "string"), low_memory=False
    )


def _parquet(place: str, columns: Sequence[Hashable]) -> pd.DataFrame:
    files = ds.dataset(place, format="parquet")
    _check_columns(place, files.schema.names, columns)
    return files.to_table(columns=list(columns)).to_pandas(types_mapper=pd.ArrowDtype)


def _check_columns(place: str, there: Iterable[Hashable], wanted: Sequence[Hashable]) -> None:
    known = list(there)
    for name in wanted:
        if name not in known:
            raise ValueError(
                describe(place, f"a column {name!r}", "none", nearest(str(name), map(str, known)))
            )


def numbers_of(column: pd.Series) -> np.ndarray:
    """A column as numbers; booleans are 0 and 1."""
    is_plain = types.is_numeric_dtype(column.dtype) and not types.is_complex_dtype(column.dtype)
    values, remedy = (
        column if is_plain else column.astype(object),
        "map it to numbers, or name it in ids",
    )
    try:
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError, OverflowError) as error:
        row = next(row for row, value in enumerate(values) if not _is_number(value))
        place = f"column {column.name!r}, row {row}"
        raise ValueError(describe(place, "a number", repr(values.iloc[row]), remedy)) from error
    bad = np.flatnonzero(np.abs(numbers) >= LARGEST_NUMBER)
    if len(bad):
        place = f"column {column.name!r}, row {bad[0]}"
        raise ValueError(
            describe(place, f"a number below {LARGEST_NUMBER:g}", numbers[bad[0]], "clean the data")
        )
    return numbers


def _is_number(value: Any) -> bool:
    try:
        return pd.isna(value) is True or math.isfinite(float(value)) or True
    except (TypeError, ValueError, OverflowError):
        return False


def labels_of(column: pd.Series) -> np.ndarray:
    """A column of labels."""
    labels, place = numbers_of(column), f"label column {column.name!r}"
    missing = np.flatnonzero(np.isnan(labels))
    received = f"{len(missing)} missing, the first in row {missing[0]}" if len(missing) else ""
    check(not len(missing), place, "a label in every row", received, "leave those rows out")
    is_one = bool((labels == labels[0]).all())
    check(
        not is_one,
        place,
        "labels that differ",
        f"{labels[0]:g} in all rows",
        "there is nothing to predict",
    )
    return labels


def order_in_time(column: pd.Series) -> np.ndarray:
    """The rows from the earliest to the latest; those of one time keep their order."""
    place, remedy = f"time column {column.name!r}", "convert it, as pd.to_datetime does"
    missing = int(column.isna().sum())
    check(missing == 0, place, "a time in every row", f"{missing} missing", "leave those rows out")
    if not types.is_numeric_dtype(column.dtype):
        try:
            column = pd.to_datetime(column.astype(object), format="ISO8601", utc=True)
        except (TypeError, ValueError) as error:
            requirement = "numbers, dates or texts as ISO 8601 has them"
            raise ValueError(describe(place, requirement, str(error), remedy)) from error
    return column.argsort(kind="stable").to_numpy(copy=True)


@dataclass(frozen=True, eq=False)
class Ids:
    """Entries of a column."""

    codes: np.ndarray
    texts: Sequence[str]


def ids_of(column: pd.Series) -> Ids:
    """A column with one id a row, of any type. Python looks at each distinct value once."""
    try:
        codes, values = pd.factorize(column)
    except (TypeError, NotImplementedError) as error:
        place, remedy = f"column {column.name!r}", "name it in bags"
        raise ValueError(describe(place, "one id in every row", "lists", remedy)) from error
    merged, texts = pd.factorize(np.array([text_of(value) for value in values], dtype=object))
    return Ids(np.append(merged, -1)[codes], texts)


def text_of(value: Any) -> str | None:
    """The text by which an id is known, whatever type its column has."""
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else repr(float(value))
    if isinstance(value, datetime) and value.tzinfo is not None:
        return pd.Timestamp(value).tz_convert("UTC").isoformat()
    if isinstance(value, datetime):
        return pd.Timestamp(value).isoformat()
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    text = text.strip(string.whitespace)
    whole = _WHOLE_FLOAT.fullmatch(text)
    return (whole[1] if whole else text) or None


def id_bags_of(column: pd.Series) -> tuple[Ids, np.ndarray]:
    """A column with any number of ids a row."""
    entries = column.reset_index(drop=True)
    kind = entries.dtype
    if not (isinstance(kind, pd.ArrowDtype) and pa.types.is_nested(kind.pyarrow_dtype)):
        split = [
            value.split(SEPARATOR) if isinstance(value, str) else value
            for value in entries.astype(object)
        ]
        entries = pd.Series(split, dtype=object)
    entries = entries.explode()
    try:
        found = ids_of(entries)
    except ValueError as error:
        place = f"column {column.name!r}"
        raise ValueError(
            describe(place, "lists of ids", "lists of lists", "flatten them")
        ) from error
    is_there = found.codes >= 0
    lengths = np.bincount(entries.index.to_numpy()[is_there], minlength=len(column))
    return Ids(found.codes[is_there], found.texts), lengths


UNSEEN_ROW = 0
"""The row of all ids that no training sample has, in every table."""


@dataclass(frozen=True, kw_only=True)
class FrameSplits(DataSplits):
    """The splits of a frame, see `DataSplits.from_frame`."""

    encoder: FrameEncoder
    is_binary: bool


def splits_of_frame(
    frame: Frame,
    *,
    label: Hashable,
    dense: Sequence[Hashable],
    ids: Sequence[str],
    bags: Sequence[str],
    time: Hashable | None,
    batch_size: int,
    seed: int,
) -> FrameSplits:
    """See `DataSplits.from_frame`."""
    lists = {
        "dense": names_of("dense", dense),
        "ids": names_of("ids", ids),
        "bags": names_of("bags", bags),
    }
    columns = FrameColumns(label=label, time=time, **lists)
    frame = frame_of(frame, columns.all, columns.features)
    labels, parsed = labels_of(frame[columns.label]), _Parsed.of(frame, columns)
    splits = _split(frame, columns.time, seed)
    encoder = FrameEncoder(columns, parsed, splits[0])
    encoded, shuffled = encoder.encoded(parsed), (True, True, False, False)
    train, validation, selection, test = (
        encoded.batches(
            torch.from_numpy(labels.astype(np.float32)),
            rows=rows,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
        )
        for rows, shuffle in zip(splits, shuffled, strict=True)
    )
    is_binary = bool(np.isin(labels, (0, 1)).all())
    return FrameSplits(
        train=train,
        validation=validation,
        selection=selection,
        test=test,
        encoder=encoder,
        is_binary=is_binary,
    )


def _split(frame: pd.DataFrame, time: Hashable | None, seed: int) -> Sequence[Tensor]:
    parts = split_rows(len(frame), seed=seed)
    if time is None:
        return parts
    order = torch.from_numpy(order_in_time(frame[time]))
    return order.split([len(part) for part in parts])


class FrameEncoder:
    """What turns rows of a frame into what a model reads, as learned of training samples."""

    def __init__(self, columns: FrameColumns, parsed: _Parsed, training: Tensor) -> None:
        chosen = np.zeros(parsed.num_rows, bool)
        chosen[training.numpy()] = True
        self._columns = columns
        self._scaled = {name: _Scaled(numbers[chosen]) for name, numbers in parsed.dense.items()}
        self._rows = {name: _Rows(feature, chosen) for name, feature in parsed.features.items()}
        self.num_embeddings = {name: len(rows) for name, rows in self._rows.items()}
        self.num_dense = max(1, len(self._scaled))

    def __call__(self, frame: Frame) -> tuple[Tensor, KeyedJaggedTensor]:
        """What a model reads of a frame, such as new samples to be served."""
        columns = self._columns
        parsed = _Parsed.of(
            frame_of(frame, (*columns.dense, *columns.features), columns.features), columns
        )
        labels, all_rows = torch.zeros(parsed.num_rows), parsed.num_rows
        batches = self.encoded(parsed).batches(
            labels, rows=None, batch_size=all_rows, shuffle=False, seed=0
        )
        batch = next(iter(batches))
        return batch.dense_features, batch.sparse_features

    def encoded(self, parsed: _Parsed) -> _Encoded:
        """The rows as tensors."""
        dense = [scaled(parsed.dense[name]) for name, scaled in self._scaled.items()]
        rows = {name: self._rows[name](feature.ids) for name, feature in parsed.features.items()}
        lengths = {name: feature.lengths for name, feature in parsed.features.items()}
        single = [name for name, of_bags in lengths.items() if of_bags is None]
        bags = {name: of_bags for name, of_bags in lengths.items() if of_bags is not None}
        nothing = torch.zeros(parsed.num_rows, 1)
        return _Encoded(
            dense=torch.stack(dense, dim=1) if dense else nothing,
            ids=torch.stack([rows[name] for name in single], dim=1)
            if single
            else nothing[:, :0].int(),
            feature_names=tuple(single),
            multi_hot={
                name: Bags.of_lengths(rows[name], torch.from_numpy(of_bags))
                for name, of_bags in bags.items()
            },
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Encoded:
    """Samples as tensors, see `InMemoryBatches`."""

    dense: Tensor
    ids: Tensor
    feature_names: tuple[str, ...]
    multi_hot: Mapping[str, Bags]

    def batches(
        self, labels: Tensor, *, rows: Tensor | None, batch_size: int, shuffle: bool, seed: int
    ) -> InMemoryBatches:
        return InMemoryBatches(
            self.dense,
            self.ids,
            labels,
            feature_names=self.feature_names,
            multi_hot=self.multi_hot,
            rows=rows,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
        )


@dataclass(frozen=True, eq=False)
class _Feature:
    """Ids of all rows, one after the other, and how many each row has; None of one each."""

    ids: Ids
    lengths: np.ndarray | None

    def codes_of(self, chosen: np.ndarray) -> np.ndarray:
        """Of the rows for which `chosen`, ``(n,)`` bool, holds."""
        return self.ids.codes[chosen if self.lengths is None else np.repeat(chosen, self.lengths)]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Parsed:
    """Columns of a frame, before anything is learned of them."""

    num_rows: int
    dense: Mapping[Hashable, np.ndarray]
    features: Mapping[str, _Feature]

    @classmethod
    def of(cls, frame: pd.DataFrame, columns: FrameColumns) -> _Parsed:
        single = {name: _Feature(ids_of(frame[name]), None) for name in columns.ids}
        bags = {name: _Feature(*id_bags_of(frame[name])) for name in columns.bags}
        dense = {name: numbers_of(frame[name]) for name in columns.dense}
        return cls(num_rows=len(frame), dense=dense, features=single | bags)


class _Scaled:
    """A dense feature: mean 0 and variance 1 over the training samples, 0 where a number is
    missing."""

    def __init__(self, training: np.ndarray) -> None:
        known = training[~np.isnan(training)]
        self._mean = float(known.mean()) if len(known) else 0.0
        self._deviation = (float(known.std()) if len(known) else 0.0) or 1.0

    def __call__(self, numbers: np.ndarray) -> Tensor:
        """``(n,)`` float32."""
        return torch.from_numpy(np.nan_to_num((numbers - self._mean) / self._deviation)).float()


class _Rows:
    """Which row of a table an id has: row 1 is that of the most frequent one. Missing is an id like
    any other."""

    def __init__(self, feature: _Feature, chosen: np.ndarray) -> None:
        names = (None, *feature.ids.texts)
        counts = np.bincount(feature.codes_of(chosen) + 1, minlength=len(names))
        order = np.argsort(-counts, kind="stable")
        self._rows = {
            names[index]: row for row, index in enumerate(order[counts[order] > 0], UNSEEN_ROW + 1)
        }

    def __len__(self) -> int:
        """N."""
        return len(self._rows) + 1

    def __call__(self, ids: Ids) -> Tensor:
        """int32."""
        rows = np.array([self._rows.get(name, UNSEEN_ROW) for name in (None, *ids.texts)], np.int32)
        return torch.from_numpy(rows[ids.codes + 1])


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
        label: what is predicted.
        dense: numbers.
        ids: columns with one id a row.
        bags: columns with any number of ids a row.
        time: column to split by, or None to split at random.
        embedding_dim: D, 64 by default.
        batch_size: B.
        seed: of the split, the order of the batches and the initial weights.

    Returns:
        The recipe; its data are `FrameSplits`.

    Raises:
        ValueError: as `DataSplits.from_frame`; also for an unknown model, or an `embedding_dim`
            below 1.
        TypeError: as `DataSplits.from_frame`.
        FileNotFoundError: if there is no such file.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"user": list("abcd") * 10, "item": list("vwxyz") * 8, "liked": [0, 1] * 20})
        >>> recipe = recipe_from_frame(frame, model="dlrm", label="liked", ids=["user", "item"])
        >>> type(recipe.model).__name__, recipe.loss, recipe.data.encoder.num_embeddings
        ('DLRM', BCEWithLogitsLoss(), {'user': 5, 'item': 6})
    """
    check_known("model", model, MODELS)
    dim = EMBEDDING_DIM if embedding_dim is None else embedding_dim
    check(dim >= 1, "embedding_dim", "an integer >= 1", dim)
    data = DataSplits.from_frame(
        frame,
        label=label,
        dense=dense,
        ids=ids,
        bags=bags,
        time=time,
        batch_size=batch_size,
        seed=seed,
    )
    encoder = data.encoder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = MODELS[model](_tables(encoder.num_embeddings, dim), encoder.num_dense)
    loss = nn.BCEWithLogitsLoss() if data.is_binary else nn.MSELoss()
    return Recipe(model=network, data=data, loss=loss)


def _tables(num_embeddings: Mapping[str, int], embedding_dim: int) -> EmbeddingBagCollection:
    """One table a feature; its name is no attribute that a module has, as ``"type"`` is."""
    tables = [
        EmbeddingBagConfig(
            name=f"{feature}_table",
            num_embeddings=rows,
            embedding_dim=embedding_dim,
            feature_names=[feature],
        )
        for feature, rows in num_embeddings.items()
    ]
    collection = EmbeddingBagCollection(tables=tables)
    with torch.no_grad():
        for bag in collection.embedding_bags.values():
            bag.weight.normal_(std=INIT_STD)[UNSEEN_ROW] = 0
    return collection


def _dlrm(tables: EmbeddingBagCollection, num_dense: int) -> nn.Module:
    layers = [*DENSE_LAYERS, _embedding_dim(tables)]
    return DLRM(tables, num_dense, layers, [*OVER_LAYERS, 1])


def _dlrm_dcn(tables: EmbeddingBagCollection, num_dense: int) -> nn.Module:
    layers = [*DENSE_LAYERS, _embedding_dim(tables)]
    return DLRM_DCN(
        tables, num_dense, layers, [*OVER_LAYERS, 1], dcn_num_layers=2, dcn_low_rank_dim=32
    )


def _deepfm(tables: EmbeddingBagCollection, num_dense: int) -> nn.Module:
    model = SimpleDeepFMNN(
        num_dense, tables, hidden_layer_size=DENSE_LAYERS[0], deep_fm_dimension=OVER_LAYERS[-1]
    )
    model.over_arch.model = model.over_arch.model[
        :1
    ]  # behind it comes a sigmoid, and losses here take logits
    return model


def _embedding_dim(tables: EmbeddingBagCollection) -> int:
    return int(tables.embedding_bag_configs()[0].embedding_dim)


MODELS: Mapping[str, Callable[[EmbeddingBagCollection, int], nn.Module]] = {
    "dlrm": _dlrm,
    "dlrm_dcn": _dlrm_dcn,
    "deepfm": _deepfm,
}
"""Name -> what builds a model of its tables and the number of dense features."""
