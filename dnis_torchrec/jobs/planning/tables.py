"""The tables to plan for: the uncompressed ones, and those that are left of them, one per block."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dnis_torchrec.checks import check, describe
from dnis_torchrec.forms import stored_blocks
from dnis_torchrec.scheme import MixedDimensionScheme


@dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """A table as the planner has to know it."""

    name: str
    num_embeddings: int
    embedding_dim: int
    num_features: int = 1
    pooling_factor: float = 1.0
    is_weighted: bool = False

    def __post_init__(self) -> None:
        for field in ("num_embeddings", "embedding_dim", "num_features"):
            check(
                getattr(self, field) >= 1,
                f"table {self.name!r}",
                f"{field} >= 1",
                getattr(self, field),
            )

    @property
    def parameters(self) -> int:
        """N times D."""
        return self.num_embeddings * self.embedding_dim

    def training_bytes(self, optimizer: str) -> int:
        """Bytes of the fp32 table and its optimizer state."""
        state_values = {"none": 0, "rowwise_adagrad": 1, "adam": 2 * self.embedding_dim}[optimizer]
        return 4 * self.num_embeddings * (self.embedding_dim + state_values)


def parse_tables(texts: Iterable[str]) -> tuple[list[PlannedTable], list[PlannedTable]]:
    """Tables in numbers: ``NAME=NxD``, and the blocks that are left of one,
    ``NAME=NxD:ROWSxR,ROWSxR``."""
    before: list[PlannedTable] = []
    after: list[PlannedTable] = []
    for text in texts:
        table, blocks = _parse_table(text)
        before.append(table)
        after += blocks
    for tables in (
        before,
        after,
    ):  # a table without blocks may have the name that a block of another is given
        for name, times in Counter(table.name for table in tables).items():
            check(times == 1, f"table {name!r}", "every name once", f"it {times} times")
    return before, after


def _parse_table(text: str) -> tuple[PlannedTable, list[PlannedTable]]:
    match = re.fullmatch(r"([^=:]+)=(\d+)x(\d+)(?::(\d+x\d+(?:,\d+x\d+)*))?", text)
    if match is None:
        requirement = "NAME=ROWSxDIM or NAME=ROWSxDIM:ROWSxDIM,ROWSxDIM"
        raise ValueError(
            describe("table", requirement, repr(text), "such as user=1000000x64:10000x32,50000x8")
        )
    name, num_embeddings, embedding_dim = match[1], int(match[2]), int(match[3])
    check(
        "." not in name,
        f"table {name!r}",
        "a name without a dot, as TorchRec's tables have",
        repr(name),
    )
    table = PlannedTable(name=name, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
    if match[4] is None:
        return table, [table]
    shapes = [list(map(int, shape.split("x"))) for shape in match[4].split(",")]
    rows = sum(rows for rows, _ in shapes)
    check(
        rows <= num_embeddings, f"table {name!r}", f"blocks of at most {num_embeddings} rows", rows
    )
    widest = max(dim for _, dim in shapes)
    check(
        widest <= embedding_dim,
        f"table {name!r}",
        f"blocks of at most {embedding_dim} dims",
        widest,
    )
    return table, _blocks(table, dict(enumerate(shapes)))


def tables_of_scheme(scheme: MixedDimensionScheme) -> tuple[list[PlannedTable], list[PlannedTable]]:
    """The tables of a scheme before pruning, and the blocks' tables that the mixed-dimension form
    stores."""
    before: list[PlannedTable] = []
    after: list[PlannedTable] = []
    for table in scheme.tables.values():
        whole = PlannedTable(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            num_features=len(table.feature_names),
            is_weighted=table.is_weighted,
        )
        before.append(whole)
        after += _blocks(whole, stored_blocks(table))
    return before, after


def _blocks(table: PlannedTable, shapes: Mapping[int, Sequence[int]]) -> list[PlannedTable]:
    # A scheme does not know how often each block is looked up: the ids are spread evenly, their
    # number stays.
    return [
        PlannedTable(
            name=f"{table.name}/b{s}",
            num_embeddings=rows,
            embedding_dim=dim,
            num_features=table.num_features,
            pooling_factor=table.pooling_factor / len(shapes),
            is_weighted=table.is_weighted,
        )
        for s, (rows, dim) in shapes.items()
    ]
