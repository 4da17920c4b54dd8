"""run_package, the work of `dnis package`: it makes a package of an artifact."""

from __future__ import annotations

from pathlib import Path

import torch

from dnis_torchrec.artifact import read_manifest
from dnis_torchrec.checks import describe
from dnis_torchrec.data.users_code import errors_of_its_code
from dnis_torchrec.forms import CANONICAL_FORM, FORMS, PACKED, Dense, RowPruned, form_named
from dnis_torchrec.jobs.artifact_jobs import drop_in_, recipe_of_artifact
from dnis_torchrec.jobs.packaging.package import write_package
from dnis_torchrec.jobs.recorded import load_recorded

ON_FBGEMM = (Dense, RowPruned)
"""Layouts whose lookups are FBGEMM's kernels."""


def run_package(
    artifact: Path,
    out: Path,
    *,
    recipe: str | None = None,
    data: Path | None = None,
    form: str | None = None,
    kind: str = "aoti",
    name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Packages the model of an artifact."""
    if form is not None:
        check_packaged_form(form)
    manifest = read_manifest(artifact)
    form = form or (PACKED.name if PACKED.name in manifest["forms"] else CANONICAL_FORM)
    spec = load_recorded(artifact, manifest["run"], data, recipe)
    built = recipe_of_artifact(artifact, data, recipe=recipe)
    model = drop_in_(built.model, artifact, form=form)
    with torch.no_grad(), errors_of_its_code(spec):
        return write_package(
            model,
            next(iter(built.data.test)),
            out,
            kind=kind,
            name=name or spec.rpartition(":")[2],
            described={"recipe": spec, "form": form},
            overwrite=overwrite,
        )


def check_packaged_form(form: str) -> None:
    """Refuses a form that torch.export does not take."""
    if isinstance(form_named(form), ON_FBGEMM):
        supported = "supported are forms whose lookup is an operator of dnis_torchrec"
        remedy = f"choose one of {', '.join(name for name, other in FORMS.items() if not isinstance(other, ON_FBGEMM))}"
        raise NotImplementedError(
            describe(f"form {form!r}", supported, "one on FBGEMM's kernels", remedy)
        )
