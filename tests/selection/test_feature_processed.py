"""Feature processors: soft selection of what they weigh, and their weights learn as in TorchRec's own module."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.data.task import pooled_outputs
from dnis_torchrec.selection.shards import collections
from dnis_torchrec.selection.wrapper import plain_state_dict, soft_selection_modules
from tests.position_weighted import (
    BATCHES,
    CPU,
    DIM,
    FEATURES,
    ROWS,
    SIZE,
    TABLES,
    Net,
    Trained,
    blocks,
    prepared,
    weights_of,
)
from tests.small_models import alpha_of, operators

SHARDED_AS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def by_hand(net: Net, of: KeyedJaggedTensor, alpha: Tensor, own: RowBlocks) -> Tensor:
    """Every id's row, times the weight of its place, times its block's alpha, one after the other."""
    pooled = []
    places = {name.split(".")[-2]: weight for name, weight in weights_of(net).items()}
    for feature, table in FEATURES.items():
        weight, jagged = net.e._embedding_bag_collection.embedding_bags[table].weight, of[feature]
        rows_of_alpha = own.routings[table].block_of(torch.arange(ROWS)) + own.first_alpha_row(table)
        for bag in jagged.to_dense():
            rows = [places[feature][at] * weight[row] * alpha[rows_of_alpha[row]] for at, row in enumerate(bag)]
            pooled.append(torch.stack([torch.zeros(DIM), *rows]).sum(0))
    per_sample = torch.stack(pooled).view(len(FEATURES), SIZE, DIM).transpose(0, 1).flatten(1)
    return net.over(per_sample).squeeze(1)


@pytest.mark.parametrize("compiled", [True, False])
def test_unsharded_forward_and_gradients_are_those_by_hand(compiled: bool) -> None:
    plain, own = Net(), BATCHES[0]
    with operators(compiled=compiled):
        net = prepared(copy.deepcopy(plain), alpha_from=0.1)
        found = net(own.dense_features, own.sparse_features)
        (found * torch.arange(SIZE)).sum().backward()
    expected = by_hand(plain, own.sparse_features, alpha_of(net).of(DIM), blocks())
    (expected * torch.arange(SIZE)).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for (name, weight), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("sharding_type", SHARDED_AS)
def test_places_learn_as_in_torchrecs_own_module(gloo: dist.ProcessGroup, sharding_type: str) -> None:
    own = Trained(Net(), sharding_type, by_torchrec=True)
    expected = own.by_itself()
    ours = Trained(prepared(Net()), sharding_type)
    assert ours.searched(with_upper_steps=False) == pytest.approx(expected, abs=1e-5)
    found, wanted, start = weights_of(ours.model), weights_of(own.model), weights_of(Net())
    assert list(found) == list(wanted)
    for name, weight in found.items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-5, rtol=0)
        assert not torch.allclose(weight, start[name.removeprefix("model.")], atol=1e-3)
    plain = Trained(Net(), sharding_type)  # ours without a search
    assert plain.by_itself() == pytest.approx(expected, abs=1e-5)
    assert list(plain.model.state_dict()) == list(plain_state_dict(ours.model)) == list(own.model.state_dict())


@pytest.mark.parametrize("sharding_type", SHARDED_AS)
@pytest.mark.parametrize("as_collection", [False, True])
def test_what_was_searched_survives_merging(gloo: dist.ProcessGroup, sharding_type: str, as_collection: bool) -> None:
    trained = Trained(prepared(Net(as_collection=as_collection)), sharding_type)
    trained.searched(with_upper_steps=True)
    alpha, own = alpha_of(trained.model), BATCHES[1]
    assert float(alpha.of(DIM).min()) < 1
    before = trained.model.module.model(own.dense_features, copy.deepcopy(own.sparse_features)).detach()
    names, places = list(plain_state_dict(trained.model)), copy.deepcopy(weights_of(trained.model))
    merged = dnis.merge_(trained.model)
    assert type(merged.model.e) is FeatureProcessedEmbeddingBagCollection
    assert type(merged.model.e._embedding_bag_collection) is EmbeddingBagCollection
    assert sorted(merged.state_dict()) == sorted(names)
    assert all(torch.equal(weight, places[name]) for name, weight in weights_of(merged).items())
    torch.testing.assert_close(merged.model(own.dense_features, own.sparse_features), before, atol=1e-5, rtol=0)


def test_pooled_outputs_are_those_of_the_whole_module(gloo: dist.ProcessGroup) -> None:
    for net in (Net(), prepared(Net())):
        trained = Trained(net, "table_wise")
        if soft_selection_modules(trained.model):
            dnis.BilevelTrainPipeline(trained.model, trained.optimizer, CPU)
        with pooled_outputs(trained.model) as outputs:
            trained.model(copy.deepcopy(BATCHES[0]))
        assert [sorted(output.keys()) for output in outputs] == [sorted(FEATURES)]


@pytest.mark.parametrize("sharding_type", [None, "table_wise", "row_wise"])
def test_curvature_of_a_prepared_model_is_the_plain_models(gloo: dist.ProcessGroup, sharding_type: str | None) -> None:
    plain, net = Net(), prepared(Net())
    worth = dnis.curvature(plain, BATCHES, blocks(), loss=nn.BCEWithLogitsLoss())
    if sharding_type is not None:
        trained = Trained(net, sharding_type)
        dnis.BilevelTrainPipeline(trained.model, trained.optimizer, CPU)
        net = trained.model.module.model
    again = dnis.curvature(net, [copy.deepcopy(own) for own in BATCHES], blocks(), loss=nn.BCEWithLogitsLoss())
    for name in TABLES:
        torch.testing.assert_close(again.gradient[name], worth.gradient[name], atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(again.curvature[name], worth.curvature[name], atol=1e-6, rtol=1e-4)


def test_curvature_is_the_loss_by_alpha() -> None:
    net, own = prepared(Net()), BATCHES[0]
    alpha = alpha_of(net).of(DIM).requires_grad_()
    loss = binary_cross_entropy_with_logits(by_hand(Net(), own.sparse_features, alpha, blocks()), own.labels)
    (expected,) = torch.autograd.grad(loss, [alpha])
    worth = dnis.curvature(Net(), [own], blocks(), loss=nn.BCEWithLogitsLoss())
    found = torch.cat([*worth.gradient.values()])
    torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-4)


def test_served_bags_are_weighted(tmp_path: Path) -> None:
    net, own = Net(), BATCHES[2]
    measured = dnis.measure_(net, BATCHES, loss=nn.BCEWithLogitsLoss())
    found = measured.allocate(compression=4)
    dnis.export(net, found.scheme, tmp_path / "artifact")
    turned = copy.deepcopy(net)
    shift = dnis.compress(net, BATCHES, loss=nn.BCEWithLogitsLoss(), compression=4).output_shift
    assert measured.sample.bias is not None
    measured.sample.bias.shift_(turned, shift)
    served = net(own.dense_features, own.sparse_features).detach()
    assert list(collections(turned)) == ["e._embedding_bag_collection"]
    fresh = Net()
    fresh.load_state_dict(turned.state_dict())
    fresh = fresh.requires_grad_(False)
    fresh.e._embedding_bag_collection = dnis.load(tmp_path / "artifact", form="packed")
    torch.testing.assert_close(fresh(own.dense_features, own.sparse_features), served, atol=1e-4, rtol=0)
    single = {"values": torch.arange(ROWS).repeat(len(FEATURES)), "lengths": torch.ones(len(FEATURES) * ROWS).long()}
    bags = KeyedJaggedTensor(keys=list(FEATURES), weights=torch.ones(len(FEATURES) * ROWS), **single)
    rows = fresh.e._embedding_bag_collection(bags).to_dict()
    with torch.no_grad():
        for feature, table in FEATURES.items():
            turned.e._embedding_bag_collection.embedding_bags[table].weight.copy_(rows[feature])
        expected = by_hand(turned, own.sparse_features, torch.ones(blocks().alpha_shapes[DIM]), blocks())
    torch.testing.assert_close(served, expected, atol=1e-4, rtol=0)
    for weight in weights_of(fresh).values():
        weight.data.copy_(weight.data.flip(0))
    assert not torch.allclose(fresh(own.dense_features, own.sparse_features), served, atol=1e-2)
