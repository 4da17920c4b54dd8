"""Code of Markdown pages, as tests run it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    """Blocks of a page in one language.

    Args:
        page: path from the project's root.
        language: as the fence has it.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_blocks(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Runs a page's Python from top to bottom, as if it were one file.

    Args:
        page: path from the project's root.
        names: what stands before it; the blocks' own names come to it.
    """
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


def shell_commands(page: str) -> Iterator[list[str]]:
    """Words of every command of a page's shell blocks, without comments; a line that ends with ``\\`` goes on.

    Args:
        page: path from the project's root.
    """
    for block in blocks(page, "sh"):
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            words = re.sub(r" +#.*", "", line).split()
            if words:
                yield words


def table_rows(page: str, heading: str) -> dict[str, list[str]]:
    """Rows of the table under a heading of a page: first cell -> the others.

    Args:
        page: path from the project's root.
        heading: of any level.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    below = re.split(rf"^#+ {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
    table = re.split(r"^#", below, maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in rows[2:]}
