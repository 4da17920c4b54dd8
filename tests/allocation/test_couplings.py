"""Couplings, by which rows are rounded with error feedback, against the oracle; and what they are worth."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.allocation.curvature import curvature
from tests.allocation.curvature_cases import COLLECTIONS, FEATURES, ROWS, Case, make_batches, make_blocks, make_model
from tests.reference import couplings_reference

BCE = nn.BCEWithLogitsLoss()
CASES = {
    "one id": Case(lengths=(1, 1, 1, 1)),
    "several ids": Case(),
    "mean": Case(pooling=PoolingType.MEAN),
    "rows of no block": Case(unassigned=3, pooling=PoolingType.MEAN),
    "two outputs": Case(num_outputs=2),
}


def expected(case: Case, batch: Batch, loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    net, blocks = make_model(case).eval(), make_blocks(case)
    pooled, parts = {}, []
    for collection, names in zip(net.collections, COLLECTIONS, strict=True):
        of_keys = {
            key: value.detach().requires_grad_() for key, value in collection(batch.sparse_features).to_dict().items()
        }
        parts += [value.double() for _, value in sorted(of_keys.items())]
        for name in names:
            pooled |= {(name, f): of_keys[f"{f}@{name}" if f == "both" else f] for f in FEATURES[name]}
    predictions = net.over(torch.cat(parts, dim=1))

    def second(n: int) -> Tensor:
        def of_sample(z: Tensor) -> Tensor:
            return loss(
                z.view(1, -1).squeeze(1) if case.num_outputs == 1 else z.view(1, -1), batch.labels[n : n + 1].double()
            )

        found = torch.autograd.functional.hessian(of_sample, predictions[n].detach())
        return found.view(case.num_outputs, case.num_outputs)

    return couplings_reference(
        predictions,
        pooled,
        {key: [bag.tolist() for bag in batch.sparse_features[key[1]].to_dense()] for key in pooled},
        {name: blocks.routings[name].all_blocks().tolist() for name in ROWS},
        second,
        num_blocks=case.num_blocks,
        is_mean=case.pooling == PoolingType.MEAN,
    )


@pytest.mark.parametrize("loss", [nn.MSELoss(), BCE])
@pytest.mark.parametrize("name", CASES)
def test_they_are_what_the_oracle_finds(name: str, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    case = CASES[name]
    batches = make_batches(case)
    found = curvature(make_model(case), batches, make_blocks(case), loss=loss)
    sums = [expected(case, batch, loss) for batch in batches]
    for table in ROWS:
        wanted = sum(of_batch[table] for of_batch in sums) / found.num_samples
        assert isinstance(wanted, Tensor)
        torch.testing.assert_close(found.couplings[table], wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_they_are_left_out_where_nobody_needs_them() -> None:
    case = CASES["several ids"]
    found = curvature(make_model(case), make_batches(case), make_blocks(case), loss=nn.MSELoss(), couplings=False)
    assert not found.couplings


class NextItem(nn.Module):
    """Two sequences on one table, multiplied by a matrix that no axes of the table are known for."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item", num_embeddings=300, embedding_dim=16, feature_names=["seen", "next"])
        self.items = EmbeddingCollection(tables=[table])
        self.mix = nn.Linear(16, 4, bias=False)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``(B,)``."""
        found = self.items(sparse_features)
        seen, following = (found[name].values().view(len(dense_features), -1, 16) for name in ("seen", "next"))
        return (self.mix(seen).sum(1) * self.mix(following).sum(1)).sum(1)


def sequences(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.cat([torch.full((256,), 3), torch.ones(256, dtype=torch.int64)])
    ids = (torch.rand(1024, generator=generator).square() * 300).long()
    features = KeyedJaggedTensor(keys=["seen", "next"], values=ids, lengths=lengths)
    return Batch(torch.zeros(256, 1), features, torch.zeros(256))


def test_a_table_of_no_known_axes_is_served_far_better() -> None:
    """Its 16 columns move predictions in four directions alone: errors across them cancel."""
    torch.manual_seed(1)
    model, batches = NextItem(), [sequences(seed) for seed in range(8)]
    nn.init.normal_(model.items.embeddings["item"].weight)
    with torch.no_grad():
        for batch in batches:
            batch.labels.copy_(model(batch.dense_features, batch.sparse_features))
    measured = measure_(copy.deepcopy(model), batches, loss=nn.MSELoss())
    found = measured.allocate(compression=16)
    without = dnis.allocate(
        measured.model,
        measured.blocks,
        measured.counts,
        dnis.curvature(measured.model, batches, measured.blocks, loss=nn.MSELoss(), couplings=False),
        compression=16,
    )
    nearest = measured.sample.predict(without.scheme).loss_increase
    assert measured.sample.predict(found.scheme).loss_increase < 0.5 * nearest
    own = [table.scheme.tables["item"] for table in (found, without)]
    assert torch.equal(own[0].codes.bits, own[1].codes.bits)
    compressed = copy.deepcopy(model)
    dnis.compress(compressed, batches, loss=nn.MSELoss(), compression=16)
    with torch.no_grad():
        errors = torch.cat([compressed(b.dense_features, b.sparse_features) - b.labels for b in batches])
    assert float(errors.square().mean()) < 0.6 * nearest
