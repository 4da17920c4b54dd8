"""`dnis train`: the plain model that everybody starts from."""

from __future__ import annotations

from typing import Annotated

import typer

from dnis_torchrec.checks import describe
from dnis_torchrec.cli.addresses import shown, url_of_ranks
from dnis_torchrec.cli.app import (
    DataOption,
    OutOption,
    OverwriteOption,
    RecipeArgument,
    app,
    arguments,
    check_data,
    is_first_rank,
)
from dnis_torchrec.cli.runs import print_rows
from dnis_torchrec.cli.terminal import say
from dnis_torchrec.data.recipe import load_recipe
from dnis_torchrec.jobs import TrainJob, run_train
from dnis_torchrec.jobs.run_folder import RunFolder


@app.command()
def train(
    recipe: RecipeArgument,
    out: OutOption,
    data: DataOption = None,
    seed: Annotated[int, typer.Option(help="Of weights, splits and batch order.")] = TrainJob.seed,
    embedding_dim: Annotated[int | None, typer.Option(help="D of the tables; the recipe's own if not given.")] = None,
    embedding_l2: Annotated[
        float | None,
        typer.Option("--embedding-l2", help="L2 penalty on looked-up embeddings; the recipe's own if not given."),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Epochs at most.")] = TrainJob.epochs,
    overwrite: OverwriteOption = False,
) -> None:
    """Trains the plain model until its selection loss stops improving; writes RUN and its report.json.

    Nothing is compressed: it is what every method starts from or is compared with.
    """
    with arguments():
        load_recipe(recipe)
        job = TrainJob(
            recipe=recipe,
            data=data,
            out=out,
            seed=seed,
            embedding_dim=embedding_dim,
            embedding_l2=embedding_l2,
            epochs=epochs,
            overwrite=overwrite,
        )
        url = url_of_ranks(out)
        if url is not None:
            supported = "supported is a folder that all hosts have mounted"
            raise NotImplementedError(describe("--out", supported, f"{url} on several hosts"))
        if is_first_rank():  # which may have made the folder before the others come here
            RunFolder.check_free(out, overwrite=overwrite, can_resume=False)
        check_data(data)
    row = run_train(job)
    if is_first_rank():
        print_rows([row], out)
        say(f"run: {shown(out)}")
