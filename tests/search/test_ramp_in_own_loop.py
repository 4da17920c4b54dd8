"""A ramp in a loop of one's own, which asks it after every step of either level."""

from __future__ import annotations

from typing import Any

import pytest

from dnis_torchrec.search.ramp import STAGES, Ramp, num_stages
from tests.small_models import blocks


@pytest.mark.parametrize("steps", [3, 40, 100, 1000])
def test_every_stage_comes_once_and_none_before_the_ramp_or_after_it(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[int] = []
    monkeypatch.setattr(Ramp, "_narrow", lambda _, *stage: stages.append(stage))
    nothing: Any = None
    ramp = Ramp(nothing, nothing, blocks(), nothing, 20.0)
    for done in range(-30, steps + 30):
        ramp.follow(done, steps)  # behind a lower step
        ramp.follow(done, steps)  # and behind the upper step after it
    assert stages == [(stage + 1, num_stages(steps)) for stage in range(num_stages(steps))]
    assert num_stages(steps) <= STAGES
