"""Forms: in which tables are stored and served, one list of them, and what each takes in bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from dnis_torchrec.blocks.codes import FLOAT_BITS, is_coded, row_strides
from dnis_torchrec.blocks.routing import RowRouting, map_bytes, routing_bytes
from dnis_torchrec.checks import check, check_known

RECORD_BYTES = 64
START_BYTES = 8
ROWS_PER_RECORD = RECORD_BYTES - START_BYTES
LARGEST_LENGTH = 255

SCALE_BYTES = 4
"""Scale and bias of a row of int8 or int4, a float16 each."""


def rounded_up(dim: int, multiple: int) -> int:
    """The least multiple that is no less than a number of columns."""
    return -(-dim // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A precision, in which values are stored."""

    name: str
    bits: int
    dim_multiple: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of FBGEMM's kernels, scale and bias counted."""
        return columns * self.bits // 8 + (SCALE_BYTES if self.bits < 16 else 0)

    def stored_width(self, dim: int) -> int:
        """Columns that a block of R retained dims takes in FBGEMM's kernels."""
        return rounded_up(dim, self.dim_multiple)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(name="fp32", bits=32, dim_multiple=1),
        Precision(name="fp16", bits=16, dim_multiple=1),
        Precision(name="int8", bits=8, dim_multiple=2),
        Precision(name="int4", bits=4, dim_multiple=4),
    )
}
"""Name -> precision."""


CODES = Precision(name="codes", bits=0, dim_multiple=1)
"""Codes, or float32, of as many bits as the scheme says of a column, see
`dnis_torchrec.blocks.codes`."""
COLUMN_SCALE_BYTES = 4
"""Scale (bfloat16) and shift (int16) of a column of a block that is stored in codes."""


def compact_bytes(num_rows: int) -> int:
    """Bytes of the compact row pointers of n rows."""
    return num_rows + START_BYTES * -(-num_rows // ROWS_PER_RECORD)


def has_compact_pointers(embedding_dim: int) -> bool:
    """Returns whether lookups read compact row pointers: up to D = 255."""
    return embedding_dim <= LARGEST_LENGTH


def plain_pointer_bytes(num_rows: int, num_values: int) -> int:
    """Bytes of the row pointers of n rows as integers: four each, or eight from 2^31 values on."""
    return (num_rows + 1) * (4 if num_values < 2**31 else 8)


def pointer_bytes(num_rows: int, embedding_dim: int, num_values: int = 0) -> int:
    """Bytes of a table's row pointers as lookups read them."""
    if has_compact_pointers(embedding_dim):
        return compact_bytes(num_rows)
    return plain_pointer_bytes(num_rows, num_values)


def precision_named(name: str) -> Precision:
    """The precision of that name."""
    check_known("precision", name, PRECISIONS)
    return PRECISIONS[name]


class RetainedTable(Protocol):
    """The facts about a `dnis_torchrec.scheme.TableScheme` on which bytes depend."""

    @property
    def num_embeddings(self) -> int:
        """N."""

    @property
    def embedding_dim(self) -> int:
        """D."""

    @property
    def num_retained(self) -> int:
        """V."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Features read from the table."""

    @property
    def routing(self) -> RowRouting:
        """Row -> block."""

    @property
    def dims(self) -> Tensor:
        """``(S,)``: R of each block."""

    @property
    def retained(self) -> Tensor:
        """``(S, D)`` bool: columns that hold something."""

    @property
    def bits(self) -> Tensor | None:
        """``(S, D)``: bits of a value of each column; None where all retained ones are float32."""


def stored_blocks(table: RetainedTable) -> dict[int, tuple[int, int]]:
    """Blocks that a mixed-dimension form stores: those with rows and retained dims."""
    rows, dims = table.routing.row_counts().tolist(), table.dims.tolist()
    return {s: (rows[s], dims[s]) for s in range(table.routing.num_blocks) if rows[s] and dims[s]}


def column_bytes(embedding_dim: int) -> int:
    """Bytes of the column of a value."""
    return 1 if embedding_dim <= 256 else 2


def block_index_bytes(table: RetainedTable) -> int:
    """Bytes that tell where the values of a mixed-dimension form are: 2 per column of a block, and
    the row routing."""
    return 2 * sum(dim for _, dim in stored_blocks(table).values()) + routing_bytes(table.routing)


@dataclass(frozen=True)
class Form(ABC):
    """A layout, one class each, in a precision."""

    precision: Precision
    layout: ClassVar[str]
    needs_codes: ClassVar[bool] = False
    has_column_bytes: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """``layout_precision``: as users write it, as manifests say it, and as the folder of its
        files."""
        return f"{self.layout}_{self.precision.name}"

    @property
    def is_exact(self) -> bool:
        """Whether it holds the pruned values bit for bit."""
        return self.precision.bits == 32

    @property
    def dim_multiple(self) -> int:
        """Number of which D has to be a multiple."""
        return 1

    @abstractmethod
    def served_bytes(self, table: RetainedTable) -> int:
        """Bytes that lookups of a table read: values with their scales, and what tells where they
        are."""

    @abstractmethod
    def file_bytes(self, table: RetainedTable) -> int:
        """Bytes of a table's tensors in an artifact."""

    @abstractmethod
    def stored_values(self, table: RetainedTable) -> int:
        """Values of a table that are stored, those that fill a row up counted."""

    def fixed_bytes(self, routing: RowRouting, embedding_dim: int) -> int:
        """Bytes that a table takes if nothing of it is retained, where `has_column_bytes`."""
        raise NotImplementedError

    def bytes_per_column(self, rows: Tensor, embedding_dim: int) -> Tensor:
        """Bytes of one more retained column of a block, where `has_column_bytes`."""
        raise NotImplementedError


class Dense(Form):
    """All N rows, D columns wide, with the zeros in them."""

    layout = "dense"

    def served_bytes(self, table: RetainedTable) -> int:
        """N rows of D columns."""
        return table.num_embeddings * self.precision.row_bytes(table.embedding_dim)

    file_bytes = served_bytes

    def stored_values(self, table: RetainedTable) -> int:
        """N times D."""
        return table.num_embeddings * table.embedding_dim

    @property
    def dim_multiple(self) -> int:
        """That of FBGEMM's kernels."""
        return self.precision.dim_multiple


class RowPruned(Form):
    """The K rows that retain something, D columns wide; a map finds them, once for every feature of
    the table."""

    layout = "row_pruned"

    def served_bytes(self, table: RetainedTable) -> int:
        """K rows of D columns, and the maps where K is below N."""
        has_map = self._num_kept(table) < table.num_embeddings
        maps = len(table.feature_names) * map_bytes(table.num_embeddings) if has_map else 0
        return self.file_bytes(table) + maps

    def file_bytes(self, table: RetainedTable) -> int:
        """K rows of D columns: the map follows from the scheme."""
        return self._num_kept(table) * self.precision.row_bytes(table.embedding_dim)

    def stored_values(self, table: RetainedTable) -> int:
        """K times D."""
        return self._num_kept(table) * table.embedding_dim

    @property
    def dim_multiple(self) -> int:
        """That of FBGEMM's kernels."""
        return self.precision.dim_multiple

    @staticmethod
    def _num_kept(table: RetainedTable) -> int:
        return max(1, int(table.routing.row_counts()[table.dims > 0].sum()))  # FBGEMM knows no table without rows


class MixedDimension(Form):
    """A table per block, as wide as its retained dims; the row routing finds the rows."""

    layout = "mixed_dimension"
    has_column_bytes = True

    def served_bytes(self, table: RetainedTable) -> int:
        """The blocks' tables and their index."""
        return self.file_bytes(table) + block_index_bytes(table)

    def file_bytes(self, table: RetainedTable) -> int:
        """The blocks' tables: columns and routing are in the scheme."""
        return self.stored_values(table) * self.precision.bits // 8

    def stored_values(self, table: RetainedTable) -> int:
        """The sum over blocks of rows times R."""
        return sum(rows * dim for rows, dim in stored_blocks(table).values())

    def fixed_bytes(self, routing: RowRouting, embedding_dim: int) -> int:
        """The row routing."""
        return routing_bytes(routing)

    def bytes_per_column(self, rows: Tensor, embedding_dim: int) -> Tensor:
        """A value per row, and 2."""
        return rows.double() * (self.precision.bits // 8) + 2


class Csr(Form):
    """Compressed sparse rows: the V retained values, the column of each, and where every row
    begins."""

    layout = "csr"
    has_column_bytes = True

    def served_bytes(self, table: RetainedTable) -> int:
        """Rows, as lookups read them, and row pointers."""
        pointers = pointer_bytes(table.num_embeddings, table.embedding_dim, table.num_retained)
        return self._rows_bytes(table) + pointers

    def file_bytes(self, table: RetainedTable) -> int:
        """Rows twice, as lookups read them and as everybody else does, and row pointers likewise."""
        num_rows = table.num_embeddings
        compact = compact_bytes(num_rows) if has_compact_pointers(table.embedding_dim) else 0
        return 2 * self._rows_bytes(table) + plain_pointer_bytes(num_rows, table.num_retained) + compact

    def stored_values(self, table: RetainedTable) -> int:
        """V."""
        return table.num_retained

    def fixed_bytes(self, routing: RowRouting, embedding_dim: int) -> int:
        """Row pointers, and the scales of int8."""
        return self.row_index_bytes(routing.num_embeddings, embedding_dim)

    def row_index_bytes(self, num_rows: int, embedding_dim: int) -> int:
        """Row pointers, and the scales of int8, of n rows of fewer than 2^31 values."""
        return pointer_bytes(num_rows, embedding_dim) + num_rows * self._scale_bytes()

    def bytes_per_column(self, rows: Tensor, embedding_dim: int) -> Tensor:
        """Values with their columns."""
        return rows.double() * self.bytes_per_value(embedding_dim)

    def bytes_per_value(self, embedding_dim: int) -> int:
        """Of a value and its column."""
        return self.precision.bits // 8 + column_bytes(embedding_dim)

    def _rows_bytes(self, table: RetainedTable) -> int:
        values = table.num_retained * self.bytes_per_value(table.embedding_dim)
        return values + table.num_embeddings * self._scale_bytes()

    def _scale_bytes(self) -> int:
        return 2 if self.precision.bits == 8 else 0


class Packed(Form):
    """Every column of every block in bits of its own; a row directory finds the rows."""

    layout = "packed"
    needs_codes = True

    @property
    def name(self) -> str:
        """The layout alone: the scheme says the precision."""
        return self.layout

    def served_bytes(self, table: RetainedTable) -> int:
        """Rows, scales and shifts of columns in codes, and the index; nothing where nothing is
        retained."""
        return self.bytes_of(self._bits(table), table.routing.row_counts(), table.routing)

    def bytes_of(self, bits: Tensor, rows: Tensor, routing: RowRouting) -> int:
        """Served bytes of a table of which some bits are known, and no scheme yet."""
        if not bool(bits.any()):
            return 0
        scales = COLUMN_SCALE_BYTES * int(is_coded(bits).sum())
        return int(rows @ row_strides(bits)) + scales + self.index_bytes(routing, bits.shape[1], rows)

    def file_bytes(self, table: RetainedTable) -> int:
        """Rows: all else is in the scheme, or follows from it."""
        return int(table.routing.row_counts() @ row_strides(self._bits(table)))

    def stored_values(self, table: RetainedTable) -> int:
        """V."""
        return table.num_retained

    def index_bytes(self, routing: RowRouting, embedding_dim: int, rows: Tensor | None = None) -> int:
        """One byte of bits for every column of a block, and the row directory."""
        # serving of all other forms does without it
        from dnis_torchrec.blocks.routing import directory_bytes

        return routing.num_blocks * embedding_dim + directory_bytes(routing, rows)

    @staticmethod
    def _bits(table: RetainedTable) -> Tensor:
        return table.retained.long() * FLOAT_BITS if table.bits is None else table.bits.long()


PACKED = Packed(CODES)

FORMS: dict[str, Form] = {
    form.name: form
    for layout, precisions in (
        (Csr, ("fp32", "fp16", "int8")),
        (MixedDimension, ("fp32",)),
        (RowPruned, ("int8", "int4")),
        (Dense, ("fp32", "fp16", "int8", "int4")),
    )
    for form in (layout(PRECISIONS[precision]) for precision in precisions)
} | {PACKED.name: PACKED}
"""Name -> form, in the order in which they are shown: the one list. Further ones join it by
`register`."""

DEFAULT_FORM = "mixed_dimension_fp32"
"""The form that a size is in, and that is loaded, unless another is named: exact, and it trains on.
"""
CANONICAL_FORM = "csr_fp32"
"""The exact rows of any scheme, single values too: every other form can be made from it."""
WRITTEN_BY_DEFAULT = (DEFAULT_FORM, CANONICAL_FORM)
"""Forms of an artifact unless others are asked for."""
RETIRED_FORMS = {f"{MixedDimension.layout}_{name}": PRECISIONS[name].bits for name in ("fp16", "int8", "int4")}
"""Form that earlier versions wrote -> bits of every retained column of `PACKED`, which is smaller
and faster."""


def register(form: Form) -> Form:
    """Makes a form known."""
    check(form.name not in FORMS, f"form {form.name!r}", "a new name", "one that is taken")
    FORMS[form.name] = form
    return form


def form_named(name: str) -> Form:
    """The form of that name."""
    remedy = "give every column its bits (dnis compress), or take another form"
    check(name not in RETIRED_FORMS, f"form {name!r}", f"{PACKED.name!r}, which took its place", "the former", remedy)
    check_known("form", name, FORMS)
    return FORMS[name]
