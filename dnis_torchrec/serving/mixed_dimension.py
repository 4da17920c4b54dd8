"""MixedDimensionEmbeddingBagCollection: a drop-in for an EmbeddingBagCollection over
mixed-dimension tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.checks import check, check_known
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.serving.block_collection import BlockCollection


def block_tables(table: TableScheme, chunks: Iterable[Tensor]) -> dict[int, Tensor]:
    """Cuts one dense table into its blocks' tables: rows ordered by block, retained columns only."""
    shapes = table.stored_blocks()
    tables = {s: torch.empty(shape) for s, shape in shapes.items()}
    columns = {s: table.columns(s) for s in shapes}
    filled = dict.fromkeys(shapes, 0)
    first = 0
    for chunk in chunks:
        last = first + len(chunk)
        fits = (
            chunk.dim() == 2
            and chunk.shape[1] == table.embedding_dim
            and last <= table.num_embeddings
        )
        requirement = f"rows of shape ({table.num_embeddings}, {table.embedding_dim})"
        check(
            fits,
            f"table {table.name!r}",
            requirement,
            f"rows {first}..{last - 1} of shape {tuple(chunk.shape)}",
        )
        blocks = table.routing.block_of(torch.arange(first, last))
        for s in blocks.unique().tolist():
            if s in tables:
                rows = (blocks == s).nonzero().squeeze(1).to(chunk.device)
                part = (
                    chunk.detach()
                    .index_select(0, rows)
                    .index_select(1, columns[s].to(chunk.device))
                )
                tables[s][filled[s] : filled[s] + len(rows)] = part
                filled[s] += len(rows)
        first = last
    check(
        first == table.num_embeddings,
        f"table {table.name!r}",
        f"{table.num_embeddings} rows",
        first,
    )
    return tables


def _with_new_rows(table: TableScheme, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    """The rows of a table in order, those of no block drawn as TorchRec draws a table's."""
    first, bound = 0, table.num_embeddings**-0.5
    for chunk in chunks:
        last = first + len(chunk)
        if (
            chunk.dim() == 2 and last <= table.num_embeddings
        ):  # else `block_tables` says what is wrong
            is_new = table.routing.block_of(torch.arange(first, last)) == table.routing.num_blocks
            if is_new.any():
                drawn = torch.empty(chunk.shape).uniform_(-bound, bound).to(chunk)
                chunk = torch.where(is_new.to(chunk.device).unsqueeze(1), drawn, chunk)
        first = last
        yield chunk


class MixedDimensionEmbeddingBagCollection(BlockCollection):
    """Looks bags up in mixed-dimension tables; same keys, dims and values as the collection that
    was pruned.

    For a bag with ids i_1 .. i_L and weights w (1 if unweighted),
    ``pooled = sum over blocks s of scatter_s(sum over i in block s of w_i * e_i)``, where scatter_s
    puts the R values of block s on its retained columns of D; MEAN divides by L, the length of the
    whole bag, as FBGEMM does also for weighted bags. Rows of no block and blocks that retain
    nothing contribute zero.

    It is to train further, alone or under DistributedModelParallel: the sharder finds the stock
    collection inside, ``.blocks``, and what is pruned stays pruned because it does not exist.
    Routing and merging are local and replicated; the collectives are those of the sharded
    collection. To serve, `PackedEmbeddingBagCollection` reads the same values faster.

    Args:
        scheme: the tables of ONE collection of a model.
        device: where the blocks' tables live, the CPU by default; ``"meta"`` leaves them without
            memory until `load_block`, the routing being real all the same.
        dim_multiple: widths of the blocks' tables are rounded up to it. TorchRec's fused kernels
            want 4; the dense kernel (data_parallel), and serving, want no more than 1.
        unknown_ids: ids below 0 or from N on raise (``"error"``) or contribute zero (``"zero"``;
            they count in L).

    Shape:
        - Input: at least the collection's features in any order, ids int32 or int64, stride B.
        - Output: KeyedTensor of ``(B, sum of D over features)``, keys as the pruned collection's:
        the feature, or
          ``"feature@table"`` where several tables read it.

    Raises:
        ValueError: if the scheme holds no table, or tables of several collections; for other
            `unknown_ids`.

    Example:
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from dnis_torchrec.blocks.routing import RowRouting
        >>> table = TableScheme(name="t", collection="ebc", num_embeddings=3, embedding_dim=2, pooling="sum",
        ...     feature_names=("f",), is_weighted=False, routing=RowRouting(3, 2, boundaries=torch.tensor([0, 1, 3])),
        ...     retained=torch.tensor([[True, True], [False, True]]), num_retained=4)
        >>> weight = torch.tensor([[1.0, 2.0], [0.0, 4.0], [0.0, 6.0]])
        >>> ebc = MixedDimensionEmbeddingBagCollection.from_tables(MixedDimensionScheme({"t": table}), {"t": weight})
        >>> kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([0, 2, 1]), lengths=torch.tensor([2, 1]))
        >>> ebc(kjt).to_dict()["f"].tolist()
        [[1.0, 8.0], [0.0, 4.0]]
    """

    blocks: EmbeddingBagCollection | None

    def __init__(
        self,
        scheme: MixedDimensionScheme,
        *,
        device: torch.device | str | None = None,
        dim_multiple: int = 1,
        unknown_ids: str = "error",
    ) -> None:
        check(dim_multiple >= 1, "dim_multiple", "an integer >= 1", dim_multiple)
        super().__init__(scheme, dim_multiple=dim_multiple, unknown_ids=unknown_ids)
        place = torch.device("cpu" if device is None else device)
        if self._physical:
            is_weighted = self._logical.is_weighted
            self.blocks = EmbeddingBagCollection(
                tables=self._physical, is_weighted=is_weighted, device=place
            )
            self._fill_padding(place)
        if place.type != "meta":
            self.to(place)

    def _fill_padding(self, place: torch.device) -> None:
        """Zeros in columns that are never read: a checkpoint or a norm should not show chance."""
        if place.type == "meta" or self.blocks is None:
            return
        for name, s in self._stored:
            _, (_, dim) = self._check_block(name, s)
            with torch.no_grad():
                self.blocks.embedding_bags[f"{name}/b{s}"].weight[:, dim:] = 0.0

    @classmethod
    def from_tables(
        cls,
        scheme: MixedDimensionScheme,
        tables: Mapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        dim_multiple: int = 1,
        unknown_ids: str = "error",
        new_rows: bool = True,
    ) -> MixedDimensionEmbeddingBagCollection:
        """Builds the module from dense tables that were merged and pruned; only retained parts are
        copied.

        It is to train on, so rows of no block, as those that the counts never saw, have a place in
        the last block that retains a column, and learn once they turn up. They begin as TorchRec's
        rows do, uniform within 1 / sqrt(N).

        Args:
            scheme: the tables of one collection.
            tables: table name -> ``(N, D)``; read one at a time.
            device: where the blocks' tables go.
            dim_multiple: see the class.
            unknown_ids: see the class.
            new_rows: False gives rows of no block no place, as in exported tables: they are zero
                for good.

        Raises:
            ValueError: if a table is missing or has another shape.
        """
        stored = {
            name: table.with_new_rows() if new_rows else table
            for name, table in scheme.tables.items()
        }
        module = cls(
            MixedDimensionScheme(stored),
            device="meta",
            dim_multiple=dim_multiple,
            unknown_ids=unknown_ids,
        )
        for name, table in scheme.tables.items():
            check_known("table", name, tables)
            chunks: Iterable[Tensor] = (
                tables[name].detach().split(rows_per_chunk(table.embedding_dim))
            )
            chunks = _with_new_rows(table, chunks) if new_rows else chunks
            for s, block in block_tables(stored[name], chunks).items():
                module.load_block(name, s, block.to(device))
        return module.to(device)

    def load_block(self, table: str, block: int, weight: Tensor) -> None:
        """Gives one block its table: without a copy while the module is on the meta device, else
        into place.

        Args:
            table: table name.
            block: number of a block that has rows and retained dims.
            weight: ``(rows, R)`` float32.

        Raises:
            ValueError: for an unknown table, a block that stores nothing, another shape or dtype.
        """
        place, shape = self._check_block(table, block)
        fits = tuple(weight.shape) == shape and weight.dtype == torch.float32
        check(fits, place, f"float32 of shape {shape}", f"{weight.dtype} {tuple(weight.shape)}")
        assert self.blocks is not None  # a block that stores something was found
        bag = self.blocks.embedding_bags[f"{table}/b{block}"]
        if bag.weight.is_meta:
            missing = bag.weight.shape[1] - shape[1]
            bag.weight = nn.Parameter(
                nn.functional.pad(weight, (0, missing)) if missing else weight
            )
            self.blocks._device = weight.device
        else:
            with torch.no_grad():
                bag.weight[:, : shape[1]] = weight
