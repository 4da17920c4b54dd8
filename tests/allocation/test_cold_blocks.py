"""Blocks of rows that training never saw have a few columns, whose bytes count, and learn in the form that trains."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.bits import COLD_COLUMNS, Allocation, allocate, retained_columns
from dnis_torchrec.allocation.curvature import Curvature
from dnis_torchrec.allocation.energies import blocked_tables, rounding_energies
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.forms import PACKED
from dnis_torchrec.serving import MixedDimensionEmbeddingBagCollection

ROWS, BLOCKS = 400, 4


class Model:
    """One table of which the last rows are never looked up, beside one that training knows whole."""

    def __init__(self, dim: int, seen: int, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.tables = [
            EmbeddingBagConfig(name="new", num_embeddings=ROWS, embedding_dim=dim, feature_names=["f"]),
            EmbeddingBagConfig(name="old", num_embeddings=ROWS, embedding_dim=16, feature_names=["g"]),
        ]
        counted = torch.arange(ROWS, 0, -1)
        drawn = {"new": counted * (torch.arange(ROWS) < seen), "old": counted}
        self.counts = FrequencyCounts(drawn, {"f": 1, "g": 1}, 100)
        self.blocks: RowBlocks = blocks_from_counts(self.counts, self.tables, num_blocks=BLOCKS, scope="table")
        worth = {t.name: torch.rand(BLOCKS, t.embedding_dim, dtype=torch.float64) + 0.1 for t in self.tables}
        worth["new"][self.blocks.seen_rows["new"] == 0] = 0.0
        self.curvature = Curvature({name: 0 * part for name, part in worth.items()}, worth, 100, 0.1)
        self.collection = EmbeddingBagCollection(tables=self.tables)

    def allocate(self, **size: float) -> Allocation:
        return allocate(self.collection, self.blocks, self.counts, self.curvature, **size)  # type: ignore[arg-type]


def bits_of(found: Allocation) -> torch.Tensor:
    bits = found.scheme.tables["new"].bits
    assert bits is not None
    return bits


@pytest.mark.parametrize(("dim", "columns"), [(64, 4), (32, 4), (16, 2), (8, 1), (4, 0)])
def test_the_first_columns_of_cold_blocks_are_stored_and_counted(dim: int, columns: int) -> None:
    model = Model(dim, seen=ROWS // 2)
    found = model.allocate(compression=12)
    bits = bits_of(found)
    assert bits[:2].any(1).all()  # those of rows that are seen
    expected = torch.zeros(2, dim, dtype=torch.uint8)
    expected[:, :columns] = 2
    assert torch.equal(bits[2:], expected)
    assert found.num_bytes == sum(map(PACKED.served_bytes, found.scheme.tables.values()))
    assert found.compression >= 12
    assert columns <= COLD_COLUMNS


def test_a_table_without_rows_never_seen_is_stored_as_before() -> None:
    """Nothing is paid for: the last block gets nothing where it is worth nothing."""
    model = Model(16, seen=ROWS)
    model.curvature.curvature["new"][2:] = 0
    assert not bits_of(model.allocate(compression=12))[2:].any()


def test_a_block_that_rare_rows_share_with_new_ones_is_not_cold() -> None:
    model = Model(16, seen=ROWS - 10)
    model.curvature.curvature["new"][3:] = 0
    assert not bits_of(model.allocate(compression=12))[3:].any()


@settings(max_examples=25, deadline=None)
@given(
    dim=st.sampled_from([8, 16, 40]),
    seen=st.integers(0, ROWS),
    seed=st.integers(0, 99),
    bits=st.sampled_from([(0, 1, 2, 3, 4, 5, 6, 8), (0, 3, 32), (0, 1), (0, 32)]),
    is_worth=st.booleans(),
    compressions=st.lists(st.floats(1.5, 40), min_size=2, max_size=3),
)
def test_sizes_are_met_and_more_bytes_never_predict_more_loss(
    dim: int, seen: int, seed: int, bits: tuple[int, ...], is_worth: bool, compressions: list[float]
) -> None:
    model = Model(dim, seen, seed=seed)
    if is_worth:  # as where validation data reads rows that training does not
        model.curvature.curvature["new"] += 0.05
    energies = rounding_energies(model.collection, model.blocks, model.counts, bits=bits)
    losses = []
    for compression in sorted(compressions, reverse=True):
        try:
            found = model.allocate(compression=compression, energies=energies, bits=bits)
        except ValueError as error:
            assert "compression: expected at most" in str(error)  # noqa: PT017
            continue
        assert found.compression >= compression
        losses.append(found.predicted_loss_increase)
    assert all(more <= less + 1e-12 for less, more in pairwise(losses))


def test_columns_that_stay_in_a_search_are_those_of_cold_blocks_too() -> None:
    model = Model(32, seen=ROWS // 2)
    tables = blocked_tables(model.collection, model.blocks)
    found = retained_columns(tables, model.blocks, model.curvature.curvature, bits=4, compression=12)["new"]
    assert found[2:, :COLD_COLUMNS].all()
    assert not found[2:, COLD_COLUMNS:].any()


def test_a_row_born_after_the_search_learns() -> None:
    model = Model(32, seen=ROWS // 2)
    scheme = model.allocate(compression=12).scheme
    weights = {name: bag.weight.detach() for name, bag in model.collection.embedding_bags.items()}
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, weights)
    assert sum(p.numel() for p in module.parameters()) == scheme.parameters
    new = torch.tensor([ROWS - 1])
    bags = KeyedJaggedTensor(keys=["f", "g"], values=new, lengths=torch.tensor([1, 0]))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(bags)["f"], torch.ones(1, 32), reduction="sum").backward()
        optimizer.step()
    assert module(bags)["f"][0].tolist() == pytest.approx(COLD_COLUMNS * [1.0] + (32 - COLD_COLUMNS) * [0.0], abs=1e-4)
