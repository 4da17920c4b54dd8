"""Numbers read late from a GPU, checks that they are finite, pipelines that are saved."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dnis_torchrec.checks import describe
from dnis_torchrec.data.urls import Address
from dnis_torchrec.ranks import Ranks, on_rank_zero
from dnis_torchrec.selection.shards import collections, local_shards, table_weight_names
from dnis_torchrec.selection.torchrec_inputs import DetachableTrainPipeline
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training import checkpoint

Reader = Callable[[Tensor], None]


def is_read_late(device: torch.device) -> bool:
    """Returns whether to read a number of this device at once would stop it."""
    return device.type == "cuda"


class LateValues:
    """Copies on their way to the host. Local, no collective."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, torch.cuda.Event | None, Reader]] = []

    def read(self, values: Tensor, then: Reader) -> bool:
        """Has values read: on a CPU now, those of a GPU when `settle` is called next."""
        if not is_read_late(values.device):
            then(values.detach())
            return True
        # pinned, where it comes from a GPU
        on_host = values.detach().to("cpu", non_blocking=True, copy=True)
        stream = torch.cuda.current_stream(values.device) if values.is_cuda else None
        self._copies.append((on_host, None if stream is None else stream.record_event(), then))
        return False

    def settle(self) -> None:
        """Reads all values that are still being computed; the first one that raises ends it."""
        copies, self._copies = self._copies, []
        for values, arrival, then in copies:
            if arrival is not None:
                arrival.synchronize()
            then(values)


REMEDY = "lower the learning rate or clean the data, and start again from the last good checkpoint"


class NonFiniteError(ArithmeticError):
    """A loss, gradient or weight is NaN or infinite."""


class FiniteGuard:
    """Checks losses and gradients of a model, prepared or not."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._ranks, self._late = Ranks(group), LateValues()
        self._collections = collections(model)
        self._wrappers = soft_selection_modules(model)
        of_tables = table_weight_names(model)
        self._dense = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in of_tables
        }

    def settle(self) -> None:
        """Reads earlier checks of a GPU, before a state is saved, evaluated or left."""
        self._late.settle()

    def flags(self, is_finite: Tensor) -> Tensor:
        """Flags this rank if it holds a NaN or an infinity, for a sum over ranks."""
        flags = torch.zeros(self._ranks.world_size, device=is_finite.device)
        flags[self._ranks.rank] = ~is_finite
        return flags

    def check_loss(self, loss: Tensor, place: str, flags: Tensor | None = None) -> None:
        """Checks a loss, on all ranks alike, and before that reads earlier checks of a GPU."""
        self.settle()
        values = loss.detach().flatten()
        flags = self._sum_flags(values.isfinite().all()) if flags is None else flags
        values = torch.cat([flags.to(values.dtype), values])
        self._late.read(values, partial(self._stop_for_loss, place))

    @contextmanager
    def watch_gradients(self, place: str) -> Iterator[None]:
        """Checks gradients of embeddings, table by table, during the backward pass inside."""

        def look(finite: Tensor, table_of: Callable[[Tensor], str]) -> Tensor | None:
            is_finite = finite.all()
            values = torch.cat([self._sum_flags(is_finite), finite.float()])
            is_read = self._late.read(values, partial(self._stop_for_gradient, place, table_of))
            return None if is_read else is_finite

        for wrapper in self._wrappers.values():
            wrapper.selection.on_gradient = look
        try:
            yield
        finally:
            for wrapper in self._wrappers.values():
                wrapper.selection.on_gradient = None

    def check_dense_gradients(self, place: str) -> None:
        """Checks gradients of all but tables; on a GPU makes all of them zero if one is bad."""
        gradients = {name: p.grad for name, p in self._dense.items() if p.grad is not None}
        gradients = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
        if not gradients:
            return
        values = list(gradients.values())
        if values[0].device.type == "cpu":
            norms = torch.stack(torch._foreach_norm(values))
            if bool(torch.isfinite(norms.sum())):
                return  # by far the quickest there; a sum of squares may also overflow
        largest = torch.stack(torch._foreach_norm(values, math.inf))
        then = partial(self._stop_for_dense_gradient, place, list(gradients))
        if not self._late.read(largest, then):
            is_bad = ~(largest < math.inf).all()  # NaN is not smaller, either
            for value in values:
                value.masked_fill_(is_bad, 0)

    def check_alpha_gradient(self, gradient: Tensor, embedding_dim: int, place: str) -> Tensor:
        """Checks the all-reduced gradient of an alpha, so that all ranks stop alike."""
        finite = (gradient.abs() < math.inf).all(dim=1)
        self._late.read(finite, partial(self._stop_for_alpha, place, embedding_dim))
        return finite.all()

    def _sum_flags(self, is_finite: Tensor) -> Tensor:
        flags = self.flags(is_finite)
        if self._ranks.world_size > 1:
            dist.all_reduce(flags, group=self._ranks.group)
        return flags

    # What follows reads the summed flags of ranks, and then values of this one.

    def _stop_for_loss(self, place: str, values: Tensor) -> None:
        loss = values[self._ranks.world_size :]
        if not self._is_bad(values, place, "a finite loss"):
            return
        culprit = self._table_with_non_finite_value()
        where = f"{place}, table {culprit!r}" if culprit else f"{place} (every table is finite)"
        raise _not_finite(where, "a finite loss", float(loss.sum()))

    def _stop_for_gradient(
        self, place: str, table_of: Callable[[Tensor], str], values: Tensor
    ) -> None:
        finite = values[self._ranks.world_size :] > 0
        if self._is_bad(values, place, "finite gradients"):
            raise _not_finite(f"{place}, {table_of(finite)}")

    def _is_bad(self, values: Tensor, place: str, requirement: str) -> bool:
        """Whether this rank has a value that is not finite; raises if only another one has."""
        flags = values[: self._ranks.world_size]
        if bool(flags.any()) and not bool(flags[self._ranks.rank]):
            raise _not_finite(f"{place}, rank {int(flags.nonzero()[0])}", requirement)
        return bool(flags.any())

    def _stop_for_dense_gradient(self, place: str, names: list[str], largest: Tensor) -> None:
        finite = torch.isfinite(largest)
        if not bool(finite.all()):
            raise _not_finite(f"{place}, parameter {names[int((~finite).nonzero()[0])]!r}")

    def _stop_for_alpha(self, place: str, embedding_dim: int, finite: Tensor) -> None:
        if bool(finite.all()):
            return
        blocks, row = next(iter(self._wrappers.values())).blocks, int((~finite).nonzero()[0])
        tables = [
            table
            for table, dim in blocks.embedding_dims.items()
            if dim == embedding_dim
            and 0 <= row - blocks.first_alpha_row(table) < blocks.routings[table].num_blocks
        ]
        raise _not_finite(f"{place}, tables {tables}, row {row} of alpha", "a finite gradient")

    def _table_with_non_finite_value(self) -> str | None:
        for collection in self._collections.values():
            for shard in local_shards(collection):
                for chunk, _, _ in shard.chunks():
                    if not bool(torch.isfinite(chunk).all()):
                        return shard.table
        return None


def _not_finite(
    place: str, requirement: str = "finite gradients", value: object = "nan or inf"
) -> NonFiniteError:
    return NonFiniteError(describe(place, requirement, value, REMEDY))


class SavedTrainPipeline(DetachableTrainPipeline):
    """TorchRec's own pipeline, whose state a checkpoint holds. Whoever makes it sets its fields."""

    device: torch.device
    process_group: dist.ProcessGroup | None
    lower_steps = upper_steps = 0
    _dense_optimizer: Any
    _guard: FiniteGuard

    def detach(self) -> nn.Module:
        """Takes the model out of the pipeline; batches in flight stay with it."""
        self._guard.settle()
        return super().detach()

    def _more_tensors(self) -> dict[str, checkpoint.PlacedTensor]:
        """What goes on in a run beside a model and the optimizers of its weights."""
        return {}

    def _model_tensors(self) -> dict[str, checkpoint.PlacedTensor]:
        model, optimizer = self._model, self._dense_optimizer
        return checkpoint.model_tensors(model) | checkpoint.optimizer_tensors(model, optimizer)

    def state(self, stream: Any) -> checkpoint.TrainingState:
        """Everything that goes on in a run, live: copy it before the next step. Local."""
        self._guard.settle()
        tensors, of_rank = self._model_tensors(), checkpoint.rng_tensors(self.device)
        return checkpoint.TrainingState(
            tensors=tensors | self._more_tensors() | of_rank,
            tables=checkpoint.describe_tables(self._model),
            values={
                "lower_steps": self.lower_steps,
                "upper_steps": self.upper_steps,
                "stream": stream.state_dict(self.lower_steps + self.upper_steps),
            },
        )

    def restore(
        self, path: Address, stream: Any, more: Mapping[str, checkpoint.PlacedTensor] | None = None
    ) -> Mapping[str, Any]:
        """Goes on from a checkpoint, with any number of ranks and any sharding of the same tables;
        returns its values. `more` are further tensors to be read in place."""
        if self.contexts:
            place, requirement = "restore", "a pipeline before its first step"
            raise RuntimeError(describe(place, requirement, "one after it"))
        manifest = on_rank_zero(lambda: checkpoint.Manifest.read(path).values, self.process_group)
        batch = stream.first_train_batch().to(self.device)
        checkpoint.warm_up_(self._model, self._dense_optimizer, batch, manifest["lower_steps"])
        tensors = {**self.state(stream).tensors, **(more or {})}
        values = checkpoint.read_checkpoint(path, self._model, tensors, self.process_group)
        self.lower_steps, self.upper_steps = values["lower_steps"], values["upper_steps"]
        stream.load_state_dict(values["stream"])
        checkpoint.set_rng_(tensors, self.device)
        return values

    def begin_with(self, path: Address, batch: Any, *, is_plain: bool = False) -> None:
        """Takes weights and states of optimizers from another run; `batch` is to try things on."""
        checkpoint.warm_up_(self._model, self._dense_optimizer, batch.to(self.device), 2)
        self._read(path, is_plain=is_plain)

    def _read(self, path: Address, *, is_plain: bool = False) -> None:
        tensors, kinds = self._model_tensors(), ("table", "model", "fused", "optimizer")
        model, group = self._model, self.process_group
        checkpoint.read_checkpoint(path, model, tensors, group, kinds=kinds, is_plain=is_plain)
