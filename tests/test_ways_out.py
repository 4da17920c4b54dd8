"""What `compress` leaves goes everywhere: to disk and back, into a state_dict, and nowhere silently wrong."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis

BCE = nn.BCEWithLogitsLoss()
ROWS, DIM, BATCH = 200, 16, 64


def make_batch(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    items = (ROWS ** torch.rand(BATCH, generator=draw)).long() - 1
    features = KeyedJaggedTensor(["item"], items, lengths=torch.ones(BATCH, dtype=torch.int64))
    return Batch(torch.rand(BATCH, 4, generator=draw), features, labels=(items % 2).float())


BATCHES = [make_batch(seed) for seed in range(6)]
HELD_OUT = [make_batch(seed) for seed in range(100, 104)]


def dlrm(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    table = EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item"])
    return DLRM(EmbeddingBagCollection(tables=[table]), 4, [32, DIM], [32, 1])


class Sequence(nn.Module):
    """A model of an EmbeddingCollection that passes its ids on."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        table = EmbeddingConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item"])
        self.collection = EmbeddingCollection(tables=[table], need_indices=True)
        self.head = nn.Linear(DIM, 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        rows = self.collection(sparse_features)["item"]
        assert rows.weights().equal(sparse_features.values())
        return self.head(rows.values()).squeeze(1) + dense_features.sum(1)


@torch.no_grad()
def predict(model: nn.Module) -> Tensor:
    batch = BATCHES[0]
    logits: Tensor = model(batch.dense_features, batch.sparse_features)
    return logits.flatten()


def compressed(model: nn.Module, factor: float = 1.0, compression: float = 6) -> nn.Module:
    """A compressed model, all of its tables multiplied first."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embedding" in name:
                weight.mul_(factor)
    dnis.compress(model, BATCHES, loss=BCE, compression=compression, held_out=HELD_OUT)
    return model


def through_torch_save(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


WAYS: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "state_dict": lambda one, other: other.load_state_dict(one.state_dict()),
    "torch.save": lambda one, other: other.load_state_dict(through_torch_save(one.state_dict())),
    "assign": lambda one, other: other.load_state_dict(one.state_dict(), assign=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [dlrm, Sequence])
def test_a_state_dict_gives_a_twin_of_other_scales_the_same_predictions(
    make: Callable[[], nn.Module], way: str
) -> None:
    one, other = compressed(make()), compressed(make(), factor=3.0)
    assert not torch.allclose(predict(one), predict(other))
    WAYS[way](one, other)
    assert predict(other).equal(predict(one))


def test_a_deep_copy_and_a_distributed_checkpoint_predict_the_same(gloo: object, tmp_path: Path) -> None:
    one, other = compressed(dlrm()), compressed(dlrm(), factor=3.0)
    assert predict(copy.deepcopy(one)).equal(predict(one))
    dcp.save(one.state_dict(), checkpoint_id=tmp_path / "dcp")
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    other.load_state_dict(state)
    assert predict(other).equal(predict(one))


def test_codes_without_their_meaning_and_those_of_other_tables_are_refused() -> None:
    one, other = compressed(dlrm()), compressed(dlrm(), factor=3.0)
    state = {name: value for name, value in one.state_dict().items() if "outputs." not in name}
    with pytest.raises(RuntimeError, match="expected codes and their layout, got no 'outputs.features'"):
        other.load_state_dict(state, strict=False)
    layout = next(name for name in one.state_dict() if name.endswith("outputs.tables"))
    state = {**one.state_dict(), layout: one.state_dict()[layout] + 1}
    with pytest.raises(RuntimeError, match="build it with the saved scheme"):
        other.load_state_dict(state)


def test_narrow_tables_take_no_values_that_were_cut_otherwise(tmp_path: Path) -> None:
    modules = []
    for name, compression in (("one", 4), ("other", 8), ("same", 4)):
        model = dlrm()
        result = dnis.compress(model, BATCHES, loss=BCE, compression=compression)
        dnis.export(model, result.scheme, tmp_path / name)
        modules.append(dnis.load(tmp_path / name, form="mixed_dimension"))
    modules[0].load_state_dict(modules[2].state_dict())
    with pytest.raises(RuntimeError, match="values cut by its own scheme"):
        modules[0].load_state_dict(modules[1].state_dict(), strict=False)


@pytest.mark.parametrize("make", [dlrm, Sequence])
@pytest.mark.parametrize("form", ["packed", "mixed_dimension"])
def test_what_compress_leaves_is_written_and_fills_a_fresh_model(
    make: Callable[[int], nn.Module], form: str, tmp_path: Path
) -> None:
    model = make(0)
    result = dnis.compress(model, BATCHES, loss=BCE, compression=6, held_out=HELD_OUT)
    dnis.export(model, result.scheme, tmp_path / "artifact")
    fresh = dnis.load_model(make(1), tmp_path / "artifact", form=form)
    torch.testing.assert_close(predict(fresh), predict(model), rtol=0, atol=1e-6)
    again = dnis.load_model(make(2), tmp_path / "artifact")
    dnis.export(again, dnis.artifact.load.read_scheme(tmp_path / "artifact"), tmp_path / "again")
    files = {path.name: path.read_bytes() for path in (tmp_path / "artifact").rglob("*.safetensors")}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "again").rglob("*.safetensors")}


def test_an_artifact_alone_says_that_ids_are_passed_on(tmp_path: Path) -> None:
    model = Sequence()
    scheme = dnis.compress(model, BATCHES, loss=BCE, compression=6).scheme
    assert dnis.load(dnis.export(model, scheme, tmp_path / "artifact")).need_indices()


def test_large_packed_tables_are_cut_into_files(tmp_path: Path) -> None:
    from dnis_torchrec.allocation.compress import served_collections
    from dnis_torchrec.artifact.write import write_artifact

    model = dlrm()
    result = dnis.compress(model, BATCHES, loss=BCE, compression=4)
    (module,) = served_collections(model).values()
    rows = module.bit_fields()
    write_artifact(rows, result.scheme, tmp_path / "cut", forms=["packed"], max_file_bytes=1700)
    assert len(list((tmp_path / "cut" / "packed").iterdir())) > 1
    served = dnis.load(tmp_path / "cut", verify=True)
    features = BATCHES[0].sparse_features
    assert served(features).values().equal(module(features).values())


def test_another_scheme_and_another_form_are_refused(tmp_path: Path) -> None:
    model = dlrm()
    other = dnis.compress(dlrm(), BATCHES, loss=BCE, compression=10).scheme
    result = dnis.compress(model, BATCHES, loss=BCE, compression=4)
    with pytest.raises(ValueError, match="give the scheme that compress returned"):
        dnis.export(model, other, tmp_path / "artifact")
    with pytest.raises(ValueError, match="packed, which the tables are"):
        dnis.export(model, result.scheme, tmp_path / "artifact", forms=["mixed_dimension"])
    assert not (tmp_path / "artifact").exists()


def test_a_model_of_other_weights_is_left_as_it_was(tmp_path: Path) -> None:
    model = dlrm()
    dnis.export(model, dnis.compress(model, BATCHES, loss=BCE).scheme, tmp_path / "artifact")
    table = EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item"])
    other = DLRM(EmbeddingBagCollection(tables=[table]), 4, [16, DIM], [32, 1])
    names, prediction = list(other.state_dict()), predict(other)
    with pytest.raises(ValueError, match="expected shape"):
        dnis.load_model(other, tmp_path / "artifact")
    assert list(other.state_dict()) == names
    assert predict(other).equal(prediction)


def test_a_model_in_distributed_model_parallel_on_one_rank_is_compressed_inside_it(
    gloo: object, tmp_path: Path
) -> None:
    model = DistributedModelParallel(DLRMTrain(dlrm()), device=torch.device("cpu"))
    inner = model.module.model
    expected = predict(inner)
    result = dnis.compress(model, BATCHES, loss=BCE, compression=4)
    moved = float((predict(model.module.model) - expected).abs().max())
    assert 0 < moved < 0.2 * float(expected.abs().max())
    dnis.export(model, result.scheme, tmp_path / "artifact")
    fresh = dnis.load_model(DLRMTrain(dlrm(1)), tmp_path / "artifact")
    assert predict(fresh.model).equal(predict(model.module.model))


class NamedOutput(nn.Module):
    """A model that returns its one output by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dlrm()

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> dict[str, Tensor]:
        return {"logits": self.inner(dense_features, sparse_features).squeeze(1)}


class NamedLoss(dnis.Task):
    """Its loss."""

    def loss(self, batch: Batch, outputs: dict[str, Tensor]) -> Tensor:
        return BCE(outputs["logits"], batch.labels.to(outputs["logits"].dtype))


def test_one_output_by_name_is_compressed_as_one_without() -> None:
    named, plain = NamedOutput(), dlrm()
    of_named = dnis.compress(named, BATCHES, loss=NamedLoss(), compression=6, held_out=HELD_OUT)
    of_plain = dnis.compress(plain, BATCHES, loss=BCE, compression=6, held_out=HELD_OUT)
    assert of_named.num_bytes == of_plain.num_bytes
    torch.testing.assert_close(predict(named.inner), predict(plain), rtol=0, atol=1e-3)


class BesideLookups(nn.Module):
    """A model that reads a table beside its lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dlrm()

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        weight = self.inner.sparse_arch.embedding_bag_collection.embedding_bags["item"].weight
        logits: Tensor = self.inner(dense_features, sparse_features)
        return logits.squeeze(1) + weight.square().mean()


class Tied(nn.Module):
    """A model whose last layer has the table's own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = dlrm(), nn.Linear(DIM, ROWS, bias=False)
        collection = self.inner.sparse_arch.embedding_bag_collection
        self.out.weight = collection.embedding_bags["item"].weight

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.inner(dense_features, sparse_features)
        return logits.squeeze(1) + self.out(dense_features.repeat(1, DIM // 4)).mean(1)


class OtherCall(nn.Module):
    """A model that is called otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dlrm()

    def forward(self, pair: tuple[Tensor, KeyedJaggedTensor]) -> Tensor:
        logits: Tensor = self.inner(*pair)
        return logits


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (BesideLookups, {}, NotImplementedError, "lookups alone"),
        (Tied, {}, ValueError, "'out.weight'"),
        (OtherCall, {}, TypeError, "give a Task"),
        (dlrm, {"compression": 1e6}, ValueError, "compression"),
        (dlrm, {"loss": nn.L1Loss()}, ValueError, "one that bends"),
    ],
)
def test_whatever_is_refused_leaves_the_model_as_it_was(
    make: Callable[[], nn.Module], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = make()
    batch, names = BATCHES[0], list(model.state_dict())
    arguments = (batch.dense_features, batch.sparse_features)
    call = (lambda: model(arguments)) if make is OtherCall else (lambda: model(*arguments))
    expected = call().detach()
    with pytest.raises(error, match=message):
        dnis.compress(model, BATCHES, **{"loss": BCE, "compression": 4, **options})
    assert list(model.state_dict()) == names
    torch.testing.assert_close(call().detach(), expected, rtol=0, atol=1e-5)


def test_compressing_twice_says_that_it_is_compressed() -> None:
    with pytest.raises(RuntimeError, match="got packed ones; compress the model that was trained"):
        compressed(compressed(dlrm()))


def test_rows_that_grew_since_bits_were_allocated_are_not_packed() -> None:
    from dnis_torchrec.allocation.compress import measure_, packed_collections

    model = dlrm()
    scheme = measure_(model, BATCHES, loss=BCE).allocate(compression=6).scheme
    assert packed_collections(model, scheme)
    with torch.no_grad():
        model.sparse_arch.embedding_bag_collection.embedding_bags["item"].weight.mul_(2)
    with pytest.raises(ValueError, match="table 'item': expected values within"):
        packed_collections(model, scheme)
