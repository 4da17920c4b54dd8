"""What one rank does to measure and allocate on a sharded model; judged in test_allocation_ranks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dnis_torchrec.allocation import energies as energies_module
from dnis_torchrec.allocation.bits import allocate
from dnis_torchrec.allocation.curvature import Curvature
from dnis_torchrec.allocation.energies import rounding_energies, sample_rows
from dnis_torchrec.selection.shards import collections, local_shards
from tests.distributed.harness import Rank
from tests.distributed.model import DIMS, ROWS
from tests.distributed.pruning_scenarios import blocks, counts, described, model, sharded

SAMPLED = 9
"""Rows of a block in the sample: fewer than there are."""
BITS = (0, 2, 3, 4, 8, 32)


def worth() -> Curvature:
    """The same in every process."""
    generator = torch.Generator().manual_seed(11)
    shapes = {name: (blocks().routings[name].num_blocks, DIMS[name]) for name in ROWS}
    of_columns = {name: torch.rand(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return Curvature(of_columns, of_columns, 100, 0.1)


def measured(whole: nn.Module) -> dict[str, Any]:
    """Energies, codes and scheme as the report of a scenario can hold them."""
    found = rounding_energies(whole, blocks(), counts(), bits=BITS)
    allocation = allocate(whole, blocks(), counts(), worth(), compression=3, bits=BITS, energies=found)
    return {
        "energies": {f"{name}/{part}": getattr(of, part) for name, of in found.tables.items() for part in vars(of)},
        "codes": allocation.scheme.to_tensors(),
        "scheme": described(allocation.scheme),
        "numbers": [allocation.predicted_loss_increase, allocation.num_bytes],
    }


def sampling_few(whole: nn.Module) -> dict[str, Any]:
    """`measured`, on samples smaller than these small blocks."""
    before = energies_module.sample_rows
    energies_module.sample_rows = lambda counts, routing: sample_rows(counts, routing, SAMPLED)
    try:
        return measured(whole)
    finally:
        energies_module.sample_rows = before


def allocate_all(kind: str, rank: Rank) -> dict[str, Any]:
    """From tables of very different values."""
    return sampling_few(sharded("spread", kind, rank))


def allocate_alone() -> dict[str, Any]:
    """The same in one process."""
    return sampling_few(model("spread"))


def refusals(rank: Rank) -> dict[str, Any]:
    """A value of one rank is none: all of them say so."""
    whole = sharded("spread", "row_wise", rank)
    if rank.rank == 1:
        first = next(s for m in collections(whole).values() for s in local_shards(m) if s.table == "tag")
        first.weight.fill_(torch.nan)
    try:
        rounding_energies(whole, blocks(), counts(), bits=BITS)
    except ValueError as error:
        return {"refused": str(error)}
    return {"refused": ""}
