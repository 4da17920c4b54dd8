"""What moved: the ratios of the quick benchmarks beside the committed ones.

    make bench
    python -m benchmarks.compare_ratios [--update --note "machine and load"]

Runs `benchmarks.step_time --quick` and `benchmarks.against_naive --quick` and prints every ratio beside the one in
benchmarks/ratios.json, with a mark where it is off by more than TIME_TOLERANCE or MEMORY_TOLERANCE. Absolute times are
never compared. The exit code is 0 whatever moved: another machine has other ratios, and somebody has to look.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = ("step_time", "against_naive")
COMMITTED = Path(__file__).parent / "ratios.json"
TIME_TOLERANCE, MEMORY_TOLERANCE = 0.2, 0.1
"""Share of the committed ratio by which one may differ without a mark."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One ratio beside the committed one.

    Attributes:
        name: benchmark, case and ratio.
        committed: None if it was not measured then.
        measured: None if it was not measured now.
    """

    name: str
    committed: float | None
    measured: float | None

    @property
    def tolerance(self) -> float:
        """Share of the committed ratio."""
        return MEMORY_TOLERANCE if self.name.endswith("memory_ratio") else TIME_TOLERANCE

    @property
    def verdict(self) -> str:
        """``"moved +30 %"`` beyond the tolerance, ``"new"``, ``"gone"``, or nothing."""
        if self.measured is None:
            return "gone"
        if self.committed is None:
            return "new"
        change = self.measured / self.committed - 1
        return f"moved {change:+.0%}" if abs(change) > self.tolerance else ""


def ratios_of(benchmark: str, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Name -> value of every ratio in the rows of a benchmark's JSON file; those that are null are left out."""
    return {
        f"{benchmark} {row.get('shape', row.get('num_rows'))} {name}": value
        for row in rows
        for name, value in row.items()
        if name.endswith("_ratio") and value is not None
    }


def compare(committed: dict[str, float], measured: dict[str, float]) -> list[Comparison]:
    """Every ratio of either side, in the order of the committed ones, new ones last."""
    return [
        Comparison(name=name, committed=committed.get(name), measured=measured.get(name))
        for name in dict.fromkeys([*committed, *measured])
    ]


def table(comparisons: Sequence[Comparison]) -> str:
    """The comparison as text."""
    width = max([len(comparison.name) for comparison in comparisons], default=0)
    lines = [f"{'ratio':{width}}  committed   measured"]
    for comparison in comparisons:
        values = (comparison.committed, comparison.measured)
        shown = "  ".join(f"{'-' if value is None else format(value, '.3f'):>9}" for value in values)
        lines.append(f"{comparison.name:{width}}  {shown}  {comparison.verdict}".rstrip())
    moved = sum(comparison.verdict.startswith("moved") for comparison in comparisons)
    lines.append(f"{moved} moved by more than {TIME_TOLERANCE:.0%} (time) or {MEMORY_TOLERANCE:.0%} (memory)")
    return "\n".join(lines)


def measure() -> dict[str, float]:
    """Ratios of the quick benchmarks, each in a process of its own; their tables go to the terminal."""
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in BENCHMARKS:
            path = Path(folder) / f"{benchmark}.json"
            subprocess.run(
                [sys.executable, "-m", f"benchmarks.{benchmark}", "--quick", "--json", str(path)], check=True
            )
            measured |= ratios_of(benchmark, json.loads(path.read_text(encoding="utf-8"))["rows"])
    return measured


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints what moved; with --update, commits to what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the measured ratios to benchmarks/ratios.json")
    parser.add_argument("--note", default="", help="with --update: where they were taken, and what else ran there")
    arguments = parser.parse_args(argv)
    committed = json.loads(COMMITTED.read_text(encoding="utf-8")) if COMMITTED.is_file() else {"note": "", "ratios": {}}
    measured = measure()
    print()
    if not committed["ratios"]:
        print("no committed ratios yet: --update writes them")
    elif committed["note"]:
        print(f"committed: {committed['note']}")
    print(table(compare(committed["ratios"], measured)))
    if arguments.update:
        temporary = COMMITTED.with_name(f"{COMMITTED.name}.partial")
        temporary.write_text(json.dumps({"note": arguments.note, "ratios": measured}, indent=1) + "\n", "utf-8")
        os.replace(temporary, COMMITTED)


if __name__ == "__main__":
    main()
