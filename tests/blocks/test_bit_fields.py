"""Bit fields against a count by hand, and the bits of a scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.blocks.codes import WIDTHS, field_offsets, row_strides
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme, TableScheme


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


def _table(bits: torch.Tensor | None) -> TableScheme:
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
    scheme = MixedDimensionScheme({"t": _table(bits)})
    again = MixedDimensionScheme.from_parts(scheme.to_json(), scheme.to_tensors()).tables["t"].bits
    assert again is not None
    assert again.equal(bits)
    assert "t/bits" not in MixedDimensionScheme({"t": _table(None)}).to_tensors()


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
        _table(bits)


def test_bits_want_whole_columns() -> None:
    with pytest.raises(ValueError, match="whole columns"):
        replace(_table(torch.tensor([[8, 3], [0, 32]])), num_retained=3)


def test_served_bytes_are_rows_scales_bits_and_the_directory() -> None:
    """One row of the first block, two of the second; 4 bytes of bits and 24 of boundaries."""
    mixed = _table(torch.tensor([[8, 3], [0, 32]], dtype=torch.uint8))
    assert mixed.served_bytes(PACKED) == (2 + 2 * 4) + 2 * 4 + 4 + 24
    assert _table(None).served_bytes(PACKED) == (8 + 2 * 4) + 4 + 24
    nothing = torch.zeros(2, 2, dtype=torch.uint8)
    assert replace(_table(None), retained=nothing > 0, num_retained=0, bits=nothing).served_bytes(PACKED) == 0
