"""Every retained column in as many bits, and the forms of earlier versions that are loaded so."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dnis_torchrec import forms
from dnis_torchrec.artifact import load, mixed_dimension_form, read_manifest, serve, uniform_bits, write_artifact
from dnis_torchrec.artifact.forms import CODECS, Codec, rows_of
from dnis_torchrec.artifact.uniform_bits import with_uniform_bits
from dnis_torchrec.blocks.codes import decode_rows, encode_rows
from dnis_torchrec.forms import PRECISIONS, RETIRED_FORMS, MixedDimension, form_named
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from dnis_torchrec.serving.quantized_rows import quantized_rows, values_of_rows
from tests.artifact.test_quantized_forms import NUM_ROWS, pruned_tables
from tests.serving_reference import Case, cases, keyed_jagged_tensor

BAGS = {f"{name}_id": [[(row, 1.0)] for row in range(NUM_ROWS)] for name in ("map", "sorted")}


def evenly_rounded(values: Tensor, bits: int) -> Tensor:
    """Every column cut into equal steps from its smallest value to its largest."""
    low, step = values.amin(0), (values.amax(0) - values.amin(0)) / (2**bits - 1)
    return torch.where(step > 0, ((values - low) / step.clamp(min=1e-30)).round() * step + low, values)


@given(cases(), st.sampled_from([2, 4, 8, 16, 32]))
def test_columns_are_no_worse_than_evenly_rounded(case: Case, bits: int) -> None:
    """But for shifts, which come in half steps, and scales, which are bfloat16."""
    rows = {name: rows_of(weight) for name, weight in case.tables.items()}
    coded = with_uniform_bits(case.scheme, rows, bits)
    for name, table in coded.tables.items():
        assert table.bits is not None
        assert table.bits.equal(case.scheme.tables[name].retained.byte() * bits)
        weight, blocks = case.tables[name], table.routing.all_blocks()
        found = decode_rows(encode_rows(weight, blocks, table.codes), blocks, table.codes)
        for s in range(table.routing.num_blocks):
            here = (blocks == s).nonzero()
            if here.numel() and table.dims[s]:
                values, stored = weight[here, table.columns(s)], found[here, table.columns(s)]
                wanted = 0.0 if bits == 32 else (evenly_rounded(values, bits) - values).square().sum(0).sqrt()
                range_ = values.amax(0) - values.amin(0)
                off = range_ / (2**bits - 1) / 4 + 2**-8 * range_ + 1e-5 * values.abs().amax(0)
                found_error = (stored - values).square().sum(0).sqrt()
                assert bool((found_error <= wanted + len(values) ** 0.5 * off).all())
    again = with_uniform_bits(coded, rows, 3)
    assert all(again.tables[name] is table for name, table in coded.tables.items())


def test_a_large_block_is_fitted_to_rows_from_all_over_it() -> None:
    """However many rows are read at a time."""
    tables, scheme = pruned_tables()
    rows, found = {name: rows_of(weight) for name, weight in tables.items()}, []
    for chunk in (7, 64, 1000):
        with (
            patch.object(uniform_bits, "SAMPLED_PER_BLOCK", 20),
            patch.object(uniform_bits, "rows_per_chunk", lambda _, chunk=chunk: chunk),
        ):
            found.append(with_uniform_bits(scheme, rows, 4))
            samples = uniform_bits._samples(scheme.tables["sorted"], rows["sorted"])
    assert [len(samples[s]) for s in range(3)] == [20, 20, 18]
    assert samples[1].equal(tables["sorted"][40:200:8])
    for name, table in found[0].tables.items():
        assert all(table.codes.scale.equal(other.tables[name].codes.scale) for other in found)


def atol_of(form: str) -> float:
    return {"fp16": 0.001, "int8": 0.03, "int4": 0.4}[form.rpartition("_")[2]]


@pytest.mark.parametrize("form", RETIRED_FORMS)
def test_a_form_of_earlier_versions_is_made_of_exact_rows(tmp_path: Path, form: str) -> None:
    tables, scheme = pruned_tables()
    path = write_artifact(tables, scheme, tmp_path / "a")
    exact, module = load(path)(keyed_jagged_tensor(BAGS)).values(), load(path, form=form)
    assert isinstance(module, PackedEmbeddingBagCollection)
    found = module(keyed_jagged_tensor(BAGS)).values()
    assert not found.equal(exact)
    torch.testing.assert_close(found, exact, rtol=0, atol=atol_of(form))


def written_by_1_0(path: Path, form: str, max_file_bytes: int) -> tuple[Path, dict[str, Tensor]]:
    """An artifact that holds this form alone, as earlier versions wrote it, and the values of its tables."""
    tables, scheme = pruned_tables()
    former = MixedDimension(PRECISIONS[form.rpartition("_")[2]])

    def encode(form: forms.Form, *arguments: object) -> dict[str, Tensor]:
        blocks = mixed_dimension_form._encode(form, *arguments)
        return {name: quantized_rows(block, former.precision, place=name) for name, block in blocks.items()}

    with (
        patch.dict(forms.FORMS, {form: former}),
        patch.dict(CODECS, {former.layout: Codec(encode=encode, build=CODECS[former.layout].build)}),
        patch.dict(RETIRED_FORMS, clear=True),
    ):
        write_artifact(tables, scheme, path, forms=[form], max_file_bytes=max_file_bytes)
    values = {}
    for name, table in scheme.tables.items():
        values[name], blocks = torch.zeros_like(tables[name]), table.routing.all_blocks()
        for s in range(2):  # the last block retains nothing
            here, columns = (blocks == s).nonzero(), table.columns(s)
            rows = quantized_rows(tables[name][here, columns], former.precision, place=name)
            values[name][here, columns] = values_of_rows(rows, former.precision)[:, : len(columns)]
    return path, values


@pytest.mark.parametrize("max_file_bytes", [10**9, 2000])
@pytest.mark.parametrize("form", RETIRED_FORMS)
def test_an_artifact_of_such_a_form_is_read(tmp_path: Path, form: str, max_file_bytes: int) -> None:
    """What was rounded once is not rounded a second time so that it shows."""
    path, values = written_by_1_0(tmp_path / "a", form, max_file_bytes)
    found = load(path, form=form)(keyed_jagged_tensor(BAGS))
    for name, weight in values.items():
        torch.testing.assert_close(found.to_dict()[f"{name}_id"], weight, rtol=0, atol=2e-4)
    assert read_manifest(path)["forms"] == []
    with pytest.raises(ValueError, match=f"expected form 'mixed_dimension_fp32', got .*{form}.*; export with forms"):
        load(path)


def test_they_are_not_written_any_more(tmp_path: Path) -> None:
    tables, scheme = pruned_tables()
    message = "form 'mixed_dimension_int8': expected 'packed', which took its place, got the former; give every column"
    for ask in (
        lambda: form_named("mixed_dimension_int8"),
        lambda: serve(scheme, tables, "mixed_dimension_int8"),
        lambda: write_artifact(tables, scheme, tmp_path / "a", forms=["mixed_dimension_int8"]),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
    assert not (tmp_path / "a").exists()


def test_codes_stay_as_they_are(tmp_path: Path) -> None:
    tables, scheme = pruned_tables()
    coded = with_uniform_bits(scheme, {name: rows_of(weight) for name, weight in tables.items()}, 3)
    path = write_artifact(tables, MixedDimensionScheme(coded.tables), tmp_path / "a")
    bags = keyed_jagged_tensor(BAGS)
    assert load(path, form="mixed_dimension_int8")(bags).values().equal(load(path)(bags).values())
