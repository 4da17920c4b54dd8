"""What MkDocs does not know by itself: README, measured pages, notebooks, and the names of the package's face.

MkDocs calls the functions that begin with ``on_``. Nothing of the package is imported, so that a build needs no torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
START = "index.md"
"""README's place in the site."""

MEASURED = "benchmarks"
"""Folder beside docs/ whose pages and pictures the site shows under the same name."""

MARKER = "<!-- every public name -->"
ROOM_TITLES = {
    "allocation": "Compress a trained model",
    "artifact": "Export and load",
    "blocks": "Counts and blocks",
    "data": "Recipes and data",
    "search": "Search",
    "serving": "Serve",
    "selection": "Soft selection and sharding",
}
"""Room of the package -> heading above its public names."""


def public_names() -> dict[str, list[str]]:
    """Room -> its names in the package's face, both in alphabetical order."""
    tree = ast.parse((ROOT / "dnis_torchrec" / "__init__.py").read_text(encoding="utf-8"))
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    modules = ast.literal_eval(values["_NAMES"])
    homes = {name: module for module, names in modules.items() for name in names}
    homes["search"] = "search"  # a function there
    rooms: dict[str, list[str]] = {}
    for name in sorted(ast.literal_eval(values["__all__"])):
        rooms.setdefault(homes[name].split(".")[0], []).append(name)
    return dict(sorted(rooms.items()))


def reference() -> str:
    """Markdown of the API page, as mkdocstrings reads it: a heading for each room, a line for each name."""
    lines = []
    for room, names in public_names().items():
        lines += [f"## {ROOM_TITLES.get(room, room)}", "", *(f"::: dnis_torchrec.{name}\n" for name in names)]
    return "\n".join(lines)


def cells(script: str) -> Iterator[tuple[str, str]]:
    """Kind and text of every cell of a script in percent format: ``"code"``, or ``"markdown"`` without comment signs.

    As in jupytext, a comment that begins with ``!`` is a command of the notebook.

    Example:
        >>> list(cells("# %% [markdown]\\n# # Title\\n# %%\\nx = 1\\n# %%\\n# !dnis\\n"))
        [('markdown', '# Title'), ('code', 'x = 1'), ('code', '!dnis')]
    """
    for cell in f"\n{script}".split("\n# %%")[1:]:
        head, _, text = cell.partition("\n")
        if "[markdown]" in head:
            yield "markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.strip().splitlines())
        else:
            yield "code", re.sub(r"^# !", "!", text.strip(), flags=re.MULTILINE)


def notebook_page(script: str) -> str:
    """Markdown of a notebook; its commands stand there as in a shell."""
    parts = []
    for kind, text in cells(script):
        language = "sh" if text.startswith("!") else "python"
        parts.append(text if kind == "markdown" else f"```{language}\n{text.replace('!dnis', 'dnis')}\n```")
    return "\n\n".join(parts)


def inside_the_site(page: str, markdown: str) -> str:
    """Links of a page with those out of docs/ replaced by where the site has their target.

    Example:
        >>> inside_the_site("how-to/x.md", "[y](../../benchmarks/y.md), [z](../../README.md#z)")
        '[y](../benchmarks/y.md), [z](../index.md#z)'
        >>> inside_the_site("benchmarks/y.md", "[x](../docs/x.md)")
        '[x](../x.md)'
        >>> inside_the_site("index.md", "[x](docs/x.md)")
        '[x](x.md)'
    """
    if page == START:
        return markdown.replace("](docs/", "](")
    if page.startswith(f"{MEASURED}/"):
        return markdown.replace("](../docs/", "](../")
    up = "../" * page.count("/")
    markdown = re.sub(r"(notebooks/\w+)\.py\)", r"\1.md)", markdown)
    markdown = markdown.replace(f"](../{up}{MEASURED}/", f"]({up}{MEASURED}/")
    return markdown.replace(f"](../{up}README.md", f"]({up}{START}")


def with_equations(html: str, draw: Callable[..., str]) -> str:
    """A page whose equations are drawn from the LaTeX that arithmatex has marked.

    Example:
        >>> with_equations(r'<span class="arithmatex">\\(a &lt; b\\)</span>', lambda latex, display: display + latex)
        '<span class="arithmatex">inlinea < b</span>'
    """
    return re.sub(
        r'(?<=class="arithmatex">)\\([(\[])(.*?)\\[)\]](?=</)',
        lambda match: draw(unescape(match[2]), display="inline" if match[1] == "(" else "block"),
        html,
        flags=re.DOTALL,
    )


def on_config(config: Any) -> Any:
    """Gives headings the anchors that GitHub gives them, so that links hold in both."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Adds README, the measured pages and the notebooks."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, START, abs_src_path=str(ROOT / "README.md")))
    for file in sorted((ROOT / MEASURED).iterdir()):
        if file.suffix in (".md", ".png"):
            files.append(File.generated(config, f"{MEASURED}/{file.name}", abs_src_path=str(file)))
    for script in sorted((ROOT / "docs" / "notebooks").glob("*.py")):
        link = f'<a href="../{script.stem}.ipynb">This page as a notebook with its outputs</a>\n\n'
        page = notebook_page(script.read_text(encoding="utf-8")) + "\n\n" + link
        files.append(File.generated(config, f"notebooks/{script.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Puts the names of the face into the API page, and links where the site has their targets."""
    return inside_the_site(page.file.src_uri, markdown.replace(MARKER, reference()))


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Draws equations as MathML, which browsers show without a script."""
    from latex2mathml.converter import convert

    return with_equations(html, convert)
