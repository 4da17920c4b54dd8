"""Artifacts of models with unpooled tables: every form serves an EmbeddingCollection's interface."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.artifact import load
from dnis_torchrec.artifact.export import export
from dnis_torchrec.search.prune import uncompressed_scheme
from dnis_torchrec.serving import ServedEmbeddingCollection
from tests.sequence_models import interest, make_batch, rounded

LOSS = nn.BCEWithLogitsLoss()


@pytest.mark.parametrize("form", ["packed", "mixed_dimension", "csr_fp32", "dense_fp32"])
def test_an_artifact_serves_sequences_in_every_form(form: str, tmp_path: Path) -> None:
    model, batches = interest(), [make_batch(seed) for seed in range(12)]
    plain = copy.deepcopy(model)
    scheme = dnis.compress(copy.deepcopy(model), batches, loss=LOSS, compression=2.5).scheme
    path = export(plain, scheme, tmp_path / "artifact", forms=["packed"])
    served = load(path, form=form, collection="sequences")
    assert isinstance(served, ServedEmbeddingCollection)
    kjt, wanted = batches[0].sparse_features, rounded(plain, scheme).sequences(batches[0].sparse_features)
    for key, jagged in wanted.items():
        torch.testing.assert_close(served(kjt)[key].values(), jagged.values())
    assert served(kjt)["visits"].weights_or_none() is None
    served.pass_indices_(True)
    assert served(kjt)["visits"].weights().equal(kjt["visits"].values())


def test_a_form_of_earlier_versions_is_packed_in_its_bits(tmp_path: Path) -> None:
    model, kjt = interest(), make_batch(0).sparse_features
    path = export(model, uncompressed_scheme(model), tmp_path / "artifact")
    served, wanted = load(path, form="mixed_dimension_int8", collection="sequences")(kjt), model.sequences(kjt)
    for key, jagged in wanted.items():
        torch.testing.assert_close(served[key].values(), jagged.values(), atol=0.03, rtol=0)
        assert not torch.equal(served[key].values(), jagged.values())


def test_a_served_sequence_of_no_ids_and_of_unknown_ones(tmp_path: Path) -> None:
    model, batches = interest(), [make_batch(seed) for seed in range(12)]
    scheme = dnis.compress(copy.deepcopy(model), batches, loss=LOSS, compression=2.5).scheme
    path = export(model, scheme, tmp_path / "artifact")
    keys, lengths = ["history", "candidate", "visits"], torch.tensor([0, 2, 0, 0, 0, 0])
    features = KeyedJaggedTensor(keys=keys, values=torch.tensor([5, 99]), lengths=lengths)
    with pytest.raises(ValueError, match=r"table 'item'.*99"):
        load(path, collection="sequences")(features)
    found = load(path, collection="sequences", unknown_ids="zero")(features)
    assert found["visits"].values().shape == (0, 8)
    assert found["history"].values()[1].tolist() == [0.0] * 8
    assert found["history"].values()[0].abs().sum() > 0
    missing = KeyedJaggedTensor(keys=["history"], values=torch.tensor([5]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match="candidate"):
        load(path, collection="sequences")(missing)
