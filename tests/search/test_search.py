"""The whole search on a tiny recipe: meets the size, for every torchrec model, through export; what it saves."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec import TrainTask, export, packed_collections
from dnis_torchrec.allocation.bits import Prediction
from dnis_torchrec.allocation.held_out import LossSample, with_gains
from dnis_torchrec.artifact.export import drop_in_
from dnis_torchrec.blocks.codes import is_coded
from dnis_torchrec.data import over_ranks
from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.data.over_ranks import count_training_data
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme
from dnis_torchrec.search import search as search_module
from dnis_torchrec.search.search import COMPRESSED, SEARCHED, SearchOutcome, search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.search.started import _in_parts
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.training import checkpoint
from dnis_torchrec.training import loop as search_loop
from dnis_torchrec.training import shard as sharding_of_training
from dnis_torchrec.training.checkpoint import CheckpointFolder, CheckpointWriteError
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import EpochRecord, SearchEvents, SearchInterrupted
from dnis_torchrec.training.pipeline import NonFiniteError
from dnis_torchrec.training.settings import Saving
from tests.batches import OneOf
from tests.late import read_late
from tests.tiny import ROWS, make_batch, make_collection, make_model, make_recipe, ranked

CPU = torch.device("cpu")
SIZE = 10.0
SHORT = SearchSettings(num_blocks=3, epochs=2, patience=2)


def found_by(recipe: Recipe, folder: Path, events: SearchEvents | None = None, saving: Saving | None = None):
    """A search of a second."""
    return search(recipe, SIZE, folder, CPU, settings=SHORT, events=events, saving=saving)


def selection_loss_of(outcome: SearchOutcome, recipe: Recipe) -> float:
    return evaluate(TrainTask(outcome.model, recipe.loss), recipe.data.selection, recipe.loss, CPU)["loss"]


def assert_tables_hold_what_is_served(outcome: SearchOutcome) -> None:
    """Bit for bit, row by row."""
    names = list(ROWS)
    for fqn, packed in packed_collections(outcome.model, outcome.scheme).items():
        tables = {own.table: own.weight for own in local_shards(collections(outcome.model)[fqn])}
        for number, name in enumerate(names):
            lengths = torch.zeros(len(names), ROWS[name], dtype=torch.int64)
            lengths[number] = 1
            served = packed(KeyedJaggedTensor(names, torch.arange(ROWS[name]), lengths=lengths.flatten()))
            assert torch.equal(served[name], tables[name])


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("dlrm", "adam"), ("dlrm", "rowwise_adagrad"), ("dlrm_dcn", "adam"), ("deepfm", "rowwise_adagrad")],
)
def test_torchrecs_models_go_all_the_way_unmodified(gloo, tmp_path: Path, kind: str, optimizer: str) -> None:
    recipe, seen = make_recipe(kind, optimizer=optimizer), []
    outcome = found_by(recipe, tmp_path, SearchEvents(on_epoch=seen.append))
    assert SIZE <= outcome.scheme.compression(PACKED) <= 1.4 * SIZE  # a column of 13 rows is 4 % of the bytes
    assert outcome.predicted_loss_increase >= 0 or outcome.origin == COMPRESSED  # where held-out samples teach scales
    assert_tables_hold_what_is_served(outcome)
    assert outcome.selection_loss == outcome.selection_losses[outcome.origin] == min(outcome.selection_losses.values())
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
    drop_in_(fresh.model, artifact)
    served = evaluate(TrainTask(fresh.model, recipe.loss), recipe.data.test, recipe.loss, CPU)
    assert served == pytest.approx(expected, abs=1e-5)


def dense_of(model: nn.Module) -> dict[str, Tensor]:
    """Weights beside the tables."""
    return {name: value for name, value in model.state_dict().items() if ".embedding_bags." not in name}


@pytest.mark.parametrize("loses", [SEARCHED, COMPRESSED])
def test_the_better_of_two_is_returned_with_its_own_weights(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses: str
) -> None:
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
    assert not same.pop(bias)  # of the compressed model it goes up by what keeps the mean prediction
    assert set(same.values()) == {wins == COMPRESSED}
    assert outcome.scheme.compression(PACKED) >= SIZE


def test_scales_of_what_was_searched_learn_once_weights_have(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_dense_weights_slow_down_behind_plain_training(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates, set_rates = [], search_module.set_learning_rates_

    def noting(*model_and_optimizer: object, **of_parts: float) -> None:
        rates.append(of_parts)
        set_rates(*model_and_optimizer, **of_parts)

    monkeypatch.setattr(search_module, "set_learning_rates_", noting)
    monkeypatch.setattr(search_module, "_Finishing", None)  # what it does is of no interest here
    with pytest.raises(TypeError):
        found_by(replace(make_recipe(), row_weights=("over_arch.model.1.bias",)), tmp_path)
    assert rates == [{"tables": 0.01, "dense": 0.01 * search_module.DENSE_SHARE, "rows": 0.01}] * 2


def test_a_size_that_bits_alone_lead_to_drops_no_column_before_the_end(gloo, tmp_path: Path) -> None:
    outcome = search(make_recipe(), 4, tmp_path, CPU, settings=replace(SHORT, epochs=1))
    assert {record.alpha_density for record in outcome.history} == {1.0}
    assert outcome.scheme.compression(PACKED) >= 4


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


def test_a_request_to_stop_saves_the_state(gloo, tmp_path: Path) -> None:
    steps = []
    events = SearchEvents(on_step=lambda loss, density: steps.append(loss), should_stop=lambda: len(steps) == 13)
    with pytest.raises(SearchInterrupted, match=r"epoch 1, lower step 13: stopped on request; .* saved in .*step-"):
        found_by(make_recipe(), tmp_path, events)
    assert CheckpointFolder(tmp_path).latest() == tmp_path / "step-00000013"


def test_a_request_to_stop_is_heard_while_a_search_finishes(gloo, tmp_path: Path) -> None:
    """It is asked after every step, of the last phase's end on too; what goes on comes to what one would have."""
    whole, asked, last = found_by(make_recipe(), tmp_path / "whole"), [], []
    events = SearchEvents(
        on_alpha=lambda record, alpha, is_last: last.append(record.phase == "release" and is_last),
        should_stop=lambda: bool(last) and last[-1] and (asked.append(1) or len(asked) == 4),
    )
    with pytest.raises(SearchInterrupted, match=r"^finishing, step 4: stopped on request; its phases are saved in .*,"):
        found_by(make_recipe(), tmp_path / "broken", events)
    again = found_by(make_recipe(), tmp_path / "broken", saving=Saving(resume=True))
    assert again.selection_losses == whole.selection_losses
    own = whole.model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in again.model.state_dict().items())


def test_a_model_that_looks_untrained_is_told_once(
    gloo, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dnis_torchrec.allocation.curvature.LEAST_CURVATURE", 1e9)
    found_by(make_recipe(), tmp_path)
    assert caplog.text.count("the model looks untrained") == 1


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


def scripted(monkeypatch: pytest.MonkeyPatch, losses: Sequence[float]) -> list[EpochRecord]:
    """Lets epochs have the selection losses that are written, and returns where their records go."""
    records: list[EpochRecord] = []
    monkeypatch.setattr(search_loop, "selection_loss", lambda *_: losses[len(records)])
    return records


def test_best_epochs_that_could_not_be_written_leave_the_last_one_that_was(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in a row, each better than all before."""
    records = scripted(monkeypatch, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    is_full, save_file = threading.Event(), checkpoint.save_file

    def save_unless_full(*arguments: object) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(*arguments)

    def on_epoch(record: EpochRecord) -> None:
        records.append(record)
        if record.epoch == 3:
            is_full.set()

    monkeypatch.setattr(checkpoint, "save_file", save_unless_full)
    events = SearchEvents(on_epoch=on_epoch)
    outcome = found_by(make_recipe(), tmp_path, events, Saving(on_save_error="continue"))
    assert [record.phase for record in records] == ["plain", "plain", "ramp", "release", "release"]
    assert outcome.best_epoch == (2 if outcome.origin == SEARCHED else 1)


def test_a_phase_of_which_no_checkpoint_could_be_written_is_the_last_one(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search goes back to the best epochs of its phases when all are over: too late to learn that there are none."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    records: list[EpochRecord] = []
    message = "^phase 'plain': expected the checkpoint of an epoch, to go back to, got none; make room"
    with pytest.raises(CheckpointWriteError, match=message):
        found_by(make_recipe(), tmp_path, SearchEvents(on_epoch=records.append), Saving(on_save_error="continue"))
    assert [record.phase for record in records] == ["plain"] * 2


def test_ids_and_bags_of_all_splits_are_looked_at_before_training(gloo, tmp_path: Path) -> None:
    table = "table 'user', feature 'user'"
    for name in ("validation", "selection", "test"):
        recipe = make_recipe()
        getattr(recipe.data, name).batches[1].sparse_features.values()[0] = 40
        with pytest.raises(ValueError, match=rf"{table}, {name} batch 1: expected ids in 0\.\.39, got 40; hash the"):
            found_by(recipe, tmp_path)
    recipe = make_recipe()
    features = recipe.data.test.batches[1].sparse_features
    longer = {key: [*jagged.to_dense()] for key, jagged in features.to_dict().items()}
    longer["user"][3] = torch.tensor([1, 2, 3])
    recipe.data.test.batches[1].sparse_features = bags_of(longer)
    counts = count_training_data(recipe.data, recipe.loss, table_configs(recipe.model))
    assert counts.max_bag_lengths["user"] == 3
    assert found_by(recipe, tmp_path).scheme.compression(PACKED) >= SIZE


def test_no_rank_is_left_out_of_a_part() -> None:
    """Two samples are one part for two ranks: two parts would be too small for both to step on."""
    recipe = make_recipe()
    batch = slice_of(recipe.data.validation.batches[0], 0, 2)
    for number in range(2):
        parts = _in_parts(replace(recipe.data, validation=[batch]), 2, OneOf(number, 2))
        assert [part.labels.tolist() for part in parts] == [batch.labels[number : number + 1].tolist()]


def bags_of(bags: dict[str, list[torch.Tensor]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.cat([bag for of_key in bags.values() for bag in of_key]),
        lengths=torch.tensor([bag.numel() for of_key in bags.values() for bag in of_key]),
    )


def test_bad_labels_and_empty_splits_are_found_before_training(gloo, tmp_path: Path) -> None:
    recipe = make_recipe()
    recipe.data.selection.batches[1].labels[3] = 5.0
    with pytest.raises(
        ValueError, match=r"selection batch 1: expected labels in \[0, 1\] for BCEWithLogitsLoss, got 5.0"
    ):
        found_by(recipe, tmp_path)
    recipe = make_recipe()
    recipe.data.train.batches[0].labels[3] = 0.75
    recipe.data.test.batches[1].labels[3] = 0.75
    with pytest.raises(ValueError, match=r"test batch 1: expected labels 0 or 1, got 0.75; smooth labels in the train"):
        found_by(recipe, tmp_path)
    recipe = make_recipe()
    recipe.data.train.batches[4].labels = recipe.data.train.batches[4].labels.unsqueeze(1)
    with pytest.raises(
        ValueError, match=r"train batch 4: expected labels of shape \(B,\), got \(64, 1\); flatten them"
    ):
        found_by(recipe, tmp_path)
    recipe = make_recipe()
    recipe.data.validation.batches.clear()
    with pytest.raises(ValueError, match=r"validation stream: expected at least one batch, got 0"):
        found_by(recipe, tmp_path)


def test_rankings_are_checked_before_training(gloo, tmp_path: Path) -> None:
    """Else a search would end with an error of its last evaluation, and could not be resumed past it."""
    recipe = make_recipe()
    recipe.data.test.batches[:] = [ranked(make_batch(27, 60), 9)]
    with pytest.raises(
        ValueError, match=r"test split, query 0: expected at least k=10 candidates, got 9; add negatives"
    ):
        found_by(recipe, tmp_path)
    stars = ranked(make_batch(30, 60), 10)
    stars.labels[7] = 4.0
    recipe = replace(make_recipe(), loss=nn.MSELoss())
    recipe.data.selection.batches[:] = [stars]
    with pytest.raises(
        ValueError, match=r"selection batch 0: expected labels 0 or 1, got 4.0; mark relevant candidates"
    ):
        found_by(recipe, tmp_path)
    recipe.data.train.batches[0].labels[7] = stars.labels[7] = 1.0
    recipe.data.train.batches[1].labels[7] = 4.0  # ratings may be trained on
    assert found_by(recipe, tmp_path).best_epoch >= 0


def test_bags_that_the_plain_model_could_not_pool_are_refused_before_training(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_ranks, "count_training_data", lambda *_, **__: pytest.fail("read the data"))
    recipe = replace(make_recipe(), model=make_collection(is_weighted=True))
    features = make_batch(4, 0).sparse_features
    weights = torch.ones(features.values().numel())
    with pytest.raises(NotImplementedError, match="only supported for mode='sum'"):
        recipe.model(KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths()))
    with pytest.raises(
        ValueError, match=r"table 'genre': expected SUM pooling of bags with weights, got MEAN; use SUM"
    ):
        found_by(recipe, tmp_path)
    monkeypatch.setattr(sharding_of_training, "world_size_of", lambda: 2)
    sharding_of_training.check_pooling(recipe.model)  # stays sharded, and FBGEMM's kernels can


def test_models_of_the_tests_are_torchrecs_own() -> None:
    assert {type(make_model(kind)).__module__ for kind in ("dlrm", "dlrm_dcn", "deepfm")} == {
        "torchrec.models.dlrm",
        "torchrec.models.deepfm",
    }
