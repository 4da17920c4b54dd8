"""README is short; its commands run alone and twice, and so does its code, with that of the how-to pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dnis_torchrec
from dnis_torchrec.artifact.delta import read_state, write_delta
from examples import own_data, synthetic
from tests.programs import ROOT, SHORT, blocks, dnis, run_blocks, run_python

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
        "packaging.md",
    )  # test_docs.py, selection/test_swap.py, test_models_page.py, serving/test_scripted.py
    assert sorted(path.name for path in pages) == sorted((*HOW_TO, *elsewhere))


def moved(word: str, folder: Path) -> str:
    """A word of a command with README's files and folders in another place."""
    if word.split("/")[0] in FOLDERS:
        return str(folder / word)
    return re.sub(r'"((?:clicks|small)[./]\w+)"', lambda quoted: f'"{folder / quoted[1]}"', word)


@pytest.mark.parametrize("heading", ["Your own table", "A search while the model trains"])
def test_its_commands_run_alone_and_twice(gloo, tmp_path: Path, heading: str, monkeypatch) -> None:
    """As they are, in the project's folder; but for one epoch, fewer samples, and with files and folders elsewhere."""
    monkeypatch.setattr(synthetic, "NUM_SAMPLES", 10_000)
    monkeypatch.setattr(own_data.draw_frame, "__defaults__", (5_000,))
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
