"""MixedDimensionScheme: which dimensions of which rows are retained. All that crosses from search
to serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict, get_origin, get_type_hints

import torch
from torch import Tensor

from dnis_torchrec.blocks.codes import FLOAT_BITS, ColumnCodes, check_widths, is_coded, row_strides
from dnis_torchrec.blocks.counts import table_name
from dnis_torchrec.blocks.routing import RowRouting, directory_bytes, routing_bytes
from dnis_torchrec.checks import check, check_known, describe

PACKED = "packed"
"""The form for serving: every column of every block has its own bit width, up to float32."""
MIXED_DIMENSION = "mixed_dimension"
"""The form for training: one float32 table per block, with the columns that the block retains."""
FORMS = (PACKED, MIXED_DIMENSION)
FORMS_OF_0_1 = {"mixed_dimension_fp32": MIXED_DIMENSION}
"""Name of a form in release 0.1.0 -> its name since."""
COLUMN_SCALE_BYTES = 4
"""Scale (bfloat16) and shift (int16) of a column of a block that is stored in codes."""

MOST_DIMS = 1 << 16
POOLINGS = ("sum", "mean", "none")
"""How the rows of a bag are combined: summed, averaged, or returned one by one."""


def form_named(name: str) -> str:
    """Returns the present name of a form, given its present name or that of release 0.1.0."""
    name = FORMS_OF_0_1.get(name, name)
    remedy = "dnis_torchrec 0.1.0 reads and writes it"
    check(not is_gone(name), f"form {name!r}", f"one of {FORMS}", "one of release 0.1.0", remedy)
    check_known("form", name, FORMS)
    return name


def is_gone(form: str) -> bool:
    """Returns whether release 0.1.0 wrote this form, and no later release reads it."""
    gone = ("csr", "dense_", "row_pruned_", "mixed_dimension_")
    return form not in FORMS_OF_0_1 and form.startswith(gone)


class DescribedTable(TypedDict):
    """The entry of one table in `MixedDimensionScheme.to_json`."""

    collection: str
    num_embeddings: int
    embedding_dim: int
    pooling: str
    feature_names: list[str]
    is_weighted: bool
    need_indices: NotRequired[bool]
    num_blocks: int
    num_retained: int


_HINTS = get_type_hints(DescribedTable, include_extras=True)
_FIELDS = [name for name, hint in _HINTS.items() if get_origin(hint) is not NotRequired]
_COLUMNS = ("retained", "bits", "scale", "shift")
"""Tensors of `TableScheme`, by the names that they have in a file."""
_REFRESH = ("turn", "row_gain")
"""Those that a refresh needs, and nothing that serves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TableScheme:
    """The retained dims of one table."""

    name: str
    collection: str
    num_embeddings: int
    embedding_dim: int
    pooling: str
    feature_names: tuple[str, ...]
    is_weighted: bool
    routing: RowRouting
    retained: Tensor
    num_retained: int
    need_indices: bool = False
    bits: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    feedback: Tensor | None = None
    gain: Tensor | None = None
    turn: Tensor | None = None
    row_gain: Tensor | None = None
    largest_value: float | None = None

    def __post_init__(self) -> None:
        place, shape = f"table {self.name!r}", (self.num_blocks, self.embedding_dim)
        requirement = f"a pooling of {', '.join(map(repr, POOLINGS))}"
        check(self.pooling in POOLINGS, place, requirement, repr(self.pooling))
        rows, dim, kind = self.num_embeddings, self.embedding_dim, self.retained.dtype
        requirement = f"rows, and 1..{MOST_DIMS} dims"
        check(rows > 0 and 0 < dim <= MOST_DIMS, place, requirement, (rows, dim))
        is_fit = kind == torch.bool and tuple(self.retained.shape) == shape
        actual = f"{kind} {tuple(self.retained.shape)}"
        check(is_fit, place, f"retained as bool of shape {shape}", actual)
        num_rows, largest = self.routing.num_embeddings, self.routing.largest_block
        check(num_rows == rows, place, f"a routing of {rows} rows", num_rows)
        check(largest <= shape[0], place, f"blocks 0..{shape[0]}", largest)
        is_fit = 0 <= self.num_retained <= self.block_area
        check(is_fit, place, f"0 <= num_retained <= {self.block_area}", self.num_retained)
        if self.bits is not None:
            is_fit = tuple(self.bits.shape) == shape
            is_fit = is_fit and bool(((self.bits > 0) == self.retained).all())
            requirement = f"bits of shape {shape}, above 0 where a column is retained, else 0"
            check(is_fit, place, requirement, "others")
            check_widths(self.bits, place)
            is_fit = self.num_retained == self.block_area
            check(is_fit, place, "whole columns of blocks beside bits", "single values")
        if self.scale is not None or self.shift is not None:
            _ = self.codes  # has to be whole

    @property
    def num_blocks(self) -> int:
        """Blocks of rows."""
        return self.routing.num_blocks

    @property
    def table_name(self) -> str:
        """The table's name in its collection."""
        return table_name(self.name, self.collection)

    @property
    def has_codes(self) -> bool:
        """Whether retained values are stored in codes."""
        return self.scale is not None

    @property
    def codes(self) -> ColumnCodes:
        """The codes in which retained values are stored."""
        if self.bits is None or self.scale is None or self.shift is None:
            requirement, remedy = "bits, scales and shifts of its columns", "allocate bits first"
            raise ValueError(describe(f"table {self.name!r}", requirement, "none", remedy))
        return ColumnCodes(self.bits, self.scale, self.shift, self.feedback, self.gain)

    @property
    def dims(self) -> Tensor:
        """``(S,)`` int64: R of each block."""
        return self.retained.sum(dim=1)

    @property
    def block_area(self) -> int:
        """Values that the mixed-dimension form stores: the sum over blocks of rows times R."""
        return int((self.routing.row_counts() * self.dims).sum())

    def columns(self, block: int) -> Tensor:
        """Retained columns of one block, ``(R,)`` int64, rising."""
        return self.retained[block].nonzero().squeeze(1)

    def with_codes(self, codes: ColumnCodes) -> TableScheme:
        """The same table, its columns stored in other codes; those of 0 bits are dropped."""
        return self._cut(self.routing, codes.bits > 0, **vars(codes))

    def _cut(self, routing: RowRouting, columns: Tensor, **fields: Any) -> TableScheme:
        """The same table with whole columns of other blocks."""
        area = int((routing.row_counts() * columns.sum(dim=1)).sum())
        return replace(self, routing=routing, retained=columns, num_retained=area, **fields)

    def with_new_rows(self) -> TableScheme:
        """The same table with its rows of no block, or of one that retains no column, in the last
        block that retains one, beside those that are rare."""
        if not bool(self.retained.any()):
            return self
        routing = self.routing.with_rows_in(self.retained.any(dim=1))
        num_new = int((routing.row_counts() * self.dims).sum()) - self.block_area
        return replace(self, routing=routing, num_retained=self.num_retained + num_new)

    def for_training(self, *, least_dim: int = 8, dim_multiple: int = 4) -> TableScheme:
        """The same table as narrow float32 tables that learn: every block has at least `least_dim`
        columns, a multiple of `dim_multiple`; rows of no block are in the last one.

        The columns that a block gains are those that hotter blocks retain first, then by index.
        """
        routing = self.routing.with_rows_in(torch.ones(self.num_blocks, dtype=torch.bool))
        dims = self.dims.clamp(min=least_dim)
        dims = ((dims + dim_multiple - 1) // dim_multiple * dim_multiple).clamp(
            max=self.embedding_dim
        )
        # The first block that retains a column; S where none does.
        is_in = torch.cat([self.retained, torch.ones(1, self.embedding_dim, dtype=torch.bool)])
        first_block = is_in.to(torch.uint8).argmax(dim=0)
        rank = first_block.expand_as(self.retained).masked_fill(self.retained, -1)
        order = rank.argsort(dim=1, stable=True)
        is_within = torch.arange(self.embedding_dim) < dims.unsqueeze(1)
        retained = torch.zeros_like(self.retained).scatter(1, order, is_within)
        codes = dict.fromkeys(("bits", "scale", "shift", "feedback", "gain"))
        return self._cut(routing, retained, **codes)

    def between(self, first: int, last: int) -> TableScheme:
        """The scheme of rows ``first <= i < last``, as if they were a table."""
        rows = last - first
        return self._cut(self.routing.between(first, last), self.retained, num_embeddings=rows)

    def column_bits(self) -> Tensor:
        """Bits of every column of every block, ``(S, D)`` uint8; float32 where none are given."""
        return self.retained.to(torch.uint8) * FLOAT_BITS if self.bits is None else self.bits

    def with_float_codes(self) -> TableScheme:
        """The same table with codes: where it has none, retained columns are float32."""
        if self.has_codes:
            return self
        bits = self.column_bits()
        shift = torch.zeros(bits.shape, dtype=torch.int16)
        return self.with_codes(ColumnCodes(bits, torch.ones(bits.shape), shift))

    def stored_blocks(self) -> dict[int, tuple[int, int]]:
        """Block -> rows and retained dims, of the blocks that have both."""
        rows, dims = self.routing.row_counts().tolist(), self.dims.tolist()
        return {s: (n, dim) for s, (n, dim) in enumerate(zip(rows, dims, strict=True)) if n and dim}

    def served_bytes(self, form: str) -> int:
        """Bytes that lookups of this table read in a form, index bytes counted."""
        if form_named(form) != PACKED:
            return self.file_bytes(form) + self.block_index_bytes()
        bits = self.column_bits().long()
        if not bool(bits.any()):
            return 0
        scales = COLUMN_SCALE_BYTES * int(is_coded(bits).sum())
        return self.file_bytes(form) + scales + packed_index_bytes(self.routing, bits)

    def file_bytes(self, form: str) -> int:
        """Bytes of this table's values in an artifact: all else is in the scheme."""
        if form_named(form) == PACKED:
            return int(self.routing.row_counts() @ row_strides(self.column_bits().long()))
        return 4 * sum(rows * dim for rows, dim in self.stored_blocks().values())

    def block_index_bytes(self) -> int:
        """Bytes that tell where the values of the mixed-dimension form are: 2 per column of a
        block, and the row routing."""
        num_columns = sum(dim for _, dim in self.stored_blocks().values())
        return 2 * num_columns + routing_bytes(self.routing)


def packed_index_bytes(routing: RowRouting, bits: Tensor) -> int:
    """One byte of bits for every column of every block, and the row directory."""
    return bits.numel() + directory_bytes(routing, (bits > 0).any(dim=1))


@dataclass(frozen=True)
class MixedDimensionScheme:
    """The retained dims of every table of a model, by table name, in the model's table order."""

    tables: Mapping[str, TableScheme] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Retained values of all tables."""
        return sum(table.num_retained for table in self.tables.values())

    @property
    def dense_parameters(self) -> int:
        """Values of the uncompressed tables: the sum of N times D."""
        return sum(table.num_embeddings * table.embedding_dim for table in self.tables.values())

    def served_bytes(self, form: str) -> int:
        """Bytes that lookups of all tables read in a form, index bytes counted."""
        return sum(table.served_bytes(form) for table in self.tables.values())

    def exact_bytes(self) -> dict[str, int]:
        """Form -> bytes served: both hold the same values."""
        return {form: self.served_bytes(form) for form in FORMS}

    def with_float_codes(self) -> MixedDimensionScheme:
        """The same tables with codes: where they have none, retained columns are float32."""
        tables = {name: table.with_float_codes() for name, table in self.tables.items()}
        return MixedDimensionScheme(tables)

    def for_training(self) -> MixedDimensionScheme:
        """The same tables as narrow ones that learn, see `TableScheme.for_training`."""
        tables = {name: table.for_training() for name, table in self.tables.items()}
        return MixedDimensionScheme(tables)

    @property
    def form(self) -> str:
        """The form that the tables are in unless another is asked for."""
        return PACKED if any(t.has_codes for t in self.tables.values()) else MIXED_DIMENSION

    def compression(self, form: str | None = None) -> float:
        """Bytes of the float32 tables over bytes served, in `form` unless another is asked for."""
        num_bytes = self.served_bytes(self.form if form is None else form)
        return compression_of(self.dense_parameters, num_bytes)

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors, ready for json.dumps; `to_tensors` gives the rest."""
        return {
            name: {key: getattr(table, key) for key in _FIELDS}
            | {"feature_names": list(table.feature_names)}
            | ({"need_indices": True} if table.need_indices else {})
            for name, table in self.tables.items()
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """The routing and the retained columns of every table, keyed ``"<table>/<field>"``."""
        tensors: dict[str, Tensor] = {}
        for name, table in self.tables.items():
            parts = {key: getattr(table, key) for key in _COLUMNS} | table.routing.to_tensors()
            tensors |= {f"{name}/{key}": part for key, part in parts.items() if part is not None}
        return tensors

    def to_refresh(self) -> dict[str, Tensor]:
        """What a trained row goes through before it is encoded, for a refresh:
        ``"<table>/turn"``, ``(D, D)``, then ``"<table>/row_gain"``, ``(S, D)``, float32; absent
        where it changes nothing."""
        tensors: dict[str, Tensor] = {}
        for name, table in self.tables.items():
            parts = {key: getattr(table, key) for key in _REFRESH}
            tensors |= {f"{name}/{key}": p.float() for key, p in parts.items() if p is not None}
        return tensors

    def with_refresh(self, tensors: Mapping[str, Tensor]) -> MixedDimensionScheme:
        """The same scheme with what `to_refresh` gave."""
        tables = {}
        for name, table in self.tables.items():
            rows, dim = table.num_blocks, table.embedding_dim
            for key, shape in {"turn": (dim, dim), "row_gain": (rows, dim)}.items():
                part = tensors.get(f"{name}/{key}")
                actual = shape if part is None else tuple(part.shape)
                check(actual == shape, f"table {name!r}, {key}", f"shape {shape}", actual)
            parts = {key: tensors.get(f"{name}/{key}") for key in _REFRESH}
            tables[name] = replace(table, turn=parts["turn"], row_gain=parts["row_gain"])
        return MixedDimensionScheme(tables)

    @staticmethod
    def from_parts(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MixedDimensionScheme:
        """Rebuilds a scheme from `to_json` and `to_tensors`; other tensors are passed over."""
        tables = {}
        for name, fields in facts.items():
            absent = sorted(set(_FIELDS) - set(fields))
            check(not absent, f"table {name!r}", "a complete description", f"none of {absent}")
            keys = {key: f"{name}/{key}" for key in (*_COLUMNS, "boundaries", "block_of_row")}
            parts = {key: tensors[place] for key, place in keys.items() if place in tensors}
            check("retained" in parts, f"table {name!r}", "its retained columns", "none")
            entry = {key: fields[key] for key in _FIELDS}
            entry["need_indices"] = fields.get("need_indices", False)
            rows, num_blocks = fields["num_embeddings"], entry.pop("num_blocks")
            entry["routing"] = RowRouting.from_tensors(rows, num_blocks, parts)
            entry["feature_names"] = tuple(entry["feature_names"])
            entry |= {key: parts.get(key) for key in _COLUMNS}
            tables[name] = TableScheme(name=name, **entry)
        return MixedDimensionScheme(tables)


def compression_of(dense_parameters: int, num_bytes: int) -> float:
    """Bytes of the float32 tables over bytes served, at least one."""
    return 4 * dense_parameters / max(1, num_bytes)


VALUES_PER_CHUNK = 2**22
"""Values of a dense table handled at a time: 16 MiB in fp32."""


def rows_per_chunk(embedding_dim: int) -> int:
    """Rows of a dense table that are handled at a time."""
    return max(1, VALUES_PER_CHUNK // embedding_dim)
