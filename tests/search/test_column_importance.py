"""ColumnImportance: against a row-by-row oracle; an overfitted model keeps what it would miss, not what is small."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.frequency import FrequencyCounts
from dnis_torchrec.search.alpha_optimizer import FLOOR, MEAN_SHARE, AlphaOptimizer, Pressure
from dnis_torchrec.search.budget import Size
from dnis_torchrec.search.column_order import LOWEST_MEAN, RESTARTED_AT, ColumnImportance
from dnis_torchrec.soft_selection.alpha import Alpha
from tests.reference import variance_reference
from tests.sizes import size_of_share

DIM, STEPS = 8, 300
ALL_HIT = torch.tensor([True, True])


def two_tables(large: int = 40, small: int = 40) -> RowBlocks:
    """One block for each of two tables, of its own."""
    rows = {"large": large, "small": small}
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=n, embedding_dim=DIM, feature_names=[name])
        for name, n in rows.items()
    ]
    counts = {name: torch.ones(n, dtype=torch.int64) for name, n in rows.items()}
    return blocks_from_counts(FrequencyCounts(counts, dict.fromkeys(rows, 1), 100), tables, num_blocks=1, scope="table")


def make_optimizer(
    blocks: RowBlocks, order: str, ratio: float = 4, column_sharing: float = 0.0
) -> tuple[Alpha, AlphaOptimizer]:
    alpha = Alpha(blocks.alpha_shapes)
    pressure = Pressure(size=size_of_share(ratio, blocks), ramp_steps=STEPS, order=order, column_sharing=column_sharing)
    return alpha, AlphaOptimizer(alpha, blocks, pressure=pressure)


@given(
    steps=st.lists(st.lists(st.floats(-5, 5, width=32), min_size=6, max_size=6), min_size=1, max_size=8),
    window=st.sampled_from([1.0, 2.0, 7.0]),
)
def test_losses_match_the_oracle(steps: list[list[float]], window: float) -> None:
    alpha = Alpha({3: (2, 3)})
    alpha.of(3).copy_(torch.tensor([[1.0, 0.5, 0.0], [0.25, 1.0, 0.75]]))
    importance = ColumnImportance(alpha, window=window)
    gradients = [torch.tensor(values).view(2, 3) for values in steps]
    for gradient in gradients:
        importance.update({3: gradient})
    expected = alpha.of(3).double().square() * variance_reference(gradients, window)
    torch.testing.assert_close(importance.losses(3).double(), expected, atol=1e-4, rtol=1e-4)


def test_what_few_batches_see_is_missed_by_few() -> None:
    importance = ColumnImportance(Alpha({1: (2, 1)}), window=400)
    for step in range(2000):
        sign = float(2 * (step % 2) - 1)
        importance.update({1: torch.tensor([[sign], [sign if step % 10 < 2 else 0.0]])})
    always, seldom = importance.losses(1)
    assert float(seldom / always) == pytest.approx(0.2, abs=0.01)


def overfitted(alpha: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Validation wants less of everything, most of the strong first columns; weights make up for what alpha takes."""
    strength = torch.linspace(2, 0.2, DIM).repeat(2, 1)
    return strength * (0.5 + torch.randn(2, DIM, generator=generator)) / alpha.clamp(min=FLOOR)


def kept_of(order: str) -> torch.Tensor:
    alpha, optimizer = make_optimizer(two_tables(), order)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        optimizer.step({DIM: overfitted(alpha.of(DIM), generator)}, {DIM: ALL_HIT})
    return alpha.of(DIM) > 0


def test_where_a_model_overfits_the_order_of_alpha_drops_the_strong_columns_and_importance_keeps_them() -> None:
    by_alpha, by_importance = kept_of("alpha"), kept_of("importance")
    assert by_alpha.sum() == by_importance.sum() == 4
    assert by_importance[:, :2].all()
    assert not by_alpha[:, :2].any()


def means_of(order: str, validation: float) -> tuple[list[float], float]:
    """The mean of alpha over its line after every step of the ramp, and the mean of the living alphas in the end."""
    alpha, optimizer = make_optimizer(two_tables(), order)
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for step in range(1, STEPS):
        optimizer.step({DIM: validation + 0.1 * torch.randn(2, DIM, generator=generator)}, {DIM: ALL_HIT})
        ratios.append(optimizer.mean() / (MEAN_SHARE / 4) ** (step / STEPS))
    return ratios, float(alpha.of(DIM)[alpha.of(DIM) > 0].mean())


@pytest.mark.parametrize("validation", [-0.5, 0.0, 0.5], ids=["holds all up", "is still", "takes all down"])
def test_the_mean_of_alpha_stays_on_its_line_whatever_validation_does(validation: float) -> None:
    ratios, living = means_of("importance", validation)
    assert all(ratio == pytest.approx(1, abs=0.2) for ratio in ratios)
    assert living > 100 * FLOOR


def test_in_the_order_of_alpha_validation_alone_may_take_all_alphas_to_the_floor() -> None:
    ratios, living = means_of("alpha", 0.5)
    assert min(ratios) < 0.05
    assert living == pytest.approx(FLOOR, rel=0.1)


def test_free_by_importance_it_may_take_them_below_their_line_and_not_below_the_lowest() -> None:
    ratios, living = means_of("free_importance", 0.5)
    lowest = [(LOWEST_MEAN / (MEAN_SHARE / 4)) ** (step / STEPS) for step in range(1, STEPS)]
    assert ratios[-1] < 0.3
    assert all(ratio > 0.8 * low for ratio, low in zip(ratios, lowest, strict=True))
    assert living > 10 * FLOOR


@pytest.mark.parametrize(
    ("order", "is_restarted"), [("importance", True), ("alpha", False), ("free_importance", False)]
)
def test_the_release_begins_with_alphas_near_zero_which_grow_from_there(order: str, is_restarted: bool) -> None:
    alpha, optimizer = make_optimizer(two_tables(), order)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, STEPS + 100):
        optimizer.step({DIM: torch.randn(2, DIM, generator=generator) - 0.5}, {DIM: ALL_HIT})
        if step == STEPS:
            assert bool((alpha.of(DIM) <= RESTARTED_AT).all()) == is_restarted
    assert int((alpha.of(DIM) > 0).sum()) == 4
    assert float(alpha.of(DIM)[alpha.of(DIM) > 0].min()) > 10 * RESTARTED_AT


def test_what_is_missed_as_much_dies_first_where_it_costs_more() -> None:
    alpha, optimizer = make_optimizer(two_tables(large=200, small=20), "importance", ratio=1.5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        optimizer.step({DIM: torch.randn(2, DIM, generator=generator)}, {DIM: ALL_HIT})
    large, small = (alpha.of(DIM) > 0).sum(1).tolist()
    assert small == DIM
    assert 200 * large + 20 * small <= 220 * DIM / 1.5 < 200 * (large + 1) + 20 * small


def kept_with_sharing(order: str, column_sharing: float) -> torch.Tensor:
    """Of two tables that miss different columns most, and one both."""
    alpha, optimizer = make_optimizer(two_tables(), order, column_sharing=column_sharing)
    missed = torch.tensor([[5.0, 4.0, 3.0, 1.0, 1.0, 1.0, 0.5, 0.5], [5.0, 0.5, 0.5, 1.0, 1.0, 1.0, 2.5, 3.5]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        optimizer.step({DIM: missed * torch.randn(2, DIM, generator=generator)}, {DIM: ALL_HIT})
    return alpha.of(DIM) > 0


@pytest.mark.parametrize("order", ["importance", "free_importance"])
def test_blocks_that_share_keep_what_all_of_them_miss_together(order: str) -> None:
    apart, together = kept_with_sharing(order, 0.0), kept_with_sharing(order, 100.0)
    assert apart.sum() == together.sum() == 4
    assert together[0].equal(together[1])
    assert not apart[0].equal(apart[1])


def test_a_restored_state_goes_on_the_same_way() -> None:
    blocks, generator = two_tables(), torch.Generator().manual_seed(1)
    alpha, optimizer = make_optimizer(blocks, "importance")
    gradients = [torch.randn(2, DIM, generator=generator) for _ in range(STEPS + 20)]
    for gradient in gradients[:120]:
        optimizer.step({DIM: gradient}, {DIM: ALL_HIT})
    other, restored = make_optimizer(blocks, "importance")
    other.of(DIM).copy_(alpha.of(DIM))
    restored.load_state_dict({name: value.clone() for name, value in optimizer.state_dict().items()})
    for gradient in gradients[120:]:
        optimizer.step({DIM: gradient}, {DIM: ALL_HIT})
        restored.step({DIM: gradient}, {DIM: ALL_HIT})
    assert torch.equal(alpha.of(DIM), other.of(DIM))
    assert optimizer.pressure_now == restored.pressure_now


def test_restored_moments_judge_the_same() -> None:
    alpha = Alpha({3: (2, 3)})
    importance, restored = (ColumnImportance(alpha, window=5) for _ in range(2))
    for _ in range(4):
        importance.update({3: torch.randn(2, 3)})
    restored.load_state_dict({name: value.clone() for name, value in importance.state_dict().items()})
    assert bool(importance.losses(3).all())
    for _ in range(2):
        assert torch.equal(restored.losses(3), importance.losses(3))
        gradient = torch.randn(2, 3)
        importance.update({3: gradient})
        restored.update({3: gradient})


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order 'size': expected a known order, got 'size'"):
        Pressure(size=Size(compression=2), ramp_steps=5, order="size")
