"""The command line: help at once, refusals as exit codes, one line an error, and nothing that steers a terminal."""

import ast
import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from contextlib import redirect_stderr
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

import pytest
from typer.models import OptionInfo

from dnis_torchrec.checks import describe_error, is_of_system, visible
from dnis_torchrec.cli import app, terminal
from dnis_torchrec.cli.main import ALONE, _print_findings
from dnis_torchrec.cli.settings import TableOptions
from tests.programs import ROOT, dnis
from tests.test_architecture import sources
from tests.tiny import write_tiny_artifact

EVIL = "\x1b]0;title\x07\x1b[2J\x9b1m\u202egnp.exe\r"
SHOWN = r"\u001b]0;title\u0007\u001b[2J\u009b1m\u202egnp.exe\u000d"
TINY = "tests.tiny:demo"
LINES: dict[str, tuple[str, ...]] = {
    "train": (TINY, "--out", "OUT"),
    "compress": (TINY, "--compression", "2", "--out", "OUT"),
    "search": (TINY, "--out", "OUT"),
    "export": ("RUN", "--out", "OUT"),
    "evaluate": ("RUN", "--recipe", TINY),
    "package": ("ARTIFACT", "--recipe", TINY, "--out", "OUT"),
    "refresh": (TINY, "RUN", "ARTIFACT", "--out", "OUT"),
    "report": ("RUN",),
}
"""Command -> arguments with which it does its work if nothing comes between."""
COMMANDS = tuple(LINES)
REFUSALS = [
    ("search", "--compression", "inf"),
    ("search", "--compression", "nan"),
    ("search", "--epochs", "0"),
    ("search", "--resume", "--overwrite"),
    ("search", "--data", "no/such"),
    ("search", "--from", "no/such"),
    ("train", "--seed", "-1"),
    ("train", "--label", "y"),
    ("compress", "--compression", "2,x"),
    ("compress", "--compression", "2,2"),
    ("compress", "--compression", "1"),
    ("compress", "--max-loss", "0.1"),
    ("export", "--form", "csr_fp32"),
    ("evaluate", "--json", "no/such/file"),
    ("evaluate", "--json", "."),
    ("evaluate", "--json", "/dev/null"),
    ("evaluate", "--recipe", "tests.tiny:dmeo"),
    ("package", "--recipe", "nowhere:demo"),
    ("refresh", "--overwrite"),
]
"""Options that make a good command line a bad one."""


def words(command: str, artifact: Path, folder: Path) -> list[str]:
    places = {"OUT": str(folder / "out"), "RUN": str(folder), "ARTIFACT": str(artifact)}
    return [command, *(places.get(word, word) for word in LINES[command])]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_artifact(tmp_path_factory.mktemp("lines") / "artifact")


@pytest.mark.parametrize("refusal", REFUSALS, ids=" ".join)
def test_wrong_arguments_are_refused_before_the_work(refusal: tuple[str, ...], artifact: Path, tmp_path: Path) -> None:
    command, *options = refusal
    done = dnis(*words(command, artifact, tmp_path), *options)
    assert done.returncode in (1, 2) if "--from" in options else done.returncode == 2
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", ["tests.tiny:nothing", "nowhere:demo", "demo"])
def test_recipes_that_are_none_are_refused(recipe: str, tmp_path: Path) -> None:
    for command in ("train", "search"):
        done = dnis(command, recipe, "--out", tmp_path / "out")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: recipe ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [("none.csv", "--label", "y"), ("none.parquet",), (ROOT / "tests",), (ROOT, "--label", "y", "--data", ROOT)],
    ids=lambda words: " ".join(str(word).replace(str(ROOT), "ROOT") for word in words),
)
def test_tables_that_are_none_or_have_no_label_are_refused(words: tuple, tmp_path: Path) -> None:
    done = dnis("train", *words, "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [name for name in COMMANDS if "OUT" in LINES[name]])
def test_what_stands_there_is_never_overwritten_silently(command: str, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("run.json", "out/mine"):
        (tmp_path / name).touch()
    for more in ((), ("--overwrite",))[: 1 + (command != "refresh")]:
        done = dnis(*words(command, artifact, tmp_path), *more)
        assert (done.returncode in (1, 2), "error: " in done.stderr) == (True, True)
        assert command != "refresh" or "--overwrite" not in done.stderr  # which it does not have
        assert (tmp_path / "out" / "mine").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_system_refuses_is_one_line(
    command: str, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run.json", "results.json"):  # which are looked for before the work
        (tmp_path / name).touch()
    errors = [
        OSError(errno.ENOSPC, "No space left on device", "out/x"),
        RuntimeError("device.cc]\n-1. Too many open files"),
    ]
    for error in errors:

        def refuse(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(f"dnis_torchrec.cli.commands.run_{command}", refuse)
        done = dnis(*words(command, artifact, tmp_path))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def test_what_is_no_refusal_of_the_system_keeps_its_words() -> None:
    assert not is_of_system(KeyError("x"))
    assert describe_error(OSError("no such thing")) == "no such thing"


@pytest.mark.parametrize("command", ALONE)
def test_what_has_no_work_for_several_ranks_refuses_them(
    command: str, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = dnis(*words(command, artifact, tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert list(tmp_path.iterdir()) == []


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
    print(json.dumps([code, sorted({"pandas", "pyarrow", "torch", "torchrec"} & set(sys.modules))]))
"""


def test_help_wrong_options_and_wrong_paths_need_no_torch() -> None:
    """The one process of its own here: `python -m dnis_torchrec` is the same program."""
    lines = {"--help": 0, "--version": 0, "search a:b --out a --compression 0.5": 2}
    lines |= {"search a:b --out a --compression 8,20": 2, "search a.csv --label y --out a": 2}
    lines |= {
        "train a:b --refit none --out a": 2,
        "report none": 2,
        "evaluate none": 2,
        "export none --out a": 2,
        "export tests --out a": 2,
        "compress a:b --from none --compression 8 --out a": 2,
    }
    lines |= {f"{command} --help": 0 for command in COMMANDS} | {f"{command} --none": 2 for command in COMMANDS}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ANSWER]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=json.dumps([*lines]), capture_output=True, text=True
    )
    answers = dict(zip(lines, map(json.loads, done.stdout.splitlines()), strict=True))
    assert answers == {line: [code, []] for line, code in lines.items()}


def test_a_list_where_one_number_is_wanted_is_named() -> None:
    done = dnis("search", TINY, "--out", "none", "--compression", "8,20")
    assert done.returncode == 2
    assert "`dnis compress` takes several sizes" in " ".join(done.stderr.replace("│", " ").split())


def test_help_begins_with_an_example_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dnis_torchrec.cli.commands.write_package", lambda *_, **__: None)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for command in ("train", "compress", "search", "export", "evaluate", "package", "refresh", "report"):
        done = dnis(command, "--help")
        example = re.search(r"^ +(dnis [^\n]+(?:\n +\S[^\n]+)*)\n *\n", done.stdout, re.MULTILINE)
        words = example[1].replace("examples.synthetic:demo", TINY).split()[1:]
        assert words[0] == command
        more = ("--epochs", "1") if command in ("train", "search") else ()
        done = dnis(*words, *more, folder=tmp_path)
        assert done.returncode == 0, done.stderr


def test_the_command_line_is_small() -> None:
    """At most 8 commands and 40 options, those of tables once; what has one name has one type everywhere."""
    kinds: dict[str, set[str]] = {}
    of_tables = {field.name for field in fields(TableOptions)}
    count = len(of_tables)
    for command in app.registered_commands:
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            if any(isinstance(part, OptionInfo) for part in get_args(hint)):
                kinds.setdefault(name, set()).add(
                    str(set(get_args(get_args(hint)[0]) or get_args(hint)[:1]) - {NoneType})
                )
                count += name not in of_tables
    assert len(app.registered_commands) == len(COMMANDS) <= 8
    assert count + 1 <= 40
    assert {name for name, types in kinds.items() if len(types) > 1} <= {"compression"}  # several sizes, or one
    assert [command.callback.__name__ for command in app.registered_commands] == list(COMMANDS)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (EVIL, SHOWN),
        ("Grüße, 表, 😀\tund\nmehr", "Grüße, 表, 😀\tund\nmehr"),
        ("\ud800\x7f\u2028", r"\ud800\u007f\u2028"),
    ],
)
def test_what_would_steer_a_terminal_becomes_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(visible(text)) == shown


def test_names_of_others_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads((write_results_of(EVIL, tmp_path)).read_text())
    assert results["rows"][0]["method"] == EVIL
    done = dnis("report", tmp_path)
    assert done.returncode == 0, done.stderr
    of_path = dnis("export", tmp_path / EVIL, "--out", tmp_path / "out")
    assert SHOWN in done.stdout
    assert SHOWN in of_path.stderr
    for text in (done.stdout, of_path.stderr):
        assert all(character.isprintable() or character == "\n" for character in text)
    _print_findings({"artifact": EVIL, "findings": [{"check": "", "subject": EVIL, "status": "", "detail": "x"}]})
    assert capsys.readouterr().out.count(SHOWN) == 2


def write_results_of(method: str, folder: Path) -> Path:
    row = {"method": method, "compression": 1.0, "num_bytes": 9, "metrics": {"auc": 0.5}, "seed": 0, "seconds": 1.0}
    row |= {"selection": {}, "predicted_loss_increase": None, "name": ""}
    results = {"recipe": TINY, "rows": [row], "primary_metric": "auc", "higher_is_better": True}
    (folder / "results.json").write_text(json.dumps(results))
    return folder / "results.json"


def test_logs_warnings_and_tracebacks_do_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    record = logging.LogRecord("x", logging.WARNING, "x", 1, EVIL, None, None)
    for owner, name in ((warnings, "formatwarning"), (sys, "excepthook"), (threading, "excepthook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with redirect_stderr(shown):
        terminal.guard_standard_error()
        logging.getLogger().handle(record)
        logging.getLogger("torchrec.distributed").warning("noise of torchrec")
        logging.getLogger("torchrec.distributed").error("trouble of torchrec")
        assert "trouble of torchrec" in shown.getvalue()
        assert "noise of torchrec" not in shown.getvalue()
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
    assert "x.py" not in text
    assert all(character.isprintable() or character == "\n" for character in text)


PRINTERS = {"print", "echo", "secho", "Console", "print_exc", "print_exception"}
ALLOWED = {"dnis_torchrec/cli/terminal.py": PRINTERS}


def unguarded(path: str, source: str) -> list[str]:
    calls = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            is_attribute = isinstance(node.func, ast.Attribute)
            name = node.func.attr if is_attribute else getattr(node.func, "id", "")
            owner = ast.unparse(node.func.value) if is_attribute else ""
            of_bar = name == "write" and owner in ("bar", "tqdm", "sys.stderr", "sys.stdout")
            is_plain = of_bar and not ast.unparse(node.args[0]).startswith("visible(")
            is_printer = name in PRINTERS - ALLOWED.get(path, set())
            if (is_plain and path not in ALLOWED) or is_printer:
                calls.append(f"{path}:{node.lineno} {ast.unparse(node)[:60]}")
    return calls


def test_nothing_prints_past_the_one_way_to_the_terminal() -> None:
    assert [line for path, source in sources("dnis_torchrec").items() for line in unguarded(path, source)] == []
    assert len(unguarded("a.py", "typer.echo(name)\nprint(name)\nbar.write(name)\nConsole()")) == 4
