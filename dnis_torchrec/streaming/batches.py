"""StreamedBatches: a part of a stream as TorchRec Batches, split over ranks and workers, resumable
at any batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.recipe import DataSplits
from dnis_torchrec.ranks import rank_of, world_size_of
from dnis_torchrec.streaming.access import local_path
from dnis_torchrec.streaming.epochs import EpochOrder
from dnis_torchrec.streaming.parsed import ParsedStream
from dnis_torchrec.streaming.parsing import ParsedChunk
from dnis_torchrec.streaming.split import WHOLE, Part, cut

WINDOW_SAMPLES = 1 << 17
"""Samples that are shuffled together unless told otherwise: more no longer fit a CPU's cache, and
are read slower."""
SPLIT_FRACTIONS = (0.8, 0.05, 0.05, 0.1)
"""train, validation, selection, test."""

Window = dict[str, Tensor]

logger = logging.getLogger(__name__)


class StreamedBatches:
    """Batches of one part of a stream, to be iterated again and again: each time is the next epoch."""

    is_split_over_ranks = True
    """Told to `dnis_torchrec.data.over_ranks`, which would split it again otherwise."""

    def __init__(
        self,
        stream: ParsedStream,
        *,
        batch_size: int,
        part: Part = WHOLE,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        window_batches: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check(num_workers >= 0, "num_workers", "an integer >= 0", num_workers)
        self._stream, self._part = stream, part
        self._rank, self._world_size = rank, world_size
        self._any_order = EpochOrder(
            chunk_samples=samples_per_chunk(stream, part),
            batch_size=batch_size,
            rank=0,
            world_size=1,
            drop_last=drop_last,
            shuffle=shuffle,
            window_batches=max(1, WINDOW_SAMPLES // max(1, batch_size))
            if window_batches is None
            else window_batches,
            seed=seed,
            place="stream"
            if part == WHOLE
            else f"part {part.begin:g} to {part.end:g} of the stream",
        )
        self._num_workers, self._pin_memory = num_workers, pin_memory
        _ = self._order  # refuses too few samples now
        self.is_split_over_ranks = True
        # (epoch, batch): behind the last batch handed out, and where the next iteration begins.
        self._position = self._next = (0, 0)

    @property
    def _order(self) -> EpochOrder:
        """The order for this rank; recipes make their batches before there is a process group."""
        rank = rank_of() if self._rank is None else self._rank
        world_size = world_size_of() if self._world_size is None else self._world_size
        return replace(self._any_order, rank=rank, world_size=world_size)

    @property
    def epoch(self) -> int:
        """Number of the next epoch, from 0; set it to resume at the beginning of one."""
        return self._next[0]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch."""
        check(epoch >= 0, "stream's epoch", "an integer >= 0", epoch)
        self._position = self._next = (epoch, 0)

    @property
    def num_samples(self) -> int:
        """Samples of the part, on all ranks together."""
        return self._order.num_samples

    def __len__(self) -> int:
        """Batches of an epoch on this rank, the same number on every rank."""
        return self._order.num_batches

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = self._position = self._next
        self._next = (epoch + 1, 0)
        return self._batches(epoch, first)

    def counted(self) -> Iterator[Batch]:
        """Every sample of the part once, over all ranks, in file order; the position stays where it
        is."""
        whole = copy(self)
        whole._any_order = replace(self._any_order, drop_last=False, shuffle=False)
        return whole._batches(0, 0)

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        order, number = self._order, first
        first_window, skipped = divmod(first, order.window_batches)
        windows = _Windows(self._stream, self._part, order, epoch, first_window)
        for window, tensors in enumerate(self._loaded(windows), start=first_window):
            bounds = order.window_bounds(window).tolist()
            for begin, end in list(pairwise(bounds))[skipped:]:
                batch = self._batch(tensors, tensors["order"][begin:end])
                number += 1
                # Before the yield: whoever has the batch finds the position behind it.
                self._position = (epoch, number) if number < order.num_batches else (epoch + 1, 0)
                yield batch.pin_memory() if self._pin_memory else batch
            skipped = 0

    def _loaded(self, windows: _Windows) -> Iterator[Window]:
        if not self._num_workers:
            return iter(windows)
        # Clients of storage have threads, which do not survive a fork.
        is_local = all(local_path(file) is not None for file in self._stream.index.files)
        return iter(
            DataLoader(
                windows,
                batch_size=None,
                num_workers=self._num_workers,
                multiprocessing_context=None if is_local else "spawn",
            )
        )

    def _batch(self, window: Window, rows: Tensor) -> Batch:
        batch_size, schema = rows.numel(), self._stream.schema
        num_single = len(schema.single_id)
        values = [window["ids"].index_select(1, rows).reshape(-1)]
        lengths = [torch.ones(num_single * batch_size, dtype=torch.int64)]
        for feature in schema.multi_hot:
            offsets = window[f"offsets/{feature}"]
            bag_values, bag_lengths = _select_bags(window[f"values/{feature}"], offsets, rows)
            values.append(bag_values)
            lengths.append(bag_lengths)
        features = KeyedJaggedTensor(
            keys=list(schema.num_embeddings),
            values=_joined(values).long(),
            lengths=_joined(lengths),
            stride=batch_size,
            length_per_key=[batch_size] * num_single + [part.numel() for part in values[1:]],
        )
        return Batch(
            window["dense"].index_select(0, rows), features, window["labels"].index_select(0, rows)
        )

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was handed out, and what it is a position in;
        plain numbers and text."""
        order = self._order
        return {
            "epoch": self._position[0],
            "batch": self._position[1],
            "num_batches": len(self),
            "layout": self._stream.layout,
            "part": [self._part.begin, self._part.end, self._part.seed],
            "batch_size": order.batch_size,
            "world_size": order.world_size,
            "window_batches": order.window_batches,
            "drop_last": order.drop_last,
            "shuffle": order.shuffle,
            "seed": order.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position: the next iteration begins with the batch that would have been handed
        out next."""
        own = self.state_dict()
        for name in sorted(set(own) - {"epoch", "batch", "num_batches", "world_size"}):
            remedy = "resume with the data and settings of the checkpoint"
            check(
                state.get(name) == own[name],
                f"stream's {name}",
                f"{own[name]}",
                state.get(name),
                remedy,
            )
        epoch, batch = int(state["epoch"]), int(state["batch"])
        check(epoch >= 0, "stream's epoch", "an integer >= 0", epoch)
        check(
            0 <= batch < state["num_batches"],
            "stream's batch",
            f"0..{state['num_batches'] - 1}",
            batch,
        )
        if state["world_size"] != own["world_size"] and batch:
            batch = batch * len(self) // state["num_batches"]
            remedy = f"going on at batch {batch} of {len(self)}: some samples come twice or not at all in this epoch"
            place, received = f"stream's position in epoch {epoch}", f"one of {state['world_size']}"
            logger.warning(describe(place, f"one of {own['world_size']} ranks", received, remedy))
        self._position = self._next = (epoch, batch)


class _Windows(IterableDataset[Window]):
    """The windows of one epoch on one rank from `first` on; worker w of K makes each K-th,
    beginning with the w-th."""

    def __init__(
        self, stream: ParsedStream, part: Part, order: EpochOrder, epoch: int, first: int
    ) -> None:
        self._stream, self._part, self._order, self._epoch, self._first = (
            stream,
            part,
            order,
            epoch,
            first,
        )

    def __iter__(self) -> Iterator[Window]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for window in range(self._first + first, self._order.num_windows, step):
            made = self._window(window)
            yield (
                made if worker is None else {name: _owned(tensor) for name, tensor in made.items()}
            )

    def _window(self, window: int) -> Window:
        pieces = [self._piece(*piece) for piece in self._order.pieces(self._epoch, window)]
        joined = {
            "dense": _joined([piece.dense for piece in pieces]),
            "ids": _joined([piece.ids for piece in pieces], dim=1),
            "labels": _joined([piece.labels for piece in pieces]),
            "order": torch.from_numpy(self._order.permutation(self._epoch, window)),
        }
        for feature in self._stream.schema.multi_hot:
            values, offsets = zip(*(piece.bags[feature] for piece in pieces), strict=True)
            lengths = torch.cat([part.diff() for part in offsets])
            joined[f"values/{feature}"] = _joined(values)
            joined[f"offsets/{feature}"] = torch.cat(
                [torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]
            )
        return joined

    def _piece(self, number: int, first: int, last: int) -> ParsedChunk:
        """Returns the part's samples in a chunk, from number first to before last."""
        chunk = self._stream.chunk(number)
        if self._part == WHOLE:
            return chunk.slice(first, last)
        inside = self._part.contains(self._stream.split_position(number, self._part.seed))
        rows = torch.from_numpy(np.flatnonzero(inside)[first:last])
        bags = {}
        for feature, (values, offsets) in chunk.bags.items():
            selected, lengths = _select_bags(values, offsets, rows)
            bags[feature] = (
                selected,
                torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            )
        dense, labels = chunk.dense.index_select(0, rows), chunk.labels.index_select(0, rows)
        return ParsedChunk(dense, chunk.ids.index_select(1, rows), labels, bags, None)


def samples_per_chunk(stream: ParsedStream, part: Part) -> np.ndarray:
    """Counts the samples of a part in each chunk."""
    if part == WHOLE:
        return np.diff(stream.index.offsets)
    chunks = range(len(stream.index.chunks))
    counts = [
        np.count_nonzero(part.contains(stream.split_position(number, part.seed)))
        for number in chunks
    ]
    return np.array(counts, dtype=np.int64)


def split_stream(
    stream: ParsedStream,
    *,
    batch_size: int,
    seed: int,
    fractions: tuple[float, float, float, float] = SPLIT_FRACTIONS,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataSplits:
    """The four disjoint parts of a search, all split off one stream."""
    learning = {"shuffle": True, "drop_last": True}
    judging = {"shuffle": False, "drop_last": False}
    train, validation, selection, test = (
        StreamedBatches(
            stream,
            part=part,
            batch_size=batch_size,
            seed=seed,
            num_workers=num_workers,
            pin_memory=pin_memory,
            **settings,
        )
        for part, settings in zip(
            cut(fractions, seed=seed), (learning, learning, judging, judging), strict=True
        )
    )
    return DataSplits(train=train, validation=validation, selection=selection, test=test)


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The parts one after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _owned(tensor: Tensor) -> Tensor:
    """The tensor with memory of its own: a worker sends all of the memory that a tensor is a part
    of."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _select_bags(values: Tensor, offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(values, lengths) of the bags of some samples."""
    starts = offsets.index_select(0, rows)
    lengths = offsets.index_select(0, rows + 1) - starts
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    shift = torch.repeat_interleave(starts - ends + lengths, lengths, output_size=total)
    return values.index_select(0, shift + torch.arange(total)), lengths
