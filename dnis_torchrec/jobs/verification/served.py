"""Models to measure: an artifact's forms, and the uncompressed tables that they are measured
against."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.quant.embedding_modules import quant_prep_customize_row_alignment
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.artifact import load
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.logical_tables import torchrec_config
from dnis_torchrec.serving.sequences import (
    ServedEmbeddingCollection,
    is_unpooled,
    table_of_single_ids,
)

UNCOMPRESSED_FORMS = ("uncompressed_fp32", "uncompressed_int8", "uncompressed_int4")
"""The uncompressed tables, as TorchRec serves them. Their values are drawn: neither size nor speed
depends on them."""
_QUANTIZED = {"uncompressed_int8": torch.qint8, "uncompressed_int4": torch.quint4x2}


def served_module(
    artifact: Path, form: str, collection: str, scheme: MixedDimensionScheme
) -> nn.Module:
    """A collection as it is served."""
    return (
        baseline(form, scheme)
        if form in UNCOMPRESSED_FORMS
        else load(artifact, form=form, collection=collection)
    )


class SummedBags(nn.Module):
    """What a served EmbeddingCollection looks up, summed over each bag: comparable with any pooled
    one."""

    def __init__(self, served: ServedEmbeddingCollection) -> None:
        super().__init__()
        self.served = served

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks ids up and sums them."""
        found = self.served(features)
        sums = {}
        for key, jagged in found.items():
            bags = torch.arange(jagged.lengths().numel()).repeat_interleave(jagged.lengths())
            zeros = torch.zeros(jagged.lengths().numel(), jagged.values().shape[1])
            sums[key] = zeros.index_add(0, bags, jagged.values())
        return KeyedTensor.from_tensor_list(list(sums), list(sums.values()))


def summed(module: nn.Module) -> nn.Module:
    """The module itself where it pools; else its bags' sums."""
    return SummedBags(module) if isinstance(module, ServedEmbeddingCollection) else module


def collections_of(scheme: MixedDimensionScheme) -> dict[str, MixedDimensionScheme]:
    """FQN -> the scheme of that collection's tables."""
    names = sorted({table.collection for table in scheme.tables.values()})
    return {
        name: MixedDimensionScheme(
            {t: table for t, table in scheme.tables.items() if table.collection == name}
        )
        for name in names
    }


def baseline(form: str, scheme: MixedDimensionScheme) -> nn.Module:
    """The uncompressed tables of a collection: fp32, or quantised by TorchRec, which wants D
    rounded up to 4."""
    if is_unpooled(scheme):
        tables = {
            name: baseline(form, table_of_single_ids(table))
            for name, table in scheme.tables.items()
        }
        return ServedEmbeddingCollection(scheme, tables)
    configs = [torchrec_config(table, table.embedding_dim) for table in scheme.tables.values()]
    is_weighted = next(iter(scheme.tables.values())).is_weighted
    if form == "uncompressed_fp32":
        return EmbeddingBagCollection(
            tables=configs, is_weighted=is_weighted, device=torch.device("cpu")
        )
    for config in configs:
        config.embedding_dim = -(-config.embedding_dim // 4) * 4
    dense = EmbeddingBagCollection(
        tables=configs, is_weighted=is_weighted, device=torch.device("cpu")
    )
    holder = nn.ModuleDict({"collection": dense})
    quant_prep_customize_row_alignment(holder, [EmbeddingBagCollection], 1)
    with warnings.catch_warnings():
        # which TorchRec itself is built on
        warnings.filterwarnings(
            "ignore", message="torch.ao.quantization is deprecated", category=DeprecationWarning
        )
        return quantize_embeddings(holder, dtype=_QUANTIZED[form], inplace=True)["collection"]
