"""Rows as FBGEMM's inference kernels hold them, within the stated bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.forms import PRECISIONS, precision_named
from dnis_torchrec.serving.quantized_rows import error_bound, quantized_rows, values_of_rows


@given(
    st.integers(1, 9),
    st.integers(0, 2**31),
    st.sampled_from(["fp16", "int8", "int4"]),
    st.sampled_from([1e-9, 1e-6, 1e-4, 1.0, 1e4]),
    st.sampled_from([0.0, 1.0]),
)
def test_rows_are_within_their_bound(dim: int, seed: int, precision: str, scale: float, offset: float) -> None:
    """At every magnitude, where scale and bias are subnormal in float16 too."""
    weight = (torch.randn(4, dim, generator=torch.Generator().manual_seed(seed)).clamp(-5, 5) + offset) * scale
    weight[0] = 0.0
    stored = PRECISIONS[precision]
    rows = quantized_rows(weight, stored, place="table 't'")
    assert rows.shape == (4, stored.row_bytes(-(-dim // stored.dim_multiple) * stored.dim_multiple))
    values = values_of_rows(rows, stored)[:, :dim]
    assert bool(((values - weight).abs() <= error_bound(weight, stored).unsqueeze(1)).all())


def decoded(rows: torch.Tensor, precision: str) -> torch.Tensor:
    """The values of rows of int8 or int4, by their format alone."""
    steps = rows[:, :-4]
    if precision == "int4":
        steps = torch.stack([steps & 15, steps >> 4], dim=2).flatten(1)
    scale, bias = rows[:, -4:].contiguous().view(torch.float16).double().unsqueeze(2).unbind(1)
    return steps * scale + bias


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("offset", [0.0, 1e-3, 1.0, -3.0])
@pytest.mark.parametrize("magnitude", [0.0, 1e-8, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2, 1.0])
def test_small_rows_lose_half_a_step_and_no_more(precision: str, offset: float, magnitude: float) -> None:
    """A step of the row's range, widened to begin at a float16, and rounded up to a float16; never more than FBGEMM."""
    weight = offset + magnitude * torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    stored, range_ = PRECISIONS[precision], weight.amax(dim=1) - weight.amin(dim=1)
    rows = quantized_rows(weight, stored, place="table 't'")
    errors = (decoded(rows, precision) - weight).abs().amax(dim=1)
    step = (range_ + 2**-10 * weight.abs().amax(dim=1)) / (2**stored.bits - 1)
    assert bool((errors <= 1.001 * step / 2 + 2**-25).all())
    of_fbgemm = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight, stored.bits)
    theirs = (decoded(of_fbgemm, precision) - weight).abs().amax(dim=1)
    assert bool((errors <= theirs + 1e-7 * weight.abs().amax(dim=1)).all())


def test_rows_that_lose_nothing_are_those_of_fbgemm() -> None:
    weight = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    weight[:2] = torch.tensor([[0.0], [0.5]])
    for precision in ("int8", "int4"):
        rows = quantized_rows(weight, PRECISIONS[precision], place="table 't'")
        assert rows.equal(
            torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight, PRECISIONS[precision].bits)
        )


@pytest.mark.parametrize(
    ("bad", "precision", "message"),
    [
        (float("nan"), "int8", "expected finite values"),
        (float("inf"), "fp32", "expected finite values"),
        (70000.0, "fp16", "expected at most 65504 for fp16"),
        (70000.0, "int4", "expected at most 65504 for int4"),
    ],
)
def test_values_that_do_not_fit(bad: float, precision: str, message: str) -> None:
    weight = torch.zeros(2, 4)
    weight[0, 0] = bad
    with pytest.raises(ValueError, match=f"table 't': {message}"):
        quantized_rows(weight, PRECISIONS[precision], place="table 't'")


def test_a_precision_is_named() -> None:
    with pytest.raises(ValueError, match=r"precision 'int2': expected a known precision.*'int4'"):
        precision_named("int2")
