"""`dnis package`: an artifact's model as one folder that a server runs."""

from __future__ import annotations

from dnis_torchrec.checks import check
from dnis_torchrec.cli.app import (
    ArtifactArgument,
    DataOption,
    OutOption,
    OverwriteOption,
    RecipeOption,
    arguments,
    check_data,
)
from dnis_torchrec.cli.options import command
from dnis_torchrec.cli.terminal import fail, say
from dnis_torchrec.data.urls import address_of


@command
def package(
    artifact: ArtifactArgument,
    out: OutOption,
    recipe: RecipeOption,
    data: DataOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Packages the whole model, dense weights and compressed tables: inputs dense, values, lengths;
    any batch size."""
    from dnis_torchrec.artifact import package as packages
    from dnis_torchrec.artifact.export import drop_in_
    from dnis_torchrec.data.recipe import load_recipe
    from dnis_torchrec.jobs.artifact_jobs import recipe_of_artifact
    from dnis_torchrec.scheme import PACKED

    with arguments():
        check_data(data)
        place, remedy = f"package {out}", "choose another --out, or --overwrite"
        free = overwrite or not out.exists()
        check(free, place, "a folder that does not exist", "an existing one", remedy)
        load_recipe(recipe)
    try:
        built = recipe_of_artifact(artifact, data, recipe=recipe)
        model, batch = drop_in_(built.model, artifact, form=PACKED), next(iter(built.data.test))
        notes = {"recipe": recipe, "form": PACKED}
        packages.write_package(model, batch, out, notes=notes, overwrite=overwrite)
    except RuntimeError as error:  # no compiler, or a package that predicts something else
        fail(error, 1)
    say(f"package: {address_of(out)}")
