"""Common ground of the commands: the application itself, options, checks of arguments, printing."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from dnis_torchrec._dependencies import version
from dnis_torchrec.checks import check
from dnis_torchrec.cli.addresses import fetched_settings, published_settings
from dnis_torchrec.cli.terminal import PlainConsole, fail, say
from dnis_torchrec.data.urls import address_of

ORDER = (*("train", "compress", "search", "evaluate", "export", "package", "report"),)
"""The commands in the order in which a user meets them."""


class InOrder(TyperGroup):
    """Lists the commands as `ORDER` has them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands; `ctx` is a context of click or of typer, whichever typer was built
        on."""
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    name="dnis",
    cls=InOrder,
    help="Makes embedding tables many times smaller: every column of every block of rows gets the bits it is worth.\n\n"
    "A typical session:\n\n"
    "  dnis train examples.movielens:mf --data DIR --out TRAINED\n\n"
    "  dnis compress examples.movielens:mf --from TRAINED --data DIR --compression 8,20,40 --out SMALL\n\n"
    "  dnis evaluate SMALL/x20 --verify\n\n"
    "A model trained for its size:\n\n"
    "  dnis search examples.movielens:mf --data DIR --from TRAINED --compression 20 --out RUN\n\n"
    "  dnis export RUN --out ARTIFACT\n\n"
    "  dnis report RUN",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

ON_RANKS = ("train", "compress", "search", "evaluate", "export")
"""Commands that know what to do as one of several ranks."""

RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="`module:function`, looked for from the current folder."),
]
RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Folder that `dnis search` or `dnis train` wrote, or its URL.",
        **fetched_settings,
    ),
]
ArtifactArgument = Annotated[
    Path,
    typer.Argument(
        metavar="ARTIFACT", help="Folder that `dnis export` wrote, or its URL.", **fetched_settings
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FOLDER",
        help="Data, a folder or a URL; recipes that generate their own need none.",
        **fetched_settings,
    ),
]
RecipeOption = Annotated[
    str,
    typer.Option(
        "--recipe",
        metavar="MODULE:FUNCTION",
        help="Recipe of the model, looked for from the current folder.",
    ),
]
OutOption = Annotated[
    Path,
    typer.Option(
        "--out", metavar="FOLDER", help="Folder to write, or its URL.", **published_settings
    ),
]
BaselinesOption = Annotated[
    bool,
    typer.Option(
        "--baselines/--no-baselines",
        help="Measure beside, without a further training: the model uncompressed, and with its rows in int8 and int4.",
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what stands at --out.")]


@contextmanager
def arguments() -> Iterator[None]:
    """Blames the caller's arguments for errors inside the block: the command ends with exit code 2."""
    try:
        yield
    except (NotImplementedError, OSError, ValueError) as error:
        fail(error, 2)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        say(f"dnis {version()}")
        raise typer.Exit


@app.callback()
def _before_any_command(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Refuses to do the work of one process on every rank of a launcher: they would write over each
    other."""
    command, world_size = context.invoked_subcommand, int(os.environ.get("WORLD_SIZE", "1"))
    with arguments():
        remedy = "start it without torchrun, or with --nproc_per_node 1"
        alone = [name for name in ORDER if name not in ON_RANKS]
        requirement = (
            f"one process: {', '.join(alone[:-1])} and {alone[-1]} have no work for several ranks"
        )
        check(
            world_size == 1 or command in ON_RANKS,
            f"dnis {command}",
            requirement,
            f"{world_size} ranks",
            remedy,
        )


def is_first_rank() -> bool:
    """Returns whether this process speaks for a job that a launcher such as torchrun has started on
    several ranks."""
    return os.environ.get("RANK", "0") == "0"


def check_data(data: Path | None) -> None:
    """Refuses a --data that is no folder."""
    if data is not None:
        check(
            data.is_dir(),
            f"--data {data}",
            "a folder",
            "none",
            "without --data the recipe says what it needs",
        )


def check_json(file: Path | None) -> None:
    """Refuses a --json that is no file, or in no folder, before the work whose result it is to
    hold."""
    if file is not None:
        check(file.parent.is_dir(), f"--json {file}", "an existing folder", file.parent)
        check(not file.is_dir(), f"--json {file}", "a file", "a folder", "name a file in it")
        is_special = file.exists() and not file.is_file()  # which would be replaced
        check(not is_special, f"--json {file}", "a file", "a pipe or a device", "name a file")


def print_table(table: Table, at_least: int) -> None:
    """Prints a table as wide as the terminal, or as `at_least` where that is less or there is none."""
    PlainConsole(max(at_least, Console().width)).print(table)


def print_verdict(
    sentence: str, doubts: Sequence[str], following: Sequence[str], data: Path | None
) -> None:
    """Prints what a run has gained, what is uncertain about it, and the command to type next."""
    of_data = [] if data is None else ["--data", address_of(data)]
    say(f"\n{sentence[:1].upper()}{sentence[1:]}")
    for doubt in doubts:
        say(f"  uncertain: {doubt}")
    say(f"next: {shlex.join(['dnis', *following, *of_data])}")


def print_metrics(
    build: Callable[[Sequence[str]], Table],
    metrics: Sequence[str],
    *,
    more: str,
    console: Console | None = None,
) -> None:
    """Prints a table with as many metrics as the terminal is wide for; with all of them where there
    is no terminal."""
    console = console or PlainConsole()
    for count in range(len(metrics), -1, -1):
        table = build(metrics[:count])
        width = console.measure(table, options=console.options.update(width=sys.maxsize)).maximum
        if count <= 1 or width <= console.width or not console.is_terminal:
            break
    console.width = max(console.width, width)
    console.print(table)
    if metrics[count:]:
        left_out = f"Too narrow here for {', '.join(metrics[count:])}: {more}"
        console.print(left_out, markup=False, highlight=False, soft_wrap=True)
