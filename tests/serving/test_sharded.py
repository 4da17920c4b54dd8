"""Packed tables over ranks give the bits that one process gives; TorchRec's planner and modules take the sharder."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.inference.modules import DEFAULT_SHARDERS, quantize_inference_model, shard_quant_model
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact.load import serve
from dnis_torchrec.blocks.codes import ColumnCodes
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving import PackedEmbeddingBagCollection, PackedSharder
from tests.reference import Case, all_rows, cases, coded_tables, packed_case, table_scheme


def sharding(sharding_type: str, ranks: list[int], sizes: list[int], other: int) -> ParameterSharding:
    """A plan by hand: ranks, their rows or columns, and how many of the other there are."""
    first, shards = 0, []
    for rank, size in zip(ranks, sizes, strict=True):
        offsets, lengths = [first, 0], [size, other]
        if sharding_type == "column_wise":
            offsets, lengths = offsets[::-1], lengths[::-1]
        shards.append(ShardMetadata(offsets, lengths, f"rank:{rank}/cpu"))
        first += size
    return ParameterSharding(sharding_type, "quant", ranks, EnumerableShardingSpec(shards))


def with_codes_of(case: Case, tables: dict[str, Any]) -> MixedDimensionScheme:
    """The scheme with the scales and shifts of drawn tables."""
    schemes = {}
    for name, table in case.scheme.tables.items():
        scale, shift = tables[name].scale_and_shift()
        schemes[name] = replace(table, scale=scale, shift=shift)
    return MixedDimensionScheme(schemes)


@st.composite
def plans(draw: st.DrawFn, scheme: MixedDimensionScheme, world_size: int) -> dict[str, ParameterSharding]:
    """Each table whole somewhere, or in any shares over some ranks in any order; a rank may have columns twice."""
    plan = {}
    for table in scheme.tables.values():
        kind = draw(st.sampled_from(["table_wise", "row_wise", "column_wise"]))
        most = {"table_wise": 1, "row_wise": world_size, "column_wise": 4}[kind]
        options = {"min_size": 1, "max_size": most, "unique": kind == "row_wise"}
        ranks = draw(st.lists(st.integers(0, world_size - 1), **options))
        plan[table.table_name] = sharding(kind, ranks, [draw(st.integers(1, 5)) for _ in ranks], 5)
    return plan


@given(cases(), st.integers(0, 2**16), st.integers(1, 3), st.sampled_from(["error", "zero"]), st.data())
def test_any_plan_gives_the_bits_of_one_process(
    case: Case, seed: int, world_size: int, unknown_ids: str, data: st.DataObject
) -> None:
    case, tables = packed_case(case, seed)
    scheme = with_codes_of(case, tables)
    whole = PackedEmbeddingBagCollection(scheme, tables, unknown_ids=unknown_ids)
    plan = data.draw(plans(scheme, world_size))
    sharded = PackedSharder().shard(whole, plan, ShardingEnv.from_local(world_size, 0))
    features = case.kjt()
    if unknown_ids == "zero" and data.draw(st.booleans()):
        features.values()[::3] = 1000
    output, expected = sharded(features), whole(features)
    assert output.keys() == expected.keys()
    assert list(output.length_per_key()) == list(expected.length_per_key())
    assert output.values().view(torch.int32).equal(expected.values().view(torch.int32))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables, scheme = coded_tables()
        self.packed = serve(scheme, tables, "packed")
        config = EmbeddingBagConfig(name="plain", num_embeddings=10, embedding_dim=8, feature_names=["user"])
        self.plain = EmbeddingBagCollection(tables=[config])

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([self.packed(features).values(), self.plain(features).values()], dim=1)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:_check_is_size will be removed:FutureWarning")
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_a_model_is_quantized_and_sharded_around_packed_tables(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """`quantize_inference_model` quantizes plain tables alone, and each call says so once; `shard_quant_model` spreads
    both."""
    model = Both()
    packed = model.packed
    expected = packed(all_rows()).values()
    model = quantize_inference_model(model)
    quantize_inference_model(nn.ModuleList([copy.deepcopy(packed), copy.deepcopy(packed)]))
    of_calls = [record.getMessage() for record in caplog.records if record.name.startswith("dnis_torchrec")]
    assert of_calls == ["quantization leaves packed tables as they are, in their own bits"] * 2
    assert model.packed is packed
    assert isinstance(model.plain, QuantEmbeddingBagCollection)
    assert packed(all_rows()).values().equal(expected)
    outputs = model(all_rows())
    names = ("user", "movie/seen", "plain")
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name in names}
    options = {"world_size": 2, "compute_device": "cpu", "constraints": constraints}
    both, plan = shard_quant_model(copy.deepcopy(model), sharders=[PackedSharder(), *DEFAULT_SHARDERS], **options)
    assert set(plan.plan) == {"packed", "plain"}  # the plain one lies on the meta device until it gets weights
    assert both.packed(all_rows()).values().equal(expected)
    sharded, _ = shard_quant_model(model, sharders=[PackedSharder()], **options)
    assert sharded.packed is not packed
    assert sharded(all_rows()).equal(outputs)


def test_the_planner_reads_the_bytes_of_packed_tables() -> None:
    """Up to a row of float32."""
    tables, scheme = coded_tables()
    module = serve(scheme, tables, "packed")
    topology = Topology(world_size=2, compute_device="cpu")
    options = EmbeddingEnumerator(topology, batch_size=1).enumerate(nn.ModuleDict({"m": module}), [PackedSharder()])
    assert {option.sharding_type for option in options} == {"table_wise", "row_wise", "column_wise"}
    for option in options:
        size, row = module.bytes_of_table(option.name), 4 * 5
        assert size <= option.tensor.numel() * option.tensor.element_size() < size + row


@pytest.mark.parametrize(("kind", "ranks"), [("grid_shard", [0]), ("row_wise", [1, 1]), ("column_wise", [0, 2])])
def test_other_plans_are_refused(kind: str, ranks: list[int]) -> None:
    tables, scheme = coded_tables()
    module = serve(scheme, tables, "packed")
    plan = {name: sharding(kind, ranks, [2] * len(ranks), 5) for name in scheme.tables}
    with pytest.raises(ValueError, match=r"^table .+: expected (one of|ranks of 2)"):
        PackedSharder().shard(module, plan, ShardingEnv.from_local(2, 0))


def test_equal_shards_of_columns_share_bytes() -> None:
    """The cut is where half of the bytes are; wide tables, and a block with no columns beyond it, stay right."""
    widths = [[16] * 8 + [8] * 8 + [4] * 16 + [2] * 16, [8] * 8 + [4] * 8 + [2] * 16 + [1] * 16, [8] * 8 + [0] * 40]
    bits = torch.tensor(widths, dtype=torch.uint8)
    torch.manual_seed(0)
    routing = RowRouting.from_map(torch.tensor([0, 1, 3, 1, 2] * 800)[torch.randperm(4000)], 3)
    codes = ColumnCodes(bits, torch.full(bits.shape, 2.0**-7), torch.zeros(bits.shape, dtype=torch.int16))
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, torch.ones(3, 48).bool()).with_codes(codes)})
    module = serve(scheme, {"t": torch.rand(4000, 48)}, "packed")
    plan = {"t": sharding("column_wise", [1, 0], [24, 24], 4000)}
    sharded = PackedSharder().shard(module, plan, ShardingEnv.from_local(2, 0))
    num_bytes = len(module.bit_fields()["t"])
    for of_rank in sharded.shards.values():
        assert len(of_rank.bags.bit_fields()["t"]) == pytest.approx(num_bytes / 2, rel=0.05)
    lengths = torch.full((400,), 10)
    features = KeyedJaggedTensor(["f"], torch.randperm(4000), lengths=lengths)
    assert sharded(features).values().equal(module(features).values())


def test_plans_of_torchrec_and_a_batch_size_for_each_feature() -> None:
    """Ranks that are local devices keep all shards, and count their bytes together."""
    tables, scheme = coded_tables()
    module, sharder = serve(scheme, tables, "packed"), PackedSharder()
    by_table = {"user": row_wise(), "movie/seen": table_wise(rank=1)}
    sizes = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    plan = construct_module_sharding_plan(module, by_table, sharder, **sizes)
    sharded = sharder.shard(module, plan, ShardingEnv.from_local(2, 0))
    inverse = (["user", "movie"], torch.tensor([[0, 0, 1], [0, 1, 2]]))
    strides, lengths = [[2], [3]], torch.tensor([3, 0, 1, 2, 1])
    features = KeyedJaggedTensor(
        ["user", "movie"], torch.arange(7), lengths=lengths, stride_per_key_per_rank=strides, inverse_indices=inverse
    )
    assert sharded(features).values().equal(module(features).values())
    assert sharded.bytes_of_table("movie/seen") == module.bytes_of_table("movie/seen")
    assert [len(rank.rows) for rank in sharded.shards.values()] == [1, 1]
    assert [rank.bags is not None for rank in sharded.shards.values()] == [False, True]
