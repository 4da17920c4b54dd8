"""Bit fields against a count by hand, and the bits of a scheme."""

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
    WIDTHS,
    ColumnCodes,
    decode_rows,
    encode_rows,
    feedback_of,
    field_offsets,
    fit_codes,
    rounding_order,
    row_strides,
)
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme, TableScheme
from tests.reference import error_feedback_reference, rounded_reference, rounding_error_reference


@given(bits=st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=40))
def test_fields_follow_one_another_and_floats_begin_at_whole_bytes(bits: list[int]) -> None:
    end, expected = 0, []
    for width in bits:
        if width == 32:
            while end % 8:
                end += 1
        expected.append(end)
        end += width
    assert field_offsets(torch.tensor([bits]))[0].tolist() == expected
    assert row_strides(torch.tensor([bits])).tolist() == [(end + 7) // 8]


def table_scheme(bits: torch.Tensor | None) -> TableScheme:
    return TableScheme(
        name="t",
        collection="ebc",
        num_embeddings=3,
        embedding_dim=2,
        pooling="sum",
        feature_names=("f",),
        is_weighted=False,
        routing=RowRouting(3, 2, boundaries=torch.tensor([0, 1, 3])),
        retained=torch.tensor([[True, True], [False, True]]),
        num_retained=4,
        bits=bits,
    )


def test_bits_of_a_scheme_survive_its_parts() -> None:
    bits = torch.tensor([[8, 3], [0, 32]], dtype=torch.uint8)
    scheme = MixedDimensionScheme({"t": table_scheme(bits)})
    again = MixedDimensionScheme.from_parts(scheme.to_json(), scheme.to_tensors()).tables["t"].bits
    assert again is not None
    assert again.equal(bits)
    assert "t/bits" not in MixedDimensionScheme({"t": table_scheme(None)}).to_tensors()


@pytest.mark.parametrize(
    ("bits", "requirement"),
    [
        (torch.tensor([[8, 3], [4, 32]]), "expected bits of shape"),
        (torch.tensor([[8, 0], [0, 32]]), "expected bits of shape"),
        (torch.tensor([[8, 3]]), "expected bits of shape"),
        (torch.tensor([[9, 3], [0, 32]]), "expected bits among"),
    ],
)
def test_bits_that_do_not_fit_are_refused(bits: torch.Tensor, requirement: str) -> None:
    with pytest.raises(ValueError, match=requirement):
        table_scheme(bits)


def test_bits_want_whole_columns() -> None:
    with pytest.raises(ValueError, match="whole columns"):
        replace(table_scheme(torch.tensor([[8, 3], [0, 32]])), num_retained=3)


def test_served_bytes_are_rows_scales_bits_and_the_directory() -> None:
    """One row of the first block, two of the second; 4 bytes of bits and 24 of boundaries."""
    mixed = table_scheme(torch.tensor([[8, 3], [0, 32]], dtype=torch.uint8))
    assert mixed.served_bytes(PACKED) == (2 + 2 * 4) + 2 * 4 + 4 + 24
    assert table_scheme(None).served_bytes(PACKED) == (8 + 2 * 4) + 4 + 24
    nothing = torch.zeros(2, 2, dtype=torch.uint8)
    assert replace(table_scheme(None), retained=nothing > 0, num_retained=0, bits=nothing).served_bytes(PACKED) == 0


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


COARSE = (0, 1, 2, 3, 32)
"""Coarse ones: a value as good as half way between two codes, where float32 decides otherwise than float64, is rare."""


def couplings_of(num_blocks: int, dim: int, generator: torch.Generator) -> Tensor:
    """Those of random slopes, of which fewer than D are independent; a last block that nothing reads."""
    slopes = torch.randn(num_blocks, max(1, dim // 2), dim, generator=generator, dtype=torch.float64)
    found = slopes.mT @ slopes
    found[num_blocks - 1] *= float(num_blocks == 1)
    return found


def codes_of(num_blocks: int, dim: int, generator: torch.Generator) -> ColumnCodes:
    bits = torch.tensor(COARSE)[torch.randint(len(COARSE), (num_blocks, dim), generator=generator)]
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
    nearest, with_feedback = (
        float(((rounded(rows, blocks, of) - rows).double() @ couplings[0] * (rounded(rows, blocks, of) - rows)).sum())
        for of in (codes, replace(codes, feedback=feedback_of(couplings, bits)))
    )
    assert with_feedback < 0.5 * nearest


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
    moved = of.settle(rows, blocks)
    assert torch.equal(rounded(moved, blocks, codes), rounded(rows, blocks, of))
    assert not torch.equal(rounded(rows, blocks, codes), rounded(rows, blocks, of))
    assert torch.equal(moved[blocks == 2], rows[blocks == 2])


def test_feedback_of_another_shape_is_refused() -> None:
    codes = codes_of(2, 3, torch.Generator().manual_seed(3))
    with pytest.raises(ValueError, match=r"ColumnCodes.feedback: expected \(2, 3, 3\), got \(2, 3\)"):
        replace(codes, feedback=torch.zeros(2, 3))
