"""Every retained column in as many bits, and the forms of earlier versions that are loaded so."""

from __future__ import annotations

from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.rivals import uniform_bits
from benchmarks.rivals.uniform_bits import with_uniform_bits
from dnis_torchrec.artifact.forms import rows_of
from dnis_torchrec.blocks.codes import decode_rows, encode_rows
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme
from tests.serving_reference import Case, cases, pruned, table_scheme

NUM_ROWS, DIM = 300, 8


def pruned_tables() -> tuple[dict[str, Tensor], MixedDimensionScheme]:
    """Two tables whose last block retains nothing, one routed by map and pooled by MEAN."""
    torch.manual_seed(0)
    retained = torch.tensor([[1] * DIM, [0, 1, 0, 1, 1, 0, 0, 0], [0] * DIM], dtype=torch.bool)
    routings = {
        "map": RowRouting.from_map(torch.randint(0, 4, (NUM_ROWS,)), 3),
        "sorted": RowRouting(NUM_ROWS, 3, boundaries=torch.tensor([0, 40, 200, 290])),
    }
    tables = {name: pruned(torch.randn(NUM_ROWS, DIM), routing, retained) for name, routing in routings.items()}
    pooling = {"map": "mean", "sorted": "sum"}
    schemes = {
        name: table_scheme(name, routing, retained, feature_names=(f"{name}_id",), pooling=pooling[name])
        for name, routing in routings.items()
    }
    return tables, MixedDimensionScheme(schemes)


def evenly_rounded(values: Tensor, bits: int) -> Tensor:
    """Every column cut into equal steps from its smallest value to its largest."""
    low, step = values.amin(0), (values.amax(0) - values.amin(0)) / (2**bits - 1)
    return torch.where(step > 0, ((values - low) / step.clamp(min=1e-30)).round() * step + low, values)


@given(cases(), st.sampled_from([2, 4, 8, 16, 32]))
def test_columns_are_no_worse_than_evenly_rounded(case: Case, bits: int) -> None:
    """But for shifts, which come in half steps, and scales, which are bfloat16."""
    rows = {name: rows_of(weight) for name, weight in case.tables.items()}
    coded = with_uniform_bits(case.scheme, rows, bits)
    for name, table in coded.tables.items():
        assert table.bits is not None
        assert table.bits.equal(case.scheme.tables[name].retained.byte() * bits)
        weight, blocks = case.tables[name], table.routing.all_blocks()
        found = decode_rows(encode_rows(weight, blocks, table.codes), blocks, table.codes)
        for s in range(table.routing.num_blocks):
            here = (blocks == s).nonzero()
            if here.numel() and table.dims[s]:
                values, stored = weight[here, table.columns(s)], found[here, table.columns(s)]
                wanted = 0.0 if bits == 32 else (evenly_rounded(values, bits) - values).square().sum(0).sqrt()
                range_ = values.amax(0) - values.amin(0)
                off = range_ / (2**bits - 1) / 4 + 2**-8 * range_ + 1e-5 * values.abs().amax(0)
                found_error = (stored - values).square().sum(0).sqrt()
                assert bool((found_error <= wanted + len(values) ** 0.5 * off).all())
    again = with_uniform_bits(coded, rows, 3)
    assert all(again.tables[name] is table for name, table in coded.tables.items())


def test_a_large_block_is_fitted_to_rows_from_all_over_it() -> None:
    """However many rows are read at a time."""
    tables, scheme = pruned_tables()
    rows, found = {name: rows_of(weight) for name, weight in tables.items()}, []
    for chunk in (7, 64, 1000):
        with (
            patch.object(uniform_bits, "SAMPLED_PER_BLOCK", 20),
            patch.object(uniform_bits, "rows_per_chunk", lambda _, chunk=chunk: chunk),
        ):
            found.append(with_uniform_bits(scheme, rows, 4))
            samples = uniform_bits._samples(scheme.tables["sorted"], rows["sorted"])
    assert [len(samples[s]) for s in range(3)] == [20, 20, 18]
    assert samples[1].equal(tables["sorted"][40:200:8])
    for name, table in found[0].tables.items():
        assert all(table.codes.scale.equal(other.tables[name].codes.scale) for other in found)
