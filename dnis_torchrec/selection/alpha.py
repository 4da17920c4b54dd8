"""Soft selection: alpha, and the modules that multiply a lookup's outputs by it.

Shapes: B batch, D embedding_dim, S blocks, A rows of alpha of one D, K pieces of outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.routing import RowRouter
from dnis_torchrec.checks import check
from dnis_torchrec.ops.batches import jagged_by_key
from dnis_torchrec.ops.select import Watch, can_select, fill_rows_, select_pieces


class Alpha(nn.Module):
    """One alpha per embedding_dim, shared by every wrapper of a model."""

    def __init__(self, shapes: Mapping[int, tuple[int, int]]) -> None:
        super().__init__()
        for dim, shape in shapes.items():
            self.register_buffer(f"dim{dim}", torch.ones(shape))
        self.dims = tuple(shapes)
        self._hits: dict[int, Tensor] | None = None

    def of(self, embedding_dim: int) -> Tensor:
        """alpha of the tables of one embedding_dim, ``(A, D)``."""
        return getattr(self, f"dim{embedding_dim}")

    @property
    def begins(self) -> dict[int, int]:
        """embedding_dim -> where its alpha begins among all of them, flattened."""
        sizes = [self.of(dim).numel() for dim in self.dims]
        return {dim: sum(sizes[:index]) for index, dim in enumerate(self.dims)}

    @property
    def is_upper(self) -> bool:
        """True inside `upper_level`."""
        return self._hits is not None

    @contextmanager
    def upper_level(self) -> Iterator[dict[int, Tensor]]:
        """Makes alpha alone learn, for one upper step."""
        self._hits = {
            dim: torch.zeros(len(self.of(dim)), dtype=torch.bool, device=self.of(dim).device)
            for dim in self.dims
        }
        for dim in self.dims:
            self.of(dim).requires_grad_(True)
        try:
            yield self._hits
        finally:
            for dim in self.dims:
                self.of(dim).requires_grad_(False)
            self._hits = None

    def record_hits(self, embedding_dim: int, rows: Tensor) -> None:
        """Notes, in an upper step, which rows of alpha the batch used."""
        if self._hits is not None:
            hits = self._hits[embedding_dim]
            of_batch = torch.zeros(len(hits) + 1, dtype=torch.bool, device=hits.device)
            hits |= of_batch.index_fill_(0, rows.flatten().long() + 1, True)[1:]

    def density(self, rows_per_alpha_row: Mapping[int, Tensor]) -> Tensor:
        """Share of table values whose alpha is not zero, a float64 on alpha's device."""
        values = {dim: (self.of(dim) > 0).double() for dim in self.dims}
        return self._mean_of(values, rows_per_alpha_row)

    def mean(self, rows_per_alpha_row: Mapping[int, Tensor]) -> float:
        """Mean of alpha over all table values."""
        values = {dim: self.of(dim).double() for dim in self.dims}
        return float(self._mean_of(values, rows_per_alpha_row))

    def _mean_of(self, values: Mapping[int, Tensor], rows: Mapping[int, Tensor]) -> Tensor:
        """Mean of ``(A, D)`` values; a row of alpha weighs as many table rows as it serves."""
        total = torch.stack([rows[dim].sum() * dim for dim in self.dims]).sum()
        return torch.stack([values[dim].sum(1) @ rows[dim] for dim in self.dims]).sum() / total


def select_per_sample(sums: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Soft selection of bags of at most one id (paper, eq. 3): ``alpha[rows] * sums``."""
    factors = alpha.index_select(0, rows.flatten()).view(*rows.shape, alpha.shape[1])
    return (sums * factors).to(sums.dtype)


def select_per_block(sums: Tensor, alpha: Tensor) -> Tensor:
    """Soft selection of a multi-hot feature: ``sum over s of alpha[s] * sums[:, s]``."""
    return (sums * alpha).sum(1).to(sums.dtype)


def select_rows(
    values: Tensor, alpha: Tensor, rows: Tensor, *, watch: Watch | None = None
) -> Tensor:
    """``alpha[rows] * values`` by the compiled operators, zero where a row is -1."""
    layout = torch.tensor([[0, 0, values.shape[1], 0, 0, 0, len(alpha)]])
    flat = alpha.to(torch.promote_types(values.dtype, torch.float32)).flatten()
    return select_pieces(values, flat, rows, None, layout, values.shape[1], watch=watch)


def select_feature(
    output: PooledFeature, sums: Tensor, blocks: Tensor, lengths: Tensor, alpha: Tensor
) -> Tensor:
    """Soft selection of one feature by torch's own operators, from the blocks of its ids."""
    if output.is_multi_hot:
        return select_per_block(sums, alpha)
    block_of_bag = blocks.clamp(max=output.num_blocks - 1)
    if blocks.numel() != lengths.numel():  # an empty bag, whose sum is zero, takes any block
        first = torch.zeros_like(lengths, dtype=torch.int64)
        block_of_bag = first.masked_scatter(lengths > 0, block_of_bag)
    return select_per_sample(sums, alpha, block_of_bag.unsqueeze(1)).squeeze(1)


def normalise_gradient(gradient: Tensor, hits: Tensor) -> Tensor:
    """Normalises alpha's gradient row by row (paper, eq. 8): ``g / (mean_k |g_k| + 1e-7)``."""
    direction = gradient / (gradient.abs().mean(dim=1, keepdim=True) + 1e-7)
    return torch.where(hits.unsqueeze(1), direction, torch.zeros_like(direction))


def step_and_clip_(
    alpha: Tensor, direction: Tensor, learning_rate: float, *, floor: float = 0.0
) -> Tensor:
    """A descent step: ``alpha <- clip(alpha - learning_rate * direction, floor, 1)``."""
    check(learning_rate > 0, "learning_rate", "a number above 0", learning_rate)
    return alpha.sub_(direction, alpha=learning_rate).clamp_(min=floor, max=1.0)


OnGradient = Callable[[Tensor, Callable[[Tensor], str]], Tensor | None]
"""Takes which parts of a gradient are finite, and what names the table of one that is not."""

_FINITE = torch.ones(1, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class PooledFeature:
    """One output key of a collection: a feature read from a table."""

    feature: str
    name: str
    table: str
    num_embeddings: int
    embedding_dim: int
    is_multi_hot: bool
    divides: bool
    first_alpha_row: int
    num_blocks: int

    @property
    def block_keys(self) -> tuple[str, ...]:
        """KJT keys that the child reads: one for each block of a multi-hot feature, else one."""
        if not self.is_multi_hot:
            return (self.feature,)
        return tuple(f"{self.name}/b{s}" for s in range(self.num_blocks))


class PooledPieces:
    """The pieces of a collection's outputs, in the form that `ops` reads (`select_pieces`)."""

    def __init__(self, outputs: Sequence[PooledFeature], alpha_begins: Mapping[int, int]) -> None:
        self._outputs = tuple(outputs)
        self._pieces = [
            (index, output, key, output.first_alpha_row + block)
            for index, output in enumerate(outputs)
            for block, key in enumerate(output.block_keys)
        ]
        pieces = [output for _, output, _, _ in self._pieces]
        self.single_id = [(k, output) for k, output in enumerate(pieces) if not output.is_multi_hot]
        self.of_dim: dict[int, list[int]] = {}
        for k, output in enumerate(pieces):
            self.of_dim.setdefault(output.embedding_dim, []).append(k)
        self._alpha_begins = alpha_begins
        self._layouts: dict[tuple[str, ...], Tensor] = {}
        self._places: dict[tuple[tuple[str, ...], torch.device], tuple[Tensor, Tensor]] = {}

    def layout(self, keys: Sequence[str], widths: Sequence[int]) -> Tensor:
        """Returns the place of every piece, ``(K, 7)`` int64."""
        if tuple(keys) not in self._layouts:
            dims = [output.embedding_dim for output in self._outputs]
            out_columns = list(itertools.accumulate(dims, initial=0))
            column_of_key = dict(zip(keys, itertools.accumulate(widths, initial=0), strict=False))
            fields = []
            for index, output, key, row in self._pieces:
                dim, begin = output.embedding_dim, self._alpha_begins[output.embedding_dim]
                column = column_of_key[key if output.is_multi_hot else output.name]
                num_rows = 1 if output.is_multi_hot else output.num_blocks
                fields.append((column, out_columns[index], dim, begin, index, row, num_rows))
            self._layouts[tuple(keys)] = torch.tensor(fields, dtype=torch.int64).view(-1, 7)
        return self._layouts[tuple(keys)]

    def rows_of_multi_hot(self, split: KeyedJaggedTensor, batch_size: int) -> Tensor:
        """Rows of alpha, ``(B, K)`` int32, -1 for empty bags; without those of single-id ones."""
        device = split.lengths().device
        if len(self.single_id) == len(self._pieces):
            return torch.empty(batch_size, len(self._pieces), dtype=torch.int32, device=device)
        places, first_rows = self._places_in(split.keys(), device)
        holds_ids = split.lengths().view(len(split.keys()), batch_size)[places] > 0
        return torch.where(holds_ids, first_rows, -1).t().contiguous()

    def _places_in(self, keys: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Position of every piece's key, and its first row of alpha, copied once to a device."""
        entry = tuple(keys), device
        if entry not in self._places:
            position = {key: index for index, key in enumerate(keys)}
            places = torch.tensor([position[key] for _, _, key, _ in self._pieces])
            rows = torch.tensor([[row] for *_, row in self._pieces], dtype=torch.int32)
            self._places[entry] = places.to(device), rows.to(device)
        return self._places[entry]

    def places(self, keys: Sequence[str]) -> list[tuple[int, int, int]]:
        """Piece, position of the key, and first row of alpha, of every single-id feature."""
        position = {key: index for index, key in enumerate(keys)}
        return [
            (k, position[output.feature], output.first_alpha_row) for k, output in self.single_id
        ]

    def divisors(self, bags: KeyedJaggedTensor, dtype: torch.dtype) -> Tensor | None:
        """Lengths of whole bags, by which sums have to be divided, ``(B, outputs)``, or None."""
        if not any(output.divides for output in self._outputs):
            return None
        lengths = bags.lengths().view(len(bags.keys()), bags.stride())
        length_of = dict(zip(bags.keys(), lengths, strict=True))
        shape = bags.stride(), len(self._outputs)
        divisors = torch.ones(shape, dtype=dtype, device=lengths.device)
        for index, output in enumerate(self._outputs):
            if output.divides:
                divisors[:, index] = length_of[output.feature].clamp(min=1)
        return divisors


class WatchedOutputs(nn.Module):
    """Base of the modules that make a wrapper's outputs: it reports their gradient."""

    # A module, so that TorchRec's tracer takes it for a leaf and pipelines the lookup before it.

    _across = 0
    """Dimension of the gradient across which values are of one table."""

    def __init__(self, outputs: tuple[PooledFeature, ...], alpha: Alpha) -> None:
        super().__init__()
        self._outputs = outputs
        self._alpha = [alpha]  # in a list: the wrapper registers it, once
        self.on_gradient: OnGradient | None = None
        self._keys = [output.name for output in outputs]
        self._dims = self._sizes = [output.embedding_dim for output in outputs]

    def _watch(self, values: Tensor) -> None:
        if values.requires_grad and not self._alpha[0].is_upper:
            values.register_hook(self._on_hook)

    def _on_hook(self, gradient: Tensor) -> Tensor | None:
        """Runs before the tables' backward, hence before a fused optimizer applies the gradient."""
        if self.on_gradient is None:
            return None
        on_cpu = gradient.device.type == "cpu"
        is_finite = bool(torch.isfinite(gradient.sum())) if on_cpu else self._finite_parts(gradient)
        may_learn = self._check_gradient(is_finite, gradient)
        return None if may_learn is None else torch.where(may_learn, gradient, 0.0)

    def _check_gradient(self, is_finite: bool | Tensor, gradient: Tensor) -> Tensor | None:
        """Reports whether all of a gradient, or which parts, are finite."""
        # on a GPU the listener may answer whether tables learn by it
        if self.on_gradient is None:
            return None
        if isinstance(is_finite, bool):
            is_finite = _FINITE if is_finite else self._finite_parts(gradient)
        return self.on_gradient(is_finite, partial(_table_with_bad, self._outputs, self._sizes))

    def _finite_parts(self, gradient: Tensor) -> Tensor:
        """Of every column, or row, whether its largest magnitude is finite."""
        if not gradient.numel():
            size = gradient.shape[1 - self._across]
            return torch.ones(size, dtype=torch.bool, device=gradient.device)
        return torch.isfinite(torch.linalg.vector_norm(gradient, math.inf, dim=self._across))


def _table_with_bad(outputs: tuple[PooledFeature, ...], sizes: list[int], finite: Tensor) -> str:
    """Names the first table with a part that is not finite, or all where parts have no table."""
    tables = list(dict.fromkeys(output.table for output in outputs))
    if len(finite) == sum(sizes):
        parts = zip(outputs, finite.split(sizes), strict=True)
        tables = [next(output.table for output, part in parts if not bool(part.all()))]
    if len(tables) == 1:
        return f"table {tables[0]!r}"
    return f"one of {len(tables)} tables, {tables[0]!r} to {tables[-1]!r}"


class _Routers(nn.ModuleList):
    """Row -> block of some tables, on the device of the model."""

    def __init__(self, tables: Iterable[str], blocks: RowBlocks) -> None:
        names = list(dict.fromkeys(tables))
        super().__init__(RowRouter(blocks.routings[name]) for name in names)
        self._index = {name: index for index, name in enumerate(names)}

    def of(self, output: PooledFeature) -> RowRouter:
        """That of an output's table."""
        return cast(RowRouter, self[self._index[output.table]])


class SelectPooled(WatchedOutputs):
    """The part of the wrapper behind the lookup: local, no collective, no parameter."""

    def __init__(self, outputs: tuple[PooledFeature, ...], blocks: RowBlocks, alpha: Alpha) -> None:
        super().__init__(outputs, alpha)
        self._pieces = PooledPieces(outputs, alpha.begins)
        tables = sorted({output.table for output in outputs if not output.is_multi_hot})
        self._routers = _Routers(tables, blocks)

    def forward(
        self, sums: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor
    ) -> KeyedTensor:
        """Multiplies pooled embeddings by alpha."""
        select = self._select_at_once if can_select(sums.values()) else self._select_by_torch
        values = select(sums, features, split)
        return KeyedTensor(keys=self._keys, values=values, length_per_key=self._dims)

    def _select_at_once(
        self, sums: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor
    ) -> Tensor:
        """Selects by the operators on blocks, for all outputs in one pass."""
        alpha, pieces, values = self._alpha[0], self._pieces, sums.values()
        values = values.detach() if alpha.is_upper else values  # tables learn no validation data
        layout = pieces.layout(sums.keys(), sums.length_per_key())
        rows = pieces.rows_of_multi_hot(split, len(values))
        if pieces.single_id:
            routings = [self._routers.of(output).routing_tensor() for _, output in pieces.single_id]
            places = pieces.places(features.keys())
            fill_rows_(rows, features.values(), features.lengths(), routings, places)
        if alpha.is_upper:
            for dim, columns in pieces.of_dim.items():
                alpha.record_hits(dim, rows if len(columns) == rows.shape[1] else rows[:, columns])
        exact = torch.promote_types(values.dtype, torch.float32)
        divisors = pieces.divisors(features, exact)
        flat = [alpha.of(dim).to(exact).flatten() for dim in alpha.dims]
        alphas = flat[0] if len(flat) == 1 else torch.cat(flat)
        width, watch = sum(self._dims), self._check_gradient
        return select_pieces(values, alphas, rows, divisors, layout, width, watch=watch)

    def _select_by_torch(
        self, sums: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor
    ) -> Tensor:
        """Selects by torch's own operators, one output after the other."""
        alpha, by_key, parts = self._alpha[0], sums.to_dict(), []
        bags, split_bags = jagged_by_key(features), jagged_by_key(split)
        for output in self._outputs:
            keys = output.block_keys if output.is_multi_hot else (output.name,)
            values = torch.stack([by_key[key] for key in keys], dim=1)
            values = values.detach() if alpha.is_upper else values  # see `_select_at_once`
            bag, dim, first = bags[output.feature], output.embedding_dim, output.first_alpha_row
            if output.is_multi_hot:
                hits = [block for block, key in enumerate(keys) if split_bags[key].values().numel()]
                blocks = torch.tensor(hits, dtype=torch.int64, device=values.device)
            else:
                blocks = self._routers.of(output)(bag.values())
            alpha.record_hits(dim, first + blocks)
            rows = alpha.of(dim)[first : first + output.num_blocks]
            part = select_feature(output, values, blocks, bag.lengths(), rows)
            if output.divides:
                part = part / bag.lengths().clamp(min=1).unsqueeze(1)
            parts.append(part)
        out = torch.cat(parts, dim=1)
        self._watch(out)
        return out


class SelectSequences(WatchedOutputs):
    """The same behind a lookup that does not pool."""

    _across = 1

    def __init__(self, outputs: tuple[PooledFeature, ...], blocks: RowBlocks, alpha: Alpha) -> None:
        super().__init__(outputs, alpha)
        self._routers = _Routers((output.table for output in outputs), blocks)

    def forward(
        self, embeddings: dict[str, JaggedTensor], features: KeyedJaggedTensor
    ) -> dict[str, JaggedTensor]:
        """Multiplies embeddings by alpha, those of all output keys at once."""
        parts, bags = [embeddings[key] for key in self._keys], jagged_by_key(features)
        alpha = self._alpha[0]
        ids = [bags[output.feature].values() for output in self._outputs]
        pairs = zip(self._outputs, ids, strict=True)
        rows = torch.cat([self._routers.of(o)(of_ids) + o.first_alpha_row for o, of_ids in pairs])
        each = [part.values() for part in parts]
        values = each[0] if len(each) == 1 else torch.cat(each)
        self._sizes = [len(of_output) for of_output in ids]
        if alpha.is_upper:
            alpha.record_hits(self._dims[0], rows)
            values = values.detach()  # the tables would learn from validation data
        out = self._select(values, rows).split(self._sizes)
        return {
            key: JaggedTensor(value, lengths=part.lengths(), weights=part.weights_or_none())
            for key, value, part in zip(self._keys, out, parts, strict=True)
        }

    def _select(self, values: Tensor, rows: Tensor) -> Tensor:
        alpha = self._alpha[0].of(self._dims[0])
        if can_select(values):
            rows = rows.to(torch.int32).unsqueeze(1)
            return select_rows(values, alpha, rows, watch=self._check_gradient)
        out = select_per_sample(values.unsqueeze(1), alpha, rows.unsqueeze(1)).squeeze(1)
        self._watch(out)
        return out
