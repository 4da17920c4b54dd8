"""A recipe of a data frame, for who has no model yet: one of TorchRec's own, on one table for each
column of ids."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.checks import check, check_known
from dnis_torchrec.data.frame_columns import Frame
from dnis_torchrec.data.frames import UNSEEN_ROW
from dnis_torchrec.data.recipe import DataSplits, Recipe, draws

EMBEDDING_DIM = 64
"""D of all tables, unless told otherwise."""
INIT_STD = 0.01
"""Standard deviation of the initial weights of tables."""
DENSE_LAYERS, OVER_LAYERS = [128], [128, 64]
"""Hidden sizes of the networks in front of dense features, and behind the tables."""


def recipe_from_frame(
    frame: Frame,
    *,
    model: str,
    label: Hashable,
    dense: Sequence[Hashable] = (),
    ids: Sequence[str] = (),
    bags: Sequence[str] = (),
    time: Hashable | None = None,
    embedding_dim: int | None = None,
    batch_size: int = 1024,
    seed: int = 0,
) -> Recipe:
    """Makes a recipe of a data frame, with one of TorchRec's models as it is.

    Every column of ids or bags has a table of its own, with SUM pooling; the row of ids that
    training never saw is zero. Learning rates and L2 are the defaults of `Recipe`: replace them by
    ``dataclasses.replace``. The loss is BCEWithLogitsLoss where all labels are 0 or 1, else
    MSELoss.

    Args:
        frame: see `DataSplits.from_frame`, as all columns.
        model: ``"dlrm"``, ``"dlrm_dcn"``, or ``"deepfm"``, torchrec's SimpleDeepFMNN without its
            last sigmoid.
        label: what is predicted.
        dense: numbers.
        ids: columns with one id a row.
        bags: columns with any number of ids a row.
        time: column to split by, or None to split at random.
        embedding_dim: D, 64 by default.
        batch_size: B.
        seed: of the split, the order of the batches and the initial weights.

    Returns:
        The recipe; its data are `FrameSplits`.

    Raises:
        ValueError: as `DataSplits.from_frame`; also for an unknown model, or an `embedding_dim`
            below 1.
        TypeError: as `DataSplits.from_frame`.
        FileNotFoundError: if there is no such file.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"user": list("abcd") * 10, "item": list("vwxyz") * 8, "liked": [0, 1] * 20})
        >>> recipe = recipe_from_frame(frame, model="dlrm", label="liked", ids=["user", "item"])
        >>> type(recipe.model).__name__, recipe.loss, recipe.data.encoder.num_embeddings
        ('DLRM', BCEWithLogitsLoss(), {'user': 5, 'item': 6})
    """
    check_known("model", model, MODELS)
    dim = EMBEDDING_DIM if embedding_dim is None else embedding_dim
    check(dim >= 1, "embedding_dim", "an integer >= 1", dim)
    data = DataSplits.from_frame(
        frame,
        label=label,
        dense=dense,
        ids=ids,
        bags=bags,
        time=time,
        batch_size=batch_size,
        seed=seed,
    )
    encoder = data.encoder
    draw = draws(
        lambda: MODELS[model](_tables(encoder.num_embeddings, dim), encoder.num_dense), seed
    )
    loss = nn.BCEWithLogitsLoss() if data.is_binary else nn.MSELoss()
    return Recipe(model=draw(0), redraw=draw, data=data, loss=loss)


def _tables(num_embeddings: Mapping[str, int], embedding_dim: int) -> EmbeddingBagCollection:
    """One table a feature; its name is no attribute that a module has, as ``"type"`` is."""
    tables = [
        EmbeddingBagConfig(
            name=f"{feature}_table",
            num_embeddings=rows,
            embedding_dim=embedding_dim,
            feature_names=[feature],
        )
        for feature, rows in num_embeddings.items()
    ]
    collection = EmbeddingBagCollection(tables=tables)
    with torch.no_grad():
        for bag in collection.embedding_bags.values():
            bag.weight.normal_(std=INIT_STD)[UNSEEN_ROW] = 0
    return collection


def _dlrm(tables: EmbeddingBagCollection, num_dense: int) -> nn.Module:
    layers = [*DENSE_LAYERS, _embedding_dim(tables)]
    return DLRM(tables, num_dense, layers, [*OVER_LAYERS, 1])


def _dlrm_dcn(tables: EmbeddingBagCollection, num_dense: int) -> nn.Module:
    layers = [*DENSE_LAYERS, _embedding_dim(tables)]
    return DLRM_DCN(
        tables, num_dense, layers, [*OVER_LAYERS, 1], dcn_num_layers=2, dcn_low_rank_dim=32
    )


def _deepfm(tables: EmbeddingBagCollection, num_dense: int) -> nn.Module:
    model = SimpleDeepFMNN(
        num_dense, tables, hidden_layer_size=DENSE_LAYERS[0], deep_fm_dimension=OVER_LAYERS[-1]
    )
    model.over_arch.model = model.over_arch.model[
        :1
    ]  # behind it comes a sigmoid, and losses here take logits
    return model


def _embedding_dim(tables: EmbeddingBagCollection) -> int:
    return int(tables.embedding_bag_configs()[0].embedding_dim)


MODELS: Mapping[str, Callable[[EmbeddingBagCollection, int], nn.Module]] = {
    "dlrm": _dlrm,
    "dlrm_dcn": _dlrm_dcn,
    "deepfm": _deepfm,
}
"""Name -> what builds a model of its tables and the number of dense features."""
