"""What several jobs need: recipes by name, rows of reports, versions."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from dnis_torchrec.checks import describe
from dnis_torchrec.recipe import Recipe, load_recipe
from dnis_torchrec.report import ReportRow
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.users_code import RecipeError, errors_of_recipe


def build_recipe(spec: str, data: Path | None, *, seed: int, embedding_dim: int | None = None) -> Recipe:
    """Calls a recipe function.

    Args:
        spec: ``module:function``, see `load_recipe`.
        data: folder of the data, or None for a recipe that makes its own.
        seed: of weights, splits and batch order.
        embedding_dim: D to build the tables with, or None for the recipe's own.

    Raises:
        ValueError: if it cannot be found or called so, raises, or refuses the data.
        TypeError: if it returns no Recipe.
    """
    function, place = load_recipe(spec), f"recipe {spec!r}"
    given: dict[str, Any] = {"seed": seed, "embedding_dim": embedding_dim}
    _check_takes(function, place, data, given)
    with errors_of_recipe(spec):
        recipe = function(data, **given)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{place}: expected a Recipe, got {type(recipe).__name__}")
    return recipe


def _check_takes(function: Callable[..., Any], place: str, data: Path | None, given: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some of what can be called does not say how
    try:
        signature.bind(data, **given)
    except TypeError as error:
        requirement = "expected a function of (data, *, seed, embedding_dim)"
        raise RecipeError(describe(place, requirement, f"one of {signature}", str(error))) from error


def scheme_row(
    method: str, scheme: MixedDimensionScheme, metrics: dict[str, float], seed: int, seconds: float
) -> ReportRow:
    """The row of a model whose tables follow a scheme.

    Args:
        method: what the row is called.
        scheme: retained dims of all tables: they give parameters and bytes.
        metrics: metric -> value on the test split.
        seed: of splits and initial weights.
        seconds: wall time of the training, search included.

    Raises:
        TypeError, ValueError: as `ReportRow`.
    """
    return ReportRow(
        method=method,
        compression_ratio=scheme.finite_compression_ratio,
        parameters=scheme.parameters,
        bytes=scheme.form_bytes(),
        metrics=metrics,
        seed=seed,
        seconds=seconds,
    )


def versions() -> dict[str, str]:
    """Versions of what decides a result."""
    names = ("dnis-torchrec", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
