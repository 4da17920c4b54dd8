"""Artifacts of bit fields are evaluated and planned for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dnis_torchrec.artifact.export import drop_in_
from dnis_torchrec.cli import app
from dnis_torchrec.jobs.artifact_jobs import run_evaluate
from dnis_torchrec.serving import PackedEmbeddingBagCollection
from tests import tiny
from tests.tiny_artifact import write_tiny_artifact

RECIPE = "tests.tiny:demo"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tables in bit fields alone."""
    return write_tiny_artifact(tmp_path_factory.mktemp("codes") / "artifact", forms=("packed",), codes=True)


def test_evaluates_what_it_serves(artifact: Path) -> None:
    found = run_evaluate(artifact, None, recipe=RECIPE)
    stated = json.loads((artifact / "manifest.json").read_text())["run"]["metrics"]
    assert found["metrics"] == pytest.approx(stated, abs=1e-5)
    assert found["bytes"]["packed"] < found["bytes"]["csr_fp32"]
    model = drop_in_(tiny.demo(None).model, artifact)
    assert [type(m) for m in model.modules() if isinstance(m, PackedEmbeddingBagCollection)]


def test_a_cluster_is_planned(artifact: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(artifact), "--json", str(tmp_path / "plan.json"), "--world-size", "1"])
    assert done.exit_code == 0, done.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert 0 < plan["after"]["training_bytes"] < plan["before"]["training_bytes"]
