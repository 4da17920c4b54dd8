"""`dnis plan`: what a cluster holds before and after pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dnis_torchrec.artifact import read_scheme
from dnis_torchrec.checks import check
from dnis_torchrec.cli.addresses import fetched_settings
from dnis_torchrec.cli.app import app, arguments, check_json, print_table
from dnis_torchrec.jobs.planning import Cluster, compare_plans, parse_bytes, parse_tables, plan_table, tables_of_scheme
from dnis_torchrec.storage.whole_files import write_json

PLAN_WIDTH = 150


@app.command()
def plan(
    artifact: Annotated[
        Path | None,
        typer.Argument(metavar="ARTIFACT", help="Folder `dnis export` wrote, or its URL.", **fetched_settings),
    ] = None,
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
    with arguments():
        check((artifact is None) != (not table), "plan", "either ARTIFACT or --table", "both or neither")
        cluster = Cluster(
            world_size=world_size,
            hbm_bytes=parse_bytes(hbm, "--hbm"),
            ddr_bytes=parse_bytes(ddr, "--ddr"),
            compute=compute,
            local_world_size=local_world_size,
            batch_size=batch_size,
            optimizer=optimizer,
        )
        check_json(json_file)
        if artifact is not None:
            before, after = tables_of_scheme(read_scheme(artifact))
        else:
            before, after = parse_tables(table or ())
    comparison = compare_plans(before, after, cluster)
    print_table(plan_table(comparison), PLAN_WIDTH)
    if json_file is not None:
        write_json(json_file, comparison.to_json())
