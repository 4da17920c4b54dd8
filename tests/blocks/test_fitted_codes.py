"""Codes against naive rounding, and the best of them against a fine grid of scales and shifts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dnis_torchrec.blocks.codes import ColumnCodes, decode_rows, encode_rows, fit_codes
from tests.reference import rounded_reference, rounding_error_reference

BITS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
CODED = [width for width in BITS if 0 < width < 32]


def _drawn(kind: str, rows: int, columns: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    normal = torch.randn(rows, columns, generator=generator)
    made = {
        "normal": normal,
        "heavy": normal**5,
        "one-sided": normal.abs() + 0.1,
        "far from zero": normal * 1e-3 + 50,
        "two values": normal.sign() + 0.3,
        "tiny": normal * 1e-12,
        "huge": normal * 1e30,
    }
    return made[kind]


KINDS = ["normal", "heavy", "one-sided", "far from zero", "two values", "tiny", "huge"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 300])
def test_errors_are_those_of_naive_rounding_with_what_is_stored(kind: str, rows: int) -> None:
    """By boundaries between codes (300 rows) and by values (up to 3)."""
    values, weights = _drawn(kind, rows), torch.rand(rows, generator=torch.Generator().manual_seed(0)) + 0.1
    fitted = fit_codes(values, weights, BITS)
    for index, width in enumerate(BITS):
        if width not in CODED[:8]:
            continue
        for column in range(values.shape[1]):
            found = float(fitted.error[index, column])
            scale, shift = float(fitted.scale[index, column]), int(fitted.shift[index, column])
            expected = rounding_error_reference(values[:, column].tolist(), weights.tolist(), scale, shift, width)
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_bfloat16_and_more_bits_never_err_by_more(kind: str) -> None:
    values = _drawn(kind, 300)
    fitted = fit_codes(values, torch.ones(300), BITS)
    assert torch.equal(fitted.scale, fitted.scale.bfloat16().float())
    assert bool((fitted.scale > 0).all())
    assert fitted.error[0].tolist() == [1.0] * 3
    assert fitted.error[-1].tolist() == [0.0] * 3
    upto_8 = fitted.error[: BITS.index(8) + 1]
    assert bool((upto_8.diff(dim=0) <= 1e-13).all())


@pytest.mark.parametrize("kind", ["normal", "heavy", "one-sided", "two values"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_no_scale_and_shift_of_a_fine_grid_is_much_better(kind: str, width: int) -> None:
    values = _drawn(kind, 40, columns=1)
    fitted = fit_codes(values, torch.ones(40), [width])
    found, reach = float(fitted.error[0, 0]), float(values.abs().max())
    scales = torch.logspace(-2.5, 0.4, 60).mul(2 * reach).bfloat16().float().tolist()
    x = values[:, 0].double()
    errors = []
    for scale in scales:
        shifts = torch.arange(-int(2 * reach / scale) - 2**width - 1, int(2 * reach / scale) + 2)
        codes = (x / scale - shifts[:, None] / 2).round().clamp(0, 2**width - 1)
        errors.append(float((scale * (codes + shifts[:, None] / 2) - x).square().sum(1).min() / x.square().sum()))
    assert found <= 1.1 * min(errors) + 1e-3


def test_rows_that_are_looked_up_more_are_rounded_better() -> None:
    values = torch.tensor([[0.1], [0.2], [0.7], [0.9], [-0.8], [10.0]])
    rare = fit_codes(values, torch.tensor([1, 1, 1, 1, 1, 1e-6]), [3])
    often = fit_codes(values, torch.ones(6), [3])
    assert float(rare.scale[0, 0]) < 0.5 < float(often.scale[0, 0])


@pytest.mark.parametrize("value", [0.0, 1.0, -77.7, 0.12345678, 3.3e-5, 1e30])
def test_constant_columns_are_exact(value: float) -> None:
    """Half a bfloat16 times an int16 comes within a few float32 roundings of any value."""
    values = torch.full((5, 1), value)
    fitted = fit_codes(values, torch.ones(5), BITS)
    for index, width in enumerate(BITS):
        codes = ColumnCodes(torch.tensor([[width]]).byte(), fitted.scale[index, None], fitted.shift[index, None])
        block = torch.zeros(5, dtype=torch.int64)
        if width:
            torch.testing.assert_close(
                decode_rows(encode_rows(values, block, codes), block, codes), values, rtol=5e-7, atol=0
            )


@pytest.mark.parametrize("values_of_one", [[0.12345678] * 9, [0.0] * 9])
def test_a_constant_column_changes_nothing_of_the_one_beside_it(values_of_one: list[float]) -> None:
    columns = [torch.tensor(values_of_one).unsqueeze(1), _drawn("normal", 9, 1)]
    both = fit_codes(torch.cat(columns, dim=1), torch.ones(9), BITS)
    for place, column in enumerate(columns):
        alone = fit_codes(column, torch.ones(9), BITS)
        for name in ("scale", "shift", "error"):
            assert getattr(both, name)[:, place].equal(getattr(alone, name)[:, 0]), name


def test_a_huge_outlier_is_kept_where_that_errs_least() -> None:
    values = torch.cat([torch.randn(999, 1, generator=torch.Generator().manual_seed(0)), torch.tensor([[1e6]])])
    fitted = fit_codes(values, torch.ones(1000), [2, 4])
    assert bool((fitted.error < 1e-5).all())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), blocks=st.integers(1, 3), columns=st.integers(1, 4), rows=st.integers(0, 6))
def test_codes_are_the_nearest_ones(data: st.DataObject, blocks: int, columns: int, rows: int) -> None:
    def drawn(choices: list[float], height: int) -> torch.Tensor:
        size = height * columns
        return torch.tensor(data.draw(st.lists(st.sampled_from(choices), min_size=size, max_size=size))).view(
            -1, columns
        )

    bits, scale = drawn([*BITS], blocks).byte(), drawn([0.25, 0.75, 2.0], blocks)
    shift = drawn([-7, -3, 0, 2], blocks).short()
    codes = ColumnCodes(bits, scale, shift)
    values = drawn([-9.3, -1.01, 0.0, 0.3, 0.77, 5.2], rows).float()
    of_rows = torch.tensor(data.draw(st.lists(st.integers(0, blocks), min_size=rows, max_size=rows)), dtype=torch.int64)
    encoded = encode_rows(values, of_rows, codes)
    decoded = decode_rows(encoded, of_rows, codes)
    assert encoded.dtype == torch.int32
    for row in range(rows):
        for column in range(columns):
            block, value = int(of_rows[row]), float(values[row, column])
            width = int(bits[block, column]) if block < blocks else 0
            if width == 32:
                assert float(decoded[row, column]) == value
            elif width == 0:
                assert (int(encoded[row, column]), float(decoded[row, column])) == (0, 0.0)
            elif width <= 8:
                step, half = float(scale[block, column]), int(shift[block, column])
                (nearest,) = (step * (q + half / 2) for q in rounded_reference([value], step, half, width))
                found = step * (int(encoded[row, column]) + half / 2)
                assert abs(found - value) == pytest.approx(abs(nearest - value), abs=1e-6)  # two may be as near
                assert float(decoded[row, column]) == pytest.approx(found, abs=1e-6)


def test_values_that_are_none_are_refused() -> None:
    codes = ColumnCodes(torch.full((2, 2), 4).byte(), torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int16))
    values = torch.tensor([[0.0, 1.0], [2.0, torch.nan]])
    with pytest.raises(ValueError, match=r"codes: expected finite values, got nan in block 1, column 1"):
        encode_rows(values, torch.tensor([0, 1]), codes)
