"""The packed lookup, compiled, on Triton and by torch; how libraries are built."""

import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dnis_torchrec.blocks.codes import WIDTHS, ColumnCodes, feedback_of, is_coded, largest_codes
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops import build as native_build
from dnis_torchrec.ops import packed as operators
from dnis_torchrec.ops import packed_triton
from dnis_torchrec.ops.build import INSTRUCTION_SETS, LOOKUPS, fallback_libraries, find_compiler, library_folder
from dnis_torchrec.ops.packed import pack_values, torch_encode_rows, torch_packed_embedding_bag, values_in_codes
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving import PackedEmbeddingBagCollection, load_operator
from tests.reference import ROUTINGS, Case, cases, limited, packed, packed_case, table_scheme
from tests.triton_on_numpy import DEVICE, check_compiled, needs_compilation, needs_device, needs_triton, without_triton

needs_compiler = pytest.mark.skipif(not load_operator(), reason="no C++ compiler")


IDS, OFFSETS = torch.tensor([0, 3, 9, 1]), torch.tensor([0, 1, 2, 3, 4])
PLACES = {"ids": 0, "offsets": 1, "tables": 3, "features": 4, "table_layout": 5, "blocks": 6, "groups": 7}


def call() -> tuple[list, Tensor]:
    """Arguments for a table with a rank directory and one with boundaries, and what their bags of one id pool to."""
    torch.manual_seed(1)
    schemes, stored, dense = {}, {}, {}
    for feature, (name, routing) in zip("fg", ROUTINGS.items(), strict=True):
        scheme = table_scheme(name, routing, torch.ones(3, 18).bool(), feature_names=(feature,))
        schemes[name], stored[name], dense[name] = packed(scheme, Random(4))
    module = PackedEmbeddingBagCollection(MixedDimensionScheme(schemes), stored)
    layout = list(module.outputs.buffers())
    expected = torch.cat([dense["movie/seen"][IDS[:2]], dense["user"][IDS[2:]]], dim=1)
    return [IDS, OFFSETS, None, list(module.tables.buffers()), *layout, None, 2, 36, False], expected


def look_up(arguments: list[Any]) -> Tensor:
    """Compiled, or from torch's own operators where nothing can be compiled."""
    return torch.ops.dnis_torchrec.packed_embedding_bag.default(*arguments)


def opened(arguments: list[Any]) -> Tensor:
    """A lookup in a collection whose layouts were read when the bags had not come yet."""
    collection = operators.OpenedCollection([*arguments[3], *arguments[4:8]])
    rest = *arguments[:3], *arguments[8:10], arguments[11]
    return torch.ops.dnis_torchrec.pool_opened.default(collection.number, *rest)


def by_torch(arguments: list[Any]) -> Tensor:
    """The operator's meaning."""
    return torch_packed_embedding_bag(*arguments)


def on_numpy(arguments: list[Any]) -> Tensor:
    """The kernel, one program after another."""
    with pytest.MonkeyPatch.context() as patch:
        without_triton(patch, [packed_triton], arguments[PLACES["tables"]])
        return packed_triton.triton_packed_embedding_bag(*arguments)


def moved_to(device: str, arguments: list[Any]) -> list[Any]:
    parts = [part.to(device) if isinstance(part, Tensor) else part for part in arguments]
    parts[PLACES["tables"]] = [table.to(device) for table in arguments[PLACES["tables"]]]
    return parts


def on_device(arguments: list[Any]) -> Tensor:
    return packed_triton.triton_packed_embedding_bag(*moved_to(DEVICE, arguments)).cpu()


survives = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the assertion would end the process")
KERNELS = [on_numpy, pytest.param(on_device, marks=[needs_triton, needs_device])]
WAYS = [look_up, pytest.param(opened, marks=needs_compiler), by_torch, *KERNELS]
WAYS_THAT_REFUSE = [*WAYS[:4], pytest.param(on_device, marks=[needs_triton, needs_device, survives])]


def with_argument(place: int, value: object) -> list:
    arguments, _ = call()
    arguments[place] = value
    return arguments


@pytest.mark.parametrize("way", WAYS)
def test_gives_the_rows(way: Any) -> None:
    arguments, expected = call()
    assert way(arguments).equal(expected)


PLACES_THAT_LEAD_OUTSIDE = {
    "features": [(0, 0, 2), (0, 0, -1), (1, 1, 6), (0, 1, -1), (0, 2, 19), (0, 2, 2**40)],
    "table_layout": [
        *((0, 0, num_rows) for num_rows in (-1, 1000, 2**62)),
        *((0, 1, 1), (0, 2, 0), (0, 2, 3), (0, 2, 100), (0, 3, 4), (0, 3, -1), (0, 4, -1)),
        *((1, 3, 3), (0, 4, 0)),  # boundaries for rows, and rows for a directory
    ],
    "blocks": [
        *((0, column, number) for column in (0, 1) for number in (-1, 2**62)),
        *((0, 2, 10_000), (0, 2, 0), (0, 3, 100), (1, 3, 2**62)),
    ],
    "groups": [(2, 80, 10_000), (2, 80, -1)],  # the window of the first columns of the block of row 0 or 3
}


@needs_compiler
@pytest.mark.parametrize("limit", INSTRUCTION_SETS)
@pytest.mark.parametrize(("field", "place"), [(f, p) for f, places in PLACES_THAT_LEAD_OUTSIDE.items() for p in places])
def test_layouts_that_lead_outside(field: str, place: tuple[int, int, int], limit: str) -> None:
    arguments, _ = call()
    row, column, value = place
    layout = arguments[PLACES[field]] = arguments[PLACES[field]].clone()
    layout[slice(None) if field == "groups" else row, column] = value
    with limited(limit):
        with pytest.raises(ValueError, match=r"packed_embedding_bag: .*expected"):
            look_up(arguments)
        written = call()[0]  # by a checkpoint, into a collection that has been opened
        collection = operators.OpenedCollection([*written[3], *written[4:8]])
        written[PLACES[field]].copy_(layout)
        with pytest.raises(ValueError, match=r"packed_embedding_bag: .*expected"):
            torch.ops.dnis_torchrec.pool_opened.default(collection.number, *written[:3], None, 2, False)


@needs_compiler
def test_a_closed_collection_is_refused() -> None:
    """Also a number of another process."""
    arguments, expected = call()
    numbers = [operators.OpenedCollection([*arguments[3], *arguments[4:8]]).number, 0]  # nobody holds the first
    collection = operators.OpenedCollection([*arguments[3], *arguments[4:8]])
    for number in numbers:
        with pytest.raises(ValueError, match="collection: expected one that is open"):
            torch.ops.dnis_torchrec.pool_opened.default(number, *arguments[:3], None, 2, False)
    assert torch.ops.dnis_torchrec.pool_opened.default(collection.number, *arguments[:3], None, 2, False).equal(
        expected
    )


@needs_compiler
@pytest.mark.parametrize("place", range(8))
def test_tensors_that_get_other_memory_are_read_there(place: int) -> None:
    """As where a module goes to another process: its memory is moved, and the tensors stay the same objects."""
    arguments, _ = call()
    tensors = [*arguments[3], *arguments[4:8]]
    collection = operators.OpenedCollection(tensors)
    changed = tensors[place].clone()
    if place == 0:
        changed ^= 1
    tensors[place].data.fill_(-1 if place else 0)  # the old memory has nothing that anybody may read
    tensors[place].data = changed
    found = torch.ops.dnis_torchrec.pool_opened.default(collection.number, *arguments[:3], None, 2, False)
    assert found.equal(look_up(arguments))
    assert found.equal(call()[1]) == bool(place)


@needs_compiler
def test_tensors_that_do_not_fit() -> None:
    arguments, _ = call()
    tables = arguments[3]
    lists = [
        [tables[0][:-1], *tables[1:]],
        [tables[0].view(1, -1), *tables[1:]],
        [torch.stack([tables[0]] * 2, dim=1)[:, 0], *tables[1:]],
        [tables[0].to(torch.int8), *tables[1:]],
        [tables[0], tables[1][:-1], *tables[2:]],
        [tables[0], tables[1].to(torch.int16), *tables[2:]],
        [*tables[:3], tables[3][:-1]],
        tables[:-1],
    ]
    bad = [with_argument(3, tables) for tables in lists]
    for place in (4, 5, 6, 7):
        layout = arguments[place]
        bad += [with_argument(place, other) for other in (layout.short(), layout[:, :-1], layout.T, layout[0])]
    bad += [with_argument(7, arguments[7][:-1]), with_argument(0, IDS.short()), with_argument(1, OFFSETS.float())]
    bad += [with_argument(2, torch.ones(3)), with_argument(2, torch.ones(4).double()), with_argument(10, 35)]
    bad += [with_argument(8, [0]), with_argument(8, [0, 2]), with_argument(8, [-1, 0]), with_argument(9, 3)]
    for arguments in bad:
        with pytest.raises(ValueError, match=r"packed_embedding_bag: .*expected"):
            look_up(arguments)


def directory_that_points_nowhere(place: int, value: int) -> list[Tensor]:
    """The tables of `call`; where blocks begin is spoiled, but for the last, which is that of none."""
    tables = [table.clone() for table in call()[0][PLACES["tables"]]]
    tables[place][: 24 // tables[place].itemsize] = value
    return tables


RISE, EXIST = "offsets: expected them to rise from 0 to the number of ids", "a directory of rows that exist"


@pytest.mark.parametrize("way", WAYS_THAT_REFUSE)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("ids", torch.tensor(ids), r"feature 0: expected ids in 0\.\.9") for ids in ([0, -1, 10, 1], [0, 10, 3, 1])),
        *(
            ("offsets", torch.tensor(offsets), RISE)
            for offsets in ([0, 2, 1, 3, 4], [0, 1, 2, 3, 9], [-1, 1, 2, 3, 4], [0, 1, 2, 3, 3], [1, 1, 2, 3, 4])
        ),
        ("offsets", torch.tensor([0, 1, 2, 3, 2**40]), RISE),
        ("tables", directory_that_points_nowhere(1, 0xFF), EXIST),
        ("tables", directory_that_points_nowhere(3, 2**40), EXIST),
    ],
)
def test_what_leads_outside_is_refused(way: Any, name: str, value: Any, message: str) -> None:
    """On a GPU, which checks as it goes, by an assertion."""
    is_asserted = way in (on_numpy, on_device)
    with pytest.raises(RuntimeError if is_asserted else ValueError, match=None if is_asserted else message):
        way(with_argument(PLACES[name], value))


@pytest.mark.parametrize("way", [look_up, by_torch])  # to the kernel no block begins below row 0
def test_boundaries_below_0_are_refused(way: Any) -> None:
    with pytest.raises(ValueError, match=EXIST):
        way(with_argument(PLACES["tables"], directory_that_points_nowhere(3, -(2**63))))


@pytest.mark.parametrize("way", WAYS)
def test_unknown_ids_contribute_zero(way: Any) -> None:
    arguments, expected = call()
    arguments[0], arguments[-1] = torch.tensor([0, -1, 10, 1]), True
    expected[1, :18] = expected[0, 18:] = 0.0
    assert way(arguments).equal(expected)


def test_no_bags() -> None:
    arguments, _ = call()
    none = torch.zeros(0, dtype=torch.int64)
    assert look_up([none, torch.zeros(5, dtype=torch.int32), *arguments[2:]]).equal(torch.zeros(2, 36))
    arguments[9] = 0
    assert look_up([none, torch.zeros(1, dtype=torch.int32), *arguments[2:]]).shape == (0, 36)


@needs_compiler
@pytest.mark.parametrize("schema", [operators.PACKED_SCHEMA, operators.OFFSETS_SCHEMA, operators.ENCODE_SCHEMA])
def test_schemas_are_those_of_the_library(schema: str) -> None:
    operator = getattr(torch.ops.dnis_torchrec, schema.partition("(")[0])
    assert str(operator.default._schema) == f"dnis_torchrec::{schema}"


def draw_codes(num_blocks: int, dim: int, generator: torch.Generator, widths: tuple[int, ...] = WIDTHS) -> ColumnCodes:
    """Codes of any widths, that mean values between -2 and 2 or so; some blocks may have no bits."""
    size = num_blocks, dim
    bits = torch.tensor(widths)[torch.randint(len(widths), size, generator=generator)]
    bits[torch.rand(num_blocks, generator=generator) < 0.2] = 0
    steps = 4 / largest_codes(bits).clamp(min=1) * (1 + torch.rand(size, generator=generator))
    scale = torch.where(is_coded(bits), steps, 1.0).bfloat16().float()
    shift = torch.where(is_coded(bits), -4 / scale, 0).clamp(min=-(2**15)).short()
    return ColumnCodes(bits.byte(), scale, shift)


def with_moves(codes: ColumnCodes, generator: torch.Generator, *, feedback: bool, gain: bool) -> ColumnCodes:
    """The same with error feedback, of which the last of several blocks has none, and with gains."""
    num_blocks, dim = codes.bits.shape
    if feedback:
        slopes = torch.randn(num_blocks, dim // 2 + 1, dim, generator=generator, dtype=torch.float64)
        shares = feedback_of(slopes.mT @ slopes, codes.bits)
        shares[1:][-1:] = 0
        codes = replace(codes, feedback=shares)
    return codes.with_gain(torch.rand(num_blocks, dim, generator=generator) + 0.6) if gain else codes


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 4), st.integers(1, 130), st.sampled_from([0, 1, 15, 16, 17, 200, 3_000])),
    moves=st.fixed_dictionaries({"feedback": st.booleans(), "gain": st.booleans()}),
    widths=st.sampled_from([WIDTHS, (1, 2, 3), (8, 16, 32), (0, 5, 32)]),
    magnitude=st.sampled_from([0.0, 1e-30, 1.0, 50.0, 3e38]),
    limit=st.sampled_from(INSTRUCTION_SETS),
    seed=st.integers(0, 2**31),
)
def test_rows_are_encoded_to_the_bits_of_torch(
    size: tuple[int, int, int], moves: dict[str, bool], widths: tuple[int, ...], magnitude: float, limit: str, seed: int
) -> None:
    """Fields and values, on every instruction set, in several threads, for rows of no block as well."""
    (num_blocks, dim, num_rows), generator = size, torch.Generator().manual_seed(seed)
    codes = with_moves(draw_codes(num_blocks, dim, generator, widths), generator, **moves)
    values = magnitude * (2 * torch.rand(num_rows, dim, generator=generator) - 1)
    blocks = torch.randint(num_blocks + 1, (num_rows,), generator=generator)
    num_threads = torch.get_num_threads()
    with limited(limit):
        torch.set_num_threads(3)
        fields, row_counts = pack_values(values, blocks, codes, place="t")
        coded = values_in_codes(values, blocks, codes, place="t")
        torch.set_num_threads(num_threads)
    assert row_counts.equal(torch.bincount(blocks, minlength=num_blocks + 1)[:-1])
    # where float32 overflows on the way, torch has no code that would mean a value
    for found in (fields, coded) if magnitude < 1e38 else (fields,):
        expected = torch.full_like(found, 9)
        of_columns = codes.bits, codes.scale, codes.shift, codes.gain, codes.feedback
        assert torch_encode_rows(values, blocks, *of_columns, expected)
        assert found.view(torch.uint8).equal(expected.view(torch.uint8))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row", [0, 2, 20])
def test_values_that_cannot_be_encoded_are_named(value: float, row: int) -> None:
    codes, values = draw_codes(2, 5, torch.Generator().manual_seed(0)), torch.zeros(21, 5)
    values[row, 3] = value
    blocks = torch.arange(21) % 3  # the last is no block
    for encode in (pack_values, values_in_codes):
        with pytest.raises(ValueError, match=rf"t: expected finite values, got {value} in block {row % 3}, column 3"):
            encode(values, blocks, codes, place="t")


@needs_compiler
@pytest.mark.parametrize(
    ("place", "argument"),
    [
        *((0, torch.zeros(4, 5)), (0, torch.zeros(3, 5).double()), (0, torch.zeros(5, 3).T)),
        *((1, torch.tensor([0, 3, 1])), (1, torch.tensor([-1, 0, 0])), (2, torch.full((2, 5), 33).byte())),
        *((3, torch.ones(2, 4)), (4, torch.ones(2, 5)), (5, torch.ones(5)), (6, torch.ones(2, 5))),
        *((7, torch.zeros(8).byte()), (7, torch.zeros(3, 4)), (7, torch.zeros(3, 5).double())),
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(place: int, argument: Tensor) -> None:
    bits, shift = torch.full((2, 5), 4).byte(), torch.zeros(2, 5).short()
    arguments = [torch.zeros(3, 5), torch.zeros(3).long(), bits, torch.ones(2, 5), shift, None, None]
    arguments.append(torch.zeros(9).byte())
    assert torch.ops.dnis_torchrec.encode_rows.default(*arguments)
    arguments[place] = argument
    with pytest.raises(ValueError, match="encode_rows: .*expected"):
        torch.ops.dnis_torchrec.encode_rows.default(*arguments)


def test_export_with_any_batch_size() -> None:
    arguments, expected = call()

    class Served(nn.Module):
        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            return look_up([ids, offsets, *arguments[2:9], (offsets.numel() - 1) // 2, 36, False])

    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = ({0: torch.export.Dim.AUTO}, {0: 2 * batch + 1})
    program = torch.export.export(Served(), (IDS, OFFSETS), dynamic_shapes=shapes)
    assert program.module()(IDS, OFFSETS).equal(expected)
    assert program.module()(torch.cat([IDS[:2], IDS[:1], IDS[2:], IDS[3:]]), torch.arange(7)).shape == (3, 36)


def test_the_meaning_moves_with_its_tensors() -> None:
    """Layouts and tables on another device, which the meta device stands for."""
    out = look_up(moved_to("meta", call()[0]))
    assert (out.shape, out.device.type) == ((2, 36), "meta")


def test_routing_without_a_directory() -> None:
    torch.manual_seed(0)
    scheme = table_scheme("t", RowRouting.from_map(torch.full((4,), 1), 2), torch.ones(2, 5).bool())
    scheme, stored, dense = packed(scheme, Random(2))
    module = PackedEmbeddingBagCollection(MixedDimensionScheme({"t": scheme}), {"t": stored})
    assert stored.directory.directory.numel() == 0
    assert module.lookup(torch.arange(4), torch.arange(5)).equal(dense)


def of_case(case: Case, seed: int) -> list[Any]:
    """Arguments for the bags of a case over packed tables."""
    case, stored = packed_case(case, seed)
    module = PackedEmbeddingBagCollection(case.scheme, stored)
    calls: list[list[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.jit, "is_tracing", lambda: True)  # a graph has all arguments
        operator = torch.ops.dnis_torchrec.packed_embedding_bag
        compiled = operator.default
        patch.setattr(operator, "default", lambda *given: calls.append(list(given)) or compiled(*given))
        module(case.kjt())
    return calls[0]


def of_blocks(
    num_blocks: int, dim: int, *, weighted: bool = False, stored_share: float = 1.0, seed: int | None = None
) -> list[Any]:
    """Arguments for bags over one table of so many blocks, in no order; other rows have none."""
    torch.manual_seed(num_blocks)
    of_row = torch.randint(num_blocks + 1, (1_500,))
    of_row[torch.rand(1_500) > stored_share] = num_blocks
    routing = RowRouting.from_map(of_row, num_blocks)
    scheme = table_scheme("t", routing, torch.ones(num_blocks, dim).bool(), pooling="mean", is_weighted=weighted)
    scheme, stored, _ = packed(scheme, Random(num_blocks if seed is None else seed))
    module = PackedEmbeddingBagCollection(MixedDimensionScheme({"t": scheme}), {"t": stored})
    offsets, ids = torch.tensor([0, 3, 3, 4, 9, 20, 21, 22, 22, 25, 30]), torch.randint(1_500, (30,))
    ids[::2] = (of_row < num_blocks).nonzero().squeeze(1)[-15:]
    weights = torch.randn(30) if weighted else None
    layout = list(module.outputs.buffers())
    return [ids, offsets, weights, list(module.tables.buffers()), *layout, None, 10, dim, False]


@pytest.mark.parametrize("way", KERNELS)
@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_gives_the_bits_of_the_operator(way: Any, case: Case, seed: int) -> None:
    arguments = of_case(case, seed)
    assert way(arguments).equal(look_up(arguments))


@pytest.mark.parametrize("way", [by_torch, *KERNELS])
@pytest.mark.parametrize(
    ("num_blocks", "dim", "share"),
    [
        *((1, 5, 1.0), (3, 130, 1.0), (8, 17, 1.0), (12, 4, 1.0), (100, 6, 1.0)),
        *((1, 5, 0.03), (3, 17, 0.06), (7, 5, 0.1), (20, 4, 0.1)),
    ],
)
def test_takes_directories_of_any_size_and_sparse_ones(way: Any, num_blocks: int, dim: int, share: float) -> None:
    for weighted in (False, True):
        arguments = of_blocks(num_blocks, dim, weighted=weighted, stored_share=share)
        is_sparse = torch.int32 in [table.dtype for table in arguments[PLACES["tables"]]]
        assert is_sparse == (share < 1)
        assert way(arguments).equal(look_up(arguments))


@needs_compiler
@pytest.mark.parametrize("limit", INSTRUCTION_SETS)
@pytest.mark.parametrize(("first", "step"), [(0, 10**6), (1, 10**6), *((2 + column, 6) for column in range(6))])
def test_damaged_sparse_directories_lead_nowhere_else(limit: str, first: int, step: int) -> None:
    """Refused, or other rows of the table: a sanitizer would see what is read outside."""
    with limited(limit):
        for num_blocks, value in product((1, 7), (0, -1, 2**31 - 1, -(2**31))):
            arguments = of_blocks(num_blocks, 5, stored_share=0.1)
            (place,) = (i for i, table in enumerate(arguments[3]) if table.dtype == torch.int32)
            arguments[3][place] = arguments[3][place].clone()
            arguments[3][place][first : 14 if step == 6 else None : step] = value
            with suppress(ValueError):
                assert look_up(arguments).isfinite().all()
            if first == 2 and value < 0:
                with pytest.raises(ValueError, match=EXIST):
                    look_up(arguments)


def outcomes(arguments: list[Any]) -> list[Any]:
    """What every instruction set gives, or says."""
    results: list[Any] = []
    for limit in INSTRUCTION_SETS:
        with limited(limit):
            try:
                results.append(look_up(arguments).tolist())
            except ValueError as error:
                results.append(str(error))
    return results


def of_many_ids(num_blocks: int, dim: int, seed: int, dtype: torch.dtype, *, weighted: bool = False) -> list[Any]:
    """Arguments for 500 ids, in bags of none to many."""
    arguments = of_blocks(num_blocks, dim, weighted=weighted, seed=seed)
    lengths = torch.tensor([1, 0, 2, 64, 65, 1, 1, 7, 200, 159])
    arguments[0] = torch.randint(1_500, (500,), dtype=dtype)
    arguments[1] = torch.cat([torch.zeros(1, dtype=dtype), lengths.cumsum(0).to(dtype)])
    arguments[2] = torch.randn(500) if weighted else None
    return arguments


RECORDS = [(1, 5, 1), (3, 33, 1), (5, 70, 1), (5, 70, 5), (6, 64, 1), (7, 48, 1), (7, 64, 7), (8, 17, 1), (15, 20, 1)]
"""Blocks, columns and a seed: of 1 all columns have few bits, of others some are float32."""


@needs_compiler
@pytest.mark.parametrize(("num_blocks", "dim", "seed"), RECORDS)
def test_instruction_sets_give_the_same_bits(num_blocks: int, dim: int, seed: int) -> None:
    for dtype, weighted in product((torch.int64, torch.int32), (False, True)):
        arguments = of_many_ids(num_blocks, dim, seed, dtype, weighted=weighted)
        assert outcomes(arguments) == [by_torch(arguments).tolist()] * 3
        arguments[0][[3, 130, 499]] = torch.tensor([-1, 1_500, 2**31 - 1], dtype=dtype)
        first, *others = outcomes(arguments)
        assert others == [first] * 2
        assert "expected ids in 0..1499, got -1" in first
        arguments[-1] = True
        assert outcomes(arguments) == [by_torch(arguments).tolist()] * 3


@needs_compiler
@pytest.mark.parametrize(("num_blocks", "dim", "seed"), RECORDS)
def test_instruction_sets_take_damaged_directories_alike(num_blocks: int, dim: int, seed: int) -> None:
    """Refused, for the same row, or the same other rows of the table."""
    arguments = of_many_ids(num_blocks, dim, seed, torch.int64)
    place = int(arguments[5][0, 4])
    directory, refusals = arguments[3][place], 0
    for number in range(40):
        torch.manual_seed(number)
        damaged = directory.clone()
        damaged[torch.randint(len(damaged), (1 + number // 4,))] = torch.randint(256, (1,), dtype=torch.uint8)
        arguments[3][place] = damaged
        first, *others = outcomes(arguments)
        assert others == [first] * 2
        refusals += isinstance(first, str)
    assert 0 < refusals < 40


def test_constants_are_made_once_and_anew_where_groups_have_changed() -> None:
    arguments = of_blocks(3, 17)
    assert on_numpy(arguments).equal(look_up(arguments))
    groups = arguments[7]
    constants = packed_triton._columns_of_groups[groups][1]
    assert on_numpy(arguments).equal(look_up(arguments))
    assert packed_triton._columns_of_groups[groups][1] is constants
    groups[:, 32:64].view(torch.float32).mul_(2.0)  # scales and biases
    changed = look_up(arguments)
    assert on_numpy(arguments).equal(changed)
    with torch.inference_mode():
        arguments[7] = groups.clone()
        for _ in range(2):
            arguments[7][:, 32:64].view(torch.float32).mul_(0.5)
            assert on_numpy(arguments).equal(look_up(arguments))


@pytest.mark.parametrize("way", KERNELS)
def test_features_that_read_one_key_do_not_share_places(way: Any) -> None:
    arguments, _ = call()
    offsets, arguments[8] = arguments[1], [0, 0]
    arguments[0], arguments[1] = arguments[0][: offsets[arguments[9]]], offsets[: arguments[9] + 1]
    assert way(arguments).equal(look_up(arguments))


@survives
def test_a_row_behind_the_last_of_its_block_is_refused_as_the_operator_does() -> None:
    refusals = []
    for size in range(4):  # more rows than these the bytes do not hold
        arguments, _ = call()
        arguments[6][:, 1] = size
        for way in (look_up, on_numpy):
            try:
                way(arguments)
            except (RuntimeError, ValueError):
                refusals.append((size, way.__name__))
    sizes = {size for size, _ in refusals}
    assert sizes
    assert len(sizes) < 4
    assert len(refusals) == 2 * len(sizes)


def test_features_without_bags() -> None:
    arguments, _ = call()
    for keys in ([0, 2], [-1, 0]):
        arguments[8] = keys
        with pytest.raises(ValueError, match="offsets: expected bags for each feature, got those of 2 keys"):
            on_numpy(arguments)
    arguments[8], arguments[9], arguments[1] = None, 0, torch.zeros(1, dtype=torch.int64)
    assert on_numpy(arguments).shape == (0, 36)


@needs_triton
@needs_compilation
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("kind", "num_planes"), [(0, 0), (1, 0), (2, 3), (3, 0), (3, 3)])
def test_compiles_without_a_gpu_and_rounds_as_the_cpu_does(kind: int, num_planes: int, is_weighted: bool) -> None:
    pointers = {"ids": "i64", "places": "i64", "offsets": "i64", "weights": "fp32", "features": "i64"}
    pointers |= {"blocks": "i64", "columns": "i32", "fault": "i32", "out": "fp32"}
    numbers = dict.fromkeys(["num_ids", "num_bags", "batch_size", "width"], "i32")
    constants = {"has_weights": is_weighted, "checks_ids": True, "kind": kind, "num_planes": num_planes}
    constants |= {"rows_per_record": 128, "is_one_block": kind == 0, "columns_per_program": 64}
    types = {name: f"*{kind}" for name, kind in pointers.items()} | numbers
    for kernel, num_warps in (
        (packed_triton._search_kernel, packed_triton.WARPS_PER_SEARCH),
        (packed_triton._kernel, packed_triton.NUM_WARPS),
    ):
        of_kernel = {name: part for name, part in constants.items() if name in kernel.arg_names}
        signature = {name: part for name, part in types.items() if name in kernel.arg_names}
        check_compiled(kernel, signature, of_kernel, num_warps)


@pytest.mark.gpu
@needs_triton
def test_the_operator_runs_on_a_gpu() -> None:
    load_operator()
    arguments = of_blocks(8, 64)
    assert look_up(moved_to("cuda", arguments)).cpu().equal(look_up(arguments))


def build(*, compiler: str | None = None) -> Path:
    """The library of lookups, by a compiler that the variable CXX names."""
    with pytest.MonkeyPatch.context() as patch:
        if compiler is not None:
            patch.setenv("CXX", compiler)
        return LOOKUPS.build()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "dnis_torchrec"


def compiler(tmp_path: Path, body: str) -> str:
    """A program that is called like a compiler and does what `body` says: `output` is the path after -o."""
    program = tmp_path / "compiler"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, time\n"
        "output = sys.argv[sys.argv.index('-o') + 1]\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv) + '\\n')\n"
        f"{body}\n"
    )
    program.chmod(0o755)
    return str(program)


WORKS = "open(output, 'w').write('library')"


def test_builds_once(tmp_path: Path, cache: Path) -> None:
    command = compiler(tmp_path, WORKS)
    library = build(compiler=command)
    assert library.parent == cache == library_folder()
    assert library.read_text() == "library"
    assert (cache.stat().st_mode & 0o777, library.stat().st_mode & 0o777) == (0o700, 0o755)
    assert build(compiler=command) == library
    assert build(compiler="/nowhere") == library  # a library outlives its compiler
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert str(LOOKUPS.sources[0]) in call
    assert "-ffp-contract=off" in call


def test_another_source_or_torch_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    command = compiler(tmp_path, WORKS)
    libraries = {build(compiler=command)}
    monkeypatch.setattr("torch.__version__", "2.99.0")
    libraries.add(build(compiler=command))
    changed = tmp_path / "csrc"
    changed.mkdir()
    for source in LOOKUPS.sources:
        (changed / source.name).write_text(source.read_text() + "// changed\n")
    monkeypatch.setenv("CXX", command)
    libraries.add(replace(LOOKUPS, sources=tuple(changed / source.name for source in LOOKUPS.sources)).build())
    assert len(libraries) == 3
    assert set(cache.iterdir()) == libraries


@pytest.mark.parametrize(
    ("body", "seconds", "message"),
    [
        ("open(output, 'w').write('half'); sys.exit('error: no such header')", 60, r"(.|\n)*no such header"),
        ("time.sleep(60)", 0.2, r" within 0\.2 s"),
    ],
)
def test_failure_is_quoted_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, body: str, seconds: float, message: str
) -> None:
    monkeypatch.setattr(native_build, "SECONDS_TO_COMPILE", seconds)
    with pytest.raises(RuntimeError, match=rf"packed lookup: expected .*to compile it{message}"):
        build(compiler=compiler(tmp_path, body))
    assert list(cache.iterdir()) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find_compiler() is None
    with pytest.raises(RuntimeError, match=r"expected a C\+\+ compiler: CXX or one of .*got none; install one"):
        build()
    assert not cache.exists()


@pytest.mark.usefixtures("cache")
def test_finds_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiler(tmp_path, WORKS)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    os.symlink(program, tmp_path / "clang++")
    assert find_compiler() == str(tmp_path / "clang++")
    os.symlink(program, tmp_path / "c++")
    assert find_compiler() == str(tmp_path / "c++")
    monkeypatch.setenv("CXX", program)
    assert find_compiler() == program


def test_several_may_build_at_once(tmp_path: Path, cache: Path) -> None:
    slowly = "stream = open(output, 'w'); stream.write('lib'); stream.flush(); time.sleep(.1); stream.write('rary')"
    command = compiler(tmp_path, slowly)
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: build(compiler=command).read_text(), range(4)))
    assert built == ["library"] * 4
    assert len(list(cache.iterdir())) == 1


def test_a_library_appears_whole_or_not_at_all(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        build(compiler=compiler(tmp_path, WORKS))
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_a_library_that_others_can_have_written_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = compiler(tmp_path, WORKS)
    library = build(compiler=command)
    owner, message = library.stat().st_uid, r"expected a library that only you or root can write.*remove "
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: owner + 1)
        with nullcontext() if owner == 0 else pytest.raises(RuntimeError, match=message):
            build(compiler=command)
    library.chmod(0o775)
    with pytest.raises(RuntimeError, match=message):
        build(compiler=command)


@pytest.mark.parametrize("num_bytes", [0, 3, 63, 64, 127])
def test_a_library_that_was_cut_off_is_built_again(tmp_path: Path, cache: Path, num_bytes: int) -> None:
    """As by a full disk or a crash: a process that loads one is killed by SIGBUS, if not refused."""
    header = struct.pack("=4s36xQ10xHH2x", b"\x7fELF", 64, 64, 1)  # one section of 64 bytes, from byte 64
    command = compiler(tmp_path, f"open(output, 'wb').write({header + bytes(64)!r})")
    library = build(compiler=command)
    assert build(compiler="/nowhere").read_bytes() == header + bytes(64)
    library.write_bytes(library.read_bytes()[:num_bytes])
    with pytest.raises(RuntimeError, match=r"expected a C\+\+ compiler"):
        build(compiler="/nowhere")
    assert build(compiler=command).read_bytes() == header + bytes(64)
    assert list(cache.iterdir()) == [library]
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


@pytest.mark.parametrize("mended", [True, False])
def test_a_library_that_cannot_be_loaded_is_built_again_once(tmp_path, monkeypatch, cache: Path, mended: bool) -> None:
    loaded = []

    def load_library(library: Path) -> None:
        loaded.append((library.parent, library.read_text()))
        if not mended or library.read_text() != "library":
            raise OSError("version `GLIBC_2.99' not found")

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    monkeypatch.setenv("CXX", compiler(tmp_path, WORKS))
    build().write_text("of another machine")
    with nullcontext() if mended else pytest.raises(OSError, match="GLIBC"):
        LOOKUPS.load()
    assert loaded == [(cache, "of another machine"), (cache, "library")]


def test_what_was_built_elsewhere_does_where_nothing_can_be_built(tmp_path, monkeypatch, cache: Path) -> None:
    other, library = tmp_path / "select_01234567.so", tmp_path / "packed_01234567.so"
    working = compiler(tmp_path, WORKS)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with fallback_libraries([other, library]):
        assert build() == library
        cache.parent.write_text("no folder")
        assert build(compiler=working) == library
        cache.parent.unlink()
    with fallback_libraries([other]), pytest.raises(RuntimeError, match=r"expected a C\+\+ compiler"):
        build()
    with pytest.raises(RuntimeError, match=r"expected a C\+\+ compiler"):
        build()
    with fallback_libraries([library]):
        assert build(compiler=working).parent == cache
