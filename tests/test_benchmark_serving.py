"""The serving benchmark gives a row for every case, form, batch, pooling and number of threads. No clock is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import serving
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.scheme import FORMS
from tests.serving_reference import write_two_tables

FIELDS = {
    "case",
    "form",
    "batch",
    "pooling",
    "threads",
    "tables",
    "latency_ratio",
    "bytes_over_floor",
    "resident_bytes",
    "resident_over_predicted",
}


def test_rows_of_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in {
        "NUM_EMBEDDINGS": 300,
        "NUM_EMBEDDINGS_OF_MANY": 100,
        "NUM_TABLES": 2,
        "BATCH_SIZES": (2,),
        "BAGS_PER_TURN": 2,
    }.items():
        monkeypatch.setattr(serving, name, small)
    artifact = write_two_tables(tmp_path / "artifact")
    threads = torch.get_num_threads()
    try:
        serving.main(["--quick", "--artifact", str(artifact), "--json", str(tmp_path / "rows.json")])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert all(set(row) >= FIELDS for row in rows)
    cases = {(row["case"], row["tables"], row["baseline"].split(".")[-1]) for row in rows}
    collection = "EmbeddingBagCollection"
    assert cases == {
        ("simulated", 1, "EmbeddingBag"),
        ("simulated", 2, collection),
        ("simulated_blocks", 2, collection),
        ("simulated_codes", 1, "EmbeddingBag"),
        ("simulated_codes", 2, collection),
        ("simulated_unsorted", 1, "EmbeddingBag"),
        ("simulated_unsorted", 2, collection),
        ("artifact:ebc", 2, collection),
        ("artifact:ebc:movie/seen", 1, collection),
        ("artifact:ebc:user", 1, collection),
    }
    forms = {row["form"] for row in rows if row["case"] == "artifact:ebc:user"}
    assert forms == {"mixed_dimension"}
    assert set(read_manifest(artifact)["forms"]) == {"mixed_dimension"}
    assert {row["pooling"] for row in rows if row["tables"] == 1 and row["case"] == "simulated"} == {1, 20}
    exact = next(row for row in rows if (row["case"], row["form"], row["tables"]) == ("simulated", "packed", 1))
    assert 1 < exact["bytes_over_floor"] < 2


def test_the_floor_is_four_bytes_per_value_and_the_entropy_of_the_mask() -> None:
    case = serving.simulated(1, 1000, ["packed"], torch.device("cpu"))
    values = int(case.tables["t0"].count_nonzero())
    share = values / (1000 * 64)
    column_shares = (case.tables["t0"] != 0).double().mean(dim=0)
    bits = 1000 * float((torch.special.entr(column_shares) + torch.special.entr(1 - column_shares)).sum())
    assert serving.floor_bytes(case) == pytest.approx(4 * values + bits / torch.tensor(2.0).log().item() / 8)
    assert share == pytest.approx(0.05, abs=0.005)


def test_codes_take_the_bytes_that_are_predicted_and_give_what_they_stand_for() -> None:
    for simulate in (serving.simulated_codes, serving.simulated_unsorted):
        case = simulate(1, 20_000, ["packed"], torch.device("cpu"))
        serving.check_equal(case)
        assert case.forms["packed"].table_bytes() == case.scheme.served_bytes("packed")
        area = case.scheme.tables["t0"].routing.row_counts().unsqueeze(1) * case.scheme.tables["t0"].bits.long()
        assert float(area.sum()) / case.scheme.tables["t0"].num_retained == pytest.approx(4, abs=0.2)
        assert serving.floor_bytes(case) == pytest.approx(int(area.sum()) / 8, rel=1e-3)
    assert case.scheme.tables["t0"].routing.boundaries is None


def test_every_form_that_can_hold_a_case_is_measured() -> None:
    plain = serving.simulated_blocks(1, 100, (), torch.device("cpu"))
    coded = serving.simulated_codes(1, 100, (), torch.device("cpu"))
    assert set(plain.forms) == set(coded.forms) == set(FORMS)
