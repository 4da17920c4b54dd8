"""The documentation: pages and links have targets; README and how-to pages run; commands have options.

Notebooks run in `docs.execute`, and compare what they gain themselves.
"""

import doctest
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import dnis_torchrec
from docs import execute, pictures, quality, rooms, sentences, site
from examples import own_data, synthetic
from tests.programs import ROOT, SHORT, blocks, commands, dnis, run_blocks, run_python, shell_commands, write_next_delta

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
DOCUMENTS = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *PAGES]
"""Those that the site does not have come first."""


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
    notebooks = {f"notebooks/{path.stem}.md" for path in execute.SCRIPTS}
    assert sorted(entries) == sorted(pages | notebooks | {site.START})


def test_the_api_page_has_every_public_name() -> None:
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


README = (ROOT / "README.md").read_text(encoding="utf-8")

FOLDERS = {"clicks.csv", "trained", "small", "run", "artifact"}
"""Files and folders of README's commands."""

HOW_TO = ("own-loop.md", "serve.md", "sharded.md", "warm-start.md")
"""Pages whose Python goes on from README's and the loop of own-loop.md; that of own-data.md is a file of its own."""


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 130


@pytest.fixture(scope="module")
def run(gloo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What README's one block of Python and the first of own-loop.md leave behind, in the folder of their artifacts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("readme"))
        names = run_blocks("README.md", {"__name__": "readme"})
        names = run_blocks("README.md", {"__name__": "readme"})  # again, where the first has left its folder
        exec(compile(blocks("docs/how-to/own-loop.md", "python")[0], "own-loop.md, block 0", "exec"), names)
        yield names


def test_its_own_data_are_compressed_and_its_loop_searches(run: dict[str, Any]) -> None:
    assert 20 <= run["compressed"].compression < 22  # a byte more for a block of 250 rows is a twelfth
    assert run["served"].sparse_arch.embedding_bag_collection.table_bytes() == run["compressed"].num_bytes
    assert run["found"].scheme.compression("packed") >= 20
    plain, batch = run["plain"], run["train"][0]
    assert plain.sparse_arch.embedding_bag_collection.table_bytes() == run["found"].scheme.served_bytes("packed")
    assert bool(plain(batch.dense_features, batch.sparse_features).isfinite().all())


FRESH = """
import os, sys

import torch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis

assert not {{"RANK", "WORLD_SIZE", "MASTER_ADDR"}} & os.environ.keys()
tables = [EmbeddingBagConfig(name="item", num_embeddings=1000, embedding_dim=16, feature_names=["item"])]
{code}
dense, items = torch.load(sys.argv[1], weights_only=True)
features = KeyedJaggedTensor(keys=["item"], values=items, lengths=torch.ones_like(items))
with torch.no_grad():
    torch.save(served(dense, features), sys.argv[1])
{group}
assert torch.distributed.get_world_size() == 1
"""


def test_its_model_predicts_the_same_in_a_fresh_process(run: dict[str, Any], tmp_path: Path) -> None:
    """In which its process group needs no launcher."""
    (loop, *_) = blocks("docs/how-to/own-loop.md", "python")
    (group,) = re.findall(r"^ +(torch\.distributed\.init_process_group.*)$", loop, re.MULTILINE)
    (code,) = (block for block in blocks("docs/how-to/serve.md", "python") if "load_model" in block)
    batch, file = run["train"][0], tmp_path / "tensors"
    torch.save((batch.dense_features, batch.sparse_features.values()), file)
    with torch.no_grad():
        expected = run["plain"].eval()(batch.dense_features, batch.sparse_features)
    # where its artifact lies
    done = run_python(tmp_path, FRESH.format(group=group, code=code), file, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(file, weights_only=True), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("page", HOW_TO)
def test_code_of_how_to_pages_runs_behind_its_own(run: dict[str, Any], page: str) -> None:
    names = run_blocks(f"docs/how-to/{page}", dict(run))
    assert any(names[name] is not run.get(name) for name in names)


def test_code_of_the_page_of_every_day_runs(run: dict[str, Any], tmp_path: Path, monkeypatch) -> None:
    """Behind an artifact and a delta, as its commands leave them."""

    def build_model() -> torch.nn.Module:
        return run["DLRM"](run["EmbeddingBagCollection"](tables=run["tables"]), 4, [32, 16], [32, 1])

    monkeypatch.chdir(tmp_path)
    model = build_model()
    result = dnis_torchrec.compress(model, run["train"], loss=run["loss"], compression=4)
    dense = write_next_delta(dnis_torchrec.export(model, result.scheme, "artifact1"), Path("delta1"))
    names = run_blocks("docs/concepts/every-day.md", dict(run) | {"build_model": build_model, "model": build_model()})
    assert names["recipe"].is_stream
    for name, part in names["model"].state_dict().items():
        assert name not in dense or part.equal(dense[name])


def test_code_of_all_other_pages_is_run_elsewhere() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if blocks(str(path.relative_to(ROOT)), "python")]
    elsewhere = (
        "every-day.md",
        "own-data.md",
        "checkpoints.md",
        "models.md",
        "packaging.md",
    )  # test_docs.py, selection/test_plan.py, test_models_page.py, serving/test_scripted.py
    assert sorted(path.name for path in pages) == sorted((*HOW_TO, *elsewhere))


def moved(word: str, folder: Path) -> str:
    """A word of a command with README's files and folders in another place."""
    if word.split("/")[0] in FOLDERS:
        return str(folder / word)
    return re.sub(r'"((?:clicks|small)[./]\w+)"', lambda quoted: f'"{folder / quoted[1]}"', word)


@pytest.mark.parametrize("heading", ["Your own table", "A search while the model trains"])
def test_its_commands_run_alone_and_twice(gloo, tmp_path: Path, heading: str, monkeypatch) -> None:
    """As they are, in the project's folder; but for one epoch, fewer samples, and with files and folders elsewhere."""
    monkeypatch.setattr(synthetic, "NUM_SAMPLES", 3_000)
    monkeypatch.setattr(own_data.draw_frame, "__defaults__", (2_000,))
    (block,) = re.findall(rf"^## {heading}\n.*?^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    for line in block.splitlines() * 2:
        program, *words = [moved(word, tmp_path) for word in shlex.split(line)]
        if program == "dnis":
            done = dnis(*words, *(SHORT if words[0] in ("train", "search") else ()))
            assert done.returncode == 0, (words, done.stderr)
        else:
            assert words[0] == "-c", line
            exec(compile(words[1], line, "exec"), {})
    assert (tmp_path / ("small" if "table" in heading else "run") / "report.html").is_file()
