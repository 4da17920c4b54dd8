"""The tests marked gpu, in a process of their own; as a stand-in all are skipped."""

import re
import subprocess
import sys

from benchmarks.gpu.schedule import ROOT
from benchmarks.gpu.step import Run


def run(run: Run) -> None:
    """Notes how many tests passed, failed or were skipped. The log shows each result at once."""
    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text("utf-8")]
    command, last = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", *sorted(files)], ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for last in process.stdout or ():
            print(last, end="", flush=True)
    for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last):
        run.figures.note("tests", int(number), outcome=outcome)
    if process.returncode:
        raise RuntimeError(f"pytest ended with code {process.returncode}: {last}")
