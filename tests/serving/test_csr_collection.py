"""CsrEmbeddingBagCollection against a naive oracle, inside TorchRec's own models, exported, and read from an artifact.

Random cases as in test_mixed_dimension.py; what the operator itself has to get right, ops/test_csr_operator.py tries.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact import load, write_artifact
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops.compact_pointers import compact_bytes
from dnis_torchrec.ops.interleaved_rows import interleaved
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving import CsrEmbeddingBagCollection, CsrTable, MixedDimensionEmbeddingBagCollection
from tests.serving_reference import Case, all_rows, cases, keyed_jagged_tensor, table_scheme, two_tables

UNPRUNED = RowRouting(10, 1, boundaries=torch.tensor([0, 10]))


def one_table(embedding_dim: int = 5, **fields: Any) -> tuple[MixedDimensionScheme, dict[str, Tensor]]:
    """Ten rows whose values were pruned one by one."""
    torch.manual_seed(0)
    weight = torch.randn(10, embedding_dim) * (torch.rand(10, embedding_dim) < 0.4)
    retained = torch.ones(1, embedding_dim, dtype=torch.bool)
    return MixedDimensionScheme({"t": table_scheme("t", UNPRUNED, retained, **fields)}), {"t": weight}


def one_module(*, unknown_ids: str = "error", **fields: Any) -> tuple[CsrEmbeddingBagCollection, Tensor]:
    scheme, tables = one_table(**fields)
    return CsrEmbeddingBagCollection.from_tables(scheme, tables, unknown_ids=unknown_ids), tables["t"]


@settings(max_examples=100)
@given(cases())
def test_equals_naive_oracle(case: Case) -> None:
    module = CsrEmbeddingBagCollection.from_tables(case.scheme, case.tables)
    expected = case.expected()
    out = module(case.kjt())
    assert out.keys() == list(expected)
    assert out.length_per_key() == [pooled.shape[1] for pooled in expected.values()]
    for name, pooled in out.to_dict().items():
        torch.testing.assert_close(pooled, expected[name], rtol=1e-6, atol=1e-6)


@settings(max_examples=40)
@given(cases(), st.sampled_from([torch.float16, torch.int8]))
def test_smaller_values_stay_within_their_error(case: Case, dtype: torch.dtype) -> None:
    """The error of a bag is at most that of its rows, each at most 0.004 times the row's largest magnitude."""
    exact = CsrEmbeddingBagCollection.from_tables(case.scheme, case.tables)
    module = CsrEmbeddingBagCollection.from_tables(case.scheme, case.tables, value_dtype=dtype)
    largest = {name: table.abs().amax(dim=1, keepdim=True).expand_as(table) for name, table in case.tables.items()}
    magnitudes = {f: [[(i, abs(w)) for i, w in bag] for bag in bags] for f, bags in case.bags.items()}
    bound = Case(case.scheme, largest, magnitudes, case.id_dtype).expected()
    expected = exact(case.kjt()).to_dict()
    for name, pooled in module(case.kjt()).to_dict().items():
        assert ((pooled - expected[name]).abs() <= 0.004 * bound[name] + 1e-6).all()


def test_a_single_id_gives_the_bits_of_the_pruned_row() -> None:
    module, weight = one_module(embedding_dim=300)
    assert module(keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(10)]})).values().equal(weight)


def test_agrees_with_the_mixed_dimension_form() -> None:
    tables, scheme = two_tables()
    served = CsrEmbeddingBagCollection.from_tables(scheme, tables)(all_rows())
    mixed = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)(all_rows())
    assert served.keys() == mixed.keys()
    torch.testing.assert_close(served.values(), mixed.values())


def test_lookup_takes_plain_tensors() -> None:
    module, weight = one_module(is_weighted=True, pooling="mean", feature_names=("f", "g"))
    ids, weights = torch.tensor([3, 4, 5, 6, 9]), torch.tensor([1.0, 3.0, 1.0, 2.0, -1.0])
    out = module.lookup(ids, torch.tensor([0, 2, 2, 4, 5]), weights)
    expected = torch.stack(
        [(weight[3] + 3 * weight[4]) / 2, torch.zeros(5), (weight[5] + 2 * weight[6]) / 2, -weight[9]]
    )
    torch.testing.assert_close(out, torch.cat([expected[:2], expected[2:]], dim=1))


def test_plain_tensors_that_do_not_fit_are_refused() -> None:
    module, _ = one_module(is_weighted=True, feature_names=("f", "g"))
    ids, weights = torch.tensor([3, 4]), torch.ones(2)
    with pytest.raises(ValueError, match="offsets: expected 2 times the batch size and one more, got 4"):
        module.lookup(ids, torch.tensor([0, 1, 2, 2]), weights)
    with pytest.raises(ValueError, match="per_sample_weights: expected some, got none"):
        module.lookup(ids, torch.tensor([0, 1, 2]))
    module, _ = one_module(feature_names=("f", "g"))
    with pytest.raises(ValueError, match="per_sample_weights: expected none: the collection is not weighted, got some"):
        module.lookup(ids, torch.tensor([0, 1, 2]), weights)


def test_shows_logical_configs() -> None:
    module, _ = one_module(pooling="mean", feature_names=("f", "g"))
    (logical,) = module.embedding_bag_configs()
    assert (logical.name, logical.num_embeddings, logical.embedding_dim) == ("t", 10, 5)
    assert (logical.feature_names, logical.pooling) == (["f", "g"], PoolingType.MEAN)
    assert not module.is_weighted()
    assert list(module.parameters()) == []


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unknown_id_is_named(bad: int, dtype: torch.dtype) -> None:
    module, _ = one_module()
    kjt = keyed_jagged_tensor({"other": [[], []], "f": [[(3, 1.0)], [(bad, 1.0)]]}, id_dtype=dtype)
    with pytest.raises(ValueError, match=rf"table 't', feature 'f'.*num_embeddings=10.*id {bad}; .*unknown_ids='zero'"):
        module(kjt)


@pytest.mark.parametrize(("pooling", "share"), [("sum", 1.0), ("mean", 0.5)])
def test_unknown_ids_contribute_zero_where_wanted(pooling: str, share: float) -> None:
    module, weight = one_module(unknown_ids="zero", pooling=pooling)
    out = module(keyed_jagged_tensor({"f": [[(3, 1.0), (10, 1.0)], [(-1, 1.0)], []]}))
    torch.testing.assert_close(out.values(), torch.stack([share * weight[3], torch.zeros(5), torch.zeros(5)]))


def test_other_policies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown_ids: expected one of \('error', 'zero'\), got 'ignore'"):
        one_module(unknown_ids="ignore")


def test_buffers_that_a_row_points_out_of_are_named() -> None:
    scheme, tables = one_table()
    table = CsrTable.from_dense(tables["t"])
    table.columns.fill_(5)
    module = CsrEmbeddingBagCollection(scheme, {"t": table})
    with pytest.raises(ValueError, match="feature 0: expected columns below embedding_dim, got "):
        module(keyed_jagged_tensor({"f": [[(row, 1.0) for row in range(10)]]}))


def test_ids_of_unread_keys_are_not_checked() -> None:
    module, weight = one_module()
    out = module(keyed_jagged_tensor({"other": [[(999, 1.0)]], "f": [[(3, 1.0)]]}))
    assert out.values().equal(weight[[3]])


def test_what_is_missing_is_named() -> None:
    module, _ = one_module(feature_names=("movie",), is_weighted=True)
    with pytest.raises(ValueError, match=r"feature 'movie'.*did you mean 'moive'"):
        module(keyed_jagged_tensor({"moive": [[(3, 1.0)]]}, weighted=True))
    with pytest.raises(ValueError, match="expected per-sample weights"):
        module(keyed_jagged_tensor({"movie": [[(3, 1.0)]]}))


def test_weights_are_ignored_where_unweighted() -> None:
    module, weight = one_module()
    assert module(keyed_jagged_tensor({"f": [[(3, 7.0)]]}, weighted=True)).values().equal(weight[[3]])


def test_variable_batch_size_is_refused() -> None:
    module, _ = one_module()
    kjt = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(NotImplementedError, match="one batch size for all features"):
        module(kjt)


def test_tables_and_scheme_have_to_fit() -> None:
    scheme, tables = one_table()
    with pytest.raises(ValueError, match="scheme: expected at least one table"):
        CsrEmbeddingBagCollection(MixedDimensionScheme({}), {})
    with pytest.raises(ValueError, match="table 't': expected a known table"):
        CsrEmbeddingBagCollection.from_tables(scheme, {"u": tables["t"]})
    with pytest.raises(ValueError, match=r"table 't': expected rows of shape \(10, 5\), got \(9, 5\)"):
        CsrEmbeddingBagCollection.from_tables(scheme, {"t": tables["t"][:9]})
    other = table_scheme("u", UNPRUNED, torch.ones(1, 5, dtype=torch.bool), collection="other")
    with pytest.raises(ValueError, match="expected the tables of one collection"):
        CsrEmbeddingBagCollection.from_tables(
            MixedDimensionScheme({**scheme.tables, "u": other}), tables | {"u": tables["t"]}
        )


def test_copies_serve_the_same() -> None:
    tables, scheme = two_tables()
    module = CsrEmbeddingBagCollection.from_tables(scheme, tables, value_dtype=torch.int8)
    expected = module(all_rows()).values()
    other = CsrEmbeddingBagCollection.from_tables(scheme, {n: (t != 0).float() for n, t in tables.items()}).eval()
    assert not other(all_rows()).values().equal(expected)
    other = CsrEmbeddingBagCollection.from_tables(scheme, tables, value_dtype=torch.int8)
    other.tables.get_buffer("user/interleaved_rows").zero_()
    other.load_state_dict(module.state_dict())
    for copied in (other, copy.deepcopy(module)):
        assert copied(all_rows()).values().equal(expected)
    fields = ("interleaved_rows", "compact_row_pointers")
    assert list(module.state_dict()) == [f"tables.{table}/{field}" for table in tables for field in fields]


def test_counts_its_bytes() -> None:
    scheme, tables = one_table()
    module = CsrEmbeddingBagCollection.from_tables(scheme, tables)
    assert module.table_bytes() == 5 * int(tables["t"].count_nonzero()) + 8 + 10
    wide, tables = one_table(embedding_dim=256)
    module = CsrEmbeddingBagCollection.from_tables(wide, tables)
    assert module.table_bytes() == 5 * int(tables["t"].count_nonzero()) + 4 * 11


class Exported(nn.Module):
    """As a packaged model calls it: values and lengths in, pooled embeddings out."""

    def __init__(self, collection: CsrEmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        features = KeyedJaggedTensor(keys=["user", "movie"], values=values, lengths=lengths)
        return self.collection(features).values() * dense


@pytest.mark.parametrize("value_dtype", [torch.float32, torch.int8])
def test_exports_with_a_dynamic_batch(value_dtype: torch.dtype) -> None:
    tables, scheme = two_tables()
    model = Exported(CsrEmbeddingBagCollection.from_tables(scheme, tables, value_dtype=value_dtype))
    example = (torch.ones(3, 1), torch.tensor([1, 2, 3, 4, 5, 6, 7]), torch.tensor([1, 1, 0, 2, 3, 0]))
    batch = Dim("batch", min=1)
    shapes = ({0: batch}, {0: Dim("ids")}, {0: 2 * batch})
    exported = torch.export.export(model, example, dynamic_shapes=shapes)
    assert len(exported.state_dict) == len(model.state_dict())  # tables stay outside, to be mapped
    for arguments in (example, (torch.ones(2, 1), torch.tensor([9, 8, 0]), torch.tensor([1, 0, 0, 2]))):
        assert exported.module()(*arguments).equal(model(*arguments))


class Core(nn.Module):
    """No KeyedJaggedTensor at all: ids and offsets as nn.EmbeddingBag takes them."""

    def __init__(self, collection: CsrEmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return self.collection.lookup(values, offsets)


def test_exports_without_keyed_tensors() -> None:
    tables, scheme = two_tables()
    model = Core(CsrEmbeddingBagCollection.from_tables(scheme, tables))
    example = (torch.tensor([1, 2, 3, 4, 5, 6, 7]), torch.tensor([1, 1, 0, 2, 3, 0]))
    batch = Dim("batch", min=1)
    exported = torch.export.export(model, example, dynamic_shapes=({0: Dim("ids")}, {0: 2 * batch}))
    # torch guards against a batch of 1, because it might have specialised on more; here nothing has
    program = exported.module(check_guards=False)
    one, empty = (torch.tensor([9, 8, 0]), torch.tensor([1, 2])), (example[0][:0], torch.zeros(8).long())
    for arguments in (example, one, empty):
        assert program(*arguments).equal(model(*arguments))


def zeros_of_a_file(path: Path, dtype: torch.dtype, size: int) -> Tensor:
    """More zeros than memory: a file without content, mapped."""
    with path.open("wb") as file:
        file.truncate(size * dtype.itemsize)
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype)


def test_rows_and_values_beyond_32_bits(tmp_path: Path) -> None:
    """A table of 2^31 + 3 rows, of which the last two hold values; and one row that begins after 2^31 values."""
    num_rows, values = 2**31 + 3, torch.tensor([5.0, 7.0])
    pointers = zeros_of_a_file(tmp_path / "pointers", torch.int32, num_rows + 1)
    pointers[-2:] = torch.tensor([1, 2], dtype=torch.int32)
    columns = torch.tensor([1, 0], dtype=torch.uint8)
    compact = zeros_of_a_file(tmp_path / "compact", torch.uint8, compact_bytes(num_rows))
    compact[-2:] = 1
    arrays = {"values": values, "columns": columns, "row_pointers": pointers, "compact_row_pointers": compact}
    rows = interleaved(values, columns, torch.tensor([0, 1, 2]))  # empty ones before them take no bytes
    table = CsrTable(embedding_dim=2, interleaved_rows=rows, **arrays)
    routing = RowRouting(num_rows, 1, boundaries=torch.tensor([0, num_rows]))
    retained = torch.ones(1, 2, dtype=torch.bool)
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, retained, num_retained=2)})
    module = CsrEmbeddingBagCollection(scheme, {"t": table})
    ids = [num_rows - 3, num_rows - 2, num_rows - 1]
    assert module(keyed_jagged_tensor({"f": [[(i, 1.0)] for i in ids]})).values().tolist() == [[0, 0], [0, 5], [7, 0]]
    with pytest.raises(TypeError, match=r"int64 ids, because a table has more than 2\^31 rows, got torch.int32"):
        module(keyed_jagged_tensor({"f": [[(3, 1.0)]]}, id_dtype=torch.int32))

    before = 2**31 + 5
    values = zeros_of_a_file(tmp_path / "values", torch.int8, before + 1)
    columns = zeros_of_a_file(tmp_path / "columns", torch.uint8, before + 1)
    rows = zeros_of_a_file(tmp_path / "rows", torch.uint8, 2 * 57 + 2 * (before + 1))
    rows[-4:] = torch.tensor([128, 63, 3, 1])  # the scale 1.0, and 3 in column 1
    # what stands before the last of 57 rows, of two columns each, nobody looks at
    pointers = torch.tensor([0] * 56 + [before, before + 1])
    compact = torch.tensor([0] * 64 + [*before.to_bytes(8, "little"), 1], dtype=torch.uint8)
    arrays = {"values": values, "columns": columns, "row_pointers": pointers, "compact_row_pointers": compact}
    arrays |= {"scales": torch.ones(57, dtype=torch.bfloat16), "interleaved_rows": rows}
    table = CsrTable(embedding_dim=2, **arrays)
    routing = RowRouting(57, 1, boundaries=torch.tensor([0, 57]))
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, retained)})
    module = CsrEmbeddingBagCollection(scheme, {"t": table})
    assert module(keyed_jagged_tensor({"f": [[(56, 1.0)]]})).values().tolist() == [[0, 3]]


def test_tables_in_shards_of_one_dtype() -> None:
    scheme, tables = one_table()
    first, second = CsrTable.from_dense(tables["t"][:4]), CsrTable.from_dense(tables["t"][4:])
    module = CsrEmbeddingBagCollection(scheme, {"t": [first, second]})
    assert module(keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(10)]})).values().equal(tables["t"])
    with pytest.raises(
        ValueError, match="table 't': expected shards with values and columns of one dtype, got 2 kinds"
    ):
        CsrEmbeddingBagCollection(scheme, {"t": [first, second.quantized(torch.int8)]})
    with pytest.raises(ValueError, match=r"table 't': expected rows of shape \(10, 5\), got \(4, 5\)"):
        CsrEmbeddingBagCollection(scheme, {"t": [first]})
    with pytest.raises(ValueError, match=r"table 't': expected rows of shape \(10, 5\), got \(0,\)"):
        CsrEmbeddingBagCollection(scheme, {"t": []})


def pruned_model() -> tuple[DLRM, MixedDimensionScheme]:
    """A DLRM over three tables, the first with two features, pruned value by value in place."""
    torch.manual_seed(1)
    configs = [
        EmbeddingBagConfig(name="user", num_embeddings=10, embedding_dim=8, feature_names=["user", "friend"]),
        EmbeddingBagConfig(
            name="movie", num_embeddings=10, embedding_dim=8, feature_names=["movie"], pooling=PoolingType.MEAN
        ),
    ]
    collection = EmbeddingBagCollection(tables=configs)
    schemes = {}
    for config in configs:
        weight = collection.embedding_bags[config.name].weight
        with torch.no_grad():
            weight.mul_(torch.rand(10, 8) < 0.5)
        features, pooling = tuple(config.feature_names), config.pooling.name.lower()
        retained = torch.ones(1, 8, dtype=torch.bool)
        schemes[config.name] = table_scheme(
            config.name, UNPRUNED, retained, feature_names=features, pooling=pooling, num_retained=80
        )
    return dlrm(collection), MixedDimensionScheme(schemes)


def dlrm(collection: nn.Module) -> DLRM:
    return DLRM(collection, dense_in_features=4, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1]).eval()


@pytest.mark.parametrize("batch_size", [1, 6])
def test_drops_into_a_dlrm(batch_size: int) -> None:
    model, scheme = pruned_model()
    served = copy.deepcopy(model)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    tables = {name: bag.weight for name, bag in bags.items()}
    served.sparse_arch.embedding_bag_collection = CsrEmbeddingBagCollection.from_tables(scheme, tables)
    lengths = torch.randint(0, 4, (3 * batch_size,))
    ids = torch.randint(0, 10, (int(lengths.sum()),))
    kjt = KeyedJaggedTensor(keys=["movie", "user", "friend"], values=ids, lengths=lengths)
    dense = torch.rand(batch_size, 4)
    torch.testing.assert_close(served(dense, kjt), model(dense, kjt), rtol=1e-6, atol=1e-6)
    # and a model built around the module from the start reads the same logical tables
    collection = served.sparse_arch.embedding_bag_collection
    rebuilt = DLRM(
        collection, dense_in_features=4, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1]
    ).eval()
    rebuilt.load_state_dict(served.state_dict())
    torch.testing.assert_close(rebuilt(dense, kjt), model(dense, kjt), rtol=1e-6, atol=1e-6)


def test_read_from_an_artifact(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    path = write_artifact(tables, scheme, tmp_path / "artifact")
    module = load(path, form="csr_fp32")
    assert isinstance(module, CsrEmbeddingBagCollection)
    expected = CsrEmbeddingBagCollection.from_tables(scheme, tables)(all_rows())
    out = module(all_rows())
    assert out.keys() == expected.keys()
    assert out.values().equal(expected.values())
    assert isinstance(load(path, form="mixed_dimension_fp32"), MixedDimensionEmbeddingBagCollection)
    with pytest.raises(ValueError, match=r"form 'cst'.*did you mean 'csr_"):
        load(path, form="cst")
    without = write_artifact(tables, scheme, tmp_path / "mixed", forms=["mixed_dimension_fp32"])
    with pytest.raises(ValueError, match=r"expected form 'csr_fp32'.*export with forms=\['csr_fp32'\]"):
        load(without, form="csr_fp32")


def test_an_artifacts_buffers_stay_in_its_files(tmp_path: Path) -> None:
    """As mapped memory, which the system pages in as rows are asked for and shares between processes."""
    tables, scheme = two_tables()
    module = load(write_artifact(tables, scheme, tmp_path / "artifact"), form="csr_fp32")
    mapped = Path("/proc/self/maps")
    if not mapped.exists():
        pytest.skip("needs /proc to look at mapped memory")
    ranges = [line.split()[0].split("-") for line in mapped.read_text().splitlines() if "artifact/csr_fp32/" in line]
    for buffer in module.tables.buffers():
        assert any(int(first, 16) <= buffer.data_ptr() < int(last, 16) for first, last in ranges)
