"""Planning: sizes and tables as they are typed, what TorchRec's planner says of them, and clusters too small."""

from __future__ import annotations

import json
import logging
import resource
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dnis_torchrec.artifact import write_artifact
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.cli import main
from dnis_torchrec.jobs.planning import plans
from dnis_torchrec.jobs.planning.cluster import Cluster, parse_bytes
from dnis_torchrec.jobs.planning.placement import place
from dnis_torchrec.jobs.planning.plans import compare_plans, plan_table
from dnis_torchrec.jobs.planning.tables import PlannedTable, parse_tables, tables_of_scheme
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme

GB = 10**9


def table(name: str, rows: int, dim: int) -> PlannedTable:
    return PlannedTable(name=name, num_embeddings=rows, embedding_dim=dim)


def make_scheme() -> MixedDimensionScheme:
    """A table read by two features, in three blocks of which the last retains nothing."""
    retained = torch.tensor([[True] * 8, [True] * 3 + [False] * 5, [False] * 8])
    user = TableScheme(
        name="user",
        collection="ebc",
        num_embeddings=1000,
        embedding_dim=8,
        pooling="mean",
        feature_names=("user", "friend"),
        is_weighted=True,
        routing=RowRouting(1000, 3, boundaries=torch.tensor([0, 100, 400, 1000])),
        retained=retained,
        num_retained=1700,
    )
    return MixedDimensionScheme({"user": user})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GB", 80 * GB), ("512MB", 512 * 10**6), ("1.5 GiB", 3 * 2**29), ("2tb", 2 * 10**12), ("7B", 7)],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["80", "GB", "-1GB", "80 G", "1e3GB", "80GB!", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^size: expected a number and a unit, such as 80GB, got '.*'; units are B, KB"
    ):
        parse_bytes(text)


def test_a_table_is_read_from_numbers() -> None:
    before, after = parse_tables(["user=1000x16:100x8,700x2"])
    assert before == [table("user", 1000, 16)]
    assert [(t.name, t.num_embeddings, t.embedding_dim) for t in after] == [("user/b0", 100, 8), ("user/b1", 700, 2)]
    assert parse_tables(["user=1000x16"]) == ([table("user", 1000, 16)], [table("user", 1000, 16)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user", "expected NAME=ROWSxDIM"),
        ("user=10x", "expected NAME=ROWSxDIM"),
        ("=10x4", "expected NAME=ROWSxDIM"),
        ("user=10x4:", "expected NAME=ROWSxDIM"),
        ("a.b=10x4", "table 'a.b': expected a name without a dot"),
        ("user=0x4", "table 'user': expected num_embeddings >= 1, got 0"),
        ("user=10x4:6x4,5x2", "table 'user': expected blocks of at most 10 rows, got 11"),
        ("user=10x4:0x4", "table 'user/b0': expected num_embeddings >= 1, got 0"),
        ("user=10x4:6x5", "table 'user': expected blocks of at most 4 dims, got 5"),
    ],
)
def test_a_table_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tables([text])


def test_tables_are_told_apart_by_name() -> None:
    before, after = parse_tables(["user=10x4:5x2", "item=20x4"])
    assert [t.name for t in before] == ["user", "item"]
    assert [t.name for t in after] == ["user/b0", "item"]
    with pytest.raises(ValueError, match="table 'user': expected every name once, got it 2 times"):
        parse_tables(["user=10x4", "user=20x4"])
    with pytest.raises(ValueError, match="table 'user/b0': expected every name once, got it 2 times"):
        parse_tables(["user=10x4:5x2", "user/b0=10x4"])


def test_a_scheme_gives_its_tables_before_and_a_table_per_stored_block_after() -> None:
    (before,), after = tables_of_scheme(make_scheme())
    assert (before.num_embeddings, before.embedding_dim, before.num_features, before.is_weighted) == (1000, 8, 2, True)
    assert [(t.num_embeddings, t.embedding_dim) for t in after] == [(100, 8), (300, 3)]
    assert all(t.num_features == 2 and t.is_weighted for t in after)
    assert sum(t.pooling_factor for t in after) == before.pooling_factor  # as many lookups as before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 0}, "world_size: expected 1..8, or whole hosts of 8 ranks, got 0"),
        ({"world_size": 12}, "world_size: expected 1..8, or whole hosts of 8 ranks, got 12"),
        ({"hbm_bytes": 0}, "hbm: expected more than 0 bytes on 'cuda', got 0; tell the memory per rank"),
        (
            {"hbm_bytes": 1},
            "hbm: expected a byte and more beside the 15% that are kept free, got 1; tell the memory per",
        ),
        ({"compute": "cpu"}, "ddr: expected more than 0 bytes on 'cpu', got 0; tell the memory per rank"),
        ({"compute": "cdua"}, "did you mean 'cuda'"),
        ({"optimizer": "adm"}, "did you mean 'adam'"),
        ({"ddr_bytes": -1}, "ddr: expected at least 0 bytes, got -1"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"local_world_size": 0}, "local_world_size: expected at least 1, got 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**{"world_size": 8, "hbm_bytes": GB} | settings)


def test_ten_billion_rows_take_no_memory() -> None:
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    tables = parse_tables(["user=10000000000x128:1000000000x64,9000000000x8"])
    comparison = compare_plans(*tables, Cluster(world_size=128, hbm_bytes=80 * GB))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 - before_mb < 256
    before, after = comparison.before, comparison.after
    assert before.parameters == 10**10 * 128
    assert before.training_bytes == 10**10 * (4 * 128 + 4)
    # 68 GB of a device are for tables: 75.9 devices of which hosts have 8; 8.8 devices after pruning.
    assert (before.smallest_world_size, after.smallest_world_size) == (80, 16)
    assert before.placement is not None
    assert after.placement is not None
    assert len(before.placement.hbm_bytes) == 128
    assert sum(before.placement.hbm_bytes) == pytest.approx(before.training_bytes, rel=0.01)
    assert before.placement.fullest_rank_bytes <= 0.85 * 80 * GB
    assert 0 < after.placement.step_ms < before.placement.step_ms


@pytest.mark.parametrize(("optimizer", "values_per_row"), [("none", 16), ("rowwise_adagrad", 17), ("adam", 48)])
def test_the_planner_counts_the_optimizer_as_we_do(optimizer: str, values_per_row: int) -> None:
    one = table("t", 10**7, 16)
    assert one.training_bytes(optimizer) == 4 * 10**7 * values_per_row
    placement = place([one], Cluster(world_size=1, hbm_bytes=80 * GB, optimizer=optimizer), thorough=True)
    assert placement is not None
    assert placement.hbm_bytes[0] == pytest.approx(one.training_bytes(optimizer), rel=1e-3)


def test_the_fewest_devices_are_the_first_that_fit() -> None:
    tables = [table(f"t{i}", 10**6, 64) for i in range(5)]  # 260 MB each
    plan = compare_plans(tables, tables, Cluster(world_size=8, hbm_bytes=400 * 10**6, batch_size=64)).before
    assert plan.smallest_world_size == 4  # 1.3 GB in parts of 340 MB
    cluster = Cluster(world_size=3, hbm_bytes=400 * 10**6, batch_size=64)
    assert place(tables, cluster, thorough=True) is None
    assert place(tables, cluster.resized(4), thorough=False) is not None


@pytest.mark.parametrize("most", [64, 72])
def test_the_search_for_the_fewest_devices_misses_none(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [*range(1, 8), *range(8, most + 1, 8)]
    monkeypatch.setattr(plans, "MAX_WORLD_SIZE", most)
    for first_that_fits in range(1, most + 2):

        def place_from(_: object, cluster: Cluster, *, thorough: bool, first: int = first_that_fits) -> str | None:
            return "a plan" if cluster.world_size >= first else None

        monkeypatch.setattr(plans, "place", place_from)
        found = plans._smallest_world_size([table("t", 10, 4)], Cluster(world_size=8, hbm_bytes=GB))
        assert found == next((size for size in sizes if size >= first_that_fits), None)


def test_buffers_of_a_batch_count_too() -> None:
    # The tables alone fill two devices to the brim: 2 x 85 MB.
    tables = [table("t", 2 * 85 * 10**6 // 68, 16)]
    cluster = Cluster(world_size=2, hbm_bytes=100 * 10**6)
    assert tables[0].training_bytes("rowwise_adagrad") == 2 * cluster.table_bytes_per_rank
    plan = compare_plans(tables, [table("s", 10, 16)], cluster).before
    assert plan.placement is None
    assert plan.smallest_world_size == 3


def test_host_memory_holds_what_gpu_memory_does_not() -> None:
    tables = [table("t", 10**7, 64)]  # 2.6 GB
    assert place(tables, Cluster(world_size=1, hbm_bytes=GB), thorough=True) is None
    placement = place(tables, Cluster(world_size=1, hbm_bytes=GB, ddr_bytes=8 * GB), thorough=True)
    assert placement is not None
    assert placement.ddr_bytes[0] > 2.5 * GB
    assert placement.hbm_bytes[0] < GB


def test_a_cpu_cluster_is_planned_by_its_host_memory() -> None:
    placement = place([table("t", 10**6, 6)], Cluster(world_size=2, compute="cpu", ddr_bytes=GB), thorough=True)
    assert placement is not None
    assert placement.hbm_bytes == (0, 0)
    assert sum(placement.ddr_bytes) >= 4 * 7 * 10**6


def test_dims_are_padded_for_gpus_only() -> None:
    tables = [table("t", 1000, 5)]
    on_gpu = compare_plans(tables, tables, Cluster(world_size=1, hbm_bytes=GB)).after
    on_cpu = compare_plans(tables, tables, Cluster(world_size=1, compute="cpu", ddr_bytes=GB)).after
    assert (on_gpu.training_bytes, on_cpu.training_bytes) == (4 * 1000 * 9, 4 * 1000 * 6)
    assert on_gpu.parameters == on_cpu.parameters == 5000


def test_what_fits_only_after_pruning_is_told_and_what_never_fits_is_refused() -> None:
    before, after = parse_tables(["t=10000000x64:10000000x4"])  # 2.6 GB and 200 MB
    console = Console(width=200, record=True)
    console.print(plan_table(compare_plans(before, after, Cluster(world_size=1, hbm_bytes=GB))))
    lines = console.export_text().splitlines()
    assert "does not fit" in lines[1]
    assert "does not fit" not in lines[2]
    assert "not measurements" in " ".join(lines[3:])
    message = (
        "world_size: expected room for 200.0 MB of pruned tables and optimizer state and for a batch's buffers, got 1 "
        r"times 85.0 MB \(15% of a device is kept free\); they take 3 devices of this size"
    )
    with pytest.raises(ValueError, match=message):
        compare_plans(before, after, Cluster(world_size=1, hbm_bytes=10**8))


def test_tables_that_no_number_of_devices_holds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dnis_torchrec.jobs.planning.plans.MAX_WORLD_SIZE", 16)
    tables = [table("t", 10**9, 64)]
    with pytest.raises(ValueError, match="they take more than 16 devices, or devices with more of this size"):
        compare_plans(tables, tables, Cluster(world_size=8, hbm_bytes=GB))


def test_nothing_left_takes_nothing() -> None:
    plan = compare_plans([table("t", 10, 4)], [], Cluster(world_size=2, hbm_bytes=GB)).after
    assert (plan.num_tables, plan.training_bytes, plan.smallest_world_size) == (0, 0, 1)
    assert plan.placement is not None
    assert plan.placement.hbm_bytes == (0, 0)


def test_the_json_holds_every_rank_and_says_what_the_numbers_are() -> None:
    tables = [table("t", 1000, 8)]
    described = compare_plans(tables, tables, Cluster(world_size=4, hbm_bytes=GB)).to_json()
    assert json.loads(json.dumps(described))["after"]["placement"]["step_ms"] > 0
    assert len(described["before"]["placement"]["hbm_bytes"]) == 4
    assert described["cluster"]["world_size"] == 4
    assert "nothing was measured" in described["estimates"]


def test_the_planner_keeps_quiet_and_others_are_heard_again(caplog: pytest.LogCaptureFixture) -> None:
    tables = [table("t", 1000, 8)]
    level = logging.getLogger("torchrec").level
    compare_plans(tables, tables, Cluster(world_size=1, hbm_bytes=GB))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert logging.getLogger("torchrec").level == level


def dnis_plan(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["dnis", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_the_command_plans_an_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scheme = make_scheme()
    weight = torch.zeros(1000, 8)
    write_artifact({"user": weight}, scheme, tmp_path / "artifact")
    json_file = tmp_path / "plan.json"
    arguments = ("--world-size", 64, "--hbm", "80GB", "--json", json_file)
    assert dnis_plan(monkeypatch, tmp_path / "artifact", *arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[1].split()[:3] == ["before", "1", "8,000"]
    assert out.splitlines()[2].split()[:3] == ["after", "2", "1,700"]
    planned = json.loads(json_file.read_text())
    assert planned["after"]["parameters"] == 1700
    assert planned["cluster"]["hbm_bytes"] == 80 * GB
    assert [path.name for path in tmp_path.glob("plan*")] == ["plan.json"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "plan: expected either ARTIFACT or --table"),
        (("a", "--table", "t=10x4"), 2, "plan: expected either ARTIFACT or --table"),
        (("no/such",), 2, "expected a folder, got none"),
        (("--table", "t=10y4"), 2, "expected NAME=ROWSxDIM"),
        (("--table", "t=10x4", "--hbm", "80"), 2, "--hbm: expected a number and a unit"),
        (("--table", "t=10x4", "--ddr", "GB"), 2, "--ddr: expected a number and a unit"),
        (("--table", "t=10x4", "--world-size", 9), 2, "world_size: expected 1..8, or whole hosts of 8 ranks, got 9"),
        (("--table", "t=10x4", "--json", "no/such/file"), 2, "expected an existing folder, got no/such"),
        (("--table", "t=1000000x64", "--world-size", 1, "--hbm", "100MB"), 1, "they take 4 devices of this size"),
    ],
)
def test_what_the_command_refuses(
    arguments: tuple[object, ...],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dnis_plan(monkeypatch, *arguments) == code
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
