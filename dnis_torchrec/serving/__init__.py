"""Serving: modules that look mixed-dimension tables up in place of an EmbeddingBagCollection."""

from dnis_torchrec.serving.mixed_dimension import MixedDimensionEmbeddingBagCollection, block_tables

__all__ = ["MixedDimensionEmbeddingBagCollection", "block_tables"]
