"""Settings of the commands, in a module without torch: `--help` is there at once."""

import json
import math
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dnis_torchrec.checks import check, describe
from dnis_torchrec.cli.terminal import arguments
from dnis_torchrec.data.urls import fetch, local_path, output, output_folder, url_of
from dnis_torchrec.search.settings import check_compression

WRITTEN_BY_RANKS = ("checkpoints/*", "model/*")
"""Files of a run that every rank writes; rank 0 writes the others."""
FINISHED = "finished"
"""Status of a run that is over."""
FORM_NAMES = ("packed", "mixed_dimension")


def number_of(variable: str, otherwise: int) -> int:
    """A number that torchrun gives its processes."""
    return int(os.environ.get(variable, otherwise))


def _read(value: str | None) -> Path | None:
    with arguments():
        path = None if value is None else fetch(value)
        is_there = path is None or path.exists()
        check(is_there, f"path {value}", "a file or a folder", "none", "check the path")
        return path


def _number(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        remedy = "`dnis compress` takes several sizes" if "," in value else "write it as 20 or 0.01"
        text = describe("size", "one number", repr(value), remedy)
        raise typer.BadParameter(text) from None


def _write(context: typer.Context, value: str | None) -> Path | None:
    """The local folder; the context of the command publishes it when the command is over."""
    with arguments():
        path = None if value is None else local_path(value)
        if value is None or path is not None:
            return path
        job = f"{os.getpid()} {time.time_ns()}"
        if number_of("WORLD_SIZE", 1) > 1:
            # Ranks of one torchrun have it for a parent, also those that it starts again.
            job = f"{os.getppid()} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            if number_of("RANK", 0) != 0:
                return output_folder(value, job)
        return context.with_resource(output(value, job, skip=WRITTEN_BY_RANKS))


def _write_first(context: typer.Context, values: Sequence[str]) -> list[Path]:
    """The first address is written to, the others are read."""
    paths = [_write(context, values[0]), *map(_read, values[1:])]
    return [path for path in paths if path is not None]


# Text until the callback: a Path would swallow one of the two slashes of a URL.
READ: dict[str, Any] = {"parser": str, "callback": _read}
ReadOption, ReadArgument = partial(typer.Option, **READ), partial(typer.Argument, **READ)
WRITTEN: dict[str, Any] = {"parser": str, "callback": _write}
WRITTEN_FIRST: dict[str, Any] = {"parser": str, "callback": _write_first}
COMPRESSION_HELP = "Bytes of the float32 tables over served bytes, above 1"

RECIPE_HELP = """A recipe `module:function` in the current folder, or a table. A table is a CSV or
Parquet file, or a folder of them."""
WEIGHTS_HELP = """The trained model: a run of `dnis train` or `dnis search`, or weights, or a URL.
Weights are a .safetensors file, a file of torch.save, or a folder of
torch.distributed.checkpoint."""
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help=RECIPE_HELP)]
RecipeOption = typer.Option(metavar="RECIPE", help="The recipe or the table of the model.")
OutOption = Annotated[
    Path, typer.Option(metavar="FOLDER", help="The folder to write, or its URL.", **WRITTEN)
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the folder at --out.")]

Text = str | None
Column, Columns = (partial(typer.Option, metavar=name) for name in ("COLUMN", "COLUMNS"))


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Data of RECIPE, and the roles of columns where it is a table: a run remembers them."""

    label: Annotated[Text, Column(help="The column to predict: 0 and 1, or numbers.")] = None
    ids: Annotated[Text, Columns(help="Columns of one id each, with commas between them.")] = None
    dense: Annotated[Text, Columns(help="Columns of numbers.")] = None
    bags: Annotated[Text, Columns(help="Columns of lists of ids; in text | is between ids.")] = None
    time: Annotated[Text, Column(help="The time of a row: the latest rows are the test.")] = None
    data: Annotated[
        Path | None,
        ReadOption(metavar="FOLDER", help="The data of a recipe: a folder, or its URL."),
    ] = None

    @property
    def columns(self) -> dict[str, Any] | None:
        """The roles as `recipe_from_frame` takes them; None where none is given."""
        roles: dict[str, Any] = {"label": self.label, "time": self.time}
        for role in ("ids", "dense", "bags"):
            text = getattr(self, role)
            roles[role] = [] if text is None else [name.strip() for name in text.split(",")]
        return roles if any(roles.values()) else None

    def check_table(self, recipe: str | None, is_new: bool) -> None:
        """Checks data, and that a table, and nothing else, has roles of its own or of a run."""
        data = self.data
        remedy = "without --data the recipe says what it needs"
        check(data is None or data.is_dir(), f"--data {data}", "a folder", "none", remedy)
        if recipe is not None and is_table(recipe):
            check(data is None, "--data", f"nothing beside table {recipe}", data, "leave it out")
            is_there = "://" in recipe or Path(recipe).exists()
            check(is_there, f"table {recipe}", "a file or a folder", "none")
            is_clear = self.label is not None or (self.columns is None and not is_new)
            check(is_clear, "--label", f"the column of {recipe} to predict", "none")
        else:
            remedy = "name a CSV or Parquet file, or leave out the roles of columns"
            check(self.columns is None, "--label", "a table as RECIPE", str(recipe), remedy)


def check_run(path: Path) -> None:
    """Checks that a folder is a finished run, without loading torch."""
    place, remedy = f"run folder {path}", "name a folder that `dnis train` or `dnis search` wrote"
    check((path / "run.json").is_file(), place, "a run.json in it", "none", remedy)
    status = FINISHED
    with suppress(KeyError, TypeError, ValueError):  # `RunFolder.read_head` refuses a damaged file
        status = json.loads((path / "run.json").read_text(encoding="utf-8"))["status"]
    check(status == FINISHED, place, "a finished run", status, "go on with --resume first")


def is_table(recipe: str) -> bool:
    """Returns whether RECIPE names a table, by path or URL, and not a ``module:function``."""
    path = Path(recipe)
    is_file = bool({".csv", ".parquet", ".pq"} & {suffix.lower() for suffix in path.suffixes[-2:]})
    return is_file or "://" in recipe or path.exists()


@dataclass(frozen=True, kw_only=True)
class ModelCommand(TableOptions):
    """Settings of all commands that write a model; `source` is what they begin with."""

    recipe: RecipeArgument
    out: OutOption
    source: Annotated[
        Path | None, ReadOption("--from", metavar="RUN_OR_WEIGHTS", help=WEIGHTS_HELP)
    ] = None
    overwrite: OverwriteOption = False

    def __post_init__(self) -> None:
        is_new = self.source is None and getattr(self, "refit", None) is None
        self.check_table(self.recipe, is_new=is_new)


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(ModelCommand):
    """Settings of all commands that train, and go on where they were stopped."""

    epochs: Annotated[
        int | None, typer.Option(min=1, help="The most epochs of plain training, 60 by default.")
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run at --out, if there is one.")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(not (self.resume and self.overwrite), "--resume", "no --overwrite", "both")


@dataclass(frozen=True, kw_only=True)
class TrainCommand(TrainingCommand):
    """Settings of `dnis train`. Each field is an option of the command."""

    source: Annotated[
        Path | None, ReadOption("--from", metavar="RUN", help="Go on from the end of this stream.")
    ] = None
    scheme: Annotated[
        Path | None, ReadOption(metavar="ARTIFACT", help="Train the narrow tables of an artifact.")
    ] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="The most steps of one pass over a stream.")
    ] = None
    until: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The end of a pass: 23:30, or a date and time."),
    ] = None
    refit: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Train on train and validation data, for the best number of epochs of RUN.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="The seed of weights, splits and batches: 0, or that of --from."),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for run in filter(None, (self.refit, self.source)):
            check_run(run)
        names = "--steps or --until"
        remedy = f"a stream has no epochs: give {names} alone"
        for name in ("epochs", "refit") if self.is_pass else ():
            value = getattr(self, name)
            check(value is None, f"--{name}", f"none beside {names}", value, remedy)
        is_clear = self.is_pass or self.source is None
        check(is_clear, "--from", f"{names} beside it", "neither", "say when the pass ends")
        if self.deadline is not None and not self.resume:
            check(self.deadline > time.time(), "--until", "a time to come", self.until)

    @property
    def is_pass(self) -> bool:
        """Whether it is one pass over a stream."""
        return self.steps is not None or self.until is not None

    @cached_property
    def deadline(self) -> float | None:
        """When the pass ends, in seconds since 1970."""
        if self.until is None:
            return None
        now, clock = datetime.now(), re.fullmatch(r"(\d\d?):(\d\d)", self.until)
        try:
            if clock is None:
                return datetime.fromisoformat(self.until).timestamp()
            moment = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
        except ValueError as error:
            requirement = "HH:MM, or a date and time as ISO 8601 has it"
            raise ValueError(describe("--until", requirement, repr(self.until))) from error
        return (moment if moment > now else moment + timedelta(days=1)).timestamp()


@dataclass(frozen=True, kw_only=True)
class CompressCommand(ModelCommand):
    """Settings of `dnis compress`; without a source the recipe's own weights."""

    compression: Annotated[
        str | None, typer.Option(help=f"{COMPRESSION_HELP}. Several have commas between them.")
    ] = None
    max_loss: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="Instead of a size: the most that the loss may rise, as predicted.",
            parser=_number,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        loss, sizes = self.max_loss, self.compressions
        is_clear, value = bool(sizes) != (loss is not None), "both" if sizes else "neither"
        remedy = "say --compression 8,20,40, for example"
        check(is_clear, "size", "--compression or --max-loss", value, remedy)
        check(loss is None or 0 < loss < math.inf, "--max-loss", "a finite number above 0", loss)
        for size in sizes:
            check_compression(size, "--compression")
        is_once = len(set(sizes)) == len(sizes)
        check(is_once, "--compression", "each size once", ",".join(map(str, sizes)))
        _check_seen_by_ranks(self.out)

    @property
    def compressions(self) -> tuple[float, ...]:
        """The numbers of ``8,20,40``."""
        text = self.compression
        try:
            return () if text is None else tuple(map(float, text.split(",")))
        except ValueError:
            requirement = "numbers with commas between them"
            raise ValueError(describe("--compression", requirement, repr(text))) from None

    @property
    def sizes(self) -> dict[str, dict[str, float]]:
        """Name of an artifact's folder -> its size, as `Measured.allocate` takes it."""
        if self.max_loss is not None:
            return {f"loss{self.max_loss:g}": {"max_loss": self.max_loss}}
        return {f"x{size:g}": {"compression": size} for size in self.compressions}


@dataclass(frozen=True, kw_only=True)
class SearchCommand(TrainingCommand):
    """Settings of `dnis search`; without a source it trains first."""

    compression: Annotated[
        float, typer.Option(metavar="NUMBER", help=f"{COMPRESSION_HELP}.", parser=_number)
    ] = 20.0
    steps: Annotated[
        int | None,
        typer.Option(min=5, help="Steps of one pass over a stream; the first half only trains."),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_compression(self.compression, "--compression")
        is_clear, remedy = self.steps is None or self.epochs is None, "a stream has no epochs"
        check(is_clear, "--epochs", "none beside --steps", self.epochs, remedy)

    @property
    def is_pass(self) -> bool:
        """Whether it is one pass over a stream."""
        return self.steps is not None


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Settings of `dnis export`."""

    run: Annotated[Path, ReadArgument(metavar="RUN", help="A run of `dnis search`, or its URL.")]
    out: OutOption
    forms: Annotated[
        list[str] | None,
        typer.Option("--form", help=f"{' or '.join(FORM_NAMES)}; may be repeated."),
    ] = None
    overwrite: OverwriteOption = False

    def __post_init__(self) -> None:
        check_run(self.run)
        for form in self.forms or ():
            check(form in FORM_NAMES, "--form", f"one of {', '.join(FORM_NAMES)}", form)
        _check_seen_by_ranks(self.out)


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(TableOptions):
    """Settings of `dnis evaluate`."""

    path: Annotated[
        Path, ReadArgument(metavar="RUN_OR_ARTIFACT", help="A run, an artifact, or a URL.")
    ]
    recipe: Annotated[str | None, RecipeOption] = None
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Check hashes and served values of an artifact; with --recipe its metrics, too.",
        ),
    ] = False
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="The file for the result.")
    ] = None

    def __post_init__(self) -> None:
        self.check_table(self.recipe, is_new=False)
        if not (self.path / "manifest.json").is_file():
            check_run(self.path)
        is_clear = self.recipe is not None or self.verify
        check(is_clear, "--recipe", "the recipe of the model", "none", "name it")
        if self.json_file is not None:  # a pipe or a device would be replaced
            file, place = self.json_file, f"--json {self.json_file}"
            check(file.parent.is_dir(), place, "an existing folder", file.parent)
            check(file.is_file() or not file.exists(), place, "a file", "something else")


@dataclass(frozen=True, kw_only=True)
class PackageCommand(TableOptions):
    """Settings of `dnis package`."""

    artifact: Annotated[
        Path, ReadArgument(metavar="ARTIFACT", help="The artifact to compile, or its URL.")
    ]
    out: OutOption
    recipe: Annotated[str, RecipeOption]
    overwrite: OverwriteOption = False

    def __post_init__(self) -> None:
        self.check_table(self.recipe, is_new=False)


@dataclass(frozen=True, kw_only=True)
class RefreshCommand(TableOptions):
    """Settings of `dnis refresh`."""

    recipe: RecipeArgument
    run: Annotated[Path, ReadArgument(metavar="RUN", help="A run of `dnis train`, or its URL.")]
    artifact: Annotated[
        Path, ReadArgument(metavar="ARTIFACT", help="The artifact that is served, or its URL.")
    ]
    out: OutOption
    delta: Annotated[
        bool, typer.Option("--delta", help="Keep the scheme and write only changes.")
    ] = False

    def __post_init__(self) -> None:
        self.check_table(self.recipe, is_new=False)
        check_run(self.run)
        _check_seen_by_ranks(self.out)


def _check_seen_by_ranks(out: Path) -> None:
    """Refuses a URL on several hosts: ranks of the others do not see the folder behind it."""
    url, hosts = url_of(out), number_of("LOCAL_WORLD_SIZE", 1) < number_of("WORLD_SIZE", 1)
    if url is not None and hosts:
        requirement = "supported is a folder that all hosts have mounted"
        raise NotImplementedError(describe("--out", requirement, f"{url} on several hosts"))
