"""A size that cannot be met is refused with the smallest one that can be, and what is named can be met."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.artifact.export import export
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.scheme import PACKED
from dnis_torchrec.search import started as started_module
from dnis_torchrec.search.budget import Size, SizeOutOfReachError, check_compresses
from dnis_torchrec.search.paper import PaperSettings, search_as_published
from dnis_torchrec.search.pruning import drop_zeros_, prune
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from tests.search.test_pruning import simple
from tests.tiny import make_recipe

CPU = torch.device("cpu")


def named(error: ValueError) -> float:
    """The number in an error that says "expected at most" or "at least"."""
    return float(re.search(r"expected at (?:most|least) ([\d.]+)", str(error)).group(1))


def compression_of_search(value: float, folder: Path) -> float:
    """What a search comes to that is asked for a compression."""
    settings = SearchSettings(num_blocks=3, epochs=1)
    return search(make_recipe(), value, folder, CPU, settings=settings).scheme.compression(PACKED)


def compression_of_paper(value: float, folder: Path) -> float:
    """Likewise, of the paper's search."""
    size = Size(compression=value, form="csr_fp32")
    settings = PaperSettings(size=size, epochs=2, num_blocks=3)
    return search_as_published(make_recipe(), settings, folder, CPU).scheme.compression("csr_fp32")


@pytest.mark.parametrize("found", [compression_of_search, compression_of_paper])
def test_a_search_names_the_smallest_size_before_training_and_comes_to_it(
    gloo, tmp_path: Path, found: Callable[[float, Path], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(started_module, "shard", None)  # what begins to train would fail of another error
        with pytest.raises(SizeOutOfReachError) as caught:
            found(5000, tmp_path)
        smallest = named(caught.value)
        with pytest.raises(SizeOutOfReachError):
            found(smallest + 0.02, tmp_path)
    assert found(smallest, tmp_path) >= smallest


@given(st.integers(1, 500), st.integers(1, 3000))
def test_a_size_compresses(dense: int, value: int) -> None:
    size, limit = Size(embedding_bytes=value), 4 * dense
    if value <= limit:
        check_compresses(size, dense)
    else:
        with pytest.raises(ValueError, match=f"at most {limit}, what the uncompressed tables take, got {value}"):
            check_compresses(size, dense)
    check_compresses(Size(compression=1.01), dense)


def two_tables() -> tuple[nn.Module, RowBlocks, FrequencyCounts]:
    """One table of four rows, one of two, all values one."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
        for name, rows in (("a", 4), ("b", 2))
    ]
    counts = FrequencyCounts({"a": torch.tensor([4, 3, 2, 1]), "b": torch.tensor([9, 8])}, {"a": 1, "b": 1}, 9)
    model = EmbeddingBagCollection(tables=tables)
    for table in model.embedding_bags.values():
        nn.init.ones_(table.weight)
    return model, blocks_from_counts(counts, tables, num_blocks=1), counts


@pytest.mark.parametrize("structure", ["block", "element"])
@pytest.mark.parametrize("per_table", [False, True])
@pytest.mark.parametrize("kind", ["compression", "embedding_bytes"])
def test_pruning_names_the_smallest_size_and_comes_to_it(structure: str, per_table: bool, kind: str) -> None:
    def found(value: float) -> int:
        model, blocks, counts = two_tables()
        size = Size(**{kind: value}, form="csr_fp32" if structure == "element" else "mixed_dimension")
        parameters = prune(model, blocks, counts, size=size, structure=structure, per_table=per_table).parameters
        assert all(table.weight.any() or per_table for table in model.embedding_bags.values()) or parameters
        return parameters

    with pytest.raises(SizeOutOfReachError) as caught:
        found(100 if kind == "compression" else 0.5)
    smallest = named(caught.value)
    assert found(smallest) > 0
    with pytest.raises(SizeOutOfReachError, match=f"{smallest:g}"):
        found(smallest + 0.01 if kind == "compression" else smallest - 1 or 0.5)


@pytest.mark.parametrize("how", [{"threshold": 0.0}, {"size": Size(embedding_bytes=60, form="csr_fp32")}])
@pytest.mark.parametrize("structure", ["block", "element"])
def test_tables_of_zeros_are_refused(how: dict[str, object], structure: str, tmp_path: Path) -> None:
    model, blocks, counts = two_tables()
    for table in model.embedding_bags.values():
        nn.init.zeros_(table.weight)
    message = "^tables: expected a value that is not zero, in a row that training looked up, got none$"
    with pytest.raises(ValueError, match=message):
        prune(model, blocks, counts, structure=structure, **how)
    nothing = drop_zeros_(model, blocks, counts)
    assert nothing.parameters == 0
    with pytest.raises(ValueError, match=r"^export: expected a scheme that retains a value, got none"):
        export(model, nothing, tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "row"}, r"structure: expected one of \('element', 'block'\), got 'row'"),
        ({}, r"prune: expected exactly one of size and threshold, got \(None, None\)"),
        ({"threshold": 0.1, "size": Size(compression=2)}, "prune: expected exactly one of size and threshold"),
        ({"threshold": -0.1}, "threshold: expected a number >= 0, got -0.1"),
        (
            {"size": Size(embedding_bytes=16)},
            "embedding_bytes: expected at least 30 for these tables and blocks, got 16",
        ),
        (
            {"size": Size(embedding_bytes=16, form="csr_fp32"), "structure": "element"},
            "embedding_bytes: expected at least 17 for these tables, got 16",
        ),
        (
            {"size": Size(compression=1.9, form="csr_fp32"), "structure": "element"},
            r"compression: expected at most 1\.88 for these tables, got 1\.9",
        ),
        ({"size": Size(embedding_bytes=33)}, "embedding_bytes: expected at most 32, what the uncompressed tables take"),
        ({"threshold": 1.0}, "threshold: expected a number below 1, above which nothing is left, got 1.0"),
        ({"threshold": 7.0, "structure": "element"}, "threshold: expected a number below 1, above which nothing is"),
    ],
)
def test_unfit_options_are_refused_before_a_table_changes(options: dict, message: str) -> None:
    model, blocks, counts = simple()
    with pytest.raises(ValueError, match=f"^{message}"):
        prune(model, blocks, counts, **options)
    assert (model.embedding_bags["a"].weight == 1).all()
