"""One pass over a stream: beside a plain loop, day after day, killed, compressed, in narrow tables, refreshed."""

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch

from dnis_torchrec import apply_delta
from dnis_torchrec.artifact.delta import read_state
from dnis_torchrec.artifact.load import read_scheme
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.cli import commands, streams
from dnis_torchrec.cli.commands import run_compress, run_evaluate, run_refresh, run_search, run_train, run_verify
from dnis_torchrec.cli.run import INTERRUPTED, RunFolder
from dnis_torchrec.cli.settings import CompressCommand, EvaluateCommand, RefreshCommand, TrainCommand
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.report.page import draw_charts
from dnis_torchrec.report.rows import COMPRESS, UNCOMPRESSED, read_results
from dnis_torchrec.training import loop as loops
from dnis_torchrec.training import progressive
from dnis_torchrec.training.checkpoint import Manifest
from dnis_torchrec.training.loop import SearchInterrupted, TrainLoop
from tests.programs import dnis
from tests.tiny import ROLES, batches_of_day, demo, files_of, quick_search, tasks_make_recipe, two_sided, write_table

DAY, NEXT, BOTH = (f"tests.tiny:{name}" for name in ("stream", "next_day", "two_days"))
HERE = "tests.cli.test_streams"


class Forgetful(nn.Module):
    """A model with dropout, which predicts otherwise while it trains."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(0.5)

    def forward(self, dense_features: Tensor, sparse_features: Any) -> Tensor:
        return self.model(self.dropout(dense_features), sparse_features)


def forgetful(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    recipe = demo(data, seed=seed, embedding_dim=embedding_dim)
    return dataclasses.replace(recipe, model=Forgetful(recipe.model), data=batches_of_day(0))


class FunctionallyForgetful(nn.Module):
    """The same, of which no module tells."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense_features: Tensor, sparse_features: Any) -> Tensor:
        return self.model(nn.functional.dropout(dense_features, 0.5, self.training), sparse_features)


def functionally_forgetful(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    recipe = demo(data, seed=seed, embedding_dim=embedding_dim)
    return dataclasses.replace(recipe, model=FunctionallyForgetful(recipe.model), data=batches_of_day(0))


RECIPES = {DAY: demo, f"{HERE}:forgetful": forgetful, f"{HERE}:functionally_forgetful": functionally_forgetful}


def tasks(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    recipe = tasks_make_recipe(seed=seed, embedding_dim=embedding_dim, embedding_l2=0.0)
    return dataclasses.replace(recipe, data=(two_sided(64, index) for index in range(30)))


def trained(out: Path, recipe: str = DAY, **settings: Any) -> RunFolder:
    run_train(TrainCommand(recipe=recipe, out=out, **({"steps": 30} | settings)))
    return RunFolder.open(out)


@pytest.fixture(scope="module")
def day(gloo, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("day") / "run")


@pytest.fixture(scope="module")
def later(day: RunFolder) -> RunFolder:
    return trained(day.path.parent / "next", NEXT, source=day.path)


def results_of(run: RunFolder) -> dict[str, Any]:
    return json.loads((run.path / "results.json").read_text())


def by_hand(recipe: Recipe, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor]]:
    """(predictions before the step, labels) of a plain loop of torch, which trains the recipe's model."""
    model, seen = recipe.model, []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    for batch in batches:
        with torch.no_grad():
            model.eval()
            seen.append((recipe.task.outputs(model, batch), batch))
            model.train()
        optimizer.zero_grad()
        recipe.task.loss(batch, recipe.task.outputs(model, batch)).backward()
        optimizer.step()
    return seen


def area(scores: Tensor, labels: Tensor) -> float:
    """Share of (positive, negative) pairs in the right order."""
    pairs = scores[labels == 1].unsqueeze(1) - scores[labels == 0].unsqueeze(0)
    return float(((pairs > 0).double() + 0.5 * (pairs == 0)).mean())


@pytest.mark.parametrize("recipe", [*RECIPES])
def test_a_pass_is_that_of_a_plain_loop_and_judged_before_each_step(gloo, recipe: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", recipe)
    plain = RECIPES[recipe](None)
    seen = by_hand(plain, [*batches_of_day(0)])
    weights = load_file(run.path / "model.safetensors")
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=1e-4)
    history = results_of(run)["history"]
    assert [record["step"] for record in history] == [*range(1, 31)]
    for record in history:
        window = seen[max(0, record["step"] - 10) : record["step"]]
        scores, labels = torch.cat([s for s, _ in window]), torch.cat([batch.labels for _, batch in window])
        assert record["auc"] == pytest.approx(area(scores, labels), abs=1e-5)
        loss = binary_cross_entropy_with_logits(scores, labels)
        assert record["logloss"] == pytest.approx(float(loss), abs=1e-5)
        assert record["loss"] == pytest.approx(float(loss), abs=1e-5)
        assert record["calibration"] == pytest.approx(float(scores.sigmoid().mean() / labels.mean()), abs=1e-4)
    (row,) = results_of(run)["rows"]
    assert row["method"] == UNCOMPRESSED
    assert row["metrics"] == {name: history[-1][name] for name in row["metrics"]} == run.read_head()["metrics"]


def test_every_task_is_judged(gloo, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", f"{HERE}:tasks")
    plain = tasks(None)
    seen = by_hand(plain, [two_sided(64, index) for index in range(30)])[-10:]
    metrics = run.read_head()["metrics"]
    scores = torch.cat([outputs["click"].flatten() for outputs, _ in seen])
    clicks = torch.cat([batch.labels[:, 0] for _, batch in seen])
    assert metrics["click_auc"] == pytest.approx(area(scores, clicks), abs=1e-5)
    errors, weights = torch.zeros(0), torch.zeros(0)
    for outputs, batch in seen:
        known = torch.where(batch.weights > 0, batch.labels[:, 1], 0)
        errors = torch.cat([errors, batch.weights * (outputs["rating"].flatten() - known) ** 2])
        weights = torch.cat([weights, batch.weights])
    assert metrics["rating_mse"] == pytest.approx(float(errors.sum() / weights.sum()), abs=1e-4)


def test_the_next_day_goes_on_as_if_it_were_one(later: RunFolder, tmp_path: Path) -> None:
    both, run = trained(tmp_path / "both", BOTH, steps=60), later
    for name in ("model", "counts"):
        first, second = (load_file(of.path / f"{name}.safetensors") for of in (both, run))
        assert {key for key in first if not first[key].equal(second[key])} == set()
    assert run.counts().num_samples == both.counts().num_samples == 60 * 64
    assert run.counts().max_bag_lengths == both.counts().max_bag_lengths
    alone = trained(tmp_path / "alone", NEXT)
    assert files_of(run.path)["recent.safetensors"] == files_of(alone.path)["recent.safetensors"]
    assert run.read_head()["stream"]["steps"] == 30
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-00000030"]


@pytest.mark.parametrize("after", [3, 17])
def test_a_pass_that_was_stopped_goes_on_to_the_same_result(
    day: RunFolder, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainLoop, "_is_stop_requested", lambda self: self._steps == after)
    with pytest.raises(SearchInterrupted):
        trained(tmp_path / "run")
    monkeypatch.undo()
    assert RunFolder(tmp_path / "run").status() == INTERRUPTED
    run = trained(tmp_path / "run", resume=True)
    for name in ("model", "counts", "recent"):
        name = f"{name}.safetensors"
        assert files_of(run.path)[name] == files_of(day.path)[name]
    assert results_of(run)["history"] == results_of(day)["history"]


def test_the_history_is_bounded_and_checkpoints_are_rare(gloo, tmp_path: Path, monkeypatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(loops, "MOST_RECORDS", 8)
    monkeypatch.setattr(loops, "STREAM_CHECKPOINT_STEPS", 7)
    save = TrainLoop._save
    monkeypatch.setattr(TrainLoop, "_save", lambda self: (written.append(self._steps), save(self))[1])
    steps = [record["step"] for record in results_of(trained(tmp_path / "run"))["history"]]
    assert written == [7, 14, 21, 28, 30]
    assert len(steps) <= 8
    assert steps[-1] == 30
    assert steps == sorted(steps)


def test_reports_are_a_hundred_or_all_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [progressive.report_steps(n) for n in (1, 99, 250, 10**4, 10**7, None)] == [1, 1, 2, 100, 100, 100]


def test_a_stream_that_ends_or_whose_time_is_over_finishes_its_run(gloo, tmp_path: Path) -> None:
    run = trained(tmp_path / "short", steps=500)
    assert run.read_head()["stream"]["steps"] == 30
    assert "The stream ended after 30 of 500 steps." in results_of(run)["notes"]
    assert results_of(run)["history"][-1]["step"] == 30
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 2))
    run = trained(tmp_path / "until", f"{HERE}:endless", steps=None, until=soon)
    assert run.counts().num_samples == 64 * run.read_head()["stream"]["steps"] > 64


def endless(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    def batches() -> Iterator[Batch]:
        while True:
            yield from batches_of_day(0, 3)

    return dataclasses.replace(demo(data, seed=seed, embedding_dim=embedding_dim), data=batches())


def test_a_run_of_a_stream_is_compressed_and_evaluated(day: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "small"
    results = run_compress(CompressCommand(recipe=DAY, source=day.path, out=out, compression="2,4"))
    rows = {row.method: row for row in results.rows}
    assert len([row for row in results.rows if row.method == COMPRESS]) == 2
    assert "newest 1,920 samples" in " ".join(results.notes)
    assert results.split == "recent"
    whole = run_evaluate(EvaluateCommand(path=day.path, recipe=DAY))["metrics"]
    assert whole == pytest.approx(rows[UNCOMPRESSED].metrics, abs=1e-6)  # here they are all of the stream
    served = run_evaluate(EvaluateCommand(path=out / "x4", recipe=DAY))["metrics"]
    assert served == pytest.approx(rows[COMPRESS].metrics, abs=1e-6)
    assert run_evaluate(EvaluateCommand(path=out / "x4", recipe=NEXT))["metrics"] != served
    assert run_verify(EvaluateCommand(path=out / "x4", recipe=DAY, verify=True)).failures == []
    assert read_manifest(out / "x4")["run"]["stream"]["steps"] == 30


def test_the_counts_of_all_days_make_the_blocks(later: RunFolder, tmp_path: Path, monkeypatch) -> None:
    given: dict[str, Any] = {}
    measure = commands.measure_
    monkeypatch.setattr(commands, "measure_", lambda *a, **options: (given.update(options), measure(*a, **options))[1])
    run_compress(CompressCommand(recipe=NEXT, source=later.path, out=tmp_path / "small", compression="2"))
    assert given["held_out"] is None
    for name, counts in given["counts"].counts.items():
        assert counts.equal(later.counts().counts[name])


def test_the_command_line_shows_the_pass(day: RunFolder, tmp_path: Path) -> None:
    done = dnis("train", NEXT, "--from", day.path, "--steps", 20, "--until", "23:59", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "step 20: train loss" in done.stderr
    assert "window loss" in done.stderr
    assert "The window auc of the uncompressed model is" in done.stdout
    done = dnis("report", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    chart = draw_charts(read_results(tmp_path / "run" / "results.json"))["history"]
    assert chart.layout.xaxis.title.text == "step"
    assert {trace.name for trace in chart.data} == {"training loss", "window loss"}


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ((DAY, "--epochs", "2"), "a stream"),
        ((DAY,), "a stream"),
        ((DAY, "--steps", "5", "--epochs", "2"), "--epochs"),
        ((DAY, "--steps", "5", "--refit", "RUN"), "--refit"),
        (("tests.tiny:demo", "--steps", "5"), "--steps"),
        ((DAY, "--until", "2020-01-01"), "--until"),
        ((DAY, "--until", "25:00"), "--until"),
        ((DAY, "--until", "soon"), "--until"),
        ((DAY, "--from", "RUN"), "--from"),
        ((DAY, "--steps", "5", "--from", "RUN", "--seed", "3"), "seed"),
    ],
    ids=" ".join,
)
def test_what_has_no_meaning_is_refused(day: RunFolder, words: tuple, place: str, tmp_path: Path) -> None:
    done = dnis("train", *(str(day.path) if word == "RUN" else word for word in words), "--out", tmp_path / "out")
    assert done.returncode in (1, 2)
    assert place in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_run_of_a_stream_is_refused(day: RunFolder, tmp_path: Path) -> None:
    run_train(TrainCommand(recipe="tests.tiny:demo", out=tmp_path / "plain", epochs=1))
    with pytest.raises(ValueError, match="a run of a stream"):
        trained(tmp_path / "out", source=tmp_path / "plain")
    for source in (tmp_path / "plain", None):
        with pytest.raises(ValueError, match="run"):
            run_compress(CompressCommand(recipe=DAY, source=source, out=tmp_path / "out", compression="2"))
    with pytest.raises(ValueError, match="a stream"):
        run_search(quick_search(tmp_path / "out", recipe=DAY))
    with pytest.raises(ValueError, match="refit"):
        run_train(TrainCommand(recipe="tests.tiny:demo", out=tmp_path / "out", refit=day.path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", [".CSV", ".Parquet"])
def test_a_table_is_a_stream_in_the_order_of_time(gloo, suffix: str, tmp_path: Path) -> None:
    table, out = write_table(tmp_path / f"day{suffix}", num_rows=3000), tmp_path / "run"
    done = dnis("train", table, *ROLES, "--steps", 99, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "The stream ended after 3 of 99 steps." in results_of(RunFolder.open(out))["notes"]
    assert RunFolder.open(out).counts().num_samples == 3000
    done = dnis("train", table, "--from", out, "--steps", 2, "--out", tmp_path / "next")
    assert done.returncode == 0, done.stderr
    assert RunFolder.open(tmp_path / "next").counts().num_samples == 3000 + 2048
    done = dnis("compress", table, "--from", tmp_path / "next", "--compression", 2, "--out", tmp_path / "small")
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "next", tmp_path / "small" / "x2"):
        done = dnis("evaluate", path, "--recipe", table)
        assert done.returncode == 0, done.stderr
    done = dnis("train", table, *ROLES[:-2], "--steps", 2, "--out", tmp_path / "none")
    assert (done.returncode != 0, "time" in done.stderr) == (True, True)
    assert not (tmp_path / "none").exists()


class World:
    """A plain run of a day and the artifact that was made of it."""

    def __init__(self, folder: Path, day: RunFolder) -> None:
        self.folder, self.day = folder, day
        run_compress(CompressCommand(recipe=DAY, source=self.day.path, compression="3", out=folder / "small"))
        (self.artifact,) = (path.parent for path in (folder / "small").glob("*/manifest.json"))
        self.narrow = self.next("narrow", DAY, self.day, steps=30)

    def next(self, name: str, recipe: str, past: RunFolder, **settings: object) -> RunFolder:
        return trained(self.folder / name, recipe, source=past.path, scheme=self.artifact, **settings)


@pytest.fixture(scope="module")
def world(day: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), day)


def shapes(run: RunFolder) -> dict[str, list[int]]:
    tensors = Manifest.read(run.latest_checkpoint()).tensors.items()
    return {key: entry["size"] for key, entry in tensors if not key.startswith("rank") and not key.endswith(".axes")}


def test_a_run_of_narrow_tables_looks_like_a_plain_one(world: World) -> None:
    assert shapes(world.narrow) == shapes(world.day)
    assert len(list(Path(world.narrow.checkpoints).iterdir())) == 1
    head = world.narrow.read_head()
    assert head["configuration"]["scheme"] == str(world.artifact)
    weights, stored = load_file(world.narrow.path / "model.safetensors"), {}
    for name in world.narrow.scheme().tables:
        key = next(key for key in weights if key.endswith(f".embedding_bags.{name}.weight"))
        stored[name] = weights[key]
        assert not stored[name].equal(load_file(world.day.path / "model.safetensors")[key])
    assert torch.isfinite(torch.cat([weight.flatten() for weight in stored.values()])).all()
    assert world.narrow.counts().num_samples == 2 * world.day.counts().num_samples


def test_two_days_in_one_scheme_are_one_run_of_both(world: World) -> None:
    """The second day stands in the axes of the artifact already; nothing is turned twice."""
    second = world.next("second", NEXT, world.narrow, steps=30)
    both = world.next("both", BOTH, world.day, steps=60)
    one, other = (load_file(run.path / "model.safetensors") for run in (second, both))
    assert one.keys() == other.keys()
    for key, value in other.items():
        torch.testing.assert_close(one[key], value, atol=1e-6, rtol=1e-5)


def test_plain_training_and_compress_go_on_with_it(world: World) -> None:
    plain = trained(world.folder / "plain", NEXT, source=world.narrow.path, steps=5)
    assert shapes(plain) == shapes(world.day)
    out = world.folder / "again"
    run_compress(CompressCommand(recipe=DAY, source=world.narrow.path, compression="3", out=out))
    (artifact,) = (path.parent for path in out.glob("*/manifest.json"))
    assert read_scheme(artifact).compression() >= 3


def test_epochs_of_splits_train_narrow_tables_too(world: World, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "tests.tiny:demo", steps=None, epochs=2, scheme=world.artifact)
    tables = load_file(run.path / "model.safetensors")
    assert {key for key in tables if not key.endswith(".axes")} == {
        key for key in load_file(world.day.path / "model.safetensors") if not key.endswith(".axes")
    }


def test_a_kill_is_gone_on_with(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are narrow again, and nothing is trained twice."""
    whole = world.next("whole", NEXT, world.day, steps=12)

    def stop(*values: object) -> None:
        raise RuntimeError("the power went")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the power went"):
        patch.setattr(streams.NarrowTraining, "plain_model", stop)
        world.next("killed", NEXT, world.day, steps=12)
    killed = world.next("killed", NEXT, world.day, steps=12, resume=True)
    one, other = (load_file(run.path / "model.safetensors") for run in (killed, whole))
    assert [key for key in other if not one[key].equal(other[key])] == []


@pytest.fixture(scope="module", params=["stream", "splits"])
def folder(
    request: pytest.FixtureRequest, world: World, later: RunFolder, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An artifact x3, and the run of the next day, or of another training; the recipe of the latter."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "stream":
        shutil.copytree(world.artifact, folder / "small" / "x3")
        shutil.copytree(later.path, folder / "next")
        (folder / "recipe").write_text(NEXT)
        return folder
    recipe = "tests.tiny:demo"
    for name, epochs in (("run", 1), ("next", 3)):
        run_train(TrainCommand(recipe=recipe, out=folder / name, epochs=epochs))
    run_compress(CompressCommand(recipe=recipe, source=folder / "run", out=folder / "small", compression="3"))
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


def test_a_delta_makes_of_the_artifact_what_the_run_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = refresh(folder, "delta", delta=True)
    assert any("drift" in line for line in lines)
    shutil.copytree(folder / "small" / "x3", folder / "served")
    apply_delta(folder / "served", folder / "delta")
    old, new = (read_state(path) for path in (folder / "small" / "x3", folder / "served"))
    assert any(not rows.equal(old.rows[name]) for name, rows in new.rows.items())
    for name, table in new.scheme.tables.items():
        assert table.bits[: old.scheme.tables[name].num_blocks].equal(old.scheme.tables[name].bits)
    weights = load_file(folder / "next" / "model.safetensors")
    bias = next(key for key in new.dense if key.endswith("0._linear.bias") and key in weights)
    assert new.dense[bias].equal(weights[bias])
    assert not run_verify(EvaluateCommand(path=folder / "served", verify=True)).failures
    with pytest.raises(ValueError, match="delta"):
        apply_delta(folder / "served", folder / "delta")
    # where the run that the artifact was made of is gone, all rows are compared: to the same end
    head, base = RunFolder.open(folder / "next").read_head(), read_state(folder / "small" / "x3")
    is_stream = "stream" in head
    assert set(commands.previous_tables(head, base)) == (set(base.scheme.tables) if is_stream else set())
    gone = head | {"configuration": head["configuration"] | {"from": str(folder / "gone")}}
    other = dataclasses.replace(base, run=base.run | {"weights_sha256": "0" * 64})
    assert not commands.previous_tables(gone, base) | commands.previous_tables(head, other)
    monkeypatch.setattr(commands, "previous_tables", lambda *_: {})
    refresh(folder, "again", delta=True)
    assert files_of(folder / "again") == files_of(folder / "delta")
