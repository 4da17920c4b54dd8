"""`dnis compress` on ranks: the files and the rows of one process, and no more of a table on a rank than its shards."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dnis_torchrec.cli.commands import run_compress, run_evaluate
from dnis_torchrec.cli.settings import EvaluateCommand
from dnis_torchrec.report.rows import COMPRESS, UNCOMPRESSED, Results
from tests.distributed.compress_job_scenarios import (
    KINDS,
    RECIPE,
    ROWS,
    SIZES,
    UNFILLED,
    compressed,
    from_files,
    job,
    manifest_of,
    refusals,
    save_weights,
    trained,
)
from tests.distributed.harness import RankResults, Scenario, run_on_ranks
from tests.tiny import EMBEDDING_DIM, files_of

READ = {"w.safetensors": "row_wise", "w.pt": "column_wise"}
"""Files of weights, and how the tables that are read from them are sharded."""
ON_FOUR = ("table_wise", "row_wise", "grid_shard")
"""Where four ranks have no table, a few rows, a few columns of a few rows; their files: test_packed_export_ranks.py."""
TOLD_OF_METRICS = {"manifest.json", "run.json", "results.json", "report.html", "MODEL_CARD.md"}


@pytest.fixture(scope="module")
def weights(gloo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in files of every kind."""
    return save_weights(tmp_path_factory.mktemp("weights"))


def in_kinds(kinds: Iterable[str], weights: dict[str, Path]) -> dict[str, Scenario]:
    return {kind: partial(compressed, kind=kind, file=weights["w.safetensors"]) for kind in kinds}


@pytest.fixture(scope="module")
def ranks(weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All scenarios on two ranks."""
    scenarios = in_kinds(KINDS, weights) | {
        file: partial(from_files, kind=kind, file=weights[file]) for file, kind in READ.items()
    }
    scenarios |= {"trained": trained, "refusals": partial(refusals, file=weights["w.safetensors"])}
    return run_on_ranks(2, scenarios, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def four_ranks(weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """Some sharding types on four."""
    return run_on_ranks(4, in_kinds(ON_FOUR, weights), tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def alone(weights: dict[str, Path]) -> tuple[Path, list[dict[str, Any]]]:
    """The files and rows of one process."""
    out = weights["w.safetensors"].parent / "alone"
    return out, rows_of(run_compress(job(out, source=weights["w.safetensors"])))


def rows_of(results: Results) -> list[dict[str, Any]]:
    """What several ranks measure, too."""
    return [asdict(row) for row in results.rows if row.method in (COMPRESS, UNCOMPRESSED)]


def assert_same(found: Path, rows: list[dict[str, Any]], alone: tuple[Path, list[dict[str, Any]]]) -> None:
    assert_same_rows(rows, alone[1])
    files, wanted = files_of(found), files_of(alone[0])
    assert files.keys() == wanted.keys()
    others = [name for name in wanted if Path(name).name not in TOLD_OF_METRICS]
    assert {f"x{size:g}/packed/000_user.safetensors" for size in SIZES} <= set(others)
    assert [name for name in others if files[name] != wanted[name]] == []
    for size in SIZES:
        assert manifest_of(found / f"x{size:g}") == manifest_of(alone[0] / f"x{size:g}")


def assert_same_rows(rows: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for row, other in zip(rows, wanted, strict=True):
        for metrics in ("metrics", "selection"):
            assert row[metrics] == pytest.approx(other[metrics], abs=1e-6)
        for name in ("method", "compression", "num_bytes", "seed", "name"):
            assert row[name] == other[name]
        predicted = row["predicted_loss_increase"], other["predicted_loss_increase"]
        assert predicted[0] == (predicted[1] and pytest.approx(predicted[1], abs=1e-6))


@pytest.mark.parametrize(("world_size", "kind"), [*((2, kind) for kind in KINDS), *((4, kind) for kind in ON_FOUR)])
def test_files_and_rows_are_those_of_one_process(request, alone, kind: str, world_size: int) -> None:
    ranks = request.getfixturevalue({2: "ranks", 4: "four_ranks"}[world_size])
    for own in ranks[kind]:
        assert_same(ranks.folder / kind, own["rows"], alone)


@pytest.mark.parametrize("file", READ)
def test_weights_in_other_files_give_the_same(ranks: RankResults, alone, file: str) -> None:
    for own in ranks[file]:
        assert_same(ranks.folder / f"from_{file}", own["rows"], alone)


def test_tables_that_a_recipe_does_not_fill_are_filled_in_one_process(weights: dict[str, Path], alone) -> None:
    found = run_compress(job(alone[0].with_name("unfilled"), source=weights["w.pt"], recipe=UNFILLED))
    assert_same(alone[0].with_name("unfilled"), rows_of(found), alone)


@pytest.mark.parametrize("scenario", [*READ, "trained"])
def test_of_tables_a_rank_reads_and_holds_its_shards_alone(ranks: RankResults, scenario: str) -> None:
    values = dict.fromkeys(ROWS, 0)
    for own in ranks[scenario]:
        assert own["read"][: len(own["held"])] == own["held"]
        assert own["whole"] == []
        for table, _, (rows, columns) in own["held"]:
            values[table.removesuffix(".weight")] += rows * columns
    assert values == {name: rows * EMBEDDING_DIM for name, rows in ROWS.items()}


def test_the_commands_go_through_as_ranks_of_torchrun(ranks: RankResults, gloo, tmp_path: Path) -> None:
    first, second = ranks["trained"]
    folder = ranks.folder
    assert [code for code, _ in first["said"] + second["said"]] == [0] * 8
    assert [said for _, said in second["said"]] == [""] * 4
    assert f"artifact: {folder}/of_run/x3" in first["said"][1][1]
    rows = json.loads((folder / "of_run" / "results.json").read_text())["rows"]
    again = run_compress(job(tmp_path / "alone", source=folder / "run"))
    assert_same(folder / "of_run", rows, (tmp_path / "alone", rows_of(again)))
    for path, row, (_, said) in zip(("run", "of_run/x6"), (rows[0], rows[2]), first["said"][2:], strict=True):
        assert json.loads(said)["metrics"] == pytest.approx(row["metrics"], abs=1e-6)
        assert run_evaluate(EvaluateCommand(path=folder / path, recipe=RECIPE))["metrics"] == pytest.approx(
            row["metrics"], abs=1e-6
        )


def test_what_goes_wrong_on_one_rank_stops_all_and_leaves_nothing(ranks: RankResults) -> None:
    for rank, own in enumerate(ranks["refusals"]):
        named = "" if rank == 1 else "rank 1: "
        assert own["weights"].startswith(f"ValueError: {named}weights ")
        assert own["weights"].endswith("none.safetensors: expected a file, got none")
        for what in ("full", "serving"):
            assert own[what].startswith(f"RunWriteError: folder {ranks.folder}/refused: expected to write what")
            assert f"got {named}[Errno 28] No space left on device" in own[what]
        assert own["size"].startswith("ValueError: compression: expected at most ")
        assert "expected the folder that rank 0 writes to, on storage that all hosts have mounted" in own["apart"]
        assert "expected a folder that does not exist, got an existing one; choose another" in own["stands"]
        assert own["left"] == []
