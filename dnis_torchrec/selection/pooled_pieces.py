"""Pooled pieces: what a collection's output keys are made of, and where each part stands in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True, kw_only=True)
class PooledFeature:
    """One output key of a collection: a feature read from a table."""

    feature: str
    name: str
    table: str
    num_embeddings: int
    embedding_dim: int
    is_multi_hot: bool
    divides: bool
    first_alpha_row: int
    num_blocks: int

    @property
    def block_keys(self) -> tuple[str, ...]:
        """KJT keys that the child collection reads: one per block of a multi-hot feature, else the
        feature itself."""
        return (
            tuple(f"{self.name}/b{s}" for s in range(self.num_blocks))
            if self.is_multi_hot
            else (self.feature,)
        )

    @property
    def whole_key(self) -> str:
        """The one KJT key that a child collection reads whose lookups split bags for themselves."""
        return self.name if self.is_multi_hot else self.feature


class PooledPieces:
    """The pieces of a collection, in the form that
    `dnis_torchrec.ops.block_operators.select_pieces` reads."""

    def __init__(self, outputs: Sequence[PooledFeature], alpha_begins: Mapping[int, int]) -> None:
        self._outputs = tuple(outputs)
        owners = [
            (index, output) for index, output in enumerate(outputs) for _ in output.block_keys
        ]
        self._owners = owners
        self.keys = [
            key if output.is_multi_hot else output.name
            for output in outputs
            for key in output.block_keys
        ]
        self.single_id = [
            (k, output) for k, (_, output) in enumerate(owners) if not output.is_multi_hot
        ]
        self.of_dim = {
            dim: [k for k, (_, o) in enumerate(owners) if o.embedding_dim == dim]
            for dim in alpha_begins
        }
        self.of_dim = {dim: positions for dim, positions in self.of_dim.items() if positions}
        self._rows_of_piece = [
            (output.first_alpha_row + s, 1 if output.is_multi_hot else output.num_blocks)
            for output in outputs
            for s in range(len(output.block_keys))
        ]
        self._alpha_begins = alpha_begins
        self._layouts: dict[tuple[str, ...], Tensor] = {}
        self._places: dict[tuple[tuple[str, ...], torch.device], tuple[Tensor, Tensor]] = {}

    def layout(self, keys: Sequence[str], widths: Sequence[int]) -> Tensor:
        """Returns the place of every piece, ``(K, 7)`` int64."""
        known = self._layouts.get(tuple(keys))
        if known is not None:
            return known
        column_of_key, column = {}, 0
        for key, width in zip(keys, widths, strict=True):
            column_of_key[key] = column
            column += width
        out_columns, column = [], 0
        for output in self._outputs:
            out_columns.append(column)
            column += output.embedding_dim
        fields = [
            (
                column_of_key[key],
                out_columns[index],
                o.embedding_dim,
                self._alpha_begins[o.embedding_dim],
                index,
                *rows,
            )
            for key, (index, o), rows in zip(
                self.keys, self._owners, self._rows_of_piece, strict=True
            )
        ]
        self._layouts[tuple(keys)] = torch.tensor(fields, dtype=torch.int64).view(-1, 7)
        return self._layouts[tuple(keys)]

    def rows_of_multi_hot(self, split: KeyedJaggedTensor, batch_size: int) -> Tensor:
        """Rows of alpha, ``(B, K)`` int32, -1 for empty bags; those of single-id features are left
        to be filled in."""
        device = split.lengths().device
        if len(self.single_id) == len(self._owners):
            return torch.empty(batch_size, len(self._owners), dtype=torch.int32, device=device)
        places, first_rows = self._places_in(split.keys(), device)
        holds_ids = split.lengths().view(len(split.keys()), batch_size)[places] > 0
        return torch.where(holds_ids, first_rows, -1).t().contiguous()

    def _places_in(self, keys: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Position of every piece's key among `keys`, and its first row of alpha, ``(K, 1)``;
        copied once to a device."""
        known = self._places.get((tuple(keys), device))
        if known is None:
            position = {key: index for index, key in enumerate(keys)}
            places = torch.tensor(
                [position[key] for output in self._outputs for key in output.block_keys]
            )
            rows = torch.tensor([[first] for first, _ in self._rows_of_piece], dtype=torch.int32)
            known = self._places[tuple(keys), device] = places.to(device), rows.to(device)
        return known

    def places(self, keys: Sequence[str]) -> list[tuple[int, int, int]]:
        """Piece, position of its key among `keys`, and row of alpha of block 0, of every single-id
        feature."""
        position = {key: index for index, key in enumerate(keys)}
        return [
            (k, position[output.feature], output.first_alpha_row) for k, output in self.single_id
        ]

    def divisors(self, bags: KeyedJaggedTensor, dtype: torch.dtype) -> Tensor | None:
        """Returns the lengths of whole bags, by which pooled sums still have to be divided, ``(B,
        outputs)``, or None."""
        if not any(output.divides for output in self._outputs):
            return None
        lengths = dict(
            zip(bags.keys(), bags.lengths().view(len(bags.keys()), bags.stride()), strict=True)
        )
        divisors = torch.ones(
            bags.stride(), len(self._outputs), dtype=dtype, device=bags.lengths().device
        )
        for index, output in enumerate(self._outputs):
            if output.divides:
                divisors[:, index] = lengths[output.feature].clamp(min=1)
        return divisors
