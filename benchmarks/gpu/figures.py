"""Figures in a file: appended one by one as they are found, and read back as tables."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FIGURES, RESULTS = "figures.jsonl", "results.md"

Line = dict[str, Any]
"""A figure: step, name, value, unit, and what it is of. Or how a step ended: step, outcome, seconds, limit, detail."""


class Figures:
    """What one step has found, in a file that all steps share."""

    def __init__(self, folder: Path, step: str) -> None:
        self._path, self._step = folder / FIGURES, step

    def note(self, name: str, value: float | int | str, unit: str = "", /, **of: object) -> None:
        """Adds a figure; it outlives this process, however that ends."""
        rounded = float(f"{value:.5g}") if isinstance(value, float) else value
        self._append({"step": self._step, "name": name, "value": rounded, "unit": unit, "of": of})

    def end(self, outcome: str, seconds: float, limit: float, detail: str = "") -> None:
        """Adds how the step ended."""
        times = {"seconds": round(seconds, 1), "limit": round(limit, 1)}
        self._append({"step": self._step, "outcome": outcome, **times, "detail": detail})

    def _append(self, line: Line) -> None:
        # One write of the whole line: processes that append to one file do not mix within a line.
        with self._path.open("ab", buffering=0) as file:
            file.write((json.dumps(line) + "\n").encode())
            os.fsync(file.fileno())


def read_lines(folder: Path) -> list[Line]:
    """All lines of a folder, in the order in which they were added."""
    path = folder / FIGURES
    whole = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in whole if line.endswith("\n")]


def tables(lines: Iterable[Line]) -> str:
    """Markdown: how the steps ended, and a table of every step's figures."""
    lines = list(lines)
    ends, text = [line for line in lines if "outcome" in line], ["# Measured", ""]
    if ends:
        text += ["| step | outcome | seconds | of |", "|---|---|---|---|"]
        text += [f"| {end['step']} | {end['outcome']} | {end['seconds']} | {end['limit']} |" for end in ends]
        text += [""]
    for step in dict.fromkeys(line["step"] for line in lines):
        figures = [line for line in lines if line["step"] == step and "name" in line]
        details = [line["detail"] for line in ends if line["step"] == step and line["detail"]]
        text += [f"## {step}", ""]
        if figures:
            text += ["| figure | of | value |", "|---|---|---|", *map(_row, figures), ""]
        for detail in details:
            text += ["```text", detail.replace("```", "'''"), "```", ""]
    return "\n".join(text)


def _row(figure: Line) -> str:
    of = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in figure["of"].items())
    value = f"{figure['value']} {figure['unit']}".strip()
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in (figure["name"], of, value)) + " |"
