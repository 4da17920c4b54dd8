"""RunFolder: what a command leaves behind, and how later commands read it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.allocation.axes import with_axes_
from dnis_torchrec.artifact.manifest import ENCODER
from dnis_torchrec.checks import check, describe
from dnis_torchrec.cli.settings import check_run
from dnis_torchrec.data import files, stream
from dnis_torchrec.data.stream import FrequencyCounts, StreamSummary
from dnis_torchrec.data.urls import Address, fetch, path_in, put_file, remove_file
from dnis_torchrec.ranks import rank_of, together
from dnis_torchrec.scheme import DescribedTable, MixedDimensionScheme, rows_per_chunk
from dnis_torchrec.selection.shards import collections, ranks_of, tables_named_apart
from dnis_torchrec.selection.torchrec import writing_to_tables
from dnis_torchrec.training import checkpoint as checkpoints
from dnis_torchrec.training.checkpoint import CheckpointFolder, StoredTensor
from dnis_torchrec.training.loop import SearchValues
from dnis_torchrec.training.weights import remove_model, weight_name, write_model, written_model

FORMAT, FORMAT_VERSION = "dnis-torchrec-run", 1
RUN = files.FolderKind("run", "run.json", FORMAT)
RESULTS, PAGE = "results.json", "report.html"
TRAIN_RUN, SEARCH_RUN, COMPRESS_RUN = "trained", "searched", "compressed"
"""Kinds of run: of `dnis train`, of `dnis search`, and the artifacts of `dnis compress`."""
TRAINING, INTERRUPTED = "training", "interrupted"

_DAMAGED = "it was damaged; run the command again"


class TableColumns(TypedDict):
    """Roles of the columns of a table."""

    label: str
    ids: list[str]
    dense: list[str]
    bags: list[str]
    time: str | None


class StreamRecord(TypedDict):
    """What run.json holds of a stream: steps of this run, and what counts of all days have."""

    steps: files.NotNegative
    samples: files.NotNegative
    max_bag_lengths: dict[str, files.NotNegative]


class _Head(TypedDict):
    """The fields of every run that later commands rely on."""

    status: str
    kind: NotRequired[str]
    recipe: str
    seed: files.NotNegative
    embedding_dim: NotRequired[files.Positive | None]
    columns: NotRequired[TableColumns]
    configuration: NotRequired[dict[str, Any]]
    commands: NotRequired[list[str]]
    best_epoch: NotRequired[int]
    stream: NotRequired[StreamRecord]
    scheme: NotRequired[dict[str, DescribedTable]]
    metrics: NotRequired[dict[str, float]]


class RunFolder:
    """The folder of a run. A file in it is written whole or not at all."""

    def __init__(self, path: Path, *, url: str | None = None) -> None:
        self.path, self._url, self.is_shared = path, url, url is None  # whether all ranks see it
        self._address: Address = path if url is None else url  # of what every rank writes
        self._place = f"run folder {path}"
        self._replaced: Path | None = None

    @staticmethod
    def check_free(path: Path, *, overwrite: bool, can_resume: bool = False) -> None:
        """Refuses a folder that a new run may not take."""
        if not path.exists() or (can_resume and _is_unused(path)):
            return
        is_run = (path / "run.json").is_file()
        remedy = f"choose another --out{', or --overwrite' if is_run else ''}"
        place, requirement = f"run folder {path}", "a folder that does not exist"
        check(overwrite and is_run, place, requirement, "an existing one", remedy)

    @staticmethod
    def open(path: Path) -> RunFolder:
        """Opens the folder of a finished run that holds a model."""
        run = RunFolder(path)
        check_run(path)
        head = run.read_head()
        remedy = "its artifacts are the folders in it"
        check(kind_of(head) != COMPRESS_RUN, run._place, "a model", "compressed ones", remedy)
        return run

    def create(self, *, overwrite: bool) -> None:
        """Makes the folder of a new run, and moves a run that stands there to a hidden name."""
        self.check_free(self.path, overwrite=overwrite, can_resume=True)
        if self.path.exists() and not _is_unused(self.path):
            with self.lock():
                path = self.path.resolve()
                self._replaced = path.with_name(f".{path.name}.{uuid4().hex}{files.PARTIAL}")
                os.rename(path, self._replaced)
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._remove_what_ranks_wrote()

    def give_up(self) -> None:
        """Deletes a run that has saved nothing, and moves the run that it replaced back."""
        shutil.rmtree(self.path)
        self._remove_what_ranks_wrote()
        if self._replaced is not None:
            os.rename(self._replaced, self.path.resolve())

    def drop_replaced(self) -> None:
        """Deletes the run that this one replaces, once this one can be gone on with."""
        if self._replaced is not None:
            shutil.rmtree(self._replaced, ignore_errors=True)
            self._replaced = None

    def _remove_what_ranks_wrote(self) -> None:
        if self._url is not None:
            remove_file(path_in(self._url, "run.json"))  # nothing is a run without it
            CheckpointFolder(self.checkpoints).remove()
            remove_model(self._url)

    @property
    def checkpoints(self) -> Address:
        """Address of the checkpoints."""
        return path_in(self._address, "checkpoints")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other commands from writing this run."""
        with files.file_lock(self.path / "lock") as owner:
            remedy = "wait for it, or choose another --out"
            check(owner is None, self._place, "no other job at work in it", owner, remedy)
            yield

    def status(self) -> str | None:
        """How far the run has come; None if there is none."""
        return self.read_head()["status"] if (self.path / "run.json").is_file() else None

    def read_head(self) -> dict[str, Any]:
        """The content of run.json."""
        file = self.path / "run.json"
        head: dict[str, Any] = files.read_json(file, dict[str, Any], remedy=_DAMAGED)
        form, version = head.get("format"), head.get("format_version")
        check(form == FORMAT, self._place, f"format {FORMAT!r}", repr(form))
        place, requirement = self._place, f"format version {FORMAT_VERSION}"
        check(version == FORMAT_VERSION, place, requirement, version)
        files.conform(head, _Head, str(file), remedy=_DAMAGED)
        return head

    def check_same(self, fields: Mapping[str, Any]) -> None:
        """Refuses to resume a run with another recipe or other settings than its own."""
        head, new = _settings(self.read_head()), _settings(json.loads(json.dumps(fields)))
        names = sorted(name for name in {*head, *new} if head.get(name) != new.get(name))
        different = ", ".join(f"{name} {head.get(name)} not {new.get(name)}" for name in names)
        remedy = "repeat the run's own arguments to --resume it"
        check(not names, self._place, "a run with these settings", different, remedy)

    def write_head(self, status: str, fields: Mapping[str, Any]) -> None:
        """Writes run.json."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "status": status, **fields}
        text = json.dumps(head, indent=1, allow_nan=False) + "\n"
        put_file(self.path / "run.json", lambda file: file.write_text(text, encoding="utf-8"))
        if self._url is not None and status == TRAINING:
            # At once: without it the checkpoints of ranks are nobody's.
            copy = partial(shutil.copyfile, self.path / "run.json")
            put_file(path_in(self._url, "run.json"), copy)

    def save_model(
        self, model: nn.Module, scheme: MixedDimensionScheme, encoder: bytes = b""
    ) -> None:
        """Writes a model that is plain or merged, its scheme, and what reads raw rows; every rank
        what it holds."""
        ranks = ranks_of(*collections(model).values())
        with together(ranks.group):
            if rank_of() == 0:
                tensors = files.unshare(scheme.to_tensors())
                put_file(self.path / "scheme.safetensors", partial(save_file, tensors))
                if encoder:
                    put_file(self.path / ENCODER, lambda file: file.write_bytes(encoder))
                remove_model(self._address)
                if ranks.world_size == 1:
                    state = model.state_dict().items()
                    tensors = files.unshare({weight_name(name): part for name, part in state})
                    put_file(self.path / "model.safetensors", partial(save_file, tensors))
        if ranks.world_size > 1:
            write_model(self._address, model, ranks)

    def save_stream(self, summary: StreamSummary) -> None:
        """Writes what a stream leaves beside its model."""
        recent, form = stream.batches_to_tensors(summary.recent)
        for name, tensors in {"counts": summary.counts.counts, "recent": recent}.items():
            metadata = {"form": form} if name == "recent" else None
            write = partial(save_file, files.unshare(tensors), metadata=metadata)
            put_file(self.path / f"{name}.safetensors", write)

    def counts(self) -> FrequencyCounts:
        """How often each row occurred in the stream, on all days."""
        record = self._of_stream()
        return FrequencyCounts(self._load("counts"), record["max_bag_lengths"], record["samples"])

    def recent(self) -> list[Batch]:
        """The newest samples of the stream; a batch of another class needs its recipe loaded."""
        self._of_stream()
        tensors = self._load("recent")
        with safe_open(self.path / "recent.safetensors", framework="pt") as file:
            return stream.batches_of_tensors(tensors, (file.metadata() or {}).get("form", ""))

    def latest_checkpoint(self) -> Address:
        """The checkpoint that a run of a stream ends with."""
        self._of_stream()
        latest = CheckpointFolder(self.checkpoints).latest()
        check(latest is not None, self._place, "its last checkpoint", "none", _DAMAGED)
        return cast(Address, latest)

    def _of_stream(self) -> StreamRecord:
        record, remedy = self.read_head().get("stream"), "name a run of `dnis train --steps`"
        check(record is not None, self._place, "a run of a stream", "another", remedy)
        return cast(StreamRecord, record)

    def _load(self, name: str) -> dict[str, Tensor]:
        file = self.path / f"{name}.safetensors"
        check(file.is_file(), str(file), "a file of the run", "none", _DAMAGED)
        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(describe(str(file), "a whole safetensors file", str(error))) from error

    def scheme(self) -> MixedDimensionScheme:
        """What its tables retain, and in how many bits."""
        tables, place = self.read_head().get("scheme", {}), str(self.path / "run.json")
        check(bool(tables), place, "at least one table", "none", _DAMAGED)
        try:
            return MixedDimensionScheme.from_parts(tables, self._load("scheme"))
        except ValueError as error:
            raise ValueError(f"{place}, field scheme: {error}; {_DAMAGED}") from error

    def weights(self) -> dict[str, StoredTensor]:
        """The state_dict of the plain model, of which nothing is read yet."""
        weights = written_model(self.path)
        if weights is not None:
            return weights
        place, tensors = str(self.path / "model.safetensors"), self._load("model")
        return {name: StoredTensor.of(f"{place}, {name}", tensors[name]) for name in tensors}

    def hash_of_weights(self) -> str:
        """The sha256 of all weights, however many ranks wrote them."""
        digest = hashlib.sha256()
        for _, weight in sorted(self.weights().items()):
            num_rows, *rest = weight.shape or (1,)
            step = rows_per_chunk(max(1, math.prod(rest)))
            for first in range(0, num_rows, step):
                last = min(first + step, num_rows)
                part = weight.rows(first, last) if weight.shape else weight.whole()
                digest.update(part.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def tables_and_dense(self) -> tuple[dict[str, StoredTensor], dict[str, Tensor]]:
        """Tables by name, of which nothing is read yet, and everything else of the model."""
        weights, tables = self.weights(), self.scheme().tables
        keys = {}
        for name, table in tables.items():
            under = "embeddings" if table.pooling == "none" else "embedding_bags"
            key = f"{table.collection}.{under}.{table.table_name}.weight"
            keys[name] = key.removeprefix(".")
        absent = [key for key in keys.values() if key not in weights]
        check(not absent, self._place, "the tables of run.json", f"no {absent[:3]}", _DAMAGED)
        dense = {
            name: value.whole()
            for name, value in weights.items()
            if name not in keys.values() and ".embedding_bags." not in f".{name}"
        }
        return {name: weights[key] for name, key in keys.items()}, dense


@torch.no_grad()
def fill_after_plain_training_(model: nn.Module, run: RunFolder, head: Mapping[str, Any]) -> int:
    """Fills a model with what a search began with; returns the epochs behind it."""
    place, remedy = f"run folder {run.path}", "begin with a run of `dnis train`"
    folder = CheckpointFolder(run.checkpoints)
    latest = folder.latest()
    check(latest is not None, place, "a search with checkpoints", "none", remedy)
    values = checkpoints.Manifest.read(str(latest)).values
    files.conform(values, SearchValues, f"checkpoint {latest}, values", remedy=remedy)
    phases, steps_per_epoch = values["search"]["finished"], values["search"]["steps_per_epoch"]
    check(bool(phases), place, "plain training that is over", "one that is not", remedy)
    best = phases[0]["best"]
    checkpoint = fetch(folder.path_of(best["step"]))
    parts = checkpoints.Manifest.read(checkpoint).stored(checkpoint)
    with_axes_(model)  # as every search has them, with tables named apart, in a `TrainTask`
    with tables_named_apart(model), writing_to_tables(model):
        tensors = checkpoints.model_tensors(nn.ModuleDict({"model": model}))
        fit = {key: key in parts and parts[key].shape == tensors[key].size for key in tensors}
        misfits, remedy = [key for key in fit if not fit[key]], "use the recipe and data of the run"
        check(not misfits, place, "the recipe's model", f"another in {misfits[:3]}", remedy)
        for key, value in tensors.items():
            parts[key].copy_to_(value.chunks[0].tensor)
    epochs = head["configuration"].get("trained_epochs")
    return int(epochs or max(1, round(best["lower_step"] / steps_per_epoch)))


def kind_of(head: Mapping[str, Any]) -> str:
    """The kind of a run."""
    return str(head.get("kind", SEARCH_RUN))


def _is_unused(path: Path) -> bool:
    """Returns whether a folder holds no more than what a search makes before its run.json."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    names = {name for name in names if not name.endswith(files.PARTIAL)}  # a kill leaves such files
    is_new = bool(names) and names <= {"checkpoints", "lock"}
    return is_new and not any((path / "checkpoints").glob("*"))


def _settings(head: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the outcome of a run, by name."""
    names = ("recipe", "columns", "seed", "embedding_dim")
    return {"kind": kind_of(head)} | {n: head.get(n) for n in names} | head["configuration"]
