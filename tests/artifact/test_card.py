"""The model card of an artifact: what it says, that names of others are no markup, that no reader minds it."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from dnis_torchrec.artifact import load, write_artifact
from dnis_torchrec.artifact.card import CARD, card_of
from dnis_torchrec.artifact.manifest import verify_files
from dnis_torchrec.artifact.verify import FAILED, check_files
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme
from tests.coded_tables import coded_tables
from tests.serving_reference import two_tables

MANIFEST = {"versions": {"dnis-torchrec": "0.1.0", "torch": "2.13.0"}, "run": {}}


def rows_below(heading: str, card: str) -> list[list[str]]:
    """Cells of the table below a heading, its head and ruler left out."""
    section = card.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.strip("|").split("|") for line in lines[2:]]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    tables, scheme = coded_tables()
    run = {"recipe": "shop:recipe", "seed": 3, "metrics": {"auc": 0.8125, "loss": 0.5}}
    return write_artifact(tables, scheme, tmp_path / "artifact", run=run)


def test_it_says_tables_dims_bits_bytes_metrics_and_origin(written: Path) -> None:
    card, (_, scheme) = (written / CARD).read_text(encoding="utf-8"), coded_tables()
    for row, table in zip(rows_below("Tables", card), scheme.tables.values(), strict=True):
        assert row[1:5] == [", ".join(table.feature_names), "10", "5", "4, 3, 0"]
        assert row[5:] == ["11.8, 1.8, 0.0", f"{table.served_bytes('packed'):,}"]
    assert f"{scheme.compression('packed'):.2f} times smaller: {scheme.served_bytes('packed'):,} bytes" in card
    assert rows_below("Metrics", card) == [["auc", "0.8125"], ["loss", "0.5"]]
    assert rows_below("Where it comes from", card)[:2] == [["recipe", "shop:recipe"], ["seed", "3"]]


def test_what_is_not_known_is_left_out() -> None:
    card = card_of(two_tables()[1], MANIFEST)
    assert "## Metrics" not in card
    assert rows_below("Where it comes from", card) == [["dnis-torchrec", "0.1.0"], ["torch", "2.13.0"]]
    assert rows_below("Tables", card)[0][4:6] == ["5, 2, 0", "32.0, 12.8, 0.0"]


@pytest.mark.parametrize(
    "name", ["a|b", "![x](http://y)", "<b>", "`x`", "two\nlines", "\x1b[2J", "**x** _y_", "&lt;", "\\|", "~~x~~"]
)
def test_names_of_others_are_text_where_a_browser_shows_the_card(name: str) -> None:
    _, scheme = two_tables()
    odd = {name: replace(next(iter(scheme.tables.values())), name=name)}
    shown = (
        MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(card_of(MixedDimensionScheme(odd), MANIFEST))
    )
    (row,) = re.findall("<tr>(.*?)</tr>", shown.split("Tables</h2>")[1].split("<h2>")[0], re.DOTALL)[1:]
    cells = re.findall("<td>(.*?)</td>", row, re.DOTALL)
    assert len(cells) == 7
    assert "<" not in cells[0]
    assert unescape(cells[0]) == name.replace("\n", " ").replace("\x1b", "\\u001b")


def test_no_reader_minds_a_card_that_was_changed_or_left_out(written: Path) -> None:
    for change in (lambda card: card.write_text("ours"), Path.unlink):
        change(written / CARD)
        verify_files(written)
        assert FAILED not in {finding.status for finding in check_files(written, Ranks())[1]}
        load(written)


def test_a_link_in_its_place_is_refused(written: Path, tmp_path: Path) -> None:
    (written / CARD).unlink()
    (written / CARD).symlink_to(tmp_path / "elsewhere")
    failed = [finding.subject for finding in check_files(written, Ranks())[1] if finding.status == FAILED]
    assert failed == [CARD]
