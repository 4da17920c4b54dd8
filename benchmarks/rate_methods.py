"""The methods of `benchmarks.rate_distortion`: ways to store the tables of one trained model in few bytes.

All start from the same plain model and serve from the collection that stands in for the model's own. Nothing trains but
a search and the narrower models of `uniform`.

Shapes: N rows of a table, D embedding_dim, S blocks, K columns that are kept.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.rate_compress import Prepared, UnmetError, compress
from benchmarks.rate_models import Trained, row_bytes
from benchmarks.rivals.forms import DEFAULT_FORM, PRECISIONS, Precision
from benchmarks.rivals.methods.method import MethodResult
from benchmarks.rivals.methods.reparametrised import rounded
from benchmarks.rivals.methods.trained_scheme import first_columns
from dnis_torchrec.allocation.axes import rotation_groups
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme
from dnis_torchrec.search.prune import uncompressed_scheme
from dnis_torchrec.search.search import search
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.training.shard import process_group

WHOLE_ROWS = ("int8", "int4")
"""Precisions of all D columns; their bytes are sizes for other methods, too."""
NARROWEST = "fp16"
"""Precision of rivals at sizes that leave no bytes for a row of int8 or int4 beside its scale."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A row that is to be measured.

    Attributes:
        method: name of an entry of `METHODS`.
        precision: what values are stored in.
        size: compression asked for; ``"int8 rows"`` or ``"int4 rows"`` for the bytes of all D columns so; None for the
            uncompressed model.
    """

    method: str
    precision: str
    size: float | str | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Served:
    """A model whose tables are stored in few bytes.

    Attributes:
        made: what it is, as a method of a comparison tells it; its seconds are those from the trained model to this
            one, of one that is trained with its training.
        num_bytes: of the tables, where no form of ours stores them so.
        predicted: increase of the loss, where the method predicts one.
        extra: what else a row tells.
    """

    made: MethodResult
    num_bytes: int | None = None
    predicted: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def _served(
    model: nn.Module,
    scheme: MixedDimensionScheme,
    form: str,
    seconds: float,
    *,
    predicted: float | None = None,
    **extra: Any,
) -> Served:
    made = MethodResult(
        model=model, scheme=scheme, form=form, selection_loss=math.nan, seconds=seconds, seconds_of_trials=seconds
    )
    return Served(made=made, predicted=predicted, extra=extra)


def columns_that_fit(configs: Sequence[EmbeddingBagConfig], precision: str, num_bytes: int) -> int:
    """The most columns of every table that fit in so many bytes, as wide as the kernels want them.

    Args:
        configs: the tables.
        precision: a name of `PRECISIONS`; `NARROWEST` only where neither int8 nor int4 fits.
        num_bytes: of all tables together.

    Returns:
        K, a multiple of what the kernels want, below the widest D.

    Raises:
        UnmetError: if none fits, or int8 or int4 fits beside `NARROWEST`.

    Example:
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=64, feature_names=["f"])
        >>> [columns_that_fit([table], name, 10 * 256 // 20) for name in ("int8", "int4")]
        [8, 16]
        >>> columns_that_fit([table], "fp16", 10 * 256 // 64)
        2
    """
    widest = max(config.embedding_dim for config in configs)

    def most(stored: Precision) -> int:
        widths = range(stored.dim_multiple, widest, stored.dim_multiple)
        return max((width for width in widths if row_bytes(configs, stored, width) <= num_bytes), default=0)

    if precision == NARROWEST and any(most(PRECISIONS[name]) for name in WHOLE_ROWS):
        raise UnmetError("int8 or int4 can be met")
    columns = most(PRECISIONS[precision])
    if not columns:
        raise UnmetError(f"no column of {precision} fits")
    return columns


def _uncompressed(trained: Trained, wanted: Wanted) -> Served:
    del wanted
    model, training = trained.model, trained.training
    extra = {"epochs": training["epochs"], "epoch_seconds": training["seconds"] / training["epochs"]}
    return _served(model, uncompressed_scheme(model), "dense_fp32", training["seconds"], **extra)


def _row_wise(trained: Trained, wanted: Wanted) -> Served:
    """FBGEMM's rows of all D columns."""
    if any(config.embedding_dim % PRECISIONS[wanted.precision].dim_multiple for config in trained.configs):
        raise UnmetError(f"a table's embedding_dim does not fit {wanted.precision}")
    return _served(trained.model, uncompressed_scheme(trained.model), f"dense_{wanted.precision}", 0.0)


def _cut_axes(trained: Trained, wanted: Wanted) -> Served:
    """The first K of the turned tables' columns, each row quantised as FBGEMM does."""
    columns = columns_that_fit(trained.configs, wanted.precision, trained.bytes_of(wanted.size))
    model = trained.turned.model
    turned = {table for group in rotation_groups(model) for table in group.tables}
    if not turned.issuperset(config.name for config in trained.configs):
        raise UnmetError("some tables may not be turned, and their first columns say no more than their last")
    widths = {config.name: min(columns, config.embedding_dim) for config in trained.configs}
    scheme, stored = first_columns(uncompressed_scheme(model), widths), copy.deepcopy(model)
    for module in collections(stored).values():
        for shard in local_shards(module):
            kept = shard.weight.detach()[:, : widths[shard.table]]
            kept.copy_(rounded(kept, wanted.precision))
    num_bytes = row_bytes(trained.configs, PRECISIONS[wanted.precision], columns)
    return replace(_served(stored, scheme, DEFAULT_FORM, 0.0, columns=columns), num_bytes=num_bytes)


def _uniform(trained: Trained, wanted: Wanted) -> Served:
    """A plain model trained at a smaller D, each row quantised as FBGEMM does."""
    precision, budget = PRECISIONS[wanted.precision], trained.bytes_of(wanted.size)
    dim = columns_that_fit(trained.configs, wanted.precision, budget)
    narrow = Trained(trained.case, dim)
    while row_bytes(narrow.configs, precision, None) > budget:  # where some tables are wider than D
        dim -= precision.dim_multiple
        if dim < 1:
            raise UnmetError(f"no D in {wanted.precision} fits")
        narrow = Trained(trained.case, dim)
    served, seconds = _row_wise(narrow, wanted), narrow.training["seconds"]
    made = replace(served.made, seconds=seconds, seconds_of_trials=seconds)
    return Served(made=made, extra={"embedding_dim": dim})


def _compressed(prepared: Prepared, trained: Trained, wanted: Wanted) -> Served:
    started = time.monotonic()
    found = compress(prepared, trained.bytes_of(wanted.size))
    seconds = prepared.seconds + time.monotonic() - started
    bits = torch.cat([table.codes.bits.flatten() for table in found.scheme.tables.values()])
    model, bias = copy.deepcopy(prepared.model), prepared.measured.sample.bias
    if bias is not None:
        bias.shift_(model, found.output_shift)
    return _served(
        model,
        found.scheme,
        PACKED,
        seconds,
        predicted=found.predicted_loss_increase,
        shared_seconds=prepared.seconds,
        relative_error=prepared.measured.curvature.relative_error,
        columns_by_bits=torch.bincount(bits.long()).tolist(),
    )


def _searched(trained: Trained, wanted: Wanted) -> Served:
    """What a search with its defaults makes of the trained model, or that model compressed if it gained nothing."""
    recipe = replace(trained.recipe, model=copy.deepcopy(trained.model))
    started = time.monotonic()
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        size, epochs = trained.dense_bytes / trained.bytes_of(wanted.size), trained.best_epochs
        found = search(recipe, size, Path(folder), device, trained_epochs=epochs)
    seconds, predicted = time.monotonic() - started, found.predicted_loss_increase
    return _served(found.model, found.scheme, PACKED, seconds, predicted=predicted, origin=found.origin)


UNCOMPRESSED, COMPRESS, NOT_TURNED, SEARCH = "uncompressed", "compress", "compress, not turned", "search"
ROW_WISE, CUT_AXES, UNIFORM = "row-wise", "cut axes", "uniform"
RIVALS = (ROW_WISE, CUT_AXES, UNIFORM)
METHODS: Mapping[str, Callable[[Trained, Wanted], Served]] = {
    UNCOMPRESSED: _uncompressed,
    COMPRESS: lambda trained, wanted: _compressed(trained.turned, trained, wanted),
    NOT_TURNED: lambda trained, wanted: _compressed(trained.not_turned, trained, wanted),
    ROW_WISE: _row_wise,
    CUT_AXES: _cut_axes,
    UNIFORM: _uniform,
    SEARCH: _searched,
}
"""Name -> what serves a trained model so, or raises an UnmetError."""


def wanted_rows(sizes: list[float], *, ablations: bool, searches: bool = False) -> list[Wanted]:
    """Lists what is measured of a trained model, in the order of the table.

    Args:
        sizes: compressions to meet.
        ablations: `compress` without turning the tables, too.
        searches: searches that begin with the trained model, too.
    """
    whole = [f"{precision} rows" for precision in WHOLE_ROWS]
    rows = [Wanted(method=UNCOMPRESSED, precision="fp32", size=None)]
    rows += [Wanted(method=ROW_WISE, precision=p, size=size) for p, size in zip(WHOLE_ROWS, whole, strict=True)]
    for method in (COMPRESS, NOT_TURNED) if ablations else (COMPRESS,):
        rows += [Wanted(method=method, precision="mixed", size=size) for size in [*whole, *sizes]]
    rows += [Wanted(method=SEARCH, precision="mixed", size=size) for size in sizes if searches]
    for method in (CUT_AXES, UNIFORM):
        rows += [
            Wanted(method=method, precision=precision, size=size)
            for size in sizes
            for precision in (*WHOLE_ROWS, NARROWEST)
        ]
    return rows
