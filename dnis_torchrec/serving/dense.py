"""DenseEmbeddingBagCollection: pruned tables D columns wide, in FP32, FP16, INT8 or INT4, without
the rows of no value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.checks import check, check_known
from dnis_torchrec.forms import Precision, precision_named
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.serving.logical_tables import LogicalCollection, checked_bags
from dnis_torchrec.serving.quantized_rows import (
    data_type_of,
    quantized_collection,
    quantized_rows,
    stored_rows,
)


def kept_rows(table: TableScheme) -> Tensor:
    """Rows that retain something, as the scheme tells: ``(N,)`` bool. A table of which none does
    keeps its first row."""
    retains = torch.cat([table.dims > 0, torch.zeros(1, dtype=torch.bool)])
    kept = retains[table.routing.all_blocks()]
    if not bool(kept.any()):
        kept[0] = True  # FBGEMM knows no table without rows
    return kept


def dense_rows(
    table: TableScheme,
    chunks: Iterable[Tensor],
    *,
    precision: str,
    drops_rows: bool,
    first_row: int = 0,
) -> Tensor:
    """The rows of one table that `DenseEmbeddingBagCollection` stores, or those among some
    consecutive rows of it."""
    stored, place = precision_named(precision), f"table {table.name!r}"
    _check_dim(table, stored)
    kept = kept_rows(table) if drops_rows else torch.ones(table.num_embeddings, dtype=torch.bool)
    parts = []
    for chunk in chunks:
        fits = (
            chunk.dim() == 2
            and chunk.shape[1] == table.embedding_dim
            and first_row + len(chunk) <= len(kept)
        )
        requirement = f"rows of shape ({table.num_embeddings}, {table.embedding_dim})"
        check(fits, place, requirement, f"rows from {first_row} on of shape {tuple(chunk.shape)}")
        mask = kept[first_row : first_row + len(chunk)].to(chunk.device)
        parts.append(quantized_rows(chunk.detach()[mask].cpu(), stored, place=place))
        first_row += len(chunk)
    return torch.cat(parts)


class DenseEmbeddingBagCollection(LogicalCollection):
    """Looks bags up in tables of D columns that TorchRec's quantised collection holds."""

    limits: Tensor
    unknown: Tensor

    def __init__(
        self,
        scheme: MixedDimensionScheme,
        rows: Mapping[str, Tensor],
        *,
        precision: str,
        drops_rows: bool,
        device: torch.device | str = "cpu",
        unknown_ids: str = "error",
    ) -> None:
        super().__init__(scheme, unknown_ids=unknown_ids)
        stored = precision_named(precision)
        remaps = {
            name: _index_remap(table) if drops_rows else None
            for name, table in scheme.tables.items()
        }
        configs = [
            self._physical_config(table, stored, remaps[name])
            for name, table in scheme.tables.items()
        ]
        self.tables = quantized_collection(
            configs, rows, is_weighted=self._logical.is_weighted, device=device
        )
        _set_remaps(self.tables, [remaps[table.name] for table in self._logical.tables])
        # FBGEMM passes over index -1; a remap, which is asked first, has it in its last place
        unknown = [
            -1 if remaps[table.name] is None else table.num_embeddings
            for table in self._logical.tables
        ]
        self.register_buffer("unknown", torch.tensor(unknown), persistent=False)
        self.register_buffer("limits", self._logical.limits(), persistent=False)
        self.to(device)

    def _physical_config(
        self, table: TableScheme, stored: Precision, remap: Tensor | None
    ) -> EmbeddingBagConfig:
        _check_dim(table, stored)
        readers = zip(self._logical.names, self._logical.tables, strict=True)
        return EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            num_embeddings_post_pruning=None if remap is None else int((remap >= 0).sum()),
            embedding_dim=table.embedding_dim,
            feature_names=[name for name, other in readers if other.name == table.name],
            data_type=data_type_of(stored),
        )

    @classmethod
    def from_tables(
        cls,
        scheme: MixedDimensionScheme,
        tables: Mapping[str, Tensor],
        *,
        precision: str,
        drops_rows: bool,
        device: torch.device | str = "cpu",
        unknown_ids: str = "error",
    ) -> DenseEmbeddingBagCollection:
        """Builds the module from dense tables that were merged and pruned."""
        for name in scheme.tables:
            check_known("table", name, tables)
        rows = {
            name: dense_rows(
                table,
                tables[name].split(rows_per_chunk(table.embedding_dim)),
                precision=precision,
                drops_rows=drops_rows,
            )
            for name, table in scheme.tables.items()
        }
        return cls(
            scheme,
            rows,
            precision=precision,
            drops_rows=drops_rows,
            device=device,
            unknown_ids=unknown_ids,
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up."""
        bags = checked_bags(
            features, self._logical, self.limits, self.unknown if self._zero_unknown else None
        )
        if features.stride() == 0:  # FBGEMM's remapping refuses a batch of no sample
            return self._logical.keyed(
                torch.zeros(0, sum(self._logical.dims), device=features.device())
            )
        return self._logical.keyed(
            self._logical.divide_means_(self.tables(bags).values(), features)
        )

    def table_bytes(self) -> int:
        """Bytes of all tables, and of the index remapping."""
        (kernel,) = self.tables._emb_modules
        return (
            sum(rows.nbytes for rows in stored_rows(self.tables))
            + kernel.index_remappings_array.nbytes
        )


def _check_dim(table: TableScheme, stored: Precision) -> None:
    multiple = stored.dim_multiple
    requirement = f"an embedding_dim that is a multiple of {multiple} for {stored.name}"
    fits = table.embedding_dim % multiple == 0
    remedy = "take a mixed_dimension form, which rounds up by itself, or another precision"
    check(fits, f"table {table.name!r}", requirement, table.embedding_dim, remedy)


def _index_remap(table: TableScheme) -> Tensor | None:
    """Kept row of every row, -1 for dropped ones, and -1 once more for unknown ids: ``(N + 1,)``
    int32."""
    kept = kept_rows(table)
    if bool(kept.all()):
        return None
    check(
        len(kept) < 2**31,
        f"table {table.name!r}",
        "fewer than 2^31 rows",
        len(kept),
        "take another form",
    )
    remap = torch.where(kept, kept.cumsum(0) - 1, -1)
    return torch.cat([remap, torch.tensor([-1])]).to(torch.int32)


def _set_remaps(tables: QuantEmbeddingBagCollection, remaps: list[Tensor | None]) -> None:
    """Gives FBGEMM's kernel a remap per feature."""
    given = [remap for remap in remaps if remap is not None]
    if not given:
        return
    (kernel,) = tables._emb_modules
    device, rows = kernel.current_device, kernel.rows_per_table.tolist()
    sizes = torch.tensor([0 if remap is None else remap.numel() for remap in remaps])
    kernel.index_remappings_array = torch.cat(given).to(device)
    kernel.index_remappings_array_offsets = torch.cat(
        [torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]
    ).to(device)
    original = [
        rows[feature] if remap is None else remap.numel() for feature, remap in enumerate(remaps)
    ]
    kernel.original_rows_per_table = torch.tensor(original, device=device)
