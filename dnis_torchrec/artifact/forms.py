"""How the rows of each layout are written, and how a serving module is made of them: a codec per
layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.blocks.codes import decode_rows, encode_rows
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.forms import Form
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme

Rows = Callable[[int, int], Tensor]
"""Dense rows of a table: ``rows(first, last)`` gives rows ``first <= i < last`` as ``(last - first,
D)``."""


def rows_of(weight: Tensor) -> Rows:
    """The rows of a dense table, as forms read them."""
    return lambda first, last: weight[first:last]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some consecutive rows of a table in one form, complete in themselves."""

    place: str
    first_row: int
    num_rows: int
    tensors: Mapping[str, Tensor]

    def check_names(self, expected: set[str]) -> None:
        """Checks that the shard holds just the tensors that its form has."""
        requirement = f"tensors {sorted(expected)}"
        check(
            set(self.tensors) == expected,
            self.place,
            requirement,
            sorted(self.tensors),
            "export again",
        )


class Encode(Protocol):
    """Writes rows ``first <= i < last`` of a table as the tensors of one shard; reads them a chunk
    at a time."""

    def __call__(
        self, form: Form, table: TableScheme, rows: Rows, first: int, last: int
    ) -> dict[str, Tensor]: ...


class Build(Protocol):
    """Makes a serving module of one collection from its tables' shards (table name -> shards in
    order of rows)."""

    def __call__(
        self,
        form: Form,
        scheme: MixedDimensionScheme,
        shards: Mapping[str, Sequence[Shard]],
        *,
        device: torch.device | str,
        unknown_ids: str,
    ) -> EmbeddingBagCollectionInterface: ...


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A pair of functions that write and serve the forms of one layout."""

    encode: Encode
    build: Build


CODECS: dict[str, Codec] = {}
"""Layout -> codec."""


def register_codec(layout: str, codec: Codec) -> None:
    """Makes `write_artifact` and `load` know how a layout is written and served."""
    check(layout not in CODECS, f"layout {layout!r}", "a new name", "one that is taken")
    CODECS[layout] = codec


def codec_of(form: Form) -> Codec:
    """Returns the codec that writes and serves a form."""
    check_known("layout", form.layout, CODECS)
    return CODECS[form.layout]


def check_codes(form: Form, table: TableScheme) -> None:
    """Checks that a table can take a form."""
    fits = table.has_codes or not form.needs_codes
    remedy = "allocate bits first, or choose another form"
    check(
        fits,
        f"table {table.name!r}, form {form.name!r}",
        "bits, scales and shifts of its columns",
        "none",
        remedy,
    )


def values_of_codes(table: TableScheme, rows: Rows) -> Rows:
    """The values that the codes of a table's rows stand for: in every form, a table of codes has
    these values."""
    if not table.has_codes:
        return rows

    def values(first: int, last: int) -> Tensor:
        blocks, chunk = (
            table.routing.block_of(torch.arange(first, last)),
            rows(first, last).detach().cpu().float(),
        )
        encoded = encode_rows(chunk, blocks, table.codes, place=f"table {table.name!r}")
        return decode_rows(encoded, blocks, table.codes)

    return values


def encode_shard(
    form: Form, table: TableScheme, rows: Rows, first: int, last: int
) -> dict[str, Tensor]:
    """Writes rows ``first <= i < last`` of a table as the tensors of one shard."""
    check_codes(form, table)
    values = rows if form.needs_codes else values_of_codes(table, rows)
    return codec_of(form).encode(form, table, values, first, last)


def whole_shard(form: Form, table: TableScheme, rows: Rows) -> Shard:
    """A table in a form, in memory, as one shard."""
    tensors = encode_shard(form, table, rows, 0, table.num_embeddings)
    place = f"table {table.name!r}, form {form.name!r}"
    return Shard(place=place, first_row=0, num_rows=table.num_embeddings, tensors=tensors)
