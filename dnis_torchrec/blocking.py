"""Blocking: frequency counts -> RowBlocks, the sets of rows that share one row of alpha (paper, section 3.2).

Rows are sorted by descending frequency (ties in row order) and the order is cut into S blocks. With scope ``"global"``
(the paper's) all tables of equal embedding_dim are sorted together and share the same S rows of alpha; with scope
``"table"`` each table has its own.

Shapes: N rows of a table, D embedding_dim, S blocks, A rows of alpha for one D (S, or S times the number of tables).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.frequency import FrequencyCounts
from dnis_torchrec.row_routing import RowRouting

logger = logging.getLogger(__name__)

SCOPES = ("global", "table")
STRATEGIES = ("equal_rows", "equal_mass", "decades", "explicit")


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """Which row of alpha multiplies which row of which table.

    Attributes:
        scope: ``"global"`` or ``"table"``.
        strategy: how the order was cut.
        routings: table -> row routing.
        embedding_dims: table -> D.
        max_bag_lengths: feature -> longest bag in the training data.
        occurrences: table -> ``(S,)`` int64, how often training looked up rows of each block.
        seen_rows: table -> ``(S,)`` int64, rows of each block that training looked up at least once.
    """

    scope: str
    strategy: str
    routings: Mapping[str, RowRouting]
    embedding_dims: Mapping[str, int]
    max_bag_lengths: Mapping[str, int]
    occurrences: Mapping[str, Tensor]
    seen_rows: Mapping[str, Tensor]

    @property
    def alpha_shapes(self) -> dict[int, tuple[int, int]]:
        """embedding_dim D -> shape (A, D) of the alpha that serves all tables of that D."""
        rows: dict[int, int] = {}
        for table, dim in self.embedding_dims.items():
            num_blocks = self.routings[table].num_blocks
            rows[dim] = max(rows.get(dim, 0), self.first_alpha_row(table) + num_blocks)
        return {dim: (num_rows, dim) for dim, num_rows in rows.items()}

    def first_alpha_row(self, table: str) -> int:
        """Row of alpha that belongs to block 0 of `table`; 0 for every table of scope ``"global"``.

        Raises:
            ValueError: if the table has no blocks.
        """
        check_known("table", table, self.routings)
        if self.scope == "global":
            return 0
        first = 0
        for name, dim in self.embedding_dims.items():
            if name == table:
                break
            if dim == self.embedding_dims[table]:
                first += self.routings[name].num_blocks
        return first

    def per_alpha_row(self, embedding_dim: int, per_block: Mapping[str, Tensor]) -> Tensor:
        """Adds up a quantity of the tables' blocks, such as `seen_rows`, by the row of alpha that multiplies them.

        Args:
            embedding_dim: D of the alpha.
            per_block: table -> ``(S,)``.

        Returns:
            ``(A,)`` float64.
        """
        total = torch.zeros(self.alpha_shapes[embedding_dim][0], dtype=torch.float64)
        for table, dim in self.embedding_dims.items():
            if dim == embedding_dim:
                first = self.first_alpha_row(table)
                total[first : first + self.routings[table].num_blocks] += per_block[table]
        return total

    def save(self, path: Path) -> None:
        """Writes one safetensors file, whole or not at all."""
        tensors, described = {}, {}
        for table, routing in self.routings.items():
            described[table] = [routing.num_embeddings, routing.num_blocks, self.embedding_dims[table]]
            tensors[f"{table}/occurrences"] = self.occurrences[table]
            tensors[f"{table}/seen_rows"] = self.seen_rows[table]
            tensors |= {f"{table}/{key}": value for key, value in routing.to_tensors().items()}
        head = {"scope": self.scope, "strategy": self.strategy, "tables": described}
        head["max_bag_lengths"] = dict(self.max_bag_lengths)
        temporary = path.with_name(f"{path.name}.partial")
        save_file(tensors, temporary, metadata={"row_blocks": json.dumps(head)})
        os.replace(temporary, path)

    @staticmethod
    def load(path: Path) -> RowBlocks:
        """Reads what `save` wrote.

        Raises:
            ValueError: if the file is damaged or holds something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                head = (file.metadata() or {}).get("row_blocks", "")
                check(bool(head), str(path), "expected a file of row blocks", "another file")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except SafetensorError as error:
            requirement = "expected a whole safetensors file"
            raise ValueError(describe(str(path), requirement, str(error), "use another one")) from error
        described = json.loads(head)
        routings, dims = {}, {}
        for table, (num_embeddings, num_blocks, dim) in described["tables"].items():
            parts = {k: tensors[f"{table}/{k}"] for k in ("boundaries", "block_of_row") if f"{table}/{k}" in tensors}
            routings[table] = RowRouting.from_tensors(num_embeddings, num_blocks, parts)
            dims[table] = dim
        return RowBlocks(
            described["scope"],
            described["strategy"],
            routings,
            dims,
            described["max_bag_lengths"],
            {table: tensors[f"{table}/occurrences"] for table in routings},
            {table: tensors[f"{table}/seen_rows"] for table in routings},
        )


def blocks_from_counts(
    counts: FrequencyCounts,
    tables: Sequence[EmbeddingBagConfig],
    *,
    num_blocks: int = 10,
    scope: str = "global",
    strategy: str = "equal_rows",
    boundaries: Sequence[int] | None = None,
    keep_ties_together: bool = False,
) -> RowBlocks:
    """Cuts the rows, sorted by descending frequency, into blocks.

    Args:
        counts: occurrences in the training data.
        tables: the tables to block, as ``embedding_bag_configs()`` gives them.
        num_blocks: S wanted. ``"decades"`` and ``"explicit"`` have as many blocks as they come to.
        scope: ``"global"`` (the paper: tables of equal embedding_dim together) or ``"table"``.
        strategy: ``"equal_rows"`` (the paper's reading), ``"equal_mass"`` (equal occurrences), ``"decades"`` (one block
            per power of ten of the frequency; never-seen rows join the last) or ``"explicit"``.
        boundaries: for ``"explicit"``: rising positions in the sorted order at which a new block begins.
        keep_ties_together: never cut between rows of equal frequency. Fewer blocks may come out; a warning says so.

    Returns:
        The blocks of every table. A table whose rows stand in frequency order is routed by boundaries, any other by a
        uint8 or uint16 map.

    Raises:
        ValueError: for an unknown scope or strategy, counts of other tables or other num_embeddings, or boundaries that
            do not fit.

    Example:
        >>> counts = FrequencyCounts({"t": torch.tensor([9, 7, 2, 1])}, {"f": 1}, 19)
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"])
        >>> blocks_from_counts(counts, [table], num_blocks=2).routings["t"].boundaries.tolist()
        [0, 2, 4]
    """
    check(scope in SCOPES, "scope", f"expected one of {SCOPES}", repr(scope))
    check(strategy in STRATEGIES, "strategy", f"expected one of {STRATEGIES}", repr(strategy))
    check(num_blocks >= 1, "num_blocks", "expected at least 1", num_blocks)
    check(
        (boundaries is not None) == (strategy == "explicit"),
        "boundaries",
        "expected exactly with strategy 'explicit'",
        f"{boundaries} with {strategy!r}",
    )
    for table in tables:
        check_known("table", table.name, counts.counts)
        counted = counts.counts[table.name].numel()
        place, fits = f"table {table.name!r}", counted == table.num_embeddings
        check(fits, place, f"expected counts of num_embeddings={table.num_embeddings} rows", counted)
    sorted_together: dict[object, list[EmbeddingBagConfig]] = {}
    for table in tables:
        sorted_together.setdefault(table.embedding_dim if scope == "global" else table.name, []).append(table)
    routings: dict[str, RowRouting] = {}
    for members in sorted_together.values():
        merged = torch.cat([counts.counts[table.name] for table in members])
        block_of_row, actual = _cut(merged, strategy, num_blocks, boundaries or (), keep_ties_together)
        for table, rows in zip(members, block_of_row.split([t.num_embeddings for t in members]), strict=True):
            routings[table.name] = _route(rows, actual, counts.counts[table.name] == 0)
    return RowBlocks(
        scope,
        strategy,
        {table.name: routings[table.name] for table in tables},
        {table.name: table.embedding_dim for table in tables},
        dict(counts.max_bag_lengths),
        {t.name: _sum_per_block(routings[t.name], counts.counts[t.name]) for t in tables},
        {t.name: _sum_per_block(routings[t.name], (counts.counts[t.name] > 0).long()) for t in tables},
    )


def _cut(
    counts: Tensor, strategy: str, num_blocks: int, boundaries: Sequence[int], keep_ties_together: bool
) -> tuple[Tensor, int]:
    """Block of every row, ``(N,)`` int64, and the number of blocks that came out."""
    num_rows = counts.numel()
    ordered, order = torch.sort(counts, descending=True, stable=True)
    if strategy == "equal_rows":
        starts = torch.arange(num_blocks) * num_rows // num_blocks
    elif strategy == "equal_mass":
        mass = ordered.cumsum(0)
        shares = -(-torch.arange(1, num_blocks) * mass[-1] // num_blocks)  # rounded up, exact unlike floats
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.searchsorted(mass, shares) + 1])
    elif strategy == "decades":
        rarest = max(1, int(ordered[(ordered > 0).sum() - 1]))
        decade = torch.log10(ordered.clamp(min=rarest).double() * (1 + 1e-12)).floor()
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), decade.diff().nonzero().squeeze(1) + 1])
    else:
        starts = torch.tensor([0, *boundaries])
        rising = bool((starts.diff() > 0).all()) and int(starts[-1]) < num_rows
        check(rising, "boundaries", f"expected rising positions in 1..{num_rows - 1}", list(boundaries))
    if keep_ties_together:
        # A cut inside a run of equal counts moves up to the start of the run.
        starts = torch.searchsorted(-ordered, -ordered[starts.clamp(max=num_rows - 1)])
    starts = torch.unique(starts[starts < num_rows])
    wanted = num_blocks if strategy in ("equal_rows", "equal_mass") else starts.numel()
    if starts.numel() < wanted:
        logger.warning("blocking: %d blocks came out of %d wanted (too few rows or ties)", starts.numel(), wanted)
    block_of_row = torch.empty(num_rows, dtype=torch.int64)
    block_of_row[order] = torch.searchsorted(starts, torch.arange(num_rows), right=True) - 1
    return block_of_row, starts.numel()


def _route(block_of_row: Tensor, num_blocks: int, never_seen: Tensor) -> RowRouting:
    """By boundaries only if they still say it all once never-seen rows are dropped, so that sizes can be told now."""
    seen_first = bool((never_seen.int().diff() >= 0).all())
    if seen_first and bool((block_of_row.diff() >= 0).all()):
        boundaries = torch.searchsorted(block_of_row, torch.arange(num_blocks + 1))
        return RowRouting(block_of_row.numel(), num_blocks, boundaries=boundaries)
    return RowRouting.from_map(block_of_row, num_blocks)


def _sum_per_block(routing: RowRouting, per_row: Tensor) -> Tensor:
    per_block = torch.zeros(routing.num_blocks + 1, dtype=torch.int64)
    return per_block.scatter_add_(0, routing.all_blocks(), per_row)[: routing.num_blocks]
