"""What one rank does to prune and export a sharded model; judged in test_pruning_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec import ranks as reductions
from dnis_torchrec import scheme as scheme_module
from dnis_torchrec.artifact import write
from dnis_torchrec.artifact.export import export
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.prune import Size, _pruned_tables, mean_squares, prune
from dnis_torchrec.selection import shards as shards_module
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.wrapper import soft_selection_modules
from tests.distributed.harness import Rank
from tests.distributed.model import ROWS, Net, tables
from tests.tiny import AllocatedPeak

KINDS = {
    kind: dict.fromkeys(ROWS, kind)
    for kind in (
        *("table_wise", "row_wise", "column_wise"),
        *("table_row_wise", "table_column_wise", "grid_shard", "data_parallel"),
    )
}
KINDS["grid_shard"] |= {"item": "column_wise", "genre": "column_wise"}  # MEAN
KINDS["mixed"] = {"user": "row_wise", "item": "column_wise", "genre": "data_parallel", "tag": "table_wise"}

CASES: dict[str, dict[str, Any]] = {
    "ratio": {"size": Size(compression=3)},
    "bytes": {"size": Size(embedding_bytes=2000)},
}
"""Name -> how to prune."""
DRAWN = ("ties", "spread")


def counts() -> FrequencyCounts:
    """Of all four tables; `user` is in frequency order, and some rows of every table were never seen."""
    generator = torch.Generator().manual_seed(5)
    of_rows = {name: torch.randint(0, 6, (rows,), generator=generator) for name, rows in ROWS.items()}
    of_rows["user"] = of_rows["user"].sort(descending=True).values
    return FrequencyCounts(of_rows, {f"{name}_id": 1 for name in ROWS}, 100)


def blocks(num_blocks: int = 3) -> RowBlocks:
    """Blocks over all tables."""
    return blocks_from_counts(counts(), tables(), num_blocks=num_blocks)


def model(drawn: str) -> nn.Module:
    """The same weights in every process: a few values with many ties and zeros, or values of very different size."""
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(3)
    net = Net()
    for name, config in sorted(
        {c.name: c for m in collections(net).values() for c in m.embedding_bag_configs()}.items()
    ):
        shape = (config.num_embeddings, config.embedding_dim)
        if drawn == "ties":
            weight = torch.randint(-3, 4, shape, generator=generator) / 4
        else:
            weight = torch.randn(shape, generator=generator) * 10 ** (4 * torch.rand(shape, generator=generator) - 2)
        for shard in (s for m in collections(net).values() for s in local_shards(m)):
            if shard.table == name:
                shard.weight.copy_(weight)
    return net


def sharded(drawn: str, kind: str, rank: Rank) -> nn.Module:
    """`model`, sharded over all ranks; never merged, because it was never prepared."""
    plain, sharders = model(drawn), [CpuEmbeddingBagCollectionSharder()]
    constraints = {t: ParameterConstraints(sharding_types=[k], min_partition=4) for t, k in KINDS[kind].items()}
    group = rank.process_group
    plan = make_sharding_plan(plain, rank.device, sharders, constraints=constraints, process_group=group)
    return shard_model(plain, rank.device, plan, sharders, process_group=group)


def shards_of(whole: nn.Module) -> dict[str, torch.Tensor]:
    """``"table/first row/first column"`` -> clone of the local shard."""
    parts = [part for module in collections(whole).values() for part in local_shards(module)]
    return {f"{part.table}/{part.first_row}/{part.first_column}": part.weight.clone() for part in parts}


def described(scheme: MixedDimensionScheme) -> dict[str, Any]:
    """A scheme as the report of a scenario can hold it."""
    return {"json": str(scheme.to_json()), "tensors": {k: v.clone() for k, v in scheme.to_tensors().items()}}


def scores(whole: nn.Module) -> dict[str, torch.Tensor]:
    """What columns are chosen by."""
    found, ranks = _pruned_tables(whole, blocks(), counts())
    return {table.name: mean_squares(table, ranks) for table in found}


def prune_all(kind: str, rank: Rank) -> dict[str, Any]:
    """Every case, from the same weights."""
    found: dict[str, Any] = {}
    for drawn in DRAWN:
        whole = sharded(drawn, kind, rank)
        found[f"{drawn} scores"] = scores(whole)
        before = {part: weight.clone() for part, weight in shards_of(whole).items()}
        for name, options in CASES.items():
            for part in (part for module in collections(whole).values() for part in local_shards(module)):
                part.weight.copy_(before[f"{part.table}/{part.first_row}/{part.first_column}"])
            scheme = prune(whole, blocks(), counts(), **options)
            found[f"{drawn} {name}"] = {"shards": shards_of(whole), "scheme": described(scheme)}
    return found


def outcome_of(action: Any) -> str:
    """How an action ends."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def refusals(rank: Rank) -> dict[str, Any]:
    """What one rank alone meets stops all of them, and no table changes; nor where nothing would be left."""
    whole = sharded("ties", "row_wise", rank)
    nothing = outcome_of(lambda: prune(whole, blocks(), counts(), size=Size(embedding_bytes=1)))
    if rank.rank == 1:
        next(s for m in collections(whole).values() for s in local_shards(m) if s.table == "tag").weight[0, 0] = (
            torch.inf
        )
    before = shards_of(whole)
    infinite = outcome_of(lambda: prune(whole, blocks(), counts(), **CASES["ratio"]))
    after = shards_of(whole)
    return {
        "infinite": infinite,
        "nothing": nothing,
        "changed": [name for name, weight in before.items() if not torch.equal(weight, after[name])],
    }


def export_all(kind: str, rank: Rank) -> dict[str, Any]:
    """An artifact, and again over it."""
    whole = sharded("spread", kind, rank)
    scheme = prune(whole, blocks(), counts(), size=Size(compression=3))
    target = rank.folder / kind
    export(whole, scheme, target, run={"metrics": {"auc": 0.5}})
    return {"again": outcome_of(lambda: export(whole, scheme, target))}


def memory(kind: str, rank: Rank) -> dict[str, Any]:
    """What pruning and exporting one large table allocate, with chunks and files as small beside it as in earnest."""
    rows, dim = 8192 * rank.world_size, 64
    config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
    large = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[config], device=torch.device("meta"))})
    sharders = [CpuEmbeddingBagCollectionSharder()]
    constraints = {"t": ParameterConstraints(sharding_types=[kind], min_partition=dim // rank.world_size)}
    plan = make_sharding_plan(large, rank.device, sharders, constraints=constraints, process_group=rank.process_group)
    whole = shard_model(large, rank.device, plan, sharders, process_group=rank.process_group)
    weights = [part.weight for module in collections(whole).values() for part in local_shards(module)]
    of_rows = FrequencyCounts({"t": torch.arange(rows, 0, -1)}, {"f": 1}, rows)
    of_blocks = blocks_from_counts(of_rows, [config], num_blocks=4)
    found: dict[str, Any] = {"shard": max(weight.nbytes for weight in weights)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "VALUES_PER_OPERATION", 1 << 13)
        patch.setattr(scheme_module, "VALUES_PER_CHUNK", 1 << 13)
        patch.setattr(write, "_SMALLEST_FILE_BYTES", 1 << 16)
        for weight in weights:
            weight.normal_(generator=torch.Generator().manual_seed(rank.rank))
        with AllocatedPeak(weights) as pruned:
            scheme = prune(whole, of_blocks, of_rows, size=Size(compression=1.1))
        with AllocatedPeak(weights) as exported:
            export(whole, scheme, rank.folder / f"memory_{kind}")
        found |= {"prune": pruned.peak, "export": exported.peak}
    return found


def texts(rank: Rank) -> dict[str, Any]:
    """Texts of different length, and values that take several collectives."""
    ranks = Ranks(rank.process_group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "VALUES_PER_COLLECTIVE", 3)
        total = ranks.sum_(torch.arange(8).view(2, 4) * (rank.rank + 1))
        largest = ranks.max_(torch.tensor([float(rank.rank), -float(rank.rank), 0.5, 7.0]))
    return {"texts": ranks.gather_texts("é" * rank.rank), "none": ranks.gather_texts(""), "sum": total, "max": largest}


def unmerged(rank: Rank) -> dict[str, Any]:
    """A prepared model whose alpha has not been folded yet, and the same once it has."""
    net = prepare_(model("ties"), blocks())
    whole = shard_model(net, rank.device, process_group=rank.process_group)
    for wrapper in soft_selection_modules(whole).values():
        for dim in wrapper.alpha.dims:
            wrapper.alpha.of(dim).fill_(0.5)
    refused = outcome_of(lambda: prune(whole, blocks(), counts(), size=Size(compression=3)))
    not_exported = outcome_of(lambda: export(whole, MixedDimensionScheme(), rank.folder / "unmerged"))
    scheme = prune(merge_(whole), blocks(), counts(), size=Size(compression=3))
    return {"prune": refused, "export": not_exported, "scheme": described(scheme), "shards": shards_of(whole)}


def export_refusals(rank: Rank) -> dict[str, Any]:
    """One rank cannot write, or holds values outside its scheme: none is left waiting, and no artifact appears."""
    whole = sharded("ties", "row_wise", rank)
    scheme = prune(whole, blocks(), counts(), size=Size(compression=3))
    if rank.rank == 1:
        first = next(s for m in collections(whole).values() for s in local_shards(m) if s.table == "tag")
        first.weight.fill_(1.0)
    return {"outcome": outcome_of(lambda: export(whole, scheme, rank.folder / "refused"))}
