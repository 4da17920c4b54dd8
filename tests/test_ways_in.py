"""Whatever model comes in, `compress` and `search` take it, or say in one line what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.data.task import Predictions
from dnis_torchrec.search.settings import SearchSettings

BCE = nn.BCEWithLogitsLoss()
SIZE = 64


class Twins(nn.Module):
    """A bag and a sequence, each of which has a table "item"."""

    def __init__(self, rows: tuple[int, int] = (120, 90)) -> None:
        super().__init__()
        torch.manual_seed(0)
        bag = EmbeddingBagConfig(name="item", num_embeddings=rows[0], embedding_dim=8, feature_names=["item"])
        row = EmbeddingConfig(name="item", num_embeddings=rows[1], embedding_dim=8, feature_names=["seq"])
        self.bags, self.rows = EmbeddingBagCollection(tables=[bag]), EmbeddingCollection(tables=[row])
        self.out = nn.Linear(16, 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        bag, rows = self.bags(sparse_features).values(), self.rows(sparse_features)["seq"].values()
        logits: Tensor = self.out(torch.cat([bag, rows], 1))
        return logits.squeeze(1)


def make_batch(seed: int) -> Batch:
    ids = torch.randint(0, 90, (2 * SIZE,), generator=torch.Generator().manual_seed(seed))
    features = KeyedJaggedTensor(["item", "seq"], ids, lengths=torch.ones(2 * SIZE, dtype=torch.int64))
    return Batch(torch.zeros(SIZE, 1), features, (ids[:SIZE] % 2).float())


BATCHES = [make_batch(seed) for seed in range(4)]
SPLITS = dnis.DataSplits(train=BATCHES, validation=BATCHES[:2], selection=BATCHES[2:], test=BATCHES[3:])


@torch.no_grad()
def predict(model: nn.Module) -> Tensor:
    logits: Tensor = model(BATCHES[0].dense_features, BATCHES[0].sparse_features)
    return logits


def table_names(model: Any) -> list[str]:
    configs = [*model.bags.embedding_bag_configs(), *model.rows.embedding_configs()]
    return [config.name for config in configs]


def compress(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, dnis.compress(model, BATCHES, loss=BCE, compression=3, held_out=BATCHES[:2]).scheme


def search(model: nn.Module) -> tuple[nn.Module, Any]:
    recipe = dnis.Recipe(model=model, data=SPLITS, loss=BCE)
    result = dnis.search(recipe, 3, settings=SearchSettings(epochs=1, num_blocks=2))
    return result.model, result.scheme


@pytest.mark.parametrize("way", [compress, search])
def test_tables_of_one_name_in_two_collections_each_have_bits_of_their_own(
    way: Callable[[nn.Module], tuple[nn.Module, Any]], tmp_path: Path
) -> None:
    plain = Twins()
    model, scheme = way(plain)
    assert list(scheme.tables) == ["item@bags", "item@rows"]
    assert [table.num_embeddings for table in scheme.tables.values()] == [120, 90]
    assert table_names(model) == table_names(Twins()) == ["item", "item"]
    dnis.export(model, scheme, tmp_path / "artifact")
    fresh = dnis.load_model(Twins(), tmp_path / "artifact")
    torch.testing.assert_close(predict(fresh), predict(model), rtol=0, atol=1e-6)


def test_what_fails_gives_tables_their_names_back() -> None:
    model = Twins()
    names, expected = list(model.state_dict()), predict(model)
    with pytest.raises(ValueError, match="compression"):
        dnis.compress(model, BATCHES, loss=BCE, compression=1e6)
    assert list(model.state_dict()) == names
    assert predict(model).equal(expected)


def test_a_table_left_alone_is_named_as_in_its_collection() -> None:
    with pytest.raises(ValueError, match="a table beside those that are left alone, got all 2"):
        dnis.compress(Twins(), BATCHES, loss=BCE, compression=3, leave_alone=["item"])
    result = dnis.compress(Twins(), BATCHES, loss=BCE, compression=1.2, leave_alone=["item@rows"])
    assert set(result.scheme.tables["item@rows"].bits.flatten().tolist()) == {32}


class LossMadeInPlace(dnis.Task):
    """A loss that is a module made where it is called, as many write it."""

    kinds: Mapping[str, str] = {"click": "binary"}

    def loss(self, batch: Batch, outputs: Tensor) -> Tensor:
        value: Tensor = nn.BCEWithLogitsLoss()(outputs, batch.labels.to(outputs.dtype))
        return value

    def predictions(self, batch: Batch, outputs: Tensor) -> dict[str, Predictions]:
        return {"click": Predictions(outputs, batch.labels)}


def test_a_task_may_make_its_loss_where_it_calls_it() -> None:
    recipe = dnis.Recipe(model=Twins(), data=SPLITS, loss=LossMadeInPlace())
    assert dnis.search(recipe, 2, settings=SearchSettings(epochs=1, num_blocks=2)).scheme.compression() >= 2


class Classes(nn.Module):
    """A model of several classes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.inner = Twins()
        self.inner.out = nn.Linear(16, num_classes)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        bag = self.inner.bags(sparse_features).values()
        rows = self.inner.rows(sparse_features)["seq"].values()
        logits: Tensor = self.inner.out(torch.cat([bag, rows], 1))
        return logits


def test_classes_are_integers_for_cross_entropy() -> None:
    batches = [Batch(b.dense_features, b.sparse_features, b.sparse_features.values()[:SIZE] % 3) for b in BATCHES]
    result = dnis.compress(Classes(3), batches, loss=nn.CrossEntropyLoss(), compression=3, held_out=batches[:2])
    assert result.compression >= 3
    nobody = [Batch(b.dense_features, b.sparse_features, torch.full((SIZE,), -100)) for b in BATCHES]
    with pytest.raises(ValueError, match="expected a finite loss, got nan; leave such batches out"):
        dnis.compress(Classes(3), nobody, loss=nn.CrossEntropyLoss(), compression=3)


@dataclass
class ModelInput:
    """What a model of one's own may take."""

    ids: KeyedJaggedTensor


@pytest.mark.parametrize("batch", [ModelInput(BATCHES[0].sparse_features), {"ids": BATCHES[0].sparse_features}, (1, 2)])
def test_a_batch_of_another_kind_is_refused_with_what_to_do(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"dense_features, sparse_features and labels, got .*; .* docs/models.md"):
        dnis.compress(Twins(), [batch], loss=BCE)


class Offset(nn.Module):
    """A model that gives ids other rows before it looks them up."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.inner, self.offset = Twins((320, 320)), offset

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        bags = KeyedJaggedTensor(
            sparse_features.keys(), sparse_features.values() + self.offset, lengths=sparse_features.lengths()
        )
        logits: Tensor = self.inner(dense_features, bags)
        return logits


def test_ids_that_a_model_offsets_are_counted_where_they_are_read() -> None:
    schemes = []
    for offset in (0, 30):
        batches = [
            Batch(
                b.dense_features,
                KeyedJaggedTensor(
                    ["item", "seq"], b.sparse_features.values() + 30 - offset, lengths=b.sparse_features.lengths()
                ),
                b.labels,
            )
            for b in BATCHES
        ]
        schemes.append(dnis.compress(Offset(offset), batches, loss=BCE, compression=3, held_out=batches[:2]).scheme)
    for name, table in schemes[0].tables.items():
        other = schemes[1].tables[name]
        assert table.routing.block_of(torch.arange(320)).equal(other.routing.block_of(torch.arange(320)))
        assert table.bits.equal(other.bits)


def test_batches_of_several_sizes_are_not_counted() -> None:
    ids = torch.tensor([1, 2, 3])
    features = KeyedJaggedTensor(
        ["item", "seq"], ids, lengths=torch.ones(3, dtype=torch.int64), stride_per_key_per_rank=[[1], [2]]
    )
    with pytest.raises(NotImplementedError, match=r"batch 0: supported are batches of one size .*, got sizes \[1, 2\]"):
        dnis.count_frequencies([features], Twins().bags.embedding_bag_configs())
