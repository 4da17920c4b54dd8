"""Streams made of others: the validation split as training data, too, so that nobody wins by data;
and ids in no order."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.batches import CutBatches, parts_of
from dnis_torchrec.data.over_ranks import JoinedBatches, all_samples
from dnis_torchrec.data.recipe import SPLITS, Recipe
from dnis_torchrec.selection.shards import table_configs


@runtime_checkable
class JoinsItself(Protocol):
    """A training stream whose samples depend on what else is trained on, such as one that draws
    negatives."""

    def joined_with(self, validation: Iterable[Batch]) -> Iterable[Batch]:
        """The training stream of both splits together."""


def train_on_validation(recipe: Recipe) -> Recipe:
    """The recipe with its validation samples among the training samples; selection and test stay as
    they are."""
    data = recipe.data
    return replace(recipe, data=replace(data, train=_joined(data.train, data.validation)))


def _joined(train: Iterable[Batch], validation: Iterable[Batch]) -> Iterable[Batch]:
    if isinstance(train, RenumberedBatches) and isinstance(validation, RenumberedBatches):
        return RenumberedBatches(_joined(train.batches, validation.batches), train.rows)
    return train.joined_with(validation) if isinstance(train, JoinsItself) else JoinedBatches(train, validation)


class RenumberedBatches(CutBatches):
    """Batches whose ids have other numbers: feature -> the new one of every id."""

    def __init__(self, batches: Iterable[Batch], rows: Mapping[str, Tensor]) -> None:
        super().__init__(batches)
        self.batches, self.rows = batches, rows

    def __iter__(self) -> Iterator[Batch]:
        return map(self._renumber, self.batches)

    def each_sample(self) -> Iterator[Batch]:
        """Yields the batches that are counted."""
        return map(self._renumber, all_samples(self.batches))

    def _renumber(self, batch: Batch) -> Batch:
        parts = {name: part for name, part in parts_of(batch).items() if isinstance(part, KeyedJaggedTensor)}
        other = copy.copy(batch)
        for name, bags in parts.items():
            ids = [
                self.rows[key][ids.values()] if key in self.rows else ids.values()
                for key, ids in bags.to_dict().items()
            ]
            renumbered = KeyedJaggedTensor(
                bags.keys(), torch.cat(ids), bags.weights_or_none(), bags.lengths(), stride=bags.stride()
            )
            setattr(other, name, renumbered)
        return other


def shuffle_ids(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with the ids of every table in a random order, the same in all splits."""
    generator, rows, order_of_size = torch.Generator().manual_seed(seed), {}, {}
    for table in table_configs(recipe.model):
        # Tables of one size share an order, for one feature may read several of them.
        size = table.num_embeddings
        if size not in order_of_size:
            order_of_size[size] = torch.randperm(size, generator=generator)
        for feature in table.feature_names:
            if rows.setdefault(feature, order_of_size[size]) is not order_of_size[size]:
                raise ValueError(f"feature {feature!r}: tables of one size expected, so that ids can be shuffled")
    parts = {name: getattr(recipe.data, name) for name in SPLITS}
    splits = {name: RenumberedBatches(batches, rows) for name, batches in parts.items()}
    return replace(recipe, data=replace(recipe.data, **splits))
