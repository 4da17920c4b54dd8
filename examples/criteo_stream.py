"""DLRM on streamed Criteo data of any size: Kaggle's ``train.txt``, the days of the 1 TB logs, Parquet of the same.

The data is never held in memory and has no dictionaries: categories are hashed, see `dnis_torchrec.data.parquet`. The
data folder holds, and the first of these that is found is read:

    urls.txt       one address or glob per line, of Parquet or text files on this machine or on storage
    *.parquet      columns label, int_0 .. int_12, cat_0 .. cat_25
    train.txt, day_0, day_1, ...  as Criteo Labs publish them, plain or .gz
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from torch import nn
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.parquet import FileSamples, FileSchema, split_files
from dnis_torchrec.data.recipe import Recipe
from examples.datasets.criteo import PUBLISHER
from examples.datasets.text_files import require_folder
from examples.models import build_dlrm, build_tables, network_of_seed

BATCH_SIZE = 4096
EMBEDDING_DIM = 64
DENSE_LAYERS = [512, 256]
OVER_LAYERS = [512, 256]
HASH_ROWS_VARIABLE = "DNIS_HASH_ROWS"
HASH_ROWS = 100_000
"""Rows of a large field's table, unless the environment variable says otherwise."""
KAGGLE_CATEGORIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Distinct categories of each field in Kaggle's whole ``train.txt``."""
TERABYTE_CATEGORIES = (
    *(45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10),
    *(2209, 11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35),
)
"""Those of the 1 TB logs' 24 days, whose fields are others; source: torchrec.inference.dlrm_packager."""
ROWS_PER_CATEGORY = 16
"""Rows of a small field's table per category: about 3 % of the categories then share a row with another."""
_TEXT_FILE = re.compile(r"(train\.txt|day_\d+)(\.gz)?")
_LOGS = {"train.txt": KAGGLE_CATEGORIES, "day_": TERABYTE_CATEGORIES}
"""Start of the names of a log's files -> the numbers of its categories."""


def dlrm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """torchrec's DLRM on streamed Criteo data, its tables fused with row-wise Adagrad.

    Args:
        data: folder, see above.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; a sample's part depends on its number in the stream and on `seed` only.

    Raises:
        ValueError: if `data` is None or holds none of the files.
    """
    stream = open_stream(require_folder(data, "examples.criteo_stream:dlrm", PUBLISHER))

    def build() -> nn.Module:
        tables = build_tables(stream.schema.num_embeddings, embedding_dim or EMBEDDING_DIM)
        num_dense = len(DEFAULT_INT_NAMES)
        return build_dlrm(tables, dense_in_features=num_dense, dense_layers=DENSE_LAYERS, over_layers=OVER_LAYERS)

    network = network_of_seed(build, seed)
    return Recipe(
        model=network,
        data=split_files(stream, batch_size=BATCH_SIZE, seed=seed),
        loss=nn.BCEWithLogitsLoss(),
        table_optimizer="rowwise_adagrad",
        table_learning_rate=0.02,
    )


def open_stream(folder: Path) -> FileSamples:
    """The samples of a folder.

    Args:
        folder: see above.

    Raises:
        ValueError: if the folder holds none of the files, one of them is missing or empty, or the environment variable
            holds no integer above 1.
        OSError: if storage does not answer.
    """
    files = find_files(folder)
    return FileSamples(files, make_schema(categories_of(files)))


def categories_of(files: Sequence[str]) -> tuple[int, ...]:
    """Returns each field's number of categories: that of the log whose names the files have, else the larger of both.

    Args:
        files: addresses, as `find_files` gives them.

    Example:
        >>> [categories_of([name])[0] for name in ("logs/train.txt", "s3://bucket/day_3.gz", "part-0.parquet")]
        [1460, 45833188, 45833188]
    """
    names = {PurePosixPath(file).name for file in files}
    for start, categories in _LOGS.items():
        if all(name.startswith(start) for name in names):
            return categories
    return tuple(map(max, KAGGLE_CATEGORIES, TERABYTE_CATEGORIES))


def make_schema(categories: Sequence[int]) -> FileSchema:
    """Criteo's columns, and a table per field that is as large as the field needs, or `HASH_ROWS`.

    Args:
        categories: of each field.

    Raises:
        ValueError: if the environment variable holds no integer above 1.
    """
    chosen = os.environ.get(HASH_ROWS_VARIABLE, str(HASH_ROWS))
    check(chosen.isdecimal() and int(chosen) >= 2, HASH_ROWS_VARIABLE, "an integer >= 2", repr(chosen))
    fields = zip(DEFAULT_CAT_NAMES, categories, strict=True)
    return FileSchema(
        label=DEFAULT_LABEL_NAME,
        dense=tuple(DEFAULT_INT_NAMES),
        single_id={name: max(2, min(int(chosen), ROWS_PER_CATEGORY * number)) for name, number in fields},
        log_dense=True,
        text_columns=(DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES),
    )


def find_files(folder: Path) -> list[str]:
    """Addresses of the files of a folder, or of those that its ``urls.txt`` names.

    A file that is there both plain and packed is the same lines twice, so the plain one is taken.

    Args:
        folder: see above.

    Raises:
        ValueError: if there are none, or no such folder.
    """
    place, remedy = str(folder), f"get it from {PUBLISHER}"
    check(folder.is_dir(), place, "a folder", "none", remedy)
    listed = folder / "urls.txt"
    if listed.is_file():
        addresses = [line.strip() for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
        check(bool(addresses), str(listed), "at least one address", "none", "write one per line")
        return addresses
    if found := sorted(folder.glob("*.parquet"), key=_in_order):
        return [str(path) for path in found]
    texts = [path for path in sorted(folder.iterdir(), key=_in_order) if _TEXT_FILE.fullmatch(path.name)]
    if texts:
        return [str(path) for path in texts if path.suffix != ".gz" or path.with_suffix("") not in texts]
    raise ValueError(describe(place, "urls.txt, *.parquet, train.txt[.gz] or day_*[.gz]", "none of them", remedy))


def _in_order(path: Path) -> tuple[int, str]:
    """day_2 before day_10, packed or not."""
    name = path.name.removesuffix(".gz")
    return len(name), name
