"""Templates: every value is escaped, every name that a template uses has to be given."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


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
    return environment.get_template(template).render(**values)
