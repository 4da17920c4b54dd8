"""Both plans side by side: what pruning saves on a cluster, and the fewest devices that hold each
set of tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.filesize import decimal
from rich.table import Table

from dnis_torchrec.checks import describe
from dnis_torchrec.jobs.planning.cluster import RESERVED_RATIO, Cluster
from dnis_torchrec.jobs.planning.placement import Placement, place
from dnis_torchrec.jobs.planning.tables import PlannedTable

MAX_WORLD_SIZE = 1024
"""Largest number of devices that the search for the smallest one tries."""

_CUDA_DIM_MULTIPLE = 4
"""FBGEMM's training kernels on a GPU take such dims only; narrower blocks are padded."""


@dataclass(frozen=True, kw_only=True)
class TablesPlan:
    """The needs of one set of tables on a cluster."""

    num_tables: int
    parameters: int
    training_bytes: int
    placement: Placement | None
    smallest_world_size: int | None


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """Plans of the same model before and after pruning."""

    cluster: Cluster
    before: TablesPlan
    after: TablesPlan

    def to_json(self) -> dict[str, Any]:
        """Everything, ready for json.dumps."""
        return asdict(self) | {
            "estimates": "TorchRec's planner; nothing was measured",
            "reserved": RESERVED_RATIO,
        }


def compare_plans(
    before: Sequence[PlannedTable], after: Sequence[PlannedTable], cluster: Cluster
) -> PlanComparison:
    """Plans both sets of tables for the same cluster."""
    comparison = PlanComparison(
        cluster=cluster, before=_plan(before, cluster), after=_plan(after, cluster)
    )
    if comparison.before.placement is None and comparison.after.placement is None:
        needed, per_rank = comparison.after.training_bytes, cluster.table_bytes_per_rank
        smallest = comparison.after.smallest_world_size
        devices = (
            f"{smallest} devices"
            if smallest
            else f"more than {MAX_WORLD_SIZE} devices, or devices with more"
        )
        requirement = f"room for {decimal(needed)} of pruned tables and optimizer state and for a batch's buffers"
        received = f"{cluster.world_size} times {decimal(per_rank)} ({RESERVED_RATIO:.0%} of a device is kept free)"
        raise ValueError(
            describe("world_size", requirement, received, f"they take {devices} of this size")
        )
    return comparison


def plan_table(comparison: PlanComparison) -> Table:
    """The comparison as a terminal table; what it rests on stands below."""
    cluster = comparison.cluster
    memory = (
        f"{decimal(cluster.hbm_bytes)} HBM"
        if cluster.compute == "cuda"
        else f"{decimal(cluster.ddr_bytes)} DDR"
    )
    if cluster.compute == "cuda" and cluster.ddr_bytes:
        memory += f" and {decimal(cluster.ddr_bytes)} DDR"
    caption = (
        f"{cluster.world_size} x {cluster.compute} with {memory}, {RESERVED_RATIO:.0%} of it kept free; batch "
        f"{cluster.batch_size} per rank; optimizer {cluster.optimizer}. Storage and time are estimates of TorchRec's "
        "planner, not measurements: time is lookups and communication of the slowest rank, with ids spread evenly over "
        "blocks; on a GPU, dims are padded to multiples of 4."
    )
    table = Table(
        box=None, pad_edge=False, header_style="bold", caption=caption, caption_justify="left"
    )
    table.add_column("tables")
    headings = (
        "number",
        "parameters",
        "with optimizer",
        "fullest rank",
        "mean rank",
        "est. step",
        "fewest devices",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("sharding")
    for name, plan in (("before", comparison.before), ("after", comparison.after)):
        placed = plan.placement
        cells = ("does not fit", "-", "-", "-")
        if placed is not None:
            mean = (sum(placed.hbm_bytes) + sum(placed.ddr_bytes)) // cluster.world_size
            sharding = ", ".join(
                f"{count} {kind}" for kind, count in sorted(placed.sharding.items())
            )
            cells = (
                decimal(placed.fullest_rank_bytes),
                decimal(mean),
                f"{placed.step_ms:.3g} ms",
                sharding,
            )
        fewest = str(plan.smallest_world_size or f"> {MAX_WORLD_SIZE}")
        numbers = (f"{plan.num_tables}", f"{plan.parameters:,}", decimal(plan.training_bytes))
        table.add_row(name, *numbers, *cells[:3], fewest, cells[3])
    return table


def _plan(unpadded: Sequence[PlannedTable], cluster: Cluster) -> TablesPlan:
    multiple = _CUDA_DIM_MULTIPLE if cluster.compute == "cuda" else 1
    tables = [
        replace(table, embedding_dim=math.ceil(table.embedding_dim / multiple) * multiple)
        for table in unpadded
    ]
    placement = place(tables, cluster, thorough=True)
    smallest = _smallest_world_size(tables, cluster)
    if placement is not None:
        smallest = min(smallest or cluster.world_size, cluster.world_size)
    return TablesPlan(
        num_tables=len(tables),
        parameters=sum(table.parameters for table in unpadded),
        training_bytes=sum(table.training_bytes(cluster.optimizer) for table in tables),
        placement=placement,
        smallest_world_size=smallest,
    )


def _smallest_world_size(tables: Sequence[PlannedTable], cluster: Cluster) -> int | None:
    """The fewest devices on which a plan finds room; whole hosts beyond the first."""
    thorough = cluster.compute == "cuda" and cluster.ddr_bytes > 0
    local = cluster.local_world_size
    sizes = [*range(1, local), *range(local, MAX_WORLD_SIZE + 1, local)]
    needed = sum(table.training_bytes(cluster.optimizer) for table in tables)
    fewest = math.ceil(needed / cluster.table_bytes_per_rank)

    def fits(at: int) -> bool:
        return place(tables, cluster.resized(sizes[at]), thorough=thorough) is not None

    low = next((at for at, size in enumerate(sizes) if size >= fewest), len(sizes))
    high, step = low, 1
    while high < len(sizes) and not fits(high):
        low, high, step = high + 1, min(high + step, len(sizes)), 2 * step
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return sizes[high] if high < len(sizes) else None
