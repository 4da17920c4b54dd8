"""A finished search in MLflow or Weights & Biases, for who compares runs there; TensorBoard has
every run anyway."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dnis_torchrec.checks import check, check_known

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A search as trackers get it."""

    name: str
    settings: Mapping[str, Any]
    history: Sequence[tuple[int, Mapping[str, float]]]
    metrics: Mapping[str, float]


def check_trackers(names: Sequence[str]) -> None:
    """Refuses trackers that are not known or not installed."""
    for name in names:
        check_known("--log-to", name, TRACKERS)
        remedy = f"install it: pip install {name}"
        check(
            find_spec(name) is not None,
            "--log-to",
            f"the package {name}",
            "an environment without it",
            remedy,
        )


def track(names: Sequence[str], run: TrackedRun) -> None:
    """Tells trackers of a finished search. A tracker that fails is warned of: the run lies in its
    folder."""
    for name in names:
        try:
            TRACKERS[name](run)
        except Exception as error:  # a service that is away may raise anything
            logger.warning("run %s is not in %s: %s", run.name, name, error)


def _to_mlflow(run: TrackedRun) -> None:
    mlflow = import_module("mlflow")
    with mlflow.start_run(run_name=run.name):
        mlflow.log_params(run.settings)
        for step, curves in run.history:
            mlflow.log_metrics(curves, step=step)
        mlflow.log_metrics(run.metrics)


def _to_wandb(run: TrackedRun) -> None:
    wandb = import_module("wandb")
    with wandb.init(name=run.name, config=dict(run.settings)) as tracked:
        for step, curves in run.history:
            tracked.log(dict(curves), step=step)
        tracked.summary.update(dict(run.metrics))


TRACKERS = {"mlflow": _to_mlflow, "wandb": _to_wandb}
"""Package -> what tells it of a run."""
