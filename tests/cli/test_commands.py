"""The commands, one after the other: what each leaves is what the next reads, and metrics stay to the digit.

And runs: stopped and gone on with to the same files, replaced, locked, and never half there.
"""

import errno
import json
import multiprocessing
import shutil
import signal
import time
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from torch.nn.functional import binary_cross_entropy_with_logits

from dnis_torchrec.allocation.compress import Measured
from dnis_torchrec.artifact.export import load_predictor
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.cli import commands, judge
from dnis_torchrec.cli.commands import run_compress, run_evaluate, run_export, run_search, run_train, run_verify
from dnis_torchrec.cli.judge import BY_TIME
from dnis_torchrec.cli.run import INTERRUPTED, RunFolder
from dnis_torchrec.cli.settings import FINISHED, CompressCommand, EvaluateCommand, ExportCommand, TrainCommand
from dnis_torchrec.report.rows import COMPRESS, SEARCH, UNCOMPRESSED, Results
from dnis_torchrec.search.search import _Finish
from dnis_torchrec.training import settings as signals
from dnis_torchrec.training.loop import SearchInterrupted, TrainLoop
from dnis_torchrec.training.pipeline import NonFiniteError
from tests.programs import SHORT, dnis, start_dnis
from tests.tiny import ROLES, demo, files_of, quick_search, write_table

DEMO = "tests.tiny:demo"


def metrics_of(path: Path, recipe: str = DEMO) -> dict[str, float]:
    return run_evaluate(EvaluateCommand(path=path, recipe=recipe))["metrics"]


@pytest.fixture(scope="module")
def trained(gloo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    run_train(TrainCommand(recipe=DEMO, out=out, epochs=2))
    return out


@pytest.fixture(scope="module")
def searched(gloo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("searched") / "run"
    done = dnis("search", DEMO, "--compression", 4, "--out", out, *SHORT)
    assert done.returncode == 0, done.stderr
    assert "epoch 0, plain: train loss" in done.stderr
    assert done.stdout.endswith(f"run: {out}\n")
    assert "epoch 0" not in done.stdout
    assert "Warning" not in done.stderr
    return out


@pytest.fixture(scope="module")
def compressed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    out = tmp_path_factory.mktemp("compressed") / "small"
    settings = CompressCommand(recipe=DEMO, source=trained, out=out, compression="2,3.5")
    return out, run_compress(settings)


def test_a_trained_run_is_exported_and_evaluated_as_it_was_trained(trained: Path, tmp_path: Path) -> None:
    (row,) = json.loads((trained / "results.json").read_text())["rows"]
    assert (row["method"], row["num_bytes"], row["compression"]) == (UNCOMPRESSED, 1664, 1.0)
    artifact = run_export(ExportCommand(run=trained, out=tmp_path / "artifact"))
    assert read_manifest(artifact)["forms"] == ["mixed_dimension"]
    for path in (trained, artifact):
        assert metrics_of(path) == pytest.approx(row["metrics"], abs=1e-6)


def test_each_size_is_an_artifact_that_serves_what_its_row_says(compressed: tuple[Path, Results]) -> None:
    out, results = compressed
    rows = {row.name: row for row in results.rows if row.method == COMPRESS}
    assert list(rows) == ["x2", "x3.5"]
    for name, row in rows.items():
        assert row.compression >= float(name[1:])
        assert row.compression == pytest.approx(1664 / row.num_bytes)
        assert metrics_of(out / name) == pytest.approx(row.metrics, abs=1e-6)
        findings = run_verify(EvaluateCommand(path=out / name, recipe=DEMO, verify=True))
        assert findings.failures == []
    assert {"int8 rows", "int4 rows", "cut axes"} <= {row.method for row in results.rows}
    assert (out / "report.html").is_file()
    assert json.loads((out / "results.json").read_text())["primary_metric"] == "auc"


def test_weights_of_a_users_own_give_what_the_run_gives(
    compressed: tuple[Path, Results], trained: Path, tmp_path: Path
) -> None:
    state = load_file(trained / "model.safetensors")
    save_file({f"module.{name}": value for name, value in state.items()}, tmp_path / "mine.safetensors")
    torch.save({"state_dict": state}, tmp_path / "mine.pt")
    for name in ("mine.safetensors", "mine.pt"):
        out = tmp_path / f"of_{name}"
        run_compress(CompressCommand(recipe=DEMO, source=tmp_path / name, out=out, compression="3.5"))
        wanted = files_of(compressed[0] / "x3.5")
        others = {key for key, content in files_of(out / "x3.5").items() if content != wanted[key]}
        assert others <= {"manifest.json", "MODEL_CARD.md"}
    state["over.weight"] = torch.zeros(2)
    save_file(state, tmp_path / "bad.safetensors")
    for name in ("bad.safetensors", "none"):
        with pytest.raises(ValueError, match=name):
            run_compress(CompressCommand(recipe=DEMO, source=tmp_path / name, out=tmp_path / "out", compression="2"))
    assert not (tmp_path / "out").exists()


def test_a_largest_loss_stands_in_place_of_a_size(trained: Path, tmp_path: Path) -> None:
    done = dnis("compress", DEMO, "--from", trained, "--max-loss", 0.01, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"artifact: {tmp_path}/out/loss0.01" in done.stdout
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    (row,) = [row for row in rows if row["method"] == COMPRESS]
    assert row["predicted_loss_increase"] <= 0.01


def test_what_stood_there_stays_until_all_is_whole(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CompressCommand(recipe=DEMO, source=trained, out=tmp_path / "out", compression="2", overwrite=True)
    run_compress(settings)
    before = files_of(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(judge, "write_report", full)
    with pytest.raises(OSError):
        run_compress(settings)
    assert files_of(tmp_path) == before


def test_a_refit_trains_on_validation_too_and_gains_come_from_selection(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, held_out, train, measure = [], [], commands.TrainLoop, commands.measure_

    def note_steps(*arguments: Any, **options: Any) -> TrainLoop:
        steps.append(options["steps_per_epoch"])
        return train(*arguments, **options)

    def note_samples(*arguments: Any, **options: Any) -> Measured:
        held_out.append(torch.cat([batch.labels for batch in options["held_out"]]))
        return measure(*arguments, **options)

    monkeypatch.setattr(commands, "TrainLoop", note_steps)
    monkeypatch.setattr(commands, "measure_", note_samples)
    run_train(TrainCommand(recipe=DEMO, out=tmp_path / "refit", refit=trained))
    heads = [RunFolder.open(path).read_head() for path in (trained, tmp_path / "refit")]
    assert [head["refit"] for head in heads] == [False, True]
    data, epochs = demo(None).data, len(RunFolder.open(tmp_path / "refit").read_head()["metrics"])
    assert steps == [sum(1 for _ in data.train) + sum(1 for _ in data.validation)]
    assert epochs
    history = json.loads((tmp_path / "refit" / "results.json").read_text())["history"]
    assert len(history) == heads[0]["best_epoch"] + 1
    run_compress(CompressCommand(recipe=DEMO, source=tmp_path / "refit", out=tmp_path / "small", compression="2"))
    assert held_out[0].equal(torch.cat([batch.labels for batch in data.selection]))
    for command in (
        lambda: run_train(TrainCommand(recipe=DEMO, out=tmp_path / "again", refit=tmp_path / "refit")),
        lambda: run_search(quick_search(tmp_path / "search", source=tmp_path / "refit")),
    ):
        with pytest.raises(ValueError, match="refit"):
            command()


def test_what_cannot_be_is_refused_before_anything_is_written(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compression"):
        run_compress(CompressCommand(recipe=DEMO, source=trained, out=tmp_path / "out", compression="9e9"))
    assert list(tmp_path.iterdir()) == []
    run = shutil.copytree(trained, tmp_path / "run")
    with pytest.raises(ValueError, match="another folder"):  # it would replace the model that it reads
        run_compress(CompressCommand(recipe=DEMO, source=run, out=run, compression="2", overwrite=True))
    assert files_of(run) == files_of(trained)


def test_a_search_leaves_rows_epochs_and_blocks(searched: Path) -> None:
    results = json.loads((searched / "results.json").read_text())
    assert [row["method"] for row in results["rows"]] == [SEARCH, UNCOMPRESSED, "int8 rows", "int4 rows"]
    row = results["rows"][0]
    assert row["compression"] == pytest.approx(1664 / row["num_bytes"])
    assert row["compression"] >= 4
    assert row["num_bytes"] == RunFolder.open(searched).scheme().served_bytes("packed")
    phases = [record["phase"] for record in results["history"]]
    assert phases[0] == "plain"
    assert set(phases) == {"plain", "ramp", "release"}
    assert {block["table"] for block in results["blocks"]} == {"user", "genre"}


def test_export_and_evaluate_agree_to_the_digit(searched: Path, tmp_path: Path) -> None:
    expected = json.loads((searched / "results.json").read_text())["rows"][0]["metrics"]
    both = tmp_path / "both"
    for out, forms in ((tmp_path / "artifact", ()), (both, ("--form", "packed", "--form", "mixed_dimension"))):
        done = dnis("export", searched, *forms, "--out", out)
        assert (done.returncode, done.stdout) == (0, f"artifact: {out}\n")
    done = dnis("evaluate", both, "--recipe", DEMO, "--verify", "--json", tmp_path / "verified.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "verified.json").read_text())["ok"]
    for path in (searched, both, tmp_path / "artifact"):
        done = dnis("evaluate", path, "--recipe", DEMO, "--json", tmp_path / "result.json")
        result = json.loads((tmp_path / "result.json").read_text())
        assert json.loads(done.stdout) == result
        assert result["metrics"] == pytest.approx(expected, abs=1e-6)
        assert result["kind"] == ("run" if path == searched else "artifact")
    file = next(both.glob("packed/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    done = dnis("evaluate", both, "--verify")
    assert done.returncode == 1
    assert file.name in done.stderr


def test_report_is_one_page_of_all_runs(searched: Path, trained: Path, compressed: tuple[Path, Results]) -> None:
    with pytest.warns(UserWarning, match="other losses: uncompressed"):
        done = dnis("report", searched, trained, compressed[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"report: {searched}/report.html\n")
    for method in (SEARCH, COMPRESS, UNCOMPRESSED):
        assert f"\n{method} " in done.stdout
    assert (trained / "report.html").is_file()


def test_a_search_begins_with_a_trained_model_whatever_holds_it(trained: Path, searched: Path, tmp_path: Path) -> None:
    first = run_search(quick_search(tmp_path / "of_run", source=trained, epochs=2))
    assert first.history[0]["phase"] == "given"
    uncompressed = next(row for row in first.rows if row.method == UNCOMPRESSED)
    assert metrics_of(trained) == pytest.approx(uncompressed.metrics, abs=1e-6)
    other = run_search(quick_search(tmp_path / "of_weights", source=trained / "model.safetensors", epochs=2))
    assert other.history == first.history
    again = run_search(quick_search(tmp_path / "of_search", source=searched))
    plain = next(row for row in json.loads((searched / "results.json").read_text())["rows"] if row["name"] == "")
    assert plain["method"] == SEARCH
    begin = next(row for row in again.rows if row.method == UNCOMPRESSED)
    end = [row for row in json.loads((searched / "results.json").read_text())["rows"] if row["method"] == UNCOMPRESSED]
    assert begin.metrics == pytest.approx(end[0]["metrics"], abs=1e-6)
    with pytest.raises(ValueError, match="another folder"):
        run_search(quick_search(trained, source=trained, overwrite=True))


def test_a_search_that_gained_nothing_says_so_and_holds_plain_training_compressed(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Finish, "_is_ahead", lambda *_: False)
    results = run_search(quick_search(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["origin"] == "compress"
    assert any("gained nothing" in note for note in results.notes)
    artifact = run_export(ExportCommand(run=tmp_path / "run", out=tmp_path / "artifact"))
    assert metrics_of(artifact) == pytest.approx(results.rows[0].metrics, abs=1e-6)


def test_a_searched_run_is_compressed_as_it_was_merged(searched: Path, tmp_path: Path) -> None:
    settings = CompressCommand(recipe=DEMO, source=searched, out=tmp_path / "out", compression="2")
    results = run_compress(settings)
    expected = json.loads((searched / "results.json").read_text())["rows"][0]["metrics"]
    assert results.rows[0].metrics == pytest.approx(expected, abs=1e-5)
    for words in (("export", tmp_path / "out"), ("compress", DEMO, "--from", tmp_path / "out", "--compression", 2)):
        assert dnis(*words, "--out", tmp_path / "more").returncode in (1, 2)


def test_a_table_needs_no_recipe_and_its_roles_are_given_once(gloo, tmp_path: Path, monkeypatch) -> None:
    table, run, small = write_table(tmp_path / "clicks.csv", num_rows=1500), tmp_path / "run", tmp_path / "small"

    def say(*words: object) -> str:
        done = dnis(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    say("train", table, *ROLES, "--out", run, *SHORT)
    assert json.loads((run / "run.json").read_text())["recipe"] == str(table)
    say("compress", table, "--from", run, "--compression", 4, "--out", small)
    assert BY_TIME in json.loads((small / "results.json").read_text())["notes"]
    say("search", table, *ROLES, "--from", run, "--compression", 4, "--out", tmp_path / "searched", *SHORT)
    say("search", table, "--from", run, "--compression", 4, "--out", tmp_path / "searched", *SHORT, "--resume")
    say("export", tmp_path / "searched", "--out", tmp_path / "artifact")
    for path, results in ((run, run), (small / "x4", small), (tmp_path / "artifact", tmp_path / "searched")):
        rows = json.loads((results / "results.json").read_text())["rows"]
        row = next(row for row in rows if results != small or row["name"] == "x4")
        said = json.loads(say("evaluate", path, "--recipe", table))
        assert said["metrics"] == pytest.approx(row["metrics"], abs=1e-6)
    say("evaluate", tmp_path / "artifact", "--verify", "--recipe", table, *ROLES)
    rows = pd.read_csv(table).head(8)
    for path in (small / "x4", tmp_path / "artifact"):
        assert bool(load_predictor(path)(rows).isfinite().all())
    monkeypatch.setattr(commands, "write_package", lambda model, batch, out, **_: None)
    say("package", small / "x4", "--recipe", table, "--out", tmp_path / "package")
    changed = tmp_path / "changed.csv"  # of the same sizes, with ids that have each other's rows
    pd.read_csv(table).assign(user=lambda frame: (frame["user"] + 1) % 40).to_csv(changed, index=False)
    refresh = ("refresh", changed, run, small / "x4", "--out", tmp_path / "other")
    for words in (refresh, ("package", small / "x4", "--recipe", changed, "--out", tmp_path / "other")):
        done = dnis(*words)
        assert (done.returncode, "changed.csv: expected the ids that" in done.stderr) == (1, True)
    with pytest.warns(UserWarning, match="all its rows are evaluated"):
        said = json.loads(say("evaluate", small / "x4", "--recipe", changed))
    logits, labels = load_predictor(small / "x4")(changed), torch.tensor(pd.read_csv(changed)["liked"]).float()
    assert said["metrics"]["loss"] == pytest.approx(binary_cross_entropy_with_logits(logits, labels).item(), abs=1e-6)
    pd.read_csv(table).assign(liked=lambda frame: frame["liked"] * (frame["day"] < 1350)).to_csv(changed, index=False)
    for words in (("evaluate", run, "--recipe", changed), ("train", changed, *ROLES, "--out", tmp_path / "f", *SHORT)):
        with pytest.raises(UserWarning, match="test split: expected labels that differ, got one label in all samples;"):
            dnis(*words)
    assert "name a folder in it, or export it" in dnis("evaluate", small, "--verify").stderr
    other = [word.replace("user,item", "item,user") for word in ROLES]
    done = dnis("evaluate", small / "x4", "--recipe", table, *other)
    assert done.returncode == 1
    assert "the columns of the run" in done.stderr


def test_a_table_is_a_file_or_a_folder(gloo, tmp_path: Path) -> None:
    file = write_table(tmp_path / "clicks.parquet", num_rows=600)
    frame = pd.read_csv(write_table(tmp_path / "clicks.csv", num_rows=600))
    folder, models = tmp_path / "parts", set()
    folder.mkdir()
    for number, part in enumerate((frame[:250], frame[250:])):
        part.to_csv(folder / f"part{number}.csv", index=False)
    for table in (file, folder):
        out = tmp_path / f"{table.name}.run"
        done = dnis("train", table, *ROLES, "--out", out, *SHORT)
        assert done.returncode == 0, done.stderr
        models.add((out / "model.safetensors").read_bytes())
    assert len(models) == 1


def test_a_package_answers_as_the_model_does(compressed: tuple[Path, Results], tmp_path: Path, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(commands, "write_package", lambda model, *args, **more: calls.append((model, args, more)))
    done = dnis("package", compressed[0] / "x2", "--recipe", DEMO, "--out", tmp_path / "package")
    assert done.returncode == 0, done.stderr
    ((model, (batch, out), _more),) = calls
    assert out == tmp_path / "package"
    assert model(dense_features=batch.dense_features, sparse_features=batch.sparse_features).isfinite().all()


@pytest.mark.parametrize("recipe", ["tests.models:recipe", "tests.tiny:two_tasks"])
def test_other_models_go_all_the_way(gloo, recipe: str, tmp_path: Path) -> None:
    """A feature processor, and several tasks."""
    run, small, out = tmp_path / "run", tmp_path / "small", tmp_path / "searched"
    run_train(TrainCommand(recipe=recipe, out=run, epochs=1))
    results = run_compress(CompressCommand(recipe=recipe, source=run, out=small, compression="2"))
    row = next(row for row in results.rows if row.method == COMPRESS)
    assert metrics_of(small / "x2", recipe) == pytest.approx(row.metrics, abs=1e-4)
    results = run_search(quick_search(out, recipe=recipe, source=run, compression=2.0))
    artifact = run_export(ExportCommand(run=out, out=tmp_path / "artifact"))
    assert metrics_of(artifact, recipe) == pytest.approx(results.rows[0].metrics, abs=1e-4)
    findings = run_verify(EvaluateCommand(path=artifact, recipe=recipe, verify=True))
    assert findings.failures == []


# Runs


SEARCH_WORDS = ("search", DEMO, "--compression", 4, *SHORT)


def stop_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """As Ctrl-C in that step."""
    calls = iter(range(10**6))
    patch.setattr(signals.StopRequest, "is_requested", lambda self: next(calls) == steps)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def whole(gloo, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    data = (write_table(tmp_path / "clicks.csv"), *ROLES) if kind == "table" else (DEMO,)
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
    settings = TrainCommand(recipe=DEMO, out=out, epochs=1)
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
        assert dnis(*SEARCH_WORDS, "--out", "memory://bucket/run").returncode == 1
    assert json.loads(remote.cat("/bucket/run/run.json"))["status"] == INTERRUPTED
    done = dnis(*SEARCH_WORDS, "--out", "memory://bucket/run", "--resume")
    assert done.returncode == 0, done.stderr
    assert remote.cat("/bucket/run/scheme.safetensors") == (whole / "scheme.safetensors").read_bytes()
    done = dnis("export", "memory://bucket/run", "--out", "memory://bucket/artifact")
    assert done.returncode == 0, done.stderr
    assert "memory://bucket/artifact" in done.stdout
    verify = ("evaluate", "memory://bucket/artifact", "--verify", "--recipe", DEMO)
    assert dnis(*verify).returncode == 0
    assert dnis("report", "memory://bucket/run").returncode == 0
    assert remote.exists("/bucket/run/report.html")


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        (("search", DEMO, "--compression", 4), signal.SIGINT, 130),
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
    for words in (("export", whole), ("train", DEMO, *SHORT)):  # the latter before its first step
        done = dnis(*words, "--out", tmp_path / "out")
        assert (done.returncode, done.stdout) == (128 + number, "")
        assert done.stderr.endswith(f"error: stopped by {signal.Signals(number).name}\n")
        assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in signals.REQUESTS] == handlers


def test_a_signal_after_the_last_step_leaves_a_run_to_resume(gloo, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "evaluate", lambda *_: signal.raise_signal(signal.SIGHUP))
        assert dnis(*SEARCH_WORDS, "--out", out).returncode == 129
    assert RunFolder(out).status() == INTERRUPTED
    assert dnis(*SEARCH_WORDS, "--out", out, "--resume").returncode == 0
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
    assert dnis(*SEARCH_WORDS, "--out", out).returncode == 143
    assert RunFolder(out).status() == INTERRUPTED  # with the checkpoint of the first epoch


def test_nohup_stays_in_force(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(TrainLoop, "_is_stop_requested", lambda self: bool(signal.raise_signal(signal.SIGHUP)))
    try:
        assert dnis("train", DEMO, *SHORT, "--out", tmp_path / "run").returncode == 0
    finally:
        signal.signal(signal.SIGHUP, before)
