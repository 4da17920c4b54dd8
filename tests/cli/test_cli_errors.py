"""What a user sees when the system refuses, a signal strikes, or names steer terminals: one line, nothing half done."""

from __future__ import annotations

import ast
import errno
import io
import json
import logging
import os
import signal
import sys
import threading
import warnings
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from rich.table import Table
from safetensors import SafetensorError

from dnis_torchrec.artifact import write
from dnis_torchrec.checks import describe_error, is_of_system, visible
from dnis_torchrec.cli import terminal
from dnis_torchrec.cli.app import ORDER, print_table
from dnis_torchrec.data.files import written_whole
from dnis_torchrec.jobs import report_job, search_job
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.training import settings as signals
from dnis_torchrec.training.loop import SearchLoop
from tests.cli.test_cli import SHORT, dnis
from tests.test_architecture import sources
from tests.tiny_artifact import write_tiny_artifact

pytestmark = pytest.mark.usefixtures("no_images")

LONG = "n" * 300
SEARCH = ("search", "tests.tiny:demo", "--compression", 4, *SHORT)
EVIL = "\x1b]0;title\x07\x1b[2J\x9b1m\u202egnp.exe\r"
SHOWN = r"\u001b]0;title\u0007\u001b[2J\u009b1m\u202egnp.exe\u000d"


@pytest.fixture(scope="module")
def run(gloo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("errors") / "run"
    assert dnis(*SEARCH, "--out", out).returncode == 0
    return out


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_artifact(tmp_path_factory.mktemp("errors") / "artifact")


def commands(run: Path, artifact: Path, out: Path) -> dict[str, tuple[object, ...]]:
    """Every command that does its work if nothing comes between."""
    return {
        "train": ("train", "tests.tiny:demo", "--out", out),
        "compress": ("compress", run, "--compression", 2, "--num-blocks", 2, "--out", out),
        "search": (*SEARCH, "--out", out),
        "evaluate": ("evaluate", run),
        "export": ("export", run, "--out", out),
        "package": ("package", artifact, "--out", out),
        "compare": ("compare", "tests.tiny:demo", "--methods", "uniform", "--out", out),
        "report": ("report", run),
    }


WORK = {
    "train": "jobs.train_job.run_train",
    "compress": "jobs.compress_job.run_compress",
    "search": "jobs.search_job.run_search",
    "evaluate": "jobs.artifact_jobs.run_evaluate",
    "export": "jobs.artifact_jobs.run_export",
    "package": "artifact.package.write_package",
    "report": "jobs.report_job.run_report",
}
"""What does the work of each command."""
REFUSALS = [
    (OSError(errno.ENOSPC, "No space left on device", "out/x"), "out/x: expected room on the disk, got No space left"),
    (OSError(errno.EROFS, "Read-only file system", "out/x"), "out/x: expected a place that can be written to"),
    (OSError(errno.EMFILE, "Too many open files"), "file system: expected to open one more file"),
    (OSError(errno.ESTALE, "Stale file handle", b"x"), "x: expected a file that its server still has"),
    (OSError(errno.EIO, "Input/output error", "x"), "x: expected the system to read and write, got Input/output error"),
    (RuntimeError("device.cc]\n-1. Too many open files"), "file system: expected to open one more file, got device"),
    (OSError("artifact, file 'x': expected it to be written, got No space left on device"), "artifact, file 'x': exp"),
]


@pytest.mark.parametrize("command", WORK)
def test_what_the_system_refuses_is_one_line_in_every_command(
    run: Path, artifact: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WORK.keys() == commands(run, artifact, tmp_path).keys() == set(ORDER)
    for error, told in REFUSALS:

        def refused(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(f"dnis_torchrec.{WORK[command]}", refused)
        done = dnis(*commands(run, artifact, tmp_path / "out")[command])
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {told}")
        assert done.stderr.count("\n") == 1


def test_what_is_no_refusal_of_the_system_keeps_its_traceback() -> None:
    assert not is_of_system(KeyError("x"))
    assert describe_error(KeyError("x")) == "'x'"
    assert describe_error(OSError("no such thing")) == "no such thing"
    both = OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b")
    assert describe_error(both) == "a, b: expected the system to read and write, got Invalid cross-device link"


def test_names_that_no_file_can_have(run: Path, artifact: Path, tmp_path: Path) -> None:
    """Too long, or below a file: for every argument and option that is a path."""
    file = tmp_path / "file"
    file.touch()
    for name, arguments in commands(run, artifact, tmp_path / LONG).items():
        lines = [arguments] if "--out" in arguments else []
        if name in ("evaluate", "verify", "plan"):
            lines += [(*arguments, "--json", tmp_path / LONG), (*arguments, "--json", file / "x")]
        if name in ("search", "compare", "package", "evaluate", "verify"):
            lines.append((*commands(run, artifact, tmp_path / "out")[name], "--data", tmp_path / LONG))
        if name not in ("search", "compare"):
            lines += [(name, path, *arguments[2:]) for path in (tmp_path / LONG, file / "x", file)]
        for line in lines:
            done = dnis(*line)
            assert done.returncode in (1, 2), line
            assert done.stderr.splitlines()[-1].startswith("error: "), line
            assert ": expected" in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_where_a_folder_should_be_and_the_other_way_round(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, arguments in commands(run, run, tmp_path / "file" / "out").items():
        if name in ("search", "export"):
            done = dnis(*arguments)
            assert done.returncode == 1
            assert "Not a directory" in done.stderr or "File exists" in done.stderr
            assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    RunFolder.open(run)
    for name in ("counts", "blocks"):
        held = run / f"{name}.safetensors"
        held.rename(tmp_path / name)
        held.mkdir()
        done = dnis("report", run)
        held.rmdir()
        assert done.stderr == f"error: {held}: expected a file, got Is a directory; choose another name\n"
        done = dnis("report", run)
        assert done.stderr.startswith(f"error: {held}: expected it to be there, got No such file")
        (tmp_path / name).rename(held)


def test_a_full_disk_that_safetensors_tells_of_is_one_of_the_system(tmp_path: Path) -> None:
    def save() -> None:
        with written_whole(tmp_path / "a.safetensors"):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match="No space left") as full:
        save()
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize("number", signals.REQUESTS)
def test_commands_without_checkpoints_end_with_a_sentence_and_leave_nothing(
    run: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def struck(*_: object, **__: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(write, "write_manifest", struck)
    monkeypatch.setattr(RunFolder, "write_head", struck)
    handlers = [signal.getsignal(each) for each in signals.REQUESTS]
    for arguments in (("export", run, "--out", tmp_path / "deep" / "artifact"),):
        done = dnis(*arguments)
        assert done.returncode == 128 + number
        assert (done.stdout, done.stderr) == ("", f"error: stopped by {signal.Signals(number).name}\n")
        assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in signals.REQUESTS] == handlers


def test_a_signal_after_the_last_step_leaves_a_run_to_resume(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_job, "evaluate", lambda *_: signal.raise_signal(signal.SIGHUP))
        done = dnis(*SEARCH, "--out", out)
    assert done.returncode == 129
    assert done.stderr.endswith("error: stopped by SIGHUP\n")
    assert RunFolder(out).status() == "interrupted"
    assert dnis(*SEARCH, "--out", out, "--resume").returncode == 0
    assert RunFolder(out).status() == "finished"


def test_a_second_signal_ends_a_search_that_does_not_come_to_its_next_step(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)

    def stuck(self: SearchLoop) -> bool:
        if self.history:
            signal.raise_signal(signal.SIGTERM)
        return False

    monkeypatch.setattr(SearchLoop, "_is_stop_requested", stuck)
    out = tmp_path / "run"
    done = dnis(*SEARCH, "--out", out)
    assert done.returncode == 143
    assert done.stderr.endswith("error: stopped by SIGTERM\n")
    assert RunFolder(out).status() == "interrupted"  # with the checkpoint of the first epoch


def test_the_first_signal_saves_and_tells_its_number(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter(range(10**6))
    plain = SearchLoop._is_stop_requested

    def struck(self: SearchLoop) -> bool:
        if next(asked) == 5:
            signal.raise_signal(signal.SIGHUP)
        return plain(self)

    monkeypatch.setattr(SearchLoop, "_is_stop_requested", struck)
    done = dnis(*SEARCH, "--out", tmp_path / "run")
    assert done.returncode == 129
    assert "stopped on request; everything is saved in" in done.stderr
    assert RunFolder(tmp_path / "run").status() == "interrupted"


def test_nohup_stays_in_force(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(SearchLoop, "_is_stop_requested", lambda self: bool(signal.raise_signal(signal.SIGHUP)))
    try:
        assert dnis(*SEARCH, "--out", tmp_path / "run").returncode == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (EVIL, SHOWN),
        ("Grüße, 表, 😀\tund\nmehr", "Grüße, 表, 😀\tund\nmehr"),
        ("\U000e0041\ud800\x7f\u2028", r"\U000e0041\ud800\u007f\u2028"),
    ],
)
def test_what_would_steer_a_terminal_becomes_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(visible(text)) == shown


def test_names_of_others_do_not_steer_the_terminal(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = tmp_path / "run"
    forged.mkdir()
    for file in run.iterdir():
        if file.is_file():
            (forged / file.name).write_bytes(file.read_bytes())
    rows = json.loads((run / "report.json").read_text())
    rows["rows"][0]["method"] = EVIL
    (forged / "report.json").write_text(json.dumps(rows))
    monkeypatch.setattr(report_job, "run_report", lambda *_: None)
    done = dnis("report", forged)
    assert done.returncode == 0, done.stderr
    assert SHOWN in done.stdout
    head = json.loads((run / "run.json").read_text()) | {"format": EVIL}
    (forged / "run.json").write_text(json.dumps(head))
    of_json = dnis("report", forged)
    of_path = dnis("export", tmp_path / EVIL, "--out", tmp_path / "out")
    assert SHOWN in of_path.stderr
    for text in (done.stdout, of_json.stderr, of_path.stderr):
        assert all(character.isprintable() or character == "\n" for character in text)
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    print_table(table, 400)
    assert capsys.readouterr().out.count(SHOWN) == 3


def test_logs_warnings_and_tracebacks_do_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    record = logging.LogRecord("x", logging.WARNING, "x", 1, EVIL, None, None)
    for owner, name in ((warnings, "formatwarning"), (sys, "excepthook"), (threading, "excepthook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with redirect_stderr(shown):
        terminal.guard_standard_error()
        logging.getLogger().handle(record)
        print(warnings.formatwarning(EVIL, UserWarning, "x.py", 1), file=sys.stderr)
        try:
            raise KeyError(EVIL)
        except KeyError as error:
            sys.excepthook(KeyError, RuntimeError(EVIL), error.__traceback__)
        full = threading.Thread(target=lambda: os.open("/no/such", os.O_RDONLY), name=EVIL)
        full.start()
        full.join()
    text = shown.getvalue()
    assert text.count(SHOWN) == 4
    assert all(character.isprintable() or character == "\n" for character in text)
    assert f"WARNING: thread {SHOWN}: /no/such: expected it to be there, got No such file or directory" in text


PRINTERS = {"print", "echo", "secho", "Console", "print_exc", "print_exception"}
ALLOWED = {
    "dnis_torchrec/cli/terminal.py",  # the one way to the terminal
    "dnis_torchrec/cli/app.py",  # the width of the terminal
}


def unguarded(path: str, source: str) -> list[str]:
    """Calls that print past `visible`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            of_bar = name == "write" and owner in ("bar", "tqdm", "sys.stderr", "sys.stdout")
            is_plain = of_bar and not ast.unparse(node.args[0]).startswith(("visible(", "f'epoch", "f'resumed"))
            if path not in ALLOWED and ((name in PRINTERS and owner != "console") or is_plain):
                found.append(f"{path}:{node.lineno} {ast.unparse(node)[:60]}")
    return found


def test_nothing_prints_past_the_one_way_to_the_terminal() -> None:
    assert [line for path, source in sources("dnis_torchrec").items() for line in unguarded(path, source)] == []
    assert len(unguarded("a.py", "typer.echo(name)\nprint(name)\nbar.write(name)\nConsole()")) == 4
