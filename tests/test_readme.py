"""README is short and plain, what it names exists; its commands run, and its code with that of the how-to pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

import dnis_torchrec
from dnis_torchrec.artifact.delta import read_state, write_delta
from tests.programs import ROOT, blocks, dnis, run_blocks, shell_commands

README = (ROOT / "README.md").read_text(encoding="utf-8")

FOLDERS = {"compressed", "ml-1m", "trained", "small", "run", "artifact"}
"""Of README's commands."""

HOW_TO = ("own-loop.md", "serve.md", "sharded.md", "warm-start.md")
"""Pages whose Python goes on from README's; that of own-data.md is a file of its own."""


def sentences(markdown: str) -> list[str]:
    """Sentences of a page's prose: no code, tables, headings or pictures, the text of links alone."""
    prose = re.sub(r"^```.*?^```|^\|.*?$|^#.*?$|^!\[.*?\)$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose)
    parts = re.split(r"[.!?][*)]*\s+|\n\n", prose)
    return [part for part in parts if re.search(r"\w", part)]


def test_it_is_short_and_its_sentences_are() -> None:
    assert len(README.splitlines()) <= 150
    found = sentences(README)
    assert len(found) > 40
    assert mean(len(sentence.split()) for sentence in found) <= 18


@pytest.fixture(scope="module")
def run(gloo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What README's Python leaves behind, run as one file, in the folder where it leaves an artifact."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("readme"))
        patch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)  # `gloo` is one
        yield run_blocks("README.md", {"__name__": "readme"})


def test_its_own_data_are_compressed_and_its_loop_searches(run: dict[str, Any]) -> None:
    assert 20 <= run["compressed"].compression < 22  # a byte more for a block of 250 rows is a twelfth
    assert run["served"].sparse_arch.embedding_bag_collection.table_bytes() == run["compressed"].num_bytes
    assert run["found"].scheme.compression("packed") >= 20
    plain, batch = run["plain"], run["train"][0]
    assert plain.sparse_arch.embedding_bag_collection.table_bytes() == run["found"].scheme.served_bytes("packed")
    assert bool(plain(batch.dense_features, batch.sparse_features).isfinite().all())


FRESH = """
import sys

import torch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis

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
    (group,) = re.findall(r"^torch\.distributed\.init_process_group.*$", README, re.MULTILINE)
    bare = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    (code,) = (block for block in blocks("docs/how-to/serve.md", "python") if "load_model" in block)
    batch, file = run["train"][0], tmp_path / "tensors"
    torch.save((batch.dense_features, batch.sparse_features.values()), file)
    with torch.no_grad():
        expected = run["plain"].eval()(batch.dense_features, batch.sparse_features)
    command = [sys.executable, "-W", "ignore", "-c", FRESH.format(group=group, code=code), str(file)]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=120)  # where its artifact lies
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
    base = read_state(dnis_torchrec.export(model, result.scheme, "artifact1"))
    write_delta("artifact1", replace(base, dense={name: part + 1 for name, part in base.dense.items()}), "delta1")
    names = run_blocks("docs/concepts/every-day.md", dict(run) | {"build_model": build_model, "model": build_model()})
    assert names["recipe"].is_stream
    for name, part in names["model"].state_dict().items():
        assert name not in base.dense or part.equal(base.dense[name] + 1)


def test_code_of_all_other_pages_is_run_elsewhere() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if blocks(str(path.relative_to(ROOT)), "python")]
    elsewhere = (
        "every-day.md",
        "own-data.md",
        "checkpoints.md",
        "models.md",
    )  # test_docs.py, selection/test_swap.py, test_models_page.py
    assert sorted(path.name for path in pages) == sorted((*HOW_TO, *elsewhere))


def write_ratings(folder: Path) -> None:
    """A ratings.dat in GroupLens' format: 40 users, 150 movies, a fifth of all pairs."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    lines = [
        f"{user}::{movie}::{1 + (user * movie) % 5}::{978300000 + user}"
        for user in range(1, 41)
        for movie in range(1, 151)
        if float(torch.rand(1, generator=generator)) < 0.2
    ]
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n", encoding="latin-1")


def test_its_commands_run_in_their_order(gloo, tmp_path: Path) -> None:
    """As they stand, in the project's folder; but for two epochs, and with folders of data and results elsewhere."""
    write_ratings(tmp_path / "ml-1m")
    commands = [words[1:] for words in shell_commands("README.md") if words[0] == "dnis"]
    assert [words[0] for words in commands] == ["train", "compress", "evaluate", "search", "export", "report"]
    for words in commands:
        moved = [tmp_path / word if word.split("/")[0] in FOLDERS else word for word in words]
        done = dnis(*moved, *(("--epochs", "2") if words[0] in ("train", "search") else ()))
        assert done.returncode == 0, (words, done.stderr)
    assert (tmp_path / "small" / "report.html").is_file()
    assert (tmp_path / "run" / "report.html").is_file()
