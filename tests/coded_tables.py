"""Tables with codes: schemes that say bits, scales and shifts, and what they round values to, level by level."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.codes import WIDTHS
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from tests.serving_reference import Case, two_tables

PACKED_FILE = "packed/000_movie_seen.safetensors"


def with_codes(table: TableScheme, *, seed: int = 0, widths: tuple[int, ...] | None = None) -> TableScheme:
    """A scheme with drawn bits, and scales that clip some values of about 1."""
    random, shape = Random(seed), table.retained.shape
    widths = widths or random.choice([WIDTHS, WIDTHS, (0, 2, 3, 4, 5), (32,), (4,), (0,)])
    bits = torch.tensor([[random.choice(widths) for _ in range(shape[1])] for _ in range(shape[0])], dtype=torch.uint8)
    is_coded = (bits > 0) & (bits < 32)
    levels = torch.where(is_coded, 2.0 ** bits.clamp(max=16), 1.0)
    scale = torch.where(is_coded, (3 / levels).bfloat16().float(), 1.0)
    off = torch.tensor([[random.randint(-3, 3) for _ in range(shape[1])] for _ in range(shape[0])])
    shift = torch.where(is_coded, (off - levels).clamp(-(2**15), 2**15 - 1), 0.0).short()
    area = int((table.routing.row_counts() * (bits > 0).sum(1)).sum())
    return replace(table, bits=bits, scale=scale, shift=shift, retained=bits > 0, num_retained=area)


def rounded(table: TableScheme, weight: Tensor) -> Tensor:
    """The nearest level to every value, in float64; 0 where nothing is retained."""
    out = torch.zeros(weight.shape, dtype=torch.float64)
    codes, blocks = table.codes, table.routing.all_blocks()
    for s, of_block in enumerate(codes.bits.tolist()):
        rows = (blocks == s).nonzero().flatten()
        for d, width in enumerate(of_block):
            values = weight[rows, d].double()
            if 0 < width < 32:
                levels = codes.scale[s, d].double() * (torch.arange(2**width) + codes.shift[s, d].double() / 2)
                above = torch.searchsorted(levels, values).clamp(1, len(levels) - 1)
                nearer = values - levels[above - 1] < levels[above] - values
                out[rows, d] = torch.where(nearer, levels[above - 1], levels[above])
            elif width == 32:
                out[rows, d] = values
    return out.float()


def coded_case(case: Case, seed: int) -> tuple[Case, dict[str, Tensor]]:
    """The same bags over tables with codes; `tables` of the case are rounded. Beside it, the tables before."""
    torch.manual_seed(seed)
    schemes = {name: with_codes(table, seed=seed + i) for i, (name, table) in enumerate(case.scheme.tables.items())}
    weights = {name: torch.randn(table.num_embeddings, table.embedding_dim) for name, table in schemes.items()}
    dense = {name: rounded(table, weights[name]) for name, table in schemes.items()}
    return replace(case, scheme=MixedDimensionScheme(schemes), tables=dense), weights


def coded_tables() -> tuple[dict[str, Tensor], MixedDimensionScheme]:
    """The tables of `two_tables` before they were rounded, nothing of them pruned, and their scheme with codes."""
    _, scheme = two_tables()
    bits = torch.tensor([[4, 32, 0, 7, 16], [3, 1, 0, 0, 5], [0, 0, 0, 0, 0]], dtype=torch.uint8)
    is_coded = (bits > 0) & (bits < 32)
    levels = torch.where(is_coded, 2.0 ** bits.clamp(max=8), 1.0)
    codes = {"bits": bits, "scale": (4 / levels).bfloat16().float(), "shift": (1 - levels).short()}
    coded = {}
    for name, table in scheme.tables.items():
        area = int((table.routing.row_counts() * (bits > 0).sum(1)).sum())
        coded[name] = replace(table, retained=bits > 0, num_retained=area, **codes)
    torch.manual_seed(1)
    return {name: torch.randn(10, 5) for name in coded}, MixedDimensionScheme(coded)


def write_coded_tables(path: Path, forms: tuple[str, ...] | None = None) -> Path:
    """The artifact of `coded_tables`, with a dense state and a run."""
    tables, scheme = coded_tables()
    state = {"over_arch.weight": torch.ones(3, 2), "step": torch.tensor(7)}
    return write_artifact(tables, scheme, path, forms=forms, dense_state=state, run={"seed": 3})
