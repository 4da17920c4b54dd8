"""Tables of two ranks that train in codes are those of one process, however they are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dnis_torchrec.blocks.codes import decode_rows, encode_rows
from tests.distributed.harness import RankResults, Results, running_ranks
from tests.distributed.model import blocks, tables
from tests.distributed.rounding_scenarios import KINDS, OTHERWISE, fed_back_scheme, scenarios, trains
from tests.distributed.test_two_ranks import assert_same, whole
from tests.reference import rounded, scheme_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    """Starts the scenarios, once for all tests."""
    with running_ranks(2, scenarios(), tmp_path_factory.mktemp("rounding")) as running:
        yield running


@pytest.fixture(scope="module")
def alone(gloo: dist.ProcessGroup, ranks: RankResults) -> Results:
    """The same steps on one rank; made while the others run."""
    return trains("table_wise", gloo, (0, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one(ranks: RankResults, alone: Results, kind: str) -> None:
    parts = ranks[kind]
    begin = whole([{"tables": alone["begin"]}])
    assert_same(whole(parts, "begin"), begin)  # in the same codes, fitted by two ranks and by one
    for when in ("trained", "folded"):
        first, second = (own[when] for own in parts)
        assert_same(first["codes"], second["codes"])
        torch.testing.assert_close(first["alpha"], alone[when]["alpha"], atol=1e-5, rtol=0)
        of_one = {key: whole([{"tables": alone[when][key]}]) for key in ("tables", "latents")}
        for key, expected in of_one.items():
            found = whole([first, second], key)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            assert not found["user"].equal(begin["user"])
    assert_same(parts[0]["trained"]["codes"], alone["trained"]["codes"])


def test_alpha_was_learnt_and_is_in_the_codes(alone: Results) -> None:
    assert all(bool((alpha < 1).any()) for alpha in alone["trained"]["alpha"].values())
    assert all(bool((alpha == 1).all()) for alpha in alone["folded"]["alpha"].values())
    scheme = scheme_of(tables(), blocks().routings)
    for name, weight in whole([{"tables": alone["folded"]["tables"]}]).items():
        codes = {key: alone["folded"]["codes"][f"{name}/{key}"] for key in ("bits", "scale", "shift")}
        table = scheme.tables[name].with_codes(type(scheme.tables[name].codes)(**codes))
        assert weight.equal(rounded(table, weight))


@pytest.mark.parametrize(("kind", "then"), OTHERWISE)
def test_runs_go_on_from_checkpoints(ranks: RankResults, kind: str, then: str) -> None:
    parts = ranks[f"{kind} to {then}"]
    assert_same(parts[0]["resumed"]["codes"], parts[0]["whole"]["codes"])
    for key in ("tables", "latents"):
        found, expected = (whole([own[which] for own in parts], key) for which in ("resumed", "whole"))
        if kind == then:
            assert_same(found, expected)
        else:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_rounding_is_that_of_whole_rows(ranks: RankResults, kind: str) -> None:
    """By error feedback, also of a rank that has some columns of a row; what trains on has its nearest codes."""
    parts = ranks[f"settles {kind}"]
    before, after = whole(parts, "before"), whole(parts, "after")
    for name, table in fed_back_scheme().tables.items():
        of_rows = table.routing.all_blocks()
        expected = decode_rows(encode_rows(before[name], of_rows, table.codes), of_rows, table.codes)
        assert torch.equal(after[name], expected)
        nearest = replace(table.codes, feedback=None)
        assert name == "one" or not torch.equal(
            after[name], decode_rows(encode_rows(before[name], of_rows, nearest), of_rows, nearest)
        )
    assert not any(own["has_feedback"] for own in parts)


def test_nan_on_one_rank_stops_both(ranks: RankResults) -> None:
    first, second = (own["error"] for own in ranks["nan"])
    assert first == f"rank 1: {second}"
    assert second.startswith("table 'user': expected finite values, got nan in block 1, column 0")
