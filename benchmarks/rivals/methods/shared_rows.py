"""`hash` and `qr`: the recipe's own embedding_dim, with as many rows as the bytes pay for, trained
from scratch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.rivals.forms import PRECISIONS
from benchmarks.rivals.methods.method import MethodResult, MethodTask, NotApplicableError, SizeNotMetError, served_in
from benchmarks.rivals.methods.partitioned import QUOTIENT, Partition, partition_
from benchmarks.rivals.methods.trained_scheme import Candidate
from benchmarks.rivals.methods.uniform import uniform_bytes, uniform_form
from dnis_torchrec.checks import check, describe
from dnis_torchrec.search.prune import uncompressed_scheme

_HALVINGS = 40


@served_in(*PRECISIONS)
def hashed(task: MethodTask) -> MethodResult:
    """Every table with the same share of its rows, an id in row ``id mod m``: frequent ids share
    theirs with rare ones."""
    return _trained(task, has_quotients=False)


@served_in(*PRECISIONS)
def quotient_remainder(task: MethodTask) -> MethodResult:
    """The quotient-remainder trick: as `hashed`, times a row of a second table that tells ids of
    one row apart."""
    for module in task.build(None).model.modules():
        if getattr(module, "is_weighted", lambda: False)():
            requirement = "supported are bags without per-sample weights"
            raise NotApplicableError(describe("qr", requirement, f"weighted {type(module).__name__}"))
    return _trained(task, has_quotients=True)


def _trained(task: MethodTask, *, has_quotients: bool) -> MethodResult:
    tables = task.tables()
    names = {table.name for table in tables}
    taken = sorted(name for name in names if name.removesuffix(QUOTIENT) in names - {name})
    check(not taken, "table names", f"none that ends with {QUOTIENT!r} behind another's", taken, "rename tables")
    found = partitions(task, has_quotients=has_quotients)
    recipe = task.build(None)
    partition_(recipe.model, found)
    return Candidate(
        recipe=recipe,
        scheme=uncompressed_scheme(recipe.model),
        form=uniform_form(tables, task.precision, is_cut=False),
        precision=task.precision,
        settings={f"rows of {name}": partition.rows for name, partition in found.items()},
    ).train(task)


def partitions(task: MethodTask, *, has_quotients: bool) -> dict[str, Partition]:
    """Rows of every table: one share of all of them, the largest within the bytes."""
    tables = task.tables()

    def of_share(share: float) -> dict[str, Partition]:
        return {table.name: _partition(table.num_embeddings, share, has_quotients) for table in tables}

    def num_bytes(share: float) -> int:
        return _bytes_of(tables, of_share(share), task.precision)

    smallest = num_bytes(0.0)
    if smallest > task.embedding_bytes():
        requirement = f"at least {smallest} bytes for the fewest rows"
        raise SizeNotMetError(describe("qr" if has_quotients else "hash", requirement, task.embedding_bytes()))
    return of_share(_largest(num_bytes, task.embedding_bytes()))


def _largest(num_bytes: Callable[[float], int], budget: int) -> float:
    if num_bytes(1.0) <= budget:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        low, high = (share, high) if num_bytes(share) <= budget else (low, share)
    return low


def _partition(num_rows: int, share: float, has_quotients: bool) -> Partition:
    """Fewer remainders than the root of N would want more quotients than they save."""
    least = math.ceil(math.sqrt(num_rows)) if has_quotients else 1
    remainders = min(num_rows, max(least, math.floor(share * num_rows)))
    partition = Partition(num_embeddings=num_rows, remainders=remainders, has_quotients=has_quotients)
    if partition.rows >= num_rows:
        return Partition(num_embeddings=num_rows, remainders=num_rows, has_quotients=has_quotients)
    return partition


def _bytes_of(tables: Sequence[EmbeddingBagConfig], found: dict[str, Partition], precision: str) -> int:
    short = [
        EmbeddingBagConfig(name=table.name, num_embeddings=rows, embedding_dim=table.embedding_dim)
        for table in tables
        for rows in (found[table.name].remainders, found[table.name].quotients)
        if rows
    ]
    return uniform_bytes(short, precision, is_cut=False)
