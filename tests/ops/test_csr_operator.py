"""The operator csr_embedding_bag: compiled and torch's own give the same bits, and neither leaves its buffers.

Random cases mix empty bags, batch 1, batch 0, rows without values, full rows, runs of neighbouring columns, D of all
kinds up to two bytes per column, float32, float16 and int8 values, int32 and int64 ids and offsets, row pointers of
either and compact ones, several features on a table, keys in any order and keys that nobody reads, weights, MEAN, ids
that are no rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dnis_torchrec.ops.csr_operator import CSR_EMBEDDING_BAG, CSR_SCHEMA, torch_csr_embedding_bag
from dnis_torchrec.ops.interleaved_rows import interleaved
from dnis_torchrec.ops.native_build import INSTRUCTION_SETS, LOOKUPS, NativeLibrary
from dnis_torchrec.serving import CsrTable, load_operator
from tests.ops.test_compact_pointers import written_out
from tests.ops.test_interleaved_rows import taken_apart

COMPILED = load_operator()
needs_compiler = pytest.mark.skipif(not COMPILED, reason="needs a C++ compiler")


def operator(*arguments: Any) -> Tensor:
    return torch.ops.dnis_torchrec.csr_embedding_bag.default(*arguments)


@dataclass(frozen=True)
class Call:
    """The operator's arguments, in its order."""

    ids: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    tables: list[Tensor]
    layout: Tensor
    keys: list[int] | None
    batch_size: int
    width: int
    zero_unknown: bool

    def arguments(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())


POINTERS = ("compact", torch.int32, torch.int64)


def buffers(table: CsrTable, pointers: str | torch.dtype = "compact") -> list[Tensor]:
    """As the operator takes them; tables too wide for compact row pointers have int32 ones."""
    rows, made = table.lookup_tensors().values()
    return [rows, made if pointers == "compact" else table.row_pointers.to(pointers)]


def plain_pointers(pointers: Tensor) -> Tensor:
    """Row pointers, from compact ones byte by byte."""
    return torch.tensor(written_out(pointers)) if pointers.dtype == torch.uint8 else pointers


def in_shards(table: CsrTable, cuts: list[int]) -> list[CsrTable]:
    """The rows between one cut and the next as a table each."""
    bounds, parts = [0, *sorted(cuts), table.num_embeddings], []
    for first, last in pairwise(bounds):
        pointers = table.row_pointers[first : last + 1]
        values = slice(int(pointers[0]), int(pointers[-1]))
        scales = None if table.scales is None else table.scales[first:last]
        arrays = {"values": table.values[values], "columns": table.columns[values], "scales": scales}
        parts.append(replace(table, row_pointers=pointers - pointers[0], **arrays))
    return parts


def random_table(generator: torch.Generator, num_rows: int, dim: int, dtype: torch.dtype) -> CsrTable:
    """Rows without values, sparse rows, rows of neighbouring columns and full rows."""
    weight = torch.randn(num_rows, dim, generator=generator)
    kind = torch.randint(0, 4, (num_rows, 1), generator=generator)
    first, last = torch.randint(0, dim + 1, (2, num_rows, 1), generator=generator).sort(dim=0).values
    column = torch.arange(dim)
    sparse = torch.rand(num_rows, dim, generator=generator) < 0.2
    weight *= torch.where(
        kind == 0, False, torch.where(kind == 1, sparse, (kind == 3) | (column >= first) & (column < last))
    )
    return CsrTable.from_dense(weight).quantized(dtype)


@st.composite
def calls(draw: st.DrawFn, *, most_cuts: int = 3, longest: int = 89) -> Call:
    """Calls of tables in up to so many further shards, with bags of up to so many ids."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    value_dtypes = st.sampled_from([torch.float32, torch.float16, torch.int8])
    tables = [
        random_table(
            generator,
            draw(st.integers(1, 9) | st.sampled_from([56, 57, 130])),
            draw(st.sampled_from([1, 2, 5, 8, 16, 31, 64, 255, 256, 257, 300])),
            draw(value_dtypes),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    pointers = [draw(st.sampled_from(POINTERS)) for _ in tables]
    shards = [
        in_shards(table, draw(st.lists(st.integers(0, table.num_embeddings), max_size=most_cuts))) for table in tables
    ]
    of_features = draw(st.lists(st.integers(0, len(tables) - 1), min_size=1, max_size=4))
    batch_size, zero_unknown = draw(st.integers(0, 5)), draw(st.booleans())
    num_keys = len(of_features) + draw(st.integers(0, 2))
    keys = draw(st.permutations(range(num_keys)))[: len(of_features)] if num_keys > len(of_features) else None
    lengths = torch.randint(
        0, draw(st.sampled_from([2, 4, longest + 1])), (num_keys * batch_size,), generator=generator
    )
    rows = torch.full((num_keys,), 5)
    for feature, table in enumerate(of_features):
        rows[feature if keys is None else keys[feature]] = tables[table].num_embeddings
    upper = torch.repeat_interleave(torch.repeat_interleave(rows, batch_size), lengths)
    ids = (torch.rand(len(upper), generator=generator) * upper).long()
    if zero_unknown:
        unknown = torch.rand(len(ids), generator=generator) < 0.2
        ids = torch.where(unknown, torch.where(ids % 2 == 0, -1 - ids, upper + ids), ids)
    integer = st.sampled_from([torch.int32, torch.int64])
    layout, first = [], 0
    for table in of_features:
        first_shard = sum(len(of_table) for of_table in shards[:table])
        dim, is_mean = tables[table].embedding_dim, int(draw(st.booleans()))
        layout.append([first_shard, len(shards[table]), first, dim, is_mean, *tables[table].row_layout])
        first += tables[table].embedding_dim
    return Call(
        ids=ids.to(draw(integer)),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(draw(integer)),
        per_sample_weights=torch.randn(len(ids), generator=generator) if draw(st.booleans()) else None,
        tables=[
            buffer
            for of_table, kind in zip(shards, pointers, strict=True)
            for shard in of_table
            for buffer in buffers(shard, kind)
        ],
        layout=torch.tensor(layout),
        keys=keys,
        batch_size=batch_size,
        width=first,
        zero_unknown=zero_unknown,
    )


def small_call(**changes: Any) -> Call:
    """Two bags of a table of three rows and two columns."""
    pointers = torch.tensor([0, 1, 1, 3])
    call = Call(
        ids=torch.tensor([0, 2, 1]),
        offsets=torch.tensor([0, 2, 3]),
        per_sample_weights=None,
        tables=[
            interleaved(torch.tensor([2.0, 3.0, 4.0]), torch.tensor([1, 0, 1], dtype=torch.uint8), pointers),
            pointers,
        ],
        layout=torch.tensor([[0, 1, 0, 2, 0, 4, 1]]),
        keys=None,
        batch_size=2,
        width=2,
        zero_unknown=False,
    )
    return replace(call, **changes)


def large_call() -> Call:
    """Enough bags that threads share them; floats of all sizes, so that any other order of additions shows."""
    generator = torch.Generator().manual_seed(0)
    tables = [random_table(generator, 100, 64, dtype) for dtype in (torch.float32, torch.float16, torch.int8)]
    batch_size = 3000
    lengths = torch.randint(0, 9, (3 * batch_size,), generator=generator)
    ids = torch.randint(0, 100, (int(lengths.sum()),), generator=generator)
    return Call(
        ids=ids,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        per_sample_weights=torch.randn(len(ids), generator=generator),
        tables=[buffer for table in tables for buffer in buffers(table)],
        layout=torch.tensor([[0, 1, 0, 64, 0, 4, 1], [1, 1, 64, 64, 1, 2, 1], [2, 1, 128, 64, 0, 1, 1]]),
        keys=None,
        batch_size=batch_size,
        width=192,
        zero_unknown=False,
    )


@needs_compiler
@settings(max_examples=200)
@given(calls())
def test_compiled_gives_the_bits_of_torch(call: Call) -> None:
    assert operator(*call.arguments()).equal(torch_csr_embedding_bag(*call.arguments()))


@settings(max_examples=100)
@given(calls())
def test_equals_the_sum_over_dense_rows(call: Call) -> None:
    """Nothing of CSR left: rows of the dense tables, added one id at a time in float64."""
    out = operator(*call.arguments())
    for feature, fields in enumerate(call.layout.tolist()):
        first_shard, num_shards, first, dim, is_mean, *row_layout = fields
        shards = []
        for index in range(first_shard, first_shard + num_shards):
            rows, pointers = call.tables[2 * index], plain_pointers(call.tables[2 * index + 1])
            arrays = taken_apart(rows, pointers, *row_layout) | {"row_pointers": pointers}
            shards.append(CsrTable(embedding_dim=2**16, **arrays).to_dense().double())
        table = torch.cat(shards)
        key = feature if call.keys is None else call.keys[feature]
        for bag in range(call.batch_size):
            begin, end = call.offsets[key * call.batch_size + bag :][:2].tolist()
            expected = torch.zeros(dim, dtype=torch.float64)
            for i in range(begin, end):
                weight = 1.0 if call.per_sample_weights is None else float(call.per_sample_weights[i])
                if 0 <= int(call.ids[i]) < len(table):
                    expected += weight * table[int(call.ids[i]), :dim]
            if is_mean and end > begin:
                expected /= end - begin
            torch.testing.assert_close(out[bag, first : first + dim].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def widest() -> Iterator[str]:
    """The instruction set of this machine, put back afterwards."""
    name = LOOKUPS.instruction_set()
    yield name
    LOOKUPS.instruction_set(limit=name)


@needs_compiler
@pytest.mark.parametrize("wanted", INSTRUCTION_SETS)
def test_every_instruction_set_gives_the_same_bits(wanted: str, widest: str) -> None:
    if INSTRUCTION_SETS.index(wanted) > INSTRUCTION_SETS.index(widest):
        pytest.skip(f"this machine has {widest} at most")
    assert LOOKUPS.instruction_set(limit=wanted) == wanted
    assert LOOKUPS.instruction_set() == wanted
    assert operator(*large_call().arguments()).equal(torch_csr_embedding_bag(*large_call().arguments()))
    check_every_float16()


@needs_compiler
def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="instruction set 'avx': expected a known instruction set"):
        LOOKUPS.instruction_set(limit="avx")


@needs_compiler
def test_result_depends_on_neither_torchs_threads_nor_the_callers() -> None:
    call = large_call()
    expected = torch_csr_embedding_bag(*call.arguments())
    assert operator(*call.arguments()).equal(expected)
    with ThreadPoolExecutor(4) as pool:
        assert all(out.equal(expected) for out in pool.map(lambda _: operator(*call.arguments()), range(8)))
    torch.set_num_threads(2)
    try:
        assert operator(*call.arguments()).equal(expected)
        ids = call.ids.clone()
        ids[[40, -1]] = 100
        with pytest.raises(ValueError, match=f"feature 0: .*got {100}"):
            operator(*replace(call, ids=ids).arguments())
    finally:
        torch.set_num_threads(1)


@needs_compiler
def test_of_several_faults_the_first_is_told() -> None:
    """Whichever thread is done first: here the one that finds the last of them."""
    lengths = torch.zeros(4096, dtype=torch.int64)
    lengths[:2048], lengths[-1] = 20, 1
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    ids[1000], ids[-1] = 8, 9
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="got 8"):
            operator(*small_call(ids=ids, offsets=offsets, batch_size=4096).arguments())
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("implementation", [operator, torch_csr_embedding_bag])
@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unknown_id(implementation: Any, bad: int, dtype: torch.dtype) -> None:
    call = small_call(ids=torch.tensor([0, bad, 1], dtype=dtype))
    with pytest.raises(ValueError, match=rf"csr_embedding_bag: feature 0: expected ids in 0\.\.2, got {bad}"):
        implementation(*call.arguments())
    out = implementation(*replace(call, zero_unknown=True).arguments())
    assert out.tolist() == [[0.0, 2.0], [0.0, 0.0]]


def test_ids_beyond_32_bits() -> None:
    with pytest.raises(ValueError, match=f"got {2**40}"):
        operator(*small_call(ids=torch.tensor([0, 2**40, 1])).arguments())


@pytest.mark.parametrize("implementation", [operator, torch_csr_embedding_bag])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "offsets", [[0, 2, 4], [0, 3, 2], [-1, 2, 3], [0, 2**31 - 1, 3], [0, -(2**31), 3], [0, 2, 2], [1, 2, 3], [0, 5, 3]]
)
def test_offsets_that_are_none(implementation: Any, offsets: list[int], dtype: torch.dtype) -> None:
    """Also those that are right for every bag, and leave ids over."""
    with pytest.raises(ValueError, match="offsets: expected them to rise from 0 to the number of ids"):
        implementation(*small_call(offsets=torch.tensor(offsets, dtype=dtype)).arguments())


@pytest.mark.parametrize("implementation", [operator, torch_csr_embedding_bag])
@pytest.mark.parametrize("offsets", [[0, 1, 0, 2, 3], [0, -1, 0, 2, 3], [0, 9, 0, 2, 3], [1, 1, 1, 2, 3]])
def test_offsets_of_keys_that_nobody_reads_count_too(implementation: Any, offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets: expected them to rise from 0 to the number of ids"):
        implementation(*small_call(offsets=torch.tensor(offsets), keys=[1]).arguments())


@pytest.mark.parametrize("implementation", [operator, torch_csr_embedding_bag])
@pytest.mark.parametrize("pointers", [[0, 1, 1, 4], [0, 1, 1, 2**40], [2, 1, 1, 3], [-5, 1, 1, 3]])
def test_row_pointers_that_are_none(implementation: Any, pointers: list[int]) -> None:
    call = small_call()
    tables = [call.tables[0], torch.tensor(pointers)]
    with pytest.raises(ValueError, match="expected rising row pointers up to the number of values"):
        implementation(*replace(call, tables=tables).arguments())


@pytest.mark.parametrize("implementation", [operator, torch_csr_embedding_bag])
@pytest.mark.parametrize(
    ("start", "lengths"),
    [(0, [1, 0, 3]), (1, [1, 0, 2]), (2**40, [1, 0, 2]), (2**63 - 1, [1, 0, 2]), (-1, [0, 0, 2]), (0, [255, 0, 2])],
)
def test_compact_row_pointers_that_are_none(implementation: Any, start: int, lengths: list[int]) -> None:
    record = [*start.to_bytes(8, "little", signed=True), *lengths]
    tables = [small_call().tables[0], torch.tensor(record, dtype=torch.uint8)]
    with pytest.raises(ValueError, match="expected rising row pointers up to the number of values"):
        implementation(*small_call(tables=tables).arguments())


@pytest.mark.parametrize("implementation", [operator, torch_csr_embedding_bag])
@pytest.mark.parametrize("column_dtype", [torch.uint8, torch.uint16])
@pytest.mark.parametrize("num_values", [1, 3, 9, 20])
def test_columns_outside_the_row(implementation: Any, column_dtype: torch.dtype, num_values: int) -> None:
    columns = torch.arange(num_values) + 1  # the last is one too far, rows of neighbours included
    columns = columns.to(column_dtype)
    pointers = torch.tensor([0, num_values])
    tables = [interleaved(torch.ones(num_values), columns, pointers), pointers]
    call = small_call(ids=torch.zeros(3, dtype=torch.int64), tables=tables, width=num_values)
    call = replace(call, layout=torch.tensor([[0, 1, 0, num_values, 0, 4, columns.element_size()]]))
    with pytest.raises(ValueError, match="feature 0: expected columns below embedding_dim, got "):
        implementation(*call.arguments())


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": torch.zeros(3)}, "ids: expected int32 or int64"),
        ({"ids": torch.arange(6)[::2]}, "ids: expected one contiguous dimension"),
        ({"offsets": torch.tensor([0, 3])}, "offsets: expected batch_size bags of every key"),
        ({"offsets": torch.tensor([0], dtype=torch.int32)}, "offsets: expected them to rise"),
        ({"offsets": torch.zeros(0, dtype=torch.int64)}, "offsets: expected them to rise"),
        ({"keys": [1]}, "offsets: expected bags for each feature"),
        ({"keys": [0, 0]}, "keys: expected one for each feature"),
        ({"per_sample_weights": torch.ones(2)}, "per_sample_weights: expected one"),
        ({"per_sample_weights": torch.ones(3).double()}, "per_sample_weights: expected one"),
        ({"tables": [torch.ones(3)]}, "tables: expected rows and row_pointers"),
        ({"tables": []}, "layout: expected tables that exist"),
        ({"layout": torch.tensor([[1, 1, 0, 2, 0, 4, 1]])}, "layout: expected tables that exist"),
        ({"layout": torch.tensor([[0, 0, 0, 2, 0, 4, 1]])}, "layout: expected tables that exist"),
        ({"layout": torch.tensor([[0, 2, 0, 2, 0, 4, 1]])}, "layout: expected tables that exist"),
        ({"layout": torch.tensor([[0, 2**62, 0, 2, 0, 4, 1]])}, "layout: expected tables that exist"),
        ({"layout": torch.tensor([[0, 1, 1, 2, 0, 4, 1]])}, "layout: expected columns within the output"),
        ({"layout": torch.tensor([[0, 1, 0, 2**62, 0, 4, 1]])}, "layout: expected columns within the output"),
        ({"layout": torch.tensor([[0, 1, 0, 1, 0, 4, 1]])}, "layout: expected columns for the whole output"),
        ({"layout": torch.zeros(0, 7, dtype=torch.int64)}, "offsets: expected bags for each feature and for no other"),
        ({"layout": torch.tensor([[0, 1, 0, 2, 0, 8, 1]])}, "layout: expected values of 4, 2 or 1 bytes"),
        ({"layout": torch.tensor([[0, 1, 0, 2, 0, 4, 4]])}, "layout: expected columns of 1 or 2 bytes"),
        ({"layout": torch.tensor([[0, 1, 0, 2, 0]])}, r"layout: expected int64 of shape \(F, 7\)"),
        ({"layout": torch.tensor([0, 1, 0, 2, 0, 4, 1])}, "layout: expected int64"),
        ({"batch_size": -1}, "batch_size and width: expected none below 0"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        operator(*small_call(**changes).arguments())


@needs_compiler
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([[0, 1, 0, 2, 0, 4, 1], [0, 1, 1, 2, 0, 4, 1]], "layout: expected columns within the output, those of one"),
        ([[0, 1, 2, 2, 0, 4, 1], [0, 1, 0, 2, 0, 4, 1]], "layout: expected columns within the output, those of one"),
        # the second feature would number the rows of shard 1 anew, and the first find its last ones behind them
        ([[0, 2, 0, 2, 0, 4, 1], [1, 1, 2, 2, 0, 4, 1]], "layout: expected shards of one table each"),
    ],
)
def test_features_share_neither_columns_nor_parts_of_a_table(layout: list[list[int]], message: str) -> None:
    call = small_call(offsets=torch.tensor([0, 2, 3, 3, 3]), layout=torch.tensor(layout), width=4)
    with pytest.raises(ValueError, match=message):
        operator(*replace(call, ids=torch.tensor([0, 5, 1]), tables=call.tables * 2).arguments())


@needs_compiler
@pytest.mark.parametrize(
    ("index", "buffer", "message"),
    [
        (0, torch.ones(15), "rows: expected uint8"),
        (0, torch.zeros(30, dtype=torch.uint8)[::2], "rows: expected uint8, one contiguous dimension"),
        (0, torch.zeros(14, dtype=torch.uint8), "expected rising row pointers up to the number of values"),
        (1, torch.zeros(4), "row_pointers: expected int32 or int64"),
        (1, torch.zeros(0, dtype=torch.int32), "row_pointers: expected one more than rows"),
        (1, torch.zeros(72, dtype=torch.uint8), "row_pointers: expected whole records"),
        (1, torch.zeros(22, dtype=torch.uint8)[::2], "row_pointers: expected one contiguous dimension"),
        (1, torch.zeros(0, dtype=torch.uint8), r"expected ids in 0\.\.-1"),
    ],
)
def test_buffers_that_do_not_fit(index: int, buffer: Tensor, message: str) -> None:
    tables = small_call().tables
    tables[index] = buffer
    with pytest.raises(ValueError, match=message):
        operator(*small_call(tables=tables).arguments())


def test_every_float16() -> None:
    check_every_float16()


def check_every_float16() -> None:
    """All 65,536 of them, each in a row of its own and all in one row."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    columns, pointers = torch.zeros(2**16, dtype=torch.uint8), torch.arange(2**16 + 1)
    layout, offsets = torch.tensor([[0, 1, 0, 1, 0, 2, 1]]), torch.arange(2**16 + 1)
    tables = [interleaved(values, columns, pointers), pointers]
    arguments = (torch.arange(2**16), offsets, None, tables, layout, None, 2**16, 1, False)
    torch.testing.assert_close(operator(*arguments).squeeze(1), values.float(), rtol=0, atol=0, equal_nan=True)
    columns, pointers = torch.arange(2**16).to(torch.uint16), torch.tensor([0, 2**16])
    tables = [interleaved(values, columns, pointers), pointers]
    layout, offsets = torch.tensor([[0, 1, 0, 2**16, 0, 2, 2]]), torch.tensor([0, 1])
    for implementation in (operator, torch_csr_embedding_bag):
        out = implementation(torch.tensor([0]), offsets, None, tables, layout, None, 1, 2**16, False)
        torch.testing.assert_close(out.squeeze(0), values.float(), rtol=0, atol=0, equal_nan=True)


def test_torch_knows_what_it_needs_to_compile_and_export() -> None:
    for call in (small_call(), small_call(keys=[0], per_sample_weights=torch.ones(3), zero_unknown=True)):
        torch.library.opcheck(torch.ops.dnis_torchrec.csr_embedding_bag.default, call.arguments())


def test_schema_is_the_same_in_both_languages() -> None:
    schema = str(torch.ops.dnis_torchrec.csr_embedding_bag.default._schema)
    assert schema == f"dnis_torchrec::{CSR_SCHEMA}"
    assert schema.startswith(f"dnis_torchrec::{CSR_EMBEDDING_BAG}(")


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("no compiler")])
def test_what_cannot_be_compiled_is_said(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(library: NativeLibrary) -> None:
        raise error

    monkeypatch.setattr(NativeLibrary, "load", fails)
    monkeypatch.delenv("DNIS_NO_COMPILE", raising=False)
    with pytest.warns(RuntimeWarning, match=f"{error}\n.*many times slower; DNIS_NO_COMPILE=1 silences this"):
        assert not LOOKUPS.is_there()
    monkeypatch.setenv("DNIS_NO_COMPILE", "1")
    assert not LOOKUPS.is_there()


def test_without_compiler_torch_does_the_work() -> None:
    """And nothing is compiled where that is forbidden."""
    script = (
        "import torch; from dnis_torchrec.serving import load_operator; compiled = load_operator()\n"
        "one = torch.tensor([0, 0, 128, 63, 0], dtype=torch.uint8)  # 1.0 in column 0\n"
        "rest = ([one, torch.tensor([0, 1])], torch.tensor([[0, 1, 0, 1, 0, 4, 1]]), None, 1, 1, False)\n"
        "bag = torch.tensor([0, 0]), torch.tensor([0, 2]), None\n"
        "print(compiled, torch.ops.dnis_torchrec.csr_embedding_bag(*bag, *rest).item())\n"
        "from dnis_torchrec.ops.block_operators import are_compiled; print(are_compiled())"
    )
    variables = os.environ | {"DNIS_NO_COMPILE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["False", "2.0", "False"], "")
