"""What every table is served in, as people read it: lines of text, or a table for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dnis_torchrec.forms import PACKED
from dnis_torchrec.scheme import MixedDimensionScheme

LISTED = 12
"""Tables that are listed one by one, the largest; the others are added up."""

_Size = tuple[str, int, int]
"""Name, values, bytes served."""


def sizes_as_text(scheme: MixedDimensionScheme) -> list[str]:
    """A line for each table."""
    lines = []
    for name, values, size in _sizes(scheme):
        lines.append(
            f"  {name}: {values:,} values, {size:,} bytes, {8 * size / values:.2f} bits a value"
        )
    return lines


def sizes_as_html(scheme: MixedDimensionScheme, captions: Sequence[str]) -> str:
    """A row for each table, for ``_repr_html_``."""
    rows = [
        f"<tr><th>{escape(name)}</th><td>{values:,}</td><td>{size:,}</td><td>{8 * size / values:.2f}</td></tr>"
        for name, values, size in _sizes(scheme)
    ]
    caption = "<br>".join(map(escape, captions))
    head = "<tr><th>table</th><th>values</th><th>bytes served</th><th>bits a value</th></tr>"
    return f"<table><caption>{caption}</caption><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _sizes(scheme: MixedDimensionScheme) -> list[_Size]:
    found = [
        (name, table.num_embeddings * table.embedding_dim, PACKED.served_bytes(table))
        for name, table in scheme.tables.items()
    ]
    largest = sorted(found, key=lambda size: size[1], reverse=True)[:LISTED]
    listed = [size for size in found if size in largest]
    others = [size for size in found if size not in largest]
    if not others:
        return listed
    return [
        *listed,
        (
            f"{len(others)} other tables",
            sum(size[1] for size in others),
            sum(size[2] for size in others),
        ),
    ]
