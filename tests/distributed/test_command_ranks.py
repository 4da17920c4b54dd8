"""`dnis export`, `verify` and `compare` on ranks: what one process comes to, and no table whole on a rank."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from dnis_torchrec.cli.commands import run_search
from tests.distributed.command_scenarios import COMMANDS, commands, refusals, run_commands, spread_run
from tests.distributed.compress_job_scenarios import RECIPE, ROWS
from tests.distributed.harness import RankResults, run_on_ranks
from tests.tiny import EMBEDDING_DIM, files_of, quick_search

NUM_VALUES = EMBEDDING_DIM * sum(ROWS.values())
WITHOUT_TRAINING = tuple(COMMANDS)
READS_TABLES = ("packed",)


@pytest.fixture(scope="module")
def runs(gloo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run as two ranks write it, and one with other tables."""
    folder = tmp_path_factory.mktemp("runs")
    run_search(quick_search(folder / "searched", recipe=RECIPE))
    another = spread_run(folder / "searched", folder / "another", added=1.0)
    return {"run": spread_run(folder / "searched", folder / "run"), "another": another}


@pytest.fixture(scope="module")
def ranks(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All scenarios on two ranks."""
    scenarios = {"commands": partial(commands, **runs, names=tuple(COMMANDS)), "refusals": partial(refusals, **runs)}
    return run_on_ranks(2, scenarios, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def four_ranks(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """The commands on four, which cannot divide the rows, and neither can two."""
    names = ("packed", "verified")
    return run_on_ranks(4, {"commands": partial(commands, **runs, names=names)}, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def alone(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of the same."""
    out = tmp_path_factory.mktemp("alone")
    codes = {name: told["code"] for name, told in run_commands(out, **runs, names=WITHOUT_TRAINING).items()}
    assert codes == {name: int(name == "damaged") for name in WITHOUT_TRAINING}
    return out


@pytest.fixture(params=[2, 4])
def on_ranks(request: pytest.FixtureRequest) -> RankResults:
    """Both numbers of ranks, one after the other."""
    return request.getfixturevalue({2: "ranks", 4: "four_ranks"}[request.param])


def test_an_artifact_is_written_to_the_same_bytes(on_ranks: RankResults, alone: Path) -> None:
    assert files_of(on_ranks.folder / "packed") == files_of(alone / "packed")


def test_a_verification_finds_the_same(on_ranks: RankResults, alone: Path) -> None:
    found, wanted = (json.loads((folder / "verified.json").read_text()) for folder in (on_ranks.folder, alone))
    checked = {(finding["check"], finding["subject"]): finding["status"] for finding in found["findings"]}
    assert checked == {(finding["check"], finding["subject"]): finding["status"] for finding in wanted["findings"]}
    assert {"checksums", "parity", "unknown ids", "metric"} == {check for check, _ in checked}
    assert found["ok"]


def test_all_ranks_come_to_one_verdict_and_the_first_speaks(ranks: RankResults) -> None:
    first, second = ranks["commands"]
    assert {name: told["code"] for name, told in first.items()} == {name: told["code"] for name, told in second.items()}
    assert [name for name, told in first.items() if told["code"]] == ["damaged"]
    assert {told["said"] for told in second.values()} == {""}
    assert not [line for told in second.values() for line in told["error"].splitlines() if line.startswith("error")]
    assert f"artifact: {ranks.folder}/packed" in first["packed"]["said"]
    assert "expected sha256" in first["damaged"]["error"]


def test_together_ranks_read_each_value_of_a_table_once(on_ranks: RankResults) -> None:
    of_ranks = on_ranks["commands"]
    for name in [name for name in READS_TABLES if name in of_ranks[0]]:
        read = [own[name]["read"] for own in of_ranks]
        assert sum(read) == NUM_VALUES, name
        assert [own[name]["whole"] for own in of_ranks] == [[]] * len(of_ranks)
        assert max(read) < NUM_VALUES, name


def test_what_goes_wrong_on_one_rank_stops_all_and_leaves_nothing(ranks: RankResults) -> None:
    for rank, own in enumerate(ranks["refusals"]):
        named = "" if rank == 1 else "rank 1: "
        missing = f"ValueError: {named}run folder {ranks.folder}/none: expected a run.json in it"
        assert own["exported"].startswith(missing)
        assert own["left"] == []
