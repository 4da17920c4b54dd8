"""Two processes, gloo on a CPU: ranks agree, equal one rank on the concatenated batches, and stop together.

One pair of processes runs all of scenarios.py and leaves its results in files; each test here judges one of them.
Meanwhile this process makes the same steps alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dnis_torchrec.blocks.routing import RowRouter
from tests.distributed.harness import RankResults, Results, running_ranks
from tests.distributed.model import DIMS, KINDS, MULTI_HOT, NUM_BLOCKS, ROWS, Stream, blocks
from tests.distributed.scenarios import (
    STEPS,
    STOPS,
    alpha_of,
    dense_of,
    evaluate_halves,
    losses,
    make_pipeline,
    run_steps,
    scenarios,
    tables_of,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    """Starts the scenarios, once for all tests."""
    with running_ranks(2, scenarios(), tmp_path_factory.mktemp("ranks")) as running:
        yield running


@pytest.fixture(scope="module")
def alone(gloo: dist.ProcessGroup, ranks: RankResults) -> Results:
    """The same steps on one rank; made while the others run."""
    pipeline, stream, model = make_pipeline("table_wise", gloo, (0, 1))
    found = run_steps(pipeline, stream, STEPS)
    tables = whole([{"tables": tables_of(model)}])
    return found | {"alpha": alpha_of(pipeline), "dense": dense_of(model), "tables": tables}


def whole(parts: list[Results], key: str = "tables") -> dict[str, torch.Tensor]:
    """Tables put together from the shards of all ranks; every value is held once, or is the same on all ranks."""
    tables = {name: torch.full((ROWS[name], DIMS[name]), float("nan")) for name in ROWS}
    for part in parts:
        for place, weight in part[key].items():
            name, row, column = place.split("/")
            rows = slice(int(row), int(row) + weight.shape[0])
            target = tables[name][rows, int(column) : int(column) + weight.shape[1]]
            is_replica = weight.shape == tables[name].shape and not target.isnan().any()
            assert target.isnan().all() or (is_replica and torch.equal(target, weight)), place
            target.copy_(weight)
    assert not [name for name, table in tables.items() if table.isnan().any()]
    return tables


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("kind", list(KINDS))
def test_both_ranks_hold_the_same_alpha(ranks: RankResults, kind: str) -> None:
    first, second = ranks[f"search {kind}"]
    assert_same(first["alpha"], second["alpha"])
    assert_same(first["dense"], second["dense"])
    assert first["levels"] == second["levels"]
    assert first["levels"].count("upper") == (STEPS - 2) // 2
    assert not torch.equal(first["losses"], second["losses"])  # they saw different batches
    assert all((alpha < 1).any() for alpha in first["alpha"].values())


def test_both_ranks_hold_the_same_alpha_after_a_ramp(ranks: RankResults) -> None:
    first, second = ranks["ramp"]
    assert_same(first["alpha"], second["alpha"])
    shares = [float((alpha == 0).float().mean()) for alpha in first["alpha"].values()]
    assert max(shares) > 0.2
    assert all(((alpha >= 0.01) | (alpha == 0)).all() and (alpha < 1).any() for alpha in first["alpha"].values())


def hit_rows(halves: tuple[int, ...], upper_step: int) -> dict[str, torch.Tensor]:
    """Which rows of alpha the ids of a validation batch belong to, id by id."""
    of = blocks()
    features = Stream("validation", 3, halves).batches[upper_step % 3].sparse_features
    hits = {str(dim): torch.zeros(shape[0], dtype=torch.bool) for dim, shape in of.alpha_shapes.items()}
    for name, dim in DIMS.items():
        router = RowRouter(of.routings[name])
        for row in features[f"{name}_id"].values():
            hits[str(dim)][of.first_alpha_row(name) + int(router(row.view(1)))] = True
    return hits


@pytest.mark.parametrize("kind", list(KINDS))
def test_hits_are_the_union_over_ranks(ranks: RankResults, kind: str) -> None:
    results = ranks[f"search {kind}"]
    for own in results:
        assert len(own["hits"]) == (STEPS - 2) // 2
        for upper_step, hits in enumerate(own["hits"]):
            assert_same(hits, hit_rows((0, 1), upper_step))
            assert not torch.equal(hits["16"], hit_rows((1,), upper_step)["16"])  # the second rank misses blocks
            assert not torch.equal(hits["8"], hit_rows((1,), upper_step)["8"])
    users = results[0]["alpha"]["8"][blocks().first_alpha_row("user") :][:NUM_BLOCKS]
    assert bool((users[1] < 1).any())  # only the first rank hit it
    assert bool((users[2] == 1).all())  # neither did


@pytest.mark.parametrize("kind", list(KINDS))
def test_two_ranks_equal_one_on_the_concatenated_batches(ranks: RankResults, alone: Results, kind: str) -> None:
    results = ranks[f"search {kind}"]
    mean_loss = torch.stack([own["losses"] for own in results]).mean(0)
    torch.testing.assert_close(mean_loss, alone["losses"], atol=1e-5, rtol=0)
    torch.testing.assert_close(results[0]["alpha"], alone["alpha"], atol=1e-5, rtol=0)
    torch.testing.assert_close(list(results[0]["dense"].values()), list(alone["dense"].values()), atol=1e-5, rtol=0)
    torch.testing.assert_close(whole(results), alone["tables"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_sharding_is_what_it_says(ranks: RankResults, kind: str) -> None:
    places = [set(own["tables"]) for own in ranks[f"search {kind}"]]
    for name, sharding_type in KINDS[kind].items():
        first, second = ({place for place in own if place.startswith(f"{name}/")} for own in places)
        if sharding_type == "data_parallel":
            assert first == second == {f"{name}/0/0"}
        else:
            assert not first & second
        if sharding_type == "row_wise":
            assert len(first) == len(second) == 1
        if sharding_type == "table_wise":
            assert len(first | second) == 1
        if sharding_type == "column_wise":
            assert len(first | second) == DIMS[name] // 4


@pytest.mark.parametrize("kind", list(KINDS))
def test_both_levels_are_pipelined(ranks: RankResults, kind: str) -> None:
    for own in ranks[f"search {kind}"]:
        assert [message for message in own["logs"] if "NOT be pipelined" in message] == []
        pipelined = {message.split("'")[1] for message in own["logs"] if "will be pipelined" in message}
        assert {name.split(".")[1] for name in pipelined} == {"first", "second"}


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_an_upper_step_moves_alpha_and_nothing_else(ranks: RankResults, optimizer: str) -> None:
    results = ranks[f"upper {optimizer}"]
    for own in results:
        levels = [step["level"] for step in own["steps"]]
        assert sorted(levels) == ["lower"] * 3 + ["upper"] * 3
        for step in own["steps"]:
            assert step["alpha_moved"] == (step["level"] == "upper")
            kinds = {name.split("/")[0] for name in step["changed"]}
            assert kinds == (set() if step["level"] == "upper" else {"table", "dense", "state"})
    assert_same(results[0]["dense"], results[1]["dense"])
    kind_of_tables = "fused" if optimizer == "rowwise_adagrad" else "dense"
    states = [name for own in results for name in own["names"] if name.startswith(f"state/{kind_of_tables}/")]
    assert all(any(table in name for name in states) for table in ("user", "genre"))


@pytest.mark.parametrize("kind", list(KINDS))
def test_fold_and_merge_touch_own_shards(ranks: RankResults, kind: str) -> None:
    results, of = ranks[f"search {kind}"], blocks()
    for rank, own in enumerate(results):
        assert_same(own[f"while_rank_{1 - rank}_folds"], own["tables" if rank else "folded"])
        for place, folded in own["folded"].items():
            name, row, column = place.split("/")
            ids = torch.arange(int(row), int(row) + folded.shape[0])
            alpha = own["alpha"][str(DIMS[name])][of.first_alpha_row(name) + RowRouter(of.routings[name])(ids)]
            expected = own["tables"][place] * alpha[:, int(column) : int(column) + folded.shape[1]]
            assert torch.equal(folded, expected), place
        assert all(bool((alpha == 1).all()) for alpha in own["folded_alpha"].values())
        torch.testing.assert_close(own["after"], own["before"], atol=1e-6, rtol=0)
    whole(results, "folded")


@pytest.mark.parametrize("kind", list(KINDS))
def test_merge_returns_the_sharded_model(ranks: RankResults, kind: str) -> None:
    for own in ranks[f"search {kind}"]:
        assert own["is_same"]
        assert not torch.allclose(own["halved"], own["after"])
        torch.testing.assert_close(own["after_merge"], own["halved"], atol=1e-6, rtol=0)
        assert all(bool((alpha == 1).all()) for alpha in own["merged_alpha"].values())


@pytest.mark.parametrize("kind", list(KINDS))
def test_checkpoints_come_back(ranks: RankResults, kind: str) -> None:
    for rank, own in enumerate(ranks[f"search {kind}"]):
        assert_same(own["checkpoint"]["saved"], own["checkpoint"]["loaded"])
        written = load_file(ranks.folder / f"{kind}_last.rank{rank}.safetensors")
        tables = {name.removeprefix("table/"): value for name, value in written.items() if name.startswith("table/")}
        assert_same(tables, own["tables"])
        for dim, alpha in own["alpha"].items():
            assert any(
                name.endswith(f"soft_selection.dim{dim}") and torch.equal(written[name], alpha) for name in written
            )


@pytest.mark.parametrize("loss", list(losses()))
def test_metrics_are_those_of_the_union(ranks: RankResults, gloo: dist.ProcessGroup, loss: str) -> None:
    expected = evaluate_halves(gloo, (0, 1), losses()[loss])
    first, second = (own[loss] for own in ranks["metrics"])
    assert first == second
    assert first == pytest.approx(expected, abs=1e-6)
    assert first != pytest.approx(evaluate_halves(gloo, (0,), losses()[loss]), abs=1e-3)


@pytest.mark.parametrize(("level", "what"), STOPS)
def test_all_ranks_stop_at_what_one_of_them_meets(ranks: RankResults, level: Any, what: str) -> None:
    good, bad = ranks[f"stops {level.value} {what}"]
    for own in (good, bad):
        assert own["outcome"].startswith(f"NonFiniteError: {level.value} step ")
        weights = [name for name in own["changed"] if what != "dense gradient" or name.split("/")[0] not in ROWS]
        assert weights == []  # a table may learn before a dense gradient is known
    if what == "dense gradient" or (level, what) == STOPS[-1]:
        assert good["outcome"] == bad["outcome"]  # both see the sum over ranks
    else:
        assert ", rank 1: expected" in good["outcome"]
        assert "rank 1" not in bad["outcome"]
    named = {"loss": "(every table is finite)", "gradient": "table", "dense gradient": "over"}[what]
    assert named in bad["outcome"]


@pytest.mark.parametrize(("level", "what"), STOPS)
def test_ranks_that_read_late_stop_alike_a_step_later(ranks: RankResults, level: Any, what: str) -> None:
    good, bad = ranks[f"stops late {level.value} {what}"]
    for own in (good, bad):
        assert own["outcomes"][0] == "went on"
        assert own["outcomes"][1].startswith(f"NonFiniteError: {own['place']}")
        assert own["bad"] == []
    if what == "dense gradient" or (level, what) == STOPS[-1]:
        assert good["outcomes"] == bad["outcomes"]
    else:
        assert ", rank 1: expected" in good["outcomes"][1]
        assert "rank 1" not in bad["outcomes"][1]


def test_all_ranks_stop_plain_training(ranks: RankResults) -> None:
    good, bad = (own["outcome"] for own in ranks["stops plain training"])
    assert good.startswith("NonFiniteError: epoch 0, step 1, rank 1: expected a finite loss")
    assert bad.startswith("NonFiniteError: epoch 0, step 1")


def test_the_model_has_both_kinds_of_features_in_every_collection() -> None:
    """Else much of the above would pass without having been tried."""
    features = Stream("train", 1, (0, 1)).batches[0].sparse_features
    longest = {name: int(features[f"{name}_id"].lengths().max()) for name in ROWS}
    assert {name for name, length in longest.items() if length > 1} == set(MULTI_HOT)
    assert {name for name in ROWS if int(features[f"{name}_id"].lengths().min()) == 0} == set(ROWS) - {"user"}
