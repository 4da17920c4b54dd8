"""The form of bit fields in artifacts: in any number of shards it serves the nearest level of every value."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dnis_torchrec.artifact import load, load_dense_state, read_manifest, read_scheme, serve, write_artifact, writing
from dnis_torchrec.artifact.forms import encode_shard
from dnis_torchrec.artifact.writing import write_packed
from dnis_torchrec.scheme import FORMS, PACKED, MixedDimensionScheme, TableScheme
from dnis_torchrec.serving import PackedEmbeddingBagCollection
from tests.artifact.test_artifact_damage import restate
from tests.coded_tables import PACKED_FILE, coded_case, coded_tables, rounded, write_coded_tables
from tests.serving_reference import Case, all_rows, cases, write_two_tables


def dense_rows(path: Path, form: str) -> Tensor:
    """Every row of both tables as a form serves it."""
    return load(path, form=form)(all_rows()).values()


def by_hand() -> Tensor:
    """Every row of both tables, rounded level by level."""
    tables, scheme = coded_tables()
    of_feature = {name[:5]: rounded(scheme.tables[name], weight) for name, weight in tables.items()}
    return torch.cat(list(of_feature.values()), dim=1)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cases(), st.integers(0, 999), st.sampled_from([280, 340, 2_000_000_000]))
def test_serves_the_nearest_levels_in_any_number_of_shards(
    tmp_path: Path, case: Case, seed: int, max_file_bytes: int
) -> None:
    coded, weights = coded_case(case, seed)
    with pytest.MonkeyPatch.context() as patch:
        # schemes do not fit into the smallest files: it is the tables' shards that are tried
        patch.setattr(writing, "write_packed", lambda folder, stem, tensors, *_: write_packed(folder, stem, tensors))
        path = write_artifact(weights, coded.scheme, tmp_path / "a", overwrite=True, max_file_bytes=max_file_bytes)
    assert read_manifest(path)["forms"] == ["packed"]
    served = load(path)
    assert isinstance(served, PackedEmbeddingBagCollection)
    found, expected = served(coded.kjt()).to_dict(), coded.expected()
    assert list(found) == list(expected)
    for name, pooled in expected.items():
        torch.testing.assert_close(found[name], pooled, rtol=1e-5, atol=2e-5)
    assert served.table_bytes() == sum(table.served_bytes(PACKED) for table in coded.scheme.tables.values())
    for name, table in coded.scheme.tables.items():
        shards = read_manifest(path)["tables"][name]["shards"]["packed"]
        stored = sum(read_manifest(path)["files"][s["file"]]["tensors"]["rows"]["shape"][0] for s in shards)
        assert stored == table.file_bytes(PACKED)


def test_tables_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would pass without having been tried."""
    tables, scheme = coded_tables()
    monkeypatch.setattr(writing, "write_packed", lambda folder, stem, packed, *_: write_packed(folder, stem, packed))
    whole = write_artifact(tables, scheme, tmp_path / "whole")
    cut = write_artifact(tables, scheme, tmp_path / "cut", max_file_bytes=240)
    for name in tables:
        assert len(read_manifest(whole)["tables"][name]["shards"]["packed"]) == 1
        assert len(read_manifest(cut)["tables"][name]["shards"]["packed"]) > 1
    assert dense_rows(cut, "packed").equal(dense_rows(whole, "packed"))


def test_scheme_state_and_run_come_back(tmp_path: Path) -> None:
    path, (_, scheme) = write_coded_tables(tmp_path / "a"), coded_tables()
    found = read_scheme(path)
    assert found.to_json() == scheme.to_json()
    tensors = found.to_tensors()
    assert [name for name, value in scheme.to_tensors().items() if not value.equal(tensors[name])] == []
    assert load_dense_state(path)["step"] == 7
    assert read_manifest(path)["run"] == {"seed": 3}
    assert read_manifest(path)["bytes"]["packed"] == sum(table.served_bytes(PACKED) for table in scheme.tables.values())


def test_several_collections(tmp_path: Path) -> None:
    tables, scheme = coded_tables()
    moved = {name: replace(table, collection=name[:4]) for name, table in scheme.tables.items()}
    path = write_artifact(tables, MixedDimensionScheme(moved), tmp_path / "a")
    assert load(path, collection="user").lookup(torch.arange(10), torch.arange(11)).equal(dense_rows_of_user(tmp_path))
    with pytest.raises(ValueError, match="expected collection="):
        load(path)


def dense_rows_of_user(tmp_path: Path) -> Tensor:
    return load(write_coded_tables(tmp_path / "both"))(all_rows()).to_dict()["user"]


def test_a_table_in_one_file_stays_in_it(tmp_path: Path) -> None:
    path = write_coded_tables(tmp_path / "a")
    served = load(path)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "packed/" in line]
    for name, buffer in served.tables.named_buffers():
        if name.endswith("/rows"):
            spans = [[int(end, 16) for end in fields[0].split("-")] for fields in mapped]
            assert any(first <= buffer.data_ptr() < last for first, last in spans), name


def test_rows_are_read_once(tmp_path: Path) -> None:
    tables, scheme = coded_tables()
    read: list[int] = []
    table, weight = scheme.tables["user"], tables["user"]

    def rows(first: int, last: int) -> Tensor:
        read.extend(range(first, last))
        return weight[first:last]

    encode_shard(PACKED, table, rows, 2, 9)
    assert read == list(range(2, 9))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["packed", "mixed_dimension"])
def test_non_finite_values_are_named(tmp_path: Path, value: float, form: str) -> None:
    tables, scheme = coded_tables()
    tables["user"][3, 4] = value
    message = f"table 'user': expected finite values, got {value} in block 1, column 4"
    with pytest.raises(ValueError, match=message):
        write_artifact(tables, scheme, tmp_path / "a", forms=[form])
    assert list(tmp_path.iterdir()) == []


def test_artifacts_of_format_1_0_are_read(tmp_path: Path) -> None:
    path = write_two_tables(tmp_path / "a")
    expected = load(path)(all_rows()).values()
    restate(path, lambda manifest: manifest.update(format_version="1.0"))
    assert load(path)(all_rows()).values().equal(expected)


def test_the_manifest_says_where_rows_are(tmp_path: Path) -> None:
    path = write_coded_tables(tmp_path / "a")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["tables"]["movie/seen"]["shards"] == {
        "packed": [{"file": PACKED_FILE, "first_row": 0, "num_rows": 10}]
    }
    assert list(manifest["files"][PACKED_FILE]["tensors"]) == ["rows"]


def test_rows_of_no_block_and_dropped_tables(tmp_path: Path) -> None:
    """A table of which nothing is retained takes no byte, and its rows are 0."""
    tables, scheme = coded_tables()
    nothing = torch.zeros(3, 5, dtype=torch.uint8)
    dropped: TableScheme = replace(
        scheme.tables["user"],
        bits=nothing,
        retained=nothing.bool(),
        num_retained=0,
        scale=torch.ones(3, 5),
        shift=torch.zeros(3, 5).short(),
    )
    path = write_artifact(tables, MixedDimensionScheme(dict(scheme.tables) | {"user": dropped}), tmp_path / "a")
    found = load(path)(all_rows()).to_dict()
    assert found["user"].equal(torch.zeros(10, 5))
    torch.testing.assert_close(found["movie"], rounded(scheme.tables["movie/seen"], tables["movie/seen"]))
    assert load(path, form="mixed_dimension")(all_rows()).to_dict()["user"].equal(torch.zeros(10, 5))


def test_both_forms_of_codes_hold_the_same_values(tmp_path: Path) -> None:
    """Written or made, from one or the other: nothing is rounded twice to something else."""
    made, tables = write_coded_tables(tmp_path / "made"), coded_tables()
    held = write_coded_tables(tmp_path / "held", ("mixed_dimension",))
    assert read_manifest(made)["forms"] == ["packed"]
    torch.testing.assert_close(dense_rows(made, "packed"), by_hand(), rtol=1e-6, atol=1e-6)
    for form in FORMS:
        assert dense_rows(held, form).equal(dense_rows(made, "packed"))
        assert dense_rows(made, form).equal(dense_rows(made, "packed"))
        assert serve(tables[1], tables[0], form)(all_rows()).values().equal(dense_rows(made, form))
    assert isinstance(load(made), PackedEmbeddingBagCollection)
    assert not isinstance(load(held), PackedEmbeddingBagCollection)


def test_an_artifact_of_forms_to_come_is_refused(tmp_path: Path) -> None:
    path = write_coded_tables(tmp_path / "a")

    def rename(manifest: dict) -> None:
        manifest["forms"] = ["entropy_coded"]
        for table in manifest["tables"].values():
            table["shards"] = {"entropy_coded": table["shards"]["packed"]}

    restate(path, rename)
    with pytest.raises(ValueError, match=r"got \['entropy_coded'\]; update dnis_torchrec"):
        load(path)
