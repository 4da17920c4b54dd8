"""The benchmark of one large table on disk: what it makes up, and that its figures are those of the artifact."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch

from benchmarks import compress_scale


def test_counts_are_those_of_the_batches_law() -> None:
    expected = Counter({rank * compress_scale.MULTIPLIER % 97: 97 // (1 + rank) for rank in range(97)})
    counts = compress_scale.zipf_counts(97)
    assert counts.counts["t"].tolist() == [expected[row] for row in range(97)]
    assert counts.num_samples == expected.total()


def test_batches_are_the_same_every_time_and_labels_near_predictions() -> None:
    table = torch.randn(50, 3)
    samples = compress_scale.Samples(table)
    first, again = next(iter(samples)), next(iter(samples))
    ids = first.sparse_features.values()
    assert ids.equal(again.sparse_features.values())
    assert first.labels.equal(again.labels)
    assert (int(ids.min()), int(ids.max())) == (0, 49)
    assert float((first.labels - table[ids].square().sum(1)).std()) < 0.11


def test_a_table_on_disk_becomes_an_artifact_within_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    compress_scale.main(["--rows", "60000", "--dim", "4", "--folder", str(tmp_path), "--json", str(path)])
    found = json.loads(path.read_text())
    assert [row["step"] for row in found["rows"]] == [
        *("count", "given counts", "finite", "blocks", "axes", "curvature", "energies", "loss sample"),
        *("allocation", "codes, written"),
    ]
    assert found["table_bytes"] == 60_000 * 4 * 4
    assert found["compression"] == found["table_bytes"] / found["served_bytes"] >= compress_scale.COMPRESSION
    assert 0 < found["peak_anonymous_bytes"] < found["limit_bytes"] == 4 * 2**30
    assert all(row["anonymous_bytes"] > 0 < row["file_bytes"] for row in found["rows"])
    assert all(rate >= 0 for rate in found["rates"].values())
    assert [each.name for each in tmp_path.iterdir()] == ["scale.json"]
