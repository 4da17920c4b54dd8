"""A model's output bias: found by what it does, and moved so that the mean prediction stays."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

import dnis_torchrec as dnis
from dnis_torchrec.allocation import held_out as loss_sample
from dnis_torchrec.allocation.compress import Measured, measure_
from dnis_torchrec.allocation.held_out import OutputBias, output_bias
from dnis_torchrec.ranks import Ranks
from tests.allocation.curvature_cases import Case, make_batches, make_model
from tests.allocation.test_compress import BATCHES, labels, predictions, trained

__all__ = ["labels"]  # a fixture
MSE, BCE = nn.MSELoss(), nn.BCEWithLogitsLoss()


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


def bias_of(model: nn.Module, batch: Batch = BATCHES[0], loss: nn.Module = MSE) -> OutputBias | None:
    return output_bias(model, batch, loss, Ranks())


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
    target.labels = (
        torch.stack([target.labels] * 2, dim=1) if output(model, torch.zeros(2)).dim() > 1 else target.labels
    )
    found = bias_of(model, target)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.name, round(found.gain, 4)) == expected
        at_rest = model(target.dense_features, target.sparse_features)
        with found.shifted(model, 0.3):
            moved = model(target.dense_features, target.sparse_features)
        torch.testing.assert_close(moved, at_rest + 0.3)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_a_shift_is_taken_back_bit_for_bit_whatever_happens_within() -> None:
    model = trained()
    found = bias_of(model)
    assert found is not None
    own, before = copy.deepcopy(model.state_dict()), predictions(model)

    def fail() -> None:
        torch.testing.assert_close(predictions(model), before + 0.3)
        raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"), found.shifted(model, 0.3):
        fail()
    assert all(value.equal(own[name]) for name, value in model.state_dict().items())


def compressed(loss: nn.Module, compression: float) -> tuple[Tensor, Tensor, float]:
    """Predictions before and after, and by how much the bias went up."""
    model = trained()
    before = predictions(model)
    found = dnis.compress(model, BATCHES, loss=loss, compression=compression)
    return before, predictions(model), found.output_shift


@pytest.mark.parametrize("compression", [5.0, 9.0])
def test_the_mean_prediction_stays_and_so_does_the_mean_probability(compression: float) -> None:
    before, after, shift = compressed(MSE, compression)
    assert float((after - shift - before).mean()) == pytest.approx(-shift, abs=1e-4)
    assert abs(shift) > 1e-3
    assert float(after.mean()) == pytest.approx(float(before.mean()), abs=1e-4)
    for own in BATCHES:
        own.labels = (own.labels > 0).float()
    before, after, shift = compressed(BCE, compression)
    assert abs(shift) > 1e-3
    assert float(after.sigmoid().mean()) == pytest.approx(float(before.sigmoid().mean()), abs=1e-4)


def test_a_model_of_several_outputs_has_none() -> None:
    case = Case(num_outputs=2)
    measured = measure_(make_model(case), make_batches(case), loss=BCE)
    assert measured.sample.bias is None
    found = measured.allocate(compression=1.5)
    assert found.output_shift == 0
    with measured.shifted(found):
        pass


def shift_with(monkeypatch: pytest.MonkeyPatch, measured: Measured, **limits: float) -> float:
    """Of the predictions that a size has, by steps that may be no more and no longer than this."""
    for name, value in limits.items():
        monkeypatch.setattr(loss_sample, name, value)
    return measured.allocate(compression=9).output_shift


def test_it_stays_where_steps_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measure_(trained(), BATCHES, loss=MSE)
    found = shift_with(monkeypatch, measured)
    assert found != 0
    assert math.remainder(found, loss_sample.SHIFT_UNIT) == 0
    assert shift_with(monkeypatch, measured, LONGEST_STEP=abs(found) / 2) == 0
    assert shift_with(monkeypatch, measured, LONGEST_STEP=4.0, MOST_STEPS=1) == 0


def test_a_loss_that_does_not_bend_moves_nothing() -> None:
    """So that no step has a length: the second derivatives of a line are 0."""

    def line(predictions: Tensor, targets: Tensor) -> Tensor:
        return (predictions * targets + 0 * predictions.square()).mean()

    measured = measure_(trained(), BATCHES, loss=MSE)
    bias, blocks = measured.sample.bias, measured.blocks
    assert bias is not None
    sample = loss_sample.LossSample(trained(), BATCHES, blocks, loss=line, is_held_out=True, bias=bias)
    said = sample.predict(measured.allocate(compression=5).scheme)
    assert said.output_shift == 0
    assert said.scheme is None
