"""`dnis plan`: what a cluster holds before and after pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dnis_torchrec.checks import check
from dnis_torchrec.cli.addresses import fetched_settings
from dnis_torchrec.cli.app import arguments, check_json, print_table
from dnis_torchrec.cli.options import Fields, command
from dnis_torchrec.jobs.planning.cluster import Cluster, parse_bytes

PLAN_WIDTH = 150


@command
def plan(
    artifact: Annotated[
        Path | None,
        typer.Argument(
            metavar="ARTIFACT", help="Folder `dnis export` wrote, or its URL.", **fetched_settings
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead: `NAME=ROWSxDIM:ROWSxDIM,...`, a table and its blocks. May be repeated."
        ),
    ] = None,
    hbm: Annotated[str, typer.Option(help="Memory of one GPU: 80GB, 16GiB.")] = "80GB",
    ddr: Annotated[
        str, typer.Option(help="Host memory per rank that tables may take; on `cpu`, all there is.")
    ] = "0GB",
    *,
    cluster: Annotated[dict[str, Any], Fields(Cluster)],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write it here, rank by rank.")
    ] = None,
) -> None:
    """Plans a cluster for the tables before and after pruning: storage per rank, step time, the
    fewest devices."""
    from dnis_torchrec.artifact import read_scheme
    from dnis_torchrec.data.files import write_json
    from dnis_torchrec.jobs.planning.plans import compare_plans, plan_table
    from dnis_torchrec.jobs.planning.tables import parse_tables, tables_of_scheme

    with arguments():
        check(
            (artifact is None) != (not table),
            "plan",
            "either ARTIFACT or --table",
            "both or neither",
        )
        machines = Cluster(
            hbm_bytes=parse_bytes(hbm, "--hbm"), ddr_bytes=parse_bytes(ddr, "--ddr"), **cluster
        )
        check_json(json_file)
        if artifact is not None:
            before, after = tables_of_scheme(read_scheme(artifact))
        else:
            before, after = parse_tables(table or ())
    comparison = compare_plans(before, after, machines)
    print_table(plan_table(comparison), PLAN_WIDTH)
    if json_file is not None:
        write_json(json_file, comparison.to_json())
