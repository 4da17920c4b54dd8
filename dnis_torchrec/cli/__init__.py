"""The `dnis` command: parses and prints; jobs/ does the work."""

from __future__ import annotations

import sys

from dnis_torchrec.checks import describe_error, is_of_system
from dnis_torchrec.cli import compress, package, runs, train
from dnis_torchrec.cli.app import app
from dnis_torchrec.cli.terminal import guard_standard_error, say
from dnis_torchrec.training.settings import Ending, Stopped, exit_code

__all__ = ["app", "compress", "main", "package", "runs", "train"]


def main() -> None:
    """Entry point: runs a command and turns errors into one line on standard error and an exit
    code."""
    guard_standard_error()
    try:
        with Ending():
            app(prog_name="dnis")
    except Stopped as stop:
        say(f"error: {stop}", err=True)
        sys.exit(stop.exit_code)
    except Exception as error:
        if not _is_told(error):
            raise
        has_saved_itself = hasattr(
            error, "signal"
        )  # a `SearchInterrupted`, which only an interrupted search imports
        say(f"error: {error if has_saved_itself else describe_error(error)}", err=True)
        number = getattr(error, "signal", None)
        sys.exit(1 if number is None else exit_code(number))


def _is_told(error: Exception) -> bool:
    """Returns whether a user can do something about an error: it is then said in one line, without
    a traceback."""
    if isinstance(error, ValueError | TypeError | NotImplementedError) or is_of_system(error):
        return True
    from dnis_torchrec.jobs.run_folder import RunWriteError
    from dnis_torchrec.training.checkpoint import CheckpointWriteError
    from dnis_torchrec.training.loop import SearchInterrupted
    from dnis_torchrec.training.pipeline import NonFiniteError

    of_work = (CheckpointWriteError, NonFiniteError, RunWriteError, SearchInterrupted)
    return isinstance(error, of_work)
