"""NIS: grids and their bytes, a controller that learns, what a budget affords, and whole runs on a tiny recipe."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.rivals.methods.method import Method, MethodTask, SizeNotMetError
from benchmarks.rivals.methods.nis import nis_me, nis_se
from benchmarks.rivals.methods.nis.affordable import most_probable_within, trim
from benchmarks.rivals.methods.nis.controller import Controller
from benchmarks.rivals.methods.nis.grid import Grid, multi_size_grid, single_size_grid
from benchmarks.rivals.methods.nis.methods import chosen
from benchmarks.rivals.methods.nis.supernet import Quality, Supernet, train_controller
from benchmarks.rivals.methods.trained_scheme import prune_to_columns_
from dnis_torchrec import export, load
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.prune import Budget, Size
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.training.pipeline import NonFiniteError
from tests.late import read_late
from tests.tiny import ROWS, BagsOnly, Repeatable, make_batch, make_collection, make_recipe

CPU = torch.device("cpu")
DENSE_BYTES = 4 * 52 * 8
KINDS = {"se": single_size_grid, "me": multi_size_grid}


def stages(embedding_bytes: int = 800, num_blocks: int = 3) -> tuple[FrequencyCounts, RowBlocks, Budget]:
    tables = make_collection().embedding_bag_configs()
    batches = [make_batch(64, seed).sparse_features for seed in range(2)]
    counts = count_frequencies(batches, tables)
    blocks = blocks_from_counts(counts, tables, num_blocks=num_blocks)
    return counts, blocks, Budget.of(Size(embedding_bytes=embedding_bytes), blocks)


def make_grid(kind: str, num_dimension_blocks: int = 4, embedding_bytes: int = 800) -> Grid:
    _, blocks, budget = stages(embedding_bytes)
    return KINDS[kind](blocks, budget, num_dimension_blocks=num_dimension_blocks)


def random_picks(grid: Grid, num: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    sizes = [len(choice.options) for choice in grid.choices]
    return [[int(torch.randint(size, (), generator=generator)) for size in sizes] for _ in range(num)]


def controller_for(grid: Grid, wanted: list[int]) -> Controller:
    """A controller that was paid for one combination."""
    controller = Controller([len(choice.options) for choice in grid.choices], num_steps=300, seed=0)
    for _ in range(300):
        picked = controller.sample(8)
        controller.learn(picked, (picked == torch.tensor(wanted)).sum(1).float())
    assert controller.most_probable() == wanted
    return controller


class Unread:
    """A split that nobody may read."""

    def __iter__(self):
        raise AssertionError("the test split was read")


def make_task(tmp_path: Path, ratio: float, *, seed: int = 0, loss: nn.Module | None = None) -> MethodTask:
    def build(embedding_dim: int | None) -> Recipe:
        recipe = make_recipe(seed=seed, embedding_dim=embedding_dim)
        data = replace(recipe.data, test=BagsOnly())
        return replace(recipe, data=data, loss=loss or recipe.loss)

    return MethodTask(build=build, compression=ratio, seed=seed, device=CPU, folder=tmp_path, patience=1, max_epochs=2)


@pytest.mark.parametrize("num_parts", [1, 3, 4, 20])
def test_single_size_options_are_every_rectangle_from_the_most_frequent_corner(num_parts: int) -> None:
    grid, dim = make_grid("se", num_parts), 8
    parts = min(num_parts, dim)
    assert [choice.table for choice in grid.choices] == ["user", "genre"]
    for choice in grid.choices:
        expected = [torch.zeros(3, dim, dtype=torch.bool)]
        for rows, part in itertools.product(range(1, 4), range(1, parts + 1)):
            expected.append(
                torch.tensor([[s < rows and d < part * dim // parts for d in range(dim)] for s in range(3)])
            )
        assert torch.equal(choice.options, torch.stack(expected))


@pytest.mark.parametrize("num_parts", [1, 3, 4, 20])
def test_multi_size_keeps_each_dimension_block_for_its_own_number_of_vocabulary_blocks(num_parts: int) -> None:
    grid, dim = make_grid("me", num_parts), 8
    parts = min(num_parts, dim)
    assert len(grid.choices) == 2 * parts
    for picked in random_picks(grid, 20):
        retained = grid.retained(picked)
        for index, table in enumerate(ROWS):
            own = picked[index * parts : (index + 1) * parts]
            for s, d in itertools.product(range(3), range(dim)):
                part = next(p for p in range(parts) if d < (p + 1) * dim // parts)
                assert bool(retained[table][s, d]) == (s < own[part])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", [1, 3, 8])
def test_the_grid_tells_the_bytes_of_the_scheme(kind: str, num_blocks: int) -> None:
    counts, blocks, budget = stages(1200, num_blocks)
    assert any(bool(counts.never_seen(table).any()) for table in ROWS)
    grid = KINDS[kind](blocks, budget, num_dimension_blocks=3)
    for picked in random_picks(grid, 12):
        if grid.cost(picked) == 0:
            continue
        scheme = prune_to_columns_(make_collection(), blocks, counts, grid.retained(picked))
        assert 1200 - budget.amount + grid.cost(picked) == scheme.served_bytes("mixed_dimension")


def test_grids_refuse_no_dimension_block() -> None:
    _, blocks, budget = stages()
    with pytest.raises(ValueError, match="num_dimension_blocks: expected at least 1, got 0"):
        multi_size_grid(blocks, budget, num_dimension_blocks=0)


def test_the_controller_starts_uniform_and_samples_known_options_only() -> None:
    controller = Controller([2, 5], num_steps=10, seed=0)
    probabilities = controller.log_probabilities().exp()
    torch.testing.assert_close(probabilities, torch.tensor([[0.5, 0.5, 0, 0, 0], [0.2] * 5]))
    picked = controller.sample(2000)
    shares = [torch.bincount(picked[:, choice], minlength=5) / 2000 for choice in range(2)]
    torch.testing.assert_close(torch.stack(shares), probabilities, atol=0.04, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_the_controller_finds_the_best_arm_though_the_batch_moves_rewards_more_than_arms_do(seed: int) -> None:
    worth = torch.tensor([[0.00, 0.01, 0.03, 0.00], [0.02, 0.00, -0.01, 0.00], [0.00, 0.00, 0.00, 0.02]])
    controller = Controller([4, 3, 4], num_steps=300, seed=seed)
    noise = torch.Generator().manual_seed(seed)
    for _ in range(300):
        picked = controller.sample(4)
        difficulty = 0.2 * torch.randn((), generator=noise)
        controller.learn(picked, worth.gather(1, picked.T).sum(0) + difficulty)
    assert controller.most_probable() == [2, 0, 3]
    assert bool((controller.log_probabilities().exp().amax(1) > 0.8).all())


def test_where_rewards_tell_nothing_entropy_leads_back_to_uniform() -> None:
    controller = Controller([4, 4], num_steps=1000, seed=0)
    for _ in range(20):
        picked = controller.sample(8)
        controller.learn(picked, (picked == 1).sum(1).double())
    assert bool((controller.log_probabilities().exp()[:, 1] > 0.5).all())
    for _ in range(400):
        controller.learn(controller.sample(4), torch.full((4,), 0.7, dtype=torch.float64))
    torch.testing.assert_close(controller.log_probabilities().exp(), torch.full((2, 4), 0.25), atol=0.1, rtol=0)


def test_a_single_sample_has_no_critic() -> None:
    controller = Controller([2], num_steps=1, seed=0)
    with pytest.raises(ValueError, match="rewards: expected those of at least 2 samples, got 1"):
        controller.learn(controller.sample(1), torch.ones(1))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_choices=st.integers(1, 4), amount=st.integers(1, 60))
def test_the_most_probable_combination_within_a_budget_is_that_of_all_combinations(
    data: st.DataObject, num_choices: int, amount: int
) -> None:
    costs, log_p = [], []
    for _ in range(num_choices):
        more = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
        costs.append(torch.tensor([0, *more], dtype=torch.float64))
        weights = data.draw(st.lists(st.integers(1, 99), min_size=len(more) + 1, max_size=len(more) + 1))
        log_p.append((torch.tensor(weights, dtype=torch.float64) / sum(weights)).log())
    every = list(itertools.product(*(range(len(options)) for options in costs)))

    def total(of: list[Tensor], picked: tuple[int, ...] | list[int]) -> float:
        return sum(float(values[option]) for values, option in zip(of, picked, strict=True))

    allowed = [picked for picked in every if 0 < total(costs, picked) <= amount]
    if not allowed:
        return
    picked = most_probable_within(log_p, costs, amount)
    assert 0 < total(costs, picked) <= amount
    best = max(total(log_p, other) for other in [*allowed, (0,) * num_choices])
    if best > total(log_p, [0] * num_choices):
        assert total(log_p, picked) == pytest.approx(best, abs=1e-9)


def test_an_option_that_costs_the_whole_budget_still_fits() -> None:
    log_p = [torch.tensor([0.1, 0.9]).log(), torch.tensor([0.4, 0.6]).log()]
    costs = [torch.tensor([0.0, 10.0]), torch.tensor([0.0, 1.0])]
    assert most_probable_within(log_p, costs, 10) == [1, 0]
    assert most_probable_within(log_p, [cost * 7777 for cost in costs], 77770) == [1, 0]


def test_trimming_takes_the_last_columns_of_the_least_frequent_blocks_and_no_more_than_needed() -> None:
    retained = {"a": torch.ones(2, 4, dtype=torch.bool), "b": torch.tensor([[True, True, False, False], [False] * 4])}
    costs = {"a": torch.tensor([40.0, 10.0]), "b": torch.tensor([25.0, 1.0])}
    cheapest = trim(retained, costs, 9.0)
    assert cheapest["a"].sum(1).tolist() == [4, 3]
    assert not bool(cheapest["a"][1, 3])
    assert cheapest["b"].sum(1).tolist() == [2, 0]
    assert trim(retained, costs, 12.0)["b"].sum(1).tolist() == [1, 0]  # no column of a covers it
    several = trim(retained, costs, 60.0)
    assert (several["a"].sum(1).tolist(), several["b"].sum(1).tolist()) == ([4, 3], [0, 0])
    assert retained["a"].sum() == 8


def test_what_the_controller_wants_is_taken_as_it_is_if_the_budget_affords_it() -> None:
    grid = make_grid("se", embedding_bytes=900)
    wanted = [1 + 4 + 1, 2]
    retained, how = chosen(grid, controller_for(grid, wanted))
    assert how == "most probable"
    assert all(torch.equal(retained[table], mask) for table, mask in grid.retained(wanted).items())


def test_a_choice_that_overshoots_by_a_hair_loses_a_column() -> None:
    wanted = [1 + 2 * 4 + 1, 1 + 2 * 4 + 1]  # half of everything
    fixed = 800 - make_grid("se").budget.amount
    cost = make_grid("se").cost(wanted)
    grid = make_grid("se", embedding_bytes=int(fixed + cost) - 1)
    retained, how = chosen(grid, controller_for(grid, wanted))
    assert how == "most probable, trimmed"
    lost = {table: int((mask & ~retained[table]).sum()) for table, mask in grid.retained(wanted).items()}
    assert sum(lost.values()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_that_is_too_large_or_empty_gives_way_to_one_within_the_budget(kind: str) -> None:
    grid = make_grid(kind, embedding_bytes=600)
    largest, nothing = [len(choice.options) - 1 for choice in grid.choices], [0] * len(grid.choices)
    for wanted in (largest, nothing):
        retained, how = chosen(grid, controller_for(grid, wanted))
        spent = sum(float(grid.budget.column_costs[table] @ mask.sum(1).double()) for table, mask in retained.items())
        assert how.startswith("most probable in budget")
        assert 0 < spent <= grid.budget.amount


def test_quality_is_auc_or_the_error_in_units_of_the_labels_variance() -> None:
    recipe = make_recipe()
    scores, labels = torch.tensor([0.1, 2.0, -1.0, 0.3]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert Quality(recipe).of(scores, labels) == pytest.approx(0.5)
    assert Quality(recipe).of(-scores, torch.tensor([1.0, 0.0, 1.0, 1.0])) == 1.0
    assert Quality(recipe).of(scores, torch.ones(4)) == 0.5
    shares = make_recipe()
    shares.data.validation.batches[0].labels[0] = 0.75
    with pytest.raises(ValueError, match=r"validation stream: expected labels 0 or 1, got 0.75"):
        Quality(shares)
    ratings = Repeatable([replace(batch, labels=10 * batch.labels) for batch in recipe.data.validation])
    of_ratings = Quality(replace(recipe, loss=nn.MSELoss(), data=replace(recipe.data, validation=ratings)))
    every = torch.cat([batch.labels for batch in ratings])
    assert of_ratings.of(every.mean().expand_as(every), every) == pytest.approx(-1.0, abs=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_the_supernet_computes_with_what_is_retained_and_trains_nothing_else(gloo, optimizer: str) -> None:
    grid = make_grid("me")
    recipe, plain = make_recipe(optimizer=optimizer), make_recipe()
    counts, blocks, _ = stages()
    every_row = FrequencyCounts({table: count + 1 for table, count in counts.counts.items()}, {}, 1)
    picked = [2, 3, 0, 1, 1, 0, 3, 0]
    prune_to_columns_(plain.model, blocks, every_row, grid.retained(picked))
    supernet = Supernet(recipe, grid, CPU)
    batch = make_batch(64, 100)
    tables = {part.table: part.weight for m in collections(supernet.model).values() for part in local_shards(m)}
    before = {table: weight.clone() for table, weight in tables.items()}
    _, (_, predictions) = TrainTask(plain.model, plain.loss)(batch)
    expected = Quality(recipe).of(predictions, batch.labels)
    other = [3] * len(picked)
    of_all, of_picked = supernet.qualities(batch, [other, picked])
    assert of_picked == pytest.approx(expected, abs=1e-6) != of_all
    assert all(torch.equal(weight, before[table]) for table, weight in tables.items())

    supernet.train(make_batch(64, 0), picked, "a step")
    for table, mask in grid.retained(picked).items():
        of_rows = mask[blocks.routings[table].block_of(torch.arange(ROWS[table]))]
        moved = tables[table] != before[table]
        assert bool((moved & of_rows).any())
        assert not bool((moved & ~of_rows).any())


def test_no_quality_is_told_after_a_step_that_was_not_finite_and_is_read_late(gloo) -> None:
    grid, bad = make_grid("me"), make_batch(64, 0)
    supernet, picked = Supernet(make_recipe(), grid, CPU), [3] * len(grid.choices)
    bad.dense_features[:] = float("nan")
    with read_late():
        supernet.train(bad, picked, "step 7")
        with pytest.raises(NonFiniteError, match="step 7"):
            supernet.qualities(make_batch(64, 100), [picked])


def test_the_search_takes_as_many_epochs_as_warm_up_and_ramp_and_reads_train_and_validation_only(gloo) -> None:
    taken = {"train": 0, "validation": 0}

    class Counted(Repeatable):
        def __init__(self, batches, name: str) -> None:
            super().__init__(batches)
            self.name = name

        def __iter__(self):
            for batch in self.batches:
                taken[self.name] += 1
                yield batch

    recipe = make_recipe()
    train, validation = (
        Counted(recipe.data.train.batches, "train"),
        Counted(recipe.data.validation.batches, "validation"),
    )
    data = DataSplits(train=train, validation=validation, selection=Unread(), test=Unread())
    recipe = replace(recipe, data=data)
    train_controller(recipe, make_grid("se"), 800, warm_up_epochs=2, epochs=1, device=CPU, seed=0)
    assert taken == {"train": 10 + 3 * 10, "validation": 3 + 10}  # counted once, then used


@pytest.mark.parametrize(("max_epochs", "expected"), [(60, (2, 12)), (10, (2, 8)), (1, (2, 1))])
def test_the_controller_learns_for_as_many_epochs_as_a_training_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_epochs: int, expected: tuple[int, int]
) -> None:
    asked = []

    def watched(*_: object, warm_up_epochs: int, epochs: int, **__: object) -> None:
        asked.append((warm_up_epochs, epochs))
        raise InterruptedError

    monkeypatch.setattr("benchmarks.rivals.methods.nis.methods.train_controller", watched)
    with pytest.raises(InterruptedError):
        nis_se(replace(make_task(tmp_path, 4), max_epochs=max_epochs))
    assert asked == [expected]


def test_bytes_over_the_budget_are_what_the_controller_learns_to_avoid(gloo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quality, "of", lambda self, predictions, labels: 0.5)
    grid = make_grid("me", embedding_bytes=700)
    within = []
    for controller in (
        Controller([len(choice.options) for choice in grid.choices], num_steps=1, seed=0),
        train_controller(make_recipe(), grid, 700, warm_up_epochs=1, epochs=6, device=CPU, seed=0),
    ):
        costs = [grid.cost(picked) for picked in controller.sample(200).tolist()]
        within.append(sum(cost <= grid.budget.amount for cost in costs) / 200)
    assert within[0] < 0.3
    assert within[1] > 0.95


@pytest.mark.parametrize(("method", "ratio"), [(nis_se, 2), (nis_me, 2), (nis_se, 4), (nis_me, 4), (nis_me, 4.47)])
def test_a_run_is_within_the_budget_and_serves_what_it_trained(
    gloo, tmp_path: Path, method: Method, ratio: float
) -> None:
    task = make_task(tmp_path, ratio)
    result = method(task)
    assert result.form == "mixed_dimension"
    assert result.scheme.parameters > 0
    assert result.embedding_bytes() <= DENSE_BYTES / ratio
    assert (result.trials, result.seconds > 0) == (1, result.seconds == result.seconds_of_trials)
    (collection,) = collections(result.model).values()
    tables = {part.table: part.weight for part in local_shards(collection)}
    for name, table in result.scheme.tables.items():
        dims = [int(dims) for dims in str(result.settings[f"dims of {name}"]).split()]
        assert all(of_scheme in (dims[block], 0) for block, of_scheme in enumerate(table.dims.tolist()))
        assert int((tables[name] != 0).sum()) == table.num_retained
    served = load(export(result.model, result.scheme, tmp_path / "artifact"))
    features = make_batch(32, 7).sparse_features
    torch.testing.assert_close(served(features).values(), collection(features).values(), atol=1e-6, rtol=0)


def test_ratings_are_searched_too_and_the_same_seed_gives_the_same_result(gloo, tmp_path: Path) -> None:
    first, second = (nis_me(make_task(tmp_path, 3, seed=5, loss=nn.MSELoss())) for _ in range(2))
    assert first.settings == second.settings
    assert first.selection_loss == second.selection_loss
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name])


def test_a_size_below_the_smallest_choice_is_not_met(gloo, tmp_path: Path) -> None:
    with pytest.raises(SizeNotMetError, match=r"embedding_bytes: expected at least \d+ for these tables"):
        nis_se(make_task(tmp_path, 10))
    with pytest.raises(SizeNotMetError, match="embedding_bytes: expected at least 372 bytes for NIS, got 369"):
        nis_me(make_task(tmp_path, DENSE_BYTES / 369))


def test_a_recipe_without_validation_is_refused(gloo, tmp_path: Path) -> None:
    task = make_task(tmp_path, 2)
    recipe = task.build(None)
    without = replace(recipe, data=replace(recipe.data, validation=Repeatable([])))
    with pytest.raises(ValueError, match="validation stream: expected at least one batch, got 0"):
        nis_se(replace(task, build=lambda dim: without))
