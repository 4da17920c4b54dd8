"""DenseEmbeddingBagCollection, with and without its empty rows, within the stated bounds of a naive oracle."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.forms import PRECISIONS
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.dense import DenseEmbeddingBagCollection, dense_rows, kept_rows
from dnis_torchrec.serving.quantized_rows import error_bound
from tests.quantized_reference import assert_within, expected_with_unknown, with_unknown_ids
from tests.serving_reference import Case, cases, keyed_jagged_tensor, pruned, table_scheme

ROUTINGS = {
    "boundaries": RowRouting(10, 3, boundaries=torch.tensor([0, 2, 6, 9])),
    "map": RowRouting.from_map(torch.tensor([2, 0, 1, 0, 2, 1, 1, 3, 0, 2]), 3),
}


def eight_columns(routing: RowRouting, **fields: object) -> tuple[MixedDimensionScheme, dict[str, torch.Tensor]]:
    """One table of D = 8 whose last block retains nothing."""
    torch.manual_seed(0)
    retained = torch.rand(3, 8) < torch.tensor([0.9, 0.5, 0.0]).unsqueeze(1)
    weight = pruned(torch.randn(10, 8), routing, retained)
    return MixedDimensionScheme({"t": table_scheme("t", routing, retained, **fields)}), {"t": weight}


def fits(case: Case, precision: str) -> bool:
    return all(table.embedding_dim % PRECISIONS[precision].dim_multiple == 0 for table in case.scheme.tables.values())


@pytest.mark.parametrize("drops_rows", [False, True])
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_a_batch_of_no_sample_has_no_rows(precision: str, drops_rows: bool) -> None:
    scheme, weights = eight_columns(ROUTINGS["map"])
    module = DenseEmbeddingBagCollection.from_tables(scheme, weights, precision=precision, drops_rows=drops_rows)
    empty = KeyedJaggedTensor(keys=["f"], values=torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0).long())
    with torch.inference_mode():
        assert module(empty).values().shape == (0, 8)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(sorted(PRECISIONS)), st.booleans())
def test_within_the_stated_bound(case: Case, precision: str, drops_rows: bool) -> None:
    if not fits(case, precision):
        precision = "fp16"
    module = DenseEmbeddingBagCollection.from_tables(
        case.scheme, case.tables, precision=precision, drops_rows=drops_rows
    )
    bounds = {}
    for name, table in case.scheme.tables.items():
        bound = error_bound(case.tables[name], PRECISIONS[precision]).unsqueeze(1).repeat(1, table.embedding_dim)
        if drops_rows:
            bound[~kept_rows(table)] = 0.0
        bounds[name] = bound
    assert_within(case, module(case.kjt()).to_dict(), lambda table: bounds[table])


@settings(max_examples=20, deadline=None)
@given(cases(), st.booleans(), st.lists(st.sampled_from([-1, -(2**40), 12, 2**31, 2**40]), max_size=2))
def test_unknown_ids_give_zero_and_count(case: Case, drops_rows: bool, unknown: list[int]) -> None:
    module = DenseEmbeddingBagCollection.from_tables(
        case.scheme, case.tables, precision="fp32", drops_rows=drops_rows, unknown_ids="zero"
    )
    pooled = module(with_unknown_ids(case, unknown)).to_dict()
    for name, expected in expected_with_unknown(case, len(unknown)).items():
        torch.testing.assert_close(pooled[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("drops_rows", [True, False])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("bad", [-1, 10])
def test_unknown_id_is_named(routing: RowRouting, drops_rows: bool, bad: int) -> None:
    scheme, tables = eight_columns(routing)
    module = DenseEmbeddingBagCollection.from_tables(scheme, tables, precision="int4", drops_rows=drops_rows)
    with pytest.raises(ValueError, match=rf"table 't', feature 'f'.*num_embeddings=10.*id {bad}"):
        module(keyed_jagged_tensor({"f": [[(0, 1.0), (bad, 1.0)]]}))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_dropped_rows_count_in_the_length(pooling: str, is_weighted: bool) -> None:
    scheme, tables = eight_columns(ROUTINGS["map"], pooling=pooling, is_weighted=is_weighted, feature_names=("f", "g"))
    module = DenseEmbeddingBagCollection.from_tables(scheme, tables, precision="fp32", drops_rows=True)
    bags = [[(0, 2.0), (1, 0.5), (7, 1.0), (4, 1.0)], [(0, 1.0)], []]
    case = Case(scheme, tables, {"f": bags, "g": bags[::-1]}, torch.int64)
    assert_within(case, module(case.kjt()).to_dict(), lambda table: torch.zeros(10, 8))


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_stores_what_it_says(precision: str) -> None:
    scheme, tables = eight_columns(ROUTINGS["boundaries"])
    row = {"fp32": 32, "fp16": 16, "int8": 12, "int4": 8}[precision]
    whole, smaller = (
        DenseEmbeddingBagCollection.from_tables(scheme, tables, precision=precision, drops_rows=drops)
        for drops in (False, True)
    )
    assert whole.table_bytes() == 10 * row
    assert smaller.table_bytes() == 6 * row + 4 * 11


def test_a_table_of_nothing() -> None:
    routing = ROUTINGS["boundaries"]
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, torch.zeros(3, 8, dtype=torch.bool))})
    module = DenseEmbeddingBagCollection.from_tables(
        scheme, {"t": torch.zeros(10, 8)}, precision="int8", drops_rows=True
    )
    assert module(keyed_jagged_tensor({"f": [[(0, 1.0), (9, 1.0)], []]})).values().equal(torch.zeros(2, 8))


def test_is_deterministic_and_safe_in_threads() -> None:
    scheme, tables = eight_columns(ROUTINGS["map"])
    module = DenseEmbeddingBagCollection.from_tables(scheme, tables, precision="int8", drops_rows=True)
    bags = keyed_jagged_tensor({"f": [[(row, 1.0), (9 - row, 1.0)] for row in range(10)]})
    expected = module(bags).values()
    with ThreadPoolExecutor(4) as pool:
        assert all(other.equal(expected) for other in pool.map(lambda _: module(bags).values(), range(40)))


def test_arguments() -> None:
    scheme, tables = eight_columns(ROUTINGS["map"])
    odd = MixedDimensionScheme({"t": table_scheme("t", ROUTINGS["map"], torch.ones(3, 6, dtype=torch.bool))})
    for precision, dims in (("int4", 4), ("int8", 2)):
        if 6 % dims:
            with pytest.raises(
                ValueError, match=rf"multiple of {dims} for {precision}, got 6; take a mixed_dimension form"
            ):
                DenseEmbeddingBagCollection.from_tables(
                    odd, {"t": torch.zeros(10, 6)}, precision=precision, drops_rows=False
                )
    with pytest.raises(ValueError, match=r"table 't': expected rows of shape \(10, 8\)"):
        dense_rows(scheme.tables["t"], [torch.zeros(9, 7)], precision="int8", drops_rows=True)
    with pytest.raises(ValueError, match=r"table 't': expected int8 rows: uint8 of shape \(10, 12\)"):
        DenseEmbeddingBagCollection.from_tables(scheme, {"t": torch.zeros(9, 8)}, precision="int8", drops_rows=False)
    with pytest.raises(ValueError, match="table 't': expected finite values"):
        dense_rows(scheme.tables["t"], [tables["t"] * float("nan")], precision="int8", drops_rows=True)
    with pytest.raises(ValueError, match="table 't': expected a known table"):
        DenseEmbeddingBagCollection.from_tables(scheme, {}, precision="int8", drops_rows=True)
    with pytest.raises(ValueError, match="unknown_ids: expected one of"):
        DenseEmbeddingBagCollection.from_tables(scheme, tables, precision="int8", drops_rows=True, unknown_ids="hash")
