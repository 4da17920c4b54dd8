"""SoftSelectionEmbeddingBagCollection: an EmbeddingBagCollection whose output is multiplied by alpha, block by block.

The user's EmbeddingBagCollection stays a child, so any sharder, planner and kernel works on it unchanged. Two kinds of
features, told apart when the wrapper is built:

- a *single-id* feature (bags of at most one id): pooled output times the alpha row of the bag's one block;
- a *multi-hot* feature: BagSplitter turns its bags into one per block, each is pooled alone, and the wrapper adds up
  alpha_s * pooled_s. Costs up to S times the output volume of that feature; in a sharded model shard_selection.py moves
  both to the ranks that hold the shards, and the volume is the plain model's.

Shapes: B batch, D embedding_dim, S blocks, A rows of alpha of one D.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.bag_check import BagCheck
from dnis_torchrec.bag_splitting import BagSplitter, FeatureSplit
from dnis_torchrec.block_operators import are_compiled, fill_rows_, select_pieces
from dnis_torchrec.blocking import RowBlocks
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.features_by_name import read_collection_by_name_
from dnis_torchrec.jagged import jagged_by_key
from dnis_torchrec.pooled_pieces import PooledFeature, PooledPieces
from dnis_torchrec.row_routing import RowRouter
from dnis_torchrec.soft_selection import Alpha, select_per_block, select_per_sample

JaggedByKey = dict[str, JaggedTensor]


class SoftSelectionEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Wraps an EmbeddingBagCollection and applies soft selection (paper, eq. 3) to its output.

    For a bag that mixes blocks, ``pooled = sum over s of alpha_s * (sum of the bag's rows in block s)``; MEAN divides
    by the length of the whole bag; per-sample weights multiply each row. With alpha at 1 the output is the wrapped
    collection's.

    Args:
        embedding_bag_collection: the collection to wrap; its tables' weights are shared, not copied.
        blocks: blocks of at least its tables.
        alpha: alpha to share with other wrappers of the model; a new one of ones if None.
        multi_hot_features: features whose bags may hold several ids; None takes those whose longest bag in the counted
            training data exceeds one. Naming a feature that is single-id in truth only costs speed.

    Attributes:
        embedding_bag_collection: the child; DistributedModelParallel shards it.
        blocks: the blocks it was built with.
        alpha: see `Alpha`.
        multiplies_tables: see `read_whole_features_`.

    Shape:
        - Input: KeyedJaggedTensor, keys in any order, stride B.
        - Output: KeyedTensor ``(B, sum of D over output keys)``, keys, order and dims as the wrapped collection's.

    Raises:
        ValueError: for an unknown table or feature, or blocks that do not match num_embeddings or embedding_dim.
        TypeError: if the first argument is no EmbeddingBagCollection.

    Example:
        >>> from dnis_torchrec.blocking import blocks_from_counts
        >>> from dnis_torchrec.frequency import count_frequencies
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"])
        >>> kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([3, 0]), lengths=torch.tensor([1, 1]))
        >>> blocks = blocks_from_counts(count_frequencies([kjt], [table]), [table], num_blocks=2)
        >>> ebc = EmbeddingBagCollection(tables=[table])
        >>> SoftSelectionEmbeddingBagCollection(ebc, blocks)(kjt).values().equal(ebc(kjt).values())
        True
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        blocks: RowBlocks,
        *,
        alpha: Alpha | None = None,
        multi_hot_features: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(embedding_bag_collection, EmbeddingBagCollection):
            received = type(embedding_bag_collection).__name__
            raise TypeError(describe("SoftSelection", "expected an EmbeddingBagCollection", received))
        self.blocks = blocks
        self._tables = list(embedding_bag_collection.embedding_bag_configs())
        self._is_weighted = embedding_bag_collection.is_weighted()
        _check_blocks(self._tables, blocks)
        self._outputs = _pooled_features(self._tables, blocks, multi_hot_features)
        self.bag_check = BagCheck(self._outputs)
        self.bag_splitter = _bag_splitter(self._outputs, blocks)
        self.embedding_bag_collection = _child(embedding_bag_collection, self._tables, self._outputs, self.bag_splitter)
        self.alpha = alpha if alpha is not None else Alpha(blocks.alpha_shapes)
        self.selection: WatchedOutputs = SelectPooled(self._outputs, blocks, self.alpha)
        self.multiplies_tables = False

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up and multiplies them by alpha.

        Args:
            features: the bags.

        Returns:
            Pooled embeddings, one key per (feature, table).

        Raises:
            ValueError: if a bag of a single-id feature holds several ids, or an id lies outside its table (found at
                once on a CPU; on a GPU a single-id violation trips an asynchronous assert).
        """
        self.bag_check(features)
        split = features if self.bag_splitter is None else self.bag_splitter(features)
        pooled = self.embedding_bag_collection(split)
        return self.selection(pooled, features, split)

    def __setattr__(self, name: str, value: Any) -> None:
        """A child that is sharded reads by name from then on: pipelines call it without the wrapper."""
        super().__setattr__(name, value)
        if isinstance(value, ShardedEmbeddingBagCollection):
            read_collection_by_name_(value)

    def read_whole_features_(self, *, multiply_tables: bool = False) -> None:
        """Gives the child one key per feature, whatever its blocks, for lookups that split bags for themselves.

        FBGEMM's CPU kernels learn a table that several keys read by a slower path. Call it before sharding, and
        `dnis_torchrec.shard_selection.select_on_shards_` right after: in between the wrapper cannot be called.

        Args:
            multiply_tables: let kernels whose optimizer is not fused multiply whole tables by alpha, where they can:
                quicker for tables of fewer numbers than a batch's pooled embeddings (`dnis_torchrec.table_selection`).
        """
        self.multiplies_tables = multiply_tables
        if self.bag_splitter is not None:
            keys = {output.name: (output.whole_key,) for output in self._outputs}
            self.embedding_bag_collection = _reading(self.embedding_bag_collection, self._tables, self._outputs, keys)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the wrapped collection, as the user wrote them."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether bags carry per-sample weights."""
        return self._is_weighted

    @property
    def outputs(self) -> tuple[PooledFeature, ...]:
        """What stands behind each output key, in order."""
        return self._outputs


class WatchedOutputs(nn.Module):
    """What a wrapper hands out, and who is told of its gradient.

    Args:
        outputs: what stands behind each output key.

    Attributes:
        on_gradient: called in every backward with the gradient, and the name of a table whose part of it is not finite
            or None; None does not look.
    """

    def __init__(self, outputs: tuple[PooledFeature, ...]) -> None:
        super().__init__()
        self._outputs = outputs
        self.on_gradient: Callable[[str | None, Tensor], None] | None = None
        self._keys = [output.name for output in outputs]
        self._dims = [output.embedding_dim for output in outputs]

    def _watch(self, values: Tensor) -> None:
        values.register_hook(lambda gradient: self._check_gradient(bool(torch.isfinite(gradient.sum())), gradient))

    def _check_gradient(self, is_finite: bool, gradient: Tensor) -> None:
        """Runs before the tables' own backward, hence before a fused optimizer applies the gradient."""
        if self.on_gradient is not None:
            self.on_gradient(None if is_finite else self._table_with_bad(gradient), gradient)

    def _table_with_bad(self, gradient: Tensor) -> str | None:
        parts = zip(self._outputs, gradient.split(self._dims, dim=1), strict=True)
        return next((output.table for output, part in parts if not bool(torch.isfinite(part).all())), None)


class SelectPooled(WatchedOutputs):
    """The part of the wrapper behind the lookup: local, no collective, no parameter.

    A module of its own, so that TorchRec's tracer takes it for a leaf and pipelines the lookup before it.

    Args:
        outputs: what stands behind each output key.
        blocks: row -> block of every table.
        alpha: the wrapper's alpha.
    """

    def __init__(self, outputs: tuple[PooledFeature, ...], blocks: RowBlocks, alpha: Alpha) -> None:
        super().__init__(outputs)
        self._runs = _runs(outputs)
        self._alpha = [alpha]  # in a list: the wrapper registers it, once
        self._pieces = PooledPieces(outputs, {dim: alpha.of(dim).numel() for dim in alpha.dims})
        tables = sorted({output.table for output in outputs if not output.is_multi_hot})
        self._router_of = {table: index for index, table in enumerate(tables)}
        self._routers = nn.ModuleList(RowRouter(blocks.routings[table]) for table in tables)

    def forward(self, pooled: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor) -> KeyedTensor:
        """Multiplies pooled embeddings by alpha.

        Args:
            pooled: what the child returned for `split`.
            features: the bags as the user gave them.
            split: the bags as the child read them.

        Returns:
            One key per output, in order.
        """
        values = pooled.values()
        is_for_compiled = values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)
        select = self._select_at_once if is_for_compiled and are_compiled() else self._select_in_runs
        return KeyedTensor(keys=self._keys, values=select(pooled, features, split), length_per_key=self._dims)

    def _may_learn(self, values: Tensor) -> Tensor:
        """In an upper step nothing behind the lookup may learn, for it would learn from validation data."""
        return values.detach() if self._alpha[0].is_upper else values

    def _select_at_once(self, pooled: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor) -> Tensor:
        """By the compiled operator, for all outputs in one pass."""
        alpha, pieces = self._alpha[0], self._pieces
        values, layout = self._may_learn(pooled.values()), pieces.layout(pooled.keys(), pooled.length_per_key())
        rows = pieces.rows_of_multi_hot(split, len(values))
        if pieces.single_id:
            routings = [self._router(output).routing_tensor() for _, output in pieces.single_id]
            fill_rows_(rows, features.values(), features.lengths(), routings, pieces.places(features.keys()))
        if alpha.is_upper:
            for dim, columns in pieces.of_dim.items():
                alpha.record_hits(dim, rows if len(columns) == rows.shape[1] else rows[:, columns])
        divisors = pieces.divisors(features, values)
        flat = [alpha.of(dim).to(values.dtype).flatten() for dim in alpha.dims]
        alphas = flat[0] if len(flat) == 1 else torch.cat(flat)
        return select_pieces(values, alphas, rows, divisors, layout, sum(self._dims), watch=self._check_gradient)

    def _select_in_runs(self, pooled: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor) -> Tensor:
        """By torch's own operators, a run of outputs after the other."""
        values = self._may_learn(self._in_order(pooled))
        jagged, split_jagged = jagged_by_key(features), jagged_by_key(split)
        widths = [sum(self._width(output) for output in run) for run in self._runs]
        parts = []
        for run, part in zip(self._runs, values.split(widths, dim=1), strict=True):
            selected = self._select_per_block if run[0].is_multi_hot else self._select_per_sample
            parts.append(selected(part, run, jagged, split_jagged))
        merged = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if merged.requires_grad and not self._alpha[0].is_upper:
            self._watch(merged)
        return merged

    def _in_order(self, pooled: KeyedTensor) -> Tensor:
        """Values in the order of the pieces; sharded collections may group keys by sharding type."""
        if pooled.keys() == self._pieces.keys:
            return pooled.values()
        by_key = pooled.to_dict()
        return torch.cat([by_key[key] for key in self._pieces.keys], dim=1)

    @staticmethod
    def _width(output: PooledFeature) -> int:
        return output.embedding_dim * len(output.block_keys)

    def _select_per_sample(self, part: Tensor, run: list[PooledFeature], jagged: JaggedByKey, _: JaggedByKey) -> Tensor:
        alpha, dim = self._alpha[0], run[0].embedding_dim
        rows_of_ids = [self._alpha_rows(output, jagged[output.feature]) for output in run]
        if alpha.is_upper:
            alpha.record_hits(dim, torch.cat(rows_of_ids))
        filled = [
            one_per_bag(rows, jagged[output.feature].lengths(), output.first_alpha_row)
            for rows, output in zip(rows_of_ids, run, strict=True)
        ]
        rows = torch.stack(filled, dim=1)
        selected = select_per_sample(part.view(len(part), len(run), dim), alpha.of(dim), rows)
        return selected.view(len(part), len(run) * dim)

    def _select_per_block(
        self, part: Tensor, run: list[PooledFeature], jagged: JaggedByKey, split: JaggedByKey
    ) -> Tensor:
        output, alpha = run[0], self._alpha[0]
        dim, num_blocks, first = output.embedding_dim, output.num_blocks, output.first_alpha_row
        selected = select_per_block(part.view(len(part), num_blocks, dim), alpha.of(dim)[first : first + num_blocks])
        if alpha.is_upper:
            used = [first + s for s, key in enumerate(output.block_keys) if split[key].values().numel()]
            alpha.record_hits(dim, torch.tensor(used, dtype=torch.int64, device=part.device))
        if output.divides:
            selected = selected / jagged[output.feature].lengths().clamp(min=1).unsqueeze(1)
        return selected

    def _alpha_rows(self, output: PooledFeature, bags: JaggedTensor) -> Tensor:
        """Row of alpha of each id."""
        return self._router(output)(bags.values()) + output.first_alpha_row

    def _router(self, output: PooledFeature) -> RowRouter:
        return cast(RowRouter, self._routers[self._router_of[output.table]])


def one_per_bag(rows: Tensor, lengths: Tensor, row_of_empty: int) -> Tensor:
    """Row of alpha of each single-id bag; an empty bag, whose embedding is zero, takes any.

    Args:
        rows: of the ids, int64.
        lengths: ``(B,)``, 0 or 1.
        row_of_empty: what empty bags take.

    Returns:
        ``(B,)`` int64.

    Example:
        >>> one_per_bag(torch.tensor([5]), torch.tensor([0, 1]), 0).tolist()
        [0, 5]
    """
    if rows.numel() == lengths.numel():
        return rows
    filled = torch.full_like(lengths, row_of_empty, dtype=torch.int64)
    return filled.masked_scatter(lengths > 0, rows)


def _check_blocks(tables: list[EmbeddingBagConfig], blocks: RowBlocks) -> None:
    for table in tables:
        check_known("table", table.name, blocks.routings)
        place, remedy = f"table {table.name!r}", "make the blocks from counts of this table"
        blocked = blocks.routings[table.name].num_embeddings
        fits = blocked == table.num_embeddings
        check(fits, place, f"expected blocks of num_embeddings={table.num_embeddings} rows", blocked, remedy)
        dim = blocks.embedding_dims[table.name]
        check(dim == table.embedding_dim, place, f"expected blocks of embedding_dim={table.embedding_dim}", dim, remedy)
        if table.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise NotImplementedError(describe(place, "supported pooling is SUM or MEAN", table.pooling))


def _pooled_features(
    tables: list[EmbeddingBagConfig], blocks: RowBlocks, multi_hot_features: Collection[str] | None
) -> tuple[PooledFeature, ...]:
    all_features = {feature for table in tables for feature in table.feature_names}
    for feature in multi_hot_features or ():
        check_known("feature", feature, all_features)
    if multi_hot_features is None:
        multi_hot_features = {f for f in all_features if blocks.max_bag_lengths.get(f, 2) > 1}
    outputs = []
    for table, names in zip(tables, get_embedding_names_by_table(tables), strict=True):
        for feature, name in zip(table.feature_names, names, strict=True):
            outputs.append(
                PooledFeature(
                    feature=feature,
                    name=name,
                    table=table.name,
                    num_embeddings=table.num_embeddings,
                    embedding_dim=table.embedding_dim,
                    is_multi_hot=feature in multi_hot_features,
                    divides=table.pooling == PoolingType.MEAN and feature in multi_hot_features,
                    first_alpha_row=blocks.first_alpha_row(table.name),
                    num_blocks=blocks.routings[table.name].num_blocks,
                )
            )
    return tuple(outputs)


def _bag_splitter(outputs: tuple[PooledFeature, ...], blocks: RowBlocks) -> BagSplitter | None:
    if not any(output.is_multi_hot for output in outputs):
        return None
    splits: dict[str, FeatureSplit] = {}
    for output in outputs:
        routing = blocks.routings[output.table] if output.is_multi_hot else None
        split = FeatureSplit(feature=output.feature, keys=output.block_keys, routing=routing)
        splits.setdefault(output.name if output.is_multi_hot else output.feature, split)
    return BagSplitter(list(splits.values()))


def _child(
    wrapped: EmbeddingBagCollection,
    tables: list[EmbeddingBagConfig],
    outputs: tuple[PooledFeature, ...],
    splitter: BagSplitter | None,
) -> EmbeddingBagCollection:
    """The collection that reads split bags: the same tables, under the same names, with the same weights.

    It always sums: MEAN is divided by the length of the whole bag afterwards, and a bag of one id is its own mean.
    nn.EmbeddingBag refuses weights with MEAN, and TorchRec pools MEAN wrongly in some sharding plans (see `sharding`).
    """
    is_torchrecs = type(wrapped) is EmbeddingBagCollection  # sharders look up what to do by this very type
    if is_torchrecs and splitter is None and all(table.pooling == PoolingType.SUM for table in tables):
        return wrapped
    return _reading(wrapped, tables, outputs, {output.name: output.block_keys for output in outputs})


def _reading(
    wrapped: EmbeddingBagCollection,
    tables: list[EmbeddingBagConfig],
    outputs: tuple[PooledFeature, ...],
    keys_of: Mapping[str, tuple[str, ...]],
) -> EmbeddingBagCollection:
    """The tables of a collection, read by other keys and summed: output -> its keys."""
    configs = []
    for table in tables:
        keys = [key for output in outputs if output.table == table.name for key in keys_of[output.name]]
        configs.append(replace(table, feature_names=keys, pooling=PoolingType.SUM))
    child = EmbeddingBagCollection(tables=configs, is_weighted=wrapped.is_weighted(), device=torch.device("meta"))
    for name, bag in wrapped.embedding_bags.items():
        child.embedding_bags[name].weight = bag.weight
    child._device = wrapped.device
    return child


def _runs(outputs: tuple[PooledFeature, ...]) -> list[list[PooledFeature]]:
    """Neighbouring outputs that one operation can select: single-id features of equal D; each multi-hot one alone."""
    runs: list[list[PooledFeature]] = []
    for output in outputs:
        if runs and _are_selected_together(runs[-1][-1], output):
            runs[-1].append(output)
        else:
            runs.append([output])
    return runs


def _are_selected_together(last: PooledFeature, output: PooledFeature) -> bool:
    are_single_id = not last.is_multi_hot and not output.is_multi_hot
    return are_single_id and last.embedding_dim == output.embedding_dim
