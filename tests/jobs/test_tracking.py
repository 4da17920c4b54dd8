"""A finished search in MLflow and Weights & Biases, in whose place stand modules that write down what they are told."""

from __future__ import annotations

import json
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.jobs.tracking import TRACKERS, TrackedRun, check_trackers, track
from tests.searched_runs import quick_job

CURVES = [(3, {"loss/train": 0.5}), (6, {"loss/train": 0.4})]
RUN = TrackedRun(name="x20", settings={"seed": 0}, history=CURVES, metrics={"test/auc": 0.8})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both packages, as far as anybody can tell."""
    for name in TRACKERS:
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for function in ("start_run", "log_params", "log_metrics", "init"):
            setattr(module, function, MagicMock())
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(**{name: sys.modules[name] for name in TRACKERS})


def test_mlflow_gets_name_settings_curves_and_test_metrics(installed: SimpleNamespace) -> None:
    track(["mlflow"], RUN)
    installed.mlflow.start_run.assert_called_once_with(run_name="x20")
    installed.mlflow.start_run.return_value.__exit__.assert_called_once()
    installed.mlflow.log_params.assert_called_once_with({"seed": 0})
    told = [(call.args, call.kwargs) for call in installed.mlflow.log_metrics.call_args_list]
    assert told == [
        (({"loss/train": 0.5},), {"step": 3}),
        (({"loss/train": 0.4},), {"step": 6}),
        (({"test/auc": 0.8},), {}),
    ]
    installed.wandb.init.assert_not_called()


def test_wandb_gets_name_settings_curves_and_test_metrics(installed: SimpleNamespace) -> None:
    track(["wandb"], RUN)
    installed.wandb.init.assert_called_once_with(name="x20", config={"seed": 0})
    run = installed.wandb.init.return_value.__enter__.return_value
    assert [(call.args, call.kwargs) for call in run.log.call_args_list] == [
        (({"loss/train": 0.5},), {"step": 3}),
        (({"loss/train": 0.4},), {"step": 6}),
    ]
    run.summary.update.assert_called_once_with({"test/auc": 0.8})


def test_what_is_not_known_or_not_installed_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    assert "wandb" not in sys.modules
    told = "--log-to: expected the package wandb, got an environment without it; install it: pip install wandb"
    with pytest.raises(ValueError, match=told):
        quick_job(tmp_path / "run", log_to=("wandb",))
    with pytest.raises(ValueError, match=r"known names: 'mlflow', 'wandb'"):
        check_trackers(["visdom"])


@pytest.mark.usefixtures("gloo", "no_images")
def test_a_search_tells_its_trackers_when_it_has_finished_and_outlives_them(
    installed: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    installed.wandb.init.side_effect = RuntimeError("no network")
    with caplog.at_level(logging.WARNING):
        run_search(quick_job(tmp_path / "mine", log_to=("wandb", "mlflow")))
    assert "run mine is not in wandb: no network" in caplog.text
    head = json.loads((tmp_path / "mine" / "run.json").read_text())
    installed.mlflow.start_run.assert_called_once_with(run_name="mine")
    (settings,) = installed.mlflow.log_params.call_args.args
    assert (settings["recipe"], settings["compression"]) == ("tests.tiny:demo", 4.0)
    *curves, last = installed.mlflow.log_metrics.call_args_list
    assert [call.kwargs["step"] for call in curves] == [entry["step"] for entry in head["history"]]
    assert last.args[0] == {f"test/{name}": value for name, value in head["metrics"].items()}
