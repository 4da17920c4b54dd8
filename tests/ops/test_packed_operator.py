"""The operator of packed tables refuses what would lead outside its tensors, and exports."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dnis_torchrec.blocks.codes import WIDTHS, field_offsets
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops.build import LOOKUPS
from dnis_torchrec.ops.packed import GROUP_FIELDS, PACKED_SCHEMA, field_groups, torch_packed_embedding_bag
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving import PackedEmbeddingBagCollection, load_operator
from tests.packed_reference import packed
from tests.serving_reference import ROUTINGS, table_scheme

needs_compiler = pytest.mark.skipif(not load_operator(), reason="no C++ compiler")

IDS, OFFSETS = torch.tensor([0, 3, 9, 1]), torch.tensor([0, 1, 2, 3, 4])
PLACES = {"tables": 3, "features": 4, "table_layout": 5, "blocks": 6, "groups": 7}


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


def look_up(arguments: list) -> Tensor:
    return torch.ops.dnis_torchrec.packed_embedding_bag.default(*arguments)


def with_argument(place: int, value: object) -> list:
    arguments, _ = call()
    arguments[place] = value
    return arguments


@pytest.mark.parametrize("way", [look_up, lambda arguments: torch_packed_embedding_bag(*arguments)])
def test_gives_the_rows(way) -> None:
    arguments, expected = call()
    assert way(arguments).equal(expected)


@given(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=70))
def test_windows_hold_their_fields(bits: list[int]) -> None:
    """16 columns within 64 bytes, four within 16; what is masked is the field and nothing else."""
    widths = torch.tensor([bits])
    groups = field_groups(widths, torch.ones(1, len(bits)), torch.zeros(1, len(bits)))
    assert groups.shape == (-(-len(bits) // 16), GROUP_FIELDS)
    ends = [0] * len(groups)
    for column, (offset, width) in enumerate(zip(field_offsets(widths)[0].tolist(), bits, strict=True)):
        group, lane = groups[column // 16].tolist(), column % 16
        mask = group[16 + lane] % 2**32
        assert mask.bit_count() == width
        if width:
            window, quad = group[80], group[81 + lane // 4]
            wide, narrow = group[lane] & 0xFF, group[64 + lane] & 0xFF
            first_bit = (mask & -mask).bit_length() - 1
            assert 8 * (window + wide) + first_bit == 8 * (window + quad + narrow) + first_bit == offset
            last = (offset + width - 1) // 8 - window
            assert last < 64
            assert last - quad < 16
            assert quad < 64
            ends[column // 16] = max(ends[column // 16], last + 1)
    assert groups[:, 86].tolist() == ends


@needs_compiler
@pytest.mark.parametrize("limit", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize(
    ("field", "row", "column", "value"),
    [
        ("features", 0, 0, 2),
        ("features", 0, 0, -1),
        ("features", 1, 1, 6),
        ("features", 0, 1, -1),
        ("features", 0, 2, 19),
        ("features", 0, 2, 2**40),
        ("table_layout", 0, 0, -1),
        ("table_layout", 0, 0, 1000),
        ("table_layout", 0, 0, 2**62),
        ("table_layout", 0, 1, 1),
        ("table_layout", 0, 2, 0),
        ("table_layout", 0, 2, 3),
        ("table_layout", 0, 2, 100),
        ("table_layout", 0, 3, 4),
        ("table_layout", 1, 3, 3),  # boundaries for rows
        ("table_layout", 0, 3, -1),
        ("table_layout", 0, 4, 0),  # rows for a directory
        ("table_layout", 0, 4, -1),
        ("blocks", 0, 0, -1),
        ("blocks", 0, 0, 2**62),
        ("blocks", 0, 1, 2**62),
        ("blocks", 0, 1, -1),
        ("blocks", 0, 2, 10_000),
        ("blocks", 0, 2, 0),
        ("blocks", 0, 3, 100),
        ("blocks", 1, 3, 2**62),
        ("groups", 2, 80, 10_000),  # the window of the first columns of the block of row 0 or 3
        ("groups", 2, 80, -1),
    ],
)
def test_layouts_that_lead_outside(field: str, row: int, column: int, value: int, limit: str) -> None:
    arguments, _ = call()
    changed = arguments[PLACES[field]].clone()
    changed[row, column] = value
    if field == "groups":
        changed[:, column] = value
    arguments[PLACES[field]] = changed
    widest = LOOKUPS.instruction_set()
    LOOKUPS.instruction_set(limit=limit)
    try:
        with pytest.raises(ValueError, match=r"packed_embedding_bag: .*expected"):
            look_up(arguments)
    finally:
        LOOKUPS.instruction_set(limit=widest)


@needs_compiler
def test_directories_that_point_nowhere() -> None:
    message = r"feature \d: expected a directory of rows that exist, got others for row"
    for place, value in ((1, 0xFF), (3, 2**40), (3, -(2**63))):
        arguments, _ = call()
        tables = [table.clone() for table in arguments[3]]
        # where blocks begin, all but the last, which is that of none
        tables[place][: 24 // tables[place].itemsize] = value
        arguments[3] = tables
        with pytest.raises(ValueError, match=message):
            look_up(arguments)


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


@needs_compiler
@pytest.mark.parametrize(
    "offsets", [[0, 2, 1, 3, 4], [0, 1, 2, 3, 9], [-1, 1, 2, 3, 4], [0, 1, 2, 3, 3], [1, 1, 2, 3, 4]]
)
@pytest.mark.parametrize("way", [look_up, lambda arguments: torch_packed_embedding_bag(*arguments)])
def test_offsets_that_do_not_rise(offsets: list[int], way) -> None:
    with pytest.raises(ValueError, match="offsets: expected them to rise from 0 to the number of ids"):
        way(with_argument(1, torch.tensor(offsets)))


@pytest.mark.parametrize("way", [look_up, lambda arguments: torch_packed_embedding_bag(*arguments)])
def test_unknown_ids(way) -> None:
    arguments, expected = call()
    arguments[0] = torch.tensor([0, -1, 10, 1])
    with pytest.raises(ValueError, match=r"feature 0: expected ids in 0\.\.9, got -1"):
        way(arguments)
    arguments[-1] = True
    expected[1, :18] = expected[0, 18:] = 0.0
    assert way(arguments).equal(expected)


def test_no_bags() -> None:
    arguments, _ = call()
    none = torch.zeros(0, dtype=torch.int64)
    assert look_up([none, torch.zeros(5, dtype=torch.int32), *arguments[2:]]).equal(torch.zeros(2, 36))
    arguments[9] = 0
    assert look_up([none, torch.zeros(1, dtype=torch.int32), *arguments[2:]]).shape == (0, 36)


@needs_compiler
def test_the_schema_is_that_of_the_library() -> None:
    found = str(torch.ops.dnis_torchrec.packed_embedding_bag.default._schema)
    assert found == f"dnis_torchrec::{PACKED_SCHEMA}"


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
    arguments, _ = call()
    moved = [part.to("meta") if isinstance(part, Tensor) else part for part in arguments]
    moved[3] = [table.to("meta") for table in arguments[3]]
    out = look_up(moved)
    assert (out.shape, out.device.type) == ((2, 36), "meta")


def test_routing_without_a_directory() -> None:
    torch.manual_seed(0)
    scheme = table_scheme("t", RowRouting.from_map(torch.full((4,), 1), 2), torch.ones(2, 5).bool())
    scheme, stored, dense = packed(scheme, Random(2))
    module = PackedEmbeddingBagCollection(MixedDimensionScheme({"t": scheme}), {"t": stored})
    assert stored.directory.directory.numel() == 0
    assert module.lookup(torch.arange(4), torch.arange(5)).equal(dense)
