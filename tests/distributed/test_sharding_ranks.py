"""Every sharding type, on two and four ranks: the same search as without any, pipelined, and refusals without hanging.

Four ranks are two hosts of two. The same on GPUs, where there are some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.distributed.harness import RankResults, Results, running_ranks
from tests.distributed.model import DIMS, FROZEN, KINDS, MORE_KINDS, ROWS, task
from tests.distributed.scenarios import tables_of
from tests.distributed.sharding_scenarios import COMMUNICATION, FEW_DIM, FEW_ROWS, STEPS, scenarios, search_unsharded

ALL_KINDS = KINDS | MORE_KINDS
GPUS = next(ranks for ranks in (4, 2, 1, 0) if ranks <= torch.cuda.device_count())
KINDS_OF = {
    "gloo-2": list(ALL_KINDS),
    "gloo-4": [
        "mixed",
        "grid_shard",
        "mixed hosts",
        "dense",
        "few rows table_wise",
        "cached",
        "frozen mixed",
    ],  # each sharding type is in one
    "nccl": list(ALL_KINDS),
}
RANKS_OF = {"gloo-2": 2, "gloo-4": 4, "nccl": GPUS}


def on(name: str, *values: str) -> object:
    """A test's parameters, the first of which names the world."""
    return pytest.param(name, *values, id="-".join((name, *values)), marks=pytest.mark.gpu if name == "nccl" else ())


in_every_world = pytest.mark.parametrize("name", [on(name) for name in RANKS_OF])
with_every_kind = pytest.mark.parametrize(
    ("name", "kind"), [on(name, kind) for name, kinds in KINDS_OF.items() for kind in kinds]
)
TOLERANCE = 1e-5
UNSHARDED = ("all tables", "few rows", "frozen")
"""What is searched without ranks, too: by which words the kinds of the others begin."""


class World:
    """Some ranks at work, and the same search without them."""

    def __init__(self, ranks: RankResults, world_size: int) -> None:
        self.ranks = ranks
        self.world_size = world_size
        self.unsharded = {kind: search_unsharded(tuple(range(world_size)), kind) for kind in UNSHARDED}

    def __getitem__(self, scenario: str) -> list[Results]:
        return self.ranks[scenario]

    def expected(self, kind: str) -> Results:
        return self.unsharded[next((name for name in UNSHARDED if kind.startswith(name)), "all tables")]


class Worlds:
    """All of them, each started when a test first asks for it."""

    def __init__(self, make_folder: Callable[[str], Path], running: ExitStack) -> None:
        self._make_folder = make_folder
        self._running = running
        self._started: dict[str, World] = {}

    def __getitem__(self, name: str) -> World:
        if name not in self._started:
            world_size = RANKS_OF[name]
            ranks = running_ranks(
                world_size,
                scenarios(KINDS_OF[name]),
                self._make_folder(name),
                backend=name.split("-")[0],
                local_world_size=min(2, world_size),
            )
            self._started[name] = World(self._running.enter_context(ranks), world_size)
        return self._started[name]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """The worlds, for all tests."""
    with ExitStack() as running:
        yield Worlds(tmp_path_factory.mktemp, running)


def whole(parts: list[Results], expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tables put together from the shards of all ranks: every value is held once, or is the same on all of them."""
    tables = {place: torch.full_like(table, float("nan")) for place, table in expected.items()}
    for part in parts:
        for place, weight in part["tables"].items():
            table_name, row, column = place.split("/")
            table = tables[f"{table_name}/0/0"]
            target = table[int(row) : int(row) + weight.shape[0], int(column) : int(column) + weight.shape[1]]
            is_replica = weight.shape == table.shape and not target.isnan().any()
            assert target.isnan().all() or (is_replica and torch.equal(target, weight)), place
            target.copy_(weight)
    return tables


@with_every_kind
def test_a_sharded_search_equals_the_unsharded_one(worlds: Worlds, name: str, kind: str) -> None:
    world = worlds[name]
    results, expected = world[f"search {kind}"], world.expected(kind)
    losses = torch.stack([own["losses"] for own in results]).mean(0)
    torch.testing.assert_close(losses, expected["losses"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(results[0]["alpha"], expected["alpha"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(whole(results, expected["tables"]), expected["tables"], atol=TOLERANCE, rtol=0)
    dense = list(expected["dense"].values())
    torch.testing.assert_close(list(results[0]["dense"].values()), dense, atol=TOLERANCE, rtol=0)
    assert results[0]["levels"].count("upper") == (STEPS - 2) // 2
    assert all(bool((alpha < 1).any()) for alpha in expected["alpha"].values())


@pytest.mark.parametrize(
    ("name", "kind"),
    [on(name, kind) for name, kinds in KINDS_OF.items() for kind in kinds if kind.startswith("frozen")],
)
def test_frozen_tables_keep_their_bits(worlds: Worlds, name: str, kind: str) -> None:
    world = worlds[name]
    before, after = tables_of(task(frozen=True)), whole(world[f"search {kind}"], world.expected(kind)["tables"])
    moved = {place.split("/")[0] for place, table in after.items() if not torch.equal(table, before[place])}
    assert moved == set(ROWS) - set(FROZEN)


@with_every_kind
def test_alpha_is_the_same_on_all_ranks_bit_by_bit(worlds: Worlds, name: str, kind: str) -> None:
    world = worlds[name]
    first, *others = world[f"search {kind}"]
    for own in others:
        for key in ("alpha", "dense"):
            assert own[key].keys() == first[key].keys()
            assert [name for name, value in own[key].items() if not torch.equal(value, first[key][name])] == []


@with_every_kind
def test_shards_lie_where_the_sharding_type_puts_them(worlds: Worlds, name: str, kind: str) -> None:
    world = worlds[name]
    """Else much of the above would pass without having been tried."""
    results = world[f"search {kind}"]
    hosts = [range(first, first + 2) for first in range(0, world.world_size, 2)]
    for table, value in ALL_KINDS[kind].items():
        shape = (FEW_ROWS, FEW_DIM) if kind.startswith("few rows") else (ROWS[table], DIMS[table])
        held = [[w for place, w in own["tables"].items() if place.startswith(f"{table}/")] for own in results]
        ranks = [rank for rank, own in enumerate(held) if own]
        parts = [part for own in held for part in own]
        match value.split()[0]:
            case "data_parallel":
                assert all(part.shape == shape for part in parts)
                assert len(parts) == world.world_size
            case "table_wise":
                assert [tuple(part.shape) for part in parts] == [shape]
            case "column_wise" | "table_column_wise":
                assert all(part.shape == (shape[0], 4) for part in parts)
            case "row_wise":
                assert len(ranks) == world.world_size
                assert all(part.shape[1] == shape[1] for part in parts)
            case "table_row_wise":
                assert ranks in [list(host) for host in hosts if host[-1] < world.world_size] or world.world_size == 1
                assert all(part.shape[1] == shape[1] for part in parts)
            case "grid_shard":
                assert all(part.shape[1] == 4 for part in parts)
                assert world.world_size == 1 or all(part.shape[0] < shape[0] for part in parts)


@with_every_kind
def test_every_collection_is_pipelined(worlds: Worlds, name: str, kind: str) -> None:
    world = worlds[name]
    collections = {"collection"} if kind.startswith("few rows") else {"first", "second"}
    for own in world[f"search {kind}"]:
        assert own["not_pipelined"] == []
        assert {fqn.split(".")[1] for fqn in own["pipelined"]} == collections


@with_every_kind
def test_no_cached_row_stays_locked(worlds: Worlds, name: str, kind: str) -> None:
    found = worlds[name][f"search {kind}"]
    assert sum(own["num_caches"] for own in found) >= (1 if kind == "cached" else 0)
    assert [own["num_locked"] for own in found] == [0] * len(found)


@in_every_world
def test_input_dist_of_the_next_batch_starts_before_the_current_backward(worlds: Worlds, name: str) -> None:
    world = worlds[name]
    for own in world["trace"]:
        events, levels = [tuple(event) for event in own["events"]], own["levels"]
        assert own["num_collections"] == 2
        pairs = set()
        for step, (level, next_level) in enumerate(pairwise(levels)):
            backward = events.index(("backward", step))
            started = [event for event in events[:backward] if event == ("input_dist", step + 1)]
            assert len(started) == own["num_collections"], (step, level)
            pairs.add((level, next_level))
        assert pairs == {("lower", "lower"), ("lower", "upper"), ("upper", "lower")}


@in_every_world
@pytest.mark.parametrize("communication", list(COMMUNICATION))
def test_quantised_communication_works(worlds: Worlds, name: str, communication: str) -> None:
    world = worlds[name]
    results, exact = world[communication], world["search mixed"]
    for own, other in zip(results, exact, strict=True):
        assert all(torch.equal(value, results[0]["alpha"][dim]) for dim, value in own["alpha"].items())
        assert own["not_pipelined"] == []
        assert world.world_size == 1 or not torch.equal(own["losses"], other["losses"])  # it was in use
    losses = torch.stack([own["losses"] for own in results]).mean(0)
    torch.testing.assert_close(losses, world.expected("mixed")["losses"], atol=5e-3, rtol=0)


@in_every_world
def test_sharding_keeps_the_weights_and_makes_replicas_equal(worlds: Worlds, name: str) -> None:
    world = worlds[name]
    results = world["weights"]
    first = results[0]["data_parallel"]["before"]
    for own in results:
        after = own["data_parallel"]["after"]
        assert after.keys() == first.keys()
        assert all(torch.equal(value, after[place]) for place, value in first.items())
        for place, weight in own["row_wise"]["after"].items():
            table, row, _ = place.split("/")
            assert torch.equal(weight, own["row_wise"]["before"][f"{table}/0/0"][int(row) :][: len(weight)])
        assert own["meta"]["is_real"]
    assert world.world_size == 1 or any(
        not torch.equal(value, results[1]["data_parallel"]["before"][place]) for place, value in first.items()
    )


REFUSALS = {
    "type": "table 'user': expected a sharding type that the sharder offers on ",
    "kernel": "table 'user': expected a compute kernel for ",
    "table": "table 'users': expected a known table, got 'users'; did you mean 'user'?",
    "too large": "sharding plan: expected constraints that can be met on ",
    "more ranks": "sharding plan, table 'user': expected ranks below the world size ",
    "left out": "sharding plan, table 'genre': expected an entry under FQN 'second', got none",
    "other model": "sharding plan, FQN ",
}
OF_THE_PLANNER = {"type", "kernel", "table", "too large", "few rows"}
OF_SEVERAL_RANKS = {
    "few rows": "table 'tag': expected a row on every rank of row_wise, got 3 rows; shard it table_wise",
    "fewer ranks": "sharding plan, table 'tag': expected a shard on each of ",
    "no host": "sharding plan, table 'tag': expected shards on all 2 ranks of a host (LOCAL_WORLD_SIZE), got ",
    "differing": "sharding plan: expected the same on every rank, got another on ranks [1",
}


@in_every_world
@pytest.mark.parametrize("plan", [*REFUSALS, *OF_SEVERAL_RANKS])
def test_all_ranks_refuse_a_bad_plan_in_the_same_words(worlds: Worlds, name: str, plan: str) -> None:
    world = worlds[name]
    found = [own[plan] for own in world["refusals"]]
    if plan in OF_SEVERAL_RANKS and world.world_size == 1:
        pytest.skip("needs several ranks")
    if (plan, name) in (("few rows", "gloo-2"), ("few rows", "nccl")):
        assert set(found) == {"none"}  # enough rows, or kernels that need none
        return
    first = found[0]
    assert first.startswith((REFUSALS | OF_SEVERAL_RANKS)[plan])
    assert set(found[1:]) <= ({f"rank 0: {first}"} if plan in OF_THE_PLANNER else {first})


@in_every_world
def test_what_is_wrong_on_one_rank_is_said_on_all(worlds: Worlds, name: str) -> None:
    world = worlds[name]
    first, *others = [own["rank zero"] for own in world["refusals"]]
    assert first.startswith("table 'user': expected a sharding type")
    assert others == [f"rank 0: {first}"] * len(others)
    first, *others = [own["one rank"] for own in world["refusals"]]
    assert set(others) <= {REFUSALS["left out"] + "; make the plan for the prepared model"}
    assert first == (f"rank 1: {others[0]}" if others else "none")
