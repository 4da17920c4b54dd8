"""W ranks equal one: selection and searches under every sharding type, and inputs and tables of every kind.

All things of two ranks run in one launch, and all of four, which are two hosts of two, in another; on GPUs the
searches run once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.distributed import selection_scenarios as of
from tests.distributed.harness import Part, Results, joined, running_ranks
from tests.distributed.model import (
    DIMS,
    FROZEN,
    KINDS,
    MORE_KINDS,
    MULTI_HOT,
    NUM_BLOCKS,
    ROWS,
    Stream,
    assert_near,
    assert_outcome,
    assert_same,
    blocks,
    tables_of,
    task,
    whole,
)
from tests.distributed.selection_scenarios import STEPS, scenarios, search_unsharded
from tests.models import Net
from tests.selection.shard_cases import ANY_SIZE, PER_RANK, SHARDINGS
from tests.selection.shard_cases import scenarios as of_selection

ALL_KINDS = KINDS | MORE_KINDS
GPUS = next(ranks for ranks in (4, 2, 1, 0) if ranks <= torch.cuda.device_count())
RANKS_OF = {"gloo-2": 2, "gloo-4": 4, "nccl": GPUS}
OF_FOUR = ("mixed hosts",)
"""All types that spread a table over a host; two ranks are one host."""
OF_HOSTS = ("table_row_wise", "table_column_wise", "mixed hosts", "frozen dense")
"""What two ranks do no otherwise than others: four ranks have the types."""
KINDS_OF = {
    "gloo-2": tuple(kind for kind in ALL_KINDS if kind not in OF_HOSTS),
    "gloo-4": OF_FOUR,
    "nccl": tuple(ALL_KINDS),
}
UNSHARDED = ("all tables", "frozen")
"""What is searched without ranks, too: by which words the kinds of the others begin."""


class World:
    """Some ranks at work, and the same search without them."""

    def __init__(self, parts: Callable[[str], Part], world_size: int) -> None:
        self.part = parts
        self.searches = parts("search")
        self.world_size = world_size
        self._alone = {kind: search_unsharded(tuple(range(world_size)), kind) for kind in UNSHARDED}

    def expected(self, kind: str) -> Results:
        return self._alone[next((name for name in UNSHARDED if kind.startswith(name)), "all tables")]


class Worlds:
    """All of them, each started when a test first asks for it."""

    def __init__(self, make_folder: Callable[[str], Path], running: ExitStack) -> None:
        self._make_folder, self._running = make_folder, running
        self._worlds: dict[str, World] = {}

    def __getitem__(self, name: str) -> World:
        if name not in self._worlds:
            things = {"search": scenarios(KINDS_OF[name]) | (of.OF_ONE_HOST if name != "gloo-4" else {})}
            if name == "gloo-2":
                things |= {"select": of_selection()} | of.INPUTS
            size, folder = RANKS_OF[name], self._make_folder(name)
            backend, hosts = name.split("-")[0], min(2, size)
            ranks = running_ranks(size, joined(**things), folder, backend=backend, local_world_size=hosts)
            self._worlds[name] = World(self._running.enter_context(ranks).part, size)
        return self._worlds[name]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """The worlds, for all tests."""
    with ExitStack() as running:
        yield Worlds(tmp_path_factory.mktemp, running)


@pytest.fixture
def two(worlds: Worlds) -> Callable[[str], Part]:
    """Thing -> what two ranks reported."""
    return worlds["gloo-2"].part


def on(name: str, *values: str) -> object:
    """A test's parameters, the first of which names the world."""
    return pytest.param(name, *values, id="-".join((name, *values)), marks=pytest.mark.gpu if name == "nccl" else ())


on_one_host = pytest.mark.parametrize("name", [on("gloo-2"), on("nccl")])
with_every_kind = pytest.mark.parametrize(
    ("name", "kind"), [on(name, kind) for name, kinds in KINDS_OF.items() for kind in kinds]
)
of_two = pytest.mark.parametrize("kind", list(KINDS))


@with_every_kind
def test_a_search_equals_the_unsharded_one(worlds: Worlds, name: str, kind: str) -> None:
    results, expected = worlds[name].searches[kind], worlds[name].expected(kind)
    torch.testing.assert_close(
        torch.stack([own["losses"] for own in results]).mean(0), expected["losses"], atol=1e-5, rtol=0
    )
    for part in ("alpha", "dense"):
        values = [list(own[part].values()) for own in (results[0], expected)]
        torch.testing.assert_close(*values, atol=1e-5, rtol=0)
        for own in results:
            assert_same(own[part], results[0][part])
    tables, alone = whole([own["tables"] for own in results]), whole([expected["tables"]])
    torch.testing.assert_close(tables, alone, atol=1e-5, rtol=0)
    assert len(results[0]["hits"]) == (STEPS - 2) // 2
    assert all(bool((alpha < 1).any()) for alpha in expected["alpha"].values())
    if kind.startswith("frozen"):
        before = whole([tables_of(task(frozen=True))])
        assert {table for table in ROWS if not tables[table].equal(before[table])} == set(ROWS) - set(FROZEN)


@with_every_kind
def test_shards_lie_where_the_sharding_type_puts_them(worlds: Worlds, name: str, kind: str) -> None:
    """Else much of the above would pass without having been tried."""
    results, size = worlds[name].searches[kind], worlds[name].world_size
    hosts = [[first, first + 1] for first in range(0, size - 1, 2)]
    for table, value in ALL_KINDS[kind].items():
        shape = (ROWS[table], DIMS[table])
        held = [[w.shape for place, w in own["tables"].items() if place.startswith(f"{table}/")] for own in results]
        ranks, parts = [rank for rank, own in enumerate(held) if own], [part for own in held for part in own]
        match value.split()[0]:
            case "data_parallel":
                assert parts == [shape] * size
            case "table_wise":
                assert parts == [shape]
            case "column_wise" | "table_column_wise":
                assert set(parts) == {(shape[0], 4)}
            case "row_wise":
                assert len(ranks) == size
            case "table_row_wise":
                assert ranks in hosts or size == 1
            case "grid_shard":
                assert all(part[1] == 4 and (size == 1 or part[0] < shape[0]) for part in parts)


def hit_rows(halves: tuple[int, ...], upper_step: int) -> dict[str, torch.Tensor]:
    """Which rows of alpha the ids of a validation batch belong to, id by id."""
    all_blocks = blocks()
    features = Stream("validation", 3, halves).batches[upper_step % 3].sparse_features
    hits = {str(dim): torch.zeros(shape[0], dtype=torch.bool) for dim, shape in all_blocks.alpha_shapes.items()}
    for name, dim in DIMS.items():
        block_of_row = all_blocks.routings[name].all_blocks().tolist()
        for row in features[f"{name}_id"].values().tolist():
            hits[str(dim)][all_blocks.first_alpha_row(name) + block_of_row[row]] = True
    return hits


@of_two
def test_hits_are_the_union_over_ranks(worlds: Worlds, kind: str) -> None:
    results = worlds["gloo-2"].searches[kind]
    for own in results:
        for step, hits in enumerate(own["hits"]):
            assert_same(hits, hit_rows((0, 1), step))
            of_one = hit_rows((1,), step)
            assert not any(torch.equal(rows, of_one[dim]) for dim, rows in hits.items())  # rank 1 misses some
    users = results[0]["alpha"]["8"][blocks().first_alpha_row("user") :][:NUM_BLOCKS]
    assert bool((users[1] < 1).any())  # only the first rank hit it
    assert bool((users[2] == 1).all())  # neither did


@of_two
def test_alpha_is_folded_and_merged(worlds: Worlds, kind: str) -> None:
    all_blocks = blocks()
    for own in worlds["gloo-2"].searches[kind]:
        for place, folded in own["folded"].items():
            name, row, column = place.split("/")
            rows = torch.arange(int(row), int(row) + folded.shape[0])
            alpha = own["alpha"][str(DIMS[name])][
                all_blocks.first_alpha_row(name) + all_blocks.routings[name].all_blocks()[rows]
            ]
            columns = alpha[:, int(column) : int(column) + folded.shape[1]]
            assert torch.equal(folded, own["tables"][place] * columns), place
        assert all(bool((alpha == 1).all()) for alpha in own["folded alpha"].values())
        assert_near(own["after"], own["before"], 1e-6)
        assert_near(own["merged"], own["halved"], 1e-6)
        assert not torch.allclose(own["halved"], own["after"])


@on_one_host
def test_quantised_communication_works(worlds: Worlds, name: str) -> None:
    world = worlds[name]
    results, exact = world.searches["fp16"], world.searches["mixed"]
    for own, other in zip(results, exact, strict=True):
        assert_same(own["alpha"], results[0]["alpha"])
        assert world.world_size == 1 or not torch.equal(own["losses"], other["losses"])  # it was in use
    losses = torch.stack([own["losses"] for own in results]).mean(0)
    torch.testing.assert_close(losses, world.expected("mixed")["losses"], atol=5e-3, rtol=0)


@on_one_host
def test_sharding_keeps_the_weights_and_makes_replicas_equal(worlds: Worlds, name: str) -> None:
    results = worlds[name].searches["weights"]
    first = results[0]["data_parallel"]["before"]
    for own in results:
        assert_same(own["data_parallel"]["after"], first)
        for place, weight in own["row_wise"]["after"].items():
            table, row, _ = place.split("/")
            assert torch.equal(weight, own["row_wise"]["before"][f"{table}/0/0"][int(row) :][: len(weight)])
        assert own["meta"]["is_real"]
    assert len(results) == 1 or not torch.equal(*(own["data_parallel"]["before"]["user/0/0"] for own in results[:2]))


PLANS = {
    "type": ("table 'user'", 0),
    "kernel": ("table 'user'", 0),
    "table": ("table 'users'", 0),
    "too large": ("sharding plan", 0),
    "type on rank 0": ("table 'user'", 0),
    "more ranks": ("table 'user'", None),
    "left out": ("table 'genre'", None),
    "other model": ("sharding plan", None),
    "few rows": ("table 'tag'", 0),
    "fewer ranks": ("table 'tag'", None),
    "no host": ("table 'tag'", None),
    "another on rank 1": ("on ranks [1", None),
    "left out on rank 1": ("table 'genre'", 1),
}
"""Plan -> the place that all ranks name, and the rank that is named where one alone plans or is wrong."""


@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_refuse_a_bad_plan(two, plan: str) -> None:
    place, rank = PLANS[plan]
    assert_outcome([own[plan] for own in two("search")["plans"]], "ValueError", place, rank)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", SHARDINGS)
def test_select_computes_what_the_unsharded_collection_does(two, kind: str, weighted: bool) -> None:
    for own in two("select")[f"{kind} {weighted}"]:
        assert own["keys"]
        assert own["state"]
        assert own["columns"] == 8 + 8 + 8 + 12
        assert max(own["value_error"], own["alpha_error"], own["table_error"]) < 1e-6
        assert own["hit_errors"] == 0


@pytest.mark.parametrize("kind", SHARDINGS)
def test_a_batch_of_no_samples(two, kind: str) -> None:
    for own in two("select")[f"{kind}, no samples"]:
        assert own["keys"]
        assert own["shape"] == [0, 36]
        assert own["table_change"] == own["gradient"] == own["alpha_gradient"] == own["hits"] == 0


@pytest.mark.parametrize("empty_rank", [0, 1])
@pytest.mark.parametrize("kind", ANY_SIZE)
def test_a_rank_may_have_no_samples(two, kind: str, empty_rank: int) -> None:
    for rank, own in enumerate(two("select")[f"{kind}, no samples on rank {empty_rank}"]):
        assert own["shape"] == [0 if rank == empty_rank else PER_RANK, 36]
        assert max(own["value_error"], own["alpha_error"], own["table_error"]) < 1e-5
        assert own["hit_errors"] == 0


@pytest.mark.parametrize("scenario", of.SEQUENCES)
def test_sequences_learn_as_unsharded(two, scenario: str) -> None:
    for own in two("sequences")[scenario]:
        assert max(own["error"], own["folded"]) < 1e-5


@pytest.mark.parametrize(("model_of", "kind"), of.MANAGED_AS)
def test_managed_collisions_are_searched_as_on_one_process(two, alone: dict[str, Results], model_of: str, kind: str):
    results, expected = two("managed")[f"{model_of} {kind}"], alone[model_of]
    assert_near(torch.stack([own["losses"] for own in results]).mean(0), expected["losses"])
    assert_near(whole([own["tables"] for own in results]), whole([expected["tables"]]))
    for own in results:
        assert own["moved"] == []
        assert_near(own["alpha"], expected["alpha"])
        assert_near(own["merged"], own["before"])


@pytest.fixture(scope="module")
def alone() -> dict[str, Results]:
    """What one process comes to with managed collisions."""
    return {model_of: of.managed_alone(model_of) for model_of in of.MANAGED}


@pytest.mark.parametrize("kind", of.PLACES_AS)
@pytest.mark.parametrize("how", ["searched", "plain"])
def test_places_learn_as_in_torchrecs_own_module(two, kind: str, how: str) -> None:
    start = {f"model.{name}": weight for name, weight in of.places_of(Net()).items()}
    first, second = two("places")[kind]
    assert_same(first[how]["places"], second[how]["places"])
    for own in (first, second):
        assert own[how]["losses"] == pytest.approx(own["torchrec"]["losses"], abs=1e-5)
        assert_same(own["merged"], own["searched"]["places"])
        assert own["merged"].keys() == start.keys()
        assert_near(own[how]["places"], own["torchrec"]["places"])
        assert not any(torch.allclose(weight, start[name], atol=1e-3) for name, weight in own[how]["places"].items())


@pytest.mark.parametrize("kind", of.NARROW_AS)
def test_narrow_tables_learn_as_on_one_process(two, kind: str) -> None:
    results, expected = two("narrow")[kind], of.narrow_steps(None)
    assert_near(torch.stack([own["losses"] for own in results]).mean(0), expected["losses"])
    assert_near(whole([own["tables"] for own in results]), whole([expected["tables"]]))
    if kind in of.SHARDED_AS:  # only what fused kernels do not take is dense
        wide = "dense" if kind == "data_parallel" else "fused"
        for own in results:
            assert own["kernels"] == dict.fromkeys(of.NARROW, "dense") | {"wide": wide}


def test_the_model_has_both_kinds_of_features_in_every_collection() -> None:
    """Else much of the above would pass without having been tried."""
    features = Stream("train", 1, (0, 1)).batches[0].sparse_features
    longest = {name: int(features[f"{name}_id"].lengths().max()) for name in ROWS}
    assert {name for name, length in longest.items() if length > 1} == set(MULTI_HOT)
    assert {name for name in ROWS if int(features[f"{name}_id"].lengths().min()) == 0} == set(ROWS) - {"user"}
