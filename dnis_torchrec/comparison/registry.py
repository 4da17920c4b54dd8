"""Where the methods of a comparison are found."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from dnis_torchrec.baselines.method import Method

REGISTRY = "dnis_torchrec.baselines:METHODS"


def load_registry(spec: str) -> Mapping[str, Method]:
    """The mapping from method name to method that stands at ``module:name``; a process finds it by that name again."""
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)
