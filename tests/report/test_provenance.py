"""Where results come from: the steps that runs, pages and artifacts record, from the first training on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dnis_torchrec.jobs.report_job import run_report
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.report.provenance import Step, commands, steps_of
from tests.report.pages import PageReader
from tests.searched_runs import quick_job


def typed(monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    """Makes this process one that was started by a command; returns the command."""
    monkeypatch.setattr("sys.argv", ["/usr/bin/dnis", *map(str, words)])
    return " ".join(["dnis", *map(str, words)])


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
