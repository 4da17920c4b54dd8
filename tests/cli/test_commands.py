"""The commands, one after the other: what each leaves is what the next reads, and metrics stay to the digit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from dnis_torchrec.allocation.compress import Measured
from dnis_torchrec.artifact.export import load_predictor
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.cli import commands, judge
from dnis_torchrec.cli.commands import run_compress, run_evaluate, run_export, run_search, run_train, run_verify
from dnis_torchrec.cli.judge import BY_TIME
from dnis_torchrec.cli.run import RunFolder
from dnis_torchrec.cli.settings import CompressCommand, EvaluateCommand, ExportCommand, TrainCommand
from dnis_torchrec.report.rows import COMPRESS, SEARCH, UNCOMPRESSED, Results
from dnis_torchrec.search.search import _Finish
from dnis_torchrec.training.loop import TrainLoop
from tests.programs import SHORT, dnis
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


def test_sizes_do_not_depend_on_each_other(compressed: tuple[Path, Results], trained: Path, tmp_path: Path) -> None:
    settings = CompressCommand(recipe=DEMO, source=trained, out=tmp_path / "one", compression="3.5")
    run_compress(settings)
    assert files_of(tmp_path / "one" / "x3.5") == files_of(compressed[0] / "x3.5")


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
    other = [word.replace("user,item", "item,user") for word in ROLES]
    done = dnis("evaluate", small / "x4", "--recipe", table, *other)
    assert done.returncode == 1
    assert "the columns of the run" in done.stderr


def test_a_table_is_a_file_or_a_folder_of_csv_or_parquet(gloo, tmp_path: Path) -> None:
    models = set()
    for ending in (".csv", ".parquet"):
        file = write_table(tmp_path / f"clicks{ending}", num_rows=600)
        folder = tmp_path / ending[1:]
        folder.mkdir()
        frame = pd.read_csv(file) if ending == ".csv" else pd.read_parquet(file)
        for number, part in enumerate((frame[:250], frame[250:])):
            path = folder / f"part{number}{ending}"
            part.to_csv(path, index=False) if ending == ".csv" else part.to_parquet(path)
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
