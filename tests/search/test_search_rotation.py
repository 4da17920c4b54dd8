"""Rotation within a search: once, behind plain training's best epoch; a resumed search turns nothing twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search import search as search_module
from dnis_torchrec.search.search import SearchOutcome, search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.training import shard as sharding_of_training
from dnis_torchrec.training.loop import EpochRecord, SearchEvents
from dnis_torchrec.training.settings import Saving
from examples.models import FactorizationMachine
from tests.reference import second_moment_reference
from tests.tiny import make_collection, make_recipe

CPU = torch.device("cpu")
SHORT = SearchSettings(num_blocks=3, epochs=2, patience=1)


def factorization_machine(optimizer: str) -> Recipe:
    """The tiny recipe's data with a model that may be rotated."""
    torch.manual_seed(0)
    return replace(make_recipe(optimizer=optimizer), model=FactorizationMachine(make_collection()))


def run(
    folder: Path, events: SearchEvents | None = None, *, resume: bool = False, optimizer: str = "adam"
) -> SearchOutcome:
    """A search of a second."""
    recipe, saving = factorization_machine(optimizer), Saving(resume=resume)
    return search(recipe, 10, folder, CPU, settings=SHORT, events=events, saving=saving)


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """After every rotation: the second moment of all tables together, as often as their rows are looked up."""
    seen: list[torch.Tensor] = []
    rotate_ = search_module.rotate_

    def watched(model, counts, *rest):
        found = rotate_(model, counts, *rest)
        shards = [shard for own in collections(model).values() for shard in local_shards(own)]
        tables = [shard.weight.double() for shard in shards]
        seen.append(second_moment_reference(tables, [counts.counts[shard.table] for shard in shards]))
        return found

    monkeypatch.setattr(search_module, "rotate_", watched)
    return seen


class Killed(BaseException):
    """As if the process had ended here."""


def test_tables_turn_once_however_often_the_search_goes_on(gloo, tmp_path: Path, turned: list[torch.Tensor]) -> None:
    """Into axes of their own; and again to see what plain training, compressed, is worth, and to return it.

    That is what comes out here: of two tables that are multiplied so few columns are left that none has its partner.
    """
    whole = run(tmp_path / "whole")
    assert whole.origin == search_module.COMPRESSED
    assert len(turned) == 3
    for moment in turned:
        torch.testing.assert_close(moment, moment.diag().diag(), atol=1e-4, rtol=0)
        assert bool((moment.diag().diff() < 1e-4).all())
    turned.clear()

    def kill(record: EpochRecord, _: object, is_last: bool) -> None:
        if is_last and record.phase == "plain":
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "broken", SearchEvents(on_alpha=kill))
    assert not turned
    resumed = run(tmp_path / "broken", resume=True)
    assert len(turned) == 3
    assert resumed.history == whole.history
    own, others = whole.model.state_dict(), resumed.model.state_dict()
    assert [name for name in own if not torch.equal(own[name], others[name])] == []


def test_rows_of_tables_to_be_turned_are_never_cut(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner may cut columns of any table otherwise, and rotation would be refused in the middle of the search."""
    asked = []

    def watched(*arguments, constraints, **options):
        asked.append({kind for constraint in constraints.values() for kind in constraint.sharding_types})
        raise Killed

    monkeypatch.setattr(sharding_of_training, "make_sharding_plan", watched)
    with pytest.raises(Killed):
        run(tmp_path, optimizer="rowwise_adagrad")
    assert asked == [set(sharding_of_training.WHOLE_ROWS)]
    monkeypatch.setattr(search_module, "rotation_groups", lambda *_: [])  # as of a model that cannot be turned
    with pytest.raises(Killed):
        run(tmp_path, optimizer="rowwise_adagrad")
    assert "column_wise" in asked[1]
