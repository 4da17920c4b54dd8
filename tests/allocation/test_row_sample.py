"""The sample of rows: unbiased, of every block, the same however the counts are read; energies of tables."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.allocation import energies as row_sample
from dnis_torchrec.allocation.energies import UNSEEN_WEIGHT, rounding_energies, sample_rows
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting
from tests.reference import rounding_error_reference


def _skewed(rows: int) -> torch.Tensor:
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    return (50_000 / torch.arange(1, rows + 1) ** 1.1).long()[order]


def _routing(rows: int, num_blocks: int) -> RowRouting:
    drawn = torch.randint(0, num_blocks + 1, (rows,), generator=torch.Generator().manual_seed(2))
    return RowRouting.from_map(drawn, num_blocks)


@pytest.mark.parametrize("rows_per_block", [1, 7, 200, 2000])
def test_weights_add_up_to_the_look_ups_of_each_block(rows_per_block: int) -> None:
    counts, routing = _skewed(5000), _routing(5000, 3)
    sample = sample_rows(counts, routing, rows_per_block)
    assert bool((sample.rows.diff() > 0).all())
    assert torch.equal(routing.block_of(sample.rows), sample.blocks)
    for block in range(3):
        all_weights = counts[routing.all_blocks() == block].double().clamp(min=UNSEEN_WEIGHT)
        own = sample.weights[sample.blocks == block]
        assert max(1, min(rows_per_block, len(all_weights)) - 2) <= len(own) <= rows_per_block
        lightest = float(own.min())
        assert float(own.sum()) == pytest.approx(float(all_weights.sum()), abs=2 * lightest)


def test_sums_over_a_sample_estimate_those_over_all_rows() -> None:
    counts, routing = _skewed(20_000), _routing(20_000, 2)
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(3)).square()
    sample = sample_rows(counts, routing, 2000)
    for block in range(2):
        mine, own = routing.all_blocks() == block, sample.blocks == block
        expected = (values * counts.double().clamp(min=UNSEEN_WEIGHT))[mine].sum()
        found = (values[sample.rows] * sample.weights)[own].sum()
        assert float(found / expected) == pytest.approx(1, abs=0.05)


def test_the_most_looked_up_rows_are_certain_and_small_blocks_whole() -> None:
    counts = torch.tensor([1000, 1, 1, 1, 0, 0, 0, 500])
    sample = sample_rows(counts, RowRouting(8, 1, boundaries=torch.tensor([0, 8])), rows_per_block=4)
    assert {0, 7} <= set(sample.rows.tolist())
    assert sample.weights[sample.rows == 0].item() == 1000
    whole = sample_rows(counts, RowRouting(8, 2, boundaries=torch.tensor([0, 4, 6])), rows_per_block=4)
    assert whole.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert whole.weights.tolist() == [1000, 1, 1, 1, UNSEEN_WEIGHT, UNSEEN_WEIGHT]
    steep = 8 ** torch.arange(20)
    assert (
        sample_rows(steep, RowRouting(20, 1, boundaries=torch.tensor([0, 20])), 20).weights.tolist() == steep.tolist()
    )


def test_rows_are_the_same_however_many_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a few at which the sum of probabilities is a half, up to rounding."""
    counts, routing = _skewed(5000), _routing(5000, 3)
    expected = sample_rows(counts, routing, 100)
    monkeypatch.setattr(row_sample, "ROWS_AT_A_TIME", 701)
    found = sample_rows(counts, routing, 100)
    assert len(set(found.rows.tolist()) ^ set(expected.rows.tolist())) <= 6
    assert len(found.rows) == pytest.approx(len(expected.rows), abs=3)


def _table(rows: int, dim: int) -> tuple[EmbeddingBagCollection, FrequencyCounts, RowBlocks]:
    config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
    torch.manual_seed(0)
    counts = FrequencyCounts({"t": _skewed(rows)}, {"f": 1}, 1000)
    blocks = blocks_from_counts(counts, [config], num_blocks=2, scope="table")
    return EmbeddingBagCollection(tables=[config]), counts, blocks


def test_energies_are_those_of_the_blocks_rows_by_their_look_ups() -> None:
    collection, counts, blocks = _table(60, 3)
    energies = rounding_energies(collection, blocks, counts, bits=[3, 32])
    assert energies.bits == (0, 3, 32)
    found, of_row = energies.tables["t"], blocks.routings["t"].all_blocks()
    weight = collection.embedding_bags["t"].weight.detach()
    for block in range(2):
        mine = of_row == block
        weights = counts.counts["t"][mine].double().clamp(min=UNSEEN_WEIGHT).tolist()
        for column in range(3):
            scale, shift = float(found.scale[block, column, 1]), int(found.shift[block, column, 1])
            expected = rounding_error_reference(weight[mine, column].tolist(), weights, scale, shift, 3)
            assert float(found.energy[block, column, 1]) == pytest.approx(expected, rel=1e-6)
    assert found.energy[..., 0].unique().tolist() == [1.0]
    assert found.energy[..., 2].unique().tolist() == [0.0]


def test_a_table_with_nan_is_refused_by_name_and_block() -> None:
    collection, counts, blocks = _table(60, 3)
    block = int(blocks.routings["t"].block_of(torch.tensor([11])))
    collection.embedding_bags["t"].weight.data[11, 2] = torch.nan
    with pytest.raises(ValueError, match=rf"table 't': expected finite values, got nan in block {block}, column 2"):
        rounding_energies(collection, blocks, counts)


def test_counts_of_another_size_are_refused() -> None:
    collection, _, blocks = _table(60, 3)
    counts = FrequencyCounts({"t": torch.ones(59, dtype=torch.int64)}, {"f": 1}, 59)
    with pytest.raises(ValueError, match="table 't': expected counts of num_embeddings=60 rows, got 59"):
        rounding_energies(collection, blocks, counts)
