"""Memory of pruning and exporting a sharded table, beyond the model, against the largest shard of a rank.

    python -m benchmarks.pruning_memory [--quick] --json FILE

One table of `--rows` times `--dim` values over `--ranks` processes (gloo, CPU). Each process notes how far its resident
memory rises above what it was before (VmHWM of /proc/self/status, reset through /proc/self/clear_refs: Linux only), the
first time it prunes and the first time it exports; the largest rise over ranks is reported.
Rows: ``{"ranks", "sharding", "structure", "step", "shard_bytes", "peak_bytes", "ratio"}``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from benchmarks.cpu_ranks import hidden_gpus
from benchmarks.files import output_file
from dnis_torchrec import Size, blocks_from_counts, export, prune
from dnis_torchrec._dependencies import versions
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.files import write_json
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, local_shards

SHARDINGS = ("row_wise", "column_wise")
STRUCTURES = ("block",)
CPU = torch.device("cpu")


def rise_of_memory(action: Callable[[], Any]) -> int:
    """Bytes by which this process's resident memory rises while something is done."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    action()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure(rank: int, arguments: argparse.Namespace, sharding: str, structure: str, folder: str) -> None:
    """Measures on one rank, and leaves its figures in the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    config = EmbeddingBagConfig(
        name="t", num_embeddings=arguments.rows, embedding_dim=arguments.dim, feature_names=["f"]
    )
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[config], device=torch.device("meta"))})
    sharders = [CpuEmbeddingBagCollectionSharder()]
    constraints = {"t": ParameterConstraints(sharding_types=[sharding], min_partition=arguments.dim // arguments.ranks)}
    plan = make_sharding_plan(model, CPU, sharders, constraints=constraints)
    sharded = shard_model(model, CPU, plan, sharders)
    shards = [shard for module in collections(sharded).values() for shard in local_shards(module)]
    for shard in shards:
        shard.weight.normal_(generator=torch.Generator().manual_seed(rank))
    counts = FrequencyCounts({"t": torch.arange(arguments.rows, 0, -1)}, {"f": 1}, arguments.rows)
    blocks = blocks_from_counts(counts, [config], num_blocks=4)
    size = Size(compression=arguments.compression)
    schemes = []
    rises = {
        "prune": rise_of_memory(lambda: schemes.append(prune(sharded, blocks, counts, size=size))),
        "export": rise_of_memory(lambda: export(sharded, schemes[0], Path(folder) / "artifact")),
    }
    own = {"shard_bytes": max(shard.weight.nbytes for shard in shards), "rises": rises}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(own), encoding="utf-8")
    dist.destroy_process_group()


def rows_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs every combination, in fresh processes."""
    rows = []
    for sharding in SHARDINGS:
        for structure in STRUCTURES:
            with tempfile.TemporaryDirectory() as folder, hidden_gpus():
                mp.spawn(measure, args=(arguments, sharding, structure, folder), nprocs=arguments.ranks)
                ranks = [
                    json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("rank*.json"))
                ]
            shard_bytes = max(own["shard_bytes"] for own in ranks)
            for step in ("prune", "export"):
                peak = max(own["rises"][step] for own in ranks)
                rows.append(
                    {
                        "ranks": arguments.ranks,
                        "sharding": sharding,
                        "structure": structure,
                        "step": step,
                        "shard_bytes": shard_bytes,
                        "peak_bytes": peak,
                        "ratio": peak / shard_bytes,
                    }
                )
    return rows


def main() -> None:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--compression", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows")
    parser.add_argument("--json", type=output_file, dest="json_file")
    arguments = parser.parse_args()
    arguments.rows = arguments.rows // 4 if arguments.quick else arguments.rows
    rows = rows_of(arguments)
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    if arguments.json_file:
        head = {"rows": rows, "table": [arguments.rows, arguments.dim], "compression": arguments.compression}
        write_json(arguments.json_file, {**head, "versions": versions()})


if __name__ == "__main__":
    main()
