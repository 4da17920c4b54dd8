"""What a form of the artifact is: how rows are written, how a serving module is made of them, and what they weigh.

A form that is registered here is written by `write_artifact`, read by `load`, and derived from ``"csr"`` where an
artifact does not hold it. See docs/artifact.md.

Shapes: N rows of a table, D embedding_dim, n rows of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.blocks.column_codes import decode_rows, encode_rows
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme

Rows = Callable[[int, int], Tensor]
"""Dense rows of a table: ``rows(first, last)`` gives rows ``first <= i < last`` as ``(last - first, D)``."""


def rows_of(weight: Tensor) -> Rows:
    """The rows of a dense table, as forms read them.

    Args:
        weight: ``(N, D)``; a view is enough.
    """
    return lambda first, last: weight[first:last]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some consecutive rows of a table in one form, complete in themselves.

    Attributes:
        place: the file, as errors name it.
        first_row: the first of them.
        num_rows: n, at least 1.
        tensors: name -> tensor, memory-mapped where it comes from a file.
    """

    place: str
    first_row: int
    num_rows: int
    tensors: Mapping[str, Tensor]

    def check_names(self, expected: set[str]) -> None:
        """Checks that the shard holds just the tensors that its form has.

        Args:
            expected: their names.

        Raises:
            ValueError: if one is missing or too many.
        """
        requirement = f"tensors {sorted(expected)}"
        check(set(self.tensors) == expected, self.place, requirement, sorted(self.tensors), "export again")


class Encode(Protocol):
    """Writes rows ``first <= i < last`` of a table as the tensors of one shard; reads them a chunk at a time."""

    def __call__(self, table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, Tensor]: ...


class Build(Protocol):
    """Makes a serving module of one collection from its tables' shards (table name -> shards in order of rows)."""

    def __call__(
        self,
        scheme: MixedDimensionScheme,
        shards: Mapping[str, Sequence[Shard]],
        *,
        device: torch.device | str,
        unknown_ids: str,
    ) -> EmbeddingBagCollectionInterface: ...


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of the artifact.

    Attributes:
        name: as in the manifest, in ``load(form=...)`` and as the folder of its files.
        encode: rows of a table -> tensors of a shard. They may not share memory.
        build: shards -> serving module. Shapes, dtypes and names are to be checked, values need not be.
        predicted_bytes: bytes of a table's tensors, told from its scheme alone.
        needs_codes: whether it stores the codes of the scheme, so that schemes without codes cannot take it.
    """

    name: str
    encode: Encode
    build: Build
    predicted_bytes: Callable[[TableScheme], int]
    needs_codes: bool = False


FORMS: dict[str, Form] = {}
"""Name -> form, in the order of registration."""


def register(form: Form) -> Form:
    """Makes a form known to `write_artifact` and `load`.

    Args:
        form: with a name of its own.

    Returns:
        `form`.

    Raises:
        ValueError: if another form has its name.
    """
    check(form.name not in FORMS, f"form {form.name!r}", "a new name", "one that is taken")
    FORMS[form.name] = form
    return form


def form_named(name: str) -> Form:
    """The registered form of that name.

    Args:
        name: as in the manifest.

    Raises:
        ValueError: if there is none; shows the nearest.
    """
    check_known("form", name, FORMS)
    return FORMS[name]


def check_codes(form: Form, table: TableScheme) -> None:
    """Checks that a table can take a form.

    Args:
        form: any.
        table: scheme of the table.

    Raises:
        ValueError: if the form stores codes, and the scheme has none.
    """
    fits, place = table.has_codes or not form.needs_codes, f"table {table.name!r}, form {form.name!r}"
    remedy = "allocate bits first, or choose another form"
    check(fits, place, "bits, scales and shifts of its columns", "none", remedy)


def values_of_codes(table: TableScheme, rows: Rows) -> Rows:
    """What the codes of a table's rows stand for: in every form, a table of codes has these values.

    Args:
        table: scheme of the table.
        rows: gives its dense rows.

    Returns:
        `rows` itself, if the scheme has no codes.
    """
    if not table.has_codes:
        return rows

    def values(first: int, last: int) -> Tensor:
        blocks, chunk = table.routing.block_of(torch.arange(first, last)), rows(first, last).detach().cpu().float()
        encoded = encode_rows(chunk, blocks, table.codes, place=f"table {table.name!r}")
        return decode_rows(encoded, blocks, table.codes)

    return values


def encode_shard(form: Form, table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, Tensor]:
    """Writes rows ``first <= i < last`` of a table as the tensors of one shard.

    Args:
        form: how.
        table: scheme of the table.
        rows: gives its dense rows; where the scheme has codes, these are rounded to them.
        first: the first of them.
        last: the one after the last.

    Raises:
        ValueError: for NaN or infinity in a table of codes, and what the form refuses.
    """
    check_codes(form, table)
    return form.encode(table, rows if form.needs_codes else values_of_codes(table, rows), first, last)
