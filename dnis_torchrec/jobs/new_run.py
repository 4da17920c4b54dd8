"""A run that is written at once, by all ranks that hold its model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.ranks import on_rank_zero, together, world_size_of
from dnis_torchrec.selection.swap import unshard_


@contextmanager
def new_run(out: Path, *, overwrite: bool = False) -> Iterator[RunFolder]:
    """`RunFolder.whole` of rank 0, for all ranks to fill; it appears when all of them have, and all
    wait for that."""
    with ExitStack() as stack:

        def make() -> str:
            return str(stack.enter_context(RunFolder.whole(out, overwrite=overwrite)).path)

        yield RunFolder(Path(on_rank_zero(make)))
        with together():
            stack.close()


def task_of_trained(model: nn.Module) -> TrainTask:
    """The task around a trained model: plain on one process, with its collections sharded still on
    several ranks."""
    return cast(TrainTask, get_unwrapped_module(model) if world_size_of() > 1 else unshard_(model))
