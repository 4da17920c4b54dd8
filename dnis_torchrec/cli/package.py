"""`dnis package`: an artifact's model as one folder that a server runs."""

from __future__ import annotations

from typing import Annotated

import typer

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
from dnis_torchrec.data.users_code import named_errors


@command
def package(
    artifact: ArtifactArgument,
    out: OutOption,
    data: DataOption = None,
    recipe: RecipeOption = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="How tables are served; `packed` if the artifact holds it, else `csr_fp32`."
        ),
    ] = None,
    package_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="`aoti` (compiled, constants memory-mapped) or `torchscript` (for Triton).",
        ),
    ] = "aoti",
    name: Annotated[
        str | None, typer.Option(help="Of the model; the recipe's function if not given.")
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Packages the whole model, dense weights and pruned tables: inputs dense, values, lengths; any
    batch size."""
    from dnis_torchrec.artifact import read_manifest
    from dnis_torchrec.forms import form_named
    from dnis_torchrec.jobs.packaging import KINDS, run_package
    from dnis_torchrec.jobs.packaging.of_artifact import check_packaged_form
    from dnis_torchrec.jobs.packaging.package import check_name
    from dnis_torchrec.jobs.recorded import load_recorded

    with arguments():
        check_data(data)
        if package_format not in KINDS:
            raise ValueError(f"--format: expected one of {KINDS}, got {package_format!r}")
        place, remedy = f"package {out}", "choose another --out, or --overwrite"
        free = overwrite or not out.exists()
        check(free, place, "a folder that does not exist", "an existing one", remedy)
        load_recorded(
            artifact, read_manifest(artifact)["run"], data, recipe
        )  # whose module may register the form
        if form is not None:
            form_named(form)
            check_packaged_form(form)
        if name is not None:
            check_name(name)
    kind = package_format
    try:
        with named_errors():
            run_package(
                artifact,
                out,
                recipe=recipe,
                data=data,
                form=form,
                kind=kind,
                name=name,
                overwrite=overwrite,
            )
    except RuntimeError as error:  # no compiler, or a package that predicts something else
        fail(error, 1)
    say(f"package: {address_of(out)}")
