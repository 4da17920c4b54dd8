"""Tables of bit fields, and an EmbeddingBagCollection that looks them up."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.codes import check_widths, is_coded, row_strides
from dnis_torchrec.blocks.routing import RowDirectory
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.ops.batches import name_features, readable_bags
from dnis_torchrec.ops.packed import (
    COLUMNS_PER_GROUP,
    NUM_LAYOUTS,
    OpenedCollection,
    field_groups,
    load_operator,
    pack_values,
)
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.tables import LogicalCollection, name_unknown_id

logger = logging.getLogger(__name__)


class HeldBuffers(nn.Module):
    """Buffers that C++ owns, and not Python alone."""

    __jit_ignored_attributes__: ClassVar[list[str]] = ["_views", "opened"]

    opened: OpenedCollection | None
    """What a lookup has read from these buffers, and from those of the tables they describe."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._hold()

    def _hold(self) -> None:
        with torch.inference_mode(False):  # in which views would not own anything
            self._views = [buffer.view_as(buffer) for buffer in self.buffers()]
        self.opened = None

    def _apply(self, *arguments: Any, **options: Any) -> HeldBuffers:
        module = super()._apply(*arguments, **options)
        self._hold()
        return module

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self._hold()

    def __getstate__(self) -> dict[str, Any]:
        """Without the views: a copy makes its own."""
        left_out = self.__jit_ignored_attributes__
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the views of a copy, or of tensors that came from another process."""
        super().__setstate__(state)
        self._hold()


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTable:
    """A table in bit fields: a value of k bits is a number q in 0 .. 2^k - 1 that stands for scale
    * (q + shift / 2)."""

    bits: Tensor
    directory: RowDirectory
    rows: Tensor
    scales: Tensor
    shifts: Tensor
    row_counts: Tensor

    def __post_init__(self) -> None:
        dtypes = {"bits": torch.uint8, "rows": torch.uint8}
        dtypes |= {"scales": torch.bfloat16, "shifts": torch.int16}
        for name, dtype in dtypes.items():
            value = getattr(self, name).dtype
            if value != dtype:
                raise TypeError(describe(f"PackedTable.{name}", f"{dtype}", value))
        check_widths(self.bits, "PackedTable.bits")
        num_blocks, value = self.directory.num_blocks, (len(self.bits), *self.row_counts.shape)
        requirement = f"bits and row counts of {num_blocks}"
        check(value == (num_blocks,) * 2, "PackedTable", requirement, value)
        num_codes = int(is_coded(self.bits).sum())
        num_bytes = int(self.row_counts @ row_strides(self.bits))
        shapes = {"rows": num_bytes, "scales": num_codes, "shifts": num_codes}
        for name, size in shapes.items():
            shape = tuple(getattr(self, name).shape)
            check(shape == (size,), f"PackedTable.{name}", f"{size} of them", shape)
        sound = bool((self.scales > 0).all()) and bool(self.scales.isfinite().all())
        check(sound, "PackedTable.scales", "finite ones above 0", "others")

    @classmethod
    def from_rows(
        cls,
        table: TableScheme,
        rows: Tensor,
        scale: Tensor,
        shift: Tensor,
        directory: RowDirectory | None = None,
    ) -> PackedTable:
        """Takes the rows of all blocks as they are, so that they may lie in a mapped file."""
        bits = table.column_bits()
        is_code = is_coded(bits)
        return cls(
            bits=bits,
            directory=directory or RowDirectory.of(table.routing, (bits > 0).any(dim=1)),
            rows=rows,
            scales=scale[is_code].bfloat16(),
            shifts=shift[is_code].to(torch.int16),
            row_counts=table.routing.row_counts(),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of rows, scales, shifts, bits and directory; 0 where nothing is retained."""
        if not bool(self.bits.any()):
            return 0
        parts = (self.rows, self.scales, self.shifts, self.bits, self.directory.directory)
        return sum(part.nbytes for part in parts)

    def first_bytes(self) -> Tensor:
        """Returns the first byte of the rows of every block, ``(S,)`` int64."""
        sizes = self.row_counts * row_strides(self.bits)
        return sizes.cumsum(0) - sizes

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Returns scale and shift of every column of every block, ``(S, D)`` float32, int16; 1 and
        0 without codes."""
        is_code = is_coded(self.bits)
        scale, shift = torch.ones(self.bits.shape), torch.zeros(self.bits.shape, dtype=torch.int16)
        scale[is_code], shift[is_code] = self.scales.float(), self.shifts
        return scale, shift


def split_blocks(rows: Tensor, row_counts: Tensor, bits: Tensor) -> list[Tensor]:
    """The rows of every block, ``(n, stride)`` each; views."""
    strides = row_strides(bits)
    parts = rows.split((row_counts * strides).tolist())
    return [
        part.view(n, stride)
        for part, n, stride in zip(parts, row_counts.tolist(), strides.tolist(), strict=True)
    ]


def pack_rows(
    table: TableScheme, chunks: Iterable[Tensor], row_counts: Tensor, *, first: int = 0
) -> Tensor:
    """Encodes consecutive rows of a table, each of which is read once."""
    bits = table.codes.bits
    table_of_fields = torch.empty(int(row_counts @ row_strides(bits)), dtype=torch.uint8)
    blocks, counts = split_blocks(table_of_fields, row_counts, bits), [0] * len(row_counts)
    for s, rows in packed_chunks(table, chunks, first=first):
        blocks[s][counts[s] : counts[s] + len(rows)] = rows
        counts[s] += len(rows)
    return table_of_fields


def packed_chunks(
    table: TableScheme, chunks: Iterable[Tensor], *, first: int
) -> Iterator[tuple[int, Tensor]]:
    """Encodes consecutive rows of a table a chunk at a time, each of which is read once."""
    codes, place = table.codes, f"table {table.name!r}"
    for chunk in chunks:
        of_rows = table.routing.block_of(torch.arange(first, first + len(chunk)))
        rows, row_counts = pack_values(chunk, of_rows, codes, place=place)
        first += len(chunk)
        for s, rows_of_block in enumerate(split_blocks(rows, row_counts, codes.bits)):
            if rows_of_block.numel():
                yield s, rows_of_block


def check_num_bags(names: list[str], offsets: Tensor, batch_size: int) -> None:
    """Checks that a batch has as many bags as its batch size and its keys say."""
    # a batch size that is a symbol would be fixed by looking at it
    if type(batch_size) is int and offsets.numel() != len(names) * batch_size + 1:
        requirement = f"{len(names) * batch_size} lengths, one for each bag"
        text = describe(name_features(names), requirement, max(offsets.numel() - 1, 0))
        raise ValueError(text)


class _Layout(NamedTuple):
    """The operator's description of features, tables, blocks and groups of columns; see
    `ops/packed.py`."""

    features: Tensor
    tables: Tensor
    blocks: Tensor
    groups: Tensor


_WITH_QCONFIG = WeakSet[nn.Module]()
"""Packed tables that are being quantized: one warning is enough for all tables of a model."""


class PackedEmbeddingBagCollection(LogicalCollection):
    """Looks bags up in tables of bit fields; same keys and dims as the uncompressed collection."""

    _CONTENT: ClassVar[tuple[str, ...]] = ("_logical", "_num_bytes", "_identity", "_modules")

    def __init__(
        self,
        scheme: MixedDimensionScheme,
        tables: Mapping[str, PackedTable],
        *,
        unknown_ids: str = "error",
    ) -> None:
        super().__init__(scheme, unknown_ids=unknown_ids)
        load_operator()
        self._width = sum(self._dims)
        self._needs_int64 = any(table.num_embeddings > 2**31 for table in self._logical.tables)
        buffers: dict[str, Tensor] = {}
        for name, table in scheme.tables.items():
            check_known("table", name, tables)
            _check_table(table, tables[name])
            parts = {"rows": tables[name].rows, "directory": tables[name].directory.directory}
            buffers |= {f"{name}/{key}": part for key, part in parts.items() if part.numel()}
        self._num_bytes = {name: tables[name].num_bytes for name in scheme.tables}
        # never none: AOTInductor hands an empty list of tensors over as None, which no operator
        # takes
        self.tables = HeldBuffers(buffers or {"none": torch.zeros(1, dtype=torch.uint8)})
        layout = self._output_layout(tables, list(buffers))
        self.outputs = HeldBuffers(layout._asdict())
        # Not tensors: a distributed checkpoint writes into those before anything can compare them.
        self._identity = {"features": layout.features.tolist(), "tables": layout.tables.tolist()}

    def __setattr__(self, name: str, value: Any) -> None:
        """Says that nothing is quantized here: torch.ao.quantization gives each module a qconfig,
        and takes it away when it is done."""
        if name == "qconfig":
            if not _WITH_QCONFIG:
                logger.warning("quantization leaves packed tables as they are, in their own bits")
            _WITH_QCONFIG.add(self)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Forgets a qconfig."""
        if name == "qconfig":
            _WITH_QCONFIG.discard(self)
        super().__delattr__(name)

    def _output_layout(
        self, table_of_fields: Mapping[str, PackedTable], buffers: list[str]
    ) -> _Layout:
        place_of = {name: place for place, name in enumerate(buffers)}
        table_rows: list[list[int]] = []
        block_rows: list[list[int]] = []
        groups: list[Tensor] = []
        position_of: dict[str, int] = {}
        num_groups = 0
        for table in self._logical.tables:
            if table.name in position_of:
                continue
            position_of[table.name] = len(table_rows)
            of_table = table_of_fields[table.name]
            of_blocks = field_groups(of_table.bits, *of_table.scale_and_shift())
            rows = _block_rows(of_table, num_groups, len(of_blocks) // table.routing.num_blocks)
            places = [place_of.get(f"{table.name}/{part}", -1) for part in ("rows", "directory")]
            table_rows.append([table.num_embeddings, len(block_rows), len(rows), *places])
            block_rows += rows
            groups.append(of_blocks)
            num_groups += len(of_blocks)
        features = [
            [position_of[table.name], first, table.embedding_dim, int(table.pooling == "mean")]
            for table, first in zip(self._logical.tables, self._logical.first_columns, strict=True)
        ]
        return _Layout(
            features=torch.tensor(features),
            tables=torch.tensor(table_rows),
            blocks=torch.tensor(block_rows),
            groups=torch.cat(groups),
        )

    def _look_up(self, features: KeyedJaggedTensor) -> KeyedTensor:
        values = self._scripted(features) if torch.jit.is_scripting() else self._of_batch(features)
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=values)

    def lookup(
        self, ids: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Looks bags up from plain tensors, as nn.EmbeddingBag takes them: for callers that have no
        KeyedJaggedTensor."""
        size, names = self._logical.batch_size_of(offsets, per_sample_weights), self._features
        return self._pooled(ids, offsets, per_sample_weights, None, size, names)

    def _of_batch(self, features: KeyedJaggedTensor) -> Tensor:
        """Pooled embeddings of a batch whose keys may stand in any order, ``(B, sum of D over
        features)``."""
        logical = self._logical
        names = features.keys()
        keys = None if names == logical.features else logical.positions(features)
        weights, offsets = logical.weights_of(features), features.offsets()
        batch_size = features.stride()
        if keys is not None:  # else the operator sees that there are as many as features
            check_num_bags(names, offsets, batch_size)
        return self._pooled(features.values(), offsets, weights, keys, batch_size, names)

    def _scripted(self, features: KeyedJaggedTensor) -> Tensor:
        """The same in TorchScript, where the operator says what is wrong with a batch."""
        keys, ids, offsets = features.keys(), features.values(), features.offsets()
        if offsets.numel() != len(keys) * features.stride() + 1:
            raise ValueError("KeyedJaggedTensor: expected one length for each bag, got others")
        if self._needs_int64 and ids.dtype == torch.int32:
            raise TypeError("KeyedJaggedTensor: expected int64 ids, got int32; hash to int64")
        tables: list[Tensor] = []
        for _, buffer in self.tables.named_buffers():
            tables.append(buffer)
        return torch.ops.dnis_torchrec.packed_embedding_bag(
            ids.contiguous(),
            offsets.contiguous(),
            features.weights().float().contiguous() if self._is_weighted else None,
            tables,
            self.outputs.features,
            self.outputs.tables,
            self.outputs.blocks,
            self.outputs.groups,
            [keys.index(feature) for feature in self._features],
            features.stride(),
            self._width,
            self._zero_unknown,
        )

    def _pooled(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        keys: list[int] | None,
        batch_size: int,
        names: list[str],
    ) -> Tensor:
        """Pooled embeddings; bags that the operator does not read as they came are made readable,
        or refused."""
        try:
            return self._read(ids, offsets, weights, keys, batch_size)
        except ValueError:
            check_num_bags(names, offsets, batch_size)
            bags = readable_bags(names, ids, offsets, weights)
            if bags[0] is not ids or bags[1] is not weights:
                return self._pooled(bags[0], offsets, bags[1], keys, batch_size, names)
            if not self._zero_unknown:
                ends = [int(offsets[key * batch_size]) for key in range(len(names) + 1)]
                positions = range(len(self._logical.features)) if keys is None else keys
                of_keys = [ids[ends[key] : ends[key + 1]] for key in positions]
                name_unknown_id(self._logical, of_keys)
            raise

    def _read(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        keys: list[int] | None,
        batch_size: int,
    ) -> Tensor:
        if self._needs_int64 and ids.dtype == torch.int32:
            requirement = "int64 ids, because a table has more than 2^31 rows"
            raise TypeError(describe("KeyedJaggedTensor", requirement, ids.dtype, "hash to int64"))
        # Once, so that all parts are of one version while another thread exchanges them. nn.Module
        # takes longer to find a part by attribute than a lookup of one bag takes.
        modules: Any = self._modules
        tables, outputs = modules["tables"], modules["outputs"]
        weights = None if weights is None else weights.contiguous()
        bags = ids.contiguous(), offsets.contiguous(), weights
        buffers = [*tables._buffers.values(), *outputs._buffers.values()]
        # A graph that outlives this process takes the buffers, and no number of this process.
        if type(ids) is Tensor and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
            opened = outputs.opened
            if opened is None or not opened.has(buffers):
                opened = outputs.opened = OpenedCollection(buffers)
            if opened.number is not None:
                return torch.ops.dnis_torchrec.pool_opened.default(
                    opened.number, *bags, keys, batch_size, self._zero_unknown
                )
        return torch.ops.dnis_torchrec.packed_embedding_bag.default(
            *bags,
            buffers[:-NUM_LAYOUTS],
            *buffers[-NUM_LAYOUTS:],
            keys,
            batch_size,
            self._width,
            self._zero_unknown,
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Refuses codes without their bits and scales, and codes of other tables."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        errors: list[str] = rest[-1]
        place, remedy = prefix.removesuffix(".") or "the model", "build it with the saved scheme"
        names = [f"outputs.{field}" for field in self.outputs._buffers]
        absent = [name for name in names if prefix + name not in state_dict]
        if absent and any(key.startswith(f"{prefix}tables.") for key in state_dict):
            errors.append(describe(place, "codes and their layout", f"no {absent[0]!r}", remedy))
        for field, numbers in self._identity.items():
            tensor = state_dict.get(f"{prefix}outputs.{field}")
            if tensor is not None and not tensor.is_meta and tensor.tolist() != numbers:
                errors.append(describe(place, f"{field} {numbers}", tensor.tolist(), remedy))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the operator there in a process that received the module from another."""
        super().__setstate__(state)
        load_operator()

    def bytes_of_table(self, name: str) -> int:
        """Bytes of one table: rows, scales, shifts, bits and directory."""
        return self._num_bytes[name]

    def table(self, name: str) -> PackedTable:
        """A table as it lies in memory."""
        table, buffers = self.schemes()[name], self.tables._buffers
        no_bytes = torch.empty(0, dtype=torch.uint8, device=self.device)
        rows, data = (buffers.get(f"{name}/{part}", no_bytes) for part in ("rows", "directory"))
        is_stored = (table.column_bits() > 0).any(dim=1)
        directory = RowDirectory.of(table.routing, is_stored, cast(Tensor, data))
        scale, shift = table.codes.scale, table.codes.shift
        of_table = PackedTable.from_rows(table, cast(Tensor, rows), scale, shift, directory)
        self._check_layout(name, of_table)
        return of_table

    def _check_layout(self, name: str, of_table: PackedTable) -> None:
        """Refuses codes that a state_dict brought, whose blocks or scales the scheme does not
        know."""
        names, outputs = list(self.schemes()), self.outputs
        groups = field_groups(of_table.bits, *of_table.scale_and_shift())
        per_table = [
            table.routing.num_blocks * -(-table.embedding_dim // COLUMNS_PER_GROUP)
            for table in self.schemes().values()
        ]
        position = names.index(name)
        begin, end = sum(per_table[:position]), sum(per_table[: position + 1])
        blocks = _block_rows(of_table, begin, len(groups) // of_table.directory.num_blocks)
        _, first, count, *_ = cast(Tensor, outputs.tables)[position].tolist()
        is_same = cast(Tensor, outputs.blocks)[first : first + count].tolist() == blocks
        is_same = is_same and cast(Tensor, outputs.groups)[begin:end].cpu().equal(groups)
        remedy = "load the artifact that the state_dict is of"
        requirement = "blocks, bits and scales of its scheme"
        check(is_same, f"table {name!r}", requirement, "those of another state_dict", remedy)

    def bit_fields(self) -> dict[str, Tensor]:
        """The rows of every table as they lie in memory, ``(bytes,)`` uint8."""
        buffers, no_bytes = self.tables._buffers, torch.empty(0, dtype=torch.uint8)
        names = self.schemes()
        return {name: cast(Tensor, buffers.get(f"{name}/rows", no_bytes)) for name in names}


def _block_rows(table: PackedTable, first_group: int, groups_per_block: int) -> list[list[int]]:
    """Rows of the operator's table of blocks: those that a directory may name, and for boundaries
    that of no rows."""
    begins, counts = table.first_bytes().tolist(), table.row_counts.tolist()
    strides, num_blocks = row_strides(table.bits).tolist(), table.directory.num_blocks
    numbers = range(num_blocks + 1) if table.directory.is_sorted else table.directory.blocks
    return [
        [begins[s], counts[s], strides[s], first_group + s * groups_per_block]
        if s < num_blocks and strides[s] * counts[s]
        else [0, 0, 0, -1]
        for s in numbers
    ]


def _check_table(table: TableScheme, table_of_fields: PackedTable) -> None:
    place, shape = f"table {table.name!r}", (table.num_embeddings, *table.retained.shape)
    value = (table_of_fields.directory.num_embeddings, *table_of_fields.bits.shape)
    check(value == shape, place, f"rows, blocks and columns {shape}", value)
    is_same, counts = table_of_fields.bits.equal(table.column_bits()), table.routing.row_counts()
    check(is_same, place, "the bits of the scheme", "others")
    is_same = table_of_fields.row_counts.equal(counts)
    check(is_same, place, f"blocks of {counts.tolist()} rows", "others")
