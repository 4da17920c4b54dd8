"""The process group of a run, as launchers start it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch.distributed as dist

from dnis_torchrec.training.shard import launched_ranks, process_group


@pytest.mark.parametrize("group", [process_group, launched_ranks])
def test_a_rank_without_torchrun_looks_for_the_others_too(
    group: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mpirun and srun start ranks: one that took itself for the only process would do the work of all of them."""

    def meet(backend: str, **of_its_own: Any) -> None:
        assert "store" not in of_its_own, "it would meet nobody"
        raise ConnectionError("nobody there yet")

    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # whatever ran before
    monkeypatch.setattr(dist, "init_process_group", meet)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConnectionError), group():
        pass
