"""README's code runs, and its commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.serving import PackedEmbeddingBagCollection
from tests.cli.test_cli import SHORT, dnis

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def make_batches(count: int) -> list[Batch]:
    batches = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        ids = (1000 ** torch.rand(64, generator=generator)).long() - 1
        features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones(64, dtype=torch.int64))
        labels = (ids % 2).float()
        batches.append(Batch(torch.rand(64, 4, generator=generator), features, labels))
    return batches


@pytest.fixture
def quickstart(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the first two blocks leave behind: the model that somebody has, and the ten lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)  # `gloo` is one
    names: dict[str, Any] = {"make_batches": make_batches}
    for block in BLOCKS[:2]:
        exec(block, names)
    return names


def test_the_quickstart_runs_as_written(quickstart: dict[str, Any]) -> None:
    scheme, plain = quickstart["found"].scheme, quickstart["plain"]
    assert scheme.compression("packed") >= 20  # rows that were never seen are worth nothing
    assert 0 < scheme.parameters < scheme.dense_parameters
    served = plain.model.sparse_arch.embedding_bag_collection
    assert isinstance(served, PackedEmbeddingBagCollection)
    loss, _ = plain(make_batches(1)[0])
    assert torch.isfinite(loss)


def test_the_other_way_to_shard_keeps_the_weights(quickstart: dict[str, Any]) -> None:
    other_way = BLOCKS[2]
    torch.manual_seed(0)
    exec(other_way, quickstart)
    torch.manual_seed(0)
    fresh = DLRM(EmbeddingBagCollection(tables=quickstart["tables"]), 4, [32, 16], [32, 1])
    sharded = quickstart["sharded"].state_dict()
    (kept,) = (value for name, value in sharded.items() if name.endswith("embedding_bags.t.weight"))
    table = fresh.sparse_arch.embedding_bag_collection.embedding_bags["t"]
    assert torch.equal(kept.local_shards()[0].tensor, table.weight)


def test_a_trained_model_is_compressed_as_written(
    quickstart: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = quickstart["trained"] = DLRM(EmbeddingBagCollection(tables=quickstart["tables"]), 4, [32, 16], [32, 1])
    exec(BLOCKS[3], quickstart)
    assert isinstance(trained.sparse_arch.embedding_bag_collection, PackedEmbeddingBagCollection)
    assert 10 <= quickstart["compressed"].compression < 11
    assert bool(quickstart["served"].isfinite().all())
    assert "  t: 16,000 values, " in capsys.readouterr().out


def test_its_process_group_needs_no_launcher() -> None:
    (line,) = re.findall(r"^torch\.distributed\.init_process_group.*$", BLOCKS[0], re.MULTILINE)
    code = f"import torch\n{line}\nprint(torch.distributed.get_world_size())"
    bare = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1", done.stderr


def test_its_recipe_is_searched(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imports = re.findall(r"^(?:import|from) .*$", BLOCKS[0], re.MULTILINE)
    lines = [*imports, "from tests.test_readme import make_batches", BLOCKS[4]]
    (tmp_path / "my_ranker.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    done = dnis("search", "my_ranker:recipe", "--compression", 4, "--out", tmp_path / "run", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "dnis" in done.stdout


def test_every_file_it_names_exists() -> None:
    root = Path(__file__).parents[1]
    for name in re.findall(r"`((?:dnis_torchrec|examples|benchmarks|torchx_components|docs)/[\w./]*)`", README):
        assert (root / name).exists(), name
    for name in re.findall(r"\]\((docs/[\w./]+|benchmarks/[\w./]+)\)", README):
        assert (root / name).exists(), name


def test_every_target_it_names_exists() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
