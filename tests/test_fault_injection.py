"""The fault benchmark in its short form: a rank is killed under torchrun, the job ends as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(600)
def test_a_killed_rank_leaves_no_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fault_injection", "--kills", "1"]
    subprocess.run(
        [*command, "--json", str(tmp_path / "result.json")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    assert json.loads((tmp_path / "result.json").read_text()) == {"kills": 1, "finished": 1, "identical": 1}
