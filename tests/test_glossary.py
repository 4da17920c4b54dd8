"""One word has one meaning: in the pages, and in the docstrings of the face."""

import inspect
import re
from pathlib import Path

import pytest

import dnis_torchrec as dnis

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES} | {
    name: inspect.getdoc(getattr(dnis, name)) or "" for name in dnis.__all__
}
"""Page or name of the face -> what it says."""

PLAN_IS = re.compile(r"plan(ner|_)|shard|rank|TorchRec|where the", re.IGNORECASE)
"""What stands in a paragraph that speaks of a plan: TorchRec's."""

GONE = (
    r"dnis (compare|plan|verify|prune)\b",
    r"\b(csr|row_pruned|dense)_(fp|int)\d+|--form \"?(csr|dense|row_pruned)",
    r"TensorBoard|mlflow|wandb|Triton Inference|Triton-server|lab notes|provenance|comparison\.html",
    r"(comparing|performance)\.md|\b(jobs|comparison|storage|streaming|soft_selection)/",
    r"dnis_torchrec\.(forms|storage|streaming|jobs|comparison)\b",
)
"""What release 0.1.0 had."""


def paragraphs(text: str) -> list[str]:
    """Of prose and code; a row of a table or an item of a list is one of its own."""
    return re.split(r"\n\s*\n|\n(?=\||\s*- )", text)


def test_the_glossary_names_what_there_is() -> None:
    row = re.search(r"^\| form \| (.+) \|$", GLOSSARY, re.MULTILINE)
    assert row is not None
    assert set(re.findall(r"`([^`]+)`", row[1])) == {"mixed_dimension", "packed"}
    words = re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE)
    assert len(words) == len(set(words))


@pytest.mark.parametrize("place", list(TEXTS))
def test_one_word_has_one_meaning(place: str) -> None:
    text = TEXTS[place]
    others = re.sub(r"`?rotation_groups`?|RotationGroup", "", text)
    assert re.findall(r"(?i)\w*rotat\w*", others) == []  # tables are turned
    assert [part for part in paragraphs(text) if re.search(r"\bplans?\b", part) and not PLAN_IS.search(part)] == []
    assert (
        re.findall(r"predictions? of (?:what|the (?:loss|size|bytes))|\w*rows? packed|pack(?:s|ing) bags", text) == []
    )


@pytest.mark.parametrize("place", list(TEXTS))
def test_what_is_gone_is_not_named(place: str) -> None:
    if place == "docs/artifact.md":  # it says what older artifacts hold
        return
    assert [found[0] for pattern in GONE for found in re.finditer(pattern, TEXTS[place])] == []
