"""``dnis.search(recipe)``: no process group, no folder, twice the same; prints as a few lines."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import dnis_torchrec as dnis
from dnis_torchrec.allocation import bits as table_sizes
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search import one_call
from dnis_torchrec.search.one_call import SearchResult
from dnis_torchrec.search.search import COMPRESSED, SEARCHED
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.training.evaluate import evaluate
from tests import tiny_tasks
from tests.tiny import ROWS, make_recipe

SHORT = SearchSettings(num_blocks=3, epochs=2, patience=2)
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


WITHOUT_A_GROUP = """
import sys
import dnis_torchrec as dnis
assert dnis.search is sys.modules["dnis_torchrec.search"]
assert "torch" not in sys.modules
import torch
from tests.search.test_one_call import SHORT
from tests.tiny import make_recipe

recipe = make_recipe()
for _ in range(2):
    torch.manual_seed(0)
    print(dnis.search(recipe, compression=10, settings=SHORT))
    assert not torch.distributed.is_initialized()
"""


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return make_recipe()


@pytest.fixture(scope="module")
def found(gloo, recipe: Recipe) -> SearchResult:
    return dnis.search(recipe, compression=10, settings=SHORT)


def test_the_same_call_gives_the_same_twice_and_leaves_no_process_group() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_GROUP], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) in (6, 8)  # with a word on what it gained, or without
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def test_a_task_of_ones_own_is_judged_by_its_metrics(gloo) -> None:
    own = dnis.search(tiny_tasks.make_recipe(), compression=4, settings=SHORT)
    assert set(own.metrics) == tiny_tasks.METRICS
    assert own.metric == "click_auc"


def test_the_recipe_stays_as_it_was(recipe: Recipe, found: SearchResult) -> None:
    assert found.model is not recipe.model
    for name, weight in make_recipe().model.state_dict().items():
        assert weight.equal(recipe.model.state_dict()[name]), name


def test_streams_count_their_epochs_anew() -> None:
    class Counting:
        epoch = 0

        def __iter__(self):
            self.epoch += 1
            return iter(())

    data = make_recipe().data
    counting = Counting()
    own = one_call._from_its_epoch(replace(data, train=counting))
    list(own.train)
    assert (counting.epoch, own.train.epoch) == (0, 1)


def test_it_meets_the_size_and_its_metrics_are_those_of_the_served_values(recipe: Recipe, found: SearchResult) -> None:
    assert 10 <= found.compression < 14
    assert found.metric == "auc"
    assert evaluate(TrainTask(found.model, recipe.loss), recipe.data.test, recipe.loss, CPU) == found.metrics


def test_it_can_be_exported(found: SearchResult, tmp_path: Path) -> None:
    collection = dnis.load(dnis.export(found.model, found.scheme, tmp_path / "artifact"))
    assert collection.embedding_bag_configs()[0].num_embeddings == ROWS["user"]


def test_it_prints_as_a_few_lines_and_no_tensors(found: SearchResult) -> None:
    lines = repr(found).splitlines()
    assert str(found) == repr(found)
    assert re.fullmatch(r"1\d\.\d\d times smaller: [\d,]+ bytes served; test auc 0\.\d{4}, loss 0\.\d{4}", lines[0])
    assert [line.split(":")[0] for line in lines[-2:]] == ["  user", "  genre"]
    assert not re.search("tensor|nan", repr(found))
    assert "tensor" not in repr(found.outcome)


def test_it_says_whether_the_search_gained_something(found: SearchResult) -> None:
    for origin, said in ((SEARCHED, False), (COMPRESSED, True)):
        of_origin = replace(found, outcome=replace(found.outcome, origin=origin))
        assert ("gained nothing" in repr(of_origin)) is said


def test_a_notebook_shows_a_table(found: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    page = found._repr_html_()
    assert page.count("<tr>") == 3
    assert "times smaller" in page
    assert found.allocation._repr_html_().count("<tr>") == 3
    scheme = replace(found.scheme, tables={"<user>": found.scheme.tables["user"]})
    assert "<th>&lt;user&gt;</th>" in table_sizes.sizes_as_html(scheme, ["a < b"])
    monkeypatch.setattr(table_sizes, "LISTED", 1)
    lines = table_sizes.sizes_as_text(found.scheme)
    assert [line.split(":")[0] for line in lines] == ["  user", "  1 other tables"]


def test_the_room_is_one_object_however_it_is_asked_for() -> None:
    import dnis_torchrec.search.settings as of_room

    assert dnis.search.settings is of_room
    assert dnis.search is sys.modules["dnis_torchrec.search"]


def test_a_size_is_refused_before_anything_is_copied() -> None:
    with pytest.raises(ValueError, match="compression: expected a finite number above 1, got 1"):
        dnis.search(None, compression=1)  # type: ignore[arg-type]


def test_several_ranks_are_sent_to_the_command(gloo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_call, "world_size_of", lambda: 2)
    with pytest.raises(NotImplementedError, match="search: supported is one process, got 2; run `torchrun"):
        dnis.search(make_recipe(), compression=10)


def test_a_regression_is_judged_by_its_error(gloo) -> None:
    recipe = replace(make_recipe(), loss=nn.MSELoss())
    assert "test mse " in repr(dnis.search(recipe, compression=10, settings=SHORT))
