"""`dnis compare`: methods x sizes x seeds at the same bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dnis_torchrec.cli.addresses import check_seen_by_ranks
from dnis_torchrec.cli.app import (
    DataOption,
    OutOption,
    RecipeArgument,
    arguments,
    check_data,
    check_json,
    is_first_rank,
    print_metrics,
)
from dnis_torchrec.cli.options import Fields, command
from dnis_torchrec.cli.terminal import say
from dnis_torchrec.comparison.settings import COMPARED_PRECISIONS, CompareSettings
from dnis_torchrec.data.urls import address_of, url_of
from dnis_torchrec.training.settings import Stopped

if TYPE_CHECKING:
    from dnis_torchrec.comparison.run import Compared


@command
def compare(
    recipe: RecipeArgument,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Names with commas between them; `dense`, uncompressed, is always added.",
        ),
    ],
    out: OutOption,
    data: DataOption = None,
    sizes: Annotated[
        str,
        typer.Option(
            "--sizes", help="Bytes of the uncompressed tables over bytes wanted, each above 1."
        ),
    ] = "2,4,10",
    precisions: Annotated[
        str,
        typer.Option(
            "--precisions",
            help="In which each method that can stores values, of fp32, fp16, int8 and int4; at every size the best one"
            " on the selection split is taken.",
        ),
    ] = ",".join(COMPARED_PRECISIONS),
    seeds: Annotated[
        str,
        typer.Option("--seeds", help="How many, from 0 on; or with commas: which (`7,` is one)."),
    ] = "3",
    *,
    settings: Annotated[dict[str, Any], Fields(CompareSettings)],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write OUT/comparison.json here.")
    ] = None,
) -> None:
    """Compares methods at the same bytes: methods x sizes x seeds, same splits, same early
    stopping."""
    from dnis_torchrec.comparison.outputs import write_comparison_json
    from dnis_torchrec.comparison.plan import Comparison, parse_names, parse_seeds, parse_sizes
    from dnis_torchrec.comparison.run import run_comparison
    from dnis_torchrec.data.recipe import load_recipe

    with arguments():
        load_recipe(recipe)
        check_seen_by_ranks(out)
        check_data(data)
        check_json(json_file)
        comparison = Comparison(
            recipe=recipe,
            data=data,
            data_address=url_of(data),
            out=out,
            methods=parse_names(methods, "--methods"),
            sizes=parse_sizes(sizes, "--sizes"),
            precisions=parse_names(precisions, "--precisions"),
            seeds=parse_seeds(seeds, "--seeds"),
            **settings,
        )
    try:
        compared = run_comparison(comparison)
    except Stopped as error:
        say(
            f"error: {error}; what has finished is kept, the same command goes on from there",
            err=True,
        )
        raise typer.Exit(error.exit_code) from error
    if is_first_rank():
        if json_file is not None:
            write_comparison_json(json_file, compared.content)
        _print_compared(compared, out)
    if compared.crashes:
        raise typer.Exit(1)


def _print_compared(compared: Compared, out: Path) -> None:
    from dnis_torchrec.comparison.outputs import comparison_table, missing_lines

    content, page = compared.content, f"{address_of(out)}/comparison.html"
    print_metrics(partial(comparison_table, content), content.metrics, more=page)
    for line in missing_lines(content.rows):
        say(line, err=True)
    say(f"comparison: {page}")
    if compared.crashes:
        files = "\n".join(
            f"  {address_of(out)}/{file.relative_to(out)}" for file in compared.crashes.values()
        )
        say(
            f"error: {len(compared.crashes)} cells crashed; the same command tries them again:\n{files}",
            err=True,
        )
