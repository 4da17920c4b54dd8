"""The machines to plan for, none of which has to be at hand. Shapes: W ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from dnis_torchrec.checks import check, check_known, describe

if TYPE_CHECKING:
    from torchrec.distributed.planner import Topology

COMPUTE_DEVICES = ("cuda", "cpu")
OPTIMIZERS = ("none", "rowwise_adagrad", "adam")
"""Table optimizers whose state is counted; ``"none"`` for serving, and for SGD."""

RESERVED_RATIO = 0.15
"""Share of a device's memory kept free of tables, for dense weights and activations: TorchRec's own
default."""

_BYTES = {unit: 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB", "PB"))}
_BYTES |= {
    unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB", "PIB"), start=1)
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines to plan for."""

    world_size: Annotated[int, "Devices, one rank on each."] = 8
    hbm_bytes: int = 0
    ddr_bytes: int = 0
    compute: Annotated[str, "`cuda` or `cpu`."] = "cuda"
    local_world_size: Annotated[
        int, "Devices of one host; from the second host on, hosts are whole."
    ] = 8
    batch_size: Annotated[int, "Samples per rank and step."] = 512
    optimizer: Annotated[str, "Of the tables: `none`, `rowwise_adagrad`, `adam`."] = (
        "rowwise_adagrad"
    )

    def __post_init__(self) -> None:
        check_known("compute", self.compute, COMPUTE_DEVICES)
        check_known("optimizer", self.optimizer, OPTIMIZERS)
        check(self.local_world_size >= 1, "local_world_size", "at least 1", self.local_world_size)
        check(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)
        requirement = f"1..{self.local_world_size}, or whole hosts of {self.local_world_size} ranks"
        whole = (
            self.world_size % self.local_world_size == 0 or self.world_size < self.local_world_size
        )
        check(self.world_size >= 1 and whole, "world_size", requirement, self.world_size)
        memory, option = (
            (self.hbm_bytes, "hbm") if self.compute == "cuda" else (self.ddr_bytes, "ddr")
        )
        remedy = f"tell the memory per rank, such as --{option} 80GB"
        check(memory > 0, option, f"more than 0 bytes on {self.compute!r}", memory, remedy)
        requirement = f"a byte and more beside the {RESERVED_RATIO:.0%} that are kept free"
        check(_usable(memory) > 0, option, requirement, memory, remedy)
        check(self.ddr_bytes >= 0, "ddr", "at least 0 bytes", self.ddr_bytes)

    @property
    def table_bytes_per_rank(self) -> int:
        """Memory of a rank that tables may take: all of it but `RESERVED_RATIO`."""
        hbm = self.hbm_bytes if self.compute == "cuda" else 0
        return _usable(hbm) + _usable(self.ddr_bytes)

    def resized(self, world_size: int) -> Cluster:
        """The same machines, another number of them."""
        return replace(self, world_size=world_size)

    def topology(self) -> Topology:
        """The cluster as TorchRec's planner wants it."""
        from torchrec.distributed.planner import Topology

        return Topology(
            world_size=self.world_size,
            compute_device=self.compute,
            hbm_cap=_usable(self.hbm_bytes),
            ddr_cap=_usable(self.ddr_bytes),
            local_world_size=min(self.local_world_size, self.world_size),
        )


def parse_bytes(text: str, place: str = "size") -> int:
    """Bytes of a size such as ``"80GB"`` (10^9), ``"512MB"`` or ``"16GiB"`` (2^30)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    unit = match[2].upper() if match else ""
    remedy = "units are B, KB, MB, GB, TB, PB (powers of 1000) and KiB .. PiB (powers of 1024)"
    if match is None or unit not in _BYTES:
        raise ValueError(describe(place, "a number and a unit, such as 80GB", repr(text), remedy))
    return int(float(match[1]) * _BYTES[unit])


def _usable(memory: int) -> int:
    return int(memory * (1 - RESERVED_RATIO))
