"""The whole search, of fresh and trained models, with tables left alone and turned, in one call; progress."""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec import export
from dnis_torchrec.allocation.axes import rotation_groups, with_axes_
from dnis_torchrec.allocation.bits import Prediction
from dnis_torchrec.allocation.compress import compress, measure_, packed_collections
from dnis_torchrec.allocation.gains import LossSample, with_gains
from dnis_torchrec.artifact.export import load_model
from dnis_torchrec.artifact.verify import verify
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.codes import is_coded
from dnis_torchrec.cli.commands import run_evaluate, run_export, run_search
from dnis_torchrec.cli.settings import EvaluateCommand, ExportCommand
from dnis_torchrec.data import over_ranks
from dnis_torchrec.data.over_ranks import count_training_data
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme
from dnis_torchrec.search import ramp
from dnis_torchrec.search import search as one_call
from dnis_torchrec.search import search as search_module
from dnis_torchrec.search.prune import SizeOutOfReachError
from dnis_torchrec.search.search import COMPRESSED, SEARCHED, SearchOutcome, SearchResult, Setup, search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.training import loop as search_loop
from dnis_torchrec.training import shard as sharding_of_training
from dnis_torchrec.training.checkpoint import CheckpointFolder
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import EpochRecord, FinishedPhase, Phase, SearchEvents, SearchInterrupted, TrainLoop
from dnis_torchrec.training.pipeline import NonFiniteError
from dnis_torchrec.training.settings import Saving
from examples.models import FactorizationMachine
from examples.paper.search import PaperSettings, search_as_published
from tests.distributed.model import assert_same
from tests.models import state_tensors
from tests.programs import run_python
from tests.reference import second_moment_reference
from tests.tiny import QUICK, ROWS, make_batch, make_collection, make_recipe, quick_search, read_late

CPU = torch.device("cpu")
SIZE = 10.0
SHORT = SearchSettings(num_blocks=3, epochs=2, patience=2)


def selection_loss_of(outcome: SearchOutcome, recipe: Recipe) -> float:
    return evaluate(TrainTask(outcome.model, recipe.loss), recipe.data.selection, recipe.loss, CPU)["loss"]


def rows_of(collection: nn.Module, name: str) -> torch.Tensor:
    names = list(ROWS)
    lengths = torch.zeros(len(names), ROWS[name], dtype=torch.int64)
    lengths[names.index(name)] = 1
    return collection(KeyedJaggedTensor(names, torch.arange(ROWS[name]), lengths=lengths.flatten()))[name]


def table(model: nn.Module, name: str) -> torch.Tensor:
    return next(s.weight for c in collections(model).values() for s in local_shards(c) if s.table == name)


def assert_tables_hold_what_is_served(outcome: SearchOutcome) -> None:
    """Bit for bit, row by row."""
    (packed,) = packed_collections(outcome.model, outcome.scheme).values()
    for name in ROWS:
        assert torch.equal(rows_of(packed, name), table(outcome.model, name))


@pytest.mark.parametrize(("kind", "optimizer"), [("dlrm", "adam"), ("deepfm", "rowwise_adagrad")])
def test_torchrecs_models_go_all_the_way_unmodified(gloo, tmp_path: Path, kind: str, optimizer: str) -> None:
    recipe, seen = make_recipe(kind, optimizer=optimizer), []
    outcome = found_by(recipe, tmp_path, SearchEvents(on_epoch=seen.append))
    assert SIZE <= outcome.scheme.compression(PACKED) <= 1.4 * SIZE  # a column of 13 rows is 4 % of the bytes
    assert outcome.predicted_loss_increase >= 0 or outcome.origin == COMPRESSED  # where held-out samples teach scales
    assert_tables_hold_what_is_served(outcome)
    losses = outcome.selection_losses
    assert outcome.selection_loss == losses[outcome.origin]
    assert outcome.origin == COMPRESSED or losses[SEARCHED] < losses[COMPRESSED]
    assert selection_loss_of(outcome, recipe) == pytest.approx(outcome.selection_loss, abs=1e-6)
    assert tuple(seen) == outcome.history
    phases = [record.phase for record in seen]
    assert sorted(set(phases), key=phases.index) == ["plain", "ramp", "release"]
    assert phases.count("plain") == 2
    assert [record.step for record in seen[:4]] == [10, 20, 28, 38]  # behind a ramp of eight steps
    density = [record.alpha_density for record in seen]
    assert density[:2] == [1.0, 1.0]
    assert all(later <= earlier for earlier, later in pairwise(density))
    assert density[-1] == density[2] < 0.9
    assert all(record.alpha_mean <= record.alpha_density for record in seen)
    assert all(bool(((alpha == 0) | (alpha >= search_module.ALPHA_FLOOR)).all()) for alpha in outcome.alpha.values())

    expected = evaluate(TrainTask(outcome.model, recipe.loss), recipe.data.test, recipe.loss, CPU)
    artifact = export(outcome.model, outcome.scheme, tmp_path / "artifact", forms=(PACKED,))
    fresh = make_recipe(kind, seed=1)
    fresh.model.load_state_dict({**fresh.model.state_dict(), **dense_of(outcome.model)}, strict=False)
    load_model(fresh.model, artifact)
    served = evaluate(TrainTask(fresh.model, recipe.loss), recipe.data.test, recipe.loss, CPU)
    assert served == pytest.approx(expected, abs=1e-5)


def dense_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if ".embedding_bags." not in name}


@pytest.mark.parametrize("loses", [SEARCHED, COMPRESSED])
def test_the_better_of_two_is_returned_with_its_own_weights(gloo, tmp_path, monkeypatch, loses: str) -> None:
    """Whatever the other has done to the model meanwhile; of both it is said how good they were."""
    judge, measure, ends = search_module.selection_loss, search_module.curvature_of_read_tables, []

    def judged(*arguments: object):
        is_searched = len(ends) == 2
        return (9.0 if loses == SEARCHED else -9.0) if is_searched else judge(*arguments)

    def watched(model: nn.Module, *arguments: object, **options: object):
        task = get_unwrapped_module(model)
        ends.append({name: value.clone() for name, value in dense_of(task).items() if "over_arch" in name})
        return measure(model, *arguments, **options)

    monkeypatch.setattr(search_module, "selection_loss", judged)
    monkeypatch.setattr(search_module, "curvature_of_read_tables", watched)
    recipe = make_recipe()
    outcome = found_by(recipe, tmp_path)
    wins = COMPRESSED if loses == SEARCHED else SEARCHED
    assert outcome.origin == wins
    assert len(ends) == 2  # nothing is measured again of what is returned
    assert not any(torch.equal(value, ends[1][name]) for name, value in ends[0].items())  # each of its own state
    assert_tables_hold_what_is_served(outcome)
    if wins == COMPRESSED:
        assert outcome.selection_losses == {SEARCHED: 9.0, COMPRESSED: outcome.selection_loss}
        assert selection_loss_of(outcome, recipe) == pytest.approx(outcome.selection_loss, abs=1e-7)
        assert outcome.history[outcome.best_epoch].phase == "plain"
    else:
        assert outcome.history[outcome.best_epoch].phase != "plain"
    own = dense_of(outcome.model)
    same = {name: value.equal(own[name.removeprefix("model.")]) for name, value in ends[0].items()}
    [bias] = [name for name, value in ends[0].items() if value.numel() == 1]
    same.pop(bias)  # it moves where held-out samples gain by it
    assert set(same.values()) == {wins == COMPRESSED}
    assert outcome.scheme.compression(PACKED) >= SIZE


def test_scales_of_what_was_searched_learn_once_weights_have(gloo, tmp_path, monkeypatch) -> None:
    predict, judge, told = LossSample.predict, search_module.selection_loss, []

    def teach(self: LossSample, scheme: MixedDimensionScheme) -> Prediction:
        model = get_unwrapped_module(self._model)
        told.append((scheme, {name: value.clone() for name, value in dense_of(model.model).items()}))
        if len(told) == 1:
            return predict(self, scheme)
        gains = {name: torch.full(table.codes.bits.shape, 1.25) for name, table in scheme.tables.items()}
        return Prediction(loss_increase=-1.0, output_shift=0.5, scheme=with_gains(scheme, gains))

    monkeypatch.setattr(LossSample, "predict", teach)
    monkeypatch.setattr(search_module, "selection_loss", lambda *of: -9.0 if len(told) == 2 else judge(*of))
    monkeypatch.setattr(search_module, "is_ahead", lambda *of: True)
    outcome = found_by(make_recipe(), tmp_path)
    assert outcome.origin == SEARCHED
    assert_tables_hold_what_is_served(outcome)
    [_, (scheme, dense)] = told
    for name, table in outcome.scheme.tables.items():
        before = scheme.tables[name].codes
        wanted = torch.where(is_coded(before.bits), (1.25 * before.scale).bfloat16().float(), before.scale)
        assert table.codes.scale.equal(wanted)
    higher = {name: value - dense[name] for name, value in dense_of(outcome.model).items() if value.numel() == 1}
    assert [float(value) for value in higher.values()] == pytest.approx([0.5])


@pytest.mark.parametrize("compression", [1, 0.5, float("nan")])
def test_a_size_makes_tables_smaller(gloo, tmp_path: Path, compression: float) -> None:
    with pytest.raises(ValueError, match=f"^compression: expected a number above 1, got {compression}"):
        search(make_recipe(), compression, tmp_path, CPU)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_blocks", 0), ("epochs", 0), ("patience", 0), ("ramp_share", 0.0), ("ramp_share", float("inf"))],
)
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected .*, got {value}"):
        SearchSettings(**{field: value})


@pytest.mark.parametrize("reading", [nullcontext, read_late])
def test_divergence_keeps_the_last_good_checkpoint(
    gloo, tmp_path: Path, reading: Callable[[], AbstractContextManager[None]]
) -> None:
    recipe = make_recipe()

    def poison(record: EpochRecord) -> None:
        recipe.data.train.batches[4].dense_features[:] = float("nan")

    with reading(), pytest.raises(NonFiniteError, match="lower step 14"):
        found_by(recipe, tmp_path, SearchEvents(on_epoch=poison))
    saved = load_file(next(CheckpointFolder(tmp_path).latest().glob("rank0.*")))
    assert all(bool(torch.isfinite(value.float()).all()) for value in saved.values())


def test_ids_and_bags_of_all_splits_are_looked_at_before_training(gloo, tmp_path: Path) -> None:
    table = "table 'user', feature 'user'"
    for name in ("validation", "selection", "test"):
        recipe = make_recipe()
        getattr(recipe.data, name).batches[1].sparse_features.values()[0] = 40
        with pytest.raises(ValueError, match=rf"{table}, {name} batch 1: expected ids in 0\.\.39, got 40; hash the"):
            found_by(recipe, tmp_path)
    recipe = make_recipe()
    by_key = recipe.data.test.batches[1].sparse_features.to_dict()
    longer = [*by_key["user"].to_dense()]
    longer[3] = torch.tensor([1, 2, 3])
    by_key["user"] = JaggedTensor.from_dense(longer)
    recipe.data.test.batches[1].sparse_features = KeyedJaggedTensor.from_jt_dict(by_key)
    counts = count_training_data(recipe.data, recipe.loss, table_configs(recipe.model))
    assert counts.max_bag_lengths["user"] == 3
    with pytest.raises(SearchInterrupted):  # and not refused
        found_by(recipe, tmp_path, SearchEvents(should_stop=lambda: True))


def test_bags_that_the_plain_model_could_not_pool_are_refused_before_training(gloo, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(over_ranks, "count_training_data", lambda *_, **__: pytest.fail("read the data"))
    recipe = replace(make_recipe(), model=make_collection(is_weighted=True))
    features = make_batch(4, 0).sparse_features
    weights = torch.ones(features.values().numel())
    with pytest.raises(NotImplementedError, match="only supported for mode='sum'"):
        recipe.model(KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths()))
    with pytest.raises(ValueError, match=r"table 'genre': expected SUM pooling"):
        found_by(recipe, tmp_path)
    monkeypatch.setattr("dnis_torchrec.allocation.compress.unshard_", lambda _: pytest.fail("made the model plain"))
    for call in (compress, measure_):
        with pytest.raises(ValueError, match=r"table 'genre': expected SUM pooling"):
            call(recipe.model, recipe.data.train, loss=recipe.loss)
    monkeypatch.setattr(sharding_of_training, "world_size_of", lambda: 2)
    sharding_of_training.check_pooling(recipe.model)  # stays sharded, and FBGEMM's kernels can


SHORT_OF_SEARCH_GIVEN = SearchSettings(num_blocks=3, epochs=1, patience=1)
EPOCHS = 2


def given_to_search(
    recipe: Recipe,
    folder: Path,
    *,
    trained_epochs: int | None = EPOCHS,
    stop_at: int | None = None,
    resume: bool = False,
) -> tuple[SearchOutcome | None, list[float]]:
    """A search of a model that is taken for a trained one, None if stopped, and its lower steps' losses."""
    losses: list[float] = []
    events = SearchEvents(on_step=lambda loss, _: losses.append(loss), should_stop=lambda: len(losses) == stop_at)
    torch.manual_seed(99 if resume else 7)
    saving = Saving(resume=resume)
    try:
        found = search(
            *(recipe, 10.0, folder, CPU),
            settings=SHORT_OF_SEARCH_GIVEN,
            trained_epochs=trained_epochs,
            events=events,
            policy=saving,
        )
    except SearchInterrupted:
        return None, losses
    return found, losses


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_weights_stand_still_while_their_optimizers_see_gradients(gloo, tmp_path: Path, optimizer: str) -> None:
    recipe = make_recipe(optimizer=optimizer)
    before = {name: value.clone() for name, value in recipe.model.state_dict().items()}
    loss = evaluate(TrainTask(recipe.model, recipe.loss), recipe.data.selection, recipe.loss, CPU)["loss"]
    outcome, _ = given_to_search(recipe, tmp_path)
    assert outcome is not None
    first = outcome.history[0]
    assert (first.phase, first.step, first.selection_loss) == ("given", 10, pytest.approx(loss, abs=1e-6))
    assert [record.phase for record in outcome.history].count("given") == 1
    assert "plain" not in {record.phase for record in outcome.history}
    saved = load_file(next(Path(CheckpointFolder(tmp_path).path_of(10)).glob("rank0.*")))
    for name, value in before.items():
        table = name.split(".")[-2]
        key = f"table/{table}@0,0" if "embedding_bags" in name else f"model/model.{name}@{','.join('0' * value.dim())}"
        assert torch.equal(saved[key], value), name
    states = {"adam": ("exp_avg", "exp_avg_sq"), "rowwise_adagrad": ("momentum1",)}[optimizer]
    of_tables = [value for key, value in saved.items() if ("user" in key or "fused" in key) and f"/{states[0]}" in key]
    assert of_tables
    assert all(bool((value != 0).any()) for value in of_tables)
    folder = CheckpointFolder(tmp_path)
    before_last, last = (load_file(next(Path(folder.path_of(step)).glob("rank0.*"))) for step in folder.steps()[-2:])
    assert not torch.equal(before_last["table/user@0,0"], last["table/user@0,0"])  # weights move again


def test_ramp_and_release_are_as_long_as_after_so_much_plain_training(gloo, tmp_path, monkeypatch) -> None:
    phases = []
    begin = search_module._Plan.begin
    monkeypatch.setattr(
        search_module._Plan, "begin", lambda plan, phase, finished: (phases.append(phase), begin(plan, phase, finished))
    )
    given_to_search(make_recipe(), tmp_path, trained_epochs=8, stop_at=40)
    assert [(phase.name, phase.steps) for phase in phases] == [("given", 10), ("ramp", 24), ("release", 80)]


WITHOUT_A_GROUP = """
import torch
import dnis_torchrec as dnis
from dnis_torchrec.search.settings import SearchSettings
from tests.tiny import make_recipe

torch.set_num_threads(1)
recipe, settings = make_recipe(), SearchSettings(num_blocks=3, epochs=2, patience=2)
torch.manual_seed(0)
print(dnis.search(recipe, compression=10, settings=settings))
assert not torch.distributed.is_initialized()
"""


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return make_recipe()


@pytest.fixture(scope="module")
def found(gloo, recipe: Recipe) -> SearchResult:
    torch.manual_seed(0)
    return dnis.search(recipe, compression=10, settings=SHORT)


def test_the_same_call_gives_the_same_in_another_process_and_leaves_no_process_group(
    found: SearchResult, tmp_path: Path
) -> None:
    done = run_python(tmp_path, WITHOUT_A_GROUP)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) in (3, 4)  # with a word on what it gained, or without
    assert done.stdout == f"{found}\n"


def test_the_recipe_stays_as_it_was(recipe: Recipe, found: SearchResult) -> None:
    assert found.model is not recipe.model
    for name, weight in make_recipe().model.state_dict().items():
        assert weight.equal(recipe.model.state_dict()[name]), name


def test_streams_count_their_epochs_anew() -> None:
    class Counting:
        epoch = 0

        def __iter__(self):
            self.epoch += 1
            return iter(())

    data = make_recipe().data
    counting = Counting()
    own = one_call._from_its_epoch(replace(data, train=counting))
    list(own.train)
    assert (counting.epoch, own.train.epoch) == (0, 1)


def test_it_meets_the_size_and_its_metrics_are_those_of_the_served_values(recipe: Recipe, found: SearchResult) -> None:
    assert 10 <= found.compression < 14
    assert found.metric == "auc"
    assert evaluate(TrainTask(found.model, recipe.loss), recipe.data.test, recipe.loss, CPU) == found.metrics


def test_it_says_whether_the_search_gained_something(found: SearchResult) -> None:
    for origin, said in ((SEARCHED, False), (COMPRESSED, True)):
        of_origin = replace(found, outcome=replace(found.outcome, origin=origin))
        assert ("gained nothing" in repr(of_origin)) is said


def test_a_size_is_refused_before_anything_is_copied() -> None:
    with pytest.raises(ValueError, match="compression: expected a finite number above 1, got 1"):
        dnis.search(None, compression=1)  # type: ignore[arg-type]


def test_several_ranks_are_sent_to_the_command(gloo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_call, "world_size_of", lambda: 2)
    with pytest.raises(NotImplementedError, match="search: supported is one process, got 2; run `torchrun"):
        dnis.search(make_recipe(), compression=10)


SIZE_OF_LEAVE_ALONE = 2.5
ALONE = "genre"
BYTES = 4 * 8 * ROWS[ALONE]
"""Of that table in float32."""
DENSE = 4 * 8 * sum(ROWS.values())


def genre_alone(data: Path | None = None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The tiny recipe as the command line finds it, one of its two tables left alone."""
    del data
    return replace(make_recipe(seed=seed, embedding_dim=embedding_dim), leave_alone=(ALONE,))


def test_a_search_leaves_a_table_in_float32_and_counts_its_bytes(gloo, tmp_path, caplog, monkeypatch) -> None:
    """And says once, not with every measurement, that a model looks untrained."""
    monkeypatch.setattr("dnis_torchrec.allocation.curvature.LEAST_CURVATURE", 1e9)
    recipe = genre_alone()
    found = search(recipe, SIZE_OF_LEAVE_ALONE, tmp_path, CPU, settings=SHORT)
    own, other = found.scheme.tables[ALONE], found.scheme.tables["user"]
    assert list(found.scheme.tables) == list(ROWS)
    assert own.bits.tolist() == [[32] * 8]
    assert int(other.bits.max()) <= 8
    assert own.served_bytes(PACKED) < BYTES + 64
    served = sum(table.served_bytes(PACKED) for table in found.scheme.tables.values())
    assert SIZE_OF_LEAVE_ALONE <= found.scheme.compression(PACKED) == DENSE / served
    blocks = found.blocks
    alone = found.alpha[8][blocks.first_alpha_row(ALONE)]
    assert bool((alone == 1).all())
    assert bool((found.alpha[8][blocks.first_alpha_row("user")] != 1).any())
    assert_tables_hold_what_is_served(found)
    assert caplog.text.count("the model looks untrained") == 1


def test_the_tables_of_its_group_keep_their_axes() -> None:
    model = with_axes_(genre_alone().model)
    assert [set(group.tables) for group in rotation_groups(model)] == [{"user", "genre"}]
    assert rotation_groups(model, [ALONE]) == []


def test_a_size_that_a_table_left_alone_does_not_leave_is_refused_before_training(gloo, tmp_path: Path) -> None:
    with pytest.raises(SizeOutOfReachError, match=r"^compression: expected at most [23]\.\d+ for these tables"):
        search(genre_alone(), 20.0, tmp_path, CPU)


def test_a_run_is_exported_and_verified_with_it_and_not_pruned(gloo, tmp_path: Path) -> None:
    run, artifact = tmp_path / "run", tmp_path / "artifact"
    spec = "tests.search.test_search:genre_alone"
    run_search(quick_search(run, compression=SIZE_OF_LEAVE_ALONE, recipe=spec))
    run_export(ExportCommand(run=run, out=artifact))
    of_run, served = (run_evaluate(EvaluateCommand(path=path, recipe=spec)) for path in (run, artifact))
    assert served["metrics"] == pytest.approx(of_run["metrics"], abs=1e-6)
    assert verify(artifact).failures == []
    with pytest.raises(NotImplementedError, match=r"^Recipe\.leave_alone: supported are recipes without"):
        search_as_published(genre_alone(), PaperSettings(), CPU)


def test_it_is_one_block_of_rows_as_they_stand() -> None:
    recipe = make_recipe()
    tables = table_configs(recipe.model)
    counts = count_training_data(recipe.data, recipe.loss, tables)
    counts.counts[ALONE][3] = 0  # a row that was never seen, among others
    blocks = blocks_from_counts(counts, tables, num_blocks=3, leave_alone=[ALONE], least_rows=1)
    plain = blocks_from_counts(counts, tables, num_blocks=3, least_rows=1)
    assert blocks.routings[ALONE].boundaries.tolist() == [0, ROWS[ALONE]]
    assert int(blocks.seen_rows[ALONE]) == int((counts.counts[ALONE] > 0).sum())
    assert torch.equal(blocks.occurrences["user"], plain.occurrences["user"])
    assert blocks.left_alone == {ALONE}


SHORT_OF_SEARCH_ROTATION = SearchSettings(num_blocks=3, epochs=2, patience=1)


def factorization_machine(optimizer: str) -> Recipe:
    torch.manual_seed(0)
    return replace(make_recipe(optimizer=optimizer), model=FactorizationMachine(make_collection()))


def run(
    folder: Path, events: SearchEvents | None = None, *, resume: bool = False, optimizer: str = "adam"
) -> SearchOutcome:
    recipe, saving = factorization_machine(optimizer), Saving(resume=resume)
    return search(recipe, 20, folder, CPU, settings=SHORT_OF_SEARCH_ROTATION, events=events, policy=saving)


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """After every rotation: the second moment of all tables together, as often as their rows are looked up."""
    seen: list[torch.Tensor] = []
    rotate_ = search_module.rotate_

    def watched(model, counts, *rest):
        found = rotate_(model, counts, *rest)
        shards = [shard for own in collections(model).values() for shard in local_shards(own)]
        tables = [shard.weight.double() for shard in shards]
        seen.append(second_moment_reference(tables, [counts.counts[shard.table] for shard in shards]))
        return found

    monkeypatch.setattr(search_module, "rotate_", watched)
    return seen


class Killed(BaseException):
    """As if the process had ended here."""


def test_tables_turn_once_however_often_the_search_goes_on(gloo, tmp_path: Path, turned: list[torch.Tensor]) -> None:
    """Into axes of their own; and again to see what plain training, compressed, is worth, and to return it.

    That is what comes out here: of two tables that are multiplied so few columns are left that none has its partner.
    """
    whole = run(tmp_path / "whole")
    assert whole.origin == search_module.COMPRESSED
    assert len(turned) == 3
    for moment in turned:
        torch.testing.assert_close(moment, moment.diag().diag(), atol=1e-4, rtol=0)
        assert bool((moment.diag().diff() < 1e-4).all())
    turned.clear()

    def kill(record: EpochRecord, is_last: bool) -> None:
        if is_last and record.phase == "plain":
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "broken", SearchEvents(on_save=kill))
    assert not turned
    resumed = run(tmp_path / "broken", resume=True)
    assert len(turned) == 3
    assert resumed.history == whole.history
    own, others = whole.model.state_dict(), resumed.model.state_dict()
    assert [name for name in own if not torch.equal(own[name], others[name])] == []


def test_rows_of_tables_to_be_turned_are_never_cut(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner may cut columns of any table otherwise, and rotation would be refused in the middle of the search."""
    asked = []

    def watched(*arguments, constraints, **options):
        asked.append({kind for constraint in constraints.values() for kind in constraint.sharding_types})
        raise Killed

    monkeypatch.setattr(sharding_of_training, "make_sharding_plan", watched)
    with pytest.raises(Killed):
        run(tmp_path, optimizer="rowwise_adagrad")
    assert asked == [set(sharding_of_training.WHOLE_ROWS)]
    monkeypatch.setattr(search_module, "rotation_groups", lambda *_: [])  # as of a model that cannot be turned
    with pytest.raises(Killed):
        run(tmp_path, optimizer="rowwise_adagrad")
    assert "column_wise" in asked[1]


FIRST = Phase(name="first", steps=60, patience=2)
SECOND = Phase(name="second", steps=13)
THIRD = Phase(name="third", steps=25, patience=1, starts_best=True)


def blocks_of(counts, tables) -> RowBlocks:
    return blocks_from_counts(counts, tables, num_blocks=3, least_rows=1)


@dataclass
class Phases:
    """A plan that notes what it is asked; in its second phase alpha learns and a column dies at every step."""

    started: Setup
    phases: tuple[Phase, ...] = (FIRST, SECOND, THIRD)
    calls: list[tuple[str, str, int]] = field(default_factory=list)

    def phase_after(self, finished: Sequence[FinishedPhase]) -> Phase | None:
        return [*self.phases, None][len(finished)]

    def begin(self, phase: Phase, finished: Sequence[FinishedPhase]) -> None:
        self.note("begin", phase)
        assert [own.name for own in finished] == [own.name for own in self.phases[: len(finished)]]
        if finished:
            pipeline = self.started.pipeline
            self.started.stream.alternate(pipeline.lower_steps + pipeline.upper_steps)

    def after_step(self, phase: Phase, done: int) -> None:
        if phase.name == "second":
            alpha = self.started.pipeline.alpha.of(8)
            living = torch.arange(8).expand_as(alpha) >= done // 4
            self.started.pipeline.alpha_optimizer.retain_({8: living})

    def end(self, phase: Phase) -> None:
        self.note("end", phase)

    def note(self, call: str, phase: Phase) -> None:
        self.calls.append((call, phase.name, self.started.pipeline.lower_steps))


@dataclass
class Run:
    """A search of the tiny recipe by `Phases`; `weights` are those at the end of every epoch."""

    folder: Path
    events: SearchEvents = field(default_factory=SearchEvents)
    saving: Saving = field(default_factory=Saving)
    phases: tuple[Phase, ...] = (FIRST, SECOND, THIRD)
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = Setup(make_recipe(), blocks_of, CPU, self.events)
        self.plan = Phases(self.started, self.phases)
        self.loop: TrainLoop = self.started.loop(self.plan, self.folder, self.events, self.saving)
        self.events.on_epoch = lambda record: self.weights.append(self.now())

    def now(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in state_tensors(self.started.model).items()}


def scripted(monkeypatch: pytest.MonkeyPatch, losses: Sequence[float]) -> None:
    left = iter(losses)
    monkeypatch.setattr(search_loop, "selection_loss", lambda *_: next(left))


def test_phases_follow_each_other_and_go_back_to_their_best_epoch(gloo, tmp_path, monkeypatch) -> None:
    """The first stops early, the second takes all of its steps, the third is no better than what it began with."""
    scripted(monkeypatch, [0.6, 0.4, 0.5, 0.7, 0.8, 0.9, 0.95])
    run = Run(tmp_path)
    at_ends: list[dict[str, Tensor]] = []
    note = run.plan.note
    monkeypatch.setattr(run.plan, "end", lambda phase: (note("end", phase), at_ends.append(run.now())))
    run.loop.run()
    history = run.loop.history
    assert [record.phase for record in history] == ["first"] * 4 + ["second"] * 2 + ["third"]
    assert [record.epoch for record in history] == list(range(7))
    assert [record.step for record in history] == [10, 20, 30, 40, 50, 53, 63]
    assert run.plan.calls == [
        ("begin", "first", 0),
        ("end", "first", 40),
        ("begin", "second", 40),
        ("end", "second", 53),
        ("begin", "third", 53),
        ("end", "third", 63),
    ]
    first, second, third = run.loop.finished
    assert (first.first_step, first.last_step, first.best.epoch, first.best.lower_step, first.best.loss) == (
        *(0, 40, 1, 20, 0.4),
    )
    assert (second.best.epoch, second.best.loss, second.last_step) == (5, 0.9, 53)  # though it was better before
    assert third.best == second.best
    assert_same(at_ends[0], run.weights[1])
    assert_same(at_ends[1], run.weights[5])
    assert_same(at_ends[2], run.weights[5])
    assert_same(run.now(), run.weights[5])
    assert [record.alpha_density for record in history] == [1.0] * 4 + [0.75, 0.625, 0.625]
    assert history[4].alpha_mean < 1


class Dropping(nn.Module):
    """A model that draws random numbers in every step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(0.2)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        return self.model(self.dropout(dense_features), sparse_features)


class Counted:
    """Batches in an order that its epoch decides, as those of the examples have."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches, self.epoch = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = torch.randperm(len(self._batches), generator=torch.Generator().manual_seed(epoch))
        return iter([self._batches[place] for place in order.tolist()])


class Noisy:
    """Batches in an order of its own every epoch and with noise, drawn from torch's random numbers as users' do."""

    def __init__(self, batches: list[Batch]) -> None:
        self._loader = DataLoader(batches, batch_size=None, shuffle=True)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            yield replace(batch, dense_features=batch.dense_features + torch.rand(1))


def shuffled(optimizer: str) -> Recipe:
    recipe = make_recipe(optimizer=optimizer)
    kind = Noisy if optimizer == "adam" else Counted
    train, validation = kind(recipe.data.train.batches), kind(recipe.data.validation.batches)
    data = replace(recipe.data, train=train, validation=validation)
    return replace(recipe, model=Dropping(recipe.model), data=data)


def run_shuffled(
    folder: Path,
    optimizer: str,
    *,
    stop_at: int | None = None,
    kill_behind: str | None = None,
    every: int = 0,
    resume: bool = False,
    **settings: float,
) -> tuple[SearchOutcome | None, list[float]]:
    """A search, and the loss of each of its lower steps; None for the outcome of one that was stopped."""
    losses: list[float] = []

    def kill(record: EpochRecord, is_last: bool) -> None:
        if is_last and record.phase == kill_behind:
            raise Killed

    events = SearchEvents(
        on_step=lambda loss, density: losses.append(loss), should_stop=lambda: len(losses) == stop_at, on_save=kill
    )
    saving = Saving(checkpoint_every=every, resume=resume)
    torch.manual_seed(99 if resume else 7)  # a new process has other random numbers
    try:
        return found_by(shuffled(optimizer), folder, events, saving, **settings), losses
    except SearchInterrupted:
        return None, losses


def found_by(
    recipe: Recipe,
    folder: Path,
    events: SearchEvents | None = None,
    saving: Saving | None = None,
    *,
    compression: float = SIZE,
    **settings: object,
) -> SearchOutcome:
    own = replace(SHORT, **settings)
    return search(recipe, compression, folder, CPU, settings=own, events=events, policy=saving)


def assert_same_outcomes(first: SearchOutcome, second: SearchOutcome) -> None:
    """Bit for bit."""
    assert first.history == second.history
    assert first.best_epoch == second.best_epoch
    assert_same(first.model.state_dict(), second.model.state_dict())
    assert all(torch.equal(first.alpha[dim], second.alpha[dim]) for dim in first.alpha)
    assert (first.origin, first.selection_losses) == (second.origin, second.selection_losses)
    for name, table in first.scheme.tables.items():
        for part in ("bits", "scale", "shift"):
            assert torch.equal(getattr(table, part), getattr(second.scheme.tables[name], part))


def test_an_interrupted_search_equals_an_uninterrupted_one(gloo, tmp_path, monkeypatch) -> None:
    """Stopped within plain training, where it is over, between the stages of a ramp, and within the release."""
    monkeypatch.setattr(ramp, "LEAST_STEPS", 2)
    whole, expected = run_shuffled(tmp_path / "whole", "rowwise_adagrad")
    folder, seen = tmp_path / "broken", []
    for stop_at in (13, 7, 3, 12):
        outcome, losses = run_shuffled(folder, "rowwise_adagrad", stop_at=stop_at, resume=bool(seen))
        assert outcome is None
        seen += losses
    outcome, losses = run_shuffled(folder, "rowwise_adagrad", resume=True)
    assert seen + losses == expected
    assert_same_outcomes(outcome, whole)


@pytest.fixture(scope="module")
def whole_search(gloo, tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchOutcome, list[float], Path]:
    """A search in one go, the loss of every lower step, and its folder with a checkpoint every fourth step."""
    folder = tmp_path_factory.mktemp("search")
    return *run_shuffled(folder, "adam", every=4), folder


def test_a_search_goes_on_where_the_ramp_is_over_and_the_release_has_not_begun(
    whole_search: tuple[SearchOutcome, list[float], Path], tmp_path: Path
) -> None:
    """As after SIGKILL there; after one behind plain training: `test_tables_turn_once_...`."""
    whole, expected, _ = whole_search
    with pytest.raises(Killed):
        run_shuffled(tmp_path / "broken", "adam", kill_behind="ramp")
    outcome, losses = run_shuffled(tmp_path / "broken", "adam", resume=True)
    assert losses == expected[28:]
    assert_same_outcomes(outcome, whole)


def test_steps_since_the_last_checkpoint_are_repeated_alike(
    whole_search: tuple[SearchOutcome, list[float], Path], tmp_path: Path
) -> None:
    """As after SIGKILL, which saves nothing: the state on disk is that of some step before."""
    whole, expected, folder = whole_search
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    kept = CheckpointFolder(tmp_path).steps()
    assert len(kept) <= 6  # the last two, and the best ones of three phases, of the last one two
    for step in kept[::3]:
        lower = json.loads((tmp_path / f"step-{step:08d}" / "manifest.json").read_text())["values"]["lower_steps"]
        for later in CheckpointFolder(tmp_path).steps():
            if later > step:
                shutil.rmtree(tmp_path / f"step-{later:08d}")
        outcome, losses = run_shuffled(tmp_path, "adam", every=4, resume=True)
        assert losses == expected[lower:]
        assert_same_outcomes(outcome, whole)


def test_resume_without_a_checkpoint_begins_the_search(gloo, tmp_path: Path) -> None:
    assert len(run_shuffled(tmp_path, "adam", stop_at=5, resume=True)[1]) == 5


def test_other_data_in_as_many_batches_is_refused(gloo, tmp_path: Path) -> None:
    """However little of it is other: two samples of one batch have their labels swapped."""
    stop, same = SearchEvents(should_stop=lambda: True), make_recipe()
    with pytest.raises(SearchInterrupted):
        found_by(make_recipe(), tmp_path, stop)
    for split in ("train", "validation", "selection", "test"):
        other = make_recipe()
        labels = getattr(other.data, split).batches[1].labels
        labels[[int(labels.argmin()), int(labels.argmax())]] = torch.tensor([1.0, 0.0])
        message = rf"checkpoint .*step-\d+: expected one of this data, got one of other samples in: {split}; resume"
        with pytest.raises(ValueError, match=message):
            found_by(other, tmp_path, saving=Saving(resume=True))
        getattr(same.data, split).batches.reverse()  # the order of an epoch is the stream's own affair
    with pytest.raises(SearchInterrupted):
        found_by(same, tmp_path, stop, Saving(resume=True))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]) -> tuple[str, str]:
    texts = []
    for work in (
        lambda recipe: dnis.search(recipe, compression=4, settings=QUICK),
        lambda recipe: dnis.compress(recipe.model, recipe.data.train, loss=recipe.loss, compression=4),
    ):
        monkeypatch.setattr(sys, "stderr", kind())
        torch.manual_seed(0)
        work(make_recipe())
        texts.append(sys.stderr.getvalue())
    return texts[0], texts[1]


def test_calls_show_progress_and_end_in_a_sentence_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    search, compress = shown(monkeypatch, Terminal)
    assert "plain, epoch 1 of at most 1:" in search
    for text in (search, compress):
        sentence = text.splitlines()[-1]
        assert sentence.startswith("Tables are 4.")
        assert "bytes instead of 1,664; " in sentence
        assert "uncompressed" in sentence


def test_elsewhere_they_show_nothing_but_log_it(monkeypatch, caplog) -> None:
    with caplog.at_level(logging.INFO, "dnis_torchrec"):
        assert shown(monkeypatch, io.StringIO) == ("", "")
    messages = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith("Tables are 4.") for message in messages) == 2
    assert any(message.startswith("epoch 0, plain: train loss") for message in messages)
