"""MixedDimensionEmbeddingBagCollection against a naive oracle, and inside TorchRec's own models.

Random cases mix empty bags, batch 1, several features on a table, one feature on several tables, D that no kernel
likes, S = 1, blocks that retain nothing or have no rows, dropped rows, weights, SUM and MEAN, int32 and int64 ids,
shuffled and extra keys, routing by boundaries and by map.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.artifact.load import serve
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving import MixedDimensionEmbeddingBagCollection, block_tables
from tests.quantized_reference import expected_with_unknown, with_unknown_ids
from tests.serving_reference import Case, cases, keyed_jagged_tensor, lookups, pruned, table_scheme

MAPPED = RowRouting.from_map(torch.tensor([2, 0, 1, 0, 2, 1, 1, 3, 0, 2]), 3)
SORTED = RowRouting(10, 3, boundaries=torch.tensor([0, 2, 6, 9]))


def one_table(routing: RowRouting = SORTED, **fields: object) -> tuple[MixedDimensionScheme, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    retained = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    weight = pruned(torch.randn(10, 5), routing, retained)
    return MixedDimensionScheme({"t": table_scheme("t", routing, retained, **fields)}), {"t": weight}


@settings(max_examples=100, deadline=None)
@given(cases())
def test_equals_naive_oracle(case: Case) -> None:
    module = MixedDimensionEmbeddingBagCollection.from_tables(case.scheme, case.tables, new_rows=False)
    expected = case.expected()
    out = module(case.kjt())
    assert out.keys() == list(expected)
    assert out.length_per_key() == [pooled.shape[1] for pooled in expected.values()]
    for name, pooled in out.to_dict().items():
        torch.testing.assert_close(pooled, expected[name], rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_compiled_pass_equals_naive_oracle(case: Case) -> None:
    """Taken where no gradient is wanted; without a compiler, the same calls go through the stock kernels."""
    module = MixedDimensionEmbeddingBagCollection.from_tables(case.scheme, case.tables, new_rows=False)
    expected = case.expected()
    with torch.inference_mode():
        pooled = module(case.kjt())
    assert pooled.keys() == list(expected)
    for name, values in pooled.to_dict().items():
        torch.testing.assert_close(values, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compiled", [True, False])
def test_lookup_from_plain_tensors(compiled: bool) -> None:
    scheme, tables = one_table(MAPPED, feature_names=("f", "g"))
    with lookups(compiled):
        module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, dim_multiple=4, new_rows=False)
    ids, offsets = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([0, 2, 3, 3, 6])
    with torch.inference_mode():
        pooled = module.lookup(ids, offsets)
    rows = [tables["t"][ids[first:last]].sum(0) for first, last in ((0, 2), (2, 3), (3, 3), (3, 6))]
    torch.testing.assert_close(pooled, torch.stack([torch.cat(rows[::2]), torch.cat(rows[1::2])]))
    with pytest.raises(ValueError, match="per_sample_weights: expected none"):
        module.lookup(ids, offsets, torch.ones(6))
    with pytest.raises(ValueError, match="offsets: expected 2 times the batch size and one more, got 6"):
        module.lookup(ids, torch.tensor([0, 2, 3, 3, 4, 6]))


@pytest.mark.parametrize("form", ["mixed_dimension", "csr_int8"])
@pytest.mark.parametrize("compiled", [True, False])
def test_no_samples_give_an_output_of_none(form: str, compiled: bool) -> None:
    scheme, tables = one_table(MAPPED, feature_names=("f", "g"), pooling="mean")
    with lookups(compiled):
        module = serve(scheme, tables, form)
    none = torch.empty(0, dtype=torch.int64)
    with torch.inference_mode():
        pooled = module(KeyedJaggedTensor(keys=["f", "g"], values=none, lengths=none, stride=0))
        assert module.lookup(none, torch.zeros(1, dtype=torch.int64)).shape == (0, 10)
    assert {name: value.shape for name, value in pooled.to_dict().items()} == {"f": (0, 5), "g": (0, 5)}


def test_more_blocks_than_are_counted() -> None:
    """Beyond 32 blocks the operator searches them; 300 do not fit into a byte."""
    generator = torch.Generator().manual_seed(0)
    routing = RowRouting.from_map(torch.randint(0, 301, (900,), generator=generator), 300)
    retained = torch.rand(300, 5, generator=generator) < 0.5
    weight = pruned(torch.randn(900, 5, generator=generator), routing, retained)
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, retained)})
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, {"t": weight}, new_rows=False)
    bags = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(900)]})
    with torch.inference_mode():
        assert module(bags).values().equal(weight)
    torch.testing.assert_close(module(bags).values(), weight)


def test_result_does_not_depend_on_threads_or_copies() -> None:
    scheme, tables = one_table(MAPPED)
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    bags = keyed_jagged_tensor({"f": [[(row, 1.0), (9 - row, 0.5)] for row in range(10)]})

    def served(_: int) -> torch.Tensor:
        with torch.inference_mode():
            return module(bags).values()

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(served, range(40))
    assert all(other.equal(first) for other in others)
    with torch.inference_mode():
        assert copy.deepcopy(module)(bags).values().equal(first)


def test_padded_columns_stay_zero_and_unread() -> None:
    scheme, tables = one_table(MAPPED)
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, dim_multiple=4, new_rows=False)
    fresh = MixedDimensionEmbeddingBagCollection(scheme, dim_multiple=4)
    assert [config.embedding_dim for config in module.physical_embedding_bag_configs()] == [8, 4]
    bags = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(10)]})
    torch.testing.assert_close(module(bags).values(), tables["t"])
    module(bags).values().sum().backward()
    for built in (module, fresh):
        assert not bool(built.blocks.embedding_bags["t/b0"].weight[:, 5:].any())
    assert not bool(module.blocks.embedding_bags["t/b0"].weight.grad[:, 5:].any())


@settings(max_examples=40, deadline=None)
@given(cases())
def test_stores_only_what_is_retained(case: Case) -> None:
    module = MixedDimensionEmbeddingBagCollection.from_tables(case.scheme, case.tables, new_rows=False)
    assert sum(p.numel() for p in module.parameters()) == sum(t.block_area for t in case.scheme.tables.values())
    for config in module.physical_embedding_bag_configs():
        assert config.num_embeddings > 0
        assert config.embedding_dim > 0


@pytest.mark.parametrize("dim_multiple", [1, 4])
def test_tables_count_on_every_device(dim_multiple: int) -> None:
    scheme, tables = one_table(MAPPED)
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, dim_multiple=dim_multiple, new_rows=False)
    width, narrow = (5, 2) if dim_multiple == 1 else (8, 4)
    columns, boundaries, row_map = 2 * (5 + 2), 8 * 4, 4 * 11
    assert module.table_bytes() == 4 * 3 * (width + narrow) + columns + boundaries + row_map
    empty = MixedDimensionEmbeddingBagCollection(scheme, device="meta", dim_multiple=dim_multiple)
    assert empty.table_bytes() == module.table_bytes()


def test_tables_count_where_they_are_sharded(gloo: dist.ProcessGroup) -> None:
    """A rank counts its own shards: all of them where it is the only one."""
    scheme, tables = one_table(MAPPED)
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, dim_multiple=4, new_rows=False)
    expected = module.table_bytes()
    DistributedModelParallel(holder := nn.ModuleDict({"tables": module}), device=torch.device("cpu"))
    assert type(holder["tables"].blocks) is not EmbeddingBagCollection
    assert holder["tables"].table_bytes() == expected


@pytest.mark.parametrize("routing", [SORTED, MAPPED], ids=["boundaries", "map"])
def test_block_tables_hold_rows_in_order(routing: RowRouting) -> None:
    scheme, tables = one_table(routing)
    blocks = block_tables(scheme.tables["t"], tables["t"].split(3))
    assert sorted(blocks) == [0, 1]
    for block, stored in blocks.items():
        rows = (routing.all_blocks() == block).nonzero().squeeze(1)
        assert stored.equal(tables["t"][rows][:, scheme.tables["t"].columns(block)])


@pytest.mark.parametrize("chunks", [[(9, 5)], [(10, 4)], [(10, 5), (1, 5)]])
def test_block_tables_refuse_other_shapes(chunks: list[tuple[int, int]]) -> None:
    scheme, _ = one_table()
    with pytest.raises(ValueError, match="table 't': expected"):
        block_tables(scheme.tables["t"], [torch.zeros(shape) for shape in chunks])


def test_shows_logical_and_physical_configs() -> None:
    scheme, tables = one_table(pooling="mean", feature_names=("f", "g"))
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    (logical,) = module.embedding_bag_configs()
    assert (logical.name, logical.num_embeddings, logical.embedding_dim) == ("t", 10, 5)
    assert (logical.feature_names, logical.pooling) == (["f", "g"], PoolingType.MEAN)
    physical = [(c.name, c.num_embeddings, c.embedding_dim) for c in module.physical_embedding_bag_configs()]
    assert physical == [("t/b0", 2, 5), ("t/b1", 4, 2)]
    assert not module.is_weighted()


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_nothing_retained_gives_zeros(pooling: str) -> None:
    nothing = torch.zeros(3, 5, dtype=torch.bool)
    scheme = MixedDimensionScheme({"t": table_scheme("t", SORTED, nothing, pooling=pooling)})
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, {"t": torch.zeros(10, 5)}, new_rows=False)
    assert module.physical_embedding_bag_configs() == []
    out = module(keyed_jagged_tensor({"f": [[(1, 1.0)], [], [(9, 1.0), (0, 1.0)]]}))
    assert out.values().equal(torch.zeros(3, 5))


@pytest.mark.parametrize("routing", [SORTED, MAPPED], ids=["boundaries", "map"])
@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_id_out_of_range_is_named(routing: RowRouting, bad: int, dtype: torch.dtype) -> None:
    scheme, tables = one_table(routing)
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    kjt = keyed_jagged_tensor({"f": [[(3, 1.0)], [(bad, 1.0)]]}, id_dtype=dtype)
    with pytest.raises(ValueError, match=rf"table 't', feature 'f'.*num_embeddings=10.*id {bad}"):
        module(kjt)


def test_ids_of_unread_keys_are_not_checked() -> None:
    scheme, tables = one_table()
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    out = module(keyed_jagged_tensor({"other": [[(999, 1.0)]], "f": [[(3, 1.0)]]}))
    torch.testing.assert_close(out.values(), tables["t"][[3]])


def test_missing_feature_is_named() -> None:
    scheme, tables = one_table(feature_names=("movie",))
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    with pytest.raises(ValueError, match=r"feature 'movie'.*did you mean 'moive'"):
        module(keyed_jagged_tensor({"moive": [[(3, 1.0)]]}))


def test_missing_weights_are_named() -> None:
    scheme, tables = one_table(is_weighted=True)
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    assert module.is_weighted()
    with pytest.raises(ValueError, match="expected per-sample weights"):
        module(keyed_jagged_tensor({"f": [[(3, 1.0)]]}))


def test_weights_are_ignored_where_unweighted() -> None:
    scheme, tables = one_table(MAPPED)
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    out = module(keyed_jagged_tensor({"f": [[(3, 7.0)]]}, weighted=True))
    torch.testing.assert_close(out.values(), tables["t"][[3]])


def test_variable_batch_size_is_refused() -> None:
    scheme, tables = one_table()
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    kjt = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(NotImplementedError, match="one batch size for all features"):
        module(kjt)


def test_scheme_of_several_collections_is_refused() -> None:
    first, _ = one_table()
    second = table_scheme("u", SORTED, torch.ones(3, 5, dtype=torch.bool), collection="other")
    with pytest.raises(ValueError, match="expected the tables of one collection"):
        MixedDimensionEmbeddingBagCollection(MixedDimensionScheme({**first.tables, "u": second}))
    with pytest.raises(ValueError, match="at least one table"):
        MixedDimensionEmbeddingBagCollection(MixedDimensionScheme())


def test_from_tables_needs_every_table() -> None:
    scheme, _ = one_table()
    with pytest.raises(ValueError, match="table 't': expected a known table"):
        MixedDimensionEmbeddingBagCollection.from_tables(scheme, {}, new_rows=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_block(device: str) -> None:
    scheme, tables = one_table()
    module = MixedDimensionEmbeddingBagCollection(scheme, device=device)
    blocks = block_tables(scheme.tables["t"], [tables["t"]])
    for block, weight in blocks.items():
        module.load_block("t", block, weight)
    kjt = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(10)]})
    torch.testing.assert_close(module(kjt).values(), tables["t"])
    shares = module.blocks.embedding_bags["t/b0"].weight.data_ptr() == blocks[0].data_ptr()
    assert shares == (device == "meta")


def test_load_block_checks() -> None:
    scheme, _ = one_table()
    module = MixedDimensionEmbeddingBagCollection(scheme)
    with pytest.raises(ValueError, match="expected a known table"):
        module.load_block("u", 0, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="table 't', block 2: expected a block with rows"):
        module.load_block("t", 2, torch.zeros(3, 0))
    with pytest.raises(ValueError, match=r"table 't', block 0: expected float32 of shape \(2, 5\)"):
        module.load_block("t", 0, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"block 0: expected float32.*got torch.float64"):
        module.load_block("t", 0, torch.zeros(2, 5, dtype=torch.float64))


def test_gradients_reach_the_block_tables() -> None:
    scheme, tables = one_table(MAPPED, pooling="mean")
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    module(keyed_jagged_tensor({"f": [[(1, 1.0), (2, 1.0)]]})).values().sum().backward()
    assert module.blocks.embedding_bags["t/b0"].weight.grad[0].tolist() == [0.5] * 5
    assert module.blocks.embedding_bags["t/b1"].weight.grad[0].tolist() == [0.5] * 2


def test_inner_keys_in_another_order() -> None:
    """A sharded collection groups its keys by sharding type."""
    scheme, tables = one_table()
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    inner = module.blocks

    class Regrouped(nn.Module):
        def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
            by_key = inner(features).to_dict()
            keys = list(by_key)[::-1]
            values = torch.cat([by_key[key] for key in keys], dim=1)
            return KeyedTensor(keys=keys, length_per_key=[by_key[key].shape[1] for key in keys], values=values)

    module.blocks = Regrouped()
    torch.testing.assert_close(module(keyed_jagged_tensor({"f": [[(0, 1.0)]]})).values(), tables["t"][[0]])


def test_state_dict_round_trip() -> None:
    scheme, tables = one_table(MAPPED)
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    other = MixedDimensionEmbeddingBagCollection(scheme)
    other.load_state_dict(module.state_dict())
    kjt = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(10)]})
    assert other(kjt).values().equal(module(kjt).values())
    assert sorted(module.state_dict()) == ["blocks.embedding_bags.t/b0.weight", "blocks.embedding_bags.t/b1.weight"]


def pruned_collection() -> tuple[EmbeddingBagCollection, MixedDimensionScheme]:
    """Three tables of D = 8, the first with two features, pruned in place."""
    torch.manual_seed(1)
    configs = [
        EmbeddingBagConfig(name="user", num_embeddings=10, embedding_dim=8, feature_names=["user", "friend"]),
        EmbeddingBagConfig(
            name="movie", num_embeddings=10, embedding_dim=8, feature_names=["movie"], pooling=PoolingType.MEAN
        ),
        EmbeddingBagConfig(name="zip", num_embeddings=10, embedding_dim=8, feature_names=["zip"]),
    ]
    collection = EmbeddingBagCollection(tables=configs)
    schemes: dict[str, TableScheme] = {}
    for config, routing in zip(configs, (SORTED, MAPPED, SORTED), strict=True):
        retained = torch.rand(3, 8) < 0.5
        weight = collection.embedding_bags[config.name].weight
        with torch.no_grad():
            weight.copy_(pruned(weight, routing, retained))
        schemes[config.name] = table_scheme(
            config.name,
            routing,
            retained,
            feature_names=tuple(config.feature_names),
            pooling="mean" if config.pooling == PoolingType.MEAN else "sum",
        )
    return collection, MixedDimensionScheme(schemes)


def dlrm(collection: EmbeddingBagCollection) -> nn.Module:
    return DLRM(collection, dense_in_features=4, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1])


def dlrm_dcn(collection: EmbeddingBagCollection) -> nn.Module:
    return DLRM_DCN(
        collection,
        dense_in_features=4,
        dense_arch_layer_sizes=[16, 8],
        over_arch_layer_sizes=[16, 1],
        dcn_num_layers=2,
        dcn_low_rank_dim=4,
    )


def dlrm_projection(collection: EmbeddingBagCollection) -> nn.Module:
    return DLRM_Projection(
        collection,
        dense_in_features=4,
        dense_arch_layer_sizes=[16, 8],
        over_arch_layer_sizes=[16, 1],
        interaction_branch1_layer_sizes=[16, 16],
        interaction_branch2_layer_sizes=[16, 16],
    )


def deepfm(collection: EmbeddingBagCollection) -> nn.Module:
    return SimpleDeepFMNN(
        num_dense_features=4, embedding_bag_collection=collection, hidden_layer_size=16, deep_fm_dimension=5
    )


@pytest.mark.parametrize("build", [dlrm, dlrm_dcn, dlrm_projection, deepfm])
@pytest.mark.parametrize("batch_size", [1, 6])
def test_drops_into_torchrec_models(build: object, batch_size: int) -> None:
    collection, scheme = pruned_collection()
    model = build(collection).eval()
    served = copy.deepcopy(model)
    tables = {name: bag.weight for name, bag in collection.embedding_bags.items()}
    served.sparse_arch.embedding_bag_collection = MixedDimensionEmbeddingBagCollection.from_tables(
        scheme, tables, new_rows=False
    )
    lengths = torch.randint(0, 4, (4 * batch_size,))
    kjt = KeyedJaggedTensor(
        keys=["zip", "movie", "user", "friend"], values=torch.randint(0, 10, (int(lengths.sum()),)), lengths=lengths
    )
    dense = torch.rand(batch_size, 4)
    torch.testing.assert_close(served(dense, kjt), model(dense, kjt), rtol=1e-6, atol=1e-6)
    # and a model built around the module from the start reads the same logical tables
    rebuilt = build(served.sparse_arch.embedding_bag_collection).eval()
    rebuilt.load_state_dict(served.state_dict())
    torch.testing.assert_close(rebuilt(dense, kjt), model(dense, kjt), rtol=1e-6, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(cases(), st.booleans(), st.lists(st.sampled_from([-1, -(2**40), 12, 2**31, 2**40]), max_size=2))
def test_unknown_ids_give_zero_and_count(case: Case, compiled: bool, unknown: list[int]) -> None:
    options = {"unknown_ids": "zero", "new_rows": False}
    with lookups(compiled):
        module = MixedDimensionEmbeddingBagCollection.from_tables(case.scheme, case.tables, **options)
    with torch.no_grad():
        pooled = module(with_unknown_ids(case, unknown)).to_dict()
    for name, expected in expected_with_unknown(case, len(unknown)).items():
        torch.testing.assert_close(pooled[name], expected, rtol=1e-5, atol=1e-5)


def test_masks_of_wide_rows() -> None:
    """D beyond 64, and not a multiple of the operator's 16 columns."""
    torch.manual_seed(0)
    routing = RowRouting(20, 3, boundaries=torch.tensor([0, 4, 10, 20]))
    retained = torch.rand(3, 137) < torch.tensor([0.9, 0.3, 0.02]).unsqueeze(1)
    weight = pruned(torch.randn(20, 137), routing, retained)
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, retained)})
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, {"t": weight}, new_rows=False)
    bags = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(20)]})
    with torch.no_grad():
        assert module(bags).values().equal(weight)
