"""prune: from a merged model and a requested size to a pruned model and its scheme."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import describe
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.budget import Size, check_compresses
from dnis_torchrec.search.pruning.columns import (
    check_leaves_something,
    keep_columns_,
    kept_columns,
    largest_magnitude,
    nonzero_columns,
)
from dnis_torchrec.search.pruning.elements import (
    check_form_of_elements,
    keep_above_,
    keep_largest_of_tables_,
    num_elements,
)
from dnis_torchrec.search.pruning.schemes import scheme_of
from dnis_torchrec.search.pruning.tables import PrunedTable, pruned_tables, zero_never_seen_
from dnis_torchrec.search.settings import check_pruning


@torch.no_grad()
def prune(
    model: nn.Module,
    blocks: RowBlocks,
    counts: FrequencyCounts,
    *,
    size: Size | None = None,
    threshold: float | None = None,
    structure: str = "block",
    per_table: bool = False,
) -> MixedDimensionScheme:
    """Zeroes all values that are not retained, in place, and returns the scheme of those that are.

    Two structures. ``"element"``: single values, the largest magnitudes stay (paper, eq. 7: ``|E~|
    < eps -> 0``). ``"block"``: whole columns of a block, by mean square over the block's seen rows;
    no padding in the mixed-dimension form. Rows never seen in training are zeroed in both. Tables
    are walked a few rows at a time: nothing of a table's size is ever allocated, only a byte per
    row.

    Distributed: every rank of the model calls it and changes its own shards (row-wise, column-wise,
        table-wise or grid)
    or its copy of a data_parallel table; blocks and counts are those of the whole tables on every
    rank. What is reduced over ranks are histograms, scores of columns and a byte per row, never a
    value of a table. Every rank gets the same scheme, bit for bit that of one process with the same
    tables.

    Args:
        model: a merged model (see `merge_`); its tables change. A collection that has no table in
            `blocks`, such as one that `prepare_` left out, stays as it is and out of the scheme.
        blocks: blocks of its tables.
        counts: training counts; rows that were never seen are zeroed.
        size: how much to retain. With structure ``"element"`` bytes of a CSR form are met to the
            value; with ``"block"`` the largest set of columns that fits is kept.
        threshold: instead of a size: magnitudes (root mean squares of columns) up to this are
            dropped. 0 drops zeros only.
        structure: ``"block"`` or ``"element"``.
        per_table: bring each table to the same ratio, instead of one budget for all of them.

    Returns:
        The scheme, to `export` with the model.

    Raises:
        ValueError: for an unknown structure, not exactly one of size and threshold, a size above
            that of the uncompressed tables, one that cannot be met or a threshold that leaves
            nothing, a model without a collection, or a NaN or infinity in a table of any rank; no
            table has changed then.
        NotImplementedError: for element structure with bytes of a form other than CSR, or tables of
            which some ranks hold copies and some do not.
        RuntimeError: if the model is not merged yet.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> from dnis_torchrec.blocks.blocking import blocks_from_counts
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
        >>> counts = FrequencyCounts({"t": torch.tensor([3, 2, 1, 0])}, {"f": 1}, 6)
        >>> blocks = blocks_from_counts(counts, [table], num_blocks=2)
        >>> ebc = EmbeddingBagCollection(tables=[table])
        >>> prune(ebc, blocks, counts, size=Size(embedding_bytes=42, form="csr_fp32"), structure="element").parameters
        6
    """
    check_pruning(structure=structure, threshold=threshold)
    wanted = _size_or_threshold(size, threshold)
    if isinstance(wanted, Size) and structure == "element":
        check_form_of_elements(wanted.form)
    tables, ranks = pruned_tables(model, blocks, counts)
    if isinstance(wanted, Size):
        check_compresses(wanted, sum(table.num_values for table in tables))
    if structure == "element":
        _prune_elements_(tables, blocks, wanted, per_table, ranks)
        return scheme_of(
            tables, {table.name: nonzero_columns(table, ranks) for table in tables}, ranks
        )
    kept = kept_columns(tables, blocks, wanted, per_table, ranks)  # raises before a table changes
    return _with_columns_(tables, kept, ranks)


@torch.no_grad()
def drop_zeros_(
    model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts
) -> MixedDimensionScheme:
    """Says what a model retains whose dropped columns are zero already; it may be nothing."""
    tables, ranks = pruned_tables(model, blocks, counts)
    return _with_columns_(
        tables, {table.name: nonzero_columns(table, ranks) for table in tables}, ranks
    )


def _with_columns_(
    tables: list[PrunedTable], kept: Mapping[str, Tensor], ranks: Ranks
) -> MixedDimensionScheme:
    """Zeroes rows never seen and all columns but these."""
    zero_never_seen_(tables)
    for table in tables:
        keep_columns_(table, kept[table.name])
    return scheme_of(tables, kept, ranks)


def _size_or_threshold(size: Size | None, threshold: float | None) -> Size | float:
    if size is not None and threshold is None:
        return size
    if size is None and threshold is not None:
        return threshold
    raise ValueError(describe("prune", "exactly one of size and threshold", (size, threshold)))


def _prune_elements_(
    tables: list[PrunedTable],
    blocks: RowBlocks,
    wanted: Size | float,
    per_table: bool,
    ranks: Ranks,
) -> None:
    largest = {table.name: largest_magnitude(table, ranks) for table in tables}
    if not isinstance(wanted, Size):
        check_leaves_something(max(largest.values()), wanted, max(largest.values()) > wanted)
        zero_never_seen_(tables)
        keep_above_(tables, wanted)
        return
    check_leaves_something(max(largest.values()))
    total = sum(table.num_values for table in tables)
    most = max(table.num_values for table in tables if largest[table.name]) if per_table else total
    num_keep = num_elements(
        wanted, blocks, at_least=-(-total // most)
    )  # raises before a table changes
    zero_never_seen_(tables)
    if not per_table:
        keep_largest_of_tables_(tables, num_keep, ranks)
        return
    for table in tables:
        keep_largest_of_tables_([table], num_keep * table.num_values // total, ranks)
