"""Rotation within a search: once, after the warm-up, only where it is wanted; a resumed search turns nothing twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dnis_torchrec import Size
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search import search as search_module
from dnis_torchrec.search.alpha_optimizer import AlphaOptimizer
from dnis_torchrec.search.config import SearchConfig
from dnis_torchrec.search.loop import SearchInterrupted
from dnis_torchrec.search.search import Saving, SearchEvents, SearchOutcome, search
from dnis_torchrec.training import sharded as sharding_of_training
from examples.models import FactorizationMachine
from tests.tiny import make_collection, make_recipe

CPU = torch.device("cpu")
SHORT = {"num_blocks": 3, "warm_up_epochs": 2, "ramp_epochs": 3, "release_epochs": 2}


def factorization_machine(optimizer: str) -> Recipe:
    """The tiny recipe's data with a model that may be rotated."""
    torch.manual_seed(0)
    return replace(make_recipe(optimizer=optimizer), model=FactorizationMachine(make_collection()))


def run(
    folder: Path,
    events: SearchEvents | None = None,
    *,
    rotate: bool = True,
    resume: bool = False,
    optimizer: str = "adam",
) -> SearchOutcome:
    """A search of a second."""
    config = SearchConfig(size=Size(compression=3), rotate=rotate, **SHORT)
    return search(factorization_machine(optimizer), config, folder, CPU, events, Saving(resume=resume))


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lower steps done at each rotation."""
    seen: list[int] = []

    def watched(model, counts, optimizer):
        seen.append(int(max(float(state["step"]) for state in optimizer.state.values())))
        return rotate_(model, counts, optimizer)

    rotate_ = search_module.rotate_
    monkeypatch.setattr(search_module, "rotate_", watched)
    return seen


def test_tables_turn_once_at_the_end_of_the_warm_up(
    gloo, tmp_path: Path, rotations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And alpha learns what their columns carry then, the first ones most."""
    scaled = []

    def watched(alpha_optimizer: AlphaOptimizer, scales: dict[int, Tensor]) -> None:
        scaled.append((len(rotations), scales))
        scale_columns(alpha_optimizer, scales)

    scale_columns = AlphaOptimizer.scale_columns
    monkeypatch.setattr(AlphaOptimizer, "scale_columns", watched)
    records = []
    outcome = run(tmp_path / "rotated", SearchEvents(on_epoch=records.append))
    assert rotations == [records[SHORT["warm_up_epochs"] - 1].step]
    ((rotations_before, scales),) = scaled
    assert rotations_before == 1
    for dim, scale in scales.items():
        occurrences = outcome.blocks.per_alpha_row(dim, outcome.blocks.occurrences)
        carried = occurrences @ scale.to(occurrences).square()
        assert bool((carried.diff() < 0).all())
    run(tmp_path / "not_rotated", rotate=False)
    assert len(rotations) == len(scaled) == 1


def test_a_resumed_search_equals_an_uninterrupted_one(gloo, tmp_path: Path, rotations: list[int]) -> None:
    whole = run(tmp_path / "whole")
    steps = 0

    def count(loss: float, density: float) -> None:
        nonlocal steps
        steps += 1

    per_epoch = whole.history[0].step
    for stop_at in (SHORT["warm_up_epochs"] * per_epoch, SHORT["warm_up_epochs"] * per_epoch + 1):
        events = SearchEvents(on_step=count, should_stop=lambda at=stop_at: steps >= at)
        with pytest.raises(SearchInterrupted):
            run(tmp_path / "broken", events, resume=steps > 0)
    resumed = run(tmp_path / "broken", resume=True)
    assert len(rotations) == 2
    assert resumed.history == whole.history
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)


def test_rows_of_tables_to_be_turned_are_never_cut(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner may cut columns of any table otherwise, and rotation would be refused in the middle of the search."""
    asked = []

    def watched(*arguments, constraints, **options):
        asked.append({kind for constraint in constraints.values() for kind in constraint.sharding_types})
        return make_sharding_plan(*arguments, constraints=constraints, **options)

    make_sharding_plan = sharding_of_training.make_sharding_plan
    monkeypatch.setattr(sharding_of_training, "make_sharding_plan", watched)
    for rotate in (True, False):
        run(tmp_path / f"{rotate}", rotate=rotate, optimizer="rowwise_adagrad")
    assert asked[0] == set(sharding_of_training.WHOLE_ROWS)
    assert "column_wise" in asked[1]
