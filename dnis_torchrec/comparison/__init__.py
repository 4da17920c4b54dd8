"""Comparisons: methods x sizes x seeds under the same rules, one process per cell, resumable.

Inside this package, cells, registry and streams come first, then worker and processes, plan, summary, outputs, and
run; each file imports only earlier ones.
"""

from dnis_torchrec.comparison.outputs import comparison_table, missing_lines, write_comparison_json
from dnis_torchrec.comparison.plan import Comparison, parse_names, parse_seeds, parse_sizes
from dnis_torchrec.comparison.run import Compared, run_comparison

__all__ = [
    "Compared",
    "Comparison",
    "comparison_table",
    "missing_lines",
    "parse_names",
    "parse_seeds",
    "parse_sizes",
    "run_comparison",
    "write_comparison_json",
]
