"""Numbers at the head of a page."""

from __future__ import annotations

from dataclasses import dataclass

from dnis_torchrec.report.tables import format_metric


@dataclass(frozen=True, kw_only=True)
class KeyNumber:
    """One number at the head of a page."""

    label: str
    value: str
    detail: str
    tone: str = ""


def compared_number(label: str, change: float, detail: str, *, higher_is_better: bool) -> KeyNumber:
    """The number that says how much better or worse a result is than another."""
    size = format_metric(abs(change))
    if float(size) == 0:
        return KeyNumber(label=label, value="equal", detail=detail)
    tone = "better" if (change > 0) == higher_is_better else "worse"
    return KeyNumber(label=label, value=f"{size} {tone}", detail=detail, tone=tone)
