"""Tables that a model reads through a function of what learns: rounded to few bits, or less a learnt threshold.

The model looks up ``f(V)``; V learns. Between steps the model's own tables hold f(V), so that lookups, pooling and
evaluation are those of any model, and its backward leaves dL/df(V) in their gradients, of which the chain rule makes
those of V and of whatever else f has.

Shapes: N rows, D embedding_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dnis_torchrec.checks import describe
from dnis_torchrec.comparison.methods.method import NotApplicableError
from dnis_torchrec.forms import PRECISIONS
from dnis_torchrec.serving.quantized_rows import quantized_rows, values_of_rows
from dnis_torchrec.soft_selection.table_shards import collections, local_shards


def table_parameters(model: DistributedModelParallel, method: str) -> dict[str, Tensor]:
    """table -> the parameter that holds it, whose gradient an optimizer of ours sees.

    Args:
        model: sharded on one process.
        method: who asks, for the message.

    Raises:
        NotApplicableError: for tables that a fused optimizer steps inside backward.
    """
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
    """Steps an optimizer of tables that are read in int8 or int4: gradients pass the rounding as if it were not there.

    Source: the straight-through estimator, Bengio, Leonard, Courville, Estimating or Propagating Gradients Through
    Stochastic Neurons, 2013.

    Args:
        optimizer: of everything that is not fused; its steps are those of V.
        tables: table -> parameter, see `table_parameters`. They hold V before, and f(V) from now on.
        precision: ``"int8"`` or ``"int4"``, each row as FBGEMM stores it.
    """

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
    """Rows as FBGEMM's kernels read them: rounded to codes of some bits, or to float16, and back.

    Args:
        weight: ``(N, D)`` float32.
        precision: ``"fp16"``, ``"int8"`` or ``"int4"``.

    Returns:
        ``(N, D)`` float32.

    Example:
        >>> rounded(torch.tensor([[0.0, 1.0, 2.2, 15.0]]), "int4").tolist()
        [[0.0, 1.0, 2.0, 15.0]]
    """
    stored = PRECISIONS[precision]
    rows = quantized_rows(weight.cpu(), stored, place="table in training")
    return values_of_rows(rows, stored)[:, : weight.shape[1]].to(weight.device)


class ThresholdedTables:
    r"""Steps an optimizer of tables and of a threshold for every value, below which it is zero.

    .. math:: f(V, s) = \mathrm{sign}(V) \, \mathrm{ReLU}(|V| - \sigma(s))

    With alive values those of :math:`|V| > \sigma(s)`, and g the gradient of f, V gets g and s gets
    :math:`-g \, \mathrm{sign}(V) \, \sigma'(s)` of alive values, and nothing of others.

    Source: Liu, Gao, Chen, Jin, Li, Learnable Embedding Sizes for Recommender Systems (PEP), ICLR 2021, equations 4 to
    6, thresholds of granularity "feature-dimension".

    Args:
        optimizer: of everything that is not fused; its steps of tables are those of V.
        tables: table -> parameter, see `table_parameters`. They hold V before, and f(V, s) from now on.
        start: s of every value at the beginning.
        learning_rate: of s, which learns by Adam as V does.
        decay: added to the gradient of s, times s: it raises a threshold that the loss does not hold down.
    """

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
    """Values less their thresholds; see `ThresholdedTables`.

    Args:
        values: V.
        thresholds: s, of the same shape.

    Example:
        >>> thresholded(torch.tensor([-0.75, 0.25, 2.0]), torch.zeros(3)).tolist()
        [-0.25, 0.0, 1.5]
    """
    return values.sign() * (values.abs() - thresholds.sigmoid()).relu()


def threshold_gradients(values: Tensor, thresholds: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of V and s by that of `thresholded`.

    Args:
        values: V.
        thresholds: s.
        gradient: of what `thresholded` gives.

    Returns:
        Both of the shape of V.
    """
    share = thresholds.sigmoid()
    of_value = gradient * (values.abs() > share)
    return of_value, -of_value * values.sign() * share * (1 - share)
