"""The one way to the terminal: what names, files and recipes of others hold never steers it (see
`checks.visible`)."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from dnis_torchrec.checks import describe_error, is_of_system, visible

COMPILING = "dnis_torchrec.ops.build"
"""Logger that tells when operators are compiled; importing its module would import torch."""

_plain_warning, _show_any_error_of_thread = warnings.formatwarning, threading.excepthook


def say(text: str, *, err: bool = False) -> None:
    """Prints a text that may hold names and messages of others."""
    typer.echo(visible(text), err=err)


def fail(error: BaseException, code: int) -> NoReturn:
    """Says an error in one line on standard error and ends the command."""
    say(f"error: {describe_error(error)}", err=True)
    raise typer.Exit(code) from error


class PlainConsole(Console):
    """Standard output, where brackets and colons in a name are no markup."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(width=width, file=sys.stdout, markup=False, emoji=False)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Renders a text with control characters made visible; rich measures lines by it, too."""
        return super().render_str(visible(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Renders with control characters made visible; rich adds its own colours and controls
        after this."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def guard_standard_error() -> None:
    """Logs, warnings and tracebacks reach standard error through `visible`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_VisibleFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger(COMPILING).setLevel(logging.INFO)  # nobody should wonder what takes so long
    warnings.formatwarning = _format_warning
    sys.excepthook = _show_error
    threading.excepthook = _show_error_of_thread


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _format_warning(*parts: Any, **more: Any) -> str:
    return visible(_plain_warning(*parts, **more))


def _show_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    stream: TextIO = sys.stderr
    stream.write(visible("".join(traceback.format_exception(kind, error, trace))))


def _show_error_of_thread(end: threading.ExceptHookArgs) -> None:
    if end.exc_value is None or not is_of_system(end.exc_value):
        _show_any_error_of_thread(end)
        return
    name = "a thread" if end.thread is None else f"thread {end.thread.name}"
    say(f"WARNING: {name}: {describe_error(end.exc_value)}", err=True)
