"""QuantizedMixedDimensionEmbeddingBagCollection: mixed-dimension tables in FP32, FP16, INT8 or INT4, to serve only.

Shapes: B batch, D embedding_dim, S blocks, R retained dims of a block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection

from dnis_torchrec.checks import check_known
from dnis_torchrec.forms import precision_named
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.serving.block_collection import BlockCollection
from dnis_torchrec.serving.mixed_dimension import block_tables
from dnis_torchrec.serving.quantized_rows import data_type_of, quantized_collection, quantized_rows, stored_rows


class QuantizedMixedDimensionEmbeddingBagCollection(BlockCollection):
    """Looks bags up in mixed-dimension tables that TorchRec's quantised collection holds; D logical columns per key.

    Values are those of `MixedDimensionEmbeddingBagCollection`, each row off by at most its `error_bound` in the
    columns that its block retains (and exact zeros elsewhere), so a bag by at most the sum of |w_i| times its rows'
    bounds, over L for MEAN. FP32 is exact: the form for serving without a compiler, where one call of FBGEMM's
    inference kernel pools all blocks. Nothing has a gradient. Deterministic, and safe to call from several threads.

    Args:
        scheme: the tables of ONE collection of a model.
        rows: ``"<table>/b<s>"`` -> rows of that block in this precision, see `quantized_block_rows`.
        precision: ``"fp32"``, ``"fp16"``, ``"int8"`` or ``"int4"``.
        device: where to serve.
        unknown_ids: ids below 0 or from N on raise (``"error"``) or contribute zero (``"zero"``; they count in L).

    Shape:
        - Input: at least the collection's features in any order, ids int32 or int64, stride B.
        - Output: KeyedTensor of ``(B, sum of D over features)`` float32, keys as the pruned collection's.

    Raises:
        ValueError: if the scheme holds no table, or tables of several collections; if rows are missing or have another
            shape; for an unknown precision or other `unknown_ids`.

    Example:
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from dnis_torchrec.blocks.row_routing import RowRouting
        >>> table = TableScheme(name="t", collection="ebc", num_embeddings=3, embedding_dim=2, pooling="sum",
        ...     feature_names=("f",), is_weighted=False, routing=RowRouting(3, 2, boundaries=torch.tensor([0, 1, 3])),
        ...     retained=torch.tensor([[True, True], [False, True]]), num_retained=4)
        >>> scheme, weight = MixedDimensionScheme({"t": table}), torch.tensor([[1.0, 2.0], [0.0, 4.0], [0.0, 6.0]])
        >>> ebc = QuantizedMixedDimensionEmbeddingBagCollection.from_tables(scheme, {"t": weight}, precision="int8")
        >>> kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([0, 2, 1]), lengths=torch.tensor([2, 1]))
        >>> ebc(kjt).to_dict()["f"].round(decimals=3).tolist()
        [[1.0, 8.0], [0.0, 4.0]]
    """

    blocks: QuantEmbeddingBagCollection | None

    def __init__(
        self,
        scheme: MixedDimensionScheme,
        rows: Mapping[str, Tensor],
        *,
        precision: str,
        device: torch.device | str = "cpu",
        unknown_ids: str = "error",
    ) -> None:
        stored = precision_named(precision)
        super().__init__(
            scheme,
            dim_multiple=stored.dim_multiple,
            data_type=data_type_of(stored),
            bits=stored.bits,
            unknown_ids=unknown_ids,
        )
        self._precision = precision
        if self._physical:
            is_weighted = self._logical.is_weighted
            self.blocks = quantized_collection(self._physical, rows, is_weighted=is_weighted, device=device)
        self._rows_of_block: tuple[int, list[Tensor]] = (0, [])
        self.to(device)

    @classmethod
    def from_tables(
        cls,
        scheme: MixedDimensionScheme,
        tables: Mapping[str, Tensor],
        *,
        precision: str,
        device: torch.device | str = "cpu",
        unknown_ids: str = "error",
    ) -> QuantizedMixedDimensionEmbeddingBagCollection:
        """Builds the module from dense tables that were merged and pruned; one block is quantised at a time.

        Args:
            scheme: the tables of one collection.
            tables: table name -> ``(N, D)``; read one at a time.
            precision: see the class.
            device: see the class.
            unknown_ids: see the class.

        Raises:
            ValueError: if a table is missing or has another shape, or a value does not fit the precision.
        """
        rows: dict[str, Tensor] = {}
        for name, table in scheme.tables.items():
            check_known("table", name, tables)
            chunks = tables[name].split(rows_per_chunk(table.embedding_dim))
            of_table = quantized_block_rows(table, block_tables(table, chunks), precision)
            rows |= {f"{name}/b{s}": of_block for s, of_block in of_table.items()}
        return cls(scheme, rows, precision=precision, device=device, unknown_ids=unknown_ids)

    def _stock_tables(self) -> list[Tensor] | None:
        if self.blocks is None:
            return []
        if type(self.blocks) is not QuantEmbeddingBagCollection:
            return None
        (kernel,) = self.blocks._emb_modules
        memory = kernel.weights_host if kernel.host_size > 0 else kernel.weights_dev
        if memory.device.type != "cpu":
            return None
        where, tables = self._rows_of_block
        if where != memory.data_ptr():  # the first lookup, or that of a copy
            tables = stored_rows(self.blocks)
            self._rows_of_block = (memory.data_ptr(), tables)
        return tables

    def _tables_elsewhere(self) -> list[Tensor]:
        is_stock = type(self.blocks) is QuantEmbeddingBagCollection
        return stored_rows(self.blocks) if is_stock else super()._tables_elsewhere()

    def _wants_gradient(self) -> bool:
        return False

    def exportable(self) -> BlockCollection:
        """The same lookups for torch.export, which cannot look into FBGEMM's kernels: their tables as plain buffers.

        Returns:
            A module that shares the tables' memory; this one itself where the compiled operator cannot read them.

        Example:
            >>> from dnis_torchrec.blocks.row_routing import RowRouting
            >>> table = TableScheme(name="t", collection="ebc", num_embeddings=2, embedding_dim=2, pooling="sum",
            ...     feature_names=("f",), is_weighted=False, routing=RowRouting(2, 1, boundaries=torch.tensor([0, 2])),
            ...     retained=torch.tensor([[False, True]]), num_retained=2)
            >>> scheme, weight = MixedDimensionScheme({"t": table}), torch.tensor([[0.0, 2.0], [0.0, 4.0]])
            >>> ebc = QuantizedMixedDimensionEmbeddingBagCollection.from_tables(scheme, {"t": weight}, precision="fp16")
            >>> ebc.exportable().lookup(torch.tensor([1, 0]), torch.tensor([0, 1, 2])).tolist()
            [[0.0, 4.0], [0.0, 2.0]]
        """
        tables = self._stock_tables()
        return self if tables is None or not self._compiled else _PackedBlocks(self, tables)


class _PackedBlocks(BlockCollection):
    """Blocks of packed rows without FBGEMM's kernels around them, for the compiled operator alone."""

    def __init__(self, source: QuantizedMixedDimensionEmbeddingBagCollection, tables: list[Tensor]) -> None:
        stored = precision_named(source._precision)
        super().__init__(
            source._scheme,
            dim_multiple=stored.dim_multiple,
            data_type=data_type_of(stored),
            bits=stored.bits,
            unknown_ids="zero" if source._zero_unknown else "error",
        )
        self.tables = nn.Module()
        for (name, s), table in zip(self._stored, tables, strict=True):
            self.tables.register_buffer(f"{name}/b{s}", table)

    def _stock_tables(self) -> list[Tensor]:
        return list(self.tables.buffers())

    def _wants_gradient(self) -> bool:
        return False


def quantized_block_rows(table: TableScheme, blocks: Mapping[int, Tensor], precision: str) -> dict[int, Tensor]:
    """Stores the blocks of one table in some precision.

    Args:
        table: scheme of the table.
        blocks: block -> ``(rows, R)`` float32, as `block_tables` gives them.
        precision: ``"fp32"``, ``"fp16"``, ``"int8"`` or ``"int4"``.

    Returns:
        Block -> ``(rows, bytes)`` uint8, see `quantized_rows`.

    Raises:
        ValueError: for values that do not fit the precision, and for an unknown precision.
    """
    stored = precision_named(precision)
    return {s: quantized_rows(b, stored, place=f"table {table.name!r}, block {s}") for s, b in blocks.items()}
