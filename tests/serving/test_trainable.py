"""Mixed-dimension tables equal the pruned ones and train; narrow tables; rows that the counts never saw."""

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.artifact.load import serve
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.prune import Size, prune
from dnis_torchrec.serving import MixedDimensionEmbeddingBagCollection, block_tables
from dnis_torchrec.serving.configs import embedding_configs
from tests.reference import Case, cases, keyed_jagged_tensor, lookups, pruned, routings, table_scheme

MAPPED = RowRouting.from_map(torch.tensor([2, 0, 1, 0, 2, 1, 1, 3, 0, 2]), 3)
SORTED = RowRouting(10, 3, boundaries=torch.tensor([0, 2, 6, 9]))


def one_table(routing: RowRouting = SORTED, **fields: object) -> tuple[MixedDimensionScheme, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    retained = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    weight = pruned(torch.randn(10, 5), routing, retained)
    return MixedDimensionScheme({"t": table_scheme("t", routing, retained, **fields)}), {"t": weight}


def trainable(
    routing: RowRouting = SORTED, **fields: object
) -> tuple[MixedDimensionEmbeddingBagCollection, dict[str, torch.Tensor]]:
    scheme, tables = one_table(routing, **fields)
    return MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False), tables


def expected_with_unknown(case: Case, num_unknown: int) -> dict[str, Tensor]:
    """What a batch with unknown ids gives where they count as zero: MEAN divides by the longer length."""
    expected = case.expected()
    readers = [(t, f) for t in case.scheme.tables.values() for f in t.feature_names]
    for name, (table, feature) in zip(expected, readers, strict=True):
        if table.pooling == "mean":
            lengths = torch.tensor([len(bag) for bag in case.bags[feature]]).unsqueeze(1)
            expected[name] = expected[name] * lengths / (lengths + num_unknown).clamp(min=1)
    return expected


@settings(max_examples=50, deadline=None)
@given(cases())
def test_equals_naive_oracle_and_stores_only_what_is_retained(case: Case) -> None:
    """By stock kernels, and where no gradient is wanted by the compiled pass, if there is a compiler."""
    module = MixedDimensionEmbeddingBagCollection.from_tables(case.scheme, case.tables, new_rows=False)
    expected = case.expected()
    trained = module(case.kjt())
    with torch.inference_mode():
        served = module(case.kjt())
    for out in (trained, served):
        assert out.keys() == list(expected)
        assert out.length_per_key() == [pooled.shape[1] for pooled in expected.values()]
        for name, pooled in out.to_dict().items():
            torch.testing.assert_close(pooled, expected[name], rtol=1e-6, atol=1e-6)
    assert sum(p.numel() for p in module.parameters()) == sum(t.block_area for t in case.scheme.tables.values())
    physical = [] if module.blocks is None else module.blocks.embedding_bag_configs()
    assert all(config.num_embeddings > 0 < config.embedding_dim for config in physical)


@pytest.mark.parametrize("compiled", [True, False])
def test_lookup_from_plain_tensors(compiled: bool) -> None:
    scheme, tables = one_table(MAPPED, feature_names=("f", "g"))
    with lookups(compiled):
        module = serve(scheme, tables, "packed")
    ids, offsets = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([0, 2, 3, 3, 6])
    with torch.inference_mode():
        pooled = module.lookup(ids, offsets)
    rows = [tables["t"][ids[first:last]].sum(0) for first, last in ((0, 2), (2, 3), (3, 3), (3, 6))]
    torch.testing.assert_close(pooled, torch.stack([torch.cat(rows[::2]), torch.cat(rows[1::2])]))
    with pytest.raises(ValueError, match="per_sample_weights: expected none"):
        module.lookup(ids, offsets, torch.ones(6))
    with pytest.raises(ValueError, match="offsets: expected 2 times the batch size and one more, got 6"):
        module.lookup(ids, torch.tensor([0, 2, 3, 3, 4, 6]))


@pytest.mark.parametrize("form", ["mixed_dimension", "packed"])
@pytest.mark.parametrize("compiled", [True, False])
def test_no_samples_give_an_output_of_none(form: str, compiled: bool) -> None:
    scheme, tables = one_table(MAPPED, feature_names=("f", "g"), pooling="mean")
    with lookups(compiled):
        module = serve(scheme, tables, form)
    none = torch.empty(0, dtype=torch.int64)
    with torch.inference_mode():
        pooled = module(KeyedJaggedTensor(keys=["f", "g"], values=none, lengths=none, stride=0))
        if form == "packed":
            assert module.lookup(none, torch.zeros(1, dtype=torch.int64)).shape == (0, 10)
    assert {name: value.shape for name, value in pooled.to_dict().items()} == {"f": (0, 5), "g": (0, 5)}


@pytest.mark.parametrize(("num_rows", "num_blocks", "dim"), [(900, 300, 5), (20, 3, 137)])
def test_more_blocks_than_are_counted_and_wide_rows(num_rows: int, num_blocks: int, dim: int) -> None:
    """Beyond 32 blocks the operator searches them; 300 do not fit into a byte. 137 is no multiple of its 16 columns."""
    generator = torch.Generator().manual_seed(0)
    routing = RowRouting.from_map(torch.randint(0, num_blocks + 1, (num_rows,), generator=generator), num_blocks)
    shares = torch.linspace(0.98, 0.02, num_blocks).unsqueeze(1)
    retained = torch.rand(num_blocks, dim, generator=generator) < shares
    weight = pruned(torch.randn(num_rows, dim, generator=generator), routing, retained)
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, retained)})
    schemes = (scheme, MixedDimensionScheme({"t@ebc": replace(scheme.tables["t"], name="t@ebc")}))  # the model's names
    module, _ = (MixedDimensionEmbeddingBagCollection.from_tables(s, {"t": weight}, new_rows=False) for s in schemes)
    bags = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(num_rows)]})
    with torch.inference_mode():
        assert module(bags).values().equal(weight)
    torch.testing.assert_close(module(bags).values(), weight)


def test_result_does_not_depend_on_threads_or_copies() -> None:
    module, _ = trainable(MAPPED)
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
    assert [config.embedding_dim for config in module.blocks.embedding_bag_configs()] == [8, 4]
    bags = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(10)]})
    torch.testing.assert_close(module(bags).values(), tables["t"])
    module(bags).values().sum().backward()
    for built in (module, fresh):
        assert not bool(built.blocks.embedding_bags["t/b0"].weight[:, 5:].any())
    assert not bool(module.blocks.embedding_bags["t/b0"].weight.grad[:, 5:].any())


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


def test_shows_logical_and_physical_configs() -> None:
    module, _ = trainable(pooling="mean", feature_names=("f", "g"))
    (logical,) = module.embedding_bag_configs()
    assert (logical.name, logical.num_embeddings, logical.embedding_dim) == ("t", 10, 5)
    assert (logical.feature_names, logical.pooling) == (["f", "g"], PoolingType.MEAN)
    physical = [(c.name, c.num_embeddings, c.embedding_dim) for c in module.blocks.embedding_bag_configs()]
    assert physical == [("t/b0", 2, 5), ("t/b1", 4, 2)]
    assert not module.is_weighted()
    assert trainable(is_weighted=True)[0].is_weighted()


def of_two_collections() -> MixedDimensionScheme:
    other = table_scheme("u", SORTED, torch.ones(3, 5, dtype=torch.bool), collection="other")
    return MixedDimensionScheme({**one_table()[0].tables, "u": other})


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: MixedDimensionEmbeddingBagCollection(of_two_collections()), ValueError, "the tables of one collection"),
    (lambda: MixedDimensionEmbeddingBagCollection(MixedDimensionScheme()), ValueError, "at least one table"),
    (lambda: MixedDimensionEmbeddingBagCollection.from_tables(one_table()[0], {}), ValueError, "table 't': expected a"),
    (lambda: trainable()[0].load_block("u", 0, torch.zeros(2, 5)), ValueError, "expected a known table"),
    (lambda: trainable()[0].load_block("t", 2, torch.zeros(3, 0)), ValueError, "table 't', block 2: expected a block"),
    (lambda: trainable()[0].load_block("t", 0, torch.zeros(2, 4)), ValueError, r"block 0: .* shape \(2, 5\)"),
    (lambda: trainable()[0].load_block("t", 0, torch.zeros(2, 5).double()), ValueError, "block 0: .*got torch.float64"),
    *(
        (lambda shapes=shapes: block_tables(one_table()[0].tables["t"], map(torch.zeros, shapes)), ValueError, "'t'")
        for shapes in ([(9, 5)], [(10, 4)], [(10, 5), (1, 5)])
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


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


def test_inner_keys_in_another_order() -> None:
    """A sharded collection groups its keys by sharding type."""
    module, tables = trainable()

    def reverse(blocks: nn.Module, inputs: object, pooled: KeyedTensor) -> KeyedTensor:
        by_key = dict(reversed(pooled.to_dict().items()))
        widths = [part.shape[1] for part in by_key.values()]
        return KeyedTensor(list(by_key), widths, torch.cat(list(by_key.values()), dim=1))

    module.blocks.register_forward_hook(reverse)
    torch.testing.assert_close(module(keyed_jagged_tensor({"f": [[(0, 1.0)]]})).values(), tables["t"][[0]])


def test_state_dict_round_trip() -> None:
    module, _ = trainable(MAPPED)
    other = MixedDimensionEmbeddingBagCollection(one_table(MAPPED)[0])
    other.load_state_dict(module.state_dict())
    kjt = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(10)]})
    assert other(kjt).values().equal(module(kjt).values())
    tables = ["blocks.embedding_bags.t/b0.weight", "blocks.embedding_bags.t/b1.weight"]
    assert sorted(module.state_dict()) == [*tables, "scheme_sha256"]


@settings(max_examples=15, deadline=None)
@given(cases(), st.booleans(), st.lists(st.sampled_from([-1, -(2**40), 12, 2**31, 2**40]), max_size=2))
def test_unknown_ids_give_zero_and_count(case: Case, compiled: bool, unknown: list[int]) -> None:
    options = {"unknown_ids": "zero", "new_rows": False}
    with lookups(compiled):
        module = MixedDimensionEmbeddingBagCollection.from_tables(case.scheme, case.tables, **options)
    bags = {f: [[*((i, 1.0) for i in unknown), *bag] for bag in of_feature] for f, of_feature in case.bags.items()}
    with torch.no_grad():
        pooled = module(Case(case.scheme, case.tables, bags, torch.int64).kjt()).to_dict()
    for name, expected in expected_with_unknown(case, len(unknown)).items():
        torch.testing.assert_close(pooled[name], expected, rtol=1e-5, atol=1e-5)


ROWS, SEEN = 40, 25
SHUFFLED = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
"""An order in which no block is dropped whole: the rows of such a one are in no block, as new ones are."""
TABLE = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"])


def bags_of(ids: list[int]) -> object:
    return keyed_jagged_tensor({"f": [[(row, 1.0)] for row in ids]})


def searched(order: torch.Tensor) -> tuple[MixedDimensionScheme, dict[str, torch.Tensor], list[int], list[int]]:
    """A pruned table, the rows that were counted, and those that were not."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[TABLE])})
    seen, new = order[:SEEN].tolist(), order[SEEN:].tolist()
    counts = count_frequencies([bags_of(seen[: SEEN // 2] + seen)], [TABLE])
    scheme = prune(
        model, blocks_from_counts(counts, [TABLE], num_blocks=4, least_rows=1), counts, size=Size(compression=2)
    )
    return scheme, {"t": model["ebc"].embedding_bags["t"].weight.detach()}, seen, new


@pytest.mark.parametrize("order", [torch.arange(ROWS), torch.arange(ROWS).flip(0), SHUFFLED])
def test_a_new_row_learns_and_no_other_does(order: torch.Tensor) -> None:
    scheme, tables, seen, new = searched(order)
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, dim_multiple=4)
    torch.testing.assert_close(module(bags_of(seen)).values(), tables["t"][seen])
    before = module(bags_of([*seen, *new])).values().detach()
    bound = ROWS**-0.5
    assert before[SEEN:].abs().max() <= bound
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        (module(bags_of([new[-1]])).values() - 1).square().sum().backward()
        optimizer.step()
    after = module(bags_of([*seen, *new])).values().detach()
    kept = int((after[-1] != 0).sum())
    assert kept > 0
    torch.testing.assert_close(after[-1].sum(), torch.tensor(float(kept)), atol=1e-3, rtol=0)
    assert torch.equal(after[:-1], before[:-1])


def test_without_a_place_they_are_zero_for_good() -> None:
    scheme, tables, _, new = searched(torch.arange(ROWS))
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    assert not module(bags_of(new)).values().any()
    assert sum(p.numel() for p in module.parameters()) == scheme.tables["t"].block_area


@given(cases())
def test_rows_of_a_block_are_what_they_were(case: Case) -> None:
    module = MixedDimensionEmbeddingBagCollection.from_tables(case.scheme, case.tables)
    for table in case.scheme.tables.values():
        blocks = table.routing.all_blocks()
        for feature in table.feature_names:
            case.bags[feature] = [
                [own for own in bag if blocks[own[0]] < table.routing.num_blocks] for bag in case.bags[feature]
            ]
    for name, pooled in case.expected().items():
        torch.testing.assert_close(module(case.kjt()).to_dict()[name], pooled, rtol=1e-6, atol=1e-6)


@given(routings(), st.data())
def test_they_go_to_the_last_block_that_retains_a_column(routing: RowRouting, data: st.DataObject) -> None:
    keeps = data.draw(st.lists(st.booleans(), min_size=routing.num_blocks, max_size=routing.num_blocks))
    retained = torch.tensor(keeps).unsqueeze(1).expand(-1, 3)
    wider = table_scheme("t", routing, retained).with_new_rows()
    last = max((s for s, keep in enumerate(keeps) if keep), default=routing.num_blocks)
    blocks = routing.all_blocks().tolist()
    expected = [block if block < len(keeps) and keeps[block] else last for block in blocks] if any(keeps) else blocks
    assert wider.routing.all_blocks().tolist() == expected
    assert wider.num_retained == wider.block_area


RETAINED = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]], dtype=torch.bool)
ROUTING = RowRouting(10, 3, boundaries=torch.tensor([0, 2, 5, 10]))


def scheme(**fields: object) -> MixedDimensionScheme:
    """Ten rows: 2 retain all columns, 3 retain columns 1 and 3, 5 retain column 3."""
    return MixedDimensionScheme({"t": table_scheme("t", ROUTING, RETAINED, **fields)})


def test_columns_are_those_that_most_rows_retain_and_the_size_is_the_schemes() -> None:
    (table,) = embedding_configs(scheme())
    assert (table.embedding_dim, table.columns, table.logical_dim) == (2, (1, 3), 4)  # 19 values / 10 rows, rounded up
    assert embedding_configs(scheme()).parameters == 20


def test_the_union_keeps_every_column_that_a_row_retains() -> None:
    (table,) = embedding_configs(scheme(), columns="union")
    assert table.columns == (0, 1, 2, 3)


def test_per_block_there_is_a_lossless_table_for_each_block() -> None:
    tables = embedding_configs(scheme(feature_names=("f", "g")), per="block")
    assert [(t.name, t.num_embeddings, t.columns) for t in tables] == [
        ("t/b0", 2, (0, 1, 2, 3)),
        ("t/b1", 3, (1, 3)),
        ("t/b2", 5, (3,)),
    ]
    assert tables.tables[0].feature_names == ("f/b0", "g/b0")
    assert tables.parameters == 19


def test_per_block_a_feature_of_two_tables_has_bags_for_each() -> None:
    """The tables route their rows differently, so that no bag is right for both."""
    other = RowRouting(10, 1, boundaries=torch.tensor([0, 10]))
    found = MixedDimensionScheme({**scheme().tables, "u": table_scheme("u", other, RETAINED[:1])})
    readers = {table.name: table.feature_names for table in embedding_configs(found, per="block")}
    assert readers == {"t/b0": ("f@t/b0",), "t/b1": ("f@t/b1",), "t/b2": ("f@t/b2",), "u/b0": ("f@u/b0",)}


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_per_block_tables_and_their_keys_are_those_that_are_served(case: Case) -> None:
    module = MixedDimensionEmbeddingBagCollection(case.scheme, device="meta")
    served = [] if module.blocks is None else module.blocks.embedding_bag_configs()
    found = embedding_configs(case.scheme, per="block").configs()
    assert {config.name: facts(config) for config in found} == {config.name: facts(config) for config in served}


def facts(config: EmbeddingBagConfig) -> tuple[object, ...]:
    return config.num_embeddings, config.embedding_dim, config.feature_names, config.pooling


def test_json_yaml_and_python_say_the_same() -> None:
    tables = embedding_configs(scheme(feature_names=("f", "g's"), pooling="mean"))
    fields = json.loads(tables.to_json())
    assert yaml.safe_load(tables.to_yaml()) == fields
    assert fields["format_version"] == 1
    (field,) = fields["tables"]
    assert (field["name"], field["columns"], field["feature_names"]) == ("t", [1, 3], ["f", "g's"])
    names: dict[str, object] = {}
    exec(compile(tables.to_python(), "tables.py", "exec"), names)
    (config,) = names["tables"]
    assert isinstance(config, EmbeddingBagConfig)
    assert (config.name, config.num_embeddings) == ("t", 10)
    assert (config.embedding_dim, config.feature_names, config.pooling) == (2, ["f", "g's"], PoolingType.MEAN)
    assert names["columns"] == {"t": [1, 3]}


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="per: expected one of"):
        embedding_configs(scheme(), per="table")
    with pytest.raises(ValueError, match="columns: expected one of"):
        embedding_configs(scheme(), columns="all")
    other = table_scheme("u", ROUTING, RETAINED, collection="other")
    with pytest.raises(ValueError, match=r"one collection, .* if t.collection == '"):
        embedding_configs(MixedDimensionScheme({**scheme().tables, "u": other}))
    sequences = replace(other, pooling="none")
    with pytest.raises(ValueError, match="table 'u': expected a table that is pooled"):
        embedding_configs(MixedDimensionScheme({"u": sequences}))
