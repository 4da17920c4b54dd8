"""`run_search` in several attempts: what a run folder keeps, who may write it, what may be resumed."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import shutil
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from dnis_torchrec.data.recipe import build_recipe
from dnis_torchrec.jobs import run_folder
from dnis_torchrec.jobs.artifact_jobs import run_evaluate, run_export
from dnis_torchrec.jobs.progress import _StopRequest
from dnis_torchrec.jobs.report_job import run_report
from dnis_torchrec.jobs.run_folder import REPLACED, RunFolder, RunWriteError
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.training.checkpoint import CheckpointFolder
from dnis_torchrec.training.loop import SearchInterrupted, SearchLoop
from dnis_torchrec.training.pipeline import NonFiniteError
from dnis_torchrec.training.settings import Saving
from tests.searched_runs import QUICK
from tests.searched_runs import quick_job as job

pytestmark = pytest.mark.usefixtures("no_images")

CPU = torch.device("cpu")


def stop_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """As Ctrl-C in that step."""
    asked = iter(range(10**6))
    patch.setattr(_StopRequest, "is_requested", lambda self: next(asked) == steps)


@pytest.fixture(scope="module")
def whole(gloo, no_images, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run_search(job(out))
    return out


def interrupted(out: Path, steps: int = 25) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(SearchInterrupted):
            run_search(job(out))


@pytest.mark.parametrize(
    ("steps", "told"),
    [(4, "lower step 5, in epoch 0"), (12, "lower step 13, in epoch 1"), (30, "lower step 23, in epoch 2")],
    ids=["plain", "ramp", "release"],
)
def test_a_resumed_run_leaves_the_same_files(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, told: str
) -> None:
    out = tmp_path / "run"
    interrupted(out, steps)
    assert RunFolder(out).status() == "interrupted"
    before = json.loads((out / "checkpoints" / "latest.json").read_text())["checkpoint"]
    seconds = json.loads((out / "checkpoints" / before / "manifest.json").read_text())["values"]["search"]["seconds"]
    head = json.loads((out / "run.json").read_text())
    head["provenance"][0]["date"] = "yesterday"
    (out / "run.json").write_text(json.dumps(head))
    (row,) = run_search(job(out, saving=Saving(resume=True)))
    assert row.seconds > seconds > 0
    assert f"resumed after {told}" in capsys.readouterr().err
    for name in ("model", "alpha", "scheme", "counts", "blocks"):
        assert (out / f"{name}.safetensors").read_bytes() == (whole / f"{name}.safetensors").read_bytes(), name
    resumed, never_stopped = (json.loads((run / "run.json").read_text()) for run in (out, whole))
    (step,), _ = resumed.pop("provenance"), never_stopped.pop("provenance")
    assert step["date"] == "yesterday", "what is resumed comes of the command that began it"
    assert json.dumps(resumed) == json.dumps(never_stopped)


def test_a_run_that_says_nothing_was_saved_is_gone_and_one_that_names_a_checkpoint_is_not(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out, saving = tmp_path / "run", Saving(on_save_error="continue")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "add", full)
        stop_after(patch, 3)
        with pytest.raises(SearchInterrupted, match="stopped on request; nothing could be saved"):
            run_search(job(out, saving=saving))
    assert not out.exists()
    interrupted(out)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "add", full)
        stop_after(patch, 3)
        with pytest.raises(SearchInterrupted, match=r"this state could not be saved, --resume goes on from .*step-"):
            run_search(job(out, saving=dataclasses.replace(saving, resume=True)))
    assert RunFolder(out).status() == "interrupted"


def test_resume_begins_a_run_and_leaves_a_finished_one(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    resuming = job(out, saving=Saving(resume=True))
    first = run_search(resuming)
    assert run_search(resuming) == first


def test_other_settings_are_refused_by_name(whole: Path) -> None:
    other = job(whole, seed=3, settings=dataclasses.replace(QUICK, patience=9), saving=Saving(resume=True))
    message = r"expected a run with these settings, got patience 1 instead of 9, seed 0 instead of 3; repeat the run"
    with pytest.raises(ValueError, match=message):
        run_search(other)


def test_resume_and_overwrite_contradict(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--resume: expected no --overwrite, got both"):
        job(tmp_path, overwrite=True, saving=Saving(resume=True))


def test_a_result_that_cannot_be_written_can_be_resumed(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save_model", full)
        message = "expected to write what the search found, got .* No space left on device; make room for it, then"
        with pytest.raises(RunWriteError, match=message):
            run_search(job(out))
    run_search(job(out, saving=Saving(resume=True)))
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_result_that_is_cut_short_leaves_what_was_there(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    before = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}

    def cut_short(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    run = RunFolder.open(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "save_file", cut_short)
        with pytest.raises(OSError, match="No space left"):
            run.save_model(build_recipe("tests.tiny:demo", None, seed=0).model, run.scheme(), run.alpha())
    assert {path.name: path.read_bytes() for path in out.glob("*.safetensors")} == before


def hold(run: Path, held: Event) -> None:
    """Another job at work in a run folder, until it is killed."""
    with RunFolder(run).lock():
        held.set()
        signal.pause()


def test_a_second_job_is_refused_until_the_first_is_gone(gloo, tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupted(out)
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "lock"}
    context = multiprocessing.get_context("forkserver")
    held = context.Event()
    first = context.Process(target=hold, args=(out, held))
    first.start()
    assert held.wait(60)
    message = rf"expected no other job at work in it, got process {first.pid} on .*; wait for it, or choose another"
    for changes in ({"saving": Saving(resume=True)}, {"overwrite": True}):
        with pytest.raises(ValueError, match=message):
            run_search(job(out, **changes))
    assert {path: path.read_bytes() for path in files} == files
    first.kill()
    first.join()
    assert len(run_search(job(out, saving=Saving(resume=True)))) == 1


def test_a_folder_left_before_the_run_began_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "lock").touch()
    (tmp_path / "run" / "run.json.partial").touch()
    (tmp_path / "run" / "shared.partial").touch()
    RunFolder.create(tmp_path / "run")
    (tmp_path / "run" / "mine").touch()
    with pytest.raises(ValueError, match="expected a folder that does not exist, got an existing one; choose another"):
        RunFolder.create(tmp_path / "run")


@pytest.mark.parametrize("names", [("lock",)])
def test_what_comes_of_such_a_folder_at_a_url_is_taken(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Storage keeps files alone, so there is no empty folder of checkpoints."""
    out = tmp_path / "run"
    out.mkdir()
    for name in names:
        (out / name).touch()
    RunFolder.create(out)
    assert (out / "checkpoints").is_dir()


def files_of(run: Path) -> dict[str, bytes]:
    """But for the lock, which says who was there last."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def fail_in_the_first_epoch(patch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise NonFiniteError("not today")

    patch.setattr(SearchLoop, "_end_epoch", fails)


def fail_to_write_the_head(patch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(RunFolder, "write_head", fails)


@pytest.mark.parametrize(
    ("fail", "changes", "message"),
    [
        (None, {"compression": 1e5}, "compression: expected at most"),
        (fail_in_the_first_epoch, {}, "not today"),
        (fail_to_write_the_head, {}, "No space left"),
    ],
)
def test_a_run_that_fails_before_its_first_checkpoint_replaces_none(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail, changes: dict, message: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    if fail is not None:
        fail(monkeypatch)
    with pytest.raises((ValueError, OSError, NonFiniteError), match=message):
        run_search(job(out, overwrite=True, **changes))
    assert files_of(out) == files_of(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_is_replaced_for_good_once_there_is_a_checkpoint(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    stop_after(monkeypatch, 25)
    with pytest.raises(SearchInterrupted):
        run_search(job(out, overwrite=True))
    assert RunFolder(out).status() == "interrupted"
    assert not (out / REPLACED).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_ranks_have_put_at_a_url_goes_with_the_run(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of a run that is no more: nothing may go on with it."""
    monkeypatch.setenv("DNIS_CACHE", str(tmp_path / "cache"))
    files, url, out = MemoryFileSystem(), "memory://jobs/run", tmp_path / "run"
    left = {"run.json", "checkpoints/latest.json", "checkpoints/step-00000003/manifest.json", "model.rank1.safetensors"}

    def leave() -> None:
        files.pipe({f"/jobs/run/{name}": b"{}" for name in {*left, "counts.safetensors"}})

    def stored() -> set[str]:
        return {name.removeprefix("/jobs/run/") for name in files.find("/jobs/run")}

    leave()
    run = RunFolder.create(out, url=url)
    assert stored() == {"counts.safetensors"}  # which rank 0 writes: it goes with its own copy
    assert not run.has_checkpoint()
    run.write_head("finished", {})
    leave()
    assert run.has_checkpoint()
    with pytest.raises(ValueError, match="expected a folder that does not exist"):
        RunFolder.create(out, url=url)
    assert stored() >= left
    run = RunFolder.create(out, url=url, overwrite=True)
    assert not stored() & left
    leave()
    run.delete()
    assert not stored() & left
    assert not out.exists()
    files.rm("/jobs", recursive=True)


def test_a_run_from_another_embedding_dim_is_exported_and_evaluated_as_such(gloo, tmp_path: Path) -> None:
    out, artifact = tmp_path / "run", tmp_path / "artifact"
    run_search(job(out, embedding_dim=4, compression=2.0))
    run_export(out, artifact, forms=("mixed_dimension",))
    expected = run_evaluate(out, None)["metrics"]
    assert run_evaluate(artifact, None)["metrics"] == pytest.approx(expected, abs=1e-6)


READ = ("run.json", "model.safetensors", "report.json", "counts.safetensors")
WRITTEN = ("checkpoints", "figures", "lock", "report.html", "report.html.partial", "figures/alpha.png", "anything")


@pytest.mark.parametrize("name", [*READ, *WRITTEN, "tensorboard"])
def test_links_in_a_run_are_named_before_anything_is_read_or_written_through_them(
    whole: Path, tmp_path: Path, name: str
) -> None:
    run, outside = Path(shutil.copytree(whole, tmp_path / "run")), tmp_path / "outside"
    planted = run / name
    planted.parent.mkdir(exist_ok=True)
    if planted.exists():
        planted.rename(outside)
    else:
        (outside.mkdir if name in ("checkpoints", "figures") else outside.touch)()
    planted.symlink_to(outside)
    before = files_of(tmp_path)
    message = f"run folder {run}: expected plain files and folders in it, got the link '{name}'; remove it"
    for act in (
        lambda: run_report(run),
        lambda: run_evaluate(run, None),
        lambda: run_export(run, tmp_path / "artifact", forms=("packed",)),
        lambda: run_search(job(run, overwrite=True)),
        lambda: run_search(job(run, saving=Saving(resume=True))),
        lambda: RunFolder.check_free(run, overwrite=True),
    ):
        with pytest.raises(ValueError, match=message):
            act()
        assert files_of(tmp_path) == before


def test_the_folder_that_a_user_names_may_be_a_link(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "disk" / "run"))
    (tmp_path / "run").symlink_to(run)
    run_report(tmp_path / "run")
    assert (run / "report.html").is_file()
    run_search(job(tmp_path / "run", overwrite=True))
    assert (tmp_path / "run").is_symlink()
    assert not (run / "report.html").exists()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["run"]


def test_files_outside_that_a_run_has_a_second_name_of_stay(whole: Path, tmp_path: Path) -> None:
    run, outside = Path(shutil.copytree(whole, tmp_path / "run")), tmp_path / "outside"
    run_report(run)
    (run / "lock").write_text("years of work")
    names = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    for number, name in enumerate(names):
        outside.mkdir(exist_ok=True)
        (outside / str(number)).hardlink_to(run / name)
    before = files_of(outside)
    run_report(run)
    with RunFolder(run).lock():
        assert files_of(outside) == before


def test_all_of_a_run_is_readable_by_whom_the_user_wants(gloo, tmp_path: Path) -> None:
    mask = 0o027
    before = os.umask(mask)
    try:
        run_search(job(tmp_path / "run"))
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path
