"""TorchRec's models are turned by type: every logit stays, fresh models take what was turned, others are left alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.deepfm import FactorizationMachine

from dnis_torchrec.allocation.axes import DirectedFactorizationMachine, has_axes, rotate_, rotation_groups, with_axes_
from dnis_torchrec.artifact.export import export, load_model
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import collections, local_shards
from tests.allocation.test_rotation import tables_of
from tests.allocation.turnable import BUILDERS, DIM, FEATURES, GROUPS, ROWS, build, collection, counts, dcn, logits_of
from tests.models import shard_as
from tests.reference import second_moment_reference, table_scheme

pytestmark = pytest.mark.usefixtures("gloo")


def assert_stays(found: Tensor, wanted: Tensor) -> None:
    """Equal to 1e-5."""
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def assert_turned(before: dict[str, Tensor], after: dict[str, Tensor], groups: list[tuple[str, ...]]) -> None:
    """Rows keep their lengths, and in every group columns are uncorrelated and carry less and less."""
    for group in groups:
        moment = second_moment_reference([after[name] for name in group], [counts().counts[name] for name in group])
        torch.testing.assert_close(moment, moment.diag().diag(), atol=1e-3, rtol=0)
        assert (moment.diag().diff() < 1e-4).all()
    for name, table in after.items():
        assert not torch.allclose(table, before[name], atol=0.01)
        torch.testing.assert_close(table.square().sum(1), before[name].square().sum(1))


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("name", BUILDERS)
def test_plain_models_turn_and_no_logit_moves(name: str, is_weighted: bool) -> None:
    model = build(name, is_weighted=is_weighted)
    before, logits = copy.deepcopy(tables_of(model)), logits_of(model, is_weighted=is_weighted)
    with_axes_(model)
    assert_stays(logits_of(model, is_weighted=is_weighted), logits)
    assert [group.tables for group in rotation_groups(model)] == GROUPS[name]
    assert len(rotate_(model, counts())) == len(GROUPS[name])
    assert_stays(logits_of(model, is_weighted=is_weighted), logits)
    assert_turned(before, tables_of(model), GROUPS[name])


@pytest.mark.parametrize("added", ["before", "after"])
@pytest.mark.parametrize("sharding_type", ["table_wise", "data_parallel", "column_wise"])
@pytest.mark.parametrize("name", BUILDERS)
def test_sharded_models_turn_like_plain_ones(name: str, sharding_type: str, added: str) -> None:
    """Axes may be added before or after; after training even parts of rows are turned."""
    plain = with_axes_(build(name))
    rotate_(plain, counts())
    model = build(name)
    logits = logits_of(model)
    sharded = shard_as(with_axes_(model) if added == "before" else model, sharding_type)
    with_axes_(sharded)
    rotate_(sharded, counts())
    assert_stays(logits_of(sharded), logits)
    shards: dict[str, list[Tensor]] = {}
    for table, weight in tables_in_order(sharded):
        shards.setdefault(table, []).append(weight)
    for table, weight in tables_of(plain).items():
        torch.testing.assert_close(torch.cat(shards[table], dim=1), weight, atol=1e-5, rtol=1e-5)


def tables_in_order(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Local shards of a model on one rank, from the first column on."""
    shards = [shard for module in collections(model).values() for shard in local_shards(module)]
    return [(shard.table, shard.weight) for shard in sorted(shards, key=lambda shard: shard.first_column)]


@pytest.mark.parametrize("name", BUILDERS)
def test_names_of_weights_stay_and_axes_are_no_parameters(name: str) -> None:
    model = build(name)
    state, parameters = set(model.state_dict()), list(model.parameters())
    assert not has_axes(state)
    added = set(with_axes_(model).state_dict()) - state
    assert state < set(model.state_dict()) or name == "projection"
    assert has_axes(added) == (name != "projection")
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    again = set(with_axes_(model).state_dict())
    assert again == state | added
    assert len(added) == (name != "projection")


@pytest.mark.parametrize("name", BUILDERS)
def test_a_fresh_model_takes_the_state_of_a_turned_one(name: str) -> None:
    model = with_axes_(build(name))
    logits = logits_of(model)
    rotate_(model, counts())
    torch.manual_seed(99)
    fresh = with_axes_(BUILDERS[name](collection()))
    fresh.load_state_dict(model.state_dict())
    assert_stays(logits_of(fresh), logits)


def test_adding_axes_again_keeps_those_that_are_turned() -> None:
    model = with_axes_(build("dlrm"))
    logits = logits_of(model)
    rotate_(model, counts())
    assert_stays(logits_of(with_axes_(model)), logits)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_model_may_turn_twice(name: str) -> None:
    model = with_axes_(build(name))
    logits = logits_of(model)
    for factor in (1, 2):
        other = counts()
        other.counts["user"][:4] *= factor
        rotate_(model, other)
    assert_stays(logits_of(model), logits)


def test_models_inside_others_and_subclasses_without_a_forward_are_known() -> None:
    class Named(DLRM):
        """Computes as its base does."""

    model = DLRMTrain(Named(collection(), 3, [4, DIM], [6, 1]))
    logits = logits_of(model)
    assert len(rotate_(with_axes_(model), counts())) == 1
    assert_stays(logits_of(model), logits)


class Doubled(DLRM):
    """A forward of its own."""

    def forward(self, dense_features: Tensor, sparse_features: object) -> Tensor:
        return 2 * super().forward(dense_features, sparse_features)


class CosineInteraction(nn.Module):
    """Takes the place of an interaction arch, and is none of TorchRec's."""


def _patched(model: nn.Module) -> nn.Module:
    model.forward = model.forward  # an attribute of the object now
    return model


def _hooked(model: nn.Module) -> nn.Module:
    model.dense_arch.register_forward_hook(lambda module, inputs, output: output.abs())
    return model


def _normalised(model: nn.Module) -> nn.Module:
    weight_norm(model.over_arch.model[0]._mlp[0]._linear)
    return model


def _other_interaction(model: nn.Module) -> nn.Module:
    model.inter_arch = CosineInteraction()
    return model


class Reused(nn.Module):
    """Holds an arch of its model a second time, perhaps to read its weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, model.over_arch


class Tied(nn.Module):
    """Holds a weight of its model a second time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.tied = model, model.over_arch.model[0]._mlp[0]._linear.weight


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "dcn": dcn,
    "own forward": lambda: Doubled(collection(), 3, [4, DIM], [6, 1]),
    "patched": lambda: _patched(build("dlrm")),
    "hooked": lambda: _hooked(build("dlrm")),
    "parametrized": lambda: _normalised(build("dlrm")),
    "other interaction": lambda: _other_interaction(build("dlrm")),
    "shared arch": lambda: Reused(build("dlrm")),
    "tied weight": lambda: Tied(build("dlrm")),
    "patched deepfm": lambda: _patched(build("deepfm")),
    "hooked projection": lambda: _hooked(build("projection")),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_left_alone_and_named_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = UNKNOWN[name]()
    before = copy.deepcopy(model.state_dict())
    with caplog.at_level(logging.WARNING):
        assert rotate_(with_axes_(model), counts()) == []
    (record,) = caplog.records
    assert "rotation: expected tables of which it is known what turns along" in record.message
    assert str(list(ROWS)) in record.message
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_sum_of_columns_is_no_dot_product_but_keeps_its_direction() -> None:
    """TorchRec's FactorizationMachine changes by a rotation; with the direction turned along it does not."""
    torch.manual_seed(1)
    inputs = [torch.randn(5, 4) for _ in range(3)]
    rotation = torch.linalg.qr(torch.randn(4, 4)).Q
    turned, machine = [value @ rotation for value in inputs], DirectedFactorizationMachine(12, inputs[0])
    expected = FactorizationMachine()(inputs)
    assert_stays(machine(inputs), expected)
    assert not torch.allclose(FactorizationMachine()(turned), expected, atol=0.1)
    machine.axes.copy_((torch.ones(4) @ rotation).repeat(3))
    assert_stays(machine(turned), expected)


@pytest.mark.parametrize("name", BUILDERS)
def test_an_artifact_gives_a_fresh_model_its_axes(name: str, tmp_path: Path) -> None:
    model = with_axes_(build(name))
    logits = logits_of(model)
    rotate_(model, counts())
    schemes = {}
    for table, rows in ROWS.items():
        routing, pooling = RowRouting.from_map(torch.arange(rows) % 2, 2), "mean" if table == "genre" else "sum"
        schemes[table] = table_scheme(
            table,
            routing,
            torch.ones(2, DIM, dtype=torch.bool),
            feature_names=FEATURES[table],
            pooling=pooling,
            collection="sparse_arch.embedding_bag_collection",
        )
    path = export(model, MixedDimensionScheme(schemes), tmp_path / "artifact")
    torch.manual_seed(99)
    served = load_model(BUILDERS[name](collection()), path)
    assert_stays(logits_of(served), logits)
