"""The commands on a model with position-weighted features: searched, trained, compressed, exported, verified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dnis_torchrec.artifact.load import load_dense_state, read_scheme
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.artifact.verify import verify
from dnis_torchrec.jobs.artifact_jobs import recipe_of_artifact, run_evaluate, run_export
from dnis_torchrec.jobs.compress_job import CompressJob, run_compress
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.jobs.train_job import TrainJob, run_train
from tests.position_weighted import FEATURES, Net
from tests.searched_runs import quick_job

pytestmark = pytest.mark.usefixtures("gloo", "no_images")

RECIPE = "tests.position_weighted:recipe"


def assert_served(artifact: Path) -> None:
    """It passes every check, its weights of places are learnt ones, and it is as good as its run was."""
    assert verify(artifact, make_recipe=lambda: recipe_of_artifact(artifact, None, recipe=RECIPE)).failures == []
    dense, start = load_dense_state(artifact), Net().state_dict()
    places: dict[str, Tensor] = {name: value for name, value in dense.items() if name.endswith("position_weight")}
    assert len(places) == len(FEATURES)
    assert all(not torch.allclose(value, start[name], atol=1e-3) for name, value in places.items())
    assert {table.collection for table in read_scheme(artifact).tables.values()} == {"e._embedding_bag_collection"}
    of_run = read_manifest(artifact)["run"]["metrics"]
    assert run_evaluate(artifact, None)["metrics"]["auc"] == pytest.approx(of_run["auc"], abs=1e-4)


def test_a_search_is_exported_and_verified(tmp_path: Path) -> None:
    run_search(quick_job(tmp_path / "run", recipe=RECIPE, compression=2.0))
    run_export(tmp_path / "run", tmp_path / "artifact")
    assert_served(tmp_path / "artifact")


def test_a_plain_run_is_compressed_and_verified(tmp_path: Path) -> None:
    run_train(TrainJob(recipe=RECIPE, data=None, out=tmp_path / "run", epochs=2, embedding_l2=0.01))
    job = CompressJob(
        run=tmp_path / "run", recipe=None, data=None, out=tmp_path / "out", compressions=(2.0,), num_blocks=2
    )
    run_compress(job)
    assert_served(tmp_path / "out" / "x2")
