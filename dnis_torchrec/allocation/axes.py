"""Principal axes: tables turned so that few columns carry most, where the model can follow."""

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.models import deepfm, dlrm
from torchrec.modules.deepfm import DeepFM, FactorizationMachine
from torchrec.modules.mlp import MLP, Perceptron

from dnis_torchrec.allocation.energies import WholeRows, whole_rows
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.shards import (
    TableShard,
    collections,
    frozen_tables_of,
    local_shards,
    ranks_of,
    table_configs_of,
)
from dnis_torchrec.selection.torchrec import (
    ShardedTensor,
    linear_of,
    perceptrons_of,
    writing_to_tables,
)


@dataclass(frozen=True, kw_only=True)
class LinearReader:
    """Columns of a linear layer that read one embedding."""

    weight: Tensor
    first_column: int = 0

    def columns(self, dim: int) -> slice:
        """Their place among the inputs of the layer."""
        return slice(self.first_column, self.first_column + dim)


@dataclass(frozen=True, kw_only=True)
class WeightedProduct(LinearReader):
    """Columns of a linear layer with one output that read the product of two embeddings, column by
    column."""


@dataclass(frozen=True, kw_only=True)
class RotationGroup:
    """Tables of equal embedding_dim that may be turned, all by the same matrix."""

    tables: tuple[str, ...]
    readers: Mapping[str, tuple[LinearReader, ...]] = field(default_factory=dict)
    product: WeightedProduct | None = None
    along: tuple[LinearReader, ...] = ()

    def turning(self) -> list[LinearReader]:
        """All columns that turn with the tables."""
        return [*(reader for readers in self.readers.values() for reader in readers), *self.along]

    def layers(self) -> list[Tensor]:
        """Weights of everything that turns with the tables, or weighs their product."""
        layers = [columns.weight for columns in self.turning()]
        return layers if self.product is None else [*layers, self.product.weight]


@runtime_checkable
class Rotatable(Protocol):
    """A model that says which of its tables may be turned."""

    def rotation_groups(self) -> Sequence[RotationGroup]:
        """Groups of tables; a table is in one of them at most."""


def check_groups(groups: Sequence[RotationGroup], embedding_dims: Mapping[str, int]) -> None:
    """Checks that groups fit a model and each other. Local, no collective."""
    names = [table for group in groups for table in group.tables]
    twice = sorted({table for table in names if names.count(table) > 1})
    check(not twice, "rotation groups", "every table in one group at most", twice)
    for group in groups:
        place, remedy = f"rotation group {group.tables}", "make a group for each"
        for table in group.tables:
            check_known("table", table, embedding_dims)
        dims = {embedding_dims[table] for table in group.tables}
        check(len(dims) == 1, place, "tables of one embedding_dim", sorted(dims), remedy)
        for table, readers in group.readers.items():
            check(table in group.tables, place, "readers of its own tables", repr(table))
            for reader in readers:
                _check_width(reader, max(dims), f"{place}, reader of {table!r}")
        for columns in group.along:
            _check_width(columns, max(dims), f"{place}, along")
        if group.product is not None:
            is_pair = len(group.tables) == 2 and not group.turning()
            requirement = "two tables without readers beside a product"
            check(is_pair, place, requirement, list(group.tables))
            outputs = group.product.weight.shape[0]
            check(outputs == 1, f"{place}, product", "a layer with one output", outputs)
            _check_width(group.product, max(dims), f"{place}, product")


def _check_width(reader: LinearReader, dim: int, place: str) -> None:
    width, inputs = reader.columns(dim).stop, reader.weight.shape[1]
    check(inputs >= width, place, f"at least {width} inputs", inputs)


KnownModel: TypeAlias = dlrm.DLRM | deepfm.SimpleDeepFMNN
_Part: TypeAlias = tuple[nn.Module, tuple[type[nn.Module], ...]]
"""A module that is read or changed, and the types that it may have."""

AXES = "axes"
"""Name of the buffers that `with_axes_` adds."""
TURN = "turn"
"""Name of the module behind a dense arch."""


class Turn(nn.Module):
    """Turns a vector: ``x @ axes``."""

    def __init__(self, dim: int, like: Tensor) -> None:
        super().__init__()
        self.axes: Tensor
        self.register_buffer(AXES, torch.eye(dim, dtype=like.dtype, device=like.device))

    def forward(self, values: Tensor) -> Tensor:
        """Turns each row."""
        return values @ self.axes


class DirectedFactorizationMachine(nn.Module):
    r"""TorchRec's FactorizationMachine that adds columns up in any direction: :math:`((w^\top x)^2
    - x^\top x) / 2`."""

    def __init__(self, in_features: int, like: Tensor) -> None:
        super().__init__()
        self.axes: Tensor
        self.register_buffer(AXES, torch.ones(1, in_features, dtype=like.dtype, device=like.device))

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Interactions of all columns."""
        columns = torch.cat([embedding.flatten(1) for embedding in embeddings], dim=1)
        return ((columns @ self.axes.T).square() - columns.square().sum(1, keepdim=True)) * 0.5


def with_axes_(model: nn.Module) -> nn.Module:
    """Adds a buffer to TorchRec's DLRM and SimpleDeepFMNN, so that their tables can be turned and a
    fresh model takes the dense weights of a turned one; predictions and names of weights stay."""
    for match in _known_models(get_unwrapped_module(model)):
        interaction = match.inter_arch
        if isinstance(interaction, deepfm.FMInteractionArch) and not _has_axes(interaction.fm):
            weight = _first_linear_of_deep_part(interaction).weight
            interaction._modules["fm"] = DirectedFactorizationMachine(weight.shape[1], weight)
        elif isinstance(interaction, dlrm.InteractionArch) and not _has_axes(_turn_of(match)):
            weight = _first_linear(cast(Any, match.over_arch.model)[0]).weight
            layers = perceptrons_of(match.dense_arch.model)
            layers.add_module(TURN, Turn(match.sparse_arch.D, weight))
    return model


def without_axes_(model: nn.Module) -> None:
    """Undoes `with_axes_`, once the tables have been turned back. Local."""
    for match in _known_models(get_unwrapped_module(model)):
        interaction = match.inter_arch
        if isinstance(interaction, deepfm.FMInteractionArch) and _has_axes(interaction.fm):
            interaction._modules["fm"] = FactorizationMachine()
        elif _has_axes(_turn_of(match)):
            del perceptrons_of(match.dense_arch.model)._modules[TURN]


def has_axes(names: Iterable[str]) -> bool:
    """Returns whether a state_dict is that of a model `with_axes_`."""
    return any(name.rpartition(".")[2] == AXES for name in names)


def _groups_of(match: KnownModel) -> list[RotationGroup]:
    interaction = match.inter_arch
    if isinstance(interaction, deepfm.FMInteractionArch):
        if not _has_axes(interaction.fm):
            return []
        layers = [_first_linear_of_deep_part(interaction).weight, cast(Tensor, interaction.fm.axes)]
        return _groups_of_tables(match, interaction.sparse_feature_names, layers)
    if isinstance(interaction, dlrm.InteractionProjectionArch):
        branches = interaction.interaction_branch1, interaction.interaction_branch2
        layers = [_first_linear(branch.model).weight for branch in branches]
        return _groups_of_tables(match, match.sparse_arch.sparse_feature_names, layers)
    turn = _turn_of(match)
    if not isinstance(turn, Turn):
        return []
    reader = _first_linear(cast(Any, match.over_arch.model)[0])
    along = (LinearReader(weight=turn.axes), LinearReader(weight=reader.weight))
    collection = match.sparse_arch.embedding_bag_collection
    tables = tuple(table.name for table in table_configs_of(collection))
    return [RotationGroup(tables=tables, along=along)]


def _groups_of_tables(
    match: KnownModel, features: Sequence[str], layers: Sequence[Tensor]
) -> list[RotationGroup]:
    """A group for each table, read by layers whose inputs are the dense output and then the
    features."""
    groups = []
    for table in table_configs_of(match.sparse_arch.embedding_bag_collection):
        columns = [table.embedding_dim * (1 + features.index(name)) for name in table.feature_names]
        readers = tuple(
            LinearReader(weight=layer, first_column=first) for first in columns for layer in layers
        )
        groups.append(RotationGroup(tables=(table.name,), readers={table.name: readers}))
    return groups


def _known_models(root: nn.Module) -> Iterator[KnownModel]:
    """TorchRec's models inside a model that compute as TorchRec wrote them, from parts that nobody
    else has."""
    repeats = _shared(root)
    for module in list(root.modules()):
        if isinstance(module, Rotatable):
            continue
        if isinstance(module, dlrm.DLRM):
            parts = _parts_of_dlrm(module)
        elif isinstance(module, deepfm.SimpleDeepFMNN):
            parts = _parts_of_deepfm(module)
        else:
            continue
        is_plain = all(_computes_as(part, kinds) for part, kinds in parts)
        if is_plain and not repeats & _own_parts(module):
            yield module


def _parts_of_dlrm(model: dlrm.DLRM) -> Iterator[_Part]:
    """Yields the parts of a DLRM, from outside to inside."""
    yield model, (dlrm.DLRM,)
    yield model.sparse_arch, (dlrm.SparseArch,)
    yield model.inter_arch, (dlrm.InteractionArch, dlrm.InteractionProjectionArch)
    yield model.dense_arch, (dlrm.DenseArch,)
    yield from _parts_of_mlp(model.dense_arch.model)
    yield model.over_arch, (dlrm.OverArch,)
    yield model.over_arch.model, (nn.Sequential,)
    yield from _parts_of_mlp(model.over_arch.model[0])
    interaction = model.inter_arch
    if isinstance(interaction, dlrm.InteractionProjectionArch):
        for branch in (interaction.interaction_branch1, interaction.interaction_branch2):
            yield branch, (dlrm.DenseArch,)
            yield from _parts_of_mlp(branch.model)


def _parts_of_mlp(mlp: Any) -> Iterator[_Part]:
    yield mlp, (MLP,)
    layers = perceptrons_of(mlp)
    yield layers, (nn.Sequential,)
    yield layers[0], (Perceptron,)
    yield linear_of(layers[0]), (nn.Linear,)


def _parts_of_deepfm(model: deepfm.SimpleDeepFMNN) -> Iterator[_Part]:
    """The same of a SimpleDeepFMNN, whose dense output stays as it is."""
    yield model, (deepfm.SimpleDeepFMNN,)
    yield model.sparse_arch, (deepfm.SparseArch,)
    yield model.inter_arch, (deepfm.FMInteractionArch,)
    yield model.inter_arch.fm, (FactorizationMachine, DirectedFactorizationMachine)
    yield model.inter_arch.deep_fm, (DeepFM,)
    yield model.inter_arch.deep_fm.dense_module, (nn.Sequential,)
    yield _first_linear_of_deep_part(model.inter_arch), (nn.Linear,)


def _computes_as(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module computes as one of TorchRec's or torch's classes, not as a subclass does."""
    is_one = isinstance(module, kinds)
    is_one = is_one and any(type(module).forward is kind.forward for kind in kinds)
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    return is_one and not (has_hooks or "forward" in vars(module) or is_parametrized(module))


def _shared(root: nn.Module) -> set[int]:
    """Modules and weights, by identity, that have several names in a model."""
    uses = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
    uses.update(id(weight) for _, weight in root.named_parameters(remove_duplicate=False))
    return {part for part, times in uses.items() if times > 1}


def _own_parts(match: KnownModel) -> set[int]:
    sparse = match.sparse_arch
    parts: list[object] = [match, sparse, sparse.embedding_bag_collection]
    for arch in (match.dense_arch, match.inter_arch, match.over_arch):
        parts += [*arch.modules(), *arch.parameters()]
    return {id(part) for part in parts}


def _first_linear(mlp: Any) -> nn.Linear:
    return linear_of(perceptrons_of(mlp)[0])


def _first_linear_of_deep_part(interaction: deepfm.FMInteractionArch) -> nn.Linear:
    return cast(nn.Linear, cast(nn.Sequential, interaction.deep_fm.dense_module)[0])


def _turn_of(match: KnownModel) -> nn.Module | None:
    return perceptrons_of(match.dense_arch.model)._modules.get(TURN)


def _has_axes(module: nn.Module | None) -> bool:
    return isinstance(module, Turn | DirectedFactorizationMachine)


logger = logging.getLogger(__name__)

LINEAR_STATES = frozenset({"exp_avg", "momentum_buffer"})
"""Optimizer states that turn as the gradient does."""
SQUARED_STATES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum"})
"""Optimizer states that are sums of squared gradients."""
AXES_TOLERANCE = 0.01
"""Axes of an earlier day still serve where their first columns, however many, carry at most this
share of all energy less than those of fresh ones."""
ORTHOGONAL = 1e-3
"""How far axes that were stored in float32 may be from orthogonal ones."""


def rotation_groups(model: nn.Module, leave_alone: Collection[str] = ()) -> list[RotationGroup]:
    """Finds the groups of tables that can be turned in a model. Local, no collective."""
    plain, modules = get_unwrapped_module(model), list(collections(model).values())
    rotatable = [module for module in plain.modules() if isinstance(module, Rotatable)]
    groups = [group for module in rotatable for group in module.rotation_groups()]
    for match in _known_models(plain):
        if any(match.sparse_arch.embedding_bag_collection is module for module in modules):
            groups += _groups_of(match)
    check_groups(groups, _embedding_dims(modules))
    still, result = {*leave_alone}.union(*map(frozen_tables_of, modules)), []
    for group in groups:
        layers = [layer for layer in group.layers() if isinstance(layer, nn.Parameter)]
        if not still & set(group.tables) and all(layer.requires_grad for layer in layers):
            result.append(group)
    return result


def _embedding_dims(modules: Iterable[nn.Module]) -> dict[str, int]:
    """Table -> D."""
    return {t.name: t.embedding_dim for module in modules for t in table_configs_of(module)}


@torch.no_grad()
def rotate_(
    model: nn.Module,
    counts: FrequencyCounts,
    optimizer: torch.optim.Optimizer | None = None,
    leave_alone: Collection[str] = (),
    turns: Mapping[str, Tensor] | None = None,
    tolerance: float = AXES_TOLERANCE,
) -> list[Tensor]:
    """Turns the tables of every rotation group, and the layers that read them, into the tables'
    principal axes; or into those of earlier `turns`, where they serve within a tolerance."""
    groups, modules = rotation_groups(model, leave_alone), list(collections(model).values())
    dims, ranks = _embedding_dims(modules), ranks_of(*modules)
    tables = [table for group in groups for table in group.tables]
    _say_what_stays(dims, [*tables, *leave_alone], ranks)
    shards = [shard for module in modules for shard in local_shards(module)]
    shards = [shard for shard in shards if shard.table in tables]
    states: dict[int, dict[str, Tensor]] = {}
    if optimizer is not None:
        states = _states_by_storage(model, optimizer)
        layers = [layer for group in groups for layer in group.layers()]
        with ranks.together():
            _check_turnable(shards, dims, layers, states)
    shapes = {table: (counts.counts[table].numel(), dims[table]) for table in tables}
    rows = whole_rows(shards, shapes, ranks)
    old = [axes_of(group, turns or {}) for group in groups]
    with writing_to_tables(model):
        return [
            _rotate_group_(group, rows, counts, ranks, states, axes, tolerance)
            for group, axes in zip(groups, old, strict=True)
        ]


def axes_of(group: RotationGroup, turns: Mapping[str, Tensor]) -> Tensor | None:
    """The axes that the last table of a group was turned into, without the factors of a product;
    None where it was not turned, or a factor was 0."""
    turn = turns.get(group.tables[-1])
    if turn is None:
        return None
    axes = turn.double() / turn.double().norm(dim=1, keepdim=True)
    error = (axes.T @ axes - torch.eye(len(axes), dtype=torch.float64)).abs().max()
    return axes if float(error) < ORTHOGONAL else None


def _energy_lost(moment: Tensor, old: Tensor, fresh: Tensor) -> float:
    """By how much of all energy the first columns in old axes carry less than in fresh ones, at
    the number of columns where it is most."""
    of_columns = [(axes * (moment @ axes)).sum(0).cumsum(0) for axes in (fresh, old)]
    total = float(of_columns[0][-1])
    return float((of_columns[0] - of_columns[1]).max()) / total if total else 0.0


def _say_what_stays(dims: Mapping[str, int], turns: Sequence[str], ranks: Ranks) -> None:
    """Names the tables whose axes stay; those of a single column have nothing to turn."""
    rest = [table for table, dim in dims.items() if dim > 1 and table not in turns]
    if rest and ranks.is_first:
        requirement = "tables of which it is known what turns along, and that are not frozen"
        remedy = "they keep their axes: see `with_axes_`, and `rotation_groups` for your own models"
        logger.warning(describe("rotation", requirement, f"others: {rest}", remedy))


def _rotate_group_(
    group: RotationGroup,
    rows: Mapping[str, WholeRows],
    counts: FrequencyCounts,
    ranks: Ranks,
    states: Mapping[int, Mapping[str, Tensor]],
    old: Tensor | None,
    tolerance: float,
) -> Tensor:
    rows = {table: rows[table] for table in group.tables}
    dim = rows[group.tables[0]].shape[1]
    shards = [shard for of_table in rows.values() for shard in of_table.shards]
    if group.product is not None:
        _draw_in_(group.product, dim, group.tables[0], shards, states)
    rotation = old
    if old is None or tolerance < math.inf:
        moment = _second_moment(rows, dim, counts, ranks)
        rotation = _principal_axes(moment)
        if old is not None and _energy_lost(moment, old, rotation) <= tolerance:
            rotation = old
    rotation = ranks.broadcast_(cast(Tensor, rotation).contiguous())
    _turn_group_(group, rows, rotation, states)
    return rotation


def _turn_group_(
    group: RotationGroup,
    rows: Mapping[str, WholeRows],
    rotation: Tensor,
    states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Turns the tables of a group, what reads them, and the optimizer states of both."""
    if _stands(rotation):
        return
    for of_table in rows.values():
        for chunk in of_table.chunks():
            chunk.write_(chunk.values @ rotation.to(chunk.values.device))
        for shard in of_table.shards:
            _turn_states_(_states_like(shard.weight, states), rotation, slice(None))
    for turn in group.turning():
        columns = turn.columns(len(rotation))
        _rotate_columns_(turn.weight[:, columns], rotation)
        _turn_states_(_states_like(turn.weight, states), rotation, columns)


@torch.no_grad()
def turn_back_(
    model: nn.Module,
    counts: FrequencyCounts,
    rotations: Sequence[Tensor],
    leave_alone: Collection[str] = (),
) -> None:
    """Undoes `rotate_` in a model of one process, to rounding; weights of products stay in their
    tables."""
    shards = [shard for module in collections(model).values() for shard in local_shards(module)]
    for group, rotation in zip(rotation_groups(model, leave_alone), rotations, strict=False):
        shapes = {name: (counts.counts[name].numel(), len(rotation)) for name in group.tables}
        with writing_to_tables(model):
            _turn_group_(group, whole_rows(shards, shapes, Ranks()), rotation.T, {})


def _draw_in_(
    product: WeightedProduct,
    dim: int,
    first_table: str,
    shards: Sequence[TableShard],
    states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Draws the weights of a product into its two tables, the sign into the first. Local: all ranks
    have them."""
    layer, columns = product.weight, product.columns(dim)
    weights = layer[:, columns].double().clone()
    for shard in shards:
        factor = _factor(weights, is_first=shard.table == first_table)
        for chunk, _, uses in shard.chunks():
            chunk.copy_((chunk.double() * factor[:, uses].to(chunk.device)).to(chunk))
        # Of a column that the product does not look at nothing is known.
        inverse = torch.where(factor.abs() > 1e-6 * factor.abs().max(), 1 / factor, 0.0)
        for name, state in _states_like(shard.weight, states):
            scale = (inverse if name in LINEAR_STATES else inverse.square()).to(state.device)
            state.copy_((state.double() * scale).to(state))
    layer[:, columns] = 1
    for name, state in _states_like(layer, states):
        of_ones = state[:, columns].double() * weights.square()
        state[:, columns] = 0 if name in LINEAR_STATES else of_ones.mean().to(state)


def _factor(weights: Tensor, *, is_first: bool) -> Tensor:
    """What the columns of a table of a product are multiplied by, ``(1, D)`` float64."""
    return weights.abs().sqrt() * (weights.sign() if is_first else 1)


@torch.no_grad()
def product_factors(groups: Sequence[RotationGroup], dims: Mapping[str, int]) -> dict[str, Tensor]:
    """Table of a product -> the factors of its columns that `rotate_` draws in, ``(D, 1)``."""
    factors = {}
    for group in groups:
        if (product := group.product) is not None:
            for table in group.tables:
                weights = product.weight[:, product.columns(dims[table])].double()
                factors[table] = _factor(weights, is_first=table == group.tables[0]).T.cpu()
    return factors


@dataclass(frozen=True, eq=False)
class AxesOfRows:
    """Axes of some groups, and factors of products in front of them."""

    groups: Sequence[RotationGroup]
    rotations: Sequence[Tensor]
    factors: Mapping[str, Tensor]

    @property
    def turns(self) -> dict[str, Tensor]:
        """Table -> what `rotate_` multiplies its rows by, ``(D, D)`` float64."""
        one = torch.ones(1, dtype=torch.float64)
        return {
            table: self.factors.get(table, one) * rotation.double().cpu()
            for group, rotation in zip(self.groups, self.rotations, strict=True)
            for table in group.tables
        }

    def turned(self, table: str, values: Tensor) -> Tensor:
        """Rows as `rotate_` would leave them, to the bit."""
        for group, rotation in zip(self.groups, self.rotations, strict=True):
            if table not in group.tables:
                continue
            if table in self.factors:
                values = (values.double() * self.factors[table].T.to(values.device)).to(values)
            if not _stands(rotation):
                values = (values.double() @ rotation.to(values.device)).to(values)
        return values

    @contextmanager
    @torch.no_grad()
    def readers_turned(self) -> Iterator[None]:
        """Turns the layers that read the tables; restores them to the bit when the block ends."""
        layers = [layer for group in self.groups for layer in group.layers()]
        old = [layer.clone() for layer in layers]
        try:
            for group, rotation in zip(self.groups, self.rotations, strict=True):
                _turn_readers_(group, rotation, {})
            yield
        finally:
            for layer, value in zip(layers, old, strict=True):
                layer.copy_(value)


def axes_of_rows(
    model: nn.Module, turns: Mapping[str, Tensor], leave_alone: Collection[str]
) -> AxesOfRows | None:
    """The axes in which rows can be read of a model that is not turned: every group has some, and
    the tables are whole rows of float32. One all_reduce."""
    groups, modules = rotation_groups(model, leave_alone), list(collections(model).values())
    dims = _embedding_dims(modules)
    rotations = [axes for group in groups if (axes := axes_of(group, turns)) is not None]
    shards = [shard for module in modules for shard in local_shards(module)]
    is_whole = len(rotations) == len(groups) and all(
        shard.weight.dtype == torch.float32 and shard.weight.shape[1] == dims[shard.table]
        for shard in shards
    )
    if int(ranks_of(*modules).max_(torch.tensor([not is_whole]).long())):
        return None
    return AxesOfRows(groups, rotations, product_factors(groups, dims))


@torch.no_grad()
def turn_readers_(
    groups: Sequence[RotationGroup],
    turns: Mapping[str, Tensor],
    states: Mapping[int, Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Turns what reads tables into axes of an older state of the model, and its optimizer states,
    by address; returns table -> what its rows are to be multiplied by, ``(D, D)`` float64. Local.
    """
    # Weights of a product that were trained since are drawn in as they are now.
    matrices: dict[str, Tensor] = {}
    for group in groups:
        turn = turns.get(group.tables[-1])
        if turn is None:
            continue
        factors = product_factors([group], dict.fromkeys(group.tables, len(turn)))
        # Factors of the last table are no less than 0: a row's length.
        lengths = turn.double().norm(dim=1, keepdim=True).clamp(min=1e-30)
        first, _, second = torch.linalg.svd(turn.double() / lengths)
        rotation = first @ second
        _turn_readers_(group, rotation, states)
        matrices |= AxesOfRows([group], [rotation], factors).turns
    return matrices


def _stands(rotation: Tensor) -> bool:
    """Whether a model stands in its axes already."""
    return rotation.equal(torch.eye(len(rotation), dtype=rotation.dtype))


def _turn_readers_(
    group: RotationGroup, rotation: Tensor, states: Mapping[int, Mapping[str, Tensor]]
) -> None:
    if group.product is not None:
        _draw_in_(group.product, len(rotation), group.tables[0], (), states)
    _turn_group_(group, {}, rotation, states)


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


def _principal_axes(moment: Tensor) -> Tensor:
    """Eigenvectors as columns, by falling eigenvalue; the largest component of each is positive."""
    axes = torch.linalg.eigh(moment).eigenvectors.flip(1)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return axes * largest.sign()


def _rotate_columns_(weights: Tensor, rotation: Tensor) -> None:
    weights.copy_((weights.double() @ rotation.to(weights.device)).to(weights))


def _turn_states_(states: Sequence[tuple[str, Tensor]], rotation: Tensor, columns: slice) -> None:
    for name, state in states:
        of_state = rotation if name in LINEAR_STATES else rotation.square()
        _rotate_columns_(state[:, columns], of_state)


def _states_by_storage(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Tensor]]:
    """Address of a parameter's storage -> its optimizer states, of fused optimizers and of the
    other one."""
    of_kernels = _fused_states(cast(DistributedModelParallel, model))
    return {
        parameter.data_ptr(): {n: value for n, value in state.items() if isinstance(value, Tensor)}
        for parameter, state in [*optimizer.state.items(), *of_kernels]
    }


def _fused_states(model: DistributedModelParallel) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Local weights and states of optimizers fused into the tables' backward, by the names that
    torch.optim has."""
    for key, state in model.fused_optimizer.state.items():
        weight = _local(key)
        if weight is None:
            continue
        states = [part for part in map(_local, state.values()) if part is not None]
        states = [part for part in states if part.shape == weight.shape]
        names = ("exp_avg", "exp_avg_sq") if len(states) > 1 else ("sum",)
        yield weight, dict(zip(names, states, strict=False))


def _local(value: object) -> Tensor | None:
    """The only local shard of a ShardedTensor, a tensor itself, or None."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return shards[0].tensor if shards else None
    return value if isinstance(value, Tensor) else None


def _check_turnable(
    shards: Sequence[TableShard],
    dims: Mapping[str, int],
    layers: Sequence[Tensor],
    states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Refuses parts of rows, and optimizer states that nobody knows how to turn."""
    requirement = "supported to turn are shards of whole rows"
    remedy = "shard it by rows or as a whole, or leave it alone"
    for shard in shards:
        width, dim, place = shard.weight.shape[1], dims[shard.table], f"table {shard.table!r}"
        if width != dim:
            text = describe(place, requirement, f"{width} of its {dim} columns", remedy)
            raise NotImplementedError(text)
    names = LINEAR_STATES | SQUARED_STATES
    requirement, remedy = f"supported to turn are {sorted(names)}", "leave its table alone"
    for weight in [*(shard.weight for shard in shards), *layers]:
        for name, _ in _states_like(weight, states):
            if name not in names:
                text = describe("optimizer state", requirement, repr(name), remedy)
                raise NotImplementedError(text)
