"""Tables that must not be touched (`Recipe.leave_alone`), through search, compress, compare, export and verify."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.axes import rotation_groups, with_axes_
from dnis_torchrec.allocation.compress import compress, packed_collections
from dnis_torchrec.artifact.verify import verify
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.cli.commands import run_evaluate, run_export, run_search
from dnis_torchrec.cli.settings import EvaluateCommand, ExportCommand
from dnis_torchrec.data.over_ranks import count_training_data
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.scheme import PACKED
from dnis_torchrec.search.prune import SizeOutOfReachError
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from examples.paper.search import PaperSettings, search_as_published
from tests.searched_runs import quick_search
from tests.tiny import ROWS, make_recipe

CPU = torch.device("cpu")
SIZE = 2.5
ALONE = "genre"
BYTES = 4 * 8 * ROWS[ALONE]
"""Of that table in float32."""
DENSE = 4 * 8 * sum(ROWS.values())


def genre_alone(data: Path | None = None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The tiny recipe as the command line finds it, one of its two tables left alone."""
    del data
    return replace(make_recipe(seed=seed, embedding_dim=embedding_dim), leave_alone=(ALONE,))


def rows_of(collection: nn.Module, name: str) -> torch.Tensor:
    """Every row of a table, looked up one by one."""
    names = list(ROWS)
    lengths = torch.zeros(len(names), ROWS[name], dtype=torch.int64)
    lengths[names.index(name)] = 1
    return collection(KeyedJaggedTensor(names, torch.arange(ROWS[name]), lengths=lengths.flatten()))[name]


def table(model: nn.Module, name: str = ALONE) -> torch.Tensor:
    return next(s.weight for c in collections(model).values() for s in local_shards(c) if s.table == name)


def test_a_search_leaves_a_table_in_float32_and_counts_its_bytes(gloo, tmp_path: Path) -> None:
    recipe = genre_alone()
    found = search(recipe, SIZE, tmp_path, CPU, settings=SearchSettings(num_blocks=3, epochs=2, patience=2))
    own, other = found.scheme.tables[ALONE], found.scheme.tables["user"]
    assert list(found.scheme.tables) == list(ROWS)
    assert own.bits.tolist() == [[32] * 8]
    assert int(other.bits.max()) <= 8
    assert own.served_bytes(PACKED) < BYTES + 64
    served = sum(table.served_bytes(PACKED) for table in found.scheme.tables.values())
    assert SIZE <= found.scheme.compression(PACKED) == DENSE / served
    blocks = found.blocks
    alone = found.alpha[8][blocks.first_alpha_row(ALONE)]
    assert bool((alone == 1).all())
    assert bool((found.alpha[8][blocks.first_alpha_row("user")] != 1).any())
    for packed in packed_collections(found.model, found.scheme).values():
        assert torch.equal(rows_of(packed, ALONE), table(found.model))


def test_the_tables_of_its_group_keep_their_axes() -> None:
    model = with_axes_(genre_alone().model)
    assert [set(group.tables) for group in rotation_groups(model)] == [{"user", "genre"}]
    assert rotation_groups(model, [ALONE]) == []


def test_compress_keeps_every_bit_of_a_table_left_alone() -> None:
    recipe = genre_alone()
    before = table(recipe.model).clone()
    batches = recipe.data.train.batches
    with pytest.raises(ValueError, match=r"expected at most [0-9.]+ for these tables") as told:
        compress(genre_alone().model, batches, loss=recipe.loss, compression=100, leave_alone=[ALONE])
    most = float(str(told.value).partition("at most ")[2].split()[0])
    assert SIZE < most < DENSE / BYTES
    found = compress(recipe.model, batches, loss=recipe.loss, compression=most, leave_alone=[ALONE])
    assert found.compression >= most
    assert found.scheme.tables[ALONE].bits.tolist() == [[32] * 8]
    [served] = [module for module in recipe.model.modules() if type(module).__name__ == "PackedEmbeddingBagCollection"]
    assert torch.equal(rows_of(served, ALONE), before)
    with pytest.raises(ValueError, match=r"table of leave_alone 'gender': .* did you mean 'genre'"):
        compress(genre_alone().model, batches, loss=recipe.loss, leave_alone=["gender"])


def test_a_size_that_a_table_left_alone_does_not_leave_is_refused_before_training(gloo, tmp_path: Path) -> None:
    with pytest.raises(SizeOutOfReachError, match=r"^compression: expected at most [23]\.\d+ for these tables"):
        search(genre_alone(), 20.0, tmp_path, CPU)


def test_a_run_is_exported_and_verified_with_it_and_not_pruned(gloo, tmp_path: Path) -> None:
    run, artifact = tmp_path / "run", tmp_path / "artifact"
    spec = "tests.search.test_leave_alone:genre_alone"
    run_search(quick_search(run, compression=SIZE, recipe=spec))
    run_export(ExportCommand(run=run, out=artifact))
    of_run, served = (run_evaluate(EvaluateCommand(path=path, recipe=spec)) for path in (run, artifact))
    assert served["metrics"] == pytest.approx(of_run["metrics"], abs=1e-6)
    assert verify(artifact).failures == []
    with pytest.raises(NotImplementedError, match=r"^Recipe\.leave_alone: supported are recipes without"):
        search_as_published(genre_alone(), PaperSettings(), CPU)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("gendre",), r"table of Recipe\.leave_alone 'gendre': .* did you mean 'genre'"),
        (("user", "genre"), r"^Recipe\.leave_alone: expected a table beside those that are left alone, got all 2"),
    ],
)
def test_names_are_checked_with_the_recipe(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_recipe(), leave_alone=names)


def test_it_is_one_block_of_rows_as_they_stand(tmp_path: Path) -> None:
    recipe = make_recipe()
    tables = table_configs(recipe.model)
    counts = count_training_data(recipe.data, recipe.loss, tables)
    counts.counts[ALONE][3] = 0  # a row that was never seen, among others
    blocks = blocks_from_counts(counts, tables, num_blocks=3, leave_alone=[ALONE])
    plain = blocks_from_counts(counts, tables, num_blocks=3)
    assert blocks.routings[ALONE].boundaries.tolist() == [0, ROWS[ALONE]]
    assert int(blocks.seen_rows[ALONE]) == int((counts.counts[ALONE] > 0).sum())
    assert torch.equal(blocks.occurrences["user"], plain.occurrences["user"])
    blocks.save(tmp_path / "blocks.safetensors")
    assert RowBlocks.load(tmp_path / "blocks.safetensors").left_alone == {ALONE}
