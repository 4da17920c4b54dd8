"""No method is left without the L2 penalty of its recipe: every step that learns has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchrec.datasets.utils import Batch

from benchmarks.rivals.methods import METHODS
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from examples.models import FactorizationMachine
from tests.comparison.test_baselines_methods import make_task
from tests.tiny import make_collection, make_recipe

L2 = 0.3


def build(embedding_dim: int | None) -> Recipe:
    """A short search of a model that may be rotated."""
    torch.manual_seed(0)
    model = FactorizationMachine(make_collection(embedding_dim or 16))
    return replace(make_recipe(), model=model, embedding_l2=L2)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"no-embeddings"}))
def test_every_method_trains_with_the_penalty_of_its_recipe(
    gloo, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[float] = set()
    forward = TrainTask.forward

    def watched(task: TrainTask, batch: Batch) -> object:
        if task.training:
            used.add(task.embedding_l2)
        return forward(task, batch)

    monkeypatch.setattr(TrainTask, "forward", watched)
    METHODS[name](make_task(tmp_path, 2.5, make=build, trials=1, max_epochs=3))
    assert used == {L2}
