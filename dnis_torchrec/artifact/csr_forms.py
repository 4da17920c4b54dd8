"""The forms ``"csr_fp32"`` (exact), ``"csr_fp16"`` and ``"csr_int8"``: compressed sparse rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dnis_torchrec.artifact.forms import Codec, Rows, Shard, register_codec
from dnis_torchrec.checks import check
from dnis_torchrec.forms import Csr, Form
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.csr_collection import CsrEmbeddingBagCollection
from dnis_torchrec.serving.csr_table import CsrTable, column_dtype

LOOKUP_TENSORS = frozenset({"compact_row_pointers", "interleaved_rows"})
"""Tensors that are derived from the others, and stored so that lookups find them in a mapped file.
"""
VALUE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
"""Precision -> dtype of the values."""


def csr_of_shard(table: TableScheme, shard: Shard, value_dtype: torch.dtype) -> CsrTable:
    """The rows of a shard; nothing but shapes, dtypes and the outer row pointers is read."""
    scales = {"scales"} if value_dtype == torch.int8 else set()
    brought = LOOKUP_TENSORS & set(shard.tensors)
    shard.check_names({"values", "columns", "row_pointers"} | scales | brought)
    received = shard.tensors["values"].dtype
    check(received == value_dtype, shard.place, f"{value_dtype} values", received, "export again")
    expected = column_dtype(table.embedding_dim)
    received = shard.tensors["columns"].dtype
    check(received == expected, shard.place, f"{expected} columns", received, "export again")
    try:
        rows = CsrTable(embedding_dim=table.embedding_dim, **shard.tensors).prepared()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{shard.place}: {error}; export again") from error
    requirement = f"{shard.num_rows} rows"
    check(
        rows.num_embeddings == shard.num_rows,
        shard.place,
        requirement,
        rows.num_embeddings,
        "export again",
    )
    return rows


def _encode(form: Form, table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, Tensor]:
    sparse = CsrTable.from_rows(rows, first, last, embedding_dim=table.embedding_dim)
    return sparse.quantized(VALUE_DTYPES[form.precision.name]).to_tensors()


def _build(
    form: Form,
    scheme: MixedDimensionScheme,
    shards: Mapping[str, Sequence[Shard]],
    *,
    device: torch.device | str,
    unknown_ids: str,
) -> CsrEmbeddingBagCollection:
    value_dtype = VALUE_DTYPES[form.precision.name]
    tables = {
        name: [csr_of_shard(table, shard, value_dtype) for shard in shards[name]]
        for name, table in scheme.tables.items()
    }
    return CsrEmbeddingBagCollection(scheme, tables, unknown_ids=unknown_ids).to(device)


register_codec(Csr.layout, Codec(encode=_encode, build=_build))
