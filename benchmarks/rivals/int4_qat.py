"""int4-QAT: uniform tables that know while they train that they will be served in int4, through
the rounding by the straight-through estimator."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.rivals.rows import TRAINED_MULTIPLE, in_precision, largest_dim, round_rows_, rows_bytes
from benchmarks.rivals.task import Served, Task, UnmetError, shards_of, train


def table_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Table -> the parameter that holds it, whose gradient an optimizer sees."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    parameters = {parameter.data_ptr(): parameter for parameter in dense}
    shards = shards_of(model)
    if any(shard.weight.data_ptr() not in parameters for shard in shards):
        raise UnmetError("tables with a fused optimizer are not supported")
    return {shard.table: parameters[shard.weight.data_ptr()] for shard in shards}


class Reparametrisation:
    """Steps an optimizer of tables that the model reads through a function of what learns.

    Gradients pass the function as if it were not there, but for what `before_step` does to them.
    """

    def __init__(self, model: nn.Module, optimizer: Any, function: Callable[[str, Tensor], Tensor]) -> None:
        self.tables = table_parameters(model)
        self.values = {name: weight.detach().clone() for name, weight in self.tables.items()}
        self._optimizer, self._function = optimizer, function
        self._write()

    def zero_grad(self) -> None:
        """Clears all gradients."""
        self._optimizer.zero_grad()

    def before_step(self) -> None:
        """For subclasses: gradients of the function become those of its argument."""

    @torch.no_grad()
    def step(self) -> None:
        """Steps what learns by the gradients of what the model reads."""
        self.before_step()
        for name, weight in self.tables.items():
            weight.copy_(self.values[name])
        self._optimizer.step()
        for name, weight in self.tables.items():
            self.values[name].copy_(weight)
        self._write()

    @torch.no_grad()
    def _write(self) -> None:
        for name, weight in self.tables.items():
            weight.copy_(self._function(name, self.values[name]))


def int4_qat(task: Task) -> Served:
    """Uniform tables of the size in int4, from scratch."""
    task = replace(task, precision="int4")
    dim = largest_dim(task)  # a multiple of 4, as rows of int4 and FBGEMM's kernels want it
    recipe = task.build(-(-dim // TRAINED_MULTIPLE) * TRAINED_MULTIPLE)

    def stepper(model: nn.Module, optimizer: Any) -> Reparametrisation:
        return Reparametrisation(model, optimizer, lambda _, value: in_precision(value, "int4"))

    model, _ = train(task, recipe, stepper=stepper)
    round_rows_(model, "int4")
    num_bytes = rows_bytes(task.tables(dim), "int4")
    return Served(model=model, num_bytes=num_bytes, settings={"embedding_dim": dim})
