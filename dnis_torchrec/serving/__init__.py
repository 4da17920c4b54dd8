"""Serving: modules that look pruned tables up in place of a model's embedding collections."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dnis_torchrec.ops.packed import load_operator
    from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection, PackedTable
    from dnis_torchrec.serving.sequences import ServedEmbeddingCollection
    from dnis_torchrec.serving.sharded import PackedSharder
    from dnis_torchrec.serving.tables import MeanForUnknownIds
    from dnis_torchrec.serving.trainable import MixedDimensionEmbeddingBagCollection, block_tables

__all__ = [
    "MeanForUnknownIds",
    "MixedDimensionEmbeddingBagCollection",
    "PackedEmbeddingBagCollection",
    "PackedSharder",
    "PackedTable",
    "ServedEmbeddingCollection",
    "block_tables",
    "load_operator",
]

_HOME = {
    "load_operator": "dnis_torchrec.ops.packed",
    "MeanForUnknownIds": "dnis_torchrec.serving.tables",
    "MixedDimensionEmbeddingBagCollection": "dnis_torchrec.serving.trainable",
    "PackedEmbeddingBagCollection": "dnis_torchrec.serving.packed",
    "PackedSharder": "dnis_torchrec.serving.sharded",
    "PackedTable": "dnis_torchrec.serving.packed",
    "ServedEmbeddingCollection": "dnis_torchrec.serving.sequences",
    "block_tables": "dnis_torchrec.serving.trainable",
}
"""Public name -> its module: a server loads the modules of the form that it serves, and no others.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
