"""Whether one state of a model is ahead of another by more than chance: their losses on the same samples, in pairs.

Both states see the same samples, so what makes some of them hard for both drops out of the difference. Pairs are parts
of batches: a small split has two or three batches, too few to tell what chance does.

Shapes: P parts of this rank's batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.data.lookup_batches import for_lookup
from dnis_torchrec.data.task import Outputs, Task
from dnis_torchrec.ranks import Ranks, world_size_of

LOSSES_PER_BATCH = 16
"""Parts of a batch at most."""


@torch.no_grad()
def part_losses(model: nn.Module, batches: Iterable[Batch], task: Task, device: torch.device) -> Tensor:
    """Losses of a model on parts of every batch of a split.

    Distributed: every rank takes its own batches, each looked up as a whole, with the collectives of a lookup.

    Args:
        model: called on a Batch, returns ``(loss, (loss, outputs))`` as `TrainTask` does.
        batches: the split.
        task: the recipe's.
        device: where the model is.

    Returns:
        ``(P, 2)`` float64: samples, and the mean loss over them.
    """
    was_training = model.training
    model.eval()
    found = [torch.zeros(0, 2, dtype=torch.float64)]
    for batch in batches:
        if not len(batch.labels) and world_size_of() == 1:  # TorchRec's collections look up no batch of none
            continue
        batch = for_lookup(batch).to(device)
        loss, (_, outputs) = model(batch)
        if len(batch.labels):
            found.append(_losses_of_parts(task, batch, outputs, loss))
    model.train(was_training)
    return torch.cat(found)


def _losses_of_parts(task: Task, batch: Batch, outputs: Outputs, loss: Tensor) -> Tensor:
    """Those of all parts; of the whole batch where one has no loss, as one whose samples all weigh nothing."""
    size = len(batch.labels)
    bounds = torch.linspace(0, size, min(LOSSES_PER_BATCH, size) + 1).round().long()
    losses = torch.stack([task.loss(*part) for part in _parts(batch, outputs, bounds.tolist())])
    if not bool(losses.isfinite().all()):
        bounds, losses = bounds[[0, -1]], loss.reshape(1)
    return torch.stack([bounds.diff(), losses.cpu()], dim=1).double()


def _parts(batch: Batch, outputs: Outputs, bounds: list[int]) -> Iterator[tuple[Batch, Outputs]]:
    for first, last in pairwise(bounds):
        rows = slice(first, last)
        yield slice_of(batch, first, last), _rows_of(outputs, rows)


def _rows_of(outputs: Outputs, rows: slice) -> Outputs:
    """Some samples' rows; what is no tensor of rows stays as it is."""
    if not isinstance(outputs, Mapping):
        return outputs[rows]
    return {name: part[rows] if isinstance(part, Tensor) and part.dim() else part for name, part in outputs.items()}


def is_ahead(losses: Tensor, rival: Tensor, ranks: Ranks) -> bool:
    """Whether the mean loss is lower than a rival's by more than one standard error of the difference.

    With n_p samples, n of them in all, and d_p the rival's loss less the own one in part p:

        lead m = sum_p n_p d_p / n,   error^2 = P / (P - 1) sum_p n_p^2 (d_p - m)^2 / n^2

    Of two that are level within one standard error the simpler is to be taken (Breiman, Friedman, Olshen, Stone,
    Classification and Regression Trees, 1984, section 3.4.3); here that is the rival. One part has no error to tell.

    Distributed: one all_reduce of six numbers; the same answer on all ranks.

    Args:
        losses: ``(P, 2)``, of `part_losses`.
        rival: the same of the rival, on the same samples.
        ranks: all ranks that hold some.

    Example:
        >>> losses = torch.tensor([[10.0, 0.50], [10.0, 0.52]], dtype=torch.float64)
        >>> better, level = losses - torch.tensor([0, 0.01]), losses - torch.tensor([[0, 0.01], [0, -0.008]])
        >>> is_ahead(better, losses, Ranks()), is_ahead(level, losses, Ranks())
        (True, False)
    """
    samples, lead = losses[:, 0], rival[:, 1] - losses[:, 1]
    squared = samples.square()
    terms = [samples, samples * lead, squared, squared * lead, squared * lead.square(), torch.ones_like(samples)]
    n, of_n, n2, n2_lead, n2_lead2, parts = ranks.sum_(torch.stack([term.sum() for term in terms])).tolist()
    mean = of_n / n
    spread = max(n2_lead2 - 2 * mean * n2_lead + mean**2 * n2, 0.0) / n**2
    return mean > math.sqrt(spread * parts / max(parts - 1, 1))
