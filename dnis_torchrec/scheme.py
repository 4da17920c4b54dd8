"""MixedDimensionScheme: which dimensions of which rows are retained. All that crosses from search
to serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict, get_origin, get_type_hints

import torch
from torch import Tensor

from dnis_torchrec.blocks.codes import FLOAT_BITS, ColumnCodes, check_widths, is_coded, row_strides
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


_HINTS = get_type_hints(DescribedTable, include_extras=True).items()
_FIELDS = {name for name, hint in _HINTS if get_origin(hint) is not NotRequired}


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
    largest_value: float | None = None

    def __post_init__(self) -> None:
        place = f"table {self.name!r}"
        check(
            self.pooling in POOLINGS,
            place,
            f"a pooling of {', '.join(map(repr, POOLINGS))}",
            repr(self.pooling),
        )
        rows, dim = self.num_embeddings, self.embedding_dim
        requirement = f"rows, and 1..{MOST_DIMS} dims"
        check(rows > 0 and 0 < dim <= MOST_DIMS, place, requirement, (rows, dim))
        shape, kind = (self.routing.num_blocks, dim), self.retained.dtype
        fits = kind == torch.bool and tuple(self.retained.shape) == shape
        actual = f"{kind} {tuple(self.retained.shape)}"
        check(fits, place, f"retained as bool of shape {shape}", actual)
        check(
            self.routing.num_embeddings == self.num_embeddings,
            place,
            f"a routing of {self.num_embeddings} rows",
            self.routing.num_embeddings,
        )
        largest = self.routing.largest_block
        check(largest <= shape[0], place, f"blocks 0..{shape[0]}", largest)
        check(
            0 <= self.num_retained <= self.block_area,
            place,
            f"0 <= num_retained <= {self.block_area}",
            self.num_retained,
        )
        if self.bits is not None:
            fits = tuple(self.bits.shape) == shape
            agrees = fits and bool(((self.bits > 0) == self.retained).all())
            requirement = (
                f"bits of shape {shape}, above 0 where a column is retained and nowhere else"
            )
            check(agrees, place, requirement, "others")
            check_widths(self.bits, place)
            check(
                self.is_block_structured,
                place,
                "whole columns of blocks beside bits",
                "single values",
            )
        if self.scale is not None or self.shift is not None:
            check(self.bits is not None, place, "bits beside scales and shifts", "none")
            _ = self.codes

    @property
    def has_codes(self) -> bool:
        """Whether retained values are stored in codes."""
        return self.scale is not None

    @property
    def codes(self) -> ColumnCodes:
        """The codes in which retained values are stored."""
        remedy = "allocate bits first"
        if self.bits is None or self.scale is None or self.shift is None:
            raise ValueError(
                describe(
                    f"table {self.name!r}", "bits, scales and shifts of its columns", "none", remedy
                )
            )
        return ColumnCodes(self.bits, self.scale, self.shift, self.feedback, self.gain)

    @property
    def dims(self) -> Tensor:
        """``(S,)`` int64: R of each block."""
        return self.retained.sum(dim=1)

    @property
    def block_area(self) -> int:
        """Values that the mixed-dimension form stores: the sum over blocks of rows times R."""
        return int((self.routing.row_counts() * self.dims).sum())

    @property
    def is_block_structured(self) -> bool:
        """True if whole columns of blocks are retained, so that the mixed-dimension form has no
        padding."""
        return self.num_retained == self.block_area

    def columns(self, block: int) -> Tensor:
        """Retained columns of one block, ``(R,)`` int64, rising."""
        return self.retained[block].nonzero().squeeze(1)

    def with_codes(self, codes: ColumnCodes) -> TableScheme:
        """The same table, its columns stored in other codes; those of 0 bits are dropped."""
        retained = codes.bits > 0
        area = int((self.routing.row_counts() * retained.sum(dim=1)).sum())
        return replace(self, retained=retained, num_retained=area, **vars(codes))

    def with_new_rows(self) -> TableScheme:
        """The same table with its rows of no block in the last block that retains a column, beside
        those that are rare."""
        with_columns, routing = self.retained.any(dim=1).nonzero(), self.routing
        new_rows = int(routing.row_counts(include_unassigned=True)[-1])
        if not new_rows or not with_columns.numel():
            return self
        return replace(self, routing=routing.with_unassigned_in(int(with_columns[-1])))

    def column_bits(self) -> Tensor:
        """Bits of every column of every block, ``(S, D)`` uint8; float32 for all that is retained
        where none are given."""
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
        if form_named(form) == PACKED:
            return packed_bytes(self.column_bits().long(), self.routing.row_counts(), self.routing)
        return self.file_bytes(form) + self.block_index_bytes()

    def file_bytes(self, form: str) -> int:
        """Bytes of this table's values in an artifact: all else is in the scheme."""
        if form_named(form) == PACKED:
            return int(self.routing.row_counts() @ row_strides(self.column_bits().long()))
        return 4 * sum(rows * dim for rows, dim in self.stored_blocks().values())

    def block_index_bytes(self) -> int:
        """Bytes that tell where the values of the mixed-dimension form are: 2 per column of a
        block, and the row routing."""
        return 2 * sum(dim for _, dim in self.stored_blocks().values()) + routing_bytes(
            self.routing
        )


def packed_bytes(bits: Tensor, rows: Tensor, routing: RowRouting) -> int:
    """Bytes that lookups of a packed table read, from its bits alone."""
    if not bool(bits.any()):
        return 0
    scales = COLUMN_SCALE_BYTES * int(is_coded(bits).sum())
    index = packed_index_bytes(routing, bits.shape[1], rows)
    return int(rows @ row_strides(bits)) + scales + index


def packed_index_bytes(routing: RowRouting, embedding_dim: int, rows: Tensor | None = None) -> int:
    """One byte of bits for every column of a block, and the row directory."""
    return routing.num_blocks * embedding_dim + directory_bytes(routing, rows)


@dataclass(frozen=True)
class MixedDimensionScheme:
    """The retained dims of every table of a model, in the model's table order.

    Attributes:
        tables: table name -> its scheme.

    Example:
        >>> import torch
        >>> routing = RowRouting(8, 2, boundaries=torch.tensor([0, 2, 8]))
        >>> retained = torch.tensor([[True, True, True, True], [True, False, False, False]])
        >>> table = TableScheme(name="t", collection="ebc", num_embeddings=8, embedding_dim=4,
        ...     pooling="sum", feature_names=("f",), is_weighted=False, routing=routing,
        ...     retained=retained, num_retained=14)
        >>> scheme = MixedDimensionScheme({"t": table})
        >>> scheme.parameters, scheme.served_bytes("mixed_dimension"), scheme.served_bytes("packed")
        (14, 90, 88)
    """

    tables: Mapping[str, TableScheme] = field(default_factory=dict)

    @property
    def has_codes(self) -> bool:
        """Whether the values of some table are stored in codes."""
        return any(table.has_codes for table in self.tables.values())

    @property
    def parameters(self) -> int:
        """Retained values of all tables."""
        return sum(table.num_retained for table in self.tables.values())

    @property
    def dense_parameters(self) -> int:
        """Values of the uncompressed tables: the sum of N times D."""
        return sum(table.num_embeddings * table.embedding_dim for table in self.tables.values())

    def served_bytes(self, form: str) -> int:
        """Bytes that lookups of all tables read in a form, index bytes counted.

        Args:
            form: how the tables are stored: ``"packed"`` or ``"mixed_dimension"``.

        Raises:
            ValueError: for a form of another name.
        """
        return sum(table.served_bytes(form) for table in self.tables.values())

    def exact_bytes(self) -> dict[str, int]:
        """Form -> bytes served: both hold the same values."""
        return {form: self.served_bytes(form) for form in FORMS}

    def with_float_codes(self) -> MixedDimensionScheme:
        """The same tables with codes: where they have none, retained columns are float32."""
        tables = {name: table.with_float_codes() for name, table in self.tables.items()}
        return MixedDimensionScheme(tables)

    @property
    def form(self) -> str:
        """The form that the tables are in unless another is asked for."""
        return PACKED if self.has_codes else MIXED_DIMENSION

    def compression(self, form: str | None = None) -> float:
        """Bytes of the float32 tables over bytes served.

        Args:
            form: in which they are served; None: ``"packed"`` where values have codes, else
                ``"mixed_dimension"``.

        Raises:
            ValueError: for a form of another name.
        """
        num_bytes = self.served_bytes(self.form if form is None else form)
        return compression_of(self.dense_parameters, num_bytes)

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors, ready for json.dumps; `to_tensors` gives the rest."""
        return {
            name: {
                "collection": table.collection,
                "num_embeddings": table.num_embeddings,
                "embedding_dim": table.embedding_dim,
                "pooling": table.pooling,
                "feature_names": list(table.feature_names),
                "is_weighted": table.is_weighted,
                "num_blocks": table.routing.num_blocks,
                "num_retained": table.num_retained,
                **({"need_indices": True} if table.need_indices else {}),
            }
            for name, table in self.tables.items()
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """The routing and the retained columns of every table, keyed ``"<table>/<field>"``."""
        tensors: dict[str, Tensor] = {}
        for name, table in self.tables.items():
            tensors[f"{name}/retained"] = table.retained
            stored = {"bits": table.bits, "scale": table.scale, "shift": table.shift}
            tensors |= {
                f"{name}/{part}": value for part, value in stored.items() if value is not None
            }
            tensors |= {f"{name}/{key}": value for key, value in table.routing.to_tensors().items()}
        return tensors

    @staticmethod
    def from_parts(
        described: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> MixedDimensionScheme:
        """Rebuilds a scheme from `to_json` and `to_tensors`.

        Args:
            described: table name -> what `to_json` says of it.
            tensors: ``"<table>/<field>"`` -> tensor; others are passed over.

        Raises:
            ValueError: if the description of a table lacks a field, its retained columns are
                missing, or the tensors do not fit the description.
        """
        tables = {}
        for name, fields in described.items():
            absent = _FIELDS - set(fields)
            check(
                not absent, f"table {name!r}", "a complete description", f"none of {sorted(absent)}"
            )
            routing_tensors = {
                key: tensors[f"{name}/{key}"]
                for key in ("boundaries", "block_of_row")
                if f"{name}/{key}" in tensors
            }
            check(f"{name}/retained" in tensors, f"table {name!r}", "its retained columns", "none")
            tables[name] = TableScheme(
                name=name,
                collection=fields["collection"],
                num_embeddings=fields["num_embeddings"],
                embedding_dim=fields["embedding_dim"],
                pooling=fields["pooling"],
                feature_names=tuple(fields["feature_names"]),
                is_weighted=fields["is_weighted"],
                need_indices=fields.get("need_indices", False),
                routing=RowRouting.from_tensors(
                    fields["num_embeddings"], fields["num_blocks"], routing_tensors
                ),
                retained=tensors[f"{name}/retained"],
                num_retained=fields["num_retained"],
                bits=tensors.get(f"{name}/bits"),
                scale=tensors.get(f"{name}/scale"),
                shift=tensors.get(f"{name}/shift"),
            )
        return MixedDimensionScheme(tables)


def compression_of(dense_parameters: int, num_bytes: int) -> float:
    """Bytes of the float32 tables over bytes served, at least one: tables of which nothing is left
    may take none."""
    return 4 * dense_parameters / max(1, num_bytes)


VALUES_PER_CHUNK = 2**22
"""Values of a dense table handled at a time: 16 MiB in fp32."""


def rows_per_chunk(embedding_dim: int) -> int:
    """Rows of a dense table that are handled at a time."""
    return max(1, VALUES_PER_CHUNK // embedding_dim)
