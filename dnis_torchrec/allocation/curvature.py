"""Curvature: how fast the loss rises as a column of a block is scaled away from 1."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation import contributions
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.batches import check_batch, for_lookup, slice_of
from dnis_torchrec.data.over_ranks import SAME_BATCHES
from dnis_torchrec.data.task import LossTask, Outputs, Task, TrainTask, check_labels, check_outputs
from dnis_torchrec.ranks import Ranks, progress_bar
from dnis_torchrec.selection.shards import collections, ranks_of, table_configs_of
from dnis_torchrec.selection.torchrec import read_by_name_
from dnis_torchrec.selection.torchrec_inputs import evaluating as evaluating

ENOUGH_SAMPLES = 1 << 14
"""Samples that columns are measured on: the error of the sum of their worth is about a hundredth
then, and four times as many give tables that are no better."""

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Called with (predictions, labels), both float64: their mean loss, a scalar."""

RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""Tolerances within which one float64 number, computed in two ways, counts as equal."""
SINGLE = 1e-3
"""The same for the numbers of a task, which are its model's, in float32 mostly."""


@dataclass(frozen=True)
class LossDerivatives:
    """A loss around the predictions of a batch."""

    loss: float
    first: Tensor
    second: Tensor


@torch.enable_grad()
def loss_derivatives(loss: Loss, predictions: Tensor, labels: Tensor) -> LossDerivatives:
    """Derives a loss twice in the prediction of every sample: by T + 2 passes over numbers of the
    batch's size."""
    z = predictions.detach().double().requires_grad_()
    y = _labels_of(z, labels)
    value = _of(loss, z, y)
    _check_finite(value, _place(loss))
    of_all_twice = _of(loss, torch.cat([z, z]), torch.cat([y, y]))
    mean, twice = float(value.detach()), float(of_all_twice.detach())
    is_mean = math.isclose(mean, twice, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    both = f"{mean:g}, and {twice:g} of every sample twice"
    check(is_mean, _place(loss), "a mean over the samples", both, "give it reduction='mean'")
    return _derivatives(value, z, _place(loss), RELATIVE)


def _derivatives(value: Tensor, z: Tensor, place: str, tolerance: float) -> LossDerivatives:
    """Derives a mean over samples, computed from ``(B, T)`` predictions."""
    num_samples, num_outputs = z.shape
    first = _derive(value, z, place, create_graph=True) * num_samples
    rows = [_derive(first[:, output].sum(), z, place) for output in range(num_outputs)]
    second = torch.stack(rows, dim=1)
    probe = torch.arange(1, z.numel() + 1, dtype=z.dtype, device=z.device).cos().view_as(z)
    cross = _derive((first * probe).sum(), z, place)
    vector = torch.einsum("ntu,nt->nu", second, probe)
    margin = tolerance * float(vector.abs().max()) + ABSOLUTE
    apart = torch.allclose(cross, vector, tolerance, margin)
    check(apart, place, "a mean of the losses of single samples", "one in which samples meet")
    return LossDerivatives(float(value.detach()), first.detach().double(), second.double())


@torch.enable_grad()
def task_derivatives(
    task: Task, batch: Batch, outputs: Outputs, place: str
) -> tuple[Tensor, LossDerivatives]:
    """Derives a task's loss twice in the outputs of its model, of every sample. Local, no
    collective."""
    place = f"{place}, task {type(task).__name__}"
    check_outputs(outputs, place)
    by_name = {"": outputs} if isinstance(outputs, Tensor) else dict(outputs)

    def loss_at(values: Mapping[str, Tensor]) -> Tensor:
        by_table = {name: values.get(name, part) for name, part in by_name.items()}
        value = task.loss(batch, by_table[""] if isinstance(outputs, Tensor) else by_table)
        return value.sum()

    leaves = {
        name: part.detach().requires_grad_()
        for name, part in by_name.items()
        if isinstance(part, Tensor)
        and part.is_floating_point()
        and part.shape[:1] == batch.labels.shape[:1]
    }
    value, requirement = loss_at(leaves), "a loss that depends on the outputs"
    _check_finite(value, place)
    remedy = "take what comes from the model from the outputs in its method 'loss'"
    check(value.requires_grad, place, requirement, f"constants {list(by_name)}", remedy)
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    used = [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
    columns = [by_name[name].reshape(len(batch.labels), -1) for name in used]
    whole = torch.cat(columns, dim=1)
    _check_all_finite(whole, place, "finite outputs")
    z = whole.detach().requires_grad_()
    parts = z.split([column.shape[1] for column in columns], dim=1)
    values = {
        name: part.view_as(by_name[name]).to(by_name[name])
        for name, part in zip(used, parts, strict=True)
    }
    return whole, _derivatives(loss_at(values), z, place, SINGLE)


def _check_finite(value: Tensor, place: str) -> None:
    """Checks the loss of a batch: a mean over no sample is not a number."""
    remedy = "leave such batches out; a mean over labels that are ignored has nothing to divide by"
    check(bool(value.isfinite()), place, "a finite loss", float(value.detach()), remedy)


def _check_all_finite(values: Tensor, place: str, requirement: str) -> None:
    """Checks what a model returns of a batch."""
    remedy = "take weights of a model whose training did not diverge"
    for bad in values[~values.isfinite()].tolist():
        raise ValueError(describe(place, requirement, bad, remedy))


def _place(loss: Loss | Task) -> str:
    return f"loss {getattr(loss, '__name__', type(loss).__name__)}"


def _labels_of(z: Tensor, labels: Tensor) -> Tensor:
    """Labels for predictions ``(B, T)``, flat for ``(B, 1)``."""
    if labels.numel() == z.numel() == len(labels):
        labels = labels.flatten()
    # integers beside several outputs are classes, which a float cannot name
    are_classes = z.shape[1] > 1 and labels.dim() == 1 and not labels.is_floating_point()
    return labels.long() if are_classes else labels.double()


def mean_loss(outputs: Outputs, batch: Batch, loss: Loss | Task, place: str) -> Tensor:
    """Returns the mean loss of what a model returns of a batch, a float64 scalar to be derived.
    Local, no collective."""
    criterion = loss.criterion if isinstance(loss, LossTask) else loss
    if isinstance(criterion, Task):
        return criterion.loss(batch, outputs).sum().double()
    z = _of_samples(outputs, len(batch.labels), place).double()
    return _of(criterion, z, _labels_of(z, batch.labels))


def _of(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    value = loss(z.squeeze(1) if z.shape[1] == 1 else z, y)
    is_scalar = isinstance(value, Tensor) and value.numel() == 1
    kind = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    remedy = "give it reduction='mean'"
    check(is_scalar, _place(loss), "a scalar, the mean over the samples", kind, remedy)
    return value.sum()


def _derive(value: Tensor, z: Tensor, place: str, *, create_graph: bool = False) -> Tensor:
    try:
        return torch.autograd.grad(
            value, z, create_graph=create_graph, retain_graph=True, materialize_grads=True
        )[0]
    except RuntimeError as error:
        requirement = "supported are losses that are twice differentiable in the predictions"
        reason = str(error).splitlines()[0]
        raise NotImplementedError(describe(place, requirement, reason)) from error


logger = logging.getLogger(__name__)

LARGEST_STEP = 4.0
"""Norm of G over that of H, up to which a model may be trained: L2 alone holds one back by 1 to 2.
"""
LEAST_CURVATURE = 1e-6
"""Sum of H over the mean loss, below which dropping all tables would cost nothing that counts."""


@dataclass(frozen=True, eq=False, repr=False)
class Curvature:
    """Gradient and curvature of the loss in alpha, for every column of every block, see
    `curvature`."""

    gradient: Mapping[str, Tensor]
    curvature: Mapping[str, Tensor]
    num_samples: int
    relative_error: float
    couplings: Mapping[str, Tensor] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    @property
    def is_zero(self) -> bool:
        """Whether no column moves a prediction: nothing is left to choose by."""
        return not any(bool(of_table.any()) for of_table in self.curvature.values())

    def __repr__(self) -> str:
        error = f"relative error {self.relative_error:.2g}"
        return f"Curvature({len(self.curvature)} tables, {self.num_samples} samples, {error})"


class CurvatureSums:
    """Sums over samples, of this rank."""

    def __init__(
        self,
        tables: Iterable[EmbeddingBagConfig],
        blocks: RowBlocks,
        device: torch.device,
        *,
        couplings: bool,
    ) -> None:
        self._of_tables, self._couplings = dict[str, Tensor](), dict[str, Tensor]()
        zeros = partial(torch.zeros, dtype=torch.float64)
        for table in tables:
            num_blocks, dim = blocks.routings[table.name].num_blocks, table.embedding_dim
            self._of_tables[table.name] = zeros(2, num_blocks, dim, device=device)
            if couplings:
                self._couplings[table.name] = zeros(num_blocks, dim, dim, device=device)
        self._batches, self._reads = zeros(9), zeros(len(self._of_tables))

    @torch.no_grad()
    def add(self, at: LossDerivatives, calls: Sequence[contributions.Call]) -> None:
        """Adds a batch."""
        batch_size = len(at.first)
        for lookup, _, gradient in calls if self._couplings else ():
            for table, reads in lookup.of.reads(lookup, gradient):
                self._couplings[table] += _coupled(reads, at.second, len(self._couplings[table]))
        entries = contributions.entries_by_table(calls, batch_size)
        total, noise = 0.0, 0.0
        for place, table in enumerate(self._of_tables):
            if table not in entries:
                continue
            both = entries[table]
            self._reads[place] += len(both.samples)
            num_blocks = self._of_tables[table].shape[1]
            slopes = torch.einsum("mt,tmd->md", at.first[both.samples], both.worth)
            bends = torch.einsum("tmd,mtu,umd->md", both.worth, at.second[both.samples], both.worth)
            sums = [
                contributions.sum_by_group(part, both.blocks, num_blocks)
                for part in (slopes, bends)
            ]
            self._of_tables[table] += torch.stack(sums)
            total, noise = total + float(sums[1].sum()), noise + float(slopes.square().sum())
        n, loss, bent = batch_size, at.loss * batch_size, float(at.second.abs().sum())
        numbers = [1, n, n * n, total, total * total, total * n, noise, loss, bent]
        self._batches += torch.tensor(numbers)

    def over(self, ranks: Ranks, loss: Loss | Task, *, warns: bool) -> Curvature:
        """Means over the samples of all ranks. One all_reduce, and one for the couplings of each
        table."""
        of_tables = [both.flatten().cpu() for both in self._of_tables.values()]
        flat = [self._batches, self._reads, *of_tables]
        sums = ranks.sum_(torch.cat(flat)).split([part.numel() for part in flat])
        batches, n, n_n, total, total_total, total_n, noise, mean_loss, bent = sums[0].tolist()
        requirement, value = "one that is twice differentiable", "second derivatives of 0"
        remedy = "choose one that bends, such as MSELoss"
        check(bent > 0, _place(loss), requirement, value, remedy)
        means = {
            name: (values / n).view(both.shape)
            for (name, both), values in zip(self._of_tables.items(), sums[2:], strict=True)
        }
        mean = total / n
        # of batches' sums, about the mean
        spread = total_total - 2 * mean * total_n + mean * mean * n_n
        error = math.inf
        if batches > 1 and total:
            error = math.sqrt(max(spread, 0.0) * batches / (batches - 1)) / abs(total)
        reads = zip(means, sums[1].tolist(), strict=True)
        result = Curvature(
            gradient={name: both[0] for name, both in means.items()},
            curvature={name: both[1] for name, both in means.items()},
            num_samples=round(n),
            relative_error=error,
            couplings={name: ranks.sum_(part.cpu()) / n for name, part in self._couplings.items()},
            unread=frozenset(name for name, times in reads if not times),
        )
        if warns and ranks.is_first:
            _warn_of_untrained(result, mean_loss / n, noise / (n * n))
        return result


def _coupled(reads: contributions.Reads, second: Tensor, num_blocks: int) -> Tensor:
    """``(S, D, D)``, the couplings of a table's reads through one feature."""
    slopes = reads.slopes.double()
    bent = torch.einsum("mtu,umd->tmd", second[reads.samples], slopes) * reads.times[:, None]
    order = reads.blocks.argsort(stable=True)
    sizes = torch.bincount(reads.blocks, minlength=num_blocks).tolist()
    of_blocks = zip(*(x[:, order].split(sizes, dim=1) for x in (bent, slopes)), strict=True)
    return torch.stack([one.flatten(0, 1).T @ other.flatten(0, 1) for one, other in of_blocks])


def _warn_of_untrained(result: Curvature, loss: float, noise: float) -> None:
    """Warns where the tables do next to nothing, or columns would rather change by several times
    their size."""
    gradient, curvature = (
        torch.cat([part.flatten() for part in of_tables.values()])
        for of_tables in (result.gradient, result.curvature)
    )
    bend, bends = float(curvature.sum()), float(curvature.norm())
    slopes = math.sqrt(max(float(gradient.square().sum()) - noise, 0.0))
    if bend <= LEAST_CURVATURE * abs(loss) or slopes > LARGEST_STEP * bends:
        logger.warning(
            "the model looks untrained: the gradient of the loss in alpha has norm %.3g, its "
            "curvature norm %.3g and sum %.3g, at a loss of %.3g; train the model first",
            *(slopes, bends, bend, loss),
        )


LARGER_SAMPLE = 4
"""The sample grows by this factor if it reads no row of a table."""
DERIVATIVE_BYTES = 1 << 28
"""Most memory for the second derivatives of a batch; larger batches are cut."""
BYTES_AT_A_TIME = 1 << 26
"""About as many bytes as a pass takes beside the model's activations; larger batches are cut."""


def curvature(
    model: nn.Module,
    batches: Iterable[Batch],
    blocks: RowBlocks,
    *,
    loss: Loss | Task,
    num_samples: int | None = ENOUGH_SAMPLES,
    warns: bool = True,
    couplings: bool = True,
    num_outputs: int = 1,
) -> Curvature:
    """Measures gradient and curvature of the loss in alpha, at alpha = 1, per table, block and
    column: means over samples of ``L'(z) dz/dalpha`` and ``L''(z) (dz/dalpha)^2``.

    Of a prepared model all are in relative steps of its alpha: what scaling the tables is worth
    that `merge_` would make. Distributed: every rank measures its own batches, as many on each;
    lookups go twice for multi-hot features, all_reduces add up all sums.
    """
    enough = math.inf if num_samples is None else num_samples
    check(enough >= 1, "num_samples", "at least 1, or None for all", num_samples)
    result = collections(model)
    check(bool(result), "model", "an embedding collection in it", "none")
    read_by_name_(model, refuse_weights=None)
    device, ranks = device_of(model), ranks_of(*result.values())
    tables = [table for collection in result.values() for table in table_configs_of(collection)]
    of = [
        contributions.watched_collection(collection, blocks, device)
        for collection in result.values()
    ]
    sums = CurvatureSums(tables, blocks, device, couplings=couplings)
    with evaluating(model), contributions.watching(of) as lookups:
        floats = sum(part.floats_per_sample for part in of)
        at_a_time = max(1, min(BYTES_AT_A_TIME // (4 * floats), samples_within(num_outputs)))
        stream = first_batches(batches, loss, ranks, enough, at_a_time)
        most = None if math.isinf(enough) else enough
        bar = progress_bar(None, "measuring", total=most, unit=" samples", delay=1)
        for place, batch in stream:
            bar.update(ranks.world_size * len(batch.labels))
            sums.add(*look_up(model, batch.to(device), loss, place, ranks, lookups))
        bar.close()
    return sums.over(ranks, loss, warns=warns)


def curvature_of_read_tables(
    model: nn.Module,
    batches: Iterable[Batch],
    blocks: RowBlocks,
    *,
    loss: Loss | Task,
    num_samples: int | None = ENOUGH_SAMPLES,
    warns: bool = True,
    num_outputs: int = 1,
) -> Curvature:
    """Measures `curvature` on so many samples that every table is read that training reads."""
    read = {table for table, occurrences in blocks.occurrences.items() if bool(occurrences.any())}
    measure = partial(curvature, model, batches, blocks, loss=loss, num_outputs=num_outputs)
    while True:
        result = measure(num_samples=num_samples, warns=warns)
        if num_samples is None or result.num_samples < num_samples or not read & result.unread:
            return result
        num_samples, warns = LARGER_SAMPLE * result.num_samples, False


def device_of(model: nn.Module) -> torch.device:
    """Returns the device on which a model takes its batches; its tables may lie elsewhere."""
    if isinstance(model, DistributedModelParallel):
        return model.device
    return next(chain(model.parameters(), model.buffers())).device


def samples_within(num_outputs: int) -> int:
    """Returns the number of samples whose second derivatives fit into `DERIVATIVE_BYTES`."""
    return max(1, DERIVATIVE_BYTES // (8 * num_outputs**2))


def first_batches(
    batches: Iterable[Batch],
    loss: Loss | Task,
    ranks: Ranks,
    enough: float,
    at_a_time: int,
    least: int = 1,
) -> Iterator[tuple[str, Batch]]:
    """This rank's batches until all ranks together have enough samples, cut alike on all: into
    `least` parts at least, unless one has too few samples."""
    stream, done = iter(batches), 0
    for index in count():
        if done >= enough:
            return
        place, batch = f"batch {index}", None
        with ranks.together():
            batch = next(stream, None)
            if batch is not None:
                batch = checked_batch(batch, loss, place)
        size = torch.tensor([-1 if batch is None else len(batch.labels)])
        sizes = ranks.concatenate(size).tolist()
        if max(sizes) < 0:
            check(index > 0, "batches", "at least one batch", "none")
            return
        empty = next((rank for rank, size in enumerate(sizes) if size < 0), None)
        shortage = f"{index} on rank {empty}, more on another"
        remedy = "leave out what does not fill a batch on every rank"
        check(empty is None, "batches", SAME_BATCHES, shortage, remedy)
        done += sum(sizes)
        cuts = min(max(least, math.ceil(max(sizes) / at_a_time)), *sizes)
        if batch is not None and cuts == 1:
            yield place, batch
        elif batch is not None:
            bounds = torch.linspace(0, len(batch.labels), cuts + 1).round().long().tolist()
            for first, last in pairwise(bounds):
                yield place, slice_of(batch, first, last)


def checked_batch(batch: Batch, loss: Loss | Task, place: str) -> Batch:
    """Checks a batch and its labels. Local, no collective."""
    labels, num_samples = batch.labels, batch.sparse_features.stride()
    has_labels = isinstance(labels, Tensor) and labels.dim() > 0
    has_labels = has_labels and (len(labels) > 0 or not num_samples)
    requirement = f"those of {num_samples} samples, for the loss"
    remedy = "take batches of training or validation data"
    check(has_labels, f"{place}, labels", requirement, "none", remedy)
    criterion = loss.criterion if isinstance(loss, LossTask) else loss
    if not isinstance(criterion, Task):
        check_labels(labels.flatten(), criterion, place)
    check_batch(batch, place)
    return for_lookup(batch)


def look_up(
    model: nn.Module,
    batch: Batch,
    loss: Loss | Task,
    place: str,
    ranks: Ranks,
    lookups: list[contributions.Lookup],
) -> tuple[LossDerivatives, list[contributions.Call]]:
    """All that needs the other ranks, too: a forward pass of a model that is watched, and
    lookups block by block."""
    lookups.clear()
    with torch.enable_grad():
        outputs = outputs_of(model, batch, loss)
        with ranks.together():
            predictions, at = derivatives_at(outputs, batch, loss, place)
            remedy = "do not detach the embeddings in the model"
            requirement = "predictions that come from embeddings"
            check(predictions.requires_grad, place, requirement, "constants", remedy)
        leaves = [lookup.leaf for lookup in lookups]
        gradients = [
            torch.autograd.grad(z.sum(), leaves, retain_graph=True, materialize_grads=True)
            for z in predictions.unbind(1)
        ]
    for lookup in lookups:
        if lookup.features.stride() != len(predictions):
            rule = "supported are collections that look up one bag per sample"
            value = f"{lookup.features.stride()} bags of {len(predictions)} samples"
            tables = sorted({output.table for output in lookup.of.outputs})
            raise NotImplementedError(describe(f"tables {tables}", rule, value))
    with torch.no_grad():
        apart = [lookup.of.apart(lookup) for lookup in lookups]
    of_leaves = [torch.stack(of_leaf) for of_leaf in zip(*gradients, strict=True)]
    return at, list(zip(lookups, apart, of_leaves, strict=True))


def outputs_of(model: nn.Module, batch: Batch, loss: Loss | Task) -> Outputs:
    """Calls a model on a batch, in the mode that it is in."""
    task = get_unwrapped_module(model)
    module = task.model if isinstance(task, TrainTask) else task
    of_task = loss if isinstance(loss, Task) and not isinstance(loss, LossTask) else Task()
    return of_task.outputs(module, batch)


def derivatives_at(
    outputs: Outputs, batch: Batch, loss: Loss | Task, place: str
) -> tuple[Tensor, LossDerivatives]:
    """Derives the loss in what a model returns of a batch. Local, no collective."""
    criterion = loss.criterion if isinstance(loss, LossTask) else loss
    if isinstance(criterion, Task):
        return task_derivatives(criterion, batch, outputs, place)
    predictions = _of_samples(outputs, len(batch.labels), place)
    _check_all_finite(predictions, place, "finite predictions")
    return predictions, loss_derivatives(criterion, predictions, batch.labels)


def _of_samples(predictions: object, num_samples: int, place: str) -> Tensor:
    """Predictions as ``(B, T)``."""
    requirement = f"predictions ({num_samples},) or ({num_samples}, T) of the model"
    remedy = "give a model that returns its predictions alone, or a task"
    if not isinstance(predictions, Tensor):
        raise ValueError(describe(place, requirement, type(predictions).__name__, remedy))
    is_of_samples = predictions.dim() in (1, 2) and len(predictions) == num_samples
    check(is_of_samples, place, requirement, tuple(predictions.shape), remedy)
    return predictions if predictions.dim() == 2 else predictions.unsqueeze(1)


@torch.no_grad()
def predictions_of(
    model: nn.Module, batch: Batch, loss: Loss | Task, place: str, ranks: Ranks
) -> tuple[Tensor, LossDerivatives]:
    """Predictions ``(B, T)`` of one batch in evaluation mode, and the loss around them."""
    read_by_name_(model, refuse_weights=None)
    batch = batch.to(device_of(model))
    with evaluating(model):
        outputs = outputs_of(model, batch, loss)
    with ranks.together():
        predictions, at = derivatives_at(outputs, batch, loss, place)
    return predictions.double(), at
