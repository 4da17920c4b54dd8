"""Product quantisation of trained tables (Jegou et al. 2011; MEC 2025): sub-vectors of rows share the
codewords of their table and place, found by k-means that counts a row as often as it is read."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.rivals.rows import TRAINED_MULTIPLE, round_rows_
from benchmarks.rivals.shared_rows import Parts, ShortTable, short_bytes, shorten_, table_bytes
from benchmarks.rivals.task import Served, Task, UnmetError, best_of, check_pooled, counts_of, plain, shards_of, train

WIDTHS = (2, 4, 8, 16, 32, 64)
"""Columns of a sub-vector."""
MOST_BITS = 12
"""Of a pointer."""
ROUNDS = 25
"""Of k-means."""
DISTANCES = 1 << 22
"""Distances that k-means holds at a time."""


class Pointers(nn.Module):
    """The row that an id points at."""

    def __init__(self, pointers: Tensor) -> None:
        super().__init__()
        self.register_buffer("pointers", pointers, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows."""
        return self.pointers[ids]


def pointer_bytes(num_ids: int, num_rows: int) -> int:
    """Bytes of the pointers of all ids, as bit fields one behind the other."""
    return -(-num_ids * (num_rows - 1).bit_length() // 8)


def k_means(points: Tensor, weights: Tensor, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most so many centres of weighted points, and the one that is nearest to every point."""
    distinct, which = torch.unique(points.float(), dim=0, return_inverse=True)
    if len(distinct) <= number:
        return distinct, which
    weight = torch.zeros(len(distinct)).index_add_(0, which, weights.float())
    weight += 1e-6 * weight.mean().clamp(min=1e-6)
    centres, distance = torch.empty(number, distinct.shape[1]), torch.ones(len(distinct))
    for index in range(number):  # k-means++ (Arthur and Vassilvitskii 2007)
        centres[index] = distinct[torch.multinomial(weight * distance, 1, generator=generator)]
        of_centre = (distinct - centres[index]).square().sum(1)
        distance = torch.minimum(distance, of_centre) if index else of_centre
    for _ in range(ROUNDS):
        nearest, distance = _nearest(distinct, centres)
        total = torch.zeros(number).index_add_(0, nearest, weight)
        sums = torch.zeros_like(centres).index_add_(0, nearest, distinct * weight[:, None])
        centres = sums / total.clamp(min=1e-30)[:, None]
        # A centre without points moves to the point that costs most.
        empty = (total == 0).nonzero()[:, 0]
        centres[empty] = distinct[(distance.square() * weight).topk(len(empty)).indices]
    return centres, _nearest(distinct, centres)[0][which]


def _nearest(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centre of every point, and its distance."""
    parts = points.split(max(1, DISTANCES // len(centres)))
    lowest = [torch.cdist(part, centres).min(dim=1) for part in parts]
    return torch.cat([low.indices for low in lowest]), torch.cat([low.values for low in lowest])


def settings_of(task: Task, least_width: int = 1) -> list[tuple[int, int]]:
    """For every width of sub-vectors the most bits of a pointer within a task's bytes."""
    tables = task.tables()

    def num_bytes(width: int, bits: int) -> int:
        total = 0
        for table in tables:
            number = min(1 << bits, table.num_embeddings)
            of_part = pointer_bytes(table.num_embeddings, number) + table_bytes(number, width, task.precision)
            total += table.embedding_dim // width * of_part
        return total

    settings = []
    for width in WIDTHS:
        fit = [bits for bits in range(1, MOST_BITS + 1) if num_bytes(width, bits) <= task.num_bytes]
        if fit and width >= least_width and all(table.embedding_dim % width == 0 for table in tables):
            settings.append((width, max(fit)))
    if not settings:
        raise UnmetError(f"no codebooks in {task.precision} come to {task.num_bytes} bytes")
    return settings


def quantise(weight: Tensor, counts: Tensor, width: int, bits: int, generator: torch.Generator) -> Parts:
    """A table as codewords for sub-vectors of so many columns."""
    parts = []
    for columns in weight.split(width, dim=1):
        rows, pointers = k_means(columns, counts, 1 << bits, generator)
        parts.append([ShortTable(rows, Pointers(pointers), pointer_bytes(len(weight), len(rows)))])
    return parts


def _quantise(task: Task, width: int, bits: int) -> tuple[nn.Module, int]:
    """The uncompressed model with its tables as codewords, and their bytes."""
    (model, _), counts = plain(task), counts_of(task).counts
    generator = torch.Generator().manual_seed(task.seed)
    weights = {shard.table: shard.weight.detach().cpu() for shard in shards_of(model)}
    parts = {name: quantise(weight, counts[name], width, bits, generator) for name, weight in weights.items()}
    shorten_(model, parts)
    return model, short_bytes(parts, task.precision)


def _serve(task: Task, width: int, bits: int) -> Served:
    model, num_bytes = _quantise(task, width, bits)
    round_rows_(model, task.precision)
    return Served(model=model, num_bytes=num_bytes, settings={"width": width, "bits": bits})


def product_quantisation(task: Task, least_width: int = 1) -> Served:
    """The best width of sub-vectors; nothing is trained."""
    check_pooled(task.build(None).model)
    return best_of(task, [partial(_serve, task, *setting) for setting in settings_of(task, least_width)])


def trained_codewords(task: Task) -> Served:
    """The same, codewords and all else trained on as long as that helps."""
    served = product_quantisation(task, TRAINED_MULTIPLE)
    model, num_bytes = _quantise(task, **served.settings)
    model, _ = train(task, replace(task.build(None), model=model), starts_trained=True)
    round_rows_(model, task.precision)
    return replace(served, model=model, num_bytes=num_bytes)
