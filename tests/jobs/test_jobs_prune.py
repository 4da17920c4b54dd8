"""`dnis prune` never costs a run: neither the one it reads nor the one it replaces."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest

from dnis_torchrec import Size
from dnis_torchrec.jobs import prune_job
from dnis_torchrec.jobs.prune_job import run_prune
from dnis_torchrec.jobs.run_folder import RunFolder, RunWriteError
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.search.settings import PruneSettings
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.shard import set_learning_rates_
from tests.cli.test_cli import dnis
from tests.searched_runs import quick_job

SMALLER = Size(compression=5.5)
CUT, TUNED = PruneSettings(fine_tune_epochs=0), PruneSettings(fine_tune_epochs=1)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(gloo, no_images, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prune") / "runs" / "run"
    run_search(quick_job(out))
    return out


@pytest.mark.parametrize("place", [".", "../run", ".."])
def test_the_run_itself_and_what_holds_it_are_no_place_for_the_pruned_one(run: Path, place: str) -> None:
    before = files_of(run)
    message = "expected another folder than that of the run to prune, got the one that holds .*; choose another --out"
    with pytest.raises(ValueError, match=message):
        run_prune(run, None, run / place, size=SMALLER, settings=TUNED, overwrite=True)
    assert files_of(run) == before


def test_fewer_epochs_than_none_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^fine_tune_epochs: expected an integer >= 0, got -1; say 0 for no"):
        PruneSettings(fine_tune_epochs=-1)
    done = dnis("prune", run, "--compression", 8, "--fine-tune-epochs", -1, "--out", tmp_path / "pruned")
    assert done.returncode == 2
    assert "fine_tune_epochs: expected an integer >= 0, got -1; say 0 for no fine-tuning" in done.stderr
    assert not (tmp_path / "pruned").exists()


@pytest.mark.parametrize(
    ("size", "how", "message"),
    [
        (
            None,
            {"threshold": 1e9},
            r"threshold: expected a number below 0\.\d+, above which nothing is left, got 1000000000\.0",
        ),
        (
            None,
            {"threshold": 1e9, "structure": "element"},
            r"threshold: expected a number below \d\.\d+, above which nothing",
        ),
        (Size(compression=400), {}, r"compression: expected at most \d+\.\d\d for these tables"),
        (Size(embedding_bytes=10**6), {}, "embedding_bytes: expected at most 1664, what the uncompressed tables"),
    ],
)
def test_a_run_that_would_retain_nothing_or_all_is_refused_before_training(
    run: Path, tmp_path: Path, size: Size | None, how: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune_job, "train_plainly", None)
    with pytest.raises(ValueError, match=f"^{message}"):
        run_prune(run, None, tmp_path / "nothing", size=size, settings=PruneSettings(fine_tune_epochs=1, **how))
    assert not (tmp_path / "nothing").exists()


def test_the_smallest_size_that_is_named_can_be_met_by_the_run(run: Path, tmp_path: Path) -> None:
    """Which has fewer columns than the tables have: its cheapest one may be dearer than theirs."""
    with pytest.raises(ValueError, match=r"^compression: expected at most [\d.]+ for these") as caught:
        run_prune(run, None, tmp_path / "nothing", size=Size(compression=400), settings=CUT)
    named = float(re.search(r"at most ([\d.]+) for", str(caught.value)).group(1))
    assert run_prune(run, None, tmp_path / "least", size=Size(compression=named), settings=CUT).parameters > 0
    with pytest.raises(ValueError, match=rf"^compression: expected at most {named:.2f} for these"):
        run_prune(run, None, tmp_path / "nothing", size=Size(compression=named + 0.01), settings=CUT)


def test_an_interrupted_prune_leaves_nothing_and_the_run_it_was_to_replace(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_prune(run, None, tmp_path / "older", size=SMALLER, settings=TUNED)
    before = files_of(tmp_path)

    def interrupt(*_: object, folder: Path, **__: object) -> None:
        (folder / "best.rank0.safetensors").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(prune_job, "train_plainly", interrupt)
    for name in ("older", "new"):
        with pytest.raises(KeyboardInterrupt):
            run_prune(run, None, tmp_path / name, size=SMALLER, settings=TUNED, overwrite=True)
    assert files_of(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["older"]


def test_a_run_that_cannot_be_written_leaves_the_one_it_was_to_replace(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_prune(run, None, tmp_path / "older", size=SMALLER, settings=CUT)
    before = files_of(tmp_path / "older")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_rows", full)
        for name in ("older", "new"):
            message = (
                f"run folder {tmp_path / name}: expected to write the pruned run, got .* No space left .*; make room"
            )
            with pytest.raises(RunWriteError, match=message):
                run_prune(run, None, tmp_path / name, size=SMALLER, settings=CUT, overwrite=True)
    assert files_of(tmp_path / "older").items() >= before.items()
    assert [path.name for path in tmp_path.iterdir()] == ["older"]
    for name in ("older", "new"):
        run_prune(run, None, tmp_path / name, size=SMALLER, settings=CUT, overwrite=name == "older")
        assert RunFolder.open(tmp_path / name).rows()


def test_what_a_job_that_never_began_has_left_is_no_obstacle_but_one_at_work_is(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "pruned"
    RunFolder.create(out)
    with RunFolder(out).lock(), pytest.raises(ValueError, match="expected no other job at work in it"):
        run_prune(run, None, out, size=SMALLER, settings=CUT)
    run_prune(run, None, out, size=SMALLER, settings=CUT)
    with RunFolder(out).lock(), pytest.raises(ValueError, match="expected no other job at work in it"):
        run_prune(run, None, out, size=SMALLER, settings=CUT, overwrite=True)
    assert RunFolder.open(out).rows()


def test_a_pruned_run_that_training_on_makes_worse_stays_as_it_is(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_no_rate_that_helps(model, optimizer, *arguments, **options):
        set_learning_rates_(model, optimizer, tables=10.0, dense=10.0, rows=10.0)
        return train_plainly(model, optimizer, *arguments, **options)

    monkeypatch.setattr(prune_job, "train_plainly", at_no_rate_that_helps)
    tuned = run_prune(run, None, tmp_path / "tuned", size=SMALLER, settings=TUNED)
    assert tuned.metrics == run_prune(run, None, tmp_path / "cut", size=SMALLER, settings=CUT).metrics


def test_what_stands_there_is_replaced_only_if_that_was_asked_for_and_it_is_a_run(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "pruned"
    first = run_prune(run, None, out, size=SMALLER, settings=CUT)
    with pytest.raises(ValueError, match=r"got an existing one; choose another --out or --overwrite the run$"):
        run_prune(run, None, out, size=SMALLER, settings=CUT)
    again = run_prune(run, None, out, size=SMALLER, settings=CUT, overwrite=True)
    assert again.metrics == first.metrics
    assert RunFolder.open(out).rows()[0] == again
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ValueError, match=r"got an existing one; choose another --out$"):
        run_prune(run, None, tmp_path / "mine", size=SMALLER, settings=CUT, overwrite=True)
