"""Templates: every value is escaped, every name that a template uses has to be given.

A page's one script sorts its tables. Its policy names that script by its hash, so that no other one runs.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **values: Any) -> str:
    """Fills a template of ``dnis_torchrec/report/templates``.

    Args:
        template: file name.
        values: what the template names; text is escaped unless it is `markupsafe.Markup`.
    """
    environment = Environment(
        loader=PackageLoader("dnis_torchrec.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    script = (files("dnis_torchrec.report") / "templates" / "sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {"sort_script": Markup(script), "sort_script_hash": f"sha256-{digest}"}
    return environment.get_template(template).render(**values)
