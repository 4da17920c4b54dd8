"""What a browser would see of a page, without one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

from plotly.offline import get_plotlyjs


def without_plotly(page: str) -> str:
    """The page without the library that draws its charts."""
    return page.replace(get_plotlyjs(), "")


def chart(page: str, name: str) -> dict[str, Any]:
    """A chart of a page as Plotly gets it."""
    place = page[page.index(f'id="chart-{name}"') :]
    return json.loads(place[place.index("{") : place.index("</script>")])


def assert_runs_its_own_scripts_alone(page: str) -> None:
    """Plotly, what draws charts and what sorts tables; a policy lets nothing else run. Charts are JSON, not scripts."""
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == 3
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {allowed}\"" in page
    others = re.findall(r"<script (.*?)>", without_plotly(page))
    assert set(others) == {'type="application/json"'}


class PageReader(HTMLParser):
    """Collects what a browser would see: tags, attributes, ids, and the text outside of markup and scripts.

    Args:
        page: its HTML.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.best: list[str] = []
        self._in_best = self._in_script = False
        self.feed(without_plotly(page))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.text += " "
        self.attributes += [(name, value or "") for name, value in attrs]
        self._in_best, self._in_script = ("class", "best") in attrs, tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            return
        self.text += data
        if self._in_best and data.strip():
            self.best.append(data.strip())
            self._in_best = False

    def values(self, *names: str) -> list[str]:
        return [value for name, value in self.attributes if name in names]
