"""The forms ``"csr"`` (exact), ``"csr_fp16"`` and ``"csr_int8"``: compressed sparse rows.

Shapes: N rows of a table, D embedding_dim, V retained values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dnis_torchrec.artifact.forms import Form, Rows, Shard, register
from dnis_torchrec.checks import check
from dnis_torchrec.ops.interleaved_rows import RowLayout
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, compact_bytes, has_compact_pointers, pointer_bytes
from dnis_torchrec.serving.csr_collection import CsrEmbeddingBagCollection
from dnis_torchrec.serving.csr_table import CsrTable, column_dtype, pointer_dtype

OF_LOOKUPS = frozenset({"compact_row_pointers", "interleaved_rows"})
"""What is derived from the rest, so that lookups find it in a mapped file."""
CSR = "csr"
"""The canonical form: every other one can be made from it."""
VALUE_DTYPES = {CSR: torch.float32, "csr_fp16": torch.float16, "csr_int8": torch.int8}


def csr_of_shard(table: TableScheme, shard: Shard, value_dtype: torch.dtype) -> CsrTable:
    """The rows of a shard; nothing but shapes, dtypes and the outer row pointers is read.

    What lookups read is made of the rest, which is read for it, where an artifact does not bring it.

    Args:
        table: scheme of the table.
        shard: some of its rows in a form of `VALUE_DTYPES`.
        value_dtype: the form's.

    Raises:
        ValueError: if the shard holds something else.
    """
    scales = {"scales"} if value_dtype == torch.int8 else set()
    brought = OF_LOOKUPS & set(shard.tensors)
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
    check(rows.num_embeddings == shard.num_rows, shard.place, requirement, rows.num_embeddings, "export again")
    return rows


def lookup_bytes(form: str, table: TableScheme) -> int:
    """Bytes that lookups of a table read in one of the forms of `VALUE_DTYPES`.

    Args:
        form: its name.
        table: scheme of the table.
    """
    pointers = pointer_bytes(table.num_embeddings, table.embedding_dim, table.num_retained)
    return _row_bytes(table, VALUE_DTYPES[form]) + pointers


def _row_bytes(table: TableScheme, value_dtype: torch.dtype) -> int:
    """Bytes of values, columns and scales."""
    layout = RowLayout.of(value_dtype, column_dtype(table.embedding_dim))
    return layout.num_bytes(table.num_embeddings, table.num_retained)


def _predicted_bytes(table: TableScheme, value_dtype: torch.dtype) -> int:
    compact = compact_bytes(table.num_embeddings) if has_compact_pointers(table.embedding_dim) else 0
    plain = pointer_dtype(table.num_retained).itemsize * (table.num_embeddings + 1)
    return 2 * _row_bytes(table, value_dtype) + plain + compact


def _form(name: str, value_dtype: torch.dtype) -> Form:
    def encode(table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, Tensor]:
        sparse = CsrTable.from_rows(rows, first, last, embedding_dim=table.embedding_dim)
        return sparse.quantized(value_dtype).to_tensors()

    def build(
        scheme: MixedDimensionScheme,
        shards: Mapping[str, Sequence[Shard]],
        *,
        device: torch.device | str,
        unknown_ids: str,
    ) -> CsrEmbeddingBagCollection:
        tables = {
            name: [csr_of_shard(table, shard, value_dtype) for shard in shards[name]]
            for name, table in scheme.tables.items()
        }
        return CsrEmbeddingBagCollection(scheme, tables, unknown_ids=unknown_ids).to(device)

    def predicted_bytes(table: TableScheme) -> int:
        return _predicted_bytes(table, value_dtype)

    return Form(name=name, encode=encode, build=build, predicted_bytes=predicted_bytes)


for _name, _value_dtype in VALUE_DTYPES.items():
    register(_form(_name, _value_dtype))
