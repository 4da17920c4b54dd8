"""Settings of saving a run, in a module without torch: the command line builds its options from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dnis_torchrec.checks import check, check_known

ON_ERROR = ("stop", "continue")


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Settings by which a search saves itself. Whatever happens to a checkpoint, the last good one
    stays."""

    resume: Annotated[
        bool, "Go on with an interrupted run at --out; begin it if there is none."
    ] = False
    checkpoint_every: Annotated[int, "Lower steps between checkpoints; also after an epoch."] = 0
    keep_checkpoints: Annotated[int, "How many are kept, besides that of the best epoch."] = 2
    on_save_error: Annotated[str, "On a full disk, say: `stop` or `continue`."] = "stop"

    def __post_init__(self) -> None:
        every, keep = self.checkpoint_every, self.keep_checkpoints
        check(every >= 0, "checkpoint_every", "a number of steps >= 0", every)
        check(keep >= 1, "keep_checkpoints", "at least 1", keep)
        check_known("on_save_error", self.on_save_error, ON_ERROR)
