"""Serving: modules that look pruned tables up in place of an EmbeddingBagCollection."""

from dnis_torchrec.ops.csr_operator import load_operator
from dnis_torchrec.serving.csr_collection import CsrEmbeddingBagCollection
from dnis_torchrec.serving.csr_table import CsrTable
from dnis_torchrec.serving.mixed_dimension import MixedDimensionEmbeddingBagCollection, block_tables

__all__ = [
    "CsrEmbeddingBagCollection",
    "CsrTable",
    "MixedDimensionEmbeddingBagCollection",
    "block_tables",
    "load_operator",
]
