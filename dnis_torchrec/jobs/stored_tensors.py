"""Tensors in files, read as far as they are asked for: of a table, a rank reads its own shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.checks import check

Cut = Callable[[tuple[slice, ...]], Tensor]
"""Gives a part of a chunk: ``cut((slice(2, 4), slice(0, 8)))``."""
VALUES_AT_A_TIME = 1 << 20
"""Values, roughly, that are cut out at a time."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor."""

    first: tuple[int, ...]
    shape: tuple[int, ...]
    open: Callable[[], Cut]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files."""

    place: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @classmethod
    def of(cls, place: str, tensor: Tensor) -> StoredTensor:
        """A tensor that is there as a whole, mapped from its file or not."""
        shape = tuple(tensor.shape)
        return cls(
            place, shape, (StoredChunk((0,) * len(shape), shape, lambda: tensor.__getitem__),)
        )

    def copy_to_(self, target: Tensor, first: Sequence[int] | None = None) -> None:
        """Copies the part of the tensor that is as large as `target`. Local; no more than that part
        is read."""
        begin, copied = tuple(first or (0,) * len(self.shape)), 0
        for chunk in self.chunks:
            low = [
                max(of_part, of_chunk) for of_part, of_chunk in zip(begin, chunk.first, strict=True)
            ]
            ends = zip(begin, target.shape, chunk.first, chunk.shape, strict=True)
            high = [min(at + extent, of_chunk + size) for at, extent, of_chunk, size in ends]
            if all(start < stop for start, stop in zip(low, high, strict=True)):
                cut = chunk.open()
                for span in _in_pieces(low, high):
                    part = target[_within(span, begin)]
                    part.copy_(cut(_within(span, chunk.first)))
                    copied += part.numel()
        check(
            copied == target.numel(),
            self.place,
            f"chunks of {target.numel()} values",
            copied,
            "copy all files of it",
        )

    def rows(self, first: int, last: int) -> Tensor:
        """Rows ``first <= i < last``, and no more of it is read; mapped from their file where that
        is one chunk's."""
        return self._part((slice(first, last), *self._everything[1:]))

    def whole(self) -> Tensor:
        """The whole tensor; mapped from its file where that holds it in one chunk."""
        return self._part(self._everything)

    @property
    def _everything(self) -> tuple[slice, ...]:
        return tuple(slice(0, size) for size in self.shape)

    def _part(self, places: tuple[slice, ...]) -> Tensor:
        check(bool(self.chunks), self.place, "chunks of it", "none", "copy all files of it")
        cut = self.chunks[0].open()
        if self.chunks[0].shape == self.shape:
            return cut(places)
        dtype = cut((slice(0, 0),) * len(self.shape)).dtype
        target = torch.empty([place.stop - place.start for place in places], dtype=dtype)
        self.copy_to_(target, [place.start for place in places])
        return target


def _in_pieces(low: Sequence[int], high: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Cuts a part into pieces of consecutive rows; a number is a piece by itself."""
    spans = tuple(zip(low, high, strict=True))
    if not spans:
        return [()]
    (first, last), rest = spans[0], spans[1:]
    of_row = max(1, torch.Size([stop - start for start, stop in rest]).numel())
    step = max(1, VALUES_AT_A_TIME // of_row)
    return [((start, min(start + step, last)), *rest) for start in range(first, last, step)]


def _within(span: Sequence[tuple[int, int]], first: Sequence[int]) -> tuple[slice, ...]:
    """Places of a tensor as those of a part or chunk that begins at `first`."""
    return tuple(
        slice(start - at, stop - at) for (start, stop), at in zip(span, first, strict=True)
    )
