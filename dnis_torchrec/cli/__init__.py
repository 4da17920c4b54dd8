"""The `dnis` command: parses and prints; jobs/, comparison/ and planning/ do the work.

Exit codes: 0 when all went well, 2 for wrong arguments, 1 otherwise. Results go to standard output, progress and
logs to standard error. A module here is a group of commands; importing it registers them.
"""

from __future__ import annotations

import logging
import sys

import typer

from dnis_torchrec.checkpoint import CheckpointWriteError
from dnis_torchrec.cli import compare, package, plan, runs, verify
from dnis_torchrec.cli.app import app
from dnis_torchrec.finite import NonFiniteError
from dnis_torchrec.run_folder import RunWriteError
from dnis_torchrec.search import SearchInterrupted
from dnis_torchrec.storage import StorageError
from dnis_torchrec.users_code import named_errors

__all__ = ["app", "compare", "main", "package", "plan", "runs", "verify"]

ERRORS = (
    ValueError,
    TypeError,
    NotImplementedError,
    NonFiniteError,
    SearchInterrupted,
    CheckpointWriteError,
    RunWriteError,
    StorageError,
)
"""What a user can do something about: said in one line, without a traceback."""


def main() -> None:
    """Entry point: runs a command and turns errors into one line on standard error and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        with named_errors():
            app(prog_name="dnis")
    except ERRORS as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("error: interrupted", err=True)
        sys.exit(1)
