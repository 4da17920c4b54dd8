r"""Loss sample: some samples, on which a model in codes is predicted to lose before anything is packed.

.. math:: \Delta L = \frac{1}{N} \sum_n L_n(\hat z_n) - L_n(z_n) - L_n'(z_n)^\top (\hat z_n - z_n)

over N training samples, with z_n the predictions of the model as it is, and :math:`\hat z_n` those of the model whose
rows are rounded to their codes, and whose output bias has moved (see `output_bias`). To second order it is the mean of
L'' / 2 times the square of how far predictions move. The first-order term is left out, because a model fits the samples
that it was trained on so closely that every move costs there, and on no others. On held-out samples that term is small
and true, and stays: the figure is how much their loss increases.

The sum that `allocate` spends by, H / 2 times the rounding energy of every column, takes errors to be independent.
Those of the columns and features of a sample meet in its prediction, where they add up.

Shapes: N samples, B batch, T outputs of the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.allocate import Prediction
from dnis_torchrec.allocation.curvature import (
    derivatives_at,
    device_of,
    evaluating,
    first_batches,
    on_all,
    outputs_of,
)
from dnis_torchrec.allocation.learnt_scales import learnt_gains, with_gains
from dnis_torchrec.allocation.loss_derivatives import Loss, LossDerivatives
from dnis_torchrec.allocation.row_sample import RowSample, sampled_values
from dnis_torchrec.allocation.whole_rows import WholeRows, whole_rows
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.column_codes import decode_rows, encode_rows
from dnis_torchrec.blocks.frequency import bags_of
from dnis_torchrec.data.lookup_batches import features_of
from dnis_torchrec.data.task import Outputs, Task
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.soft_selection.cached_tables import writing_to_tables
from dnis_torchrec.soft_selection.features_by_name import read_by_name_
from dnis_torchrec.soft_selection.managed_collisions import remapped
from dnis_torchrec.soft_selection.table_shards import collections, local_shards, ranks_of, table_configs_of

JUDGED_SAMPLES = 1 << 16
"""Samples that are enough; a pass takes a second or two."""
SAMPLES_PER_PASS = 1 << 12
"""Larger batches are cut: bounds the rows that are rounded at a time."""
MOST_STEPS, LONGEST_STEP, LAST_STEP = 12, 4.0, 1e-3
"""Newton's steps to the shift of the output bias, how long each may be, and how long the last one: what it leaves is of
its square."""
SHIFT_UNIT = 2.0**-16
"""What the shift is a multiple of."""


@dataclass(frozen=True, eq=False)
class _Judged:
    """A batch, and what is known of it before anything is rounded.

    Attributes:
        batch: of this rank.
        predictions: ``(B, T)`` float64.
        at: the loss around them.
        rows: table -> those that the batches of all ranks read, ``(n,)`` int64, rising.
    """

    batch: Batch
    predictions: Tensor
    at: LossDerivatives
    rows: Mapping[str, Tensor]


class LossSample:
    """The first samples of a split, ready to be predicted with tables in codes.

    Distributed: that of `whole_rows`, one forward pass of each batch; per batch and table the ids that ranks read are
    gathered.

    Args:
        model: trained, its tables in their axes, sharded or not; called as `curvature` calls it.
        batches: of this rank.
        loss: see `curvature`.
        is_held_out: whether the model was not trained on them.
        has_bias: whether the model has an output bias, which goes up by what keeps the mean of the loss's derivatives
            (see `dnis_torchrec.allocation.output_bias`).
        num_samples: that are enough, of all ranks together; whole batches are taken.

    Raises:
        ValueError: as `curvature`.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        *,
        loss: Loss | Task,
        is_held_out: bool,
        has_bias: bool = False,
        num_samples: int = JUDGED_SAMPLES,
    ) -> None:
        found = collections(model)
        tables = [table for collection in found.values() for table in table_configs_of(collection)]
        self._model, self._loss, self._has_bias = model, loss, has_bias
        self.is_held_out = is_held_out
        self._ranks, self._batches = ranks_of(*found.values()), list[_Judged]()
        shards = [shard for collection in found.values() for shard in local_shards(collection)]
        shapes = {table.name: (table.num_embeddings, table.embedding_dim) for table in tables}
        self._tables = whole_rows(shards, shapes, self._ranks)
        for place, batch in first_batches(batches, loss, self._ranks, num_samples, SAMPLES_PER_PASS):
            predictions, at = predictions_of(model, batch, loss, place, self._ranks)
            with on_all(self._ranks):
                ids = _ids_by_table(remapped(model, features_of(batch)), tables, place)
            rows = {name: self._ranks.concatenate(of_table).unique() for name, of_table in ids.items()}
            self._batches.append(_Judged(batch, predictions, at, rows))

    def predict(self, scheme: MixedDimensionScheme) -> Prediction:
        """Predicts what tables in the codes of a scheme lose. The model does not change.

        The rows that a batch reads are rounded where they lie, and put back once it is predicted.

        Distributed: one forward pass of each batch, with that of `rounded_rows`, and one all_reduce of two numbers,
        and one more for each of some steps to the shift; all ranks get the same.

        Args:
            scheme: of an `Allocation` for the model.

        Returns:
            What it loses, in units of the loss: below 0 where rounding is predicted to mend what the model has
            overfitted; and by how much its output bias has to go up for that.
        """
        increase, num_samples, shift = self._sums(scheme, self._batches)
        return Prediction(loss_increase=increase / num_samples, output_shift=shift)

    def predict_learnt(self, scheme: MixedDimensionScheme, blocks: RowBlocks) -> Prediction:
        """Predicts the same once these samples, which should be held out, have taught the scales. The model stays.

        What is learnt on samples is better there than elsewhere. So what it loses is predicted crosswise: every second
        batch with the scales that the others teach, and these with its own.

        Distributed: that of `learnt_gains`, `rounded_rows` and `predict`, twice, and two all_reduces of three numbers.

        Args:
            scheme: of an `Allocation` for the model.
            blocks: its blocks.

        Returns:
            With the codes that all samples together teach. One batch, of a few thousand samples, teaches nothing: on
            what could it be seen to hold?
        """
        halves = self._batches[::2], self._batches[1::2]
        if not halves[1]:
            return self.predict(scheme)
        learnt = self._learn(scheme, blocks, self._batches)
        _, _, shift = self._sums(learnt, self._batches)
        crossed = [self._sums(self._learn(scheme, blocks, own), other) for own, other in (halves, halves[::-1])]
        increase, num_samples = (sum(part[index] for part in crossed) for index in (0, 1))
        return Prediction(loss_increase=increase / num_samples, output_shift=shift, scheme=learnt)

    def _sums(self, scheme: MixedDimensionScheme, batches: Sequence[_Judged]) -> tuple[float, float, float]:
        """The loss that batches lose together, over all ranks, their samples, and the shift of the output bias."""
        rounded = []
        for index, judged in enumerate(batches):
            place = f"batch {index}, in codes"
            with rounded_rows(self._model, self._tables, scheme, judged.rows):
                rounded.append(_predicted(self._model, judged.batch, self._loss, place, self._ranks))
        outputs_of_all = [outputs for outputs, _, _ in rounded]
        shift = self._shift(batches, outputs_of_all) if self._has_bias else 0.0
        sums = torch.zeros(2, dtype=torch.float64)
        for judged, (outputs, predictions, at) in zip(batches, rounded, strict=True):
            moved = predictions + shift
            loss = self._around(judged, outputs, shift).loss if shift else at.loss
            sums += torch.tensor([self._increase(judged, moved, loss), len(moved)])
        increase, num_samples = self._ranks.sum_(sums).tolist()
        return increase, num_samples, shift

    def _learn(
        self, scheme: MixedDimensionScheme, blocks: RowBlocks, batches: Sequence[_Judged]
    ) -> MixedDimensionScheme:
        """The same codes, that stand for what some batches teach."""
        rows = {name: torch.cat([judged.rows[name] for judged in batches]).unique() for name in self._tables}
        first = sum(float(judged.at.first.square().sum()) for judged in batches)
        second = sum(float(judged.at.second.diagonal(dim1=1, dim2=2).sum()) for judged in batches)
        sums = torch.tensor([first, second, sum(len(judged.predictions) for judged in batches)], dtype=torch.float64)
        first, second, num_samples = self._ranks.sum_(sums).tolist()
        if not second > 0:
            return scheme
        with rounded_rows(self._model, self._tables, scheme, rows):
            gains = learnt_gains(
                self._model,
                self._tables,
                scheme,
                [judged.batch for judged in batches],
                rows,
                blocks,
                loss=self._loss,
                noise=first / second / num_samples,
            )
        return with_gains(scheme, gains)

    def _shift(self, batches: Sequence[_Judged], rounded: list[Outputs]) -> float:
        """By how much outputs go up so that the loss's derivatives add up to what they did: by Newton's steps.

        Returns:
            A multiple of `SHIFT_UNIT`, so that float32 sums in another order give the same. 0 where steps lead nowhere.
        """
        own = sum(float(judged.at.first.sum()) for judged in batches)
        wanted, shift = float(self._ranks.sum_(torch.tensor([own], dtype=torch.float64))), 0.0
        for _ in range(MOST_STEPS):
            sums = torch.zeros(2, dtype=torch.float64)
            for judged, outputs in zip(batches, rounded, strict=True):
                at = self._around(judged, outputs, shift)
                sums += torch.tensor([float(at.first.sum()), float(at.second.sum())], dtype=torch.float64)
            first, second = self._ranks.sum_(sums).tolist()
            step = (wanted - first) / second if second > 0 else math.nan
            if not abs(step) <= LONGEST_STEP:
                return 0.0
            shift += step
            if abs(step) < LAST_STEP:
                return round(shift / SHIFT_UNIT) * SHIFT_UNIT
        return 0.0

    def _around(self, judged: _Judged, outputs: Outputs, shift: float) -> LossDerivatives:
        """The loss around the outputs of a batch, all of them that much higher."""
        assert isinstance(outputs, Tensor)  # of a model of one output
        batch = judged.batch.to(outputs.device)
        return derivatives_at(outputs + shift, batch, self._loss, "outputs in codes")[1]

    def _increase(self, judged: _Judged, rounded: Tensor, loss: float) -> float:
        """Of a batch's samples together."""
        increase = len(rounded) * (loss - judged.at.loss)
        expected = float((judged.at.first * (rounded - judged.predictions)).sum())
        return increase if self.is_held_out else increase - expected


def predictions_of(
    model: nn.Module, batch: Batch, loss: Loss | Task, place: str, ranks: Ranks
) -> tuple[Tensor, LossDerivatives]:
    """The predictions of one batch in evaluation mode, and the loss around them.

    Args:
        model: sharded or not, a `TrainTask` or what one calls.
        batch: of this rank.
        loss: see `curvature`.
        place: which batch, for the error.
        ranks: that hold the model; what is wrong on one raises on all.

    Returns:
        ``(B, T)`` float64, those that the loss depends on, and the loss.

    Raises:
        ValueError: if the model returns something else.
    """
    return _predicted(model, batch, loss, place, ranks)[1:]


@torch.no_grad()
def _predicted(
    model: nn.Module, batch: Batch, loss: Loss | Task, place: str, ranks: Ranks
) -> tuple[Outputs, Tensor, LossDerivatives]:
    """What the model returns of a batch, and `predictions_of` it."""
    read_by_name_(model, refuse_weights=None)
    batch = batch.to(device_of(model))
    with evaluating(model):
        outputs = outputs_of(model, batch, loss)
    with on_all(ranks):
        predictions, at = derivatives_at(outputs, batch, loss, place)
    return outputs, predictions.double(), at


@contextmanager
def rounded_rows(
    model: nn.Module, tables: Mapping[str, WholeRows], scheme: MixedDimensionScheme, rows: Mapping[str, Tensor]
) -> Iterator[None]:
    """Within the block some rows hold the values that they would be served with; afterwards their own, bit for bit.

    Distributed: one all_reduce of the rows of each table that is cut by columns; else local.

    Args:
        model: sharded or not.
        tables: all of it, see `whole_rows`.
        scheme: with codes of its tables.
        rows: table -> which rows, ``(n,)`` int64, rising, each once; the same on every rank.
    """
    own: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        with torch.no_grad(), writing_to_tables(model):
            for name, table in tables.items():
                for weight, place, rounded in _rounded(table, scheme.tables[name], rows[name]):
                    own.append((weight, place, weight[place]))
                    weight[place] = rounded
        yield
    finally:
        with torch.no_grad(), writing_to_tables(model):
            for weight, place, values in own:
                weight[place] = values


def _rounded(whole: WholeRows, table: TableScheme, rows: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For every shard of this rank: its weights, the places of some of the table's rows, and what they are in codes."""
    blocks = table.routing.block_of(rows)

    def in_codes(values: Tensor, of_blocks: Tensor) -> Tensor:
        encoded = encode_rows(values, of_blocks, table.codes, place=f"table {table.name!r}")
        return decode_rows(encoded, of_blocks, table.codes)

    gathered = None
    if whole.is_cut:
        sample = RowSample(rows, blocks, torch.ones(len(rows), dtype=torch.float64))
        gathered = in_codes(sampled_values(sample, whole.shards, table.embedding_dim, 1, whole.ranks), blocks)
    found = []
    for shard in whole.shards:
        is_here = (rows >= shard.first_row) & (rows < shard.first_row + len(shard.weight))
        place = (rows[is_here] - shard.first_row).to(shard.weight.device)
        if gathered is None:
            rounded = in_codes(shard.weight[place].cpu().float(), blocks[is_here])
        else:
            rounded = gathered[is_here, shard.first_column : shard.first_column + shard.weight.shape[1]]
        found.append((shard.weight, place, rounded.to(shard.weight)))
    return found


def _ids_by_table(features: KeyedJaggedTensor, tables: Iterable[EmbeddingBagConfig], place: str) -> dict[str, Tensor]:
    """Table -> the rows that a batch reads, each once."""
    jagged = copy.copy(features).to_dict()  # the batch itself is left as it was: see jagged_by_key
    return {
        table.name: torch.cat([ids for ids, _ in bags_of(table, jagged, place).values()]).unique() for table in tables
    }
