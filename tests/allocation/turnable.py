"""TorchRec's models with bags of every kind, and batches for them: what tests of turning them share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import FrequencyCounts

DIM, NUM_DENSE, BATCH_SIZE = 8, 3, 12
FEATURES = {"user": ("user_id",), "movie": ("liked", "seen"), "genre": ("genre_id",)}
ROWS = {"user": 14, "movie": 13, "genre": 12}
"""More than D rows each that were seen: the axes are determined."""


def collection(*, is_weighted: bool = False) -> EmbeddingBagCollection:
    """Three tables, one read by two features; of unweighted bags one is pooled by MEAN."""
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=DIM,
            feature_names=list(FEATURES[name]),
            pooling=PoolingType.MEAN if name == "genre" and not is_weighted else PoolingType.SUM,
        )
        for name, rows in ROWS.items()
    ]
    tables = EmbeddingBagCollection(tables=configs, is_weighted=is_weighted)
    for bag in tables.embedding_bags.values():
        nn.init.normal_(bag.weight, std=0.5)
    return tables


BUILDERS: dict[str, Callable[[EmbeddingBagCollection], nn.Module]] = {
    "dlrm": lambda tables: DLRM(tables, NUM_DENSE, [4, DIM], [6, 1]),
    "projection": lambda tables: DLRM_Projection(tables, NUM_DENSE, [4, DIM], [6, 1], [9, 2 * DIM], [7, 3 * DIM]),
    "deepfm": lambda tables: SimpleDeepFMNN(NUM_DENSE, tables, hidden_layer_size=4, deep_fm_dimension=5),
}
"""Models that can be turned."""
GROUPS = {"dlrm": [tuple(ROWS)], "projection": [(name,) for name in ROWS], "deepfm": [(name,) for name in ROWS]}
"""Tables that turn by one matrix."""


def build(name: str, *, is_weighted: bool = False) -> nn.Module:
    """One of `BUILDERS`, the same weights every time."""
    torch.manual_seed(7)
    return BUILDERS[name](collection(is_weighted=is_weighted))


def dcn() -> nn.Module:
    """A model that cannot be turned."""
    return DLRM_DCN(collection(), NUM_DENSE, [4, DIM], [4, 1], dcn_num_layers=1, dcn_low_rank_dim=2)


def logits_of(model: nn.Module, *, is_weighted: bool = False) -> Tensor:
    """What a model makes of a batch with dense features and bags of up to three ids, some of them empty."""
    generator = torch.Generator().manual_seed(3)
    lengths, values = [], []
    for name, features in FEATURES.items():
        for _ in features:
            lengths.append(torch.randint(0, 4, (BATCH_SIZE,), generator=generator))
            values.append(torch.randint(0, ROWS[name], (int(lengths[-1].sum()),), generator=generator))
    ids = torch.cat(values)
    features = KeyedJaggedTensor(
        keys=[feature for own in FEATURES.values() for feature in own],
        values=ids,
        weights=torch.rand(len(ids), generator=generator) if is_weighted else None,
        lengths=torch.cat(lengths),
    )
    dense = torch.randn(BATCH_SIZE, NUM_DENSE, generator=generator)
    inner = model.model if isinstance(model, DLRMTrain) else model
    return inner(dense_features=dense, sparse_features=features)


def counts() -> FrequencyCounts:
    """Frequencies of all rows; some were never seen."""
    generator = torch.Generator().manual_seed(5)
    drawn = {name: torch.randint(0, 6, (rows,), generator=generator) for name, rows in ROWS.items()}
    return FrequencyCounts(drawn, {feature: 3 for own in FEATURES.values() for feature in own}, 50)
