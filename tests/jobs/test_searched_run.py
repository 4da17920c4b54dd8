"""`dnis search` from end to end: what a run says, serves and shows, and what it holds where a search gained nothing."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.jobs.artifact_jobs import run_evaluate, run_export
from dnis_torchrec.jobs.report_job import run_report
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.search import started as started_search
from dnis_torchrec.search.prune import SizeOutOfReachError
from dnis_torchrec.search.search import _Finishing
from dnis_torchrec.search.settings import SearchSettings
from tests.cli.test_cli import dnis
from tests.report.pages import chart
from tests.searched_runs import quick_job
from tests.tiny import ROWS

COMPRESSION, EMBEDDING_DIM = 10, 16
SETTINGS = ("--compression", COMPRESSION, "--embedding-dim", EMBEDDING_DIM, "--num-blocks", 3)


@pytest.fixture(scope="module")
def run(gloo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short search."""
    out = tmp_path_factory.mktemp("searched") / "run"
    short = ("--epochs", 2, "--patience", 1)
    done = dnis("search", "tests.tiny:demo", "--out", out, *SETTINGS, *short)
    assert done.returncode == 0, done.stderr
    for phase in ("plain", "ramp", "release"):
        assert re.search(rf"^epoch \d, {phase}: train loss [\d.]+, selection loss", done.stderr, re.MULTILINE), phase
    return out


def head_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def test_a_run_says_how_it_was_searched_and_which_of_two_it_holds(run: Path) -> None:
    head = head_of(run)
    settings = {part.name for part in fields(SearchSettings)}
    assert len(settings) <= 8
    assert head["configuration"].keys() == settings | {"compression", "embedding_l2"}
    assert head["configuration"]["compression"] == COMPRESSION
    losses = head["selection_losses"]
    assert losses.keys() == {"search", "compress"}
    assert head["origin"] == min(losses, key=losses.__getitem__) == "search"
    assert not any("gained nothing" in note for note in head["notes"])
    phases = [record["phase"] for record in head["history"]]
    assert phases == sorted(phases, key=("plain", "ramp", "release").index)
    assert len(set(phases)) == 3
    assert phases[head["best_epoch"]] == "release"
    assert head["history"][-1]["alpha_density"] < 1 == head["history"][0]["alpha_density"]


def test_its_rows_count_the_bytes_that_are_served(run: Path) -> None:
    found, *beside = json.loads((run / "report.json").read_text())["rows"]
    assert [row["method"] for row in beside] == ["uncompressed", "int8 rows", "int4 rows"]
    plain, int8, int4 = (row["metrics"]["loss"] for row in beside)
    assert 0 < abs(int8 - plain) < abs(int4 - plain) < 0.02
    dense = 4 * EMBEDDING_DIM * sum(ROWS.values())
    assert found["compression"] == dense / found["bytes"]["packed"]
    assert COMPRESSION <= found["compression"] < 1.2 * COMPRESSION


def test_its_artifact_serves_just_what_was_found(run: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    assert dnis("export", run, "--out", artifact).returncode == 0
    assert list(read_manifest(artifact)["forms"]) == ["packed"]
    assert run_evaluate(artifact, None)["metrics"] == pytest.approx(head_of(run)["metrics"], abs=1e-6)
    done = dnis("verify", artifact, "--against", run, "--no-measure")
    assert done.returncode == 0, done.stdout


def test_its_report_has_the_phases_and_speaks_of_bytes(run: Path) -> None:
    page = run_report(run).read_text()
    figure = page[page.index('id="figure-history"') :].partition("</figure>")[0]
    assert "a dotted line begins each phase" in figure
    assert [note["text"] for note in chart(page, "history")["layout"]["annotations"]] == ["plain", "ramp", "release"]
    assert "MB instead of 0.00333 MB" in page
    assert "bytes of the embedding tables" in page
    assert "tests.tiny:demo: bits found by search" in page


def test_its_curves_are_of_numbers_alone(run: Path) -> None:
    log = EventAccumulator(str(run / "tensorboard" / run.name))
    log.Reload()
    metrics = head_of(run)["metrics"]
    curves = {"loss/train", "loss/selection", "alpha/mean", "alpha/density"}
    assert set(log.Tags()["scalars"]) == curves | {f"test/{name}" for name in metrics}
    [last] = log.Scalars("test/auc")
    assert (last.value, last.step) == (pytest.approx(metrics["auc"]), head_of(run)["history"][-1]["step"])
    [told] = [tag for tag in log.summary_metadata if tag == "_hparams_/session_start_info"]
    assert b"tests.tiny" in log.SummaryMetadata(told).plugin_data.content
    assert len(log.Scalars("loss/selection")) == len(head_of(run)["history"])


def test_the_largest_compression_that_is_named_can_be_met(gloo, no_images, tmp_path: Path) -> None:
    job = quick_job(tmp_path / "run", compression=1e5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(started_search, "shard", None)  # nothing gets so far as to train
        with pytest.raises(
            SizeOutOfReachError, match=r"^compression: expected at most [\d.]+ for these tables"
        ) as told:
            run_search(job)
    assert not job.out.exists()
    named = float(re.search(r"at most ([\d.]+)", str(told.value)).group(1))
    (row,) = run_search(quick_job(tmp_path / "run", compression=named))
    assert row.compression >= named


def test_a_search_that_gained_nothing_says_so_and_holds_plain_training_compressed(
    gloo, no_images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = _Finishing._search

    def worse(finishing: _Finishing) -> Any:
        found, loss = searches(finishing)
        return found, loss + 1

    monkeypatch.setattr(_Finishing, "_search", worse)
    out = tmp_path / "run"
    (row,) = run_search(quick_job(out))
    head = head_of(out)
    assert head["origin"] == "compress"
    assert head["history"][head["best_epoch"]]["phase"] == "plain"
    searched, compressed = (f"{head['selection_losses'][name]:.5f}" for name in ("search", "compress"))
    note = (
        f"The search gained nothing: at the same bytes its selection loss is {searched}, that of plain training, "
        f"compressed, {compressed}. The latter is what this run holds."
    )
    assert note in head["notes"]
    assert note in run_report(out).read_text()
    assert RunFolder(out).scheme().has_codes
    assert row.compression >= 4
    run_export(out, tmp_path / "artifact", forms=("packed",))
    assert run_evaluate(tmp_path / "artifact", None)["metrics"] == pytest.approx(row.metrics, abs=1e-6)
