"""The results of compressing a trained model: a row for the model as it was, and one per size.
Plain frozen values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import UNCOMPRESSED, json_text
from dnis_torchrec.report.provenance import PROVENANCE, Step

COMPRESS = "compress"
"""Method of the rows that `dnis compress` makes."""


@dataclass(frozen=True, kw_only=True)
class CompressionRow:
    """One model as it is served."""

    method: str
    compression: float
    bytes: int
    metrics: dict[str, float]
    selection: dict[str, float]
    predicted_loss_increase: float
    seed: int
    seconds: float
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class CompressionContent:
    """All sizes of one model."""

    recipe: str
    rows: tuple[CompressionRow, ...]
    primary_metric: str
    higher_is_better: bool
    num_samples: int
    relative_error: float
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    provenance: tuple[Step, ...] = ()
    configuration: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        methods = [row.method for row in self.rows]
        fits = methods[:1] == [UNCOMPRESSED] and UNCOMPRESSED not in methods[1:]
        check(fits, "CompressionContent.rows", "the uncompressed model, then others", methods)

    @property
    def uncompressed(self) -> CompressionRow:
        """The model as it was."""
        return self.rows[0]

    @property
    def compressed(self) -> tuple[CompressionRow, ...]:
        """Those of `COMPRESS`, smallest compression first."""
        compressed = [row for row in self.rows if row.method == COMPRESS]
        return tuple(sorted(compressed, key=lambda row: row.compression))

    @property
    def compared(self) -> tuple[CompressionRow, ...]:
        """What they are compared with, beside the model as it was."""
        return tuple(row for row in self.rows if row.method not in (UNCOMPRESSED, COMPRESS))

    def loss_increase(self, row: CompressionRow, split: str = "metrics") -> float:
        """How much loss a row was measured to cost."""
        return float(getattr(row, split)["loss"] - getattr(self.uncompressed, split)["loss"])

    def to_json(self) -> dict[str, Any]:
        """As compress.json holds it; an error that could not be estimated is null."""
        content = asdict(self) | {
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }
        content |= {
            "doubts": list(self.doubts),
            PROVENANCE: [step.to_json() for step in self.provenance],
        }
        content["relative_error"] = (
            self.relative_error if self.relative_error < float("inf") else None
        )
        json_text(content, "CompressionContent")
        return content
