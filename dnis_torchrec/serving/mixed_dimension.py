"""MixedDimensionEmbeddingBagCollection: a drop-in for an EmbeddingBagCollection over mixed-dimension tables.

Each block of a table is a table of its own, as wide as the block's retained dims, inside one stock
EmbeddingBagCollection, so that TorchRec's sharders, kernels and quantisation work on it as on any other. The model
sees the logical tables.

Shapes: B batch, N rows of a table, D embedding_dim, S blocks, R retained dims of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.bag_splitting import BagSplitter, FeatureSplit, select_features
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme

VALUES_PER_CHUNK = 2**22
"""Values of a dense table handled at a time: 16 MiB in fp32."""


def rows_per_chunk(embedding_dim: int) -> int:
    """Rows of a dense table that are handled at a time, so that `VALUES_PER_CHUNK` is not exceeded.

    Example:
        >>> rows_per_chunk(64)
        65536
    """
    return max(1, VALUES_PER_CHUNK // embedding_dim)


def stored_blocks(table: TableScheme) -> dict[int, tuple[int, int]]:
    """Blocks that the mixed-dimension form stores: those with rows and retained dims.

    Returns:
        Block -> shape ``(rows, R)`` of its table.
    """
    rows, dims = table.routing.row_counts().tolist(), table.dims.tolist()
    return {s: (rows[s], dims[s]) for s in range(table.routing.num_blocks) if rows[s] and dims[s]}


def block_tables(table: TableScheme, chunks: Iterable[Tensor]) -> dict[int, Tensor]:
    """Cuts one dense table into its blocks' tables: rows ordered by block, retained columns only.

    Args:
        table: scheme of the table.
        chunks: the rows of the table in order, ``(rows, D)`` each, so that no dense table has to exist as a whole;
            ``weight.split(rows)`` makes them from one that does.

    Returns:
        Block -> ``(rows, R)`` float32, as `stored_blocks` says.

    Raises:
        ValueError: if the chunks do not hold N rows of D columns.

    Example:
        >>> from dnis_torchrec.row_routing import RowRouting
        >>> table = TableScheme(name="t", collection="ebc", num_embeddings=3, embedding_dim=2, pooling="sum",
        ...     feature_names=("f",), is_weighted=False, routing=RowRouting(3, 2, boundaries=torch.tensor([0, 1, 3])),
        ...     retained=torch.tensor([[True, True], [False, True]]), num_retained=4)
        >>> weight = torch.tensor([[1.0, 2.0], [0.0, 4.0], [0.0, 6.0]])
        >>> {s: block.tolist() for s, block in block_tables(table, weight.split(2)).items()}
        {0: [[1.0, 2.0]], 1: [[4.0], [6.0]]}
    """
    shapes = stored_blocks(table)
    tables = {s: torch.empty(shape) for s, shape in shapes.items()}
    columns = {s: table.columns(s) for s in shapes}
    filled = dict.fromkeys(shapes, 0)
    first = 0
    for chunk in chunks:
        last = first + len(chunk)
        fits = chunk.dim() == 2 and chunk.shape[1] == table.embedding_dim and last <= table.num_embeddings
        requirement = f"expected rows of shape ({table.num_embeddings}, {table.embedding_dim})"
        check(fits, f"table {table.name!r}", requirement, f"rows {first}..{last - 1} of shape {tuple(chunk.shape)}")
        blocks = table.routing.block_of(torch.arange(first, last))
        for s in blocks.unique().tolist():
            if s in tables:
                rows = (blocks == s).nonzero().squeeze(1).to(chunk.device)
                part = chunk.detach().index_select(0, rows).index_select(1, columns[s].to(chunk.device))
                tables[s][filled[s] : filled[s] + len(rows)] = part
                filled[s] += len(rows)
        first = last
    check(first == table.num_embeddings, f"table {table.name!r}", f"expected {table.num_embeddings} rows", first)
    return tables


class MixedDimensionEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Looks bags up in mixed-dimension tables; same keys, dims and values as the collection that was pruned.

    For a bag with ids i_1 .. i_L and weights w (1 if unweighted),
    ``pooled = sum over blocks s of scatter_s(sum over i in block s of w_i * e_i)``, where scatter_s puts the R values
    of block s on its retained columns of D; MEAN divides by L, the length of the whole bag, as FBGEMM does also for
    weighted bags. Rows of no block and blocks that retain nothing contribute zero.

    Args:
        scheme: the tables of ONE collection of a model.
        device: where the blocks' tables live, the CPU by default; ``"meta"`` leaves them without memory until
            `load_block`, the routing being real all the same.

    Shape:
        - Input: at least the collection's features in any order, ids int32 or int64, stride B.
        - Output: KeyedTensor of ``(B, sum of D over features)``, keys as the pruned collection's: the feature, or
          ``"feature@table"`` where several tables read it.

    Raises:
        ValueError: if the scheme holds no table, or tables of several collections.

    Example:
        >>> from dnis_torchrec.row_routing import RowRouting
        >>> table = TableScheme(name="t", collection="ebc", num_embeddings=3, embedding_dim=2, pooling="sum",
        ...     feature_names=("f",), is_weighted=False, routing=RowRouting(3, 2, boundaries=torch.tensor([0, 1, 3])),
        ...     retained=torch.tensor([[True, True], [False, True]]), num_retained=4)
        >>> weight = torch.tensor([[1.0, 2.0], [0.0, 4.0], [0.0, 6.0]])
        >>> ebc = MixedDimensionEmbeddingBagCollection.from_tables(MixedDimensionScheme({"t": table}), {"t": weight})
        >>> kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([0, 2, 1]), lengths=torch.tensor([2, 1]))
        >>> ebc(kjt).to_dict()["f"].tolist()
        [[1.0, 8.0], [0.0, 4.0]]
    """

    def __init__(self, scheme: MixedDimensionScheme, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        tables = list(scheme.tables.values())
        check(bool(tables), "scheme", "expected at least one table", "none")
        owners = sorted({(table.collection, table.is_weighted) for table in tables})
        remedy = "build one module for each collection"
        check(len(owners) == 1, "scheme", "expected the tables of one collection", [name for name, _ in owners], remedy)
        self._is_weighted = tables[0].is_weighted
        self._scheme = scheme
        self._configs = [_logical_config(table) for table in tables]
        names = get_embedding_names_by_table(self._configs)
        self._embedding_names = [name for names_of_table in names for name in names_of_table]
        self._tables = [table for table in tables for _ in table.feature_names]
        self._features = [feature for table in tables for feature in table.feature_names]
        self._dims = [table.embedding_dim for table in self._tables]
        self.bag_splitter = BagSplitter(
            [
                _feature_split(table, feature, name)
                for table, feature, name in zip(self._tables, self._features, self._embedding_names, strict=True)
            ]
        )
        configs = [config for table, own in zip(tables, names, strict=True) for config in _physical_configs(table, own)]
        self._split_keys = [key for config in configs for key in config.feature_names]
        place = torch.device("cpu" if device is None else device)
        self.blocks: EmbeddingBagCollection | None = None
        if configs:
            self.blocks = EmbeddingBagCollection(tables=configs, is_weighted=self._is_weighted, device=place)
        self.register_buffer("_columns", self._output_columns(), persistent=False)
        if place.type != "meta":
            self.to(place)

    def _output_columns(self) -> Tensor:
        """Output column of every pooled column of the blocks' tables, ``(sum of R over split keys,)``."""
        columns: dict[str, Tensor] = {}
        first = 0
        for table, name in zip(self._tables, self._embedding_names, strict=True):
            columns |= {f"{name}/b{s}": first + table.columns(s) for s in stored_blocks(table)}
            first += table.embedding_dim
        return torch.cat([torch.empty(0, dtype=torch.int64), *(columns[key] for key in self._split_keys)])

    @classmethod
    def from_tables(
        cls,
        scheme: MixedDimensionScheme,
        tables: Mapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
    ) -> MixedDimensionEmbeddingBagCollection:
        """Builds the module from dense tables that were merged and pruned; only retained parts are copied.

        Args:
            scheme: the tables of one collection.
            tables: table name -> ``(N, D)``; read one at a time.
            device: where the blocks' tables go.

        Raises:
            ValueError: if a table is missing or has another shape.
        """
        module = cls(scheme, device="meta")
        for name, table in scheme.tables.items():
            check_known("table", name, tables)
            chunks = tables[name].split(rows_per_chunk(table.embedding_dim))
            for s, weight in block_tables(table, chunks).items():
                module.load_block(name, s, weight.to(device))
        return module.to(device)

    def load_block(self, table: str, block: int, weight: Tensor) -> None:
        """Gives one block its table: without a copy while the module is on the meta device, else into place.

        Args:
            table: table name.
            block: number of a block that has rows and retained dims.
            weight: ``(rows, R)`` float32.

        Raises:
            ValueError: for an unknown table, a block that stores nothing, another shape or dtype.
        """
        check_known("table", table, self._scheme.tables)
        place = f"table {table!r}, block {block}"
        shapes = stored_blocks(self._scheme.tables[table])
        if self.blocks is None or block not in shapes:
            raise ValueError(describe(place, "expected a block with rows and retained dims", "one without"))
        fits = tuple(weight.shape) == shapes[block] and weight.dtype == torch.float32
        received = f"{weight.dtype} {tuple(weight.shape)}"
        check(fits, place, f"expected float32 of shape {shapes[block]}", received)
        bag = self.blocks.embedding_bags[f"{table}/b{block}"]
        if bag.weight.is_meta:
            bag.weight = nn.Parameter(weight)
            self.blocks._device = weight.device
        else:
            with torch.no_grad():
                bag.weight.copy_(weight)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up.

        Args:
            features: the bags, with weights if the collection is weighted.

        Returns:
            Pooled embeddings, D per key.

        Raises:
            ValueError: if a feature or the weights are missing or, on CPU, an id lies outside its table.
            NotImplementedError: if the features of the batch differ in stride.
        """
        bags = select_features(features, self._features)
        self._check(bags)
        values = bags.values()
        pooled = torch.zeros(bags.stride(), sum(self._dims), device=values.device)
        if self.blocks is not None:
            block_pooled = self.blocks(self.bag_splitter(bags))
            pooled = pooled.index_add_(1, self._columns, _in_order(block_pooled, self._split_keys))
        lengths = bags.lengths().view(len(self._features), bags.stride())
        first = 0
        for table, bag_lengths in zip(self._tables, lengths, strict=True):
            if table.pooling == "mean":
                pooled.narrow(1, first, table.embedding_dim).div_(bag_lengths.clamp(min=1).unsqueeze(1))
            first += table.embedding_dim
        return KeyedTensor(keys=self._embedding_names, length_per_key=self._dims, values=pooled)

    def _check(self, bags: KeyedJaggedTensor) -> None:
        has_weights = bags.weights_or_none() is not None
        check(has_weights or not self._is_weighted, "KeyedJaggedTensor", "expected per-sample weights", "none")
        for table, feature, ids in zip(
            self._tables, self._features, bags.values().split(bags.length_per_key()), strict=True
        ):
            if ids.device.type != "cpu":
                torch._assert_async(((ids >= 0) & (ids < table.num_embeddings)).all())
            elif ids.numel():
                low, high = (int(bound) for bound in torch.aminmax(ids))
                requirement = f"expected ids in 0..{table.num_embeddings - 1} (num_embeddings={table.num_embeddings})"
                within = low >= 0 and high < table.num_embeddings
                received = f"id {low if low < 0 else high}"
                check(within, f"table {table.name!r}, feature {feature!r}", requirement, received, "hash ids as before")

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The logical tables: N rows of D, as before pruning; what DLRM and its like read."""
        return self._configs

    def physical_embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables that exist: ``"<table>/b<s>"`` with a block's rows and R columns."""
        return [] if self.blocks is None else self.blocks.embedding_bag_configs()

    def is_weighted(self) -> bool:
        """Whether bags carry per-sample weights."""
        return self._is_weighted


def _logical_config(table: TableScheme) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=list(table.feature_names),
        pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
    )


def _physical_configs(table: TableScheme, embedding_names: list[str]) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"{table.name}/b{s}",
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=[f"{name}/b{s}" for name in embedding_names],
        )
        for s, (rows, dim) in stored_blocks(table).items()
    ]


def _feature_split(table: TableScheme, feature: str, embedding_name: str) -> FeatureSplit:
    stored = stored_blocks(table)
    keys = tuple(f"{embedding_name}/b{s}" if s in stored else None for s in range(table.routing.num_blocks))
    return FeatureSplit(feature=feature, keys=keys, routing=table.routing, local_ids=True)


def _in_order(pooled: KeyedTensor, keys: list[str]) -> Tensor:
    """Values in the order of `keys`; a sharded collection may group its keys by sharding type."""
    if pooled.keys() == keys:
        return pooled.values()
    by_key = pooled.to_dict()
    return torch.cat([by_key[key] for key in keys], dim=1)
