"""Addresses on the command line: what a command reads is fetched first, what it writes is published
when it ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from dnis_torchrec.checks import check, describe
from dnis_torchrec.cli.terminal import fail
from dnis_torchrec.storage.copies import address_of, stands_for


def url_of_ranks(out: Path) -> str | None:
    """Returns the URL where ranks write, if only ranks of the first host see `out`; else None."""
    return address_of(out) if _are_on_several_hosts() else None


def check_seen_by_ranks(out: Path) -> None:
    """Refuses an output that only ranks of the first host see, for commands that write to a folder
    alone."""
    url = url_of_ranks(out)
    if url is not None:
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
        from dnis_torchrec.storage.fetching import fetch

        return fetch(value)

    return _local(value, prepare)


def _published(context: typer.Context, value: str | None) -> Path | None:
    """The local folder; the context of the command closes the output when the command is over,
    however it ends."""
    if value is None:
        return None

    def prepare() -> Path:
        from dnis_torchrec.jobs.run_folder import WRITTEN_BY_RANKS
        from dnis_torchrec.storage.fetching import local_copy_of
        from dnis_torchrec.storage.outputs import output, shared_output

        # Ranks of one torchrun have it for a parent, also those that it starts again.
        job = f"ranks of {os.getppid()}" if "TORCHELASTIC_RUN_ID" in os.environ else ""
        if _number("WORLD_SIZE", 1) == 1:
            return context.with_resource(output(value, job=job))
        variables = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        missing = [name for name in variables if name not in os.environ]
        remedy = "start it with torchrun, which sets them"
        requirement = f"{', '.join(variables)} of every rank"
        check(not missing, f"address {value}", requirement, f"no {', '.join(missing)}", remedy)
        if _number("RANK", 0) != _number("LOCAL_RANK", 0):  # of another host than the first
            return local_copy_of(value)
        attempt = os.environ.get(
            "TORCHELASTIC_RESTART_COUNT", "0"
        )  # which starts from what storage has
        skip = WRITTEN_BY_RANKS if _are_on_several_hosts() else ()
        is_first = os.environ["LOCAL_RANK"] == "0"
        return context.with_resource(
            shared_output(value, job=job, attempt=attempt, is_first=is_first, skip=skip)
        )

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
    from dnis_torchrec.storage.access import local_path

    here = local_path(value)
    if here is not None:
        return here
    try:
        path = prepare()
    except (OSError, ValueError) as error:
        fail(error, 2)
    stands_for(path, value)
    return path


# Text until the callback: a Path would swallow one of the two slashes of a URL.
fetched_settings: dict[str, Any] = {"parser": str, "callback": _fetched}
published_settings: dict[str, Any] = {"parser": str, "callback": _published}
published_first_settings: dict[str, Any] = {"parser": str, "callback": _published_first}
