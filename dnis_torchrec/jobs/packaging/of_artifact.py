"""run_package: what `dnis package` does, from an artifact to a package."""

from __future__ import annotations

from pathlib import Path

import torch

from dnis_torchrec.artifact import read_manifest
from dnis_torchrec.artifact.csr_forms import CSR
from dnis_torchrec.artifact.dense_forms import DENSE_FORMS, ROW_PRUNED_FORMS
from dnis_torchrec.artifact.packed_form import PACKED
from dnis_torchrec.artifact.predictions import SERVING_FORMS
from dnis_torchrec.checks import describe
from dnis_torchrec.data.users_code import errors_of_its_code
from dnis_torchrec.jobs.artifact_jobs import drop_in_, recipe_of_artifact
from dnis_torchrec.jobs.packaging.package import write_package
from dnis_torchrec.jobs.recorded import load_recorded

ON_FBGEMM = (*DENSE_FORMS, *ROW_PRUNED_FORMS)
"""Forms whose lookups are FBGEMM's kernels."""


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
    """Packages the model of an artifact.

    Args:
        artifact: what `export` wrote, with its dense weights.
        out: folder to make.
        recipe: ``module:function`` of the model; by default the one that the manifest names, if that is
            the user's own code.
        data: folder of its data, as the recipe wants it.
        form: the tables' form; ``"packed"`` if not given and the artifact holds it, else ``"csr"``.
        kind: ``"aoti"`` or ``"torchscript"``.
        name: of the model; the recipe's function by default.
        overwrite: replace a package that stands at `out`.

    Returns:
        `out`.

    Raises:
        ValueError: if the artifact is damaged, names no recipe, or does not fit the recipe's model, and as
            `write_package`.
        NotImplementedError: for a form on FBGEMM's kernels, which torch.export does not take, and as `write_package`.
    """
    if form is not None:
        check_packaged_form(form)
    manifest = read_manifest(artifact)
    form = form or (PACKED if PACKED in manifest["forms"] else CSR)
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
    """Refuses a form that torch.export does not take.

    Args:
        form: name of a registered form.

    Raises:
        NotImplementedError: for one on FBGEMM's kernels.
    """
    if form in ON_FBGEMM:
        supported = "supported are forms whose lookup is an operator of dnis_torchrec"
        remedy = f"choose one of {', '.join(name for name in (*SERVING_FORMS, PACKED) if name not in ON_FBGEMM)}"
        raise NotImplementedError(describe(f"form {form!r}", supported, "one on FBGEMM's kernels", remedy))
