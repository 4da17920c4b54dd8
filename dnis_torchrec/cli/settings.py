"""Settings of the commands, in a module without torch: `--help` is there at once."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dnis_torchrec.checks import check, describe
from dnis_torchrec.cli.terminal import fail
from dnis_torchrec.data.urls import fetch, local_path, output, output_folder, url_of
from dnis_torchrec.search.settings import check_compression

FORM_NAMES = ("packed", "mixed_dimension")
EPOCHS = 60
"""Epochs at most of plain training, unless the user says another number."""


@dataclass(frozen=True, kw_only=True)
class _NewFolder:
    """A command that writes a folder."""

    out: Path
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainCommand(_NewFolder):
    """Settings of `dnis train`."""

    recipe: str
    data: Path | None = None
    epochs: int = EPOCHS
    seed: int = 0

    def __post_init__(self) -> None:
        _check_data(self.data)
        check(self.epochs >= 1, "--epochs", "an integer >= 1", self.epochs)
        check(self.seed >= 0, "--seed", "an integer >= 0", self.seed)
        _check_seen_by_ranks(self.out)


@dataclass(frozen=True, kw_only=True)
class CompressCommand(_NewFolder):
    """Settings of `dnis compress`; `source` is a run or weights, None for the recipe's own."""

    recipe: str
    source: Path | None = None
    data: Path | None = None
    compressions: tuple[float, ...] = ()
    max_loss: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_data(self.data)
        loss, sizes = self.max_loss, self.compressions
        is_clear, received = bool(sizes) != (loss is not None), "both" if sizes else "neither"
        remedy = "say --compression 8,20,40, for example"
        check(is_clear, "size", "--compression or --max-loss", received, remedy)
        check(loss is None or 0 < loss < math.inf, "--max-loss", "a finite number above 0", loss)
        for size in sizes:
            check_compression(size, "--compression")
        is_once = len(set(sizes)) == len(sizes)
        check(is_once, "--compression", "each size once", ",".join(map(str, sizes)))
        check(self.seed is None or self.seed >= 0, "--seed", "an integer >= 0", self.seed)
        _check_seen_by_ranks(self.out)

    @property
    def sizes(self) -> dict[str, dict[str, float]]:
        """Name of an artifact's folder -> its size, as `Measured.allocate` takes it."""
        if self.max_loss is not None:
            return {f"loss{self.max_loss:g}": {"max_loss": self.max_loss}}
        return {f"x{size:g}": {"compression": size} for size in self.compressions}


@dataclass(frozen=True, kw_only=True)
class SearchCommand(_NewFolder):
    """Settings of `dnis search`; `source` is as in `CompressCommand`, None trains first."""

    recipe: str
    source: Path | None = None
    data: Path | None = None
    compression: float = 20.0
    epochs: int = EPOCHS
    seed: int | None = None
    resume: bool = False
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        _check_data(self.data)
        check_compression(self.compression, "--compression")
        check(self.epochs >= 1, "--epochs", "an integer >= 1", self.epochs)
        check(self.seed is None or self.seed >= 0, "--seed", "an integer >= 0", self.seed)
        every = self.checkpoint_every
        check(every >= 0, "--checkpoint-every", "an integer >= 0", every)
        is_clear = not (self.overwrite and self.resume)
        check(is_clear, "--resume", "no --overwrite", "both", "give one of them")

    @property
    def url(self) -> str | None:
        """Where ranks write checkpoints and the model themselves; None for a path."""
        return url_of(self.out)


@dataclass(frozen=True, kw_only=True)
class ExportCommand(_NewFolder):
    """Settings of `dnis export`."""

    run: Path
    forms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for form in self.forms:
            check(form in FORM_NAMES, "--form", f"one of {', '.join(FORM_NAMES)}", form)
        _check_seen_by_ranks(self.out)


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Settings of `dnis evaluate`."""

    path: Path
    recipe: str | None = None
    data: Path | None = None
    verify: bool = False
    json_file: Path | None = None

    def __post_init__(self) -> None:
        _check_data(self.data)
        check(self.path.is_dir(), str(self.path), "a run or an artifact", "no such folder")
        is_clear = self.recipe is not None or self.verify
        check(is_clear, "--recipe", "the recipe of the model", "none", "name module:function")
        file = self.json_file
        if file is not None:
            check(file.parent.is_dir(), f"--json {file}", "an existing folder", file.parent)
            is_file = file.is_file() or not file.exists()  # a pipe or a device would be replaced
            check(is_file, f"--json {file}", "a file", "something else", "name a file")


@dataclass(frozen=True, kw_only=True)
class PackageCommand(_NewFolder):
    """Settings of `dnis package`."""

    artifact: Path
    recipe: str
    data: Path | None = None

    def __post_init__(self) -> None:
        _check_data(self.data)


def parse_numbers(text: str | None) -> tuple[float, ...]:
    """Parses ``8,20,40``."""
    try:
        return () if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        requirement = "numbers with commas between them"
        raise ValueError(describe("--compression", requirement, repr(text))) from None


def _check_data(data: Path | None) -> None:
    remedy = "without --data the recipe says what it needs"
    check(data is None or data.is_dir(), f"--data {data}", "a folder", "none", remedy)


def number_of(variable: str, otherwise: int) -> int:
    """A number that torchrun gives its processes."""
    return int(os.environ.get(variable, otherwise))


def _check_seen_by_ranks(out: Path) -> None:
    """Refuses a URL on several hosts: ranks of the others do not see the folder behind it."""
    url, hosts = url_of(out), number_of("LOCAL_WORLD_SIZE", 1) < number_of("WORLD_SIZE", 1)
    if url is not None and hosts:
        supported = "supported is a folder that all hosts have mounted"
        raise NotImplementedError(describe("--out", supported, f"{url} on several hosts"))


def _fetched(value: str | None) -> Path | None:
    return None if value is None else _local(value, lambda: fetch(value))


def _published(context: typer.Context, value: str | None) -> Path | None:
    """The local folder; the context of the command publishes it when the command is over."""
    if value is None:
        return None

    def prepare() -> Path:
        from dnis_torchrec.cli.run import WRITTEN_BY_RANKS

        if number_of("WORLD_SIZE", 1) == 1:
            return context.with_resource(
                output(value, f"{os.getpid()} {time.time_ns()}", skip=WRITTEN_BY_RANKS)
            )
        # Ranks of one torchrun have it for a parent, also those that it starts again.
        job = f"{os.getppid()} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if number_of("RANK", 0) != 0:
            return output_folder(value, job)
        return context.with_resource(output(value, job, skip=WRITTEN_BY_RANKS))

    return _local(value, prepare)


def _published_first(context: typer.Context, values: Sequence[str]) -> list[Path]:
    """The first address is written to, the others are read."""
    paths = [_published(context, values[0]), *map(_fetched, values[1:])]
    return [path for path in paths if path is not None]


def _local(value: str, prepare: Callable[[], Path]) -> Path:
    """The local path of an address; a wrong address is a wrong argument, exit code 2."""
    here = local_path(value)
    if here is not None:
        return here
    try:
        return prepare()
    except (OSError, ValueError) as error:
        fail(error, 2)


# Text until the callback: a Path would swallow one of the two slashes of a URL.
READ: dict[str, Any] = {"parser": str, "callback": _fetched}
WRITTEN: dict[str, Any] = {"parser": str, "callback": _published}
WRITTEN_FIRST: dict[str, Any] = {"parser": str, "callback": _published_first}

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="`module:function`, from the current folder.")
]
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", metavar="MODULE:FUNCTION", help="Recipe of the model.")
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="FOLDER", help="Data, a folder or a URL, where a recipe needs it.", **READ
    ),
]
OutOption = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Folder to write, or its URL.", **WRITTEN)
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what stands at --out.")]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="RUN_OR_WEIGHTS",
        help="The trained model: what `dnis train` or `dnis search` wrote; or weights, a "
        ".safetensors file, a state_dict of torch.save, or a folder of "
        "torch.distributed.checkpoint; or a URL.",
        **READ,
    ),
]
EpochsOption = Annotated[int, typer.Option("--epochs", help="Epochs at most of plain training.")]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Of weights, splits and batch order: 0, or that of --from."),
]
COMPRESSION_HELP = "Bytes of the float32 tables over bytes served, above 1"
