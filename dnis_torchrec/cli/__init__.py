"""The `dnis` command: parses and prints; jobs/, comparison/ and planning/ do the work.

Exit codes: 0 when all went well, 2 for wrong arguments, 128 + N if signal N has stopped it, 1 otherwise. Results go to
standard output, progress and logs to standard error. A module here is a group of commands; importing it registers them.
"""

from __future__ import annotations

import sys

from dnis_torchrec.checks import describe_error, is_of_system
from dnis_torchrec.cli import compare, package, plan, runs, train, verify
from dnis_torchrec.cli.app import app
from dnis_torchrec.cli.terminal import guard_standard_error, say
from dnis_torchrec.data.users_code import named_errors
from dnis_torchrec.jobs.run_folder import RunWriteError
from dnis_torchrec.search.search import SearchInterrupted
from dnis_torchrec.storage.access import StorageError
from dnis_torchrec.training.checkpoint import CheckpointWriteError
from dnis_torchrec.training.finite import NonFiniteError
from dnis_torchrec.training.signals import Ending, Stopped, exit_code

__all__ = ["app", "compare", "main", "package", "plan", "runs", "train", "verify"]

ERRORS = (
    ValueError,
    TypeError,
    NotImplementedError,
    NonFiniteError,
    CheckpointWriteError,
    RunWriteError,
    StorageError,
)
"""What a user can do something about: said in one line, without a traceback."""


def main() -> None:
    """Entry point: runs a command and turns errors into one line on standard error and an exit code."""
    guard_standard_error()
    try:
        with Ending(), named_errors():
            app(prog_name="dnis")
    except SearchInterrupted as stop:
        say(f"error: {stop}", err=True)
        sys.exit(1 if stop.signal is None else exit_code(stop.signal))
    except Stopped as stop:
        say(f"error: {stop}", err=True)
        sys.exit(stop.exit_code)
    except Exception as error:
        if not (isinstance(error, ERRORS) or is_of_system(error)):
            raise
        say(f"error: {describe_error(error)}", err=True)
        sys.exit(1)
