"""Ratios of the quick benchmarks beside the committed ones, with marks where they moved.

    make bench
    python -m benchmarks.compare_ratios [--update --note "machine and load"]

Runs `benchmarks.step_time --quick` and `benchmarks.against_naive --quick` and prints every ratio beside the one in
benchmarks/ratios.json, with a mark where it moved: off by more than its tolerance (`TOLERANCES`), and, where quartiles
are known of both, with quartiles that do not overlap, so that a noisy run is not taken for a change. Absolute times are
never compared. The exit code is 0 whatever moved: another machine has other ratios, and somebody has to look.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dnis_torchrec.data.files import write_json

BENCHMARKS = ("step_time", "against_naive")
COMMITTED = Path(__file__).parent / "ratios.json"
TOLERANCES = {"volume_ratio": 0.0, "time_ratio": 1.0, "time_cpu_ratio": 1.0, "": 0.2}
"""End of a ratio's name -> share of the committed ratio by which it may differ without a mark; the first that fits.

Runs of `against_naive` are processes that follow each other, so their times are trusted only to a factor of two; steps
of `step_time` take turns. Peaks of memory differ by up to .15 from run to run of the same code.
"""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A measured ratio."""

    value: float
    quartiles: Sequence[float] | None = None

    def overlaps(self, other: Ratio) -> bool:
        """Returns whether the middle halves of both have values in common; not if those of one are not known."""
        if self.quartiles is None or other.quartiles is None:
            return False
        return self.quartiles[0] <= other.quartiles[1] and other.quartiles[0] <= self.quartiles[1]


def verdict(name: str, committed: Ratio | None, measured: Ratio | None) -> str:
    """``"moved +30 %"`` beyond tolerance and quartiles, ``"new"``, ``"gone"``, or nothing."""
    if measured is None or committed is None:
        return "gone" if measured is None else "new"
    low, high = sorted((measured.value, committed.value))
    tolerance = next(share for end, share in TOLERANCES.items() if name.endswith(end))
    if high <= low * (1 + tolerance) or measured.overlaps(committed):
        return ""
    return f"moved {measured.value / committed.value - 1:+.0%}"


def ratios_of(benchmark: str, rows: Sequence[dict[str, Any]]) -> dict[str, Ratio]:
    """Name -> every ratio in the rows of a benchmark's JSON file; those that are null are left out.

    Ratios that are bounds (see `against_naive`) say how long one waited: of them, only that they are bounds would be
    worth comparing, so they are left out too.
    """
    ratios = {}
    for row in rows:
        for name, value in row.items():
            is_bound = name.startswith("time_") and row.get("is_bound", False)
            if name.endswith("_ratio") and value is not None and not is_bound:
                quartiles = row.get(f"{name.removesuffix('_ratio')}_quartiles")
                key = f"{benchmark} {row.get('shape', row.get('num_rows'))} {name}"
                ratios[key] = Ratio(value=value, quartiles=quartiles)
    return ratios


def table(committed: dict[str, Ratio], measured: dict[str, Ratio]) -> str:
    """The comparison as text: every ratio of either side, in the order of the committed ones, new ones last."""
    names = list(dict.fromkeys([*committed, *measured]))
    width = max(map(len, names), default=0)
    lines = [f"{'ratio':{width}}  {'committed':>22}  {'measured':>22}"]
    verdicts = [verdict(name, committed.get(name), measured.get(name)) for name in names]
    for name, text in zip(names, verdicts, strict=True):
        shown = f"{_shown(committed.get(name)):>22}  {_shown(measured.get(name)):>22}"
        lines.append(f"{name:{width}}  {shown}  {text}".rstrip())
    lines.append(f"{sum(text.startswith('moved') for text in verdicts)} moved beyond tolerance and quartiles")
    return "\n".join(lines)


def _shown(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    quartiles = "" if ratio.quartiles is None else " [{:.3f}, {:.3f}]".format(*ratio.quartiles)
    return f"{ratio.value:.3f}{quartiles}"


def measure() -> dict[str, Ratio]:
    """Ratios of the quick benchmarks, each in a process of its own; their tables go to the terminal."""
    measured: dict[str, Ratio] = {}
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in BENCHMARKS:
            path = Path(folder) / f"{benchmark}.json"
            subprocess.run(
                [sys.executable, "-m", f"benchmarks.{benchmark}", "--quick", "--json", str(path)], check=True
            )
            measured |= ratios_of(benchmark, json.loads(path.read_text(encoding="utf-8"))["rows"])
    return measured


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints which ratios moved; with --update, records the new ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the measured ratios to benchmarks/ratios.json")
    parser.add_argument("--note", default="", help="with --update: where they were taken, and what else ran there")
    arguments = parser.parse_args(argv)
    note, committed = read(COMMITTED) if COMMITTED.is_file() else ("", {})
    measured = measure()
    print()
    if not committed:
        print("no committed ratios yet: --update writes them")
    elif note:
        print(f"committed: {note}")
    print(table(committed, measured))
    if arguments.update:
        write(COMMITTED, arguments.note, measured)


def read(path: Path) -> tuple[str, dict[str, Ratio]]:
    """The note and the ratios that `write` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["note"], {name: Ratio(**fields) for name, fields in content["ratios"].items()}


def write(path: Path, note: str, ratios: dict[str, Ratio]) -> None:
    """Writes a note and ratios in one piece."""
    content = {"note": note, "ratios": {name: asdict(ratio) for name, ratio in ratios.items()}}
    write_json(path, content)


if __name__ == "__main__":
    main()
