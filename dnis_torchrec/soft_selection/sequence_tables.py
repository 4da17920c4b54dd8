"""Tables of an EmbeddingCollection as all that counts, blocks, allocates and writes tables knows them."""

from __future__ import annotations

from dataclasses import fields

from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType


def as_bags(table: EmbeddingConfig) -> EmbeddingBagConfig:
    """The config of an unpooled table as that of a pooled one, whose pooling is NONE.

    Args:
        table: of an EmbeddingCollection.

    Example:
        >>> table = EmbeddingConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"])
        >>> as_bags(table).pooling, as_bags(table).num_embeddings
        (<PoolingType.NONE: 'NONE'>, 4)
    """
    values = {field.name: getattr(table, field.name) for field in fields(EmbeddingConfig) if field.init}
    return EmbeddingBagConfig(**values, pooling=PoolingType.NONE)
