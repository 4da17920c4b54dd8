"""The forms ``"dense_fp32"``, ``_fp16``, ``_int8``, ``_int4`` and ``"row_pruned_int8"``, ``_int4``:
D columns wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.artifact.forms import Codec, Rows, Shard, register_codec
from dnis_torchrec.artifact.mixed_dimension_form import chunks_of
from dnis_torchrec.checks import check
from dnis_torchrec.forms import Dense, Form, RowPruned
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.dense import DenseEmbeddingBagCollection, dense_rows, kept_rows


def _codec(*, drops_rows: bool) -> Codec:
    def encode(
        form: Form, table: TableScheme, rows: Rows, first: int, last: int
    ) -> dict[str, Tensor]:
        chunks, precision = chunks_of(table, rows, first, last), form.precision.name
        return {
            "rows": dense_rows(
                table, chunks, precision=precision, drops_rows=drops_rows, first_row=first
            )
        }

    def build(
        form: Form,
        scheme: MixedDimensionScheme,
        shards: Mapping[str, Sequence[Shard]],
        *,
        device: torch.device | str,
        unknown_ids: str,
    ) -> EmbeddingBagCollectionInterface:
        rows = {name: _rows_of(form, table, shards[name]) for name, table in scheme.tables.items()}
        return DenseEmbeddingBagCollection(
            scheme,
            rows,
            precision=form.precision.name,
            drops_rows=drops_rows,
            device=device,
            unknown_ids=unknown_ids,
        )

    def _rows_of(form: Form, table: TableScheme, shards: Sequence[Shard]) -> Tensor:
        kept, width = kept_rows(table), form.precision.row_bytes(table.embedding_dim)
        for shard in shards:
            shard.check_names({"rows"})
            of_shard, found = (
                kept[shard.first_row : shard.first_row + shard.num_rows],
                shard.tensors["rows"],
            )
            shape = (int(of_shard.sum()) if drops_rows else shard.num_rows, width)
            fits = found.dtype == torch.uint8 and tuple(found.shape) == shape
            check(
                fits,
                shard.place,
                f"uint8 of shape {shape}",
                f"{found.dtype} {tuple(found.shape)}",
                "export again",
            )
        return torch.cat([shard.tensors["rows"] for shard in shards])

    return Codec(encode=encode, build=build)


register_codec(Dense.layout, _codec(drops_rows=False))
register_codec(RowPruned.layout, _codec(drops_rows=True))
