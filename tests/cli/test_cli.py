"""The command line: what a user types, exit codes, what goes where, and that nothing is overwritten silently."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from dnis_torchrec._dependencies import version
from dnis_torchrec.cli import main
from dnis_torchrec.cli.app import ORDER, app
from tests.report.pages import without_plotly
from tests.started import start_dnis
from tests.tiny_artifact import write_tiny_artifact

ROOT = Path(__file__).parents[2]
SHORT = ("--epochs", "1", "--num-blocks", "3")


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def dnis(*arguments: object, folder: Path = ROOT) -> Done:
    """Runs the program in this process: starting Python and TorchRec anew costs seconds."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["dnis", *map(str, arguments)])
        patch.chdir(folder)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def run(gloo, no_images, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run."""
    out = tmp_path_factory.mktemp("cli") / "run"
    done = dnis("search", "tests.tiny:demo", "--compression", 4, "--out", out, *SHORT)
    assert done.returncode == 0, done.stderr
    assert "dnis" in done.stdout
    assert "epoch 0, plain: train loss" in done.stderr
    assert "epoch 0" not in done.stdout
    assert " against uncompressed, " in done.stdout
    assert done.stdout.endswith(f"next: dnis export {out} --out {out}-artifact\n")
    assert "Warning" not in done.stderr
    return out


def test_train_writes_a_run_that_is_evaluated_and_exported_and_nothing_else(gloo, tmp_path: Path) -> None:
    run, artifact = tmp_path / "trained", tmp_path / "artifact"
    train = ("train", "tests.tiny:demo", "--out", run, "--epochs", 2, "--embedding-l2", 0.01)
    done = dnis(*train)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("uncompressed")
    assert done.stdout.splitlines()[-1] == f"run: {run}"
    assert "epoch 1: train loss" in done.stderr
    assert "epoch" not in done.stdout
    again = dnis(*train)
    assert again.returncode == 2
    assert "choose another --out or --overwrite the run" in again.stderr
    assert dnis(*train, "--overwrite").returncode == 0
    assert dnis("evaluate", run).returncode == 0
    exported = dnis("export", run, "--form", "dense_int8", "--form", "mixed_dimension", "--out", artifact)
    assert exported.returncode == 0, exported.stderr
    assert dnis("evaluate", artifact).returncode == 0
    for refused in (("report", run),):
        done = dnis(*refused)
        assert done.returncode in (1, 2)
        assert "expected a run of `dnis search`, got a trained one" in done.stderr


def test_compress_prints_a_line_per_size_and_writes_the_same_numbers(gloo, tmp_path: Path) -> None:
    run, out, file = tmp_path / "run", tmp_path / "small", tmp_path / "rows.json"
    assert dnis("train", "tests.tiny:demo", "--out", run, "--epochs", 2, "--embedding-l2", 0.01).returncode == 0
    compress = ("compress", run, "--compression", "2,3.5", "--num-blocks", 2, "--out", out)
    done = dnis(*compress, "--json", file)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert rows == json.loads((out / "compress.json").read_text())["rows"]
    for row, name in zip(
        rows, ("uncompressed", "x2", "x3.5", "int8 rows", "int4 rows", "cut axes", "cut axes"), strict=True
    ):
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
        assert f"{row['bytes']:,}" in line
        assert f"{row['metrics']['auc']:.4f}" in line
        assert f"{row['selection']['auc']:.4f}" in line
    ends = [f"artifact: {out}/x2", f"artifact: {out}/x3.5", f"report: {out}/report.html"]
    lines = done.stdout.splitlines()
    told, *uncertain, last = lines[lines.index("") + 1 :]
    assert lines[lines.index("") - 3 : lines.index("")] == ends
    assert told.startswith(f"{rows[2]['compression']:.3g} times smaller: test auc {rows[2]['metrics']['auc']:.4f}, ")
    assert " against uncompressed, " in told
    assert uncertain[0].startswith("  uncertain: one seed: ")
    assert uncertain[1] == "  uncertain: small test split: 128 samples"
    assert last == f"next: dnis verify {out}/x3.5"
    assert dnis("evaluate", out / "x2").returncode == 0
    for line, told in (
        (
            compress,
            "expected a folder that does not exist, got an existing one; choose another --out or --overwrite it",
        ),
        (("compress", run, "--out", tmp_path / "o"), "size: expected compressions or a largest loss, got neither"),
        ((*compress[:2], "--compression", "2,x", "--out", tmp_path / "o"), "--compression: expected numbers"),
        (
            ("compress", tmp_path / "no", "--compression", 2, "--out", tmp_path / "o"),
            "no: expected a run, or a recipe's module:function",
        ),
        (("report", out), "expected a run, got what `dnis compress` wrote; its page is report.html"),
    ):
        refused = dnis(*line)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert told in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "run", "small"]


def test_search_writes_what_others_rely_on(run: Path) -> None:
    rows = json.loads((run / "report.json").read_text())["rows"]
    assert [row["method"] for row in rows] == [
        *("dnis", "uncompressed", "int8 rows", "int4 rows", "dense", "uniform", "magnitude")
    ]
    first = rows[0]
    served = first["bytes"]["packed"]
    assert 4 <= first["compression"] == 1664 / served <= 4 * 1.25
    assert first["dense_parameters"] == 416
    assert set(first["bytes"]) == {"dense_fp32", "csr_fp32", "mixed_dimension", "packed"}
    assert {"auc", "logloss"} <= set(first["metrics"])
    assert first["seed"] == 0
    assert first["seconds"] > 0
    assert list((run / "tensorboard" / run.name).glob("events*"))
    assert rows[1]["parameters"] == 416
    for rival in rows[5:]:  # in whichever precision
        assert 1664 / rival["compression"] <= 1.02 * served


def test_export_and_evaluate_agree_to_the_digit(run: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    done = dnis("export", run, "--out", artifact, "--scipy", "csr", "--regroup", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == f"artifact: {artifact}"
    assert "recommended" in done.stdout
    assert "csr_int8" in done.stdout
    results = {}
    for name, path in (("run", run), ("artifact", artifact)):
        done = dnis("evaluate", path, "--json", tmp_path / f"{name}.json")
        assert done.returncode == 0, done.stderr
        results[name] = json.loads((tmp_path / f"{name}.json").read_text())
        assert json.loads(done.stdout) == results[name]
    reported = json.loads((run / "report.json").read_text())["rows"][0]["metrics"]
    assert results["run"]["metrics"] == pytest.approx(reported, abs=1e-6)
    assert results["artifact"]["metrics"] == pytest.approx(reported, abs=1e-6)
    assert results["artifact"]["kind"] == "artifact"


def test_report_is_one_self_contained_page(run: Path) -> None:
    done = dnis("report", run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(f"report: {run / 'report.html'}")
    page = (run / "report.html").read_text()
    assert 'id="chart-quality"' in page
    assert "src=" not in without_plotly(page)


def test_report_prints_the_rows_of_its_page_and_names_runs_that_are_in_charts_only(run: Path, tmp_path: Path) -> None:
    alone = dnis("report", run).stdout
    assert dnis("report", run, run).stdout == alone
    done = dnis(
        "search", "tests.tiny:demo", "--compression", 4, "--out", tmp_path / "coarse", *SHORT, "--num-blocks", 2
    )
    assert done.returncode == 0, done.stderr
    told = f"of another D or S, in the charts only: {tmp_path / 'coarse'}\n"
    *rows, last = alone.splitlines(keepends=True)
    assert dnis("report", run, tmp_path / "coarse").stdout == "".join([*rows, told, last])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["search", "tests.tiny:demo", "--compression", 0.5],
            "--compression: expected a finite number above 1, got 0.5",
        ),
        (
            ["search", "tests.tiny:demo", "--compression", "inf"],
            "--compression: expected a finite number above 1, got inf",
        ),
        (
            ["search", "tests.tiny:demo", "--compression", "nan"],
            "--compression: expected a finite number above 1, got nan",
        ),
        (["search", "tests.tiny:demo", "--ramp-share", 0], "ramp_share: expected a finite number above 0, got 0.0"),
        (["search", "tests.tiny:demo", "--patience", 0], "patience: expected at least 1, got 0"),
        (["search", "tests.tiny:demo", "--embedding-bytes", 9], "No such option: --embedding-bytes"),
        (["search", "tests.tiny:demo", "--compression", 4, "--embedding-dim", 0], "embedding_dim: expected an integer"),
        (["search", "tests.tiny:nothing", "--compression", 4], "got 'nothing'; known names: 'demo'"),
        (["search", "tests.tiny:dmeo", "--compression", 4], "did you mean 'demo'?"),
        (["search", "nowhere:demo", "--compression", 4], "expected a module 'nowhere'"),
        (["search", "demo", "--compression", 4], "expected 'module:function', got 'demo'; name one"),
        (
            ["search", "tests.tiny:demo", "--compression", 4, "--data", "no/such"],
            "expected a folder, got none; without",
        ),
        (["search", "tests.tiny:demo", "--compression", 4, "--sed", 1], "No such option"),
        (["train", "tests.tiny:demo", "--embedding-l2", -1], "embedding_l2: expected a finite number >= 0, got -1.0"),
        (["train", "tests.tiny:demo", "--epochs", 0], "epochs: expected an integer >= 1, got 0"),
        (["train", "tests.tiny:demo", "--data", "no/such"], "expected a folder, got none; without --data"),
        (["train", "tests.tiny:dmeo"], "did you mean 'demo'?"),
        (["export", "no/such"], "expected a folder written by `dnis search` or `dnis train`, got no run.json in it"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[object], message: str, tmp_path: Path) -> None:
    done = dnis(*arguments, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("export", ["--form", "crs_int8"], "form 'crs_int8': expected a known form, got 'crs_int8'; did you mean"),
        ("export", ["--form", "csr_fp32", "--form", "csr_fp32"], "forms: expected each once"),
        ("export", ["--scipy", "cso"], "scipy format 'cso': expected a known scipy format, got 'cso'; did you mean"),
    ],
)
def test_arguments_that_do_not_fit_a_run_exit_with_2(
    run: Path, tmp_path: Path, command: str, options: list[object], message: str
) -> None:
    done = dnis(command, run, *options, "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {message}" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--form", "crs_int8"], "form 'crs_int8': expected a known form, got 'crs_int8'; did you mean")],
)
def test_arguments_that_do_not_fit_an_artifact_exit_with_2(options: list[str], message: str, tmp_path: Path) -> None:
    done = dnis("package", write_tiny_artifact(tmp_path / "artifact"), *options, "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {message}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_folder_of_a_result_is_looked_for_before_the_work(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "none" / "result.json"
    done = dnis("evaluate", run, "--json", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--json {file}: expected an existing folder, got {file.parent}" in done.stderr
    done = dnis("evaluate", run, "--json", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--json {tmp_path}: expected a file, got a folder; name a file in it" in " ".join(done.stderr.split())
    done = dnis("evaluate", run, "--json", "/dev/null")
    assert done.returncode == 2
    assert "--json /dev/null: expected a file, got a pipe or a device; name a file" in done.stderr


def test_an_existing_run_is_never_overwritten_silently(run: Path, tmp_path: Path) -> None:
    before = (run / "run.json").read_bytes()
    done = dnis("search", "tests.tiny:demo", "--compression", 4, "--out", run)
    assert done.returncode == 2
    assert (
        "expected a folder that does not exist, got an existing one; choose another --out, --resume the run or"
        in done.stderr
    )
    assert (run / "run.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    done = dnis("search", "tests.tiny:demo", "--compression", 4, "--out", tmp_path / "mine", "--overwrite")
    assert done.returncode == 2
    assert (tmp_path / "mine" / "file").exists()


def test_a_size_that_cannot_be_met_exits_with_1_and_says_what_can(tmp_path: Path) -> None:
    done = dnis("search", "tests.tiny:demo", "--compression", 4000, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "compression: expected at most" in done.stderr
    assert not (tmp_path / "out").exists()  # nothing was trained, so nothing stands in the way of the next try


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_export_of_the_unfinished_run_is_refused(tmp_path: Path, number: int, code: int) -> None:
    out = tmp_path / "run"
    search = start_dnis(tmp_path, "search", "tests.tiny:demo", "--compression", 4, "--out", out, "--patience", 500)
    deadline = time.monotonic() + 120
    while not (out / "checkpoints" / "latest.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    search.send_signal(number)
    found, _, messages = search.ended(timeout=60)
    assert found == code
    assert "stopped on request; everything is saved in" in messages
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    done = dnis("export", out, "--out", tmp_path / "artifact")
    assert done.returncode == 2
    assert "expected a search that has finished, got 'interrupted'; run `dnis search` to its end first" in done.stderr


def test_python_m_is_the_same_program() -> None:
    command = [sys.executable, "-m", "dnis_torchrec", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment())
    assert done.stdout == dnis("--help").stdout
    assert done.stderr == ""


ANSWERED_AT_ONCE: list[tuple[str, int, str]] = [
    ("--help", 0, "A typical session"),
    ("--version", 0, f"dnis {version()}"),
    *((f"{command} --help", 0, "Options") for command in ORDER),
    *((f"{command} --no-such-option", 2, "No such option") for command in ORDER),
    ("search a:b --out a --compression 0.5", 2, "--compression: expected a finite number above 1, got 0.5"),
    ("search a:b --out a --compression 4 --num-blocks 0", 2, "num_blocks: expected at least 1, got 0"),
    ("search a:b --out a --compression 4 --keep-checkpoints 0", 2, "keep_checkpoints: expected at least 1, got 0"),
    ("compress a:b --out c --compression 4 --num-blocks 0", 2, "num_blocks: expected an integer >= 1, got 0"),
]
"""Command line, its exit code and what it says."""

ANSWER = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from dnis_torchrec.cli import main

for line in json.load(sys.stdin):
    sys.argv, said = ["dnis", *line.split()], io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, said.getvalue(), sorted({"pandas", "pyarrow", "torch", "torchrec"} & set(sys.modules))]))
"""


def test_help_and_wrong_options_need_no_torch() -> None:
    lines = json.dumps([line for line, _, _ in ANSWERED_AT_ONCE])
    done = subprocess.run(
        [sys.executable, "-c", ANSWER], cwd=ROOT, env=environment(), input=lines, capture_output=True, text=True
    )
    answers = [json.loads(answer) for answer in done.stdout.splitlines()]
    for (line, code, told), (exit_code, said, modules) in zip(ANSWERED_AT_ONCE, answers, strict=True):
        assert (exit_code, modules) == (code, []), line
        assert told in said, line


def test_help_teaches() -> None:
    done = dnis("--help")
    assert done.returncode == 0
    assert "A typical session" in done.stdout
    assert sorted(ORDER) == sorted(command.name or command.callback.__name__ for command in app.registered_commands)
    rows = [line.split() for line in done.stdout.partition("Commands")[2].splitlines()]
    listed = [row[1] for row in rows if row[1:2] and row[1] in ORDER]
    assert listed == list(ORDER)
    for command in ORDER:
        assert dnis(command, "--help").returncode == 0
