"""What all ranks have to agree on before the next collective, so that an error on one of them leaves nobody waiting.

Everything here works without a process group too, for a process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

_ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, NotImplementedError, RuntimeError, OSError)


def rank_of(process_group: dist.ProcessGroup | None = None) -> int:
    """This process's number in a group: 0 without one.

    Args:
        process_group: the group; None for that of all processes.
    """
    return dist.get_rank(process_group) if dist.is_initialized() else 0


def world_size_of(process_group: dist.ProcessGroup | None = None) -> int:
    """How many processes a group has: 1 without one.

    Args:
        process_group: the group; None for that of all processes.
    """
    return dist.get_world_size(process_group) if dist.is_initialized() else 1


@contextmanager
def together(process_group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Either all ranks come out of the block, or all raise: those without an error of their own raise the first other.

    Distributed: one all_gather_object of a short string, where there are several ranks.

    Args:
        process_group: of all ranks that enter the block.

    Example:
        >>> with together():
        ...     answer = 42
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    kind = next((k for k in _ERRORS if isinstance(error, k)), RuntimeError)
    own = None if error is None else (_ERRORS.index(kind), str(error))
    found = [own]
    if world_size_of(process_group) > 1:
        found = [None] * world_size_of(process_group)
        dist.all_gather_object(found, own, group=process_group)
    if error is not None:
        raise error
    for rank, other in enumerate(found):
        if other is not None:
            raise _ERRORS[other[0]](f"rank {rank}: {other[1]}")


def on_rank_zero(action: Callable[[], T], process_group: dist.ProcessGroup | None = None) -> T:
    """Runs something on rank 0 alone, and gives its result, or its error, to all ranks.

    Distributed: one all_gather_object and one broadcast, where there are several ranks.

    Args:
        action: returns something small.
        process_group: of all ranks that call this.

    Example:
        >>> on_rank_zero(lambda: 42)
        42
    """
    box: list[T | None] = [None]
    with together(process_group):
        if rank_of(process_group) == 0:
            box[0] = action()
    if world_size_of(process_group) > 1:
        dist.broadcast_object_list(box, group=process_group, group_src=0)
    return box[0]  # type: ignore[return-value]


def union_over_ranks(own: Mapping[str, T], process_group: dist.ProcessGroup | None = None) -> dict[str, T]:
    """Entries of all ranks; of those that several have, the first one's. One all_gather_object.

    Args:
        own: something small.
        process_group: of all ranks that call this.

    Example:
        >>> union_over_ranks({"table": (40, 8)})
        {'table': (40, 8)}
    """
    found: list[Mapping[str, T]] = [own]
    if world_size_of(process_group) > 1:
        found = [{}] * world_size_of(process_group)
        dist.all_gather_object(found, own, group=process_group)
    return {key: value for part in reversed(found) for key, value in part.items()}
