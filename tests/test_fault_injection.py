"""The fault benchmark in its short form: ranks are killed under torchrun, the job ends as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(600)
def test_killed_ranks_leave_no_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fault_injection", "--kills", "2"]
    subprocess.run(
        [*command, "--json", str(tmp_path / "result.json")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    assert json.loads((tmp_path / "result.json").read_text()) == {"kills": 2, "finished": 2, "identical": 2}
