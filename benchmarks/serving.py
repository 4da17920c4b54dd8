"""Latency on a CPU of tables that `compress` made, beside the rows that others serve.

    python -m benchmarks.serving [--quick] [--json FILE]

26 tables of 64 columns with the rows of Criteo's, 1.6 million at most: 8.6 million together, beyond the caches. Values
are normal, those of later columns smaller, counts of rows follow Zipf's law, and `compress` makes the tables 20 times
smaller. Rows stand in no order, or sorted by how often they are read. Ids follow the same law. Beside `packed` stand:

* `ebc_fp32`: torchrec's EmbeddingBagCollection; both take a KeyedJaggedTensor that nobody has used before,
* `tbe_int4`: FBGEMM's inference kernel for all tables, called directly; from here on all take plain tensors,
* `bag_int4`: torch's 4-bit bags, a call a table,
* `bag_fp16`: nn.EmbeddingBag in float16, a call a table,
* `bag_fp32`: nn.EmbeddingBag, beside one table of 1.6 million rows.

In every round all take turns, in random order, on the same fresh ids, on one thread. A ratio is the median over rounds
of the time of `packed` over another's of the same round; beside it stand its quartiles. `--quick` has a tenth of the
rows. Run it with OMP_NUM_THREADS=1.
"""

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from benchmarks.deltas import state_of
from benchmarks.files import output_file
from dnis_torchrec.allocation.compress import compress
from dnis_torchrec.artifact.delta import write_state
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import versions
from dnis_torchrec.data.files import write_json
from dnis_torchrec.ops.build import LOOKUPS
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving import load_operator
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection

EMBEDDING_DIM, COMPRESSION, MOST_ROWS = 64, 20.0, 1_600_000
CRITEO_ROWS = (1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992)
CRITEO_ROWS += (5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572)
BATCHES = ((1, 1), (64, 1), (1024, 1), (4096, 1), (64, 20), (1024, 20))
"""Bags of a table, and ids of a bag."""
SAMPLES, SAMPLES_PER_BATCH = 65_536, 4096
ROUNDS, MOST_IDS_OF_TURN = 100, 20_000
"""A turn is one call or more, of so many ids together, after one that is not timed: that one brings back what others
drove from the caches, as in a service, where nobody takes turns."""
Bags: TypeAlias = tuple[Tensor, Tensor]
Call: TypeAlias = Callable[[Any], object]


class SumOfSquares(nn.Module):
    """Predicts the squared length of all pooled embeddings."""

    def __init__(self, rows_of_tables: Sequence[int]) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t{index}", num_embeddings=rows, embedding_dim=EMBEDDING_DIM, feature_names=[f"f{index}"]
            )
            for index, rows in enumerate(rows_of_tables)
        ]
        self.tables: nn.Module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        for bag in self.tables.embedding_bags.values():
            values = torch.randn(bag.num_embeddings, EMBEDDING_DIM) * 0.1 / torch.arange(1, 1 + EMBEDDING_DIM).sqrt()
            bag.weight = nn.Parameter(values)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts."""
        del dense_features
        return self.tables(sparse_features).values().square().sum(1)


@dataclass
class Case:
    """Tables that `compress` made; `rows_by_frequency` from the most frequent to the rarest."""

    name: str
    packed: PackedEmbeddingBagCollection
    scheme: MixedDimensionScheme
    rows_by_frequency: dict[str, Tensor]

    @property
    def keys(self) -> list[str]:
        """The feature of every table."""
        return [table.feature_names[0] for table in self.scheme.tables.values()]

    def kjt(self, bags: Bags) -> KeyedJaggedTensor:
        """The same bags as torchrec takes them; nobody has used it before."""
        ids, lengths = bags[0], bags[1].diff()
        return KeyedJaggedTensor(self.keys, ids, lengths=lengths, stride=len(lengths) // len(self.keys))

    def draw(self, batch_size: int, pooling: int) -> Bags:
        """Ids and offsets, table by table, after Zipf's law: the logarithm of a row's rank is uniform."""
        ids = []
        for rows in self.rows_by_frequency.values():
            uniform = torch.rand(batch_size * pooling, dtype=torch.float64)
            ids.append(rows[(len(rows) ** uniform).long().sub(1).clamp(0, len(rows) - 1)])
        return torch.cat(ids), torch.arange(0, len(ids) * batch_size * pooling + 1, pooling)


def compressed(name: str, rows_of_tables: Sequence[int], *, is_sorted: bool) -> Case:
    """Makes tables and compresses them."""
    torch.manual_seed(0)
    model = SumOfSquares(rows_of_tables)
    order = torch.arange if is_sorted else torch.randperm
    rows_by_frequency = {f"t{index}": order(rows) for index, rows in enumerate(rows_of_tables)}
    counts: dict[str, Tensor] = {}
    for table, rows in rows_by_frequency.items():
        counts[table] = torch.empty(len(rows), dtype=torch.int32)
        counts[table][rows] = len(rows) // torch.arange(1, 1 + len(rows), dtype=torch.int32)
    case = Case(name, model.tables, MixedDimensionScheme({}), rows_by_frequency)
    keys, batches = [f"f{index}" for index in range(len(rows_of_tables))], []
    for _ in range(SAMPLES // SAMPLES_PER_BATCH):
        ids, offsets = case.draw(SAMPLES_PER_BATCH, 1)
        features = KeyedJaggedTensor(keys, ids, lengths=offsets.diff())
        with torch.no_grad():
            labels = model(torch.empty(0), features) + torch.randn(SAMPLES_PER_BATCH)
        batches.append(Batch(torch.zeros(SAMPLES_PER_BATCH, 1), features, labels))
    num_samples = max(int(of_rows.sum()) for of_rows in counts.values())
    frequencies = FrequencyCounts(counts, dict.fromkeys(keys, 1), num_samples)
    case.scheme = compress(model, batches, loss=nn.MSELoss(), compression=COMPRESSION, counts=frequencies).scheme
    case.packed = model.tables
    return case


def resident_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers: the tables, and whatever is needed to find a row in them."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def int4_lookup(rows_of_tables: Sequence[int]) -> Call:
    """FBGEMM's kernel of int4 rows, as its module calls it, but for the check of ids and what Python does there."""
    specs = [("", rows, EMBEDDING_DIM, SparseType.INT4, EmbeddingLocation.HOST) for rows in rows_of_tables]
    module = IntNBitTableBatchedEmbeddingBagsCodegen(specs, device="cpu", output_dtype=SparseType.FP32)
    module.fill_random_weights()
    names = ("weights_placements", "weights_offsets", "weights_tys", "D_offsets", "total_D")
    names += ("max_int2_D", "max_int4_D", "max_int8_D", "max_float16_D", "max_float32_D", "row_alignment")
    fields: dict[str, Any] = {name: getattr(module, name) for name in names}
    fields |= {
        "dev_weights": module.weights_host,
        "uvm_weights": module.weights_uvm,
        "pooling_mode": 0,
        "indice_weights": None,
        "output_dtype": 0,
    }
    call = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default
    return lambda bags: call(indices=bags[0], offsets=bags[1], **fields)


def contenders(case: Case) -> dict[str, Call]:
    """Name -> what looks bags up. Values do not matter to the time of others, so theirs are drawn."""
    sizes = [table.num_embeddings for table in case.scheme.tables.values()]
    dense = SumOfSquares(sizes).tables
    weights = [bag.weight.detach() for bag in dense.embedding_bags.values()]
    calls: dict[str, Call] = {"packed": lambda bags: case.packed.lookup(*bags)}
    if len(sizes) == 1:
        bag = nn.EmbeddingBag.from_pretrained(weights[0], mode="sum", include_last_offset=True)
        return calls | {"bag_fp32": lambda bags: bag(*bags)}
    fours = [torch.ops.quantized.embedding_bag_4bit_prepack(weight) for weight in weights]
    look_up = partial(torch.ops.quantized.embedding_bag_4bit_rowwise_offsets, include_last_offset=True)
    plain = partial(nn.EmbeddingBag.from_pretrained, mode="sum", include_last_offset=True)

    def table_by_table(calls_of_tables: Sequence[Callable[[Tensor, Tensor], Tensor]]) -> Call:
        def of_all(bags: Bags) -> Tensor:
            ids, offsets = bags
            of_table = offsets[: (len(offsets) - 1) // len(sizes) + 1]
            parts = zip(calls_of_tables, ids.view(len(sizes), -1).unbind(0), strict=True)
            return torch.cat([call(part, of_table) for call, part in parts], dim=1)

        return of_all

    return calls | {
        "packed_kjt": lambda bags: case.packed(case.kjt(bags)).values(),
        "ebc_fp32": lambda bags: dense(case.kjt(bags)).values(),
        "tbe_int4": int4_lookup(sizes),
        "bag_int4": table_by_table([partial(look_up, table) for table in fours]),
        "bag_fp16": table_by_table([plain(weight.half()) for weight in weights]),
    }


@torch.inference_mode()
def measure(case: Case, calls: dict[str, Call], batch_size: int, pooling: int) -> dict[str, list[float]]:
    """Microseconds per call of every contender in every round; they take turns."""
    per_turn = max(1, min(50, MOST_IDS_OF_TURN // (batch_size * pooling * len(case.keys))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS if batch_size * pooling < 10_000 else ROUNDS // 3):
        first, *turn = [case.draw(batch_size, pooling) for _ in range(1 + per_turn)]
        for name in random.sample(list(calls), len(calls)):
            calls[name](first)
            start = time.thread_time()  # a core that others want, too, would tell of them
            for bags in turn:
                calls[name](bags)
            times[name].append(1e6 * (time.thread_time() - start) / per_turn)
    return times


def rows_of(case: Case) -> Iterator[dict[str, Any]]:
    """One row for each batch size, pooling and rival."""
    calls = contenders(case)
    for batch_size, pooling in BATCHES:
        times = measure(case, calls, batch_size, pooling)
        for rival in calls:
            if rival.startswith("packed"):
                continue
            packed = times["packed_kjt" if rival == "ebc_fp32" else "packed"]
            ratios = [a / b for a, b in zip(packed, times[rival], strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4)
            row = {"case": case.name, "batch": batch_size, "pooling": pooling, "rival": rival, "ratio": median}
            row |= {"quartiles": [low, high], "packed_us": statistics.median(packed)}
            row |= {"rival_us": statistics.median(times[rival]), "rounds": len(ratios)}
            print(
                f"{case.name:>18} {batch_size:>5} {pooling:>3} {rival:>9} {row['packed_us']:>9.1f} "
                f"{row['rival_us']:>9.1f} us {median:>6.2f} [{low:.2f}, {high:.2f}]",
                flush=True,
            )
            yield row


def _load_and_wait(path: str, num_rows: int, barrier: Any, results: Any) -> None:
    """Loads an artifact, looks rows of all its pages up, and puts seconds and how much its share of memory grew."""
    torch.set_num_threads(1)
    load_operator()
    pages = torch.arange(0, num_rows, 256)
    first = KeyedJaggedTensor(["f"], pages[:1], lengths=torch.ones(1, dtype=torch.int64))
    assert dnis.load  # the face imports at the first use, which is no part of a load

    def share() -> int:
        barrier.wait()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        size = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        barrier.wait()
        return size

    before, begin = share(), time.perf_counter()
    module = dnis.load(path)
    module(first).values()
    seconds = time.perf_counter() - begin
    for ids in pages.split(1 << 12):
        module(KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))).values()
    results.put((seconds, share() - before))


def print_cold(num_rows: int) -> None:
    """Prints how long load and first lookup take, and what one process and eight take in memory."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        path = f"{folder}/artifact"
        write_state(state_of(num_rows), Path(path))
        for size in (1, 8):
            barrier, results = context.Barrier(size), context.Queue()
            workers = [
                context.Process(target=_load_and_wait, args=(path, num_rows, barrier, results)) for _ in range(size)
            ]
            for worker in workers:
                worker.start()
            seconds, growth = zip(*(results.get(timeout=300) for _ in workers), strict=True)
            print(f"{size} processes: load and first lookup {max(seconds):.3f} s, memory {sum(growth) / 1e6:,.0f} MB")
            for worker in workers:
                worker.join()


def main(argv: list[str] | None = None) -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--json", type=output_file, help="file to write")
    parser.add_argument("--cold", type=int, metavar="ROWS", help="load a table of so many rows, and nothing else")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.cold:
        print_cold(arguments.cold)
        return
    most = MOST_ROWS // 10 if arguments.quick else MOST_ROWS
    many = [min(rows, most) for rows in CRITEO_ROWS]
    load_operator()
    machine = {**versions(), "instruction_set": LOOKUPS.instruction_set()}
    print(machine)
    rows = []
    for order in ("no order", "sorted"):
        for name, sizes in (("26 tables", many), ("one table", [most])):
            case = compressed(f"{name}, {order}", sizes, is_sorted=order == "sorted")
            print(f"{case.name}: {resident_bytes(case.packed):,} bytes of {4 * EMBEDDING_DIM * sum(sizes):,}")
            rows += rows_of(case)
            del case  # before the next one is made
    if arguments.json:
        write_json(arguments.json, {**machine, "rows": rows})


if __name__ == "__main__":
    main()
