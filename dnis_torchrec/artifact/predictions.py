"""Predicted bytes and latency of every serving form of a scheme, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.artifact.forms import codec_of, rows_of, whole_shard
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.forms import (
    FORMS,
    PRECISIONS,
    Csr,
    Form,
    MixedDimension,
    Packed,
    form_named,
    stored_blocks,
)
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme

DENSE_INT4 = "dense_int4"
LATENCY_CLASSES = {"faster": 0.9, "similar": 1.5}
"""Class -> the largest latency it stands for, as a multiple of torchrec's fp32 collection; beyond:
``"slower"``."""
NANOSECONDS_PER_ID, NANOSECONDS_PER_VALUE = (
    15.0,
    {Csr.layout: 0.7, MixedDimension.layout: 0.5, Packed.layout: 0.2},
)
DENSE_PER_ID, DENSE_PER_VALUE = 20.0, 0.6
BATCHED_PER_ID, BATCHED_PER_VALUE = 10.0, 0.4
"""Costs on one core with the compiled operators: 26 tables of 40,000 x 64, batch 1024, one id per
bag, Zipf ids."""


@dataclass(frozen=True, kw_only=True)
class FormPrediction:
    """Predicted bytes and latency of one form of a scheme."""

    form: str
    resident_bytes: int | None
    padding: float | None
    latency_ratio: float
    latency_class: str
    is_exact: bool
    warning: str

    def to_json(self) -> dict[str, Any]:
        """The fields, for a manifest."""
        return asdict(self)


def predict_forms(
    scheme: MixedDimensionScheme, forms: Sequence[str] | None = None
) -> list[FormPrediction]:
    """Bytes, padding and latency class of every form, for this scheme."""
    if forms is None:
        forms = [name for name, form in FORMS.items() if scheme.has_codes or not form.needs_codes]
    tables = list(scheme.tables.values())
    int4_bytes = sum(table.num_embeddings * _int4_row_bytes(table) for table in tables)
    return [_predict(form_named(name), tables, int4_bytes) for name in forms]


def recommended_form(predictions: Iterable[FormPrediction], *, exact: bool = False) -> str | None:
    """The form to take: the smallest that is not slower than torchrec's own collection by more than
    half."""
    good = [
        p
        for p in predictions
        if p.resident_bytes is not None
        and p.latency_class != "slower"
        and not p.form.endswith("int4")
        and (p.is_exact or not exact)
    ]
    return min(good, key=lambda p: (p.resident_bytes, p.latency_ratio)).form if good else None


def forms_table(scheme: MixedDimensionScheme) -> list[tuple[str, ...]]:
    """The predictions as rows of text under a row of headings, the recommended form marked."""
    predictions = predict_forms(scheme)
    recommended, dense = recommended_form(predictions), scheme.dense_parameters * 4
    rows: list[tuple[str, ...]] = [
        ("form", "bytes", "of dense fp32", "padding", "latency", "exact", "")
    ]
    for p in predictions:
        size = (
            ("-", "-")
            if p.resident_bytes is None
            else (f"{p.resident_bytes:,}", f"{p.resident_bytes / dense:.1%}")
        )
        padding = "-" if p.padding is None else f"{p.padding:.2f}"
        note = p.warning or ("recommended" if p.form == recommended else "")
        rows.append((p.form, *size, padding, p.latency_class, "yes" if p.is_exact else "no", note))
    return rows


def describe_forms(scheme: MixedDimensionScheme) -> dict[str, Any]:
    """The predictions and the recommended form, for a manifest."""
    predictions = predict_forms(scheme)
    return {
        "recommended": recommended_form(predictions),
        "forms": [p.to_json() for p in predictions],
    }


def serve(
    scheme: MixedDimensionScheme,
    tables: Mapping[str, Tensor],
    form: str,
    *,
    device: torch.device | str = "cpu",
    unknown_ids: str = "error",
) -> EmbeddingBagCollectionInterface:
    """Builds a serving module of one collection in any form, from the pruned tables and without an
    artifact."""
    known = form_named(form)
    shards = {}
    for name, table in scheme.tables.items():
        check_known("table", name, tables)
        shape, weight = (table.num_embeddings, table.embedding_dim), tables[name].detach()
        check(
            tuple(weight.shape) == shape, f"table {name!r}", f"shape {shape}", tuple(weight.shape)
        )
        shards[name] = [whole_shard(known, table, rows_of(weight))]
    return codec_of(known).build(known, scheme, shards, device=device, unknown_ids=unknown_ids)


def _predict(form: Form, tables: list[TableScheme], int4_bytes: int) -> FormPrediction:
    misfits = [table.name for table in tables if table.embedding_dim % form.dim_multiple]
    lacking = [table.name for table in tables if form.needs_codes and not table.has_codes]
    ratio = sum(_cost(form, table) for table in tables) / sum(
        _dense_cost(table) for table in tables
    )
    latency = next((name for name, limit in LATENCY_CLASSES.items() if ratio <= limit), "slower")
    size, padding, warning = None, None, ""
    if misfits:
        warning = f"needs an embedding_dim that is a multiple of {form.dim_multiple}: not so in table {misfits[0]!r}"
    elif lacking:
        warning = f"needs bits, scales and shifts of every column: not so in table {lacking[0]!r}"
    else:
        size = sum(form.served_bytes(table) for table in tables)
        retained = sum(table.num_retained for table in tables)
        padding = (
            sum(form.stored_values(table) for table in tables) / retained if retained else None
        )
        if size > int4_bytes and form.name != DENSE_INT4:
            warning = "larger than the dense tables in int4"
    return FormPrediction(
        form=form.name,
        resident_bytes=size,
        padding=None if padding is None else round(padding, 4),
        latency_ratio=round(ratio, 3),
        latency_class=latency,
        is_exact=form.is_exact and not any(table.has_codes for table in tables),
        warning=warning,
    )


def _int4_row_bytes(table: TableScheme) -> int:
    stored = PRECISIONS["int4"]
    return stored.row_bytes(stored.stored_width(table.embedding_dim))


def _cost(form: Form, table: TableScheme) -> float:
    """Nanoseconds of a lookup of one of the widest rows, which frequent ids mostly are."""
    if not isinstance(form, Csr | MixedDimension | Packed):
        return BATCHED_PER_ID + BATCHED_PER_VALUE * table.embedding_dim
    widest = max((dim for _, dim in stored_blocks(table).values()), default=0)
    share = (
        table.num_retained / table.block_area if isinstance(form, Csr) and table.block_area else 1.0
    )
    return NANOSECONDS_PER_ID + NANOSECONDS_PER_VALUE[form.layout] * widest * share


def _dense_cost(table: TableScheme) -> float:
    return DENSE_PER_ID + DENSE_PER_VALUE * table.embedding_dim
