"""Curvature over ranks: that of one process with all samples, on every rank; what is wrong on one is raised on all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dnis_torchrec.allocation.curvature import curvature
from tests.allocation.curvature_cases import ROWS, make_blocks, make_model
from tests.distributed.curvature_scenarios import CASES, LOSS, PAIRS, SCENARIOS, SIZE, batches
from tests.distributed.harness import RankResults, Results, running_ranks

ON_FOUR = ("several ids row_wise", "mean column_wise", "refused labels")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    """All scenarios on two ranks."""
    with running_ranks(2, SCENARIOS, tmp_path_factory.mktemp("two")) as running:
        yield running


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    """Some of them on four."""
    with running_ranks(4, {name: SCENARIOS[name] for name in ON_FOUR}, tmp_path_factory.mktemp("four")) as running:
        yield running


def assert_as_in_one_process(ranks: list[Results], name: str, num_batches: int = 2) -> None:
    """Up to how float32 lookups and gradients round; the ranks among themselves exactly."""
    case = CASES[name]
    found = curvature(make_model(case), batches(case, num_batches), make_blocks(case), loss=LOSS)
    for own in ranks:
        assert own["num_samples"] == found.num_samples == num_batches * SIZE
        for table in ROWS:
            for got, want in (
                (own["gradient"][table], found.gradient[table]),
                (own["curvature"][table], found.curvature[table]),
                (own["couplings"][table], found.couplings[table]),
            ):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))
            for of_all in ("gradient", "curvature", "couplings"):
                assert torch.equal(own[of_all][table], ranks[0][of_all][table])
        assert own["relative_error"] == ranks[0]["relative_error"]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_two_ranks_find_what_one_process_does(two: RankResults, name: str, kind: str) -> None:
    assert_as_in_one_process(two[f"{name} {kind}"], name)


@pytest.mark.parametrize("scenario", ["prepared", "cut"])
def test_so_do_those_of_a_prepared_model_and_those_that_cut_batches(two: RankResults, scenario: str) -> None:
    assert_as_in_one_process(two[scenario], "several ids")


def test_all_stop_where_all_together_have_enough(two: RankResults) -> None:
    assert_as_in_one_process(two["enough"], "several ids", num_batches=1)


def test_a_table_that_one_rank_reads_is_read(two: RankResults) -> None:
    """The first batch of both ranks reads nothing of it, the first four do."""
    assert two["growing"] == 2 * [{"num_samples": 2 * 4 * SIZE, "unread": []}]


@pytest.mark.parametrize("scenario", ON_FOUR[:2])
def test_four_ranks_find_what_one_process_does(four: RankResults, scenario: str) -> None:
    assert_as_in_one_process(four[scenario], scenario.rsplit(" ", 1)[0])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("batches", "batches: expected as many batches on every rank, got 1 on rank 1, more on another; leave out"),
        ("labels", "batch 1: expected finite labels, got nan"),
        ("predictions", "batch 0: expected finite predictions, got nan"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(two: RankResults, what: str, message: str) -> None:
    for own in two[f"refused {what}"]:
        assert message in own["error"]


def test_on_four_ranks_too(four: RankResults) -> None:
    for own in four["refused labels"]:
        assert "batch 1: expected finite labels, got nan" in own["error"]
