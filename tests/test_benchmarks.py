"""Each benchmark runs in small, and writes what it promises. No assertion here looks at a clock."""

import json
import sys
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import torch

from benchmarks import compress_scale, compress_time, deltas, one_pass, plain_grid, serving, step_time
from benchmarks.compress_scale import PARTS
from benchmarks.gpu.figures import FIGURES, RESULTS, Figures, read_lines
from benchmarks.gpu.schedule import Step, run_steps
from benchmarks.gpu.step import Run, run_step
from benchmarks.gpu.steps import gpu_tests
from benchmarks.plain_grid import FILE, Point, read_runs

SMALL = {"batch_size": 32, "num_embeddings": 50, "embedding_dim": 8, "num_blocks": 3}


def small(name: str, **fields: int) -> step_time.Shape:
    """A shape that takes a moment."""
    varied = {"num_tables": None, "pooling": None, **SMALL, **fields}
    return step_time.vary(step_time.SHAPES[name], **varied)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process what a benchmark would start one for; the memory is then anybody's."""
    monkeypatch.setattr(step_time, "peak_memory", lambda shape, which: {"plain": 100, "bilevel": 110}[which])
    for name, number in (("ROUNDS", 2), ("QUICK_ROUNDS", 2), ("WARM_UP_ROUNDS", 1)):
        monkeypatch.setattr(step_time, name, number)


@pytest.mark.usefixtures("no_processes")
def test_step_time_measures_every_shape_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "times.json"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    step_time.main(["--quick", *options, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["shape"] for row in rows] == ["criteo", "dlrm_v2", "movielens"]
    for row in rows:
        assert {name: row[name] for name in SMALL} == SMALL
        assert row["rounds"] == 2
        assert row["peak_memory_ratio"] == 1.1
        assert min(row["lower_ratio"], row["upper_ratio"]) > 0
        assert row["pair_ratio"] > max(row["lower_ratio"], row["upper_ratio"])
        assert row["pair_cpu_ratio"] > max(row["lower_cpu_ratio"], row["upper_cpu_ratio"]) > 0
        assert row["output_volume_ratio"] == 1
    text = capsys.readouterr().out
    assert all(f"\n{row['shape']}: batch_size=32" in text for row in rows)


def test_lookups_are_timed_beside_every_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"CRITEO_ROWS": (900, 40, 700), "MOST_ROWS": 9000, "BATCHES": ((1, 1), (4, 3))}
    small |= {"ROUNDS": 3, "MOST_IDS_OF_TURN": 8, "SAMPLES": 512, "SAMPLES_PER_BATCH": 256}
    for name, value in small.items():
        monkeypatch.setattr(serving, name, value)
    threads = torch.get_num_threads()
    try:
        serving.main(["--quick", "--json", str(tmp_path / "rows.json")])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["case"] for row in rows} == {
        f"{tables}, {order}" for tables in ("26 tables", "one table") for order in ("no order", "sorted")
    }
    assert {row["rival"] for row in rows} >= {"ebc_fp32"}
    assert all(row["ratio"] > 0 and row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1] for row in rows)


def test_a_table_on_disk_becomes_an_artifact_within_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    compress_scale.main(["--rows", "20000", "--dim", "4", "--folder", str(tmp_path), "--json", str(path)])
    found = json.loads(path.read_text())
    assert [row["step"] for row in found["rows"]] == [
        *("count", "given counts", "finite", "blocks", "axes", "curvature", "energies", "loss sample"),
        *("allocation", "codes, written"),
    ]
    assert found["table_bytes"] == 20_000 * 4 * 4
    assert found["compression"] == found["table_bytes"] / found["served_bytes"] >= compress_scale.COMPRESSION
    assert 0 < found["peak_anonymous_bytes"] < found["limit_bytes"] == 4 * 2**30
    assert all(row["anonymous_bytes"] > 0 < row["file_bytes"] for row in found["rows"])
    assert all(rate >= 0 for rate in found["rates"].values())
    assert [each.name for each in tmp_path.iterdir()] == ["scale.json"]


def test_ranks_measure_what_they_share(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    compress_scale.main(["--ranks", "1", "--rows", "20000", "--dim", "4", "--json", str(path)])
    assert [row["step"] for row in json.loads(path.read_text())["rows"]] == ["blocks", "sample of rows", "fits"]


RECIPE = "tests.tiny:demo"


def test_every_run_is_a_line_that_is_not_repeated(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(plain_grid, "LADDER", (0.0, 0.01))
    arguments = [RECIPE, "--out", str(tmp_path), "--dims", "4", "--epochs", "2"]
    plain_grid.main(arguments)
    runs = read_runs(tmp_path / FILE)
    assert {(run["recipe"], run["embedding_dim"], run["epochs"], run["metric"]) for run in runs} == {
        (RECIPE, 4, 2, "auc")
    }
    assert len({tuple(run[name] for name in Point.__annotations__) for run in runs}) == len(runs) >= 6
    printed = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert printed[0] == plain_grid.HEAD
    assert [line.removesuffix(" *") for line in printed[1:]] == [plain_grid.line_of(run) for run in runs]
    (chosen,) = (run for run, line in zip(runs, printed[1:], strict=True) if line.endswith(" *"))
    assert chosen["selection_loss"] <= min(run["selection_loss"] for run in runs) + plain_grid.LEAST_GAIN
    monkeypatch.setattr(plain_grid, "train", lambda *_, **__: pytest.fail("it stands in the file"))
    plain_grid.main(arguments)
    assert read_runs(tmp_path / FILE) == runs


PYTHON = [sys.executable, "-X", "faulthandler", "-S", "-c"]
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
CHILD = ["sh", "-c", "trap 'echo asked to end; exit' TERM; sleep 60 & wait"]  # torchrun ends its ranks there
HANG = f"import faulthandler, signal, subprocess, time; subprocess.Popen({CHILD}); "
HANG += "faulthandler.register(signal.SIGUSR1); time.sleep(60)"


def names_in(folder: Path, step: str) -> set[str]:
    """The names of a step's figures."""
    return {line["name"] for line in read_lines(folder) if line["step"] == step and "name" in line}


def test_steps_that_fail_crash_or_hang_cost_no_other_its_figures(tmp_path: Path, capfd) -> None:
    note = f"open({str(tmp_path / FIGURES)!r}, 'a').write('{{}}\\n')".replace(
        "{}", '{"step": "STEP", "name": "one", "value": 1, "unit": "", "of": {}}'
    )
    codes = {"fails": "raise ValueError('too small')", "crashes": CRASH, "hangs": HANG, "works": "pass"}
    codes = {name: f"{note.replace('STEP', name)}; {code}" for name, code in codes.items()}
    steps = [Step(name=name, share=1.0 if name == "hangs" else 20.0) for name in codes]
    run_steps(steps, tmp_path, 60.0, lambda name: [*PYTHON, codes[name]])
    ends = {line["step"]: line for line in read_lines(tmp_path) if "outcome" in line}
    outcomes = ["failed with code 1", "crashed by SIGSEGV", "out of time", "done"]
    assert [ends[name]["outcome"] for name in codes] == outcomes
    assert "ValueError: too small" in ends["fails"]["detail"]
    assert ends["crashes"]["detail"].startswith("Fatal Python error: Segmentation fault")
    assert "in <module>" in ends["hangs"]["detail"]  # the stack that it printed when its time was over
    assert "asked to end" in (tmp_path / "hangs.log").read_text()
    assert ends["works"]["detail"] == ""
    assert all(names_in(tmp_path, name) == {"one"} for name in codes)
    assert all(part in (tmp_path / RESULTS).read_text() for part in ("| hangs | out of time |", "Fatal Python error"))
    with pytest.raises(CalledProcessError, match="SIGSEGV"):
        Run(figures=Figures(tmp_path, "starts"), folder=tmp_path, is_stand_in=True).python("one", "-S", "-c", CRASH)
    assert "Fatal Python error" in capfd.readouterr().err


EXPECTED = {
    "step_time": {"bandwidth of a copy", "selection", "tables", "step", "times a plain step", "in a row"},
    "compress": {"tables", "part", "compression", "tables in codes"},
    "serving": {"bytes", "lookup", "lookup, times dense_fp32", "packed, times dense_int4"},
    "search": {"command", "artifact"},
    "smoke": {"version", "largest difference"},
    "gains": {"epoch", "gains, in epochs"},
    "refresh": {"command", "delta applied", "bytes"},
    "gpu_tests": {"tests"},
}  # `ranks` and `package` start processes that compile or import, which takes a minute
MARKED = "import pytest\n@pytest.mark.gpu\ndef test_one():\n    pytest.skip()\n"


@pytest.mark.parametrize("step", EXPECTED)
def test_a_step_finds_its_figures(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stand-in, in this process; of tests there is one."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(MARKED)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    wrapped = compress_scale.compress  # the step wraps its functions, in a process of its own
    for module, name in (*PARTS.values(), (wrapped, "count_over_ranks")):
        monkeypatch.setattr(module, name, getattr(module, name))
    run_step(step, tmp_path, is_stand_in=True)
    assert names_in(tmp_path, step) >= EXPECTED[step]
    figures = [line for line in read_lines(tmp_path) if line.get("unit") in ("ms", "us", "s", "MB")]
    assert all(figure["value"] > 0 for figure in figures)


def test_a_stream_without_end_says_its_memory_and_deltas_their_sizes(gloo, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["one_pass", "endless", "--steps", "2"])
    one_pass.main()
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (line["step"], line["mib"] > 0) == (0, True)
    deltas.main(2000, 2000)
    assert "rows named" in capsys.readouterr().out


def test_compress_is_timed_in_epochs(gloo, capsys) -> None:
    compress_time.main(["examples.synthetic:demo", "--rows", "2", "--epochs", "1"])
    line = json.loads(capsys.readouterr().out)
    assert line["rows"] == 22_600
    assert line["compress_in_epochs"] > sum(line["gains_in_epochs"]) > 0
