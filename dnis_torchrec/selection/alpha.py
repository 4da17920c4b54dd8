"""Soft selection: alpha, the functions on it, and the modules that multiply a lookup's outputs by
it.

Shapes: B batch, D embedding_dim, S blocks, A rows of alpha of one D, K pieces of outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.routing import RowRouter
from dnis_torchrec.checks import check
from dnis_torchrec.ops.batches import jagged_by_key
from dnis_torchrec.ops.select import can_select, fill_rows_, select_pieces

SAMPLES_PER_CHUNK = 256
"""Samples that soft selection works on at once: 1.7 MB of fp32 for 26 features of D = 64, which a
cache holds."""


class Alpha(nn.Module):
    """One alpha per embedding_dim, shared by every wrapper of a model."""

    def __init__(self, shapes: Mapping[int, tuple[int, int]]) -> None:
        super().__init__()
        for dim, shape in shapes.items():
            self.register_buffer(f"dim{dim}", torch.ones(shape))
        self._dims = tuple(shapes)
        self._hits: dict[int, Tensor] | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        """The embedding_dims that have an alpha."""
        return self._dims

    def of(self, embedding_dim: int) -> Tensor:
        """alpha of the tables of one embedding_dim, ``(A, D)``."""
        return getattr(self, f"dim{embedding_dim}")

    @property
    def begins(self) -> dict[int, int]:
        """embedding_dim -> where its alpha begins once all are flattened, one after the other."""
        sizes = [self.of(dim).numel() for dim in self._dims]
        return {dim: sum(sizes[:index]) for index, dim in enumerate(self._dims)}

    @property
    def is_upper(self) -> bool:
        """True inside `upper_level`."""
        return self._hits is not None

    @contextmanager
    def upper_level(self) -> Iterator[dict[int, Tensor]]:
        """Makes alpha the only thing that learns for the duration of one upper step."""
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

    def density(self, rows_per_alpha_row: Mapping[int, Tensor]) -> float:
        """Share of table values whose alpha is not zero, each row of alpha weighted by the table
        rows it serves."""
        return float(self.density_there(rows_per_alpha_row))

    def density_there(self, rows_per_alpha_row: Mapping[int, Tensor]) -> Tensor:
        """`density` as a float64 of no dimension, on alpha's device: nobody waits for it."""
        values = {dim: (self.of(dim) > 0).double() for dim in self.dims}
        return self._mean_of(values, rows_per_alpha_row)

    def mean(self, rows_per_alpha_row: Mapping[int, Tensor]) -> float:
        """Mean of alpha over all table values."""
        values = {dim: self.of(dim).double() for dim in self.dims}
        return float(self._mean_of(values, rows_per_alpha_row))

    def _mean_of(self, values: Mapping[int, Tensor], rows: Mapping[int, Tensor]) -> Tensor:
        """Mean of any ``(A, D)`` values, each row of alpha weighted by the table rows it serves."""
        total = torch.stack([rows[dim].sum() * dim for dim in self.dims]).sum()
        return torch.stack([values[dim].sum(1) @ rows[dim] for dim in self.dims]).sum() / total


class _Select(torch.autograd.Function):
    """out[b, f] = sums[b, f] * alpha[rows[b, f]], with the alpha gradient as one segment sum."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
        needs_sums = ctx.needs_input_grad[1]
        ctx.save_for_backward(alpha, rows, sums if needs_sums else None)
        return _multiply_by_rows(sums, alpha, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        alpha, rows, sums = ctx.saved_tensors
        grad_sums = grad_alpha = None
        if ctx.needs_input_grad[0]:
            grad_sums = _multiply_by_rows(grad, alpha, rows)
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.zeros_like(alpha)
            for chunk in _chunks(rows):
                products = grad[chunk].to(alpha.dtype) * sums[chunk].to(alpha.dtype)
                grad_alpha.index_add_(
                    0, rows[chunk].flatten(), products.reshape(-1, alpha.shape[1])
                )
        return grad_sums, grad_alpha, None


class _SelectBlocks(torch.autograd.Function):
    """out[b] = sum over s of sums[b, s] * alpha[s], products a few samples at a time, as in
    `_Select`."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, sums if ctx.needs_input_grad[1] else None)
        out = torch.empty(sums.shape[0], sums.shape[2], dtype=sums.dtype, device=sums.device)
        for chunk in _chunks(sums):
            torch.sum(sums[chunk] * alpha, 1, out=out[chunk])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        alpha, sums = ctx.saved_tensors
        grad_sums = grad_alpha = None
        if ctx.needs_input_grad[0]:
            grad_sums = grad.unsqueeze(1) * alpha
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.zeros_like(alpha)
            for chunk in _chunks(grad):
                grad_alpha += (
                    sums[chunk].to(alpha.dtype) * grad[chunk].to(alpha.dtype).unsqueeze(1)
                ).sum(0)
        return grad_sums, grad_alpha


def _multiply_by_rows(values: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    for chunk in _chunks(rows):
        factors = alpha.index_select(0, rows[chunk].flatten())
        shape = *rows[chunk].shape, alpha.shape[1]
        torch.mul(values[chunk], factors.view(shape), out=out[chunk])
    return out


def _chunks(samples: Tensor) -> Iterator[slice]:
    """Samples to work on at once: all of them on a GPU, where a launch costs more than a cache
    miss."""
    step = SAMPLES_PER_CHUNK if samples.device.type == "cpu" else max(1, len(samples))
    for start in range(0, len(samples), step):
        yield slice(start, start + step)


def select_per_sample(sums: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Soft selection of features whose bags hold at most one id (paper, eq. 3): ``alpha[rows] *
    sums``."""
    return _Select.apply(sums, alpha, rows)


def select_per_block(sums: Tensor, alpha: Tensor) -> Tensor:
    """Soft selection of a multi-hot feature, a sum for every block: ``sum over s of alpha[s] *
    sums[:, s]``."""
    return _SelectBlocks.apply(sums, alpha)


def normalise_gradient(gradient: Tensor, hits: Tensor) -> Tensor:
    """Row-wise normalisation of the complete alpha gradient (paper, eq. 8): ``g / (mean_k |g_k| +
    1e-7)``."""
    direction = gradient / (gradient.abs().mean(dim=1, keepdim=True) + 1e-7)
    return torch.where(hits.unsqueeze(1), direction, torch.zeros_like(direction))


def step_and_clip_(
    alpha: Tensor, direction: Tensor, learning_rate: float, *, floor: float = 0.0
) -> Tensor:
    """One projected descent step: ``alpha <- clip(alpha - learning_rate * direction, floor,
    1)``."""
    check(learning_rate > 0, "learning_rate", "a number above 0", learning_rate)
    return alpha.sub_(direction, alpha=learning_rate).clamp_(min=floor, max=1.0)


JaggedByKey = dict[str, JaggedTensor]

OnGradient = Callable[[Tensor, Callable[[Tensor], str]], Tensor | None]
"""Told of a gradient by bool on its device, and by what names the table once they are read; see
`WatchedOutputs`."""

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
        """KJT keys that the child collection reads: one per block of a multi-hot feature, else the
        feature itself."""
        if not self.is_multi_hot:
            return (self.feature,)
        return tuple(f"{self.name}/b{s}" for s in range(self.num_blocks))

    @property
    def whole_key(self) -> str:
        """The one KJT key that a child collection reads whose lookups split bags for themselves."""
        return self.name if self.is_multi_hot else self.feature


class PooledPieces:
    """The pieces of a collection's outputs, in the form that `ops` reads (`select_pieces`)."""

    def __init__(self, outputs: Sequence[PooledFeature], alpha_begins: Mapping[int, int]) -> None:
        self._outputs = tuple(outputs)
        self._owners = [(i, output) for i, output in enumerate(outputs) for _ in output.block_keys]
        self.keys = [
            key if output.is_multi_hot else output.name
            for output in outputs
            for key in output.block_keys
        ]
        self.single_id = [(k, o) for k, (_, o) in enumerate(self._owners) if not o.is_multi_hot]
        self.of_dim: dict[int, list[int]] = {}
        for k, (_, output) in enumerate(self._owners):
            self.of_dim.setdefault(output.embedding_dim, []).append(k)
        self._rows_of_piece = [
            (output.first_alpha_row + s, 1 if output.is_multi_hot else output.num_blocks)
            for output in outputs
            for s in range(len(output.block_keys))
        ]
        self._alpha_begins = alpha_begins
        self._layouts: dict[tuple[str, ...], Tensor] = {}
        self._places: dict[tuple[tuple[str, ...], torch.device], tuple[Tensor, Tensor]] = {}

    def layout(self, keys: Sequence[str], widths: Sequence[int]) -> Tensor:
        """Returns the place of every piece, ``(K, 7)`` int64."""
        if tuple(keys) not in self._layouts:
            dims = [output.embedding_dim for output in self._outputs]
            starts = itertools.accumulate(dims, initial=0)
            out_columns = dict(enumerate(starts))
            column_of_key = dict(zip(keys, itertools.accumulate(widths, initial=0), strict=False))
            fields = []
            pieces = zip(self.keys, self._owners, self._rows_of_piece, strict=True)
            for key, (index, output), rows in pieces:
                dim = output.embedding_dim
                places = (column_of_key[key], out_columns[index], dim, self._alpha_begins[dim])
                fields.append((*places, index, *rows))
            self._layouts[tuple(keys)] = torch.tensor(fields, dtype=torch.int64).view(-1, 7)
        return self._layouts[tuple(keys)]

    def rows_of_multi_hot(self, split: KeyedJaggedTensor, batch_size: int) -> Tensor:
        """Rows of alpha, ``(B, K)`` int32, -1 for empty bags; those of single-id features are left
        to be filled in."""
        device = split.lengths().device
        if len(self.single_id) == len(self._owners):
            return torch.empty(batch_size, len(self._owners), dtype=torch.int32, device=device)
        places, first_rows = self._places_in(split.keys(), device)
        holds_ids = split.lengths().view(len(split.keys()), batch_size)[places] > 0
        return torch.where(holds_ids, first_rows, -1).t().contiguous()

    def _places_in(self, keys: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Position of every piece's key among `keys`, and its first row of alpha, ``(K, 1)``;
        copied once to a device."""
        entry = tuple(keys), device
        if entry not in self._places:
            position = {key: index for index, key in enumerate(keys)}
            block_keys = [key for output in self._outputs for key in output.block_keys]
            places = torch.tensor([position[key] for key in block_keys])
            rows = torch.tensor([[first] for first, _ in self._rows_of_piece], dtype=torch.int32)
            self._places[entry] = places.to(device), rows.to(device)
        return self._places[entry]

    def places(self, keys: Sequence[str]) -> list[tuple[int, int, int]]:
        """Piece, position of its key among `keys`, and row of alpha of block 0, of every single-id
        feature."""
        position = {key: index for index, key in enumerate(keys)}
        return [
            (k, position[output.feature], output.first_alpha_row) for k, output in self.single_id
        ]

    def divisors(self, bags: KeyedJaggedTensor, dtype: torch.dtype) -> Tensor | None:
        """Returns the lengths of whole bags, by which sums still have to be divided, ``(B,
        outputs)``, or None."""
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
    """Base of the modules that make a wrapper's outputs: it reports the gradient of the outputs to
    a listener."""

    # A module of its own, so that TorchRec's tracer takes it for a leaf and pipelines the lookup
    # before it.

    _across = 0
    """Dimension of the gradient across which values are of one table."""

    def __init__(self, outputs: tuple[PooledFeature, ...], alpha: Alpha) -> None:
        super().__init__()
        self._outputs = outputs
        self._alpha = [alpha]  # in a list: the wrapper registers it, once
        self.on_gradient: OnGradient | None = None
        self._keys = [output.name for output in outputs]
        self._dims = [output.embedding_dim for output in outputs]

    def _watch(self, values: Tensor) -> None:
        if values.requires_grad and not self._alpha[0].is_upper:
            values.register_hook(self._on_hook)

    def _on_hook(self, gradient: Tensor) -> Tensor | None:
        """Runs before the tables' own backward, hence before a fused optimizer applies the
        gradient."""
        if self.on_gradient is None:
            return None
        on_cpu = gradient.device.type == "cpu"
        is_finite = bool(torch.isfinite(gradient.sum())) if on_cpu else self._finite_parts(gradient)
        may_learn = self._check_gradient(is_finite, gradient)
        return None if may_learn is None else torch.where(may_learn, gradient, 0.0)

    def _check_gradient(self, is_finite: bool | Tensor, gradient: Tensor) -> Tensor | None:
        """Tells the listener of a gradient: whether all of it is finite, or which parts; on a GPU
        the listener may answer whether tables learn by it."""
        if self.on_gradient is None:
            return None
        if isinstance(is_finite, bool):
            is_finite = _FINITE if is_finite else self._finite_parts(gradient)
        table_of = partial(_table_with_bad, self._outputs, self._sizes_of_parts())
        return self.on_gradient(is_finite, table_of)

    def _finite_parts(self, gradient: Tensor) -> Tensor:
        """Of every column, or row, whether all of it is finite: its largest magnitude is then, and
        only then."""
        if not gradient.numel():
            size = gradient.shape[1 - self._across]
            return torch.ones(size, dtype=torch.bool, device=gradient.device)
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


class _Routers(nn.ModuleList):
    """Row -> block of some tables, on the device of the model."""

    def __init__(self, tables: Iterable[str], blocks: RowBlocks) -> None:
        names = list(dict.fromkeys(tables))
        super().__init__(RowRouter(blocks.routings[name]) for name in names)
        self._index = {name: index for index, name in enumerate(names)}

    def of(self, output: PooledFeature) -> RowRouter:
        """That of an output's table."""
        return cast(RowRouter, self[self._index[output.table]])

    def alpha_rows(self, output: PooledFeature, ids: Tensor) -> Tensor:
        """Row of alpha of each id of an output's feature."""
        return cast(Tensor, self.of(output)(ids)) + output.first_alpha_row


class SelectPooled(WatchedOutputs):
    """The part of the wrapper behind the lookup: local, no collective, no parameter."""

    def __init__(self, outputs: tuple[PooledFeature, ...], blocks: RowBlocks, alpha: Alpha) -> None:
        super().__init__(outputs, alpha)
        self._runs = _runs(outputs)
        self._pieces = PooledPieces(outputs, alpha.begins)
        tables = sorted({output.table for output in outputs if not output.is_multi_hot})
        self._routers = _Routers(tables, blocks)

    def forward(
        self, sums: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor
    ) -> KeyedTensor:
        """Multiplies pooled embeddings by alpha."""
        select = self._select_at_once if can_select(sums.values()) else self._select_in_runs
        values = select(sums, features, split)
        return KeyedTensor(keys=self._keys, values=values, length_per_key=self._dims)

    def _may_learn(self, values: Tensor) -> Tensor:
        """Cuts off gradients in an upper step: the tables behind the lookup would learn from
        validation data."""
        return values.detach() if self._alpha[0].is_upper else values

    def _select_at_once(
        self, sums: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor
    ) -> Tensor:
        """Selects by the operators on blocks, for all outputs in one pass. On a GPU nothing waits
        for it."""
        alpha, pieces, values = self._alpha[0], self._pieces, self._may_learn(sums.values())
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

    def _select_in_runs(
        self, sums: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor
    ) -> Tensor:
        """Selects by torch's own operators, one run of outputs after the other, where `can_select`
        says no."""
        values = self._may_learn(self._in_order(sums))
        bags, split_bags = jagged_by_key(features), jagged_by_key(split)
        widths = [sum(o.embedding_dim * len(o.block_keys) for o in run) for run in self._runs]
        parts = []
        for run, part in zip(self._runs, values.split(widths, dim=1), strict=True):
            select = self._select_per_block if run[0].is_multi_hot else self._select_per_sample
            parts.append(select(part, run, bags, split_bags))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        self._watch(out)
        return out

    def _in_order(self, sums: KeyedTensor) -> Tensor:
        """Values in the order of the pieces; sharded collections may group keys by sharding
        type."""
        if sums.keys() == self._pieces.keys:
            return sums.values()
        by_key = sums.to_dict()
        return torch.cat([by_key[key] for key in self._pieces.keys], dim=1)

    def _select_per_sample(
        self, part: Tensor, run: list[PooledFeature], bags: JaggedByKey, _: JaggedByKey
    ) -> Tensor:
        alpha, dim = self._alpha[0], run[0].embedding_dim
        of_ids = [self._routers.alpha_rows(o, bags[o.feature].values()) for o in run]
        if alpha.is_upper:
            alpha.record_hits(dim, torch.cat(of_ids))
        of_bags = [
            one_per_bag(rows, bags[output.feature].lengths(), output.first_alpha_row)
            for rows, output in zip(of_ids, run, strict=True)
        ]
        rows = torch.stack(of_bags, dim=1)
        out = select_per_sample(part.view(len(part), len(run), dim), alpha.of(dim), rows)
        return out.view(len(part), len(run) * dim)

    def _select_per_block(
        self, part: Tensor, run: list[PooledFeature], bags: JaggedByKey, split: JaggedByKey
    ) -> Tensor:
        output, alpha = run[0], self._alpha[0]
        dim, num_blocks, first = output.embedding_dim, output.num_blocks, output.first_alpha_row
        rows = alpha.of(dim)[first : first + num_blocks]
        out = select_per_block(part.view(len(part), num_blocks, dim), rows)
        if alpha.is_upper:
            keys = enumerate(output.block_keys, first)
            hits = [row for row, key in keys if split[key].values().numel()]
            alpha.record_hits(dim, torch.tensor(hits, dtype=torch.int64, device=part.device))
        if output.divides:
            out = out / bags[output.feature].lengths().clamp(min=1).unsqueeze(1)
        return out


def one_per_bag(rows: Tensor, lengths: Tensor, row_of_empty: int) -> Tensor:
    """Row of alpha of each single-id bag; an empty bag, whose embedding is zero, takes any."""
    if rows.numel() == lengths.numel():
        return rows
    of_bags = torch.full_like(lengths, row_of_empty, dtype=torch.int64)
    return of_bags.masked_scatter(lengths > 0, rows)


def _runs(outputs: tuple[PooledFeature, ...]) -> list[list[PooledFeature]]:
    """Neighbouring outputs that one operation can select: single-id features of equal D; each
    multi-hot one alone."""
    runs: list[list[PooledFeature]] = []
    for output in outputs:
        last = runs[-1][-1] if runs else None
        joins = last is not None and not last.is_multi_hot and not output.is_multi_hot
        if joins and last is not None and last.embedding_dim == output.embedding_dim:
            runs[-1].append(output)
        else:
            runs.append([output])
    return runs


class SelectSequences(WatchedOutputs):
    """The same behind a lookup that does not pool."""

    _across = 1

    def __init__(self, outputs: tuple[PooledFeature, ...], blocks: RowBlocks, alpha: Alpha) -> None:
        super().__init__(outputs, alpha)
        self._routers = _Routers((output.table for output in outputs), blocks)
        self._sizes: list[int] = []

    def forward(
        self, embeddings: dict[str, JaggedTensor], features: KeyedJaggedTensor
    ) -> dict[str, JaggedTensor]:
        """Multiplies embeddings by alpha, those of all output keys at once."""
        parts, bags = [embeddings[key] for key in self._keys], jagged_by_key(features)
        alpha = self._alpha[0]
        ids = [bags[output.feature].values() for output in self._outputs]
        pairs = zip(self._outputs, ids, strict=True)
        rows = torch.cat([self._routers.alpha_rows(*pair) for pair in pairs])
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
        dim, alpha = self._dims[0], self._alpha[0].of(self._dims[0])
        if can_select(values):
            layout = torch.tensor([[0, 0, dim, 0, 0, 0, len(alpha)]])
            rows = rows.to(torch.int32).unsqueeze(1)
            flat = alpha.to(torch.promote_types(values.dtype, torch.float32)).flatten()
            watch = self._check_gradient
            return select_pieces(values, flat, rows, None, layout, dim, watch=watch)
        out = select_per_sample(values.unsqueeze(1), alpha, rows.unsqueeze(1)).squeeze(1)
        self._watch(out)
        return out

    def _sizes_of_parts(self) -> list[int]:
        return self._sizes
