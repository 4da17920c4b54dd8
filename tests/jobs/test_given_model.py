"""`dnis search --from` and `--weights`: the search of a model that is trained already."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dnis_torchrec.jobs.given_model import GivenModel
from dnis_torchrec.jobs.progress import _StopRequest
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.jobs.train_job import TrainJob, run_train
from dnis_torchrec.training.checkpoint import CheckpointFolder
from dnis_torchrec.training.loop import SearchInterrupted
from dnis_torchrec.training.settings import Saving
from tests.searched_runs import quick_job
from tests.tiny import make_recipe

pytestmark = pytest.mark.usefixtures("no_images")
IDENTITY = {"recipe": "tests.tiny:demo", "seed": 0, "embedding_dim": None}


@pytest.fixture(scope="module")
def trained(gloo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `dnis train`."""
    out = tmp_path_factory.mktemp("trained") / "run"
    run_train(TrainJob(recipe="tests.tiny:demo", data=None, out=out, epochs=2))
    return out


@pytest.fixture(scope="module")
def searched(gloo, no_images, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that began with it."""
    out = tmp_path_factory.mktemp("searched") / "run"
    run_search(quick_job(out, given=GivenModel(run=trained)))
    return out


def stop_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    asked = iter(range(10**6))
    patch.setattr(_StopRequest, "is_requested", lambda self: next(asked) == steps)


def test_a_search_goes_on_from_what_was_trained(trained: Path, searched: Path) -> None:
    before, head = RunFolder(trained).read_head(), RunFolder(searched).read_head()
    assert [record["phase"] for record in head["history"]][:2] == ["given", "ramp"]
    best = before["history"][before["best_epoch"]]
    assert head["history"][0]["selection_loss"] == pytest.approx(best["selection_loss"], abs=1e-6)
    assert head["configuration"]["trained_epochs"] == before["best_epoch"] + 1
    assert head["configuration"]["given"] == f"run folder {trained}"
    assert RunFolder(searched).scheme().compression("packed") >= 4


def test_a_finished_search_gives_what_plain_training_left_it(trained: Path, searched: Path, tmp_path: Path) -> None:
    """A run of another size begins with the very same weights, and one that begins with that again."""
    own, again = make_recipe().model, make_recipe().model
    epochs = GivenModel(run=trained).fill_(own, IDENTITY, 60)
    assert GivenModel(run=searched).fill_(again, IDENTITY, 60) == epochs
    for name, value in own.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_an_interrupted_search_gives_it_too_once_plain_training_is_over(gloo, tmp_path: Path) -> None:
    early, late = tmp_path / "early", tmp_path / "late"
    for out, steps in ((early, 5), (late, 22)):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, steps)
            with pytest.raises(SearchInterrupted):
                run_search(quick_job(out))
    model = make_recipe().model
    assert GivenModel(run=late).fill_(model, IDENTITY, 60) == 1
    saved = load_file(next(Path(CheckpointFolder(late / "checkpoints").path_of(10)).glob("rank0.*")))
    tables = model.sparse_arch.embedding_bag_collection.embedding_bags
    assert all(torch.equal(saved[f"table/{name}@0,0"], tables[name].weight) for name in tables)
    with pytest.raises(
        ValueError, match=f"^run folder {early}: expected a search whose plain training is over, got one"
    ):
        GivenModel(run=early).fill_(model, IDENTITY, 60)


def test_weights_in_a_file_are_taken_for_trained(trained: Path, tmp_path: Path) -> None:
    """As is said of them: as long as plain training may be, or ten epochs."""
    given = GivenModel(weights=trained / "model.safetensors")
    run_search(quick_job(tmp_path / "run", given=given))
    head, before = RunFolder(tmp_path / "run").read_head(), RunFolder(trained).read_head()
    best = before["history"][before["best_epoch"]]
    assert head["history"][0]["selection_loss"] == pytest.approx(best["selection_loss"], abs=1e-6)
    assert head["configuration"]["trained_epochs"] == 1  # no longer than --epochs
    assert given.fill_(make_recipe().model, IDENTITY, 60) == 10


def test_a_stopped_search_goes_on_with_the_same_model_alone(trained: Path, searched: Path, tmp_path: Path) -> None:
    job = quick_job(tmp_path / "run", given=GivenModel(run=trained))
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 14)
        with pytest.raises(SearchInterrupted):
            run_search(job)
    resumed = dataclasses.replace(job, saving=Saving(resume=True))
    with pytest.raises(
        ValueError, match=r"expected a run with these settings, got given run folder .* instead of None"
    ):
        run_search(dataclasses.replace(resumed, given=None))
    run_search(resumed)
    for name in ("model", "scheme", "alpha"):
        found = (tmp_path / "run" / f"{name}.safetensors").read_bytes()
        assert found == (searched / f"{name}.safetensors").read_bytes(), name


def without_a_table(run: Path) -> GivenModel:
    tensors = load_file(run / "model.safetensors")
    del tensors["sparse_arch.embedding_bag_collection.embedding_bags.user.weight"]
    save_file(tensors, run / "weights.safetensors")
    return GivenModel(weights=run / "weights.safetensors")


def with_fewer_rows(run: Path) -> GivenModel:
    tensors = load_file(run / "model.safetensors")
    key = "sparse_arch.embedding_bag_collection.embedding_bags.user.weight"
    save_file(tensors | {key: tensors[key][:30].clone()}, run / "weights.safetensors")
    return GivenModel(weights=run / "weights.safetensors")


def of(run: Path, **changes: object) -> GivenModel:
    head = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(head | changes))
    return GivenModel(run=run)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            without_a_table,
            r"^weights .*: expected the names of the model's own parameters, got 1 missing, such as .*user",
        ),
        (with_fewer_rows, r"^weights .*user\.weight: expected shape \(40, 8\), got \(30, 8\)"),
        (
            lambda run: of(run, recipe="tests.tiny:other"),
            r"a run of recipe 'tests\.tiny:demo', as .*, got 'tests\.tiny:o",
        ),
        (lambda run: of(run, seed=3), "expected a run of seed 0, as this search is, got 3; repeat the run's own"),
        (lambda run: of(run, embedding_dim=4), "expected a run of embedding_dim None, as this search is, got 4"),
        (lambda run: of(run, status="searching", kind="searched"), "expected a search with checkpoints, got none"),
        (
            lambda run: GivenModel(run=run.parent),
            "expected a folder written by `dnis train` or `dnis search`, got no run",
        ),
        (lambda run: GivenModel(run=run / "none"), "expected a folder written by `dnis train` .*, got no such folder"),
        (lambda run: GivenModel(weights=run / "none"), "^weights .*none: expected a file, got none"),
    ],
)
def test_what_does_not_fit_is_named_before_a_run_is_made(
    trained: Path, tmp_path: Path, given: Callable[[Path], GivenModel], message: str
) -> None:
    shutil.copytree(trained, tmp_path / "given")
    with pytest.raises(ValueError, match=message):
        run_search(quick_job(tmp_path / "out", given=given(tmp_path / "given")))
    assert not (tmp_path / "out").exists()


def test_a_search_does_not_write_over_the_run_it_begins_with(trained: Path) -> None:
    with pytest.raises(ValueError, match=r"^--from: expected another folder than --out, got .*; choose another --out"):
        quick_job(trained, given=GivenModel(run=trained), overwrite=True)


def test_one_model_is_given() -> None:
    with pytest.raises(ValueError, match=r"^--from: expected no --weights, got both; give one of them"):
        GivenModel.of(Path("run"), Path("weights"))
    assert GivenModel.of(None, None) is None
