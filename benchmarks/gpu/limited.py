"""A command in a process of its own, killed with its children when its time is over, and what became of it."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR1
"""At it a step prints the stacks of all its threads, see `benchmarks.gpu.step`."""
GRACE_SECONDS, POLLS = 2.0, 40
"""For which a step that hangs may print them, and then end what it has started."""
DETAIL_LINES = 40
_FATAL = re.compile(r"Fatal Python error|^(Current t|T)hread 0x", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a command."""

    outcome: str
    seconds: float
    detail: str


def run_limited(command: Sequence[str], log: Path, seconds: float) -> Ended:
    """Runs a command with a limit of time; nothing that it has started outlives it."""
    begin, started, is_late = log.stat().st_size if log.exists() else 0, time.monotonic(), False
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        is_late = True
        process.send_signal(STACKS_SIGNAL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:
        with suppress(ProcessLookupError):  # then nothing is left of the group
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks at it, which are groups of their own
            for _ in range(POLLS):
                time.sleep(GRACE_SECONDS / POLLS)
                process.poll()
                os.killpg(process.pid, 0)
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    outcome = "out of time" if is_late else _outcome(code)
    detail = "" if outcome == "done" else _detail(_text_from(log, begin))
    return Ended(outcome=outcome, seconds=time.monotonic() - started, detail=detail)


def _outcome(code: int) -> str:
    if code == 0:
        return "done"
    return f"failed with code {code}" if code > 0 else f"crashed by {signal.Signals(-code).name}"


def _text_from(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode("utf-8", errors="replace")


def _detail(text: str) -> str:
    """The first stacks of a log, where an interpreter printed some; else its last lines."""
    stacks = _FATAL.search(text)
    lines = text[stacks.start() :].splitlines()[:DETAIL_LINES] if stacks else text.splitlines()[-DETAIL_LINES:]
    return "\n".join(lines)
