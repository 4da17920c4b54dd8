"""`dnis refresh`: a day after an artifact, whole or what differs; then what was written is served."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import dnis_torchrec as dnis
from dnis_torchrec.artifact.delta import read_state
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.cli.commands import previous_tables, run_compress, run_refresh, run_train, run_verify
from dnis_torchrec.cli.run import RunFolder
from dnis_torchrec.cli.settings import CompressCommand, EvaluateCommand, RefreshCommand, TrainCommand
from tests.tiny import files_of

DAYS = {"stream": "tests.tiny:stream", "splits": "tests.tiny:demo"}


@pytest.fixture(scope="module", params=DAYS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its artifact x3, and the run of the next day, or of another training."""
    folder, recipe = tmp_path_factory.mktemp(request.param), DAYS[request.param]
    length = {"steps": 30} if request.param == "stream" else {"epochs": 1}
    run_train(TrainCommand(recipe=recipe, out=folder / "run", **length))
    run_compress(CompressCommand(recipe=recipe, source=folder / "run", out=folder / "small", compression="3"))
    if request.param == "stream":
        recipe, length["source"] = "tests.tiny:next_day", folder / "run"
    else:
        length["epochs"] = 3
    run_train(TrainCommand(recipe=recipe, out=folder / "next", **length))
    (folder / "recipe").write_text(recipe)
    return folder


def refresh(folder: Path, out: str, **settings) -> list[str]:
    recipe = (folder / "recipe").read_text()
    return list(
        run_refresh(
            RefreshCommand(
                run=folder / "next", artifact=folder / "small" / "x3", out=folder / out, recipe=recipe, **settings
            )
        )
    )


def test_a_whole_refresh_has_the_size_of_the_artifact_and_the_model_of_the_run(folder: Path) -> None:
    lines = refresh(folder, "whole")
    old, new = (read_manifest(path) for path in (folder / "small" / "x3", folder / "whole"))
    assert read_state(folder / "whole").scheme.compression() >= 3
    assert new["run"]["configuration"] == old["run"]["configuration"]
    assert "metrics" not in new["run"]
    assert lines[-1] == f"artifact: {folder / 'whole'}"
    assert not run_verify(EvaluateCommand(path=folder / "whole", verify=True)).failures
    with pytest.raises(ValueError, match="whole"):
        refresh(folder, "whole")


def test_a_delta_makes_of_the_artifact_what_the_run_is(folder: Path) -> None:
    lines = refresh(folder, "delta", delta=True)
    assert any("drift" in line for line in lines)
    shutil.copytree(folder / "small" / "x3", folder / "served")
    dnis.apply_delta(folder / "served", folder / "delta")
    old, new = (read_state(path) for path in (folder / "small" / "x3", folder / "served"))
    assert any(not rows.equal(old.rows[name]) for name, rows in new.rows.items())
    for name, table in new.scheme.tables.items():
        assert table.bits[: old.scheme.tables[name].num_blocks].equal(old.scheme.tables[name].bits)
    weights = load_file(folder / "next" / "model.safetensors")
    bias = next(key for key in new.dense if key.endswith("0._linear.bias") and key in weights)
    assert new.dense[bias].equal(weights[bias])
    assert not run_verify(EvaluateCommand(path=folder / "served", verify=True)).failures
    with pytest.raises(ValueError, match="delta"):
        dnis.apply_delta(folder / "served", folder / "delta")
    # where the run that the artifact was made of is gone, all rows are compared: to the same end
    head, base = RunFolder.open(folder / "next").read_head(), read_state(folder / "small" / "x3")
    has_stream = "stream" in head
    assert set(previous_tables(head, base)) == (set(base.scheme.tables) if has_stream else set())
    (folder / "run").rename(folder / "elsewhere")
    assert not previous_tables(head, base)
    refresh(folder, "again", delta=True)
    assert files_of(folder / "again") == files_of(folder / "delta")
    if has_stream:
        (folder / "elsewhere").rename(folder / "run")
        assert not previous_tables(head, replace(base, run=base.run | {"weights_sha256": "0" * 64}))
