"""Parts of one stream, split off online: a hash alone decides where a sample goes, not what was
read before."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dnis_torchrec.checks import check


@dataclass(frozen=True)
class Part:
    """An interval of positions."""

    begin: float
    end: float
    seed: int = 0

    def contains(self, positions: np.ndarray) -> np.ndarray:
        """Marks the positions that lie in the part, bool."""
        return (positions >= self.begin) & (positions < self.end)


WHOLE = Part(0.0, 1.0)
"""All samples."""


def cut(fractions: tuple[float, ...], *, seed: int = 0) -> tuple[Part, ...]:
    """Cuts a stream into disjoint parts."""
    check(seed >= 0, "seed", "an integer >= 0", seed)
    check(
        bool(fractions) and all(fraction > 0 for fraction in fractions),
        "fractions",
        "> 0",
        fractions,
    )
    total = math.fsum(fractions)
    check(total <= 1 + 1e-9, "fractions", "a sum of at most 1", total)
    ends = [math.fsum(fractions[: place + 1]) for place in range(len(fractions))]
    # Rounding must not leave the last samples without a part.
    ends = [1.0 if abs(end - 1) < 1e-9 else end for end in ends]
    return tuple(Part(begin, end, seed) for begin, end in zip([0.0, *ends[:-1]], ends, strict=True))
