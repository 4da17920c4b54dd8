"""A search that is interrupted goes on as if nothing had been: every loss, weight, optimizer state and alpha."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search import ramp
from dnis_torchrec.search.search import SearchOutcome, search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.training.checkpoint import CheckpointFolder
from dnis_torchrec.training.loop import EpochRecord, SearchEvents, SearchInterrupted
from dnis_torchrec.training.settings import Saving
from tests.tiny import make_recipe

CPU = torch.device("cpu")
SIZE = 10.0
SHORT = SearchSettings(num_blocks=3, epochs=2, patience=2)


class Dropping(nn.Module):
    """A model that draws random numbers in every step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(0.2)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        return self.model(self.dropout(dense_features), sparse_features)


class Counted:
    """Batches in an order that its epoch decides, as those of the examples have."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches, self.epoch = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = torch.randperm(len(self._batches), generator=torch.Generator().manual_seed(epoch))
        return iter([self._batches[place] for place in order.tolist()])


class Noisy:
    """Batches in an order of its own every epoch and with noise, drawn from torch's random numbers as users' do."""

    def __init__(self, batches: list[Batch]) -> None:
        self._loader = DataLoader(batches, batch_size=None, shuffle=True)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            yield dataclasses.replace(batch, dense_features=batch.dense_features + torch.rand(1))


def shuffled(optimizer: str) -> Recipe:
    recipe = make_recipe(optimizer=optimizer)
    recipe = dataclasses.replace(recipe, model=Dropping(recipe.model))
    kind = Noisy if optimizer == "adam" else Counted
    train, validation = kind(recipe.data.train.batches), kind(recipe.data.validation.batches)
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, train=train, validation=validation))


def run(
    folder: Path,
    optimizer: str,
    *,
    stop_at: int | None = None,
    kill_behind: str | None = None,
    every: int = 0,
    resume: bool = False,
    **settings: float,
) -> tuple[SearchOutcome | None, list[float]]:
    """A search, and the loss of each of its lower steps; None for the outcome of one that was stopped."""
    losses: list[float] = []

    def kill(record: EpochRecord, _: object, is_last: bool) -> None:
        if is_last and record.phase == kill_behind:
            raise Killed

    events = SearchEvents(
        on_step=lambda loss, density: losses.append(loss), should_stop=lambda: len(losses) == stop_at, on_alpha=kill
    )
    saving = Saving(checkpoint_every=every, resume=resume)
    torch.manual_seed(99 if resume else 7)  # a new process has other random numbers
    try:
        return found_by(shuffled(optimizer), folder, events, saving, **settings), losses
    except SearchInterrupted:
        return None, losses


def found_by(
    recipe: Recipe,
    folder: Path,
    events: SearchEvents | None = None,
    saving: Saving | None = None,
    *,
    compression: float = SIZE,
    **settings: object,
) -> SearchOutcome:
    """A search of a second."""
    own = dataclasses.replace(SHORT, **settings)
    return search(recipe, compression, folder, CPU, settings=own, events=events, saving=saving)


def assert_same(first: SearchOutcome, second: SearchOutcome) -> None:
    """Bit for bit."""
    assert first.history == second.history
    assert first.best_epoch == second.best_epoch
    own, others = first.model.state_dict(), second.model.state_dict()
    assert [name for name in own if not torch.equal(own[name], others[name])] == []
    assert all(torch.equal(first.alpha[dim], second.alpha[dim]) for dim in first.alpha)
    assert (first.origin, first.selection_losses) == (second.origin, second.selection_losses)
    for name, table in first.scheme.tables.items():
        for field in ("bits", "scale", "shift"):
            assert torch.equal(getattr(table, field), getattr(second.scheme.tables[name], field))


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_an_interrupted_search_equals_an_uninterrupted_one(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """Stopped within plain training, where it is over, between the stages of a ramp, and within the release."""
    monkeypatch.setattr(ramp, "LEAST_STEPS", 2)
    whole, expected = run(tmp_path / "whole", optimizer)
    folder, seen = tmp_path / "broken", []
    for stop_at in (13, 7, 3, 12):
        outcome, losses = run(folder, optimizer, stop_at=stop_at, resume=bool(seen))
        assert outcome is None
        seen += losses
    outcome, losses = run(folder, optimizer, resume=True)
    assert seen + losses == expected
    assert_same(outcome, whole)


@pytest.mark.parametrize("phase", ["plain", "ramp"])
def test_a_search_goes_on_where_a_phase_is_over_and_the_next_has_not_begun(gloo, tmp_path: Path, phase: str) -> None:
    """As after SIGKILL there."""
    whole, expected = run(tmp_path / "whole", "adam")
    with pytest.raises(Killed):
        run(tmp_path / "broken", "adam", kill_behind=phase)
    outcome, losses = run(tmp_path / "broken", "adam", resume=True)
    assert losses == expected[len(expected) - len(losses) :]
    assert len(losses) == len(expected) - {"plain": 20, "ramp": 28}[phase]
    assert_same(outcome, whole)


def test_steps_since_the_last_checkpoint_are_repeated_alike(gloo, tmp_path: Path) -> None:
    """As after SIGKILL, which saves nothing: the state on disk is that of some step before."""
    whole, expected = run(tmp_path, "adam", every=4)
    kept = CheckpointFolder(tmp_path).steps()
    assert len(kept) <= 6  # the last two, and the best ones of three phases, of the last one two
    latest = tmp_path / "latest.json"
    for step in kept[::2]:
        lower = json.loads((tmp_path / f"step-{step:08d}" / "manifest.json").read_text())["values"]["lower_steps"]
        latest.write_text(json.dumps({"checkpoint": f"step-{step:08d}"}))
        outcome, losses = run(tmp_path, "adam", every=4, resume=True)
        assert losses == expected[lower:]
        assert_same(outcome, whole)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_a_search_whose_steps_are_done_ends_as_before(gloo, tmp_path: Path, optimizer: str) -> None:
    """Its last step is the last one of an epoch of the data: the first attempt has read on, into the next one."""
    whole, _ = run(tmp_path, optimizer, ramp_share=1.0)
    assert whole.history[-1].step % 10 == 0
    again, losses = run(tmp_path, optimizer, resume=True, ramp_share=1.0)
    assert losses == []
    assert_same(again, whole)


def test_without_resume_a_search_begins_anew(gloo, tmp_path: Path) -> None:
    _, losses = run(tmp_path, "adam", stop_at=5)
    assert run(tmp_path, "adam", stop_at=5)[1] == losses


def test_resume_without_a_checkpoint_begins_the_search(gloo, tmp_path: Path) -> None:
    assert len(run(tmp_path, "adam", stop_at=5, resume=True)[1]) == 5


def test_a_stop_names_the_latest_checkpoint_that_was_written(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk: none, also where an earlier search has left some; that of the epoch before; that resumed from."""

    def stop_on_a_full_disk(full_from: int, stop_at: int, *, resume: bool = False) -> str:
        steps: list[float] = []

        def add(folder: CheckpointFolder, step: int, *arguments: object) -> tuple[str, int]:
            if step >= full_from:
                raise OSError(errno.ENOSPC, "No space left on device")
            return kept_add(folder, step, *arguments)

        events = SearchEvents(on_step=lambda *_: steps.append(0), should_stop=lambda: len(steps) == stop_at)
        monkeypatch.setattr(CheckpointFolder, "add", add)
        with pytest.raises(SearchInterrupted) as caught:
            found_by(make_recipe(), tmp_path, events, Saving(on_save_error="continue", resume=resume))
        return str(caught.value)

    kept_add = CheckpointFolder.add
    nothing = "epoch 0, lower step 2: stopped on request; nothing could be saved"
    earlier = f"stopped on request; this state could not be saved, --resume goes on from {tmp_path}/step-00000010"
    assert stop_on_a_full_disk(0, 2) == nothing
    assert not CheckpointFolder(tmp_path).steps()
    assert stop_on_a_full_disk(11, 13) == f"epoch 1, lower step 13: {earlier}"
    assert CheckpointFolder(tmp_path).latest() == tmp_path / "step-00000010"
    assert stop_on_a_full_disk(11, 2, resume=True) == f"epoch 1, lower step 12: {earlier}"
    assert stop_on_a_full_disk(0, 2) == nothing


@pytest.mark.parametrize("split", ["train", "validation", "selection", "test"])
def test_other_data_in_as_many_batches_is_refused(gloo, tmp_path: Path, split: str) -> None:
    """However little of it is other: two samples of one batch have their labels swapped."""
    stop = SearchEvents(should_stop=lambda: True)
    with pytest.raises(SearchInterrupted):
        found_by(make_recipe(), tmp_path, stop)
    other = make_recipe()
    labels = getattr(other.data, split).batches[1].labels
    labels[[int(labels.argmin()), int(labels.argmax())]] = torch.tensor([1.0, 0.0])
    message = (
        rf"checkpoint .*step-\d+: expected one of this data, got one of other samples in: {split}; resume with the"
    )
    with pytest.raises(ValueError, match=message):
        found_by(other, tmp_path, saving=Saving(resume=True))
    same = make_recipe()
    getattr(same.data, split).batches.reverse()  # the order of an epoch is the stream's own affair
    with pytest.raises(SearchInterrupted):
        found_by(same, tmp_path, stop, Saving(resume=True))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [({"compression": 9}, r"compression 9, got 10"), ({"ramp_share": 0.5, "patience": 4}, "patience 4, got 2")],
)
def test_another_configuration_is_refused_by_its_first_field(
    gloo, tmp_path: Path, changes: dict[str, object], difference: str
) -> None:
    with pytest.raises(SearchInterrupted):
        found_by(make_recipe(), tmp_path, SearchEvents(should_stop=lambda: True))
    message = rf"checkpoint .*step-\d+: expected one of a search with {difference}.*; resume with the configuration of"
    with pytest.raises(ValueError, match=message):
        found_by(make_recipe(), tmp_path, saving=Saving(resume=True), **changes)


@pytest.mark.parametrize("field", [None, "patience"])
def test_a_checkpoint_that_an_earlier_version_wrote_is_accepted(gloo, tmp_path: Path, field: str | None) -> None:
    """Without a configuration, or without one of the fields of today."""
    stop = SearchEvents(should_stop=lambda: True)
    with pytest.raises(SearchInterrupted):
        found_by(make_recipe(), tmp_path, stop, compression=np.int64(4))
    file = tmp_path / "step-00000001" / "manifest.json"
    manifest = json.loads(file.read_text())
    search_values = manifest["values"]["search"]
    assert search_values["configuration"]["compression"] == 4
    if field is None:
        del search_values["configuration"]
    else:
        del search_values["configuration"][field]
    file.write_text(json.dumps(manifest))
    with pytest.raises(SearchInterrupted):
        found_by(make_recipe(), tmp_path, stop, Saving(resume=True), compression=4)
