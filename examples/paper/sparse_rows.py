"""Pruned tables as scipy's sparse matrices: compressed sparse rows or coordinates, one ``.npz`` a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from torch import Tensor, nn

from dnis_torchrec.checks import check_known
from dnis_torchrec.selection.shards import collections, local_shards

KINDS = {"csr": scipy.sparse.csr_matrix, "coo": scipy.sparse.coo_matrix}
Sparse = scipy.sparse.csr_matrix | scipy.sparse.coo_matrix


def save_tables(model: nn.Module, folder: Path, kind: str = "csr") -> dict[str, Path]:
    """Writes ``TABLE.npz`` of every table of a plain model on one process; ``scipy.sparse.load_npz`` reads it."""
    check_known("kind of sparse matrix", kind, KINDS)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for module in collections(model).values():
        for shard in local_shards(module):
            paths[shard.table] = folder / f"{shard.table}.npz"
            scipy.sparse.save_npz(paths[shard.table], KINDS[kind](shard.weight.detach().cpu().numpy()))
    return paths


def load_table(path: Path) -> Tensor:
    """The dense table that was saved."""
    return torch.from_numpy(np.asarray(scipy.sparse.load_npz(path).todense()))


def lookup(rows: Sparse, ids: Tensor) -> Tensor:
    """``(n, D)``: rows of a table, zeros filled in."""
    return torch.from_numpy(np.asarray(rows.tocsr()[ids.cpu().numpy()].todense()))
