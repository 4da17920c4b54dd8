"""Settings of counting and blocking rows, in a module without torch: the command line builds its
options from it."""

from __future__ import annotations

from dataclasses import dataclass

from dnis_torchrec.checks import check


@dataclass(frozen=True, kw_only=True)
class CountLimits:
    """Limits of counting: how much memory it takes, and by how much counts may err."""

    exact_rows: int = 1 << 24
    exact_ids: int = 1 << 22
    epsilon: float = 1e-6
    delta: float = 1e-2

    def __post_init__(self) -> None:
        check(self.exact_rows >= 0, "exact_rows", "an integer >= 0", self.exact_rows)
        check(self.exact_ids >= 2, "exact_ids", "an integer >= 2", self.exact_ids)
        for name in ("epsilon", "delta"):
            check(
                0 < getattr(self, name) < 1, name, "a number between 0 and 1", getattr(self, name)
            )
