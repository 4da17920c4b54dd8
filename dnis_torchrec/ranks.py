"""Ranks: what all have to agree on before the next collective, so that an error on one of them
leaves nobody waiting, and exact sums over them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

_T = TypeVar("_T")

_ERRORS = (ValueError, TypeError, NotImplementedError, RuntimeError, OSError)


def rank_of(process_group: dist.ProcessGroup | None = None) -> int:
    """This process's number in a group: 0 without one."""
    return dist.get_rank(process_group) if dist.is_initialized() else 0


def world_size_of(process_group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of processes in a group: 1 where torch.distributed is not initialised."""
    return dist.get_world_size(process_group) if dist.is_initialized() else 1


@contextmanager
def together(process_group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """All ranks come out of the block, or all raise: their own error, or the first other."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    kind = next((k for k in _ERRORS if isinstance(error, k)), RuntimeError)
    local = None if error is None else (_ERRORS.index(kind), str(error))
    of_ranks = _gather_objects(local, process_group)
    if error is not None:
        raise error
    for rank, other in enumerate(of_ranks):
        if other is not None:
            raise _ERRORS[other[0]](f"rank {rank}: {other[1]}")


def _gather_objects(local: _T, process_group: dist.ProcessGroup | None) -> list[_T]:
    """What every rank has, in their order: one all_gather_object."""
    of_ranks = [local] * world_size_of(process_group)
    if len(of_ranks) > 1:
        dist.all_gather_object(of_ranks, local, group=process_group)
    return of_ranks


def progress_bar(steps: Iterable[Any] | None, words: str, **more: Any) -> Any:
    """Wraps steps in a progress bar with the time left, which rank 0 alone shows."""
    disable = None if rank_of() == 0 else True  # None: where standard error is no terminal
    return tqdm(steps, words, dynamic_ncols=True, leave=False, disable=disable, **more)


def on_rank_zero(action: Callable[[], _T], process_group: dist.ProcessGroup | None = None) -> _T:
    """Runs something on rank 0 alone, and gives its result, or its error, to all ranks."""
    result: Any = None
    with together(process_group):
        if rank_of(process_group) == 0:
            result = action()
    return cast(_T, _gather_objects(result, process_group)[0])


def union_over_ranks(
    local: Mapping[str, _T], process_group: dist.ProcessGroup | None = None
) -> dict[str, _T]:
    """Entries of all ranks; of those that several have, the first one's. One all_gather_object."""
    of_ranks = _gather_objects(local, process_group)
    return {key: value for of_rank in reversed(of_ranks) for key, value in of_rank.items()}


VALUES_PER_COLLECTIVE = 1 << 22
"""Values that one collective carries: bounds what has to be copied to a GPU for it."""


class Ranks:
    """The ranks that hold the shards of one model together, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)

    @staticmethod
    def everyone() -> Ranks:
        """All processes of the run, or this one alone without a process group."""
        return Ranks(dist.group.WORLD if world_size_of() > 1 else None)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks and writes for all."""
        return self.rank == 0

    def together(self) -> AbstractContextManager[None]:
        """`together` of these ranks; this process alone has nobody to agree with."""
        return nullcontext() if self.world_size == 1 else together(self.group)

    def share(self, count: int) -> tuple[int, int]:
        """The W-th part of ``0 .. count - 1`` for this rank: its begin and end."""
        return count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size

    def sum_(self, values: Tensor) -> Tensor:
        """Adds up integers over ranks, in place: an all_reduce for `VALUES_PER_COLLECTIVE` each."""
        return self._reduce_(values, dist.ReduceOp.SUM)

    def max_(self, values: Tensor) -> Tensor:
        """Takes the maximum of every value over ranks, in place, likewise."""
        return self._reduce_(values, dist.ReduceOp.MAX)

    def gather(self, local: _T) -> list[_T]:
        """Gives every rank what all ranks have, in their order: one all_gather_object."""
        return [local] if self.world_size == 1 else _gather_objects(local, self.group)

    def unlike_first(self, content: Iterable[Any]) -> list[int]:
        """The ranks that have other bytes than the first one. One all_gather_object."""
        if self.world_size == 1:
            return []
        digest = hashlib.sha256()
        for part in content:
            digest.update(part)
        digests = self.gather(digest.hexdigest())
        return [rank for rank, of_rank in enumerate(digests) if of_rank != digests[0]]

    def concatenate(self, values: Tensor) -> Tensor:
        """Gives every rank the values of all ranks, in their order: two all_gathers."""
        if self.world_size == 1:
            return values
        sizes = [int(size) for size in self._gather(torch.tensor([values.numel()]))]
        row = torch.zeros(max(*sizes, 1), dtype=values.dtype)
        row[: values.numel()] = values
        parts = zip(self._gather(row), sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def broadcast_(self, values: Tensor) -> Tensor:
        """Gives every rank the values of rank 0, in place: one broadcast."""
        if self.world_size > 1:
            copy = values.to(self._device())
            dist.broadcast(copy, group=self.group, group_src=0)
            values.copy_(copy)
        return values

    def _reduce_(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size > 1:
            for piece in values.view(-1).split(VALUES_PER_COLLECTIVE):
                copy = piece.to(self._device())
                dist.all_reduce(copy, operation, group=self.group)
                piece.copy_(copy)
        return values

    def _gather(self, values: Tensor) -> list[Tensor]:
        copy = values.to(self._device())
        parts = [torch.empty_like(copy) for _ in range(self.world_size)]
        dist.all_gather(parts, copy, group=self.group)
        return [part.cpu() for part in parts]

    def _device(self) -> torch.device:
        """Returns the device on which collectives of this group want their tensors."""
        on_gpu = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
