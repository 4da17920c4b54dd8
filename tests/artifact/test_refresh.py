"""A model that was trained on, in the scheme of yesterday: what is written is what differs, and no more."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.axes import RotationGroup, WeightedProduct
from dnis_torchrec.allocation.compress import measure_, packed_collections
from dnis_torchrec.allocation.energies import UNSEEN_WEIGHT
from dnis_torchrec.artifact import refresh as refreshing
from dnis_torchrec.artifact.load import rows_of
from dnis_torchrec.artifact.refresh import Refresh, _some_rows, changed_rows, delta_, drift, whole_
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.batches import for_lookup
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection, PackedTable
from dnis_torchrec.training.shard import process_group, shard
from tests import tiny

ROWS, DIM, OLD = {"user": 3000, "item": 2000}, 8, 0.6
"""Tables, their D, and the share of rows that are born yesterday or earlier."""
LOSS = nn.BCEWithLogitsLoss()
SIZE = 30.0
NOTHING = {name: torch.zeros(0, dtype=torch.int64) for name in ROWS}


class Product(nn.Module):
    """Users times items, column by column, weighed or not."""

    def __init__(self, *, is_weighed: bool = False) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ]
        self.tables = EmbeddingBagCollection(tables=tables)
        self.weights = nn.Linear(DIM, 1) if is_weighed else None
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        user, item = self.tables(sparse_features).to_dict().values()
        if self.weights is not None:
            return self.weights(user * item).squeeze(1) + self.bias
        return (user * item).sum(1) + self.bias

    def rotation_groups(self) -> list[RotationGroup]:
        product = None if self.weights is None else WeightedProduct(weight=self.weights.weight)
        return [RotationGroup(tables=("user", "item"), product=product)]


@cache
def truth() -> dict[str, Tensor]:
    """What users and items are like: a few directions matter."""
    generator = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator))[0]
    spread = 1.5 * 0.6 ** torch.arange(DIM)
    return {name: torch.randn(rows, DIM, generator=generator) * spread @ turn for name, rows in ROWS.items()}


def day(seed: int, born: float) -> list[Batch]:
    """Samples of rows that are born by then, few of them often."""
    generator, batches = torch.Generator().manual_seed(seed), []
    for _ in range(8):
        ids = []
        for rows in ROWS.values():
            place = ((rows * born) ** torch.rand(512, generator=generator)).long() - 1
            late = int(rows * born) - 1 - place
            ids.append(torch.where(torch.rand(512, generator=generator) < 0.7, place, late) * 7 % int(rows * born))
        features = KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=torch.ones(1024, dtype=torch.int64))
        logits = sum(truth()["user"][ids[0]].mul(truth()["item"][ids[1]]).T)
        labels = (logits + torch.randn(512, generator=generator) > 0).float()
        batches.append(Batch(torch.zeros(512, 1), features, labels))
    return batches


def train_(model: nn.Module, batches: Iterable[Batch]) -> nn.Module:
    """Goes once through some samples."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for batch in batches:
        optimizer.zero_grad()
        LOSS(model(batch.dense_features, batch.sparse_features), batch.labels).backward()
        optimizer.step()
    return model


def counted(*days: list[Batch]) -> FrequencyCounts:
    configs = Product().tables.embedding_bag_configs()
    return count_frequencies([batch.sparse_features for some in days for batch in some], configs)


@dataclass
class Published:
    """An artifact of yesterday in memory, and the model that it was made of."""

    model: nn.Module
    scheme: MixedDimensionScheme
    rows: dict[str, Tensor]


YESTERDAY, TODAY = day(1, OLD), day(2, 1.0)


def published(*, is_weighed: bool = False, held_out: list[Batch] | None = None) -> Published:
    torch.manual_seed(0)
    model = Product(is_weighed=is_weighed)
    for bag in model.tables.embedding_bags.values():
        nn.init.normal_(bag.weight, std=0.4)
    for _ in range(6):
        train_(model, YESTERDAY)
    turned = copy.deepcopy(model)
    measured = measure_(turned, YESTERDAY, loss=LOSS, counts=counted(YESTERDAY), held_out=held_out)
    scheme = measured.allocate(compression=SIZE).scheme
    (module,) = packed_collections(turned, scheme).values()
    assert isinstance(module, PackedEmbeddingBagCollection)
    scheme = MixedDimensionScheme.from_parts(scheme.to_json(), scheme.to_tensors()).with_refresh(scheme.to_refresh())
    return Published(model, scheme, dict(module.bit_fields()))


@cache
def base() -> Published:
    """No test changes it."""
    return published()


def refreshed(of: Published, model: nn.Module, *days: list[Batch], **more) -> Refresh:
    return delta_(copy.deepcopy(model), of.scheme, of.rows, days[-1], loss=LOSS, counts=counted(*days), **more)


def decoded(scheme: MixedDimensionScheme, rows: dict[str, Tensor], name: str) -> np.ndarray:
    """The values of a table, bit by bit."""
    table, at, values = scheme.tables[name], 0, np.zeros((ROWS[name], DIM))
    blocks = table.routing.all_blocks().numpy()
    for s in range(table.num_blocks):
        bits = table.bits[s].tolist()
        stride = -(-sum(bits) // 8)
        for row in np.flatnonzero(blocks == s):
            number = int.from_bytes(rows[name][at : at + stride].numpy().tobytes(), "little")
            at += stride
            for column, width in enumerate(bits):
                code, number = number & ((1 << width) - 1), number >> width
                if width:
                    step = float(table.scale[s, column])
                    values[row, column] = step * code + step * (float(table.shift[s, column]) / 2)
    assert at == rows[name].numel()
    return values


def logits(scheme: MixedDimensionScheme, rows: dict[str, Tensor], dense: dict[str, Tensor], *, is_weighed=False):
    """What a served model says of today's samples."""
    model = Product(is_weighed=is_weighed)
    tables = {
        name: PackedTable.from_rows(table, rows[name], table.scale, table.shift)
        for name, table in scheme.tables.items()
    }
    model.tables = PackedEmbeddingBagCollection(scheme, tables)
    model.load_state_dict(dense, strict=False)
    with torch.no_grad():
        return torch.cat([model(batch.dense_features, batch.sparse_features) for batch in TODAY])


def loss_of(scores: Tensor) -> float:
    return float(LOSS(scores, torch.cat([batch.labels for batch in TODAY])))


def in_axes(of: Published) -> nn.Module:
    """The model as it stands once its tables are turned."""
    model = copy.deepcopy(of.model)
    measure_(model, YESTERDAY, loss=LOSS, counts=counted(YESTERDAY))
    return model


@pytest.mark.parametrize("stands_in_axes", [False, True])
def test_nothing_is_written_of_a_model_that_did_not_change(stands_in_axes: bool) -> None:
    of = base()
    result = refreshed(of, in_axes(of) if stands_in_axes else of.model, YESTERDAY)
    assert result.num_changed == {"user": 0, "item": 0}
    for name, table in result.scheme.tables.items():
        assert result.rows[name] is of.rows[name]
        stays = torch.eye(DIM) if stands_in_axes else of.scheme.tables[name].turn
        torch.testing.assert_close(table.turn.float(), stays, atol=1e-6, rtol=0)
    for key, tensor in result.scheme.to_tensors().items():
        assert tensor.equal(of.scheme.to_tensors()[key]), key


def nearest_by_hand(values: np.ndarray, table, block: int) -> np.ndarray:
    """Values of rows in the nearest codes."""
    bits, step = table.bits[block].numpy().astype(int), table.scale[block].numpy()
    half = table.shift[block].numpy() / np.float32(2)
    code = np.clip(np.round(values.astype(np.float32) / step - half), 0, 2**bits - 1)
    return np.where(bits > 0, step * (code + half), 0)


def test_the_state_holds_new_codes_of_changed_rows_and_old_ones_of_all_others() -> None:
    of, model = base(), train_(copy.deepcopy(base().model), TODAY[:1])
    changed = {name: counted(TODAY[:1]).counts[name].nonzero().flatten() for name in ROWS}
    result = refreshed(of, model, YESTERDAY, YESTERDAY, rows_read=changed)
    for name, table in result.scheme.tables.items():
        old = of.scheme.tables[name]
        assert table.num_blocks == old.num_blocks
        is_fitted = (table.scale != old.scale).any(1) | (table.shift != old.shift).any(1)
        assert not bool(is_fitted.all())
        blocks, got, was = old.routing.all_blocks(), decoded(result.scheme, result.rows, name), None
        was = decoded(of.scheme, of.rows, name)
        is_changed = torch.zeros(ROWS[name], dtype=torch.bool)
        is_changed[changed[name]] = True
        is_old = ~is_changed & ~is_fitted[blocks]
        np.testing.assert_array_equal(got[is_old], was[is_old])
        turned = model.tables.embedding_bags[name].weight.detach().double() @ old.turn.double()
        for s in range(old.num_blocks):
            here = (blocks == s) & (is_changed | is_fitted[s])
            want = nearest_by_hand(turned[here].float().numpy(), table, s)
            wrong = np.abs(got[here] - want).max(1) > 1e-6
            assert wrong.mean() < 0.01  # a code that was half way between two


def today() -> nn.Module:
    return train_(copy.deepcopy(base().model), TODAY)


def same_refresh(one: Refresh, other: Refresh) -> bool:
    pairs = [(one.rows, other.rows), (one.dense, other.dense)]
    pairs += [
        (part(one.scheme), part(other.scheme))
        for part in (MixedDimensionScheme.to_tensors, MixedDimensionScheme.to_refresh)
    ]
    return one.num_changed == other.num_changed and all(
        first.keys() == second.keys() and all(value.equal(second[key]) for key, value in first.items())
        for first, second in pairs
    )


@pytest.mark.parametrize("is_weighed", [False, True])
def test_rows_that_turn_as_they_are_read_are_those_of_a_turned_model(is_weighed: bool, monkeypatch) -> None:
    """To the bit; and the model stays as it was."""
    of = published(is_weighed=is_weighed)
    model = train_(copy.deepcopy(of.model), TODAY)
    before = copy.deepcopy(model.state_dict())
    more = {"loss": LOSS, "counts": counted(YESTERDAY, TODAY)}
    result = delta_(model, of.scheme, of.rows, TODAY, **more)
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    monkeypatch.setattr(refreshing, "axes_of_rows", lambda *_: None)
    assert same_refresh(result, delta_(model, of.scheme, of.rows, TODAY, **more))
    assert not model.tables.embedding_bags["user"].weight.equal(before["tables.embedding_bags.user.weight"])
    model.load_state_dict(before)
    model.tables.half()
    assert delta_(model, of.scheme, of.rows, TODAY, **more).dense.keys() == result.dense.keys()  # turned in float32


def test_rows_that_are_equal_in_the_tables_of_yesterday_are_not_looked_at() -> None:
    of, model = base(), copy.deepcopy(base().model)
    previous = {name: rows_of(bag.weight.detach()) for name, bag in of.model.tables.embedding_bags.items()}
    weight = model.tables.embedding_bags["user"].weight.data
    weight[::20] += torch.randn(len(weight[::20]), DIM, generator=torch.Generator().manual_seed(3))
    results = [refreshed(of, model, YESTERDAY, previous=old) for old in (None, previous)]
    assert same_refresh(*results)
    assert results[0].num_changed["item"] == 0 < results[0].num_changed["user"]
    damaged = Published(of.model, of.scheme, {name: rows.clone() for name, rows in of.rows.items()})
    for rows in damaged.rows.values():
        rows[::50] ^= 255
    changed = [refreshed(damaged, model, YESTERDAY, previous=old).num_changed for old in (None, previous)]
    assert changed[0]["item"] > changed[1]["item"] == 0


def test_new_rows_predict_and_old_ones_keep_their_place() -> None:
    of, model = base(), train_(copy.deepcopy(base().model), TODAY)
    result = refreshed(of, model, YESTERDAY, TODAY)
    counts = counted(YESTERDAY, TODAY).counts
    for name, table in result.scheme.tables.items():
        old, blocks = of.scheme.tables[name], table.routing.all_blocks()
        assert table.num_blocks == old.num_blocks + 1
        assert table.bits[:-1].equal(old.bits)
        is_new, has_bytes = blocks == old.num_blocks, (old.bits > 0).any(1)[old.routing.all_blocks()]
        rarest = int(counts[name][has_bytes].min())
        assert is_new.equal(~has_bytes & (counts[name] >= max(1, rarest)))
        assert blocks[~is_new].equal(old.routing.all_blocks()[~is_new])
        assert bool((table.bits[-1] == old.bits).all(1).any())
        assert bool(np.abs(decoded(result.scheme, result.rows, name)[is_new]).sum(1).all())
    more = {"loss": LOSS, "counts": counted(YESTERDAY, TODAY), "compression": SIZE}
    _, allocation = whole_(copy.deepcopy(model), result.scheme, result.rows, TODAY, **more)
    assert result.scheme.compression("packed") < SIZE <= allocation.scheme.compression("packed")
    loss = loss_of(logits(result.scheme, result.rows, result.dense))
    assert loss < loss_of(logits(of.scheme, of.rows, result.dense)) - 0.01


def test_a_product_of_which_weights_have_learnt_predicts_as_its_model() -> None:
    """Its weights are drawn into all rows, also those that nobody has read."""
    of = published(is_weighed=True)
    model = train_(copy.deepcopy(of.model), TODAY[:2])
    model.weights.weight.data.mul_(torch.linspace(0.5, 2, DIM))
    with torch.no_grad():
        plain = torch.cat([model(batch.dense_features, batch.sparse_features) for batch in TODAY])
    results = [refreshed(of, model, YESTERDAY, TODAY, rows_read=changed) for changed in (None, NOTHING)]
    for result in results:
        served = logits(result.scheme, result.rows, result.dense, is_weighed=True)
        assert float(torch.corrcoef(torch.stack([plain, served]))[0, 1]) > 0.9
    assert results[0].num_changed == results[1].num_changed


def test_scales_that_no_longer_fit_move_and_no_others() -> None:
    of, model = base(), copy.deepcopy(base().model)
    table = of.scheme.tables["user"]
    in_block = table.routing.all_blocks() == 1
    model.tables.embedding_bags["user"].weight.data[in_block] *= 3
    result = refreshed(of, model, YESTERDAY, rows_read=NOTHING)
    moved = (result.scheme.tables["user"].scale != table.scale).any(1)
    assert moved.tolist() == [s == 1 for s in range(table.num_blocks)]
    assert result.num_changed["item"] == 0
    assert 0 < result.num_changed["user"] <= int(in_block.sum())


@pytest.mark.parametrize("are_named", [False, True])
def test_rows_that_are_sorted_by_block_give_the_same_bytes(are_named: bool) -> None:
    of, model, twin, counts = base(), today(), today(), counted(YESTERDAY, YESTERDAY)
    tables, counts_of_twin, named, named_of_twin = {}, {}, {}, {}
    for name, table in of.scheme.tables.items():
        blocks, weight = table.routing.all_blocks(), model.tables.embedding_bags[name].weight.data
        weight[blocks == 1] *= 3  # their scales do not fit any more
        order, ends = blocks.argsort(stable=True), table.routing.row_counts().cumsum(0)
        routing = RowRouting(len(order), table.num_blocks, boundaries=nn.functional.pad(ends, (1, 0)))
        tables[name] = replace(table, routing=routing)
        twin.tables.embedding_bags[name].weight.data.copy_(weight[order])
        counts_of_twin[name] = counts.counts[name][order]
        named[name] = torch.arange(0, len(order), 7)
        named_of_twin[name] = order.argsort()[named[name]]
    more = {"rows_read": named} if are_named else {}
    one = refreshed(of, model, YESTERDAY, YESTERDAY, **more)
    more = {"rows_read": named_of_twin} if are_named else {}
    more |= {"loss": LOSS, "counts": replace(counts, counts=counts_of_twin)}
    other = delta_(twin, MixedDimensionScheme(tables), of.rows, YESTERDAY, **more)
    assert one.num_changed == other.num_changed
    for name, rows in one.rows.items():
        assert rows.equal(other.rows[name])
        assert not rows.equal(of.rows[name])


def test_scales_of_a_small_block_are_held_against_all_of_its_rows() -> None:
    """Every second row is small: what one half of the rows teaches would clip the other."""
    of, model = base(), copy.deepcopy(base().model)
    table = of.scheme.tables["user"]
    in_block = (table.routing.all_blocks() == 1).nonzero().flatten()
    weight = model.tables.embedding_bags["user"].weight.data
    weight[in_block[::2]] *= 0.05
    weight[in_block[1::2]] *= 4
    result = refreshed(of, model, YESTERDAY, rows_read=NOTHING)
    assert bool((result.scheme.tables["user"].scale[1] != table.scale[1]).any())


@pytest.mark.parametrize("rows_per_block", [10, 4000])
def test_rows_of_a_sample_stand_for_those_between_them(rows_per_block: int) -> None:
    table, counts = base().scheme.tables["user"], counted(YESTERDAY).counts["user"]
    sample, blocks = _some_rows(counts, table.routing, rows_per_block), table.routing.all_blocks()
    for row, block, weight in zip(*(part.tolist() for part in vars(sample).values()), strict=True):
        step = max(1, int((blocks == block).sum()) // rows_per_block)
        assert block == blocks[row]
        assert weight == max(float(counts[row]), UNSEEN_WEIGHT) * step


def test_gains_move_scales_and_no_code() -> None:
    of = base()
    result = refreshed(of, of.model, YESTERDAY, held_out=day(5, OLD))
    assert result.num_changed == {"user": 0, "item": 0}
    for name, table in result.scheme.tables.items():
        coded, old = table.bits > 0, of.scheme.tables[name]
        assert bool((table.scale != old.scale).any())
        torch.testing.assert_close((table.scale / old.scale)[coded], table.row_gain[coded], rtol=1e-5, atol=0)
    again = delta_(copy.deepcopy(of.model), result.scheme, result.rows, YESTERDAY, loss=LOSS, counts=counted(YESTERDAY))
    assert again.num_changed == {"user": 0, "item": 0}
    for name, table in again.scheme.tables.items():
        assert table.scale.equal(result.scheme.tables[name].scale)


def test_a_whole_refresh_of_the_same_model_is_what_compress_gives() -> None:
    of = base()
    model = copy.deepcopy(of.model)
    _, allocation = whole_(model, of.scheme, of.rows, YESTERDAY, loss=LOSS, counts=counted(YESTERDAY), compression=SIZE)
    (module,) = packed_collections(model, allocation.scheme).values()
    for name, table in allocation.scheme.tables.items():
        assert table.bits.equal(of.scheme.tables[name].bits)
        assert table.turn.float().equal(of.scheme.tables[name].turn)
        same = module.bit_fields()[name] == of.rows[name]
        assert float(same.double().mean()) > 0.999


@pytest.mark.parametrize(("angle", "stay"), [(0.02, True), (1.0, False)])
def test_axes_stay_while_their_first_columns_carry_as_much(angle: float, stay: bool) -> None:
    """Tables whose first two axes are turned towards each other, or change places."""
    of, model = base(), copy.deepcopy(base().model)
    old = of.scheme.tables["user"].turn.double()
    swap = torch.eye(DIM).double()
    ends, turn = torch.tensor([0, DIM - 1]), torch.tensor(angle).double() * torch.pi / 2
    swap[ends[:, None], ends] = torch.tensor([[turn.cos(), -turn.sin()], [turn.sin(), turn.cos()]]).double()
    for bag in model.tables.embedding_bags.values():
        bag.weight.data = (bag.weight.double() @ old @ swap @ old.T).float()
    more = {"loss": LOSS, "counts": counted(YESTERDAY)}
    _, allocation = whole_(model, of.scheme, of.rows, YESTERDAY, **more)
    assert allocation.scheme.tables["user"].turn.float().equal(of.scheme.tables["user"].turn) == stay


def test_drift_is_said_of_a_scheme_whose_rows_are_read_no_more() -> None:
    """Rows change places with others, and so do their counts."""
    of, order = base(), {name: torch.arange(rows).flip(0) for name, rows in ROWS.items()}
    model = copy.deepcopy(of.model)
    batches = copy.deepcopy(YESTERDAY)
    for batch in batches:
        ids = torch.cat([order[name][batch.sparse_features[name].values()] for name in ROWS])
        batch.sparse_features = KeyedJaggedTensor(list(ROWS), ids, lengths=torch.ones(1024, dtype=torch.int64))
    for name, bag in model.tables.embedding_bags.items():
        bag.weight.data = bag.weight[order[name]]
    for place, (trained, some) in enumerate(((copy.deepcopy(of.model), YESTERDAY), (model, batches))):
        result = refreshed(of, trained, some)
        more = {"loss": LOSS, "counts": counted(some)}
        by_table = drift(copy.deepcopy(trained), result.scheme, result.rows, some, **more)
        assert set(by_table) == set(ROWS)
        assert (sum(by_table.values()) > 0.01) == bool(place)


def test_tables_of_another_model_are_refused() -> None:
    of = base()
    users = replace(of.scheme, tables=dict.fromkeys(ROWS, of.scheme.tables["user"]))
    with pytest.raises(ValueError, match="table 'item'"):
        refreshed(replace(of, scheme=users), of.model, YESTERDAY)


def test_rows_that_training_has_read_come_from_torchrecs_tracker() -> None:
    recipe = tiny.make_recipe()
    assert changed_rows(recipe.model) is None
    with process_group() as device:
        model, _ = shard(TrainTask(recipe.model, recipe.task), recipe, device)
        assert changed_rows(model) is None
        model.init_torchrec_delta_tracker(DeltaTrackerConfig())
        for batches in ([tiny.make_batch(16, 1), tiny.make_batch(16, 2)], [tiny.make_batch(16, 3)]):
            for batch in batches:
                model(for_lookup(batch))
            result = changed_rows(model)
            for name in tiny.ROWS:
                ids = torch.cat([batch.sparse_features[name].values() for batch in batches])
                assert result[name].equal(ids.unique())
