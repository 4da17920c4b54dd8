"""Templates: every value is escaped, every name that a template uses has to be given."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from dnis_torchrec.report.tables import format_megabytes


def render(template: str, *, charts: Mapping[str, go.Figure], **values: Any) -> str:
    """Fills a template of ``dnis_torchrec/report/templates``."""
    environment = Environment(
        loader=PackageLoader("dnis_torchrec.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    scripts = _scripts() if charts else _scripts()[-1:]
    environment.globals |= {
        "scripts": [Markup(text) for text, _ in scripts],
        "script_hashes": Markup(" ".join(f"'{digest}'" for _, digest in scripts)),
        "charts": {name: Markup(_json(figure)) for name, figure in charts.items()},
        "format_megabytes": format_megabytes,
    }
    return environment.get_template(template).render(**values)


def _json(figure: go.Figure) -> str:
    """A chart as JSON that cannot end the element it stands in."""
    return str(figure.to_json()).replace("<", "\\u003c")


@cache
def _scripts() -> list[tuple[str, str]]:
    """Plotly, what draws charts, what sorts tables; each with its hash."""
    folder = files("dnis_torchrec.report") / "templates"
    texts = [
        get_plotlyjs(),
        *((folder / name).read_text(encoding="utf-8") for name in ("charts.js", "sort.js")),
    ]
    return [
        (text, f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}")
        for text in texts
    ]
