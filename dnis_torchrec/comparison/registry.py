"""Registry of the methods of a comparison."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from dnis_torchrec.checks import check, describe
from dnis_torchrec.comparison.methods.method import Method

REGISTRY = "dnis_torchrec.comparison.methods:METHODS"


def load_registry(spec: str) -> Mapping[str, Method]:
    """The mapping from method name to method that stands at ``module:name``; a process finds it by
    that name again."""
    module, _, name = spec.partition(":")
    place, remedy = f"registry {spec!r}", f"name one such as {REGISTRY!r}"
    check(bool(module and name), place, "'module:name'", repr(spec), remedy)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that the registry's own imports
        raise ValueError(describe(place, f"a module {module!r}", "none", remedy)) from error
    if not isinstance(found, Mapping):
        raise ValueError(
            describe(place, "a mapping from name to method", type(found).__name__, remedy)
        )
    return found
