"""Findings of a verification: one line per thing that was checked."""

from __future__ import annotations

from dataclasses import dataclass

OK, FAILED, SKIPPED = "ok", "failed", "skipped"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: ``"checksums"``, ``"parity"``, ``"unknown ids"``, ``"run"``, ``"metric"`` or ``"memory"``.
        subject: a file, or a form and what it was tried on.
        status: ``"ok"``, ``"failed"`` or ``"skipped"``.
        detail: figures, or what is wrong, or why it was skipped.
    """

    check: str
    subject: str
    status: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether it makes the verification fail."""
        return self.status == FAILED


def judged(check: str, subject: str, good: bool, detail: str) -> Finding:
    """A finding that is ok or failed.

    Example:
        >>> judged("parity", "csr_fp32, empty bags", True, "off by 0").status
        'ok'
    """
    return Finding(check, subject, OK if good else FAILED, detail)
