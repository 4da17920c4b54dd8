r"""Loss sample: some samples, on which a model in codes is predicted to lose before anything is
packed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.allocate import Prediction
from dnis_torchrec.allocation.curvature import derivatives_at, first_batches, on_all
from dnis_torchrec.allocation.learnt_scales import ScaleLearner, gains_over, mean_gains, with_gains
from dnis_torchrec.allocation.loss_derivatives import Loss
from dnis_torchrec.allocation.output_bias import OutputBias
from dnis_torchrec.allocation.predictions import PredictedBatch, predictions_of
from dnis_torchrec.allocation.rows_in_codes import RowsInCodes, rows_in_codes
from dnis_torchrec.allocation.whole_rows import whole_rows
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.frequency import bags_of
from dnis_torchrec.data.lookup_batches import features_of
from dnis_torchrec.data.task import Task
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.managed_collisions import remapped
from dnis_torchrec.selection.table_shards import (
    collections,
    local_shards,
    ranks_of,
    table_configs_of,
)

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
    before: PredictedBatch


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
    ) -> None:
        found = collections(model)
        tables = [table for collection in found.values() for table in table_configs_of(collection)]
        self._model, self._blocks, self._loss, self.bias = model, blocks, loss, bias
        self._ranks, self._is_held_out = ranks_of(*found.values()), is_held_out
        shards = [shard for collection in found.values() for shard in local_shards(collection)]
        shapes = {table.name: (table.num_embeddings, table.embedding_dim) for table in tables}
        self._tables = whole_rows(shards, shapes, self._ranks)
        self._batches = list[_Judged]()
        rows: dict[str, list[Tensor]] = {name: [] for name in shapes}
        for place, batch in first_batches(
            batches, loss, self._ranks, num_samples, SAMPLES_PER_PASS
        ):
            self._batches.append(
                _Judged(batch, predictions_of(model, batch, loss, place, self._ranks))
            )
            with on_all(self._ranks):
                for name, ids in _ids_by_table(
                    remapped(model, features_of(batch)), tables, place
                ).items():
                    rows[name].append(ids)
        self._rows = {
            name: self._ranks.concatenate(torch.cat(ids).unique()).unique()
            for name, ids in rows.items()
        }

    def predict(self, scheme: MixedDimensionScheme) -> Prediction:
        """Predicts what tables in the codes of a scheme lose, once held-out samples have taught the
        scales."""
        with rows_in_codes(self._model, self._tables, scheme, self._rows) as in_codes:
            rounded = self._predictions(self._batches)
            shift = self._shift(self._batches, rounded)
            fitted = Prediction(loss_increase=self._increase(rounded, shift), output_shift=shift)
            if not self._is_held_out or len(self._batches) == 1:
                return fitted
            with nullcontext() if self.bias is None else self.bias.shifted(self._model, shift):
                return self._predict_learnt(in_codes, scheme, fitted)

    def _predict_learnt(
        self, in_codes: RowsInCodes, scheme: MixedDimensionScheme, fitted: Prediction
    ) -> Prediction:
        """The best of some steps of both halves, see the top of this module."""
        halves, best = (self._batches[::2], self._batches[1::2]), fitted
        learners = [self._learner(in_codes, scheme, half) for half in halves]
        for _ in range(MOST_ALPHA_STEPS):
            crossed = list[list[PredictedBatch]]()
            for learner, others in zip(learners, halves[::-1], strict=True):
                learner.step_()
                crossed.insert(0, self._predictions(others))
            learnt = with_gains(scheme, mean_gains(learners))
            in_codes.multiply_(gains_over(scheme, learnt))
            rounded = self._predictions(self._batches)
            shift = self._shift(self._batches, rounded)
            away = [
                self._away(half, rounded[part::2], crossed[part])
                for part, half in enumerate(halves)
            ]
            by_batch = [away[index % 2][index // 2] for index in range(len(rounded))]
            increase = self._increase(rounded, shift, by_batch)
            step = best.loss_increase - increase
            if not step > 0:
                break
            best = Prediction(
                loss_increase=increase, output_shift=fitted.output_shift + shift, scheme=learnt
            )
            if step < LEAST_SHARE * (fitted.loss_increase - increase):
                break
        return best

    def _predictions(self, batches: Sequence[_Judged]) -> list[PredictedBatch]:
        """Of batches, with rows as they are now."""
        return [
            predictions_of(
                self._model, judged.batch, self._loss, f"batch {index}, in codes", self._ranks
            )
            for index, judged in enumerate(batches)
        ]

    def _away(
        self,
        batches: Sequence[_Judged],
        rounded: Sequence[PredictedBatch],
        others: Sequence[PredictedBatch],
    ) -> list[Tensor]:
        """How far other scales take the predictions of some batches, but for what the output bias
        makes good."""
        level = self._shift(batches, others) - self._shift(batches, rounded)
        return [
            other.values - own.values + level for own, other in zip(rounded, others, strict=True)
        ]

    def _increase(
        self, rounded: Sequence[PredictedBatch], shift: float, away: Sequence[Tensor] | None = None
    ) -> float:
        """The loss of all samples in codes over that of before, see the top of this module."""
        sums = torch.zeros(2, dtype=torch.float64)
        for index, (judged, as_rounded) in enumerate(zip(self._batches, rounded, strict=True)):
            before, after = judged.before, self._higher(judged, as_rounded, shift)
            num_samples = len(after.values)
            increase = num_samples * (after.at.loss - before.at.loss)
            if not self._is_held_out:
                increase -= float((before.at.first * (after.values - before.values)).sum())
            if away is not None:
                increase += float((after.at.first * away[index]).sum())
            sums += torch.tensor([increase, num_samples], dtype=torch.float64)
        increase, num_samples = self._ranks.sum_(sums).tolist()
        return increase / num_samples

    def _learner(
        self, in_codes: RowsInCodes, scheme: MixedDimensionScheme, batches: Sequence[_Judged]
    ) -> ScaleLearner:
        """Learns from some batches."""
        first = sum(float(judged.before.at.first.square().sum()) for judged in batches)
        second = sum(
            float(judged.before.at.second.diagonal(dim1=1, dim2=2).sum()) for judged in batches
        )
        num_samples = sum(len(judged.before.values) for judged in batches)
        sums = torch.tensor([first, second, num_samples], dtype=torch.float64)
        first, second, num_samples = self._ranks.sum_(sums).tolist()
        noise = first / second / num_samples if second > 0 else math.inf
        own = [judged.batch for judged in batches]
        return ScaleLearner(
            self._model, in_codes, scheme, own, self._blocks, loss=self._loss, noise=noise
        )

    def _shift(self, batches: Sequence[_Judged], rounded: Sequence[PredictedBatch]) -> float:
        """By how much outputs go up so that the loss's derivatives add up to what they did: by
        Newton's steps."""
        if self.bias is None:
            return 0.0
        own = sum(float(judged.before.at.first.sum()) for judged in batches)
        wanted, shift = float(self._ranks.sum_(torch.tensor([own], dtype=torch.float64))), 0.0
        for _ in range(MOST_STEPS):
            sums = torch.zeros(2, dtype=torch.float64)
            for judged, after in zip(batches, rounded, strict=True):
                at = self._higher(judged, after, shift).at
                sums += torch.tensor(
                    [float(at.first.sum()), float(at.second.sum())], dtype=torch.float64
                )
            first, second = self._ranks.sum_(sums).tolist()
            step = (wanted - first) / second if second > 0 else math.nan
            if not abs(step) <= LONGEST_STEP:
                return 0.0
            shift += step
            if abs(step) < LAST_STEP:
                return round(shift / SHIFT_UNIT) * SHIFT_UNIT
        return 0.0

    def _higher(self, judged: _Judged, after: PredictedBatch, shift: float) -> PredictedBatch:
        """The predictions of a batch, all of them that much higher."""
        if not shift:
            return after
        outputs = after.outputs
        assert isinstance(outputs, Tensor)  # of a model of one output
        batch = judged.batch.to(outputs.device)
        _, at = derivatives_at(outputs + shift, batch, self._loss, "outputs in codes")
        return PredictedBatch(outputs + shift, after.values + shift, at)


def _ids_by_table(
    features: KeyedJaggedTensor, tables: Iterable[EmbeddingBagConfig], place: str
) -> dict[str, Tensor]:
    """Table -> the rows that a batch reads, each once."""
    jagged = copy.copy(features).to_dict()  # the batch itself is left as it was: see jagged_by_key
    return {
        table.name: torch.cat([ids for ids, _ in bags_of(table, jagged, place).values()]).unique()
        for table in tables
    }
