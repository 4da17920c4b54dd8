"""Packed tables serve what their codes stand for, on one rank or many; unknown ids; buffers that C++ holds."""

import copy
import ctypes
import io
import itertools
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
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

import dnis_torchrec as dnis
from dnis_torchrec.artifact.load import serve
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.codes import WIDTHS, ColumnCodes, pack_fields
from dnis_torchrec.blocks.routing import RowRouting, directory_bytes
from dnis_torchrec.ops.build import INSTRUCTION_SETS
from dnis_torchrec.ops.packed import load_operator, torch_packed_embedding_bag
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving import MeanForUnknownIds, PackedEmbeddingBagCollection, PackedSharder, PackedTable
from dnis_torchrec.serving import tables as unknown_ids
from dnis_torchrec.serving.packed import HeldBuffers
from tests import reference
from tests.models import interest, rounded
from tests.models import make_batch as make_sequence_batch
from tests.reference import pool

needs_compiler = pytest.mark.skipif(not load_operator(), reason="no C++ compiler")

NOTHING = torch.empty(0, dtype=torch.uint8)


@contextmanager
def torch_alone() -> Iterator[None]:
    """Has lookups run on torch's operators, as where nothing can be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.jit, "is_tracing", lambda: True)  # then all arguments come, as in a graph
        patch.setattr(torch.ops.dnis_torchrec.packed_embedding_bag, "default", torch_packed_embedding_bag)
        yield


def large(dim: int, *, is_weighted: bool = False, blocks: int = 9) -> tuple[PackedEmbeddingBagCollection, Tensor]:
    """One table of rows of every width in no order, and all of it dense."""
    routing = RowRouting.from_map(torch.randint(blocks + 1, (3_000,)), blocks)
    scheme = reference.table_scheme(
        "t", routing, torch.ones(blocks, dim).bool(), pooling="mean", is_weighted=is_weighted
    )
    scheme, stored, dense = reference.packed(scheme, Random(dim))
    return PackedEmbeddingBagCollection(MixedDimensionScheme({"t": scheme}), {"t": stored}), dense


@settings(max_examples=40, deadline=None)
@given(reference.cases(), st.integers(0, 2**31), st.booleans())
def test_pools_what_the_rows_stand_for(case: reference.Case, seed: int, compiled: bool) -> None:
    case, stored = reference.packed_case(case, seed)
    module = PackedEmbeddingBagCollection(case.scheme, stored)
    with nullcontext() if compiled else torch_alone():
        pooled = module(case.kjt()).to_dict()
    assert list(pooled) == list(case.expected())
    for name, expected in case.expected().items():
        torch.testing.assert_close(pooled[name], expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=40)
@given(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=40), st.integers(0, 2**31))
def test_rows_are_packed_as_by_hand(bits: list[int], seed: int) -> None:
    fields = reference.draw_fields(Random(seed), 3, bits)
    expected = [reference.packed_by_hand(of_row, bits) for of_row in fields]
    assert pack_fields(torch.tensor(fields), torch.tensor(bits)).tolist() == expected


@needs_compiler
@pytest.mark.parametrize("dim", [5, 24, 64])
def test_threads_give_the_same_bits(dim: int) -> None:
    torch.manual_seed(dim)
    module, _ = large(dim, is_weighted=True)
    lengths = torch.randint(0, 30, (800,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids, weights = torch.randint(3_000, (int(offsets[-1]),)), torch.randn(int(offsets[-1]))
    with torch_alone():
        expected = module.lookup(ids, offsets, weights)
    found = [module.lookup(ids, offsets, weights)]
    torch.set_num_threads(2)
    try:
        found.append(module.lookup(ids, offsets, weights))
    finally:
        torch.set_num_threads(1)
    assert all(pooled.equal(found[0]) for pooled in found)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    with ThreadPoolExecutor(2) as pool:
        at_once = [pool.submit(module.lookup, ids, offsets, weights) for _ in range(4)]
        assert all(one.result().equal(found[0]) for one in at_once)


@needs_compiler
def test_nothing_behind_the_last_row_is_read() -> None:
    """Rows end where memory does, as at the end of a mapped file: to read on would end the process."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0
    for dim, seed in itertools.product((1, 3, 16, 30, 64), range(4)):
        scheme = reference.table_scheme(
            "t", RowRouting(3, 1, boundaries=torch.tensor([0, 3])), torch.ones(1, dim).bool()
        )
        scheme, stored, dense = reference.packed(scheme, Random(seed))
        size = stored.rows.numel()
        rows = torch.frombuffer(pages, dtype=torch.uint8, count=mmap.PAGESIZE)[mmap.PAGESIZE - size :]
        rows.copy_(stored.rows)
        tables = {"t": replace(stored, rows=rows)}
        module = PackedEmbeddingBagCollection(MixedDimensionScheme({"t": scheme}), tables)
        for limit in INSTRUCTION_SETS:
            with reference.limited(limit):
                assert module.lookup(torch.arange(3), torch.arange(4)).equal(dense)


def one_table(**options: Any) -> tuple[PackedEmbeddingBagCollection, Tensor]:
    """Ten rows in three blocks, some in none."""
    torch.manual_seed(0)
    _, scheme = reference.two_tables()
    scheme_of_table, stored, dense = reference.packed(scheme.tables["movie/seen"], Random(1))
    scheme = MixedDimensionScheme({"movie/seen": scheme_of_table})
    return PackedEmbeddingBagCollection(scheme, {"movie/seen": stored}, **options), dense


def test_unknown_ids_are_named_or_contribute_zero() -> None:
    module, dense = one_table()
    with pytest.raises(ValueError, match=r"table 'movie/seen', feature 'movie': expected ids in 0\.\.9 .*got id 10"):
        module(reference.keyed_jagged_tensor({"movie": [[(3, 1.0)], [(10, 1.0)]]}))
    module, dense = one_table(unknown_ids="zero")
    pooled = module(reference.keyed_jagged_tensor({"movie": [[(3, 1.0), (-1, 1.0)], [(10, 1.0)]]})).values()
    assert pooled.equal(torch.stack([dense[3] / 2, torch.zeros(5)]))  # MEAN counts them
    with pytest.raises(ValueError, match="unknown_ids: expected one of"):
        one_table(unknown_ids="ignore")


def test_int32_ids_of_a_table_with_more_rows_than_they_tell_apart_are_refused() -> None:
    rows = 2**31 + 1
    scheme = reference.table_scheme(
        "t", RowRouting(rows, 1, boundaries=torch.tensor([0, rows])), torch.zeros(1, 3).bool()
    )
    stored = PackedTable.from_rows(scheme, NOTHING, torch.ones(1, 3), torch.zeros(1, 3))
    module = PackedEmbeddingBagCollection(MixedDimensionScheme({"t": scheme}), {"t": stored})
    assert module.lookup(torch.tensor([rows - 1]), torch.tensor([0, 1])).equal(torch.zeros(1, 3))
    with pytest.raises(TypeError, match="expected int64 ids, because a table has more than"):
        module.lookup(torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1]))


def test_bytes_are_those_of_the_form() -> None:
    routing = RowRouting.from_map(torch.arange(1_000) % 3, 3)
    bits = torch.tensor([[8, 4, 0, 32], [0, 0, 3, 3], [0, 0, 0, 0]], dtype=torch.uint8)
    scheme = replace(reference.table_scheme("t", routing, bits > 0), bits=bits)
    rows = torch.zeros(334 * 6 + 333 * 1, dtype=torch.uint8)
    stored = PackedTable.from_rows(scheme, rows, torch.ones(3, 4), torch.zeros(3, 4))
    expected = 334 * 6 + 333 * 1 + 4 * 4 + 3 * 4 + directory_bytes(routing, torch.tensor([True, True, False]))
    assert stored.num_bytes == expected
    module = PackedEmbeddingBagCollection(MixedDimensionScheme({"t": scheme}), {"t": stored})
    assert module.table_bytes() == expected
    tensors = {name for name in module.state_dict() if name.startswith("tables.")}
    assert tensors == {"tables.t/rows", "tables.t/directory"}


def test_a_copy_and_what_came_from_another_process_serve() -> None:
    module, dense = one_table()
    pickler = torch.multiprocessing.reducer.ForkingPickler
    for other in (copy.deepcopy(module), pickler.loads(bytes(pickler.dumps(module)))):
        assert other.lookup(torch.arange(10), torch.arange(11)).equal(dense)


def test_parts_that_do_not_fit() -> None:
    scheme, stored, _ = reference.packed(reference.two_tables()[1].tables["movie/seen"], Random(1))
    for field, message in (
        ({"rows": stored.rows[:-1]}, r"PackedTable.rows: expected \d+ of them"),
        ({"scales": -stored.scales}, "PackedTable.scales: expected finite ones above 0"),
        ({"scales": stored.scales * torch.inf}, "PackedTable.scales: expected finite ones above 0"),
        ({"shifts": stored.shifts[1:]}, r"PackedTable.shifts: expected \d+ of them"),
        ({"bits": stored.bits[1:]}, "expected bits and row counts of 3"),
        ({"bits": stored.bits * 0 + 9}, "PackedTable.bits: expected bits among"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(stored, **field)
    with pytest.raises(TypeError, match=r"PackedTable.shifts: expected torch.int16, got torch.int64"):
        replace(stored, shifts=stored.shifts.long())
    with pytest.raises(ValueError, match=r"PackedTable.rows: expected \d+ of them, got \(0,\)"):
        PackedTable.from_rows(replace(scheme, bits=None), NOTHING, torch.ones(3, 5), torch.zeros(3, 5))


def test_tables_that_do_not_fit_the_scheme() -> None:
    scheme, stored, _ = reference.packed(reference.two_tables()[1].tables["movie/seen"], Random(1))
    tables = MixedDimensionScheme({scheme.name: scheme})
    with pytest.raises(ValueError, match="movie/seen"):
        PackedEmbeddingBagCollection(tables, {})
    plain = MixedDimensionScheme({scheme.name: replace(scheme, bits=None)})
    with pytest.raises(ValueError, match="table 'movie/seen': expected the bits of the scheme"):
        PackedEmbeddingBagCollection(plain, {scheme.name: stored})
    other = RowRouting.from_map(torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 3]), 3)
    area = int((other.row_counts() * scheme.dims).sum())
    moved = MixedDimensionScheme({scheme.name: replace(scheme, routing=other, num_retained=area)})
    with pytest.raises(ValueError, match=r"table 'movie/seen': expected blocks of \[5, 3, 1\] rows"):
        PackedEmbeddingBagCollection(moved, {scheme.name: stored})
    wide = reference.table_scheme(scheme.name, scheme.routing, torch.ones(3, 6).bool())
    with pytest.raises(ValueError, match=r"expected rows, blocks and columns \(10, 3, 6\)"):
        PackedEmbeddingBagCollection(MixedDimensionScheme({scheme.name: wide}), {scheme.name: stored})


def mean_of_cold_rows(table: TableScheme, weight: Tensor) -> Tensor:
    """Naively, the mean of the rows of the last block that retains a column, ``(D,)``."""
    keeping = [block for block in range(table.routing.num_blocks) if bool(table.retained[block].any())]
    rows = [row for row, block in enumerate(table.routing.all_blocks().tolist()) if block in keeping[-1:]]
    mean = torch.zeros(table.embedding_dim, dtype=torch.float64)
    for row in rows:
        mean += weight[row].double() / len(rows)
    return mean.float()


def expected(case: reference.Case) -> dict[str, Tensor]:
    """Output key -> pooled ``(B, D)``: an id that is no row is that of the further row."""
    names = replace(case, bags={feature: [] for feature in case.bags}).expected()
    readers = [(table, feature) for table in case.scheme.tables.values() for feature in table.feature_names]
    found = {}
    for name, (table, feature) in zip(names, readers, strict=True):
        weight, last = case.tables[table.name], table.num_embeddings
        bags = [[(i if 0 <= i < last else last, weight) for i, weight in bag] for bag in case.bags[feature]]
        further = torch.cat([weight, mean_of_cold_rows(table, weight).unsqueeze(0)])
        found[name] = pool(further, bags, table.pooling, table.is_weighted)
    return found


@settings(max_examples=20, deadline=None)
@given(reference.cases(), st.sampled_from(["packed", "mixed_dimension"]), st.data())
def test_they_are_a_further_row(case: reference.Case, form: str, data: st.DataObject) -> None:
    given_to = case.tables
    if form == "packed":
        case, given_to = reference.coded_case(case, seed=0)
    unknown = st.lists(
        st.tuples(st.sampled_from([-1, -(2**40), 12, 2**31, 2**40]), st.floats(-2, 2, width=32)), max_size=2
    )
    bags = {f: [[*data.draw(unknown), *bag] for bag in of_feature] for f, of_feature in case.bags.items()}
    case = replace(case, bags=bags, id_dtype=torch.int64)
    served = MeanForUnknownIds(case.scheme, serve(case.scheme, given_to, form, unknown_ids="zero"))
    pooled, wanted = served(case.kjt()), expected(case)
    assert pooled.keys() == list(wanted)
    for name, values in wanted.items():
        torch.testing.assert_close(pooled[name], values, rtol=1e-5, atol=1e-5)


def test_means_of_many_rows_are_taken_bag_by_bag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown_ids, "ROWS_OF_A_BAG", 2)
    monkeypatch.setattr(unknown_ids, "BAGS_AT_A_TIME", 1)
    tables, scheme = reference.two_tables()
    served = MeanForUnknownIds(scheme, serve(scheme, tables, "packed", unknown_ids="zero"))
    pooled = served(reference.keyed_jagged_tensor({"user": [[(10, 1.0)]], "movie": [[(-1, 1.0)]]}))
    for name, table in scheme.tables.items():
        torch.testing.assert_close(pooled[name[:5]][0], mean_of_cold_rows(table, tables[name]))
    none = KeyedJaggedTensor(["user", "movie"], torch.zeros(0).long(), lengths=torch.zeros(0).int(), stride=0)
    assert served(none).values().shape == (0, 10)


def test_an_artifact_of_sequences_is_loaded_so(tmp_path: Path) -> None:
    model, batches = interest(), [make_sequence_batch(seed) for seed in range(12)]
    scheme = dnis.compress(copy.deepcopy(model), batches, loss=nn.BCEWithLogitsLoss(), compression=2.5).scheme
    path = dnis.export(model, scheme, tmp_path / "artifact")
    features = KeyedJaggedTensor(
        ["history", "candidate", "visits"], torch.tensor([5, 99]), lengths=torch.tensor([2, 0, 0])
    )
    found = dnis.load(path, collection="sequences", unknown_ids="mean")(features)["history"].values()
    weight = rounded(model, scheme).sequences.embeddings["item"].weight.detach()
    torch.testing.assert_close(found, torch.stack([weight[5], mean_of_cold_rows(scheme.tables["item"], weight)]))


def test_ways_that_there_are_not_are_refused(tmp_path: Path) -> None:
    tables, scheme = reference.two_tables()
    path = write_artifact(tables, scheme, tmp_path / "artifact")
    with pytest.raises(ValueError, match=r"^unknown_ids: expected one of \('error', 'zero', 'mean'\), got 'hash'$"):
        dnis.load(path, unknown_ids="hash")
    with pytest.raises(ValueError, match="collection: expected one in which unknown ids contribute zero, got an error"):
        MeanForUnknownIds(scheme, dnis.load(path))


def is_held(module: HeldBuffers) -> bool:
    """Whether C++ owns each buffer beside Python: one that Python alone owned would have a use count of 1."""
    return all(buffer._use_count() > 1 for buffer in module.buffers())


def make() -> HeldBuffers:
    return HeldBuffers({"a": torch.arange(3.0), "b": torch.zeros(2, dtype=torch.uint8), "none": torch.ones(0)})


def test_every_buffer_is_held() -> None:
    assert not torch.ones(1)._use_count() > 1
    assert is_held(make())
    with torch.no_grad():
        assert is_held(make())
    tensor = torch.ones(2)
    with torch.inference_mode():
        assert is_held(HeldBuffers({"a": tensor}))


def test_views_follow_buffers_that_are_replaced() -> None:
    module = make()
    module.double()
    assert is_held(module)
    module.load_state_dict({"a": torch.ones(3), "b": torch.ones(2).byte(), "none": torch.ones(0)}, assign=True)
    assert is_held(module)
    assert module.get_buffer("a").tolist() == [1.0] * 3


def test_copies_hold_their_own_and_nothing_is_stored_twice() -> None:
    module = make()
    other = copy.deepcopy(module)
    assert is_held(other)
    other.get_buffer("a").zero_()
    assert module.get_buffer("a").tolist() == [0.0, 1.0, 2.0]
    large, file = HeldBuffers({"a": torch.zeros(100_000)}), io.BytesIO()
    torch.save(large, file)
    assert file.tell() < 500_000
    assert list(large.state_dict()) == ["a"]


# Over ranks: the bits that one process gives; TorchRec's planner and modules take the sharder


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


def with_codes_of(case: reference.Case, tables: dict[str, Any]) -> MixedDimensionScheme:
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


@given(reference.cases(), st.integers(0, 2**16), st.integers(1, 3), st.sampled_from(["error", "zero"]), st.data())
def test_any_plan_gives_the_bits_of_one_process(
    case: reference.Case, seed: int, world_size: int, unknown_ids: str, data: st.DataObject
) -> None:
    case, tables = reference.packed_case(case, seed)
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
        tables, scheme = reference.coded_tables()
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
    expected = packed(reference.all_rows()).values()
    model = quantize_inference_model(model)
    quantize_inference_model(nn.ModuleList([copy.deepcopy(packed), copy.deepcopy(packed)]))
    of_calls = [record.getMessage() for record in caplog.records if record.name.startswith("dnis_torchrec")]
    assert of_calls == ["quantization leaves packed tables as they are, in their own bits"] * 2
    assert model.packed is packed
    assert isinstance(model.plain, QuantEmbeddingBagCollection)
    assert packed(reference.all_rows()).values().equal(expected)
    outputs = model(reference.all_rows())
    names = ("user", "movie/seen", "plain")
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name in names}
    options = {"world_size": 2, "compute_device": "cpu", "constraints": constraints}
    both, plan = shard_quant_model(copy.deepcopy(model), sharders=[PackedSharder(), *DEFAULT_SHARDERS], **options)
    assert set(plan.plan) == {"packed", "plain"}  # the plain one lies on the meta device until it gets weights
    assert both.packed(reference.all_rows()).values().equal(expected)
    sharded, _ = shard_quant_model(model, sharders=[PackedSharder()], **options)
    assert sharded.packed is not packed
    assert sharded(reference.all_rows()).equal(outputs)


def test_the_planner_reads_the_bytes_of_packed_tables() -> None:
    """Up to a row of float32."""
    tables, scheme = reference.coded_tables()
    module = serve(scheme, tables, "packed")
    topology = Topology(world_size=2, compute_device="cpu")
    options = EmbeddingEnumerator(topology, batch_size=1).enumerate(nn.ModuleDict({"m": module}), [PackedSharder()])
    assert {option.sharding_type for option in options} == {"table_wise", "row_wise", "column_wise"}
    for option in options:
        size, row = module.bytes_of_table(option.name), 4 * 5
        assert size <= option.tensor.numel() * option.tensor.element_size() < size + row


@pytest.mark.parametrize(("kind", "ranks"), [("grid_shard", [0]), ("row_wise", [1, 1]), ("column_wise", [0, 2])])
def test_other_plans_are_refused(kind: str, ranks: list[int]) -> None:
    tables, scheme = reference.coded_tables()
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
    scheme = MixedDimensionScheme(
        {"t": reference.table_scheme("t", routing, torch.ones(3, 48).bool()).with_codes(codes)}
    )
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
    tables, scheme = reference.coded_tables()
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
