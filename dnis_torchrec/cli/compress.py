"""`dnis compress`: a trained model on tables of bit fields, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dnis_torchrec.allocation.settings import CompressSettings
from dnis_torchrec.checks import describe
from dnis_torchrec.cli.addresses import check_seen_by_ranks, fetched_settings
from dnis_torchrec.cli.app import (
    BaselinesOption,
    DataOption,
    OutOption,
    OverwriteOption,
    RecipeArgument,
    arguments,
    check_data,
    check_json,
    is_first_rank,
    print_table,
    print_verdict,
)
from dnis_torchrec.cli.options import command
from dnis_torchrec.cli.terminal import say
from dnis_torchrec.data.urls import address_of

if TYPE_CHECKING:
    from dnis_torchrec.report.compression_content import CompressionContent

TABLE_WIDTH = 130


@command
def compress(
    recipe: RecipeArgument,
    out: OutOption,
    data: DataOption = None,
    compression: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the float32 tables over bytes served, each above 1, with commas between them."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="The trained model: what `dnis train` or `dnis search` wrote, or its URL.",
            **fetched_settings,
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Weights of the recipe's model: a .safetensors file, a state_dict that torch.save wrote, or what "
            "torch.distributed.checkpoint did, a folder.",
        ),
    ] = None,
    baselines: BaselinesOption = True,
    *,
    settings: CompressSettings,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write OUT/compress.json here.")
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Compresses a trained model: bits for every column of every block of rows, by what they are
    worth to the loss.

    No weight is trained; the validation split teaches the scales of the codes.

    Writes an artifact per size, OUT/x8 for 8 times, OUT/compress.json and OUT/report.html. Under
    torchrun every rank holds its shards of the tables alone, and the artifacts are the same.
    """
    from dnis_torchrec.data.recipe import load_recipe
    from dnis_torchrec.jobs.compress_job import CompressJob, check_free, run_compress

    with arguments():
        load_recipe(recipe)
        job = CompressJob(
            run=run,
            recipe=recipe,
            data=data,
            out=out,
            compressions=() if compression is None else parse_sizes(compression, "--compression"),
            weights=weights,
            baselines=baselines,
            overwrite=overwrite,
            **vars(settings),
        )
        check_seen_by_ranks(out)
        if is_first_rank():  # which may have made the folder before the others come here
            check_free(out, overwrite=overwrite)
        check_data(data)
        check_json(json_file)
    content = run_compress(job)
    if is_first_rank():
        _print(content, out, data, json_file)


def parse_sizes(text: str, place: str) -> tuple[float, ...]:
    """Numbers between commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(describe(place, "numbers with commas between them", repr(text))) from error


def _print(
    content: CompressionContent, out: Path, data: Path | None, json_file: Path | None
) -> None:
    from dnis_torchrec.data.files import write_json
    from dnis_torchrec.report.compression_page import compression_table, verdict
    from dnis_torchrec.report.verdict import ONE_SEED

    if json_file is not None:
        write_json(json_file, content.to_json())

    print_table(compression_table(content), TABLE_WIDTH)
    for row in content.compressed:
        say(f"artifact: {address_of(out)}/{row.name}")
    say(f"report: {address_of(out)}/report.html")
    smallest = f"{address_of(out)}/{content.compressed[-1].name}"
    print_verdict(
        verdict(content),
        [ONE_SEED, *content.doubts],
        ["evaluate", smallest, "--recipe", content.recipe],
        data,
    )
