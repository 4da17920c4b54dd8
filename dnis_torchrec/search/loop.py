"""SearchLoop: a search in a training loop of one's own."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import get_unwrapped_module

from dnis_torchrec.allocation.energies import blocked_tables
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.data.urls import Address
from dnis_torchrec.search.pipeline import BilevelTrainPipeline, DenseOptimizer
from dnis_torchrec.search.ramp import Ramp, check_reachable
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule, OnePass
from dnis_torchrec.selection.torchrec import default_kernels
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training.checkpoint import TrainingState

logger = logging.getLogger(__name__)


class SearchLoop:
    """A search in a loop of your own: steps on weights, steps on alpha, and columns that die.

    The first lower steps train the model plainly. Then columns die, those first that are worth
    least for their bytes; behind them what is left adapts in peace. Once the plain steps are over,
    an upper step goes before every lower one. Both streams start again when they end.

    Without validation batches `train` is a stream in the order of time, read once: an upper step
    takes the next batch, the lower step behind it trains on the same. The loop ends with it.

    `merge_` of what `detach` returns gives your model back, with zeros where columns died, and
    `compress` then spends bits on the rest. `dnis_torchrec.search` does more: it stops at the best
    epoch, turns tables into their axes before columns die, and trains through the rounding.

    Distributed: every rank makes one and steps it, on batches of its own. See
    `BilevelTrainPipeline` for what a step sends, and `Ramp` for what a stage of the ramp does.

    Args:
        model: a `TrainTask` around a model that `prepare_` was given, sharded by
            DistributedModelParallel or `shard_model`.
        optimizer: trains all weights but those of fused tables; any optimizer that TorchRec's
            pipelines accept. Fused tables are trained by plain SGD, unless you name another
            optimizer by `apply_optimizer_in_backward` or in the sharder.
        train: training batches, which can be iterated again and again; or a stream.
        validation: validation batches likewise, for alpha and for what columns are worth; None
            for a stream, as long on every rank.
        compression: bytes of the float32 tables over bytes to be served, above 1.
        steps: lower steps, at least 1.
        plain_steps: those before the first upper step; None for half of all. A model that is
            trained already needs one.
        ramp_steps: those in which columns die; None for a fifth of all.

    Attributes:
        compression: as given, for `compress` behind the loop.
        pipeline: the `BilevelTrainPipeline` that takes the steps.
        stream: the `BilevelStream` that deals out the batches.
        loss: of the last lower step, this rank's, on the model's device; None before the first.

    Raises:
        TypeError: if the model is not a `TrainTask`.
        RuntimeError: if it is not prepared.
        ValueError: for a compression that cannot be met, or a number of steps out of range.
        NotImplementedError: for a model that `BilevelTrainPipeline` cannot step.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torchrec.distributed import DistributedModelParallel
        >>> from torchrec.models.dlrm import DLRM
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> from torchrec.optim.keyed import KeyedOptimizerWrapper
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from dnis_torchrec import TrainTask, blocks_from_counts, count_frequencies
        >>> from dnis_torchrec import merge_, prepare_
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> ids = torch.arange(400) % 200
        >>> features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(400, dtype=torch.int64))
        >>> batches = [Batch(torch.rand(400, 2), features, labels=(ids % 2).float())]
        >>> shape = {"num_embeddings": 200, "embedding_dim": 8}
        >>> tables = [EmbeddingBagConfig(name="t", feature_names=["f"], **shape)]
        >>> counts = count_frequencies([features], tables)
        >>> model = DLRM(EmbeddingBagCollection(tables=tables), 2, [8], [8, 1])
        >>> model = prepare_(model, blocks_from_counts(counts, tables, num_blocks=2, least_rows=1))
        >>> task = TrainTask(model, nn.BCEWithLogitsLoss())
        >>> sharded = DistributedModelParallel(task, device=torch.device("cpu"))
        >>> adam = KeyedOptimizerWrapper(dict(sharded.named_parameters()), torch.optim.Adam)
        >>> loop = SearchLoop(sharded, adam, batches, batches, compression=12, steps=40)
        >>> while loop.step():
        ...     pass
        >>> plain = merge_(loop.detach()).model
        >>> weight = plain.sparse_arch.embedding_bag_collection.embedding_bags["t"].weight
        >>> int((weight == 0).sum()) > 0, loop.step()
        (True, False)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: DenseOptimizer,
        train: Iterable[Batch],
        validation: Iterable[Batch] | None = None,
        *,
        compression: float = 20.0,
        steps: int,
        plain_steps: int | None = None,
        ramp_steps: int | None = None,
    ) -> None:
        check(compression > 1, "compression", "a number above 1", compression)
        lengths = {"steps": steps, "plain_steps": plain_steps, "ramp_steps": ramp_steps}
        for name, length in lengths.items():
            check(length is None or length >= 1, name, "at least 1", length)
        task = get_unwrapped_module(model)
        if not isinstance(task, TrainTask):
            remedy = "wrap model and loss in a TrainTask before you shard"
            raise TypeError(describe("SearchLoop", "a TrainTask", type(task).__name__, remedy))
        groups = getattr(optimizer, "param_groups", ())
        weights = [weight for group in groups for weight in group["params"]]
        is_fused = any(hasattr(weight, "_in_backward_optimizers") for weight in weights)
        if is_fused and default_kernels(model):
            actual = "tables that FBGEMM's kernels train by SGD at 0.01"
            remedy = "call TorchRec's apply_optimizer_in_backward on tables before you shard"
            logger.warning(describe("optimizer", "weights that it trains", actual, remedy))
        device = next(model.parameters()).device
        self.pipeline = BilevelTrainPipeline(model, optimizer, device)
        blocks = next(iter(soft_selection_modules(model).values())).blocks
        check_reachable(blocked_tables(model, blocks), blocks, compression)
        self.compression = compression
        self.loss: Tensor | None = None
        self._steps = steps
        self._plain_steps = max(1, steps // 2) if plain_steps is None else plain_steps
        self._ramp_steps = max(1, steps // 5) if ramp_steps is None else ramp_steps
        schedule = LevelSchedule(warm_up_steps=self._plain_steps)
        self.stream: BilevelStream[Batch] = (
            OnePass(train, schedule)
            if validation is None
            else BilevelStream(train, validation, schedule)
        )
        self._ramp = Ramp(self.pipeline, self.stream, blocks, task.task, compression)
        model.train()

    @property
    def lower_steps(self) -> int:
        """Lower steps taken."""
        return self.pipeline.lower_steps

    def step(self) -> bool:
        """Takes a lower step, the upper one before it, and a stage of the ramp where one is due.

        Returns:
            Whether there was a step to take.

        Raises:
            NonFiniteError: if a loss or a gradient is NaN or infinite, on all ranks alike.
        """
        steps = self.lower_steps
        if steps >= self._steps:
            return False
        while self.lower_steps == steps:
            try:
                self.loss = self.pipeline.progress(self.stream)[0]
            except StopIteration:  # a stream is over
                return False
        self._ramp.follow(self.lower_steps - self._plain_steps, self._ramp_steps)
        return True

    def detach(self) -> nn.Module:
        """Takes the model out of the loop, for `merge_`.

        Returns:
            The sharded model.
        """
        return self.pipeline.detach()

    def state(self) -> TrainingState:
        """All that the loop needs to go on, as `CheckpointSaver` writes it.

        Returns:
            Live tensors: save them before the next step.
        """
        return self.pipeline.state(self.stream)

    def restore(self, path: Address) -> Mapping[str, Any]:
        """Goes on from a checkpoint, with any number of ranks and any sharding of the same tables.

        Args:
            path: the checkpoint, or its URL.

        Returns:
            The values that were saved beside the tensors.

        Raises:
            RuntimeError: if the loop has taken a step.
            ValueError: if the checkpoint is damaged or of another run.
        """
        return self.pipeline.restore(path, self.stream)
