"""Numbers at the head of a page."""

from __future__ import annotations

from dataclasses import dataclass

from dnis_torchrec.report.tables import format_metric


@dataclass(frozen=True, kw_only=True)
class KeyNumber:
    """One number at the head of a page.

    Attributes:
        label: what it is.
        value: the number as it is printed.
        detail: what it is compared with, one short line.
        tone: ``"better"``, ``"worse"`` or ``""``.
    """

    label: str
    value: str
    detail: str
    tone: str = ""


def compared_number(label: str, change: float, detail: str, *, higher_is_better: bool) -> KeyNumber:
    """The number that says how much better or worse a result is than another.

    Args:
        label: what it is compared with.
        change: of the metric, the result's minus the other's.
        detail: of the other.
        higher_is_better: direction of the metric.

    Example:
        >>> compared_number("vs uncompressed", -0.01, "0.8000", higher_is_better=True).value
        '0.0100 worse'
    """
    size = format_metric(abs(change))
    if float(size) == 0:
        return KeyNumber(label=label, value="equal", detail=detail)
    tone = "better" if (change > 0) == higher_is_better else "worse"
    return KeyNumber(label=label, value=f"{size} {tone}", detail=detail, tone=tone)
