"""Unknown ids that read a mean, against a naive oracle: a further row of each table holds the mean of its cold ones."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.artifact.export import export
from dnis_torchrec.artifact.load import load, serve
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.scheme import TableScheme
from dnis_torchrec.serving import MeanForUnknownIds
from dnis_torchrec.serving import tables as unknown_ids
from tests.coded_tables import coded_case
from tests.sequence_models import interest, make_batch, rounded
from tests.serving_reference import Case, cases, keyed_jagged_tensor, pool, two_tables


def mean_of_cold_rows(table: TableScheme, weight: Tensor) -> Tensor:
    """Naively, the mean of the rows of the last block that retains a column, ``(D,)``."""
    keeping = [block for block in range(table.routing.num_blocks) if bool(table.retained[block].any())]
    rows = [row for row, block in enumerate(table.routing.all_blocks().tolist()) if block in keeping[-1:]]
    mean = torch.zeros(table.embedding_dim, dtype=torch.float64)
    for row in rows:
        mean += weight[row].double() / len(rows)
    return mean.float()


def expected(case: Case) -> dict[str, Tensor]:
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
@given(cases(), st.sampled_from(["packed", "csr_fp32", "mixed_dimension", "dense_fp32"]), st.data())
def test_they_are_a_further_row(case: Case, form: str, data: st.DataObject) -> None:
    given_to = case.tables
    if form == "packed":
        case, given_to = coded_case(case, seed=0)
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
    tables, scheme = two_tables()
    served = MeanForUnknownIds(scheme, serve(scheme, tables, "csr_fp32", unknown_ids="zero"))
    pooled = served(keyed_jagged_tensor({"user": [[(10, 1.0)]], "movie": [[(-1, 1.0)]]}))
    for name, table in scheme.tables.items():
        torch.testing.assert_close(pooled[name[:5]][0], mean_of_cold_rows(table, tables[name]))
    none = KeyedJaggedTensor(["user", "movie"], torch.zeros(0).long(), lengths=torch.zeros(0).int(), stride=0)
    assert served(none).values().shape == (0, 10)


def test_an_artifact_of_sequences_is_loaded_so(tmp_path: Path) -> None:
    model, batches = interest(), [make_batch(seed) for seed in range(12)]
    scheme = dnis.compress(copy.deepcopy(model), batches, loss=nn.BCEWithLogitsLoss(), compression=2.5).scheme
    path = export(model, scheme, tmp_path / "artifact")
    features = KeyedJaggedTensor(
        ["history", "candidate", "visits"], torch.tensor([5, 99]), lengths=torch.tensor([2, 0, 0])
    )
    found = load(path, collection="sequences", unknown_ids="mean")(features)["history"].values()
    weight = rounded(model, scheme).sequences.embeddings["item"].weight.detach()
    torch.testing.assert_close(found, torch.stack([weight[5], mean_of_cold_rows(scheme.tables["item"], weight)]))


def test_ways_that_there_are_not_are_refused(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    path = write_artifact(tables, scheme, tmp_path / "artifact")
    with pytest.raises(ValueError, match=r"^unknown_ids: expected one of \('error', 'zero', 'mean'\), got 'hash'$"):
        load(path, unknown_ids="hash")
    with pytest.raises(ValueError, match="collection: expected one in which unknown ids contribute zero, got an error"):
        MeanForUnknownIds(scheme, load(path))
