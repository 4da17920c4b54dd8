"""The forms ``"dense_fp16"``, ``_int8``, ``_int4`` and ``"row_pruned_int8"``, ``_int4``: tables D columns wide.

Row-pruned ones leave out the rows that retain nothing. FBGEMM's own inference kernels are all that serving needs.

Shapes: N rows of a table, K kept rows, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.artifact.forms import Form, Rows, Shard, register
from dnis_torchrec.artifact.mixed_dimension_form import chunks_of
from dnis_torchrec.checks import check
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.dense import DenseEmbeddingBagCollection, dense_rows, kept_rows
from dnis_torchrec.serving.quantized_rows import PRECISIONS

DENSE_FORMS = {f"dense_{precision}": precision for precision in ("fp16", "int8", "int4")}
"""Form -> precision of all N rows."""
ROW_PRUNED_FORMS = {f"row_pruned_{precision}": precision for precision in ("int8", "int4")}
"""Form -> precision of the K rows that retain something."""


def _form(name: str, precision: str, *, drops_rows: bool) -> Form:
    def encode(table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, Tensor]:
        chunks = chunks_of(table, rows, first, last)
        return {"rows": dense_rows(table, chunks, precision=precision, drops_rows=drops_rows, first_row=first)}

    def build(
        scheme: MixedDimensionScheme,
        shards: Mapping[str, Sequence[Shard]],
        *,
        device: torch.device | str,
        unknown_ids: str,
    ) -> EmbeddingBagCollectionInterface:
        rows = {name: _rows_of(table, shards[name]) for name, table in scheme.tables.items()}
        return DenseEmbeddingBagCollection(
            scheme, rows, precision=precision, drops_rows=drops_rows, device=device, unknown_ids=unknown_ids
        )

    def _rows_of(table: TableScheme, shards: Sequence[Shard]) -> Tensor:
        kept, width = kept_rows(table), PRECISIONS[precision].row_bytes(table.embedding_dim)
        for shard in shards:
            shard.check_names({"rows"})
            of_shard, found = kept[shard.first_row : shard.first_row + shard.num_rows], shard.tensors["rows"]
            shape = (int(of_shard.sum()) if drops_rows else shard.num_rows, width)
            fits = found.dtype == torch.uint8 and tuple(found.shape) == shape
            check(fits, shard.place, f"uint8 of shape {shape}", f"{found.dtype} {tuple(found.shape)}", "export again")
        return torch.cat([shard.tensors["rows"] for shard in shards])

    def predicted_bytes(table: TableScheme) -> int:
        num_rows = int(kept_rows(table).sum()) if drops_rows else table.num_embeddings
        return num_rows * PRECISIONS[precision].row_bytes(table.embedding_dim)

    return Form(name=name, encode=encode, build=build, predicted_bytes=predicted_bytes)


for _name, _precision in (DENSE_FORMS | ROW_PRUNED_FORMS).items():
    register(_form(_name, _precision, drops_rows=_name in ROW_PRUNED_FORMS))
