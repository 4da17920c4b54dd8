"""Whatever model comes in, `compress` and `search` take it or say what to do; what they leave goes everywhere."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.allocation.compress import measure_, packed_collections, served_collections
from dnis_torchrec.artifact.load import exact_rows, read_scheme
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.cli.commands import recipe_of
from dnis_torchrec.cli.settings import TrainCommand
from dnis_torchrec.data.task import Predictions
from dnis_torchrec.search.settings import SearchSettings

BCE = nn.BCEWithLogitsLoss()
ROWS, DIM, BATCH = 200, 16, 64


def make_batch(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    items = (ROWS ** torch.rand(BATCH, generator=draw)).long() - 1
    features = KeyedJaggedTensor(["item"], items, lengths=torch.ones(BATCH, dtype=torch.int64))
    return Batch(torch.rand(BATCH, 4, generator=draw), features, labels=(items % 2).float())


BATCHES = [make_batch(seed) for seed in range(6)]
HELD_OUT = [make_batch(seed) for seed in range(100, 104)]


def dlrm(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    table = EmbeddingBagConfig(ROWS, DIM, "item", feature_names=["item"], **options)
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
def predict(model: nn.Module, batch: Batch = BATCHES[0]) -> Tensor:
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


@pytest.mark.parametrize(("make", "assign"), [(dlrm, False), (Sequence, True)])
def test_a_state_dict_gives_a_twin_of_other_scales_the_same_predictions(
    make: Callable[[], nn.Module], assign: bool
) -> None:
    """Through files, too: tests/test_matrix.py."""
    one, other = compressed(make()), compressed(make(), factor=3.0)
    assert not torch.allclose(predict(one), predict(other))
    other.load_state_dict(one.state_dict(), assign=assign)
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


HALF = partial(dlrm, data_type=DataType.FP16, init_fn=nn.init.normal_)


@pytest.mark.parametrize(("make", "form"), [(dlrm, "mixed_dimension"), (Sequence, "packed"), (HALF, "packed")])
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


def test_an_artifact_says_what_its_rows_went_through(tmp_path: Path) -> None:
    """A refresh encodes rows of later training as these were: turned, then multiplied by the gain of their block."""
    model = dlrm()
    weight = model.sparse_arch.embedding_bag_collection.embedding_bags["item"].weight.detach().clone()
    result = dnis.compress(model, BATCHES, loss=BCE, compression=1.9, held_out=HELD_OUT)
    path, table = dnis.export(model, result.scheme, tmp_path / "artifact"), result.scheme.tables["item"]
    stored = read_scheme(path).tables["item"]
    blocks = table.routing.block_of(torch.arange(ROWS))
    expected = (weight @ stored.turn)[blocks < table.num_blocks]
    if stored.row_gain is not None:
        expected = expected * stored.row_gain[blocks[blocks < table.num_blocks]]
    values = exact_rows(path)["item"](0, ROWS)[blocks < table.num_blocks]
    torch.testing.assert_close(values, expected * (values != 0), atol=2e-3, rtol=0)
    assert not torch.allclose(stored.turn, torch.eye(DIM), atol=0.1)


def test_an_artifact_alone_says_that_ids_are_passed_on(tmp_path: Path) -> None:
    model = Sequence()
    scheme = dnis.compress(model, BATCHES, loss=BCE, compression=6).scheme
    assert dnis.load(dnis.export(model, scheme, tmp_path / "artifact")).need_indices()


def test_large_packed_tables_are_cut_into_files(tmp_path: Path) -> None:
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
    with pytest.raises(RuntimeError, match="got packed ones; compress the model that was trained"):
        compressed(model)


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
    task = DLRMTrain(dlrm())
    dnis.export(task, dnis.compress(task, BATCHES, loss=BCE).scheme, tmp_path / "task")
    with pytest.raises(ValueError, match=r"got \['model.sparse_arch.+TrainTask\(model, loss\), and serve its .model"):
        dnis.load_model(dlrm(), tmp_path / "task")
    assert predict(dnis.load_model(dnis.TrainTask(dlrm(1), BCE), tmp_path / "task").model).equal(predict(task.model))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dlrm()


class BesideLookups(Around):
    """A model that reads a table beside its lookups."""

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        weight = self.inner.sparse_arch.embedding_bag_collection.embedding_bags["item"].weight
        logits: Tensor = self.inner(dense_features, sparse_features)
        return logits.squeeze(1) + weight.square().mean()


class Tied(Around):
    """A model whose last layer has the table's own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(DIM, ROWS, bias=False)
        collection = self.inner.sparse_arch.embedding_bag_collection
        self.out.weight = collection.embedding_bags["item"].weight

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.inner(dense_features, sparse_features)
        return logits.squeeze(1) + self.out(dense_features.repeat(1, DIM // 4)).mean(1)


class OtherCall(Around):
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


def test_rows_that_grew_since_bits_were_allocated_are_not_packed() -> None:
    model = dlrm()
    scheme = measure_(model, BATCHES, loss=BCE).allocate(compression=6).scheme
    assert packed_collections(model, scheme)
    with torch.no_grad():
        model.sparse_arch.embedding_bag_collection.embedding_bags["item"].weight.mul_(2)
    with pytest.raises(ValueError, match="table 'item': expected values within"):
        packed_collections(model, scheme)


SIZE = 64


class Twins(nn.Module):
    """A bag and a sequence, each of which has a table "item"."""

    def __init__(self, rows: tuple[int, int] = (120, 90), kind: DataType = DataType.FP32) -> None:
        super().__init__()
        torch.manual_seed(0)
        bag = EmbeddingBagConfig(rows[0], 8, "item", kind, feature_names=["item"])
        row = EmbeddingConfig(rows[1], 8, "item", kind, feature_names=["seq"])
        self.bags, self.rows = EmbeddingBagCollection(tables=[bag]), EmbeddingCollection(tables=[row])
        self.out = nn.Linear(16, 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        bag, rows = self.bags(sparse_features).values(), self.rows(sparse_features)["seq"].values()
        logits: Tensor = self.out(torch.cat([bag, rows], 1))
        return logits.squeeze(1)


def twin_batch(seed: int) -> Batch:
    ids = torch.randint(0, 90, (2 * SIZE,), generator=torch.Generator().manual_seed(seed))
    features = KeyedJaggedTensor(["item", "seq"], ids, lengths=torch.ones(2 * SIZE, dtype=torch.int64))
    return Batch(torch.zeros(SIZE, 1), features, (ids[:SIZE] % 2).float())


PAIRS = [twin_batch(seed) for seed in range(4)]
SPLITS = dnis.DataSplits(train=PAIRS, validation=PAIRS[:2], selection=PAIRS[2:], test=PAIRS[3:])


def halves(data: Path | None, **_: Any) -> dnis.Recipe:
    return dnis.Recipe(model=Twins(kind=DataType.FP16), data=SPLITS, loss=BCE)


def table_names(model: Any) -> list[str]:
    return [config.name for config in [*model.bags.embedding_bag_configs(), *model.rows.embedding_configs()]]


@pytest.mark.parametrize("searched", [False, True])
def test_tables_of_one_name_in_two_collections_each_have_bits_of_their_own(searched: bool, tmp_path: Path) -> None:
    model = Twins()
    if searched:
        result = dnis.search(halves(None), 3, settings=SearchSettings(epochs=1, num_blocks=2))
        model, scheme = result.model, result.scheme
    else:
        scheme = dnis.compress(model, PAIRS, loss=BCE, compression=3, held_out=PAIRS[:2]).scheme
    assert list(scheme.tables) == ["item@bags", "item@rows"]
    assert [table.num_embeddings for table in scheme.tables.values()] == [120, 90]
    assert table_names(model) == table_names(Twins()) == ["item", "item"]
    dnis.export(model, scheme, tmp_path / "artifact")
    fresh = dnis.load_model(Twins(), tmp_path / "artifact")
    torch.testing.assert_close(predict(fresh, PAIRS[0]), predict(model, PAIRS[0]), rtol=0, atol=1e-6)


def test_what_fails_gives_tables_their_names_and_types_back() -> None:
    model = Twins(kind=DataType.FP16)
    kinds, expected = {n: w.dtype for n, w in model.state_dict().items()}, predict(model, PAIRS[0])
    with pytest.raises(ValueError, match="compression"):
        dnis.compress(model, PAIRS, loss=BCE, compression=1e6)
    assert {n: w.dtype for n, w in model.state_dict().items()} == kinds
    assert predict(model, PAIRS[0]).equal(expected)
    recipe = recipe_of(TrainCommand(recipe="tests.test_ways:halves", out=Path()), {})  # commands train in float32
    assert {weight.dtype for weight in recipe.model.parameters()} == {torch.float32}


def test_a_table_left_alone_is_named_as_in_its_collection() -> None:
    with pytest.raises(ValueError, match="a table beside those that are left alone, got all 2"):
        dnis.compress(Twins(), PAIRS, loss=BCE, compression=3, leave_alone=["item"])
    with pytest.raises(ValueError, match=r"leave less alone than \['item@rows'\]: 2,8\d\d of 6,720 bytes"):
        dnis.compress(Twins(), PAIRS, loss=BCE, compression=3, leave_alone=["item@rows"])
    result = dnis.compress(Twins(), PAIRS, loss=BCE, compression=1.2, leave_alone=["item@rows"])
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
    batches = [Batch(b.dense_features, b.sparse_features, b.sparse_features.values()[:SIZE] % 3) for b in PAIRS]
    result = dnis.compress(Classes(3), batches, loss=nn.CrossEntropyLoss(), compression=3, held_out=batches[:2])
    assert result.compression >= 3
    nobody = [Batch(b.dense_features, b.sparse_features, torch.full((SIZE,), -100)) for b in PAIRS]
    with pytest.raises(ValueError, match="expected a finite loss, got nan; leave such batches out"):
        dnis.compress(Classes(3), nobody, loss=nn.CrossEntropyLoss(), compression=3)


@dataclass
class ModelInput:
    ids: KeyedJaggedTensor


@pytest.mark.parametrize("batch", [ModelInput(PAIRS[0].sparse_features), {"ids": PAIRS[0].sparse_features}, (1, 2)])
def test_a_batch_of_another_kind_is_refused_with_what_to_do(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"dense_features, sparse_features and labels, got .*; .* docs/models.md"):
        dnis.compress(Twins(), [batch], loss=BCE)


def moved(features: KeyedJaggedTensor, offset: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), features.values() + offset, lengths=features.lengths())


class Offset(nn.Module):
    """A model that gives ids other rows before it looks them up."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.inner, self.offset = Twins((320, 320)), offset

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.inner(dense_features, moved(sparse_features, self.offset))
        return logits


def test_ids_that_a_model_offsets_are_counted_where_they_are_read() -> None:
    schemes = []
    for offset in (0, 30):
        batches = [Batch(b.dense_features, moved(b.sparse_features, 30 - offset), b.labels) for b in PAIRS]
        schemes.append(dnis.compress(Offset(offset), batches, loss=BCE, compression=3, held_out=batches[:2]).scheme)
    for name, table in schemes[0].tables.items():
        other = schemes[1].tables[name]
        assert table.routing.block_of(torch.arange(320)).equal(other.routing.block_of(torch.arange(320)))
        assert table.bits.equal(other.bits)


def test_batches_of_several_sizes_are_not_counted() -> None:
    features = KeyedJaggedTensor(
        ["item", "seq"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64), stride_per_key_per_rank=[[1], [2]]
    )
    with pytest.raises(NotImplementedError, match=r"batch 0: supported are batches of one size .*, got sizes \[1, 2\]"):
        dnis.count_frequencies([features], Twins().bags.embedding_bag_configs())
