"""Predictions of forms against the modules themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.bits import Allocation
from dnis_torchrec.artifact import load, read_manifest, serve, write_artifact
from dnis_torchrec.artifact.card import card_of
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import FORMS, MIXED_DIMENSION, PACKED, MixedDimensionScheme
from tests.artifact.test_artifact_damage import restate
from tests.serving_reference import Case, all_rows, cases, table_scheme, two_tables, whole_table


def blocks_of(dims: list[int], rows: int = 1000, dim: int = 64) -> MixedDimensionScheme:
    routing = RowRouting(rows, len(dims), boundaries=torch.linspace(0, rows, len(dims) + 1).long())
    retained = torch.arange(dim) < torch.tensor(dims).unsqueeze(1)
    return MixedDimensionScheme({"t": table_scheme("t", routing, retained)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_ids_that_are_no_integers_are_named(mode: type, dtype: torch.dtype) -> None:
    """In every form, compiled or not."""
    scheme = blocks_of([4], rows=10, dim=8)
    weight = torch.randn(10, 8) * (torch.arange(8) < 4)
    batch = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2]).to(dtype), lengths=torch.tensor([1, 1]))
    for form in FORMS:
        module = serve(scheme, {"t": weight}, form)
        with mode(), pytest.raises(TypeError, match="feature 'f': expected integer ids, got torch"):
            module(batch)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_lengths_that_ask_for_other_ids_than_there_are_are_named(mode: type) -> None:
    """In every form, compiled or not; tests/ops/test_batch_checks.py has all the ways to be wrong."""
    scheme = blocks_of([4], rows=10, dim=8)
    weight = torch.randn(10, 8) * (torch.arange(8) < 4)
    for form in FORMS:
        module = serve(scheme, {"t": weight}, form)
        for lengths in ([1, 9], [3, -1], [1, 0]):
            batch = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor(lengths, dtype=torch.int32))
            with mode(), pytest.raises(ValueError, match="feature 'f': expected "):
                module(batch)


def test_an_incomplete_description_of_a_scheme_is_refused() -> None:
    retained = torch.ones(1, 4, dtype=torch.bool)
    routing = RowRouting(3, 1, boundaries=torch.tensor([0, 3]))
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, retained, num_retained=12)})
    described, tensors = scheme.to_json(), scheme.to_tensors()
    assert MixedDimensionScheme.from_parts(described, tensors).to_json() == described
    for field in described["t"]:
        fewer = {"t": {key: value for key, value in described["t"].items() if key != field}}
        with pytest.raises(ValueError, match=rf"table 't': expected a complete description, got none of \['{field}'\]"):
            MixedDimensionScheme.from_parts(fewer, tensors)


@settings(max_examples=15, deadline=None)
@given(cases())
def test_bytes_are_those_of_the_modules(case: Case) -> None:
    for form in FORMS:
        assert case.scheme.served_bytes(form) == serve(case.scheme, case.tables, form).table_bytes()


def test_nothing_retained() -> None:
    routing = RowRouting(10, 1, boundaries=torch.tensor([0, 10]))
    retained = torch.zeros(1, 8, dtype=torch.bool)
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, retained)})
    assert scheme.exact_bytes() == {PACKED: 0, MIXED_DIMENSION: 2 * 8}
    scheme = scheme.with_float_codes()
    assert (
        scheme.compression()
        == Allocation(scheme=scheme, predicted_loss_increase=0.0, num_bytes=0).compression
        == 4 * 10 * 8
    )
    assert "320.00 times smaller" in card_of(scheme, {"versions": {}, "run": {}})


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_made_of_the_other_bit_for_bit(tmp_path: Path, form: str) -> None:
    tables, scheme = two_tables()
    path = write_artifact(tables, scheme, tmp_path / "a", forms=[form])
    assert read_manifest(path)["forms"] == [form]
    for name, table in tables.items():
        assert whole_table(path, name).equal(table)
    expected = torch.cat([tables["movie/seen"], tables["user"]], dim=1)
    for wanted in (None, *FORMS, "mixed_dimension_fp32"):
        assert load(path, form=wanted)(all_rows()).values().equal(expected)


@pytest.mark.parametrize("form", ["csr_fp32", "csr", "dense_int8", "row_pruned_int4", "mixed_dimension_int8"])
def test_a_form_that_is_gone_is_named_with_the_release_that_reads_it(tmp_path: Path, form: str) -> None:
    tables, scheme = two_tables()
    path = write_artifact(tables, scheme, tmp_path / "a", forms=[MIXED_DIMENSION])
    for ask in (
        lambda: load(path, form=form),
        lambda: serve(scheme, tables, form),
        lambda: scheme.served_bytes(form),
        lambda: write_artifact(tables, scheme, tmp_path / "b", forms=[form]),
    ):
        with pytest.raises(ValueError, match=r"0\.1\.0"):
            ask()

    def of_0_1_0(manifest: dict) -> None:
        manifest["forms"] = ["mixed_dimension_fp32", form]
        for table in manifest["tables"].values():
            shards = table["shards"][MIXED_DIMENSION]
            table["shards"] = {"mixed_dimension_fp32": shards, form: shards}

    restate(path, of_0_1_0)
    assert read_manifest(path)["forms"] == [MIXED_DIMENSION]
    assert load(path)(all_rows()).values().equal(torch.cat([tables["movie/seen"], tables["user"]], dim=1))
    restate(path, lambda manifest: manifest.update(forms=[form]))
    with pytest.raises(ValueError, match=r"manifest.json.*0\.1\.0"):
        load(path)


def test_what_cannot_be_served_is_refused() -> None:
    tables, scheme = two_tables()
    for form in FORMS:
        with pytest.raises(ValueError, match="table 'user': expected a known table"):
            serve(scheme, {"movie/seen": tables["movie/seen"]}, form)
        with pytest.raises(ValueError, match=r"table 'movie/seen': expected shape \(10, 5\)"):
            serve(scheme, tables | {"movie/seen": torch.zeros(10, 4)}, form)
    with pytest.raises(ValueError, match="form 'newer': expected a known form"):
        serve(scheme, tables, "newer")
