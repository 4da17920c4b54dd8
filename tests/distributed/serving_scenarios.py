"""What ranks do, and report, to serve packed tables that are spread over them. Judged in test_allocation_ranks.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact.load import load
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.codes import ColumnCodes
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme, TableScheme
from dnis_torchrec.serving import PackedSharder
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import outcome_of
from tests.reference import table_scheme

ROWS, DIM = 200_000, 16
BAGS = {"a": ("f1", "f2"), "b": ("f3",), "c": ("f1",), "d": ("f4",)}
READERS = BAGS | {"e": ("f2",), "f": ("f4", "f5")}
"""Table -> features; those that are not pooled are the last."""
KEYS = ("f5", "f4", "f3", "f2", "f1")
AROUND = 2**17
"""Bytes that Linux maps around those of a file that are read, at most."""
KINDS = {
    "row_wise": dict.fromkeys(READERS, "row_wise"),
    "column_wise": dict.fromkeys(READERS, "column_wise"),
    "mixed": dict(zip(READERS, ("table_wise", "row_wise", "column_wise") * 2, strict=True)),
    "planned": {},
}


def _table(name: str, seed: int) -> TableScheme:
    """Rows of 8 bits a column, then of 4, then of 1, and some in no block; those of one table are mixed."""
    routing = RowRouting(ROWS, 3, boundaries=torch.tensor([0, ROWS // 6, ROWS // 2, ROWS - 9]))
    if name == "c":
        draw = torch.Generator().manual_seed(0)
        routing = RowRouting.from_map(torch.randint(4, (ROWS,), generator=draw), 3)
    is_bag = name in BAGS
    table = table_scheme(
        name,
        routing,
        torch.ones(3, DIM).bool(),
        feature_names=READERS[name],
        pooling=("sum", "mean")[seed % 2] if is_bag else "none",
        collection="bags" if is_bag else "ids",
        is_weighted=is_bag,
    )
    bits = torch.tensor([[8], [4], [1]], dtype=torch.uint8).expand(3, DIM).contiguous()
    return table.with_codes(ColumnCodes(bits, torch.full((3, DIM), 2.0**-7), -(2 ** bits.short())))


def artifact(folder: Path) -> Path:
    """Tables of bags and of sequences in the packed form."""
    torch.manual_seed(0)
    tables = [_table(name, seed) for seed, name in enumerate(READERS)]
    scheme = MixedDimensionScheme({table.name: table for table in tables})
    weights = {name: torch.randn(ROWS, DIM) for name in scheme.tables}
    return write_artifact(weights, scheme, folder / "artifact", forms=(PACKED,))


class Ranker(nn.Module):
    """Bags, sequences and a layer that reads both."""

    def __init__(self, path: Path, unknown_ids: str = "error") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = load(path, collection="bags", unknown_ids=unknown_ids)
        self.ids = load(path, collection="ids", unknown_ids=unknown_ids)
        self.over = nn.Linear(sum(map(len, BAGS.values())) * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> list[Tensor]:
        rows = [jagged.values() for jagged in self.ids(features).values()]
        return [self.over(self.bags(features).values()).sigmoid(), *rows]


def batch(seed: int, size: int, limit: int = ROWS) -> KeyedJaggedTensor:
    """Bags of up to 40 ids, half of them empty, and a weight for each id."""
    draw, num_bags = torch.Generator().manual_seed(seed), len(KEYS) * size
    lengths = torch.randint(40, (num_bags,), generator=draw) * torch.randint(2, (num_bags,), generator=draw)
    ids = torch.randint(limit, (int(lengths.sum()),), generator=draw)
    return KeyedJaggedTensor(list(KEYS), ids, torch.rand(len(ids), generator=draw), lengths, stride=size)


def batches(rank: int) -> list[KeyedJaggedTensor]:
    """Those of a rank: ranks have batches of their own, of other sizes, and none at times."""
    return [batch(rank, 5 + 3 * rank), batch(7 + rank, 9 * (1 - rank)), batch(9, 0)]


def half_unknown(rank: int) -> KeyedJaggedTensor:
    """A batch in which the second rank has ids that are no rows."""
    return batch(3, 6, (1 + rank) * ROWS)


def _all_rows() -> KeyedJaggedTensor:
    ids, lengths = torch.arange(ROWS).repeat(len(KEYS)), torch.full((len(KEYS) * 100,), ROWS // 100)
    return KeyedJaggedTensor(list(KEYS), ids, torch.ones(len(ids)), lengths, stride=100)


def _model_on(at: Rank, kind: str, **options: Any) -> nn.Module:
    path = at.folder / "artifact"
    if at.rank == 0 and not path.exists():
        artifact(at.folder)
    dist.barrier(at.process_group)
    model = Ranker(path, **options)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=at.world_size, compute_device="cpu"),
        constraints={
            name: ParameterConstraints(sharding_types=[of], min_partition=DIM // 2) for name, of in KINDS[kind].items()
        },
    )
    sharders = [PackedSharder()]
    plan = planner.collective_plan(model, sharders, at.process_group)
    env = ShardingEnv.from_process_group(at.process_group)
    return DistributedModelParallel(model, env=env, plan=plan, sharders=sharders, init_data_parallel=False)


def _mapped_bytes(folder: Path) -> int:
    """Bytes of the files of a folder that this process has in memory."""
    mapped, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef":
            is_inside = str(folder) in line
        elif line.startswith("Rss:") and is_inside:
            mapped += int(line.split()[1]) * 1024
    return mapped


def _tables_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.startswith("ShardedPacked")]


def served(kind: str, at: Rank) -> Results:
    """Predictions of a rank, bytes of its tables, and bytes of the artifact that it has in memory once all are read."""
    model = _model_on(at, kind)
    predictions = [model(features) for features in batches(at.rank)]
    model(_all_rows())
    return {
        "predictions": predictions,
        "bytes": sum(module.table_bytes() for module in _tables_of(model)),
        "mapped": _mapped_bytes(at.folder),
    }


def unknown(unknown_ids: str, at: Rank) -> Results:
    """Ids that are no rows, which one rank alone has."""
    model = _model_on(at, "mixed", unknown_ids=unknown_ids)
    features = half_unknown(at.rank)
    if unknown_ids == "error":
        return {"outcome": outcome_of(lambda: model(features))}
    return {"predictions": model(features)}


def read_damage(kind: str, at: Rank) -> Results:
    """Rows whose directory leads nowhere, in the memory of one rank alone."""
    model = _model_on(at, kind)
    for name, buffer in model.named_buffers():
        if at.rank == 1 and name.endswith("c/directory"):
            buffer[: len(buffer) // 2] = 255
    return {"outcome": outcome_of(lambda: model(_all_rows()))}


SERVED: dict[str, Scenario] = {kind: partial(served, kind) for kind in KINDS}
UNKNOWN: dict[str, Scenario] = {way: partial(unknown, way) for way in ("error", "zero", "mean")}
DAMAGE: dict[str, Scenario] = {f"damaged {kind}": partial(read_damage, kind) for kind in ("row_wise", "column_wise")}
