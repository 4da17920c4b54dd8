"""A cell of a comparison, one method at one size under one seed, and its files on disk.

OUT/cells/<cell>/task.json      the task of the cell
                 log.txt        output of its processes
                 result.json    once it has finished, or its method cannot do it; such a cell is never run again
                 crash.txt      the traceback, if it crashed; such a cell is run again by the next call
                 artifact/      its artifact, if asked for
                 work/          checkpoints and trials, while it runs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from dnis_torchrec.checks import check
from dnis_torchrec.report import ReportRow
from dnis_torchrec.report.content import WITH_VALIDATION, json_text
from dnis_torchrec.storage.foreign_folders import make_folder
from dnis_torchrec.storage.json_files import conform, read_json
from dnis_torchrec.storage.whole_files import write_text

_FORMAT = "dnis-torchrec-cell"
_FORMAT_VERSION = 1

WORK = "work"
"""Folder of a cell while it runs."""
HELPS = "helps"
"""Argument of a process that helps another with its cell."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method at one size under one seed.

    Attributes:
        method: its name in the registry.
        size: bytes of the uncompressed float32 tables over bytes wanted, above 1; None for a method without size.
        seed: of the splits and of everything else that is random.
        with_validation: train on the alpha-validation split as well, for a method that needs none.

    Example:
        >>> cell = Cell(method="uniform", size=2.5, seed=0, with_validation=True)
        >>> cell.row_name, cell.name
        ('uniform+validation', 'uniform+validation-size2.5-seed0')
    """

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
    """The task of the process that runs a cell.

    Attributes:
        cell: which.
        rules: settings that all cells of the comparison share: recipe with its settings and embedding_dims, data,
            registry, patience, max_epochs, trials.
        data: folder of the data on this machine, or None for a recipe that makes its own.
        registry: ``module:name`` of the mapping from method name to `Method`.
        cells_at_once: how many cells share the machine; measured times depend on it.
        processes: how many may train trials of this cell at a time, see `MethodTask`.
        artifact: whether to export the result.
        trained: folder of trainings that cells share, see `MethodTask.trained`; None to share none.
    """

    cell: Cell
    rules: Mapping[str, Any]
    data: str | None = None
    trained: str | None = None
    registry: str
    cells_at_once: int
    processes: int = 1
    artifact: bool

    def write(self, folder: Path) -> None:
        """Writes task.json. The record of an earlier crash stays until the next try begins.

        Args:
            folder: of the cell; made, with its parents, where it is missing.

        Raises:
            TypeError: if a rule is not JSON-able.
            ValueError: if a rule is a number that is not finite.
        """
        make_folder(folder, within=folder.parents[1])
        write_text(folder / "task.json", json_text(asdict(self), str(folder)) + "\n")

    @staticmethod
    def read(folder: Path) -> CellTask:
        """Reads task.json.

        Args:
            folder: of the cell.

        Raises:
            FileNotFoundError: if it has no task.json.
            ValueError: if it is something else.
        """
        fields = read_json(folder / "task.json", dict[str, Any])
        conform(fields, CellTask, str(folder / "task.json"))
        return CellTask(**(fields | {"cell": Cell(**fields["cell"])}))


@dataclass(frozen=True, kw_only=True)
class TrainedCell:
    """Measurements of a cell.

    Attributes:
        row: size and test metrics; `seconds` is the wall time of the one run that is reported.
        dense_bytes: of the uncompressed float32 tables.
        form: the export form whose bytes are compared.
        embedding_bytes: bytes of the tables in that form, with everything that serving needs beside it.
        extra_bytes: how many of them lie beside the form.
        network_bytes: float32 bytes of all other weights of the model, which are not part of the size: the first layers
            of models that are built at a smaller D are narrower. 0 in results of older versions.
        selection_loss: loss on the selection split, by which the method chose.
        trials: runs that the method took to choose this one.
        seconds_of_trials: wall time of all runs, added up, whether or not some of them ran at the same time.
        settings: the settings that the method chose.
        device: the device that it trained on.
        cells_at_once: how many cells shared the machine.
        resident_bytes: serving form -> bytes of all tables in memory, of the forms that can hold them (see
            `dnis_torchrec.artifact.predict_forms`); none in results of older versions.
        test_fingerprint: of the samples of the test split, see `dnis_torchrec.data.over_ranks.NotedBatches`; None in
            results of older versions.
    """

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
    """A finished cell.

    Attributes:
        cell: which.
        rules: the rules that it was run under.
        versions: package -> version.
        trained: its measurements; None if the method cannot meet the size, or cannot work on the model.
        reason: why it cannot.
    """

    cell: Cell
    rules: Mapping[str, Any]
    versions: Mapping[str, str]
    trained: TrainedCell | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The content of result.json: one flat object, a row of report.json with more keys."""
        head = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "cell": asdict(self.cell)}
        if self.trained is None:
            return head | {"reason": self.reason, "rules": dict(self.rules), "versions": dict(self.versions)}
        measured = {name: value for name, value in vars(self.trained).items() if name != "row"}
        row = self.trained.row.to_json() | {"size": self.cell.size}
        return head | row | measured | {"rules": dict(self.rules), "versions": dict(self.versions)}

    @staticmethod
    def from_json(described: Mapping[str, Any]) -> CellResult:
        """Rebuilds a result from the dict that `to_json` gave.

        Args:
            described: the content of a result.json.

        Raises:
            ValueError: if it is something else.
        """
        conform(described, _Reason if "reason" in described else _Measured, "cell")
        check(
            (described["format"], described["format_version"]) == (_FORMAT, _FORMAT_VERSION),
            "cell",
            f"{_FORMAT} {_FORMAT_VERSION}",
            described["format_version"],
        )
        shared = {"cell": Cell(**described["cell"]), "rules": described["rules"], "versions": described["versions"]}
        if "reason" in described:
            return CellResult(**shared, reason=described["reason"])
        names = [name for name in TrainedCell.__dataclass_fields__ if name != "row"]
        measured = {name: described[name] for name in names if name in described}
        return CellResult(**shared, trained=TrainedCell(row=ReportRow.from_json(described), **measured))

    def write(self, folder: Path) -> None:
        """Writes result.json, whole or not at all.

        Args:
            folder: of the cell, existing.

        Raises:
            TypeError: if a rule or setting is not JSON-able.
            ValueError: if a number is not finite, or the folder does not exist.
        """
        write_text(folder / "result.json", json_text(self.to_json(), str(folder)) + "\n")


def read_result(folder: Path) -> CellResult | None:
    """The result of a cell, None if it has none or the file is damaged; such a cell is to be run again.

    Args:
        folder: of the cell; it need not exist.
    """
    try:
        return CellResult.from_json(read_json(folder / "result.json", dict[str, Any]))
    except (FileNotFoundError, ValueError):
        return None


def read_crash(folder: Path) -> str | None:
    """The error that a crashed cell's traceback ends with, in one line; None if it did not crash.

    A message may have many lines, as those of CUDA have: the first one says what it is. Of a process that ended without
    a traceback it is the last line.

    Args:
        folder: of the cell; it need not exist.
    """
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
    """Writes crash.txt.

    Args:
        folder: of the cell, existing.
        text: the traceback, or whatever is known of the end.

    Raises:
        ValueError: if the folder does not exist.
    """
    write_text(folder / "crash.txt", text.rstrip() + "\n")
