"""Rows are rounded to what their codes stand for: compiled, by torch, and level by level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dnis_torchrec.blocks.codes import decode_rows, encode_rows
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops import select as row_rounding
from dnis_torchrec.ops.build import INSTRUCTION_SETS, SELECTION
from dnis_torchrec.ops.select import RowRounding, are_compiled
from dnis_torchrec.scheme import TableScheme
from tests.coded_tables import rounded, with_codes


def table(num_rows: int, dim: int, num_blocks: int, seed: int, *, is_sorted: bool) -> TableScheme:
    """A table with drawn codes; some of its rows may belong to no block."""
    torch.manual_seed(seed)
    blocks = torch.randint(num_blocks + 1, (num_rows,))
    routing = RowRouting.from_map(blocks, num_blocks)
    if is_sorted:
        counts = torch.bincount(blocks, minlength=num_blocks + 1)[:-1]
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        routing = RowRouting(num_rows, num_blocks, boundaries=ends)
    retained = torch.ones(num_blocks, dim, dtype=torch.bool)
    plain = TableScheme(
        name="t",
        collection="",
        num_embeddings=num_rows,
        embedding_dim=dim,
        pooling="sum",
        feature_names=("f",),
        is_weighted=False,
        routing=routing,
        retained=retained,
        num_retained=int(routing.row_counts().sum()) * dim,
    )
    return with_codes(plain, seed=seed)


def by_both(
    scheme: TableScheme, weight: Tensor, residual: Tensor, rows: Tensor | None, first_row: int, columns: slice
) -> tuple[Tensor, Tensor]:
    """The same from the compiled operator and from torch's."""
    assert are_compiled()
    found = []
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_rounding, "are_compiled", lambda compiled=compiled: compiled)
            patch.setattr(row_rounding, "ROUNDED_AT_A_TIME", 7)
            own = weight.clone(), residual.clone()
            RowRounding(scheme.codes, scheme.routing, first_row, columns, torch.device("cpu")).round_(*own, rows)
            found.append(own)
    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])
    return found[0]


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 20), st.sampled_from([1, 3, 20]), st.booleans())
def test_rows_are_rounded_bit_for_bit(seed: int, num_rows: int, dim: int, num_blocks: int, is_sorted: bool) -> None:
    scheme = table(num_rows, dim, num_blocks, seed, is_sorted=is_sorted)
    first_row, first_column = (int(torch.randint(most, ())) for most in (num_rows, dim))
    rows, columns = slice(first_row, num_rows), slice(first_column, int(torch.randint(first_column, dim, ())) + 1)
    weight, residual = torch.randn(num_rows, dim) * 2, torch.randn(num_rows, dim) / 4
    of_shard = weight[rows, columns].contiguous(), residual[rows, columns].contiguous()
    found, lacking = by_both(scheme, *of_shard, None, first_row, columns)
    latent, blocks = weight + residual, scheme.routing.all_blocks()
    assert found.equal(decode_rows(encode_rows(latent, blocks, scheme.codes), blocks, scheme.codes)[rows, columns])
    torch.testing.assert_close(found, rounded(scheme, latent)[rows, columns], rtol=0, atol=1e-4)
    bits = torch.cat([scheme.codes.bits, torch.zeros(1, dim, dtype=torch.uint8)])[blocks]
    scale = torch.cat([scheme.codes.scale, torch.ones(1, dim)])[blocks]
    half = torch.where((bits > 0) & (bits < 32), scale / 2, 0.0)[rows, columns]
    assert lacking.equal((latent[rows, columns] - found).clamp(-half, half))
    some = torch.randperm(len(found))[: len(found) // 2]
    again, lacks = by_both(scheme, *of_shard, some, first_row, columns)
    is_chosen = torch.zeros(len(found), 1, dtype=torch.bool).index_fill_(0, some, True)
    assert again.equal(torch.where(is_chosen, found, of_shard[0]))
    assert lacks.equal(torch.where(is_chosen, lacking, of_shard[1]))


@pytest.fixture
def widest() -> Iterator[str]:
    assert are_compiled()
    name = SELECTION.instruction_set()
    yield name
    SELECTION.instruction_set(limit=name)


def test_every_instruction_set_gives_the_same_bits(widest: str) -> None:
    scheme = table(40, 37, 3, 5, is_sorted=True)
    weight, residual = torch.randn(40, 37), torch.randn(40, 37) / 4
    for name in INSTRUCTION_SETS[: INSTRUCTION_SETS.index(widest) + 1]:
        assert SELECTION.instruction_set(limit=name) == name
        by_both(scheme, weight, residual, None, 0, slice(0, 37))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_passed_on_alike(bad: float) -> None:
    assert are_compiled()
    scheme = table(6, 5, 2, 1, is_sorted=False)
    weight = torch.randn(6, 5).index_fill_(0, torch.tensor([1, 4]), bad)
    found = []
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_rounding, "are_compiled", lambda compiled=compiled: compiled)
            own = weight.clone(), torch.zeros(6, 5)
            RowRounding(scheme.codes, scheme.routing, 0, slice(0, 5), torch.device("cpu")).round_(*own)
            found.append(own)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)


ENDS = torch.tensor([2, 4])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": torch.tensor([3])}, "rows: expected rows of the shard, in blocks that have codes"),
        ({"rows": torch.tensor([-1])}, "rows: expected rows of the shard"),
        ({"codes": torch.ones(2, 4, 5)}, "rows: expected rows of the shard, in blocks that have codes"),
        ({"codes": torch.ones(3, 4, 6)}, r"codes: expected shape \(S \+ 1, 4, D\)"),
        ({"routing": torch.zeros(4, dtype=torch.uint8)}, "routing: expected all rows of the shard"),
        ({"first_row": -1}, "first_row: expected a row of the table"),
        ({"residual": torch.ones(2, 5)}, "residual: expected the shape of the weights"),
        ({"weight": torch.ones(3, 5, dtype=torch.float64)}, "weight: expected another dtype or layout"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Tensor | int], message: str) -> None:
    assert are_compiled()
    weight, residual = torch.ones(3, 5), torch.zeros(3, 5)
    given = {"codes": torch.ones(3, 4, 5), "routing": ENDS, "rows": None, "first_row": 2}
    given |= {"weight": weight, "residual": residual} | changed
    with pytest.raises(ValueError, match=f"block operators: {message}"):
        torch.ops.dnis_torchrec.round_rows(*given.values())


def test_weights_are_not_their_own_residual() -> None:
    assert are_compiled()
    weight = torch.ones(3, 5)
    with pytest.raises(ValueError, match="residual: expected memory that nothing is written to"):
        torch.ops.dnis_torchrec.round_rows(torch.ones(3, 4, 5), ENDS, None, 0, weight, weight)
