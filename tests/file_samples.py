"""Small streams for the tests, and what is in them, worked out value by value in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torchrec.datasets.utils import Batch

from dnis_torchrec.blocks.hashing import hash_values
from dnis_torchrec.data.parquet import FileSchema

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
class Sample:
    """One raw sample; None is a missing value. `y` is unique, so that samples can be told apart."""

    y: float
    x: tuple[float | None, float | None]
    a: str | None
    b: str | None
    tags: tuple[str, ...]


def draw(num_samples: int, seed: int = 0) -> list[Sample]:
    """Samples with labels 0, 1, 2, ..., missing values and empty bags."""
    random = np.random.default_rng(seed)

    def value(names: str) -> str | None:
        return None if random.random() < 0.2 else str(random.choice(list(names)))

    return [
        Sample(
            y=float(number),
            x=tuple(None if random.random() < 0.2 else float(random.integers(-2, 9)) for _ in range(2)),
            a=value("pqrstuv"),
            b=value("ABCDE"),
            tags=tuple(str(tag) for tag in random.choice(list("klmno"), random.integers(0, 4))),
        )
        for number in range(num_samples)
    ]


def write_text(path: Path, samples: Sequence[Sample], *, last_newline: bool = True) -> Path:
    """The samples as tab separated text without a header."""

    def line(sample: Sample) -> str:
        x0, x1 = ("" if x is None else str(x) for x in sample.x)
        return "\t".join([str(sample.y), x0, "zzz", sample.a or "", sample.b or "", x1, ",".join(sample.tags)])

    path.write_text("\n".join(map(line, samples)) + "\n" * last_newline)
    return path


def write_parquet(path: Path, samples: Sequence[Sample], *, row_group: int) -> Path:
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


def expected(sample: Sample) -> dict[str, object]:
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
