"""The whole search on two ranks: the same everywhere, close to that of one process, and read back by one process."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

from dnis_torchrec.artifact.export import drop_in_
from dnis_torchrec.cli.commands import run_evaluate, run_export, run_train
from dnis_torchrec.cli.settings import EvaluateCommand, ExportCommand
from dnis_torchrec.data.over_ranks import count_training_data
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.search import SearchOutcome
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.weights import load_state_, written_model
from tests.distributed.harness import RankResults, running_ranks
from tests.distributed.search_scenarios import (
    CPU,
    SIZE,
    diverges,
    found_by,
    given,
    hosts,
    jobs,
    recipe,
    refused,
    rotatable,
    rotated,
    stopped,
    train_command,
    trained,
    uneven,
    whole_search,
)
from tests.tiny import make_recipe

OPTIMIZERS = ("adam", "rowwise_adagrad")
SCENARIOS = {f"search {name}": partial(whole_search, name) for name in OPTIMIZERS} | {
    "jobs": jobs,
    "hosts": hosts,
    "trained": trained,
    "rotated": rotated,
    "given": given,
    "stopped": stopped,
    "uneven": uneven,
    "refused": refused,
    "diverges": diverges,
}


@pytest.fixture(scope="module")
def both(gloo, tmp_path_factory: pytest.TempPathFactory) -> tuple[RankResults, dict[str, SearchOutcome]]:
    """What two ranks found, and what this process alone found meanwhile."""
    with running_ranks(2, SCENARIOS, tmp_path_factory.mktemp("ranks")) as ranks:
        alone = {}
        for name in OPTIMIZERS:
            own = recipe(name)
            own.data.train.batches.pop()  # several ranks do not train on it
            alone[name] = found_by(own, tmp_path_factory.mktemp(name))
        alone["rotated"] = found_by(rotatable(), tmp_path_factory.mktemp("rotated"))
        alone["given"] = found_by(make_recipe(), tmp_path_factory.mktemp("given"), trained_epochs=2)
        ranks.wait()
        return ranks, alone


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_ranks_find_the_same(both, optimizer: str) -> None:
    first, second = both[0][f"search {optimizer}"]
    assert first["history"] == second["history"]
    assert first["metrics"] == second["metrics"]
    assert first["scheme"]["json"] == second["scheme"]["json"]
    for part in ("alpha", "counts"):
        assert [name for name in first[part] if not torch.equal(first[part][name], second[part][name])] == []
    tensors = first["scheme"]["tensors"]
    assert [name for name in tensors if not torch.equal(tensors[name], second["scheme"]["tensors"][name])] == []
    assert first["origin"] == second["origin"]
    assert first["selection_losses"] == second["selection_losses"]
    assert SIZE <= first["compression"] <= 1.4 * SIZE


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_counts_are_those_of_one_process(both, optimizer: str) -> None:
    """The batch of one sample, which no rank trains on, is counted too."""
    found, own = both[0][f"search {optimizer}"][0], recipe(optimizer)
    whole = count_training_data(own.data, own.loss, table_configs(own.model))
    assert found["num_samples"] == whole.num_samples == 641
    assert all(torch.equal(found["counts"][name], counts) for name, counts in whole.counts.items())


def assert_learnt_alike(history: list[dict], alone: SearchOutcome) -> None:
    for own, expected in zip(history[:4], alone.history, strict=False):
        for name in ("step", "train_loss", "selection_loss", "alpha_mean", "alpha_density"):
            assert own[name] == pytest.approx(getattr(expected, name), abs=1e-4), (expected.epoch, name)


@pytest.mark.parametrize("scenario", [*(f"search {optimizer}" for optimizer in OPTIMIZERS), "rotated"])
def test_no_rank_holds_what_another_holds(both, scenario: str) -> None:
    """Adam's tables neither, though FBGEMM has no fused kernel for it on a CPU."""
    per_rank = [own["held"] for own in both[0][scenario]]
    whole = {table.name: table.num_embeddings * table.embedding_dim for table in table_configs(recipe("adam").model)}
    held = [part for own in per_rank for part in own]
    assert {name: sum(size for table, size in held if table == name) for name in whole} == {
        name: size for name, size in whole.items()
    }
    assert all(per_rank)


def test_tables_and_what_adam_knows_of_them_turn_as_in_one_process(both) -> None:
    assert_learnt_alike(both[0]["rotated"][0]["history"], both[1]["rotated"])


def test_a_trained_model_is_searched_as_in_one_process_and_a_stop_heard_to_the_end(both) -> None:
    """Which one rank alone was asked for."""
    first, second = both[0]["given"]
    assert first["history"] == second["history"]
    assert [record["phase"] for record in first["history"]][:2] == ["given", "ramp"]
    assert_learnt_alike(first["history"], both[1]["given"])
    for own in (first, second):
        assert own["told"].startswith("SearchInterrupted: finishing, step ")
    assert first["told"] == second["told"]


def test_one_process_goes_on_with_a_search_of_two_ranks(both) -> None:
    """With Adam's states of spread tables, and an epoch of which two ranks have seen one part each."""
    for own in both[0]["stopped"]:
        assert own["outcome"].startswith("SearchInterrupted: epoch 2, lower step 24")
    folder = both[0].folder / "stopped"
    [named] = {own["refusal"].replace("rank 0: ", "") for own in both[0]["stopped"]}
    assert named.startswith(f"ValueError: checkpoint {folder}/step-")
    assert "expected one of this data, got one of other samples in: selection; resume" in named
    [named] = {own["refusal of a configuration"].replace("rank 0: ", "") for own in both[0]["stopped"]}
    assert named.startswith(f"ValueError: checkpoint {folder}/step-")
    assert "expected one of a search with patience 9, got" in named
    found = found_by(rotatable(), folder, saving=Saving(resume=True))
    assert len(found.history) == len(both[1]["rotated"].history)
    assert_learnt_alike([asdict(record) for record in found.history], both[1]["rotated"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_with_half_batches_learn_as_one_process_does(both, optimizer: str) -> None:
    """Not bit for bit, because sums are rounded in another order, and not for ever, because Adam enlarges that."""
    found, alone = both[0][f"search {optimizer}"][0], both[1][optimizer]
    assert found["steps_per_epoch"] == [10]
    assert_learnt_alike(found["history"], alone)
    assert found["compression"] == pytest.approx(alone.scheme.compression(), rel=0.05)


def whole_model(folder: Path) -> dict[str, torch.Tensor]:
    """What several ranks have written, read by one process."""
    return {name: stored.whole() for name, stored in written_model(folder).items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_read_by_one_process_has_the_same_metric(both, optimizer: str) -> None:
    ranks = both[0]
    expected = ranks[f"search {optimizer}"][0]["metrics"]
    own = recipe(optimizer)
    load_state_(own.model, whole_model(ranks.folder / f"model_{optimizer}"), "model")
    assert evaluate(TrainTask(own.model, own.loss), own.data.test, own.loss, CPU) == pytest.approx(expected, abs=1e-6)
    fresh = recipe(optimizer)
    drop_in_(fresh.model, ranks.folder / f"artifact_{optimizer}")
    assert evaluate(TrainTask(fresh.model, own.loss), own.data.test, own.loss, CPU) == pytest.approx(expected, abs=1e-6)


def test_a_job_on_two_ranks_writes_a_run_that_one_process_exports_and_evaluates(both, tmp_path: Path) -> None:
    first, second = both[0]["jobs"]
    assert first["metrics"] == second["metrics"]
    run = both[0].folder / "run"
    artifact = run_export(ExportCommand(run=run, out=tmp_path / "artifact"))
    for path in (run, artifact):
        assert run_evaluate(EvaluateCommand(path=path, recipe="tests.tiny:demo"))["metrics"] == pytest.approx(
            first["metrics"], abs=1e-6
        )
    parts = {"model.rank0.safetensors", "model.rank1.safetensors"}
    assert parts == {path.name for path in run.iterdir() if path.name.startswith("model")}
    for own, named in ((first, ""), (second, "rank 0: ")):
        assert own["again"].startswith(f"ValueError: {named}run folder {run}: expected a folder that does not exist")
    assert not (both[0].folder / "other").exists()


def test_ranks_that_see_other_folders_are_told_before_training(both) -> None:
    """As on two hosts whose --out is a disk of their own."""
    first, second = both[0]["jobs"]
    said = (
        "expected the folder that rank 0 writes to, on storage that all hosts have mounted, got no such folder; choose"
    )
    assert first["apart"].startswith("ValueError: rank 1: folder ")
    assert second["apart"].startswith(f"ValueError: folder {both[0].folder}/apart1 on ")
    assert said in first["apart"]
    assert said in second["apart"]
    assert not first["is_left"]  # a name that is free to use


def test_a_training_on_two_ranks_is_that_of_one_process(both, tmp_path: Path) -> None:
    first, second = both[0]["trained"]
    assert first["metrics"] == second["metrics"]
    run = both[0].folder / "trained"
    alone = run_train(train_command(tmp_path / "alone")).rows[0]
    assert first["metrics"] == pytest.approx(alone.metrics, abs=1e-3)
    artifact = run_export(ExportCommand(run=run, out=tmp_path / "artifact"))
    for path in (run, artifact):
        assert run_evaluate(EvaluateCommand(path=path, recipe="tests.tiny:demo"))["metrics"] == pytest.approx(
            first["metrics"], abs=1e-6
        )
    parts = {"model.rank0.safetensors", "model.rank1.safetensors"}
    assert parts == {path.name for path in run.iterdir() if path.name.startswith("model")}
    for own, named in ((first, ""), (second, "rank 0: ")):
        assert own["again"].startswith(f"ValueError: {named}run folder {run}: expected a folder that does not exist")
        assert "expected the folder that rank 0 writes to, on storage that all hosts have mounted" in own["apart"]


def test_hosts_that_share_no_disk_search_as_ranks_of_one_do(both) -> None:
    """Stopped, and gone on with from what each rank has put at the URL: bit for bit what ranks with one folder find."""
    first, second = both[0]["hosts"]
    for own in (first, second):
        assert "everything is saved in shared://" in own["stopped"]
        assert own["checkpoints"] >= 2
        assert own["again"] == [own["metrics"]]
        assert own["metrics"] == both[0]["jobs"][0]["metrics"]
    assert second["own"] == []
    assert {"run/run.json", "run/results.json", "run/scheme.safetensors"} <= set(first["own"])
    assert not [name for name in first["own"] if "checkpoints" in name or "rank" in name]
    stored, together = whole_model(both[0].folder / "stored"), whole_model(both[0].folder / "run")
    assert [name for name in together if not torch.equal(together[name], stored[name])] == []
    assert set(stored) == set(together)


def test_a_missing_rank_is_named(both, tmp_path: Path) -> None:
    whole = both[0].folder / "model_adam"
    shutil.copytree(whole / "model", tmp_path / "model")
    next((tmp_path / "model").glob("*/rank1.*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"rank1\..*: expected .* bytes, got no such file; put back what rank 1 wrote"):
        whole_model(tmp_path)


def test_what_one_rank_meets_stops_all_before_training(both) -> None:
    good, bad = both[0]["refused"]
    label = "selection batch 1: expected labels in [0, 1] for BCEWithLogitsLoss, got 5.0; map"
    assert bad["label"].startswith(f"ValueError: {label}")
    assert good["label"].startswith(f"ValueError: rank 1: {label}")
    recipe = "recipe 'tests.distributed.search_scenarios:broken': KeyError: 1\n  File "
    assert bad["recipe"].startswith(f"RecipeError: {recipe}")
    assert good["recipe"].startswith(f"ValueError: rank 1: {recipe}")
    assert good["start"] == "ZeroDivisionError: division by zero"
    assert bad["start"] == "RuntimeError: rank 0: division by zero"
    order = "expected the same batches in the same order on every rank"
    small = "expected at least one sample for each of 2 ranks"
    for own in (good, bad):
        assert own["order"].startswith(f"ValueError: train stream: {order}, got others; let")
        assert own["small"].startswith(f"ValueError: test batch 0: {small}, got 1; choose a batch size")
        assert own["size"].startswith("SizeOutOfReachError: compression: expected at most ")
        assert own["candidates"].startswith(
            "ValueError: test split, query 0: expected at least k=10 candidates, got 9; "
        )


def test_nan_on_one_rank_stops_all(both) -> None:
    good, bad = both[0]["diverges"]
    assert good["outcome"].startswith("NonFiniteError: lower step 24, rank 1: expected a finite loss")
    assert bad["outcome"].startswith("NonFiniteError: lower step 24")


def test_ranks_with_uneven_data_are_refused_before_training(both) -> None:
    """What would leave one rank waiting for another; batches that are only judged may be of any size."""
    samples, batches = "expected as many samples on every rank", "expected as many batches on every rank"
    expected = {
        "a smaller last batch": f"train batch 1: {samples}, got",
        "fewer batches": f"train stream: {batches}, got",
        "a batch of none": "train batch 1: expected at least one sample, got none; leave empty batches out",
        "a smaller batch of validation": f"validation batch 0: {samples}, got",
        "fewer batches of test": f"test stream: {batches}, got",
        "smaller batches of test": "SearchInterrupted: epoch 0, lower step 8",
    }
    for own in both[0]["uneven"]:
        assert {what: own[what] for what in expected if expected[what] not in own[what]} == {}
        assert [what for what, text in own.items() if not text.startswith("ValueError")] == ["smaller batches of test"]
