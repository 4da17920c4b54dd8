"""A data frame as batches: columns of any type become dense features, rows of tables and labels, in
four splits; and a recipe of it, for who has no model yet."""

from __future__ import annotations

import gzip
import os
import re
import string
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
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
from dnis_torchrec.data.batches import CLEAN, Bags, InMemoryBatches, features_of_samples, split_rows
from dnis_torchrec.data.recipe import DataSplits, Recipe

Frame: TypeAlias = "pd.DataFrame | str | os.PathLike[str]"
SEPARATOR = "|"
"""Between the ids of a bag that is given as text, as a CSV file has to."""
LARGEST_NUMBER = 1e30
"""Numbers below it fit into float32."""
UNSEEN_ROW = 0
"""The row of all ids that no training sample has, in every table."""
_DAMAGE = (
    *(pa.ArrowInvalid, pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError),
    *(gzip.BadGzipFile, zlib.error, EOFError),
)
_WHOLE_FLOAT = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0")


@dataclass(frozen=True, kw_only=True)
class FrameSplits(DataSplits):
    """The splits of a frame, see `DataSplits.from_frame`."""

    encoder: FrameEncoder
    is_binary: bool


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
    frame = _frame_of(frame, [label, *dense, *ids, *bags, *times], [*ids, *bags])
    labels, columns = _labels_of(frame[label]), _Columns(frame, dense, ids, bags)
    parts: Sequence[Tensor] = split_rows(len(frame), seed=seed)
    if time is not None:
        order = torch.from_numpy(order_in_time(frame[time]))
        parts = order.split([len(part) for part in parts])
    encoder = FrameEncoder(columns, np.isin(np.arange(len(frame)), parts[0].numpy()))
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
    is_binary = bool(np.isin(labels, (0, 1)).all())
    return FrameSplits(**splits, encoder=encoder, is_binary=is_binary)


class FrameEncoder:
    """What turns rows of a frame into what a model reads, as learned of training samples."""

    def __init__(self, columns: _Columns, is_train: np.ndarray) -> None:
        self._scales = {n: _scale_of(values[is_train]) for n, values in columns.dense.items()}
        features = columns.single | columns.bags
        self._rows = {name: _rows_of(ids, is_train) for name, ids in features.items()}
        self._bags = tuple(columns.bags)
        self.num_embeddings = {name: len(rows) + 1 for name, rows in self._rows.items()}
        self.num_dense = max(1, len(self._scales))

    def __call__(self, frame: Frame) -> tuple[Tensor, KeyedJaggedTensor]:
        """What a model reads of a frame, such as new samples to be served."""
        names, single = list(self._rows), [n for n in self._rows if n not in self._bags]
        frame = _frame_of(frame, [*self._scales, *names], names)
        dense, ids, bags = self.tensors(_Columns(frame, list(self._scales), single, self._bags))
        return dense, features_of_samples(names, ids, bags)

    def tensors(self, columns: _Columns) -> tuple[Tensor, Tensor, list[Bags]]:
        """Dense features, ids of one each and bags of ids."""
        dense = [
            torch.from_numpy(np.nan_to_num((columns.dense[name] - mean) / deviation)).float()
            for name, (mean, deviation) in self._scales.items()
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
        rows = [self._rows[feature].get(text, UNSEEN_ROW) for text in (None, *ids.texts)]
        return torch.from_numpy(np.array(rows, np.int32)[ids.codes + 1])


@dataclass(frozen=True, eq=False)
class Ids:
    """Entries of a column: the code of each, -1 where it is missing, the text of each code, and how
    many of the entries each row has."""

    codes: np.ndarray
    texts: Sequence[str]
    lengths: np.ndarray


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


def _scale_of(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of a dense feature; 1 where it does not vary."""
    values = values[~np.isnan(values)]
    return (float(values.mean()), float(values.std()) or 1.0) if len(values) else (0.0, 1.0)


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


def _frame_of(source: Frame, columns: list[Hashable], texts: list[str]) -> pd.DataFrame:
    """A frame, or the columns of a file that are needed."""
    columns, place = list(dict.fromkeys(columns)), "frame"
    if isinstance(source, str | os.PathLike):
        place = os.fspath(source)
        source = _file(place, columns, texts)
    if not isinstance(source, pd.DataFrame):
        requirement = "a pandas DataFrame or the path of a file"
        remedy = "call its to_pandas() if it has one"
        raise TypeError(describe(place, requirement, type(source).__name__, remedy))
    _check_columns(place, source.columns, columns)
    check(len(source) > 0, place, "at least one row", "none")
    return source.loc[:, columns].reset_index(drop=True)


def _file(place: str, columns: list[Hashable], texts: list[str]) -> pd.DataFrame:
    path, remedy = Path(place), "read it, and give its frame"
    endings, is_folder = path.suffixes[-2:], path.is_dir()
    csv_files = sorted(path.glob("*.csv*")) if is_folder else [place] * (".csv" in endings)
    is_fit = bool(csv_files) or is_folder or endings[-1:] in ([".parquet"], [".pq"])
    requirement = "a file that ends in .parquet or .csv"
    check(is_fit, place, requirement, "".join(endings) or "no ending", remedy)
    try:
        if csv_files:
            return pd.concat([_csv(os.fspath(file), columns, texts) for file in csv_files])
        files = ds.dataset(place, format="parquet")
        _check_columns(place, files.schema.names, columns)
        return files.to_table(columns=columns).to_pandas(types_mapper=pd.ArrowDtype)
    except _DAMAGE as error:
        requirement, reason = "whole files of Parquet or CSV", str(error).split("\n")[0]
        raise ValueError(describe(place, requirement, reason, remedy)) from error


def _csv(place: str, columns: list[Hashable], texts: list[str]) -> pd.DataFrame:
    _check_columns(place, pd.read_csv(place, nrows=0).columns, columns)
    dtypes = dict.fromkeys(texts, "string")
    return pd.read_csv(place, usecols=columns, dtype=dtypes, low_memory=False)


def _check_columns(place: str, names: Iterable[Hashable], columns: list[Hashable]) -> None:
    names = list(names)
    for name in columns:
        number = names.count(name)
        remedy = "" if number else nearest(str(name), map(str, names))
        check(number == 1, place, f"a column {name!r}", f"{number or 'none'}", remedy)


def numbers_of(column: pd.Series) -> np.ndarray:
    """A column as numbers; booleans are 0 and 1."""
    is_plain = types.is_numeric_dtype(column.dtype) and not types.is_complex_dtype(column.dtype)
    values = column if is_plain else column.astype(object)
    try:
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError, OverflowError) as error:
        row = next(row for row, value in enumerate(values) if not _is_number(value))
        place, remedy = f"column {column.name!r}, row {row}", "map it to numbers, or name it in ids"
        raise ValueError(describe(place, "a number", repr(values.iloc[row]), remedy)) from error
    bad = np.flatnonzero(np.abs(numbers) >= LARGEST_NUMBER)
    if len(bad):
        place, requirement = f"column {column.name!r}, row {bad[0]}", f"below {LARGEST_NUMBER:g}"
        raise ValueError(describe(place, f"a number {requirement}", numbers[bad[0]], CLEAN))
    return numbers


def _is_number(value: Any) -> bool:
    try:
        return pd.isna(value) is True or float(value) is not None
    except (TypeError, ValueError, OverflowError):
        return False


def _labels_of(column: pd.Series) -> np.ndarray:
    labels, place = numbers_of(column), f"label column {column.name!r}"
    absent = np.flatnonzero(np.isnan(labels)).tolist()
    number = f"{len(absent)} missing, the first in row {next(iter(absent), 0)}"
    check(not absent, place, "a label in every row", number, "leave those rows out")
    value, remedy = f"{labels[0]:g} in all rows", "there is nothing to predict"
    check(not (labels == labels[0]).all(), place, "labels that differ", value, remedy)
    return labels


def order_in_time(column: pd.Series) -> np.ndarray:
    """The rows from the earliest to the latest; those of one time keep their order."""
    place, number = f"time column {column.name!r}", int(column.isna().sum())
    check(number == 0, place, "a time in every row", f"{number} missing", "leave those rows out")
    if not types.is_numeric_dtype(column.dtype):
        try:
            column = pd.to_datetime(column.astype(object), format="ISO8601", utc=True)
        except (TypeError, ValueError) as error:
            requirement = "numbers, dates or texts as ISO 8601 has them"
            remedy = "convert it, as pd.to_datetime does"
            raise ValueError(describe(place, requirement, str(error), remedy)) from error
    return column.argsort(kind="stable").to_numpy(copy=True)


def ids_of(column: pd.Series) -> Ids:
    """A column with one id a row, of any type. Python looks at each distinct value once."""
    try:
        codes, values = pd.factorize(column)
    except (TypeError, NotImplementedError) as error:
        place, remedy = f"column {column.name!r}", "name it in bags"
        raise ValueError(describe(place, "one id in every row", "lists", remedy)) from error
    of_values, texts = pd.factorize(np.array([text_of(value) for value in values], dtype=object))
    return Ids(np.append(of_values, -1)[codes], texts, np.ones(len(column), np.int64))


def text_of(value: Any) -> str | None:
    """The text by which an id is known, whatever type its column has."""
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else repr(float(value))
    if isinstance(value, datetime):
        time = pd.Timestamp(value)
        return (time if time.tzinfo is None else time.tz_convert("UTC")).isoformat()
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    text = text.strip(string.whitespace)
    whole = _WHOLE_FLOAT.fullmatch(text)
    return (whole[1] if whole else text) or None


def id_bags_of(column: pd.Series) -> Ids:
    """A column with any number of ids a row."""
    entries, kind = column.reset_index(drop=True), column.dtype
    if not (isinstance(kind, pd.ArrowDtype) and pa.types.is_nested(kind.pyarrow_dtype)):
        values = entries.astype(object)
        split = [value.split(SEPARATOR) if isinstance(value, str) else value for value in values]
        entries = pd.Series(split, dtype=object)
    entries = entries.explode()
    try:
        ids = ids_of(entries)
    except ValueError as error:
        place = f"column {column.name!r}"
        raise ValueError(describe(place, "lists of ids", "lists of lists", "flatten")) from error
    is_id = ids.codes >= 0
    lengths = np.bincount(entries.index.to_numpy()[is_id], minlength=len(column))
    return Ids(ids.codes[is_id], ids.texts, lengths)


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
    encoder = data.encoder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = MODELS[model](_tables(encoder.num_embeddings, dim), dim, encoder.num_dense)
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


def _dlrm(tables: EmbeddingBagCollection, dim: int, num_dense: int) -> nn.Module:
    return DLRM(tables, num_dense, [*DENSE_LAYERS, dim], [*OVER_LAYERS, 1])


def _dlrm_dcn(tables: EmbeddingBagCollection, dim: int, num_dense: int) -> nn.Module:
    layers = [*DENSE_LAYERS, dim], [*OVER_LAYERS, 1]
    return DLRM_DCN(tables, num_dense, *layers, dcn_num_layers=2, dcn_low_rank_dim=32)


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
