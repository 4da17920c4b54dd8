"""What one rank does to export a sharded model in bit fields; judged in test_packed_export_ranks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dnis_torchrec.allocation.allocate import allocate
from dnis_torchrec.artifact.export import export
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.budget import Size
from dnis_torchrec.search.pruning import prune
from dnis_torchrec.soft_selection.table_shards import collections, local_shards
from tests.distributed.allocation_scenarios import BITS, worth
from tests.distributed.harness import Rank
from tests.distributed.pruning_scenarios import blocks, counts, model, outcome_of, sharded


def allocated(whole: nn.Module) -> MixedDimensionScheme:
    """Bits for every column; tables stay as they are."""
    return allocate(whole, blocks(), counts(), worth(), compression=3, bits=BITS).scheme


def export_packed(kind: str, rank: Rank) -> dict[str, Any]:
    """An artifact of several ranks, and one that holds sparse rows of what the codes stand for."""
    whole = sharded("spread", kind, rank)
    scheme = allocated(whole)
    export(whole, scheme, rank.folder / f"packed_{kind}")
    export(whole, scheme, rank.folder / f"csr_{kind}", forms=("csr_fp32",))
    return {"bits": scheme.to_tensors()}


def refusals(rank: Rank) -> dict[str, Any]:
    """A scheme without codes; a value that is none on one rank."""
    whole = sharded("ties", "row_wise", rank)
    without = prune(sharded("ties", "row_wise", rank), blocks(), counts(), size=Size(compression=3))
    no_codes = outcome_of(lambda: export(whole, without, rank.folder / "refused", forms=("packed",)))
    scheme = allocated(whole)
    if rank.rank == 1:
        first = next(s for m in collections(whole).values() for s in local_shards(m) if s.table == "tag")
        first.weight[0, 0] = torch.nan
    return {"no codes": no_codes, "nan": outcome_of(lambda: export(whole, scheme, rank.folder / "refused"))}


def alone() -> tuple[nn.Module, MixedDimensionScheme]:
    """The same in one process."""
    whole = model("spread")
    return whole, allocated(whole)
