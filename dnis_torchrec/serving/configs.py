"""Narrow tables as configs of TorchRec's own modules, one per feature or per block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import yaml
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from dnis_torchrec.checks import check
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.tables import check_one_collection, torchrec_config

_FORMAT_VERSION = 1
PER = ("feature", "block")
COLUMNS = ("same_size", "union")


@dataclass(frozen=True, kw_only=True)
class NarrowTable:
    """One table as wide as it has to be, and where its columns stand in D."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: tuple[str, ...]
    pooling: str
    logical_dim: int
    columns: tuple[int, ...]

    def config(self) -> EmbeddingBagConfig:
        """The table as TorchRec describes it, R wide."""
        return torchrec_config(self, self.embedding_dim)


@dataclass(frozen=True)
class NarrowTables:
    """The narrow tables of one collection; as JSON, YAML and Python too."""

    tables: tuple[NarrowTable, ...]
    is_weighted: bool = False

    def __iter__(self) -> Iterator[NarrowTable]:
        return iter(self.tables)

    @property
    def parameters(self) -> int:
        """Values of all tables; projections not counted."""
        return sum(table.num_embeddings * table.embedding_dim for table in self.tables)

    def configs(self) -> list[EmbeddingBagConfig]:
        """The tables as TorchRec describes them, each with its own embedding_dim."""
        return [table.config() for table in self.tables]

    def to_json(self) -> str:
        """JSON text."""
        return json.dumps(self._fields(), indent=1)

    def to_yaml(self) -> str:
        """YAML text, of plain lists, mappings and scalars."""
        return yaml.safe_dump(self._fields(), sort_keys=False, default_flow_style=None, width=120)

    def to_python(self) -> str:
        """Python source of ``tables``, a list of EmbeddingBagConfigs, and of ``columns``, table
        name -> columns."""
        lines = ["from torchrec import EmbeddingBagConfig, PoolingType", "", "tables = ["]
        tables = self._fields()["tables"]
        for table in tables:
            lines.append("    EmbeddingBagConfig(")
            names = ("name", "num_embeddings", "embedding_dim", "feature_names")
            lines += [f"        {name}={table[name]!r}," for name in names]
            lines += [f"        pooling=PoolingType.{table['pooling'].upper()},", "    ),"]
        columns = [f"    {table['name']!r}: {table['columns']!r}," for table in tables]
        return "\n".join([*lines, "]", "columns = {", *columns, "}"]) + "\n"

    def _fields(self) -> dict[str, Any]:
        head = {"format_version": _FORMAT_VERSION, "is_weighted": self.is_weighted}
        # through JSON, in which tuples are lists, as YAML wants them
        tables = json.loads(json.dumps([asdict(table) for table in self.tables]))
        return {**head, "tables": tables}


def embedding_configs(
    scheme: MixedDimensionScheme, *, per: str = "feature", columns: str = "same_size"
) -> NarrowTables:
    """The tables of a scheme as EmbeddingBagConfigs with embedding_dims of their own.

    - ``per="feature"``: one table per searched table, all rows with the same R columns: those that
    most rows retain.
      Features that share a table go on sharing one, so that nothing is stored twice.
      ``columns="same_size"`` takes as many columns as give at least the scheme's parameters, so
      what rows retain beyond them is lost; ``"union"`` takes every column that any row retains,
      which loses nothing and may save nothing.
    - ``per="block"``: one table per block, ``"<table>/b<s>"`` read by ``"<feature>/b<s>"``:
    lossless, as
      `MixedDimensionEmbeddingBagCollection` serves and trains it. Blocks without rows or columns
      have none. A feature that several tables read is cut anew for each, so it is
      ``"<feature>@<table>/b<s>"`` there. Blocks of a MEAN table are pooled by SUM: no block knows
      how long the whole bag is, by which the sum over blocks is divided.

    Args:
        scheme: the tables of ONE collection.
        per: one table for each ``"feature"``, or for each ``"block"``.
        columns: ``"same_size"`` or ``"union"``, for ``per="feature"``.

    Returns:
        The narrow tables, in the collection's order. A table that retains nothing keeps one column,
        because no EmbeddingBagConfig can have none.

    Raises:
        ValueError: for other words, or a scheme of no table or several collections.

    Example:
        >>> from dnis_torchrec.blocks.routing import RowRouting
        >>> routing = RowRouting(8, 2, boundaries=torch.tensor([0, 2, 8]))
        >>> retained = torch.tensor([[True, True, True, True], [False, True, False, False]])
        >>> table = TableScheme(name="t", collection="ebc", num_embeddings=8, embedding_dim=4,
        ...     pooling="sum", feature_names=("f",), is_weighted=False, routing=routing,
        ...     retained=retained, num_retained=14)
        >>> scheme = MixedDimensionScheme({"t": table})
        >>> [(t.name, t.embedding_dim, t.columns) for t in embedding_configs(scheme)]
        [('t', 2, (0, 1))]
        >>> [(t.name, t.embedding_dim, t.columns) for t in embedding_configs(scheme, per="block")]
        [('t/b0', 4, (0, 1, 2, 3)), ('t/b1', 1, (1,))]
    """
    check(per in PER, "per", f"one of {PER}", repr(per))
    check(columns in COLUMNS, "columns", f"one of {COLUMNS}", repr(columns))
    tables = list(scheme.tables.values())
    check_one_collection(tables)
    narrow = [
        _narrow(t, t.name, t.num_embeddings, _columns(t, columns), t.feature_names) for t in tables
    ]
    if per == "block":
        names = get_embedding_names_by_table([table.config() for table in narrow])
        narrow = [
            part
            for table, names_of_table in zip(tables, names, strict=True)
            for part in _blocks(table, names_of_table)
        ]
    return NarrowTables(tuple(narrow), tables[0].is_weighted)


def _columns(table: TableScheme, choice: str) -> Tensor:
    """The columns of D that a table keeps for all of its rows, rising; ranked by how many rows
    retain them."""
    rows_of_column = (table.retained * table.routing.row_counts().unsqueeze(1)).sum(dim=0)
    count = -(-table.num_retained // table.num_embeddings)
    if choice == "union":
        count = int((rows_of_column > 0).sum())
    order = torch.argsort(rows_of_column, descending=True, stable=True)
    return order[: max(1, count)].sort().values


def _blocks(table: TableScheme, names: list[str]) -> list[NarrowTable]:
    """A table per block that stores something; `names` are those of what the table gives, one per
    feature."""
    as_sum, narrow = replace(table, pooling="sum"), []
    for s, (num_rows, _) in table.stored_blocks().items():
        features = tuple(f"{name}/b{s}" for name in names)
        narrow.append(_narrow(as_sum, f"{table.name}/b{s}", num_rows, table.columns(s), features))
    return narrow


def _narrow(
    table: TableScheme, name: str, rows: int, columns: Tensor, features: tuple[str, ...]
) -> NarrowTable:
    return NarrowTable(
        name=name,
        num_embeddings=rows,
        embedding_dim=columns.numel(),
        feature_names=features,
        pooling=table.pooling,
        logical_dim=table.embedding_dim,
        columns=tuple(columns.tolist()),
    )
