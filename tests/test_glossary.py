"""The glossary and the documents spell forms as the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dnis_torchrec.scheme import FORMS

DOCS = Path(__file__).parents[1] / "docs"
GLOSSARY = (DOCS / "glossary.md").read_text(encoding="utf-8")
DOCUMENTS = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]


def test_the_glossary_names_what_there_is() -> None:
    row = re.search(r"^\| form \| (.+) \|$", GLOSSARY, re.MULTILINE)
    assert row is not None
    assert set(re.findall(r"`([^`]+)`", row[1])) == set(FORMS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_no_form_that_is_gone(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    gone = r"(csr|dense|row_pruned|mixed_dimension)_(fp|int)\d+"
    assert not re.search(rf"`{gone}`|--form \"?{gone}|form=\"{gone}", text)
