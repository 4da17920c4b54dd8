"""Models with unpooled tables have the plain model's names, too: prepared, sharded and merged; checkpoints fit both."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.planner.types import ParameterConstraints

from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.wrapper import plain_state_dict, soft_selection_modules
from tests.sequence_models import NAMES, blocks_of, interest, make_batch

CPU = torch.device("cpu")
SHARDED_AS = (None, "table_wise", "column_wise", "data_parallel")
everywhere = pytest.mark.parametrize("kind", SHARDED_AS)
pytestmark = pytest.mark.usefixtures("gloo")


def model(kind: str | None, *, is_prepared: bool) -> nn.Module:
    """Prepared ones have weights of their own, and alpha below 1."""
    built = interest()
    if is_prepared:
        prepare_(built, blocks_of(built, [make_batch(0)]))
        alpha = soft_selection_modules(built)["sequences"].alpha
        for weight in [*built.parameters(), *map(alpha.of, alpha.dims)]:
            weight.detach().mul_(0.5)
    if kind is None:
        return built
    constraint = ParameterConstraints(sharding_types=[kind], min_partition=4)
    sharders = default_sharders({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})
    plan = make_sharding_plan(built, CPU, sharders, constraints=dict.fromkeys(NAMES, constraint))
    return shard_model(built, CPU, plan, sharders)


def predict(built: nn.Module) -> Tensor:
    batch = make_batch(1)
    return get_unwrapped_module(built)(batch.dense_features, batch.sparse_features).detach()


@everywhere
def test_names_are_the_plain_models(kind: str | None) -> None:
    prepared, plain = model(kind, is_prepared=True), model(kind, is_prepared=False)
    assert set(NAMES.values()) <= set(plain_state_dict(prepared))
    assert list(plain_state_dict(prepared)) == list(plain.state_dict())
    added = set(prepared.state_dict()) - set(plain.state_dict())
    assert {name.rpartition(".")[0] for name in added} == {"sequences.soft_selection", "users.soft_selection"}
    assert [name for name, _ in prepared.named_parameters()] == [name for name, _ in plain.named_parameters()]
    inner = prepared.module if isinstance(prepared, DistributedModelParallel) else prepared
    assert all(inner.get_parameter(name) is weight for name, weight in prepared.named_parameters())
    assert set(merge_(prepared).state_dict()) == set(interest().state_dict())


@everywhere
def test_a_plain_state_fits_strictly(kind: str | None) -> None:
    prepared, plain = model(kind, is_prepared=True), model(kind, is_prepared=False)
    assert not torch.allclose(predict(prepared), predict(plain), atol=1e-3)
    loaded = prepared.load_state_dict(plain.state_dict(), strict=True)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    torch.testing.assert_close(predict(prepared), predict(plain), atol=1e-6, rtol=0)


@everywhere
def test_a_merged_state_fits_the_plain_model(kind: str | None) -> None:
    prepared = model(kind, is_prepared=True)
    before, merged, plain = predict(prepared), merge_(prepared), interest()
    plain.load_state_dict(plain_state_dict(merged), strict=True)
    torch.testing.assert_close(predict(plain), before, atol=1e-6, rtol=0)
