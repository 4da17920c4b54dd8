"""Export: artifacts of pruned tables, and what reads them back."""

from dnis_torchrec.export.artifact import read_manifest
from dnis_torchrec.export.exporting import load, load_csr, load_dense_state, read_scheme, write_artifact
from dnis_torchrec.export.sparse import SparseTable, sparse_table

__all__ = [
    "SparseTable",
    "load",
    "load_csr",
    "load_dense_state",
    "read_manifest",
    "read_scheme",
    "sparse_table",
    "write_artifact",
]
