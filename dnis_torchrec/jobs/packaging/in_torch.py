"""FBGEMM's operators of bags and sequences in operators of torch, which every server has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.nn.functional import pad


def without_fbgemm(program: ExportedProgram) -> ExportedProgram:
    """A program that calls torch where it called FBGEMM for bags and sequences; other operators
    stay."""
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    in_torch = _in_torch()
    return program.run_decompositions(in_torch) if called & in_torch.keys() else program


def complete_cumsum(lengths: Tensor) -> Tensor:
    """``fbgemm::asynchronous_complete_cumsum``: where each bag begins, and the number of ids."""
    return pad(lengths.cumsum(-1, dtype=lengths.dtype), (1, 0))


def offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    """``fbgemm::offsets_range``: the place of every id in its bag."""
    ids = torch.arange(range_size, dtype=offsets.dtype, device=offsets.device)
    bags = torch.searchsorted(offsets, ids, right=True) - 1
    return ids - offsets.index_select(0, bags)


def padded_dense(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding: float = 0.0
) -> Any:
    """``fbgemm::jagged_to_padded_dense``: bags cut or filled up to one length."""
    if len(offsets) != 1:
        return NotImplemented
    (begins,), (length,) = offsets, max_lengths
    rows = begins[:-1, None] + torch.arange(length, dtype=begins.dtype, device=begins.device)
    filler = values.shape[0]  # the row after the last one
    rows = torch.where(rows < begins[1:, None], rows, filler)
    extended = torch.cat([values, values.new_full((1, *values.shape[1:]), padding)])
    return extended.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def _in_torch() -> dict[Any, Callable[..., Any]]:
    """FBGEMM's operator -> ours. TorchRec has loaded FBGEMM by now."""
    fbgemm = torch.ops.fbgemm
    return {
        fbgemm.asynchronous_complete_cumsum.default: complete_cumsum,
        fbgemm.offsets_range.default: offsets_range,
        fbgemm.jagged_to_padded_dense.default: padded_dense,
    }
