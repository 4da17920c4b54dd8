"""CsrEmbeddingBagCollection: a drop-in for an EmbeddingBagCollection over tables in compressed sparse rows.

The form for rows that retain dims of their own: nothing but the retained values and where they stand is stored, and one
operator pools the bags of all features, straight into the columns of the output.

Shapes: B batch, F features, I ids of a batch, N rows of a table, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.bag_splitting import select_features
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.csr_operator import load_operator
from dnis_torchrec.serving.csr_table import CsrTable
from dnis_torchrec.serving.mixed_dimension import _logical_config

UNKNOWN_IDS = ("error", "zero")
"""What may become of an id that is no row of its table."""


class CsrEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Looks bags up in tables of compressed sparse rows; same keys, dims and values as the pruned collection.

    For a bag with ids i_1 .. i_L and weights w (1 if unweighted),
    ``pooled = sum over i of w_i * scatter_i(values of row i)``, where scatter_i puts a row's values on its retained
    columns of D; MEAN divides by L, the length of the whole bag, as FBGEMM does also for weighted bags.

    A bag of one id gives the bits of the pruned row (float32 values, no weights); longer bags are summed in the order
    of their ids, so the result depends neither on the number of threads nor on the instruction set. Serving only:
    tables are buffers, nothing has a gradient. Safe to call from several threads at once.

    Args:
        scheme: the tables of ONE collection of a model; where their retained dims stand, `tables` says.
        tables: table name -> its rows; buffers are taken as they are, memory-mapped ones too.
        unknown_ids: ids below 0 or from N on raise (``"error"``) or contribute zero (``"zero"``; they count in L).

    Shape:
        - Input: at least the collection's features in any order, ids int32 or int64, stride B.
        - Output: KeyedTensor of ``(B, sum of D over features)``, keys as the pruned collection's: the feature, or
          ``"feature@table"`` where several tables read it.

    Raises:
        ValueError: if the scheme holds no table, or tables of several collections; if a table is missing or has
            other rows or columns than the scheme says.

    Example:
        >>> from dnis_torchrec.row_routing import RowRouting
        >>> from dnis_torchrec.scheme import TableScheme
        >>> table = TableScheme(name="t", collection="ebc", num_embeddings=3, embedding_dim=2, pooling="sum",
        ...     feature_names=("f",), is_weighted=False, routing=RowRouting(3, 1, boundaries=torch.tensor([0, 3])),
        ...     retained=torch.tensor([[True, True]]), num_retained=3)
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 4.0], [0.0, 6.0]])
        >>> ebc = CsrEmbeddingBagCollection.from_tables(MixedDimensionScheme({"t": table}), {"t": weight})
        >>> kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([0, 2, 1]), lengths=torch.tensor([2, 1]))
        >>> ebc(kjt).to_dict()["f"].tolist()
        [[1.0, 6.0], [0.0, 4.0]]
    """

    layout: Tensor

    def __init__(
        self, scheme: MixedDimensionScheme, tables: Mapping[str, CsrTable], *, unknown_ids: str = "error"
    ) -> None:
        super().__init__()
        schemes = list(scheme.tables.values())
        check(bool(schemes), "scheme", "expected at least one table", "none")
        owners = sorted({(table.collection, table.is_weighted) for table in schemes})
        remedy = "build one module for each collection"
        check(len(owners) == 1, "scheme", "expected the tables of one collection", [name for name, _ in owners], remedy)
        check(unknown_ids in UNKNOWN_IDS, "unknown_ids", f"expected one of {UNKNOWN_IDS}", repr(unknown_ids))
        for name, table in scheme.tables.items():
            check_known("table", name, tables)
            shape, received = (table.num_embeddings, table.embedding_dim), tables[name]
            fits = (received.num_embeddings, received.embedding_dim) == shape
            requirement = f"expected rows of shape {shape}"
            check(fits, f"table {name!r}", requirement, (received.num_embeddings, received.embedding_dim))
        load_operator()
        self._is_weighted = schemes[0].is_weighted
        self._zero_unknown = unknown_ids == "zero"
        self._configs = [_logical_config(table) for table in schemes]
        names = get_embedding_names_by_table(self._configs)
        self._embedding_names = [name for names_of_table in names for name in names_of_table]
        self._tables = [table for table in schemes for _ in table.feature_names]
        self._features = [feature for table in schemes for feature in table.feature_names]
        self._dims = [table.embedding_dim for table in self._tables]
        self._width = sum(self._dims)
        self.tables = nn.Module()
        for name in scheme.tables:
            for field, buffer in _buffers_of(tables[name]).items():
                self.tables.register_buffer(f"{name}/{field}", buffer)
        self.register_buffer("layout", self._output_layout(list(scheme.tables)), persistent=False)

    def _output_layout(self, names: list[str]) -> Tensor:
        """Per feature its table, first output column, D, and 1 for MEAN: ``(F, 4)`` int64."""
        rows, first = [], 0
        for table in self._tables:
            rows.append([names.index(table.name), first, table.embedding_dim, int(table.pooling == "mean")])
            first += table.embedding_dim
        return torch.tensor(rows, dtype=torch.int64)

    @classmethod
    def from_tables(
        cls,
        scheme: MixedDimensionScheme,
        tables: Mapping[str, Tensor],
        *,
        value_dtype: torch.dtype = torch.float32,
        unknown_ids: str = "error",
    ) -> CsrEmbeddingBagCollection:
        """Builds the module from dense tables that were merged and pruned; only retained values are copied.

        Args:
            scheme: the tables of one collection.
            tables: table name -> ``(N, D)``; read one at a time.
            value_dtype: float32, float16 or int8, see `CsrTable.quantized`.
            unknown_ids: see the class.

        Raises:
            ValueError: if a table is missing or has another shape.
        """
        for name in scheme.tables:
            check_known("table", name, tables)
        sparse = {name: CsrTable.from_dense(tables[name]).quantized(value_dtype) for name in scheme.tables}
        return cls(scheme, sparse, unknown_ids=unknown_ids)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up.

        Args:
            features: the bags, with weights if the collection is weighted. Keys may stand in any order and need not
                be permuted; keys that nobody reads are passed over.

        Returns:
            Pooled embeddings, D per key.

        Raises:
            ValueError: if a feature or the weights are missing, or an id is unknown and ``"error"`` wanted.
            NotImplementedError: if the features of the batch differ in stride.
        """
        keys = None if features.keys() == self._features else self._positions(features)
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            select_features(features, self._features)  # says why this is refused
        weights = features.weights_or_none() if self._is_weighted else None
        received = "KeyedJaggedTensor"
        check(not self._is_weighted or weights is not None, received, "expected per-sample weights", "none")
        pooled = self._lookup(features.values(), features.offsets(), weights, keys, features.stride())
        return KeyedTensor(keys=self._embedding_names, length_per_key=self._dims, values=pooled)

    def lookup(self, ids: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Looks bags up from plain tensors, as nn.EmbeddingBag takes them: for callers that have no KeyedJaggedTensor.

        Args:
            ids: ``(I,)`` int32 or int64: the bags of the first feature, then those of the second, and so on.
            offsets: ``(F * B + 1,)`` int32 or int64: where each bag begins, and the number of ids.
            per_sample_weights: ``(I,)`` float32.

        Returns:
            ``(B, sum of D over features)`` float32.

        Raises:
            ValueError: if an id is unknown and ``"error"`` wanted.
        """
        batch_size = (offsets.numel() - 1) // len(self._features)
        return self._lookup(ids, offsets, per_sample_weights, None, batch_size)

    def _lookup(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, keys: list[int] | None, batch_size: int
    ) -> Tensor:
        # nn.Module takes longer to find a part by attribute than a lookup of one bag takes
        tables: Any = self._modules["tables"]
        try:
            return torch.ops.dnis_torchrec.csr_embedding_bag.default(
                ids.contiguous(),
                offsets,
                None if weights is None else weights.contiguous(),
                list(tables._buffers.values()),
                self._buffers["layout"],
                keys,
                batch_size,
                self._width,
                self._zero_unknown,
            )
        except ValueError:
            if not self._zero_unknown:
                self._name_unknown_id(ids, offsets, keys, batch_size)
            raise

    def _positions(self, features: KeyedJaggedTensor) -> list[int]:
        """Position of every feature among the keys of a batch."""
        position_of_key = {key: position for position, key in enumerate(features.keys())}
        for name in self._features:
            check_known("feature", name, position_of_key)
        return [position_of_key[name] for name in self._features]

    def _name_unknown_id(self, ids: Tensor, offsets: Tensor, keys: list[int] | None, batch_size: int) -> None:
        """Raises with the names that the operator does not know, if an unknown id is what it stumbled over."""
        for index, (table, feature) in enumerate(zip(self._tables, self._features, strict=True)):
            key = index if keys is None else keys[index]
            first, last = int(offsets[key * batch_size]), int(offsets[(key + 1) * batch_size])
            unknown = [i for i in ids[first:last].tolist() if not 0 <= i < table.num_embeddings]
            if unknown:
                place = f"table {table.name!r}, feature {feature!r}"
                requirement = f"expected ids in 0..{table.num_embeddings - 1} (num_embeddings={table.num_embeddings})"
                remedy = "hash ids as before, or take unknown_ids='zero'"
                raise ValueError(describe(place, requirement, f"id {unknown[0]}", remedy)) from None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the operator there in a process that received the module from another."""
        super().__setstate__(state)
        load_operator()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The logical tables: N rows of D, as before pruning; what DLRM and its like read."""
        return self._configs

    def table_bytes(self) -> int:
        """Bytes of all tables, index bytes counted."""
        return sum(buffer.nbytes for buffer in self.tables.buffers())

    def is_weighted(self) -> bool:
        """Whether bags carry per-sample weights."""
        return self._is_weighted


def _buffers_of(table: CsrTable) -> dict[str, Tensor]:
    """A table's buffers in the order that the operator reads them."""
    scales = {} if table.scales is None else {"scales": table.scales}
    return {"values": table.values, "columns": table.columns, "row_pointers": table.row_pointers} | scales
