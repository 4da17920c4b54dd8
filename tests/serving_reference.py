"""Naive oracle and random cases for bags, mixed-dimension tables and artifacts: Python loops, no block ever split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact.load import exact_rows, read_scheme
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops.build import NO_COMPILE
from dnis_torchrec.scheme import FORMS, MixedDimensionScheme, TableScheme

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


@dataclass
class Case:
    """Pruned dense tables, their scheme, and bags to look up: feature -> bags -> (id, weight)."""

    scheme: MixedDimensionScheme
    tables: dict[str, Tensor]
    bags: dict[str, list[list[tuple[int, float]]]]
    id_dtype: torch.dtype

    def kjt(self) -> KeyedJaggedTensor:
        """The bags as TorchRec takes them."""
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
    bags: dict[str, list[list[tuple[int, float]]]], *, weighted: bool = False, id_dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    """Bags as a KeyedJaggedTensor, keys in the order of the dict."""
    entries = [entry for of_feature in bags.values() for bag in of_feature for entry in bag]
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([row_id for row_id, _ in entries], dtype=id_dtype),
        weights=torch.tensor([weight for _, weight in entries], dtype=torch.float32) if weighted else None,
        lengths=torch.tensor([len(bag) for of_feature in bags.values() for bag in of_feature], dtype=torch.int32),
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
    """Everything that serving has to get right: see the words of tests/serving/test_mixed_dimension.py."""
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
