"""MeanForUnknownIds: a served collection in which an id that is no row reads the mean of its
table's coldest rows."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.checks import check
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.logical_tables import LogicalCollection, checked_bags

MEAN = "mean"
"""The way to treat unknown ids that this module adds to those of `logical_tables.UNKNOWN_IDS`."""
ROWS_OF_A_BAG = 1 << 8
"""Rows that are added up in float32; the sums of bags are added up in float64."""
BAGS_AT_A_TIME = 1 << 8


class MeanForUnknownIds(LogicalCollection):
    """Looks bags up as another collection does; an unknown id adds the mean of its table's coldest
    rows."""

    limits: Tensor
    means: Tensor

    def __init__(self, scheme: MixedDimensionScheme, collection: LogicalCollection) -> None:
        super().__init__(scheme, unknown_ids="zero")
        remedy = "build it with unknown_ids='zero'"
        check(
            collection._zero_unknown,
            "collection",
            "one in which unknown ids contribute zero",
            "an error",
            remedy,
        )
        self.collection = collection
        device = next(
            (own.device for own in [*collection.buffers(), *collection.parameters()]),
            torch.device("cpu"),
        )
        self.register_buffer("limits", self._logical.limits().to(device), persistent=False)
        of_table = {name: self._mean_of(table, device) for name, table in scheme.tables.items()}
        means = torch.cat([of_table[table.name] for table in self._logical.tables])
        self.register_buffer("means", means, persistent=False)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up."""
        logical = self._logical
        bags = checked_bags(features, logical, self.limits, self.limits)
        pooled = cast(KeyedTensor, self.collection(features)).values()
        lengths, ids, weights = bags.lengths().long(), bags.values(), bags.weights_or_none()
        per_bag = lengths.view(len(logical.features), bags.stride())
        is_unknown = ids == torch.repeat_interleave(
            self.limits, per_bag.sum(1), output_size=ids.numel()
        )
        added = is_unknown.to(pooled.dtype) if weights is None else is_unknown * weights
        bag_of_id = torch.repeat_interleave(lengths, output_size=ids.numel())
        shares = added.new_zeros(lengths.numel()).index_add_(0, bag_of_id, added).view_as(per_bag)
        for position, (table, first) in enumerate(
            zip(logical.tables, logical.first_columns, strict=True)
        ):
            share = (
                shares[position] / per_bag[position].clamp(min=1)
                if table.pooling == "mean"
                else shares[position]
            )
            mean = self.means.narrow(0, first, table.embedding_dim)
            pooled.narrow(1, first, table.embedding_dim).addr_(share, mean)
        return logical.keyed(pooled)

    @torch.no_grad()
    def _mean_of(self, table: TableScheme, device: torch.device) -> Tensor:
        """m of a table, ``(D,)``."""
        total, keeping = (
            torch.zeros(table.embedding_dim, dtype=torch.float64),
            table.retained.any(dim=1).nonzero(),
        )
        num_rows = int(table.routing.row_counts()[keeping[-1]]) if len(keeping) else 0
        if not num_rows:
            return total.float().to(device)
        for rows, blocks in table.routing.blocks_of_all():
            cold = rows.start + (blocks == keeping[-1]).nonzero().squeeze(1)
            for ids in cold.split(ROWS_OF_A_BAG * BAGS_AT_A_TIME):
                total += self._sum_of(table, ids.to(device)).cpu()
        return (total / num_rows).float().to(device)

    def _sum_of(self, table: TableScheme, ids: Tensor) -> Tensor:
        """The sum of some rows, in bags of the first feature that reads the table; all other
        features have no ids."""
        logical = self._logical
        position = [own.name for own in logical.tables].index(table.name)
        lengths = torch.tensor([len(bag) for bag in ids.split(ROWS_OF_A_BAG)], device=ids.device)
        keys = list(dict.fromkeys(logical.features))
        of_keys = [
            lengths if key == logical.features[position] else torch.zeros_like(lengths)
            for key in keys
        ]
        weights = torch.ones(len(ids), device=ids.device) if self.is_weighted() else None
        bags = KeyedJaggedTensor(keys, ids, weights, torch.cat(of_keys), stride=len(lengths))
        pooled = cast(KeyedTensor, self.collection(bags)).values()
        sums = pooled.narrow(1, logical.first_columns[position], table.embedding_dim).double()
        return (sums * lengths.unsqueeze(1) if table.pooling == "mean" else sums).sum(0)
