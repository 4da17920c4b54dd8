"""Whether one state of a model is ahead of another by more than chance: their losses on the same batches, in pairs.

Both states see the same samples, so what makes a batch hard for both drops out of the difference.

Shapes: B batches of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.lookup_batches import for_lookup
from dnis_torchrec.ranks import Ranks, world_size_of


@torch.no_grad()
def batch_losses(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Tensor:
    """Losses of a model on every batch of a split. Every rank takes its own batches; a lookup has its collectives.

    Args:
        model: called on a Batch, returns ``(loss, ..)`` as `TrainTask` does.
        batches: the split.
        device: where the model is.

    Returns:
        ``(B, 2)`` float64: samples, and the mean loss over them.
    """
    was_training = model.training
    model.eval()
    found = []
    for batch in batches:
        if len(batch.labels) or world_size_of() > 1:  # TorchRec's collections look up no batch of none
            loss = model(for_lookup(batch).to(device))[0]
            found.append([float(len(batch.labels)), float(loss) if len(batch.labels) else 0.0])
    model.train(was_training)
    return torch.tensor(found, dtype=torch.float64).reshape(-1, 2)


def is_ahead(losses: Tensor, rival: Tensor, ranks: Ranks) -> bool:
    """Whether the mean loss is lower than a rival's by more than one standard error of the difference.

    With n_b samples, n of them in all, and d_b the rival's loss less the own one in batch b:

        lead m = sum_b n_b d_b / n,   error^2 = B / (B - 1) sum_b n_b^2 (d_b - m)^2 / n^2

    Of two that are level within one standard error the simpler is to be taken (Breiman, Friedman, Olshen, Stone,
    Classification and Regression Trees, 1984, section 3.4.3); here that is the rival. One batch has no error to tell.

    Distributed: one all_reduce of six numbers; the same answer on all ranks.

    Args:
        losses: ``(B, 2)``, of `batch_losses`.
        rival: the same of the rival, on the same batches.
        ranks: all ranks that hold batches.

    Example:
        >>> losses = torch.tensor([[10.0, 0.50], [10.0, 0.52]], dtype=torch.float64)
        >>> better, level = losses - torch.tensor([0, 0.01]), losses - torch.tensor([[0, 0.01], [0, -0.008]])
        >>> is_ahead(better, losses, Ranks()), is_ahead(level, losses, Ranks())
        (True, False)
    """
    samples, lead = losses[:, 0], rival[:, 1] - losses[:, 1]
    squared = samples.square()
    terms = [samples, samples * lead, squared, squared * lead, squared * lead.square(), torch.ones_like(samples)]
    n, of_n, n2, n2_lead, n2_lead2, batches = ranks.sum_(torch.stack([term.sum() for term in terms])).tolist()
    mean = of_n / n
    spread = max(n2_lead2 - 2 * mean * n2_lead + mean**2 * n2, 0.0) / n**2
    return mean > math.sqrt(spread * batches / max(batches - 1, 1))
