"""Mixed-dimension tables to train on: a stock table per block of rows."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.serving.tables import (
    LogicalCollection,
    LogicalTables,
    checked_bags,
    divide_means_,
    scripted_bags,
)


class BagRouter(nn.Module):
    """Cuts every bag by block and replaces ids by their position within the block's table."""

    limits: Tensor
    cuts: Tensor
    unit: Tensor
    places: Tensor | None

    def __init__(
        self, logical: LogicalTables, places: list[tuple[int, int]], *, unknown_ids: str
    ) -> None:
        super().__init__()
        self._logical, self._zero_unknown = logical, unknown_ids == "zero"
        self._features, self._names = logical.features, logical.names
        self._is_weighted = logical.is_weighted
        self._keys = [f"{logical.names[feature]}/b{s}" for feature, s in places]
        self.register_buffer("limits", logical.limits(), persistent=False)
        self.register_buffer("cuts", self._block_cuts(), persistent=False)
        num_features, num_blocks = len(logical.features), self.cuts.shape[1] - 1
        slots = [s * num_features + feature for feature, s in places]
        is_complete = slots == list(range(num_blocks * num_features))
        order = None if is_complete else torch.tensor(slots, dtype=torch.int32)
        self.register_buffer("places", order, persistent=False)
        self.register_buffer("unit", torch.ones(num_features, dtype=torch.int64), persistent=False)
        self._map_of_feature = self._register_maps()

    def _block_cuts(self) -> Tensor:
        """Per feature where its blocks end once rows are ordered by block, ``(F, most blocks + 2)``
        int64."""
        ends = [table.routing.row_counts().cumsum(0) for table in self._logical.tables]
        most = max(len(of_table) for of_table in ends)
        cuts = torch.zeros(len(ends), most + 2, dtype=torch.int64)
        for row, of_table, table in zip(cuts, ends, self._logical.tables, strict=True):
            row[1 : len(of_table) + 1], row[len(of_table) + 1 :] = of_table, of_table[-1]
            row[-1] = table.num_embeddings + 1
        return cuts

    def _register_maps(self) -> list[str]:
        """Registers for each table whose rows are not ordered by block where they stand, and for
        unknown ids; names them per feature, "" where there is none."""
        self.maps, names = nn.Module(), dict[str, str]()
        for table in self._logical.tables:
            if table.name not in names:
                positions = table.routing.positions()
                names[table.name] = "" if positions is None else f"positions_{len(names)}"
                if positions is not None:
                    # ids of no row stand behind the last one
                    beyond = torch.tensor([table.num_embeddings], dtype=positions.dtype)
                    self.maps.register_buffer(
                        names[table.name], torch.cat([positions, beyond]), persistent=False
                    )
        return [names[table.name] for table in self._logical.tables]

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Cuts every bag."""
        if torch.jit.is_scripting():
            keys, names, limits = self._features, self._names, self.limits
            zero, is_weighted = self._zero_unknown, self._is_weighted
            bags = scripted_bags(features, keys, names, limits, zero, is_weighted)
        else:
            unknown = self.limits if self._zero_unknown else None
            bags = checked_bags(features, self._logical, self.limits, unknown)
        batch_size, num_blocks = bags.stride(), self.cuts.shape[1] - 1
        lengths, ids, weights, _, _ = torch.ops.fbgemm.block_bucketize_sparse_features(
            bags.lengths(),
            self._located(bags),
            False,
            False,
            self.unit,
            num_blocks,
            bags.weights_or_none(),
            block_bucketize_pos=list(self.cuts.unbind(0)),
        )
        places = self.places
        if places is not None:
            num_bags = num_blocks * self.cuts.shape[0]  # of 0 samples -1 has no meaning
            lengths = lengths.view(num_bags, batch_size)
            lengths, ids, weights = torch.ops.fbgemm.permute_2D_sparse_data(
                places, lengths, ids, weights
            )
        return KeyedJaggedTensor(
            keys=self._keys,
            values=ids,
            weights=weights,
            lengths=lengths.view(-1),
            stride=batch_size,
        )

    def _located(self, bags: KeyedJaggedTensor) -> Tensor:
        """Ids as rows ordered by block have them."""
        maps: dict[str, Tensor] = {}
        for name, buffer in self.maps.named_buffers():
            maps[name] = buffer
        parts = list(bags.values().split(bags.length_per_key()))
        for index, name in enumerate(self._map_of_feature):
            if name:
                parts[index] = maps[name].index_select(0, parts[index]).long()
        return torch.cat(parts)


def rounded_up(dim: int, multiple: int) -> int:
    """The least multiple that is no less than a number of columns."""
    return -(-dim // multiple) * multiple


class BlockMerge(nn.Module):
    """Adds what each block's table gave to its columns of the output; divides MEAN tables by L.
    Local, no parameter."""

    columns: Tensor
    real_columns: Tensor | None

    def __init__(
        self, logical: LogicalTables, places: list[tuple[int, int]], *, dim_multiple: int
    ) -> None:
        super().__init__()
        self._features, self._dims, self._is_mean = logical.features, logical.dims, logical.is_mean
        self._keys = [f"{logical.names[feature]}/b{s}" for feature, s in places]
        first_columns, columns, real_columns, first = logical.first_columns, [], [], 0
        for feature, s in places:
            of_block = logical.tables[feature].columns(s)
            columns.append(first_columns[feature] + of_block)
            real_columns.append(first + torch.arange(len(of_block)))
            first += rounded_up(len(of_block), dim_multiple)
        none = [torch.empty(0, dtype=torch.int64)]
        self.register_buffer("columns", torch.cat(columns or none), persistent=False)
        without_padding = None if first == len(self.columns) else torch.cat(real_columns)
        self.register_buffer("real_columns", without_padding, persistent=False)

    def forward(self, pooled_values: KeyedTensor | None, features: KeyedJaggedTensor) -> Tensor:
        """Merges the blocks' parts."""
        out = torch.zeros(features.stride(), sum(self._dims), device=features.values().device)
        if pooled_values is not None:
            values, real_columns = self._in_order(pooled_values), self.real_columns
            if real_columns is not None:
                values = values.index_select(1, real_columns)
            out = out.index_add(1, self.columns, values)
        return divide_means_(out, features, self._features, self._dims, self._is_mean)

    def _in_order(self, pooled_values: KeyedTensor) -> Tensor:
        """Values in the order of the keys; a sharded collection may group its keys by sharding
        type."""
        if pooled_values.keys() == self._keys:
            return pooled_values.values()
        by_key = pooled_values.to_dict()
        return torch.cat([by_key[key] for key in self._keys], dim=1)


def block_tables(table: TableScheme, chunks: Iterable[Tensor]) -> dict[int, Tensor]:
    """Cuts a dense table into its blocks' tables: rows by block, retained columns only."""
    shapes = table.stored_blocks()
    tables = {s: torch.empty(shape) for s, shape in shapes.items()}
    columns = {s: table.columns(s) for s in shapes}
    counts, first, place = dict.fromkeys(shapes, 0), 0, f"table {table.name!r}"
    for chunk in chunks:
        last = first + len(chunk)
        fits = chunk.shape[1:] == (table.embedding_dim,) and last <= table.num_embeddings
        requirement = f"rows of shape ({table.num_embeddings}, {table.embedding_dim})"
        text = f"rows {first}..{last - 1} of shape {tuple(chunk.shape)}"
        check(fits, place, requirement, text)
        blocks = table.routing.block_of(torch.arange(first, last))
        for s in blocks.unique().tolist():
            if s in tables:
                rows = (blocks == s).nonzero().squeeze(1).to(chunk.device)
                part = chunk.detach().index_select(0, rows)
                part = part.index_select(1, columns[s].to(chunk.device))
                tables[s][counts[s] : counts[s] + len(rows)] = part
                counts[s] += len(rows)
        first = last
    check(first == table.num_embeddings, place, f"{table.num_embeddings} rows", first)
    return tables


@torch.no_grad()
def widened_table(table: TableScheme, blocks: Mapping[int, Tensor]) -> Tensor:
    """Rows of the dense table from those of its blocks, which `block_tables` has cut: zeros where a
    block has no column. Of one number for each row, ``(N,)``."""
    values = next(iter(blocks.values()))
    shape = (table.num_embeddings, table.embedding_dim)[: values.dim()]
    whole, of_rows = values.new_zeros(shape), table.routing.all_blocks()
    for s, block in blocks.items():
        rows, columns = (of_rows == s).nonzero().to(block.device), table.columns(s)
        if block.dim() == 1:
            whole[rows.squeeze(1)] = block
        else:  # columns behind those that it retains are padding
            whole[rows, columns.to(block.device)] = block[:, : len(columns)]
    return whole


def draw_new_rows(table: TableScheme, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    """The rows of a table in order, those of no block drawn as TorchRec draws a table's."""
    first, bound = 0, table.num_embeddings**-0.5
    for chunk in chunks:
        last = first + len(chunk)
        # else `block_tables` says what is wrong
        if chunk.dim() == 2 and last <= table.num_embeddings:
            is_new = table.routing.block_of(torch.arange(first, last)) == table.routing.num_blocks
            if is_new.any():
                drawn = torch.empty(chunk.shape).uniform_(-bound, bound).to(chunk)
                chunk = torch.where(is_new.to(chunk.device).unsqueeze(1), drawn, chunk)
        first = last
        yield chunk


def _digest(scheme: MixedDimensionScheme) -> list[int]:
    """SHA-256 of all that says which value of a block's table is which."""
    digest = hashlib.sha256()
    for name, table in scheme.tables.items():
        parts = {"retained": table.retained, **table.routing.to_tensors()}
        for part, tensor in parts.items():
            digest.update(f"{name}/{part}".encode() + tensor.contiguous().numpy().tobytes())
    return list(digest.digest())


class MixedDimensionEmbeddingBagCollection(LogicalCollection):
    """Looks bags up in mixed-dimension tables; same keys, dims and values as the collection that
    was pruned.

    For a bag with ids i_1 .. i_L and weights w (1 if unweighted),
    ``pooled = sum over blocks s of scatter_s(sum over i in block s of w_i * e_i)``, where scatter_s
    puts the R values of block s on its retained columns of D; MEAN divides by L, the length of the
    whole bag, as FBGEMM does also for weighted bags. Rows of no block and blocks that retain
    nothing contribute zero.

    It is to train further, alone or under DistributedModelParallel: the sharder finds the stock
    collection inside, ``.blocks``. Widths of its tables are multiples of `dim_multiple`, of which
    TorchRec's fused kernels want 4. To serve, `PackedEmbeddingBagCollection` is faster.
    """

    def __init__(
        self,
        scheme: MixedDimensionScheme,
        *,
        device: torch.device | str | None = None,
        dim_multiple: int = 1,
        unknown_ids: str = "error",
    ) -> None:
        check(dim_multiple >= 1, "dim_multiple", "an integer >= 1", dim_multiple)
        super().__init__(scheme, unknown_ids=unknown_ids)
        place = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("cpu"):  # what says where values are is real, also under "meta"
            self._make_parts(scheme, place, dim_multiple, unknown_ids)
        if place.type != "meta":
            self.to(place)

    def _make_parts(
        self, scheme: MixedDimensionScheme, place: torch.device, dim_multiple: int, unknown_ids: str
    ) -> None:
        self._scheme, self._digest = scheme, _digest(scheme)
        self.register_buffer("scheme_sha256", torch.tensor(self._digest, dtype=torch.uint8))
        shapes = {name: table.stored_blocks() for name, table in scheme.tables.items()}
        most = max(table.routing.num_blocks for table in scheme.tables.values())
        by_feature, names = list(enumerate(self._logical.tables)), self._logical.names
        readers = [(i, s) for s in range(most) for i, t in by_feature if s in shapes[t.name]]
        self._physical, self._stored = list[EmbeddingBagConfig](), list[tuple[str, int]]()
        for s in range(most):
            for table in (name for name in scheme.tables if s in shapes[name]):
                num_rows, dim = shapes[table][s]
                features = [f"{names[i]}/b{s}" for i, t in by_feature if t.name == table]
                self._physical.append(
                    EmbeddingBagConfig(
                        name=f"{table}/b{s}",
                        num_embeddings=num_rows,
                        embedding_dim=rounded_up(dim, dim_multiple),
                        feature_names=features,
                    )
                )
                self._stored.append((table, s))
        self.router = BagRouter(self._logical, readers, unknown_ids=unknown_ids)
        self.merge = BlockMerge(self._logical, readers, dim_multiple=dim_multiple)
        self.blocks: EmbeddingBagCollection | None = None
        if self._physical:
            is_weighted = self._logical.is_weighted
            self.blocks = EmbeddingBagCollection(self._physical, is_weighted, place)
            self._fill_padding(place)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Refuses tables of blocks that another scheme has cut."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        digest = state_dict.get(f"{prefix}scheme_sha256")
        is_same = digest is not None and (digest.is_meta or digest.tolist() == self._digest)
        if not is_same and any(key.startswith(f"{prefix}blocks.") for key in state_dict):
            place, value = prefix.removesuffix(".") or "the model", "another or none"
            remedy, errors = "build it with the saved scheme", rest[-1]
            errors.append(describe(place, "values cut by its own scheme", value, remedy))

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
    ) -> Self:
        """Builds the module from dense tables that were merged and pruned; only retained parts are
        copied.

        It is to train on, so rows of no block, or of one that retains no column, as those that the
        counts never saw, have a place in the last block that retains one, and learn once they turn
        up. Rows of no block begin as TorchRec's rows do, uniform within 1 / sqrt(N), the others
        with the values that they have.
        ``new_rows=False`` gives such rows no place, as in exported tables: they are zero for good.
        """
        schemes = dict(scheme.tables)
        if new_rows:
            schemes = {name: table.with_new_rows() for name, table in schemes.items()}
        options: dict[str, Any] = {"dim_multiple": dim_multiple, "unknown_ids": unknown_ids}
        module = cls(MixedDimensionScheme(schemes), device="meta", **options)
        for name, table in scheme.tables.items():
            given = name if name in tables else table.table_name
            check_known("table", given, tables)
            chunks: Iterable[Tensor] = tables[given].split(rows_per_chunk(table.embedding_dim))
            chunks = draw_new_rows(table, chunks) if new_rows else chunks
            module.load_table(name, chunks, device)
        return module.to(device)

    def load_table(
        self, name: str, chunks: Iterable[Tensor], device: torch.device | str = "cpu"
    ) -> None:
        """Gives all blocks of a table the rows of a dense one, which come a few at a time."""
        for s, block in block_tables(self._scheme.tables[name], chunks).items():
            self.load_block(name, s, block.to(device))

    def load_block(self, table: str, block: int, weight: Tensor) -> None:
        """Gives one block its table, ``(rows, R)`` float32: without a copy while the module is on
        the meta device, else into place."""
        place, shape = self._check_block(table, block)
        fits = tuple(weight.shape) == shape and weight.dtype == torch.float32
        check(fits, place, f"float32 of shape {shape}", f"{weight.dtype} {tuple(weight.shape)}")
        assert self.blocks is not None  # a block that stores something was found
        bag = self.blocks.embedding_bags[f"{table}/b{block}"]
        if bag.weight.is_meta:
            padding = bag.weight.shape[1] - shape[1]
            weight = nn.functional.pad(weight, (0, padding)) if padding else weight
            bag.weight = nn.Parameter(weight)
            self.blocks._device = weight.device
        else:
            with torch.no_grad():
                bag.weight[:, : shape[1]] = weight

    def widened(self, tables: Mapping[str, Tensor] | None = None) -> EmbeddingBagCollection:
        """The plain collection with the values that the blocks have, and zeros in the columns that
        they have not; of sharded blocks `tables` are its tables. Local."""
        configs, is_weighted = self.embedding_bag_configs(), self.is_weighted()
        plain = EmbeddingBagCollection(configs, is_weighted, torch.device("meta"))
        for name, table in self._scheme.tables.items():
            if tables is None:
                blocks = {s: self.table_of_block(name, s).weight for s in table.stored_blocks()}
                learns = all(block.requires_grad for block in blocks.values())
                weight = widened_table(table, blocks or {0: torch.zeros(0, table.embedding_dim)})
            else:
                weight, learns = tables[name], True
            bag = plain.embedding_bags[table.table_name]
            bag.weight, plain._device = nn.Parameter(weight, requires_grad=learns), weight.device
        return plain.train(self.training)

    def _look_up(self, features: KeyedJaggedTensor) -> KeyedTensor:
        split = self.router(features)
        pooled_values: KeyedTensor | None = None
        if self.blocks is not None:
            # TorchRec's unsharded collection takes no batch of 0 samples; in a sharded one other
            # ranks may wait
            is_stock = True
            if not torch.jit.is_scripting():
                is_stock = type(self.blocks) is EmbeddingBagCollection
            if not is_stock or features.stride() > 0:
                pooled_values = self.blocks(split)
        values = self.merge(pooled_values, features)
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=values)

    def table_of_block(self, table: str, block: int) -> nn.EmbeddingBag:
        """The stock table of one block."""
        assert self.blocks is not None  # it has a block
        return cast(nn.EmbeddingBag, self.blocks.embedding_bags[f"{table}/b{block}"])

    def _check_block(self, table: str, block: int) -> tuple[str, tuple[int, int]]:
        """Place of a stored block in errors, and its shape ``(rows, R)``."""
        check_known("table", table, self._scheme.tables)
        shapes, place = (
            self._scheme.tables[table].stored_blocks(),
            f"table {table!r}, block {block}",
        )
        check(block in shapes, place, "a block with rows and retained dims", "one without")
        return place, shapes[block]

    def bytes_of_table(self, name: str) -> int:
        """Bytes of one table's blocks, on whatever device, and of what tells where values are."""
        shapes = [config for config in self._physical if config.name.rpartition("/b")[0] == name]
        values = sum(config.num_embeddings * config.embedding_dim for config in shapes)
        return 4 * values + self._scheme.tables[name].block_index_bytes()

    def table_bytes(self) -> int:
        """Bytes of all tables on whatever device, of a rank's own shards, and of what tells where
        values are."""
        tables = [] if self.blocks is None else list(self.blocks.parameters())
        index = sum(table.block_index_bytes() for table in self._scheme.tables.values())
        return sum(table.nbytes for table in tables) + index
