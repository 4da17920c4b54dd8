"""Tables that a model reads through a function of what learns: rounded to few bits, or less a
learnt threshold."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.rivals.forms import PRECISIONS
from benchmarks.rivals.methods.method import NotApplicableError
from benchmarks.rivals.quantized_rows import quantized_rows, values_of_rows
from dnis_torchrec.checks import describe
from dnis_torchrec.selection.shards import collections, local_shards


def table_parameters(model: DistributedModelParallel, method: str) -> dict[str, Tensor]:
    """table -> the parameter that holds it, whose gradient an optimizer of ours sees."""
    parameters = {p.data_ptr(): p for p in dict(in_backward_optimizer_filter(model.named_parameters())).values()}
    found = {}
    for collection in collections(model).values():
        for shard in local_shards(collection):
            if shard.weight.data_ptr() not in parameters:
                requirement = "supported are tables whose gradients can be seen"
                raise NotApplicableError(describe(method, requirement, "tables with a fused optimizer"))
            found[shard.table] = parameters[shard.weight.data_ptr()]
    return found


class RoundedRows:
    """Steps an optimizer of tables that are read in int8 or int4: gradients pass the rounding as if
    it were not there."""

    def __init__(self, optimizer: KeyedOptimizerWrapper, tables: dict[str, Tensor], precision: str) -> None:
        self._optimizer, self._tables, self._precision = optimizer, tables, precision
        self._learnt = {name: weight.detach().clone() for name, weight in tables.items()}
        self._write_rounded()

    def zero_grad(self) -> None:
        """Clears all gradients."""
        self._optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Steps V by the gradients of f(V), and everything else by its own."""
        for name, weight in self._tables.items():
            weight.copy_(self._learnt[name])
        self._optimizer.step()
        for name, weight in self._tables.items():
            self._learnt[name].copy_(weight)
        self._write_rounded()

    @torch.no_grad()
    def _write_rounded(self) -> None:
        for name, weight in self._tables.items():
            weight.copy_(rounded(self._learnt[name], self._precision))


def rounded(weight: Tensor, precision: str) -> Tensor:
    """Rows as FBGEMM's kernels read them: rounded to codes of some bits, or to float16, and back."""
    stored = PRECISIONS[precision]
    rows = quantized_rows(weight.cpu(), stored, place="table in training")
    return values_of_rows(rows, stored)[:, : weight.shape[1]].to(weight.device)


class ThresholdedTables:
    r"""Steps an optimizer of tables and of a threshold for every value, below which it is zero."""

    def __init__(
        self,
        optimizer: KeyedOptimizerWrapper,
        tables: dict[str, Tensor],
        *,
        start: float,
        learning_rate: float,
        decay: float,
    ) -> None:
        self._optimizer, self._tables = optimizer, tables
        self._learnt = {name: weight.detach().clone() for name, weight in tables.items()}
        self._thresholds = {name: torch.full_like(weight, start) for name, weight in self._learnt.items()}
        self._of_thresholds = torch.optim.Adam(list(self._thresholds.values()), lr=learning_rate, weight_decay=decay)
        self._write_thresholded()

    def num_alive(self) -> int:
        """Counts values that are not zero."""
        return sum(int(weight.count_nonzero()) for weight in self._tables.values())

    def zero_grad(self) -> None:
        """Clears all gradients."""
        self._optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Steps V and s by the gradients of f, and everything else by its own."""
        for name, weight in self._tables.items():
            if weight.grad is None:
                continue
            of_value, of_threshold = threshold_gradients(self._learnt[name], self._thresholds[name], weight.grad)
            weight.grad.copy_(of_value)
            self._thresholds[name].grad = of_threshold
        for name, weight in self._tables.items():
            weight.copy_(self._learnt[name])
        self._optimizer.step()
        self._of_thresholds.step()
        for name, weight in self._tables.items():
            self._learnt[name].copy_(weight)
        self._write_thresholded()

    @torch.no_grad()
    def _write_thresholded(self) -> None:
        for name, weight in self._tables.items():
            weight.copy_(thresholded(self._learnt[name], self._thresholds[name]))


def thresholded(values: Tensor, thresholds: Tensor) -> Tensor:
    """Values less their thresholds; see `ThresholdedTables`."""
    return values.sign() * (values.abs() - thresholds.sigmoid()).relu()


def threshold_gradients(values: Tensor, thresholds: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of V and s by that of `thresholded`."""
    share = thresholds.sigmoid()
    of_value = gradient * (values.abs() > share)
    return of_value, -of_value * values.sign() * share * (1 - share)
