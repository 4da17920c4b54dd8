"""Breakdown of a training step, from a profile: copy, input_dist, lookup, selection, dense layers, optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.profiler import record_function
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from dnis_torchrec.selection.alpha import WatchedOutputs

STEPS = ("plain", "lower", "upper")
PART_OF = (
    ("_SelectPiecesBackward", "select"),
    ("_SelectPackedBackward", "select"),
    ("select_pooled", "select"),
    ("select_sparse", "select"),
    ("find_pieces", "select"),
    ("gather_ids", "select"),
    ("alpha_step", "optimizer"),
    ("LookupFunction", "lookup"),
    ("embedding_lookup", "lookup"),
    ("autograd::engine::evaluate_function", "backward"),
    ("## copy_batch_to_gpu", "copy"),
    ("sparse_data_dist", "input_dist"),
    ("## forward", "dense_forward"),
    ("## backward", "backward"),
    ("## optimizer", "optimizer"),
    ("## zero_grad", "optimizer"),
)
"""Text that a profiled name begins with or contains, and the part of a step to which it and all inside it belong."""

PARTS = (*dict.fromkeys(part for _, part in PART_OF), "other")


def part_of(names: Iterable[str]) -> str:
    """Part of a step that an event belongs to.

    A backward pass runs inside `## forward` in an upper step, so the innermost name that says something decides.
    The lookup's part holds its backward with the fused table optimizer too."""
    known = (part for name in names for pattern, part in PART_OF if pattern in name)
    return next(known, "other")


def breakdown(events: Iterable[Any]) -> dict[str, dict[str, float]]:
    """Step -> part -> its time as a share of the plain step; the parts of a step add up to it."""
    times: dict[str, dict[str, float]] = {name: defaultdict(float) for name in STEPS}
    for event in events:
        around, names = event, []
        while around is not None:
            names.append(around.name)
            around = around.cpu_parent
        if names[-1].startswith("step "):
            times[names[-1].removeprefix("step ")][part_of(names)] += event.self_cpu_time_total
    whole = sum(times["plain"].values())
    return {name: {part: round(own[part] / whole, 3) for part in PARTS} for name, own in times.items()}


def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, seen by the profiler under a name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return call


def record_modules(model: nn.Module) -> None:
    """Lets the profiler see lookup and soft selection, inside the pipeline's own `## forward`."""
    for module in model.modules():
        if isinstance(module, WatchedOutputs | ShardedEmbeddingBagCollection):
            name = "select_pooled" if isinstance(module, WatchedOutputs) else "embedding_lookup"
            record_module(module, name)


def record_module(module: nn.Module, name: str) -> None:
    """Puts a module's forward under a name; by hooks, because a pipeline has put its own `forward` in place."""
    running: list[record_function] = []

    def begin(*_: Any) -> None:
        running.append(record_function(name))
        running[-1].__enter__()

    def end(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)
