"""Export: artifacts of pruned tables, written and read back."""

from dnis_torchrec.artifact.loading import exact_rows, load, load_dense_state, read_scheme, serve
from dnis_torchrec.artifact.manifest import read_manifest, verify_files
from dnis_torchrec.artifact.writing import write_artifact

__all__ = [
    "exact_rows",
    "load",
    "load_dense_state",
    "read_manifest",
    "read_scheme",
    "serve",
    "verify_files",
    "write_artifact",
]
