"""`dnis compress`: what it says of each size is what the artifact serves; all of it appears, or nothing does."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import save as save_checkpoint

from dnis_torchrec.allocation.axes import has_axes
from dnis_torchrec.artifact.export import drop_in_
from dnis_torchrec.artifact.load import load, load_dense_state, read_scheme
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.jobs import compress_job
from dnis_torchrec.jobs.artifact_jobs import run_evaluate, run_export
from dnis_torchrec.jobs.compress_job import CompressJob, run_compress
from dnis_torchrec.jobs.report_job import run_report
from dnis_torchrec.jobs.run_folder import RunFolder, RunWriteError
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.jobs.train_job import TrainJob, run_train
from dnis_torchrec.report.compression_content import CompressionContent
from dnis_torchrec.training.evaluate import evaluate
from tests.report.pages import without_plotly
from tests.searched_runs import files_of, quick_job
from tests.tiny import ROWS, demo

DENSE_BYTES = 4 * 8 * sum(ROWS.values())
SIZES = (2.0, 3.5)
CPU = torch.device("cpu")


def job(run: Path | None, out: Path, **fields: Any) -> CompressJob:
    sizes = {} if "max_loss" in fields else {"compressions": SIZES}
    return CompressJob(**{"run": run, "recipe": None, "data": None, "out": out, "num_blocks": 2} | sizes | fields)


@pytest.fixture(scope="module")
def run(gloo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compress") / "run"
    run_train(TrainJob(recipe="tests.tiny:demo", data=None, out=out, embedding_l2=0.01, epochs=4))
    return out


@pytest.fixture(scope="module")
def compressed(run: Path) -> tuple[Path, CompressionContent]:
    out = run.parent / "compressed"
    return out, run_compress(job(run, out))


def test_each_size_is_an_artifact_that_serves_what_its_row_says(
    run: Path, compressed: tuple[Path, CompressionContent]
) -> None:
    out, content = compressed
    assert {path.name for path in out.iterdir()} == {"x2", "x3.5", "compress.json", "report.html"}
    before, *rows = json.loads((out / "compress.json").read_text())["rows"]
    assert rows == content.to_json()["rows"][1:]
    assert (before["method"], before["compression"], before["bytes"]) == ("uncompressed", 1.0, DENSE_BYTES)
    assert before["metrics"] == pytest.approx(RunFolder.open(run).read_head()["metrics"], abs=1e-6)
    assert before["selection"].keys() == before["metrics"].keys()
    assert [row["method"] for row in rows] == ["compress", "compress", "int8 rows", "int4 rows", "cut axes", "cut axes"]
    for row, size in zip(rows[:2], SIZES, strict=True):
        served, path = load(out / f"x{size:g}", form="packed"), out / f"x{size:g}"
        assert (row["method"], row["name"], row["seed"]) == ("compress", path.name, 0)
        assert row["bytes"] == served.table_bytes() <= DENSE_BYTES / size
        assert row["compression"] == pytest.approx(DENSE_BYTES / row["bytes"])
        assert row["metrics"] == pytest.approx(run_evaluate(path, None)["metrics"], abs=1e-6)
        assert row["metrics"] != row["selection"]
        assert read_manifest(path)["run"]["metrics"] == row["metrics"]
        dense = load_dense_state(path)
        assert has_axes(dense)
        [bias] = [name for name, value in dense.items() if value.numel() == 1]
        moved = float(dense[bias] - RunFolder.open(run).dense_state()[bias])
        assert moved == pytest.approx(read_manifest(path)["run"]["output_shift"], abs=1e-6)
        assert moved != 0
    assert before["predicted_loss_increase"] == 0


def test_beside_stand_the_models_own_rows_in_int8_and_int4_as_an_artifact_serves_them(
    run: Path, compressed: tuple[Path, CompressionContent], tmp_path: Path
) -> None:
    _, content = compressed
    forms = ("dense_int8", "dense_int4")
    run_export(run, tmp_path / "rows", forms=forms)
    for row, form in zip(content.compared[:2], forms, strict=True):
        assert row.bytes == read_scheme(tmp_path / "rows").served_bytes(form)
        assert row.compression == pytest.approx(DENSE_BYTES / row.bytes)
        plain = drop_in_(demo(None).model, tmp_path / "rows", form=form)
        served = evaluate(TrainTask(plain, nn.BCEWithLogitsLoss()), demo(None).data.test, nn.BCEWithLogitsLoss(), CPU)
        assert row.metrics == pytest.approx(served, abs=1e-6)
    assert content.compared[1].metrics != content.uncompressed.metrics
    for row, size in zip(content.compared[2:], SIZES, strict=True):
        assert row.bytes <= DENSE_BYTES / size
        assert row.compression == pytest.approx(DENSE_BYTES / row.bytes)
    alone = run_compress(job(run, tmp_path / "alone", baselines=False))
    assert [row.method for row in alone.rows] == ["uncompressed", "compress", "compress"]


def test_the_page_says_what_the_rows_do(compressed: tuple[Path, CompressionContent]) -> None:
    out, content = compressed
    page = (out / "report.html").read_text()
    for text in ("tests.tiny:demo", "x3.5", f"{content.compressed[1].bytes:,}", "generated for tests", "chart-loss"):
        assert text in page
    assert "://" not in without_plotly(page)


def test_the_models_own_tables_are_back_between_sizes(run: Path, tmp_path: Path) -> None:
    """So that the order of sizes does not matter, and each is that of the trained tables."""
    content = run_compress(job(run, tmp_path / "out", compressions=(3.5, 2.0)))
    schemes = [read_scheme(tmp_path / "out" / name) for name in ("x2", "x3.5")]
    assert [row.name for row in content.compressed] == ["x2", "x3.5"]
    first = run.parent / "compressed"
    if first.exists():
        for name, scheme in zip(("x2", "x3.5"), schemes, strict=True):
            other = read_scheme(first / name)
            assert all(table.bits.equal(other.tables[key].bits) for key, table in scheme.tables.items())


@pytest.mark.parametrize("kind", ["safetensors", "state_dict", "nested", "sharded"])
def test_weights_of_a_users_own_give_what_the_run_gives(
    run: Path, compressed: tuple[Path, CompressionContent], tmp_path: Path, kind: str
) -> None:
    state = RunFolder.open(run).state()
    file = tmp_path / ("model.safetensors" if kind == "safetensors" else "model.pt")
    if kind == "safetensors":
        save_file(state, file)
    elif kind == "sharded":
        save_checkpoint({"model": state, "epoch": 1}, checkpoint_id=file)
    else:
        torch.save(state if kind == "state_dict" else {"model": state, "optimizer": {"step": 3}, "epoch": 1}, file)
    content = run_compress(job(None, tmp_path / "out", recipe="tests.tiny:demo", weights=file))
    for row, other in zip(content.rows, compressed[1].rows, strict=True):
        assert (row.bytes, row.metrics) == (other.bytes, pytest.approx(other.metrics, abs=1e-6))


def judged(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe of `tests.tiny:demo`, tested on what the loss is predicted on."""
    recipe = demo(data, seed=seed, embedding_dim=embedding_dim)
    return replace(recipe, data=replace(recipe.data, test=recipe.data.validation))


def test_the_predicted_loss_is_that_of_a_validation_split_that_teaches_crosswise(run: Path, tmp_path: Path) -> None:
    save_file(RunFolder.open(run).state(), tmp_path / "model.safetensors")
    name = "tests.jobs.test_jobs_compress:judged"
    content = run_compress(job(None, tmp_path / "out", recipe=name, weights=tmp_path / "model.safetensors"))
    for row in content.compressed:
        taught = content.loss_increase(row)  # by all of the split, which is better there
        assert taught - 1e-6 < row.predicted_loss_increase < taught + 0.02
    assert abs(content.compressed[1].predicted_loss_increase) > 1e-5


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("over_arch", "top"): value for name, value in state.items()}


def narrower(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:, :4] if "embedding_bags.user" in name else value for name, value in state.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            renamed,
            r"expected the names of the model's own parameters, got 4 missing, such as \['over_arch.*, 4 that it",
        ),
        (narrower, r"user.weight: expected shape \(40, 8\), got \(40, 4\); use the weights of the recipe's model"),
        (lambda state: 3, "expected a state_dict, got int"),
        (
            lambda state: {"code": print},
            "expected a state_dict, read with weights_only, got UnpicklingError; save model",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    run: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    file = tmp_path / "model.pt"
    torch.save(change(RunFolder.open(run).state()), file)
    with pytest.raises(ValueError, match=f"^weights {file}.*{message}"):
        run_compress(job(None, tmp_path / "out", recipe="tests.tiny:demo", weights=file))
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_run_of_a_search_is_compressed_as_it_was_merged(gloo, no_images, tmp_path: Path) -> None:
    run_search(quick_job(tmp_path / "run", compression=2.0))
    content = run_compress(job(tmp_path / "run", tmp_path / "out", compressions=(3.0,)))
    assert content.rows[0].metrics == pytest.approx(RunFolder.open(tmp_path / "run").read_head()["metrics"], abs=1e-5)


def test_a_largest_loss_stands_in_place_of_a_size(run: Path, tmp_path: Path) -> None:
    [row] = run_compress(job(run, tmp_path / "out", max_loss=0.002)).compressed
    assert (row.name, row.predicted_loss_increase <= 0.002) == ("loss0.002", True)
    assert (tmp_path / "out" / "loss0.002" / "manifest.json").is_file()


def test_sizes_out_of_reach_are_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^compression: expected at most [\d.]+ for these tables and blocks, got 900"):
        run_compress(job(run, tmp_path / "out", compressions=(2.0, 900.0)))
    assert not list(tmp_path.iterdir())


def test_what_stood_there_stays_until_all_is_whole(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    run_compress(job(run, out, compressions=(2.0,)))
    before = files_of(tmp_path)
    with pytest.raises(
        ValueError, match=r"expected a folder that does not exist, got an existing one; .* or --overwrite"
    ):
        run_compress(job(run, out))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for failed, error in ((full, RunWriteError), (interrupted, KeyboardInterrupt)):
        with monkeypatch.context() as patch:
            patch.setattr(compress_job, "write_compression", failed)
            with pytest.raises(error):
                run_compress(job(run, out, overwrite=True))
        assert files_of(tmp_path) == before
    run_compress(job(run, out, overwrite=True))
    assert (out / "x3.5").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for other in (run, out / "x2"):
        with pytest.raises(ValueError, match="expected a folder that does not exist"):
            run_compress(job(run, other, overwrite=True))


@pytest.mark.parametrize(
    "read", [lambda out, to: run_report(out), lambda out, to: run_export(out, to, forms=("packed",))]
)
def test_what_wants_a_run_says_what_is_there(
    compressed: tuple[Path, CompressionContent], tmp_path: Path, read: Callable[[Path, Path], object]
) -> None:
    with pytest.raises(ValueError, match=r"expected a run, got what `dnis compress` wrote; its page is report\.html"):
        read(compressed[0], tmp_path / "to")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compressions": ()}, "size: expected compressions or a largest loss, got neither; say --compression"),
        ({"compressions": (2.0,), "max_loss": 0.1}, "size: expected compressions or a largest loss, got both"),
        ({"compressions": (2.0, 2.0)}, r"compression: expected each size once, got \['x2'\]"),
        ({"compressions": (1.0,)}, r"compression: expected finite numbers above 1, got 1\.0"),
        ({"compressions": (float("inf"),)}, "compression: expected finite numbers above 1, got inf"),
        ({"max_loss": 0.0}, r"max_loss: expected a finite number above 0, got 0\.0"),
        ({"num_blocks": 0}, "num_blocks: expected an integer >= 1, got 0"),
        ({"num_samples": 0}, "num_samples: expected an integer >= 1, got 0"),
        ({"seed": 1}, "run folder run: expected its own seed, got --seed 1; leave it out"),
        ({"weights": Path("w")}, "run folder run: expected its own weights, got --weights; give --weights to a recipe"),
        ({"run": None}, "model: expected a run or a recipe, got neither"),
    ],
)
def test_jobs_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        job(**{"run": Path("run"), "out": Path("out")} | fields)
