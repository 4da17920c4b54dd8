"""The `dnis` command: it parses and prints; cli/commands.py does the work."""

import inspect
import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_type_hints

import typer
from rich.table import Table

from dnis_torchrec.checks import check, describe_error, is_of_system, version, visible
from dnis_torchrec.cli import settings as options
from dnis_torchrec.cli.settings import WRITTEN_FIRST, is_table, number_of
from dnis_torchrec.cli.terminal import arguments, fail, guard_standard_error, print_table, say
from dnis_torchrec.data.urls import address_of
from dnis_torchrec.training.settings import Ending, Stopped, exit_code

ALONE = ("package", "report")
"""Commands that have no work for several ranks."""

app = typer.Typer(
    name="dnis",
    help="Makes embedding tables many times smaller: every column of every block of rows gets the "
    "bits it is worth.\n\nA session on a table of your own:\n\n"
    "  dnis train clicks.csv --label click --ids user,item --out trained\n\n"
    "  dnis compress clicks.csv --from trained --compression 8,20 --out small\n\n"
    "  dnis evaluate small/x20 --recipe clicks.csv\n\n"
    "`dnis COMMAND --help` begins with an example on generated data.",
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


def commands() -> ModuleType:
    """What does the work; importing it takes seconds, which `--help` has not."""
    from dnis_torchrec.cli import commands

    return commands


def command(kind: type[Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Makes a command whose options are the fields of its settings; checked before its work are
    settings, recipe and the place of the output."""

    def register(work: Callable[[Any], None]) -> Callable[..., None]:
        @wraps(work)
        def run(**values: Any) -> None:
            with arguments():
                settings = kind(**values)
                out, recipe = values.get("out"), values.get("recipe")
                # The first rank may make it before the others come here.
                if out is not None and _is_first_rank():
                    may_exist = any(
                        getattr(settings, name, False) for name in ("overwrite", "resume")
                    )
                    place, remedy = f"folder {out}", "choose another --out"
                    remedy += ", or --overwrite" * hasattr(settings, "overwrite")
                    requirement = "a folder that does not exist"
                    is_free = may_exist or not out.exists()
                    check(is_free, place, requirement, "an existing one", remedy)
                if recipe is not None and not is_table(recipe):
                    from dnis_torchrec.data.recipe import load_recipe

                    load_recipe(recipe)
            work(settings)

        run.__annotations__ = get_type_hints(kind, include_extras=True)
        vars(run)["__signature__"] = inspect.signature(kind, eval_str=True)
        return app.command()(run)

    return register


@command(options.TrainCommand)
def train(settings: options.TrainCommand) -> None:
    """`dnis train examples.synthetic:demo --out trained`

    Trains the plain model until its selection loss stops improving, and writes a run. Ctrl-C saves
    and stops. The same command with --resume goes on, also after a crash."""
    out = settings.out
    _print_results(commands().run_train(settings), out, f"run: {address_of(out)}")


@command(options.CompressCommand)
def compress(settings: options.CompressCommand) -> None:
    """`dnis compress examples.synthetic:demo --from trained --compression 4,8 --out small`

    Compresses a trained model without a training step. Each column of each block of rows gets the
    bits that it is worth to the loss. Each size is an artifact, OUT/x8 for 8 times."""
    place = address_of(settings.out)
    lines = [f"artifact: {place}/{name}" for name in settings.sizes]
    _print_results(commands().run_compress(settings), settings.out, *lines)


@command(options.SearchCommand)
def search(settings: options.SearchCommand) -> None:
    """`dnis search examples.synthetic:demo --compression 10 --out searched`

    Trains a model for its size: columns that are worth little shrink to nothing, the others get
    bits. Writes a run. Ctrl-C saves and stops. The same command with --resume goes on."""
    _print_results(
        commands().run_search(settings), settings.out, f"run: {address_of(settings.out)}"
    )


@command(options.ExportCommand)
def export(settings: options.ExportCommand) -> None:
    """`dnis export searched --out artifact`

    Exports a finished RUN as an artifact, ready to serve, or to train on."""
    commands().run_export(settings)
    if _is_first_rank():
        say(f"artifact: {address_of(settings.out)}")


@command(options.EvaluateCommand)
def evaluate(settings: options.EvaluateCommand) -> None:
    """`dnis evaluate small/x8 --recipe examples.synthetic:demo`

    Evaluates a run or an artifact on the test split, or verifies an artifact."""
    from dnis_torchrec.data.files import write_json

    if settings.verify:
        verification = commands().run_verify(settings)
        result, failures = verification.to_json(), verification.failures
    else:
        result, failures = commands().run_evaluate(settings), []
    if _is_first_rank():
        if settings.verify:
            _print_findings(result)
        else:
            say(json.dumps(result, indent=1))
        if settings.json_file is not None:
            write_json(settings.json_file, result)
        for failure in failures:
            say(f"error: {failure.check}, {failure.subject}: {failure.detail}", err=True)
    if failures:
        raise typer.Exit(1)


@command(options.PackageCommand)
def package(settings: options.PackageCommand) -> None:
    """`dnis package small/x8 --recipe examples.synthetic:demo --out package`

    Compiles the whole model of an artifact. Its inputs are dense, values and lengths."""
    try:
        commands().run_package(settings)
    except RuntimeError as error:  # no compiler, or a package that predicts something else
        fail(error, 1)
    say(f"package: {address_of(settings.out)}")


@command(options.RefreshCommand)
def refresh(settings: options.RefreshCommand) -> None:
    """`dnis refresh examples.synthetic:demo trained small/x8 --out refreshed`

    Compresses the model of RUN anew at the size of ARTIFACT, or writes a delta, which
    `dnis.apply_delta` applies."""
    for line in commands().run_refresh(settings):
        if _is_first_rank():
            say(line)


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
    """`dnis report trained small`

    Writes report.html into the first RUN: one page about all of them, which opens offline."""
    with arguments():
        for run in runs:
            place, requirement = f"folder {run}", "a results.json, as `dnis` writes it"
            check((run / "results.json").is_file(), place, requirement, "none", "check the path")
    _print_results(commands().run_report(runs), runs[0])


def _is_first_rank() -> bool:
    """Returns whether this process speaks for a job of several ranks."""
    return number_of("RANK", 0) == 0


def _print_results(results: Any, out: Path, *lines: str) -> None:
    if _is_first_rank():
        from dnis_torchrec.report.rows import terminal_table

        print_table(terminal_table(results))
        for line in (results.headline, f"report: {address_of(out)}/report.html", *lines):
            say(line)


def _print_findings(result: dict[str, Any]) -> None:
    title = visible(f"{result['artifact']}: what was checked")
    table = Table("check", "of", "result", "detail", title=title)
    for line in result["findings"]:
        table.add_row(*(visible(line[name]) for name in ("check", "subject", "status", "detail")))
    print_table(table)


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
    from dnis_torchrec.training.checkpoint import CheckpointWriteError
    from dnis_torchrec.training.loop import SearchInterrupted
    from dnis_torchrec.training.pipeline import NonFiniteError

    return isinstance(error, CheckpointWriteError | NonFiniteError | SearchInterrupted)
