"""A search of a model that is trained already: its weights stand until their axes are turned, then all goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dnis_torchrec.allocation.axes import with_axes_
from dnis_torchrec.cli.run import _weights_in
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search import search as search_module
from dnis_torchrec.search.search import SearchOutcome, search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.training.checkpoint import CheckpointFolder
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import SearchEvents, SearchInterrupted
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.weights import fill_
from tests.search.test_search_resume import assert_same
from tests.tiny import make_recipe

CPU = torch.device("cpu")
SHORT = SearchSettings(num_blocks=3, epochs=1, patience=1)
EPOCHS = 2


def found_by(
    recipe: Recipe,
    folder: Path,
    *,
    trained_epochs: int | None = EPOCHS,
    stop_at: int | None = None,
    resume: bool = False,
) -> tuple[SearchOutcome | None, list[float]]:
    """A search of a model that is taken for a trained one, None if stopped, and its lower steps' losses."""
    losses: list[float] = []
    events = SearchEvents(on_step=lambda loss, _: losses.append(loss), should_stop=lambda: len(losses) == stop_at)
    torch.manual_seed(99 if resume else 7)
    saving = Saving(resume=resume)
    try:
        found = search(
            *(recipe, 10.0, folder, CPU), settings=SHORT, trained_epochs=trained_epochs, events=events, saving=saving
        )
    except SearchInterrupted:
        return None, losses
    return found, losses


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_weights_stand_still_while_their_optimizers_see_gradients(gloo, tmp_path: Path, optimizer: str) -> None:
    recipe = make_recipe(optimizer=optimizer)
    before = {name: value.clone() for name, value in recipe.model.state_dict().items()}
    loss = evaluate(TrainTask(recipe.model, recipe.loss), recipe.data.selection, recipe.loss, CPU)["loss"]
    outcome, _ = found_by(recipe, tmp_path)
    assert outcome is not None
    first = outcome.history[0]
    assert (first.phase, first.step, first.selection_loss) == ("given", 10, pytest.approx(loss, abs=1e-6))
    assert [record.phase for record in outcome.history].count("given") == 1
    assert "plain" not in {record.phase for record in outcome.history}
    saved = load_file(next(Path(CheckpointFolder(tmp_path).path_of(10)).glob("rank0.*")))
    for name, value in before.items():
        table = name.split(".")[-2]
        key = f"table/{table}@0,0" if "embedding_bags" in name else f"model/model.{name}@{','.join('0' * value.dim())}"
        assert torch.equal(saved[key], value), name
    states = {"adam": ("exp_avg", "exp_avg_sq"), "rowwise_adagrad": ("momentum1",)}[optimizer]
    of_tables = [value for key, value in saved.items() if ("user" in key or "fused" in key) and f"/{states[0]}" in key]
    assert of_tables
    assert all(bool((value != 0).any()) for value in of_tables)
    folder = CheckpointFolder(tmp_path)
    before_last, last = (load_file(next(Path(folder.path_of(step)).glob("rank0.*"))) for step in folder.steps()[-2:])
    assert not torch.equal(before_last["table/user@0,0"], last["table/user@0,0"])  # weights move again


def test_ramp_and_release_are_as_long_as_after_so_much_plain_training(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = []
    begin = search_module._Plan.begin
    monkeypatch.setattr(
        search_module._Plan, "begin", lambda plan, phase, finished: (phases.append(phase), begin(plan, phase, finished))
    )
    found_by(make_recipe(), tmp_path, trained_epochs=8, stop_at=40)
    assert [(phase.name, phase.steps) for phase in phases] == [("given", 10), ("ramp", 24), ("release", 80)]


def test_a_long_epoch_is_not_gone_through(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "GIVEN_STEPS", 4)
    seen: list[int] = []
    events = SearchEvents(on_epoch=lambda record: seen.append(record.step), should_stop=lambda: len(seen) == 2)
    with pytest.raises(SearchInterrupted):
        search(make_recipe(), 10.0, tmp_path, CPU, settings=SHORT, trained_epochs=EPOCHS, events=events)
    assert seen == [4, 12]


def test_an_interrupted_search_equals_an_uninterrupted_one(gloo, tmp_path: Path) -> None:
    """Stopped while the weights stand still, and in the ramp. Whoever goes on needs the trained weights no more."""
    whole, expected = found_by(make_recipe(), tmp_path / "whole")
    seen: list[float] = []
    for stop_at in (4, 12):
        outcome, losses = found_by(make_recipe(seed=len(seen)), tmp_path / "broken", stop_at=stop_at, resume=bool(seen))
        assert outcome is None
        seen += losses
    outcome, losses = found_by(make_recipe(seed=5), tmp_path / "broken", resume=True)
    assert seen + losses == expected
    assert outcome is not None
    assert whole is not None
    assert_same(outcome, whole)
    with pytest.raises(ValueError, match="expected one of a search with trained_epochs 3, got 2; resume with the"):
        found_by(make_recipe(), tmp_path / "broken", trained_epochs=3, resume=True)


def test_a_model_has_been_trained_for_an_epoch_or_more(gloo, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^trained_epochs: expected an integer >= 1, got 0; None trains the model first"
    ):
        found_by(make_recipe(), tmp_path, trained_epochs=0)


def test_what_a_checkpoint_holds_once_or_as_one_number_is_found(gloo, tmp_path: Path) -> None:
    """A layer under two names, and a buffer of a single number."""

    def model() -> nn.Module:
        made = make_recipe().model
        made.again = made.over_arch
        made.register_buffer("seen", torch.tensor(3.0))
        return with_axes_(made)

    given, fresh = model(), model().requires_grad_(False)
    before = {name: value.clone() for name, value in given.state_dict().items()}
    found_by(replace(make_recipe(), model=given), tmp_path, stop_at=8)
    stored = _weights_in(fresh, Path(CheckpointFolder(tmp_path).path_of(8)))
    assert set(stored) == set(before)
    for value in fresh.state_dict().values():
        value.zero_()
    fill_(fresh, stored)
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())
