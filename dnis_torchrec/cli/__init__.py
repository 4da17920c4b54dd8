"""The `dnis` command: parses and prints; jobs.py, comparison/ and planning/ do the work.

Exit codes: 0 when all went well, 2 for wrong arguments, 1 otherwise. Results go to standard output, progress and
logs to standard error. A module here is a group of commands; importing it registers them.
"""

from __future__ import annotations

import logging
import sys

import typer

from dnis_torchrec.cli import compare, plan, runs
from dnis_torchrec.cli.app import app
from dnis_torchrec.finite import NonFiniteError
from dnis_torchrec.search import SearchInterrupted

__all__ = ["app", "compare", "main", "plan", "runs"]


def main() -> None:
    """Entry point: runs a command and turns errors into one line on standard error and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        app(prog_name="dnis")
    except (ValueError, TypeError, NotImplementedError, NonFiniteError, SearchInterrupted) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("error: interrupted", err=True)
        sys.exit(1)
