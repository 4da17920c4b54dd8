"""Held-out samples: the loss that a size is predicted to cost, scales, and the output bias."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.bits import Prediction
from dnis_torchrec.allocation.curvature import (
    Loss,
    PredictedBatch,
    curvature,
    derivatives_at,
    first_batches,
    on_all,
    predictions_of,
    samples_within,
)
from dnis_torchrec.allocation.energies import RowsInCodes, rows_in_codes, whole_rows
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.codes import is_coded
from dnis_torchrec.blocks.counts import bags_of
from dnis_torchrec.data.batches import features_of
from dnis_torchrec.data.task import Task
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import (
    collections,
    dense_state,
    local_shards,
    ranks_of,
    table_configs_of,
)
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
        self._number(model).add_(shift / self.gain)

    @contextmanager
    def shifted(self, model: nn.Module, shift: float) -> Iterator[None]:
        """The same within a block; afterwards the number is what it was, bit for bit."""
        number = self._number(model)
        part = number.clone()
        try:
            self.shift_(model, shift)
            yield
        finally:
            with torch.no_grad():
                number.copy_(part)

    def _number(self, model: nn.Module) -> Tensor:
        return dense_state(model)[self.name]  # shares its memory


def output_bias(
    model: nn.Module, batch: Batch, loss: Loss | Task, ranks: Ranks
) -> OutputBias | None:
    """Finds a model's output bias: adds to each single number, and looks at a batch."""
    old = predictions_of(model, batch, loss, "batch 0", ranks).values
    if old.shape[1] != 1:
        return None
    for name, value in dense_state(model).items():
        if value.numel() != 1 or not value.is_floating_point():
            continue
        with OutputBias(name=name, gain=1.0).shifted(model, ADDED):
            current = predictions_of(model, batch, loss, "batch 0", ranks).values
        change = (current - old).flatten().cpu()
        highest, lowest = ranks.max_(torch.stack([change.max(), -change.min()])).tolist()
        if highest + lowest <= EVEN * abs(highest) and highest:
            total, count = ranks.sum_(
                torch.tensor([float(change.sum()), len(change)], dtype=torch.float64)
            ).tolist()
            return OutputBias(name=name, gain=total / count / ADDED)
    return None


NEWTON_SHARE, LONGEST_ALPHA_STEP = 0.5, 0.2
"""Eta, and how far alpha moves in a step at most."""


class ScaleLearner:
    """What some held-out batches teach the scales of all columns to be multiplied by, a step at a
    time."""

    def __init__(
        self,
        model: nn.Module,
        in_codes: RowsInCodes,
        scheme: MixedDimensionScheme,
        batches: Sequence[Batch],
        blocks: RowBlocks,
        *,
        loss: Loss | Task,
        noise: float,
    ) -> None:
        self._model, self._in_codes, self._batches, self._blocks = model, in_codes, batches, blocks
        self._loss, self._noise = loss, noise
        self._coded = {name: is_coded(table.codes.bits) for name, table in scheme.tables.items()}
        self.gains = {
            name: torch.ones(bits.shape, dtype=torch.float64) for name, bits in self._coded.items()
        }

    def step_(self) -> None:
        """Takes a step. Rows hold its gains afterwards. Distributed: that of `curvature`."""
        self._in_codes.multiply_(self.gains)
        if self._noise == math.inf:
            return
        result = curvature(
            self._model,
            self._batches,
            self._blocks,
            loss=self._loss,
            num_samples=None,
            warns=False,
            couplings=False,
        )
        for name, gain in self.gains.items():
            gradient, bend = (
                part[name].double().cpu() for part in (result.gradient, result.curvature)
            )
            gain *= torch.where(self._coded[name], 1 - alpha_step(gradient, bend, self._noise), 1.0)
        self._in_codes.multiply_(self.gains)


def alpha_step(gradient: Tensor, curvature: Tensor, noise: float) -> Tensor:
    """How far alpha goes down in a step, see the top of this module."""
    is_more_than_chance = gradient.square() > noise * curvature
    moves = is_more_than_chance & (curvature > 0)
    square, bend = torch.where(moves, gradient.square(), 1.0), torch.where(moves, curvature, 1.0)
    step = NEWTON_SHARE * gradient / bend * (1 - noise * bend / square)
    return torch.where(moves, step.clamp(-LONGEST_ALPHA_STEP, LONGEST_ALPHA_STEP), 0.0)


def with_gains(scheme: MixedDimensionScheme, gains: Mapping[str, Tensor]) -> MixedDimensionScheme:
    """The scheme with its scales multiplied."""
    tables = {
        name: table.with_codes(table.codes.with_gain(gains[name].float()))
        for name, table in scheme.tables.items()
    }
    return MixedDimensionScheme(tables)


def mean_gains(learners: Sequence[ScaleLearner]) -> dict[str, Tensor]:
    """What learners of the same scheme say in the mean, table -> ``(S, D)``."""
    return {
        name: torch.stack([part.gains[name] for part in learners]).mean(0)
        for name in learners[0].gains
    }


def gains_over(scheme: MixedDimensionScheme, learnt: MixedDimensionScheme) -> dict[str, Tensor]:
    """What scales were multiplied by, table -> ``(S, D)``: bfloat16s over one another."""
    return {
        name: table.codes.scale / scheme.tables[name].codes.scale
        for name, table in learnt.tables.items()
    }


JUDGED_SAMPLES = 1 << 16
"""Samples that are enough; a pass takes a second or two."""
SAMPLES_PER_PASS = 1 << 12
"""Larger batches are cut: bounds what a pass holds, and makes halves of a large batch."""
MOST_ALPHA_STEPS, LEAST_SHARE = 4, 0.1
"""Steps that scales learn in, at most, and what one has to gain, over what all have, for another
one."""
MOST_STEPS, LONGEST_STEP, LAST_STEP = 12, 4.0, 1e-3
"""Newton's steps to the shift of the output bias, how long each may be, and how long the last one:
what it leaves is of its square."""
SHIFT_UNIT = 2.0**-16
"""What the shift is a multiple of."""


@dataclass(frozen=True, eq=False)
class _Judged:
    """A batch of this rank, and what is known of it before anything is rounded."""

    batch: Batch
    reference: PredictedBatch


class LossSample:
    """The first samples of a split, ready to be predicted with tables in codes."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        blocks: RowBlocks,
        *,
        loss: Loss | Task,
        is_held_out: bool,
        bias: OutputBias | None = None,
        num_samples: int = JUDGED_SAMPLES,
        num_outputs: int = 1,
        features: Callable[[Batch], KeyedJaggedTensor] | None = None,
    ) -> None:
        result = collections(model)
        tables = [table for collection in result.values() for table in table_configs_of(collection)]
        self._model, self._blocks, self._loss, self.bias = model, blocks, loss, bias
        self._ranks, self._is_held_out = ranks_of(*result.values()), is_held_out
        shards = [shard for collection in result.values() for shard in local_shards(collection)]
        shapes = {table.name: (table.num_embeddings, table.embedding_dim) for table in tables}
        self._tables = whole_rows(shards, shapes, self._ranks)
        self._batches = list[_Judged]()
        rows: dict[str, list[Tensor]] = {name: [] for name in shapes}
        of_batch = features or (lambda batch: remap(model, features_of(batch)))
        at_a_time = min(SAMPLES_PER_PASS, samples_within(num_outputs))
        for place, batch in first_batches(batches, loss, self._ranks, num_samples, at_a_time):
            reference = predictions_of(model, batch, loss, place, self._ranks)
            bends = reference.at.second.diagonal(dim1=1, dim2=2).clone()  # not (B, T, T) of all
            self._batches.append(
                _Judged(batch, reference._replace(at=replace(reference.at, second=bends)))
            )
            with on_all(self._ranks):
                for name, ids in _ids_by_table(of_batch(batch), tables, place).items():
                    rows[name].append(ids)
        self._rows = {
            name: self._ranks.concatenate(torch.cat(ids).unique()).unique()
            for name, ids in rows.items()
        }

    def predict(self, scheme: MixedDimensionScheme) -> Prediction:
        """Predicts what tables in the codes of a scheme lose, once held-out samples have taught the
        scales."""
        with rows_in_codes(self._model, self._tables, scheme, self._rows) as in_codes:
            new = self._predictions(self._batches)
            shift = self._shift(self._batches, new)
            with_fits = Prediction(loss_increase=self._increase(new, shift), output_shift=shift)
            if not self._is_held_out or len(self._batches) == 1:
                return with_fits
            with nullcontext() if self.bias is None else self.bias.shifted(self._model, shift):
                return self._predict_learnt(in_codes, scheme, with_fits)

    def _predict_learnt(
        self, in_codes: RowsInCodes, scheme: MixedDimensionScheme, with_fits: Prediction
    ) -> Prediction:
        """The best of some steps of both halves, see the top of this module."""
        halves, best = (self._batches[::2], self._batches[1::2]), with_fits
        learners = [self._learner(in_codes, scheme, half) for half in halves]
        for _ in range(MOST_ALPHA_STEPS):
            pairs = list[list[PredictedBatch]]()
            for learner, cross in zip(learners, halves[::-1], strict=True):
                learner.step_()
                pairs.insert(0, self._predictions(cross))
            learnt = with_gains(scheme, mean_gains(learners))
            in_codes.multiply_(gains_over(scheme, learnt))
            new = self._predictions(self._batches)
            shift = self._shift(self._batches, new)
            offsets = [
                self._away(half, new[part::2], pairs[part]) for part, half in enumerate(halves)
            ]
            by_batch = [offsets[index % 2][index // 2] for index in range(len(new))]
            increase = self._increase(new, shift, by_batch)
            step = best.loss_increase - increase
            if not step > 0:
                break
            best = Prediction(
                loss_increase=increase, output_shift=with_fits.output_shift + shift, scheme=learnt
            )
            if step < LEAST_SHARE * (with_fits.loss_increase - increase):
                break
        return best

    def _predictions(self, batches: Sequence[_Judged]) -> list[PredictedBatch]:
        """Of batches, with rows as they are now."""
        return [
            predictions_of(
                self._model, sample.batch, self._loss, f"batch {index}, in codes", self._ranks
            )
            for index, sample in enumerate(batches)
        ]

    def _away(
        self,
        batches: Sequence[_Judged],
        new: Sequence[PredictedBatch],
        cross: Sequence[PredictedBatch],
    ) -> list[Tensor]:
        """How far other scales take the predictions of some batches, but for what the output bias
        makes good."""
        level = self._shift(batches, cross) - self._shift(batches, new)
        return [other.values - part.values + level for part, other in zip(new, cross, strict=True)]

    def _increase(
        self, new: Sequence[PredictedBatch], shift: float, offsets: Sequence[Tensor] | None = None
    ) -> float:
        """The loss of all samples in codes over that of before, see the top of this module."""
        sums = torch.zeros(2, dtype=torch.float64)
        for index, (sample, as_rounded) in enumerate(zip(self._batches, new, strict=True)):
            old, current = sample.reference, self._higher(sample, as_rounded, shift)
            num_samples = len(current.values)
            increase = num_samples * (current.at.loss - old.at.loss)
            if not self._is_held_out:
                increase -= float((old.at.first * (current.values - old.values)).sum())
            if offsets is not None:
                increase += float((current.at.first * offsets[index]).sum())
            sums += torch.tensor([increase, num_samples], dtype=torch.float64)
        increase, num_samples = self._ranks.sum_(sums).tolist()
        return increase / num_samples

    def _learner(
        self, in_codes: RowsInCodes, scheme: MixedDimensionScheme, batches: Sequence[_Judged]
    ) -> ScaleLearner:
        """Learns from some batches."""
        first = sum(float(sample.reference.at.first.square().sum()) for sample in batches)
        second = sum(float(sample.reference.at.second.sum()) for sample in batches)
        num_samples = sum(len(sample.reference.values) for sample in batches)
        sums = torch.tensor([first, second, num_samples], dtype=torch.float64)
        first, second, num_samples = self._ranks.sum_(sums).tolist()
        noise = first / second / num_samples if second > 0 else math.inf
        part = [sample.batch for sample in batches]
        return ScaleLearner(
            self._model, in_codes, scheme, part, self._blocks, loss=self._loss, noise=noise
        )

    def _shift(self, batches: Sequence[_Judged], new: Sequence[PredictedBatch]) -> float:
        """By how much outputs go up so that the loss's derivatives add up to what they did: by
        Newton's steps."""
        if self.bias is None:
            return 0.0
        part = sum(float(sample.reference.at.first.sum()) for sample in batches)
        target, shift = float(self._ranks.sum_(torch.tensor([part], dtype=torch.float64))), 0.0
        for _ in range(MOST_STEPS):
            sums = torch.zeros(2, dtype=torch.float64)
            for sample, current in zip(batches, new, strict=True):
                at = self._higher(sample, current, shift).at
                sums += torch.tensor(
                    [float(at.first.sum()), float(at.second.sum())], dtype=torch.float64
                )
            first, second = self._ranks.sum_(sums).tolist()
            step = (target - first) / second if second > 0 else math.nan
            if not abs(step) <= LONGEST_STEP:
                return 0.0
            shift += step
            if abs(step) < LAST_STEP:
                return round(shift / SHIFT_UNIT) * SHIFT_UNIT
        return 0.0

    def _higher(self, sample: _Judged, current: PredictedBatch, shift: float) -> PredictedBatch:
        """The predictions of a batch, all of them that much higher."""
        if not shift:
            return current
        outputs = current.outputs
        if isinstance(outputs, Tensor):
            outputs = outputs + shift
        else:  # by name: the loss reads one number of each sample, whatever else there is
            outputs = {
                name: part + shift
                if isinstance(part, Tensor) and part.is_floating_point()
                else part
                for name, part in outputs.items()
            }
        batch = sample.batch.to(current.values.device)
        _, at = derivatives_at(outputs, batch, self._loss, "outputs in codes")
        return PredictedBatch(outputs, current.values + shift, at)


def _ids_by_table(
    features: KeyedJaggedTensor, tables: Iterable[EmbeddingBagConfig], place: str
) -> dict[str, Tensor]:
    """Table -> the rows that a batch reads, each once."""
    bags = copy.copy(features).to_dict()  # the batch itself is left as it was: see jagged_by_key
    return {
        table.name: torch.cat([ids for ids, _ in bags_of(table, bags, place).values()]).unique()
        for table in tables
    }
