"""The `dnis` command: it parses and prints; cli/commands.py does the work."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from dnis_torchrec.checks import check, describe_error, is_of_system, version
from dnis_torchrec.cli.settings import (
    COMPRESSION_HELP,
    EPOCHS,
    FORM_NAMES,
    READ,
    WRITTEN_FIRST,
    CompressCommand,
    DataOption,
    EpochsOption,
    EvaluateCommand,
    ExportCommand,
    FromOption,
    OutOption,
    OverwriteOption,
    PackageCommand,
    RecipeArgument,
    RecipeOption,
    SearchCommand,
    SeedOption,
    TrainCommand,
    number_of,
    parse_numbers,
)
from dnis_torchrec.cli.terminal import PlainConsole, fail, guard_standard_error, say
from dnis_torchrec.data.urls import address_of
from dnis_torchrec.training.settings import Ending, Stopped, exit_code

COMMANDS = ("train", "compress", "search", "export", "evaluate", "package", "report")
"""In the order in which a user meets them."""
ALONE = ("package", "report")
"""Commands that have no work for several ranks."""
TABLE_WIDTH = 120


class InOrder(TyperGroup):
    """Lists the commands as `COMMANDS` has them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        return sorted(super().list_commands(ctx), key=COMMANDS.index)


app = typer.Typer(
    name="dnis",
    cls=InOrder,
    help="Makes embedding tables many times smaller: every column of every block of rows gets the "
    "bits it is worth.\n\nA typical session:\n\n"
    "  dnis train examples.movielens:mf --data DIR --out TRAINED\n\n"
    "  dnis compress examples.movielens:mf --from TRAINED --data DIR --compression 8,20 --out S\n\n"
    "  dnis evaluate S/x20 --recipe examples.movielens:mf --data DIR\n\n"
    "A model trained for its size:\n\n"
    "  dnis search examples.movielens:mf --from TRAINED --data DIR --compression 20 --out RUN\n\n"
    "  dnis export RUN --out ARTIFACT\n\n"
    "  dnis report RUN",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


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
    """Refuses to do the work of one process on every rank of a launcher."""
    command, world_size = context.invoked_subcommand, number_of("WORLD_SIZE", 1)
    with arguments():
        is_fit, remedy = world_size == 1 or command not in ALONE, "start it without torchrun"
        check(is_fit, f"dnis {command}", "one process", f"{world_size} ranks", remedy)


@contextmanager
def arguments() -> Iterator[None]:
    """Errors inside the block are the caller's arguments': the command ends with exit code 2."""
    try:
        yield
    except (NotImplementedError, OSError, ValueError) as error:
        fail(error, 2)


@contextmanager
def _before_work(recipe: str | None, out: Path | None, overwrite: bool = False) -> Iterator[None]:
    """Settings are checked in the block, then the recipe and the place of the output."""
    with arguments():
        yield
        if out is not None and _is_first_rank():  # which may make it before the others come here
            is_free = overwrite or not out.exists()
            place, remedy = f"folder {out}", "choose another --out, or --overwrite"
            check(is_free, place, "a folder that does not exist", "an existing one", remedy)
        if recipe is not None:
            from dnis_torchrec.data.recipe import load_recipe

            load_recipe(recipe)


@app.command()
def train(
    recipe: RecipeArgument,
    out: OutOption,
    data: DataOption = None,
    epochs: EpochsOption = EPOCHS,
    seed: Annotated[int, typer.Option(help="Of weights, splits and batch order.")] = 0,
    overwrite: OverwriteOption = False,
) -> None:
    """Trains the plain model until its selection loss stops improving; writes a run."""
    with _before_work(recipe, out, overwrite):
        settings = TrainCommand(**locals())
    from dnis_torchrec.cli.commands import run_train

    _print_results(run_train(settings), f"run: {address_of(out)}")


@app.command()
def compress(
    recipe: RecipeArgument,
    out: OutOption,
    source: FromOption = None,
    data: DataOption = None,
    compression: Annotated[
        str | None, typer.Option(help=f"{COMPRESSION_HELP}; several with commas between them.")
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(help="Instead: increase of the loss, predicted, at most, in fewest bytes."),
    ] = None,
    seed: SeedOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Compresses a trained model, without a training step: bits for every column of every block of
    rows, by what they are worth to the loss. Writes an artifact a size, OUT/x8 for 8 times."""
    with _before_work(recipe, out, overwrite):
        settings = CompressCommand(
            recipe=recipe,
            out=out,
            source=source,
            data=data,
            compressions=parse_numbers(compression),
            max_loss=max_loss,
            seed=seed,
            overwrite=overwrite,
        )
    from dnis_torchrec.cli.commands import run_compress

    results, place = run_compress(settings), address_of(out)
    lines = [f"artifact: {place}/{name}" for name in settings.sizes]
    _print_results(results, *lines, f"report: {place}/report.html")


@app.command()
def search(
    recipe: RecipeArgument,
    out: OutOption,
    source: FromOption = None,
    data: DataOption = None,
    compression: Annotated[float, typer.Option(help=f"{COMPRESSION_HELP}.")] = 20.0,
    epochs: EpochsOption = EPOCHS,
    seed: SeedOption = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints, beside those after an epoch.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run at --out, if there is one.")
    ] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Searches: trains, lets columns die by what they are worth, spends bits on the others; writes
    a run. Ctrl-C saves and stops; the same command with --resume goes on, also after a crash."""
    with _before_work(recipe, None):
        settings = SearchCommand(**locals())
    from dnis_torchrec.cli.commands import run_search
    from dnis_torchrec.cli.run import RunFolder

    if _is_first_rank():
        with arguments():
            RunFolder.check_free(out, overwrite=overwrite or resume, can_resume=True)
    _print_results(run_search(settings), f"run: {address_of(out)}")


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="What `dnis search` wrote, or its URL.", **READ)
    ],
    out: OutOption,
    form: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{' or '.join(FORM_NAMES)}, may be repeated; packed where there are bits."
        ),
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Exports a finished RUN as an artifact, ready to serve, or to train on."""
    with _before_work(None, out, overwrite):
        settings = ExportCommand(run=run, out=out, forms=tuple(form or ()), overwrite=overwrite)
    from dnis_torchrec.cli.commands import run_export
    from dnis_torchrec.cli.run import RunFolder

    with arguments():
        RunFolder.open(run)
    run_export(settings)
    if _is_first_rank():
        say(f"artifact: {address_of(out)}")


@app.command()
def evaluate(
    path: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_ARTIFACT", help="What `dnis` wrote, or its URL.", **READ),
    ],
    recipe: RecipeOption = None,
    data: DataOption = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Check an artifact's hashes and the values it serves; its metrics with --recipe.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result here.")
    ] = None,
) -> None:
    """Evaluates a run or an artifact on the test split, or verifies an artifact."""
    with _before_work(recipe, None):
        settings = EvaluateCommand(**locals())
    from dnis_torchrec.cli import commands
    from dnis_torchrec.data.files import write_json

    if not verify:
        with arguments():
            if not commands.is_artifact(path):
                commands.RunFolder.open(path)
        result, failures = commands.run_evaluate(settings), []
    else:
        verification = commands.run_verify(settings)
        result, failures = verification.to_json(), verification.failures
    if _is_first_rank():
        if verify:
            _print_findings(result)
        else:
            say(json.dumps(result, indent=1))
        if json_file is not None:
            write_json(json_file, result)
        for finding in failures:
            say(f"error: {finding.check}, {finding.subject}: {finding.detail}", err=True)
    if failures:
        raise typer.Exit(1)


@app.command()
def package(
    artifact: Annotated[
        Path,
        typer.Argument(
            metavar="ARTIFACT", help="What `dnis export` or `compress` wrote, or its URL.", **READ
        ),
    ],
    out: OutOption,
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="MODULE:FUNCTION", help="Recipe of the model.")
    ],
    data: DataOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Packages the whole model of an artifact, compiled: inputs dense, values, lengths."""
    with _before_work(recipe, out, overwrite):
        settings = PackageCommand(**locals())
    from dnis_torchrec.cli.commands import run_package

    try:
        run_package(settings)
    except RuntimeError as error:  # no compiler, or a package that predicts something else
        fail(error, 1)
    say(f"package: {address_of(out)}")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders that `dnis train`, `search` or `compress` wrote, or their URLs.",
            **WRITTEN_FIRST,
        ),
    ],
) -> None:
    """Writes report.html, one page that opens offline, into the first RUN, about all of them."""
    from dnis_torchrec.cli.commands import run_report

    _print_results(run_report(runs), f"report: {address_of(runs[0])}/report.html")


def _is_first_rank() -> bool:
    """Returns whether this process speaks for a job of several ranks."""
    return os.environ.get("RANK", "0") == "0"


def _print_results(results: Any, *lines: str) -> None:
    if _is_first_rank():
        from dnis_torchrec.report.rows import terminal_table

        _print_table(terminal_table(results))
        for line in (results.headline, *lines):
            say(line)


def _print_findings(result: dict[str, Any]) -> None:
    table = Table(
        "check", "of", "result", "detail", title=f"{result['artifact']}: what was checked"
    )
    for finding in result["findings"]:
        table.add_row(*(finding[name] for name in ("check", "subject", "status", "detail")))
    _print_table(table)


def _print_table(table: Table) -> None:
    """Prints a table as wide as the terminal, or `TABLE_WIDTH` where that is more."""
    PlainConsole(max(TABLE_WIDTH, Console().width)).print(table)


def main() -> None:
    """Runs a command; an error that a user can mend is one line, and an exit code."""
    guard_standard_error()
    try:
        with Ending():
            app(prog_name="dnis")
    except Stopped as stop:
        say(f"error: {stop}", err=True)
        sys.exit(stop.exit_code)
    except Exception as error:
        if not _is_for_users(error):
            raise
        number = getattr(error, "signal", None)  # of an interrupted search, which is saved
        say(f"error: {error if hasattr(error, 'signal') else describe_error(error)}", err=True)
        sys.exit(1 if number is None else exit_code(number))


def _is_for_users(error: Exception) -> bool:
    """Returns whether a user can do something about an error."""
    if isinstance(error, ValueError | TypeError | NotImplementedError) or is_of_system(error):
        return True
    from dnis_torchrec.cli.run import RunWriteError
    from dnis_torchrec.training.checkpoint import CheckpointWriteError
    from dnis_torchrec.training.loop import SearchInterrupted
    from dnis_torchrec.training.pipeline import NonFiniteError

    kinds = (CheckpointWriteError, NonFiniteError, RunWriteError, SearchInterrupted)
    return isinstance(error, kinds)
