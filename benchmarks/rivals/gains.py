"""Gains of a served rival: a factor for every block of every table, solved on held-out samples. They
fold into the scales of rows or tables, and take no byte."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from benchmarks.rivals.shared_rows import side_by_side
from benchmarks.rivals.task import Served, Task, UnmetError, counts_of
from dnis_torchrec.allocation.gains import LossSample, output_bias
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.routing import RowRouter, RowRouting
from dnis_torchrec.data.batches import for_lookup
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ops.batches import jagged_by_key
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.shards import collections, is_pooled, table_configs_of
from dnis_torchrec.selection.swap import replace_


def held_out(task: Task) -> Iterable[Batch]:
    """Samples that the model was not trained on."""
    data = task.build(None).data
    return data.selection if task.with_validation else data.validation


def with_gains(task: Task, served: Served) -> Served:
    """A served model whose tables have gains."""
    recipe = task.build(None)
    blocks = blocks_from_counts(counts_of(task), task.tables(), leave_alone=recipe.leave_alone)
    batch = for_lookup(next(iter(recipe.data.selection))).to(task.device)
    model, wrappers = served.model.to(task.device).eval(), []
    old = _outputs(task, model, batch)
    for fqn, collection in collections(recipe.model).items():
        served_tables = model.get_submodule(fqn)
        wrappers.append(BlockGains(served_tables, collection, blocks.routings).to(task.device))
        model = replace_(model, served_tables, wrappers[-1])
    new = _outputs(task, model, batch)
    if not torch.allclose(old, new, rtol=1e-3, atol=1e-4):
        raise UnmetError("bags are no sums of what their ids stand for, which gains could multiply")
    _solve_(task, model, wrappers)
    factors = {name: factor.tolist() for wrapper in wrappers for name, factor in wrapper.factors.items()}
    return replace(served, model=model, settings=served.settings | {"gains": factors})


def _solve_(task: Task, model: nn.Module, wrappers: Sequence[BlockGains]) -> None:
    """Sets factors, and the output bias, by the solver of `compress`: on the same model with whole tables of the rows
    that it serves."""
    recipe, plain = task.build(None), copy.deepcopy(model)
    for fqn, wrapper in model.named_modules():
        if isinstance(wrapper, BlockGains):
            plain = replace_(plain, plain.get_submodule(fqn), wrapper.whole_tables())
    tables = [table for collection in collections(plain).values() for table in table_configs_of(collection)]
    blocks = blocks_from_counts(counts_of(task), tables, leave_alone=recipe.leave_alone)
    batch = for_lookup(next(iter(recipe.data.selection)))
    bias = output_bias(plain, batch, recipe.task, Ranks())
    sample = LossSample(plain, held_out(task), blocks, loss=recipe.task, is_held_out=True, bias=bias)
    every = {
        table.name: torch.ones(blocks.routings[table.name].num_blocks, table.embedding_dim).bool() for table in tables
    }
    gains = sample.fit(every, of_columns=False)
    for wrapper in wrappers:
        for name, factor in wrapper.factors.items():
            factor.data.copy_(gains.alpha[name][:, 0])
    if bias is not None:
        bias.shift_(model, gains.shift)


@torch.no_grad()
def _outputs(task: Task, model: nn.Module, batch: object) -> Tensor:
    _, (_, outputs) = TrainTask(model, task.build(None).task)(batch)
    parts = outputs.values() if isinstance(outputs, Mapping) else [outputs]
    return torch.cat([part.float().flatten() for part in parts])


class SplitByBlock(nn.Module):
    """Bags of S times B samples: those of a batch by the block of their ids, block by block. ``reads`` says of each key
    the feature, and the table whose blocks count. A module of its own, which TorchRec's tracer takes whole."""

    def __init__(self, reads: Mapping[str, tuple[str, str]], routings: Mapping[str, RowRouting]) -> None:
        super().__init__()
        self._reads, self.features = dict(reads), list(reads)
        self._numbers = {table: routings[table].num_blocks for _, table in reads.values()}
        self.num_blocks = max(self._numbers.values())
        self.routers = nn.ModuleDict({table: RowRouter(routings[table]) for table in self._numbers})

    def blocks_of(self, table: str, ids: Tensor) -> Tensor:
        """The block of every id; ids of no block count to the last block."""
        return self.routers[table](ids).clamp(max=self._numbers[table] - 1)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Splits a batch."""
        bags, size = jagged_by_key(features), features.stride()
        ids, lengths, weights = [], [], []
        for feature, table in self._reads.values():
            bag = bags[feature]
            sample = torch.arange(size, device=bag.values().device).repeat_interleave(bag.lengths())
            slot = self.blocks_of(table, bag.values()) * size + sample
            order = slot.argsort(stable=True)
            ids.append(bag.values()[order])
            lengths.append(torch.bincount(slot, minlength=self.num_blocks * size))
            if features.weights_or_none() is not None:
                weights.append(bag.weights()[order])
        return KeyedJaggedTensor(
            keys=list(self._reads),
            values=torch.cat(ids),
            lengths=torch.cat(lengths),
            weights=torch.cat(weights) if weights else None,
            stride=self.num_blocks * size,
        )


class BlockGains(nn.Module):
    """Multiplies what served tables give by a factor for the block of every id; `collection` is the recipe's, whose
    place they have."""

    def __init__(self, tables: nn.Module, collection: nn.Module, routings: Mapping[str, RowRouting]) -> None:
        super().__init__()
        self.tables, self._is_pooled = tables, is_pooled(collection)
        configs = table_configs_of(collection)
        self.factors = nn.ParameterDict({c.name: torch.ones(routings[c.name].num_blocks) for c in configs})
        self._outputs, turns = {}, []
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True):
            for name, feature in zip(names, config.feature_names, strict=True):
                # A feature is looked up once for each table that reads it: their blocks differ.
                turn = next((n for n, reads in enumerate(turns) if feature not in reads), len(turns))
                turns += [{}] if turn == len(turns) else []
                turns[turn][feature] = (feature, config.name)
                self._outputs[name] = (turn, feature, config)
        for reads in turns[1:]:
            reads |= {feature: read for feature, read in turns[0].items() if feature not in reads}
        self.turns = nn.ModuleList(SplitByBlock(reads, routings) for reads in turns)

    @torch.no_grad()
    def whole_tables(self) -> nn.Module:
        """A plain collection of the rows that are served."""
        rows, configs = {}, []
        for name, (_, feature, config) in self._outputs.items():
            if config.name not in rows:
                sizes = {key: config.num_embeddings * (key == feature) for key in self.turns[0].features}
                lengths = torch.cat([torch.full((config.num_embeddings,), int(size > 0)) for size in sizes.values()])
                ids = torch.arange(config.num_embeddings)
                output = self.tables(KeyedJaggedTensor(list(sizes), ids, lengths=lengths))[name]
                rows[config.name] = output if isinstance(output, Tensor) else output.values()
                configs.append(replace(config, embedding_dim=rows[config.name].shape[1]))
        kind = EmbeddingBagCollection if self._is_pooled else EmbeddingCollection
        collection = kind(tables=configs)
        for name, table in (collection.embedding_bags if self._is_pooled else collection.embeddings).items():
            table.weight.data.copy_(rows[name])
        return collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor | dict[str, JaggedTensor]:
        """Looks bags up, or sequences."""
        if not self._is_pooled:
            return self._sequences(features)
        size, bags, turns, outputs = features.stride(), jagged_by_key(features), [], []
        for split in self.turns:
            parts = split(features)
            lengths = {key: bag.lengths().view(-1, size) for key, bag in jagged_by_key(parts).items()}
            turns.append((self.tables(parts).to_dict(), lengths))
        for name, (turn, feature, config) in self._outputs.items():
            of_blocks, lengths = turns[turn]
            piece = of_blocks[name].reshape(-1, size, of_blocks[name].shape[1])
            if config.pooling == PoolingType.MEAN:  # of a block's ids alone, so far
                piece = piece * (lengths[feature] / bags[feature].lengths().clamp(min=1)).unsqueeze(2)
            factor = self.factors[config.name]
            outputs.append(torch.einsum("s,sbd->bd", factor, piece[: len(factor)]))
        return side_by_side(list(self._outputs), outputs)

    def _sequences(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        bags, outputs = jagged_by_key(features), self.tables(features)
        for name, (turn, feature, config) in self._outputs.items():
            block, rows = self.turns[turn].blocks_of(config.name, bags[feature].values()), outputs[name]
            values = rows.values() * self.factors[config.name][block].unsqueeze(1)
            outputs[name] = JaggedTensor(values, rows.weights_or_none(), rows.lengths())
        return outputs
