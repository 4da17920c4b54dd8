r"""Rounding energies: the squared error that storing a column of a block in k bits leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation.row_sample import RowSample, sample_rows, sampled_values
from dnis_torchrec.blocks.bit_fields import WIDTHS, is_coded
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.column_codes import ColumnCodes, check_finite
from dnis_torchrec.blocks.fitted_codes import fit_codes
from dnis_torchrec.blocks.frequency import FrequencyCounts
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.selection.table_shards import (
    collections,
    is_weighted,
    local_shards,
    num_copies,
    ranks_of,
    table_configs_of,
)
from dnis_torchrec.selection.wrapper import soft_selection_modules

BITS = (0, 1, 2, 3, 4, 5, 6, 8)
"""Widths that are offered unless others are asked for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TableEnergies:
    """The rounding energies of one table, and the codes that they were measured with."""

    energy: Tensor
    scale: Tensor
    shift: Tensor


@dataclass(frozen=True, eq=False)
class RoundingEnergies:
    """Rounding energies of all tables of a model, the same on every rank."""

    bits: tuple[int, ...]
    tables: Mapping[str, TableEnergies]

    def codes(self, table: str, bits: Tensor) -> ColumnCodes:
        """The codes of a table at widths that were measured."""
        measured = self.tables[table]
        index = torch.searchsorted(torch.tensor(self.bits), bits.long()).unsqueeze(2)
        coded = is_coded(bits)
        scale, shift = (
            measured.scale.gather(2, index).squeeze(2),
            measured.shift.gather(2, index).squeeze(2),
        )
        return ColumnCodes(
            bits.to(torch.uint8), torch.where(coded, scale, 1.0), shift.masked_fill(~coded, 0)
        )


@dataclass(frozen=True, eq=False)
class BlockedTable:
    """A table that has blocks."""

    config: EmbeddingBagConfig
    collection: str
    is_weighted: bool


def blocked_tables(model: nn.Module, blocks: RowBlocks) -> list[BlockedTable]:
    """The tables of a model that have blocks, in its order. Local."""
    tables = [
        BlockedTable(config, fqn, is_weighted(module))
        for fqn, module in collections(model).items()
        for config in table_configs_of(module)
        if config.name in blocks.routings
    ]
    check(bool(tables), "blocks", "those of tables of the model", sorted(blocks.routings))
    for config in (table.config for table in tables):
        sizes = blocks.routings[config.name].num_embeddings, blocks.embedding_dims[config.name]
        given = config.num_embeddings, config.embedding_dim
        check(sizes == given, f"table {config.name!r}", f"blocks of N, D = {given}", sizes)
    return tables


def check_all_merged(model: nn.Module) -> None:
    """Checks that no alpha is left to be folded into a table. Local."""
    for fqn, wrapper in soft_selection_modules(model).items():
        alpha = wrapper.alpha
        if not all(bool((alpha.of(dim) == 1).all()) for dim in alpha.dims):
            raise RuntimeError(
                describe(
                    f"FQN {fqn!r}", "a merged collection", "alpha below 1", "call merge_ first"
                )
            )


@torch.no_grad()
def rounding_energies(
    model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts, *, bits: Sequence[int] = BITS
) -> RoundingEnergies:
    """Measures the error that every width leaves, on a sample of a few thousand rows of every
    block."""
    others = sorted(set(bits) - set(WIDTHS))
    check(not others, "bits", f"some of {WIDTHS}", others)
    widths = tuple(sorted({0, *bits}))
    check_all_merged(model)
    tables = blocked_tables(model, blocks)
    for config in (table.config for table in tables):
        check_known("table", config.name, counts.counts)
        counted = counts.counts[config.name].numel()
        requirement = f"counts of num_embeddings={config.num_embeddings} rows"
        check(counted == config.num_embeddings, f"table {config.name!r}", requirement, counted)
    holders = {
        fqn: module
        for fqn, module in collections(model).items()
        if fqn in {t.collection for t in tables}
    }
    ranks = ranks_of(*holders.values())
    of_fqn = {fqn: local_shards(module) for fqn, module in holders.items()}
    shards = {
        t.config.name: [s for s in of_fqn[t.collection] if s.table == t.config.name] for t in tables
    }
    shapes = {t.config.name: (t.config.num_embeddings, t.config.embedding_dim) for t in tables}
    copies = num_copies(shards, shapes, ranks)
    found = {}
    for name, own in shards.items():
        routing = blocks.routings[name]
        sample = sample_rows(counts.counts[name], routing)
        values = sampled_values(sample, own, shapes[name][1], copies[name], ranks)
        check_finite(values, sample.blocks, f"table {name!r}")
        found[name] = table_energies(values, sample, routing.num_blocks, widths)
    return RoundingEnergies(widths, found)


def table_energies(
    values: Tensor, sample: RowSample, num_blocks: int, bits: Sequence[int]
) -> TableEnergies:
    """Measures the error that every width leaves on sampled rows of a table. Local and
    deterministic."""
    order = torch.sort(sample.blocks, stable=True).indices
    sizes = torch.bincount(sample.blocks, minlength=num_blocks).tolist()
    parts = zip(values[order].split(sizes), sample.weights[order].split(sizes), strict=True)
    fitted = [fit_codes(of_block, weight, bits) for of_block, weight in parts]
    return TableEnergies(
        energy=torch.stack([codes.error.T for codes in fitted]),
        scale=torch.stack([codes.scale.T for codes in fitted]),
        shift=torch.stack([codes.shift.T for codes in fitted]),
    )
