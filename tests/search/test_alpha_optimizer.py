"""AlphaOptimizer: steps against a hand-written oracle, value by value; dead columns stay dead, others at a floor."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.search.pipeline import LEARNING_RATE, AlphaOptimizer
from dnis_torchrec.selection.alpha import Alpha
from tests.reference import normalised_reference

DIM = 4
HIT = torch.tensor([True, True, True])


def make_blocks(counts: Sequence[int] = tuple(range(60, 0, -1))) -> RowBlocks:
    """Three blocks of equally many rows, the most frequent ones first."""
    table = EmbeddingBagConfig(name="t", num_embeddings=len(counts), embedding_dim=DIM, feature_names=["f"])
    return blocks_from_counts(FrequencyCounts({"t": torch.tensor(counts)}, {"f": 1}, 100), [table], num_blocks=3)


def make_optimizer(
    blocks: RowBlocks | None = None, *, rate: float = LEARNING_RATE, **settings: float
) -> tuple[Tensor, AlphaOptimizer]:
    """The alpha of one table, and what steps it."""
    blocks = blocks or make_blocks()
    alpha = Alpha(blocks.alpha_shapes)
    optimizer = AlphaOptimizer(alpha, blocks, **settings)
    optimizer.learning_rate = rate
    return alpha.of(DIM), optimizer


def step_reference(
    alpha: list[list[float]],
    average: list[list[float]],
    fresh: Tensor,
    hits: Sequence[bool],
    dead: Sequence[Sequence[bool]],
    *,
    rate: float,
    averaging: float,
    floor: float,
) -> None:
    """One upper step of lists of lists, in place."""
    for row in (row for row, is_hit in enumerate(hits) if is_hit):
        for column in range(DIM):
            moved = averaging * average[row][column] + (1 - averaging) * float(fresh[row, column])
            stepped = min(1.0, max(floor, alpha[row][column] - rate * moved))
            is_held_up, is_held_down = stepped <= floor and moved > 0, stepped >= 1 and moved < 0
            average[row][column] = 0.0 if is_held_up or is_held_down else moved
            alpha[row][column] = 0.0 if dead[row][column] else stepped


columns = st.lists(st.lists(st.booleans(), min_size=DIM, max_size=DIM), min_size=3, max_size=3)


@given(
    gradients=st.lists(
        st.lists(st.floats(-5, 5, width=32), min_size=3 * DIM, max_size=3 * DIM), min_size=1, max_size=6
    ),
    hits=st.lists(st.booleans(), min_size=3, max_size=3),
    dead=columns,
    dies_at=st.integers(0, 5),
    averaging=st.sampled_from([0.0, 0.9]),
    floor=st.sampled_from([0.0, 0.25]),
    rate=st.sampled_from([0.2, 4.7]),  # slow, and so fast that alphas are at their bounds soon and leave them again
)
def test_steps_are_those_of_the_oracle(
    gradients: list[list[float]],
    hits: list[bool],
    dead: list[list[bool]],
    dies_at: int,
    averaging: float,
    floor: float,
    rate: float,
) -> None:
    alpha, optimizer = make_optimizer(rate=rate, averaging=averaging, floor=floor)
    expected, average = [[1.0] * DIM for _ in range(3)], [[0.0] * DIM for _ in range(3)]
    died = [[False] * DIM for _ in range(3)]
    for step, values in enumerate(gradients):
        if step == dies_at:
            died = dead
            optimizer.retain_({DIM: ~torch.tensor(dead)})
            for row in range(3):
                expected[row] = [0.0 if dead[row][column] else a for column, a in enumerate(expected[row])]
        gradient = torch.tensor(values).view(3, DIM)
        optimizer.step({DIM: gradient}, {DIM: torch.tensor(hits)})
        fresh = normalised_reference(gradient, hits)
        step_reference(expected, average, fresh, hits, died, rate=rate, averaging=averaging, floor=floor)
        torch.testing.assert_close(alpha, torch.tensor(expected), atol=1e-5, rtol=0)


@given(st.lists(columns, min_size=1, max_size=4), st.sampled_from([-1.0, 1.0]))
def test_columns_die_once_and_for_all(retained: list[list[list[bool]]], pushes: float) -> None:
    """Whatever is retained later, and however much validation wants them; the others never go below their floor."""
    alpha, optimizer = make_optimizer(rate=0.9, floor=0.05)
    living = torch.ones(3, DIM, dtype=torch.bool)
    for columns_of_stage in retained:
        living &= torch.tensor(columns_of_stage)
        optimizer.retain_({DIM: torch.tensor(columns_of_stage)})
        for _ in range(3):
            optimizer.step({DIM: pushes * torch.ones(3, DIM)}, {DIM: HIT})
            assert torch.equal(alpha > 0, living)
            assert bool((alpha[living] >= 0.05).all())
            assert bool((alpha[living] <= 1).all())


def test_rows_without_a_hit_do_not_move() -> None:
    alpha, optimizer = make_optimizer(averaging=0.5)
    optimizer.step({DIM: torch.ones(3, DIM)}, {DIM: HIT})
    before = alpha.clone()
    optimizer.step({DIM: torch.ones(3, DIM)}, {DIM: torch.tensor([True, False, True])})
    assert torch.equal(alpha == before, torch.tensor([[False], [True], [False]]).expand(3, DIM))


def test_density_and_mean_are_those_of_values_of_rows_that_training_saw() -> None:
    """Of the last block's twenty rows it saw ten."""
    alpha, optimizer = make_optimizer(make_blocks([*range(60, 10, -1), *[0] * 10]))
    assert (optimizer.density(), optimizer.mean(), optimizer.last_density) == (1.0, 1.0, 1.0)
    alpha[0] = 0.5
    optimizer.retain_({DIM: torch.tensor([[True] * DIM, [False] * DIM, [True, False, False, False]])})
    expected = (20 * 4 + 10 * 1) / (50 * 4)
    assert optimizer.density() == optimizer.last_density == pytest.approx(expected)
    assert optimizer.mean() == pytest.approx((20 * 4 * 0.5 + 10) / (50 * 4))


def test_a_restored_state_goes_on_the_same_way() -> None:
    torch.manual_seed(1)
    settings = {"rate": 0.2, "averaging": 0.9, "floor": 0.01}
    alpha, optimizer = make_optimizer(**settings)
    gradients = [torch.randn(3, DIM) for _ in range(40)]
    for gradient in gradients[:15]:
        optimizer.step({DIM: gradient}, {DIM: HIT})
    optimizer.retain_({DIM: torch.tensor([True, False, True, True]).expand(3, DIM)})
    other, restored = make_optimizer(**settings)
    other.copy_(alpha)
    restored.load_state_dict({name: value.clone() for name, value in optimizer.state_dict().items()})
    assert restored.last_density == optimizer.last_density == 0.75
    for gradient in gradients[15:]:
        for each in (optimizer, restored):
            each.step({DIM: gradient}, {DIM: HIT})
        assert torch.equal(alpha, other)


@pytest.mark.parametrize("name", ["averaging", "floor"])
@pytest.mark.parametrize("value", [1.0, -0.1, float("nan")])
def test_shares_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}: expected a number in \[0, 1\), got {value}"):
        make_optimizer(**{name: value})
