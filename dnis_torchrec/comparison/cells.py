"""A cell of a comparison, one method at one size under one seed, and its files on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from dnis_torchrec.checks import check
from dnis_torchrec.data.files import conform, read_json, write_text
from dnis_torchrec.report import ReportRow
from dnis_torchrec.report.content import WITH_VALIDATION, json_text

_FORMAT = "dnis-torchrec-cell"
_FORMAT_VERSION = 1

WORK = "work"
"""Folder of a cell while it runs."""
HELPS = "helps"
"""Argument of a process that helps another with its cell."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method at one size under one seed."""

    method: str
    size: float | None
    seed: int
    with_validation: bool = False

    @property
    def row_name(self) -> str:
        """Name of the method in tables."""
        return f"{self.method}{WITH_VALIDATION}" if self.with_validation else self.method

    @property
    def training(self) -> str:
        """Name of the data that the cell trains on: cells of the same one may share a training."""
        return f"seed{self.seed}{WITH_VALIDATION if self.with_validation else ''}"

    @property
    def name(self) -> str:
        """Name of the cell's folder; no two cells share one."""
        size = "" if self.size is None else f"-size{self.size:.15g}"
        return f"{self.row_name}{size}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class CellTask:
    """The task of the process that runs a cell."""

    cell: Cell
    rules: Mapping[str, Any]
    data: str | None = None
    trained: str | None = None
    registry: str
    cells_at_once: int
    processes: int = 1
    artifact: bool

    def write(self, folder: Path) -> None:
        """Writes task.json. The record of an earlier crash stays until the next try begins."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "task.json", json_text(asdict(self), str(folder)) + "\n")

    @staticmethod
    def read(folder: Path) -> CellTask:
        """Reads task.json."""
        fields = read_json(folder / "task.json", dict[str, Any])
        conform(fields, CellTask, str(folder / "task.json"))
        return CellTask(**(fields | {"cell": Cell(**fields["cell"])}))


@dataclass(frozen=True, kw_only=True)
class TrainedCell:
    """Measurements of a cell."""

    row: ReportRow
    dense_bytes: int
    form: str
    embedding_bytes: int
    extra_bytes: int
    selection_loss: float
    trials: int
    seconds_of_trials: float
    settings: Mapping[str, float | str]
    device: str
    cells_at_once: int
    network_bytes: int = 0
    resident_bytes: Mapping[str, int] = field(default_factory=dict)
    test_fingerprint: int | None = None


class _Head(TypedDict):
    """The fields of every result.json."""

    format: str
    format_version: int
    cell: Cell
    rules: dict[str, Any]
    versions: dict[str, str]


class _Reason(_Head):
    reason: str


class _Measured(_Head):
    """With the fields of a `ReportRow`, which looks at them itself."""

    dense_bytes: int
    form: str
    embedding_bytes: int
    extra_bytes: int
    selection_loss: float
    trials: int
    seconds_of_trials: float
    settings: dict[str, float | str]
    device: str
    cells_at_once: int
    network_bytes: NotRequired[int]
    resident_bytes: NotRequired[dict[str, int]]
    test_fingerprint: NotRequired[int | None]


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A finished cell."""

    cell: Cell
    rules: Mapping[str, Any]
    versions: Mapping[str, str]
    trained: TrainedCell | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The content of result.json: one flat object, a row of report.json with more keys."""
        head = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "cell": asdict(self.cell)}
        if self.trained is None:
            return head | {
                "reason": self.reason,
                "rules": dict(self.rules),
                "versions": dict(self.versions),
            }
        measured = {name: value for name, value in vars(self.trained).items() if name != "row"}
        row = self.trained.row.to_json() | {"size": self.cell.size}
        return head | row | measured | {"rules": dict(self.rules), "versions": dict(self.versions)}

    @staticmethod
    def from_json(described: Mapping[str, Any]) -> CellResult:
        """Rebuilds a result from the dict that `to_json` gave."""
        conform(described, _Reason if "reason" in described else _Measured, "cell")
        check(
            (described["format"], described["format_version"]) == (_FORMAT, _FORMAT_VERSION),
            "cell",
            f"{_FORMAT} {_FORMAT_VERSION}",
            described["format_version"],
        )
        shared = {
            "cell": Cell(**described["cell"]),
            "rules": described["rules"],
            "versions": described["versions"],
        }
        if "reason" in described:
            return CellResult(**shared, reason=described["reason"])
        names = [name for name in TrainedCell.__dataclass_fields__ if name != "row"]
        measured = {name: described[name] for name in names if name in described}
        return CellResult(
            **shared, trained=TrainedCell(row=ReportRow.from_json(described), **measured)
        )

    def write(self, folder: Path) -> None:
        """Writes result.json, whole or not at all."""
        write_text(folder / "result.json", json_text(self.to_json(), str(folder)) + "\n")


def read_result(folder: Path) -> CellResult | None:
    """The result of a cell, None if it has none or the file is damaged; such a cell is to be run
    again."""
    try:
        return CellResult.from_json(read_json(folder / "result.json", dict[str, Any]))
    except (FileNotFoundError, ValueError):
        return None


def read_crash(folder: Path) -> str | None:
    """The error that a crashed cell's traceback ends with, in one line; None if it did not crash."""
    file = folder / "crash.txt"
    if not file.is_file():
        return None
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if not lines:
        return "no message"
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    behind = lines[frames[-1] + 1 :] if frames and lines[0].startswith("Traceback") else []
    return next((line for line in behind if line[:1].strip()), lines[-1])


def forget_crash(folder: Path) -> None:
    """Takes away the crash.txt of an earlier try."""
    (folder / "crash.txt").unlink(missing_ok=True)


def write_crash(folder: Path, text: str) -> None:
    """Writes crash.txt."""
    write_text(folder / "crash.txt", text.rstrip() + "\n")
