"""Single values that are kept: compressed sparse rows, and magnitude pruning (Han et al. 2015)."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.rivals.task import Served, Task, UnmetError, counts_of, plain, shards_of, train

VALUE_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
VALUE_PRECISIONS = tuple(VALUE_BYTES)
ROWS_PER_START = 64
"""A lookup adds up the lengths of fewer rows than this to find where its own begins."""
STAGES = 5
"""Prunings of the iterative method; each drops the same share of the values that are left."""


def encode(weight: Tensor, precision: str) -> dict[str, Tensor]:
    """A table as it is served: values, their columns, the length of every row, where every 64th
    begins, and in int8 a scale of every row."""
    mask, narrow = weight != 0, weight.shape[1] <= 255
    lengths, rows = mask.sum(1), mask.nonzero()[:, 0]
    values, kind = weight[mask], torch.uint8 if narrow else torch.int16
    parts = {
        "columns": mask.nonzero()[:, 1].to(kind),
        "lengths": lengths.to(kind),
        "starts": (lengths.cumsum(0) - lengths)[::ROWS_PER_START].int(),
    }
    if precision == "int8":
        scale = (weight.abs().amax(1) / 127).half().clamp(min=2**-24)
        steps = (values / scale[rows].float()).round().clamp(-127, 127)
        return parts | {"values": steps.to(torch.int8), "scale": scale}
    return parts | {"values": values.half() if precision == "fp16" else values}


def decode(parts: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """The table that was encoded, as lookups see it."""
    rows = torch.arange(shape[0]).repeat_interleave(parts["lengths"].long())
    values = parts["values"].float()
    if "scale" in parts:
        values = values * parts["scale"].float()[rows]
    weight = torch.zeros(shape)
    weight[rows, parts["columns"].long()] = values
    return weight


def index_bytes(table: EmbeddingBagConfig, precision: str) -> int:
    """Bytes of a table of which nothing is kept."""
    rows, narrow = table.num_embeddings, table.embedding_dim <= 255
    scales = 2 * rows if precision == "int8" else 0
    return rows * (1 if narrow else 2) + 4 * -(-rows // ROWS_PER_START) + scales


def values_within(task: Task) -> int:
    """How many single values a task's bytes pay for."""
    tables = task.tables()
    spare = task.num_bytes - sum(index_bytes(table, task.precision) for table in tables)
    column = 1 if all(table.embedding_dim <= 255 for table in tables) else 2
    number = spare // (VALUE_BYTES[task.precision] + column)
    if number < 1:
        raise UnmetError(f"{task.num_bytes} bytes leave none beside the rows' index")
    return number


@torch.no_grad()
def drop_unseen_(task: Task, model: nn.Module) -> None:
    """Zeroes rows that training never reads; any other value that starts at zero becomes the
    smallest float."""
    counts = counts_of(task)
    for shard in shards_of(model):
        shard.weight.masked_fill_(shard.weight == 0, torch.finfo(shard.weight.dtype).tiny)
        shard.weight[counts.never_seen(shard.table).to(shard.weight.device)] = 0


@torch.no_grad()
def keep_largest_(model: nn.Module, number: int) -> None:
    """Zeroes all but the values of largest magnitude over all tables; the first of equals stay."""
    weights = [shard.weight for shard in shards_of(model)]
    magnitudes = torch.cat([weight.abs().flatten() for weight in weights])
    if number >= int(magnitudes.count_nonzero()):
        return
    mask = torch.zeros_like(magnitudes, dtype=torch.bool)
    mask[torch.sort(magnitudes, descending=True, stable=True).indices[:number]] = True
    for weight, keep in zip(weights, mask.split([w.numel() for w in weights]), strict=True):
        weight.mul_(keep.view_as(weight))


@torch.no_grad()
def serve_values(task: Task, model: nn.Module, **settings: object) -> Served:
    """The model with its tables as they are encoded."""
    num_bytes = 0
    for shard in shards_of(model):
        parts = encode(shard.weight.cpu(), task.precision)
        num_bytes += sum(part.nbytes for part in parts.values())
        shard.weight.copy_(decode(parts, shard.weight.shape))
    return Served(model=model, num_bytes=num_bytes, settings=settings)


def magnitude(task: Task) -> Served:
    """One shot: the largest values of the uncompressed model, trained on."""
    return _prune_in_stages(task, 1)


def magnitude_iterative(task: Task) -> Served:
    """The same in five stages, each trained to its best epoch."""
    return _prune_in_stages(task, STAGES)


def stage_sizes(whole: int, number: int, stages: int) -> list[int]:
    """Values to keep in each stage: a geometric series from all of them to `number`."""
    share = (number / whole) ** (1 / stages)
    return [round(whole * share**stage) for stage in range(1, stages)] + [number]


def _prune_in_stages(task: Task, stages: int) -> Served:
    number, (model, _) = values_within(task), plain(task)
    drop_unseen_(task, model)
    whole = sum(int(shard.weight.count_nonzero()) for shard in shards_of(model))
    for size in stage_sizes(whole, min(number, whole), stages):
        keep_largest_(model, size)
        recipe = replace(task.build(None), model=model)
        model, _ = train(task, recipe, masks=True, starts_trained=True)
    return serve_values(task, model, stages=stages)
