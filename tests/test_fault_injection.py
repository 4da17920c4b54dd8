"""The fault benchmark in its short form: a rank is killed under torchrun, the job ends as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fault_injection import inject


@pytest.mark.timeout(600)
def test_a_killed_rank_leaves_no_trace(tmp_path: Path) -> None:
    assert inject(kills=1, folder=tmp_path, seed=0, ranks=2, epochs=1) == {"kills": 1, "finished": 1, "identical": 1}
