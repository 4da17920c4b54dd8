"""The compiled operator refuses layouts that would read outside the tables, and exports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dnis_torchrec.artifact.predictions import serve
from dnis_torchrec.ops.csr_operator import load_operator
from dnis_torchrec.serving.block_collection import BlockLayout
from dnis_torchrec.serving.logical_tables import LogicalTables
from dnis_torchrec.serving.mixed_dimension import block_tables
from tests.serving_reference import two_tables

pytestmark = pytest.mark.skipif(not load_operator(), reason="no C++ compiler")

IDS, OFFSETS = torch.tensor([0, 3, 9, 1]), torch.tensor([0, 1, 2, 3, 4])


def parts() -> tuple[BlockLayout, list[Tensor], Tensor]:
    """A layout of two tables, the stored tables, and what their bags of one id pool to."""
    tables, scheme = two_tables()
    logical = LogicalTables.of(scheme)
    blocks = {name: block_tables(table, [tables[name]]) for name, table in scheme.tables.items()}
    stored = [(name, s) for name, of_table in blocks.items() for s in of_table]
    maps = [table.routing.positions() for table in logical.tables]
    expected = torch.cat([tables["movie/seen"][IDS[:2]], tables["user"][IDS[2:]]], dim=1)
    return BlockLayout.of(logical, stored, maps), [blocks[name][s] for name, s in stored], expected


def look_up(layout: BlockLayout, tables: list[Tensor], ids: Tensor = IDS, offsets: Tensor = OFFSETS, **more) -> Tensor:
    options = {"batch_size": 2, "zero_unknown": False} | more
    return layout.lookup(ids, offsets, None, tables, None, **options)


def test_gives_the_rows() -> None:
    layout, tables, expected = parts()
    assert look_up(layout, tables).equal(expected)


def changed(tensor: Tensor, row: int, column: int, value: int) -> Tensor:
    tensor = tensor.clone()
    tensor[row, column] = value
    return tensor


@pytest.mark.parametrize(
    ("field", "row", "column", "value"),
    [
        ("features", 0, 0, 2),
        ("features", 0, 0, -1),
        ("features", 1, 1, 6),
        ("features", 0, 1, -1),
        ("features", 0, 2, 4),
        ("features", 0, 2, 17),
        ("features", 1, 1, 0),
        ("tables", 0, 1, 4),
        ("tables", 0, 2, 100),
        ("tables", 0, 3, 1),
        ("tables", 0, 0, 100),
        ("tables", 0, 0, -1),
        ("blocks", 0, 0, 11),
        ("blocks", 1, 0, 0),
        ("blocks", 0, 1, 99),
        ("blocks", 0, 2, 6),
        ("blocks", 0, 3, 100),
        ("blocks", 0, 4, 7),
        ("blocks", 0, 2, 2**62),
        ("blocks", 0, 2, -(2**63)),
        # its second block would be the first of the other table, whose rows are counted from elsewhere
        ("tables", 1, 1, 1),
    ],
)
def test_layouts_that_do_not_fit(field: str, row: int, column: int, value: int) -> None:
    layout, tables, _ = parts()
    with pytest.raises(ValueError, match=r"mixed_dimension_bag: .*expected"):
        look_up(replace(layout, **{field: changed(getattr(layout, field), row, column, value)}), tables)


def test_tensors_that_do_not_fit() -> None:
    layout, tables, _ = parts()
    wide_mask = layout.masks.clone()
    wide_mask[0] = 0b101111  # the right number of columns, one of them beyond D
    for bad_layout, bad_tables in (
        (layout, tables[:-1]),
        (layout, [tables[0][:1], *tables[1:]]),
        (layout, [tables[0][:, :3].contiguous(), *tables[1:]]),
        (layout, [tables[0].T, *tables[1:]]),
        (layout, [tables[0].double(), *tables[1:]]),
        (replace(layout, masks=wide_mask), tables),
        (replace(layout, masks=layout.masks[:2]), tables),
        (replace(layout, positions=[layout.positions[0][:5]]), tables),
        (replace(layout, positions=[layout.positions[0].long()]), tables),
        (replace(layout, positions=[]), tables),
    ):
        with pytest.raises(ValueError, match=r"mixed_dimension_bag: .*expected"):
            look_up(bad_layout, bad_tables)


@pytest.mark.parametrize(
    "offsets",
    [
        torch.tensor([0, 2, 1, 3, 4]),
        torch.tensor([0, 1, 2, 3, 9]),
        torch.tensor([-1, 1, 2, 3, 4]),
        torch.tensor([0, 1, 2, 3, 3]),  # right for every bag, and leaves an id over
        torch.tensor([1, 1, 2, 3, 4]),
        torch.tensor([0, 2**31 - 1, -(2**31), 3, 4], dtype=torch.int32),
    ],
)
def test_offsets_that_do_not_rise(offsets: Tensor) -> None:
    layout, tables, _ = parts()
    with pytest.raises(ValueError, match="offsets: expected them to rise from 0 to the number of ids"):
        look_up(layout, tables, offsets=offsets)


def test_any_stride_will_do() -> None:
    layout, tables, expected = parts()
    ids, offsets = (torch.stack([part, -part], dim=1)[:, 0] for part in (IDS, OFFSETS))
    assert not offsets.is_contiguous()
    assert look_up(layout, tables, ids=ids, offsets=offsets).equal(expected)


def test_unknown_ids() -> None:
    layout, tables, expected = parts()
    ids = torch.tensor([0, -1, 10, 1])
    with pytest.raises(ValueError, match=r"feature 0: expected ids in 0\.\.9, got -1"):
        look_up(layout, tables, ids=ids)
    expected[1, :5] = 0.0
    expected[0, 5:] = 0.0
    assert look_up(layout, tables, ids=ids, zero_unknown=True).equal(expected)


def test_positions_that_point_nowhere() -> None:
    layout, tables, _ = parts()
    with pytest.raises(ValueError, match="expected positions from 0 on, got others for row 0"):
        look_up(replace(layout, positions=[torch.full((10,), -1, dtype=torch.int32)]), tables)


def test_no_bags() -> None:
    layout, tables, _ = parts()
    empty = torch.tensor([], dtype=torch.int64)
    assert look_up(layout, tables, ids=empty, offsets=torch.zeros(1, dtype=torch.int64), batch_size=0).shape == (0, 10)
    assert look_up(layout, tables, ids=empty, offsets=torch.zeros(5, dtype=torch.int32)).equal(torch.zeros(2, 10))


def test_export_with_any_batch_size() -> None:
    layout, tables, expected = parts()

    class Served(nn.Module):
        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            batch_size = (offsets.numel() - 1) // 2
            return layout.lookup(ids, offsets, None, tables, None, batch_size=batch_size, zero_unknown=False)

    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = ({0: torch.export.Dim.AUTO}, {0: 2 * batch + 1})
    program = torch.export.export(Served(), (IDS, OFFSETS), dynamic_shapes=shapes)
    assert program.module()(IDS, OFFSETS).equal(expected)
    three = torch.cat([IDS[:2], IDS[:1], IDS[2:], IDS[3:]])
    assert program.module()(three, torch.arange(7)).shape == (3, 10)


class Served(nn.Module):
    """A collection as a graph takes it: plain tensors in, pooled embeddings out."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.collection.lookup(ids, offsets)


@pytest.mark.parametrize("form", ["csr_fp32", "mixed_dimension_fp32"])
def test_a_module_serves_on_after_it_was_exported(form: str) -> None:
    """torch.export puts tensors without content in the place of a module's own while it traces."""
    tables, scheme = two_tables()
    module = Served(serve(scheme, tables, form))
    with torch.no_grad():
        expected = module(IDS, OFFSETS)
        program = torch.export.export(module, (IDS, OFFSETS), strict=False)
        assert module(IDS, OFFSETS).equal(expected)
        assert program.module()(IDS, OFFSETS).equal(expected)
