"""RunFolder: the files that a search or a training leaves, and the way in which later commands find
them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.files import (
    PARTIAL,
    FolderKind,
    NotNegative,
    Positive,
    check_plain,
    conform,
    file_lock,
    new_folder,
    read_json,
    unshared,
)
from dnis_torchrec.data.urls import Address, path_in, put_file, remove_file
from dnis_torchrec.ranks import rank_of, together
from dnis_torchrec.report import ReportRow, read_report_rows, write_rows
from dnis_torchrec.report.provenance import DescribedStep
from dnis_torchrec.scheme import DescribedTable, MixedDimensionScheme, TableScheme
from dnis_torchrec.selection.shards import collections, ranks_of
from dnis_torchrec.training.checkpoint import CheckpointFolder, StoredTensor
from dnis_torchrec.training.weights import (
    MODEL,
    has_written_model,
    remove_model,
    write_model,
    written_model,
)

_FORMAT = "dnis-torchrec-run"
_FORMAT_VERSION = 1
_KIND = FolderKind("run", "run.json", _FORMAT)
WRITTEN_BY_RANKS = ("checkpoints/*", f"{MODEL}/*")
"""Patterns of the files that every rank writes; rank 0 writes the others."""
REPLACED = f"replaced{PARTIAL}"
"""Folder in which a new run keeps the run that it replaces. It is never published."""

COMPRESSION_FILE = "compress.json"
"""File of what `dnis compress` leaves, which is no run."""
SEARCHED_RUN, TRAINED = "searched", "trained"
"""Kinds of run: what `dnis search` and `dnis prune` leave, and what `dnis train` does."""

_DAMAGED = "it was damaged; run `dnis search` again"


class _Configuration(TypedDict):
    num_blocks: NotRequired[Positive]


class _Head(TypedDict):
    """The fields of every run that later commands rely on."""

    status: str
    kind: NotRequired[str]
    recipe: str
    seed: NotNegative
    embedding_dim: NotRequired[Positive | None]
    configuration: _Configuration


class _FinishedHead(_Head):
    """The fields of a finished run that later commands rely on."""

    primary_metric: str
    higher_is_better: bool
    notes: list[str]
    versions: dict[str, str]
    scheme: dict[str, DescribedTable]
    history: list[dict[str, float | str]]
    stop_on: NotRequired[str]
    stop_on_higher_is_better: NotRequired[bool]
    doubts: NotRequired[list[str]]
    provenance: NotRequired[list[DescribedStep]]
    metrics: dict[str, float]


class RunWriteError(RuntimeError):
    """Error of a job whose results could not be written; what was there, such as checkpoints, is as
    it was."""


class RunFolder:
    """A run on disk. Every file is written whole or not at all; a run that says it has finished
    survives the machine."""

    def __init__(self, path: Path, *, url: str | None = None) -> None:
        self.path, self._url = path, url

    @staticmethod
    def check_free(path: Path, *, overwrite: bool = False, can_resume: bool = True) -> None:
        """Refuses a folder that `create` would."""
        if not path.exists() or _is_unused(path):
            check_plain(path, f"run folder {path}")
            return
        is_run = (path / "run.json").is_file()
        remedy = "choose another --out"
        if is_run:
            remedy += (
                ", --resume the run or --overwrite it" if can_resume else " or --overwrite the run"
            )
        check(
            overwrite and is_run,
            f"run folder {path}",
            "a folder that does not exist",
            "an existing one",
            remedy,
        )
        check_plain(path, f"run folder {path}")

    @staticmethod
    def create(path: Path, *, url: str | None = None, overwrite: bool = False) -> RunFolder:
        """Makes the folder of a new run."""
        RunFolder.check_free(path, overwrite=overwrite)
        run = RunFolder(path, url=url)
        if path.exists() and not _is_unused(path):
            with run.lock():
                run._set_aside()
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        if url is not None:
            run._remove_what_ranks_wrote(url)
        return run

    @staticmethod
    @contextmanager
    def whole(path: Path, *, overwrite: bool = False) -> Iterator[RunFolder]:
        """A new run whose folder appears complete, or not at all: for what is written at once, and
        not searched for."""
        RunFolder.check_free(path, overwrite=overwrite, can_resume=False)
        with ExitStack() as stack:
            if path.exists():
                stack.enter_context(RunFolder(path).lock())
                if _is_unused(path):
                    RunFolder(path).delete()
            yield RunFolder(stack.enter_context(new_folder(path, overwrite=overwrite, kind=_KIND)))

    @staticmethod
    def open(path: Path) -> RunFolder:
        """Opens the folder of a finished run."""
        place = f"run folder {path}"
        file = path / "run.json"
        is_compressed, remedy = (
            (path / COMPRESSION_FILE).is_file(),
            "its page is report.html; artifacts are the folders in it",
        )
        check(not is_compressed, place, "a run", "what `dnis compress` wrote", remedy)
        check(
            file.is_file(),
            place,
            "a folder written by `dnis search` or `dnis train`",
            "no run.json in it",
        )
        check_plain(path, place)
        run = RunFolder(path)
        status = run.read_head()["status"]
        remedy = "run `dnis search` to its end first"
        check(status == "finished", place, "a search that has finished", repr(status), remedy)
        return run

    @staticmethod
    def open_searched(path: Path) -> RunFolder:
        """Opens the folder of a finished search, for what wants its blocks and its alpha."""
        run = RunFolder.open(path)
        remedy = "`dnis evaluate` and `dnis export` take it; its row is in its report.json"
        kind = _kind(run.read_head())
        check(
            kind == SEARCHED_RUN,
            f"run folder {path}",
            "a run of `dnis search`",
            f"a {kind} one",
            remedy,
        )
        return run

    @property
    def is_shared(self) -> bool:
        """Whether all ranks see the folder."""
        return self._url is None

    @property
    def checkpoints(self) -> Address:
        """Address of the checkpoints."""
        return path_in(self._written_by_ranks, "checkpoints")

    @property
    def _written_by_ranks(self) -> Address:
        return self.path if self._url is None else self._url

    def has_checkpoint(self) -> bool:
        """Returns whether training got as far as its first checkpoint."""
        return bool(CheckpointFolder(self.checkpoints).steps())

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other jobs from writing this run. The system lets go of it when this process ends,
        however it ends."""
        place = f"run folder {self.path}"
        check_plain(self.path, place)
        with file_lock(self.path / "lock") as owner:
            check(
                owner is None,
                place,
                "no other job at work in it",
                owner,
                "wait for it, or choose another --out",
            )
            yield

    def status(self) -> str | None:
        """``"searching"``, ``"interrupted"`` or ``"finished"``; None if there is no run."""
        return self.read_head()["status"] if (self.path / "run.json").is_file() else None

    def check_same(self, fields: Mapping[str, Any]) -> None:
        """Checks that the run was started with the recipe and settings that it is to be resumed
        with."""
        head, wanted = _settings(self.read_head()), _settings(json.loads(json.dumps(fields)))
        differences = [
            f"{name} {head.get(name)} instead of {wanted.get(name)}"
            for name in sorted(set(head) | set(wanted))
            if head.get(name) != wanted.get(name)
        ]
        remedy = "repeat the run's own arguments to --resume it"
        check(
            not differences,
            f"run folder {self.path}",
            "a run with these settings",
            ", ".join(differences),
            remedy,
        )

    def delete(self) -> None:
        """Deletes the folder and everything in it; the run that it has replaced is put back, if it
        is still there."""
        if (self.path / REPLACED).is_dir():
            self._put_back()
        else:
            shutil.rmtree(self.path)
        if self._url is not None:
            self._remove_what_ranks_wrote(self._url)

    def drop_replaced(self) -> None:
        """Deletes the run that this one has replaced, if this one has finished or can be gone on
        with."""
        if (self.path / REPLACED).is_dir() and (
            self.status() == "finished" or self.has_checkpoint()
        ):
            shutil.rmtree(self.path / REPLACED, ignore_errors=True)

    def _set_aside(self) -> None:
        """Moves the run that stands here into a folder of the new one; deletes it if ranks write to
        a URL."""
        if self._url is not None:
            shutil.rmtree(self.path)
            return
        path = self.path.resolve()
        aside = path.with_name(f".{path.name}{PARTIAL}")
        os.rename(path, aside)
        path.mkdir()
        os.rename(aside, path / REPLACED)

    def _put_back(self) -> None:
        path = self.path.resolve()
        aside = path.with_name(f".{path.name}{PARTIAL}")
        os.rename(path, aside)
        os.rename(aside / REPLACED, path)
        shutil.rmtree(aside)

    def _remove_what_ranks_wrote(self, url: str) -> None:
        """After run.json, without which nothing there is taken for a run."""
        remove_file(path_in(url, "run.json"))
        CheckpointFolder(self.checkpoints).remove()
        remove_model(url)

    def read_head(self) -> dict[str, Any]:
        """The content of run.json."""
        file, place = self.path / "run.json", f"run folder {self.path}"
        head: dict[str, Any] = read_json(file, dict[str, Any], remedy=_DAMAGED)
        check(head.get("format") == _FORMAT, place, f"format {_FORMAT!r}", repr(head.get("format")))
        version = head.get("format_version")
        check(version == _FORMAT_VERSION, place, f"format version {_FORMAT_VERSION}", version)
        conform(
            head,
            _FinishedHead if head.get("status") == "finished" else _Head,
            str(file),
            remedy=_DAMAGED,
        )
        return head

    def write_head(self, status: str, fields: Mapping[str, Any]) -> None:
        """Writes run.json."""
        head = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "status": status, **fields}
        text = json.dumps(head, indent=1, allow_nan=False) + "\n"
        put_file(self.path / "run.json", lambda file: file.write_text(text, encoding="utf-8"))

    def announce(self) -> None:
        """Puts run.json at the URL at once, if ranks write there: without it their checkpoints are
        nobody's."""
        if self._url is not None:
            put_file(
                path_in(self._url, "run.json"), partial(shutil.copyfile, self.path / "run.json")
            )

    def save_stages(self, counts: FrequencyCounts, blocks: RowBlocks | None = None) -> None:
        """Writes counts and blocks, as soon as they are known."""
        counts.save(self.path / "counts.safetensors")
        if blocks is not None:
            blocks.save(self.path / "blocks.safetensors")

    def save_model(
        self,
        model: nn.Module,
        scheme: MixedDimensionScheme,
        alpha: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Writes a model, merged and pruned after a search, its scheme and the alpha it came from."""
        ranks = ranks_of(*collections(model).values())
        with together(ranks.group):
            if rank_of() == 0:
                if alpha is not None:
                    self._save("alpha", {f"dim{dim}": value for dim, value in alpha.items()})
                self._save("scheme", unshared(scheme.to_tensors()))
                remove_model(self._written_by_ranks)
                if ranks.world_size == 1:
                    self._save("model", unshared(model.state_dict()))
        if ranks.world_size > 1:
            write_model(self._written_by_ranks, model, ranks)

    def _save(self, name: str, tensors: dict[str, Tensor]) -> None:
        put_file(self.path / f"{name}.safetensors", partial(save_file, tensors))

    def counts(self) -> FrequencyCounts:
        """Training frequencies."""
        return FrequencyCounts.load(self.path / "counts.safetensors")

    def blocks(self) -> RowBlocks:
        """Row blocks."""
        return RowBlocks.load(self.path / "blocks.safetensors")

    def left_alone(self) -> frozenset[str]:
        """Tables that the recipe of a search wanted left alone; none of a training, whose tables
        all stay."""
        return (
            self.blocks().left_alone
            if (self.path / "blocks.safetensors").is_file()
            else frozenset()
        )

    def alpha(self) -> dict[int, Tensor]:
        """alpha before merging, embedding_dim -> ``(A, D)``."""
        tensors, place = self._tensors("alpha"), str(self.path / "alpha.safetensors")
        for name in tensors:
            check(
                re.fullmatch("dim[1-9][0-9]{0,8}", name) is not None,
                place,
                "names like 'dim8'",
                repr(name),
            )
        return {int(name.removeprefix("dim")): value for name, value in tensors.items()}

    def scheme(self) -> MixedDimensionScheme:
        """Retained dims."""
        described, tensors = self.read_head()["scheme"], self._tensors("scheme")
        check(bool(described), str(self.path / "run.json"), "at least one table", "none", _DAMAGED)
        try:
            return MixedDimensionScheme.from_parts(described, tensors)
        except ValueError as error:
            raise ValueError(
                f"{self.path / 'run.json'}, field scheme: {error}; {_DAMAGED}"
            ) from error

    def state(self) -> dict[str, Tensor]:
        """state_dict of the plain model."""
        return {name: tensor.whole() for name, tensor in self.stored().items()}

    def stored(self) -> dict[str, StoredTensor]:
        """The same, of which nothing is read yet."""
        if has_written_model(self.path):
            return written_model(self.path)
        place = str(self.path / "model.safetensors")
        return {
            name: StoredTensor.of(f"{place}, {name}", value)
            for name, value in self._tensors("model").items()
        }

    def tables(self) -> dict[str, StoredTensor]:
        """Merged and pruned tables by name, ``(N, D)`` each, of which nothing is read yet."""
        stored, tables = self.stored(), self.scheme().tables
        keys = {name: _key_of_table(table) for name, table in tables.items()}
        missing = [key for key in keys.values() if key not in stored]
        place = f"run folder {self.path}"
        check(
            not missing,
            place,
            "the model to hold the tables of run.json",
            f"no {missing[:3]}",
            _DAMAGED,
        )
        return {name: stored[key] for name, key in keys.items()}

    def dense_state(self) -> dict[str, Tensor]:
        """Everything of the model that is no table."""
        keys = {_key_of_table(table) for table in self.scheme().tables.values()}
        return {
            name: stored.whole()
            for name, stored in self.stored().items()
            if name not in keys and ".embedding_bags." not in f".{name}"
        }

    def rows(self) -> tuple[ReportRow, ...]:
        """Rows of report.json."""
        return read_report_rows(self.path / "report.json")

    def write_rows(self, rows: list[ReportRow]) -> None:
        """Writes report.json."""
        write_rows(self.path / "report.json", rows)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        file = self.path / f"{name}.safetensors"
        check(file.is_file(), str(file), "a file of the run", "none", "run `dnis search` again")
        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(describe(str(file), "a whole safetensors file", str(error))) from error


def _is_unused(path: Path) -> bool:
    """Returns whether a folder holds no more than what a job makes before it writes run.json."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else {""}
    names -= {
        name for name in names if name.endswith(PARTIAL)
    }  # a kill leaves what was being written
    is_before_head = bool(names) and names <= {"checkpoints", "lock"}
    return is_before_head and not any((path / "checkpoints").glob("*"))


def _settings(head: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that decide the outcome of a run, by name."""
    settings = {name: head.get(name) for name in ("recipe", "seed", "embedding_dim")} | dict(
        head["configuration"]
    )
    return {"kind": _kind(head)} | settings


def _kind(head: Mapping[str, Any]) -> str:
    return str(head.get("kind", SEARCHED_RUN))


def _key_of_table(table: TableScheme) -> str:
    """The name of a table's weights in the state_dict of the plain model."""
    under = "embeddings" if table.pooling == "none" else "embedding_bags"
    return _key(table.collection, f"{under}.{table.name}.weight")


def _key(collection: str, name: str) -> str:
    return f"{collection}.{name}" if collection else name
