"""Straight-through training by hand: latent weights that are rounded level by level and stepped by dense optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.codes import feedback_of
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.selection.shards import TableShard, collections, local_shards
from tests.coded_tables import rounded, with_codes


def scheme_of(
    tables: list[EmbeddingBagConfig],
    routings: Mapping[str, RowRouting],
    *,
    seed: int = 0,
    widths: tuple[int, ...] | None = None,
) -> MixedDimensionScheme:
    """A scheme with drawn codes for tables, whose values are about 1."""
    found = {}
    for index, table in enumerate(tables):
        routing = routings[table.name]
        retained = torch.ones(routing.num_blocks, table.embedding_dim, dtype=torch.bool)
        plain = TableScheme(
            name=table.name,
            collection="",
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            pooling="mean" if table.pooling == PoolingType.MEAN else "sum",
            feature_names=tuple(table.feature_names),
            is_weighted=False,
            routing=routing,
            retained=retained,
            num_retained=int(routing.row_counts().sum()) * table.embedding_dim,
        )
        found[table.name] = with_codes(plain, seed=seed + index, widths=widths)
    return MixedDimensionScheme(found)


class StraightThrough:
    """What trains in codes has to come to.

    Args:
        scheme: its codes.
        tables: table -> weights before they were rounded.
    """

    def __init__(self, scheme: MixedDimensionScheme, tables: Mapping[str, Tensor]) -> None:
        self.scheme = scheme
        self.latents = {name: nn.Parameter(weight.clone()) for name, weight in tables.items()}
        self.clip_()

    def clip_(self) -> None:
        """Latent weights of codes lie at most half a step outside of the range, dropped ones are 0."""
        for name, latent in self.latents.items():
            table = self.scheme.tables[name]
            bits = [*table.codes.bits.tolist(), [0] * table.embedding_dim]
            for row, block in enumerate(table.routing.all_blocks().tolist()):
                for column, width in enumerate(bits[block]):
                    if width == 0:
                        latent.data[row, column] = 0
                    elif width < 32:
                        scale, shift = float(table.scale[block, column]), float(table.shift[block, column])
                        ends = scale * (shift / 2 - 0.5), scale * (2**width - 1 + shift / 2 + 0.5)
                        latent.data[row, column].clamp_(*ends)

    def weights(self) -> dict[str, Tensor]:
        """What lookups read."""
        return {name: rounded(self.scheme.tables[name], latent.detach()) for name, latent in self.latents.items()}

    def step(self, loss: Callable[[Mapping[str, Tensor]], Tensor], optimizer: torch.optim.Optimizer) -> None:
        """The gradient at the rounded weights steps the latent ones."""
        leaves = {name: weight.requires_grad_() for name, weight in self.weights().items()}
        loss(leaves).backward()
        for name, latent in self.latents.items():
            latent.grad = leaves[name].grad
        optimizer.step()
        self.clip_()


class RowWiseAdagradByHand(torch.optim.Optimizer):
    """One sum of squares per row."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self) -> None:
        """v <- v - lr g / (sqrt(sum over steps of mean g^2) + eps)."""
        for group in self.param_groups:
            for parameter in group["params"]:
                sums = self.state[parameter].setdefault("sums", torch.zeros(len(parameter)))
                for row, gradient in enumerate(parameter.grad):
                    sums[row] += gradient.square().mean()
                    parameter.data[row] -= group["lr"] * gradient / (sums[row].sqrt() + 1e-8)


def pooled(weight: Tensor, features: KeyedJaggedTensor, name: str, pooling: PoolingType) -> Tensor:
    """Bags of a feature, one after the other."""
    bags, is_mean = features[name].to_dense(), pooling == PoolingType.MEAN
    return torch.stack([weight[bag].sum(0) / (len(bag) if is_mean and len(bag) else 1) for bag in bags])


def distance(outputs: Mapping[str, Tensor]) -> Tensor:
    """A loss whose gradient depends on the weights and moves some of them by several codes; outputs by feature."""
    values = torch.cat([outputs[name] for name in sorted(outputs)], dim=1)
    targets = torch.linspace(-2, 2, values.numel()).view_as(values)
    return (values - targets).square().sum() / 8


def loss_by_hand(
    tables: list[EmbeddingBagConfig], features: KeyedJaggedTensor
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The loss as a function of all tables."""

    def loss(weights: Mapping[str, Tensor]) -> Tensor:
        return distance(
            {name: pooled(weights[t.name], features, name, t.pooling) for t in tables for name in t.feature_names}
        )

    return loss


def shards_of(model: nn.Module) -> list[TableShard]:
    """All local shards."""
    return [shard for module in collections(get_unwrapped_module(model)).values() for shard in local_shards(module)]


def tables_of(model: nn.Module) -> dict[str, Tensor]:
    """Table -> clone of its weights, column shards put together."""
    found: dict[str, list[Tensor]] = {}
    for shard in sorted(shards_of(model), key=lambda shard: shard.first_column):
        found.setdefault(shard.table, []).append(shard.weight)
    return {name: torch.cat(parts, dim=1) for name, parts in found.items()}


def without_codes(scheme: MixedDimensionScheme) -> MixedDimensionScheme:
    """The same, as pruning leaves it."""
    bare = {"bits": None, "scale": None, "shift": None}
    return MixedDimensionScheme({name: replace(table, **bare) for name, table in scheme.tables.items()})


def with_feedback(scheme: MixedDimensionScheme) -> MixedDimensionScheme:
    """The same codes, by error feedback of columns that meet at random."""
    generator, found = torch.Generator().manual_seed(4), {}
    for name, table in scheme.tables.items():
        slopes = torch.randn(*table.codes.bits.shape, 3, generator=generator, dtype=torch.float64)
        found[name] = replace(table, feedback=feedback_of(slopes @ slopes.mT, table.codes.bits))
    return MixedDimensionScheme(found)
