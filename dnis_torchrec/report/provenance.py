"""Where results come from: the commands that led to them, each with its folder, date and machine."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

import torch

from dnis_torchrec.data.urls import address_of
from dnis_torchrec.ranks import world_size_of

PROVENANCE = "provenance"
"""Field of run.json, compress.json and comparison.json: `DescribedStep`s, the oldest first."""


class DescribedStep(TypedDict):
    """A `Step` as JSON."""

    job: str
    folder: str
    command: str
    date: str
    machine: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command on the way to a result."""

    job: str
    folder: str
    command: str = ""
    date: str = ""
    machine: str = ""

    @staticmethod
    def now(job: str, folder: Path) -> Step:
        """The command that is at work."""
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return Step(
            job=job,
            folder=address_of(folder),
            command=_typed(sys.argv),
            date=date,
            machine=_machine(),
        )

    def to_json(self) -> dict[str, str]:
        """The step as files hold it."""
        return asdict(self)


def steps_of(head: Mapping[str, Any], folder: Path) -> tuple[Step, ...]:
    """The steps that a run tells; of an older one, which tells none, its folder alone."""
    oldest = Step(
        job="train" if head.get("kind") == "trained" else "search", folder=address_of(folder)
    )
    told = (
        {field.name: step[field.name] for field in fields(Step)}
        for step in head.get(PROVENANCE, ())
    )
    return tuple(Step(**step) for step in told) or (oldest,)


def commands(steps: Iterable[Step]) -> tuple[str, ...]:
    """Commands that lead to the same results when they are typed again; none where one is missing."""
    typed = tuple(step.command for step in steps)
    return typed if all(typed) else ()


def _typed(argv: list[str]) -> str:
    script = Path(argv[0]) if argv else Path()
    is_ours = script.name == "dnis" or (
        script.name == "__main__.py" and script.parent.name == "dnis_torchrec"
    )
    return shlex.join(["dnis", *argv[1:]]) if is_ours else ""


def _machine() -> str:
    told = [f"{platform.system()} {platform.machine()}", f"{os.cpu_count()} cores"]
    if torch.cuda.is_available():
        told.append(torch.cuda.get_device_name())
    if world_size_of() > 1:
        told.append(f"{world_size_of()} ranks")
    return ", ".join(told)
