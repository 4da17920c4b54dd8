"""Speed at which Criteo's text, and Parquet of the same, becomes batches.

    python -m benchmarks.data_loading [--quick] [--rows N] [--batch-size 4096,16384] --json FILE

The text is generated: a label, 13 integers, 26 hexadecimal categories with the vocabulary sizes of Criteo Kaggle (at
most 200,000 of each are written) and Zipf's law, a tenth of all fields missing. Everything runs in one process on one
thread, and time is that process's CPU time, so that other programs on the machine disturb less. Batches are TorchRec's
(KeyedJaggedTensors of int64), shuffled or not, all samples or the training part of a split. Files are in the page
cache: a slower disk is the bound. The last rows are of samples in memory, as those of a data frame are, beside numpy's
`take` and transpose of the same samples, in turns.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
import torch
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME

from benchmarks.files import output_file
from benchmarks.step_time import numbers
from dnis_torchrec.data.batches import InMemoryBatches
from dnis_torchrec.data.files import write_json
from dnis_torchrec.data.parquet import WHOLE, FileBatches, FileSamples, cut
from examples.criteo_stream import KAGGLE_CATEGORIES, make_schema

ROWS, QUICK_ROWS = 2_000_000, 200_000
ROWS_AT_A_TIME = 200_000
MAX_VOCABULARY = 200_000
ZIPF_EXPONENT = 1.2
MISSING_SHARE = 0.1
EPOCHS = 3
SAMPLES_PER_SECOND_WANTED = 1e6


def write_criteo_like(path: Path, num_rows: int, *, seed: int = 0) -> None:
    """Writes a text file in the format of Criteo's ``train.txt``."""
    random = np.random.default_rng(seed)
    vocabularies = [
        pa.array(np.char.mod("%08x", random.integers(0, 2**32, min(size, MAX_VOCABULARY))))
        for size in KAGGLE_CATEGORIES
    ]
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with open(path, "wb") as file:
        for begin in range(0, num_rows, ROWS_AT_A_TIME):
            count = min(ROWS_AT_A_TIME, num_rows - begin)
            columns = [pa.array(random.integers(0, 2, count))]
            columns += [_with_missing(pa.array(random.geometric(0.01, count)), random) for _ in DEFAULT_INT_NAMES]
            for vocabulary in vocabularies:
                codes = pa.array(random.zipf(ZIPF_EXPONENT, count) % len(vocabulary))
                columns.append(_with_missing(vocabulary.take(codes), random))
            table = pa.table(columns, names=["label", *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES])
            pa.csv.write_csv(table, file, options)


def _with_missing(values: pa.Array, random: np.random.Generator) -> pa.Array:
    return pa.compute.if_else(pa.array(random.random(len(values)) >= MISSING_SHARE), values, None)


def measure(path: Path, batch_size: int, *, shuffle: bool, whole: bool) -> dict[str, Any]:
    """Makes batches of a file, epoch after epoch; samples per second of CPU time, the median epoch."""
    samples = FileSamples([path], make_schema(KAGGLE_CATEGORIES))
    part = WHOLE if whole else cut((0.8,))[0]
    batches = FileBatches(samples, batch_size=batch_size, part=part, shuffle=shuffle)
    rates = []
    for _ in range(EPOCHS):
        begin = time.process_time()
        num_samples = sum(batch.labels.numel() for batch in batches)
        rates.append(num_samples / (time.process_time() - begin))
    return {
        "format": path.suffix.removeprefix("."),
        "batch_size": batch_size,
        "shuffle": shuffle,
        "part": "whole" if whole else "train",
        "samples_per_second": statistics.median(rates),
        "samples_per_second_range": [min(rates), max(rates)],
    }


def measure_memory(num_rows: int, batch_size: int) -> dict[str, Any]:
    """Shuffled batches of samples in memory, and numpy's rate for the same; the median epoch."""
    random = np.random.default_rng(0)
    ids = random.integers(0, MAX_VOCABULARY, (num_rows, len(DEFAULT_CAT_NAMES)), np.int32)
    dense, labels = random.random((num_rows, len(DEFAULT_INT_NAMES)), np.float32), random.random(num_rows, np.float32)
    tensors = (torch.from_numpy(part) for part in (dense, ids, labels))
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "seed": 0}
    batches, rates, ratios = InMemoryBatches(*tensors, feature_names=DEFAULT_CAT_NAMES, **options), [], []
    for _ in range(EPOCHS):
        begin = time.process_time()
        for _ in batches:
            pass
        middle, order = time.process_time(), random.permutation(num_rows)
        for first in range(0, num_rows, batch_size):
            rows = order[first : first + batch_size]
            np.ascontiguousarray(ids[rows].T, np.int64), dense[rows], labels[rows]
        rates.append(num_rows / (middle - begin))
        ratios.append((time.process_time() - middle) / (middle - begin))
    row = {"format": "memory", "batch_size": batch_size, "shuffle": True, "part": "whole"}
    figures = {"samples_per_second_range": [min(rates), max(rates)], "over_numpy": statistics.median(ratios)}
    return row | {"samples_per_second": statistics.median(rates)} | figures


def write_parquet(path: Path, text: Path) -> None:
    """Writes the samples of a text file as Parquet."""
    names = pa.csv.ReadOptions(column_names=[DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES])
    table = pa.csv.read_csv(text, names, pa.csv.ParseOptions(delimiter="\t"))
    pa.parquet.write_table(table, path, row_group_size=ROWS_AT_A_TIME)


def report(row: dict[str, Any]) -> str:
    """One line about a row."""
    rate, wanted = row["samples_per_second"], SAMPLES_PER_SECOND_WANTED
    order = "shuffled" if row["shuffle"] else "in order"
    what = f"{row['format']:<8}B={row['batch_size']:<6} {order:<9}{row['part']:<6}"
    beside = f"{rate / wanted:.2f} times what is wanted"
    if "over_numpy" in row:
        beside = f"{row['over_numpy']:.2f} of numpy's rate"
    return f"{what}: {rate / 1e6:.2f} million samples a second, {beside}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS:,} rows instead of {ROWS:,}")
    parser.add_argument("--rows", type=int, help="instead of either")
    parser.add_argument("--batch-size", type=numbers, default=[4096, 16384], metavar="N,N")
    parser.add_argument("--json", type=output_file, help="file to write")
    arguments = parser.parse_args(argv)
    arguments.rows = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)
    if arguments.rows < 2 * max(arguments.batch_size):
        parser.error(f"--rows: expected at least two batches, {2 * max(arguments.batch_size)}, got {arguments.rows}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a line per case, writes JSON."""
    arguments = parse(argv)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, pyarrow {pa.__version__}, {os.cpu_count()} cores")
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        files, rows = (Path(folder) / "train.txt", Path(folder) / "train.parquet"), []
        write_criteo_like(files[0], arguments.rows)
        write_parquet(files[1], files[0])
        for path in files:
            for batch_size in arguments.batch_size:
                for shuffle, whole in ((True, True), (True, False), (False, True)):
                    rows.append(measure(path, batch_size, shuffle=shuffle, whole=whole))
                    print(report(rows[-1]), flush=True)
    for batch_size in arguments.batch_size:
        rows.append(measure_memory(arguments.rows, batch_size))
        print(report(rows[-1]), flush=True)
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
