"""The one way to the terminal: what names, files and recipes of others hold never steers it (see
`checks.visible`)."""

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import format_exception
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table

from dnis_torchrec.checks import describe_error, is_of_system, visible

_show_any_error_of_thread = threading.excepthook


def say(text: str, *, err: bool = False) -> None:
    """Prints a text that may hold names and messages of others."""
    typer.echo(visible(text), err=err)


def fail(error: BaseException, code: int) -> NoReturn:
    """Says an error in one line on standard error and ends the command."""
    say(f"error: {describe_error(error)}", err=True)
    raise typer.Exit(code) from error


@contextmanager
def arguments() -> Iterator[None]:
    """Errors inside the block are the caller's arguments': the command ends with exit code 2."""
    try:
        yield
    except (NotImplementedError, OSError, ValueError) as error:
        fail(error, 2)


def print_table(table: Table) -> None:
    """Prints a table of visible texts, in which brackets and colons are no markup."""
    Console(width=max(120, Console().width), markup=False, emoji=False).print(table)


def _is_for_users(record: logging.LogRecord) -> bool:
    """Whether a log line is ours, of the user's own code, or an error."""
    library = record.name.partition(".")[0]
    return library not in ("torch", "torchrec", "fbgemm_gpu") or record.levelno >= logging.ERROR


def guard_standard_error() -> None:
    """Logs, warnings and tracebacks reach standard error through `visible`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_VisibleFormatter("%(levelname)s: %(message)s"))
    handler.addFilter(_is_for_users)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("dnis_torchrec").setLevel(logging.WARNING)
    # It tells that operators are compiled, which takes a while.
    logging.getLogger("dnis_torchrec.ops.build").setLevel(logging.INFO)
    warnings.formatwarning = lambda message, *_, **__: visible(f"WARNING: {message}\n")
    sys.excepthook = lambda *end: say("".join(format_exception(*end)), err=True)
    threading.excepthook = _show_error_of_thread


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _show_error_of_thread(end: threading.ExceptHookArgs) -> None:
    if end.exc_value is None or not is_of_system(end.exc_value):
        _show_any_error_of_thread(end)
        return
    name = "a thread" if end.thread is None else f"thread {end.thread.name}"
    say(f"WARNING: {name}: {describe_error(end.exc_value)}", err=True)
