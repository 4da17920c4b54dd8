"""A data frame as batches of dense features, rows of tables and labels; and a recipe of it."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import string
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, Self, TypeAlias, TypedDict

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
import pyarrow.dataset as ds
import torch
from pandas.api import types
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check, check_known, describe, nearest, visible
from dnis_torchrec.data.batches import CLEAN, Bags, InMemoryBatches, features_of_samples, split_rows
from dnis_torchrec.data.files import NotNegative, Positive, parse_json
from dnis_torchrec.data.recipe import SPLITS, DataSplits, Recipe
from dnis_torchrec.ranks import rank_of

Frame: TypeAlias = "pd.DataFrame | Mapping[str, Any] | str | os.PathLike[str]"
SEPARATOR = "|"  # between the ids of a bag that is given as text, as a CSV file has to
LARGEST_NUMBER = 1e30  # numbers below it fit into float32
UNSEEN_ROW = 0  # the row of all ids that no training sample has, in every table
SMALLEST_SPREAD = 1e-6  # of a feature's size: float32 cannot hold smaller differences
MODELS = ("dlrm", "dlrm_dcn", "deepfm")
EMBEDDING_DIM = 64
STREAM_HEAD = 0.1  # of the rows of a stream: the first ones, of which dense features are scaled
INIT_STD = 0.01  # standard deviation of the initial weights of tables
DENSE_LAYERS, OVER_LAYERS = [128], [128, 64]  # in front of dense features, and behind the tables
_FORMS = re.compile(r"\.((?i:parquet|pq|csv)|(?i:csv)\.(gz|bz2|zst|lz4))$")
# Texts that stand for a missing number. Only an empty text is a missing id.
_NO_NUMBER = pa.array(["", "NA", "N/A", "<NA>", "NaN", "nan", "NULL", "null", "None"])
_DIGITS = tuple("-0123456789")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-][0-9]{1,3})?")
_TIME = re.compile(r"[0-9]{4}(-[0-9]{2}){2}([T ][0-9]{2}:[0-9]{2}[0-9:.]*(Z|[+-][0-9:]+)?)?")
_BYTES = re.compile(r"""b(['"]).*\1""", re.DOTALL)
_BLOCK_BYTES = 1 << 24  # of a CSV file; a line has to fit in
logger = logging.getLogger(__name__)


# Splits


@dataclass(frozen=True, kw_only=True)
class FrameSplits(DataSplits):
    """The splits of a frame, see `DataSplits.from_frame`."""

    encoder: FrameEncoder
    is_binary: bool
    columns: pd.DataFrame = field(compare=False)  # what became of each, as it was printed


class Roles(NamedTuple):
    """Columns of a frame by what they are for, see `DataSplits.from_frame`."""

    label: Hashable
    dense: Sequence[Any]
    ids: Sequence[str]
    bags: Sequence[str]
    time: Hashable | None = None

    def columns_of(self, frame: Frame) -> pd.DataFrame:
        """Checks the names of the columns and reads them from a frame."""
        _check_names(*self[:4])
        times = [] if self.time is None else [self.time]
        return frame_of(frame, [self.label, *self.dense, *self.ids, *self.bags, *times])


def splits_of_frame(source: Frame, roles: Roles, batch_size: int, seed: int) -> FrameSplits:
    """See `DataSplits.from_frame`."""
    frame, is_by_time = roles.columns_of(source), roles.time is not None
    columns = _Columns(frame, roles)
    parts: Sequence[Tensor] = split_rows(len(frame), seed=seed)
    if is_by_time:
        order = torch.from_numpy(order_in_time(frame[roles.time]))
        parts = order.split([len(part) for part in parts])
    encoder = FrameEncoder.learn(columns, np.isin(np.arange(len(frame)), parts[0].numpy()))
    batches = _batches_of(columns, encoder, batch_size, seed)
    facts: dict[str, Any] = {
        name: batches(rows=rows, shuffle=name in ("train", "validation"))
        for name, rows in zip(SPLITS, parts, strict=True)
    }
    table = _describe(columns, encoder, facts["validation"], "validation")
    facts |= {"encoder": encoder, "is_binary": columns.is_binary, "columns": table}
    return FrameSplits(**facts, is_by_time=is_by_time)


@dataclass(frozen=True, kw_only=True, eq=False)
class FrameStream:
    """All rows of a frame in the order of time, see `recipe_from_frame`."""

    batches: InMemoryBatches
    encoder: FrameEncoder
    is_binary: bool

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def stream_of_frame(
    source: Frame, roles: Roles, batch_size: int, encoder: FrameEncoder | None
) -> FrameStream:
    """A frame as a stream; an encoder of earlier days gives new ids row 0."""
    is_clear = roles.time is not None or encoder is not None
    check(is_clear, "time", "the column that orders a stream", "none", "name it")
    frame = roles.columns_of(source)
    if roles.time is not None:
        frame = frame.iloc[order_in_time(frame[roles.time])].reset_index(drop=True)
    columns = _Columns(frame, roles, None if encoder is None else encoder.is_binary)
    if encoder is None:
        is_first = np.arange(len(frame)) < max(1, int(STREAM_HEAD * len(frame)))
        encoder = FrameEncoder.learn(columns, is_first, is_stream=True)
    names = set(encoder.scales), list(encoder.rows), list(encoder.bags)
    is_same = names == (set(roles.dense), [*roles.ids, *roles.bags], list(roles.bags))
    check(is_same, "encoder", "one of these columns", [*encoder.scales, *encoder.rows])
    batches = _batches_of(columns, encoder, batch_size, 0)(rows=None, shuffle=False)
    _describe(columns, encoder, batches, "the stream")
    return FrameStream(batches=batches, encoder=encoder, is_binary=columns.is_binary)


def _batches_of(
    columns: _Columns, encoder: FrameEncoder, batch_size: int, seed: int
) -> Callable[..., InMemoryBatches]:
    """What makes batches of some rows."""
    dense, single, of_bags = encoder.tensors(columns)
    return partial(
        InMemoryBatches,
        *(dense, single, torch.from_numpy(columns.labels.astype(np.float32))),
        feature_names=list(columns.single),
        multi_hot=dict(zip(columns.bags, of_bags, strict=True)),
        batch_size=batch_size,
        seed=seed,
    )


def _describe(
    columns: _Columns, encoder: FrameEncoder, batches: InMemoryBatches, place: str
) -> pd.DataFrame:
    """What became of each column, which is printed, too."""
    facts: dict[str, tuple[Any, ...]] = {
        str(name): ("dense", "", np.isnan(values).mean(), "", "")
        for name, values in columns.dense.items()
    }
    rows = batches.rows_of_tables()
    for name, ids in columns.features.items():
        kind = "ids" if name in columns.single else "bags"
        share = ((ids.codes < 0) if kind == "ids" else (ids.lengths == 0)).mean()
        share_unseen = float((rows[name] == UNSEEN_ROW).sum()) / max(1, len(rows[name]))
        note = ""
        if kind == "ids" and len(ids.texts) == columns.num_rows:
            note = "an id of its own in every row"
            warn(f"column {name!r}: {note}: there is nothing to learn about any of them")
        facts[name] = (kind, encoder.num_embeddings[name], share, share_unseen, note)
    for name in (name for name, row in facts.items() if row[2] == 1):
        warn(f"column {name!r}: missing in all rows")
    label, time = columns.roles.label, columns.roles.time
    if time is not None:
        facts.setdefault(str(time), ("time", "", 0.0, "", ""))
    values, note = np.unique(columns.labels), "BCEWithLogitsLoss: all labels are 0 or 1"
    if not columns.is_binary:
        span = f"{values[0]:g} to {values[-1]:g}"
        note = f"MSELoss: {len(values)} values from {span}" + ", not 0 and 1" * (span != "0 to 1")
        if len(values) == 2 and span != "0 to 1":
            warn(f"label column {label!r}: two values, {span}: map them to 0 and 1 if classes")
    facts[str(label)] = ("label", "", 0.0, "", note)
    names = ["kind", "rows", "missing", f"unseen in {place}", "note"]
    table = pd.DataFrame.from_dict(facts, orient="index", columns=names)
    if rank_of() == 0:
        text = f"{columns.num_rows} samples\n{table.to_string()}"
        logger.info(text)
        if not logger.isEnabledFor(logging.INFO):
            sys.stderr.write(visible(f"{text}\n"))
    return table


class _Settings(TypedDict):
    """What stands beside the ids in an encoder's file."""

    dense: list[tuple[str | int, float, float]]
    features: list[tuple[str, NotNegative]]
    bags: list[str]
    model: str | None
    embedding_dim: Positive | None
    is_binary: NotRequired[bool | None]


@dataclass(frozen=True, eq=False)
class FrameEncoder:
    """What turns rows of a frame into what a model reads, as learned of training samples."""

    scales: Mapping[Hashable, tuple[float, float]]  # dense column -> mean and deviation
    rows: Mapping[str, Mapping[str | None, int]]  # feature -> text of an id -> row, in their order
    bags: tuple[str, ...]  # the features that have any number of ids
    model: str | None = None  # of `recipe_from_frame`, with tables of `embedding_dim`
    embedding_dim: int | None = None
    is_binary: bool | None = None  # whether all labels were 0 or 1

    @classmethod
    def learn(cls, columns: _Columns, is_train: np.ndarray, *, is_stream: bool = False) -> Self:
        """Learns scales and rows of training samples; of a stream rows of all, as they come."""
        scales = {name: _scale_of(name, of[is_train]) for name, of in columns.dense.items()}
        of = None if is_stream else is_train
        rows = {name: _rows_of(ids, of) for name, ids in columns.features.items()}
        return cls(scales, rows, tuple(columns.bags))

    @property
    def num_embeddings(self) -> dict[str, int]:
        """Feature -> rows of its table."""
        return {name: len(rows) + 1 for name, rows in self.rows.items()}

    @property
    def num_dense(self) -> int:
        """Dense features; one of zeros where the frame has none."""
        return max(1, len(self.scales))

    def reads_as(self, other: FrameEncoder) -> bool:
        """Whether ids have the same rows, and numbers the same scale but for rounding."""
        scales, others = list(self.scales.values()), list(other.scales.values())
        is_same = self.rows == other.rows and list(self.scales) == list(other.scales)
        return is_same and np.allclose(scales, others, rtol=1e-6)

    def __call__(self, frame: Frame) -> tuple[Tensor, KeyedJaggedTensor]:
        """What a model reads of a frame, such as new samples to be served."""
        names, single = list(self.rows), [n for n in self.rows if n not in self.bags]
        frame = frame_of(frame, [*self.scales, *names])
        columns = _Columns(frame, Roles(None, list(self.scales), single, self.bags))
        for name, ids in columns.features.items():
            codes = ids.codes[ids.codes >= 0]
            is_new = np.array([text not in self.rows[name] for text in ids.texts], bool)[codes]
            if is_new.sum() * 2 > len(codes):
                new = [ids.texts[code] for code in dict.fromkeys(codes[is_new].tolist())]
                examples = ", ".join(map(repr, new[:5]))
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
            "is_binary": self.is_binary,
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
        return cls(scales, rows, bags, settings["model"], dim, settings.get("is_binary"))


class _Columns:
    """Columns of a frame, before anything is learned of them."""

    def __init__(self, frame: pd.DataFrame, roles: Roles, of_training: bool | None = None) -> None:
        self.num_rows, self.roles = len(frame), roles
        # of rows to be served there are none
        self.labels = np.zeros(0) if roles.label is None else _labels_of(frame[roles.label])
        is_binary, place = bool(np.isin(self.labels, (0, 1)).all()), f"label {roles.label!r}"
        check(is_binary or not of_training, place, "labels 0 or 1, as in the training", "others")
        self.is_binary = is_binary if of_training is None else of_training
        self.single = {name: ids_of(frame[name]) for name in roles.ids}
        self.bags = {name: id_bags_of(frame[name]) for name in roles.bags}
        self.features = self.single | self.bags
        self.dense = {name: numbers_of(frame[name]) for name in roles.dense}


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


def _rows_of(ids: Ids, is_train: np.ndarray | None) -> dict[str | None, int]:
    """Text of an id, None of missing ones -> its row, by frequency, or of a stream as they come."""
    texts = (None, *ids.texts)
    if is_train is None:
        codes = pd.unique(ids.codes)
        return {texts[code + 1]: row for row, code in enumerate(codes, UNSEEN_ROW + 1)}
    codes = ids.codes[np.repeat(is_train, ids.lengths)]
    counts = np.bincount(codes + 1, minlength=len(texts))
    order = np.argsort(-counts, kind="stable")
    return {texts[code]: row for row, code in enumerate(order[counts[order] > 0], UNSEEN_ROW + 1)}


def _check_names(label: Hashable, *roles: Sequence[Any]) -> None:
    for name, value in zip(("dense", "ids", "bags"), roles, strict=True):
        if isinstance(value, str):
            raise TypeError(describe(name, "a list of columns", repr(value), f"give [{value!r}]"))
    dense, features = [*roles[0]], [*roles[1], *roles[2]]
    check(bool(features), "from_frame", "at least one column in ids or bags", "none")
    for name in features:
        is_fit = isinstance(name, str) and name != "" and "." not in name
        check(is_fit, f"column {name!r}", "text without a dot as its name", repr(name), "rename it")
    for kind, names in {"ids and bags": features, "dense": dense}.items():
        twice = [name for name in names if names.count(name) > 1]
        check(not twice, f"{kind} columns", "every column once", repr(twice[:1])[1:-1])
    check(label not in dense + features, f"column {label!r}", "a label that is no feature", "both")


def _labels_of(column: pd.Series) -> np.ndarray:
    labels, place = numbers_of(column), f"label column {column.name!r}"
    absent = np.flatnonzero(np.isnan(labels)).tolist()
    number = f"{len(absent)} missing, the first in row {absent[:1]}"
    check(not absent, place, "a label in every row", number, "leave those rows out")
    check((labels != labels[0]).any(), place, "labels that differ", f"{labels[0]:g} in all rows")
    return labels


# Files


def frame_of(source: Frame, columns: Iterable[Hashable]) -> pd.DataFrame:
    """The columns that are needed of a frame, a dict of columns or a file."""
    columns, place = list(dict.fromkeys(columns)), "frame"
    if isinstance(source, str | os.PathLike):
        source = _file(place := os.fspath(source), columns)
    elif isinstance(source, Mapping):
        try:
            source = pd.DataFrame(source)
        except ValueError as error:  # also of single values
            text = describe(place, "a list of values for each column, all as long", str(error))
            raise ValueError(text) from error
    if not isinstance(source, pd.DataFrame):
        requirement = "a pandas DataFrame, a dict of columns or the path of a file"
        raise TypeError(describe(place, requirement, type(source).__name__))
    _check_columns(place, source.columns, columns)
    check(len(source) > 0, place, "at least one row", "none")
    return source.loc[:, columns].reset_index(drop=True)


def _file(place: str, columns: list[Hashable]) -> pd.DataFrame:
    """The files of a folder one by one: a column may have another type in each."""
    path, remedy = Path(place), "mend it, or read it and give its frame"
    requirement, suffix = "a file that ends in .parquet or .csv", "".join(path.suffixes[-2:])
    is_fit = path.is_dir() or _FORMS.search(path.name) is not None
    check(is_fit, place, requirement, suffix or "no ending", remedy)
    csv_files = _csv_files_of(path) if path.is_dir() else [path] * (".csv" in suffix.lower())
    source, kind = (list(map(str, csv_files)), _csv(columns)) if csv_files else (place, "parquet")
    frames = []
    try:
        files = list(ds.dataset(source, format=kind).get_fragments())
        schemas = [file.physical_schema for file in files]
        _check_columns(place, dict.fromkeys(n for s in schemas for n in s.names), columns)
        for file, schema in zip(files, schemas, strict=True):
            if csv_files:
                _check_columns(file.path, schema.names, columns)
            names = [name for name in columns if name in schema.names]
            for name in (name for name in columns if name not in names):
                warn(f"column {name!r}: missing in {file.path}, though other files have it")
            table = file.to_table(schema, columns=names, use_threads=False)  # errors name the line
            frames.append(table.to_pandas(types_mapper=pd.ArrowDtype))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        requirement, reason = "whole files of Parquet or CSV", str(error).split("\n")[0]
        raise ValueError(describe(place, requirement, reason, remedy)) from error
    for name in columns:
        kinds = {frame[name].dtype for frame in frames if name in frame.columns}
        for frame in frames if len(kinds) > 1 else ():
            if name in frame.columns:
                frame[name] = frame[name].astype(object)
    return pd.concat(frames, ignore_index=True)


def _csv_files_of(folder: Path) -> list[Path]:
    """All CSV files at any depth; none where the folder is one of Parquet files."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    # Arrow leaves out hidden files of Parquet, too.
    paths = [p for p in paths if not any(n[0] in "._" for n in p.relative_to(folder).parts)]
    ends = [match[1][:3].lower() if (match := _FORMS.search(path.name)) else "" for path in paths]
    csv_files = [path for path, end in zip(paths, ends, strict=True) if end == "csv"]
    others = [path for path, end in zip(paths, ends, strict=True) if end in ("par", "pq")]
    check(bool(paths), str(folder), "files that end in .parquet or .csv", "none")
    got = ", ".join(path.name for path in (*csv_files[:1], *others[:1]))
    check(not (csv_files and others), str(folder), "files of one form", got, "use two folders")
    return csv_files


def _csv(columns: list[Hashable]) -> ds.CsvFileFormat:
    """All columns are text: a type guessed from the first lines may not fit the last."""
    return ds.CsvFileFormat(
        # A line with more or fewer fields than the header is an error, which pandas lets pass.
        parse_options=pv.ParseOptions(newlines_in_values=True),
        read_options=pv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        convert_options=pv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.large_string()),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def _check_columns(place: str, names: Iterable[Hashable], columns: list[Hashable]) -> None:
    names = list(names)
    for name in columns:
        number = names.count(name)
        remedy = "" if number else nearest(str(name), map(str, names))
        line = ", ".join(part for part in names[:4] if isinstance(part, str))
        mark = next((mark for mark in ";\t|" if len(names) == 1 and mark in line), None)
        near = [n for n in names if isinstance(n, str) and name in (n.strip(), *n.split(","))]
        if not number and near:
            remedy = f"rename {near[0]!r}: the command takes no space at its ends and no comma"
        if mark is not None:
            remedy = f"the file has {mark!r} between its columns: write it with commas"
        elif re.search(r"(^|, )[-+.\d]+(,|$)", line):
            remedy = f"its first line is {line}: write the names of columns above it"
        check(number == 1, place, f"a column {name!r}", f"{number or 'none'}", remedy)


def warn(text: str) -> None:
    """Warns whoever gave the frame."""
    warnings.warn(text, stacklevel=2)


# Ids


@dataclass(frozen=True, eq=False)
class Ids:
    """Entries of a column."""

    codes: np.ndarray  # -1 where an entry is missing
    texts: Sequence[str]  # of each code
    lengths: np.ndarray  # entries of each row


def ids_of(column: pd.Series) -> Ids:
    """A column with one id a row, of any type. Python looks at each distinct value once."""
    kind = column.dtype
    if isinstance(kind, pd.ArrowDtype) and pa.types.is_dictionary(kind.pyarrow_dtype):
        # Its codes would be in the order of the dictionary, not in that of the rows.
        column = column.astype(pd.ArrowDtype(kind.pyarrow_dtype.value_type))
    try:
        codes, values = pd.factorize(column)
    except (TypeError, NotImplementedError) as error:
        place, requirement = f"column {column.name!r}", "one id in every row"
        raise ValueError(describe(place, requirement, "lists", "name it in bags")) from error
    if types.is_object_dtype(kind) and types.infer_dtype(column).startswith("mixed"):
        # Python's True equals 1, so that they were one value.
        codes, values = pd.factorize(column.map(text_of, na_action="ignore"))
    if isinstance(kind, pd.CategoricalDtype):
        values = values.categories.take(values.codes)
    if values.dtype.kind == "f":
        values = values.to_numpy()  # as Python's floats, those of float32 would have other digits
    of_values, texts = pd.factorize(np.array([text_of(value) for value in values], dtype=object))
    return Ids(np.append(of_values, -1)[codes], texts, np.ones(len(column), np.int64))


def text_of(value: Any) -> str | None:
    """The text by which an id of any type is known, as it is by that in a CSV file of pandas."""
    if value is None or value != value:
        return None
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    text = text.strip(string.whitespace)
    if not text.isascii():  # half a character, as an escape may be, has no UTF-8
        text = text.encode("utf-8", "backslashreplace").decode()
    if text.startswith(_DIGITS):
        if _NUMBER.fullmatch(text):
            return _text_of_number(text)
        text = text.removesuffix(" 00:00:00")  # of timedeltas; of times pandas leaves it out, too
    with suppress(ValueError, SyntaxError):
        if _TIME.fullmatch(text):
            time = pd.Timestamp(text)
            time = time if time.tzinfo is None else time.tz_convert("UTC")
            return time.isoformat().removesuffix("T00:00:00")
        if _BYTES.fullmatch(text):
            return text_of(ast.literal_eval(text))
    return text or None


def _text_of_number(text: str) -> str:
    """A number without exponent, zeros at the end and a minus before 0."""
    if not text.lstrip("-").isdigit():
        value = float(text)
        if value.is_integer() and repr(value) == text:
            return str(int(value))
        is_small = repr(value) == text and abs(value) < LARGEST_NUMBER
        if is_small and float(np.float32(value)) == value:
            text = str(np.float32(value))  # 0.1 in float32, with the digits of float64
        text = format(Decimal(text), "f")
        text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def id_bags_of(column: pd.Series) -> Ids:
    """A column with any number of ids a row."""
    entries, kind = column.reset_index(drop=True), column.dtype
    of_lists = getattr(getattr(kind, "pyarrow_dtype", None), "value_type", pa.null())
    if of_lists == pa.null():  # no lists, or lists that are all empty
        values = entries.astype(object)
        _check_form([value for value in values if isinstance(value, str)], str(column.name))
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


def _check_form(bags: Sequence[str], name: str) -> None:
    """Warns of bags whose text has another form than ids with the separator between them."""
    is_list = 2 * sum(bag.lstrip().startswith(("[", "(", "{")) for bag in bags) > len(bags)
    has_commas = 2 * sum("," in bag for bag in bags) > len(bags)
    if is_list or (has_commas and not any(SEPARATOR in bag for bag in bags)):
        bag = next(bag for bag in bags if "," in bag or "[" in bag or not has_commas)
        remedy = f"give lists, or ids with {SEPARATOR!r} between them"
        warn(f"column {name!r}: {bag[:60]!r} is read as one id: {remedy}")


# Numbers and times


def numbers_of(column: pd.Series) -> np.ndarray:
    """A column as numbers; booleans are 0 and 1."""
    column = _parsed(column, (pa.float64(), pa.bool_()))
    is_plain = types.is_numeric_dtype(column.dtype) and not types.is_complex_dtype(column.dtype)
    values = column if is_plain else column.astype(object)
    try:
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError, OverflowError) as error:
        bad = pd.to_numeric(values, errors="coerce").isna() & values.notna()
        row = int(np.argmax(bad.to_numpy()))
        place, remedy = f"column {column.name!r}, row {row}", "map it to numbers"
        raise ValueError(describe(place, "a number", repr(values.iloc[row]), remedy)) from error
    rows = np.flatnonzero(np.abs(numbers) >= LARGEST_NUMBER)
    if len(rows):
        place, requirement = f"column {column.name!r}, row {rows[0]}", f"below {LARGEST_NUMBER:g}"
        raise ValueError(describe(place, f"a number {requirement}", numbers[rows[0]], CLEAN))
    return numbers


def _parsed(column: pd.Series, kinds: Sequence[pa.DataType]) -> pd.Series:
    """A column of text as the first of the kinds that fits all of it; itself where none does."""
    if not types.is_string_dtype(column.dropna()):
        return column
    texts = pc.utf8_trim_whitespace(pa.array(column, pa.large_string(), from_pandas=True))
    texts = pc.if_else(pc.is_in(texts, _NO_NUMBER), None, texts)
    for kind in kinds:
        try:
            values = texts.cast(kind)
        except pa.ArrowInvalid:
            continue
        return pd.Series(values.to_pandas(types_mapper=pd.ArrowDtype), name=column.name)
    return column


def order_in_time(column: pd.Series) -> np.ndarray:
    """The rows from the earliest to the latest; those of one time keep their order."""
    place, column = f"time column {column.name!r}", _parsed(column, (pa.int64(), pa.float64()))
    if not types.is_numeric_dtype(column.dtype):
        texts, requirement = column.astype(object), "numbers, dates or texts as ISO 8601 has them"
        column = pd.to_datetime(texts, format="ISO8601", utc=True, errors="coerce")
        bad = texts[column.isna() & texts.notna()]
        remedy = "write 2024-01-31 or 2024-01-31 23:30; pandas.to_datetime reads other formats"
        check(bad.empty, place, requirement, repr(next(iter(bad), None)), remedy)
    number = int(column.isna().sum())
    check(number == 0, place, "a time in every row", f"{number} missing", "leave those rows out")
    if column.nunique() == 1:
        warn(f"{place}: one time in all rows: the split goes by their order")
    return column.argsort(kind="stable").to_numpy(copy=True)


# A recipe


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
    is_stream: bool = False,
    encoder: FrameEncoder | None = None,
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
        is_stream: all rows are one stream in the order of `time`, and nothing is split. Ids have
            rows in the order in which they first occur, up to the last one. Dense features are
            scaled by the first tenth of the rows alone. No label is read for either.
        encoder: of a stream: that of the days before, ``recipe.data.encoder``. Tables and loss are
            those of then, ids that it has not share row 0, and `time` may be None.

    Returns:
        The recipe; its data are `FrameSplits`, or a stream.

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
    check(dim >= 1 and dim == int(dim), "embedding_dim", "an integer >= 1", dim)
    roles = Roles(label, dense, ids, bags, time)
    data: FrameSplits | FrameStream
    if is_stream:
        data = stream_of_frame(frame, roles, batch_size, encoder)
    else:
        data = splits_of_frame(frame, roles, batch_size, seed)
    encoder = replace(data.encoder, model=model, embedding_dim=dim, is_binary=data.is_binary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = model_of(encoder)
    data = replace(data, encoder=encoder)
    loss = nn.BCEWithLogitsLoss() if data.is_binary else nn.MSELoss()
    return Recipe(model=network, data=data, loss=loss)


def model_of(encoder: FrameEncoder, device: str = "cpu") -> nn.Module:
    """The model that an encoder names, with tables on the device."""
    name, dim, num_dense = str(encoder.model), int(encoder.embedding_dim or 0), encoder.num_dense
    check_known("model", name, MODELS)
    # The name of a table is no attribute that a module has, as "type" is.
    configs = [
        EmbeddingBagConfig(rows, dim, f"{feature}_table", feature_names=[feature])
        for feature, rows in encoder.num_embeddings.items()
    ]
    tables = EmbeddingBagCollection(tables=configs, device=torch.device(device))
    with torch.no_grad():
        for bag in tables.embedding_bags.values():
            bag.weight.normal_(std=INIT_STD)[UNSEEN_ROW] = 0
    layers = [*DENSE_LAYERS, dim], [*OVER_LAYERS, 1]
    if name == "dlrm":
        return DLRM(tables, num_dense, *layers)
    if name == "dlrm_dcn":
        return DLRM_DCN(tables, num_dense, *layers, dcn_num_layers=2, dcn_low_rank_dim=32)
    model = SimpleDeepFMNN(num_dense, tables, DENSE_LAYERS[0], OVER_LAYERS[-1])
    # Behind it comes a sigmoid, and losses here take logits.
    model.over_arch.model = model.over_arch.model[:1]
    return model
