"""A trained model with its rows in int8 or int4: what users try first, and what a search has to be
compared with."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from dnis_torchrec.artifact.forms import Rows, rows_of
from dnis_torchrec.artifact.uniform_bits import with_uniform_bits
from dnis_torchrec.comparison.methods.method import MethodResult
from dnis_torchrec.comparison.methods.uniform import uniform_form
from dnis_torchrec.forms import PACKED, PRECISIONS
from dnis_torchrec.report.content import rows_name
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.pruning.schemes import uncompressed_scheme
from dnis_torchrec.selection.shards import collections, local_shards, table_configs

NARROW = {rows_name(precision): precision for precision in ("int8", "int4")}
"""Name of a row -> what its rows are stored in."""


def in_rows(model: nn.Module, precision: str, leave_alone: Collection[str] = ()) -> MethodResult:
    """A trained model whose rows are stored in a precision; nothing is trained. Local, no
    collective."""
    plain = get_unwrapped_module(model)
    scheme, form = (
        uncompressed_scheme(plain),
        uniform_form(table_configs(plain), precision, is_cut=False),
    )
    if form == PACKED.name or leave_alone:
        shards = [shard for module in collections(plain).values() for shard in local_shards(module)]
        rows: dict[str, Rows] = {shard.table: rows_of(shard.weight) for shard in shards}
        kept = MixedDimensionScheme({name: scheme.tables[name] for name in leave_alone})
        floats = dict(with_uniform_bits(kept, rows, PRECISIONS["fp32"].bits).tables)
        scheme, form = MixedDimensionScheme({**scheme.tables, **floats}), PACKED.name
        scheme = with_uniform_bits(scheme, rows, PRECISIONS[precision].bits)
    return MethodResult(
        model=plain,
        scheme=scheme,
        form=form,
        selection_loss=0.0,
        seconds=0.0,
        seconds_of_trials=0.0,
    )
