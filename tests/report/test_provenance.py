"""Where results come from: the steps that runs, pages and artifacts record, from the first training on."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dnis_torchrec.artifact import read_manifest
from dnis_torchrec.artifact.card import CARD
from dnis_torchrec.jobs.artifact_jobs import run_export
from dnis_torchrec.jobs.compress_job import CompressJob, run_compress
from dnis_torchrec.jobs.given_model import GivenModel
from dnis_torchrec.jobs.prune_job import run_prune
from dnis_torchrec.jobs.report_job import run_report
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.jobs.train_job import TrainJob, run_train
from dnis_torchrec.report.provenance import Step, commands, steps_of
from dnis_torchrec.search.settings import PruneSettings
from tests.report.pages import PageReader
from tests.searched_runs import quick_job


def typed(monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    """Makes this process one that was started by a command; returns the command."""
    monkeypatch.setattr("sys.argv", ["/usr/bin/dnis", *map(str, words)])
    return " ".join(["dnis", *map(str, words)])


@pytest.mark.usefixtures("gloo", "no_images")
def test_every_step_from_training_to_pruning_and_export_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, search, prune, small, artifact = (tmp_path / name for name in ("t", "s", "p", "c", "a"))
    told = [typed(monkeypatch, "train", "tests.tiny:demo", "--out", train)]
    run_train(TrainJob(recipe="tests.tiny:demo", data=None, out=train, epochs=1))
    told.append(typed(monkeypatch, "search", "tests.tiny:demo", "--from", train, "--out", search))
    run_search(quick_job(search, given=GivenModel(run=train)))
    told.append(typed(monkeypatch, "prune", search, "--out", prune))
    run_prune(search, None, prune, settings=PruneSettings(threshold=0.1, fine_tune_epochs=0))
    head = json.loads((prune / "run.json").read_text())
    assert [(step["job"], step["folder"]) for step in head["provenance"]] == [
        *(("train", str(train)), ("search", str(search)), ("prune", str(prune)))
    ]
    assert [step["command"] for step in head["provenance"]] == told
    for step in head["provenance"]:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", step["date"])
        assert f"{os.cpu_count()} cores" in step["machine"]
    page = run_report(prune).read_text()
    text = " ".join(PageReader(page).text.split())
    assert f"{told[-1]} · steps: train → search → prune" in text
    assert f"Reproduce this {' '.join(told)} Steps" in text
    run_export(prune, artifact)
    card = (artifact / CARD).read_text()
    assert [line.split("|")[1] for line in card.splitlines() if line.startswith(("|train", "|search", "|prune"))] == [
        *("train", "search", "prune")
    ]
    typed(monkeypatch, "compress", train, "--out", small)
    content = run_compress(CompressJob(run=train, recipe=None, data=None, out=small, compressions=(4.0,)))
    assert [step.job for step in content.provenance] == ["train", "compress"]
    described = json.loads((small / "compress.json").read_text())
    assert described["provenance"] == [step.to_json() for step in content.provenance]
    assert "steps: train → compress" in " ".join(PageReader((small / "report.html").read_text()).text.split())
    assert read_manifest(small / "x4")["run"]["provenance"] == described["provenance"]
    card = (small / "x4" / CARD).read_text()
    assert [line.split("|")[1] for line in card.splitlines() if line.startswith(("|train", "|compress"))] == [
        *("train", "compress")
    ]


@pytest.mark.usefixtures("gloo", "no_images")
def test_a_run_that_recorded_no_steps_is_read_as_before(tmp_path: Path) -> None:
    run_search(quick_job(tmp_path / "run"))
    file = tmp_path / "run" / "run.json"
    head = json.loads(file.read_text())
    del head["provenance"]
    file.write_text(json.dumps(head))
    text = " ".join(PageReader(run_report(tmp_path / "run").read_text()).text.split())
    assert "Reproduce this dnis search tests.tiny:demo --compression 4 --seed 0" in text
    assert f"search {tmp_path / 'run'} not recorded not recorded" in text
    step = Step(job="search", folder="run", command="dnis search m:f", date="today", machine="mine")
    head["provenance"] = [step.to_json() | {"weather": "of a later version"}]
    file.write_text(json.dumps(head))
    text = " ".join(PageReader(run_report(file.parent).read_text()).text.split())
    assert "Reproduce this dnis search m:f Steps" in text
    head["provenance"] = [{"job": "search"}]
    file.write_text(json.dumps(head))
    with pytest.raises(ValueError, match=r"run\.json.*provenance\[0\]"):
        run_report(tmp_path / "run")


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/env/bin/dnis", "train", "a b"], "dnis train 'a b'"),
        (["/env/dnis_torchrec/__main__.py", "report", "x"], "dnis report x"),
        (["/env/pytest/__main__.py", "x"], ""),
        (["notebook.py"], ""),
        ([], ""),
    ],
)
def test_what_was_typed_is_recorded_where_it_was_our_command(
    argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    assert Step.now("train", Path("out")).command == command


def test_commands_are_told_only_where_all_can_be_typed_again() -> None:
    step = Step(job="train", folder="a", command="dnis train m:f --out a")
    assert commands([step, step]) == (step.command, step.command)
    assert commands([replace(step, command=""), step]) == ()
    assert commands([]) == ()
    assert steps_of({}, Path("old"))[0].job == "search"
