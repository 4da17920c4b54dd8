"""Runs: stopped and gone on with to the same files, replaced, locked, and never half there."""

from __future__ import annotations

import errno
import json
import multiprocessing
import shutil
import signal
import time
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dnis_torchrec.cli import commands, judge
from dnis_torchrec.cli.commands import run_search, run_train
from dnis_torchrec.cli.run import INTERRUPTED, RunFolder
from dnis_torchrec.cli.settings import FINISHED, TrainCommand
from dnis_torchrec.training import settings as signals
from dnis_torchrec.training.loop import SearchInterrupted, TrainLoop
from dnis_torchrec.training.pipeline import NonFiniteError
from tests.programs import SHORT, dnis, start_dnis
from tests.tiny import ROLES, files_of, quick_search, write_table

SEARCH = ("search", "tests.tiny:demo", "--compression", 4, *SHORT)


def stop_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """As Ctrl-C in that step."""
    calls = iter(range(10**6))
    patch.setattr(signals.StopRequest, "is_requested", lambda self: next(calls) == steps)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def whole(gloo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run_search(quick_search(out))
    return out


def interrupt(out: Path, steps: int = 25, **changes: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(SearchInterrupted):
            run_search(quick_search(out, **changes))


def files_but_lock(run: Path) -> dict[str, bytes]:
    """The lock says who was there last."""
    return {name: content for name, content in files_of(run).items() if name != "lock"}


def test_a_resumed_run_leaves_the_same_files(whole: Path, tmp_path: Path) -> None:
    """Stopped in the ramp; in the release: the run at a URL below; in each phase: tests/search/test_search.py."""
    out = tmp_path / "run"
    interrupt(out, 12)
    assert RunFolder(out).status() == INTERRUPTED
    results = run_search(quick_search(out, resume=True))
    assert results.rows[0].seconds > 0
    for name in ("model.safetensors", "scheme.safetensors", "run.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert run_search(quick_search(out, resume=True)) == results


@pytest.mark.parametrize(("kind", "steps"), [("recipe", 3), ("table", 14)], ids=["first epoch", "end of the third"])
def test_a_resumed_training_leaves_the_same_files(gloo, tmp_path: Path, kind: str, steps: int) -> None:
    """As one that nothing stopped: model, scheme and head, but for the folder's name in it."""
    data = (write_table(tmp_path / "clicks.csv"), *ROLES) if kind == "table" else ("tests.tiny:demo",)
    words, uninterrupted = ("train", *data, "--epochs", 4), tmp_path / "whole"
    done = dnis(*words, "--out", uninterrupted)
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, steps)
        done = dnis(*words, "--out", tmp_path / "run")
        assert done.returncode == 1
        assert "--resume goes on" in done.stderr
    assert RunFolder(tmp_path / "run").status() == INTERRUPTED
    assert dnis("export", tmp_path / "run", "--out", tmp_path / "artifact").returncode == 2
    done = dnis(*words, "--out", tmp_path / "run", "--resume")
    assert done.returncode == 0, done.stderr
    assert f"resumed after lower step {steps + 1}" in done.stderr
    assert "epoch 3, plain" in done.stderr
    contents = [files_but_lock(folder) for folder in (uninterrupted, tmp_path / "run")]
    assert [*contents[0]] == [*contents[1]]
    heads, results = ([json.loads(of[name]) for of in contents] for name in ("run.json", "results.json"))
    assert heads[0].pop("commands") != heads[1].pop("commands")
    assert heads[0] == heads[1]
    assert results[0]["history"] == results[1]["history"]
    for name in ("model.safetensors", "scheme.safetensors"):
        assert contents[0][name] == contents[1][name], name
    again = dnis(*words, "--out", tmp_path / "run", "--resume")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    other = dnis("train", "tests.tiny:two_tasks", "--out", tmp_path / "run", "--resume")
    assert other.returncode == 1
    assert "recipe" in other.stderr


def test_what_does_not_fit_the_run_is_refused_by_name(whole: Path) -> None:
    before = files_but_lock(whole)
    for name, changes in {"epochs": {"epochs": 9}, "compression": {"compression": 5.0}}.items():
        with pytest.raises(ValueError, match=name):
            run_search(quick_search(whole, resume=True, **changes))
    with pytest.raises(ValueError, match="existing"):
        run_search(quick_search(whole))
    assert files_but_lock(whole) == before


def test_a_result_that_cannot_be_written_can_be_resumed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_model", full)
        with pytest.raises(OSError):
            run_search(quick_search(out))
    with monkeypatch.context() as patch:
        patch.setattr(judge, "write_results", full)
        with pytest.raises(OSError):
            run_search(quick_search(out, resume=True))
    assert RunFolder(out).status() == INTERRUPTED
    run_search(quick_search(out, resume=True))
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def fail_in_the_first_epoch(patch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise NonFiniteError("not today")

    patch.setattr(TrainLoop, "_end_epoch", fails)


def fail_to_write_the_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunFolder, "write_head", full)


@pytest.mark.parametrize("fail", [None, fail_in_the_first_epoch, fail_to_write_the_head])
def test_a_run_that_fails_before_its_first_checkpoint_replaces_none(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    if fail is not None:
        fail(monkeypatch)
    changes = {} if fail else {"compression": 1e5}
    with pytest.raises((ValueError, OSError, NonFiniteError)):
        run_search(quick_search(out, overwrite=True, **changes))
    assert files_but_lock(out) == files_but_lock(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_is_replaced_for_good_once_there_is_a_checkpoint(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    interrupt(out, overwrite=True)
    assert RunFolder(out).status() == INTERRUPTED
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def hold(run: Path, is_held: Event) -> None:
    """Another job at work in a run folder, until it is killed."""
    with RunFolder(run).lock():
        is_held.set()
        signal.pause()


def test_a_second_job_is_refused_until_the_first_is_gone(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    context = multiprocessing.get_context("forkserver")
    is_held = context.Event()
    first = context.Process(target=hold, args=(out, is_held))
    first.start()
    assert is_held.wait(60)
    for changes in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match=f"process {first.pid} "):
            run_search(quick_search(out, **changes))
    assert files_but_lock(out) == files_but_lock(whole)
    first.kill()
    first.join()
    assert run_search(quick_search(out, resume=True)).rows


def test_a_training_that_fails_leaves_what_was_there_or_a_run_to_resume(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    settings = TrainCommand(recipe="tests.tiny:demo", out=out, epochs=1)
    for fail in (fail_to_write_the_head, fail_in_the_first_epoch):
        with monkeypatch.context() as patch:
            fail(patch)
            with pytest.raises((OSError, NonFiniteError)):
                run_train(settings)
        assert list(tmp_path.iterdir()) == []
    run_train(settings)
    before = files_but_lock(out)
    with pytest.raises(ValueError, match="existing"):
        run_train(settings)
    with monkeypatch.context() as patch:
        fail_in_the_first_epoch(patch)
        with pytest.raises(NonFiniteError):
            run_train(replace(settings, overwrite=True))
    assert files_but_lock(out) == before
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_model", full)
        with pytest.raises(OSError):
            run_train(replace(settings, overwrite=True))
    assert RunFolder(out).status() == INTERRUPTED
    run_train(replace(settings, resume=True))
    after = files_but_lock(out)
    of_seconds = {"results.json", "report.html"}
    assert {name for name in before if before[name] != after[name]} <= of_seconds
    run_train(replace(settings, overwrite=True))
    with pytest.raises(ValueError, match="kind"):
        run_search(quick_search(out, resume=True))


def test_what_ranks_have_put_at_a_url_goes_with_the_run(tmp_path: Path, remote: MemoryFileSystem) -> None:
    """It is of a run that is no more: nothing may go on with it."""
    names = {"run.json", "checkpoints/step-00000003/manifest.json"}
    remote.pipe({f"/jobs/run/{name}": b"{}" for name in names})
    RunFolder(tmp_path / "run", url="memory://jobs/run").create(overwrite=False)
    assert remote.find("/jobs/run") == []


def test_a_run_at_a_url_is_published_resumed_and_exported(gloo, whole: Path, remote: MemoryFileSystem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 25)
        assert dnis(*SEARCH, "--out", "memory://bucket/run").returncode == 1
    assert json.loads(remote.cat("/bucket/run/run.json"))["status"] == INTERRUPTED
    done = dnis(*SEARCH, "--out", "memory://bucket/run", "--resume")
    assert done.returncode == 0, done.stderr
    assert remote.cat("/bucket/run/scheme.safetensors") == (whole / "scheme.safetensors").read_bytes()
    done = dnis("export", "memory://bucket/run", "--out", "memory://bucket/artifact")
    assert done.returncode == 0, done.stderr
    assert "memory://bucket/artifact" in done.stdout
    verify = ("evaluate", "memory://bucket/artifact", "--verify", "--recipe", "tests.tiny:demo")
    assert dnis(*verify).returncode == 0
    assert dnis("report", "memory://bucket/run").returncode == 0
    assert remote.exists("/bucket/run/report.html")


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        (("search", "tests.tiny:demo", "--compression", 4), signal.SIGINT, 130),
        (("train", "examples.synthetic:demo"), signal.SIGTERM, 143),
    ],
)
def test_a_signal_saves_and_an_unfinished_run_is_not_exported(
    tmp_path: Path, words: tuple, number: int, code: int
) -> None:
    out = tmp_path / "run"
    search = start_dnis(tmp_path, *words, "--out", out)
    deadline = time.monotonic() + 120
    while not list(out.glob("checkpoints/*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    search.send_signal(number)
    end, _, messages = search.ended(timeout=60)
    assert (end, RunFolder(out).status()) == (code, INTERRUPTED), messages
    assert dnis("export", out, "--out", tmp_path / "artifact").returncode == 2


@pytest.mark.parametrize("number", signals.REQUESTS)
def test_commands_without_checkpoints_end_with_a_sentence_and_leave_nothing(
    whole: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(*_: object, **__: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(commands, "write_artifact", strike)
    monkeypatch.setattr(RunFolder, "write_head", strike)
    handlers = [signal.getsignal(each) for each in signals.REQUESTS]
    for words in (("export", whole), ("train", "tests.tiny:demo", *SHORT)):  # the latter before its first step
        done = dnis(*words, "--out", tmp_path / "out")
        assert (done.returncode, done.stdout) == (128 + number, "")
        assert done.stderr.endswith(f"error: stopped by {signal.Signals(number).name}\n")
        assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in signals.REQUESTS] == handlers


def test_a_signal_after_the_last_step_leaves_a_run_to_resume(gloo, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "evaluate", lambda *_: signal.raise_signal(signal.SIGHUP))
        assert dnis(*SEARCH, "--out", out).returncode == 129
    assert RunFolder(out).status() == INTERRUPTED
    assert dnis(*SEARCH, "--out", out, "--resume").returncode == 0
    assert RunFolder(out).status() == FINISHED


def test_a_second_signal_ends_a_search_that_does_not_come_to_its_next_step(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)

    def stuck(self: TrainLoop) -> bool:
        if self.history:
            signal.raise_signal(signal.SIGTERM)
        return False

    monkeypatch.setattr(TrainLoop, "_is_stop_requested", stuck)
    out = tmp_path / "run"
    assert dnis(*SEARCH, "--out", out).returncode == 143
    assert RunFolder(out).status() == INTERRUPTED  # with the checkpoint of the first epoch


def test_nohup_stays_in_force(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(TrainLoop, "_is_stop_requested", lambda self: bool(signal.raise_signal(signal.SIGHUP)))
    try:
        assert dnis("train", "tests.tiny:demo", *SHORT, "--out", tmp_path / "run").returncode == 0
    finally:
        signal.signal(signal.SIGHUP, before)
