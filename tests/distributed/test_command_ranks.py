"""`dnis prune`, `export`, `verify` and `compare` on ranks: what one process comes to, and no table whole on a rank."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from dnis_torchrec.artifact import exact_rows, read_scheme
from dnis_torchrec.artifact.verify import verify
from dnis_torchrec.jobs.artifact_jobs import run_evaluate
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.jobs.search_job import run_search
from tests.distributed.command_scenarios import COMMANDS, commands, refusals, run_commands, spread_run
from tests.distributed.compress_job_scenarios import RECIPE, ROWS
from tests.distributed.harness import RankResults, run_on_ranks
from tests.documents import table_rows
from tests.jobs.test_jobs_prune import files_of
from tests.searched_runs import quick_job
from tests.tiny import EMBEDDING_DIM

LIMITS = table_rows("docs/limits.md", "Commands on several ranks")
NUM_VALUES = EMBEDDING_DIM * sum(ROWS.values())
WITHOUT_TRAINING = tuple(name for name in COMMANDS if name != "tuned")
READS_TABLES = ("cut", "tuned", "packed", "forms")


@pytest.fixture(scope="module")
def runs(gloo, no_images, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run as two ranks write it, and one with other tables."""
    folder = tmp_path_factory.mktemp("runs")
    run_search(quick_job(folder / "searched", recipe=RECIPE))
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
    names = ("cut", "packed", "forms", "verified")
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


def test_a_run_is_pruned_to_the_same_bits(on_ranks: RankResults, alone: Path) -> None:
    found, wanted = RunFolder.open(on_ranks.folder / "cut"), RunFolder.open(alone / "cut")
    state = found.state()
    assert state.keys() == wanted.state().keys()
    assert all(state[name].equal(value) for name, value in wanted.state().items())
    assert any(bool((value == 0).any()) for value in state.values())
    files, others = files_of(found.path), files_of(wanted.path)
    for name in ("scheme.safetensors", "alpha.safetensors", "blocks.safetensors", "counts.safetensors"):
        assert files[name] == others[name]
    head, other = found.read_head(), wanted.read_head()
    assert head.pop("metrics") == pytest.approx(other.pop("metrics"), abs=1e-6)
    steps = [[step["job"] for step in run.pop("provenance")] for run in (head, other)]  # their folders and dates differ
    assert steps == [["search", "prune"]] * 2
    assert head == other


def test_what_was_pruned_stays_away_while_the_rest_trains(ranks: RankResults, alone: Path) -> None:
    tuned, cut = RunFolder.open(ranks.folder / "tuned"), RunFolder.open(alone / "cut")
    for name, stored in tuned.tables().items():
        assert not stored.whole()[cut.tables()[name].whole() == 0].any()
    assert files_of(tuned.path)["scheme.safetensors"] == files_of(cut.path)["scheme.safetensors"]
    again = run_evaluate(tuned.path, None)["metrics"]
    assert again == pytest.approx(tuned.rows()[0].metrics, abs=1e-6)


def test_an_artifact_is_written_to_the_same_bytes(on_ranks: RankResults, alone: Path) -> None:
    assert files_of(on_ranks.folder / "packed") == files_of(alone / "packed")


@pytest.mark.parametrize("name", ["forms", "grouped"])
def test_other_forms_hold_the_same_values(ranks: RankResults, alone: Path, name: str) -> None:
    found, wanted = exact_rows(ranks.folder / name), exact_rows(alone / name)
    assert found.keys() == wanted.keys() == ROWS.keys()
    for table, num_rows in ROWS.items():
        assert found[table](0, num_rows).equal(wanted[table](0, num_rows))
    scheme, other = read_scheme(ranks.folder / name).to_tensors(), read_scheme(alone / name).to_tensors()
    assert all(scheme[key].equal(value) for key, value in other.items())
    assert verify(ranks.folder / name).failures == []


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
    assert f"run: {ranks.folder}/tuned" in first["tuned"]["said"]
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
        for what in ("pruned", "exported"):
            assert own[what].startswith(f"ValueError: {named}run folder {ranks.folder}/none: expected a folder written")
        for command in ("`dnis export`",):
            remedy = LIMITS[command][-1].partition(" is refused: ")[2]
            assert own[command].endswith(f": supported is one process, got 2 ranks; {remedy}")
        assert own["full"].startswith(f"RunWriteError: run folder {ranks.folder}/refused: expected to write the pruned")
        assert f"got {named}[Errno 28] No space left on device" in own["full"]
        assert own["half a run"].endswith(f"{named}[Errno 28] No space left on device")
        assert own["left"] == []
