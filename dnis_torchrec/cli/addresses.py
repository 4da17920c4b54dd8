"""Addresses on the command line: what a command reads is fetched first, what it writes is published
when it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from dnis_torchrec.checks import describe
from dnis_torchrec.cli.terminal import fail
from dnis_torchrec.data.urls import url_of


def url_of_ranks(out: Path) -> str | None:
    """The URL where ranks write themselves; None where the user named a path."""
    return url_of(out)


def check_seen_by_ranks(out: Path) -> None:
    """Refuses an output that only ranks of the first host see, for commands that write to a folder
    alone."""
    url = url_of(out)
    if url is not None and _are_on_several_hosts():
        supported = "supported is a folder that all hosts have mounted"
        raise NotImplementedError(describe("--out", supported, f"{url} on several hosts"))


def _are_on_several_hosts() -> bool:
    return _number("LOCAL_WORLD_SIZE", 1) < _number("WORLD_SIZE", 1)


def _number(variable: str, otherwise: int) -> int:
    return int(os.environ.get(variable, otherwise))


def _fetched(value: str | None) -> Path | None:
    if value is None:
        return None

    def prepare() -> Path:
        from dnis_torchrec.data.urls import fetch

        return fetch(value)

    return _local(value, prepare)


def _published(context: typer.Context, value: str | None) -> Path | None:
    """The local folder; the context of the command closes the output when the command is over,
    however it ends."""
    if value is None:
        return None

    def prepare() -> Path:
        from dnis_torchrec.data.urls import output, output_folder
        from dnis_torchrec.jobs.run_folder import WRITTEN_BY_RANKS

        if _number("WORLD_SIZE", 1) == 1:
            job, is_first = f"{os.getpid()} {time.time_ns()}", True
        else:  # ranks of one torchrun have it for a parent, also those that it starts again
            job = f"{os.getppid()} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            is_first = _number("RANK", 0) == 0
        if not is_first:
            return output_folder(value, job)
        return context.with_resource(output(value, job, skip=WRITTEN_BY_RANKS))

    return _local(value, prepare)


def _published_first(context: typer.Context, values: Sequence[str]) -> list[Path]:
    """The first address is written to, the others are read."""
    return [
        path
        for path in (_published(context, values[0]), *map(_fetched, values[1:]))
        if path is not None
    ]


def _local(value: str, prepare: Callable[[], Path]) -> Path:
    """The local path that stands for an address; a wrong address is a wrong argument, exit code 2."""
    from dnis_torchrec.data.urls import local_path

    here = local_path(value)
    if here is not None:
        return here
    try:
        return prepare()
    except (OSError, ValueError) as error:
        fail(error, 2)


# Text until the callback: a Path would swallow one of the two slashes of a URL.
fetched_settings: dict[str, Any] = {"parser": str, "callback": _fetched}
published_settings: dict[str, Any] = {"parser": str, "callback": _published}
published_first_settings: dict[str, Any] = {"parser": str, "callback": _published_first}
