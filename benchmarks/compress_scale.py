"""Compress of one table on disk that is larger than the memory allowed: time and memory of every step.

    python -m benchmarks.compress_scale [--rows 100000000] [--dim 16] [--quick] [--folder DIR] --json FILE
    python -m benchmarks.compress_scale --ranks 2 [--rows 100000000] [--dim 16] --json FILE

A table of `--rows` times `--dim` float32 lies in a file, and is the weight of a model through a shared memory mapping.
One process compresses the model to an artifact, by `dnis_torchrec`'s own functions, with defaults. The kernel allows it
4 GiB of data (RLIMIT_DATA: private memory that can be written to, touched or not, stacks and libraries included; an
allocation beyond that fails). Pages of mapped files are not in it: they are the page cache, which the kernel takes back
when it needs room. Anonymous and file-backed resident memory (RssAnon, RssFile) are sampled every 10 ms. Linux only.

Ids follow Zipf's law. Blocks are made from made-up counts, 8 bytes a row, as long training would leave them; beside
that some batches are counted as `dnis_torchrec` counts them.

With `--ranks`, the steps in which ranks share a table's rows run on each of so many processes, and no table is there.

Rows: ``{"step", "seconds", "cpu_seconds", "anonymous_bytes", "file_bytes"}``, memory at its peak during the step;
``rates`` are what docs/scale.md reckons with, nanoseconds of one core.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.cpu_ranks import hidden_gpus
from benchmarks.files import output_file
from dnis_torchrec.allocation import axes, compress, energies
from dnis_torchrec.allocation.axes import RotationGroup
from dnis_torchrec.allocation.curvature import ENOUGH_SAMPLES
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import versions
from dnis_torchrec.data.files import write_json
from dnis_torchrec.data.over_ranks import blocks_over_ranks, count_over_ranks
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.shards import local_shards

ROWS, QUICK_ROWS, DIM = 100_000_000, 1_000_000, 16
COMPRESSION = 20.0
BATCH_SIZE, NUM_BATCHES = 16_384, 256
LIMIT = 4 << 30
ROWS_PER_WRITE = 1 << 20
SECONDS_BETWEEN_SAMPLES = 0.01
MULTIPLIER = 2_654_435_761
"""Scatters rows: those that are looked up often do not stand together. A prime, so that each is met once."""
PARTS = {
    "blocks": (compress, "blocks_over_ranks"),
    "axes": (axes, "rotate_"),
    "curvature": (compress, "curvature_of_read_tables"),
    "energies": (compress, "rounding_energies"),
    "loss sample": (compress, "LossSample"),
}
"""Step -> what `measure_` calls for it, by module and name."""


class OneTable(nn.Module):
    """The squared length of a pooled embedding, which no rotation changes."""

    def __init__(self, num_embeddings: int, dim: int = DIM, device: str = "cpu") -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=num_embeddings, embedding_dim=dim, feature_names=["f"], init_fn=falling
        )
        self.tables = EmbeddingBagCollection(tables=[table], device=torch.device(device))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts."""
        del dense_features
        return cast(Tensor, self.tables(sparse_features).values().square().sum(1))

    def rotation_groups(self) -> list[RotationGroup]:
        """The table turns by itself."""
        return [RotationGroup(tables=("t",))]


def falling(weight: Tensor) -> Tensor:
    """Fills columns that carry less and less, as those of trained tables do."""
    for column, part in enumerate(weight.data.unbind(1), start=1):
        part.normal_(std=0.1 / column)
    return weight


class Samples:
    """Batches of one id a sample after Zipf's law, the same every time; labels are near the model's predictions.

    As many samples as the table has rows, at least as many as curvature wants, at most four million."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.num_batches = max(ENOUGH_SAMPLES // BATCH_SIZE, min(NUM_BATCHES, len(table) // BATCH_SIZE))

    def __iter__(self) -> Iterator[Batch]:
        num_rows, lengths = len(self._table), torch.ones(BATCH_SIZE, dtype=torch.int64)
        for seed in range(self.num_batches):
            generator = torch.Generator().manual_seed(seed)
            rank = (num_rows ** torch.rand(BATCH_SIZE, generator=generator, dtype=torch.float64)).long() - 1
            ids = rank * MULTIPLIER % num_rows
            features = KeyedJaggedTensor(["f"], ids, lengths=lengths)
            noise = 0.1 * torch.randn(BATCH_SIZE, generator=generator)
            yield Batch(torch.zeros(BATCH_SIZE, 1), features, self._table[ids].square().sum(1) + noise)


def zipf_counts(num_rows: int) -> FrequencyCounts:
    """Counts of all rows, as the law of `Samples` has them; the rarest occurs once."""
    counts, inverse = torch.empty(num_rows, dtype=torch.int64), pow(MULTIPLIER, -1, num_rows)
    for first in range(0, num_rows, ROWS_PER_WRITE):
        rows = torch.arange(first, min(first + ROWS_PER_WRITE, num_rows))
        counts[first : first + len(rows)] = num_rows // (1 + rows * inverse % num_rows)
    return FrequencyCounts({"t": counts}, {"f": 1}, int(counts.sum()))


class Watch:
    """Seconds of every step, and the most resident memory that a thread sees during it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Notes a step."""
        row = {"step": name, "seconds": 0.0, "cpu_seconds": 0.0, "anonymous_bytes": 0, "file_bytes": 0}
        self.rows.append(row)
        started = time.monotonic(), time.process_time()
        _note_memory(row)
        yield
        _note_memory(row)
        row |= {"seconds": time.monotonic() - started[0], "cpu_seconds": time.process_time() - started[1]}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that notes its calls as a step."""

        def noted(*given: Any, **named: Any) -> Any:
            with self.step(name):
                return call(*given, **named)

        return noted

    def _sample(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_SAMPLES):
            for row in self.rows[-1:]:
                _note_memory(row)


def _note_memory(row: dict[str, Any]) -> None:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":") for line in lines)
    for key, field in (("anonymous_bytes", "RssAnon"), ("file_bytes", "RssFile")):
        row[key] = max(row[key], 1024 * int(fields[field].split()[0]))


def write_table(path: Path, num_rows: int, dim: int) -> None:
    """A file of float32 whose columns carry less and less."""
    torch.manual_seed(0)
    with path.open("wb") as file:
        for first in range(0, num_rows, ROWS_PER_WRITE):
            file.write(falling(torch.empty(min(ROWS_PER_WRITE, num_rows - first), dim)).numpy().data)


def measure(folder: Path, num_rows: int, dim: int) -> dict[str, Any]:
    """Compresses the table that lies in a folder, in this process, which is not allowed more memory from here on."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    table = torch.from_file(str(folder / "table"), shared=True, size=num_rows * dim).view(num_rows, dim)
    model = OneTable(num_rows, dim, device="meta")
    model.tables.embedding_bags["t"].weight = nn.Parameter(table)
    samples = Samples(table)
    with Watch() as watch:
        with watch.step("count"):
            count_over_ranks((batch.sparse_features for batch in samples), model.tables.embedding_bag_configs())
        with watch.step("given counts"):
            counts = zipf_counts(num_rows)
        for step, (module, name) in PARTS.items():
            setattr(module, name, watch.timed(step, getattr(module, name)))
        with watch.step("finite"):
            measured = compress.measure_(model, samples, loss=nn.MSELoss(), counts=counts)
        with watch.step("allocation"):
            found = measured.allocate(compression=COMPRESSION)
        with watch.step("codes, written"):
            shards = {shard.table: shard.weight for shard in local_shards(model.tables)}
            write_artifact(shards, found.scheme, folder / "artifact")
    whole = next(row for row in watch.rows if row["step"] == "finite")  # holds the parts of `measure_`
    for key in ("seconds", "cpu_seconds"):
        whole[key] -= sum(row[key] for row in watch.rows if row["step"] in PARTS)
    return {
        "rows": watch.rows,
        "table": [num_rows, dim],
        "table_bytes": table.nbytes,
        "served_bytes": found.num_bytes,
        "artifact_bytes": sum(read_manifest(folder / "artifact")["bytes_on_disk"].values()),
        "compression": found.compression,
        "predicted_loss_increase": found.predicted_loss_increase,
        "limit_bytes": LIMIT,
        "peak_anonymous_bytes": max(row["anonymous_bytes"] for row in watch.rows),
        "rates": rates(watch.rows, num_rows, dim, samples.num_batches * BATCH_SIZE),
    }


def rates(steps: list[dict[str, Any]], num_rows: int, dim: int, num_ids: int) -> dict[str, float]:
    """What steps take per unit of what they are linear in, in nanoseconds."""
    seconds, values, nano = {row["step"]: row["cpu_seconds"] for row in steps}, num_rows * dim, 1e9
    return {
        "count, per id": nano * seconds["count"] / num_ids,
        "curvature, per sample and column": nano * seconds["curvature"] / (ENOUGH_SAMPLES * dim),
        "finite, per value": nano * seconds["finite"] / values,
        "blocks, per row": nano * seconds["blocks"] / num_rows,
        "axes, per value": nano * seconds["axes"] / values,
        "sample of rows, per row": nano * seconds["energies"] / num_rows,
        "codes, per value": nano * seconds["codes, written"] / values,
    }


def measure_on_rank(rank: int, world_size: int, folder: str, num_rows: int, dim: int) -> None:
    """Forms the blocks, draws the sample and fits its codes as one of some ranks; values are made up."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    config, counts = OneTable(num_rows, dim, device="meta").tables.embedding_bag_configs(), zipf_counts(num_rows)
    counts, ranks = replace(counts, counts={"t": counts.counts["t"].int()}), Ranks.everyone()
    with Watch() as watch:
        with watch.step("blocks"):
            blocks = blocks_over_ranks(counts, config, process_group=ranks.group)
        with watch.step("sample of rows"):
            sample = energies.sample_rows(counts.counts["t"], blocks.routings["t"], ranks=ranks)
        values, num_blocks = falling(torch.empty(len(sample.rows), dim)), blocks.routings["t"].num_blocks
        with watch.step("fits"):
            energies.table_energies(values, sample, num_blocks, energies.BITS, ranks)
    write_json(Path(folder) / f"{rank}.json", watch.rows)
    dist.destroy_process_group()


def run_on_ranks(folder: Path, world_size: int, num_rows: int, dim: int) -> dict[str, Any]:
    """Measures ranks, and gives what the slowest of them takes for every step."""
    arguments = world_size, str(folder), num_rows, dim
    with hidden_gpus():
        torch.multiprocessing.spawn(measure_on_rank, arguments, world_size)
    of_ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    rows = [max(of_step, key=itemgetter("cpu_seconds")) for of_step in zip(*of_ranks, strict=True)]
    return {"rows": rows, "table": [num_rows, dim], "ranks": world_size}


def print_measured(folder: str, num_rows: str, dim: str) -> None:
    """Prints `measure` as JSON; `run` starts it as a process of its own."""
    print(json.dumps(measure(Path(folder), int(num_rows), int(dim))))


def run(folder: Path, num_rows: int, dim: int) -> dict[str, Any]:
    """Makes the table, and measures in a process of its own."""
    write_table(folder / "table", num_rows, dim)
    code = "import sys; from benchmarks import compress_scale; compress_scale.print_measured(*sys.argv[1:])"
    command = [sys.executable, "-W", "ignore", "-c", code, str(folder), str(num_rows), str(dim)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1], check=True)
    return cast(dict[str, Any], json.loads(done.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS:,} rows")
    parser.add_argument("--ranks", type=int, help="measure what so many ranks share, and nothing else")
    parser.add_argument("--folder", type=Path, help="where the table lies meanwhile (default TMPDIR)")
    parser.add_argument("--json", type=output_file, dest="json_file")
    arguments = parser.parse_args(argv)
    num_rows = QUICK_ROWS if arguments.quick else arguments.rows
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.ranks:
            measured = run_on_ranks(Path(folder), arguments.ranks, num_rows, arguments.dim)
        else:
            measured = run(Path(folder), num_rows, arguments.dim)
    print("step | seconds | of one core | anonymous MB | file MB")
    for row in measured["rows"]:
        seconds, megabytes = (row["seconds"], row["cpu_seconds"]), (row["anonymous_bytes"], row["file_bytes"])
        figures = [*(f"{each:.1f}" for each in seconds), *(f"{each / 1e6:.0f}" for each in megabytes)]
        print(" | ".join([row["step"], *figures]))
    if not arguments.ranks:
        print(
            f"{measured['table_bytes'] / 1e9:.2f} GB become {measured['served_bytes'] / 1e6:.0f} MB, peak of ", end=""
        )
        print(f"anonymous memory {measured['peak_anonymous_bytes'] / 2**30:.2f} GiB of {LIMIT / 2**30:.0f} allowed")
    for name, value in measured.get("rates", {}).items():
        print(f"{name}: {value:.2f} ns")
    if arguments.json_file:
        write_json(arguments.json_file, measured | {"versions": versions()})


if __name__ == "__main__":
    main()
