"""Training in the scheme of an artifact equals dense tables that are masked to the blocks' columns."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.allocation.axes import LinearReader, RotationGroup
from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.artifact.load import read_scheme
from dnis_torchrec.artifact.narrow import narrow_for_training_, widened_, widened_state
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving import MixedDimensionEmbeddingBagCollection
from dnis_torchrec.training import checkpoint
from dnis_torchrec.training.weights import fill_state_
from tests.allocation import test_rotation as turning
from tests.models import shard_as
from tests.reference import Case, RowWiseAdagradByHand, cases, table_scheme

pytestmark = pytest.mark.usefixtures("gloo")

LOSS = nn.MSELoss()
NOTHING = torch.zeros(turning.BATCH_SIZE, 0)


def columns_by_hand(table: TableScheme) -> list[list[int]]:
    """The columns of every block: its own, then those of hotter blocks, then the first ones."""
    results = []
    for own in table.retained.tolist():
        columns = [c for c, keeps in enumerate(own) if keeps]
        width = max(8, len(columns))
        width = min(table.embedding_dim, width + -width % 4)
        for of_block in [*table.retained.tolist(), [True] * table.embedding_dim]:
            columns += [c for c, keeps in enumerate(of_block) if keeps and c not in columns]
        results.append(sorted(columns[:width]))
    return results


@st.composite
def wide_tables(draw: st.DrawFn) -> TableScheme:
    """A table of up to 24 columns: cases of tests.reference are narrower than eight."""
    case, dim = draw(cases()), draw(st.integers(1, 24))
    table = next(iter(case.scheme.tables.values()))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    retained = torch.rand(table.num_blocks, dim, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.6]))
    return table_scheme("t", table.routing, retained)


@given(wide_tables())
def test_columns_are_the_hottest_and_every_row_has_a_place(table: TableScheme) -> None:
    wide = table.for_training()
    assert [wide.columns(s).tolist() for s in range(table.num_blocks)] == columns_by_hand(table)
    last = table.num_blocks - 1
    assert wide.routing.all_blocks().tolist() == table.routing.all_blocks().clamp(max=last).tolist()
    assert wide.num_retained == wide.block_area
    assert bool((wide.retained >= table.retained).all())
    assert not wide.has_codes


def masks(scheme: MixedDimensionScheme) -> dict[str, Tensor]:
    """1 where a row of a table has a column, else 0."""
    tables = scheme.tables.items()
    return {name: t.retained[t.routing.all_blocks().clamp(max=t.num_blocks - 1)].float() for name, t in tables}


def pooled_by_hand(case: Case, weights: Mapping[str, Tensor]) -> Tensor:
    """Bags of dense tables, one after the other; torch has no mean of bags with weights."""
    outputs = []
    for name, table in case.scheme.tables.items():
        for feature in table.feature_names:
            for bag in case.bags[feature]:
                rows = torch.tensor([row for row, _ in bag], dtype=torch.int64)
                factors = torch.tensor([weight if table.is_weighted else 1.0 for _, weight in bag]).unsqueeze(1)
                length = max(1, len(bag)) if table.pooling == "mean" else 1
                outputs.append((weights[name][rows] * factors).sum(0) / length)
    size = len(next(iter(case.bags.values())))
    return torch.cat([torch.stack(outputs[first : first + size]) for first in range(0, len(outputs), size)], dim=1)


class MaskedRowWiseAdagrad(torch.optim.Optimizer):
    """One sum per row, of the mean square over the columns that the row has."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, mask: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": lr})
        self.mask = mask

    def step(self) -> None:
        """As `RowWiseAdagradByHand`."""
        for parameter, mask in zip(self.param_groups[0]["params"], self.mask, strict=True):
            sums = self.state[parameter].setdefault("sums", torch.zeros(len(parameter)))
            sums += parameter.grad.square().sum(1) / mask.sum(1)
            parameter.data -= 0.1 * parameter.grad / (sums.sqrt() + 1e-8).unsqueeze(1)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, mask: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters, mask: torch.optim.Adam(parameters, lr=0.1),
    "rows": lambda parameters, mask: (
        RowWiseAdagradByHand(parameters, lr=0.1) if mask is None else MaskedRowWiseAdagrad(parameters, 0.1, mask)
    ),
}


@settings(max_examples=25, deadline=None)
@given(cases(), st.sampled_from([*OPTIMIZERS]), st.sampled_from([1, 3, 8]))
def test_narrow_tables_learn_as_masked_ones(case: Case, name: str, least_dim: int) -> None:
    """The tables of the cases have nine columns at most, so that eight are nearly all of them."""
    tables = {n: t.for_training(least_dim=least_dim, dim_multiple=1) for n, t in case.scheme.tables.items()}
    scheme = MixedDimensionScheme(tables)
    mask = masks(scheme)
    values = {n: torch.randn(t.shape) * mask[n] for n, t in case.tables.items()}
    narrow = MixedDimensionEmbeddingBagCollection.from_tables(scheme, values)
    dense = {n: nn.Parameter(value.clone()) for n, value in values.items()}
    for n, weight in dense.items():  # the other values are zero, and stay so
        weight.register_hook(lambda gradient, n=n: gradient * mask[n])
    optimizers = [OPTIMIZERS[name]([*dense.values()], [mask[n] for n in dense])]
    optimizers.append(OPTIMIZERS[name]([*narrow.parameters()], None))
    kjt = case.kjt()
    for _ in range(4):
        outputs = [pooled_by_hand(case, dense), narrow(kjt).values()]
        torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)
        for optimizer, output in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad(set_to_none=False)
            (output - torch.linspace(-1, 1, output.shape[1])).square().mean().backward()
            optimizer.step()
    widened = narrow.widened()
    for n, bag in widened.embedding_bags.items():
        torch.testing.assert_close(bag.weight, dense[n], atol=1e-4, rtol=1e-4)


# From a run: `turning` has small models of every kind of reader.

NAMES = ["mf", "mlp", "neumf", "fm", "wide_deep", "deepfm"]


def stored(model: nn.Module, optimizer: object) -> dict[str, checkpoint.StoredTensor]:
    """A checkpoint of a model, as files give it."""
    results = {}
    for key, value in (checkpoint.model_tensors(model) | checkpoint.optimizer_tensors(model, optimizer)).items():
        chunks = [
            checkpoint.StoredChunk(c.offset, tuple(c.tensor.shape), lambda c=c: c.tensor) for c in value.copy().chunks
        ]
        results[key] = checkpoint.StoredTensor(key, value.size, tuple(chunks), "float32")
    return results


def batches_of(model: nn.Module) -> list[Batch]:
    labels = torch.linspace(-1, 1, turning.BATCH_SIZE)
    return [Batch(NOTHING, turning.features_of(model, seed), labels=labels) for seed in range(4)]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


class World:
    """A run of a plain model, an artifact of its state after two steps, and its state after three."""

    def __init__(self, name: str, folder: Path, make: Callable[..., torch.optim.Optimizer] = turning.sgd) -> None:
        self.name, self.make, self.artifact = name, make, folder / "artifact"
        self.plain = shard_as(turning.build(name), "data_parallel")
        self.kjt = turning.features_of(turning.build(name))
        self.optimizer = turning.optimizer_of(self.plain, make)
        turning.train(self.plain, self.optimizer, self.kjt, 2)
        copy = turning.build(name)
        copy.load_state_dict(self.plain.state_dict())
        result = dnis.compress(copy, batches_of(copy), loss=LOSS, compression=3)
        dnis.export(copy, result.scheme, self.artifact)
        turning.train(self.plain, self.optimizer, self.kjt, 1)
        self.state = stored(self.plain, self.optimizer)

    def narrow(
        self, state: Mapping[str, checkpoint.StoredTensor] | None = None, **options: object
    ) -> tuple[nn.Module, object]:
        """A sharded narrow model with the states of its optimizer."""
        state = self.state if state is None else state
        model, states = narrow_for_training_(turning.build(self.name), self.artifact, state, **options)
        return with_states(model, states, self.make, self.kjt)


def with_states(model: nn.Module, states: dict[str, Tensor], make: object, kjt: object) -> tuple[nn.Module, object]:
    sharded = shard_as(model, "data_parallel")
    optimizer = turning.optimizer_of(sharded, make)
    values = checkpoint.snapshot(sharded)
    turning.train(sharded, optimizer, kjt, 1)
    checkpoint.take_(sharded, values)
    fill_state_(sharded, optimizer, states)
    return sharded, optimizer


def carry(model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Tensor]) -> None:
    """Gives a model's optimizers their states, which a step makes."""
    values = checkpoint.snapshot(model)
    train(model, optimizer, 1, ROWS)
    checkpoint.take_(model, values)
    fill_state_(model, optimizer, states)


@pytest.mark.parametrize("name", NAMES)
def test_whole_columns_go_on_as_the_run_would(name: str, tmp_path: Path) -> None:
    """Tables of eight columns lose none; SGD with momentum does not notice that they have turned."""
    world = World(name, tmp_path)
    model, optimizer = world.narrow()
    expected = world.plain(NOTHING, world.kjt).detach()
    torch.testing.assert_close(model(NOTHING, world.kjt).detach(), expected, atol=1e-5, rtol=1e-5)
    assert any(isinstance(module, MixedDimensionEmbeddingBagCollection) for module in model.modules())
    if name == "neumf":  # steps of tables that were multiplied by the weights of a product are others
        return
    turning.train(world.plain, world.optimizer, world.kjt, 3)
    turning.train(model, optimizer, world.kjt, 3)
    after = world.plain(NOTHING, world.kjt).detach()
    assert not torch.allclose(after, expected, atol=1e-3)
    torch.testing.assert_close(model(NOTHING, world.kjt).detach(), after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["fm", "neumf"])
def test_states_turn_as_gradients_do(name: str, tmp_path: Path) -> None:
    world = World(name, tmp_path, adam)
    model, optimizer = world.narrow()
    scheme = read_scheme(world.artifact)
    after = widened_state(scheme.for_training(), stored(model, optimizer))
    assert after.keys() == {key for key in world.state if not key.startswith("rank")}
    turns = {table: turn.double() for table, t in scheme.tables.items() if (turn := t.turn) is not None}
    assert turns
    for table, turn in turns.items():
        if name == "neumf" and table.startswith("gmf"):
            continue  # the product was trained since
        (key,) = (key for key in world.state if f".{table}.weight/exp_avg" in key and key.endswith("exp_avg"))
        value = world.state[key].whole().double()
        torch.testing.assert_close(after[key], (value @ turn).float(), atol=1e-6, rtol=1e-4)
        squares = world.state[f"{key}_sq"].whole().double() @ turn.square()
        torch.testing.assert_close(after[f"{key}_sq"], squares.float(), atol=1e-6, rtol=1e-4)
        step = key.removesuffix("exp_avg") + "step"
        assert float(after[step]) == float(world.state[step].whole())


def test_states_of_scaled_tables_shrink_as_their_gradients(tmp_path: Path) -> None:
    """Rows of a product's tables are multiplied by a factor, so that gradients are divided by it."""
    world = World("neumf", tmp_path, adam)
    _, states = narrow_for_training_(turning.build("neumf"), world.artifact, world.state)
    scheme = read_scheme(world.artifact)
    table = scheme.tables["gmf_movie"]
    (key,) = (key for key in world.state if ".gmf_movie.weight/exp_avg" in key and key.endswith("exp_avg"))
    value = world.state[key].whole().double()
    weight = world.state["model/over.weight"].whole()[0, : table.embedding_dim].double()
    lengths = table.turn.double().norm(dim=1, keepdim=True)
    expected = (value / weight.abs().sqrt()) @ (table.turn.double() / lengths)
    # a product's weights become 1: what gradients of theirs point to is anybody's guess
    assert not bool(states["optimizer/over.weight/exp_avg"][:, : table.embedding_dim].any())
    parts = {s: states[f"optimizer/{block_key(table, s)}/exp_avg"] for s in table.for_training().stored_blocks()}
    blocks = table.for_training().routing.all_blocks()
    for s, part in parts.items():
        torch.testing.assert_close(part, expected[blocks == s].float(), atol=1e-6, rtol=1e-3)


def block_key(table: TableScheme, s: int) -> str:
    return f"{table.collection}.blocks.embedding_bags.{table.name}/b{s}.weight"


# From an artifact: wide tables, of which blocks have some columns.

ROWS = 900
TABLE = EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=24, feature_names=["item"])
OTHER = EmbeddingBagConfig(name="user", num_embeddings=200, embedding_dim=24, feature_names=["user"])


class Pair(nn.Module):
    """Two tables under a dot product and a linear layer beside it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.collection = EmbeddingBagCollection(tables=[TABLE, OTHER])
        for bag in self.collection.embedding_bags.values():
            nn.init.normal_(bag.weight)
            bag.weight.data *= torch.logspace(0, -2, 24)
        self.head = nn.Linear(24, 1)

    def forward(self, dense_features: Tensor, sparse_features: object) -> Tensor:
        """A logit per sample."""
        first, second = self.collection(sparse_features).to_dict().values()
        return self.head(first).squeeze(1) + (first * second).sum(1)

    def rotation_groups(self) -> list[RotationGroup]:
        """Both turn together, and the layer along."""
        return [RotationGroup(tables=("item", "user"), along=(LinearReader(weight=self.head.weight),))]


def skewed(seed: int, most: int = ROWS - 300) -> Batch:
    """Some items are read often, the last ten never."""
    draw = torch.Generator().manual_seed(seed)
    items = (most ** torch.rand(512, generator=draw)).long() - 1
    users = torch.randint(0, 200, (512,), generator=draw)
    features = bags_of({"item": items, "user": users})
    return Batch(torch.zeros(512, 0), features, labels=(items % 2).float())


def bags_of(ids: Mapping[str, Tensor]) -> object:
    lengths = torch.ones(sum(map(len, ids.values())), dtype=torch.int64)
    return KeyedJaggedTensor(list(ids), torch.cat([*ids.values()]), lengths=lengths)


BATCHES = [skewed(seed) for seed in range(6)]
BCE = nn.BCEWithLogitsLoss()


def predict(model: nn.Module, batch: Batch = BATCHES[0]) -> Tensor:
    logits: Tensor = model(batch.dense_features, batch.sparse_features).detach()
    return logits


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, most: int = ROWS - 300) -> None:
    for step in range(steps):
        batch = skewed(100 + step, most)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(batch.dense_features, batch.sparse_features), batch.labels).backward()
        optimizer.step()


def write(model: nn.Module, path: Path, compression: float = 12) -> Path:
    result = dnis.compress(model, BATCHES, loss=BCE, compression=compression)
    return dnis.export(model, result.scheme, path)


def test_the_first_predictions_are_those_of_the_artifact(tmp_path: Path) -> None:
    artifact = write(Pair(), tmp_path / "artifact")
    model, states = narrow_for_training_(Pair(1), artifact)
    assert states == {}
    torch.testing.assert_close(predict(model), predict(dnis.load_model(Pair(2), artifact)), atol=1e-6, rtol=1e-6)
    scheme = read_scheme(artifact).for_training()
    narrow = model.collection
    assert 0.2 < sum(p.numel() for p in narrow.parameters()) / scheme.dense_parameters < 0.8
    # rows that the artifact stores nothing of have columns, and learn
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not bool(narrow.widened().embedding_bags["item"].weight[-250:].any())
    train(model, optimizer, 9, ROWS)
    learnt = (narrow.widened().embedding_bags["item"].weight[-250:] != 0).sum(1)
    assert sorted(learnt.unique().tolist()) == [0, 8]


def test_rows_of_no_block_begin_as_those_of_torchrec(tmp_path: Path) -> None:
    routing = RowRouting(ROWS, 1, boundaries=torch.tensor([0, 100]))
    options = {"collection": "collection", "feature_names": ("item",)}
    item = table_scheme("item", routing, torch.ones(1, 24, dtype=torch.bool), **options)
    user = RowRouting(200, 1, boundaries=torch.tensor([0, 200]))
    options["feature_names"] = ("user",)
    scheme = MixedDimensionScheme(
        {"item": item, "user": table_scheme("user", user, torch.ones(1, 24, dtype=torch.bool), **options)}
    )
    tables = {name: bag.weight.detach() for name, bag in Pair().collection.embedding_bags.items()}
    tables["item"][100:] = 0
    write_artifact(tables, scheme, tmp_path / "artifact", dense_state=Pair().head.state_dict(prefix="head."))
    model, _ = narrow_for_training_(Pair(1), tmp_path / "artifact")
    weight = model.collection.widened().embedding_bags["item"].weight.detach()
    assert weight[:100].equal(tables["item"][:100])
    assert bool((weight[100:] != 0).all())
    assert float(weight[100:].abs().max()) <= ROWS**-0.5


def test_rows_move_to_the_width_of_their_count_and_keep_what_they_learnt(tmp_path: Path) -> None:
    """Two refreshes: of the second artifact rows have other widths, and stand in other axes."""
    first = write(Pair(), tmp_path / "first")
    model, _ = narrow_for_training_(Pair(1), first)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, optimizer, 5)
    state = stored(model, optimizer)
    wide = widened_state(read_scheme(first).for_training(), state)
    widened = widened_(model)
    assert widened.collection.embedding_bags["item"].weight.equal(wide["table/item"])
    before = predict(widened)
    second = write(widened, tmp_path / "second", compression=6)
    tables = read_scheme(second).tables
    assert not tables["item"].retained.equal(read_scheme(first).tables["item"].retained)
    again, states = narrow_for_training_(Pair(2), second, of_tensors(wide))
    mask = masks(read_scheme(second).for_training())
    values = widened_state(read_scheme(second).for_training(), of_tensors(states))
    for name, table in tables.items():
        turn = table.turn.double()
        weight = again.collection.widened().embedding_bags[name].weight.detach()
        torch.testing.assert_close(weight, (wide[f"table/{name}"].double() @ turn).float() * mask[name])
        key = f"optimizer/collection.embedding_bags.{name}.weight/exp_avg"
        torch.testing.assert_close(values[key], (wide[key].double() @ turn).float() * mask[name])
    assert float((predict(again) - before).abs().max()) < 0.2 * float(before.abs().max())


def test_a_state_in_the_axes_of_the_artifact_is_not_turned(tmp_path: Path) -> None:
    artifact = write(Pair(), tmp_path / "artifact")
    model, _ = narrow_for_training_(Pair(1), artifact)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, optimizer, 3)
    wide = widened_state(read_scheme(artifact).for_training(), stored(model, optimizer))
    again, states = narrow_for_training_(Pair(2), artifact, of_tensors(wide), is_turned=True)
    assert predict(again).equal(predict(model))
    expected = {key: part.whole() for key, part in stored(model, optimizer).items() if key.startswith("optimizer/")}
    assert states.keys() == expected.keys()
    assert [key for key in states if not states[key].equal(expected[key])] == []


def of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, checkpoint.StoredTensor]:
    return {key: checkpoint.StoredTensor.of(key, value) for key, value in tensors.items()}


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "data_parallel"])
def test_row_wise_states_go_along_under_every_sharding_type(sharding_type: str, tmp_path: Path) -> None:
    """Steps of FBGEMM's row-wise Adagrad, then all is widened and narrowed again: they go on as if nothing was."""
    artifact = write(Pair(), tmp_path / "artifact")
    model = shard_as(narrow_for_training_(Pair(1), artifact)[0], sharding_type, fused=RowWiseAdagrad)
    optimizer = turning.optimizer_of(model, turning.sgd)
    train(model, optimizer, 3, ROWS)
    wide = widened_state(read_scheme(artifact).for_training(), stored(model, optimizer))
    if sharding_type != "data_parallel":
        assert wide["fused/item/momentum1"].shape == (ROWS,)
        table = read_scheme(artifact).for_training().tables["item"]
        sums = stored(model, optimizer)["fused/item/b0/momentum1"].whole().view(-1, int(table.routing.row_counts()[0]))
        assert (len(sums) > 1) == (sharding_type == "column_wise")
        first_block = table.routing.all_blocks() == 0
        torch.testing.assert_close(wide["fused/item/momentum1"][first_block], sums.mean(0))
    again, states = narrow_for_training_(Pair(2), artifact, of_tensors(wide), is_turned=True)
    again = shard_as(again, sharding_type, fused=RowWiseAdagrad)
    twin = turning.optimizer_of(again, turning.sgd)
    carry(again, twin, states)
    widened = widened_state(read_scheme(artifact).for_training(), stored(again, twin))
    assert predict(again).equal(predict(model))
    assert [key for key in wide if not widened[key].equal(wide[key])] == []
    if sharding_type == "column_wise":
        return  # each shard of columns has sums of its own, and gets their mean
    for one, of_one in ((model, optimizer), (again, twin)):
        train(one, of_one, 3, ROWS)
    torch.testing.assert_close(predict(again), predict(model), atol=1e-6, rtol=1e-6)


def test_compress_and_evaluate_take_narrow_tables(tmp_path: Path) -> None:
    artifact = write(Pair(), tmp_path / "artifact")
    narrow = shard_as(narrow_for_training_(Pair(1), artifact)[0], "table_wise")
    plain = widened_(shard_as(narrow_for_training_(Pair(1), artifact)[0], "table_wise"))
    assert type(plain.collection) is EmbeddingBagCollection
    assert widened_(plain) is plain
    measurement = measure_(narrow_for_training_(Pair(1), artifact)[0], BATCHES, loss=BCE)
    assert [*measurement.allocate(compression=6).scheme.tables] == ["item", "user"]
    results = [dnis.compress(model, BATCHES, loss=BCE, compression=12) for model in (narrow, plain)]
    torch.testing.assert_close(predict(narrow), predict(plain), atol=1e-3, rtol=1e-3)
    assert results[0].num_bytes == pytest.approx(results[1].num_bytes, rel=0.05)


class Unpooled(nn.Module):
    """A model of an EmbeddingCollection."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item", num_embeddings=ROWS, embedding_dim=24, feature_names=["item"])
        self.collection = EmbeddingCollection(tables=[table])

    def forward(self, dense_features: Tensor, sparse_features: object) -> Tensor:
        return self.collection(sparse_features)["item"].values().sum(1)


def test_what_does_not_fit_is_refused_and_says_why(tmp_path: Path) -> None:
    artifact = write(Pair(), tmp_path / "artifact")
    unpooled = Unpooled()
    sequences = dnis.export(unpooled, dnis.compress(unpooled, BATCHES, loss=BCE, compression=6).scheme, tmp_path / "s")
    with pytest.raises(NotImplementedError, match="FQN 'collection': supported to train narrow are plain"):
        narrow_for_training_(Unpooled(), sequences)
    with pytest.raises(ValueError, match="model: expected an embedding collection"):
        narrow_for_training_(nn.Linear(2, 2), artifact)
    state = of_tensors({f"model/{name}": value for name, value in Pair().head.state_dict(prefix="head.").items()})
    with pytest.raises(ValueError, match="table/item: expected shape .*, got no rows"):
        narrow_for_training_(Pair(), artifact, state)
    state["table/item"] = checkpoint.StoredTensor.of("", torch.zeros(ROWS + 1, 24))
    with pytest.raises(ValueError, match=r"table/item: expected shape \(900, 24\), got \(901, 24\)"):
        narrow_for_training_(Pair(), artifact, state)
    with pytest.raises(ValueError, match="dense weights"):
        narrow_for_training_(Pair(), artifact, {})
    model, _ = narrow_for_training_(Pair(1), artifact)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with pytest.raises(ValueError, match="expected shape .* got none"):
        fill_state_(model, optimizer, {"optimizer/head.weight/exp_avg": torch.zeros(1, 24)})
