"""MDE: Mixed Dimension Embeddings, dims that follow a power of frequency, with projections to a base dimension.

Source: Ginart, Naumov, Mudigere, Yang, Zou, Mixed Dimension Embeddings with Application to Memory-Efficient
Recommendation Systems, 2019. A block s of mean row frequency p_s has ``d_s = lambda p_s^t`` dimensions, t the
temperature, and a learned ``(d_s, D)`` projection if d_s is below the base dimension D, at which the model is built.

Shapes: B batch, D base dimension of a table, S blocks, d_s dims of a block.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.baselines.method import MethodResult, MethodTask, SizeNotMetError
from dnis_torchrec.baselines.trained_scheme import (
    best_of,
    byte_budget,
    columns_of_dims,
    keep_columns_,
    row_blocks,
    scheme_result,
)
from dnis_torchrec.baselines.uniform import smallest_dim, table_widths, trainable_dim
from dnis_torchrec.blocking import RowBlocks
from dnis_torchrec.budget import Budget
from dnis_torchrec.checks import check, describe
from dnis_torchrec.embedding_modules import PooledFeature, SoftSelectionEmbeddingBagCollection
from dnis_torchrec.frequency import FrequencyCounts
from dnis_torchrec.row_routing import RowRouter
from dnis_torchrec.table_shards import collections

ROUNDINGS = ("integer", "power of two")
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True, kw_only=True)
class MdeSetting:
    """One trial's hyper-parameters.

    Attributes:
        temperature: t: 0 makes all dims equal, 1 proportional to frequency.
        rounding: to the nearest ``"integer"`` or ``"power of two"``.
    """

    temperature: float
    rounding: str

    def round(self, values: Tensor) -> Tensor:
        """Rounds positive numbers to int64, to at least 1.

        Example:
            >>> MdeSetting(temperature=0.3, rounding="power of two").round(torch.tensor([0.2, 5.0, 6.0])).tolist()
            [1, 4, 8]
        """
        at_least_one = values.clamp(min=1)
        rounded = at_least_one if self.rounding == "integer" else 2 ** at_least_one.log2().add(0.5).floor()
        return rounded.add(0.5).floor().long()

    def edges(self, largest: int) -> Tensor:
        """Where rounding jumps, from 1 to beyond `largest`."""
        if self.rounding == "integer":
            return torch.arange(1, largest + 1, dtype=torch.float64) + 0.5
        return 2 ** (torch.arange(math.ceil(math.log2(largest)) + 1, dtype=torch.float64) + 0.5)


SETTINGS = tuple(MdeSetting(temperature=t, rounding=rounding) for rounding in ROUNDINGS for t in TEMPERATURES)
"""The 16 settings of a full run."""


@dataclass(frozen=True, kw_only=True)
class MdeDims:
    """The dims that a setting comes to.

    Attributes:
        setting: see `MdeSetting`.
        base_dim: embedding_dim to build the recipe with.
        blocks: the blocks, with the tables' D at that embedding_dim.
        dims: table -> ``(S,)`` int64 in 1..D.
    """

    setting: MdeSetting
    base_dim: int
    blocks: RowBlocks
    dims: Mapping[str, Tensor]

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Projection -> ``(d_s, D)``. Tables of equal D share those of a block; unseen blocks need none."""
        return {
            name: (int(self.dims[table][s]), self.blocks.embedding_dims[table])
            for table in self.dims
            for s, name in enumerate(self.projection_names(table))
            if name is not None
        }

    def projection_names(self, table: str) -> list[str | None]:
        """The projection of each block of a table; None where the block is as wide as the base, or never seen."""
        dim, first = self.blocks.embedding_dims[table], self.blocks.first_alpha_row(table)
        seen = self.blocks.seen_rows[table].tolist()
        return [
            f"D{dim}_b{first + s}_d{d}" if d < dim and seen[s] else None
            for s, d in enumerate(self.dims[table].tolist())
        ]

    def table_bytes(self, budget: Budget) -> float:
        """Bytes of the tables, without their fixed index bytes."""
        return sum(float(budget.column_costs[table] @ dims.double()) for table, dims in self.dims.items())

    def projection_bytes(self) -> int:
        """Bytes of the projections."""
        return sum(4 * d * dim for d, dim in self.projection_shapes().values())


def mde(task: MethodTask) -> MethodResult:
    """The best, on the selection split, of 16 settings: temperature .1 to .8, dims rounded both ways.

    Blocks are those of a search of the same recipe. For every setting, lambda, and with it the base dimension, is the
    largest whose bytes, projections included, are within the budget (`solve`). A setting that comes to the same dims
    as one before is not trained again and is no trial; a smaller `MethodTask.num_trials` spreads over the settings.

    NOTE[DIFF]: the tables keep the recipe's own initial weights (the paper's are Xavier; projections are), so that all
    methods start alike; a block spans tables, and its tables share one projection, which costs fewer bytes.

    Args:
        task: what to train, how large.

    Raises:
        SizeNotMetError: if one dimension for every block is more than the budget; before training.
        ValueError: for more trials than there are settings.
    """
    num_trials = task.num_trials or len(SETTINGS)
    most = len(SETTINGS)
    check(num_trials <= most, "num_trials", f"expected at most {most} for MDE, one per setting", num_trials)
    counts, blocks = row_blocks(task)
    budget = byte_budget(task, blocks)
    largest = smallest_dim(task, task.dense_bytes())

    @functools.cache
    def widths(embedding_dim: int) -> dict[str, int]:
        return table_widths(task.build(embedding_dim).model)

    settings = [SETTINGS[index * most // num_trials] for index in range(num_trials)]
    distinct: dict[str, MdeDims] = {}
    for setting in settings:
        plan = solve(setting, blocks, budget, largest, widths)
        distinct.setdefault(str([plan.base_dim, *(dims.tolist() for dims in plan.dims.values())]), plan)
    return best_of((_train(task, plan, counts) for plan in distinct.values()), task.embedding_bytes())


def solve(
    setting: MdeSetting, blocks: RowBlocks, budget: Budget, largest_dim: int, widths: Callable[[int], Mapping[str, int]]
) -> MdeDims:
    """The largest dims of a setting within a budget.

    ``d_s = round(lambda (p_s / p_max)^t)``, at least 1 and at most `largest_dim`; the base dimension is the largest of
    them, rounded up to one that every kernel trains. Candidates for lambda are the points where rounding jumps.

    Args:
        setting: temperature and rounding.
        blocks: frequencies.
        budget: bytes for columns and projections.
        largest_dim: the recipe's own embedding_dim, which the base dimension does not exceed.
        widths: embedding_dim -> {table: D}; a table of another D than the recipe's has its dims in proportion.

    Raises:
        SizeNotMetError: if one dimension for every block is more than the budget.
    """
    shares = {table: share**setting.temperature for table, share in popularity(blocks).items()}

    def dims_at(scale: float) -> MdeDims:
        base = min(largest_dim, trainable_dim(int(setting.round(torch.tensor(scale, dtype=torch.float64)))))
        dims = {
            table: setting.round(shares[table] * (dim * scale / base)).clamp(max=dim)
            for table, dim in widths(base).items()
        }
        return MdeDims(setting=setting, base_dim=base, blocks=replace(blocks, embedding_dims=widths(base)), dims=dims)

    edges, distinct = setting.edges(largest_dim), torch.cat(list(shares.values())).unique()
    jumps = (edges.unsqueeze(1) / distinct[distinct > 0]).flatten().unique()
    scales = [1.0, *(jumps * (1 + 1e-12)).tolist()]  # just past each jump, so that it has happened
    affordable = bisect.bisect_right(scales, budget.amount, key=lambda scale: dims_at(scale).table_bytes(budget))
    for scale in reversed(scales[:affordable]):  # projections come and go as blocks reach the base: no order in them
        plan = dims_at(scale)
        if plan.table_bytes(budget) + plan.projection_bytes() <= budget.amount:
            return plan
    smallest = dims_at(1.0).table_bytes(budget) + dims_at(1.0).projection_bytes()
    requirement = f"expected at least {smallest:.0f} bytes for one dimension of every block"
    raise SizeNotMetError(describe("MDE", requirement, f"{budget.amount:.0f}", "take fewer blocks"))


def popularity(blocks: RowBlocks) -> dict[str, Tensor]:
    """Mean occurrences of the seen rows of each block, over those of the most popular block.

    Returns:
        table -> ``(S,)`` float64 in 0..1, equal for all tables of one D.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from dnis_torchrec.blocking import blocks_from_counts
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"])
        >>> counts = FrequencyCounts({"t": torch.tensor([9, 7, 4, 0])}, {"f": 1}, 20)
        >>> popularity(blocks_from_counts(counts, [table], num_blocks=2))["t"].tolist()
        [1.0, 0.5]
    """
    rates = {}
    for dim in blocks.alpha_shapes:
        seen = blocks.per_alpha_row(dim, blocks.seen_rows).clamp(min=1)
        rates[dim] = blocks.per_alpha_row(dim, blocks.occurrences) / seen
    most = max(float(rate.max()) for rate in rates.values())
    return {
        table: (rates[dim] / most)[blocks.first_alpha_row(table) :][: blocks.routings[table].num_blocks]
        for table, dim in blocks.embedding_dims.items()
    }


def _train(task: MethodTask, plan: MdeDims, counts: FrequencyCounts) -> MethodResult:
    recipe = task.build(plan.base_dim)
    torch.manual_seed(task.seed)
    project_(recipe.model, plan)
    scheme = keep_columns_(recipe.model, plan.blocks, counts, columns_of_dims(plan.blocks, plan.dims))
    settings: dict[str, float | str] = {
        "temperature": plan.setting.temperature,
        "rounding": plan.setting.rounding,
        "embedding_dim": plan.base_dim,
    }
    return scheme_result(task, recipe, scheme, extra_bytes=plan.projection_bytes(), settings=settings)


def project_(model: nn.Module, plan: MdeDims) -> None:
    """Puts a `ProjectedEmbeddingBagCollection` around every EmbeddingBagCollection of a model; all share projections.

    The result of MDE is such a model: to serve it, build the recipe with the base dimension, wrap it so, and drop the
    exported tables in.

    Args:
        model: built with the plan's base dimension, changed in place.
        plan: the dims.
    """
    projections = Projections(plan)
    found = {id(module): module for module in collections(model).values()}
    wrappers = {key: ProjectedEmbeddingBagCollection(module, plan, projections) for key, module in found.items()}
    for fqn, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in wrappers:
            model.set_submodule(fqn, wrappers[id(module)])


class Projections(nn.Module):
    """The learned ``(d_s, D)`` projections of a model, Xavier-initialised.

    Args:
        plan: the dims.
    """

    def __init__(self, plan: MdeDims) -> None:
        super().__init__()
        shapes = plan.projection_shapes()
        self.matrices = nn.ParameterDict({name: torch.empty(shape) for name, shape in shapes.items()})
        for matrix in self.matrices.values():
            nn.init.xavier_uniform_(matrix)
        self._names = {table: plan.projection_names(table) for table in plan.dims}

    def forward(self, pooled: Tensor, table: str, block: int) -> Tensor:
        """Projects sums of rows of one block.

        Args:
            pooled: ``(B, D)``, zero from column d_s on.
            table: table name.
            block: s.

        Returns:
            ``(B, D)``: ``pooled[:, :d_s] @ P_s``, or `pooled` itself where the block is as wide as the base.
        """
        name = self._names[table][block]
        if name is None:
            return pooled
        matrix = self.matrices[name]
        return pooled[:, : matrix.shape[0]] @ matrix


class ProjectedEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Wraps an EmbeddingBagCollection whose blocks keep their first d_s columns, and projects these to D.

    ``pooled = sum over s of (sum of the bag's rows in block s)[:d_s] P_s``. The child holds the tables, with bags split
    by block as a search splits them; it is what a scheme describes, what is sharded, exported and replaced by a serving
    module. The projections are dense weights of the model.

    Args:
        embedding_bag_collection: the collection to wrap; its tables' weights are shared, not copied.
        plan: blocks and dims of its tables.
        projections: shared by all wrappers of a model.

    Shape:
        - Input: KeyedJaggedTensor, keys in any order, stride B.
        - Output: KeyedTensor ``(B, sum of D over output keys)``, keys, order and dims as the wrapped collection's.
    """

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, plan: MdeDims, projections: Projections
    ) -> None:
        super().__init__()
        self._tables = list(embedding_bag_collection.embedding_bag_configs())
        self._is_weighted = embedding_bag_collection.is_weighted()
        soft = SoftSelectionEmbeddingBagCollection(embedding_bag_collection, plan.blocks)
        self.bag_check, self.bag_splitter = soft.bag_check, soft.bag_splitter
        self.embedding_bag_collection = soft.embedding_bag_collection
        self.project_pooled = ProjectPooled(soft.outputs, plan.blocks, projections)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up and projects them; raises as `SoftSelectionEmbeddingBagCollection` does."""
        self.bag_check(features)
        split = features if self.bag_splitter is None else self.bag_splitter(features)
        pooled = self.embedding_bag_collection(split)
        return self.project_pooled(pooled, features)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the wrapped collection, as the user wrote them."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether bags carry per-sample weights."""
        return self._is_weighted


class ProjectPooled(nn.Module):
    """The part of the wrapper behind the lookup: a module of its own, so that TorchRec's tracer takes it for a leaf.

    Args:
        outputs: what stands behind each output key.
        blocks: row -> block of every table.
        projections: of the model.
    """

    def __init__(self, outputs: tuple[PooledFeature, ...], blocks: RowBlocks, projections: Projections) -> None:
        super().__init__()
        self._outputs = outputs
        self.projections = projections
        tables = sorted({output.table for output in outputs if not output.is_multi_hot})
        self._router_of = {table: index for index, table in enumerate(tables)}
        self._routers = nn.ModuleList(RowRouter(blocks.routings[table]) for table in tables)

    def forward(self, pooled: KeyedTensor, features: KeyedJaggedTensor) -> KeyedTensor:
        """Projects pooled embeddings.

        Args:
            pooled: what the child returned for the split bags.
            features: the bags as the user gave them.
        """
        by_key, bags = pooled.to_dict(), features.to_dict()
        parts = [
            self._multi_hot(output, [by_key[key] for key in output.block_keys], bags[output.feature])
            if output.is_multi_hot
            else self._single_id(output, by_key[output.name], bags[output.feature])
            for output in self._outputs
        ]
        return KeyedTensor(
            keys=[output.name for output in self._outputs],
            length_per_key=[output.embedding_dim for output in self._outputs],
            values=torch.cat(parts, dim=1),
        )

    def _multi_hot(self, output: PooledFeature, per_block: list[Tensor], bags: JaggedTensor) -> Tensor:
        projected = [self.projections(part, output.table, s) for s, part in enumerate(per_block)]
        total = torch.stack(projected).sum(dim=0)
        return total / bags.lengths().clamp(min=1).unsqueeze(1) if output.divides else total

    def _single_id(self, output: PooledFeature, pooled: Tensor, bags: JaggedTensor) -> Tensor:
        """Bags sorted by block, so that each projection multiplies its own only, and put back into their order."""
        router = self._routers[self._router_of[output.table]]
        block = torch.zeros_like(bags.lengths(), dtype=torch.int64)  # an empty bag is zero under every projection
        block = block.masked_scatter(bags.lengths() > 0, router(bags.values()))
        order = torch.argsort(block, stable=True)
        sizes = torch.bincount(block, minlength=output.num_blocks).tolist()
        per_block = pooled.index_select(0, order).split(sizes)
        projected = torch.cat([self.projections(part, output.table, s) for s, part in enumerate(per_block)])
        return projected.index_select(0, torch.argsort(order))
