"""The pages in a real browser: visible, readable in light and dark, nothing cut off or loaded, marks tell numbers.

Headless Chromium is driven through its DevTools pipe, so a test can point with the mouse, press keys and look at pixels
without any package beside it. What is asked is structure, not a stored picture, so that it holds for any version.
"""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dnis_torchrec.report import RowDistribution, write_report
from dnis_torchrec.report.tables import PLUS_MINUS, TIMES
from tests.report.test_report import make_content, make_row

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome on PATH")

WIDE, NARROW = 1280, 390
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium takes commands from descriptor 3 and answers on 4."""
UNDRAWN = "document.querySelectorAll('.chart:not(:has(.main-svg .cartesianlayer path))').length"
"""How many charts Plotly has yet to draw."""
CONTRAST = """(element => {
  const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(channel);
                       return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const style = getComputedStyle(element), ink = element instanceof SVGElement ? style.fill : style.color;
  let behind = element;
  while (/, 0\\)|transparent/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
  const pair = [light(ink), light(getComputedStyle(behind).backgroundColor)].sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
})"""


class Browser:
    """One page in headless Chromium."""

    def __init__(self, folder: Path) -> None:
        to_browser, from_browser = os.pipe(), os.pipe()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
        command = [CHROMIUM, *flags, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        ends = (to_browser[0], from_browser[1])
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", START, *map(str, ends), *map(str, command)],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        self._write, self._read = to_browser[1], from_browser[0]
        self._received = b""
        self._number = 0
        self._session: dict[str, str] = {}
        self.requests: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.command("Network.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and waits for its result; what is requested meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def show(self, page: Path, *, width: int = WIDE, dark: bool = False) -> None:
        """Loads a file at a width, on a light or a dark screen."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.point_at(0, 0)
        self.command("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + 60
        while self.evaluate("document.readyState + location.protocol + " + UNDRAWN) != "completefile:0":
            assert time.monotonic() < deadline, "the page was not loaded and drawn in time"
            time.sleep(0.02)

    def point_at(self, x: float, y: float) -> None:
        """Moves the mouse."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Presses and releases the mouse."""
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def pixels(self, box: dict[str, float]) -> np.ndarray:
        """A part of the page as ``(height, width, 3)``."""
        clip = {name: box[name] for name in ("x", "y", "width", "height")} | {"scale": 1}
        shot = self.command("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB"))

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], 60)
            assert ready, "Chromium did not answer in time"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every figure that there is."""
    line = {"dnis at 4": [(d, make_row(ratio=4.0, metrics={"auc": 0.7 + d / 100})) for d in (4, 8, 16)]}
    rows = RowDistribution.of([(torch.arange(60), torch.arange(60) // 8)], embedding_dim=8)
    content = make_content(row_distribution=rows, by_embedding_dim=line, by_num_blocks=line)
    return write_report(tmp_path_factory.mktemp("page") / "report.html", content)


def boxes(browser: Browser, selector: str) -> list[dict[str, float]]:
    """Places of elements in the document."""
    return browser.evaluate(
        f"""[...document.querySelectorAll({selector!r})].map(e => {{ const b = e.getBoundingClientRect();
        return {{x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}}; }})"""
    )


def told(browser: Browser) -> list[str]:
    """Texts of the marks that are pointed at."""
    return browser.evaluate("[...document.querySelectorAll('.hoverlayer .hovertext')].map(t => t.textContent)")


def assert_text_stands_out(browser: Browser) -> None:
    selector = "h1, h2, p, td, th, dt, dd, li, a, figcaption, summary, .js-plotly-plot text"
    contrasts = browser.evaluate(
        f"[...document.querySelectorAll({selector!r})].map(e => [e.textContent.slice(0, 40), {CONTRAST}(e)])"
    )
    assert len(contrasts) > 60
    assert [(text, round(contrast, 2)) for text, contrast in contrasts if contrast < 4.5] == []


@pytest.mark.parametrize("dark", [False, True])
def test_every_figure_is_drawn_readable_and_nothing_is_loaded(browser: Browser, page: Path, dark: bool) -> None:
    browser.requests.clear()
    browser.show(page, dark=dark)
    assert_text_stands_out(browser)
    names = browser.evaluate("[...document.querySelectorAll('figure')].map(f => f.id.replace('figure-', ''))")
    assert names == [
        *("quality", "pruning-rate", "embedding-dim", "num-blocks"),
        *("history", "alpha", "alpha-distribution", "frequency", "row-distribution", "bytes"),
    ]
    for name, box in zip(names, boxes(browser, "figure .card"), strict=True):
        assert box["height"] > 120, name
        pixels = browser.pixels(box)
        backdrop = pixels[8, 8].astype(int)
        is_ink = np.abs(pixels - backdrop).sum(axis=2) > 60
        assert 0.003 < is_ink.mean() < 0.6, f"{name}: {is_ink.mean():.2%} of it is drawn"
        assert is_ink.any(axis=0).mean() > 0.4, f"{name}: drawn in a corner"
        assert (backdrop.sum() < 300) == dark, f"{name}: backdrop {backdrop}"
    assert [url for url in browser.requests if not url.startswith("data:image/")] == [page.as_uri()]


def overflows(browser: Browser) -> list[float]:
    """By how much every table is wider than its frame."""
    return browser.evaluate("[...document.querySelectorAll('.scroll')].map(s => s.scrollWidth - s.clientWidth)")


def test_a_table_scrolled_sideways_keeps_its_first_column_and_the_headings_of_its_parts(
    browser: Browser, awkward_page: Path
) -> None:
    browser.show(awkward_page, width=NARROW)
    assert overflows(browser)[0] > 300
    browser.evaluate("document.querySelector('#quality .scroll').scrollLeft = 300")
    (frame,) = boxes(browser, "#quality .scroll")
    for selector, num_cells in (("thead th:first-child", 1), ("tbody th[scope=row]", 4), ("tr.part span", 3)):
        cells = boxes(browser, f"#quality {selector}")
        assert len(cells) == num_cells
        for cell in cells:
            assert frame["x"] <= cell["x"] <= cell["x"] + cell["width"] <= frame["x"] + frame["width"]
    backs = browser.evaluate(
        "[...document.querySelectorAll('#quality th:first-child')]"
        ".filter(e => getComputedStyle(e).position === 'sticky').map(e => getComputedStyle(e).backgroundColor)"
    )
    assert len(backs) == 5
    assert not [back for back in backs if "rgba" in back], "what lies under it would be seen through it"


def test_a_printed_table_loses_no_column(browser: Browser, awkward_page: Path) -> None:
    browser.show(awkward_page, width=700)  # of A4 between its margins
    assert max(overflows(browser)) > 200
    browser.command("Emulation.setEmulatedMedia", media="print")
    try:
        assert max(overflows(browser)) <= 0
        assert browser.evaluate("document.scrollingElement.scrollWidth") <= 700
        assert browser.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
        assert browser.evaluate("getComputedStyle(document.querySelector('h2')).breakAfter") == "avoid"
    finally:
        browser.command("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_pointing_at_a_mark_tells_its_numbers(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, width=width)
    browser.evaluate("document.querySelector('#chart-quality').scrollIntoView({block: 'center'})")
    top = browser.evaluate("scrollY")
    marks = boxes(browser, "#chart-quality path.point")
    assert len(marks) == 5
    assert told(browser) == []
    seen = []
    for mark in marks:
        browser.point_at(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2 - top)
        deadline = time.monotonic() + 10
        while not (texts := told(browser)) or texts[0] in seen:
            assert time.monotonic() < deadline, (mark, seen, texts)
            time.sleep(0.02)
        seen.append(texts[0])
        (label,) = boxes(browser, ".hoverlayer .hovertext path")
        assert 0 <= label["x"] <= label["x"] + label["width"] <= width
    methods = ["dense", "dnis", "magnitude", "uniform", "uniform"]
    assert sorted(text.partition("test auc")[0] for text in seen) == methods
    facts = f"4.01{TIMES} smaller0.00638 MB served2 seedson the Pareto front"
    assert f"dnistest auc 0.8105 {PLUS_MINUS} 0.0007{facts}" in seen


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("which", ["page"])
def test_words_of_a_chart_are_whole_and_apart_and_nothing_scrolls_sideways(
    browser: Browser, which: str, width: int, request: pytest.FixtureRequest
) -> None:
    browser.show(request.getfixturevalue(which), width=width)
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
    assert min(box["width"] for box in boxes(browser, "figure")) > 0.75 * min(width, 1020)
    names = browser.evaluate("[...document.querySelectorAll('.chart')].map(c => '#' + c.id)")
    for name in names:
        (frame,) = boxes(browser, name)
        words = boxes(browser, f"{name} text:not(.bartext):not(:empty)")
        assert len(words) > 3
        for at, word in enumerate(words):
            assert frame["x"] - 1 <= word["x"] <= word["x"] + word["width"] <= frame["x"] + frame["width"] + 1, name
            assert frame["y"] - 1 <= word["y"] <= word["y"] + word["height"] <= frame["y"] + frame["height"] + 1, name
            for other in words[at + 1 :]:
                apart = word["x"] + word["width"] <= other["x"] + 2 or other["x"] + other["width"] <= word["x"] + 2
                below = word["y"] + word["height"] <= other["y"] + 4 or other["y"] + other["height"] <= word["y"] + 4
                assert apart or below, name


def test_the_first_screen_holds_sentence_tiles_and_chart_and_a_click_on_a_heading_sorts_its_table(
    browser: Browser, page: Path
) -> None:
    browser.show(page)
    ends = [box["y"] + box["height"] for box in boxes(browser, ".lead, .numbers, #chart-quality")]
    assert ends == sorted(ends)
    assert ends[-1] < 900
    browser.evaluate("document.querySelector('#quality table').scrollIntoView()")
    top = browser.evaluate("scrollY")
    (heading,) = boxes(browser, "#quality thead th:nth-child(5)")

    def column() -> list[str]:
        return browser.evaluate(
            "[...document.querySelectorAll('#quality tbody td:nth-child(5)')].map(c => c.firstChild.data)"
        )

    assert column() == ["0.8005", "0.7936", "0.7005", "0.7866", "0.8105"]
    for direction in ("ascending", "descending"):
        browser.click(heading["x"] + heading["width"] / 2, heading["y"] + heading["height"] / 2 - top)
        assert column() == sorted(column(), reverse=direction == "descending")
        sorted_by = "document.querySelector('#quality th[aria-sort]')"
        assert browser.evaluate(f"{sorted_by}.ariaSort + {sorted_by}.innerText").startswith(f"{direction}auc")
