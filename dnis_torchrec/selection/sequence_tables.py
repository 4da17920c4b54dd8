"""Tables of an EmbeddingCollection as all that counts, blocks, allocates and writes tables knows
them."""

from __future__ import annotations

from dataclasses import fields

from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType


def as_bags(table: EmbeddingConfig) -> EmbeddingBagConfig:
    """The config of an unpooled table as that of a pooled one, whose pooling is NONE."""
    values = {
        field.name: getattr(table, field.name) for field in fields(EmbeddingConfig) if field.init
    }
    return EmbeddingBagConfig(**values, pooling=PoolingType.NONE)
