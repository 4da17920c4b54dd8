"""What loading costs: pages of an artifact come into memory when rows are looked up, not before. And full disks."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks import artifact_memory
from dnis_torchrec.artifact import load, read_manifest, write_artifact
from tests.serving_reference import two_tables

MEGABYTES = 32


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see resident memory")
def test_loading_reads_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured as `python -m benchmarks.artifact_memory` does for a gigabyte."""
    monkeypatch.setattr(artifact_memory, "FORMS", ("packed", "mixed_dimension"))
    path = tmp_path / "memory.json"
    artifact_memory.main(["--gigabytes", str(MEGABYTES / 1000), "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["form"] for row in rows] == ["packed", "mixed_dimension"]
    for row in rows:
        assert row["artifact_bytes"] >= MEGABYTES * 10**6
        assert row["loaded_bytes"] < row["artifact_bytes"] / 16, row
        assert row["looked_up_bytes"] < row["artifact_bytes"] / 16, row
        # the measure does see pages that are used; of CSR that is half of them, beside the canonical arrays
        assert row["used_bytes"] > row["artifact_bytes"] / 3, row


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writes beyond fail in the middle of a file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("limit", "size"), [(400, 5000), (2000, 5000), (2000, 1)])
def test_a_full_disk_leaves_the_old_artifact_and_nothing_else(tmp_path: Path, limit: int, size: int) -> None:
    """The first file, or one in the middle, or the manifest alone does not fit."""
    tables, scheme = two_tables()
    path = write_artifact(tables, scheme, tmp_path / "artifact", run={"seed": 3})
    state = {"layer": torch.zeros(size)}
    for target in (path, tmp_path / "new" / "artifact"):
        refused = pytest.raises(OSError, match=r"expected it to be written, got .*File too large")
        with refused, files_of_at_most(limit):
            write_artifact(tables, scheme, target, dense_state=state, overwrite=True)
        assert [entry.name for entry in tmp_path.iterdir()] == ["artifact"]
    assert read_manifest(path)["run"] == {"seed": 3}
    load(path, verify=True)
