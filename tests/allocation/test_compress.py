"""A trained model compressed in place, the sample of rows behind it, whole rows of shards."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import cache, partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec import scheme
from dnis_torchrec.allocation import compress as module
from dnis_torchrec.allocation import energies as row_sample
from dnis_torchrec.allocation.axes import LinearReader, RotationGroup
from dnis_torchrec.allocation.compress import Measured, measure_, packed_collections
from dnis_torchrec.allocation.energies import UNSEEN_WEIGHT, rounding_energies, sample_rows, whole_rows
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.shards import TableShard
from dnis_torchrec.serving import PackedEmbeddingBagCollection
from tests.models import nearest_codes
from tests.reference import rounding_error_reference

ROWS = {"user": (60, 8), "genre": (30, 8), "bias": (60, 1), "one": (1, 4), "unread": (20, 4)}
"""Table -> N and D; each is read by a feature of its name, the last one by none that a batch fills."""
NO_LABELS = "expected those of 64 samples, for the loss, got none"
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


def test_a_compressed_model_predicts_what_the_nearest_codes_of_its_tables_do() -> None:
    model, measured = trained(), measured_on_training_samples()
    found = dnis.compress(model, BATCHES, loss=nn.MSELoss(), compression=5)
    oracle = rounded(measured.model, measured, 5)
    assert measured.sample.bias is not None
    torch.testing.assert_close(predictions(model), predictions(oracle), rtol=1e-5, atol=1e-5)
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
        monkeypatch.setattr(module, "rows_per_chunk", lambda _, step=step: step)
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
    allowed = measured.allocate(max_loss=increases[1])
    assert allowed.predicted_loss_increase <= increases[1]


def test_every_row_has_a_block_and_counts_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "blocks_from_counts", partial(module.blocks_from_counts, least_rows=1))
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
    ("change", "batches", "error", "message"),
    [
        (
            with_nan,
            lambda: BATCHES,
            ValueError,
            "^table 'genre': expected finite values, got nan in row 7; take weights",
        ),
        (None, lambda: iter(BATCHES), ValueError, "^batches: expected batches that can be iterated again and again"),
        *(
            (None, partial(unlabelled, labels, place), ValueError, f"^batch {place}, labels: {NO_LABELS}")
            for labels, place in ((torch.zeros(0), 0), (None, 0), (torch.tensor(1.0), 2))
        ),
        (None, list, ValueError, "^batches: expected at least one batch, got none"),
        (compressed_before, lambda: BATCHES, RuntimeError, "^FQN 'pairs': expected tables of float32"),
    ],
)
def test_bad_input_is_refused_by_name(
    change: Callable[[Model], None] | None, batches: Callable[[], list[Batch]], error: type[Exception], message: str
) -> None:
    model = trained()
    if change is not None:
        change(model)
    kind = type(model.pairs)
    with pytest.raises(error, match=message):
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


@pytest.mark.parametrize("rows_per_block", [1, 7, 200, 2000])
def test_weights_add_up_to_the_look_ups_of_each_block(rows_per_block: int) -> None:
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


def test_rows_are_the_same_however_many_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a few at which the sum of probabilities is a half, up to rounding."""
    counts, routing = _skewed(5000), _routing(5000, 3)
    expected = sample_rows(counts, routing, 100)
    monkeypatch.setattr(row_sample, "ROWS_AT_A_TIME", 701)
    found = sample_rows(counts, routing, 100)
    assert len(set(found.rows.tolist()) ^ set(expected.rows.tolist())) <= 6
    assert len(found.rows) == pytest.approx(len(expected.rows), abs=3)


def _table(rows: int, dim: int) -> tuple[EmbeddingBagCollection, FrequencyCounts, RowBlocks]:
    config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
    torch.manual_seed(0)
    counts = FrequencyCounts({"t": _skewed(rows)}, {"f": 1}, 1000)
    blocks = blocks_from_counts(counts, [config], num_blocks=2, least_rows=1)
    return EmbeddingBagCollection(tables=[config]), counts, blocks


def test_energies_are_those_of_the_blocks_rows_by_their_look_ups() -> None:
    collection, counts, blocks = _table(60, 3)
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
