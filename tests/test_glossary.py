"""The glossary and the documents spell forms, layouts and precisions as the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dnis_torchrec.forms import CODES, FORMS, PRECISIONS

DOCS = Path(__file__).parents[1] / "docs"
GLOSSARY = (DOCS / "glossary.md").read_text(encoding="utf-8")
LAYOUTS = {form.layout for form in FORMS.values()}
DOCUMENTS = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]


def meaning(word: str) -> str:
    return re.search(rf"^\| {word} \| (.+) \|$", GLOSSARY, re.MULTILINE).group(1)


def words_in_code(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_the_glossary_names_what_there_is() -> None:
    assert words_in_code(meaning("layout")) == LAYOUTS
    assert words_in_code(meaning("precision")) == {*PRECISIONS, CODES.name}
    assert words_in_code(meaning("form")) & FORMS.keys()
    assert len(re.findall(r"^\| [^|]+ \|", GLOSSARY, re.MULTILINE)) in range(20, 30)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_forms_that_there_are(path: Path) -> None:
    """Whatever looks like the name of a form is one; a bare `csr` is none, except of scipy's files."""
    text = path.read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{'|'.join(LAYOUTS)})_(?:fp|int)\d+)`", text)
    assert set(named) <= FORMS.keys()
    assert not re.search(r"--form (csr|mixed_dimension)\b(?!_)", text)
