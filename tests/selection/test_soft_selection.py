"""alpha and the pure functions on it: against the equations, row by row, and against numerical gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.selection.alpha import Alpha, normalise_gradient, select_per_block, select_per_sample, step_and_clip_
from tests.reference import normalised_reference

sizes = st.integers(1, 4)
seeds = st.integers(0, 2**31)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(sizes, sizes, sizes, sizes, seeds)
def test_select_per_sample(batch_size: int, num_features: int, num_rows: int, dim: int, seed: int) -> None:
    pooled, alpha = random(batch_size, num_features, dim, seed=seed), random(num_rows, dim, seed=seed + 1)
    rows = torch.randint(num_rows, (batch_size, num_features), generator=torch.Generator().manual_seed(seed))
    got = select_per_sample(pooled, alpha, rows)
    for b in range(batch_size):
        for f in range(num_features):
            assert got[b, f].tolist() == [pooled[b, f, d].item() * alpha[rows[b, f], d].item() for d in range(dim)]
    pooled.requires_grad_()
    alpha.requires_grad_()
    assert torch.autograd.gradcheck(lambda p, a: select_per_sample(p, a, rows), (pooled, alpha))
    # Each gradient alone takes another path: lower steps want that of pooled, upper steps that of alpha.
    assert torch.autograd.gradcheck(lambda p: select_per_sample(p, alpha.detach(), rows), (pooled,))
    assert torch.autograd.gradcheck(lambda a: select_per_sample(pooled.detach(), a, rows), (alpha,))


@given(sizes, sizes, sizes, seeds)
def test_select_per_block(batch_size: int, num_blocks: int, dim: int, seed: int) -> None:
    pooled, alpha = random(batch_size, num_blocks, dim, seed=seed), random(num_blocks, dim, seed=seed + 1)
    expected = torch.zeros(batch_size, dim, dtype=torch.float64)
    for b in range(batch_size):
        for s in range(num_blocks):
            expected[b] += alpha[s] * pooled[b, s]
    torch.testing.assert_close(select_per_block(pooled, alpha), expected)
    assert torch.autograd.gradcheck(select_per_block, (pooled.requires_grad_(), alpha.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_alpha_stays_float32_whatever_tables_put_out(dtype: torch.dtype) -> None:
    """Its gradient is summed in its own precision, as if the output of the tables had been cast before."""
    pooled = random(50, 2, 3, seed=0).to(dtype)
    weights = random(50, 2, 3, seed=1).to(dtype)
    rows = torch.randint(4, (50, 2), generator=torch.Generator().manual_seed(2))
    alpha = random(4, 3, seed=3, dtype=torch.float32).requires_grad_()
    selected = select_per_sample(pooled, alpha, rows)
    per_block = select_per_block(pooled, alpha[:2])
    assert (selected.dtype, per_block.dtype) == (dtype, dtype)
    got = torch.autograd.grad((selected * weights).sum() + (per_block * weights[:, 0]).sum(), [alpha])[0]
    cast, of_sample = pooled.float(), weights.float()
    expected = torch.zeros(4, 3)
    for b in range(50):
        for f in range(2):
            expected[rows[b, f]] += cast[b, f] * of_sample[b, f]
            expected[f] += cast[b, f] * of_sample[b, 0]
    torch.testing.assert_close(got, expected)


def test_select_leaves_its_arguments_alone() -> None:
    pooled, alpha = random(2, 1, 3, seed=0), random(2, 3, seed=1)
    before = pooled.clone(), alpha.clone()
    select_per_sample(pooled, alpha, torch.tensor([[0], [1]]))
    select_per_block(pooled.view(1, 2, 3), alpha)
    assert torch.equal(pooled, before[0])
    assert torch.equal(alpha, before[1])


@given(st.lists(st.booleans(), min_size=1, max_size=5), sizes, seeds, st.sampled_from([1e-12, 1e-3, 1.0, 1e6]))
def test_normalise_gradient(hits: list[bool], dim: int, seed: int, scale: float) -> None:
    gradient = scale * random(len(hits), dim, seed=seed)
    got = normalise_gradient(gradient, torch.tensor(hits))
    torch.testing.assert_close(got, normalised_reference(gradient, hits))
    assert got[~torch.tensor(hits)].count_nonzero() == 0
    for row, own, hit in zip(got, gradient, hits, strict=True):
        if own.abs().mean() > 1e-5:  # the mean step of a row that was hit is 1, whatever its signal
            assert row.abs().mean().item() == pytest.approx(float(hit), abs=2e-2)


def test_normalise_gradient_of_nothing_is_zero() -> None:
    assert normalise_gradient(torch.zeros(1, 3), torch.tensor([True])).tolist() == [[0, 0, 0]]
    noise = torch.tensor([[float("nan"), 1.0]])
    assert normalise_gradient(noise, torch.tensor([False])).tolist() == [[0, 0]]


unit = st.floats(0, 1, width=32)
cells = st.lists(st.tuples(unit, st.floats(-50, 50, width=32)), min_size=1, max_size=6)


@given(cells, st.sampled_from([0.005, 0.1, 2.0]), unit)
def test_step_and_clip(cells: list[tuple[float, float]], learning_rate: float, floor: float) -> None:
    alpha, direction = (torch.tensor([column], dtype=torch.float64) for column in zip(*cells, strict=True))
    expected = [max(floor, min(1.0, a - learning_rate * d)) for a, d in cells]
    got = step_and_clip_(alpha, direction, learning_rate, floor=floor)
    assert got is alpha
    assert got.flatten().tolist() == pytest.approx(expected)
    assert ((got >= floor) & (got <= 1)).all()


@pytest.mark.parametrize("rate", [0.0, -0.1, float("nan")])
def test_learning_rate_must_be_positive(rate: float) -> None:
    alpha = torch.ones(1, 2)
    with pytest.raises(ValueError, match=f"learning_rate: expected a number above 0, got {rate}"):
        step_and_clip_(alpha, torch.ones(1, 2), rate)
    assert alpha.tolist() == [[1, 1]]


def test_alpha_starts_at_one_and_is_no_parameter() -> None:
    alpha = Alpha({4: (3, 4), 8: (1, 8)})
    assert alpha.dims == (4, 8)
    assert torch.equal(alpha.of(4), torch.ones(3, 4))
    assert alpha.of(8).shape == (1, 8)
    assert list(alpha.parameters()) == []
    assert set(alpha.state_dict()) == {"dim4", "dim8"}


def test_alpha_learns_inside_upper_level_only() -> None:
    alpha = Alpha({2: (3, 2), 4: (1, 4)})
    alpha.record_hits(2, torch.tensor([1]))  # outside: nothing to note
    for _ in range(2):  # hits of an earlier step do not stay
        with alpha.upper_level() as hits:
            assert alpha.is_upper
            assert alpha.of(2).requires_grad
            assert alpha.of(4).requires_grad
            assert hits[2].tolist() == [False] * 3
            alpha.record_hits(2, torch.tensor([[2, 0], [2, 2]]))
            alpha.record_hits(4, torch.tensor([], dtype=torch.int64))
        assert hits[2].tolist() == [True, False, True]
        assert hits[4].tolist() == [False]
    assert not alpha.is_upper
    assert not alpha.of(2).requires_grad


def test_upper_level_ends_when_the_step_fails() -> None:
    alpha = Alpha({2: (1, 2)})
    with pytest.raises(KeyError), alpha.upper_level():
        raise KeyError
    assert not alpha.is_upper
    assert not alpha.of(2).requires_grad


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=3, max_size=3), min_size=1, max_size=4), seeds)
def test_density_and_mean_weigh_rows_of_alpha_by_the_rows_they_serve(values: list[list[float]], seed: int) -> None:
    alpha = Alpha({3: (len(values), 3), 2: (1, 2)})
    alpha.of(3).copy_(torch.tensor(values))
    alpha.of(2).copy_(torch.tensor([[0.0, 0.5]]))
    rows = torch.randint(1, 9, (len(values),), generator=torch.Generator().manual_seed(seed)).double()
    served = [row[d] for row, n in zip(values, rows.int().tolist(), strict=True) for _ in range(n) for d in range(3)]
    served += [0.0, 0.5] * 7
    per_row = {3: rows, 2: torch.tensor([7.0], dtype=torch.float64)}
    assert alpha.density(per_row) == pytest.approx(sum(value > 0 for value in served) / len(served))
    assert alpha.mean(per_row) == pytest.approx(sum(served) / len(served))
