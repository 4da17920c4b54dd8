"""examples/torcheasyrec.py: from a checkpoint of TorchEasyRec's kind to packed tables, with its INT8 beside them."""

import dataclasses
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import save
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from examples import torcheasyrec
from tests import clients
from tests.clients import BASE, DENSE
from tests.models import slice_of
from tests.test_models_page import make_batch

BAGS, SEQUENCES = "embedding_group.emb_impls.__BASE__.ebc", "embedding_group.seq_emb_impls.__BASE__.ec_dict.8"


@dataclass
class Batch(clients.GroupBatch):
    """A batch with all fields of theirs that the example reads."""

    sequence_dense_features: dict[str, JaggedTensor] = field(default_factory=dict)
    sample_weights: dict[str, Tensor] = field(default_factory=dict)
    sequence_mulval_lengths: dict[str, Tensor] = field(default_factory=dict)


class Din(clients.Towers):
    """DIN with a loss of its own, over weighted samples, as theirs; it reads how much each click cost, too."""

    def __init__(self) -> None:
        super().__init__(is_din=True)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        outputs = super().forward(batch)
        costs = batch.sequence_dense_features["costs"].to_padded_dense().sum((1, 2))
        return {name: value + 0.1 * costs if name == "logits" else value for name, value in outputs.items()}

    def loss(self, predictions: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        weights = batch.sample_weights["w"]
        labels = batch.labels["click"].float()
        loss = binary_cross_entropy_with_logits(predictions["logits"], labels, weights / weights.mean())
        return {"bce": loss}


def wrapped() -> nn.ModuleDict:
    """A model in what their training and their export put around it."""
    return nn.ModuleDict({"model": Din()})


def theirs(seed: int) -> Batch:
    batch = make_batch(seed)
    size = len(batch.labels)
    lengths = batch.sparse_features["history"].lengths()
    generator = torch.Generator().manual_seed(seed)
    costs = JaggedTensor(torch.rand(int(lengths.sum()), 2, generator=generator), lengths=lengths)
    return Batch(
        {BASE: KeyedTensor(list(DENSE), [1] * len(DENSE), batch.dense_features)},
        {BASE: batch.sparse_features},
        {"click": batch.labels.long()},
        {"costs": costs},
        {"w": torch.rand(size, generator=generator) + 0.5},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of theirs: ``model.ckpt-N/model``, of torch.distributed.checkpoint."""
    torch.manual_seed(0)
    wrapper = wrapped()
    optimizer = torch.optim.Adam(wrapper.parameters(), lr=0.05)
    for batch in map(theirs, range(8)):
        optimizer.zero_grad()
        wrapper["model"].loss(wrapper["model"](batch), batch)["bce"].backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("theirs") / "model.ckpt-8"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process saves
        save(wrapper.state_dict(), checkpoint_id=folder / "model")
    return folder


@torch.no_grad()
def test_a_checkpoint_becomes_packed_tables_beside_int8(trained: Path, tmp_path: Path) -> None:
    batches = [theirs(seed) for seed in range(4)]
    model = wrapped()
    torcheasyrec.fill_from_checkpoint_(model, trained)
    plain = model["model"].eval()(batches[3])["logits"]
    bytes_before = sum(value.nbytes for name, value in model.named_parameters() if "embedding_group" in name)
    with torch.enable_grad():
        result = torcheasyrec.pack_embeddings(model, batches[:3], compression=8, folder=tmp_path / "packed")
    kinds = [type(model["model"].get_submodule(fqn)).__name__ for fqn in (BAGS, SEQUENCES)]
    assert kinds == ["PackedEmbeddingBagCollection", "ServedEmbeddingCollection"]
    served = model["model"](batches[3])["logits"]
    assert result.compression >= 8
    names = {f"item_emb@{fqn.replace('.', '_')}" for fqn in (BAGS, SEQUENCES)}
    assert {name for name in result.scheme.tables if name.startswith("item_emb")} == names
    fresh = torcheasyrec.load_packed(wrapped(), tmp_path / "packed").eval()
    torch.testing.assert_close(fresh["model"](batches[3])["logits"], served, rtol=0, atol=1e-6)

    eight = wrapped()
    torcheasyrec.fill_from_checkpoint_(eight, trained)
    kinds = {EmbeddingCollection: QuantEmbeddingCollection}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is to go
        quantize_embeddings(eight, torch.qint8, True, additional_qconfig_spec_keys=[*kinds], additional_mapping=kinds)
    bytes_of_rows = sum(value.nbytes for name, value in eight.state_dict().items() if "embedding_group" in name)
    assert bytes_before / result.compression < bytes_of_rows < bytes_before
    assert 0 < float((served - plain).abs().max()) < 2


def test_batches_of_theirs_are_cut_and_come_back(trained: Path) -> None:
    model, batch = Din().eval(), theirs(5)
    whole, samples = model(batch)["logits"], torcheasyrec.to_samples(batch)
    parts = [torcheasyrec.of_theirs(slice_of(samples, first, first + 8)) for first in range(0, 32, 8)]
    torch.testing.assert_close(torch.cat([model(part)["logits"] for part in parts]), whole)
    assert torch.equal(torch.cat([part.labels["click"] for part in parts]), batch.labels["click"])
    assert torch.equal(torch.cat([part.sample_weights["w"] for part in parts]), batch.sample_weights["w"])
    assert parts[0].labels["click"].dtype == torch.int64


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, compression in {"": 0, "0": 0, "20": 20, "8.5": 8.5}.items():
        monkeypatch.setenv(torcheasyrec.SWITCH, text)
        assert torcheasyrec.compression_of_switch() == compression
    monkeypatch.setenv(torcheasyrec.SWITCH, "INT8")
    with pytest.raises(ValueError, match="INT8"):
        torcheasyrec.compression_of_switch()


def test_what_the_example_cannot_cut_is_refused() -> None:
    batch = theirs(0)
    negatives = {BASE: batch.sparse_features[BASE], "__NEG__": batch.sparse_features[BASE]}
    several = dataclasses.replace(batch, sequence_mulval_lengths={BASE: torch.ones(1)})
    for other in (dataclasses.replace(batch, sparse_features=negatives), several):
        with pytest.raises(NotImplementedError):
            torcheasyrec.to_samples(other)
