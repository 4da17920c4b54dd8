"""Parts of one stream, split off online: a hash alone decides where a sample goes, not what was read before.

A sample's position in [0, 1) is a hash of its number in the stream or of a column's value (`StreamSchema.split_by`);
a part is an interval of positions. So parts are disjoint, the same on every rank, in every epoch and after a restart,
and nothing has to be kept about who is where. Each holds its fraction p of the n samples up to chance: within
``4 sqrt(p (1 - p) / n)`` of it but for one split in 16,000 (where a column decides, n is the number of its distinct
values, if each has as many samples).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dnis_torchrec.checks import check


@dataclass(frozen=True)
class Part:
    """An interval of positions.

    Attributes:
        begin: first position in it.
        end: first position after it.
        seed: of the hash; parts of one split share it.
    """

    begin: float
    end: float
    seed: int = 0

    def contains(self, positions: np.ndarray) -> np.ndarray:
        """Marks the positions that lie in the part, bool.

        Args:
            positions: ``(n,)`` in [0, 1), made with the part's seed.
        """
        return (positions >= self.begin) & (positions < self.end)


WHOLE = Part(0.0, 1.0)
"""All samples."""


def cut(fractions: tuple[float, ...], *, seed: int = 0) -> tuple[Part, ...]:
    """Cuts a stream into disjoint parts.

    Args:
        fractions: share of the samples of each part, in order; together at most 1. What is left is in no part.
        seed: of the hash: another seed is another split.

    Returns:
        One part per fraction.

    Raises:
        ValueError: if a fraction is not above 0 or they are more than everything.

    Example:
        >>> [(part.begin, part.end) for part in cut((0.5, 0.25, 0.25))]
        [(0.0, 0.5), (0.5, 0.75), (0.75, 1.0)]
    """
    check(seed >= 0, "seed", "an integer >= 0", seed)
    check(bool(fractions) and all(fraction > 0 for fraction in fractions), "fractions", "> 0", fractions)
    total = math.fsum(fractions)
    check(total <= 1 + 1e-9, "fractions", "a sum of at most 1", total)
    ends = [math.fsum(fractions[: place + 1]) for place in range(len(fractions))]
    # Rounding must not leave the last samples without a part.
    ends = [1.0 if abs(end - 1) < 1e-9 else end for end in ends]
    return tuple(Part(begin, end, seed) for begin, end in zip([0.0, *ends[:-1]], ends, strict=True))
