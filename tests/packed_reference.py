"""Packed tables drawn at random, packed by hand: a row is one large number, and values are what its codes stand for."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from dnis_torchrec.blocks.codes import WIDTHS
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.packed import PackedTable
from tests.serving_reference import Case


def packed_by_hand(fields: list[int], bits: list[int]) -> list[int]:
    """The bytes of one row."""
    number, end = 0, 0
    for field, width in zip(fields, bits, strict=True):
        if width == 32:
            end = (end + 7) // 8 * 8
        number |= field << end if width else 0
        end += width
    return list(number.to_bytes((end + 7) // 8, "little"))


def draw_fields(random: Random, num_rows: int, bits: list[int]) -> list[list[int]]:
    """Codes from the least to the largest, and bits of float32."""
    floats = torch.randn(num_rows, len(bits)).view(torch.int32).tolist()
    return [
        [of_row[d] % 2**32 if width == 32 else random.randrange(2**width) for d, width in enumerate(bits)]
        for of_row in floats
    ]


def values_of(fields: list[list[int]], bits: list[int], scale: Tensor, shift: Tensor) -> Tensor:
    """What fields of one block stand for, in float64 until the end."""
    values = torch.zeros(len(fields), len(bits))
    for d, width in enumerate(bits):
        column = torch.tensor([of_row[d] for of_row in fields], dtype=torch.int64)
        if width == 32:
            values[:, d] = column.to(torch.int32).view(torch.float32)
        elif width:
            values[:, d] = ((column + shift[d].double() / 2) * scale[d].double()).float()
    return values


def packed(table: TableScheme, random: Random) -> tuple[TableScheme, PackedTable, Tensor]:
    """Gives a table bits for every column and rows: its scheme, what is stored, all of it dense.

    Draws from torch's generator, too.
    """
    num_blocks, dim = table.retained.shape
    widths = random.choice([WIDTHS, (0, 2, 3, 4, 5), (32,), (0, 32), (16, 32), (4,), (0,)])
    bits = torch.tensor([[random.choice(widths) for _ in range(dim)] for _ in range(num_blocks)], dtype=torch.uint8)
    scale = (torch.rand(num_blocks, dim) + 2**-8).bfloat16().float()
    shift = torch.randint(-300, 300, (num_blocks, dim), dtype=torch.int16)
    dense, stored, of_rows = torch.zeros(table.num_embeddings, dim), bytearray(), table.routing.all_blocks()
    for s in range(num_blocks):
        rows, widths_of_block = (of_rows == s).nonzero().flatten(), bits[s].tolist()
        fields = draw_fields(random, len(rows), widths_of_block)
        if len(rows) and any(widths_of_block):
            stored += b"".join(bytes(packed_by_hand(of_row, widths_of_block)) for of_row in fields)
            dense[rows] = values_of(fields, widths_of_block, scale[s], shift[s])
    area = int((table.routing.row_counts() * (bits > 0).sum(1)).sum())
    scheme = replace(table, bits=bits, retained=bits > 0, num_retained=area)
    return scheme, PackedTable.from_rows(scheme, torch.tensor(list(stored), dtype=torch.uint8), scale, shift), dense


def packed_case(case: Case, seed: int) -> tuple[Case, dict[str, PackedTable]]:
    """The same bags over packed tables of the same shapes; `tables` of the case is what they stand for."""
    random, schemes, stored, dense = Random(seed), {}, {}, {}
    torch.manual_seed(seed)
    for name, table in case.scheme.tables.items():
        schemes[name], stored[name], dense[name] = packed(table, random)
    return replace(case, scheme=MixedDimensionScheme(schemes), tables=dense), stored
