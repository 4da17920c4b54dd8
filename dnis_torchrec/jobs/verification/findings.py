"""Findings of a verification: one line per thing that was checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from dnis_torchrec.ranks import Ranks, together

OK, FAILED, SKIPPED = "ok", "failed", "skipped"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    subject: str
    status: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether it makes the verification fail."""
        return self.status == FAILED


def judged(check: str, subject: str, good: bool, detail: str) -> Finding:
    """A finding that is ok or failed."""
    return Finding(check, subject, OK if good else FAILED, detail)


def found_by_ranks(checks: Sequence[Callable[[], list[Finding]]], ranks: Ranks) -> list[Finding]:
    """Findings of checks that are dealt out to ranks, in the order of the checks, the same on all
    ranks."""
    with together(ranks.group):
        own = {
            n: [asdict(found) for found in checks[n]()]
            for n in range(ranks.rank, len(checks), ranks.world_size)
        }
    of_all = {
        n: found
        for text in ranks.gather_texts(json.dumps(own))
        for n, found in json.loads(text).items()
    }
    return [Finding(**fields) for n in range(len(checks)) for fields in of_all[str(n)]]
