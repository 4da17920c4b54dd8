"""Oracles: plain loops, in float64 where it matters, obviously right; fast code is tested against them."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact.load import ArtifactFolder, exact_rows, read_scheme
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.codes import WIDTHS, feedback_of
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops.build import LOOKUPS, NO_COMPILE
from dnis_torchrec.scheme import FORMS, MixedDimensionScheme, TableScheme
from dnis_torchrec.selection.shards import TableShard, collections, local_shards
from dnis_torchrec.selection.torchrec import writing_to_tables
from dnis_torchrec.serving.packed import PackedTable
from dnis_torchrec.training.rounded import RoundedTables

Bags = list[list[int]]


def load_dense_state(path: Path) -> dict[str, Tensor]:
    return ArtifactFolder(path).tensors("dense_state")


@dataclass
class ReferenceTable:
    """A dense table with one alpha row per table row, as in the paper: e~_i = e_i * alpha[block(i)]."""

    weight: Tensor
    alpha: Tensor
    alpha_row_of_row: Tensor
    is_mean: bool


def pooled_reference(table: ReferenceTable, bags: Bags, weights: Sequence[Sequence[float]] | None = None) -> Tensor:
    """Pools every bag by hand: sum or mean over the WHOLE bag of weight * e_i * alpha[block(i)]."""
    out = []
    for position, bag in enumerate(bags):
        total = torch.zeros(table.weight.shape[1], dtype=torch.float64)
        for index, row in enumerate(bag):
            factor = 1.0 if weights is None else weights[position][index]
            total = total + factor * table.weight[row] * table.alpha[table.alpha_row_of_row[row]]
        out.append(total / len(bag) if table.is_mean and bag else total)
    return torch.stack(out)


def embedding_l2_reference(reads: Sequence[tuple[ReferenceTable, Bags, Sequence[Sequence[float]] | None]]) -> Tensor:
    """Mean over samples of the sum over features, each one's (table, bags, weights), of |pooled embedding|^2."""
    total = torch.zeros((), dtype=torch.float64)
    for table, bags, weights in reads:
        for sample in pooled_reference(table, bags, weights):
            for value in sample:
                total = total + value * value
    return total / len(reads[0][1])


def normalised_reference(gradient: Tensor, hit: Sequence[bool]) -> Tensor:
    """Row-wise normalisation, one row at a time."""
    rows = []
    for row, was_hit in zip(gradient, hit, strict=True):
        rows.append(row / (row.abs().mean() + 1e-7) if was_hit else torch.zeros_like(row))
    return torch.stack(rows)


def elementwise_keep_reference(tables: Sequence[Tensor], num_keep: int) -> list[Tensor]:
    """Keeps the num_keep largest magnitudes over all tables; among equals the earlier table, row, column stays."""
    flat = [(-abs(float(v)), t, i) for t, table in enumerate(tables) for i, v in enumerate(table.flatten().tolist())]
    kept = [torch.zeros(table.numel(), dtype=torch.bool) for table in tables]
    for _, t, i in sorted(flat)[:num_keep]:
        kept[t][i] = True
    return [mask.view(table.shape) for mask, table in zip(kept, tables, strict=True)]


def blocks_reference(counts: Sequence[int], num_blocks: int, least_rows: int) -> list[int]:
    """Block of every row: sorts the rows by descending count (ties in row order), walks down and cuts. Rows that are
    never seen, if they are enough for a block and others are seen, are the last one."""
    order, seen = sorted(range(len(counts)), key=lambda row: (-counts[row], row)), sum(count > 0 for count in counts)
    is_apart = num_blocks > 1 and seen > 0 and len(counts) - seen >= least_rows
    end = seen if is_apart else len(counts)
    while num_blocks - is_apart > 1 and end < least_rows * (num_blocks - is_apart):
        num_blocks -= 1
    starts = {k * end // (num_blocks - is_apart) for k in range(num_blocks - is_apart)} | ({end} if is_apart else set())
    blocks, block = [0] * len(counts), -1
    for position, row in enumerate(order):
        block += position in starts
        blocks[row] = block
    return blocks


def places_reference(blocks: Sequence[int], is_stored: Sequence[bool]) -> list[tuple[int, int] | None]:
    """Block of every row and its position there, counted one by one; None for rows of which nothing is stored."""
    counts, places = [0] * (len(is_stored) + 1), []
    for block in blocks:
        places.append((block, counts[block]) if block < len(is_stored) and is_stored[block] else None)
        counts[block] += 1
    return places


def rounded_reference(values: Sequence[float], scale: float, shift: int, bits: int) -> list[int]:
    """The code of every value: of all that there are, the one whose value scale * (q + shift / 2) comes nearest."""
    return [min(range(2**bits), key=lambda q, x=value: (abs(scale * (q + shift / 2) - x), q)) for value in values]


def rounding_error_reference(
    values: Sequence[float], weights: Sequence[float], scale: float, shift: int, bits: int
) -> float:
    """Weighted energy of the rounding error over the weighted energy of the values."""
    codes = rounded_reference(values, scale, shift, bits)
    errors = [scale * (q + shift / 2) - x for q, x in zip(codes, values, strict=True)]
    energies = [sum(w * x * x for w, x in zip(weights, of, strict=True)) for of in (errors, values)]
    return energies[0] / energies[1]


def error_feedback_reference(
    row: Tensor, couplings: Tensor, order: Sequence[int], round_one: Callable[[int, float], float]
) -> Tensor:
    """A row that is rounded column by column, each where the loss e^T H e / 2 is least given all errors made so far.

    `couplings` is H, ``(D, D)``, positive definite. Columns that are not rounded yet could take any value: of them and
    the fixed errors the least is where H_RR e_R + H_RF e_F = 0.
    """
    rounded = row.double().clone()
    for position, column in enumerate(order):
        fixed, rest = list(order[:position]), list(order[position:])
        errors = row[fixed].double() - rounded[fixed]
        moves = torch.linalg.solve(couplings[rest][:, rest], couplings[rest][:, fixed] @ errors)
        rounded[column] = round_one(column, float(row[column].double() + moves[0]))
    return rounded


def couplings_reference(
    predictions: Tensor,
    pooled: dict[tuple[str, str], Tensor],
    bags: dict[tuple[str, str], Bags],
    blocks: dict[str, Sequence[int]],
    second: Callable[[int], Tensor],
    *,
    num_blocks: int,
    is_mean: bool,
) -> dict[str, Tensor]:
    """Sums over samples, and over the ids that each reads, of L'' dz/dx dz/dx', by table and block of the id.

    `pooled` and `bags` are by (table, feature); `predictions` ``(B, T)`` come from `pooled`. `second` gives L'' of a
    sample, ``(T, T)``. Ids of block `num_blocks` count for nothing.
    """
    found = {
        table: torch.zeros(num_blocks, values.shape[1], values.shape[1], dtype=torch.float64)
        for (table, _), values in pooled.items()
    }
    for (table, feature), values in pooled.items():
        for n, bag in enumerate(bags[table, feature]):
            slopes = torch.stack(
                [torch.autograd.grad(z, values, retain_graph=True)[0][n].double() for z in predictions[n]]
            )
            for row in bag:
                if blocks[table][row] < num_blocks:
                    own = slopes / len(bag) if is_mean else slopes
                    found[table][blocks[table][row]] += own.T @ second(n).double() @ own
    return found


def least_loss_reference(
    options: Sequence[Sequence[tuple[int, float]]], table_of_block: Sequence[int], fixed: Sequence[int], budget: int
) -> float:
    """The least loss within a budget, of all ways to choose one (bytes, loss) for every block.

    A table of which any block takes bytes takes its fixed ones, too.
    """
    least = float("inf")
    for choice in itertools.product(*options):
        opened = {table for table, (num_bytes, _) in zip(table_of_block, choice, strict=True) if num_bytes}
        total = sum(num_bytes for num_bytes, _ in choice) + sum(fixed[table] for table in opened)
        if total <= budget:
            least = min(least, sum(loss for _, loss in choice))
    return least


def second_moment_reference(tables: Sequence[Tensor], counts: Sequence[Tensor]) -> Tensor:
    """``(D, D)`` float64: the outer product of every row with itself, as often as the row was looked up, added up."""
    dim = tables[0].shape[1]
    moment = torch.zeros(dim, dim, dtype=torch.float64)
    for table, of_rows in zip(tables, counts, strict=True):
        for row, count in zip(table.double(), of_rows.tolist(), strict=True):
            moment += count * torch.outer(row, row)
    return moment


def curvature_reference(
    predict: Callable[[dict[str, Tensor]], Tensor],
    alpha: dict[str, Tensor],
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradient and Gauss-Newton curvature of the loss in alpha, one sample, output, block and column at a time.

    `predict` gives ``(B, T)``, differentiable in every table's alpha, ``(S, D)``. Every sample's loss is derived alone.
    """
    alpha = {table: values.clone().requires_grad_() for table, values in alpha.items()}
    predictions = predict(alpha)
    num_samples, num_outputs = predictions.shape
    found = {table: (torch.zeros_like(v), torch.zeros_like(v)) for table, v in alpha.items()}
    for n in range(num_samples):
        z = predictions[n].detach()

        def of_sample(z: Tensor, n: int = n) -> Tensor:
            return loss(z if num_outputs == 1 else z.unsqueeze(0), labels[n : n + 1])

        first = torch.autograd.functional.jacobian(of_sample, z)
        second = torch.autograd.functional.hessian(of_sample, z)
        of_outputs = [
            torch.autograd.grad(predictions[n, t], list(alpha.values()), retain_graph=True, allow_unused=True)
            for t in range(num_outputs)
        ]
        for index, (table, values) in enumerate(alpha.items()):
            for block in range(values.shape[0]):
                for column in range(values.shape[1]):
                    gradients = [of_output[index] for of_output in of_outputs]
                    slopes = [0.0 if own is None else float(own[block, column]) for own in gradients]
                    for t in range(num_outputs):
                        found[table][0][block, column] += float(first[t]) * slopes[t] / num_samples
                        for u in range(num_outputs):
                            bend = slopes[t] * float(second[t, u]) * slopes[u]
                            found[table][1][block, column] += bend / num_samples
    return {table: (g.detach(), h.detach()) for table, (g, h) in found.items()}


ROUTINGS = {
    "movie/seen": RowRouting.from_map(torch.tensor([2, 0, 1, 0, 2, 1, 1, 3, 0, 2]), 3),
    "user": RowRouting(10, 3, boundaries=torch.tensor([0, 2, 6, 9])),
}
MIXED_FILE = "mixed_dimension/000_movie_seen.safetensors"
PACKED_FILE = "packed/000_movie_seen.safetensors"


@contextmanager
def lookups(compiled: bool) -> Iterator[None]:
    """Modules that are made inside look up by the compiled operator, or by TorchRec's and FBGEMM's kernels alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NO_COMPILE, "0" if compiled else "1")
        yield


@contextmanager
def limited(limit: str) -> Iterator[None]:
    """Lookups run on an instruction set, or on the widest that there is below."""
    widest = LOOKUPS.instruction_set()
    LOOKUPS.instruction_set(limit=limit)
    try:
        yield
    finally:
        LOOKUPS.instruction_set(limit=widest)


@dataclass
class Case:
    """Pruned dense tables, their scheme, and bags to look up: feature -> bags -> (id, weight)."""

    scheme: MixedDimensionScheme
    tables: dict[str, Tensor]
    bags: dict[str, list[list[tuple[int, float]]]]
    id_dtype: torch.dtype

    def kjt(self) -> KeyedJaggedTensor:
        weighted = next(iter(self.scheme.tables.values())).is_weighted
        return keyed_jagged_tensor(self.bags, weighted=weighted, id_dtype=self.id_dtype)

    def expected(self) -> dict[str, Tensor]:
        """Embedding name -> pooled ``(B, D)``, in TorchRec's order."""
        readers = [(t, f) for t in self.scheme.tables.values() for f in t.feature_names]
        shared = {f for _, f in readers if sum(f == other for _, other in readers) > 1}
        return {
            f"{f}@{t.name}" if f in shared else f: pool(self.tables[t.name], self.bags[f], t.pooling, t.is_weighted)
            for t, f in readers
        }


def pool(table: Tensor, bags: list[list[tuple[int, float]]], pooling: str, weighted: bool) -> Tensor:
    """Pools bags one id at a time, in float64."""
    pooled = torch.zeros(len(bags), table.shape[1], dtype=torch.float64)
    for row, bag in enumerate(bags):
        for row_id, weight in bag:
            pooled[row] += table[row_id].double() * (weight if weighted else 1.0)
        if pooling == "mean" and bag:
            pooled[row] /= len(bag)
    return pooled.float()


def keyed_jagged_tensor(
    bags: dict[str, list[list[tuple[int, float]]]],
    *,
    weighted: bool = False,
    id_dtype: torch.dtype = torch.int64,
    length_dtype: torch.dtype = torch.int32,
) -> KeyedJaggedTensor:
    """Bags as a KeyedJaggedTensor, keys in the order of the dict."""
    entries = [entry for of_feature in bags.values() for bag in of_feature for entry in bag]
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([row_id for row_id, _ in entries], dtype=id_dtype),
        weights=torch.tensor([weight for _, weight in entries], dtype=torch.float32) if weighted else None,
        lengths=torch.tensor([len(bag) for of_feature in bags.values() for bag in of_feature], dtype=length_dtype),
        stride=len(next(iter(bags.values()))),
    )


def table_scheme(
    name: str,
    routing: RowRouting,
    retained: Tensor,
    *,
    feature_names: tuple[str, ...] = ("f",),
    pooling: str = "sum",
    collection: str = "ebc",
    is_weighted: bool = False,
    num_retained: int | None = None,
) -> TableScheme:
    """A TableScheme that is block-structured unless `num_retained` says otherwise."""
    area = int((routing.row_counts() * retained.sum(dim=1)).sum())
    return TableScheme(
        name=name,
        collection=collection,
        num_embeddings=routing.num_embeddings,
        embedding_dim=retained.shape[1],
        pooling=pooling,
        feature_names=feature_names,
        is_weighted=is_weighted,
        routing=routing,
        retained=retained,
        num_retained=area if num_retained is None else num_retained,
    )


def pruned(weight: Tensor, routing: RowRouting, retained: Tensor) -> Tensor:
    """A copy of `weight` that is zero outside the retained dims, row by row."""
    out = torch.zeros_like(weight)
    for row, block in enumerate(routing.all_blocks().tolist()):
        if block < routing.num_blocks:
            out[row] = weight[row] * retained[block]
    return out


@st.composite
def routings(draw: st.DrawFn, max_rows: int = 12, max_blocks: int = 4) -> RowRouting:
    """Routings of both forms, with empty blocks and rows of no block."""
    num_rows, num_blocks = draw(st.integers(1, max_rows)), draw(st.integers(1, max_blocks))
    if draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, num_rows), min_size=num_blocks, max_size=num_blocks))
        return RowRouting(num_rows, num_blocks, boundaries=torch.tensor([0, *sorted(inner)]))
    blocks = draw(st.lists(st.integers(0, num_blocks), min_size=num_rows, max_size=num_rows))
    return RowRouting.from_map(torch.tensor(blocks), num_blocks)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Everything that serving has to get right."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    is_weighted, batch_size = draw(st.booleans()), draw(st.integers(1, 4))
    schemes, tables = {}, {}
    pool_of_features = ["f0", "f1", "f2"]
    for index in range(draw(st.integers(1, 3))):
        name, routing, dim = f"t{index}", draw(routings()), draw(st.integers(1, 9))
        retained = torch.rand(routing.num_blocks, dim, generator=generator) < draw(st.sampled_from([0.0, 0.4, 1.0]))
        weight = pruned(torch.randn(routing.num_embeddings, dim, generator=generator), routing, retained)
        if draw(st.booleans()):  # single elements pruned too: the block form pads, the sparse form does not
            weight *= torch.rand(weight.shape, generator=generator) < 0.7
        schemes[name] = table_scheme(
            name,
            routing,
            retained,
            feature_names=tuple(draw(st.lists(st.sampled_from(pool_of_features), min_size=1, max_size=2, unique=True))),
            pooling=draw(st.sampled_from(["sum", "mean"])),
            is_weighted=is_weighted,
            num_retained=int(weight.count_nonzero()),
        )
        tables[name] = weight
    bags = {}
    for feature in draw(st.permutations([*pool_of_features, "unread"])):
        rows = [t.num_embeddings for t in schemes.values() if feature in t.feature_names]
        entry = st.tuples(st.integers(0, min(rows, default=99) - 1), st.floats(-2, 2, width=32))
        bags[feature] = draw(st.lists(st.lists(entry, max_size=4), min_size=batch_size, max_size=batch_size))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return Case(scheme=MixedDimensionScheme(schemes), tables=tables, bags=bags, id_dtype=dtype)


def two_tables() -> tuple[dict[str, Tensor], MixedDimensionScheme]:
    """Two pruned tables of 10 rows, one routed by map and pooled by MEAN, one by boundaries and by SUM."""
    torch.manual_seed(0)
    retained = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    tables = {name: pruned(torch.randn(10, 5), routing, retained) for name, routing in ROUTINGS.items()}
    schemes = {
        name: table_scheme(name, routing, retained, feature_names=(name[:5],), pooling=pooling)
        for (name, routing), pooling in zip(ROUTINGS.items(), ("mean", "sum"), strict=True)
    }
    return tables, MixedDimensionScheme(schemes)


def write_two_tables(path: Path) -> Path:
    """The artifact of `two_tables` in both forms, with a dense state and a run."""
    tables, scheme = two_tables()
    state = {"over_arch.weight": torch.randn(3, 2), "step": torch.tensor(7)}
    return write_artifact(tables, scheme, path, forms=FORMS, dense_state=state, run={"seed": 3})


def whole_table(path: Path, table: str) -> Tensor:
    """Every row of a table of an artifact, bit for bit."""
    return exact_rows(path)[table](0, read_scheme(path).tables[table].num_embeddings)


def all_rows() -> KeyedJaggedTensor:
    """Bags that look every row of both tables up."""
    return keyed_jagged_tensor({feature: [[(row, 1.0)] for row in range(10)] for feature in ("user", "movie")})


def with_codes(table: TableScheme, *, seed: int = 0, widths: tuple[int, ...] | None = None) -> TableScheme:
    """A scheme with drawn bits, and scales that clip some values of about 1."""
    random, shape = Random(seed), table.retained.shape
    widths = widths or random.choice([WIDTHS, WIDTHS, (0, 2, 3, 4, 5), (32,), (4,), (0,)])
    bits = torch.tensor([[random.choice(widths) for _ in range(shape[1])] for _ in range(shape[0])], dtype=torch.uint8)
    is_coded = (bits > 0) & (bits < 32)
    levels = torch.where(is_coded, 2.0 ** bits.clamp(max=16), 1.0)
    scale = torch.where(is_coded, (3 / levels).bfloat16().float(), 1.0)
    off = torch.tensor([[random.randint(-3, 3) for _ in range(shape[1])] for _ in range(shape[0])])
    shift = torch.where(is_coded, (off - levels).clamp(-(2**15), 2**15 - 1), 0.0).short()
    area = int((table.routing.row_counts() * (bits > 0).sum(1)).sum())
    return replace(table, bits=bits, scale=scale, shift=shift, retained=bits > 0, num_retained=area)


def rounded(table: TableScheme, weight: Tensor) -> Tensor:
    """The nearest level to every value, in float64; 0 where nothing is retained."""
    out = torch.zeros(weight.shape, dtype=torch.float64)
    codes, blocks = table.codes, table.routing.all_blocks()
    for s, of_block in enumerate(codes.bits.tolist()):
        rows = (blocks == s).nonzero().flatten()
        for d, width in enumerate(of_block):
            values = weight[rows, d].double()
            if 0 < width < 32:
                levels = codes.scale[s, d].double() * (torch.arange(2**width) + codes.shift[s, d].double() / 2)
                above = torch.searchsorted(levels, values).clamp(1, len(levels) - 1)
                nearer = values - levels[above - 1] < levels[above] - values
                out[rows, d] = torch.where(nearer, levels[above - 1], levels[above])
            elif width == 32:
                out[rows, d] = values
    return out.float()


def coded_case(case: Case, seed: int) -> tuple[Case, dict[str, Tensor]]:
    """The same bags over tables with codes; `tables` of the case are rounded. Beside it, the tables before."""
    torch.manual_seed(seed)
    schemes = {name: with_codes(table, seed=seed + i) for i, (name, table) in enumerate(case.scheme.tables.items())}
    weights = {name: torch.randn(table.num_embeddings, table.embedding_dim) for name, table in schemes.items()}
    dense = {name: rounded(table, weights[name]) for name, table in schemes.items()}
    return replace(case, scheme=MixedDimensionScheme(schemes), tables=dense), weights


def coded_tables() -> tuple[dict[str, Tensor], MixedDimensionScheme]:
    """The tables of `two_tables` before they were rounded, nothing of them pruned, and their scheme with codes."""
    _, scheme = two_tables()
    bits = torch.tensor([[4, 32, 0, 7, 16], [3, 1, 0, 0, 5], [0, 0, 0, 0, 0]], dtype=torch.uint8)
    is_coded = (bits > 0) & (bits < 32)
    levels = torch.where(is_coded, 2.0 ** bits.clamp(max=8), 1.0)
    codes = {"bits": bits, "scale": (4 / levels).bfloat16().float(), "shift": (1 - levels).short()}
    coded = {}
    for name, table in scheme.tables.items():
        area = int((table.routing.row_counts() * (bits > 0).sum(1)).sum())
        coded[name] = replace(table, retained=bits > 0, num_retained=area, **codes)
    torch.manual_seed(1)
    return {name: torch.randn(10, 5) for name in coded}, MixedDimensionScheme(coded)


def write_coded_tables(path: Path, forms: tuple[str, ...] | None = None) -> Path:
    """The artifact of `coded_tables`, with a dense state and a run."""
    tables, scheme = coded_tables()
    state = {"over_arch.weight": torch.ones(3, 2), "step": torch.tensor(7)}
    return write_artifact(tables, scheme, path, forms=forms, dense_state=state, run={"seed": 3})


def packed_by_hand(fields: list[int], bits: list[int]) -> list[int]:
    """The bytes of one row."""
    number, end = 0, 0
    for field, width in zip(fields, bits, strict=True):
        if width == 32:
            end = (end + 7) // 8 * 8
        number |= field << end if width else 0
        end += width
    return list(number.to_bytes((end + 7) // 8, "little"))


def draw_fields(random: Random, num_rows: int, bits: list[int]) -> list[list[int]]:
    """Codes from the least to the largest, and bits of float32."""
    floats = torch.randn(num_rows, len(bits)).view(torch.int32).tolist()
    return [
        [of_row[d] % 2**32 if width == 32 else random.randrange(2**width) for d, width in enumerate(bits)]
        for of_row in floats
    ]


def values_of(fields: list[list[int]], bits: list[int], scale: Tensor, shift: Tensor) -> Tensor:
    """What fields of one block stand for, in float64 until the end."""
    values = torch.zeros(len(fields), len(bits))
    for d, width in enumerate(bits):
        column = torch.tensor([of_row[d] for of_row in fields], dtype=torch.int64)
        if width == 32:
            values[:, d] = column.to(torch.int32).view(torch.float32)
        elif width:
            values[:, d] = ((column + shift[d].double() / 2) * scale[d].double()).float()
    return values


def packed(table: TableScheme, random: Random) -> tuple[TableScheme, PackedTable, Tensor]:
    """Gives a table bits for every column and rows: its scheme, what is stored, all of it dense.

    Draws from torch's generator, too.
    """
    num_blocks, dim = table.retained.shape
    widths = random.choice([WIDTHS, (0, 2, 3, 4, 5), (32,), (0, 32), (16, 32), (4,), (0,)])
    bits = torch.tensor([[random.choice(widths) for _ in range(dim)] for _ in range(num_blocks)], dtype=torch.uint8)
    scale = (torch.rand(num_blocks, dim) + 2**-8).bfloat16().float()
    shift = torch.randint(-300, 300, (num_blocks, dim), dtype=torch.int16)
    dense, stored, of_rows = torch.zeros(table.num_embeddings, dim), bytearray(), table.routing.all_blocks()
    for s in range(num_blocks):
        rows, widths_of_block = (of_rows == s).nonzero().flatten(), bits[s].tolist()
        fields = draw_fields(random, len(rows), widths_of_block)
        if len(rows) and any(widths_of_block):
            stored += b"".join(bytes(packed_by_hand(of_row, widths_of_block)) for of_row in fields)
            dense[rows] = values_of(fields, widths_of_block, scale[s], shift[s])
    area = int((table.routing.row_counts() * (bits > 0).sum(1)).sum())
    scheme = replace(table, bits=bits, retained=bits > 0, num_retained=area)
    return scheme, PackedTable.from_rows(scheme, torch.tensor(list(stored), dtype=torch.uint8), scale, shift), dense


def packed_case(case: Case, seed: int) -> tuple[Case, dict[str, PackedTable]]:
    """The same bags over packed tables of the same shapes; `tables` of the case is what they stand for."""
    random, schemes, stored, dense = Random(seed), {}, {}, {}
    torch.manual_seed(seed)
    for name, table in case.scheme.tables.items():
        schemes[name], stored[name], dense[name] = packed(table, random)
    return replace(case, scheme=MixedDimensionScheme(schemes), tables=dense), stored


def scheme_of(
    tables: list[EmbeddingBagConfig],
    routings: Mapping[str, RowRouting],
    *,
    seed: int = 0,
    widths: tuple[int, ...] | None = None,
) -> MixedDimensionScheme:
    """A scheme with drawn codes for tables, whose values are about 1."""
    schemes = {}
    for index, table in enumerate(tables):
        routing, pooling = routings[table.name], "mean" if table.pooling == PoolingType.MEAN else "sum"
        retained, readers = torch.ones(routing.num_blocks, table.embedding_dim).bool(), tuple(table.feature_names)
        plain = table_scheme(table.name, routing, retained, feature_names=readers, pooling=pooling, collection="")
        schemes[table.name] = with_codes(plain, seed=seed + index, widths=widths)
    return MixedDimensionScheme(schemes)


class StraightThrough:
    def __init__(self, scheme: MixedDimensionScheme, tables: Mapping[str, Tensor]) -> None:
        self.scheme = scheme
        self.latents = {name: nn.Parameter(weight.clone()) for name, weight in tables.items()}
        self.clip_()

    def clip_(self) -> None:
        """Latent weights of codes lie at most half a step outside of the range, dropped ones are 0."""
        for name, latent in self.latents.items():
            table = self.scheme.tables[name]
            bits = [*table.codes.bits.tolist(), [0] * table.embedding_dim]
            for row, block in enumerate(table.routing.all_blocks().tolist()):
                for column, width in enumerate(bits[block]):
                    if width == 0:
                        latent.data[row, column] = 0
                    elif width < 32:
                        scale, shift = float(table.scale[block, column]), float(table.shift[block, column])
                        ends = scale * (shift / 2 - 0.5), scale * (2**width - 1 + shift / 2 + 0.5)
                        latent.data[row, column].clamp_(*ends)

    def weights(self) -> dict[str, Tensor]:
        """What lookups read."""
        return {name: rounded(self.scheme.tables[name], latent.detach()) for name, latent in self.latents.items()}

    def step(self, loss: Callable[[Mapping[str, Tensor]], Tensor], optimizer: torch.optim.Optimizer) -> None:
        """The gradient at the rounded weights steps the latent ones."""
        leaves = {name: weight.requires_grad_() for name, weight in self.weights().items()}
        loss(leaves).backward()
        for name, latent in self.latents.items():
            latent.grad = leaves[name].grad
        optimizer.step()
        self.clip_()


class RowWiseAdagradByHand(torch.optim.Optimizer):
    """One sum of squares per row."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self) -> None:
        """v <- v - lr g / (sqrt(sum over steps of mean g^2) + eps)."""
        for group in self.param_groups:
            for parameter in group["params"]:
                sums = self.state[parameter].setdefault("sums", torch.zeros(len(parameter)))
                for row, gradient in enumerate(parameter.grad):
                    sums[row] += gradient.square().mean()
                    parameter.data[row] -= group["lr"] * gradient / (sums[row].sqrt() + 1e-8)


def pooled(weight: Tensor, features: KeyedJaggedTensor, name: str, pooling: PoolingType) -> Tensor:
    """Bags of a feature, one after the other."""
    bags, is_mean = features[name].to_dense(), pooling == PoolingType.MEAN
    return torch.stack([weight[bag].sum(0) / (len(bag) if is_mean and len(bag) else 1) for bag in bags])


def distance(outputs: Mapping[str, Tensor]) -> Tensor:
    """A loss whose gradient depends on the weights and moves some of them by several codes; outputs by feature."""
    values = torch.cat([outputs[name] for name in sorted(outputs)], dim=1)
    targets = torch.linspace(-2, 2, values.numel()).view_as(values)
    return (values - targets).square().sum() / 8


def loss_by_hand(
    tables: list[EmbeddingBagConfig], features: KeyedJaggedTensor
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    def loss(weights: Mapping[str, Tensor]) -> Tensor:
        return distance(
            {name: pooled(weights[t.name], features, name, t.pooling) for t in tables for name in t.feature_names}
        )

    return loss


def shards_of(model: nn.Module) -> list[TableShard]:
    return [shard for module in collections(get_unwrapped_module(model)).values() for shard in local_shards(module)]


def tables_of(model: nn.Module) -> dict[str, Tensor]:
    """Table -> clone of its weights, column shards put together."""
    found: dict[str, list[Tensor]] = {}
    for shard in sorted(shards_of(model), key=lambda shard: shard.first_column):
        found.setdefault(shard.table, []).append(shard.weight)
    return {name: torch.cat(parts, dim=1) for name, parts in found.items()}


def without_codes(scheme: MixedDimensionScheme) -> MixedDimensionScheme:
    bare = {"bits": None, "scale": None, "shift": None}
    return MixedDimensionScheme({name: replace(table, **bare) for name, table in scheme.tables.items()})


def with_feedback(scheme: MixedDimensionScheme) -> MixedDimensionScheme:
    """The same codes, by error feedback of columns that meet at random."""
    generator, found = torch.Generator().manual_seed(4), {}
    for name, table in scheme.tables.items():
        slopes = torch.randn(*table.codes.bits.shape, 3, generator=generator, dtype=torch.float64)
        found[name] = replace(table, feedback=feedback_of(slopes @ slopes.mT, table.codes.bits))
    return MixedDimensionScheme(found)


@contextmanager
def latent_tables(model: nn.Module, held: RoundedTables) -> Iterator[None]:
    """Tables hold their latent weights inside: what is served, and what rounding has left out of it."""
    shards = [shard for module in collections(model).values() for shard in local_shards(module)]
    values = [shard.weight.clone() for shard in shards]
    parts = [own.residual for own in held._shards]
    residuals = {(part.table, (part.first_row, part.first_column)): part.weight for part in parts}
    with torch.no_grad(), writing_to_tables(model):
        for shard in shards:
            shard.weight.add_(residuals[shard.table, (shard.first_row, shard.first_column)])
    yield
    with torch.no_grad(), writing_to_tables(model):
        for shard, value in zip(shards, values, strict=True):
            shard.weight.copy_(value)
