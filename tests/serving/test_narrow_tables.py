"""One narrow table per feature: sizes and columns by hand, values against the naive oracle, and a DLRM that trains."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import assume, given, settings
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving import MixedDimensionEmbeddingBagCollection
from dnis_torchrec.serving.configs import NarrowEmbeddingBagCollection, NarrowTable, NarrowTables, embedding_configs
from tests import tiny
from tests.serving_reference import Case, cases, keyed_jagged_tensor, table_scheme

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
    served = MixedDimensionEmbeddingBagCollection(case.scheme, device="meta").physical_embedding_bag_configs()
    found = embedding_configs(case.scheme, per="block").configs()
    assert {config.name: facts(config) for config in found} == {config.name: facts(config) for config in served}


def facts(config: EmbeddingBagConfig) -> tuple[object, ...]:
    return config.num_embeddings, config.embedding_dim, config.feature_names, config.pooling


def test_features_that_shared_a_table_go_on_sharing_it() -> None:
    (table,) = embedding_configs(scheme(feature_names=("f", "g")))
    assert table.feature_names == ("f", "g")
    ebc = NarrowEmbeddingBagCollection(NarrowTables((table,)), projection="learned")
    assert [name for name, _ in ebc.named_parameters()] == ["narrow.embedding_bags.t.weight", "projections.t"]


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_the_union_gives_what_the_pruned_tables_give(case: Case) -> None:
    tables = embedding_configs(case.scheme, columns="union")
    assume(not tables.is_weighted or all(table.pooling == "sum" for table in tables))  # torch's limit, not ours
    for projection in ("selection", "learned"):
        ebc = NarrowEmbeddingBagCollection.from_tables(tables, case.tables, projection=projection)
        found = ebc(case.kjt()).to_dict()
        expected = case.expected()
        assert list(found) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_json_yaml_and_python_say_the_same() -> None:
    tables = embedding_configs(scheme(feature_names=("f", "g's"), pooling="mean"))
    assert NarrowTables.from_json(tables.to_json()) == tables
    assert NarrowTables.from_yaml(tables.to_yaml()) == tables
    names: dict[str, object] = {}
    exec(compile(tables.to_python(), "tables.py", "exec"), names)
    (config,) = names["tables"]
    assert isinstance(config, EmbeddingBagConfig)
    assert (config.name, config.num_embeddings) == ("t", 10)
    assert (config.embedding_dim, config.feature_names, config.pooling) == (2, ["f", "g's"], PoolingType.MEAN)
    assert names["columns"] == {"t": [1, 3]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "expected YAML"),
        ("[]", "expected a mapping"),
        ("{format_version: 2, tables: []}", "format_version 1"),
        ("{format_version: 1, tables: [{name: t}]}", "entry 0.*expected fields"),
        ("!!python/object/apply:os.getcwd []", "expected YAML"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NarrowTables.from_yaml(text)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("feature_names", "movie", r"entry 0: expected feature_names to be of type list, got 'movie'"),
        ("feature_names", ["f", 3], r"entry 0: expected feature_names to hold values of type str, got \['f', 3\]"),
        ("feature_names", [], "table 't': expected at least one feature, got none"),
        ("num_embeddings", -3, "table 't': expected num_embeddings >= 1, got -3"),
        ("num_embeddings", 2.5, "entry 0: expected num_embeddings to be of type int, got 2.5"),
        ("columns", ["1", "3"], r"entry 0: expected columns to hold values of type int, got \['1', '3'\]"),
        ("logical_dim", None, "entry 0: expected logical_dim to be of type int, got None"),
    ],
)
def test_a_table_that_cannot_be_is_refused(field: str, value: object, message: str) -> None:
    fields = json.loads(embedding_configs(scheme()).to_json())
    fields["tables"][0][field] = value
    with pytest.raises(ValueError, match=message):
        NarrowTables.from_json(json.dumps(fields))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="per: expected one of"):
        embedding_configs(scheme(), per="table")
    with pytest.raises(ValueError, match="columns: expected one of"):
        embedding_configs(scheme(), columns="all")
    other = table_scheme("u", ROUTING, RETAINED, collection="other")
    with pytest.raises(ValueError, match="one collection"):
        embedding_configs(MixedDimensionScheme({**scheme().tables, "u": other}))
    with pytest.raises(ValueError, match=r"table 't': expected shape \(10, 4\), got \(10, 3\)"):
        NarrowEmbeddingBagCollection.from_tables(embedding_configs(scheme()), {"t": torch.zeros(10, 3)})
    with pytest.raises(ValueError, match="rising columns below 4"):
        NarrowTable(
            name="t",
            num_embeddings=1,
            embedding_dim=2,
            feature_names=("f",),
            pooling="sum",
            logical_dim=4,
            columns=(3, 1),
        )


@pytest.mark.parametrize("projection", ["selection", "learned"])
def test_a_fresh_dlrm_with_it_trains(projection: str) -> None:
    torch.manual_seed(0)
    rows = {
        "user": RowRouting(40, 2, boundaries=torch.tensor([0, 10, 40])),
        "genre": RowRouting.from_map(torch.arange(12) % 2, 2),
    }
    retained = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]], dtype=torch.bool)
    found = MixedDimensionScheme({n: table_scheme(n, r, retained, feature_names=(n,)) for n, r in rows.items()})
    written = embedding_configs(found).to_json()
    ebc = NarrowEmbeddingBagCollection(NarrowTables.from_json(written), projection=projection)
    model = DLRM(ebc, 4, [8, 8], [8, 1])
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=0.02), nn.BCEWithLogitsLoss()
    batch, losses = tiny.make_batch(256, 0), []
    for _ in range(30):
        value = loss(model(batch.dense_features, batch.sparse_features).squeeze(1), batch.labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] - 0.1
    assert {name: tuple(bag.weight.shape) for name, bag in ebc.narrow.embedding_bags.items()} == {
        "user": (40, 3),
        "genre": (12, 3),
    }
    if projection == "learned":
        start = torch.eye(8)[torch.tensor(next(iter(embedding_configs(found))).columns)]
        assert not torch.equal(ebc.projections["user"].detach(), start)


def test_a_column_of_a_bag_that_is_not_kept_is_zero() -> None:
    weight = torch.arange(1.0, 41.0).view(10, 4)
    ebc = NarrowEmbeddingBagCollection.from_tables(embedding_configs(scheme(feature_names=("f",))), {"t": weight})
    pooled = ebc(keyed_jagged_tensor({"f": [[(0, 1.0), (1, 1.0)], []]}))["f"]
    assert pooled.tolist() == [[0.0, 2.0 + 6.0, 0.0, 4.0 + 8.0], [0.0] * 4]
