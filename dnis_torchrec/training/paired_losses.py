"""Whether one state of a model is ahead of another by more than chance: their losses on the same
samples, in pairs."""

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
def part_losses(
    model: nn.Module, batches: Iterable[Batch], task: Task, device: torch.device
) -> Tensor:
    """Losses of a model on parts of every batch of a split."""
    was_training = model.training
    model.eval()
    found = [torch.zeros(0, 2, dtype=torch.float64)]
    for batch in batches:
        if (
            not len(batch.labels) and world_size_of() == 1
        ):  # TorchRec's collections look up no batch of none
            continue
        batch = for_lookup(batch).to(device)
        loss, (_, outputs) = model(batch)
        if len(batch.labels):
            found.append(_losses_of_parts(task, batch, outputs, loss))
    model.train(was_training)
    return torch.cat(found)


def _losses_of_parts(task: Task, batch: Batch, outputs: Outputs, loss: Tensor) -> Tensor:
    """Those of all parts; of the whole batch where one has no loss, as one whose samples all weigh
    nothing."""
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
    return {
        name: part[rows] if isinstance(part, Tensor) and part.dim() else part
        for name, part in outputs.items()
    }


def is_ahead(losses: Tensor, rival: Tensor, ranks: Ranks) -> bool:
    """Whether the mean loss is lower than a rival's by more than one standard error of the
    difference."""
    samples, lead = losses[:, 0], rival[:, 1] - losses[:, 1]
    squared = samples.square()
    terms = [
        samples,
        samples * lead,
        squared,
        squared * lead,
        squared * lead.square(),
        torch.ones_like(samples),
    ]
    n, of_n, n2, n2_lead, n2_lead2, parts = ranks.sum_(
        torch.stack([term.sum() for term in terms])
    ).tolist()
    mean = of_n / n
    spread = max(n2_lead2 - 2 * mean * n2_lead + mean**2 * n2, 0.0) / n**2
    return mean > math.sqrt(spread * parts / max(parts - 1, 1))
