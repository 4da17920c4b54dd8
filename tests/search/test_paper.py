"""The paper's search: sizes of single values, first and second order, what it refuses before training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dnis_torchrec import TrainTask
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search import loop as search_loop
from dnis_torchrec.search import started as started_module
from dnis_torchrec.search.budget import Size, SizeOutOfReachError
from dnis_torchrec.search.hypergradient import UnrollingError
from dnis_torchrec.search.loop import SearchEvents, SearchInterrupted
from dnis_torchrec.search.paper import PaperOutcome, PaperSettings, search_as_published
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.settings import Saving
from tests.tiny import make_recipe

CPU = torch.device("cpu")


def settings_of(size: Size | None = None, **others: object) -> PaperSettings:
    """A search of a second."""
    size = size or Size(compression=4, form="csr_fp32")
    return PaperSettings(size=size, **{"epochs": 3, "num_blocks": 3, "patience": 2, **others})


@pytest.mark.parametrize(
    ("size", "is_unrolled"),
    [(Size(compression=3.5, form="csr_fp32"), False), (Size(embedding_bytes=700, form="csr_fp32"), True)],
    ids=["compression", "bytes, unrolled"],
)
def test_alpha_learns_and_the_smallest_values_are_dropped(gloo, tmp_path: Path, size: Size, is_unrolled: bool) -> None:
    recipe, seen = make_recipe(), []
    outcome = search_as_published(
        recipe, settings_of(size, is_unrolled=is_unrolled), tmp_path, CPU, SearchEvents(on_epoch=seen.append)
    )
    got, asked = outcome.scheme.served_bytes("csr_fp32"), size.num_bytes(outcome.scheme.dense_parameters)
    assert asked - 8 <= got <= asked  # to a value
    assert tuple(seen) == outcome.history
    assert [(record.phase, record.step) for record in seen] == [
        ("warm-up", 10),
        ("both levels", 20),
        ("both levels", 30),
    ]
    assert seen[0].alpha_mean == 1 > seen[1].alpha_mean > seen[2].alpha_mean
    shards = [shard for own in collections(outcome.model).values() for shard in local_shards(own)]
    assert sum(int(shard.weight.count_nonzero()) for shard in shards) == outcome.scheme.parameters
    metrics = evaluate(TrainTask(outcome.model, recipe.loss), recipe.data.test, recipe.loss, CPU)
    assert 0 < metrics["loss"] < 1


def test_the_warm_up_is_never_the_best_and_patience_does_not_run_in_it(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, records = [0.1, 0.5, 0.4, 0.6, 0.7], []
    monkeypatch.setattr(search_loop, "selection_loss", lambda *_: losses[len(records)])
    events = SearchEvents(on_epoch=records.append)
    outcome = search_as_published(make_recipe(), settings_of(epochs=9), tmp_path, CPU, events)
    assert [record.selection_loss for record in outcome.history] == losses
    assert outcome.best_epoch == 2


@pytest.mark.parametrize("is_unrolled", [False, True])
def test_an_interrupted_search_equals_an_uninterrupted_one(gloo, tmp_path: Path, is_unrolled: bool) -> None:
    def run(name: str, stop_at: int | None = None) -> PaperOutcome | None:
        steps: list[float] = []
        events = SearchEvents(on_step=lambda *_: steps.append(0), should_stop=lambda: len(steps) == stop_at)
        settings, saving = settings_of(is_unrolled=is_unrolled), Saving(resume=True)
        try:
            return search_as_published(make_recipe(), settings, tmp_path / name, CPU, events, saving)
        except SearchInterrupted:
            return None

    whole = run("whole")
    assert [run("broken", stop_at) for stop_at in (10, 5)] == [None, None]
    resumed = run("broken")
    assert resumed.history == whole.history
    own, others = resumed.model.state_dict(), whole.model.state_dict()
    assert [name for name in own if not torch.equal(own[name], others[name])] == []


def fused() -> Recipe:
    return make_recipe(optimizer="rowwise_adagrad")


def test_what_cannot_be_searched_is_refused_before_training(gloo, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(UnrollingError, match="supported for one-step unrolling is the dense compute kernel"):
        search_as_published(fused(), settings_of(is_unrolled=True), tmp_path, CPU)
    monkeypatch.setattr(started_module, "shard", None)  # what begins to train would fail of another error
    with pytest.raises(SizeOutOfReachError, match=r"compression: expected at most \d+\.\d+ for these tables, got 5000"):
        search_as_published(make_recipe(), settings_of(Size(compression=5000, form="csr_fp32")), tmp_path, CPU)
    with pytest.raises(ValueError, match="embedding_bytes: expected at most 1664, what the uncompressed tables take"):
        search_as_published(make_recipe(), settings_of(Size(embedding_bytes=1665, form="csr_fp32")), tmp_path, CPU)
    with pytest.raises(NotImplementedError, match="form: supported for single values are"):
        search_as_published(make_recipe(), settings_of(Size(compression=4)), tmp_path, CPU)


@pytest.mark.parametrize(("field", "value", "least"), [("epochs", 1, 2), ("patience", 0, 1)])
def test_settings_out_of_range_are_refused(field: str, value: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected at least {least}, got {value}"):
        replace(settings_of(), **{field: value})
