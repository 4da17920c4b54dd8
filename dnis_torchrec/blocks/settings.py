"""Settings of counting and blocking rows, in a module without torch: the command line builds its options from it."""

from __future__ import annotations

from dataclasses import dataclass

from dnis_torchrec.checks import check

SCOPES = ("global", "table")
STRATEGIES = ("equal_rows", "equal_mass", "decades", "explicit")


@dataclass(frozen=True, kw_only=True)
class CountLimits:
    """Limits of counting: how much memory it takes, and by how much counts may err.

    Attributes:
        exact_rows: tables up to this many rows are counted exactly, at 8 bytes a row.
        exact_ids: of a larger table, distinct ids that are counted exactly, at 24 bytes each.
        epsilon: error of the counts of all other ids, as a share of the occurrences of all other ids.
        delta: probability that a count errs by more. The sketch takes ``8 ceil(ln(1 / delta)) ceil(e / epsilon)``
            bytes: 109 MB by default.
    """

    exact_rows: int = 1 << 24
    exact_ids: int = 1 << 22
    epsilon: float = 1e-6
    delta: float = 1e-2

    def __post_init__(self) -> None:
        check(self.exact_rows >= 0, "exact_rows", "an integer >= 0", self.exact_rows)
        check(self.exact_ids >= 2, "exact_ids", "an integer >= 2", self.exact_ids)
        for name in ("epsilon", "delta"):
            check(0 < getattr(self, name) < 1, name, "a number between 0 and 1", getattr(self, name))
