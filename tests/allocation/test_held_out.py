"""Held-out samples: predicted loss, scales that they teach, the output bias."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from dnis_torchrec.allocation.held_out import OutputBias, alpha_step, output_bias
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

import dnis_torchrec as dnis
from dnis_torchrec.allocation import held_out as loss_sample
from dnis_torchrec.allocation.compress import Measured, measure_
from dnis_torchrec.allocation.curvature import curvature
from dnis_torchrec.blocks.codes import ColumnCodes, decode_rows, encode_rows, feedback_of, is_coded
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.training.rounded import RoundedTables
from tests.allocation.test_compress import (
    BATCHES,
    Model,
    batch,
    label_,
    measured_on_training_samples,
    predictions,
    rounded,
    trained,
)
from tests.allocation.test_curvature import Case, make_batches, make_model
from tests.models import nearest_codes

MSE, BCE = nn.MSELoss(), nn.BCEWithLogitsLoss()
TRAIN, HELD_OUT = BATCHES[:2], [batch(seed, 512) for seed in (10, 11)]


@pytest.fixture(autouse=True)
def labels() -> None:
    label_([*TRAIN, *HELD_OUT])
    label_(BATCHES)


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


def naive_step(gradient: float, bend: float, noise: float) -> float:
    """Down by eta of a Newton step, less what chance may be; not at all if that is all."""
    if bend <= 0 or gradient**2 <= noise * bend:
        return 0.0
    step = 0.5 * gradient / bend * (1 - noise * bend / gradient**2)
    return min(max(step, -0.2), 0.2)


def test_a_step_is_the_naive_one() -> None:
    gradient, bend = torch.randn(6, 9, dtype=torch.float64), torch.rand(6, 9, dtype=torch.float64)
    bend[0], gradient[1] = 0, 0
    for noise in (0.0, 1e-3, 0.3):
        found = alpha_step(gradient, bend, noise)
        for index in torch.cartesian_prod(torch.arange(6), torch.arange(9)).tolist():
            place = tuple(index)
            assert float(found[place]) == pytest.approx(naive_step(float(gradient[place]), float(bend[place]), noise))


def outputs(model: nn.Module, batches: list[Batch]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(own.dense_features, own.sparse_features) for own in batches])


def losses(predicted: Tensor, batches: list[Batch]) -> Tensor:
    return (predicted - torch.cat([own.labels for own in batches])).square()


class NaiveModel:
    """A measured model whose tables hold multiples of what their fitted codes stand for; its mean prediction stays."""

    def __init__(self, found: Measured, fitted: dnis.Allocation) -> None:
        self.model, self.blocks, self.tables = copy.deepcopy(found.model), found.blocks, fitted.scheme.tables
        self.before = {id(own): outputs(found.model, [own]) for own in HELD_OUT}
        self.bags = {
            name: bag for part in (self.model.pairs, self.model.rest) for name, bag in part.embedding_bags.items()
        }
        self.rounded = {name: nearest_codes(self.tables[name], bag.weight.detach()) for name, bag in self.bags.items()}
        self.bias = found.sample.bias
        self.hold_({name: torch.ones(table.codes.bits.shape) for name, table in self.tables.items()})
        assert self.bias is not None
        moved = torch.cat([self.before[id(own)] - outputs(self.model, [own]) for own in HELD_OUT])
        self.bias.shift_(self.model, float(moved.mean()))

    def hold_(self, gains: dict[str, Tensor]) -> None:
        for name, bag in self.bags.items():
            of_rows = gains[name][self.blocks.routings[name].all_blocks()]
            bag.weight.data.copy_(self.rounded[name] * of_rows)

    def step(self, gains: dict[str, Tensor], batches: list[Batch]) -> dict[str, Tensor]:
        """All columns of all blocks, one by one."""
        self.hold_(gains)
        before = torch.cat([self.before[id(own)] for own in batches])
        noise = float(4 * losses(before, batches).mean()) / 2 / len(before)  # squared error bends by 2
        worth = curvature(self.model, batches, self.blocks, loss=MSE)
        found = {name: gain.clone() for name, gain in gains.items()}
        for name, gain in found.items():
            bits = self.tables[name].codes.bits
            for block, column in torch.cartesian_prod(*map(torch.arange, gain.shape)).tolist():
                if 0 < int(bits[block, column]) < 32:
                    gradient, bend = (float(part[name][block, column]) for part in (worth.gradient, worth.curvature))
                    gain[block, column] *= 1 - naive_step(gradient, bend, noise)
        return found

    def predictions(self, gains: dict[str, Tensor], batches: list[Batch]) -> Tensor:
        self.hold_(gains)
        before, after = torch.cat([self.before[id(own)] for own in batches]), outputs(self.model, batches)
        return after + (before - after).mean()


def naive_learning(found: Measured, fitted: dnis.Allocation, most: int) -> tuple[dict[str, Tensor], float]:
    """The gains of the best step, the last that gains a tenth of what all do or the one behind it; the prediction."""
    naive = NaiveModel(found, fitted)
    before = torch.cat([naive.before[id(own)] for own in HELD_OUT])
    ones = {name: torch.ones(table.codes.bits.shape) for name, table in naive.tables.items()}
    plain = losses(before, HELD_OUT)
    begin = float((losses(naive.predictions(ones, HELD_OUT), HELD_OUT) - plain).mean())
    best = ones, begin
    first, second = ones, ones
    for _ in range(most):
        first, second = naive.step(first, HELD_OUT[:1]), naive.step(second, HELD_OUT[1:])
        crossed = torch.cat([naive.predictions(second, HELD_OUT[:1]), naive.predictions(first, HELD_OUT[1:])])
        mean = {name: (gain + second[name]) / 2 for name, gain in first.items()}
        after = naive.predictions(mean, HELD_OUT)
        of_halves = torch.cat([naive.predictions(mean, [own]) for own in HELD_OUT])
        residuals = after - torch.cat([own.labels for own in HELD_OUT])
        lost = float((losses(after, HELD_OUT) - plain + 2 * residuals * (crossed - of_halves)).mean())
        step, best = best[1] - lost, (mean, lost) if lost < best[1] else best
        if step < 0.1 * (begin - lost) or step <= 0:
            break
    return best


@pytest.mark.parametrize(("compression", "most"), [(6.0, 1), (8.0, 4), (10.0, 4)])
def test_scales_go_where_naive_steps_of_both_halves_take_them_in_the_mean(
    compression: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_sample, "MOST_ALPHA_STEPS", most)
    found, fitted = measured(), measured(learns=False).allocate(compression=compression)
    learnt = found.allocate(compression=compression)
    gains, lost = naive_learning(found, fitted, most)
    for name, gain in gains.items():
        own, codes = fitted.scheme.tables[name].codes, learnt.scheme.tables[name].codes
        assert codes.bits.equal(own.bits)
        torch.testing.assert_close(codes.scale, own.scale * gain, rtol=2**-8, atol=0)
    assert learnt.predicted_loss_increase == pytest.approx(lost, rel=1e-3)
    assert learnt.num_bytes == fitted.num_bytes


@cache
def compressed(*, learns: bool) -> tuple[nn.Module, dnis.Allocation]:
    """A compressed model, which no test changes."""
    model = trained()
    return model, dnis.compress(model, TRAIN, loss=MSE, compression=10, held_out=HELD_OUT if learns else None)


def test_held_out_samples_lose_less() -> None:
    fitted, learnt = (
        losses(outputs(compressed(learns=learns)[0], HELD_OUT), HELD_OUT).mean() for learns in (False, True)
    )
    assert learnt < fitted - 1e-3


def test_the_mean_prediction_stays_when_scales_learn() -> None:
    model, found = compressed(learns=True)
    assert any(table.gain is not None for table in found.scheme.tables.values())
    before, after = (float(outputs(of, HELD_OUT).mean()) for of in (trained(), model))
    assert after == pytest.approx(before, abs=1e-4)


def test_the_model_is_as_it_was_and_tables_left_alone_too() -> None:
    found, fitted = (measured(learns=learns, leave_alone=("one",)) for learns in (True, False))
    before, state = predictions(found.model), copy.deepcopy(found.model.state_dict())
    scheme = fitted.allocate(compression=4).scheme
    learnt = found.sample.predict(scheme).scheme
    assert learnt is not None
    assert all(value.equal(state[name]) for name, value in found.model.state_dict().items())
    assert predictions(found.model).equal(before)
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


@pytest.mark.parametrize("compression", [3.0, 5.0])
def test_on_training_samples_it_is_the_mean_square_of_what_predictions_move_by(compression: float) -> None:
    found = measured_on_training_samples()
    moved = predictions(rounded(found.model, found, compression)) - predictions(found.model)
    predicted = found.allocate(compression=compression).predicted_loss_increase
    assert predicted == pytest.approx(float(moved.square().mean()), rel=1e-4)


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
    case = Case()
    with pytest.raises(ValueError, match="batches: expected at least one batch, got none"):
        measure_(make_model(case), make_batches(case), loss=BCE, held_out=[])


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


def shifted_by(loss: nn.Module, compression: float) -> tuple[Tensor, Tensor, float]:
    """Predictions before and after, and by how much the bias went up."""
    model = trained()
    before = predictions(model)
    found = dnis.compress(model, BATCHES, loss=loss, compression=compression)
    return before, predictions(model), found.output_shift


def test_the_mean_prediction_stays_and_so_does_the_mean_probability() -> None:
    before, after, shift = shifted_by(MSE, 12.0)
    assert float((after - shift - before).mean()) == pytest.approx(-shift, abs=1e-4)
    assert abs(shift) > 1e-3
    assert float(after.mean()) == pytest.approx(float(before.mean()), abs=1e-4)
    for own in BATCHES:
        own.labels = (own.labels > 0).float()
    before, after, shift = shifted_by(BCE, 12.0)
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
