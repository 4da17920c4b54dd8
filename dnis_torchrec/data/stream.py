"""A stream: batches that are read once, in the order of time, checked and counted on the way."""

import copy
import dataclasses
import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import FrequencyCounts, bags_of
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.batches import features_of, for_lookup, parts_of, slice_of
from dnis_torchrec.data.files import NotNegative, conform, parse_json
from dnis_torchrec.data.over_ranks import FINGERPRINTS, fingerprints_of
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import check_samples
from dnis_torchrec.ranks import Ranks, together, world_size_of

RECENT_SAMPLES = 1 << 16  # at most of the newest that a run keeps: a later compression needs them
_PLACE = "training stream"


class _State(TypedDict):
    """Where a checkpoint of a stream was taken, beside its tensors."""

    ranks: NotNegative
    batches: NotNegative
    samples: NotNegative
    longest: dict[str, NotNegative]
    recent: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    """What a step trains on: a rank's part of the last of some batches, which count as a whole."""

    part: Batch
    batches: Sequence[Batch]
    num_read: int
    source: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True, eq=False)
class StreamSummary:
    """What a run of a stream leaves beside its model."""

    counts: FrequencyCounts
    recent: Sequence[Batch]


class Stream(Iterator[Batch]):
    """This rank's parts of a recipe's stream. A batch counts once a step has trained on it."""

    # Every rank reads the stream and takes its slice of every batch; one that has
    # `is_split_over_ranks` gives each rank batches of its own. One reduction of four numbers each.

    def __init__(
        self,
        recipe: Recipe,
        tables: Sequence[EmbeddingBagConfig],
        *,
        steps: int | None = None,
        is_time_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source: Any = recipe.data
        self._iterator: Iterator[Batch] | None = None
        self._is_split = getattr(self._source, "is_split_over_ranks", False)
        # Of its own on the host: a GPU would be stopped.
        several = world_size_of() > 1
        self._ranks = Ranks(dist.new_group(backend="gloo") if several else None)
        self._task, self._tables = recipe.task, tables
        self._steps, self._is_time_over = steps, is_time_over
        self._num_given = self._num_read = 0
        self._pending: _Entry | None = None
        self._ahead = deque[_Entry]()  # given, not trained on yet
        self._latest: _Entry | None = None
        self._is_at_end = False
        self._counts = {t.name: torch.zeros(t.num_embeddings, dtype=torch.int64) for t in tables}
        self._longest, self._num_samples = Counter[str](), 0
        self._recent, self._num_recent = deque[Batch](), 0

    @property
    def owner(self) -> int:
        """The rank whose tensors a checkpoint holds for this one: the first, if all are equal."""
        return self._ranks.rank if self._is_split else 0

    @property
    def _num_owners(self) -> int:
        return self._ranks.world_size if self._is_split else 1

    @property
    def is_over(self) -> bool:
        """Whether all that it will ever give has been trained on."""
        return self._is_at_end and not self._ahead and self._pending is None

    def __next__(self) -> Batch:
        entry = self._next()
        if entry is None:
            raise StopIteration
        self._pending = None
        self._ahead.append(entry)
        self._num_given += 1
        return entry.part

    def peek(self) -> Batch | None:
        """The batch of the next step; None at the end."""
        entry = self._ahead[0] if self._ahead else self._next()
        return None if entry is None else entry.part

    def go_on(self, steps: int) -> None:
        """Gives batches up to another number of steps, once those asked for are over."""
        self._steps, self._is_at_end = steps, False

    def first_train_batch(self) -> Batch:
        """A batch to try things on; the stream gives it all the same."""
        batch = self.peek()
        check(batch is not None, _PLACE, "at least one batch", "none", "check the stream")
        return batch

    def settle(self) -> Batch:
        """Counts the batch that a step has just trained on, and returns this rank's part."""
        entry = self._latest = self._ahead.popleft()
        for batch in entry.batches:
            self._count(batch)
        return entry.part

    def _next(self) -> _Entry | None:
        """What is given next: read now, unless somebody has looked at it before."""
        is_last = self._steps is not None and self._num_given >= self._steps
        if self._pending is None and not self._is_at_end and not is_last:
            self._pending = self._read_entry()
        self._is_at_end |= self._pending is None
        return self._pending

    def _read_entry(self) -> _Entry | None:
        world_size, batches = self._ranks.world_size, list[Batch]()
        while (batch := self._read_together()) is not None:
            batches.append(batch)
            part, size = batch, len(batch.labels)
            if world_size > 1 and not self._is_split:
                share = size // world_size
                if not share:
                    continue  # it counts, but there is no sample of it for every rank
                first = share * self._ranks.rank
                part = slice_of(batch, first, first + share)
            has_state = hasattr(self._source, "state_dict")
            source = self._source.state_dict() if has_state else None
            return _Entry(for_lookup(part), batches, self._num_read, source)
        for batch in batches:
            self._count(batch)
        return None

    def _read_together(self) -> Batch | None:
        """The next batch, or on all ranks None; an error on one of them is one on all."""
        batch, error, number = None, None, 0
        try:
            if not self._is_time_over():
                batch = self._read()
            if batch is not None and self._ranks.world_size > 1 and not self._is_split:
                number = int(fingerprints_of(batch).sum() % FINGERPRINTS)
        except Exception as caught:
            error = caught
        facts = torch.tensor([error is not None, batch is None, number, -number], dtype=torch.int64)
        has_error, is_end, largest, smallest = self._ranks.max_(facts).tolist()
        if has_error:
            with together(self._ranks.group):
                if error is not None:
                    raise error
        if is_end:
            return None
        requirement = "the same batches in the same order on every rank"
        check(largest == -smallest, f"{_PLACE} batch {self._num_read - 1}", requirement, "others")
        return batch

    def _read(self) -> Batch | None:
        if self._iterator is None:
            self._iterator = iter(self._source)
        batch = next(self._iterator, None)
        if batch is None:
            check(self._num_read > 0, _PLACE, "at least one batch", "none", "check the stream")
            return None
        place = f"{_PLACE} batch {self._num_read}"
        check_samples(batch, self._task, place, has_metrics=True)
        self._ids_of(batch, place)
        self._num_read += 1
        return batch

    def _ids_of(self, batch: Batch, place: str) -> dict[str, dict[str, tuple[Tensor, int]]]:
        """Table -> feature -> ids and longest bag, checked."""
        bags = copy.copy(features_of(batch)).to_dict()  # the batch itself is left as it was
        return {table.name: bags_of(table, bags, place) for table in self._tables}

    def _count(self, batch: Batch) -> None:
        for table, features in self._ids_of(batch, _PLACE).items():
            for feature, (ids, longest) in features.items():
                self._counts[table].scatter_add_(0, ids, torch.ones_like(ids))
                self._longest[feature] = max(self._longest[feature], longest)
        size = len(batch.labels)
        self._num_samples += size
        self._recent.append(join_batches([batch]))  # a copy: workers share their memory
        self._num_recent += size
        limit = RECENT_SAMPLES // self._num_owners
        while (excess := self._num_recent - limit) > 0:
            oldest = self._recent.popleft()
            size = len(oldest.labels)
            if size > excess:
                self._recent.appendleft(slice_of(oldest, excess, size))
            self._num_recent -= min(size, excess)

    def summary(self, past: FrequencyCounts | None = None) -> StreamSummary:
        """What was read, the same on all ranks, with the counts of earlier days in front."""
        features = [feature for table in self._tables for feature in table.feature_names]
        counts, recent = dict(self._counts), [*self._recent]
        number = torch.tensor([self._num_samples])
        lengths = torch.tensor([self._longest[feature] for feature in features])
        if self._is_split:
            ranks = self._ranks
            counts = {name: ranks.sum_(of_rows.clone()) for name, of_rows in counts.items()}
            number, lengths = ranks.sum_(number), ranks.max_(lengths)
            parts = ranks.gather(batches_to_tensors(recent))
            recent = [batch for part in parts for batch in batches_of_tensors(*part)]
        if past is not None:
            counts = {name: of_rows + past.counts[name] for name, of_rows in counts.items()}
            past_lengths = torch.tensor([past.max_bag_lengths[feature] for feature in features])
            number, lengths = number + past.num_samples, torch.maximum(lengths, past_lengths)
        max_bag_lengths = dict(zip(features, lengths.tolist(), strict=True))
        return StreamSummary(FrequencyCounts(counts, max_bag_lengths, int(number)), recent)

    # What a checkpoint holds: all that was trained on, and where to read on.

    def state_dict(self, step: int) -> dict[str, Any]:
        """The position after the last step; of a source without a state, batches to skip."""
        recent = batches_to_tensors(self._recent)[1] if self._recent else None
        return {
            "ranks": self._num_owners,
            "batches": self._latest.num_read if self._latest is not None else 0,
            "samples": self._num_samples,
            "longest": dict(self._longest),
            "recent": recent,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the position, by name."""
        parts = {f"counts/{name}": of_rows for name, of_rows in self._counts.items()}
        if self._recent:
            tensors, _ = batches_to_tensors(self._recent)
            parts |= {f"recent/{name}": tensor for name, tensor in tensors.items()}
        if self._latest is not None and self._latest.source is not None:
            place = f"{_PLACE}, its state_dict"
            text = bytearray(_as_json(self._latest.source, place).encode())
            parts["source"] = torch.frombuffer(text, dtype=torch.uint8)
        return parts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the position; `load_tensors` goes there."""
        conform(state, _State, "stream of the checkpoint")
        requirement = f"one of {self._num_owners} ranks, as the stream splits itself"
        check(state["ranks"] == self._num_owners, "checkpoint", requirement, state["ranks"])
        self._state = state

    def load_tensors(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Goes to where `tensors` and `state_dict` were taken, and reads on from there."""
        state = self._state
        for name in self._counts:
            self._counts[name].copy_(tensors[f"counts/{name}"])
        self._longest, self._num_samples = Counter(state["longest"]), state["samples"]
        if state["recent"] is not None:
            keys = [key for key in tensors if key.startswith("recent/")]
            parts = {key.removeprefix("recent/"): tensors[key] for key in keys}
            self._recent = deque(batches_of_tensors(parts, state["recent"]))
            self._num_recent = sum(len(batch.labels) for batch in self._recent)
        self._num_given, source = step, tensors.get("source")
        if source is not None and hasattr(self._source, "load_state_dict"):
            content = source.numpy().tobytes()
            parse_json(content, dict[str, Any], f"{_PLACE} of the checkpoint")
            self._source.load_state_dict(json.loads(content, object_hook=_tensor_or_dict))
            self._iterator, self._pending, self._num_read = None, None, state["batches"]
            return
        first, self._pending = self._pending, None
        self._num_read = 0 if first is None else first.num_read
        while self._num_read < state["batches"]:
            requirement = f"at least {state['batches']} batches, as before the interruption"
            remedy = "resume with the stream of the run"
            has_batch = self._read() is not None
            check(has_batch, _PLACE, requirement, self._num_read, remedy)

    def leave(self) -> None:
        """Nothing: what was read is read."""


# The state of a source as JSON: nothing is unpickled

_TENSOR = "dnis_torchrec.tensor"


def _as_json(state: Mapping[str, Any], place: str) -> str:
    """The text of a state of plain values and tensors."""

    def of_other(value: object) -> Any:
        if isinstance(value, Tensor):
            return {_TENSOR: [str(value.dtype).removeprefix("torch."), value.tolist()]}
        remedy = "give the source a state_dict of numbers, texts, lists, dicts and tensors"
        raise TypeError(describe(place, "plain values and tensors", type(value).__name__, remedy))

    return json.dumps(state, default=of_other)


def _tensor_or_dict(value: dict[str, Any]) -> Any:
    """What an object of that JSON stands for."""
    if [*value] != [_TENSOR]:
        return value
    kind, numbers = value[_TENSOR]
    return torch.tensor(numbers, dtype=getattr(torch, kind))


# Batches as tensors in a file


def join_batches(batches: Sequence[Batch]) -> Batch:
    """The samples of some batches in one, in memory of their own."""
    parts: dict[str, Any] = {}
    for name, part in parts_of(batches[0]).items():
        of_all = [getattr(batch, name) for batch in batches]
        if isinstance(part, Tensor):
            parts[name] = torch.cat(of_all)
        elif isinstance(part, KeyedJaggedTensor):
            parts[name] = _join_features(of_all)
    return dataclasses.replace(batches[0], **parts)


def _join_features(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    keys, by_key = parts[0].keys(), [copy.copy(part).to_dict() for part in parts]
    bags = [features[key] for key in keys for features in by_key]
    is_weighted = parts[0].weights_or_none() is not None
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([bag.values() for bag in bags]),
        weights=torch.cat([bag.weights() for bag in bags]) if is_weighted else None,
        lengths=torch.cat([bag.lengths() for bag in bags]),
        stride=sum(part.stride() for part in parts),
    )


class _Form(TypedDict):
    """What tensors of batches do not say: their class, and the keys of their features."""

    kind: str
    keys: dict[str, list[str]]


def batches_to_tensors(batches: Sequence[Batch]) -> tuple[dict[str, Tensor], str]:
    """Batches of one form as tensors, and the form as JSON; `batches_of_tensors` is the inverse."""
    whole, kind = join_batches([*batches]), type(batches[0])
    form: _Form = {"kind": f"{kind.__module__}:{kind.__qualname__}", "keys": {}}
    tensors = {"sizes": torch.tensor([len(batch.labels) for batch in batches])}
    for name, part in parts_of(whole).items():
        if isinstance(part, Tensor):
            tensors[f"of/{name}"] = part
        elif isinstance(part, KeyedJaggedTensor):
            form["keys"][name] = [*part.keys()]
            tensors |= {f"values/{name}": part.values(), f"lengths/{name}": part.lengths()}
            if part.weights_or_none() is not None:
                tensors[f"weights/{name}"] = part.weights()
    return tensors, json.dumps(form)


def batches_of_tensors(tensors: Mapping[str, Tensor], text: str) -> list[Batch]:
    """The batches; their class is one that the recipe has imported already."""
    place = "batches of the run"
    form: _Form = parse_json(text.encode(), _Form, place)
    module, _, name = form["kind"].partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    is_fit = isinstance(kind, type) and dataclasses.is_dataclass(kind)
    check(is_fit, place, f"class {form['kind']} of the recipe", "none", "name the run's recipe")
    sizes = tensors["sizes"].tolist()
    names = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    parts: dict[str, Any] = {name: tensors.get(f"of/{name}") for name in names}
    for name in form["keys"].keys() & parts:
        parts[name] = KeyedJaggedTensor(
            keys=form["keys"][name],
            values=tensors.get(f"values/{name}", torch.zeros(0, dtype=torch.int64)),
            weights=tensors.get(f"weights/{name}"),
            lengths=tensors[f"lengths/{name}"],
            stride=sum(sizes),
        )
    whole = kind(**parts)  # type: ignore[misc]
    return [slice_of(whole, *span) for span in pairwise(accumulate(sizes, initial=0))]
