"""Sizes and times of deltas: ``python -m benchmarks.deltas [ROWS]``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import dnis_torchrec as dnis
from dnis_torchrec.artifact.delta import ServedState, write_delta, write_state
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.packed import split_blocks

DIM, SHARES = 16, (0.01, 0.05, 0.2, 1.0)


def state_of(num_rows: int) -> ServedState:
    """One table whose rows take eight, four and no bytes."""
    bits = torch.tensor([[4], [2], [0]], dtype=torch.uint8).expand(3, DIM).contiguous()
    routing = RowRouting.from_map(torch.randint(0, 3, (num_rows,)), 3)
    table = TableScheme(
        name="t", collection="", num_embeddings=num_rows, embedding_dim=DIM, pooling="sum", feature_names=("f",),
        is_weighted=False, routing=routing, retained=bits > 0, bits=bits, scale=torch.ones(3, DIM),
        shift=torch.zeros(3, DIM, dtype=torch.int16), num_retained=int((routing.row_counts()[:2] * DIM).sum()),
    )  # fmt: skip
    rows = torch.randint(0, 256, (table.file_bytes("packed"),), dtype=torch.uint8)
    return ServedState(scheme=MixedDimensionScheme({"t": table}), rows={"t": rows}, dense={}, run={})


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def num_bytes(folder: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main(num_rows: int = 10_000_000) -> None:
    """Prints a line for each share of rows that changed."""
    torch.manual_seed(0)
    state = state_of(num_rows)
    table = state.scheme.tables["t"]
    with TemporaryDirectory() as place:
        folder = Path(place)
        base, delta = folder / "base", folder / "delta"
        seconds = timed(lambda: write_state(state, base))
        print(f"{num_rows:,} rows, {num_bytes(base) / 1e6:.1f} MB, written whole in {seconds:.2f} s")
        for share in SHARES:
            rows = state.rows["t"].clone()
            for block in split_blocks(rows, table.routing.row_counts(), table.codes.bits):
                block[torch.rand(len(block)) < share] ^= 1
            after = replace(state, rows={"t": rows})
            write = timed(lambda after=after: write_delta(base, after, delta, overwrite=True))
            part, served = num_bytes(delta) / num_bytes(base), dnis.load(base)
            apply = timed(lambda served=served: dnis.apply_delta(served, delta))
            print(f"{share:.0%}: {part:.3f} of the artifact, written in {write:.2f} s, applied in {apply:.2f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
