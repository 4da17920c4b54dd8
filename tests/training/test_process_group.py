"""The ranks of a launcher find each other, whichever launcher it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from dnis_torchrec.training.process_group import launched_ranks, process_group


@pytest.mark.parametrize("group", [process_group, launched_ranks])
def test_a_rank_without_torchrun_looks_for_the_others_too(
    group: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mpirun and srun start ranks: one that took itself for the only process would do the work of all of them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="environment variable RANK expected"), group():
        pass
