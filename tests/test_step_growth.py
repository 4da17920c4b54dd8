"""The benchmark of growth builds what it says and writes what it promises. No assertion looks at a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import step_growth, step_time


def test_rows_are_varied_of_one_table_and_batches_of_all() -> None:
    by_rows = step_growth.shapes_of("num_embeddings", [10, 20])
    assert [shape.num_embeddings for shape in by_rows] == [(10,), (20,)]
    by_batch = step_growth.shapes_of("batch_size", [16, 32])
    assert [(shape.batch_size, len(shape.num_embeddings)) for shape in by_batch] == [(16, 26), (32, 26)]


def test_it_writes_a_row_per_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"num_embeddings": 50, "embedding_dim": 8, "num_blocks": 3, "num_tables": 3, "pooling": None}
    monkeypatch.setitem(step_growth.SHAPES, "criteo", step_time.vary(step_time.SHAPES["criteo"], **small))
    monkeypatch.setattr(step_growth, "QUICK_ROUNDS", 2)
    path = tmp_path / "growth.json"
    step_growth.main(["--quick", "--batch-size", "16,64", "--num-embeddings", "20,80", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    varied = [(row["varied"], row["value"]) for row in rows]
    assert varied == [("batch_size", 16), ("batch_size", 64), ("num_embeddings", 20), ("num_embeddings", 80)]
    for row in rows:
        is_first = row["value"] in (16, 20)
        assert (row["time_ratio"] == row["time_cpu_ratio"] == 1) or not is_first
        assert row["pair_ms"] > 0
    assert rows[1]["per_sample_ratio"] == pytest.approx(rows[1]["time_cpu_ratio"] / 4, abs=1e-3)
    assert "per_sample_ratio" not in rows[2]
    assert "num_embeddings" in capsys.readouterr().out
