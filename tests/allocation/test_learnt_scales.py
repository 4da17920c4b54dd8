"""Scales that held-out samples teach: the same codes stand for other values, as two naive steps of alpha say."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

import dnis_torchrec as dnis
from dnis_torchrec.allocation import energies as rows_in_codes
from dnis_torchrec.allocation import held_out as learnt_scales
from dnis_torchrec.allocation import held_out as loss_sample
from dnis_torchrec.allocation.compress import Measured, measure_
from dnis_torchrec.allocation.held_out import alpha_step
from dnis_torchrec.blocks.codes import ColumnCodes, decode_rows, encode_rows, feedback_of, is_coded
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.training.rounding import RoundedTables
from tests.allocation.test_compress import BATCHES, batch, label_, nearest_codes, predictions, trained

MSE = nn.MSELoss()
TRAIN, HELD_OUT = BATCHES[:2], [batch(seed, 512) for seed in (10, 11)]


@pytest.fixture(autouse=True)
def labels() -> None:
    label_([*TRAIN, *HELD_OUT])


def measured(*, held_out: list[Batch] | None = HELD_OUT, leave_alone: tuple[str, ...] = ()) -> Measured:
    return measure_(trained(), TRAIN, loss=MSE, held_out=held_out, leave_alone=leave_alone)


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


def test_a_gain_has_the_shape_of_the_bits() -> None:
    codes = ColumnCodes(torch.ones(2, 3).byte(), torch.ones(2, 3), torch.zeros(2, 3).short())
    with pytest.raises(ValueError, match=r"ColumnCodes\.gain: expected"):
        replace(codes, gain=torch.ones(3, 2))


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
        worth = dnis.curvature(self.model, batches, self.blocks, loss=MSE)
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


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("compression", [3.0, 4.0, 6.0])
def test_scales_go_where_naive_steps_of_both_halves_take_them_in_the_mean(
    compression: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_sample, "MOST_ALPHA_STEPS", most)
    found, fitted = measured(), measured(held_out=None).allocate(compression=compression)
    learnt = found.allocate(compression=compression)
    gains, lost = naive_learning(found, fitted, most)
    for name, gain in gains.items():
        own, codes = fitted.scheme.tables[name].codes, learnt.scheme.tables[name].codes
        assert codes.bits.equal(own.bits)
        torch.testing.assert_close(codes.scale, own.scale * gain, rtol=2**-8, atol=0)
    assert learnt.predicted_loss_increase == pytest.approx(lost, rel=1e-3)
    assert learnt.num_bytes == fitted.num_bytes


def compressed(held_out: list[Batch] | None) -> tuple[nn.Module, dnis.Allocation]:
    model = trained()
    return model, dnis.compress(model, TRAIN, loss=MSE, compression=6, held_out=held_out)


def test_held_out_samples_lose_less() -> None:
    fitted, learnt = (losses(outputs(compressed(own)[0], HELD_OUT), HELD_OUT).mean() for own in (None, HELD_OUT))
    assert learnt < fitted - 1e-3


def test_the_mean_prediction_stays_when_scales_learn() -> None:
    model, found = compressed(HELD_OUT)
    assert any(table.gain is not None for table in found.scheme.tables.values())
    before, after = (float(outputs(of, HELD_OUT).mean()) for of in (trained(), model))
    assert after == pytest.approx(before, abs=1e-4)


def test_rows_are_rounded_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured().allocate(compression=6)
    monkeypatch.setattr(rows_in_codes, "rows_per_chunk", lambda embedding_dim: 7)
    found = measured().allocate(compression=6)
    assert found.predicted_loss_increase == whole.predicted_loss_increase
    for name, table in found.scheme.tables.items():
        assert table.codes.scale.equal(whole.scheme.tables[name].codes.scale)


def test_one_batch_teaches_nothing() -> None:
    own = HELD_OUT[:1]
    (model, found), (_, fitted) = compressed(own), compressed(None)
    increase = losses(outputs(model, own), own) - losses(outputs(trained(), own), own)
    assert found.predicted_loss_increase == pytest.approx(float(increase.mean()), rel=1e-3)
    for name, table in found.scheme.tables.items():
        assert table.gain is None
        assert table.codes.scale.equal(fitted.scheme.tables[name].codes.scale)


def test_the_model_is_as_it_was_and_tables_left_alone_too() -> None:
    found, fitted = (measured(held_out=own, leave_alone=("one",)) for own in (HELD_OUT, None))
    before, state = predictions(found.model), copy.deepcopy(found.model.state_dict())
    scheme = fitted.allocate(compression=4).scheme
    learnt = found.sample.predict(scheme).scheme
    assert learnt is not None
    assert all(value.equal(state[name]) for name, value in found.model.state_dict().items())
    assert predictions(found.model).equal(before)
    same = {name: table.codes.scale.equal(scheme.tables[name].codes.scale) for name, table in learnt.tables.items()}
    assert same["one"]
    assert not all(same.values())


def test_scales_stay_where_that_is_predicted_to_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = measured(held_out=None).allocate(compression=6)
    monkeypatch.setattr(learnt_scales, "alpha_step", lambda gradient, curvature, noise: torch.full_like(gradient, -0.2))
    found = measured().allocate(compression=6)
    for name, table in found.scheme.tables.items():
        assert table.codes.scale.equal(fitted.scheme.tables[name].codes.scale)


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
