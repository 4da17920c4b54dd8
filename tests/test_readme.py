"""README's code runs, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def make_batches(count: int) -> list[Batch]:
    batches = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        ids = (1000 ** torch.rand(64, generator=generator)).long() - 1
        features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones(64, dtype=torch.int64))
        labels = (ids % 2).float()
        batches.append(Batch(torch.rand(64, 4, generator=generator), features, labels))
    return batches


def test_the_quickstart_runs_as_written(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {"make_batches": make_batches}
    for block in blocks:
        exec(block, names)
    scheme, plain = names["scheme"], names["plain"]
    assert 4 <= scheme.compression_ratio < 4.3
    served = plain.model.sparse_arch.embedding_bag_collection
    assert isinstance(served, dnis_torchrec.MixedDimensionEmbeddingBagCollection)
    loss, _ = plain(make_batches(1)[0])
    assert torch.isfinite(loss)


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
