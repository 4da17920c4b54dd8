"""Export: artifacts of pruned tables, and what reads them back."""

from dnis_torchrec.export import csr_forms, dense_forms, mixed_dimension_form  # they register their forms
from dnis_torchrec.export.artifact import read_manifest, verify_files
from dnis_torchrec.export.exporting import write_artifact
from dnis_torchrec.export.form_registry import FORMS, Form, Shard, register
from dnis_torchrec.export.forms import FormPrediction, predict_forms, recommended_form, serve
from dnis_torchrec.export.loading import load, load_csr, load_dense_state, read_scheme
from dnis_torchrec.export.regrouping import regroup

__all__ = [
    "FORMS",
    "Form",
    "FormPrediction",
    "Shard",
    "csr_forms",
    "dense_forms",
    "load",
    "load_csr",
    "load_dense_state",
    "mixed_dimension_form",
    "predict_forms",
    "read_manifest",
    "read_scheme",
    "recommended_form",
    "register",
    "regroup",
    "serve",
    "verify_files",
    "write_artifact",
]
