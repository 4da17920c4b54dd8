"""The report in a real browser: visible, readable in light and dark, nothing cut off or loaded, marks tell numbers.

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dnis_torchrec.report import ParetoPoint, RowDistribution, pareto_chart, write_report
from dnis_torchrec.report.compare_page import write_comparison
from tests.comparison.test_comparison import make_content as make_comparison_content
from tests.comparison.test_comparison import make_rows as make_comparison_rows
from tests.report.test_report import make_content, make_row
from tests.report.test_report_pareto import point

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome on PATH")

WIDE, NARROW = 1100, 390
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium takes commands from descriptor 3 and answers on 4."""
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
        while self.evaluate("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page was not loaded in time"
            time.sleep(0.02)

    def point_at(self, x: float, y: float) -> None:
        """Moves the mouse."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press_tab(self) -> None:
        """Presses and releases the Tab key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)

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


@pytest.fixture(scope="module")
def far_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart with points close together far below its axis."""
    points = [point(2.0 ** (step / 3), 0.7 + step / 100) for step in range(34)]
    points += [point(size, -3.0) for size in (1.0, 1.1, 1.5, 64.0, 64.5, 1900.0, 2048.0)]
    return write_chart(points, tmp_path_factory.mktemp("far"))


@pytest.fixture(scope="module")
def fine_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart whose axis has numbers of four decimals."""
    points = [point(2.0**step, 0.8115 + step / 1000) for step in range(6)]
    return write_chart(points, tmp_path_factory.mktemp("fine"))


def write_chart(points: list[ParetoPoint], folder: Path) -> Path:
    chart = pareto_chart(points, "auc", higher_is_better=True)
    path = folder / "chart.html"
    path.write_text(f'<!doctype html><meta charset="utf-8"><section id="figure-pareto">{chart}</section>')
    return path


def boxes(browser: Browser, selector: str) -> list[dict[str, float]]:
    """Places of elements in the document."""
    return browser.evaluate(
        f"""[...document.querySelectorAll({selector!r})].map(e => {{ const b = e.getBoundingClientRect();
        return {{x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}}; }})"""
    )


def shown_tips(browser: Browser) -> list[str]:
    """Texts of the marks whose numbers can be seen."""
    return browser.evaluate(
        "[...document.querySelectorAll('.tip')].filter(t => getComputedStyle(t).opacity === '1').map(t => t.innerText)"
    )


@pytest.mark.parametrize("dark", [False, True])
def test_every_figure_is_drawn_and_nothing_is_loaded(browser: Browser, page: Path, dark: bool) -> None:
    browser.requests.clear()
    browser.show(page, dark=dark)
    names = browser.evaluate("[...document.querySelectorAll('figure')].map(f => f.id.replace('figure-', ''))")
    assert names == [
        *("pareto", "quality", "pruning-rate", "embedding-dim", "num-blocks"),
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
    assert [url for url in browser.requests if not url.startswith("data:image/png")] == [page.as_uri()]


@pytest.fixture(scope="module")
def comparison_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a comparison, with a method that has its second row and one that has none of its seeds."""
    content = make_comparison_content(make_comparison_rows(dnis_0="E: no", dnis_1="E: no", dnis_2="E: no"))
    return write_comparison(tmp_path_factory.mktemp("page") / "comparison.html", content)


@pytest.fixture(scope="module")
def awkward_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a comparison with ten metrics and words that are longer than a narrow page is wide."""
    names = [f"{name}@{k}" for name in ("recall", "mrr", "ndcg") for k in (1, 5, 10)]
    rows = []
    for row in make_comparison_rows(dnis_1=f"{'company.recommendation.' * 4}errors.FeatureStoreUnavailableError: no"):
        lines = (replace(line, metrics=line.metrics | dict.fromkeys(names, 0.5)) for line in row.group.rows)
        rows.append(replace(row, group=replace(row.group, rows=tuple(lines))))
    content = replace(make_comparison_content(tuple(rows)), recipe=f"{'company.recommendation.' * 4}recipes:two_tower")
    return write_comparison(tmp_path_factory.mktemp("page") / "comparison.html", content)


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
    for selector, num_cells in (("thead th:first-child", 1), ("tbody td:first-child", 4), ("tr.part span", 3)):
        cells = boxes(browser, f"#quality {selector}")
        assert len(cells) == num_cells
        for cell in cells:
            assert frame["x"] <= cell["x"] <= cell["x"] + cell["width"] <= frame["x"] + frame["width"]
    backs = browser.evaluate(
        "[...document.querySelectorAll('#quality th:first-child, #quality td:first-child')]"
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
@pytest.mark.parametrize("which", ["page", "comparison_page", "awkward_page"])
def test_the_page_does_not_scroll_sideways(
    browser: Browser, which: str, width: int, request: pytest.FixtureRequest
) -> None:
    browser.show(request.getfixturevalue(which), width=width)
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
    assert min(box["width"] for box in boxes(browser, "figure")) > 0.8 * width - 60


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("which", ["page", "comparison_page"])
def test_text_stands_out_from_what_is_behind_it(
    browser: Browser, which: str, dark: bool, request: pytest.FixtureRequest
) -> None:
    browser.show(request.getfixturevalue(which), dark=dark)
    selector = "h1, h2, p, td, th, dt, dd, li, figcaption, summary, .pareto text, .tip strong, .tip i"
    contrasts = browser.evaluate(
        f"[...document.querySelectorAll({selector!r})].map(e => [e.textContent.slice(0, 40), {CONTRAST}(e)])"
    )
    assert len(contrasts) > 60
    assert [(text, round(contrast, 2)) for text, contrast in contrasts if contrast < 4.5] == []


@pytest.mark.parametrize("width", [WIDE, 760, NARROW])
def test_pointing_at_a_mark_shows_its_numbers(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, width=width)
    (chart,) = boxes(browser, "#figure-pareto .plot")
    marks = boxes(browser, "#figure-pareto .points li")
    assert len(marks) == 5
    assert shown_tips(browser) == []
    browser.evaluate(f"scrollTo(0, {chart['y'] - 20})")
    seen = []
    for index in range(len(marks)):
        show = "scrollIntoView({block: 'nearest', inline: 'center'})"
        browser.evaluate(f"document.querySelectorAll('#figure-pareto .points li')[{index}].{show}")
        top, mark = browser.evaluate("scrollY"), boxes(browser, "#figure-pareto .points li")[index]
        browser.point_at(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2 - top)
        (text,) = shown_tips(browser)
        seen.append(text.split("\n"))
        tip = next(box for box, text_ in zip(boxes(browser, ".tip"), tips(browser), strict=True) if text_ == text)
        around = chart if width == WIDE else {"x": 0, "y": top, "width": width, "height": 900}
        assert around["x"] <= tip["x"] <= tip["x"] + tip["width"] <= around["x"] + around["width"]
        assert around["y"] <= tip["y"] <= tip["y"] + tip["height"] <= around["y"] + around["height"]
    assert [lines[0] for lines in seen] == [
        *("dense", "uniform", "magnitude", "uniform", "dnis, on the Pareto front"),
    ]
    assert seen[-1][1:] == [
        "auc 0.8105 \N{PLUS-MINUS SIGN} 0.0007",
        "tables 0.00798 MB as csr_fp32",
        "compression 4.01\N{MULTIPLICATION SIGN}",
        "seeds 2",
        "time of one run 12.0 s",
    ]
    browser.point_at(2, 2)
    assert shown_tips(browser) == []


def test_every_mark_beyond_the_axis_can_be_pointed_at(browser: Browser, far_page: Path) -> None:
    browser.show(far_page)
    reached = browser.evaluate(
        """[...document.querySelectorAll('.points li')].slice(-7).map(e => { const b = e.getBoundingClientRect();
        return document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2) === e; })"""
    )
    assert reached == [True] * 7


def tips(browser: Browser) -> list[str]:
    """Texts of all marks."""
    return browser.evaluate("[...document.querySelectorAll('.tip')].map(t => t.innerText)")


def test_marks_are_reached_with_the_tab_key(browser: Browser, page: Path) -> None:
    browser.show(page)
    for place in range(3):
        browser.press_tab()
        assert shown_tips(browser) == tips(browser)[place : place + 1]


@pytest.mark.parametrize("which", ["page", "far_page", "fine_page"])
def test_labels_of_the_chart_are_whole_and_apart(request: pytest.FixtureRequest, browser: Browser, which: str) -> None:
    browser.show(request.getfixturevalue(which))
    assert len(boxes(browser, "#figure-pareto .beyond")) == (7 if which == "far_page" else 0)
    (chart,) = boxes(browser, "#figure-pareto .plot > svg")
    labels = boxes(browser, "#figure-pareto .plot text")
    assert len(labels) > 8
    for index, label in enumerate(labels):
        assert chart["x"] <= label["x"] + 1
        assert label["x"] + label["width"] <= chart["x"] + chart["width"] + 1
        assert label["y"] + label["height"] <= chart["y"] + chart["height"] + 1
        for other in labels[index + 1 :]:
            apart = label["x"] + label["width"] <= other["x"] or other["x"] + other["width"] <= label["x"]
            below = label["y"] + label["height"] <= other["y"] + 3 or other["y"] + other["height"] <= label["y"] + 3
            assert apart or below
