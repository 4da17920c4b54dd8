"""BagRouter: from the bags of logical tables to bags of the blocks' tables, with one bucketise call
for all features."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.serving.logical_tables import LogicalTables, checked_bags


class BagRouter(nn.Module):
    """Cuts every bag by block and replaces ids by their position within the block's table."""

    limits: Tensor
    cuts: Tensor
    unit: Tensor
    stored: Tensor | None

    def __init__(
        self, logical: LogicalTables, stored: list[tuple[int, int]], *, unknown_ids: str
    ) -> None:
        super().__init__()
        self._logical, self._zero_unknown = logical, unknown_ids == "zero"
        self._keys = [f"{logical.names[feature]}/b{s}" for feature, s in stored]
        self.register_buffer("limits", logical.limits(), persistent=False)
        self.register_buffer("cuts", self._block_cuts(), persistent=False)
        num_features, num_blocks = len(logical.features), self.cuts.shape[1] - 1
        slots = [s * num_features + feature for feature, s in stored]
        is_complete = slots == list(range(num_blocks * num_features))
        self.register_buffer(
            "stored",
            None if is_complete else torch.tensor(slots, dtype=torch.int32),
            persistent=False,
        )
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

    def _register_maps(self) -> list[str | None]:
        """Registers for each table whose rows are not ordered by block where they stand; names them
        per feature."""
        names: dict[str, str | None] = {}
        for table in self._logical.tables:
            if table.name not in names:
                positions = table.routing.positions()
                names[table.name] = None if positions is None else f"positions_{len(names)}"
                if positions is not None:
                    beyond = torch.tensor(
                        [table.num_embeddings], dtype=positions.dtype
                    )  # stands for unknown ids
                    self.register_buffer(
                        f"positions_{len(names) - 1}",
                        torch.cat([positions, beyond]),
                        persistent=False,
                    )
        return [names[table.name] for table in self._logical.tables]

    @property
    def positions(self) -> list[Tensor | None]:
        """Per feature the map of its table, ``(N + 1,)`` int32: where a row stands once rows are
        ordered by block."""
        return [None if name is None else self.get_buffer(name) for name in self._map_of_feature]

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Cuts every bag."""
        bags = checked_bags(
            features, self._logical, self.limits, self.limits if self._zero_unknown else None
        )
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
        if self.stored is not None:
            lengths = lengths.view(
                num_blocks * self.cuts.shape[0], batch_size
            )  # of 0 samples -1 has no meaning
            lengths, ids, weights = torch.ops.fbgemm.permute_2D_sparse_data(
                self.stored, lengths, ids, weights
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
        ids = bags.values()
        if not any(self._map_of_feature):
            return ids
        parts = ids.split(bags.length_per_key())
        return torch.cat(
            [
                part if at is None else at.index_select(0, part).long()
                for part, at in zip(parts, self.positions, strict=True)
            ]
        )
