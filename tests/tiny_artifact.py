"""An artifact of a tiny model, pruned by hand: for tests of what comes after a search."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.codes import WIDTHS
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import collections
from dnis_torchrec.training.evaluate import evaluate
from examples.models import DeepFM
from tests import tiny
from tests.coded_tables import rounded, with_codes
from tests.serving_reference import pruned, table_scheme


def deepfm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe of tests/tiny.py with DeepFM, whose first-order weights read the KeyedJaggedTensor themselves."""
    recipe = tiny.demo(data, seed=seed, embedding_dim=embedding_dim)
    torch.manual_seed(seed)
    model = DeepFM(tiny.make_collection(embedding_dim or tiny.EMBEDDING_DIM), tower=(8,))
    nn.init.normal_(model.first_order.weights)
    return Recipe(model=model, data=recipe.data, loss=recipe.loss)


class DotProduct(nn.Module):
    """Nothing but tables: what two features pool to, multiplied and added up."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``(B,)``; dense features are not read."""
        pooled = self.tables(sparse_features)
        return (pooled["user"] * pooled["genre"]).sum(dim=1)


def tables_alone(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe of tests/tiny.py with a model that has no dense weights."""
    recipe = tiny.demo(data, seed=seed, embedding_dim=embedding_dim)
    torch.manual_seed(seed)
    model = DotProduct(tiny.make_collection(embedding_dim or tiny.EMBEDDING_DIM))
    return Recipe(model=model, data=recipe.data, loss=recipe.loss)


RECIPES = {
    "tests.tiny:demo": tiny.demo,
    "tests.tiny_artifact:deepfm": deepfm,
    "tests.tiny_artifact:tables_alone": tables_alone,
}


def write_tiny_artifact(
    path: Path, *, recipe: str = "tests.tiny:demo", forms: tuple[str, ...] = ("mixed_dimension",), codes: bool = False
) -> Path:
    """Prunes a recipe's model at random, or gives it codes at random, evaluates it, and exports it.

    Args:
        path: folder to make.
        recipe: one of `RECIPES`.
        forms: of the tables.
        codes: give every column bits, and export what the tables were before they were rounded.
    """
    built = RECIPES[recipe](None, seed=0)
    (fqn, collection), *_ = collections(built.model).items()
    schemes, tables = {}, {}
    for index, config in enumerate(collection.embedding_bag_configs()):
        rows = config.num_embeddings
        routing = RowRouting.from_map(torch.arange(rows) % 3, 3)
        if index == 0:
            routing = RowRouting(rows, 3, boundaries=torch.tensor([0, rows // 4, rows // 2, rows - 1]))
        retained = torch.rand(3, config.embedding_dim, generator=torch.Generator().manual_seed(index)) < 0.4
        parameter = collection.embedding_bags[config.name].weight
        weight = pruned(parameter.detach() * 5, routing, retained)
        scheme = table_scheme(
            config.name,
            routing,
            retained,
            feature_names=tuple(config.feature_names),
            pooling=config.pooling.value.lower(),
            collection=fqn,
        )
        if codes:
            scheme, weight = with_codes(scheme, seed=index, widths=WIDTHS), parameter.detach() * 5
        schemes[config.name], tables[config.name] = scheme, weight
        parameter.data.copy_(rounded(scheme, weight) if codes else weight)
    task = TrainTask(built.model, built.loss)
    metrics = evaluate(task, built.data.test, built.loss, torch.device("cpu"))
    dense = {key: value for key, value in built.model.state_dict().items() if ".embedding_bags." not in key}
    run = {"recipe": recipe, "seed": 0, "metrics": metrics}
    return write_artifact(tables, MixedDimensionScheme(schemes), path, forms=forms, dense_state=dense, run=run)
