"""Figures as files and as part of a page."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from dnis_torchrec.checks import check
from dnis_torchrec.storage.whole_files import write_bytes, write_text


def save_png(figure: Figure, path: Path, *, dpi: int = 150) -> Path:
    """Writes a figure as PNG, atomically.

    Raises:
        ValueError: if the folder does not exist.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return write_bytes(path, buffer.getvalue())


def save_svg(figure: Figure, path: Path) -> Path:
    """Writes a figure as a stand-alone SVG, atomically; the same figure gives the same bytes.

    Raises:
        ValueError: if the folder does not exist.
    """
    return write_text(path, _svg_text(figure))


def inline_svg(figure: Figure, name: str) -> str:
    """An ``<svg>`` element for an HTML page: no ids shared with other figures, no address of any kind.

    Args:
        figure: the figure.
        name: letters, digits and dashes; goes before every id, so it has to differ between the figures of a page.

    Raises:
        ValueError: if the name holds other characters.
    """
    check(bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name)), "name", "letters, digits and dashes", repr(name))
    text = _svg_text(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    # Inside HTML, an <svg> needs neither a fixed size nor namespaces, which are addresses.
    return re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg \1 aria-hidden="true">', text, count=1)


def _svg_text(figure: Figure) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "dnis_torchrec", "svg.fonttype": "path", "svg.image_inline": True}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
