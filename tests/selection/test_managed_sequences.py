"""Unpooled tables with managed collisions: wrapped, merged, compressed, exported and served, by remapped rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.compress import compress, measure_
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.selection.plan import shard_model
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.torchrec_inputs import remapped
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingCollection
from dnis_torchrec.serving.sequences import ServedEmbeddingCollection
from tests.managed import (
    BATCHES,
    CPU,
    ITEMS,
    NEW,
    ROWS,
    USERS,
    SequenceModel,
    check_served_as_exported,
    predictions,
    rows_of,
    trained,
    zch,
)

TABLES = [USERS, ITEMS]


def sequences() -> SequenceModel:
    return trained(zch, SequenceModel)


def blocks_of(model: SequenceModel) -> RowBlocks:
    counts = count_frequencies([remapped(model, own.sparse_features) for own in BATCHES], TABLES)
    expected = {table.name: [0] * ROWS for table in TABLES}
    for own in BATCHES:
        for feature, rows in rows_of(model, own.sparse_features).items():
            for row in rows:
                expected["user" if feature == "user" else "item"][row] += 1
    assert {name: of_table.tolist() for name, of_table in counts.counts.items()} == expected
    return blocks_from_counts(counts, TABLES, num_blocks=4)


def test_a_wrapped_model_keeps_its_ids_and_comes_back() -> None:
    model, plain = sequences(), sequences()
    prepare_(model, blocks_of(model))
    wrapper = model.tables._embedding_module
    assert isinstance(wrapper, SoftSelectionEmbeddingCollection)
    before = rows_of(model, BATCHES[0].sparse_features)
    predictions(model.train(), NEW)  # remapping stands still
    assert rows_of(model, BATCHES[0].sparse_features) == before
    torch.testing.assert_close(predictions(model.eval()), predictions(plain))
    with torch.no_grad():
        wrapper.alpha.of(16).uniform_(0.5, 1)
    soft = predictions(model)
    assert not torch.allclose(soft, predictions(plain), atol=1e-3)
    assert merge_(model) is model
    assert type(model.tables._embedding_module) is EmbeddingCollection
    torch.testing.assert_close(predictions(model), soft)
    predictions(model.train(), NEW)
    assert rows_of(model.eval(), NEW[0].sparse_features) != rows_of(plain, NEW[0].sparse_features)  # it goes on


def test_a_row_that_is_evicted_and_reused_begins_in_the_cold_block() -> None:
    model = sequences()
    predictions(model.train(), NEW)
    reused = {row for own in NEW for row in rows_of(model.eval(), own.sparse_features)["user"]} - {ROWS - 1}
    blocks = blocks_of(model)  # of data that reads none of the new ids
    of_rows = blocks.routings["user"].all_blocks()[sorted(reused)]
    assert len(reused) > 3
    assert (of_rows == blocks.routings["user"].num_blocks - 1).sum() >= len(reused) - 1


def test_compressed_exported_and_served_it_maps_raw_ids_as_the_model_did(tmp_path: Path) -> None:
    model, given = sequences(), sequences()
    scheme = measure_(model, BATCHES, loss=nn.MSELoss()).allocate(compression=4).scheme
    served = check_served_as_exported(model, scheme, tmp_path / "artifact", SequenceModel(zch))
    assert isinstance(served.tables._embedding_module, ServedEmbeddingCollection)
    before = predictions(given)
    found = compress(given, BATCHES, loss=nn.MSELoss(), compression=4)
    assert found.compression >= 4
    torch.testing.assert_close(predictions(given), predictions(served) + found.output_shift)
    assert float((predictions(given) - before).std() / before.std()) < 0.2


def test_a_served_one_gives_embeddings_in_their_order() -> None:
    model = sequences()
    features = KeyedJaggedTensor(
        ["history", "item", "user"], BATCHES[0].sparse_features.values()[:4], lengths=torch.tensor([2, 1, 1])
    )
    found, _ = model.tables(features)
    compress(model, BATCHES, loss=nn.MSELoss(), compression=1.5)
    served, _ = model.tables(features)
    assert list(served) == list(found)
    assert [len(own.values()) for own in served.values()] == [len(own.values()) for own in found.values()]


def test_sharding_refuses_it_by_name_while_it_learns_ids(gloo: dist.ProcessGroup) -> None:
    with pytest.raises(NotImplementedError, match="one in ManagedCollisionEmbeddingCollection 'tables'"):
        shard_model(sequences(), CPU)
