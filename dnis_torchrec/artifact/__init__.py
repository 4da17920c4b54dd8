"""Export: artifacts of pruned tables, written and read back."""

from dnis_torchrec.artifact import csr_forms, dense_forms, mixed_dimension_form, packed_form
from dnis_torchrec.artifact.forms import CODECS, Codec, Shard, register_codec
from dnis_torchrec.artifact.loading import exact_rows, load, load_csr, load_dense_state, read_scheme
from dnis_torchrec.artifact.manifest import read_manifest, verify_files
from dnis_torchrec.artifact.predictions import (
    FormPrediction,
    predict_forms,
    recommended_form,
    serve,
)
from dnis_torchrec.artifact.regrouping import regroup_table
from dnis_torchrec.artifact.writing import write_artifact

__all__ = [
    "CODECS",
    "Codec",
    "FormPrediction",
    "Shard",
    "csr_forms",
    "dense_forms",
    "exact_rows",
    "load",
    "load_csr",
    "load_dense_state",
    "mixed_dimension_form",
    "packed_form",
    "predict_forms",
    "read_manifest",
    "read_scheme",
    "recommended_form",
    "register_codec",
    "regroup_table",
    "serve",
    "verify_files",
    "write_artifact",
]
