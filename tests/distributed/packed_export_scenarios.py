"""What one rank does to export a sharded model in bit fields; judged in test_packed_export_ranks.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec import scheme as scheme_module
from dnis_torchrec.allocation.bits import allocate
from dnis_torchrec.allocation.curvature import Curvature
from dnis_torchrec.artifact import export as export_module
from dnis_torchrec.artifact import forms
from dnis_torchrec.artifact.export import export
from dnis_torchrec.artifact.write import write_over_ranks
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection import shards as shards_module
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, local_shards
from tests.distributed.allocation_scenarios import BITS, worth
from tests.distributed.harness import Rank
from tests.distributed.pruning_scenarios import blocks, counts, model, outcome_of, sharded
from tests.tiny import AllocatedPeak

FILE_BYTES = 1600
"""Limit at which tables take several files."""


def allocated(whole: nn.Module, compression: float = 3) -> MixedDimensionScheme:
    """Bits for every column; tables stay as they are."""
    return allocate(whole, blocks(), counts(), worth(), compression=compression, bits=BITS).scheme


def export_packed(kind: str, rank: Rank) -> dict[str, Any]:
    """Artifacts of several ranks: in one file a table, in several, and in sparse rows of what the codes stand for."""
    whole = sharded("spread", kind, rank)
    scheme = allocated(whole)
    export(whole, scheme, rank.folder / f"packed_{kind}")
    with patch.object(export_module, "write_over_ranks", partial(write_over_ranks, max_file_bytes=FILE_BYTES)):
        export(whole, allocated(whole, 1.1), rank.folder / f"files_{kind}")
    export(whole, scheme, rank.folder / f"csr_{kind}", forms=("packed",))
    return {}


def export_alone(folder: Path) -> None:
    """The same in one process."""
    whole = model("spread")
    export(whole, allocated(whole), folder / "packed")
    with patch.object(export_module, "write_over_ranks", partial(write_over_ranks, max_file_bytes=FILE_BYTES)):
        export(whole, allocated(whole, 1.1), folder / "files")


def memory(kind: str, rank: Rank) -> dict[str, Any]:
    """The bytes that exporting one large table allocates, beside those of the shard."""
    rows, dim = 16384 * rank.world_size, 64
    config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
    large = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[config], device=torch.device("meta"))})
    sharders = [CpuEmbeddingBagCollectionSharder()]
    constraints = {"t": ParameterConstraints(sharding_types=[kind], min_partition=dim // rank.world_size)}
    plan = make_sharding_plan(large, rank.device, sharders, constraints=constraints, process_group=rank.process_group)
    whole = shard_model(large, rank.device, plan, sharders, process_group=rank.process_group)
    weights = [part.weight for module in collections(whole).values() for part in local_shards(module)]
    for weight in weights:
        weight.normal_(generator=torch.Generator().manual_seed(rank.rank))
    of_rows = FrequencyCounts({"t": torch.arange(rows, 0, -1)}, {"f": 1}, rows)
    of_blocks = blocks_from_counts(of_rows, [config], num_blocks=4)
    ones = {"t": torch.ones(4, dim, dtype=torch.float64)}
    scheme = allocate(whole, of_blocks, of_rows, Curvature(ones, ones, 100, 0.1), compression=8, bits=BITS).scheme
    with pytest.MonkeyPatch.context() as context:
        context.setattr(shards_module, "VALUES_PER_OPERATION", 1 << 13)
        context.setattr(scheme_module, "VALUES_PER_CHUNK", 1 << 13)
        context.setattr(forms, "ROWS_AT_A_TIME", 1 << 10)
        with AllocatedPeak(weights) as exported:
            export(whole, scheme, rank.folder / f"memory_{kind}")
    return {"shard": max(weight.nbytes for weight in weights), "export": exported.peak}


def refusals(rank: Rank) -> dict[str, Any]:
    """A value that is none on one rank."""
    whole = sharded("ties", "row_wise", rank)
    scheme = allocated(whole)
    if rank.rank == 1:
        first = next(s for m in collections(whole).values() for s in local_shards(m) if s.table == "tag")
        first.weight[0, 0] = torch.nan
    return {"nan": outcome_of(lambda: export(whole, scheme, rank.folder / "refused"))}
