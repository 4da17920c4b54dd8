"""`dnis train`: the plain model as a run that later commands read, or refuse; whole or not there at all."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.jobs import train_job
from dnis_torchrec.jobs.artifact_jobs import run_evaluate, run_export
from dnis_torchrec.jobs.report_job import run_report
from dnis_torchrec.jobs.run_folder import RunFolder, RunWriteError
from dnis_torchrec.jobs.train_job import TrainJob, run_train
from dnis_torchrec.training.pipeline import NonFiniteError
from tests.searched_runs import files_of
from tests.tiny import ROWS

L2 = 0.02


def job(out: Path, **fields: Any) -> TrainJob:
    return TrainJob(**{"recipe": "tests.tiny:demo", "data": None, "out": out, "embedding_l2": L2, "epochs": 4} | fields)


@pytest.fixture(scope="module")
def run(gloo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("train") / "runs" / "run"
    run_train(job(out))
    return out


def test_the_run_holds_what_made_it_and_one_row(run: Path) -> None:
    head, [row] = json.loads((run / "run.json").read_text()), json.loads((run / "report.json").read_text())["rows"]
    assert (head["status"], head["kind"], head["recipe"], head["seed"]) == ("finished", "trained", "tests.tiny:demo", 0)
    assert head["configuration"] == {"embedding_l2": L2, "max_epochs": 4, "patience": 3}
    assert [record["step"] for record in head["history"]] == [10, 20, 30, 40]
    best = min(head["history"], key=lambda record: record["selection_loss"])
    assert head["best_epoch"] == best["epoch"]
    assert (row["method"], row["compression"], row["parameters"]) == ("uncompressed", 1.0, 8 * sum(ROWS.values()))
    assert row["bytes"] == {"dense_fp32": 4 * 8 * sum(ROWS.values())}
    assert row["metrics"] == head["metrics"]
    assert {path.name for path in run.iterdir()} == {
        *("run.json", "report.json"),
        *(f"{name}.safetensors" for name in ("counts", "scheme", "model")),
    }


def test_what_is_exported_and_evaluated_is_the_model_that_was_trained(run: Path, tmp_path: Path) -> None:
    forms = ("mixed_dimension", "dense_int8")
    artifact = run_export(run, tmp_path / "artifact", forms=forms)
    reported = json.loads((run / "run.json").read_text())["metrics"]
    for path in (run, artifact):
        found = run_evaluate(path, None)
        assert found["metrics"] == pytest.approx(reported, abs=1e-6)
        assert found["compression"] == 4 * 416 / found["bytes"]["mixed_dimension"]
        assert (found["parameters"], found["bytes"]["dense_fp32"]) == (416, 4 * 416)


def test_settings_of_the_job_take_the_place_of_the_recipes(gloo, tmp_path: Path, monkeypatch) -> None:
    used: set[tuple[float, int]] = set()
    forward = TrainTask.forward

    def watched(task: TrainTask, batch: Any) -> Any:
        dims = {table.embedding_dim for table in task.model.sparse_arch.embedding_bag_collection._embedding_bag_configs}
        used.update((task.embedding_l2, dim) for dim in dims if task.training)
        return forward(task, batch)

    monkeypatch.setattr(TrainTask, "forward", watched)
    row = run_train(job(tmp_path / "run", embedding_l2=0.5, embedding_dim=12, epochs=1))
    assert used == {(0.5, 12)}
    assert row.parameters == 12 * sum(ROWS.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embedding_l2": -1.0}, r"embedding_l2: expected a finite number >= 0, got -1\.0; leave it out for the"),
        ({"embedding_l2": float("nan")}, "embedding_l2: expected a finite number >= 0, got nan"),
        ({"embedding_dim": 0}, "embedding_dim: expected an integer >= 1, got 0; leave it out for the recipe's"),
        ({"epochs": 0}, "epochs: expected an integer >= 1, got 0"),
        ({"patience": 0}, "patience: expected an integer >= 1, got 0"),
        ({"seed": -1}, "seed: expected an integer >= 0, got -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        job(tmp_path / "run", **fields)


@pytest.mark.parametrize("read", [lambda run, out: run_report(run)])
def test_what_wants_blocks_and_alpha_refuses_a_training(
    run: Path, tmp_path: Path, read: Callable[[Path, Path], object]
) -> None:
    before = files_of(run)
    requirement = "expected a run of `dnis search`, got a trained one; `dnis evaluate` and `dnis export` take it"
    with pytest.raises(ValueError, match=f"^run folder {run}: {requirement}"):
        read(run, tmp_path)
    assert files_of(run) == before
    assert not list(tmp_path.iterdir())


def test_a_run_that_stands_there_is_kept_until_the_new_one_is_whole(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run_train(job(out, epochs=1))
    with pytest.raises(ValueError, match=r"expected a folder that does not exist, got an existing one; choose another"):
        run_train(job(out))
    before = files_of(tmp_path)

    def interrupted(*_: object, folder: Path, **__: object) -> None:
        (folder / "best.rank0.safetensors").touch()
        raise KeyboardInterrupt

    def diverged(*_: object, **__: object) -> None:
        raise NonFiniteError("epoch 0, step 1: expected a finite loss")

    for failed, error in ((interrupted, KeyboardInterrupt), (diverged, NonFiniteError)):
        with monkeypatch.context() as patch:
            patch.setattr(train_job, "train_plainly", failed)
            with pytest.raises(error):
                run_train(job(out, overwrite=True))
        assert files_of(tmp_path) == before

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_rows", full)
        with pytest.raises(RunWriteError, match="expected to write the trained run, got"):
            run_train(job(out, overwrite=True, epochs=1))
    assert {name: text for name, text in files_of(tmp_path).items() if name != "run/lock"} == before
    run_train(job(out, overwrite=True, epochs=2))
    assert len(RunFolder.open(out).read_head()["history"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_search_does_not_go_on_with_a_training(run: Path) -> None:
    head = RunFolder.open(run).read_head()
    with pytest.raises(ValueError, match="expected a run with these settings, got kind trained instead of searched"):
        RunFolder(run).check_same({name: value for name, value in head.items() if name != "kind"})
