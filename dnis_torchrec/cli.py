"""The `dnis` command: parses and prints; jobs.py, comparison/ and planning/ do the work.

Exit codes: 0 when all went well, 2 for wrong arguments, 1 otherwise. Results go to standard output, progress and
logs to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dnis_torchrec.baselines.method import MAX_EPOCHS
from dnis_torchrec.budget import Size
from dnis_torchrec.checks import check
from dnis_torchrec.comparison import (
    Compared,
    Comparison,
    comparison_table,
    missing_lines,
    parse_names,
    parse_seeds,
    parse_sizes,
    run_comparison,
    write_json,
)
from dnis_torchrec.export.exporting import ARTIFACT_FORMS, read_scheme
from dnis_torchrec.finite import NonFiniteError
from dnis_torchrec.jobs import SearchJob, run_evaluate, run_export, run_prune, run_report, run_search
from dnis_torchrec.planning import Cluster, compare_plans, parse_bytes, parse_tables, plan_table, tables_of_scheme
from dnis_torchrec.recipe import load_recipe
from dnis_torchrec.report import ReportRow, rows_table
from dnis_torchrec.run_folder import RunFolder
from dnis_torchrec.search import SearchInterrupted

ROWS_WIDTH, COMPARISON_WIDTH = 100, 150

app = typer.Typer(
    name="dnis",
    help="Finds how many embedding dimensions each part of each table deserves; exports tables of just that size.\n\n"
    "A typical session:\n\n"
    "  dnis search examples.movielens:mf --data DIR --compression 5 --out RUN\n\n"
    "  dnis export RUN --out ARTIFACT\n\n"
    "  dnis evaluate ARTIFACT --data DIR\n\n"
    "  dnis report RUN\n\n"
    "  dnis compare examples.movielens:mf --data DIR --methods uniform,magnitude,dnis --out COMPARISON",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="`module:function`, looked for from the current folder."),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `dnis search` wrote.")]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Folder of the data; recipes that generate their own need none.")
]
CompressionOption = Annotated[
    float | None,
    typer.Option("--compression", help="Parameters of the uncompressed tables over those wanted, above 1."),
]
BytesOption = Annotated[
    int | None, typer.Option("--embedding-bytes", help="Instead of --compression: bytes of all tables in form --form.")
]
FormOption = Annotated[str, typer.Option("--form", help="mixed_dimension_fp32 or csr_fp32; index bytes are counted.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what stands at --out.")]


@app.command()
def search(
    recipe: RecipeArgument,
    out: Annotated[Path, typer.Option("--out", help="Run folder to make.")],
    data: DataOption = None,
    compression: CompressionOption = None,
    embedding_bytes: BytesOption = None,
    form: FormOption = "mixed_dimension_fp32",
    seed: Annotated[int, typer.Option(help="Of weights, splits and batch order.")] = 0,
    baseline: Annotated[
        list[str] | None,
        typer.Option(help="Train beside, at the same size: `dense`, `uniform`, `magnitude`. May be repeated."),
    ] = None,
    embedding_dim: Annotated[int | None, typer.Option(help="D to start from; the recipe's own if not given.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks per table set; the recipe's own if not given.")] = None,
    scope: Annotated[
        str, typer.Option(help="`global`: tables of equal embedding_dim share alpha; `table`.")
    ] = "global",
    strategy: Annotated[str, typer.Option(help="How rows are cut: equal_rows, equal_mass, decades.")] = "equal_rows",
    warm_up_epochs: Annotated[int | None, typer.Option(help="Epochs before alpha moves.")] = None,
    ramp_epochs: Annotated[int | None, typer.Option(help="Epochs in which alpha is led to the size.")] = None,
    release_epochs: Annotated[int | None, typer.Option(help="Epochs at most after the ramp.")] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Searches: counts, blocks, learns alpha on validation loss, merges, prunes; writes RUN and its report.json.

    The search ends at the requested size; nothing else has to be tuned. Ctrl-C saves and stops.
    """
    with _arguments():
        size = _size(compression, embedding_bytes, form)
        load_recipe(recipe)
        settings = {
            "num_blocks": num_blocks,
            "scope": scope,
            "strategy": strategy,
            "warm_up_epochs": warm_up_epochs,
            "ramp_epochs": ramp_epochs,
            "release_epochs": release_epochs,
        }
        job = SearchJob(
            recipe=recipe,
            data=data,
            out=out,
            size=size,
            settings={name: value for name, value in settings.items() if value is not None},
            embedding_dim=embedding_dim,
            seed=seed,
            baselines=tuple(baseline or ()),
            overwrite=overwrite,
        )
        _check_free(out, overwrite)
        _check_data(data)
    _print_rows(run_search(job))
    typer.echo(f"run: {out}")


@app.command()
def prune(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", help="Run folder to make.")],
    data: DataOption = None,
    compression: CompressionOption = None,
    embedding_bytes: BytesOption = None,
    form: FormOption = "mixed_dimension_fp32",
    threshold: Annotated[float | None, typer.Option(help="Instead of a size: drop magnitudes up to this.")] = None,
    structure: Annotated[
        str, typer.Option(help="`block`: whole columns of blocks; `element`: single values.")
    ] = "block",
    scope: Annotated[
        str, typer.Option(help="`global`: one budget; `table`: every table to the same ratio.")
    ] = "global",
    fine_tune_epochs: Annotated[int, typer.Option(help="Epochs at most of masked fine-tuning; 0 for none.")] = 10,
    overwrite: OverwriteOption = False,
) -> None:
    """Prunes a finished RUN further, fine-tunes what is left with the mask held, and writes a new run."""
    with _arguments():
        check(
            (threshold is None) or (compression is None and embedding_bytes is None),
            "--threshold",
            "expected no size",
            "one",
        )
        size = None if threshold is not None else _size(compression, embedding_bytes, form)
        RunFolder.open(run)
        _check_free(out, overwrite)
    row = run_prune(
        run,
        data,
        out,
        size=size,
        threshold=threshold,
        structure=structure,
        scope=scope,
        max_epochs=fine_tune_epochs,
        overwrite=overwrite,
    )
    _print_rows([row])
    typer.echo(f"run: {out}")


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", help="Artifact folder to write.")],
    form: Annotated[list[str] | None, typer.Option(help="`mixed_dimension`, `csr`; both if not given.")] = None,
    scipy: Annotated[list[str] | None, typer.Option(help="Also write scipy `.npz` files: `csr`, `coo`.")] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Exports a finished RUN as an artifact: manifest.json and safetensors, ready to serve."""
    with _arguments():
        RunFolder.open(run)
        check(
            overwrite or not out.exists(),
            f"artifact {out}",
            "expected a folder that does not exist",
            "an existing one",
            "choose another --out, or --overwrite",
        )
    path = run_export(run, out, forms=form or ARTIFACT_FORMS, scipy_formats=scipy or (), overwrite=overwrite)
    typer.echo(f"artifact: {path}")


@app.command()
def evaluate(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_ARTIFACT", help="What `dnis search` or `dnis export` wrote.")],
    data: DataOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """Evaluates on the test split: a run's model, or an artifact's serving module dropped into the model."""
    with _arguments():
        check(path.is_dir(), str(path), "expected a run or an artifact", "no such folder")
        _check_data(data)
    result = run_evaluate(path, data)
    text = json.dumps(result, indent=1)
    if json_file is not None:
        _write(json_file, text)
    typer.echo(text)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that `dnis search` wrote.")],
) -> None:
    """Writes report.html, one self-contained page, and figures/ into the first RUN, and prints the table of results.

    Further runs may differ from the first in size, seed, D and S: they add rows, and metric against D and against S.
    """
    with _arguments():
        rows = [row for run in runs for row in RunFolder.open(run).rows()]
        page = run_report(runs[0], runs[1:])
    _print_rows(rows)
    typer.echo(f"report: {page}")


@app.command()
def compare(
    recipe: RecipeArgument,
    methods: Annotated[
        str, typer.Option("--methods", help="Names with commas between them; `dense`, uncompressed, is always added.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the comparison; what has finished there is kept.")],
    data: DataOption = None,
    sizes: Annotated[
        str, typer.Option("--sizes", help="Bytes of the uncompressed tables over bytes wanted, each above 1.")
    ] = "2,4,10",
    seeds: Annotated[
        str, typer.Option("--seeds", help="How many, from 0 on; or with commas: which (`7,` is one).")
    ] = "3",
    patience: Annotated[int, typer.Option(help="Epochs without a better selection loss before a training stops.")] = 3,
    max_epochs: Annotated[int, typer.Option(help="Epochs of one training at most.")] = MAX_EPOCHS,
    trials: Annotated[
        int | None, typer.Option(help="Of methods that need several; each method's own number if not given.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Cells at a time, a process each; one per core (or GPU) if not given.")
    ] = None,
    artifacts: Annotated[
        bool, typer.Option("--artifacts", help="Export every cell that runs, to OUT/cells/CELL/artifact.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write OUT/comparison.json here.")] = None,
) -> None:
    """Compares methods at the same bytes: methods x sizes x seeds, same splits, same early stopping.

    Methods that learn nothing on the validation split get it as training data in a second row, METHOD+validation.

    Writes OUT/comparison.json, .csv and .html. Run again, it goes on where it stopped and tries again what crashed.
    """
    with _arguments():
        load_recipe(recipe)
        _check_data(data)
        if json_file is not None:
            check(json_file.parent.is_dir(), f"--json {json_file}", "expected an existing folder", json_file.parent)
        comparison = Comparison(
            recipe=recipe,
            data=data,
            out=out,
            methods=parse_names(methods, "--methods"),
            sizes=parse_sizes(sizes, "--sizes"),
            seeds=parse_seeds(seeds, "--seeds"),
            patience=patience,
            max_epochs=max_epochs,
            trials=trials,
            artifacts=artifacts,
            jobs=jobs,
        )
    try:
        compared = run_comparison(comparison)
    except KeyboardInterrupt as error:
        typer.echo("error: interrupted; what has finished is kept, the same command goes on from there", err=True)
        raise typer.Exit(1) from error
    if json_file is not None:
        write_json(json_file, compared.content)
    _print_compared(compared, out)
    if compared.crashes:
        raise typer.Exit(1)


@app.command()
def plan(
    artifact: Annotated[Path | None, typer.Argument(metavar="ARTIFACT", help="Folder `dnis export` wrote.")] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(help="Instead: `NAME=ROWSxDIM:ROWSxDIM,...`, a table and its blocks. May be repeated."),
    ] = None,
    world_size: Annotated[int, typer.Option("--world-size", help="Devices, one rank on each.")] = 8,
    hbm: Annotated[str, typer.Option(help="Memory of one GPU: 80GB, 16GiB.")] = "80GB",
    ddr: Annotated[
        str, typer.Option(help="Host memory per rank that tables may take; on `cpu`, all there is.")
    ] = "0GB",
    compute: Annotated[str, typer.Option(help="`cuda` or `cpu`.")] = "cuda",
    local_world_size: Annotated[int, typer.Option("--local-world-size", help="Devices of one host.")] = 8,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Samples per rank and step.")] = 512,
    optimizer: Annotated[
        str, typer.Option(help="Of the tables: `none`, `rowwise_adagrad`, `adam`.")
    ] = "rowwise_adagrad",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write it here, rank by rank.")] = None,
) -> None:
    """Plans a cluster for the tables before and after pruning: storage per rank, step time, the fewest devices.

    All figures are estimates of TorchRec's planner. No GPU is needed, and no memory for the tables.
    """
    with _arguments():
        check((artifact is None) != (not table), "plan", "expected either ARTIFACT or --table", "both or neither")
        cluster = Cluster(
            world_size=world_size,
            hbm_bytes=parse_bytes(hbm),
            ddr_bytes=parse_bytes(ddr),
            compute=compute,
            local_world_size=local_world_size,
            batch_size=batch_size,
            optimizer=optimizer,
        )
        if json_file is not None:
            check(json_file.parent.is_dir(), f"--json {json_file}", "expected an existing folder", json_file.parent)
        if artifact is not None:
            before, after = tables_of_scheme(read_scheme(artifact))
        else:
            before, after = parse_tables(table or ())
    comparison = compare_plans(before, after, cluster)
    if json_file is not None:
        _write(json_file, json.dumps(comparison.to_json(), indent=1))
    _print(plan_table(comparison), COMPARISON_WIDTH)


def main() -> None:
    """Entry point: runs a command and turns errors into one line on standard error and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        app(prog_name="dnis")
    except (ValueError, TypeError, NotImplementedError, NonFiniteError, SearchInterrupted) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("error: interrupted", err=True)
        sys.exit(1)


@contextmanager
def _arguments() -> Iterator[None]:
    """What fails in here is the caller's arguments: exit code 2."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def _size(compression: float | None, embedding_bytes: int | None, form: str) -> Size:
    return Size(compression_ratio=compression, embedding_bytes=embedding_bytes, form=form)


def _check_free(out: Path, overwrite: bool) -> None:
    remedy = "choose another --out, or --overwrite a run"
    check(
        overwrite or not out.exists(),
        f"run folder {out}",
        "expected a folder that does not exist",
        "an existing one",
        remedy,
    )


def _check_data(data: Path | None) -> None:
    if data is not None:
        check(data.is_dir(), f"--data {data}", "expected a folder", "none")


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f"{file.name}.partial")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, file)


def _print_rows(rows: list[ReportRow] | tuple[ReportRow, ...]) -> None:
    _print(rows_table(rows), ROWS_WIDTH)


def _print_compared(compared: Compared, out: Path) -> None:
    _print(comparison_table(compared.content), COMPARISON_WIDTH)
    for line in missing_lines(compared.content.rows):
        typer.echo(line, err=True)
    typer.echo(f"comparison: {out / 'comparison.html'}")
    if compared.crashes:
        files = "\n".join(f"  {file}" for file in compared.crashes.values())
        typer.echo(
            f"error: {len(compared.crashes)} cells crashed; the same command tries them again:\n{files}", err=True
        )


def _print(table: Table, at_least: int) -> None:
    """Prints a table as wide as the terminal, or as `at_least` where that is less or there is none."""
    Console(width=max(at_least, Console().width), file=sys.stdout).print(table)
