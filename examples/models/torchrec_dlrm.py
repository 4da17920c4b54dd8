"""torchrec's own DLRM and DLRM_DCN, as they are, with a dense arch that ends with D, whatever D the tables have.

Shapes: D embedding_dim.
"""

from __future__ import annotations

from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_modules import EmbeddingBagCollection


def build_dlrm(
    tables: EmbeddingBagCollection, *, dense_in_features: int, dense_layers: list[int], over_layers: list[int]
) -> DLRM:
    """torchrec's DLRM whose dense arch ends with D, whatever D the tables have.

    Args:
        tables: the embedding tables, all of one D.
        dense_in_features: number of dense features.
        dense_layers: hidden sizes of the dense arch; D is appended.
        over_layers: hidden sizes of the over arch; 1 is appended.
    """
    return DLRM(
        embedding_bag_collection=tables,
        dense_in_features=dense_in_features,
        dense_arch_layer_sizes=[*dense_layers, _embedding_dim(tables)],
        over_arch_layer_sizes=[*over_layers, 1],
    )


def build_dlrm_dcn(
    tables: EmbeddingBagCollection,
    *,
    dense_in_features: int,
    dense_layers: list[int],
    over_layers: list[int],
    num_cross_layers: int = 2,
    cross_rank: int = 32,
) -> DLRM_DCN:
    """torchrec's DLRM_DCN whose dense arch ends with D, whatever D the tables have.

    Args:
        tables: the embedding tables, all of one D.
        dense_in_features: number of dense features.
        dense_layers: hidden sizes of the dense arch; D is appended.
        over_layers: hidden sizes of the over arch; 1 is appended.
        num_cross_layers: layers of the low-rank cross net.
        cross_rank: its rank.
    """
    return DLRM_DCN(
        embedding_bag_collection=tables,
        dense_in_features=dense_in_features,
        dense_arch_layer_sizes=[*dense_layers, _embedding_dim(tables)],
        over_arch_layer_sizes=[*over_layers, 1],
        dcn_num_layers=num_cross_layers,
        dcn_low_rank_dim=cross_rank,
    )


def _embedding_dim(tables: EmbeddingBagCollection) -> int:
    return tables.embedding_bag_configs()[0].embedding_dim
