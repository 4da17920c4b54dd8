"""The command that measures everything on a GPU: its steps in small on a CPU; none costs another its figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from benchmarks.compress_scale import PARTS
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.figures import FIGURES, RESULTS, Figures, Line, read_lines, tables
from benchmarks.gpu.limited import Ended, run_limited
from benchmarks.gpu.schedule import STEPS, Step, run_steps
from benchmarks.gpu.step import run_step
from benchmarks.gpu.steps import marked_tests, package, ranks, smoke, step_time
from benchmarks.gpu.timing import in_turns

CPU = torch.device("cpu")
PYTHON = [sys.executable, "-X", "faulthandler", "-S", "-c"]
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
HANG = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); time.sleep(60)"


def names_in(folder: Path, step: str) -> set[str]:
    """The names of a step's figures."""
    return {line["name"] for line in read_lines(folder) if line["step"] == step and "name" in line}


def ends_in(folder: Path) -> dict[str, Line]:
    """Step -> how it ended."""
    return {line["step"]: line for line in read_lines(folder) if "outcome" in line}


def test_steps_that_fail_crash_or_hang_cost_no_other_its_figures(tmp_path: Path) -> None:
    note = f"open({str(tmp_path / FIGURES)!r}, 'a').write('{{}}\\n')".replace(
        "{}", '{"step": "STEP", "name": "one", "value": 1, "unit": "", "of": {}}'
    )
    codes = {"fails": "raise ValueError('too small')", "crashes": CRASH, "hangs": HANG, "works": "pass"}
    codes = {name: f"{note.replace('STEP', name)}; {code}" for name, code in codes.items()}
    steps = [Step(name=name, share=1.0 if name == "hangs" else 20.0) for name in codes]
    run_steps(steps, tmp_path, 60.0, lambda name: [*PYTHON, codes[name]])
    ends = ends_in(tmp_path)
    assert {name: end["outcome"] for name, end in ends.items()} == {
        "fails": "failed with code 1",
        "crashes": "crashed by SIGSEGV",
        "hangs": "out of time",
        "works": "done",
    }
    assert "ValueError: too small" in ends["fails"]["detail"]
    assert ends["crashes"]["detail"].startswith("Fatal Python error: Segmentation fault")
    assert "in <module>" in ends["hangs"]["detail"]  # the stack that it printed when its time was over
    assert ends["works"]["detail"] == ""
    assert all(names_in(tmp_path, name) == {"one"} for name in codes)
    results = (tmp_path / RESULTS).read_text()
    assert "| hangs | out of time |" in results
    assert "Fatal Python error" in results


def test_time_that_a_step_leaves_passes_on_and_none_begins_without_time(tmp_path: Path) -> None:
    steps = [Step(name=name, share=1.0) for name in ("first", "second", "third")]
    run_steps(steps, tmp_path, 300.0, lambda name: [*PYTHON, "pass"])
    limits = [end["limit"] for end in ends_in(tmp_path).values()]
    assert limits[0] == pytest.approx(100, abs=1)
    assert limits[1] == pytest.approx((300 - ends_in(tmp_path)["first"]["seconds"]) / 2, abs=1)
    assert limits[2] > 250  # all that is left
    run_steps(steps[:1], tmp_path, 0.0, lambda name: [*PYTHON, "raise SystemExit('never begun')"])
    assert ends_in(tmp_path)["first"]["outcome"] == "no time left"


def is_alive(pid: int) -> bool:
    """Whether a process is there and not waiting to be buried."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_children_end_with_their_step(tmp_path: Path, seconds: float) -> None:
    """One that is killed, and one that ends by itself before the child does."""
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(SLEEP)"
    ended = run_limited([*PYTHON, code.replace("SLEEP", "60" if seconds == 1 else "0")], tmp_path / "log", seconds)
    assert ended.outcome == ("out of time" if seconds == 1 else "done")
    child = int((tmp_path / "log").read_text().split()[0])
    until = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_alive(child)


def test_a_log_that_is_there_is_none_of_the_next_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "first" in run_limited([*PYTHON, "raise ValueError('first')"], log, 30.0).detail
    again = run_limited([*PYTHON, "raise ValueError('second')"], log, 30.0)
    assert "second" in again.detail
    assert "first" not in again.detail
    assert not again.is_crash


def test_figures_outlive_their_process_and_half_a_line_is_passed_over(tmp_path: Path) -> None:
    Figures(tmp_path, "a").note("time", 1.23456789, "ms", batch=8)
    with (tmp_path / FIGURES).open("a") as file:
        file.write('{"step": "a", "na')
    (line,) = read_lines(tmp_path)
    assert line == {"step": "a", "name": "time", "value": 1.2346, "unit": "ms", "of": {"batch": 8}}
    assert "| time | batch 8 | 1.2346 ms |" in tables([line])
    assert "a\\|b" in tables([line | {"value": "a|b"}])


def test_every_step_is_a_module_and_times_are_those_of_all_calls() -> None:
    modules = {path.stem for path in Path(smoke.__file__).parent.glob("*.py")} - {"__init__"}
    assert {step.name for step in STEPS} == modules
    calls: list[str] = []
    times = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, turns=2, rounds=4)
    assert set(times) == {"a", "b"}
    assert calls.count("a") == calls.count("b") == 2 * (4 + 3)


EXPECTED = {
    "smoke": {"date", "version", "first pair", "pair", "waits of the host in a pair"},
    "step_time": {"bandwidth of a copy", "selection", "tables", "step", "times a plain step", "in a row"},
    "compress": {"tables", "part", "compression", "tables in codes"},
    "serving": {"bytes", "lookup", "lookup, times dense_fp32"},
    "prefetch": {"pair"},
    "ranks": {"step", "alpha, largest difference between ranks"},
    "search": {"command", "artifact"},
}


@pytest.mark.parametrize("step", EXPECTED)
def test_a_step_finds_its_figures(step: str, tmp_path: Path, no_images, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stand-in, in this process; what has to be a process of its own is tried below."""
    monkeypatch.setattr(ranks, "START_METHOD", "forkserver")  # which has imported everything
    from dnis_torchrec.allocation import compress

    for name in (*PARTS.values(), "count_over_ranks"):
        monkeypatch.setattr(compress, name, getattr(compress, name))  # the step wraps them, in a process of its own
    run_step(step, tmp_path, is_stand_in=True)
    assert names_in(tmp_path, step) >= EXPECTED[step]
    figures = [line for line in read_lines(tmp_path) if line.get("unit") in ("ms", "us", "s", "MB")]
    assert all(figure["value"] > 0 for figure in figures)


def test_the_package_is_loaded_in_processes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def in_this_process(command: list[str], log: Path, seconds: float, variables: object) -> Ended:
        started.append(command)
        exec(command[-1], {})
        return Ended(outcome="done", seconds=1.0, detail="")

    monkeypatch.setattr(package, "run_limited", in_this_process)
    run_step("package", tmp_path, is_stand_in=True)
    assert len(started) == 1 + len(package.LOADS)
    outcomes = [line["value"] for line in read_lines(tmp_path) if isinstance(line["value"], str)]
    assert outcomes == ["done"] * len(started)


def test_a_crash_leaves_its_stack_and_goes_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "sys", type("Here", (), {"executable": str(tmp_path / "python")}))
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -X faulthandler -S -c "{CRASH}"\n')
    script.chmod(0o755)
    run_step("package", tmp_path, is_stand_in=True)
    found = {line["name"]: line["value"] for line in read_lines(tmp_path)}
    assert found["compiled"] == "crashed by SIGSEGV"
    assert found["compiled, stack"].startswith("Fatal Python error: Segmentation fault")
    assert set(found) == {"compiled", "compiled, time", "compiled, stack", "compiled, backtrace of gdb"}


def test_gdb_says_where_a_crash_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gdb = tmp_path / "gdb"
    gdb.write_text(
        "#!/bin/sh\necho '(gdb) run'\necho 'Program received signal SIGSEGV'\necho '#0  load () at x.cpp:1'\n"
    )
    gdb.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert package.backtrace(["anything"], tmp_path) == "Program received signal SIGSEGV\n#0  load () at x.cpp:1"
    monkeypatch.setenv("PATH", "")
    assert package.backtrace(["anything"], tmp_path) == "no gdb here"


def test_tests_are_those_with_the_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"tests/ops/test_packed_triton.py", "tests/distributed/test_sharding_ranks.py"} <= {
        *marked_tests.files_with_marks()
    }
    assert "tests/test_checks.py" not in marked_tests.files_with_marks()
    file = tmp_path / "test_triton.py"
    file.write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_one():\n    assert False\ndef test_other():\n    assert False\n"
    )
    monkeypatch.setattr(marked_tests, "files_with_marks", lambda: [str(file)])
    with pytest.raises(RuntimeError, match="pytest ended with code 1"):
        run_step("marked_tests", tmp_path, is_stand_in=True)
    found = {line["name"]: line["value"] for line in read_lines(tmp_path)}
    assert found["failed"].startswith("FAILED")
    assert found["outcome"].startswith("1 failed")
    assert "passed" not in found["outcome"]


def test_tables_of_both_pipelines_fit_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = step_time.step_time.SHAPES["criteo"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**10))
    rows = step_time.rows_for(shape, CPU)
    assert 0.8e9 < 2 * rows * 26 * 64 * 4 <= 0.85e9
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**12, 10**12))
    assert step_time.rows_for(shape, CPU) == step_time.ROWS


def test_the_command_runs_a_step_as_a_process_and_names_the_results(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--stand-in", "--steps", "smoke", "--out", str(tmp_path / "new")],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.splitlines()[-1] == f"results: {tmp_path / 'new' / RESULTS}"
    assert "| smoke | done |" in (tmp_path / "new" / RESULTS).read_text()


def test_asked_to_end_the_command_kills_the_step_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, log = signal.getsignal(signal.SIGTERM), tmp_path / "log"
    step = "import os, signal; print(os.getpid(), flush=True); os.kill(os.getppid(), signal.SIGTERM); signal.pause()"

    def run_all(steps: object, folder: Path, seconds: float, *, is_stand_in: bool) -> None:
        run_limited([sys.executable, "-c", step], log, 60)

    monkeypatch.setattr(command, "run_all", run_all)
    try:
        with pytest.raises(SystemExit, match="143"):
            command.main(["--out", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "smoke,stepp"], "expected some of smoke, marked_tests, step_time"),
        (["--minutes", "0"], "expected a number above 0, got '0'"),
        (["--minutes", "soon"], "expected a number above 0, got 'soon'"),
        ([], "--out"),
    ],
)
def test_arguments_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)] if arguments else []
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments, *out])
    assert message in capsys.readouterr().err
    assert json.dumps([step.name for step in command.chosen_steps("search,smoke")]) == '["smoke", "search"]'
