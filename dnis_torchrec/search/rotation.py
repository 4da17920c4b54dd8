r"""Rotation: turns tables into their principal axes, so that the columns that die are those that say least.

A search can only drop columns, and which direction of the embedding space a column holds is an accident of the initial
weights: what matters lies across all of them. Where a model cannot tell its embedding space from a rotated one, the
tables may be rotated first:

.. math:: E_t \leftarrow E_t Q, \quad W \leftarrow W Q, \quad Q = \text{eigenvectors of } \sum_t E_t^\top \eta_t E_t

for tables t of one `RotationGroup`, their row frequencies :math:`\eta_t`, and the linear layers W that read them. Dot
products of two embeddings of the group stay, :math:`(Q^\top e)^\top (Q^\top f) = e^\top f`, and so does
:math:`W e = (W Q)(Q^\top e)`. The columns then come in falling order of what they carry, and leaving out the last ones
is the best approximation of that rank (Eckart and Young, 1936; Ashkboos et al., SliceGPT, 2024, prune language models
so).

A product that is weighed column by column, as in GMF, is a dot product once its weights are drawn into the tables; they
learn on from 1:

.. math:: \sum_k h_k p_k q_k: \quad p_k \leftarrow \mathrm{sign}(h_k) \sqrt{|h_k|}\, p_k, \quad
    q_k \leftarrow \sqrt{|h_k|}\, q_k, \quad h_k \leftarrow 1

NOTE[DIFF]: the paper does not rotate.

Shapes: N rows, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.frequency import FrequencyCounts
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.soft_selection.cached_tables import writing_to_tables
from dnis_torchrec.soft_selection.table_shards import (
    TableShard,
    collections,
    frozen_tables_of,
    local_shards,
    num_copies,
    ranks_of,
    table_configs_of,
)

LINEAR_STATES = frozenset({"exp_avg", "momentum_buffer"})
"""Optimizer states that turn as the gradient does."""
SQUARED_STATES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum"})
"""Optimizer states that are sums of squared gradients."""


@dataclass(frozen=True, kw_only=True)
class LinearReader:
    """Columns of a linear layer that read one embedding.

    Attributes:
        weight: ``(out, in)``.
        first_column: the embedding is inputs ``first_column .. first_column + D``.
    """

    weight: nn.Parameter
    first_column: int = 0


@dataclass(frozen=True, kw_only=True)
class WeightedProduct:
    """Columns of a linear layer with one output that read the product of two embeddings, column by column.

    Attributes:
        weight: ``(1, in)``.
        first_column: the product is inputs ``first_column .. first_column + D``.
    """

    weight: nn.Parameter
    first_column: int = 0


@dataclass(frozen=True, kw_only=True)
class RotationGroup:
    """Tables of equal embedding_dim that may be rotated, all by the same matrix.

    Predictions depend on their pooled embeddings only through dot products of two of them, and through `readers`; or,
    of two tables, only through their `product`.

    Attributes:
        tables: their names.
        readers: table -> the linear layers that read pooled embeddings of its features.
        product: what weighs the product of the two tables.
    """

    tables: tuple[str, ...]
    readers: Mapping[str, tuple[LinearReader, ...]] = field(default_factory=dict)
    product: WeightedProduct | None = None

    def layers(self) -> list[nn.Parameter]:
        """Weights of all layers that read the tables."""
        layers = [reader.weight for readers in self.readers.values() for reader in readers]
        return layers if self.product is None else [*layers, self.product.weight]


@runtime_checkable
class Rotatable(Protocol):
    """A model that says which of its tables may be rotated. Models that do not say are not."""

    def rotation_groups(self) -> Sequence[RotationGroup]:
        """Groups of tables; a table is in one of them at most."""


def rotation_groups(model: nn.Module) -> list[RotationGroup]:
    """What can be rotated in a model. Local, no collective.

    Args:
        model: sharded or not; any module inside it may be `Rotatable`.

    Returns:
        The groups; none if no module is `Rotatable`. Groups with a table or a layer that is frozen (requires_grad is
        False) are left out: these are to keep their values.

    Raises:
        ValueError: if a group names an unknown table, a table is in two groups, tables of a group differ in
            embedding_dim, or a reader is of another group's table or too narrow.
    """
    modules = get_unwrapped_module(model).modules()
    groups = [group for module in modules if isinstance(module, Rotatable) for group in module.rotation_groups()]
    named = [table for group in groups for table in group.tables]
    twice = sorted({table for table in named if named.count(table) > 1})
    check(not twice, "rotation groups", "every table in one group at most", twice)
    for group in groups:
        _check_group(group, _embedding_dims(model))
    frozen = {table for module in collections(model).values() for table in frozen_tables_of(module)}
    return [group for group in groups if not _holds_frozen(group, frozen)]


def _holds_frozen(group: RotationGroup, frozen_tables: set[str]) -> bool:
    return bool(frozen_tables & set(group.tables)) or not all(layer.requires_grad for layer in group.layers())


def _embedding_dims(model: nn.Module) -> dict[str, int]:
    """Table -> D."""
    modules = collections(model).values()
    return {config.name: config.embedding_dim for module in modules for config in table_configs_of(module)}


def _check_group(group: RotationGroup, embedding_dims: Mapping[str, int]) -> None:
    place = f"rotation group {group.tables}"
    for table in group.tables:
        check_known("table", table, embedding_dims)
    dims = {embedding_dims[table] for table in group.tables}
    check(len(dims) == 1, place, "tables of one embedding_dim", sorted(dims), "make a group for each")
    for table, readers in group.readers.items():
        check(table in group.tables, place, "readers of its own tables", repr(table))
        for reader in readers:
            wanted, inputs = reader.first_column + max(dims), reader.weight.shape[1]
            check(inputs >= wanted, f"{place}, reader of {table!r}", f"at least {wanted} inputs", inputs)
    if group.product is not None:
        is_pair = len(group.tables) == 2 and not group.readers
        check(is_pair, place, "two tables without readers beside a product", list(group.tables))
        outputs, inputs = group.product.weight.shape
        wanted = group.product.first_column + max(dims)
        check(outputs == 1, f"{place}, product", "a layer with one output", outputs)
        check(inputs >= wanted, f"{place}, product", f"at least {wanted} inputs", inputs)


@torch.no_grad()
def rotate_(model: DistributedModelParallel, optimizer: torch.optim.Optimizer, counts: FrequencyCounts) -> list[Tensor]:
    """Turns the tables of every rotation group, and what reads them, into the tables' principal axes.

    Predictions stay as they were, up to rounding. States of optimizers turn along: averages of gradients exactly, sums
    of squares as if the gradients of different columns were uncorrelated, one number per row not at all. Those of a
    product's weights start anew: averages at zero, squares at their mean.

    Distributed: shards of whole rows, wherever they are, and replicated tables. One all_reduce of ``(D, D)`` float64
    per group over the model's process group, then one broadcast of Q; rows are turned in place, locally.

    Args:
        model: the sharded model.
        optimizer: of everything that is not fused into the tables' backward.
        counts: frequencies of all rows, the same on every rank.

    Returns:
        Q per group, ``(D, D)`` float64, its columns in falling order of what they carry.

    Raises:
        NotImplementedError: for shards of parts of rows (column-wise), or an optimizer state of unknown kind; before
            anything was changed, on all ranks alike.
    """
    groups = rotation_groups(model)
    modules = list(collections(model).values())
    parts = [part for module in modules for part in local_shards(module)]
    ranks = ranks_of(*modules)
    states = _states_by_storage(model, optimizer)
    tables = {table for group in groups for table in group.tables}
    turned = [part.weight for part in parts if part.table in tables]
    turned += [layer for group in groups for layer in group.layers()]
    problem = _split_rows(parts, tables, _embedding_dims(model)) or _unknown_state(turned, states)
    _refuse(problem, ranks)
    dims = _embedding_dims(model)
    with writing_to_tables(model):
        return [_rotate_group_(group, dims[group.tables[0]], parts, counts, ranks, states) for group in groups]


@torch.no_grad()
def column_scales(model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts) -> dict[int, Tensor]:
    r"""What columns of blocks carry: :math:`\sqrt{\sum_i \eta_i E_{ik}^2 / \sum_i \eta_i}` over the rows i of a block.

    Distributed: shards of any kind and replicated tables; one all_reduce of ``(A, D)`` float64 per embedding_dim, and
    one of a number per table.

    Args:
        model: prepared, sharded or not.
        blocks: those of its alphas.
        counts: frequencies of all rows, the same on every rank.

    Returns:
        embedding_dim -> ``(A, D)``, float32, on the CPU; 1 for a block without an occurrence.
    """
    modules = list(collections(model).values())
    parts = [part for module in modules for part in local_shards(module)]
    ranks = ranks_of(*modules)
    copies = _copies(parts, blocks.embedding_dims, counts, ranks)
    squares = {dim: torch.zeros(shape, dtype=torch.float64) for dim, shape in blocks.alpha_shapes.items()}
    for part in parts:
        dim, routing = blocks.embedding_dims[part.table], blocks.routings[part.table]
        for chunk, rows, columns in part.chunks():
            of_rows = routing.block_of(torch.arange(rows.start, rows.stop))
            in_block = of_rows < routing.num_blocks
            weights = counts.counts[part.table][rows].double() / copies[part.table]
            energy = chunk.cpu().double().square() * weights[:, None]
            alpha_rows = blocks.first_alpha_row(part.table) + of_rows[in_block]
            squares[dim][:, columns].index_add_(0, alpha_rows, energy[in_block])
    occurrences = {dim: blocks.per_alpha_row(dim, blocks.occurrences)[:, None] for dim in squares}
    means = {dim: ranks.sum_(square) / occurrences[dim].clamp(min=1) for dim, square in squares.items()}
    return {dim: torch.where(occurrences[dim] > 0, mean.sqrt(), 1.0).float() for dim, mean in means.items()}


def _rotate_group_(
    group: RotationGroup,
    dim: int,
    parts: Sequence[TableShard],
    counts: FrequencyCounts,
    ranks: Ranks,
    states: Mapping[int, Mapping[str, Tensor]],
) -> Tensor:
    own = [part for part in parts if part.table in group.tables]
    if group.product is not None:
        columns = slice(group.product.first_column, group.product.first_column + dim)
        _draw_in_(group.product.weight, columns, group.tables[0], own, states)
    rotation = ranks.broadcast_(_principal_axes(_second_moment(own, dim, group.tables, counts, ranks)))
    for part in own:
        for chunk, _, _ in part.chunks():
            _turn_(chunk, rotation)
        _turn_states_(_states_like(part.weight, states), rotation, slice(None))
    for readers in group.readers.values():
        for reader in readers:
            columns = slice(reader.first_column, reader.first_column + dim)
            _turn_(reader.weight[:, columns], rotation)
            _turn_states_(_states_like(reader.weight, states), rotation, columns)
    return rotation


def _draw_in_(
    layer: Tensor,
    columns: slice,
    first_table: str,
    parts: Sequence[TableShard],
    states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Draws the weights of a product into its two tables, the sign into the first. Local: all ranks have them."""
    weights = layer[:, columns].double().clone()
    for part in parts:
        factor = weights.abs().sqrt() * (weights.sign() if part.table == first_table else 1)
        for chunk, _, _ in part.chunks():
            chunk.copy_((chunk.double() * factor.to(chunk.device)).to(chunk))
        # Of a column that the product does not look at nothing is known.
        inverse = torch.where(factor.abs() > 1e-6 * factor.abs().max(), 1 / factor, 0.0)
        for name, state in _states_like(part.weight, states):
            scale = (inverse if name in LINEAR_STATES else inverse.square()).to(state.device)
            state.copy_((state.double() * scale).to(state))
    layer[:, columns] = 1
    for name, state in _states_like(layer, states):
        of_ones = state[:, columns].double() * weights.square()
        state[:, columns] = 0 if name in LINEAR_STATES else of_ones.mean().to(state)


def _states_like(weight: Tensor, states: Mapping[int, Mapping[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Optimizer states with a number for each of the weight's."""
    return [(name, state) for name, state in states.get(weight.data_ptr(), {}).items() if state.shape == weight.shape]


def _second_moment(
    parts: Sequence[TableShard], dim: int, tables: tuple[str, ...], counts: FrequencyCounts, ranks: Ranks
) -> Tensor:
    """``(D, D)`` float64: sum over tables of E^T diag(counts) E, every row once however many ranks hold it."""
    copies = _copies(parts, dict.fromkeys(tables, dim), counts, ranks)
    moment = torch.zeros(dim, dim, dtype=torch.float64)
    for part in parts:
        for chunk, rows, _ in part.chunks():
            wide = chunk.double()
            weights = counts.counts[part.table][rows].to(wide) / copies[part.table]
            moment = moment + (wide.T @ (wide * weights[:, None])).cpu()
    return ranks.sum_(moment / counts.num_samples)


def _copies(
    parts: Sequence[TableShard], dims: Mapping[str, int], counts: FrequencyCounts, ranks: Ranks
) -> dict[str, int]:
    """On how many ranks each value of a table is held, see `num_copies`."""
    shards = {table: [part for part in parts if part.table == table] for table in dims}
    return num_copies(shards, {table: (counts.counts[table].numel(), dim) for table, dim in dims.items()}, ranks)


def _principal_axes(moment: Tensor) -> Tensor:
    """Eigenvectors as columns, by falling eigenvalue; the largest component of each is positive."""
    axes = torch.linalg.eigh(moment).eigenvectors.flip(1)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return axes * largest.sign()


def _turn_(weights: Tensor, rotation: Tensor) -> None:
    weights.copy_((weights.double() @ rotation.to(weights.device)).to(weights))


def _turn_states_(states: Sequence[tuple[str, Tensor]], rotation: Tensor, columns: slice) -> None:
    for name, state in states:
        _turn_(state[:, columns], rotation if name in LINEAR_STATES else rotation.square())


def _states_by_storage(
    model: DistributedModelParallel, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Tensor]]:
    """Address of a parameter's storage -> its optimizer states, of fused optimizers and of the other one."""
    found = {}
    for parameter, state in [*optimizer.state.items(), *_fused_states(model)]:
        found[parameter.data_ptr()] = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return found


def _fused_states(model: DistributedModelParallel) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Local weights and states of optimizers fused into the tables' backward, by the names that torch.optim has.

    FBGEMM names the first state momentum1 whatever it is: beside a second one of the weights' shape it is Adam's
    average, alone it is Adagrad's sum of squares.
    """
    for key, state in model.fused_optimizer.state.items():
        weight = _local(key)
        if weight is not None:
            whole = [part for part in map(_local, state.values()) if part is not None and part.shape == weight.shape]
            yield weight, dict(zip(("exp_avg", "exp_avg_sq") if len(whole) > 1 else ("sum",), whole, strict=False))


def _local(value: object) -> Tensor | None:
    """The only local shard of a ShardedTensor, a tensor itself, or None."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return shards[0].tensor if shards else None
    return value if isinstance(value, Tensor) else None


def _refuse(problem: str, ranks: Ranks) -> None:
    for found in filter(None, ranks.gather_texts(problem)):
        raise NotImplementedError(found)


def _split_rows(parts: Sequence[TableShard], tables: set[str], embedding_dims: Mapping[str, int]) -> str:
    """Names a table of which this rank holds parts of rows, if there is one."""
    for part in parts:
        if part.table in tables and part.weight.shape[1] != embedding_dims[part.table]:
            received = f"{part.weight.shape[1]} of its {embedding_dims[part.table]} columns"
            remedy = "shard it by rows or as a whole, or search with rotate=False"
            return describe(f"table {part.table!r}", "supported to rotate are shards of whole rows", received, remedy)
    return ""


def _unknown_state(weights: Sequence[Tensor], states: Mapping[int, Mapping[str, Tensor]]) -> str:
    """Names an optimizer state that nobody knows how to turn, if there is one."""
    for weight in weights:
        for name, _ in _states_like(weight, states):
            if name not in LINEAR_STATES | SQUARED_STATES:
                supported = f"supported to rotate are {sorted(LINEAR_STATES | SQUARED_STATES)}"
                return describe("optimizer state", supported, repr(name), "search with rotate=False")
    return ""
