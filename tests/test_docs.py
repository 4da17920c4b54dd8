"""The documentation: every page has a place, every link a target; notebooks run, and commands have their options."""

from __future__ import annotations

import doctest
import pkgutil
import re
import tempfile
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest
import yaml
from PIL import Image

from dnis_torchrec.artifact.load import read_scheme
from docs import execute, pictures, quality, rooms, sentences, site
from tests.programs import ROOT, SHORT, blocks, commands, dnis, shell_commands

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
DOCUMENTS = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *PAGES]
"""Those that the site does not have come first."""
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(markdown: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title.lower())) for title in titles)
    return {title.strip().replace(" ", "-") for title in plain}


def broken_links(page: Path, markdown: str) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of it."""
    broken = []
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```|`[^`\n]*`", "", markdown, flags=re.DOTALL | re.MULTILINE)
    ):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        is_there = file.is_file() and (not anchor or anchor in anchors(file.read_text(encoding="utf-8")))
        broken += [] if is_there else [target]
    return broken


def nav_entries(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in nav_entries(entry)]


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_every_link_has_a_target(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def is_there(name: str, page: Path) -> bool:
    """Whether a file, a make target, a module or a name in one, which a page names in backticks, exists."""
    if name.startswith("make "):
        return f"\n{name.split()[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    if "/" in name:
        return any((folder / name).exists() for folder in (ROOT, ROOT / "dnis_torchrec", DOCS, page.parent))
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", [path for path in DOCUMENTS if "benchmarks" not in path.parts], ids=name_of)
def test_what_a_page_names_is_there(page: Path) -> None:
    made = ("small/", "runs/", "dist/", "lib/", "packed/", "ml-1m/")  # by a command
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    names = re.findall(r"`(make \w+|(?:dnis_torchrec|examples|benchmarks|tests)\.[\w.]+|[\w.-]+/[\w./-]*)`", prose)
    assert [name for name in names if not name.startswith(made) and not is_there(name, page)] == []


def test_every_page_has_a_place_in_the_site() -> None:
    entries = nav_entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    notebooks = {f"notebooks/{path.stem}.md" for path in NOTEBOOKS}
    assert sorted(entries) == sorted(pages | notebooks | {site.START})


def test_the_api_page_has_every_public_name() -> None:
    import dnis_torchrec

    reference = site.reference()
    assert sorted(re.findall(r"^::: dnis_torchrec\.(\w+)$", reference, re.MULTILINE)) == sorted(dnis_torchrec.__all__)
    assert site.MARKER in (DOCS / "api.md").read_text(encoding="utf-8")


def test_sentences_are_short_and_plain() -> None:
    everything = sentences.all_sentences()
    assert {"README.md", "docs/faq.md", "dnis --help", "report"} <= {place for place, _ in everything}
    assert mean(len(text.split()) for _, text in everything) < 17
    assert [(place, text) for place, text in everything if sentences.faults(text)] == []
    bad = "12 rows are here, and nobody knows why. " + "Word " * 31 + "ends. A loss of .1 is fine."
    assert [sentences.faults(text) for text in sentences.sentences(bad)] == [
        ["number first", "word"],
        ["long"],
        ["zero"],
    ]


@pytest.mark.parametrize("module", [execute, quality, rooms, sentences, site], ids=lambda module: module.__name__)
def test_examples_in_docstrings_hold(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_links_lead_to_the_same_pages_inside_the_site() -> None:
    for page in PAGES:
        inside = (
            page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix().replace("README.md", site.START)
        )
        markdown = site.inside_the_site(inside, page.read_text(encoding="utf-8"))
        assert not re.search(r"\]\((docs/|(\.\./)*(docs/|README\.md))", markdown), page
        up = "../" * inside.count("/")
        assert f"](../{up}" not in markdown, page


def test_the_recipe_is_searched(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks("docs/how-to/own-data.md", "python")
    (tmp_path / "my_ranker.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    *_, words = shell_commands("docs/how-to/own-data.md")
    (tmp_path / "DIR").mkdir()
    given = [tmp_path / word if word in ("DIR", "run") else word for word in words[1:]]
    done = dnis(*given, *SHORT, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def unknown_words(words: list[str]) -> list[str]:
    """The command and the options of a line that `dnis` does not have."""
    known = commands()
    if words[0] not in known:
        return [words[0]]
    options = {"--help", *(name for part in known[words[0]].params for name in (*part.opts, *part.secondary_opts))}
    return [word for word in words[1:] if word.startswith("--") and word.split("=")[0] not in options]


def test_commands_of_the_pages_are_those_that_there_are() -> None:
    found = {}
    for page in (path for path in PAGES if "benchmarks" not in path.parts):
        for words in shell_commands(name_of(page)):
            if "dnis" in words[:1] or "-m dnis_torchrec" in " ".join(words):
                start = 1 + (0 if words[0] == "dnis" else words.index("dnis_torchrec"))
                found[" ".join(words)] = unknown_words(words[start:])
    assert len(found) > 10
    assert {line: unknown for line, unknown in found.items() if unknown} == {}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebooks_run_and_gain_what_they_claim(notebook: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    written = execute.notebook(notebook.read_text(encoding="utf-8"), names)
    outputs = [cell["outputs"][0]["text"] for cell in written["cells"] if cell.get("outputs")]
    assert len(outputs) > 1
    if notebook.stem == "every_day":  # it compares its losses itself
        assert read_scheme("artifact1").compression("packed") >= 20
        return
    assert names["found"].compression >= (8 if notebook.stem == "own_data" else 20)
    if notebook.stem == "compress":
        assert names["after"] < names["before"]
        assert names["held_out_loss"](names["served"]) == pytest.approx(names["after"], abs=1e-5)
    elif notebook.stem == "own_data":
        assert (names["folder"] / "MODEL_CARD.md").is_file()
    else:
        losses = names["found"].outcome.selection_losses
        assert losses["search"] < losses["compress"]


def test_the_pictures_are_drawn_from_what_was_measured(tmp_path: Path) -> None:
    rivals, compressed = (page.read_text(encoding="utf-8") for page in (quality.RIVALS, quality.COMPRESSED))
    learnt = quality.measured(compressed, "Means of seeds", "FM on clicks", "learnt")
    assert learnt[:2] == [(1.0, 0.8197), (8.0, 0.8208)]
    smaller = quality.measured(rivals, "## A smaller D", "MF on ratings", "smaller D")
    assert smaller[-1] == (64.0, 0.7845)  # the test metric, not that of the selection split behind it
    with pytest.raises(ValueError, match="no row 'rows'"):
        quality.measured(rivals, "## A smaller D", "MF on ratings", "rows")
    quality.draw(tmp_path / "quality.png")
    with Image.open(tmp_path / "quality.png") as new, Image.open(DOCS / "quality.png") as kept:
        assert new.size == kept.size


def test_the_concept_pages_show_their_pictures(tmp_path: Path) -> None:
    pictures.draw(tmp_path)
    for name in pictures.PICTURES:
        assert f"]({name}.svg)" in (DOCS / "concepts" / f"{name}.md").read_text(encoding="utf-8")
        assert (tmp_path / f"{name}.svg").read_bytes() == (DOCS / "concepts" / f"{name}.svg").read_bytes(), name
