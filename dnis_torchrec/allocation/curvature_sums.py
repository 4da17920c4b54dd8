"""Sums of gradient, curvature and couplings over samples, and what they are worth once all are
added up."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation.loss_derivatives import Loss, LossDerivatives, name_of
from dnis_torchrec.allocation.pooled_blocks import (
    Apart,
    Entries,
    Lookup,
    Reads,
    merged,
    sum_by_group,
)
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check
from dnis_torchrec.data.task import Task
from dnis_torchrec.ranks import Ranks

logger = logging.getLogger(__name__)

LARGEST_STEP = 4.0
"""Norm of G over that of H, up to which a model may be trained: L2 alone holds one back by 1 to 2.
"""
LEAST_CURVATURE = 1e-6
"""Sum of H over the mean loss, below which dropping all tables would cost nothing that counts."""


@dataclass(frozen=True, eq=False, repr=False)
class Curvature:
    """Gradient and curvature of the loss in alpha, for every column of every block, see
    `curvature`."""

    gradient: Mapping[str, Tensor]
    curvature: Mapping[str, Tensor]
    num_samples: int
    relative_error: float
    couplings: Mapping[str, Tensor] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    @property
    def is_zero(self) -> bool:
        """Whether no column moves a prediction: nothing is left to choose by."""
        return not any(bool(of_table.any()) for of_table in self.curvature.values())

    def __repr__(self) -> str:
        tables = f"{len(self.curvature)} table{'s' if len(self.curvature) != 1 else ''}"
        return f"Curvature({tables}, {self.num_samples} samples, relative error {self.relative_error:.2g})"


@dataclass(frozen=True, eq=False)
class LookedUp:
    """Results of a batch's forward and backward passes."""

    at: LossDerivatives
    calls: list[tuple[Lookup, Apart | None, Tensor]]


class CurvatureSums:
    """Sums over samples, of this rank."""

    def __init__(
        self,
        tables: Iterable[EmbeddingBagConfig],
        blocks: RowBlocks,
        device: torch.device,
        *,
        couplings: bool,
    ) -> None:
        sizes = {
            table.name: (blocks.routings[table.name].num_blocks, table.embedding_dim)
            for table in tables
        }
        both = {
            name: torch.zeros(2, *size, dtype=torch.float64, device=device)
            for name, size in sizes.items()
        }
        self._of_tables = both
        self._couplings = {
            name: torch.zeros(num_blocks, dim, dim, dtype=torch.float64, device=device)
            for name, (num_blocks, dim) in sizes.items()
            if couplings
        }
        self._batches = torch.zeros(9, dtype=torch.float64)
        self._reads = torch.zeros(len(sizes), dtype=torch.float64)

    @torch.no_grad()
    def add(self, looked_up: LookedUp) -> None:
        """Adds a batch."""
        at = looked_up.at
        batch_size = len(at.first)
        entries: dict[str, list[Entries]] = {name: [] for name in self._of_tables}
        for lookup, apart, gradient in looked_up.calls:
            for table, own in lookup.of.entries(lookup, apart, gradient):
                entries[table].append(own)
            for table, reads in lookup.of.reads(lookup, gradient) if self._couplings else ():
                self._couplings[table] += _coupled(reads, at.second, len(self._couplings[table]))
        total, noise = 0.0, 0.0
        for place, (table, of_table) in enumerate(entries.items()):
            if not of_table:
                continue
            both = merged(of_table, batch_size)
            self._reads[place] += len(both.samples)
            num_blocks = self._of_tables[table].shape[1]
            slopes = torch.einsum("mt,tmd->md", at.first[both.samples], both.worth)
            bends = torch.einsum("tmd,mtu,umd->md", both.worth, at.second[both.samples], both.worth)
            added = torch.stack(
                [sum_by_group(own, both.blocks, num_blocks) for own in (slopes, bends)]
            )
            self._of_tables[table] += added
            total, noise = total + float(added[1].sum()), noise + float(slopes.square().sum())
        n, loss, bent = batch_size, at.loss * batch_size, float(at.second.abs().sum())
        self._batches += torch.tensor(
            [1, n, n * n, total, total * total, total * n, noise, loss, bent]
        )

    def over(self, ranks: Ranks, loss: Loss | Task, *, warns: bool) -> Curvature:
        """Means over the samples of all ranks. One all_reduce, and one for the couplings of each
        table."""
        flat = [
            self._batches,
            self._reads,
            *(both.flatten().cpu() for both in self._of_tables.values()),
        ]
        summed = ranks.sum_(torch.cat(flat)).split([part.numel() for part in flat])
        batches, n, n_n, total, total_total, total_n, noise, mean_loss, bent = summed[0].tolist()
        place, requirement = f"loss {name_of(loss)}", "one that is twice differentiable"
        check(
            bent > 0,
            place,
            requirement,
            "second derivatives of 0",
            "choose one that bends, such as MSELoss",
        )
        means = {
            name: (own / n).view(both.shape)
            for (name, both), own in zip(self._of_tables.items(), summed[2:], strict=True)
        }
        mean = total / n
        spread = (
            total_total - 2 * mean * total_n + mean * mean * n_n
        )  # of batches' sums, about the mean
        error = math.inf
        if batches > 1 and total:
            error = math.sqrt(max(spread, 0.0) * batches / (batches - 1)) / abs(total)
        found = Curvature(
            gradient={name: both[0] for name, both in means.items()},
            curvature={name: both[1] for name, both in means.items()},
            num_samples=round(n),
            relative_error=error,
            couplings={name: ranks.sum_(own.cpu()) / n for name, own in self._couplings.items()},
            unread=frozenset(
                name for name, reads in zip(means, summed[1].tolist(), strict=True) if not reads
            ),
        )
        if warns and ranks.is_first:
            _warn_of_untrained(found, mean_loss / n, noise / (n * n))
        return found


def _coupled(reads: Reads, second: Tensor, num_blocks: int) -> Tensor:
    """``(S, D, D)``, the couplings of a table's reads through one feature; `second` is ``(B, T,
    T)``."""
    slopes = reads.slopes.double()
    bent = torch.einsum("mtu,umd->tmd", second[reads.samples], slopes) * reads.times[:, None]
    order, sizes = (
        reads.blocks.argsort(stable=True),
        torch.bincount(reads.blocks, minlength=num_blocks).tolist(),
    )
    of_blocks = zip(
        bent[:, order].split(sizes, dim=1), slopes[:, order].split(sizes, dim=1), strict=True
    )
    return torch.stack([one.flatten(0, 1).T @ other.flatten(0, 1) for one, other in of_blocks])


def _warn_of_untrained(found: Curvature, loss: float, noise: float) -> None:
    """Warns where the tables do next to nothing, or columns would rather change by several times
    their size."""
    bend = sum(float(own.sum()) for own in found.curvature.values())
    bends = math.sqrt(sum(float(own.square().sum()) for own in found.curvature.values()))
    slopes = math.sqrt(
        max(sum(float(own.square().sum()) for own in found.gradient.values()) - noise, 0.0)
    )
    if bend <= LEAST_CURVATURE * abs(loss) or slopes > LARGEST_STEP * bends:
        logger.warning(
            "the model looks untrained: the gradient of the loss in alpha has a norm of %.3g beside a curvature of "
            "%.3g, whose sum is %.3g at a loss of %.3g; train it first, or what columns are worth says little",
            *(slopes, bends, bend, loss),
        )
