"""Error feedback against the oracle, and where it does nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dnis_torchrec.blocks.codes import (
    DIAGONAL_SHARE,
    TABLE_SHARE,
    ColumnCodes,
    decode_rows,
    encode_rows,
    feedback_of,
    rounding_order,
)
from tests.reference import error_feedback_reference

WIDTHS = (0, 1, 2, 3, 32)
"""Coarse ones: a value as good as half way between two codes, where float32 decides otherwise than float64, is rare."""


def couplings_of(num_blocks: int, dim: int, generator: torch.Generator) -> Tensor:
    """Those of random slopes, of which fewer than D are independent; a last block that nothing reads."""
    slopes = torch.randn(num_blocks, max(1, dim // 2), dim, generator=generator, dtype=torch.float64)
    found = slopes.mT @ slopes
    found[num_blocks - 1] *= float(num_blocks == 1)
    return found


def codes_of(num_blocks: int, dim: int, generator: torch.Generator) -> ColumnCodes:
    bits = torch.tensor(WIDTHS)[torch.randint(len(WIDTHS), (num_blocks, dim), generator=generator)]
    coded = (bits > 0) & (bits < 32)
    scale = torch.where(coded, (2.0 ** -bits.clamp(max=10) * 4).bfloat16().float(), 1.0)
    shift = torch.where(coded, -(2 ** bits.clamp(max=15) - 1), 0).short()
    return ColumnCodes(bits.byte(), scale, shift)


def rounded(rows: Tensor, blocks: Tensor, codes: ColumnCodes) -> Tensor:
    return decode_rows(encode_rows(rows, blocks, codes), blocks, codes)


def shrunk(couplings: Tensor) -> Tensor:
    """By the formula: each of trace 1, a share of the table's, a share of the diagonal's."""
    trace = [float(torch.trace(own)) for own in (*couplings, couplings.sum(0))]
    of_table = couplings.sum(0) / (trace[-1] or 1)
    eye = torch.eye(couplings.shape[1], dtype=torch.float64) / couplings.shape[1]
    return torch.stack(
        [
            own / (t or 1) + TABLE_SHARE * of_table + DIAGONAL_SHARE * eye
            for own, t in zip(couplings, trace, strict=False)
        ]
    )


@settings(max_examples=40, deadline=None)
@given(num_blocks=st.integers(1, 3), dim=st.integers(1, 6), num_rows=st.integers(0, 9), seed=st.integers(0, 999))
def test_it_is_the_move_that_costs_least(num_blocks: int, dim: int, num_rows: int, seed: int) -> None:
    """Column by column, also of blocks that no sample reads; rows of no block are nothing, in chunks as at once."""
    generator = torch.Generator().manual_seed(seed)
    couplings, codes = couplings_of(num_blocks, dim, generator), codes_of(num_blocks, dim, generator)
    rows = torch.randn(num_rows, dim, generator=generator)
    blocks = torch.randint(0, num_blocks + 1, (num_rows,), generator=generator)
    found = rounded(rows, blocks, replace(codes, feedback=feedback_of(couplings, codes.bits)))
    one_by_one = [
        rounded(rows[i : i + 1], blocks[i : i + 1], replace(codes, feedback=feedback_of(couplings, codes.bits)))
        for i in range(num_rows)
    ]
    assert torch.equal(found, torch.cat([torch.zeros(0, dim), *one_by_one]))
    for row, block, own in zip(rows, blocks.tolist(), found, strict=True):
        if block == num_blocks:
            assert not own.any()
            continue

        def nearest(column: int, value: float, block: int = block) -> float:
            width = int(codes.bits[block, column])
            if width in (0, 32):
                return value if width else 0.0
            scale, shift = float(codes.scale[block, column]), float(codes.shift[block, column]) / 2
            return scale * (min(max(round(value / scale - shift), 0), 2**width - 1) + shift)

        order = sorted(range(dim), key=lambda column, block=block: int(codes.bits[block, column]))
        wanted = error_feedback_reference(row, shrunk(couplings)[block], order, nearest)
        torch.testing.assert_close(own.double(), wanted, rtol=1e-4, atol=1e-4)


def test_errors_that_predictions_feel_become_smaller() -> None:
    generator = torch.Generator().manual_seed(0)
    slopes = torch.randn(400, 4, generator=generator, dtype=torch.float64) @ torch.randn(
        4, 16, generator=generator, dtype=torch.float64
    )
    couplings, rows = (slopes.T @ slopes)[None], torch.randn(500, 16, generator=generator)
    bits = torch.tensor([[0, 1, 2, 2] * 4])
    codes = ColumnCodes(bits.byte(), torch.ones(1, 16), torch.where(bits > 0, -(2**bits - 1), 0).short())
    blocks = torch.zeros(500, dtype=torch.int64)
    nearest, fed_back = (
        float(((rounded(rows, blocks, of) - rows).double() @ couplings[0] * (rounded(rows, blocks, of) - rows)).sum())
        for of in (codes, replace(codes, feedback=feedback_of(couplings, bits)))
    )
    assert fed_back < 0.5 * nearest


@pytest.mark.parametrize("couplings", [torch.eye(3, dtype=torch.float64)[None], torch.zeros(1, 3, 3).double()])
def test_columns_that_do_not_meet_have_their_nearest_codes(couplings: Tensor) -> None:
    assert not feedback_of(couplings, torch.tensor([[2, 0, 4]])).any()


def test_columns_of_few_bits_come_first() -> None:
    assert rounding_order(torch.tensor([[4, 0, 2, 0]])).tolist() == [[1, 3, 2, 0]]


def test_values_that_were_settled_have_the_same_codes() -> None:
    """So that a table may train on from them, or be written once more, without feedback."""
    generator = torch.Generator().manual_seed(1)
    couplings, codes = couplings_of(2, 5, generator), codes_of(2, 5, generator)
    of = replace(codes, feedback=feedback_of(couplings, codes.bits))
    rows, blocks = torch.randn(50, 5, generator=generator), torch.randint(0, 3, (50,), generator=generator)
    settled = of.settled(rows, blocks)
    assert torch.equal(rounded(settled, blocks, codes), rounded(rows, blocks, of))
    assert not torch.equal(rounded(rows, blocks, codes), rounded(rows, blocks, of))
    assert torch.equal(settled[blocks == 2], rows[blocks == 2])


def test_feedback_of_another_shape_is_refused() -> None:
    codes = codes_of(2, 3, torch.Generator().manual_seed(3))
    with pytest.raises(ValueError, match=r"ColumnCodes.feedback: expected \(2, 3, 3\), got \(2, 3\)"):
        replace(codes, feedback=torch.zeros(2, 3))
