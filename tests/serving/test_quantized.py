"""QuantizedMixedDimensionEmbeddingBagCollection and the rows it is made of, within the stated bounds of a naive oracle.

Both ways are tried on every case: the compiled operator, and FBGEMM's own kernels around one bucketise call.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dnis_torchrec.blocks.row_routing import RowRouting
from dnis_torchrec.forms import PRECISIONS
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.mixed_dimension import MixedDimensionEmbeddingBagCollection, block_tables
from dnis_torchrec.serving.quantized import QuantizedMixedDimensionEmbeddingBagCollection, quantized_block_rows
from dnis_torchrec.serving.quantized_rows import error_bound, quantized_rows
from tests.quantized_reference import assert_within, expected_with_unknown, with_unknown_ids
from tests.serving_reference import (
    Case,
    all_rows,
    cases,
    keyed_jagged_tensor,
    lookups,
    pruned,
    table_scheme,
    two_tables,
)

WAYS = [pytest.param(True, id="compiled"), pytest.param(False, id="stock")]


def served(case: Case, precision: str, **options: object) -> QuantizedMixedDimensionEmbeddingBagCollection:
    return QuantizedMixedDimensionEmbeddingBagCollection.from_tables(
        case.scheme, case.tables, precision=precision, **options
    )


def row_bound(case: Case, table: str, precision: str) -> torch.Tensor:
    """The stated bound of every value of a table; columns that a block does not retain are exact."""
    scheme, weight = case.scheme.tables[table], case.tables[table]
    bound = torch.zeros_like(weight)
    blocks = scheme.routing.all_blocks()
    for s, of_block in block_tables(scheme, weight.split(5)).items():
        rows = (blocks == s).nonzero()
        bound[rows, scheme.columns(s)] = error_bound(of_block, PRECISIONS[precision]).unsqueeze(1)
    return bound


@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from(sorted(PRECISIONS)), st.booleans())
def test_within_the_stated_bound(case: Case, precision: str, compiled: bool) -> None:
    with lookups(compiled):
        module = served(case, precision)
    assert_within(case, module(case.kjt()).to_dict(), lambda table: row_bound(case, table, precision))


@settings(max_examples=15, deadline=None)
@given(cases(), st.booleans(), st.lists(st.sampled_from([-1, -(2**40), 12, 2**31, 2**40]), max_size=2))
def test_unknown_ids_give_zero_and_count(case: Case, compiled: bool, unknown: list[int]) -> None:
    options = {"unknown_ids": "zero", "new_rows": False}
    with lookups(compiled):
        modules = [
            served(case, "fp32", unknown_ids="zero"),
            MixedDimensionEmbeddingBagCollection.from_tables(case.scheme, case.tables, **options),
        ]
    for module in modules:
        with torch.no_grad():
            pooled = module(with_unknown_ids(case, unknown)).to_dict()
        for name, expected in expected_with_unknown(case, len(unknown)).items():
            torch.testing.assert_close(pooled[name], expected, rtol=1e-5, atol=1e-5)


@given(
    st.integers(1, 9),
    st.integers(0, 2**31),
    st.sampled_from(["fp16", "int8", "int4"]),
    st.sampled_from([1e-9, 1e-6, 1e-4, 1.0, 1e4]),
    st.sampled_from([0.0, 1.0]),
)
def test_rows_are_within_their_bound(dim: int, seed: int, precision: str, scale: float, offset: float) -> None:
    """At every magnitude, where scale and bias are subnormal in float16 too, and served both ways."""
    weight = (torch.randn(4, dim, generator=torch.Generator().manual_seed(seed)).clamp(-5, 5) + offset) * scale
    weight[0] = 0.0
    stored = PRECISIONS[precision]
    rows = quantized_rows(weight, stored, place="table 't'")
    assert rows.shape == (4, stored.row_bytes(-(-dim // stored.dim_multiple) * stored.dim_multiple))
    routing = RowRouting(4, 1, boundaries=torch.tensor([0, 4]))
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, torch.ones(1, dim, dtype=torch.bool))})
    bags = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(4)]})
    for compiled in (True, False):
        with lookups(compiled):
            module = QuantizedMixedDimensionEmbeddingBagCollection(scheme, {"t/b0": rows}, precision=precision)
        assert bool(((module(bags).values() - weight).abs() <= error_bound(weight, stored).unsqueeze(1)).all())


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


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_is_deterministic_and_safe_in_threads(precision: str, compiled: bool) -> None:
    tables, scheme = two_tables()
    with lookups(compiled):
        module = QuantizedMixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, precision=precision)
    expected = module(all_rows()).values()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: module(all_rows()).values(), range(40)))
    assert all(other.equal(expected) for other in found)
    assert copy.deepcopy(module)(all_rows()).values().equal(expected)


@pytest.mark.parametrize("compiled", WAYS)
def test_unknown_id_is_named(compiled: bool) -> None:
    tables, scheme = two_tables()
    with lookups(compiled):
        module = QuantizedMixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, precision="int8")
    bags = keyed_jagged_tensor({"user": [[(10, 1.0)]], "movie": [[(0, 1.0)]]})
    with pytest.raises(ValueError, match=r"table 'user', feature 'user': expected ids in 0\.\.9 .*id 10.*'zero'"):
        module(bags)


INDEX_OF_TWO = 2 * (2 * 7 + 8 * 4) + 4 * 11
"""Of `two_tables`: 7 columns of blocks and 4 boundaries each, and one map of 11 rows."""


def test_stores_what_it_says() -> None:
    tables, scheme = two_tables()
    sizes = {
        name: QuantizedMixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, precision=name).table_bytes()
        for name in PRECISIONS
    }
    # blocks of 3 and 3 rows, and of 2 and 4: 5 columns and 2
    assert sizes == {
        "fp32": (5 * 5 + 7 * 2) * 4 + INDEX_OF_TWO,
        "fp16": (5 * 5 + 7 * 2) * 2 + INDEX_OF_TWO,
        "int8": 5 * (6 + 4) + 7 * (2 + 4) + INDEX_OF_TWO,
        "int4": 5 * (4 + 4) + 7 * (2 + 4) + INDEX_OF_TWO,
    }


@pytest.mark.parametrize(("precision", "row_bytes"), [("fp32", (32, 16)), ("fp16", (16, 16)), ("int4", (16, 16))])
def test_tables_count_off_the_cpu_too(precision: str, row_bytes: tuple[int, int]) -> None:
    """FBGEMM's kernels for accelerators want rows of a multiple of 16 bytes."""
    tables, scheme = two_tables()
    module = QuantizedMixedDimensionEmbeddingBagCollection.from_tables(
        scheme, tables, precision=precision, device="meta"
    )
    assert module.table_bytes() == 5 * row_bytes[0] + 7 * row_bytes[1] + INDEX_OF_TWO


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("compiled", WAYS)
def test_nothing_retained_gives_zeros(precision: str, compiled: bool) -> None:
    routing = RowRouting(10, 3, boundaries=torch.tensor([0, 2, 6, 9]))
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, torch.zeros(3, 5, dtype=torch.bool))})
    with lookups(compiled):
        module = QuantizedMixedDimensionEmbeddingBagCollection.from_tables(
            scheme, {"t": torch.zeros(10, 5)}, precision=precision
        )
    assert module(keyed_jagged_tensor({"f": [[(1, 1.0)], []]})).values().equal(torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("bad", "precision", "message"),
    [
        (float("nan"), "int8", "block 0: expected finite values"),
        (float("inf"), "fp32", "block 0: expected finite values"),
        (70000.0, "fp16", "expected at most 65504 for fp16"),
        (70000.0, "int4", "expected at most 65504 for int4"),
    ],
)
def test_values_that_do_not_fit(bad: float, precision: str, message: str) -> None:
    tables, scheme = two_tables()
    tables["user"][0, 0] = bad
    with pytest.raises(ValueError, match=rf"table 'user', {message}|table 'user', block 0: {message}"):
        QuantizedMixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, precision=precision)


def test_arguments() -> None:
    tables, scheme = two_tables()
    with pytest.raises(ValueError, match=r"precision 'int2': expected a known precision.*'int4'"):
        QuantizedMixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, precision="int2")
    with pytest.raises(ValueError, match="unknown_ids: expected one of"):
        QuantizedMixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, precision="int8", unknown_ids="hash")
    table = scheme.tables["user"]
    rows = quantized_block_rows(table, block_tables(table, [tables["user"]]), "int4")
    fields = {f"user/b{s}": of_block for s, of_block in rows.items()}
    alone = MixedDimensionScheme({"user": table})
    with pytest.raises(ValueError, match=r"table 'user/b0': expected int8 rows: uint8 of shape \(2, 10\)"):
        QuantizedMixedDimensionEmbeddingBagCollection(alone, fields, precision="int8")
    with pytest.raises(ValueError, match="table 'user/b1': expected a known table"):
        QuantizedMixedDimensionEmbeddingBagCollection(alone, {"user/b0": fields["user/b0"]}, precision="int4")


def test_masks_of_wide_rows() -> None:
    """D beyond 64, and not a multiple of the operator's 16 columns."""
    torch.manual_seed(0)
    routing = RowRouting(20, 3, boundaries=torch.tensor([0, 4, 10, 20]))
    retained = torch.rand(3, 137) < torch.tensor([0.9, 0.3, 0.02]).unsqueeze(1)
    weight = pruned(torch.randn(20, 137), routing, retained)
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, retained)})
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, {"t": weight}, new_rows=False)
    bags = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(20)]})
    with torch.no_grad():
        assert module(bags).values().equal(weight)
