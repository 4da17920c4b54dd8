"""`dnis train`: the plain model that everybody starts from."""

from __future__ import annotations

from typing import Annotated, Any

from dnis_torchrec.cli.addresses import check_seen_by_ranks
from dnis_torchrec.cli.app import (
    DataOption,
    OutOption,
    OverwriteOption,
    RecipeArgument,
    arguments,
    check_data,
    is_first_rank,
)
from dnis_torchrec.cli.options import Fields, command
from dnis_torchrec.cli.runs import print_rows
from dnis_torchrec.cli.terminal import say
from dnis_torchrec.data.urls import address_of
from dnis_torchrec.training.settings import TrainSettings


@command
def train(
    recipe: RecipeArgument,
    out: OutOption,
    data: DataOption = None,
    *,
    settings: Annotated[dict[str, Any], Fields(TrainSettings)],
    overwrite: OverwriteOption = False,
) -> None:
    """Trains the plain model until its selection loss stops improving; writes RUN and its
    report.json."""
    from dnis_torchrec.data.recipe import load_recipe
    from dnis_torchrec.jobs.run_folder import RunFolder
    from dnis_torchrec.jobs.train_job import TrainJob, run_train

    with arguments():
        load_recipe(recipe)
        job = TrainJob(recipe=recipe, data=data, out=out, overwrite=overwrite, **settings)
        check_seen_by_ranks(out)
        if is_first_rank():  # which may have made the folder before the others come here
            RunFolder.check_free(out, overwrite=overwrite, can_resume=False)
        check_data(data)
    row = run_train(job)
    if is_first_rank():
        print_rows([row], out)
        say(f"run: {address_of(out)}")
