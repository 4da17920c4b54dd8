"""A trained model compressed in place, the sample of rows behind it, and gains of held-out samples beside an oracle."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import functional_call
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec import scheme
from dnis_torchrec.allocation import compress as compressing
from dnis_torchrec.allocation import energies as row_sample
from dnis_torchrec.allocation import gains as gains_module
from dnis_torchrec.allocation.axes import LinearReader, RotationGroup
from dnis_torchrec.allocation.compress import Measured, measure_, packed_collections
from dnis_torchrec.allocation.contributions import watched_collection
from dnis_torchrec.allocation.energies import UNSEEN_WEIGHT, rounding_energies, sample_rows, whole_rows
from dnis_torchrec.allocation.gains import ENOUGH_NATS, Gains, _Layout, _Problem, output_bias
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.codes import ColumnCodes, decode_rows, encode_rows, feedback_of, is_coded
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import TableShard, collections
from dnis_torchrec.serving import PackedEmbeddingBagCollection
from dnis_torchrec.training.rounded import RoundedTables
from tests import models
from tests.allocation.test_curvature import CASES as CURVATURE_CASES
from tests.allocation.test_curvature import Case, make_batch, make_batches, make_blocks, make_model
from tests.models import interest, nearest_codes
from tests.reference import rounding_error_reference

ROWS = {"user": (60, 8), "genre": (30, 8), "bias": (60, 1), "one": (1, 4), "unread": (20, 4)}
"""Table -> N and D; each is read by a feature of its name, the last one by none that a batch fills."""
UNSEEN = 50
"""Users from here on are in no batch."""


class Model(nn.Module):
    """Two collections, of which one pools by MEAN: a dot product of two tables, what a linear layer reads, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = EmbeddingBagCollection(tables=[table("user"), table("genre", PoolingType.MEAN)])
        self.rest = EmbeddingBagCollection(tables=[table(name) for name in ("bias", "one", "unread")])
        self.reader = nn.Linear(8, 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        pairs, rest = self.pairs(sparse_features), self.rest(sparse_features).values()
        user, genre = pairs["user"], pairs["genre"]
        return (user * genre).sum(1) + self.reader(user).squeeze(1) + rest.sum(1) + dense_features.sum(1)

    def rotation_groups(self) -> list[RotationGroup]:
        return [RotationGroup(tables=("user", "genre"), readers={"user": (LinearReader(weight=self.reader.weight),)})]


class WronglyTurned(Model):
    """Says that nothing reads its users but the dot product."""

    def rotation_groups(self) -> list[RotationGroup]:
        return [RotationGroup(tables=("user", "genre"))]


def table(name: str, pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagConfig:
    rows, dim = ROWS[name]
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name], pooling=pooling)


def batch(seed: int, size: int = 64, *, with_genre: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, UNSEEN, (size,), generator=generator) % torch.randint(
        1, UNSEEN, (size,), generator=generator
    )
    lengths = torch.randint(0, 3 if with_genre else 1, (size,), generator=generator)
    genres = torch.randint(0, ROWS["genre"][0], (int(lengths.sum()),), generator=generator)
    one, none = torch.ones(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    features = KeyedJaggedTensor(
        keys=["user", "genre", "bias", "one", "unread"],
        values=torch.cat([ids, genres, ids, none]),
        lengths=torch.cat([one, lengths, one, one, none]),
    )
    return Batch(torch.rand(size, 2, generator=generator), features, torch.randn(size, generator=generator))


BATCHES = [batch(seed) for seed in range(4)]


def trained(kind: Callable[[], Model] = Model) -> Model:
    """A model, the same every time, whose labels are near its predictions."""
    torch.manual_seed(0)
    model = kind()
    for collection in (model.pairs, model.rest):
        for bag in collection.embedding_bags.values():
            nn.init.normal_(bag.weight, std=0.7)
    return model


def label_(batches: list[Batch]) -> None:
    """With what the model says, and noise."""
    model = trained()
    for index, own in enumerate(batches):
        noise = torch.randn(len(own.labels), generator=torch.Generator().manual_seed(index))
        with torch.no_grad():
            own.labels = model(own.dense_features, own.sparse_features) + 0.1 * noise


@pytest.fixture(autouse=True)
def labels() -> None:
    label_(BATCHES)


@cache
def measured_on_training_samples() -> Measured:
    """A model and what its columns are worth; no test changes it."""
    return measure_(trained(), BATCHES, loss=nn.MSELoss())


def rounded(model: nn.Module, measured: Measured, compression: float) -> nn.Module:
    """The plain model with every table's nearest codes in it, and its output bias as they want it."""
    found, model = measured.allocate(compression=compression), copy.deepcopy(model)
    if measured.sample.bias is not None:
        measured.sample.bias.shift_(model, found.output_shift)
    for name, parameter in model.named_parameters():
        if ".embedding_bags." in name:
            parameter.data.copy_(nearest_codes(found.scheme.tables[name.split(".")[-2]], parameter.detach()))
    return model


def predictions(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(own.dense_features, own.sparse_features) for own in BATCHES])


def test_an_allocation_says_the_bytes_of_what_a_compressed_model_holds() -> None:
    model = trained()
    found = dnis.compress(model, BATCHES, loss=nn.MSELoss(), compression=5)
    assert isinstance(model.pairs, PackedEmbeddingBagCollection)
    assert isinstance(model.rest, PackedEmbeddingBagCollection)
    assert found.num_bytes == model.pairs.table_bytes() + model.rest.table_bytes()
    assert found.compression == pytest.approx(4 * sum(n * d for n, d in ROWS.values()) / found.num_bytes)
    assert found.compression >= 5
    assert repr(found).startswith("Allocation(compression 5.")
    assert [line.split(":")[0].strip() for line in str(found).splitlines()[1:]] == list(ROWS)


def test_several_sizes_share_what_was_measured_and_the_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained()
    before = predictions(model)
    measured = measure_(model, BATCHES, loss=nn.MSELoss())
    torch.testing.assert_close(predictions(model), before, rtol=1e-5, atol=1e-5)
    increases = []
    for compression, step in ((3, 4096), (4, 1), (6, 7)):
        monkeypatch.setattr(compressing, "rows_per_chunk", lambda _, step=step: step)
        state = copy.deepcopy(model.state_dict())
        found = measured.allocate(compression=compression)
        served = copy.copy(model)
        served._modules = dict(model._modules) | packed_collections(model, found.scheme)
        oracle = rounded(model, measured, compression)
        with measured.shifted(found):
            torch.testing.assert_close(predictions(served), predictions(oracle), rtol=1e-5, atol=1e-5)
        assert all(value.equal(state[name]) for name, value in model.state_dict().items())
        increases.append(found.predicted_loss_increase)
    assert increases == sorted(increases)


def test_every_row_has_a_block_and_counts_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressing, "blocks_over_ranks", partial(compressing.blocks_over_ranks, least_rows=1))
    counted = measure_(trained(), BATCHES, loss=nn.MSELoss())
    given = measure_(trained(), BATCHES, loss=nn.MSELoss(), counts=counted.counts)
    for name, (rows, _) in ROWS.items():
        routing = counted.blocks.routings[name]
        assert (routing.num_blocks, int(routing.row_counts().sum())) == (min(8, rows), rows)
        assert counted.curvature.curvature[name].equal(given.curvature.curvature[name])
    unseen = counted.blocks.routings["user"].block_of(torch.arange(UNSEEN, ROWS["user"][0]))
    assert set(unseen.tolist()) <= {6, 7}  # the rarest


def test_what_no_batch_reads_is_dropped_and_what_the_sample_missed_is_not() -> None:
    batches = [batch(9, with_genre=False), *BATCHES]
    batches[0].labels = BATCHES[0].labels
    found = measure_(trained(), batches, loss=nn.MSELoss(), num_samples=1)
    assert found.curvature.num_samples == 64 * 4 < 64 * len(batches)
    assert bool(found.curvature.curvature["genre"].any())
    scheme = found.allocate(compression=3.5).scheme
    assert not bool(scheme.tables["unread"].bits.any())
    assert bool(scheme.tables["genre"].bits.any())


def with_nan(model: Model) -> None:
    model.pairs.embedding_bags["genre"].weight.data[7, 2] = float("nan")


def unlabelled(labels: Tensor | None, place: int = 0) -> list[Batch]:
    own = [copy.copy(each) for each in BATCHES]
    own[place].labels = labels
    return own


def compressed_before(model: Model) -> None:
    dnis.compress(model, BATCHES, loss=nn.MSELoss(), compression=4)


@pytest.mark.parametrize(
    ("change", "batches", "error", "place"),
    [
        (with_nan, lambda: BATCHES, ValueError, "table 'genre'.* row 7"),
        (None, lambda: iter(BATCHES), ValueError, "batches"),
        *(
            (None, partial(unlabelled, labels, place), ValueError, f"batch {place}, labels")
            for labels, place in ((torch.zeros(0), 0), (None, 0), (torch.tensor(1.0), 2))
        ),
        (None, list, ValueError, "batches"),
        (compressed_before, lambda: BATCHES, RuntimeError, "FQN 'pairs'"),
    ],
)
def test_bad_input_is_refused_by_name(
    change: Callable[[Model], None] | None, batches: Callable[[], list[Batch]], error: type[Exception], place: str
) -> None:
    model = trained()
    if change is not None:
        change(model)
    kind = type(model.pairs)
    with pytest.raises(error, match=f"^{place}"):
        dnis.compress(model, batches(), loss=nn.MSELoss())
    assert type(model.pairs) is kind


def test_axes_that_change_predictions_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"^rotation: expected predictions to stay within .*rotation_groups"):
        measure_(trained(WronglyTurned), BATCHES, loss=nn.MSELoss())


def _skewed(rows: int) -> torch.Tensor:
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    return (50_000 / torch.arange(1, rows + 1) ** 1.1).long()[order]


def _routing(rows: int, num_blocks: int) -> RowRouting:
    drawn = torch.randint(0, num_blocks + 1, (rows,), generator=torch.Generator().manual_seed(2))
    return RowRouting.from_map(drawn, num_blocks)


@pytest.mark.parametrize("at_a_time", [5000, 701])
@pytest.mark.parametrize("rows_per_block", [1, 7, 200, 2000])
def test_weights_add_up_to_the_look_ups_of_each_block(monkeypatch, rows_per_block: int, at_a_time: int) -> None:
    monkeypatch.setattr(row_sample, "ROWS_AT_A_TIME", at_a_time)
    counts, routing = _skewed(5000), _routing(5000, 3)
    sample = sample_rows(counts, routing, rows_per_block)
    assert bool((sample.rows.diff() > 0).all())
    assert torch.equal(routing.block_of(sample.rows), sample.blocks)
    for block in range(3):
        all_weights = counts[routing.all_blocks() == block].double().clamp(min=UNSEEN_WEIGHT)
        own = sample.weights[sample.blocks == block]
        assert max(1, min(rows_per_block, len(all_weights)) - 2) <= len(own) <= rows_per_block
        lightest = float(own.min())
        assert float(own.sum()) == pytest.approx(float(all_weights.sum()), abs=2 * lightest)


def test_sums_over_a_sample_estimate_those_over_all_rows() -> None:
    counts, routing = _skewed(20_000), _routing(20_000, 2)
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(3)).square()
    sample = sample_rows(counts, routing, 2000)
    for block in range(2):
        mine, own = routing.all_blocks() == block, sample.blocks == block
        expected = (values * counts.double().clamp(min=UNSEEN_WEIGHT))[mine].sum()
        found = (values[sample.rows] * sample.weights)[own].sum()
        assert float(found / expected) == pytest.approx(1, abs=0.05)


def test_energies_are_those_of_the_blocks_rows_by_their_look_ups() -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=60, embedding_dim=3, feature_names=["f"])
    torch.manual_seed(0)
    collection, counts = EmbeddingBagCollection(tables=[config]), FrequencyCounts({"t": _skewed(60)}, {"f": 1}, 1000)
    blocks = blocks_from_counts(counts, [config], num_blocks=2, least_rows=1)
    energies = rounding_energies(collection, blocks, counts, bits=[3, 32])
    assert energies.bits == (0, 3, 32)
    found, of_row = energies.tables["t"], blocks.routings["t"].all_blocks()
    weight = collection.embedding_bags["t"].weight.detach()
    for block in range(2):
        mine = of_row == block
        weights = counts.counts["t"][mine].double().clamp(min=UNSEEN_WEIGHT).tolist()
        for column in range(3):
            scale, shift = float(found.scale[block, column, 1]), int(found.shift[block, column, 1])
            expected = rounding_error_reference(weight[mine, column].tolist(), weights, scale, shift, 3)
            assert float(found.energy[block, column, 1]) == pytest.approx(expected, rel=1e-6)
    assert found.energy[..., 0].unique().tolist() == [1.0]
    assert found.energy[..., 2].unique().tolist() == [0.0]


@st.composite
def grids(draw: st.DrawFn) -> tuple[torch.Tensor, list[TableShard]]:
    """A table, and it once more cut into shards of rows and of columns."""
    num_rows, dim = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    table = torch.arange(num_rows * dim, dtype=torch.float32).reshape(num_rows, dim)
    row_cuts = sorted({0, num_rows, *draw(st.lists(st.integers(0, num_rows), max_size=3))})
    column_cuts = sorted({0, dim, *draw(st.lists(st.integers(0, dim), max_size=2))})
    shards = [
        TableShard("t", table[first:last, left:right].clone(), first, left)
        for first, last in itertools.pairwise(row_cuts)
        for left, right in itertools.pairwise(column_cuts)
    ]
    return table, draw(st.permutations(shards))


@given(grids(), st.integers(1, 20))
def test_rows_are_read_once_and_written_back_where_they_lie(
    drawn: tuple[torch.Tensor, list[TableShard]], values_per_chunk: int
) -> None:
    table, shards = drawn
    others = [TableShard("other", torch.ones(2, 3))]
    rows = whole_rows([*shards, *others], {"t": (table.shape[0], table.shape[1])}, Ranks())["t"]
    seen = torch.zeros_like(table)
    with mock.patch.object(scheme, "VALUES_PER_CHUNK", values_per_chunk):
        for chunk in rows.chunks():
            seen[chunk.rows] += chunk.values.float()
            chunk.write_(chunk.values * 2 + 1)
    assert rows.is_cut == any(shard.weight.shape[1] < table.shape[1] for shard in shards)
    assert torch.equal(seen, table)
    for shard in shards:
        columns = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
        expected = table[shard.first_row : shard.first_row + shard.weight.shape[0], columns] * 2 + 1
        assert torch.equal(shard.weight, expected)


class OtherHoldsColumns(Ranks):
    """Two ranks, of which the other holds a whole table of 4 x 2, in two shards of a column each."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(values)

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        return values.add_(8)


def test_a_rank_without_a_shard_walks_through_a_cut_table_too() -> None:
    """The others would wait for it."""
    rows = whole_rows([], {"t": (4, 2)}, OtherHoldsColumns())["t"]
    assert (rows.is_cut, rows.copies) == (True, 2)
    assert [chunk.rows for chunk in rows.chunks()] == [slice(0, 4)]


MSE, BCE = nn.MSELoss(), nn.BCEWithLogitsLoss()
PHI = 0.8
TRAIN, HELD_OUT = BATCHES[:2], [batch(seed, 512) for seed in (10, 11)]


@pytest.fixture(autouse=True)
def held_out_labels(labels: None) -> None:
    """Held-out samples want users to count less than they do in the model."""
    model = trained()
    model.pairs.embedding_bags.user.weight.data.mul_(0.8)
    for own in HELD_OUT:
        with torch.no_grad():
            own.labels = model(own.dense_features, own.sparse_features)


@cache
def measured(*, learns: bool = True, leave_alone: tuple[str, ...] = ()) -> Measured:
    """On the training samples; scales learn on those that are held out. No test changes it."""
    return measure_(trained(), TRAIN, loss=MSE, held_out=HELD_OUT if learns else None, leave_alone=leave_alone)


@given(st.integers(0, 2**31), st.booleans(), st.booleans())
def test_a_gain_leaves_every_code_as_it_was(seed: int, has_feedback: bool, twice: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 5)
    bits = torch.tensor([0, 1, 2, 4, 8, 32])[torch.randint(6, shape, generator=generator)].byte()
    scale = torch.where(is_coded(bits), torch.rand(shape, generator=generator) + 0.01, 1.0).bfloat16().float()
    shift = torch.where(is_coded(bits), torch.randint(-9, 9, shape, generator=generator), 0).short()
    noise = torch.randn(3, 5, 5, dtype=torch.float64, generator=generator)
    feedback = feedback_of(noise @ noise.transpose(1, 2), bits) if has_feedback else None
    codes = ColumnCodes(bits, scale, shift, feedback)
    rows, blocks = torch.randn(40, 5, generator=generator), torch.randint(4, (40,), generator=generator)
    gains = [0.7 + torch.rand(shape, generator=generator) for _ in range(1 + twice)]
    learnt = codes
    for gain in gains:
        learnt = learnt.with_gain(gain)
    encoded, again = (encode_rows(rows, blocks, own) for own in (codes, learnt))
    of_codes = torch.cat([is_coded(bits), torch.ones(1, 5).bool()])[blocks]
    assert again[of_codes].equal(encoded[of_codes])  # float32 columns take up errors in another last bit
    ratio = torch.where(is_coded(bits), learnt.scale / scale, 1.0)
    wanted = decode_rows(encoded, blocks, codes) * torch.cat([ratio, torch.ones(1, 5)])[blocks]
    torch.testing.assert_close(decode_rows(again, blocks, learnt), wanted)
    product = torch.stack(gains).prod(0)
    torch.testing.assert_close(ratio, torch.where(is_coded(bits), product, 1.0), rtol=0.02, atol=0)


def outputs(model: nn.Module, batches: list[Batch]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(own.dense_features, own.sparse_features) for own in batches])


def losses(predicted: Tensor, batches: list[Batch]) -> Tensor:
    return (predicted - torch.cat([own.labels for own in batches])).square()


def loss_with(
    model: nn.Module, blocks: RowBlocks, alpha: dict[str, Tensor], shift: float, batches: list[Batch]
) -> float:
    """The naive way: whole tables are multiplied by alpha of their rows, and the model is called."""
    model = copy.deepcopy(model).eval()
    for collection in collections(model).values():
        for name, bag in tables_of(collection).items():
            bag.weight.data.copy_(bag.weight * alpha[name].to(bag.weight)[blocks.routings[name].all_blocks()])
    with torch.no_grad():
        z = [model(own.dense_features, own.sparse_features).double() + shift for own in batches]
    return float(BCE(torch.cat(z), torch.cat([own.labels for own in batches]).double()))


def tables_of(collection: nn.Module) -> dict[str, nn.Module]:
    return dict(getattr(collection, "embedding_bags", None) or collection.embeddings)


def problem_of(model: nn.Module, blocks: RowBlocks, batches: list[Batch], *, moves_shift: bool = True) -> _Problem:
    dims = {name: bag for own in collections(model).values() for name, bag in tables_of(own).items()}
    layout = _Layout(
        {name: torch.ones(blocks.routings[name].num_blocks, bag.weight.shape[1]).bool() for name, bag in dims.items()}
    )
    of = [watched_collection(own, blocks, torch.device("cpu")) for own in collections(model).values()]
    samples = [(own, f"batch {index}") for index, own in enumerate(batches)]
    return _Problem(model.eval(), BCE, of, samples, Ranks(), layout=layout, phi=PHI, moves_shift=moves_shift)


ASSIGNED = [name for name, case in CURVATURE_CASES.items() if not case.unassigned]


@pytest.mark.parametrize("name", [*ASSIGNED, "sequences"])
def test_loss_and_gradient_are_those_of_tables_that_are_multiplied(name: str) -> None:
    model, blocks, batches = problem_case(name)
    problem = problem_of(model, blocks, batches)
    layout = problem._layout
    point, generator = 0.3 * torch.randn(layout.size, dtype=torch.float64), torch.Generator().manual_seed(5)
    loss, slopes = problem._derive(problem._all, point)

    def at(values: Tensor) -> float:
        alpha = {table: part.float() for table, part in layout.alpha(values).items()}
        return loss_with(model, blocks, alpha, float(layout.shift(values)), batches)

    assert loss == pytest.approx(at(point), rel=1e-5)
    for _ in range(4):
        way = torch.randn(layout.size, dtype=torch.float64, generator=generator)
        step = 1e-2 * way
        assert float(slopes @ way) == pytest.approx((at(point + step) - at(point - step)) / 2e-2, rel=2e-2, abs=1e-3)


def naive_solution(
    problem: _Problem, model: nn.Module, blocks: RowBlocks, batches: list[Batch], strengths: tuple[float, float]
) -> tuple[Tensor, Callable[[Tensor], float]]:
    """Where the objective of the paper's upper level is least, by BFGS on whole tables that are multiplied."""
    layout, model = problem._layout, copy.deepcopy(model).eval().requires_grad_(False)
    of = {name: bag for own in collections(model).values() for name, bag in tables_of(own).items()}
    keys = {
        name: next(key for key, value in model.named_parameters() if value is bag.weight) for name, bag in of.items()
    }
    num_samples = sum(len(own.labels) for own in batches)

    def objective(values: Tensor) -> Tensor:
        alpha = layout.alpha(values)
        weights = {
            keys[name]: bag.weight * alpha[name].float()[blocks.routings[name].all_blocks()] for name, bag in of.items()
        }
        z = [functional_call(model, weights, (own.dense_features, own.sparse_features)) for own in batches]
        z, y = torch.cat(z).double() + layout.shift(values), torch.cat([own.labels for own in batches]).double()
        prior, last = values.square() / 2, layout.num_of_blocks
        of_blocks, of_columns = prior[: last - 1].sum(), prior[last:].sum()
        of_shift = prior[last - 1] / PHI
        return num_samples * BCE(z, y) / PHI + of_shift + of_blocks / strengths[0] ** 2 + of_columns / strengths[1] ** 2

    def both(values: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.from_numpy(values).requires_grad_()
        value = objective(point)
        return float(value.detach()), torch.autograd.grad(value, point)[0].numpy()

    result = minimize(both, np.zeros(layout.size), jac=True, method="BFGS", options={"gtol": 1e-4})
    return torch.from_numpy(result.x), lambda values: float(objective(values))


@pytest.mark.parametrize("name", ["one id", "mean", "sequences"])
def test_the_solution_is_as_good_as_that_on_whole_tables(name: str) -> None:
    model, blocks, batches = problem_case(name)
    problem = problem_of(model, blocks, batches)
    strengths = 3.0, 1.0
    naive, objective = naive_solution(problem, model, blocks, batches, strengths)
    solution = problem._solve(problem._all, torch.zeros(problem._layout.size, dtype=torch.float64), strengths)
    assert objective(solution) - objective(naive) < 2 * ENOUGH_NATS
    assert objective(torch.zeros_like(naive)) - objective(naive) > 3 * ENOUGH_NATS  # there is something to find


def problem_case(name: str) -> tuple[nn.Module, RowBlocks, list[Batch]]:
    """A model, blocks of its tables and batches: of bags, or of single ids and bags."""
    if name != "sequences":
        case = CURVATURE_CASES[name]
        return make_model(case), make_blocks(case), [make_batch(case, seed, 64) for seed in range(3)]
    model, batches = interest(), [models.make_batch(seed) for seed in range(9)]
    return model, models.blocks_of(model, batches, num_blocks=3), batches


def click_case(num_batches: int, *, are_shuffled: bool = False) -> list[Batch]:
    """Held-out batches whose labels are drawn from the model with its users' factors halved, or at random."""
    model = trained()
    model.pairs.embedding_bags.user.weight.data.mul_(0.3)
    result = [batch(seed, 512) for seed in range(20, 20 + num_batches)]
    for seed, own in enumerate(result):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            z = model(own.dense_features, own.sparse_features)
        own.labels = (torch.rand(len(z), generator=generator) < z.sigmoid()).float()
        if are_shuffled:
            own.labels = own.labels[torch.randperm(len(z), generator=generator)]
    return result


def taught(held_out: list[Batch], **options: Any) -> Gains:
    """What batches teach a model whose tables are as they were trained."""
    model = options.pop("model", None) or trained()
    measured = measure_(model, click_case(2), loss=BCE, held_out=held_out, **options)
    every = {name: torch.ones(len(part), part.shape[1]).bool() for name, part in measured.curvature.curvature.items()}
    return measured.sample.fit(every)


def test_what_can_be_gained_is_found_and_cross_fitted() -> None:
    held_out, others = click_case(4), click_case(12)[4:]
    gains = taught(held_out)
    model, blocks = trained(), measured_on_training_samples().blocks
    ones = {name: torch.ones_like(part) for name, part in gains.alpha.items()}
    plain, better = (
        loss_with(model, blocks, alpha, shift, others) for alpha, shift in ((ones, 0.0), (gains.alpha, gains.shift))
    )
    assert gains.strengths[0] > 0
    assert better < plain - 0.02
    assert gains.loss == pytest.approx(better, abs=0.03)


def test_nothing_is_gained_where_labels_are_chance() -> None:
    """Labels of a model that is right: its factors are the best there are."""
    model = trained()
    held_out = click_case(4)
    for seed, own in enumerate(held_out):
        with torch.no_grad():
            chance = model(own.dense_features, own.sparse_features).sigmoid()
        own.labels = (torch.rand(len(chance), generator=torch.Generator().manual_seed(seed)) < chance).float()
    gains = taught(held_out)
    assert gains.strengths == (0.0, 0.0)
    assert gains.shift == 0
    assert all(bool((part == 1).all()) for part in gains.alpha.values())


def test_samples_that_a_loss_leaves_out_count_for_nothing() -> None:
    def known(z: Tensor, y: Tensor) -> Tensor:
        return BCE(z[y >= 0], y[y >= 0])

    held_out = click_case(4)
    for own in held_out:
        own.labels[:100] = -1  # whole parts of a batch
    measured = measure_(trained(), click_case(2), loss=known, held_out=held_out)
    every = {name: torch.ones(part.shape).bool() for name, part in measured.curvature.curvature.items()}
    gains = measured.sample.fit(every)
    assert gains.strengths[0] > 0
    assert gains.loss < 0.6


def test_frozen_tables_gain_nothing() -> None:
    model = trained()
    model.pairs.embedding_bags.user.weight.requires_grad_(False)
    gains = taught(click_case(4), model=model)
    assert bool((gains.alpha["user"] == 1).all())
    assert not bool((gains.alpha["genre"] == 1).all())


def test_the_order_of_batches_within_a_half_does_not_matter() -> None:
    first, second, third, fourth = click_case(4)
    one, other = taught([first, second, third, fourth]), taught([third, fourth, first, second])
    assert one.strengths == other.strengths
    for name, part in one.alpha.items():
        torch.testing.assert_close(part, other.alpha[name], rtol=0, atol=1e-3)


def test_strengths_are_chosen_on_the_same_batches_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gains_module, "SAMPLES_FOR_STRENGTHS", 1024)
    batches = click_case(8)
    blocks = measure_(trained(), click_case(2), loss=BCE).blocks
    orders = [problem_of(trained(), blocks, order)._few for order in (batches, batches[2:] + batches[:2])]
    one, other = ([[part.batch.labels.sum() for part in half] for half in few] for few in orders)
    assert one == other
    assert [len(half) for half in one] == [1, 1]
    assert taught(batches).strengths[0] > 0


def test_a_batch_alone_is_cut_into_halves() -> None:
    [own] = click_case(1)
    assert taught([own]).strengths[0] > 0
    assert taught([slice_of(own, 0, 1)]).strengths == (0.0, 0.0)


def test_samples_of_one_label_move_the_output_little_and_few_of_them_not_at_all() -> None:
    [own] = click_case(1)
    own.labels = torch.ones_like(own.labels)
    assert 0 < taught([own]).shift < 1
    assert taught([slice_of(own, 0, 31)]).shift == 0


def test_held_out_samples_lose_less() -> None:
    means = []
    for held_out in (None, HELD_OUT):
        dnis.compress(model := trained(), TRAIN, loss=MSE, compression=10, held_out=held_out)
        means.append(losses(outputs(model, HELD_OUT), HELD_OUT).mean())
    assert means[1] < means[0] - 1e-3


def test_scales_of_tables_left_alone_stay() -> None:
    found, fitted = (measured(learns=learns, leave_alone=("one",)) for learns in (True, False))
    scheme = fitted.allocate(compression=4).scheme
    learnt = found.sample.predict(scheme).scheme
    assert learnt is not None
    same = {name: table.codes.scale.equal(scheme.tables[name].codes.scale) for name, table in learnt.tables.items()}
    assert same["one"]
    assert not all(same.values())


def test_tables_that_go_over_to_learnt_scales_hold_what_they_stand_for() -> None:
    """With no feedback either: a gain alone moves rows, too."""
    found = measured().allocate(compression=6).scheme
    scheme = MixedDimensionScheme({name: replace(table, feedback=None) for name, table in found.tables.items()})
    assert all(table.gain is not None for table in scheme.tables.values())
    model = trained()
    bags = {name: bag for part in (model.pairs, model.rest) for name, bag in part.embedding_bags.items()}
    own = {name: bag.weight.detach().clone() for name, bag in bags.items()}
    RoundedTables(model, scheme)
    for name, table in scheme.tables.items():
        blocks = table.routing.all_blocks()
        wanted = decode_rows(encode_rows(own[name], blocks, table.codes), blocks, table.codes)
        torch.testing.assert_close(bags[name].weight.detach(), wanted)


def test_on_held_out_samples_it_is_the_increase_of_their_loss() -> None:
    others = BATCHES[2:3]  # one batch, that teaches nothing
    found = measure_(trained(), BATCHES, loss=MSE, held_out=others)
    models = found.model, rounded(found.model, found, 5.0)
    before, after = (float(losses(outputs(model, others), others).mean()) for model in models)
    predicted = found.sample.predict(found.allocate(compression=5).scheme).loss_increase
    assert predicted == pytest.approx(after - before, rel=1e-4)


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_of_any_loss_and_several_outputs_the_first_order_term_is_left_out(num_outputs: int) -> None:
    case = Case(num_outputs=num_outputs)
    net, batches = make_model(case), make_batches(case)
    found = measure_(net, batches, loss=BCE)
    net.eval()
    z, moved = outputs(net, batches).requires_grad_(), outputs(rounded(net, found, 1.5), batches)
    target = torch.cat([own.labels for own in batches]).double()
    loss = BCE(z, target)
    [slope] = torch.autograd.grad(loss, z)
    expected = float(BCE(moved, target) - loss.detach() - (slope * (moved - z.detach())).sum())
    assert found.allocate(compression=1.5).predicted_loss_increase == pytest.approx(expected, rel=1e-6)


def test_the_model_stays_bit_for_bit_even_if_predicting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_on_training_samples()
    before = copy.deepcopy(found.model.state_dict())
    scheme = found.allocate(compression=4).scheme
    assert all(value.equal(before[name]) for name, value in found.model.state_dict().items())
    seen = []

    def fail(model: Model, dense_features: Tensor, sparse_features: object) -> Tensor:
        state = found.model.state_dict()
        seen.append([name for name, value in state.items() if not value.equal(before[name])])
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Model, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        found.sample.predict(scheme)
    assert "pairs.embedding_bags.user.weight" in seen[0]  # in codes while predicting
    assert all(value.equal(before[name]) for name, value in found.model.state_dict().items())


def test_a_largest_loss_is_kept_on_the_samples_in_the_fewest_bytes() -> None:
    found = measured_on_training_samples()
    limit = found.allocate(compression=7).predicted_loss_increase
    least = found.allocate(max_loss=limit)
    assert least.predicted_loss_increase <= limit
    fewer = found.allocate(compression=least.compression / 0.97)
    assert fewer.predicted_loss_increase > limit
    with pytest.raises(ValueError, match=r"max_loss: expected at least .* for these bits, got 1e-12; allow more loss"):
        found.allocate(max_loss=1e-12)
    with pytest.raises(ValueError, match=r"max_loss: expected less than .* which dropping all tables"):
        found.allocate(max_loss=1e6)


def test_bad_samples_are_refused_by_place() -> None:
    bad = copy.copy(BATCHES[1])
    bad.labels = torch.full_like(bad.labels, torch.nan)
    with pytest.raises(ValueError, match="batch 1"):
        measure_(trained(), BATCHES, loss=MSE, held_out=[BATCHES[0], bad])
    with pytest.raises(ValueError, match="^batches"):
        measure_(trained(), BATCHES, loss=MSE, held_out=[])


class Wrapped(nn.Module):
    """A model with a parameter and a buffer of one number, and what they do to its output."""

    def __init__(self, output: Callable[[Wrapped, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.output = trained(), output
        self.factor = nn.Parameter(torch.tensor([1.0]))
        self.added = nn.Parameter(torch.tensor(0.25))
        self.register_buffer("mean", torch.tensor(3.0))

    def forward(self, dense_features: Tensor, sparse_features: object) -> Tensor:
        return self.output(self, self.inner(dense_features, sparse_features))


def without_own_bias(model: Wrapped) -> Wrapped:
    """The same with the inner model's bias no parameter."""
    for module in model.inner.modules():
        if isinstance(getattr(module, "bias", None), nn.Parameter) and module.bias.numel() == 1:
            own = module.bias.detach()
            del module.bias
            module.register_buffer("bias", own, persistent=False)
    return model


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (lambda model, z: z * model.factor, None),
        (lambda model, z: z * model.factor + model.added, ("added", 1.0)),
        (lambda model, z: z * model.factor - 2 * model.added, ("added", -2.0)),
        (lambda model, z: torch.sigmoid(z + model.added), None),
        (lambda model, z: z + model.mean, ("mean", 1.0)),
        (lambda model, z: torch.stack([z + model.added, z], dim=1), None),
        (lambda model, z: torch.stack([z, 2 * z], dim=1) + model.added, None),
    ],
)
def test_it_is_what_adds_the_same_to_every_output(
    output: Callable[[Wrapped, Tensor], Tensor], expected: tuple[str, float] | None
) -> None:
    model = without_own_bias(Wrapped(output))
    before = copy.deepcopy(model.state_dict())
    target = copy.copy(BATCHES[0])
    if output(model, torch.zeros(2)).dim() > 1:
        target.labels = torch.stack([target.labels] * 2, dim=1)
    found = output_bias(model, target, MSE, Ranks())
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.name, round(found.gain, 4)) == expected
        at_rest = model(target.dense_features, target.sparse_features)
        with suppress(KeyError), found.shifted(model, 0.3):
            moved = model(target.dense_features, target.sparse_features)
            raise KeyError
        torch.testing.assert_close(moved, at_rest + 0.3)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_without_held_out_samples_the_output_bias_stays() -> None:
    model = trained().eval()
    assert dnis.compress(model, BATCHES, loss=MSE, compression=12).output_shift == 0
    assert not any(module.training for module in model.modules())
