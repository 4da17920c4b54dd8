"""Packaging: a model with pruned tables as one folder that a server runs without TorchRec and
without Python."""

from dnis_torchrec.jobs.packaging.flat_model import Signature, export_graph
from dnis_torchrec.jobs.packaging.of_artifact import run_package
from dnis_torchrec.jobs.packaging.package import KINDS, load_package, write_package

__all__ = ["KINDS", "Signature", "export_graph", "load_package", "run_package", "write_package"]
