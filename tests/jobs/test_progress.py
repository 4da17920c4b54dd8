"""The bar of a search or training: its phase, the epoch of how many, samples a second and the time left."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial

import pytest
import torch
from torchrec.datasets.utils import Batch
from tqdm import tqdm

from dnis_torchrec.jobs import progress
from dnis_torchrec.training.loop import EpochRecord
from tests.tiny import make_recipe


class Terminal(io.StringIO):
    """What is written, as if to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    shown = Terminal()
    monkeypatch.setattr(progress, "tqdm", partial(tqdm, file=shown))
    return shown


def test_the_first_moment_says_what_is_being_done(terminal: Terminal) -> None:
    with progress.progress_bar():
        assert "reading the data" in terminal.getvalue()


def test_a_phase_tells_its_epoch_rate_and_time_left(terminal: Terminal) -> None:
    with progress.progress_bar() as bar:
        steps = progress._Steps(bar)
        steps.begin("plain", 3, 40, may_stop=True)
        assert "plain, epoch 1 of at most 3" in terminal.getvalue()
        for number in range(5):
            steps.take(10, 0.5, "alpha density 1.000")
            assert f"plain, epoch {number // 4 + 1} of at most 3" in str(bar)
        assert "50.0/120" in str(bar)
        assert "samples/s, loss 0.5000, alpha density 1.000" in str(bar)
        steps.begin("ramp", 1.5, 40, done=20, may_stop=False)
        assert "ramp, epoch 1 of 2" in str(bar)
        assert "20.0/60.0" in str(bar)


def test_a_plain_training_counts_the_samples_that_its_steps_take(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, batches = make_recipe(), [Batch(None, None, torch.zeros(size)) for size in (4, 4, 2)]
    recipe = replace(recipe, data=replace(recipe.data, train=batches), stop_on="auc")
    with progress.plain_progress(recipe, 10, 2) as (events, train):
        for _ in range(2):
            for _ in train:
                events.on_step(0.25)
        events.on_epoch(EpochRecord(epoch=1, step=6, train_loss=0.25, selection_loss=-0.75))
    assert "epoch 1: train loss 0.2500, selection auc 0.7500" in terminal.getvalue() + capsys.readouterr().err
    assert "training, epoch 2 of at most 2: 100%" in terminal.getvalue()
    assert "20.0/20.0" in terminal.getvalue()
