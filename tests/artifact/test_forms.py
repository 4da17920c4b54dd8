"""Predictions of forms against the modules themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec import forms
from dnis_torchrec.allocation.bits import Allocation
from dnis_torchrec.artifact import Codec, load, read_manifest, register_codec, write_artifact
from dnis_torchrec.artifact import forms as artifact_forms
from dnis_torchrec.artifact.card import card_of
from dnis_torchrec.artifact.forms import CODECS, Rows, rows_of
from dnis_torchrec.artifact.predictions import (
    FormPrediction,
    describe_forms,
    forms_table,
    predict_forms,
    recommended_form,
    serve,
)
from dnis_torchrec.artifact.regrouping import regroup_table
from dnis_torchrec.blocks.codes import ColumnCodes
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.forms import FORMS, PRECISIONS, Dense, Form, register
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving import CsrEmbeddingBagCollection
from tests.serving_reference import PLAIN_FORMS, Case, all_rows, cases, pruned, table_scheme, two_tables


@settings(max_examples=15, deadline=None)
@given(cases())
def test_bytes_are_those_of_the_modules(case: Case) -> None:
    for prediction in predict_forms(case.scheme):
        if prediction.resident_bytes is None:
            assert "multiple of" in prediction.warning
            continue
        assert prediction.resident_bytes == serve(case.scheme, case.tables, prediction.form).table_bytes(), (
            prediction.form
        )


def blocks_of(dims: list[int], rows: int = 1000, dim: int = 64) -> MixedDimensionScheme:
    routing = RowRouting(rows, len(dims), boundaries=torch.linspace(0, rows, len(dims) + 1).long())
    retained = torch.arange(dim) < torch.tensor(dims).unsqueeze(1)
    return MixedDimensionScheme({"t": table_scheme("t", routing, retained)})


def predictions(scheme: MixedDimensionScheme) -> dict[str, FormPrediction]:
    return {prediction.form: prediction for prediction in predict_forms(scheme)}


def test_every_form_is_told_of() -> None:
    found = predictions(blocks_of([64, 16, 4, 2]))
    assert list(found) == PLAIN_FORMS
    assert [form for form, p in found.items() if p.is_exact] == ["csr_fp32", "mixed_dimension_fp32", "dense_fp32"]
    assert found["mixed_dimension_fp32"].padding == 1.0
    assert found["dense_int8"].padding == round(4 * 64 / 86, 4)


def test_what_is_larger_than_dense_int4_is_warned_of() -> None:
    wide, narrow = predictions(blocks_of([64, 60, 50, 40])), predictions(blocks_of([16, 4, 2, 1]))
    assert {form for form, p in wide.items() if not p.warning} == {"row_pruned_int4", "dense_int4"}
    assert all(p.warning == "larger than the dense tables in int4" for p in wide.values() if p.warning)
    assert not narrow["mixed_dimension_fp32"].warning
    assert narrow["dense_fp16"].warning


def test_recommends_the_smallest_that_is_fast() -> None:
    found = predict_forms(blocks_of([16, 4, 2, 1]))
    assert recommended_form(found) == "csr_int8"
    assert recommended_form(found, exact=True) == "mixed_dimension_fp32"
    assert recommended_form([p for p in found if p.form.startswith("dense")]) == "dense_int8"
    assert recommended_form([p for p in found if p.form.endswith("int4")]) is None


def test_latency_classes_follow_the_width() -> None:
    narrow, wide = predictions(blocks_of([8, 4])), predictions(blocks_of([64, 64]))
    assert narrow["csr_fp32"].latency_class == narrow["mixed_dimension_fp32"].latency_class == "faster"
    assert wide["csr_fp32"].latency_class == "similar"
    assert narrow["csr_fp32"].latency_ratio < wide["csr_fp32"].latency_ratio


def test_forms_that_cannot_hold_the_tables() -> None:
    found = predictions(blocks_of([5, 3], dim=6))
    assert found["dense_int4"].resident_bytes is None
    assert found["dense_int4"].warning == "needs an embedding_dim that is a multiple of 4: not so in table 't'"
    assert found["dense_int8"].resident_bytes == 1000 * 10


def test_single_values_pruned() -> None:
    """Without block structure the mixed form is padded; regrouped it is not."""
    torch.manual_seed(0)
    routing = RowRouting(2000, 1, boundaries=torch.tensor([0, 2000]))
    lengths = torch.empty(2000).geometric_(0.3).clamp(max=64)
    weight = torch.randn(2000, 64) * (torch.arange(64) < lengths.unsqueeze(1))
    retained = torch.ones(1, 64, dtype=torch.bool)
    table = table_scheme("t", routing, retained, num_retained=int(weight.count_nonzero()))
    regrouped = regroup_table(table, rows_of(weight))
    before, after = (predictions(MixedDimensionScheme({"t": of_rows})) for of_rows in (table, regrouped))
    assert before["mixed_dimension_fp32"].padding > 10
    assert after["mixed_dimension_fp32"].padding < 1.2
    assert recommended_form(before.values(), exact=True) == "csr_fp32"
    assert after["mixed_dimension_fp32"].resident_bytes < before["mixed_dimension_fp32"].resident_bytes / 8
    # rows of three values: where each of them is takes less in csr than a map from rows to blocks
    assert recommended_form(after.values(), exact=True) == "csr_fp32"


def test_is_shown_and_kept() -> None:
    scheme = blocks_of([16, 4, 2, 1])
    rows = forms_table(scheme)
    assert [row[0] for row in rows[1:]] == PLAIN_FORMS
    assert [row[0] for row in rows if row[-1] == "recommended"] == ["csr_int8"]
    described = json.loads(json.dumps(describe_forms(scheme), allow_nan=False))
    assert described["recommended"] == "csr_int8"
    assert [form["form"] for form in described["forms"]] == PLAIN_FORMS


def test_nothing_retained() -> None:
    routing = RowRouting(10, 1, boundaries=torch.tensor([0, 10]))
    retained = torch.zeros(1, 8, dtype=torch.bool)
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, retained)})
    weight = pruned(torch.randn(10, 8), routing, retained)
    found = predictions(scheme)
    assert found["mixed_dimension_fp32"].resident_bytes == 2 * 8
    assert found["csr_fp32"].padding is None
    assert found["row_pruned_int8"].resident_bytes == serve(scheme, {"t": weight}, "row_pruned_int8").table_bytes()
    codes = ColumnCodes(torch.zeros(1, 8, dtype=torch.uint8), torch.ones(1, 8), torch.zeros(1, 8, dtype=torch.int16))
    scheme = MixedDimensionScheme({"t": scheme.tables["t"].with_codes(codes)})
    assert scheme.served_bytes("packed") == 0
    assert (
        scheme.compression()
        == Allocation(scheme=scheme, predicted_loss_increase=0.0, num_bytes=0).compression
        == 4 * 10 * 8
    )
    assert "320.00 times smaller" in card_of(scheme, {"versions": {}, "run": {}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_ids_that_are_no_integers_are_named(mode: type, dtype: torch.dtype) -> None:
    """In every form, compiled or not."""
    scheme = blocks_of([4], rows=10, dim=8)
    weight = torch.randn(10, 8) * (torch.arange(8) < 4)
    batch = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2]).to(dtype), lengths=torch.tensor([1, 1]))
    for form in PLAIN_FORMS:
        module = serve(scheme, {"t": weight}, form)
        with mode(), pytest.raises(TypeError, match="feature 'f': expected integer ids, got torch"):
            module(batch)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_lengths_that_ask_for_other_ids_than_there_are_are_named(mode: type) -> None:
    """In every form, compiled or not; tests/ops/test_batch_checks.py has all the ways to be wrong."""
    scheme = blocks_of([4], rows=10, dim=8)
    weight = torch.randn(10, 8) * (torch.arange(8) < 4)
    for form in PLAIN_FORMS:
        module = serve(scheme, {"t": weight}, form)
        for lengths in ([1, 9], [3, -1], [1, 0]):
            batch = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor(lengths, dtype=torch.int32))
            with mode(), pytest.raises(ValueError, match="feature 'f': expected "):
                module(batch)


def test_unknown_forms() -> None:
    with pytest.raises(ValueError, match="form 'csr_int9': expected a known form"):
        predict_forms(blocks_of([4]), ["csr_int9"])


def test_serves_every_form() -> None:
    tables, scheme = two_tables()
    expected = serve(scheme, tables, "csr_fp32")(all_rows()).values()
    for prediction in predict_forms(scheme):
        if prediction.resident_bytes is None:
            with pytest.raises(
                ValueError, match=r"table 'movie/seen': expected an embedding_dim that is a multiple of"
            ):
                serve(scheme, tables, prediction.form)
        else:
            module = serve(scheme, tables, prediction.form, unknown_ids="zero")
            torch.testing.assert_close(module(all_rows()).values(), expected, rtol=0, atol=0.3)
    with pytest.raises(ValueError, match="table 'user': expected a known table"):
        serve(scheme, {"movie/seen": tables["movie/seen"]}, "csr_fp32")
    with pytest.raises(ValueError, match=r"table 'movie/seen': expected shape \(10, 5\)"):
        serve(scheme, tables | {"movie/seen": torch.zeros(10, 4)}, "csr_fp32")


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


def test_a_form_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered, it is written, read, and derived from CSR."""
    with pytest.raises(ValueError, match="form 'csr_fp32': expected a new name"):
        register(FORMS["csr_fp32"])
    with pytest.raises(ValueError, match="layout 'csr': expected a new name"):
        register_codec("csr", CODECS["csr"])
    monkeypatch.setattr(forms, "FORMS", dict(FORMS))
    monkeypatch.setattr(artifact_forms, "CODECS", dict(CODECS))

    class Plain(Dense):
        layout = "plain"

    def encode(form: Form, table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, torch.Tensor]:
        return {"rows": rows(first, last).clone()}

    def build(
        form: Form, scheme: MixedDimensionScheme, shards: Mapping, **options: object
    ) -> CsrEmbeddingBagCollection:
        dense = {name: torch.cat([shard.tensors["rows"] for shard in shards[name]]) for name in scheme.tables}
        return CsrEmbeddingBagCollection.from_tables(scheme, dense)

    register(Plain(PRECISIONS["fp32"]))
    register_codec("plain", Codec(encode=encode, build=build))
    tables, scheme = two_tables()
    expected = load(write_artifact(tables, scheme, tmp_path / "csr_fp32"), form="csr_fp32")(all_rows()).values()
    path = write_artifact(tables, scheme, tmp_path / "dense", forms=["plain_fp32"], max_file_bytes=350)
    assert len(read_manifest(path)["tables"]["user"]["shards"]["plain_fp32"]) > 1
    for folder in (path, tmp_path / "csr_fp32"):
        assert load(folder, form="plain_fp32")(all_rows()).values().equal(expected)
