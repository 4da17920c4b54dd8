"""Latency of pruned tables beside dense ones, and their bytes beside what no encoding could do without.

    python -m benchmarks.serving [--quick] [--every-form] [--artifact PATH] [--device cuda] --json FILE

Cases: `simulated`, 95 % of all values pruned one by one (one table of 1M rows, or 26 of 40,000; D = 64);
`simulated_blocks`, 26 tables whose blocks retain fewer columns the rarer their rows; `simulated_codes`, tables as bits
for every column leave them, and `simulated_unsorted`, the same with rows in no order; and any artifact: each
collection, and each table of it alone, in every form that it holds and in every CSR form. Ids follow Zipf's law, rows
are sorted by frequency.
Simulated single tables are looked up from plain tensors, against nn.EmbeddingBag in fp32; all else from a
KeyedJaggedTensor that nobody has used before, against torchrec's EmbeddingBagCollection in fp32.

In every round all forms take turns, in random order, on the same fresh ids. `latency_ratio` is the median over rounds
of a form's time over the dense one's of the same round, `ratio_quartiles` its middle half. `bytes_over_floor` counts
every byte of the module's tables and indices over 4 bytes per non-zero value plus the entropy of the mask, taken per
block and column. Run it with OMP_WAIT_POLICY=passive, and two threads on an otherwise idle machine only: a core that
somebody else needs makes torch's threads wait for each other, whichever form is looked up. On a GPU a turn ends when
the GPU has done its last call; its ids lie there before it begins, as in a model that is served there as a whole.
`resident_over_predicted` compares the module's bytes with `served_bytes`, which knows nothing of what a module makes
for itself; the floor of codes is their bits.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchrec
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.files import output_file
from benchmarks.gpu.timing import wait_for
from dnis_torchrec.artifact.load import exact_rows, read_scheme
from dnis_torchrec.artifact.load import serve as serve_tables
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.files import write_json
from dnis_torchrec.ops.build import LOOKUPS
from dnis_torchrec.scheme import FORMS, MixedDimensionScheme, TableScheme
from dnis_torchrec.serving import load_operator
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection

EMBEDDING_DIM, DENSITY = 64, 0.05
NUM_EMBEDDINGS, NUM_TABLES, NUM_EMBEDDINGS_OF_MANY = 1_000_000, 26, 40_000
BATCH_SIZES, POOLINGS, THREADS = (1, 64, 1024, 4096), (1, 20), (1, 2)
BLOCK_ENDS, BLOCK_DIMS = (0.001, 0.005, 0.02, 0.1, 0.4, 1.0), (64, 48, 24, 8, 4, 2)
"""`simulated_blocks`: where blocks of rows end, as a share of N, and the columns that they retain: 94 % pruned."""
CODED_ENDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)
CODED_DIMS, CODED_BITS = (64, 64, 56, 48, 40, 32, 24, 16), (6, 5, 4, 3, 2)
"""`simulated_codes`: likewise, and the bits of each fifth of these columns: 4 a retained value, 22 times smaller."""

ROUNDS, QUICK_ROUNDS, SMALL_BATCH = 200, 7, 64
"""Rounds; fewer with ``--quick``, but for batches up to the small one, which take no time and vary most."""
CALLS_PER_TURN, BAGS_PER_TURN = 4, 32
"""A turn times at least so many calls, of so many bags together, after one that is not timed: that one brings back what
the other forms drove from the caches, as in a service, where nobody takes turns."""


@dataclass
class Case:
    """Pruned tables, and the forms that serve them; `is_plain`: without KeyedJaggedTensor, beside nn.EmbeddingBag.

    `tables` lie on the CPU, `forms`, the dense ones and the ids on `device`.
    """

    name: str
    scheme: MixedDimensionScheme
    tables: dict[str, Tensor]
    forms: dict[str, nn.Module]
    rows_by_frequency: dict[str, Tensor]
    device: torch.device
    is_plain: bool = False

    @property
    def features(self) -> list[tuple[str, TableScheme]]:
        """Every (feature, table), in the modules' order."""
        return [(feature, table) for table in self.scheme.tables.values() for feature in table.feature_names]


def simulated(num_tables: int, num_embeddings: int, forms: Sequence[str], device: torch.device) -> Case:
    """Tables whose values were pruned one by one, at random."""
    torch.manual_seed(0)
    routing = RowRouting(num_embeddings, 1, boundaries=torch.tensor([0, num_embeddings]))
    retained = torch.ones(1, EMBEDDING_DIM, dtype=torch.bool)
    tables = {}
    for index in range(num_tables):
        tables[f"t{index}"] = torch.randn(num_embeddings, EMBEDDING_DIM)
        tables[f"t{index}"][torch.rand(num_embeddings, EMBEDDING_DIM) >= DENSITY] = 0
    return serve("simulated", tables, routing, retained, forms, device)


def simulated_blocks(num_tables: int, num_embeddings: int, forms: Sequence[str], device: torch.device) -> Case:
    """Tables of which whole columns of blocks were pruned."""
    torch.manual_seed(0)
    routing = RowRouting(num_embeddings, len(BLOCK_DIMS), boundaries=boundaries_at(BLOCK_ENDS, num_embeddings))
    retained = torch.arange(EMBEDDING_DIM) < torch.tensor(BLOCK_DIMS).unsqueeze(1)
    retained = retained[:, torch.randperm(EMBEDDING_DIM)]
    mask = retained[routing.all_blocks()]
    tables = {f"t{index}": torch.randn(num_embeddings, EMBEDDING_DIM) * mask for index in range(num_tables)}
    return serve("simulated_blocks", tables, routing, retained, forms, device)


def simulated_codes(num_tables: int, num_embeddings: int, forms: Sequence[str], device: torch.device) -> Case:
    """Tables as `compress` leaves them: bits for every column, in principal axes, so that the first get most."""
    return coded("simulated_codes", num_tables, torch.arange(num_embeddings), forms, device)


def simulated_unsorted(num_tables: int, num_embeddings: int, forms: Sequence[str], device: torch.device) -> Case:
    """The same with rows in no order, which a directory has to find."""
    torch.manual_seed(1)
    return coded("simulated_unsorted", num_tables, torch.randperm(num_embeddings), forms, device)


def coded(name: str, num_tables: int, rows: Tensor, forms: Sequence[str], device: torch.device) -> Case:
    """Tables with codes; `rows` from the most frequent to the rarest."""
    torch.manual_seed(0)
    num_embeddings, num_blocks = len(rows), len(CODED_DIMS)
    routing = RowRouting(num_embeddings, num_blocks, boundaries=boundaries_at(CODED_ENDS, num_embeddings))
    blocks = torch.empty(num_embeddings, dtype=torch.int64)
    blocks[rows] = routing.all_blocks()
    if bool((blocks.diff() < 0).any()):
        routing = RowRouting.from_map(blocks, num_blocks)
    dims, column = torch.tensor(CODED_DIMS).unsqueeze(1), torch.arange(EMBEDDING_DIM)
    retained = column < dims
    fifth = (column * len(CODED_BITS) // dims).clamp(max=len(CODED_BITS) - 1)
    bits = torch.where(retained, torch.tensor(CODED_BITS)[fifth], 0)
    scale, shift = torch.where(retained, 2.0**-bits, 1.0), torch.where(retained, 1 - 2**bits, 0)
    tables, levels = {}, (1 << bits).float()
    for index in range(num_tables):
        drawn = torch.rand(num_embeddings, EMBEDDING_DIM).mul_(levels[blocks]).floor_()
        tables[f"t{index}"] = drawn.add_((shift / 2)[blocks]).mul_(scale[blocks])
    codes = {"bits": bits.to(torch.uint8), "scale": scale, "shift": shift.to(torch.int16)}
    return serve(name, tables, routing, retained, forms, device, rows=rows, codes=codes)


def boundaries_at(ends: Sequence[float], num_embeddings: int) -> Tensor:
    """Where blocks begin and end that end at shares of all rows."""
    return torch.tensor([0, *(round(end * num_embeddings) for end in ends)])


def serve(
    name: str,
    tables: dict[str, Tensor],
    routing: RowRouting,
    retained: Tensor,
    forms: Sequence[str],
    device: torch.device,
    *,
    rows: Tensor | None = None,
    codes: dict[str, Tensor] | None = None,
) -> Case:
    """The modules of a simulated case; `rows` from the most frequent to the rarest, in their order if not given."""
    scheme = MixedDimensionScheme(
        {
            table: TableScheme(
                name=table,
                collection="ebc",
                num_embeddings=routing.num_embeddings,
                embedding_dim=EMBEDDING_DIM,
                pooling="sum",
                feature_names=(f"{table}_id",),
                is_weighted=False,
                routing=routing,
                retained=retained,
                num_retained=int(weight.count_nonzero()),
                **(codes or {}),
            )
            for table, weight in tables.items()
        }
    )
    by_frequency = torch.arange(routing.num_embeddings) if rows is None else rows
    modules = modules_of(scheme, tables, forms, device)
    return Case(name, scheme, tables, modules, dict.fromkeys(tables, by_frequency), device, is_plain=len(tables) == 1)


def modules_of(
    scheme: MixedDimensionScheme, tables: dict[str, Tensor], forms: Sequence[str], device: torch.device
) -> dict[str, nn.Module]:
    """A serving module of every form, made as an artifact's reader makes it; all that can hold the scheme if none."""
    names = forms or FORMS
    return {name: serve_tables(scheme, tables, name, device=device) for name in names}


def of_artifact(path: Path, device: torch.device) -> Iterator[Case]:
    """Each unweighted collection of an artifact, then each of its tables; rows that retain most count as the most
    frequent.
    """
    scheme, held = read_scheme(path), read_manifest(path)["forms"]
    forms = list(dict.fromkeys(held))
    for collection in sorted({t.collection for t in scheme.tables.values() if not t.is_weighted}):
        whole = {n: t for n, t in scheme.tables.items() if t.collection == collection}
        parts = [whole] if len(whole) == 1 else [whole, *({name: table} for name, table in whole.items())]
        for part in parts:
            exact = exact_rows(path)
            tables = {name: exact[name](0, table.num_embeddings) for name, table in part.items()}
            rows = {name: (table != 0).sum(1).argsort(descending=True, stable=True) for name, table in tables.items()}
            name = ":".join([path.resolve().name, collection, *(part if part is not whole else ())])
            part_scheme = MixedDimensionScheme(part)
            yield Case(name, part_scheme, tables, modules_of(part_scheme, tables, forms, device), rows, device)


def floor_bytes(case: Case) -> float:
    """Bytes that no encoding of the tables could do without."""
    total = 0.0
    for name, table in case.scheme.tables.items():
        present = case.tables[name] != 0
        num_blocks = table.routing.num_blocks + 1  # one for the rows of no block
        counts = torch.zeros(num_blocks, table.embedding_dim, dtype=torch.float64)
        counts.index_add_(0, table.routing.all_blocks(), present.double())
        rows = table.routing.row_counts(include_unassigned=True).unsqueeze(1)
        share = (counts / rows.clamp(min=1)).clamp(0, 1)
        bits = torch.special.entr(share) + torch.special.entr(1 - share)
        values = 4 * int(present.sum())
        if table.bits is not None:
            values = int(table.routing.row_counts() @ table.bits.long().sum(dim=1)) // 8
        total += values + float((rows * bits).sum()) / torch.tensor(2.0).log().item() / 8
    return total


def resident_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers: the tables, and whatever is needed to find a row in them."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def draw_ids(case: Case, batch_size: int, pooling: int) -> Tensor:
    """Ids for one call, feature by feature, after Zipf's law: the logarithm of a row's rank is uniform."""
    ids = []
    for _, table in case.features:
        uniform = torch.rand(batch_size * pooling, dtype=torch.float64)
        rank = (table.num_embeddings**uniform).long().sub(1).clamp(0, table.num_embeddings - 1)
        ids.append(case.rows_by_frequency[table.name][rank])
    return torch.cat(ids)


def dense_collection(case: Case) -> EmbeddingBagCollection:
    """torchrec's own collection of the same tables."""
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(table.feature_names),
            pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
        )
        for name, table in case.scheme.tables.items()
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    for name, bag in collection.embedding_bags.items():
        bag.weight = nn.Parameter(case.tables[name].to(case.device))
    return collection


def contenders(case: Case) -> tuple[str, dict[str, Callable[[Any], Any]]]:
    """Returns the dense baseline's name, and contender -> its lookup of a batch, the baseline first."""
    if not case.is_plain:
        modules: dict[str, nn.Module] = {"dense": dense_collection(case), **case.forms}
        return "torchrec.EmbeddingBagCollection", modules
    ((name, weight),) = case.tables.items()
    mode = case.scheme.tables[name].pooling
    dense = nn.EmbeddingBag.from_pretrained(weight.to(case.device), mode=mode, include_last_offset=True)
    calls: dict[str, Callable[[Any], Any]] = {"dense": lambda batch: dense(*batch)}
    for form, module in case.forms.items():
        if isinstance(module, PackedEmbeddingBagCollection):  # the other forms know KeyedJaggedTensors only
            calls[form] = lambda batch, module=module: module.lookup(*batch)
    return "nn.EmbeddingBag", calls


def measure(case: Case, batch_size: int, pooling: int, rounds: int) -> tuple[str, dict[str, list[float]]]:
    """Microseconds per call of every contender in every round; they take turns."""
    baseline, calls = contenders(case)
    keys = [feature for feature, _ in case.features]
    num_bags = len(keys) * batch_size
    lengths = torch.full((num_bags,), pooling, device=case.device)
    offsets = torch.arange(0, num_bags * pooling + 1, pooling, device=case.device)
    per_turn = max(CALLS_PER_TURN, BAGS_PER_TURN // batch_size)
    times: dict[str, list[float]] = {name: [] for name in calls}

    def batches(all_ids: list[Tensor]) -> list[Any]:
        if baseline == "nn.EmbeddingBag":
            return [(ids, offsets) for ids in all_ids]
        return [KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths, stride=batch_size) for ids in all_ids]

    with torch.inference_mode():
        for index in range(-2, rounds):
            all_ids = [draw_ids(case, batch_size, pooling).to(case.device) for _ in range(1 + per_turn)]
            for name in random.sample(list(calls), len(calls)):
                call, (first, *turn) = calls[name], batches(all_ids)
                call(first)
                wait_for(case.device)
                start = time.perf_counter()
                for batch in turn:
                    call(batch)
                wait_for(case.device)
                seconds = time.perf_counter() - start
                if index >= 0:
                    times[name].append(1e6 * seconds / per_turn)
    return baseline, times


def check_equal(case: Case) -> None:
    """Every form without rounding gives what the dense tables give: a fast wrong answer is not worth a row."""
    keys = [feature for feature, _ in case.features]
    batch = KeyedJaggedTensor(keys=keys, values=draw_ids(case, 16, 3), lengths=torch.full((16 * len(keys),), 3))
    batch = batch.to(case.device)
    expected = dense_collection(case)(batch).values()
    for _form, module in case.forms.items():
        torch.testing.assert_close(module(batch).values(), expected, rtol=1e-5, atol=1e-5)


def rows_of(case: Case, poolings: Sequence[int], threads: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """The rows of one case; `rounds` of its larger batches."""
    check_equal(case)
    floor, rows = floor_bytes(case), []
    predicted = {form: case.scheme.served_bytes(form) for form in case.forms}
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for pooling in poolings:
            for batch_size in BATCH_SIZES:
                num_rounds = ROUNDS if batch_size <= SMALL_BATCH else rounds
                baseline, times = measure(case, batch_size, pooling, num_rounds)
                for form in list(times)[1:]:
                    ratios = [a / b for a, b in zip(times[form], times["dense"], strict=True)]
                    quartiles = statistics.quantiles(ratios, n=4)
                    size = resident_bytes(case.forms[form])
                    row = {
                        "case": case.name,
                        "form": form,
                        "batch": batch_size,
                        "pooling": pooling,
                        "device": case.device.type,
                        "threads": num_threads,
                        "tables": len(case.scheme.tables),
                        "latency_ratio": round(statistics.median(ratios), 3),
                        "bytes_over_floor": round(size / floor, 3),
                        "resident_bytes": size,
                        "resident_over_predicted": round(size / predicted[form], 3),
                        "baseline": baseline,
                        "latency_us": round(statistics.median(times[form]), 2),
                        "baseline_us": round(statistics.median(times["dense"]), 2),
                        "ratio_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
                        "rounds": num_rounds,
                    }
                    print_row(row)
                    rows.append(row)
    return rows


SIMULATED = (
    (simulated, (FORMS, FORMS)),
    (simulated_blocks, (FORMS, FORMS)),
    (simulated_codes, (FORMS, FORMS)),
    (simulated_unsorted, (FORMS, FORMS)),
)
"""What simulates, and the forms that are measured of one table and of several; None: no such case."""


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    low, high = row["ratio_quartiles"]
    print(
        f"{row['case']:>18} {row['form']:>20} {row['tables']:>6} {row['threads']:>7} {row['pooling']:>7} "
        f"{row['batch']:>5} {row['latency_us']:>10.1f} us {row['latency_ratio']:>6.2f} [{low:.2f}, {high:.2f}] "
        f"{row['bytes_over_floor']:>6.2f} {row['resident_over_predicted']:>6.3f}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = "7 rounds, not 200, of batches above 64; several tables: pooling 1"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--every-form", action="store_true", help="simulated cases in every form that can hold them")
    parser.add_argument("--artifact", type=Path, help="an artifact measured too, table by table")
    parser.add_argument("--device", type=torch.device, default="cpu", help="what serves: cpu, or cuda, one GPU")
    parser.add_argument("--json", type=output_file, help="file to write")
    arguments = parser.parse_args(argv)
    device = arguments.device
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    poolings_of_many = POOLINGS[:1] if arguments.quick else POOLINGS
    threads = THREADS if device.type == "cpu" else THREADS[:1]
    compiled = LOOKUPS.instruction_set() if load_operator() else "not compiled"
    if device.type == "cuda":
        compiled = f"Triton on {torch.cuda.get_device_name(device)}"
    print(f"torch {torch.__version__}, torchrec {torchrec.__version__}, {os.cpu_count()} cores, CSR lookup: {compiled}")
    columns = "tables threads pooling batch   latency          ratio to dense bytes/floor /predicted"
    print(f"{'case':>18} {'form':>20} {columns}")
    rows = []
    for simulate, of_numbers in SIMULATED:
        sizes = ((1, NUM_EMBEDDINGS, POOLINGS), (NUM_TABLES, NUM_EMBEDDINGS_OF_MANY, poolings_of_many))
        for (num_tables, num_embeddings, poolings), forms in zip(sizes, of_numbers, strict=True):
            if forms is not None:
                torch.set_num_threads(1)
                case = simulate(num_tables, num_embeddings, () if arguments.every_form else forms, device)
                rows += rows_of(case, poolings, threads, rounds)
                del case  # before the next one is made
    if arguments.artifact:
        for case in of_artifact(arguments.artifact, device):
            torch.set_num_threads(1)
            rows += rows_of(case, poolings_of_many, threads, rounds)
    if arguments.json:
        fields = {"instruction_set": compiled, "torch": str(torch.__version__), "rows": rows}
        write_json(arguments.json, fields)


if __name__ == "__main__":
    main()
