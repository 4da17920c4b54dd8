"""The benchmark of weak scaling runs on ranks of its own and writes what it promises. No assertion looks at a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import step_time, weak_scaling


def test_weak_scaling_writes_a_row_per_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_embeddings": 50, "embedding_dim": 8, "num_blocks": 3, "num_tables": 3, "pooling": None}
    monkeypatch.setitem(weak_scaling.SHAPES, "criteo", step_time.vary(step_time.SHAPES["criteo"], **sizes))
    monkeypatch.setattr(weak_scaling, "QUICK_ROUNDS", 2)
    monkeypatch.setattr(step_time, "START_METHOD", "forkserver")  # the tests' server has imported everything
    path = tmp_path / "scaling.json"
    weak_scaling.main(["--quick", "--ranks", "1,2", "--batch-size", "16", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2]
    for row in rows:
        assert row["batch_size_per_rank"] == 16
        assert row["rounds"] == 2
        assert row["pair_ratio"] > max(row["lower_ratio"], row["upper_ratio"]) > 0
        low, high = row["pair_quartiles"]
        assert low <= high
        assert sum(row["sharding_types"].values()) == 3
    assert capsys.readouterr().out.count("[") == 3  # the heading, and a line per row
