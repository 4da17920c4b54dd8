"""FiniteGuard: NaN and infinity stop the run before they reach a weight, with the table and step named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dnis_torchrec.checks import describe
from dnis_torchrec.soft_selection.table_shards import collections, local_shards, table_weight_names
from dnis_torchrec.soft_selection.wrapper import soft_selection_modules

REMEDY = "lower the learning rate or clean the data, and start again from the last good checkpoint"


class NonFiniteError(ArithmeticError):
    """A loss, gradient or weight is NaN or infinite."""


def _is_surely_finite(values: Tensor) -> bool:
    """Tests values by their sum: it is not finite if a value is not. It may also overflow, so False decides nothing."""
    return math.isfinite(float(values.detach().sum()))


class FiniteGuard:
    """Checks losses and gradients of a model, prepared or not.

    On a CPU a bad gradient is found inside backward, before a fused optimizer applies it. Over several ranks a check is
    one all_reduce of W numbers, after which all of them stop or none: a rank that stopped by itself would leave the
    others waiting in TorchRec's next collective.

    Args:
        model: the model, sharded or not.
        group: the ranks that stop together; None for this one alone.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._world_size = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._collections = collections(model)
        self._wrappers = soft_selection_modules(model)
        of_tables = table_weight_names(model)
        self._dense = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in of_tables
        }

    def flags(self, value: Tensor) -> Tensor:
        """Flags this rank if it holds a NaN or an infinity; the sum over ranks flags all that do. Local.

        Args:
            value: any shape.

        Returns:
            ``(W,)``, 1 at this rank if `value` is not finite throughout, else 0.
        """
        flags = torch.zeros(self._world_size, device=value.device)
        flags[self._rank] = ~torch.isfinite(value.detach()).all()
        return flags

    def check_loss(self, loss: Tensor, place: str, flags: Tensor | None = None) -> None:
        """Checks a loss, on all ranks alike.

        Args:
            loss: of this rank.
            place: the step.
            flags: of the loss, where they have been summed over ranks already; None sums them here.

        Raises:
            NonFiniteError: naming the step, and the table that holds a non-finite value if one does; or the rank, if it
                is the loss of another one.
        """
        if flags is None:
            if self._world_size == 1 and _is_surely_finite(loss):
                return
            flags = self._summed(self.flags(loss))
        if not bool(flags.any()):
            return
        self._stop_for_another_rank(flags, place, "a finite loss")
        culprit = self._table_with_non_finite_value()
        where = f"{place}, table {culprit!r}" if culprit else f"{place} (every table is finite)"
        raise NonFiniteError(describe(where, "a finite loss", float(loss.detach().sum()), REMEDY))

    @contextmanager
    def watch_gradients(self, place: str) -> Iterator[None]:
        """Checks the gradients of pooled embeddings, table by table, during the backward pass inside.

        Args:
            place: the step.

        Raises:
            NonFiniteError: naming the step and the table, before a fused optimizer has applied the gradient.
        """

        def stop_if_bad(table: str | None, gradient: Tensor) -> None:
            if self._world_size == 1 and table is None:
                return
            flags = self.flags(gradient.new_tensor(0.0 if table is None else torch.nan))
            if not bool(self._summed(flags).any()):
                return
            self._stop_for_another_rank(flags, place, "finite gradients")
            raise NonFiniteError(describe(f"{place}, table {table!r}", "finite gradients", "nan or inf", REMEDY))

        for wrapper in self._wrappers.values():
            wrapper.selection.on_gradient = stop_if_bad
        try:
            yield
        finally:
            for wrapper in self._wrappers.values():
                wrapper.selection.on_gradient = None

    def check_dense_gradients(self, place: str) -> None:
        """Checks the gradients of everything that is not a table.

        Args:
            place: the step.

        Raises:
            NonFiniteError: naming the step and the parameter.
        """
        gradients = {name: p.grad for name, p in self._dense.items() if p.grad is not None}
        if not gradients:
            return
        norms = torch._foreach_norm(list(gradients.values()))
        if _is_surely_finite(torch.stack(norms)):
            return
        # A norm may be infinite where no value is.
        bad = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
        if bad:
            raise NonFiniteError(describe(f"{place}, parameter {bad[0]!r}", "finite gradients", "nan or inf", REMEDY))

    def check_alpha_gradient(self, gradient: Tensor, embedding_dim: int, place: str) -> None:
        """Checks the all-reduced gradient of an alpha, so that all ranks stop alike.

        Args:
            gradient: ``(A, D)``, the same on all ranks.
            embedding_dim: D.
            place: the step.

        Raises:
            NonFiniteError: naming the step and the tables that this alpha multiplies.
        """
        if _is_surely_finite(gradient) or bool(torch.isfinite(gradient).all()):
            return
        blocks = next(iter(self._wrappers.values())).blocks
        row = int((~torch.isfinite(gradient)).any(dim=1).nonzero()[0])
        tables = [
            table
            for table, dim in blocks.embedding_dims.items()
            if dim == embedding_dim and 0 <= row - blocks.first_alpha_row(table) < blocks.routings[table].num_blocks
        ]
        where = f"{place}, tables {tables}, row {row} of alpha"
        raise NonFiniteError(describe(where, "a finite gradient", "nan or inf", REMEDY))

    def _summed(self, flags: Tensor) -> Tensor:
        if self._world_size > 1:
            dist.all_reduce(flags, group=self._group)
        return flags

    def _stop_for_another_rank(self, flags: Tensor, place: str, requirement: str) -> None:
        """Raises in the name of another rank, unless this one has something to tell itself."""
        if not bool(flags[self._rank]):
            rank = int(flags.nonzero()[0])
            raise NonFiniteError(describe(f"{place}, rank {rank}", requirement, "nan or inf", REMEDY))

    def _table_with_non_finite_value(self) -> str | None:
        for collection in self._collections.values():
            for shard in local_shards(collection):
                for chunk, _, _ in shard.chunks():
                    if not bool(torch.isfinite(chunk).all()):
                        return shard.table
        return None
