"""A run of two ranks goes on from its checkpoint: bit for bit on the same ranks, within rounding on others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.checkpoint_scenarios import (
    FOUR,
    ONE_TO_TWO,
    OTHERWISE,
    SAME,
    SAVED_AT,
    STEPS,
    Run,
    scenarios,
    scenarios_of_four,
    written_by_one,
)
from tests.distributed.harness import RankResults, run_on_ranks
from tests.distributed.test_two_ranks import whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scenarios run."""
    return tmp_path_factory.mktemp("checkpoint_ranks")


@pytest.fixture(scope="module")
def alone(gloo: dist.ProcessGroup, folder: Path) -> dict:
    """What a process alone came to; two ranks go on from its checkpoint."""
    return written_by_one(folder, gloo)


@pytest.fixture(scope="module")
def ranks(folder: Path, alone: dict) -> RankResults:
    """Runs the scenarios once for all tests."""
    return run_on_ranks(2, scenarios(), folder)


def assert_equal(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.fixture(scope="module")
def four_ranks(gloo: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """Runs the scenarios of four ranks."""
    return run_on_ranks(4, scenarios_of_four(), tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("scenario", [*(f"same {kind}" for kind in SAME), "adagrad column_wise"])
def test_the_same_ranks_go_on_bit_for_bit(ranks: RankResults, scenario: str) -> None:
    assert_as_if_nothing_had_been(ranks[scenario], SAVED_AT)


@pytest.mark.parametrize(("kind", "saved_at"), [(kind, step) for kind, steps in FOUR.items() for step in steps])
def test_four_ranks_go_on_bit_for_bit(four_ranks: RankResults, kind: str, saved_at: int) -> None:
    assert_as_if_nothing_had_been([own[str(saved_at)] for own in four_ranks[f"four {kind}"]], saved_at)


def assert_as_if_nothing_had_been(results: list[dict], saved_at: int) -> None:
    for own in results:
        assert own["steps"] == saved_at
        assert len(own["whole"]["losses"]) == STEPS - saved_at
        assert own["resumed"]["losses"] == own["whole"]["losses"]
        for kind in ("alpha", "dense", "tables"):
            assert_equal(own["resumed"][kind], own["whole"][kind])


@pytest.mark.parametrize(
    "scenario", [*(f"{kind} to {then}" for kind, then in OTHERWISE), "adagrad table_wise to row_wise"]
)
def test_another_sharding_goes_on_within_rounding(ranks: RankResults, scenario: str) -> None:
    results = ranks[scenario]
    for own in results:
        assert own["resumed"]["losses"] == pytest.approx(own["whole"]["losses"], abs=1e-5)
        for kind in ("alpha", "dense"):
            torch.testing.assert_close(own["resumed"][kind], own["whole"][kind], atol=1e-5, rtol=0)
    tables = [whole([own[name] for own in results]) for name in ("resumed", "whole")]
    torch.testing.assert_close(*tables, atol=1e-5, rtol=0)
    assert any(own["resumed"]["tables"].keys() != own["whole"]["tables"].keys() for own in results)


@pytest.mark.parametrize("kind", ["row_wise", "mixed"])
def test_one_rank_goes_on_within_rounding(ranks: RankResults, gloo: dist.ProcessGroup, kind: str) -> None:
    results = ranks[f"same {kind}"]
    run = Run("table_wise", gloo, (0, 1))
    run.pipeline.restore(Path(results[0]["path"]), run.stream)
    losses = run.steps(STEPS - SAVED_AT)
    mean = torch.tensor([own["whole"]["losses"] for own in results]).mean(0)
    torch.testing.assert_close(torch.tensor(losses), mean, atol=1e-5, rtol=0)
    found = run.found()
    torch.testing.assert_close(found["alpha"], results[0]["whole"]["alpha"], atol=1e-5, rtol=0)
    tables = whole([own["whole"] for own in results])
    torch.testing.assert_close(whole([found]), tables, atol=1e-5, rtol=0)


@pytest.mark.parametrize("then", ONE_TO_TWO)
def test_two_ranks_go_on_with_the_run_of_one_within_rounding(ranks: RankResults, alone: dict, then: str) -> None:
    results = ranks[f"one to {then}"]
    losses = torch.tensor([own["losses"] for own in results]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(alone["losses"]), atol=1e-5, rtol=0)
    for kind in ("alpha", "dense"):
        torch.testing.assert_close(results[0][kind], alone[kind], atol=1e-5, rtol=0)
        assert_equal(results[0][kind], results[1][kind])
    torch.testing.assert_close(whole(results), whole([alone]), atol=1e-5, rtol=0)


def test_row_wise_state_of_other_column_shards_is_refused(ranks: RankResults) -> None:
    for own in ranks["column shards"]:
        assert own["refusal"].startswith("NotImplementedError: checkpoint ")
        assert "table 'user'" in own["refusal"]
        assert "2 column shards" in own["refusal"]
        assert "fused/genre/" in own["other optimizer"]
        assert "only in the checkpoint" in own["other optimizer"]


def test_a_missing_ranks_file_is_named_on_all_ranks(ranks: RankResults) -> None:
    for own in ranks["damage"]:
        assert own["refusal"].startswith("ValueError: ")
        assert "put back what rank 1 wrote" in own["refusal"]


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_disk_that_is_full_on_one_rank(ranks: RankResults, on_error: str) -> None:
    for rank, own in enumerate(ranks[f"full disk {on_error}"]):
        said = own["errors"] or "".join(own["messages"])
        if on_error == "stop" or rank == 0:
            assert "step-00000004" in said
            assert "No space left" in said
            assert "step-00000002" in said
        assert own["taken"] == 6
        assert own["steps"] == ([2] if on_error == "stop" else [2, 6])
        assert own["latest"] == ("step-00000002" if on_error == "stop" else "step-00000006")
        assert own["partial"] == []
