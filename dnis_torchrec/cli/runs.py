"""`dnis search`, `export`, `evaluate` and `report`: one run, from data to artifact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dnis_torchrec.checks import check
from dnis_torchrec.cli.addresses import (
    check_seen_by_ranks,
    fetched_settings,
    published_first_settings,
    url_of_ranks,
)
from dnis_torchrec.cli.app import (
    BaselinesOption,
    DataOption,
    OutOption,
    OverwriteOption,
    RecipeArgument,
    RunArgument,
    arguments,
    check_data,
    check_json,
    is_first_rank,
    print_metrics,
    print_table,
    print_verdict,
)
from dnis_torchrec.cli.options import command
from dnis_torchrec.cli.terminal import say
from dnis_torchrec.data.urls import address_of
from dnis_torchrec.search.settings import USUAL_EPOCHS, SearchSettings, check_compression
from dnis_torchrec.training.settings import Saving

if TYPE_CHECKING:
    from dnis_torchrec.report import ReportRow

FORMS_WIDTH = 100

CompressionOption = Annotated[
    float | None,
    typer.Option(
        "--compression",
        help="Bytes of the float32 tables over those wanted in form --form, above 1.",
    ),
]
BytesOption = Annotated[
    int | None,
    typer.Option(
        "--embedding-bytes", help="Instead of --compression: bytes of all tables in form --form."
    ),
]
FormOption = Annotated[
    str | None,
    typer.Option(
        "--form",
        help="Of which the size counts the bytes: mixed_dimension_fp32 (if not given), csr_fp32, ...",
    ),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="Begin with the trained model of this run of `dnis train`, or with that of `dnis search` as its plain "
        "training left it; a folder or a URL.",
        **fetched_settings,
    ),
]
TrainedWeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="PATH",
        help="Begin with these trained weights: a .safetensors file, a state_dict that torch.save wrote, or what "
        "torch.distributed.checkpoint did, a folder. How long their training took is not known: ramp and release are "
        f"as after one of {USUAL_EPOCHS} epochs, or of --epochs if that is fewer.",
    ),
]


@command
def search(
    recipe: RecipeArgument,
    out: OutOption,
    data: DataOption = None,
    compression: Annotated[
        float,
        typer.Option(
            "--compression", help="Bytes of the float32 tables over bytes served, above 1."
        ),
    ] = 20.0,
    seed: Annotated[int, typer.Option(help="Of weights, splits and batch order.")] = 0,
    embedding_dim: Annotated[
        int | None, typer.Option(help="D to start from; the recipe's own if not given.")
    ] = None,
    from_run: FromOption = None,
    weights: TrainedWeightsOption = None,
    baselines: BaselinesOption = True,
    *,
    settings: SearchSettings,
    saving: Saving,
    overwrite: OverwriteOption = False,
) -> None:
    """Searches: trains, lets columns die by what they are worth, spends bits on the others; writes
    RUN.

    With --from or --weights nothing is trained plainly: the search begins at the axes of a trained
    model's tables.

    Ctrl-C saves and stops; the same command with --resume goes on, also after a crash.
    """
    with arguments():
        check_compression(compression, "--compression")

    from dnis_torchrec.data.recipe import load_recipe
    from dnis_torchrec.jobs.given_model import GivenModel
    from dnis_torchrec.jobs.report_job import verdict_of
    from dnis_torchrec.jobs.run_folder import RunFolder
    from dnis_torchrec.jobs.search_job import SearchJob, run_search

    with arguments():
        load_recipe(recipe)
        job = SearchJob(
            recipe=recipe,
            data=data,
            out=out,
            url=url_of_ranks(out),
            compression=compression,
            settings=settings,
            embedding_dim=embedding_dim,
            seed=seed,
            given=GivenModel.of(from_run, weights),
            stored_rows=baselines,
            overwrite=overwrite,
            saving=saving,
        )
        if is_first_rank():  # which may have made the folder before the others come here
            RunFolder.check_free(out, overwrite=overwrite or saving.resume)
        check_data(data)
    rows = run_search(job)
    if is_first_rank():
        print_rows(rows, out)
        say(f"run: {address_of(out)}")
        told, uncertain = verdict_of(out, rows)
        print_verdict(
            told,
            uncertain,
            ["export", address_of(out), "--out", f"{address_of(out)}-artifact"],
            None,
        )


@command
def export(
    run: RunArgument,
    out: OutOption,
    form: Annotated[
        list[str] | None,
        typer.Option(
            help="`packed`, which serves, or `mixed_dimension`, which trains; by default `packed` of codes."
        ),
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Exports a finished RUN as an artifact, ready to serve."""
    from dnis_torchrec.artifact.write import check_forms
    from dnis_torchrec.jobs.artifact_jobs import run_export
    from dnis_torchrec.jobs.run_folder import RunFolder

    with arguments():
        scheme = RunFolder.open(run).scheme()
        check_seen_by_ranks(out)
        if is_first_rank():  # which may have made the folder before the others come here
            requirement, remedy = (
                "a folder that does not exist",
                "choose another --out, or --overwrite",
            )
            check(
                overwrite or not out.exists(),
                f"artifact {out}",
                requirement,
                "an existing one",
                remedy,
            )
        forms = check_forms(form or [scheme.form])
    run_export(run, out, forms=forms, overwrite=overwrite)
    if is_first_rank():
        say(f"artifact: {address_of(out)}")


@command
def evaluate(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_ARTIFACT",
            help="What `dnis search`, `train` or `export` wrote, or its URL.",
            **fetched_settings,
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="MODULE:FUNCTION",
            help="Recipe of the model; only --verify does without.",
        ),
    ] = None,
    data: DataOption = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Check an artifact: every file's hash, every form's values on hard bags, unknown ids; "
            "with --recipe its metrics, too.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result here.")
    ] = None,
) -> None:
    """Evaluates on the test split: a run's model, or an artifact's serving module dropped into the
    model."""
    from dnis_torchrec.data.files import write_json
    from dnis_torchrec.data.recipe import load_recipe
    from dnis_torchrec.jobs.artifact_jobs import run_evaluate

    with arguments():
        check(path.is_dir(), str(path), "a run or an artifact", "no such folder")
        check_data(data)
        check_json(json_file)
        is_known = recipe is not None or verify
        check(is_known, "--recipe", "the recipe of the model", "none", "name one, module:function")
        if recipe is not None:
            load_recipe(recipe)
    if verify:
        _verify(path, recipe, data, json_file)
        return
    result = run_evaluate(path, data, recipe=str(recipe))
    if is_first_rank():
        say(json.dumps(result, indent=1))
        if json_file is not None:
            write_json(json_file, result)


def _verify(path: Path, recipe: str | None, data: Path | None, json_file: Path | None) -> None:
    from dnis_torchrec.artifact import verify as verification
    from dnis_torchrec.data.files import write_json
    from dnis_torchrec.jobs.artifact_jobs import recipe_of_artifact
    from dnis_torchrec.training.shard import launched_ranks

    make = None if recipe is None else partial(recipe_of_artifact, path, data, recipe=recipe)
    with launched_ranks() as ranks:
        result = verification.verify(path, make_recipe=make, ranks=ranks)
    if is_first_rank():
        checks = Table(
            "check", "of", "result", "detail", title=f"{result.artifact}: what was checked"
        )
        for finding in result.findings:
            checks.add_row(finding.check, finding.subject, finding.status, finding.detail)
        print_table(checks, FORMS_WIDTH)
        if json_file is not None:
            write_json(json_file, result.to_json())
        for finding in result.failures:
            say(f"error: {finding.check}, {finding.subject}: {finding.detail}", err=True)
    if result.failures:
        raise typer.Exit(1)


@command
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders that `dnis search` wrote, or their URLs.",
            **published_first_settings,
        ),
    ],
) -> None:
    """Writes report.html, one page that opens offline (5 MB), into the first RUN, and prints the
    table of results."""
    from dnis_torchrec.jobs.report_job import read_runs, run_report

    with arguments():
        together = read_runs(runs)
    run_report(runs[0], runs[1:])
    print_rows(together.rows, runs[0])
    if together.drawn_only:
        names = ", ".join(address_of(Path(name)) for name in together.drawn_only)
        say(f"of another D or S, in the charts only: {names}")
    say(f"report: {address_of(runs[0])}/report.html")


def print_rows(rows: Sequence[ReportRow], run: Path) -> None:
    """Prints the rows of a run as a table."""
    from dnis_torchrec.report import rows_table
    from dnis_torchrec.report.tables import metric_names

    names = sorted(metric_names(rows), key=lambda name: name == "loss")  # one of the others, too
    print_metrics(partial(rows_table, rows), names, more=f"{address_of(run)}/report.json")
