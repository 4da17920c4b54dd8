"""Curvature: what every column of every block is worth to the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count, pairwise

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from dnis_torchrec.allocation.curvature_sums import Curvature, CurvatureSums, LookedUp
from dnis_torchrec.allocation.loss_derivatives import (
    Loss,
    LossDerivatives,
    loss_derivatives,
    task_derivatives,
)
from dnis_torchrec.allocation.pooled_blocks import Lookup, WatchedCollection, watching
from dnis_torchrec.allocation.sequence_blocks import watched_collection
from dnis_torchrec.allocation.settings import ENOUGH_SAMPLES
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.data.labels import check_labels
from dnis_torchrec.data.lookup_batches import for_lookup
from dnis_torchrec.data.over_ranks import SAME_BATCHES
from dnis_torchrec.data.recipe import TrainTask
from dnis_torchrec.data.split_checks import check_batch
from dnis_torchrec.data.task import LossTask, Outputs, Task
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.selection.features_by_name import read_by_name_
from dnis_torchrec.selection.table_shards import collections, ranks_of, table_configs_of

LARGER_SAMPLE = 4
"""By which a sample grows that reads nothing of a table."""
BYTES_AT_A_TIME = 1 << 26
"""Bytes, roughly, that a pass holds beside the model's own activations. Larger batches are cut."""


def curvature(
    model: nn.Module,
    batches: Iterable[Batch],
    blocks: RowBlocks,
    *,
    loss: Loss | Task,
    num_samples: int | None = ENOUGH_SAMPLES,
    warns: bool = True,
    couplings: bool = True,
) -> Curvature:
    """Measures gradient and curvature of the loss in alpha, at alpha = 1, per table, block and
    column.

        G_bc = mean over samples of L'(z) dz/dalpha_bc        H_bc = mean over samples of L''(z)
        (dz/dalpha_bc)^2

    The model is called in evaluation mode; neither a weight nor a mode of it is changed. Rows of no
    block, and empty bags, count for nothing; a table that no sample reads has zeros. Of a prepared
    model both are in relative steps of its alpha: what scaling the tables is worth that `merge_`
    would make. A warning (from rank 0) tells of a model that looks untrained, because then neither
    the order of the columns nor the sum of H means anything.

    Distributed: every rank measures the samples of its own batches, on its own slice of a split.
        There are as many
    batches on every rank, and where TorchRec's sharding asks for it as large ones. Per batch some
    numbers are gathered and a sharded collection is called once, or twice for multi-hot features;
    all sums are added up by one all_reduce, couplings by one for each table, and every rank returns
    the same.

    Args:
        model: trained; called as ``model(dense_features=..., sparse_features=...)``, plain,
            prepared or sharded, or a `TrainTask` of such a model. Returns predictions ``(B,)``,
            ``(B, 1)`` or ``(B, T)``, each of its own sample alone; or what a task takes.
        batches: from training or validation data; the first ones are taken, so they should be
            shuffled. Labels are ``(B,)``, or ``(B, ...)`` as the loss wants them; the loss gets
            them as float64.
        blocks: of at least the model's tables; of any scope, each table has its own S blocks.
        loss: called with (predictions, labels): ``nn.MSELoss()``, ``nn.BCEWithLogitsLoss()`` or any
            mean over samples that is twice differentiable in the predictions; or a recipe's task,
            whose loss is so in its outputs.
        num_samples: samples that are enough, of all ranks together: no further batch is taken once
            there are so many; None takes all.
        warns: tell of a model that looks untrained; for one that is measured again and again once
            is enough.
        couplings: measure K, too: 8 S D^2 bytes for each table.

    Returns:
        G and H of every table of the model's EmbeddingBagCollections.

    Raises:
        ValueError: for blocks of other tables, no batches, bad labels or features, predictions that
            are not finite, or a loss that is no mean over samples; on all ranks for what one of
            them finds in its batches.
        NotImplementedError: for a loss that cannot be derived twice, or collections that do not
            look up one bag per sample.

    Example:
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from dnis_torchrec import blocks_from_counts
        >>> from dnis_torchrec.blocks.frequency import FrequencyCounts
        >>> class Sum(nn.Module):
        ...     def __init__(self, table):
        ...         super().__init__()
        ...         self.tables = EmbeddingBagCollection(tables=[table])
        ...
        ...     def forward(self, dense_features, sparse_features):
        ...         return self.tables(sparse_features).values().sum(1)
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=2, embedding_dim=2, feature_names=["f"])
        >>> model, features = Sum(table), KeyedJaggedTensor(["f"], torch.tensor([0, 1]), lengths=torch.tensor([1, 1]))
        >>> _ = model.tables.embedding_bags["t"].weight.data.copy_(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
        >>> counts = FrequencyCounts({"t": torch.tensor([2, 1])}, {"f": 1}, 3)
        >>> blocks = blocks_from_counts(counts, [table], num_blocks=2)
        >>> batch = Batch(torch.zeros(2, 1), features, labels=torch.tensor([3.0, 3.0]))
        >>> found = curvature(model, [batch], blocks, loss=nn.MSELoss())
        >>> found, found.curvature["t"].tolist()
        (Curvature(1 table, 2 samples, relative error inf), [[1.0, 4.0], [0.0, 9.0]])
    """
    enough = math.inf if num_samples is None else num_samples
    check(enough >= 1, "num_samples", "at least 1, or None for all", num_samples)
    found = collections(model)
    check(bool(found), "model", "an embedding collection in it", "none")
    read_by_name_(model, refuse_weights=None)
    device, ranks = device_of(model), ranks_of(*found.values())
    tables = [table for collection in found.values() for table in table_configs_of(collection)]
    of = [watched_collection(collection, blocks, device) for collection in found.values()]
    sums = CurvatureSums(tables, blocks, device, couplings=couplings)
    with evaluating(model), watching(of) as lookups:
        measure = _Measure(model, loss, ranks, lookups)
        for place, batch in first_batches(batches, loss, ranks, enough, _samples_at_a_time(of)):
            sums.add(measure.look_up(batch.to(device), place))
    return sums.over(ranks, loss, warns=warns)


def curvature_of_read_tables(
    model: nn.Module,
    batches: Iterable[Batch],
    blocks: RowBlocks,
    *,
    loss: Loss | Task,
    num_samples: int | None = ENOUGH_SAMPLES,
    warns: bool = True,
) -> Curvature:
    """Measures `curvature` on so many samples that every table is read that training reads."""
    read = {table for table, occurrences in blocks.occurrences.items() if bool(occurrences.any())}
    while True:
        found = curvature(model, batches, blocks, loss=loss, num_samples=num_samples, warns=warns)
        if num_samples is None or found.num_samples < num_samples or not read & found.unread:
            return found
        num_samples, warns = LARGER_SAMPLE * found.num_samples, False


def device_of(model: nn.Module) -> torch.device:
    """Returns the device on which a model takes its batches; its tables may lie elsewhere."""
    return (
        model.device
        if isinstance(model, DistributedModelParallel)
        else next(model.parameters()).device
    )


def _samples_at_a_time(of: Iterable[WatchedCollection]) -> int:
    """Returns the number of samples whose pooled embeddings, gradients and blocks fit into
    `BYTES_AT_A_TIME`."""
    return max(1, BYTES_AT_A_TIME // (4 * sum(watched.floats_per_sample for watched in of)))


def on_all(ranks: Ranks) -> AbstractContextManager[None]:
    """Raises on all ranks for what is wrong on one; a process whose model is its own does not ask
    others."""
    return together(ranks.group) if ranks.world_size > 1 else nullcontext()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards every module is in the mode that it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


def first_batches(
    batches: Iterable[Batch], loss: Loss | Task, ranks: Ranks, enough: float, at_a_time: int
) -> Iterator[tuple[str, Batch]]:
    """This rank's batches until all ranks together have enough samples, cut alike on all of them."""
    stream, taken = iter(batches), 0
    for index in count():
        if taken >= enough:
            return
        place, batch = f"batch {index}", None
        with on_all(ranks):
            batch = next(stream, None)
            if batch is not None:
                batch = checked_batch(batch, loss, place)
        size = torch.tensor([-1 if batch is None else len(batch.labels)])
        sizes = ranks.concatenate(size).tolist()
        if max(sizes) < 0:
            check(index > 0, "batches", "at least one batch", "none")
            return
        ended = next((rank for rank, size in enumerate(sizes) if size < 0), None)
        remedy = "leave out what does not fill a batch on every rank"
        check(
            ended is None,
            "batches",
            SAME_BATCHES,
            f"{index} on rank {ended}, more on another",
            remedy,
        )
        taken += sum(sizes)
        parts = min(math.ceil(max(sizes) / at_a_time), *sizes)
        if batch is None or parts == 1:
            yield from [(place, batch)] if batch is not None else []
            continue
        bounds = torch.linspace(0, len(batch.labels), parts + 1).round().long().tolist()
        for first, last in pairwise(bounds):
            yield place, slice_of(batch, first, last)


def checked_batch(batch: Batch, loss: Loss | Task, place: str) -> Batch:
    """Checks a batch and its labels. Local, no collective."""
    labels, num_samples = batch.labels, batch.sparse_features.stride()
    is_labelled = (
        isinstance(labels, Tensor) and labels.dim() > 0 and (len(labels) > 0 or not num_samples)
    )
    remedy = "take batches of training or validation data"
    check(
        is_labelled,
        f"{place}, labels",
        f"those of {num_samples} samples, for the loss",
        "none",
        remedy,
    )
    criterion = loss.criterion if isinstance(loss, LossTask) else loss
    if not isinstance(criterion, Task):
        check_labels(labels.flatten(), criterion, place)
    check_batch(batch, place)
    return for_lookup(batch)


class _Measure:
    """A model called on batches, while its collections are watched."""

    def __init__(
        self, model: nn.Module, loss: Loss | Task, ranks: Ranks, lookups: list[Lookup]
    ) -> None:
        self._model, self._loss, self._ranks, self._lookups = model, loss, ranks, lookups

    def look_up(self, batch: Batch, place: str) -> LookedUp:
        """All that needs the other ranks, too: the forward pass, and lookups block by block."""
        self._lookups.clear()
        with torch.enable_grad():
            outputs = outputs_of(self._model, batch, self._loss)
            with on_all(self._ranks):
                predictions, at = derivatives_at(outputs, batch, self._loss, place)
                remedy = "do not detach the embeddings in the model"
                requirement = "predictions that come from embeddings"
                check(predictions.requires_grad, place, requirement, "constants", remedy)
            leaves = [lookup.leaf for lookup in self._lookups]
            gradients = [
                torch.autograd.grad(
                    of_output.sum(), leaves, retain_graph=True, materialize_grads=True
                )
                for of_output in predictions.unbind(1)
            ]
        for lookup in self._lookups:
            if lookup.features.stride() != len(predictions):
                supported = "supported are collections that look up one bag per sample"
                received = f"{lookup.features.stride()} bags of {len(predictions)} samples"
                tables = sorted({output.table for output in lookup.of.outputs})
                raise NotImplementedError(describe(f"tables {tables}", supported, received))
        with torch.no_grad():
            apart = [lookup.apart() for lookup in self._lookups]
        stacked = [torch.stack(of_leaf) for of_leaf in zip(*gradients, strict=True)]
        calls = list(zip(self._lookups, apart, stacked, strict=True))
        return LookedUp(at, calls)


def outputs_of(model: nn.Module, batch: Batch, loss: Loss | Task) -> Outputs:
    """Calls a model on a batch, in the mode that it is in."""
    task = get_unwrapped_module(model)
    called = task.model if isinstance(task, TrainTask) else task
    of_task = loss if isinstance(loss, Task) and not isinstance(loss, LossTask) else Task()
    return of_task.outputs(called, batch)


def derivatives_at(
    outputs: Outputs, batch: Batch, loss: Loss | Task, place: str
) -> tuple[Tensor, LossDerivatives]:
    """Derives the loss in what a model returns of a batch. Local, no collective."""
    criterion = loss.criterion if isinstance(loss, LossTask) else loss
    if isinstance(criterion, Task):
        return task_derivatives(criterion, batch, outputs, place)
    labels, predictions = batch.labels, _of_samples(outputs, len(batch.labels), place)
    finite = predictions.isfinite()
    if not bool(finite.all()):
        remedy = "take weights of a model whose training did not diverge"
        raise ValueError(
            describe(place, "finite predictions", float(predictions[~finite][0].detach()), remedy)
        )
    labels = labels.flatten() if labels.numel() == predictions.numel() == len(labels) else labels
    return predictions, loss_derivatives(criterion, predictions, labels)


def _of_samples(predictions: object, num_samples: int, place: str) -> Tensor:
    """Predictions as ``(B, T)``."""
    requirement = f"predictions ({num_samples},) or ({num_samples}, T) of the model"
    remedy = "give a model that returns its predictions alone, or a task"
    if not isinstance(predictions, Tensor):
        raise ValueError(describe(place, requirement, type(predictions).__name__, remedy))
    is_of_samples = predictions.dim() in (1, 2) and len(predictions) == num_samples
    check(is_of_samples, place, requirement, tuple(predictions.shape), remedy)
    return predictions if predictions.dim() == 2 else predictions.unsqueeze(1)
