"""`dnis search`, `prune`, `export`, `evaluate` and `report`: one run, from data to artifact."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dnis_torchrec.artifact import read_scheme
from dnis_torchrec.artifact.predictions import forms_table
from dnis_torchrec.artifact.writing import check_forms
from dnis_torchrec.blocks.blocking import STRATEGIES
from dnis_torchrec.checks import check
from dnis_torchrec.cli.addresses import fetched_settings, published_first_settings, shown, url_of_ranks
from dnis_torchrec.cli.app import (
    DataOption,
    OutOption,
    OverwriteOption,
    RecipeArgument,
    RecipeOption,
    RunArgument,
    app,
    arguments,
    check_data,
    check_json,
    is_first_rank,
    print_metrics,
    print_table,
)
from dnis_torchrec.cli.terminal import say
from dnis_torchrec.data.recipe import load_recipe
from dnis_torchrec.forms import WRITTEN_BY_DEFAULT
from dnis_torchrec.jobs import (
    SearchJob,
    check_prune_out,
    check_source_kept,
    load_recorded,
    read_runs,
    recorded_run,
    run_evaluate,
    run_export,
    run_prune,
    run_report,
    run_search,
)
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.report import ReportRow, rows_table
from dnis_torchrec.report.tables import metric_names
from dnis_torchrec.search.budget import Size
from dnis_torchrec.search.pruning import check_pruning
from dnis_torchrec.search.search import Saving
from dnis_torchrec.storage.whole_files import write_json

FORMS_WIDTH = 100
CUTS = tuple(name for name in STRATEGIES if name != "explicit")
"""Strategies that a command can name: they need no boundaries."""

CompressionOption = Annotated[
    float | None,
    typer.Option("--compression", help="Bytes of the float32 tables over those wanted in form --form, above 1."),
]
BytesOption = Annotated[
    int | None, typer.Option("--embedding-bytes", help="Instead of --compression: bytes of all tables in form --form.")
]
FormOption = Annotated[
    str | None,
    typer.Option(
        "--form",
        help="Of which the size counts the bytes: mixed_dimension_fp32 (if not given), csr_fp32, ...",
    ),
]
BaselineOption = Annotated[
    list[str] | None,
    typer.Option(help="Train beside, at the same size: `dense`, `uniform`, `magnitude`. May be repeated."),
]
ExactCountOption = Annotated[
    int | None,
    typer.Option(help="Larger tables are counted in bounded memory, with an error that is said; 2^24 by default."),
]
RotateOption = Annotated[
    bool | None,
    typer.Option("--rotate/--no-rotate", help="Turn tables into their principal axes first, where the model can."),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with an interrupted run at --out; begin it if there is none.")
]
ScopeOption = Annotated[
    str | None,
    typer.Option(
        help="`global`: tables of equal embedding_dim share blocks; `table`: each its own; the recipe's if not given."
    ),
]


@app.command()
def search(
    recipe: RecipeArgument,
    out: OutOption,
    data: DataOption = None,
    compression: CompressionOption = None,
    embedding_bytes: BytesOption = None,
    form: FormOption = None,
    seed: Annotated[int, typer.Option(help="Of weights, splits and batch order.")] = 0,
    baseline: BaselineOption = None,
    embedding_dim: Annotated[int | None, typer.Option(help="D to start from; the recipe's own if not given.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks per table set; the recipe's own if not given.")] = None,
    scope: ScopeOption = None,
    strategy: Annotated[str, typer.Option(help="How rows are cut: equal_rows, equal_mass, decades.")] = "equal_rows",
    exact_count_rows: ExactCountOption = None,
    warm_up_epochs: Annotated[int | None, typer.Option(help="Epochs before alpha moves.")] = None,
    ramp_epochs: Annotated[int | None, typer.Option(help="Epochs in which alpha is led to the size.")] = None,
    release_epochs: Annotated[int | None, typer.Option(help="Epochs at most after the ramp.")] = None,
    rotate: RotateOption = None,
    overwrite: OverwriteOption = False,
    resume: ResumeOption = False,
    checkpoint_every: Annotated[int, typer.Option(help="Lower steps between checkpoints; also after an epoch.")] = 0,
    keep_checkpoints: Annotated[int, typer.Option(help="How many are kept, besides that of the best epoch.")] = 2,
    on_save_error: Annotated[str, typer.Option(help="On a full disk, say: `stop` or `continue`.")] = "stop",
) -> None:
    """Searches: counts, blocks, learns alpha on validation loss, merges, prunes; writes RUN and its report.json.

    The search ends at the requested size without tuning; README names the recipe's settings that improve quality.
    Ctrl-C saves and stops; the same command with --resume goes on, also after a crash.
    """
    with arguments():
        size = _size(compression, embedding_bytes, form)
        saving = Saving(every_steps=checkpoint_every, keep_last=keep_checkpoints, on_error=on_save_error, resume=resume)
        load_recipe(recipe)
        check(strategy in CUTS, "--strategy", f"expected one of {', '.join(CUTS)}", repr(strategy))
        settings = {
            "num_blocks": num_blocks,
            "scope": scope,
            "strategy": strategy,
            "exact_count_rows": exact_count_rows,
            "warm_up_epochs": warm_up_epochs,
            "ramp_epochs": ramp_epochs,
            "release_epochs": release_epochs,
            "rotate": rotate,
        }
        job = SearchJob(
            recipe=recipe,
            data=data,
            out=out,
            url=url_of_ranks(out),
            size=size,
            settings={name: value for name, value in settings.items() if value is not None},
            embedding_dim=embedding_dim,
            seed=seed,
            baselines=tuple(baseline or ()),
            overwrite=overwrite,
            saving=saving,
        )
        if is_first_rank():  # which may have made the folder before the others come here
            RunFolder.check_free(out, overwrite=overwrite or resume)
        check_data(data)
    rows = run_search(job)
    if is_first_rank():
        _print_rows(rows, out)
        say(f"run: {shown(out)}")


@app.command()
def prune(
    run: RunArgument,
    out: OutOption,
    data: DataOption = None,
    recipe: RecipeOption = None,
    compression: CompressionOption = None,
    embedding_bytes: BytesOption = None,
    form: FormOption = None,
    threshold: Annotated[float | None, typer.Option(help="Instead of a size: drop magnitudes up to this.")] = None,
    structure: Annotated[
        str, typer.Option(help="`block`: whole columns of blocks; `element`: single values.")
    ] = "block",
    per_table: Annotated[
        bool, typer.Option("--per-table", help="Bring every table to the same ratio, instead of one budget for all.")
    ] = False,
    fine_tune_epochs: Annotated[int, typer.Option(help="Epochs at most of masked fine-tuning; 0 for none.")] = 10,
    overwrite: OverwriteOption = False,
) -> None:
    """Prunes a finished RUN further, fine-tunes what is left with the mask held, and writes a new run."""
    with arguments():
        check(
            (threshold is None) or (compression is None and embedding_bytes is None and form is None),
            "--threshold",
            "expected no size",
            "one",
        )
        check_pruning(structure=structure, threshold=threshold)
        size = None if threshold is not None else _size(compression, embedding_bytes, form)
        requirement, remedy = "expected an integer >= 0", "say 0 for no fine-tuning"
        check(fine_tune_epochs >= 0, "--fine-tune-epochs", requirement, fine_tune_epochs, remedy)
        head = RunFolder.open(run).read_head()
        check_source_kept(shown(run), shown(out))  # whose local copies are two folders in any case
        check_prune_out(run, out, overwrite=overwrite)
        load_recorded(run, head, data, recipe)
    row = run_prune(
        run,
        data,
        out,
        recipe=recipe,
        size=size,
        threshold=threshold,
        structure=structure,
        per_table=per_table,
        max_epochs=fine_tune_epochs,
        overwrite=overwrite,
    )
    _print_rows([row], out)
    say(f"run: {shown(out)}")


@app.command()
def export(
    run: RunArgument,
    out: OutOption,
    form: Annotated[
        list[str] | None, typer.Option(help="`csr_int8`, ...; `mixed_dimension_fp32` and `csr_fp32` if not given.")
    ] = None,
    scipy: Annotated[list[str] | None, typer.Option(help="Also write scipy `.npz` files: `csr`, `coo`.")] = None,
    regroup: Annotated[
        int | None, typer.Option(help="Regroup rows that were pruned value by value into so many groups.")
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Exports a finished RUN as an artifact, ready to serve, and prints what every serving form of it would come to."""
    with arguments():
        RunFolder.open(run)
        check(
            overwrite or not out.exists(),
            f"artifact {out}",
            "expected a folder that does not exist",
            "an existing one",
            "choose another --out, or --overwrite",
        )
        check(regroup is None or regroup >= 1, "--regroup", "expected a number of groups >= 1", regroup)
        forms, scipy_formats = form or WRITTEN_BY_DEFAULT, scipy or ()
        check_forms(forms, scipy_formats)
    run_export(run, out, forms=forms, scipy_formats=scipy_formats, overwrite=overwrite, num_groups=regroup)
    _print_forms(out)
    say(f"artifact: {shown(out)}")


@app.command()
def evaluate(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_ARTIFACT", help="What `dnis search` or `dnis export` wrote, or its URL.", **fetched_settings
        ),
    ],
    data: DataOption = None,
    recipe: RecipeOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """Evaluates on the test split: a run's model, or an artifact's serving module dropped into the model."""
    with arguments():
        check(path.is_dir(), str(path), "expected a run or an artifact", "no such folder")
        check_data(data)
        check_json(json_file)
        load_recorded(path, recorded_run(path), data, recipe)
    result = run_evaluate(path, data, recipe=recipe)
    say(json.dumps(result, indent=1))
    if json_file is not None:
        write_json(json_file, result)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders that `dnis search` wrote, or their URLs.", **published_first_settings
        ),
    ],
) -> None:
    """Writes report.html, one self-contained page, and figures/ into the first RUN, and prints the table of results.

    Further runs may differ from the first in size, seed, D and S: they add rows, and metric against D and against S.
    """
    with arguments():
        together = read_runs(runs)
    run_report(runs[0], runs[1:])
    _print_rows(together.rows, runs[0])
    if together.drawn_only:
        names = ", ".join(shown(Path(name)) for name in together.drawn_only)
        say(f"of another D or S, in the figures only: {names}")
    say(f"report: {shown(runs[0])}/report.html")


def _size(compression: float | None, embedding_bytes: int | None, form: str | None) -> Size:
    given = sum(value is not None for value in (compression, embedding_bytes))
    place, received = "--compression, --embedding-bytes", ("none", "one", "both")[given]
    check(given == 1, place, "expected one of the two", received, "say --compression 5, for example")
    is_fit = compression is None or (math.isfinite(compression) and compression > 1)
    check(is_fit, "--compression", "expected a finite number above 1", compression)
    return Size(compression=compression, embedding_bytes=embedding_bytes, form=form or Size.form)


def _print_forms(artifact: Path) -> None:
    headings, *rows = forms_table(read_scheme(artifact))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("form", "") else "right")
    for row in rows:
        table.add_row(*row)
    print_table(table, FORMS_WIDTH)


def _print_rows(rows: Sequence[ReportRow], run: Path) -> None:
    names = sorted(metric_names(rows), key=lambda name: name == "loss")  # one of the others, too
    print_metrics(partial(rows_table, rows), names, more=f"{shown(run)}/report.json")
