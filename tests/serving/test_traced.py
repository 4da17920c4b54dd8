"""Models with serving modules go through torch.fx and TorchRec's quantisation, as with the plain collection."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.fx import symbolic_trace
from torchrec.inference.modules import quantize_embeddings

import dnis_torchrec as dnis
from dnis_torchrec.scheme import FORMS, MixedDimensionScheme
from tests.tiny import make_batch, make_recipe


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, MixedDimensionScheme]:
    """A model, and its tables in every form that holds them."""
    recipe, artifact = make_recipe(), tmp_path_factory.mktemp("traced") / "artifact"
    measured = dnis.measure_(recipe.model, recipe.data.train, loss=recipe.loss)
    scheme = measured.allocate(compression=3.5).scheme
    dnis.export(recipe.model, scheme, artifact)
    return recipe.model.eval(), artifact, scheme


def traced_like(model: nn.Module) -> None:
    graph = symbolic_trace(model)
    for seed, size in ((1, 5), (2, 9)):
        batch = make_batch(size, seed)
        inputs = {"dense_features": batch.dense_features, "sparse_features": batch.sparse_features}
        torch.testing.assert_close(graph(**inputs), model(**inputs), atol=0, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_traced_with_any_form(compressed: tuple[nn.Module, Path, MixedDimensionScheme], form: str) -> None:
    plain, artifact, _ = compressed
    traced_like(plain)
    served = copy.deepcopy(plain)
    served.sparse_arch.embedding_bag_collection = dnis.load(artifact, form=form)
    traced_like(served)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantisation_leaves_served_tables_alone(compressed: tuple[nn.Module, Path, MixedDimensionScheme]) -> None:
    plain, artifact, _ = compressed
    served = copy.deepcopy(plain)
    served.sparse_arch.embedding_bag_collection = dnis.load(artifact, form="packed")
    for model in (plain, served):
        traced_like(quantize_embeddings(copy.deepcopy(model), dtype=torch.qint8, inplace=True).eval())
