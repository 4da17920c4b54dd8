"""The part of the wrapper behind the lookup: pooled embeddings times alpha, and who is told of
their gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.row_routing import RowRouter
from dnis_torchrec.ops.block_operators import can_select, fill_rows_, select_pieces
from dnis_torchrec.ops.jagged import jagged_by_key
from dnis_torchrec.selection.alpha import Alpha, select_per_block, select_per_sample
from dnis_torchrec.selection.pooled_pieces import PooledFeature, PooledPieces

JaggedByKey = dict[str, JaggedTensor]


OnGradient = Callable[[Tensor, Callable[[Tensor], str]], Tensor | None]
"""Told of a gradient by bool on its device, and by what names the table once they are read; see
`WatchedOutputs`."""

_FINITE = torch.ones(1, dtype=torch.bool)


class WatchedOutputs(nn.Module):
    """Base of the modules that make a wrapper's outputs: it reports the gradient of the outputs to
    a listener."""

    _across = 0
    """Dimension of the gradient across which values are of one table."""

    def __init__(self, outputs: tuple[PooledFeature, ...]) -> None:
        super().__init__()
        self._outputs = outputs
        self.on_gradient: OnGradient | None = None
        self._keys = [output.name for output in outputs]
        self._dims = [output.embedding_dim for output in outputs]

    def _watch(self, values: Tensor) -> None:
        values.register_hook(self._watched)

    def _watched(self, gradient: Tensor) -> Tensor | None:
        """Runs before the tables' own backward, hence before a fused optimizer applies the
        gradient."""
        if self.on_gradient is None:
            return None
        on_cpu = gradient.device.type == "cpu"
        is_finite = bool(torch.isfinite(gradient.sum())) if on_cpu else self._finite_parts(gradient)
        may_learn = self._check_gradient(is_finite, gradient)
        return None if may_learn is None else torch.where(may_learn, gradient, 0.0)

    def _check_gradient(self, is_finite: bool | Tensor, gradient: Tensor) -> Tensor | None:
        """Tells the listener of a gradient."""
        if self.on_gradient is None:
            return None
        if isinstance(is_finite, bool):
            is_finite = _FINITE if is_finite else self._finite_parts(gradient)
        return self.on_gradient(
            is_finite, partial(_table_with_bad, self._outputs, self._sizes_of_parts())
        )

    def _finite_parts(self, gradient: Tensor) -> Tensor:
        """Of every column, or row, whether all of it is finite: its largest magnitude is then, and
        only then."""
        if not gradient.numel():
            return torch.ones(
                gradient.shape[1 - self._across], dtype=torch.bool, device=gradient.device
            )
        return torch.isfinite(torch.linalg.vector_norm(gradient, math.inf, dim=self._across))

    def _sizes_of_parts(self) -> list[int]:
        """Columns, or rows, of every output."""
        return self._dims


def _table_with_bad(outputs: tuple[PooledFeature, ...], sizes: list[int], finite: Tensor) -> str:
    """Names the first table with a part that is not finite; all of them where the parts are not
    told apart."""
    tables = list(dict.fromkeys(output.table for output in outputs))
    if len(finite) == sum(sizes):
        parts = zip(outputs, finite.split(sizes), strict=True)
        tables = [next(output.table for output, part in parts if not bool(part.all()))]
    if len(tables) == 1:
        return f"table {tables[0]!r}"
    return f"one of {len(tables)} tables, {tables[0]!r} to {tables[-1]!r}"


class SelectPooled(WatchedOutputs):
    """The part of the wrapper behind the lookup: local, no collective, no parameter."""

    def __init__(self, outputs: tuple[PooledFeature, ...], blocks: RowBlocks, alpha: Alpha) -> None:
        super().__init__(outputs)
        self._runs = _runs(outputs)
        self._alpha = [alpha]  # in a list: the wrapper registers it, once
        self._pieces = PooledPieces(outputs, alpha.begins)
        tables = sorted({output.table for output in outputs if not output.is_multi_hot})
        self._router_of = {table: index for index, table in enumerate(tables)}
        self._routers = nn.ModuleList(RowRouter(blocks.routings[table]) for table in tables)

    def forward(
        self, pooled: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor
    ) -> KeyedTensor:
        """Multiplies pooled embeddings by alpha."""
        select = self._select_at_once if can_select(pooled.values()) else self._select_in_runs
        return KeyedTensor(
            keys=self._keys, values=select(pooled, features, split), length_per_key=self._dims
        )

    def _may_learn(self, values: Tensor) -> Tensor:
        """Cuts off gradients in an upper step: the tables behind the lookup would learn from
        validation data."""
        return values.detach() if self._alpha[0].is_upper else values

    def _select_at_once(
        self, pooled: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor
    ) -> Tensor:
        """Selects by the operators on blocks, for all outputs in one pass. On a GPU nothing waits
        for it."""
        alpha, pieces = self._alpha[0], self._pieces
        values, layout = (
            self._may_learn(pooled.values()),
            pieces.layout(pooled.keys(), pooled.length_per_key()),
        )
        rows = pieces.rows_of_multi_hot(split, len(values))
        if pieces.single_id:
            routings = [self._router(output).routing_tensor() for _, output in pieces.single_id]
            fill_rows_(
                rows,
                features.values(),
                features.lengths(),
                routings,
                pieces.places(features.keys()),
            )
        if alpha.is_upper:
            for dim, columns in pieces.of_dim.items():
                alpha.record_hits(dim, rows if len(columns) == rows.shape[1] else rows[:, columns])
        exact = torch.promote_types(values.dtype, torch.float32)
        divisors = pieces.divisors(features, exact)
        flat = [alpha.of(dim).to(exact).flatten() for dim in alpha.dims]
        alphas = flat[0] if len(flat) == 1 else torch.cat(flat)
        return select_pieces(
            values, alphas, rows, divisors, layout, sum(self._dims), watch=self._check_gradient
        )

    def _select_in_runs(
        self, pooled: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor
    ) -> Tensor:
        """Selects by torch's own operators, one run of outputs after the other, where `can_select`
        says no."""
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

    def _select_per_sample(
        self, part: Tensor, run: list[PooledFeature], jagged: JaggedByKey, _: JaggedByKey
    ) -> Tensor:
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
        selected = select_per_block(
            part.view(len(part), num_blocks, dim), alpha.of(dim)[first : first + num_blocks]
        )
        if alpha.is_upper:
            used = [
                first + s for s, key in enumerate(output.block_keys) if split[key].values().numel()
            ]
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
    """Row of alpha of each single-id bag; an empty bag, whose embedding is zero, takes any."""
    if rows.numel() == lengths.numel():
        return rows
    filled = torch.full_like(lengths, row_of_empty, dtype=torch.int64)
    return filled.masked_scatter(lengths > 0, rows)


def _runs(outputs: tuple[PooledFeature, ...]) -> list[list[PooledFeature]]:
    """Neighbouring outputs that one operation can select: single-id features of equal D; each
    multi-hot one alone."""
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
