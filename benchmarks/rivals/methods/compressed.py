"""Post-training compression of the plainly trained model: bits for every column of every block, no
training step."""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.rivals.forms import CODES, PACKED
from benchmarks.rivals.methods.method import (
    MethodResult,
    MethodTask,
    SizeNotMetError,
    learns_on_validation,
    leaves_alone,
    served_in,
)
from benchmarks.rivals.methods.trained_scheme import row_blocks
from benchmarks.rivals.methods.uniform import uniform_candidate
from dnis_torchrec.allocation.compress import measure_


@learns_on_validation
@leaves_alone
@served_in(CODES.name)
def compressed(task: MethodTask) -> MethodResult:
    """The uncompressed model with its tables in codes, as `dnis_torchrec.compress` makes them;
    scales learn."""
    recipe, (counts, _) = task.build(None), row_blocks(task)
    dense = uniform_candidate(replace(task, precision="fp32"), None).train(task)
    started = time.monotonic()
    measured = measure_(
        dense.model.eval(),
        recipe.data.train,
        loss=recipe.task,
        counts=counts,
        held_out=recipe.data.validation,
        leave_alone=recipe.leave_alone,
    )
    try:
        found = measured.allocate(embedding_bytes=task.embedding_bytes())
    except ValueError as error:
        raise SizeNotMetError(str(error)) from error
    measured.shift_(found)
    seconds = dense.seconds + time.monotonic() - started
    return MethodResult(
        model=dense.model,
        scheme=found.scheme,
        form=PACKED.name,
        selection_loss=dense.selection_loss,
        seconds=seconds,
        seconds_of_trials=seconds,
        settings={"predicted_loss_increase": found.predicted_loss_increase},
    )
