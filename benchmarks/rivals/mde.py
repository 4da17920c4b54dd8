"""MDE (Ginart et al. 2019): dims that follow a power of frequency, with learned projections to a
base dimension."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from benchmarks.rivals.gains import SplitByBlock
from benchmarks.rivals.mixed import Blocks, pack, widths_of, zero_dropped_
from benchmarks.rivals.rows import TRAINED_MULTIPLE
from benchmarks.rivals.shared_rows import Substitute, side_by_side
from benchmarks.rivals.task import Served, Task, UnmetError, best_of, check_pooled, train
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops.batches import jagged_by_key
from dnis_torchrec.selection.shards import collections
from dnis_torchrec.selection.swap import replace_

TEMPERATURES = (0.1, 0.4, 0.7, 0.2, 0.5, 0.8, 0.3, 0.6)
SETTINGS = [(t, is_integer) for is_integer in (True, False) for t in TEMPERATURES]
"""(temperature, integers or powers of two): the 16 of a full run."""


@dataclass(frozen=True, eq=False)
class Dims:
    """What a setting comes to: a base dimension, and columns of every block of every table."""

    base: int
    dims: dict[str, Tensor]
    widths: dict[str, int]

    def shapes(self, rows: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """Projection -> (d_s, D): of blocks that have rows and are narrower than the base."""
        return {
            name: (int(d), self.widths[table])
            for table, dims in self.dims.items()
            for name, d, n in zip(self.names(table), dims, rows[table], strict=True)
            if n and d < self.widths[table]
        }

    def names(self, table: str) -> list[str]:
        """Projections of a table's blocks."""
        return [f"{table.replace('.', '_')}_block{s}" for s in range(len(self.dims[table]))]


def round_dims(values: Tensor, is_integer: bool) -> Tensor:
    """Rounds positive numbers to integers or to powers of two, at least 1."""
    values = values.clamp(min=1)
    powers = values if is_integer else 2 ** values.log2().add(0.5).floor()
    return powers.add(0.5).floor().long()


def popularity(blocks: Blocks) -> dict[str, Tensor]:
    """Mean occurrences of the rows of each block, over those of the most popular block."""
    rates = {
        name: occurrences.double() / blocks.rows[name].clamp(min=1)
        for name, occurrences in blocks.blocks.occurrences.items()
    }
    most = max(float(rate.max()) for rate in rates.values())
    return {name: rate / most for name, rate in rates.items()}


def largest_dims(blocks: Blocks, temperature: float, is_integer: bool) -> Dims:
    """The largest dims of a setting within the task's bytes, projections counted."""
    task, top = blocks.task, blocks.task.dim
    shares = {name: rate**temperature for name, rate in popularity(blocks).items()}
    widths: dict[int, dict[str, int]] = {}

    def at(scale: float) -> Dims:
        base = int(round_dims(torch.tensor(scale, dtype=torch.float64), is_integer))
        base = min(top, -(-base // TRAINED_MULTIPLE) * TRAINED_MULTIPLE)
        if base not in widths:
            widths[base] = widths_of(task.build(base).model)
        dims = {
            name: round_dims(shares[name] * (width * scale / base), is_integer).clamp(max=width)
            for name, width in widths[base].items()
        }
        return Dims(base, dims, widths[base])

    def num_bytes(plan: Dims) -> int:
        projections = sum(4 * d * width for d, width in plan.shapes(blocks.rows).values())
        return blocks.num_bytes(blocks.masks(plan.dims, plan.widths)) + projections

    low, high = 1.0, float(top) / min(float(s[s > 0].min()) for s in shares.values())
    if num_bytes(at(low)) > task.num_bytes:
        raise UnmetError(f"one column of every block takes {num_bytes(at(low))} bytes")
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if num_bytes(at(middle)) <= task.num_bytes else (low, middle)
    return at(low)


def mde(task: Task) -> Served:
    """The best of 16 settings: temperature .1 to .8, dims rounded both ways."""
    check_pooled(task.build(None).model)
    blocks = Blocks.of(task)
    trials = {}
    for temperature, is_integer in SETTINGS[: task.trials]:
        dims = largest_dims(blocks, temperature, is_integer)
        key = str([dims.base, *(d.tolist() for d in dims.dims.values())])
        settings = {"temperature": temperature, "integers": is_integer, "base": dims.base}
        trials.setdefault(key, partial(_train, blocks, dims, settings))
    return best_of(task, trials.values())


def _train(blocks: Blocks, dims: Dims, settings: dict[str, object]) -> Served:
    recipe = blocks.task.build(dims.base)
    masks = blocks.masks(dims.dims, dims.widths)
    torch.manual_seed(blocks.task.seed)
    project_(recipe.model, dims, blocks.routings, blocks.rows)
    # Projections are part of the embeddings: they learn at the rate of tables.
    names = tuple(n for n, _ in recipe.model.named_parameters() if ".matrices." in n)
    recipe = replace(recipe, row_weights=(*recipe.row_weights, *names))
    zero_dropped_(recipe.model, blocks.routings, masks)
    model, _ = train(blocks.task, recipe, masks=True)
    served = pack(model, blocks.routings, masks, blocks.bits, **settings)
    shapes = dims.shapes(blocks.rows).values()
    return replace(served, num_bytes=served.num_bytes + sum(4 * d * width for d, width in shapes))


def project_(model: nn.Module, dims: Dims, routings: Mapping[str, RowRouting], rows: Mapping[str, Tensor]) -> None:
    """Puts a `ProjectedTables` in the place of every EmbeddingBagCollection."""
    for collection in collections(model).values():
        replace_(model, collection, ProjectedTables(collection, dims, routings, rows))


class ProjectedTables(Substitute):
    """Looks up the bags of every block apart, and multiplies each sum by its block's projection."""

    def __init__(
        self,
        collection: EmbeddingBagCollection,
        dims: Dims,
        routings: Mapping[str, RowRouting],
        rows: Mapping[str, Tensor],
    ) -> None:
        super().__init__(collection)
        reads, inner = {}, []
        for table in self._tables:
            keys = {f"{feature}@{table.name}": (feature, table.name) for feature in table.feature_names}
            reads |= keys
            # A mean is a sum over the length of the whole bag, which no block knows.
            inner.append(replace(table, feature_names=list(keys), pooling=PoolingType.SUM))
        self.split = SplitByBlock(reads, routings)
        self.tables = EmbeddingBagCollection(inner, is_weighted=self._is_weighted, device=collection.device)
        for name, bag in collection.embedding_bags.items():
            self.tables.embedding_bags[name].weight.data.copy_(bag.weight.data)
        self.project = Project(self._tables, collection._embedding_names, dims, rows)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up."""
        return self.project(self.tables(self.split(features)), features)


class Project(nn.Module):
    """Multiplies sums of blocks by their projections, and adds them up."""

    def __init__(
        self, tables: list[EmbeddingBagConfig], names: list[str], dims: Dims, rows: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        own = {name for table in tables for name in dims.names(table.name)}
        shapes = {name: shape for name, shape in dims.shapes(rows).items() if name in own}
        self.matrices = nn.ParameterDict({k: torch.empty(shape) for k, shape in shapes.items()})
        for matrix in self.matrices.values():
            nn.init.xavier_uniform_(matrix)
        outputs = [(table, feature) for table in tables for feature in table.feature_names]
        self._outputs = [
            (name, feature, dims.names(table.name), table.pooling == PoolingType.MEAN, table.name)
            for name, (table, feature) in zip(names, outputs, strict=True)
        ]

    def forward(self, pooled: KeyedTensor, features: KeyedJaggedTensor) -> KeyedTensor:
        """Projects."""
        by_key, bags, results = pooled.to_dict(), jagged_by_key(features), []
        for _, feature, blocks, is_mean, table in self._outputs:
            total, sums = None, by_key[f"{feature}@{table}"]
            for block, part in zip(blocks, sums.split(features.stride()), strict=False):
                if block in self.matrices:
                    matrix = self.matrices[block]
                    part = part[:, : matrix.shape[0]] @ matrix
                total = part if total is None else total + part
            if is_mean:
                total = total / bags[feature].lengths().clamp(min=1).unsqueeze(1)
            results.append(total)
        return side_by_side([name for name, *_ in self._outputs], results)
