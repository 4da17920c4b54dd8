r"""Rotation: turns tables into their principal axes, so that the columns that die are those that
say least."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from dnis_torchrec.allocation.axes import Rotatable, RotationGroup, check_groups
from dnis_torchrec.allocation.torchrec_models import known_groups
from dnis_torchrec.allocation.whole_rows import WholeRows, whole_rows
from dnis_torchrec.blocks.frequency import FrequencyCounts
from dnis_torchrec.checks import describe
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.cached_tables import writing_to_tables
from dnis_torchrec.selection.table_shards import (
    TableShard,
    collections,
    frozen_tables_of,
    local_shards,
    num_copies,
    ranks_of,
    table_configs_of,
)

logger = logging.getLogger(__name__)

LINEAR_STATES = frozenset({"exp_avg", "momentum_buffer"})
"""Optimizer states that turn as the gradient does."""
SQUARED_STATES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum"})
"""Optimizer states that are sums of squared gradients."""


def rotation_groups(model: nn.Module, leave_alone: Collection[str] = ()) -> list[RotationGroup]:
    """Finds the groups of tables that can be rotated in a model. Local, no collective."""
    modules = get_unwrapped_module(model).modules()
    groups = [
        group
        for module in modules
        if isinstance(module, Rotatable)
        for group in module.rotation_groups()
    ]
    groups += known_groups(model)
    check_groups(groups, _embedding_dims(model))
    frozen = {
        table for module in collections(model).values() for table in frozen_tables_of(module)
    } | {*leave_alone}
    return [group for group in groups if not _holds_frozen(group, frozen)]


def _holds_frozen(group: RotationGroup, frozen_tables: set[str]) -> bool:
    layers = [layer for layer in group.layers() if isinstance(layer, nn.Parameter)]
    return bool(frozen_tables & set(group.tables)) or not all(
        layer.requires_grad for layer in layers
    )


def _embedding_dims(model: nn.Module) -> dict[str, int]:
    """Table -> D."""
    modules = collections(model).values()
    return {
        config.name: config.embedding_dim
        for module in modules
        for config in table_configs_of(module)
    }


@torch.no_grad()
def rotate_(
    model: nn.Module,
    counts: FrequencyCounts,
    optimizer: torch.optim.Optimizer | None = None,
    leave_alone: Collection[str] = (),
) -> list[Tensor]:
    """Turns the tables of every rotation group, and the layers that read them, into the tables'
    principal axes."""
    groups = rotation_groups(model, leave_alone)
    dims = _embedding_dims(model)
    modules = list(collections(model).values())
    shards = [shard for module in modules for shard in local_shards(module)]
    ranks = ranks_of(*modules)
    tables = [table for group in groups for table in group.tables]
    _say_what_stays(dims, [*tables, *leave_alone], ranks)
    states: dict[int, dict[str, Tensor]] = {}
    if optimizer is not None:
        states = _states_by_storage(model, optimizer)
        turned = [shard.weight for shard in shards if shard.table in tables]
        turned += [layer for group in groups for layer in group.layers()]
        _refuse(_split_rows(shards, set(tables), dims) or _unknown_state(turned, states), ranks)
    rows = whole_rows(
        shards, {table: (counts.counts[table].numel(), dims[table]) for table in tables}, ranks
    )
    with writing_to_tables(model):
        return [
            _rotate_group_(
                group, {table: rows[table] for table in group.tables}, counts, ranks, states
            )
            for group in groups
        ]


def _say_what_stays(dims: Mapping[str, int], turned: Sequence[str], ranks: Ranks) -> None:
    """Names the tables whose axes stay as they are; those of a single column have nothing to turn."""
    others = [table for table, dim in dims.items() if dim > 1 and table not in turned]
    if others and ranks.is_first:
        requirement = "tables of which it is known what turns along, and that are not frozen"
        remedy = "they keep their axes; see `with_axes_` for TorchRec's models, `rotation_groups` for others"
        logger.warning(describe("rotation", requirement, f"others: {others}", remedy))


def _rotate_group_(
    group: RotationGroup,
    rows: Mapping[str, WholeRows],
    counts: FrequencyCounts,
    ranks: Ranks,
    states: Mapping[int, Mapping[str, Tensor]],
) -> Tensor:
    dim = rows[group.tables[0]].shape[1]
    shards = [shard for of_table in rows.values() for shard in of_table.shards]
    if group.product is not None:
        columns = slice(group.product.first_column, group.product.first_column + dim)
        _draw_in_(group.product.weight, columns, group.tables[0], shards, states)
    rotation = ranks.broadcast_(_principal_axes(_second_moment(rows, dim, counts, ranks)))
    for of_table in rows.values():
        for chunk in of_table.chunks():
            chunk.write_(chunk.values @ rotation.to(chunk.values.device))
    for shard in shards:
        _turn_states_(_states_like(shard.weight, states), rotation, slice(None))
    for turning in group.turning():
        columns = slice(turning.first_column, turning.first_column + dim)
        _rotate_columns_(turning.weight[:, columns], rotation)
        _turn_states_(_states_like(turning.weight, states), rotation, columns)
    return rotation


def _draw_in_(
    layer: Tensor,
    columns: slice,
    first_table: str,
    shards: Sequence[TableShard],
    states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Draws the weights of a product into its two tables, the sign into the first. Local: all ranks
    have them."""
    weights = layer[:, columns].double().clone()
    for shard in shards:
        factor = weights.abs().sqrt() * (weights.sign() if shard.table == first_table else 1)
        for chunk, _, held in shard.chunks():
            chunk.copy_((chunk.double() * factor[:, held].to(chunk.device)).to(chunk))
        # Of a column that the product does not look at nothing is known.
        inverse = torch.where(factor.abs() > 1e-6 * factor.abs().max(), 1 / factor, 0.0)
        for name, state in _states_like(shard.weight, states):
            scale = (inverse if name in LINEAR_STATES else inverse.square()).to(state.device)
            state.copy_((state.double() * scale).to(state))
    layer[:, columns] = 1
    for name, state in _states_like(layer, states):
        of_ones = state[:, columns].double() * weights.square()
        state[:, columns] = 0 if name in LINEAR_STATES else of_ones.mean().to(state)


def _states_like(
    weight: Tensor, states: Mapping[int, Mapping[str, Tensor]]
) -> list[tuple[str, Tensor]]:
    """Optimizer states with a number for each of the weight's."""
    return [
        (name, state)
        for name, state in states.get(weight.data_ptr(), {}).items()
        if state.shape == weight.shape
    ]


def _second_moment(
    rows: Mapping[str, WholeRows], dim: int, counts: FrequencyCounts, ranks: Ranks
) -> Tensor:
    """``(D, D)`` float64: sum over tables of E^T diag(counts) E, every row once however many ranks
    walk through it."""
    moment = torch.zeros(dim, dim, dtype=torch.float64)
    for table, of_table in rows.items():
        for chunk in of_table.chunks():
            weights = counts.counts[table][chunk.rows].to(chunk.values) / of_table.copies
            moment = moment + (chunk.values.T @ (chunk.values * weights[:, None])).cpu()
    return ranks.sum_(moment / counts.num_samples)


def _copies(
    shards_here: Sequence[TableShard],
    dims: Mapping[str, int],
    counts: FrequencyCounts,
    ranks: Ranks,
) -> dict[str, int]:
    """On how many ranks each value of a table is held, see `num_copies`."""
    shards = {table: [shard for shard in shards_here if shard.table == table] for table in dims}
    return num_copies(
        shards, {table: (counts.counts[table].numel(), dim) for table, dim in dims.items()}, ranks
    )


def _principal_axes(moment: Tensor) -> Tensor:
    """Eigenvectors as columns, by falling eigenvalue; the largest component of each is positive."""
    axes = torch.linalg.eigh(moment).eigenvectors.flip(1)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return axes * largest.sign()


def _rotate_columns_(weights: Tensor, rotation: Tensor) -> None:
    weights.copy_((weights.double() @ rotation.to(weights.device)).to(weights))


def _turn_states_(states: Sequence[tuple[str, Tensor]], rotation: Tensor, columns: slice) -> None:
    for name, state in states:
        _rotate_columns_(
            state[:, columns], rotation if name in LINEAR_STATES else rotation.square()
        )


def _states_by_storage(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Tensor]]:
    """Address of a parameter's storage -> its optimizer states, of fused optimizers and of the
    other one."""
    found = {}
    for parameter, state in [
        *optimizer.state.items(),
        *_fused_states(cast(DistributedModelParallel, model)),
    ]:
        found[parameter.data_ptr()] = {
            name: value for name, value in state.items() if isinstance(value, Tensor)
        }
    return found


def _fused_states(model: DistributedModelParallel) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Local weights and states of optimizers fused into the tables' backward, by the names that
    torch.optim has."""
    for key, state in model.fused_optimizer.state.items():
        weight = _local(key)
        if weight is not None:
            whole = [
                each
                for each in map(_local, state.values())
                if each is not None and each.shape == weight.shape
            ]
            yield (
                weight,
                dict(
                    zip(
                        ("exp_avg", "exp_avg_sq") if len(whole) > 1 else ("sum",),
                        whole,
                        strict=False,
                    )
                ),
            )


def _local(value: object) -> Tensor | None:
    """The only local shard of a ShardedTensor, a tensor itself, or None."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return shards[0].tensor if shards else None
    return value if isinstance(value, Tensor) else None


def _refuse(problem: str, ranks: Ranks) -> None:
    for found in filter(None, ranks.gather_texts(problem)):
        raise NotImplementedError(found)


def _split_rows(
    shards_here: Sequence[TableShard], tables: set[str], embedding_dims: Mapping[str, int]
) -> str:
    """Names a table of which this rank holds parts of rows, if there is one."""
    for shard in shards_here:
        if shard.table in tables and shard.weight.shape[1] != embedding_dims[shard.table]:
            received = f"{shard.weight.shape[1]} of its {embedding_dims[shard.table]} columns"
            remedy = "shard it by rows or as a whole, or search with rotate=False"
            return describe(
                f"table {shard.table!r}",
                "supported to rotate are shards of whole rows",
                received,
                remedy,
            )
    return ""


def _unknown_state(weights: Sequence[Tensor], states: Mapping[int, Mapping[str, Tensor]]) -> str:
    """Names an optimizer state that nobody knows how to turn, if there is one."""
    for weight in weights:
        for name, _ in _states_like(weight, states):
            if name not in LINEAR_STATES | SQUARED_STATES:
                supported = f"supported to rotate are {sorted(LINEAR_STATES | SQUARED_STATES)}"
                return describe(
                    "optimizer state", supported, repr(name), "search with rotate=False"
                )
    return ""
