"""Google's name for a docstring's examples, which the package writes in the singular, for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExamplesInThePlural(griffe.Extension):
    """Lets griffe read ``Example:`` as its section ``Examples:``, so that doctests are shown as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section in the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
