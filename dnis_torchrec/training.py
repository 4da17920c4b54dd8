"""What every training run shares, search or baseline: sharding, evaluation, early stopping, plain training.

Shapes: B batch.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding_sharding import USE_ONE_TBE_PER_TABLE
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, EmbeddingModuleShardingPlan, ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dnis_torchrec.block_operators import are_compiled
from dnis_torchrec.checkpoint import load_checkpoint, save_checkpoint
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.denormals import flushing_denormals
from dnis_torchrec.detachable_pipeline import DetachableTrainPipeline
from dnis_torchrec.embedding_modules import SoftSelectionEmbeddingBagCollection
from dnis_torchrec.features_by_name import read_by_name_
from dnis_torchrec.finite import REMEDY, FiniteGuard, NonFiniteError
from dnis_torchrec.frozen_tables import FROZEN_RATE
from dnis_torchrec.lookup_batches import LookupBatches, for_lookup
from dnis_torchrec.metrics import metrics_of
from dnis_torchrec.pruning import RetainedMask
from dnis_torchrec.ranks import world_size_of
from dnis_torchrec.recipe import RankingBatch, Recipe, TrainTask, check_classes
from dnis_torchrec.shard_selection import select_on_shards_
from dnis_torchrec.sharding import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.table_shards import soft_selection_modules

WHOLE_ROWS = frozenset(
    kind.value for kind in (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
)
"""Sharding types, of those with fused kernels, that keep every row in one piece."""
FUSED_OPTIMIZERS = {"adam": EmbOptimType.ADAM, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
"""`Recipe.table_optimizer` -> FBGEMM's optimizer that runs inside the tables' backward."""

BEST_STATE = "best"
"""Name of the checkpoint of the best epoch, in the folder that a training is given."""

PART = "part"
"""What a group of the optimizer of what is not fused holds: tables, `Recipe.row_weights`, or the rest."""
OF_TABLES, OF_ROWS, OF_REST = "tables", "rows", "rest"


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The process group of a run: torchrun's if there is one, else one of world size 1 on this machine alone.

    Denormals are flushed meanwhile: torch's threads, which a run mostly starts after this, inherit that.

    Yields:
        The device to train on: this rank's GPU if CUDA is available, else the CPU.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(torch.distributed.get_node_local_rank(fallback_rank=0)))
        torch.cuda.set_device(device)
    with flushing_denormals():
        if dist.is_initialized():
            yield device
            return
        backend = "nccl" if device.type == "cuda" else "gloo"
        with tempfile.TemporaryDirectory() as folder:
            if dist.is_torchelastic_launched():
                dist.init_process_group(backend)
            else:  # a file, not a port: several runs on one machine never meet
                dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
            try:
                yield device
            finally:
                dist.destroy_process_group()


def check_pooling(model: nn.Module) -> None:
    """Checks that torch itself can look up the tables of a model, which on one process is a plain one when trained.

    FBGEMM's kernels, in which tables are trained, pool weighted bags by MEAN too, as the sharded model of several ranks
    does to the end.

    Args:
        model: not sharded; prepared or not.

    Raises:
        ValueError: on one process, if bags of a MEAN table have weights.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
        >>> check_pooling(EmbeddingBagCollection(tables=[table], is_weighted=True))
    """
    if world_size_of() > 1:
        return
    remedy = "use SUM, with weights that are divided by the length of their bag"
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection) and module.is_weighted():
            for table in module.embedding_bag_configs():
                place, requirement = f"table {table.name!r}", "expected SUM pooling of bags with weights"
                check(table.pooling != PoolingType.MEAN, place, requirement, "MEAN", remedy)


def shard(
    task: TrainTask,
    recipe: Recipe,
    device: torch.device,
    *,
    whole_rows: Collection[str] = (),
    replicated: bool = False,
    prefetched: bool = False,
    batch_size: int | None = None,
) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    """Shards a model as the recipe's table optimizer needs it.

    ``"adam"`` on a CPU runs in the dense compute kernel and steps whole shards, not only rows that were looked up
    (FBGEMM's fused CPU kernels know SGD and Adagrad only); on a GPU it is fused into the tables' backward unless
    they are replicated, as ``"rowwise_adagrad"`` always is. On several ranks tables are sharded as TorchRec's
    planner sees fit, the row-wise family included on CPUs too. A plan that cannot be made raises on every rank
    alike (see `sharding`).

    On a CPU a search over multi-hot features has a fused kernel for every table: the pieces of one table at a time are
    in memory then (see `shard_selection`). Where operators are compiled each reads one key per feature, and soft
    selection is on the shards already, as it is where small tables are multiplied whole.

    Args:
        task: the model with its loss; prepared or not. Its tables are moved into TorchRec's kernels.
        recipe: optimizers and learning rates.
        device: where to train.
        whole_rows: tables whose rows no plan may cut.
        replicated: hold tables that learn by Adam whole on every rank, and fuse none of them; one-step unrolled
            gradients want that.
        prefetched: set tables up for a pipeline that prefetches, where the planner leaves them in host memory behind a
            cache on the GPU.
        batch_size: samples of a batch of all ranks, where known: tables that are small beside it, and not fused, are
            multiplied by alpha whole (see `table_selection`).

    Returns:
        The sharded model, with the weights that `task` had, and the optimizer of everything that is not fused.

    Raises:
        ValueError: on all ranks alike, if there is no plan for the tables, or they cannot be evaluated (see
            `check_pooling`).
    """
    check_pooling(task)
    fused = recipe.table_optimizer == "rowwise_adagrad" or (device.type == "cuda" and not replicated)
    wrappers = soft_selection_modules(task).values()
    is_multi_hot = any(wrapper.bag_splitter is not None for wrapper in wrappers)
    may_select_in_lookups = is_multi_hot and device.type == "cpu" and are_compiled()
    multiplies = may_select_in_lookups and not replicated and _are_small(wrappers, batch_size)
    selects_in_lookups = multiplies or (may_select_in_lookups and fused)
    if selects_in_lookups:
        for wrapper in wrappers:
            wrapper.read_whole_features_(multiply_tables=multiplies)
    plain = [module for module in task.modules() if isinstance(module, EmbeddingBagCollection)]
    # Not by apply_optimizer_in_backward: torch then keeps what it was applied to, and every table would be held twice.
    fused_params = {"optimizer": FUSED_OPTIMIZERS[recipe.table_optimizer], "learning_rate": recipe.table_learning_rate}
    if is_multi_hot and device.type == "cpu":
        fused_params[USE_ONE_TBE_PER_TABLE] = True
    sharder = CpuEmbeddingBagCollectionSharder(fused_params=fused_params if fused else None)
    dense = ShardingType.DATA_PARALLEL.value
    is_spread = fused or (world_size_of() > 1 and not replicated)
    if is_spread:  # small tables would be planned data_parallel, whose dense kernel leaves the fused optimizer out
        kinds = [kind for kind in sharder.sharding_types(device.type) if kind != dense]
        constraint = ParameterConstraints(sharding_types=kinds)
        uncut = ParameterConstraints(sharding_types=[kind for kind in kinds if kind in WHOLE_ROWS])
    else:
        kernels = [EmbeddingComputeKernel.DENSE.value]
        constraint = uncut = ParameterConstraints(sharding_types=[dense], compute_kernels=kernels)
    tables = [config.name for collection in plain for config in collection.embedding_bag_configs()]
    sharders = [cast(ModuleSharder[nn.Module], sharder)]
    constraints = {table: uncut if table in whole_rows else constraint for table in tables}
    plan = make_sharding_plan(task, device, sharders, constraints=constraints)
    planned = [own for part in plan.plan.values() for own in cast(EmbeddingModuleShardingPlan, part).values()]
    for sharding in planned:
        if is_spread and not fused:  # every type runs in the dense kernel; the planner knows it for data_parallel alone
            sharding.compute_kernel = EmbeddingComputeKernel.DENSE.value
        if prefetched and sharding.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
            sharding.cache_params = replace(sharding.cache_params or CacheParams(), prefetch_pipeline=True)
    model = shard_model(task, device, plan, sharders)
    if selects_in_lookups:
        select_on_shards_(model)
    read_by_name_(model)
    return model, rest_optimizer(model, recipe)


def _are_small(wrappers: Collection[SoftSelectionEmbeddingBagCollection], batch_size: int | None) -> bool:
    """Whether all tables together hold at most as many numbers as what a batch of all ranks is pooled to."""
    tables = [table for wrapper in wrappers for table in wrapper.embedding_bag_configs()]
    pooled = sum(table.embedding_dim * len(table.feature_names) for table in tables) * (batch_size or 0)
    return sum(table.num_embeddings * table.embedding_dim for table in tables) <= pooled


def rest_optimizer(model: DistributedModelParallel, recipe: Recipe) -> KeyedOptimizerWrapper:
    """A fresh Adam for everything that is not fused: dense weights, and tables in the dense compute kernel.

    It is torch's own fused one, which goes through weights and states once a step, where each of Adam's operations
    would read and write them anew.

    Args:
        model: as `shard` made it.
        recipe: learning rates.

    Returns:
        The optimizer; one that steps nothing where every parameter is fused.

    Raises:
        ValueError: for a name in the recipe's `row_weights` that no parameter has.
    """
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    of_rows = {own: name for name in recipe.row_weights for own in rest if f".{own}".endswith(f".{name}")}
    for name in recipe.row_weights:
        check_known("parameter of Recipe.row_weights", name, [*of_rows.values(), *rest])
    rates = {OF_REST: recipe.dense_learning_rate}
    rates |= dict.fromkeys((OF_TABLES, OF_ROWS), recipe.table_learning_rate)
    parts: dict[str, list[nn.Parameter]] = {part: [] for part in rates}
    for name, weight in rest.items():
        parts[OF_ROWS if name in of_rows else OF_TABLES if ".embedding_bags." in name else OF_REST].append(weight)
    groups = [{"params": weights, "lr": rates[part], PART: part} for part, weights in parts.items()]
    filled = [group for group in groups if group["params"]]
    return KeyedOptimizerWrapper(rest, lambda _: torch.optim.Adam(filled or groups[:1], fused=True))


def set_learning_rates_(
    model: DistributedModelParallel, optimizer: KeyedOptimizerWrapper, *, tables: float, dense: float, rows: float
) -> None:
    """Lets a model learn at other rates from the next step on. Local; to be called on all ranks alike.

    Args:
        model: as `shard` made it.
        optimizer: as `shard` made it.
        tables: rate of the tables.
        dense: rate of everything else.
        rows: rate of numbers for rows beside the tables (`Recipe.row_weights`).
    """
    rates = {OF_TABLES: tables, OF_REST: dense, OF_ROWS: rows}
    for group in optimizer.param_groups:
        group["lr"] = rates[group[PART]]
    for group in model.fused_optimizer.param_groups:
        if group["lr"] != FROZEN_RATE:
            group["lr"] = tables
    # Where TorchRec's fused optimizers hand their rate on to the kernels; there are no gradients to clear.
    model.fused_optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], loss: nn.Module, device: torch.device) -> dict[str, float]:
    """Metrics of a model on a split, over all ranks.

    Args:
        model: called on a Batch, returns ``(loss, (loss, predictions, labels))`` as `TrainTask` does.
        batches: the split.
        loss: decides the metrics, with the kind of batches: recall@k, mrr@k and ndcg@k (k = 1, 5, 10) for a split of
            `RankingBatch`; else ``auc`` (exact, no bins), ``logloss``, ``ne`` (against the click rate of this split)
            and ``calibration`` for a binary loss, ``mse`` for nn.MSELoss.
        device: where the model is.

    Returns:
        metric -> value; ``"loss"`` is always among them, ``auc`` and ``ne`` only where samples are of both classes.

    Raises:
        ValueError: if the split is empty, a label of a binary loss is neither 0 nor 1, or a query has fewer candidates
            than k.
        NonFiniteError: on all ranks, if a prediction or its loss is NaN or infinite.
    """
    read_by_name_(model, refuse_weights=None)
    was_training = model.training
    model.eval()
    is_binary = isinstance(loss, nn.BCEWithLogitsLoss)
    mean_loss = MeanMetric(nan_strategy=math.inf).to(device)  # by itself it would leave NaN out
    metrics: MetricCollection | None = None
    seen, is_ranking = 0, False
    for batch in batches:
        if metrics is None:
            is_ranking = isinstance(batch, RankingBatch)
            metrics = metrics_of(loss, is_ranking=is_ranking).to(device)
        if is_binary and not is_ranking:
            check_classes(batch.labels, "evaluation split")
        if not batch.labels.numel() and world_size_of() == 1:  # TorchRec's collections look up no batch of none
            continue
        batch = for_lookup(batch).to(device)
        seen += batch.labels.numel()
        _, (value, predictions, labels) = model(batch)
        if labels.numel():  # the mean of none is NaN
            mean_loss.update(value, weight=labels.numel())
        if is_ranking:
            metrics.update(predictions, labels, batch.queries)
        elif is_binary:
            metrics.update(predictions.double().sigmoid(), labels.long())
        else:
            metrics.update(predictions, labels)
    model.train(was_training)
    if metrics is None or not seen:
        raise ValueError(describe("evaluation split", "expected at least one sample", "none", "check the data splits"))
    total = {"loss": float(mean_loss.compute())}
    if not math.isfinite(total["loss"]):
        raise NonFiniteError(describe("evaluation split", "expected finite predictions", "nan or inf", REMEDY))
    if is_binary and not is_ranking:
        total["logloss"] = total["loss"]
    computed = {name: float(value) for name, value in metrics.compute().items()}
    return total | {name: value for name, value in computed.items() if not math.isnan(value)}


def primary_metric(loss: nn.Module, test: Iterable[Batch] = ()) -> tuple[str, bool]:
    """The metric that a recipe is judged by.

    Args:
        loss: the recipe's loss.
        test: its test split; whether it is one of `RankingBatch` is read from its first batch.

    Returns:
        (name, whether higher is better).
    """
    if isinstance(next(iter(test), None), RankingBatch):
        return "ndcg@10", True
    return ("auc", True) if isinstance(loss, nn.BCEWithLogitsLoss) else ("mse", False)


@dataclass
class EarlyStopping:
    """Stops when the selection loss has not improved for a while, and remembers the best state on disk.

    Attributes:
        path: name of the checkpoint that holds the best state.
        patience: epochs without improvement after which to stop.
    """

    path: Path
    patience: int
    best: float = math.inf
    best_epoch: int = -1

    def update(self, epoch: int, loss: float, save: Callable[[Path], None]) -> bool:
        """Takes the selection loss of an epoch.

        Args:
            epoch: its number.
            loss: selection loss.
            save: writes a checkpoint of the given name; called if this epoch is the best so far.

        Returns:
            True if training should stop.
        """
        if loss < self.best:
            self.best, self.best_epoch = loss, epoch
            save(self.path)
        return epoch - self.best_epoch >= self.patience


@dataclass(frozen=True, kw_only=True)
class PlainTraining:
    """What `train_plainly` did.

    Attributes:
        selection_loss: of the best epoch.
        best_epoch: its number, from 0; -1 for the state that training started from.
        seconds: wall time.
    """

    selection_loss: float
    best_epoch: int
    seconds: float


@flushing_denormals()
def train_plainly(
    model: DistributedModelParallel,
    optimizer: KeyedOptimizerWrapper,
    recipe: Recipe,
    device: torch.device,
    *,
    max_epochs: int,
    patience: int,
    folder: Path,
    mask: RetainedMask | None = None,
    starts_trained: bool = False,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
) -> PlainTraining:
    """Trains with TorchRec's own pipeline until the selection loss stops improving, and goes back to the best epoch.

    Args:
        model: the sharded model; ends in its best state.
        optimizer: of everything not fused.
        recipe: data and loss.
        device: where the model is.
        max_epochs: epochs at most.
        patience: epochs without improvement before stopping.
        folder: where the best state is kept, as `BEST_STATE`.
        mask: holds pruned values at zero (masked fine-tuning).
        starts_trained: whether the state that training starts from may be the best one, as a pruned model's may that
            was at its best before. Epochs are stopped as they are without it.
        on_epoch: called with the epoch and its selection loss.

    Raises:
        NonFiniteError: if the loss becomes NaN or infinite.
    """
    started = time.monotonic()
    stepper = optimizer if mask is None else _MaskedOptimizer(optimizer, mask)
    pipeline = DetachableTrainPipeline(model, stepper, device, pipeline_postproc=True)
    stopping, guard = EarlyStopping(folder / BEST_STATE, patience), FiniteGuard(model, model._env.process_group)
    start, loss_before = folder / "start", math.inf
    if starts_trained:
        loss_before = evaluate(model, recipe.data.selection, recipe.loss, device)["loss"]
        save_checkpoint(start, model)
    model.train()
    for epoch in range(max_epochs):
        batches = iter(LookupBatches(recipe.data.train, "train"))
        step = 0
        while True:
            try:
                loss = pipeline.progress(batches)[0]
            except StopIteration:
                break
            step += 1
            guard.check_loss(loss, f"epoch {epoch}, step {step}")
        check(step > 0, "training stream", "expected at least one batch", 0, "check the data splits")
        evaluated = pipeline.detach()
        selection_loss = evaluate(evaluated, recipe.data.selection, recipe.loss, device)["loss"]
        on_epoch(epoch, selection_loss)
        if stopping.update(epoch, selection_loss, lambda path: save_checkpoint(path, model)):
            break
    stays = starts_trained and loss_before <= stopping.best
    load_checkpoint(start if stays else stopping.path, model)
    return PlainTraining(
        selection_loss=min(stopping.best, loss_before),
        best_epoch=-1 if stays else stopping.best_epoch,
        seconds=time.monotonic() - started,
    )


class _MaskedOptimizer:
    """A fresh optimizer that cannot wake pruned values."""

    def __init__(self, optimizer: KeyedOptimizerWrapper, mask: RetainedMask) -> None:
        self._optimizer = optimizer
        self._mask = mask

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        self._mask.hold_gradients_()
        self._optimizer.step()
        self._mask.hold_fused_()
