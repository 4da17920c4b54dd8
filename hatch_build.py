"""README for a package index: what builds a distribution takes its description from here.

An index has no other file of the project: a relative picture would be broken there, and so would a relative link. Both
become the text that they stand for.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_CODE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?://|mailto:|#)[^()\s]+\)")


class StandaloneReadme(MetadataHookInterface):
    """Gives the project's metadata its description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the metadata to fill.

        Args:
            metadata: of the project.
        """
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": standalone(text)}


def standalone(text: str) -> str:
    """Markdown without relative pictures and links; code stays as it is.

    Args:
        text: of the README.

    Example:
        >>> standalone("![A curve](docs/curve.png) and [the format](docs/artifact.md), `[a](b)`, [x](https://x.org)")
        'A curve and the format, `[a](b)`, [x](https://x.org)'
    """
    pieces = _CODE.split(text)
    return "".join(piece if index % 2 else _LINK.sub(r"\1", piece) for index, piece in enumerate(pieces))
