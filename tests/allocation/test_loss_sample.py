"""The predicted loss is that of the samples with every table rounded, naively; the model itself stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.allocation.compress import Measured, measure_
from dnis_torchrec.allocation.held_out import LossSample
from tests.allocation.curvature_cases import Case, Net, make_batches, make_model
from tests.allocation.test_compress import BATCHES, Model, labels, nearest_codes, predictions, trained

__all__ = ["labels"]  # a fixture
MSE, BCE = nn.MSELoss(), nn.BCEWithLogitsLoss()


def measured(*, held_out: list[Batch] | None = None) -> Measured:
    return measure_(trained(), BATCHES, loss=MSE, held_out=held_out)


def in_codes(model: nn.Module, found: Measured, compression: float) -> nn.Module:
    """The model with the nearest codes in all rows of its tables, and its output bias as they want it."""
    allocation, rounded = found.allocate(compression=compression), copy.deepcopy(model)
    scheme = allocation.scheme
    if found.sample.bias is not None:
        found.sample.bias.shift_(rounded, allocation.output_shift)
    for name, parameter in rounded.named_parameters():
        if ".embedding_bags." in name:
            parameter.data.copy_(nearest_codes(scheme.tables[name.split(".")[-2]], parameter.detach()))
    return rounded


@pytest.mark.parametrize("compression", [3.0, 5.0])
def test_on_training_samples_it_is_the_mean_square_of_what_predictions_move_by(compression: float) -> None:
    found = measured()
    moved = predictions(in_codes(found.model, found, compression)) - predictions(found.model)
    predicted = found.allocate(compression=compression).predicted_loss_increase
    assert predicted == pytest.approx(float(moved.square().mean()), rel=1e-4)


def test_on_held_out_samples_it_is_the_increase_of_their_loss() -> None:
    others = BATCHES[2:3]  # one batch, that teaches nothing
    found = measured(held_out=others)
    before, after = (loss_of(model, others) for model in (found.model, in_codes(found.model, found, 5.0)))
    predicted = found.sample.predict(found.allocate(compression=5).scheme).loss_increase
    assert predicted == pytest.approx(after - before, rel=1e-4)


def loss_of(model: nn.Module, batches: list[Batch]) -> float:
    with torch.no_grad():
        losses = [MSE(model(own.dense_features, own.sparse_features), own.labels) for own in batches]
    return float(torch.stack(losses).mean())


def outputs(net: Net, batches: list[Batch]) -> Tensor:
    with torch.no_grad():
        return torch.cat([net.eval()(own.dense_features, own.sparse_features) for own in batches])


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_of_any_loss_and_several_outputs_the_first_order_term_is_left_out(num_outputs: int) -> None:
    case = Case(num_outputs=num_outputs)
    net, batches = make_model(case), make_batches(case)
    found = measure_(net, batches, loss=BCE)
    rounded = in_codes(net, found, 1.5)
    z, moved = outputs(net, batches).requires_grad_(), outputs(rounded, batches)
    target = torch.cat([own.labels for own in batches]).double()
    loss = BCE(z, target)
    [slope] = torch.autograd.grad(loss, z)
    expected = float(BCE(moved, target) - loss.detach() - (slope * (moved - z.detach())).sum())
    assert found.allocate(compression=1.5).predicted_loss_increase == pytest.approx(expected, rel=1e-6)


def test_the_model_stays_bit_for_bit_even_if_predicting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured()
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


def test_no_more_batches_are_taken_than_are_enough_and_large_ones_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    class Noted:
        def __iter__(self) -> Iterator[Batch]:
            for own in BATCHES:
                taken.append(own)
                yield own

    found = measured()
    scheme = found.allocate(compression=5).scheme
    monkeypatch.setattr("dnis_torchrec.allocation.held_out.SAMPLES_PER_PASS", 10)
    sample = LossSample(found.model, Noted(), found.blocks, loss=MSE, is_held_out=False, num_samples=100)
    assert taken == BATCHES[:2]
    whole = LossSample(found.model, BATCHES[:2], found.blocks, loss=MSE, is_held_out=False)
    assert sample.predict(scheme).loss_increase == pytest.approx(whole.predict(scheme).loss_increase, rel=1e-6)


def test_a_largest_loss_is_kept_on_the_samples_in_the_fewest_bytes() -> None:
    found = measured()
    limit = found.allocate(compression=5).predicted_loss_increase
    least = found.allocate(max_loss=limit)
    assert least.predicted_loss_increase <= limit
    fewer = found.allocate(embedding_bytes=int(0.97 * least.num_bytes))
    assert fewer.predicted_loss_increase > limit
    with pytest.raises(ValueError, match=r"max_loss: expected at least .* for these bits, got 1e-12; allow more loss"):
        found.allocate(max_loss=1e-12)
    with pytest.raises(ValueError, match=r"max_loss: expected less than .* which dropping all tables"):
        found.allocate(max_loss=1e6)


def test_bad_samples_are_refused_by_place() -> None:
    bad = copy.copy(BATCHES[1])
    bad.labels = torch.full_like(bad.labels, torch.nan)
    with pytest.raises(ValueError, match="batch 1"):
        measured(held_out=[BATCHES[0], bad])
    case = Case()
    with pytest.raises(ValueError, match="batches: expected at least one batch, got none"):
        measure_(make_model(case), make_batches(case), loss=BCE, held_out=[])
