r"""Gains: alpha of every table, block and column, solved on held-out samples.

    alpha_tsc = 1 + a_t + b_ts + d_tsc        of column c of block s of table t
    min over a, b, d, shift:
        mean L / phi + (|a|^2 + |b|^2) / (2 N tau_b^2) + |d|^2 / (2 N tau_c^2) + shift^2 / (2 N phi)

L is the loss of N samples that the model was not trained on, with its tables in codes and all dense
weights still; the shift moves its output bias; phi, the sum of L'^2 over that of L'', is 1 for a
calibrated logistic loss and twice the mean squared residual for a squared error. This is
hierarchical shrinkage (Gelman and Hill, "Data Analysis Using Regression and Multilevel/Hierarchical
Models", chapter 12). Each half of the samples judges what strengths tau the other half has taught;
some of the samples choose tau, all of them solve and judge the choice. If it is not ahead by more
than chance, there are no gains. Gains fold into scales: they take no byte.

# NOTE[DIFF] the paper learns alpha of every column by steps while the model trains; here it is the
# solution of one problem after training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation import contributions, curvature
from dnis_torchrec.allocation.bits import Prediction
from dnis_torchrec.allocation.energies import rows_in_codes, whole_rows
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.codes import is_coded
from dnis_torchrec.blocks.counts import bags_of
from dnis_torchrec.data.batches import features_of, slice_of
from dnis_torchrec.data.task import Outputs, Task
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import (
    collections,
    dense_state,
    frozen_tables_of,
    local_shards,
    ranks_of,
    table_configs_of,
)
from dnis_torchrec.selection.torchrec import read_by_name_
from dnis_torchrec.selection.torchrec_inputs import remap

ADDED, EVEN = 1.0, 1e-3
"""What is added to a number to see what it does, and how far outputs may move unevenly, over how
far they move."""


@dataclass(frozen=True, kw_only=True)
class OutputBias:
    """A parameter, or a buffer, of one number that adds the same to the output of every sample."""

    name: str
    gain: float

    @torch.no_grad()
    def shift_(self, model: nn.Module, shift: float) -> None:
        """Adds to the output. Local, the same on every rank."""
        dense_state(model)[self.name].add_(shift / self.gain)

    @contextmanager
    def shifted(self, model: nn.Module, shift: float) -> Iterator[None]:
        """The same within a block; afterwards the number is what it was, bit for bit."""
        number = dense_state(model)[self.name]  # shares its memory
        old = number.clone()
        try:
            self.shift_(model, shift)
            yield
        finally:
            with torch.no_grad():
                number.copy_(old)


def output_bias(
    model: nn.Module, batch: Batch, loss: curvature.Loss | Task, ranks: Ranks
) -> OutputBias | None:
    """Finds a model's output bias: adds to each single number, and looks at a batch."""
    old, _ = curvature.predictions_of(model, batch, loss, "batch 0", ranks)
    if old.shape[1] != 1:
        return None
    for name, value in dense_state(model).items():
        if value.numel() != 1 or not value.is_floating_point():
            continue
        with OutputBias(name=name, gain=1.0).shifted(model, ADDED):
            current, _ = curvature.predictions_of(model, batch, loss, "batch 0", ranks)
        change = (current - old).flatten().cpu()
        highest, lowest = ranks.max_(torch.stack([change.max(), -change.min()])).tolist()
        if highest + lowest <= EVEN * abs(highest) and highest:
            sums = torch.tensor([float(change.sum()), len(change)], dtype=torch.float64)
            total, count = ranks.sum_(sums).tolist()
            return OutputBias(name=name, gain=total / count / ADDED)
    return None


MOST_SAMPLES = 1 << 16
"""Held-out samples that are enough."""
LEAST_SAMPLES = 32
"""Fewer may all have one label, and teach a shift without end."""
SAMPLES_AT_A_TIME = 1 << 12
"""Larger batches are cut: bounds what a pass holds."""
BYTES_OF_PIECES = 1 << 30
"""Most memory for the pieces of all samples; fewer samples are taken where they do not fit."""
PARTS_OF_BATCH = 32
"""Parts of a batch whose losses tell a lead from chance."""
SAMPLES_FOR_STRENGTHS = 1 << 14
"""Samples that choose strengths; all samples then tell their lead from chance."""
SCATTER = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number; products with it have no order, so sums of ids choose batches as chance would."""
BLOCK_STRENGTHS, COLUMN_STRENGTHS = (0.0, 0.1, 0.3, 1.0), (0.03, 0.1)
"""Choices of tau_b, and of tau_c above 0, rising."""
MOST_ITERATIONS = 25
ENOUGH_NATS = 0.3
"""A solution is good enough once a step of L-BFGS takes less off the loss of all samples: chance
moves it by more."""
STILL = 1e12
"""Precision of a number that does not move."""
SMALLEST_GAIN, LARGEST_GAIN = 2.0**-6, 2.0**6
SHIFT_UNIT = 2.0**-16
"""What the shift is a multiple of."""


@dataclass(frozen=True, eq=False)
class Gains:
    """What held-out samples teach: alpha by table, ``(S, D)`` float64, how far outputs move, and
    the loss that each half of the samples has with what the other taught."""

    alpha: Mapping[str, Tensor]
    shift: float
    loss: float
    strengths: tuple[float, float]


def with_gains(scheme: MixedDimensionScheme, alpha: Mapping[str, Tensor]) -> MixedDimensionScheme:
    """The scheme with its scales multiplied."""
    tables = {
        name: table.with_codes(table.codes.with_gain(alpha[name].float()))
        for name, table in scheme.tables.items()
    }
    return MixedDimensionScheme(tables)


@dataclass(frozen=True, eq=False)
class _Sample:
    """A held-out batch of this rank, and what the model says of it before anything is rounded."""

    batch: Batch
    place: str
    predictions: Tensor
    at: curvature.LossDerivatives


@dataclass(frozen=True, eq=False)
class _Layout:
    """One vector: a and b of every table, the shift, and d of every table."""

    may_move: Mapping[str, Tensor]

    @property
    def num_of_blocks(self) -> int:
        """Numbers up to the shift, and with it."""
        return sum(1 + len(moves) for moves in self.may_move.values()) + 1

    @property
    def size(self) -> int:
        """Numbers in all."""
        return self.num_of_blocks + sum(moves.numel() for moves in self.may_move.values())

    def alpha(self, values: Tensor) -> dict[str, Tensor]:
        """Alpha of every table, ``(S, D)``; 1 where it may not move."""
        tables = self.may_move.values()
        of_blocks = values[: self.num_of_blocks - 1].split([1 + len(moves) for moves in tables])
        of_columns = values[self.num_of_blocks :].split([moves.numel() for moves in tables])
        result = {}
        for (name, moves), b, d in zip(self.may_move.items(), of_blocks, of_columns, strict=True):
            result[name] = 1 + moves * (b[0] + b[1:, None] + d.view(moves.shape))
        return result

    def shift(self, values: Tensor) -> Tensor:
        """The shift of the output bias."""
        return values[self.num_of_blocks - 1]

    def gradient(self, of_alpha: Mapping[str, Tensor], of_shift: Tensor) -> Tensor:
        """Turns the gradient by alpha into the gradient by this vector."""
        parts = [of_alpha[name] * moves for name, moves in self.may_move.items()]
        of_blocks = [torch.cat([part.sum().view(1), part.sum(1)]) for part in parts]
        return torch.cat([*of_blocks, of_shift.view(1), *(part.flatten() for part in parts)])

    def precision(self, of_blocks: float, of_columns: float, of_shift: float) -> Tensor:
        """1 / tau^2 for every number of the vector; that of the shift is as given."""
        result = torch.full((self.size,), of_columns, dtype=torch.float64)
        result[: self.num_of_blocks] = of_blocks
        result = result.square().reciprocal().clamp(max=STILL)
        result[self.num_of_blocks - 1] = of_shift
        return result


class LossSample:
    """The first samples of a split, ready to be predicted with tables in codes."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        blocks: RowBlocks,
        *,
        loss: curvature.Loss | Task,
        is_held_out: bool,
        bias: OutputBias | None = None,
        num_outputs: int = 1,
        features: Callable[[Batch], KeyedJaggedTensor] | None = None,
    ) -> None:
        result = collections(model)
        tables = [table for collection in result.values() for table in table_configs_of(collection)]
        self._model, self._loss, self.bias = model, loss, bias
        self._ranks, self._is_held_out = ranks_of(*result.values()), is_held_out
        self._device = curvature.device_of(model)
        self._of = [
            contributions.watched_collection(part, blocks, self._device) for part in result.values()
        ]
        shards = [shard for collection in result.values() for shard in local_shards(collection)]
        shapes = {table.name: (table.num_embeddings, table.embedding_dim) for table in tables}
        self._tables = whole_rows(shards, shapes, self._ranks)
        self._frozen = {table for part in result.values() for table in frozen_tables_of(part)}
        self._samples = list[_Sample]()
        rows: dict[str, list[Tensor]] = {name: [] for name in shapes}
        of_batch = features or (lambda batch: remap(model, features_of(batch)))
        floats = sum(part.floats_per_sample for part in self._of)
        num_samples = self._ranks.world_size * max(1, BYTES_OF_PIECES // (4 * floats))
        num_samples = min(MOST_SAMPLES, num_samples)
        at_a_time = min(SAMPLES_AT_A_TIME, curvature.samples_within(num_outputs))
        parts = loss, self._ranks, num_samples, at_a_time
        stream = list(curvature.first_batches(batches, *parts))
        if len(stream) == 1:  # a batch alone is cut, so that there are halves
            stream = list(curvature.first_batches([stream[0][1]], *parts, least=2))
        for place, batch in stream:
            predictions, at = curvature.predictions_of(model, batch, loss, place, self._ranks)
            at = replace(at, second=at.second.diagonal(dim1=1, dim2=2).clone())  # not (B, T, T)
            self._samples.append(_Sample(batch, place, predictions, at))
            with self._ranks.together():
                for name, ids in _ids_by_table(of_batch(batch), tables, place).items():
                    rows[name].append(ids)
        self._rows = {
            name: self._ranks.concatenate(torch.cat(ids).unique()).unique()
            for name, ids in rows.items()
        }

    def predict(self, scheme: MixedDimensionScheme) -> Prediction:
        """Predicts what tables in the codes of a scheme lose, once held-out samples have taught
        them gains. Distributed: the lookups of every sample, and an all_reduce an evaluation."""
        with rows_in_codes(self._model, self._tables, scheme, self._rows):
            if not self._is_held_out:
                return Prediction(loss_increase=self._mean(self._increases_in_training()))
            tables = scheme.tables.items()
            gains = self.fit({name: is_coded(table.codes.bits) for name, table in tables})
        increase = gains.loss - self.loss
        learnt = with_gains(scheme, gains.alpha) if any(gains.strengths) else None
        return Prediction(loss_increase=increase, output_shift=gains.shift, scheme=learnt)

    @property
    def loss(self) -> float:
        """The mean loss of the model as it was measured. One all_reduce."""
        return self._mean(len(part.predictions) * part.at.loss for part in self._samples)

    def _mean(self, totals: Iterable[float]) -> float:
        """The mean over samples of what batches sum up to."""
        num_samples = sum(len(part.predictions) for part in self._samples)
        sums = torch.tensor([sum(totals), num_samples], dtype=torch.float64)
        total, num_samples = self._ranks.sum_(sums).tolist()
        return total / num_samples

    def _increases_in_training(self) -> Iterator[float]:
        """What batches that were trained on lose more in codes, without the part of first order,
        which others do not have."""
        for part in self._samples:
            sample = self._model, part.batch, self._loss, part.place, self._ranks
            predictions, at = curvature.predictions_of(*sample)
            yield len(predictions) * (at.loss - part.at.loss)
            yield -float((part.at.first * (predictions - part.predictions)).sum())

    def fit(self, may_move: Mapping[str, Tensor], *, of_columns: bool = True) -> Gains:
        """Solves for gains of the model's tables as they are now, of whole blocks alone unless
        `of_columns`; `may_move` is ``(S, D)`` bool."""
        may_move = {name: moves & (name not in self._frozen) for name, moves in may_move.items()}
        sums = [
            sum(float(part.at.first.square().sum()) for part in self._samples),
            sum(float(part.at.second.sum()) for part in self._samples),
        ]
        first, second = self._ranks.sum_(torch.tensor(sums, dtype=torch.float64)).tolist()
        phi = first / second if first > 0 and second > 0 else 1.0
        samples = [(part.batch.to(self._device), part.place) for part in self._samples]
        with curvature.evaluating(self._model):
            problem = _Problem(
                *(self._model, self._loss, self._of, samples, self._ranks),
                layout=_Layout(may_move),
                phi=phi,
                moves_shift=self.bias is not None,
            )
            return problem.gains(of_columns=of_columns)


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A batch, and what every call of a collection was given and gave, block by block."""

    batch: Batch
    place: str
    calls: Mapping[int, list[tuple[contributions.Lookup, list[contributions.Pieces]]]]
    parts: list[tuple[slice, Batch]]


_Halves = tuple[list[_Recorded], list[_Recorded]]


def _halves(batches: Sequence[_Recorded], number: Mapping[str, int]) -> _Halves:
    """Batches of an even and of an odd place."""
    even = [part for part in batches if number[part.place] % 2 == 0]
    return even, [part for part in batches if number[part.place] % 2]


def _enough_for_strengths(
    batches: Sequence[_Recorded], number: Mapping[str, int], ranks: Ranks
) -> list[_Recorded]:
    """Some batches of each half, the same on all ranks and in any order of batches, as their ids
    choose them. One all_reduce."""
    sums = torch.zeros(len(number), 2, dtype=torch.int64)
    for part in batches:
        ids = features_of(part.batch).values()
        sums[number[part.place]] += torch.tensor([int(ids.sum()), len(part.batch.labels)])
    of_ids, sizes = ranks.sum_(sums).unbind(1)
    places, num_samples = set[int](), [0, 0]
    for place in (of_ids * SCATTER).argsort().tolist():
        if num_samples[place % 2] < SAMPLES_FOR_STRENGTHS // 2:
            places.add(place)
            num_samples[place % 2] += int(sizes[place])
    return [part for part in batches if number[part.place] in places]


class _Problem:
    """The problem at the top of this module, for tables as they are when it is made."""

    def __init__(
        self,
        model: nn.Module,
        loss: curvature.Loss | Task,
        of: Sequence[contributions.WatchedCollection],
        samples: Sequence[tuple[Batch, str]],
        ranks: Ranks,
        *,
        layout: _Layout,
        phi: float,
        moves_shift: bool,
    ) -> None:
        self._model, self._loss, self._of, self._ranks = model, loss, of, ranks
        self._layout, self._phi, self._moves_shift = layout, phi, moves_shift
        self._device = curvature.device_of(model)
        read_by_name_(model, refuse_weights=None)
        records = [self._record(*sample) for sample in samples]
        self._all = [part for part, _ in records]
        self._bends = ranks.sum_(torch.stack([bends for _, bends in records]).sum(0))
        number = {place: n for n, place in enumerate(dict.fromkeys(place for _, place in samples))}
        if len(number) == 1:
            self._halves = self._few = self._all[::2], self._all[1::2]
        else:  # by whole batches: however they are cut or spread over ranks, halves are the same
            self._halves = _halves(self._all, number)
            self._few = _halves(_enough_for_strengths(self._all, number, ranks), number)

    def gains(self, *, of_columns: bool) -> Gains:
        """The solution at the strengths that are best for the other half, if they are ahead."""
        none = torch.zeros(self._layout.size, dtype=torch.float64)
        old = self._judge(self._halves, (0.0, 0.0), [none, none])
        no_gains = Gains(self._layout.alpha(none), 0.0, old.loss, (0.0, 0.0))
        if not all(self._halves) or old.num_samples < LEAST_SAMPLES:
            return no_gains
        start = best = self._judge(self._few, (0.0, 0.0), [none, none])
        best = self._climb([(tau, 0.0) for tau in BLOCK_STRENGTHS], best)
        if of_columns:
            best = self._climb([(best.strengths[0], tau) for tau in COLUMN_STRENGTHS], best)
        if best is start:
            return no_gains
        if best.num_samples < old.num_samples:
            best = self._try(self._halves, best.strengths, best.points)
        if not is_ahead(best.losses, old.losses, self._ranks):
            return no_gains
        point = self._solve(self._all, torch.stack(best.points).mean(0), best.strengths)
        alpha = {
            name: of_table.clamp(SMALLEST_GAIN, LARGEST_GAIN)
            for name, of_table in self._layout.alpha(point).items()
        }
        shift = round(float(self._layout.shift(point)) / SHIFT_UNIT) * SHIFT_UNIT
        return Gains(alpha, shift, best.loss, best.strengths)

    def _climb(self, options: Sequence[tuple[float, float]], start: _Option) -> _Option:
        """The best of rising strengths: from the third, or the last, upwards while it gets better,
        or else downwards. Each begins at the best solution so far."""
        best, first = start, min(2, len(options) - 1)
        for places in (range(first, len(options)), range(first - 1, -1, -1)):
            for strengths in map(options.__getitem__, places):
                option = self._try(self._few, strengths, best.points)
                if not option.loss < best.loss:  # NaN is no better
                    break
                best = option
            if best is not start:
                break
        return best

    def _try(self, halves: _Halves, strengths: tuple[float, float], begin: list[Tensor]) -> _Option:
        """Solves on each half, and judges by the other."""
        points = [self._solve(*pair, strengths) for pair in zip(halves, begin, strict=True)]
        return self._judge(halves, strengths, points)

    def _judge(
        self, halves: _Halves, strengths: tuple[float, float], points: list[Tensor]
    ) -> _Option:
        """What each half has taught, judged by the other."""
        judges = zip(halves, points[::-1], strict=True)
        losses = torch.cat([self._part_losses(half, point) for half, point in judges])
        sums = torch.stack([losses.prod(1).sum(), losses[:, 0].sum()])
        total, num_samples = self._ranks.sum_(sums).tolist()
        return _Option(strengths, points, losses, total / num_samples, num_samples)

    def _record(self, batch: Batch, place: str) -> tuple[_Recorded, Tensor]:
        """Calls the model once; also returns the sum over samples of the second derivatives of the
        loss in every number. Distributed: its lookups, once or twice."""
        with contributions.watching(self._of) as lookups:
            of_batch = self._model, batch, self._loss, place, self._ranks
            at, looked_up = curvature.look_up(*of_batch, lookups)
        calls: dict[int, list[tuple[contributions.Lookup, list[contributions.Pieces]]]] = {
            id(of): [] for of in self._of
        }
        for lookup, apart, _ in looked_up:
            calls[id(lookup.of)].append((lookup, list(lookup.of.pieces(lookup, apart))))
        entries = contributions.entries_by_table(looked_up, len(batch.labels))
        of_columns, of_blocks = list[Tensor](), list[Tensor]()
        for name, moves in self._layout.may_move.items():
            bends = torch.zeros(len(moves), 1 + moves.shape[1], dtype=torch.float64)
            if name in entries:
                both = entries[name]
                worth = both.worth * moves.to(both.worth)[both.blocks]
                worth = torch.cat([worth.sum(2, keepdim=True), worth], dim=2)
                bend = torch.einsum("tmd,mtu,umd->md", worth, at.second[both.samples], worth)
                bends = contributions.sum_by_group(bend, both.blocks, len(moves)).cpu()
            of_blocks += [bends[:, 0].sum().view(1), bends[:, 0]]
            of_columns.append(bends[:, 1:].flatten())
        of_shift = at.second.sum().view(1).cpu()
        part = _Recorded(batch, place, calls, cut_batch(batch, PARTS_OF_BATCH))
        none = torch.zeros(self._layout.size, dtype=torch.float64)
        # the mean of samples that all weigh nothing is NaN
        is_void = self._part_losses([part], none)[:, 1].isnan().tolist()
        parts = [own for own, is_empty in zip(part.parts, is_void, strict=True) if not is_empty]
        return replace(part, parts=parts), torch.cat([*of_blocks, of_shift, *of_columns])

    def _outputs(self, part: _Recorded, alpha: Mapping[str, Tensor], shift: Tensor) -> Outputs:
        """What the model returns with other alpha. Local."""
        answers = {collection: list[Any]() for collection in part.calls}
        for collection, calls in part.calls.items():
            for lookup, pieces in calls:
                values = {p.name: p.times(alpha[p.table]) for p in pieces}
                answers[collection].append(lookup.of.output_of(lookup, values))
        with contributions.answering(self._of, answers):
            outputs = curvature.outputs_of(self._model, part.batch, self._loss)
        if not self._moves_shift:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs + shift
        floats = {  # the loss reads one number of each sample, whatever else there is
            name: value
            for name, value in outputs.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return {**outputs, **{name: value + shift for name, value in floats.items()}}

    def _solve(
        self, batches: Sequence[_Recorded], start: Tensor, strengths: tuple[float, float]
    ) -> Tensor:
        """Solves on some batches. Rank 0 chooses the steps, all evaluate them: one broadcast and
        one all_reduce an evaluation."""
        # samples of one label would move a free shift without end
        of_shift = 1 / self._phi if self._moves_shift else STILL
        precision = self._layout.precision(*strengths, of_shift)
        sizes = [sum(len(part.batch.labels) for part in some) for some in (batches, self._all)]
        size, size_of_all = self._ranks.sum_(torch.tensor(sizes)).tolist()
        weight = size / self._phi
        # in these units the problem is about as curved in all directions
        unit = (precision + weight * self._bends.clamp(min=0) / size_of_all).rsqrt()

        def evaluate(place: np.ndarray) -> tuple[float, np.ndarray]:
            values = torch.from_numpy(place) * unit
            loss, slopes = self._derive(batches, values)
            value = weight * loss + float((precision * values.square()).sum()) / 2
            return value, ((weight * slopes + precision * values) * unit).numpy()

        start = start.masked_fill(precision == STILL, 0)
        return _minimise(evaluate, start / unit, self._ranks) * unit

    def _at(self, values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Alpha of every table and the shift, float32, where the model is."""
        alpha = self._layout.alpha(values.float())
        of_tables = {name: of_table.to(self._device) for name, of_table in alpha.items()}
        return of_tables, self._layout.shift(values).float().to(self._device)

    def _derive(self, batches: Sequence[_Recorded], values: Tensor) -> tuple[float, Tensor]:
        """The mean loss of some batches, and its gradient. One all_reduce."""
        total, num_samples = torch.zeros(len(values) + 2, dtype=torch.float64), 0
        for part in batches:
            size = len(part.batch.labels)
            alpha, shift = self._at(values)
            leaves = [leaf.requires_grad_() for leaf in (*alpha.values(), shift)]
            with torch.enable_grad():
                outputs = self._outputs(part, alpha, shift)
                loss = curvature.mean_loss(outputs, part.batch, self._loss, part.place)
                slopes = torch.autograd.grad(loss, leaves, materialize_grads=True)
            *of_alpha, of_shift = (slope.double().cpu() for slope in slopes)
            gradient = self._layout.gradient(dict(zip(alpha, of_alpha, strict=True)), of_shift)
            total += size * torch.cat([torch.tensor([float(loss.detach()), 1.0]), gradient])
        loss_of_all, num_samples, *_ = (total := self._ranks.sum_(total)).tolist()
        return loss_of_all / num_samples, total[2:] / num_samples

    @torch.no_grad()
    def _part_losses(self, batches: Sequence[_Recorded], values: Tensor) -> Tensor:
        """``(P, 2)``: samples and loss of the parts of some batches of this rank."""
        losses = [torch.zeros(0, 2, dtype=torch.float64)]
        alpha, shift = self._at(values)
        for part in filter(lambda part: part.parts, batches):
            outputs = self._outputs(part, alpha, shift)
            loss_of = partial(curvature.mean_loss, loss=self._loss, place=part.place)
            losses.append(losses_of_parts(outputs, part.parts, loss_of))
        return torch.cat(losses)


def _minimise(
    evaluate: Callable[[np.ndarray], tuple[float, np.ndarray]], begin: Tensor, ranks: Ranks
) -> Tensor:
    """L-BFGS. Rank 0 chooses the points, and all ranks evaluate them: one broadcast each."""
    value, _ = evaluate(begin.numpy())
    options = {"maxiter": MOST_ITERATIONS, "ftol": ENOUGH_NATS / max(1.0, abs(value))}

    def share(point: np.ndarray, *, is_last: bool) -> Tensor:
        return ranks.broadcast_(torch.tensor([is_last, *point], dtype=torch.float64))[1:]

    if ranks.is_first:
        result = minimize(
            lambda point: evaluate(share(point, is_last=False).numpy()),
            begin.numpy(),
            jac=True,
            method="L-BFGS-B",
            options=options,
        )
        return share(result.x, is_last=True)
    while True:
        is_last, *_ = message = ranks.broadcast_(torch.zeros(len(begin) + 1, dtype=torch.float64))
        if is_last:
            return message[1:]
        evaluate(message[1:].numpy())


@dataclass(frozen=True, eq=False)
class _Option:
    """Strengths, and what they come to: a point of each half, losses of the other one."""

    strengths: tuple[float, float]
    points: list[Tensor]
    losses: Tensor
    loss: float
    num_samples: float


def cut_batch(batch: Batch, num_parts: int) -> list[tuple[slice, Batch]]:
    """A batch in parts of about the same size, and where each lies; whole if it cannot be cut."""
    size = len(batch.labels)
    bounds = torch.linspace(0, size, min(num_parts, size) + 1).round().long().tolist()
    try:
        return [(slice(*part), slice_of(batch, *part)) for part in pairwise(bounds)]
    except (TypeError, NotImplementedError):
        return [(slice(0, size), batch)]


def losses_of_parts(
    outputs: Outputs,
    parts: Sequence[tuple[slice, Batch]],
    loss_of: Callable[[Outputs, Batch], Tensor],
) -> Tensor:
    """``(P, 2)`` float64: samples and mean loss of each part of a batch."""
    losses = [loss_of(_rows_of_outputs(outputs, rows), part) for rows, part in parts]
    sizes = torch.tensor([len(part.labels) for _, part in parts])
    return torch.stack([sizes, torch.stack(losses).cpu()], dim=1).double()


def _rows_of_outputs(outputs: Outputs, rows: slice) -> Outputs:
    """Some samples' rows; what is no tensor of rows stays as it is."""
    if not isinstance(outputs, Mapping):
        return outputs[rows]
    return {
        name: part[rows] if isinstance(part, Tensor) and part.dim() else part
        for name, part in outputs.items()
    }


def is_ahead(losses: Tensor, rival: Tensor, ranks: Ranks) -> bool:
    """Whether the mean loss is lower than a rival's by more than one standard error of that."""
    samples, lead = losses[:, 0], rival[:, 1] - losses[:, 1]
    squares, ones = samples.square(), torch.ones_like(samples)
    terms = [samples, samples * lead, squares, squares * lead, squares * lead.square(), ones]
    sums = torch.stack([term.sum() for term in terms])
    n, of_n, n2, n2_lead, n2_lead2, parts = ranks.sum_(sums).tolist()
    mean = of_n / n
    spread = max(n2_lead2 - 2 * mean * n2_lead + mean**2 * n2, 0.0) / n**2
    return mean > math.sqrt(spread * parts / max(parts - 1, 1))


def _ids_by_table(
    features: KeyedJaggedTensor, tables: Iterable[EmbeddingBagConfig], place: str
) -> dict[str, Tensor]:
    """Table -> the rows that a batch reads, each once."""
    bags = copy.copy(features).to_dict()  # the batch itself is left as it was: see jagged_by_key
    return {
        table.name: torch.cat([ids for ids, _ in bags_of(table, bags, place).values()]).unique()
        for table in tables
    }
