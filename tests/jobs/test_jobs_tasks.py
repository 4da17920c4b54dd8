"""A recipe of two tasks through every command: what is trained, compressed, searched, compared, evaluated, verified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dnis_torchrec.artifact.verify import verify
from dnis_torchrec.jobs.artifact_jobs import recipe_of_artifact, run_evaluate, run_export
from dnis_torchrec.jobs.compress_job import CompressJob, run_compress
from dnis_torchrec.jobs.report_job import run_report
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.jobs.train_job import TrainJob, run_train
from tests.searched_runs import quick_job, without_images
from tests.tiny_tasks import METRICS

CPU = torch.device("cpu")
RECIPE = "tests.tiny_tasks:two_tasks"


@pytest.fixture(scope="module")
def trained(gloo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks") / "run"
    run_train(TrainJob(recipe=RECIPE, data=None, out=out, epochs=3))
    return out


def test_a_trained_model_has_stopped_on_its_metric(trained: Path) -> None:
    head = RunFolder.open(trained).read_head()
    assert set(head["metrics"]) == METRICS
    assert (head["primary_metric"], head["higher_is_better"]) == ("click_auc", True)
    losses = [record["selection_loss"] for record in head["history"]]
    assert head["best_epoch"] == losses.index(min(losses))
    assert -1 <= min(losses) < -0.5
    assert run_evaluate(trained, None)["metrics"] == pytest.approx(head["metrics"], abs=1e-6)


def test_what_is_compressed_serves_both_predictions(trained: Path) -> None:
    out = trained.parent / "compressed"
    content = run_compress(
        CompressJob(run=trained, recipe=None, data=None, out=out, compressions=(3.0,), num_blocks=2, baselines=False)
    )
    before, after = content.rows
    assert set(before.metrics) == set(after.metrics) == METRICS
    assert after.compression >= 3
    assert after.metrics["click_auc"] == pytest.approx(before.metrics["click_auc"], abs=0.05)
    assert "click_auc" in (out / "report.html").read_text()
    found = verify(out / "x3", make_recipe=lambda: recipe_of_artifact(out / "x3", None, recipe=RECIPE))
    assert not found.failures
    assert {finding.subject for finding in found.findings if finding.check == "metric"} == {
        f"packed, {name}" for name in METRICS
    }


def test_a_search_keeps_both_predictions(gloo, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with without_images():
        (row,) = run_search(quick_job(out, recipe=RECIPE, compression=3.0))
    assert set(row.metrics) == METRICS
    assert row.compression >= 3
    head = RunFolder.open(out).read_head()
    assert all(-1 <= loss < 0 for loss in head["selection_losses"].values())
    assert (head["stop_on"], head["stop_on_higher_is_better"]) == ("click_auc", True)
    artifact = run_export(out, tmp_path / "artifact")
    assert run_evaluate(artifact, None, recipe=RECIPE)["metrics"] == pytest.approx(row.metrics, abs=1e-5)
    with without_images():
        page = run_report(out).read_text()
    assert "rating_mse" in page
    assert "selection click_auc" in page
    assert "selection loss" not in page
