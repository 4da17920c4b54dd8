"""The search as methods of a comparison: each within its bytes, exported, loaded, and the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rivals.methods import METHODS, MethodTask, NotApplicableError, SizeNotMetError, trained_scheme
from benchmarks.rivals.methods.method import MethodResult
from benchmarks.rivals.streams import train_on_validation
from dnis_torchrec.allocation.settings import NUM_BLOCKS
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training.shard import process_group
from examples.paper.blocks import global_blocks
from examples.paper.search import PaperSettings
from tests import tiny

RATIO = 3.0


def run(
    name: str,
    folder: Path,
    ratio: float = RATIO,
    *,
    max_epochs: int = 4,
    trials: int | None = 1,
    searches: DataSplits | None = None,
    trained: Path | None = None,
    **changes: Any,
) -> MethodResult:
    def build(dim: int | None) -> Recipe:
        return replace(tiny.demo(None, seed=0, embedding_dim=dim), **changes)

    with process_group() as device:
        task = MethodTask(
            build=build,
            build_for_search=None if searches is None else lambda dim: replace(build(dim), data=searches),
            compression=ratio,
            seed=0,
            device=device,
            folder=folder,
            max_epochs=max_epochs,
            trials=trials,
            trained=trained,
        )
        return METHODS[name](task)


@pytest.mark.parametrize("name", ["dnis", "dnis-paper", "dnis-unrolled"])
def test_a_result_is_within_its_bytes_and_nearly_uses_them(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path)
    dense = result.scheme.served_bytes("dense_fp32")
    assert 0.85 * dense / RATIO < result.embedding_bytes() <= dense / RATIO
    tables = dict(result.model.named_parameters())
    stored = sum(int((tables[k] != 0).sum()) for k in tables if ".embedding_bags." in k)
    rounded_to_zero = result.scheme.parameters - stored
    assert 0 < rounded_to_zero < 0.1 * stored if name == "dnis" else rounded_to_zero == 0


def test_a_search_trains_plainly_for_no_more_epochs_than_a_training_may(tmp_path: Path) -> None:
    result = run("dnis", tmp_path, max_epochs=2)
    assert result.settings["trained_epochs"] == 2
    assert result.settings["epochs"] == 1 + 1 + 2  # one to see gradients, a ramp of a few steps, a release of two
    assert result.settings["origin"] == "search"


def test_a_search_begins_with_the_training_that_cells_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[MethodTask] = []
    train = trained_scheme.train_scheme
    monkeypatch.setattr(trained_scheme, "train_scheme", lambda task, *rest: trained.append(task) or train(task, *rest))
    shared, results = tmp_path / "shared", {}
    for name, folder in (("dnis", None), ("dense", shared), ("compress", shared), ("dnis", shared)):
        work = tmp_path / f"{name}{len(results)}"
        work.mkdir()
        results[name, folder] = run(name, work, trained=folder)
    assert len(trained) == 1 + 1  # alone, and once for all that share
    alone, found = results["dnis", None], results["dnis", shared]
    assert (found.settings, found.selection_loss) == (alone.settings, alone.selection_loss)
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, alone.model.state_dict()[name])
    assert found.seconds > results["dense", shared].seconds  # which took part in it, whoever trained


def test_the_paper_prunes_single_values_and_never_releases(tmp_path: Path) -> None:
    result = run("dnis-paper", tmp_path)
    assert result.form == "csr_fp32"
    assert not all(table.is_block_structured for table in result.scheme.tables.values())


@pytest.mark.parametrize(
    ("name", "scope"),
    [("dnis", "table"), ("random", "global"), ("nis-me", "table"), ("dnis-paper", "global"), ("mde", "global")],
)
def test_tables_have_blocks_of_their_own_but_for_the_paper_and_for_popularity(
    name: str, scope: str, tmp_path: Path
) -> None:
    recipe = tiny.demo(None)
    tables = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), tables)
    num_blocks = PaperSettings.num_blocks if name == "dnis-paper" else NUM_BLOCKS
    form = global_blocks if scope == "global" else blocks_from_counts
    expected = form(counts, tables, num_blocks=num_blocks)
    num_kept = 0
    for table in run(name, tmp_path, 1.5 if name == "mde" else RATIO, max_epochs=3).scheme.tables.values():
        blocks = table.routing.all_blocks()
        kept = blocks < table.routing.num_blocks  # rows of blocks that lost all columns are in none
        assert torch.equal(blocks[kept], expected.routings[table.name].all_blocks()[kept])
        num_kept += int(kept.sum())
    assert num_kept > 0


def test_unrolled_is_another_gradient(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first, second = run("dnis-paper", tmp_path / "first"), run("dnis-unrolled", tmp_path / "second")
    assert first.selection_loss != second.selection_loss


@pytest.mark.parametrize("name", ["nis-se", "nis-me"])
def test_a_scheme_is_found_without_the_split_that_its_weights_then_train_on(name: str, tmp_path: Path) -> None:
    plain = tiny.demo(None)
    both = train_on_validation(plain)
    results = []
    for folder, recipe in ((tmp_path / "alone", plain), (tmp_path / "both", both)):
        folder.mkdir()
        results.append(run(name, folder, searches=plain.data, data=recipe.data))
    alone, with_validation = results
    assert with_validation.selection_loss != alone.selection_loss
    for table, found in alone.scheme.tables.items():
        assert torch.equal(with_validation.scheme.tables[table].retained, found.retained)


@pytest.mark.parametrize(
    ("name", "told"),
    [("dnis", r"compression: expected at most [\d.]+ for these"), ("dnis-paper", "embedding_bytes: expected at least")],
)
def test_a_size_out_of_reach_is_told(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(SizeNotMetError, match=rf"^{told}"):
        run(name, tmp_path, ratio=60)


def test_what_no_method_foresees_is_no_reason_to_leave_a_row_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another_backend(*_: object, **__: object) -> None:
        raise NotImplementedError("Could not run 'fbgemm::dense_embedding' with arguments from the 'CUDA' backend")

    monkeypatch.setattr("benchmarks.rivals.methods.dnis.search", of_another_backend)
    with pytest.raises(NotImplementedError, match="Could not run") as raised:
        run("dnis", tmp_path)
    assert not isinstance(raised.value, NotApplicableError)


def test_unrolled_says_that_fused_tables_are_not_for_it(tmp_path: Path) -> None:
    with pytest.raises(NotApplicableError, match="fused"):
        run("dnis-unrolled", tmp_path, table_optimizer="rowwise_adagrad")
