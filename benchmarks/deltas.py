"""Sizes and times of deltas, and what a refresh takes: ``python -m benchmarks.deltas [ROWS] [ROWS_OF_MODEL]``."""

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.artifact.delta import ServedState, read_state, write_delta, write_state
from dnis_torchrec.artifact.export import export
from dnis_torchrec.artifact.load import rows_of
from dnis_torchrec.artifact.refresh import delta_, whole_
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.packed import split_blocks

DIM, SHARES, TURNS = 16, (0.01, 0.05, 0.2, 1.0), 3


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


def table_of(model: nn.Module) -> torch.Tensor:
    """The rows of the model."""
    return model.sparse_arch.embedding_bag_collection.embedding_bags["t"].weight.data


def print_refreshes(num_rows: int, dim: int = 64) -> None:
    """Prints what a refresh of a model takes, whole or as a delta, where 5 % of the rows have changed."""
    config = EmbeddingBagConfig(name="t", num_embeddings=num_rows, embedding_dim=dim, feature_names=["f"])
    layers = {"dense_arch_layer_sizes": [dim], "over_arch_layer_sizes": [dim, 1]}
    model, batches = DLRM(EmbeddingBagCollection(tables=[config]), dense_in_features=4, **layers), []
    spread = 0.3 * 0.9 ** torch.arange(dim)
    table_of(model).normal_().mul_(spread)
    for _ in range(16):
        ids = (num_rows ** torch.rand(1024)).long() - 1
        features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(1024, dtype=torch.int64))
        batches.append(Batch(torch.randn(1024, 4), features, torch.randint(0, 2, (1024,)).float()))
    counts = FrequencyCounts({"t": num_rows // torch.arange(1, num_rows + 1)}, {"f": 1}, num_rows)
    samples: dict[str, Any] = {"loss": nn.BCEWithLogitsLoss(), "counts": counts}
    trained, changed = copy.deepcopy(model), (torch.rand(num_rows) < 0.05).nonzero().flatten()
    previous = {"t": rows_of(table_of(model).clone())}
    table_of(trained)[changed] += torch.randn(len(changed), dim) * spread
    ways = {
        "all compared": {},
        "equal rows left out": {"previous": previous},
        "rows named": {"rows_read": {"t": changed}},
    }
    with TemporaryDirectory() as place:
        folder = Path(place)
        scheme = measure_(model, batches, **samples).allocate(compression=20).scheme
        base = read_state(export(model, scheme, folder / "base", forms=("packed",)))
        seconds: dict[str, list[float]] = {"a whole refresh": []}
        for _ in range(TURNS):
            model, begin = copy.deepcopy(trained), time.process_time()
            _, allocation = whole_(model, base.scheme, base.rows, batches, **samples)
            export(model, allocation.scheme, folder / "whole", forms=("packed",), overwrite=True)
            seconds["a whole refresh"].append(time.process_time() - begin)
            for name, more in ways.items():
                model, begin = copy.deepcopy(trained), time.process_time()
                state = delta_(model, base.scheme, base.rows, batches, **samples, **more).state(base, run={})
                write_delta(folder / "base", state, folder / "delta", overwrite=True)
                seconds.setdefault(name, []).append(time.process_time() - begin)
        share = num_bytes(folder / "delta") / num_bytes(folder / "base")
    print(f"a model of {num_rows:,} rows of {dim}; a delta is {share:.3f} of the artifact; of one core:")
    whole = median(seconds["a whole refresh"])
    for name, of_turns in seconds.items():
        least, most = min(of_turns), max(of_turns)
        part = f"{median(of_turns):.2f} s ({least:.2f} to {most:.2f})"
        print(f"{name}: {part}, {median(of_turns) / whole:.2f} of the whole")


def main(num_rows: int = 10_000_000, rows_of_model: int = 2_000_000) -> None:
    """Prints a line for each share of rows that changed, and for each way to make a delta."""
    torch.manual_seed(0)
    print_refreshes(rows_of_model)
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
    main(*map(int, sys.argv[1:3]))
