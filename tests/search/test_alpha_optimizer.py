"""AlphaOptimizer: steps against a hand-written row-by-row oracle; the ramp lands; what is dead stays dead."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.frequency import FrequencyCounts
from dnis_torchrec.search.alpha_optimizer import FLOOR, MAX_LEARNING_RATE, AlphaOptimizer, Pressure
from dnis_torchrec.search.budget import Size
from dnis_torchrec.soft_selection.alpha import Alpha
from tests.reference import normalised_reference
from tests.sizes import size_of_share

DIM = 8
HIT = torch.tensor([True, True, True])


def make_blocks(rows: int = 60, num_blocks: int = 3, never_seen: int = 0) -> RowBlocks:
    table = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"])
    counts = torch.arange(rows, 0, -1)
    counts[rows - never_seen :] = 0
    return blocks_from_counts(FrequencyCounts({"t": counts}, {"f": 1}, 100), [table], num_blocks=num_blocks)


def make_optimizer(blocks: RowBlocks | None = None, **settings) -> tuple[Alpha, AlphaOptimizer]:
    blocks = blocks or make_blocks()
    alpha = Alpha(blocks.alpha_shapes)
    return alpha, AlphaOptimizer(alpha, blocks, **settings)


@given(
    gradients=st.lists(
        st.lists(st.floats(-5, 5, width=32), min_size=3 * DIM, max_size=3 * DIM), min_size=1, max_size=6
    ),
    hits=st.lists(st.booleans(), min_size=3, max_size=3),
    averaging=st.sampled_from([0.0, 0.9]),
    rate=st.sampled_from([0.2, 4.7]),  # slow, and so fast that alphas are at their bounds soon and leave them again
)
def test_steps_match_the_oracle(gradients: list[list[float]], hits: list[bool], averaging: float, rate: float) -> None:
    alpha, optimizer = make_optimizer(learning_rate=rate, averaging=averaging)
    expected, average = torch.ones(3, DIM), torch.zeros(3, DIM)
    for values in gradients:
        gradient = torch.tensor(values).view(3, DIM)
        optimizer.step({DIM: gradient}, {DIM: torch.tensor(hits)})
        fresh = normalised_reference(gradient, hits)
        for row in range(3):
            if not hits[row]:
                continue
            for column in range(DIM):
                average[row, column] = averaging * average[row, column] + (1 - averaging) * fresh[row, column]
                moved = float(expected[row, column] - rate * average[row, column])
                expected[row, column] = min(1.0, max(0.0, moved))
                pushes = float(average[row, column])
                at_bound = float(expected[row, column])
                if (at_bound >= 1 and pushes < 0) or (at_bound <= 0 and pushes > 0):
                    average[row, column] = 0.0
        torch.testing.assert_close(alpha.of(DIM), expected, atol=1e-5, rtol=0)


def test_rows_without_a_hit_do_not_move_whatever_the_pressure() -> None:
    alpha, optimizer = make_optimizer(pressure=Pressure(size=Size(compression=4), ramp_steps=100))
    for _ in range(50):
        optimizer.step({DIM: torch.randn(3, DIM)}, {DIM: torch.tensor([True, False, True])})
    assert torch.equal(alpha.of(DIM)[1], torch.ones(DIM))
    assert float(alpha.of(DIM)[0].mean()) < 1


def run_ramp(ratio: float, steps: int = 300, extra: int = 60, never_seen: int = 0, learning_rate: float | None = None):
    torch.manual_seed(0)
    blocks = make_blocks(never_seen=never_seen)
    pressure = Pressure(size=size_of_share(ratio, blocks), ramp_steps=steps)
    alpha, optimizer = make_optimizer(blocks, pressure=pressure, learning_rate=learning_rate)
    liked = -torch.rand(3, DIM)  # validation wants every column, some more than others
    means, alive, pressures = [], [], []
    for _ in range(steps + extra):
        optimizer.step({DIM: liked + 0.3 * torch.randn(3, DIM)}, {DIM: HIT})
        means.append(optimizer.mean())
        pressures.append(optimizer.pressure_now)
        alive.append(alpha.of(DIM) > 0)
    return optimizer, alpha, liked, means, alive, pressures


@pytest.mark.parametrize("ratio", [1.5, 2, 4, 10, 20])
def test_the_ramp_lands_on_the_size_and_stays(ratio: float) -> None:
    optimizer, alpha, _, means, alive, pressures = run_ramp(ratio)
    one_column = 20
    kept = float((alpha.of(DIM) > 0).sum(1) @ torch.full((3,), 20))
    assert 480 / ratio - one_column < kept <= 480 / ratio
    assert optimizer.is_released
    assert torch.equal(alive[300], alive[-1])
    assert optimizer.pressure_now < 0.31 * pressures[299]
    assert all(0 <= float(a) <= 1 for a in (alpha.of(DIM).min(), alpha.of(DIM).max()))
    survivors = alpha.of(DIM)[alpha.of(DIM) > 0]
    assert float(survivors.min()) >= FLOOR
    assert means[10] > means[100] > means[250]


def test_the_columns_that_validation_likes_survive() -> None:
    _, alpha, liked, _, _, _ = run_ramp(2)
    alive = alpha.of(DIM) > 0
    assert float(liked[alive].mean()) < float(liked[~alive].mean()) - 0.2


@pytest.mark.parametrize("validation", [0.0, 1.0, -1.0], ids=["still", "takes all down", "holds all up"])
def test_columns_die_along_their_line_whatever_validation_does(validation: float) -> None:
    torch.manual_seed(0)
    ratio, steps, column = 8, 200, 1 / (3 * DIM)
    pressure = Pressure(size=size_of_share(ratio, make_blocks()), ramp_steps=steps)
    _, optimizer = make_optimizer(pressure=pressure, learning_rate=0.02)
    for step in range(1, steps + 1):
        before = optimizer.density()
        optimizer.step({DIM: validation + 0.1 * torch.randn(3, DIM)}, {DIM: HIT})
        assert optimizer.density() < ratio ** (-step / steps) + column
        assert optimizer.density() > before - 4 * column  # no cliff
    assert optimizer.is_released
    assert 1 / ratio <= optimizer.density() < 1 / ratio + column


def kept_with_sharing(column_sharing: float) -> torch.Tensor:
    torch.manual_seed(0)
    pressure = Pressure(size=size_of_share(2, make_blocks()), ramp_steps=200, column_sharing=column_sharing)
    alpha, optimizer = make_optimizer(pressure=pressure)
    liked = -torch.rand(3, DIM)
    for _ in range(200):
        optimizer.step({DIM: liked + 0.3 * torch.randn(3, DIM)}, {DIM: HIT})
    return alpha.of(DIM) > 0


def test_blocks_that_share_keep_the_same_columns() -> None:
    apart, together = kept_with_sharing(0.0), kept_with_sharing(100.0)
    assert together.sum() == apart.sum() == 12
    assert together.any(0).sum() == 4
    assert apart.any(0).sum() > 5


def test_columns_that_carry_little_die_first_where_validation_is_indifferent() -> None:
    torch.manual_seed(0)
    alpha, optimizer = make_optimizer(pressure=Pressure(size=size_of_share(4, make_blocks()), ramp_steps=200))
    scales = torch.rand(3, DIM) + 0.01
    optimizer.scale_columns({DIM: 100 * scales})
    for _ in range(200):
        optimizer.step({DIM: torch.full((3, DIM), -0.1)}, {DIM: HIT})
    kept = alpha.of(DIM) > 0
    assert int(kept.sum()) == 6
    assert float(scales[kept].min()) > float(scales[~kept].max())


def test_what_is_dead_stays_dead() -> None:
    _, _, _, _, alive, _ = run_ramp(4)
    settled = alive[299]
    for before, after in pairwise(alive[299:]):
        assert not bool((after & ~before).any())
    assert torch.equal(settled, alive[-1])


def test_never_seen_rows_cost_nothing() -> None:
    _, alpha, _, _, _, _ = run_ramp(4, never_seen=20)
    kept = (alpha.of(DIM) > 0).sum(1).tolist()
    assert 20 * kept[0] + 20 * kept[1] <= 480 / 4 + 20  # the last block has no seen row, so its columns are free


def test_a_release_without_end_keeps_a_rate() -> None:
    """Halved at every step behind a ramp of one, the rate would be 0 and refused some day."""
    _, optimizer = make_optimizer(pressure=Pressure(size=Size(compression=4), ramp_steps=1))
    for _ in range(1200):
        optimizer.step({DIM: torch.ones(3, DIM)}, {DIM: HIT})
    assert 0 < optimizer.learning_rate < 1e-30


def test_learning_rate_follows_the_ramp_and_is_bounded() -> None:
    slow = make_optimizer(pressure=Pressure(size=Size(compression=4), ramp_steps=50_000))[1].learning_rate
    fast = make_optimizer(pressure=Pressure(size=Size(compression=4), ramp_steps=50))[1].learning_rate
    assert slow < fast == MAX_LEARNING_RATE
    assert make_optimizer()[1].learning_rate == 0.01


@pytest.mark.parametrize("ramp_steps", [1, 2, 3, 4])
def test_alpha_learns_on_after_the_shortest_ramps(ramp_steps: int) -> None:
    pressure = Pressure(size=Size(compression=2), ramp_steps=ramp_steps)
    alpha, optimizer = make_optimizer(pressure=pressure)
    rates = []
    for _ in range(ramp_steps + 5):
        optimizer.step({DIM: torch.randn(3, DIM)}, {DIM: torch.ones(3, dtype=torch.bool)})
        rates.append(optimizer.learning_rate)
    falling = rates[ramp_steps - 1 :]
    assert all(0 < after < before for before, after in pairwise(falling))
    assert 0 < alpha.density({DIM: torch.ones(3, dtype=torch.float64)}) <= 0.5


def test_a_restored_state_goes_on_the_same_way() -> None:
    torch.manual_seed(1)
    pressure = Pressure(size=Size(compression=4), ramp_steps=40)
    alpha, optimizer = make_optimizer(pressure=pressure)
    gradients = [torch.randn(3, DIM) for _ in range(80)]
    for gradient in gradients[:30]:
        optimizer.step({DIM: gradient}, {DIM: HIT})
    other, restored = make_optimizer(pressure=pressure)
    other.of(DIM).copy_(alpha.of(DIM))
    restored.load_state_dict({name: value.clone() for name, value in optimizer.state_dict().items()})
    for gradient in gradients[30:]:
        optimizer.step({DIM: gradient}, {DIM: HIT})
        restored.step({DIM: gradient}, {DIM: HIT})
    assert torch.equal(alpha.of(DIM), other.of(DIM))
    assert optimizer.pressure_now == restored.pressure_now


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"averaging": 1.0}, r"averaging: expected a number in \[0, 1\), got 1.0"),
        ({"learning_rate": 0.0}, "learning_rate: expected a number above 0, got 0.0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_optimizer(**settings)


@pytest.mark.parametrize("fields", [{"ramp_steps": 0}, {"ramp_steps": 5, "column_sharing": -0.1}])
def test_bad_pressure_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Pressure(size=Size(compression=2), **fields)
