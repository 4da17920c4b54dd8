"""The whole search on a tiny recipe: lands on the requested size, for every torchrec model, through export and load."""

from __future__ import annotations

import errno
import threading
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec import MixedDimensionEmbeddingBagCollection, Size, TrainTask, export, load
from dnis_torchrec.data.batches import slice_of
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.jobs.artifact_jobs import drop_in_
from dnis_torchrec.search import loop as search_loop
from dnis_torchrec.search import search as search_module
from dnis_torchrec.search.config import SearchConfig
from dnis_torchrec.search.loop import EpochRecord
from dnis_torchrec.search.search import Saving, SearchEvents, SearchInterrupted, _in_parts, count_training_data, search
from dnis_torchrec.soft_selection.table_shards import collections, table_configs
from dnis_torchrec.training import sharded as sharding_of_training
from dnis_torchrec.training.checkpoint import LocalCheckpointFolder, transfer
from dnis_torchrec.training.evaluation import evaluate
from dnis_torchrec.training.finite import NonFiniteError
from tests.batches import OneOf
from tests.tiny import make_batch, make_collection, make_model, make_recipe, ranked

CPU = torch.device("cpu")
LARGEST_BLOCK = 18
SHORT = {"warm_up_epochs": 1, "ramp_epochs": 4, "release_epochs": 2}


@pytest.mark.parametrize("kind", ["dlrm", "dlrm_dcn", "deepfm"])
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_torchrecs_models_go_all_the_way_unmodified(gloo, tmp_path: Path, kind: str, optimizer: str) -> None:
    recipe = make_recipe(kind, optimizer=optimizer)
    outcome = search(recipe, SearchConfig(size=Size(compression=4), **SHORT), tmp_path, CPU)
    assert 4 <= outcome.scheme.compression() <= 4 * 1.25  # a column of the largest block is 18 % of the budget

    pruned = TrainTask(outcome.model, recipe.loss)
    expected = evaluate(pruned, recipe.data.test, recipe.loss, CPU)
    artifact = export(outcome.model, outcome.scheme, tmp_path / "artifact")
    fresh = make_recipe(kind, seed=1)
    drop_in_(fresh.model, artifact)
    served = evaluate(TrainTask(fresh.model, recipe.loss), recipe.data.test, recipe.loss, CPU)
    assert served == pytest.approx(expected, abs=1e-6)
    (collection,) = collections(outcome.model).values()
    features = make_batch(16, 7).sparse_features
    loaded = load(artifact)
    assert isinstance(loaded, MixedDimensionEmbeddingBagCollection)
    torch.testing.assert_close(loaded(features).values(), collection(features).values(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("column_order", "column_sharing"), [("alpha", 0.5), ("importance", 0.25)])
def test_a_configuration_takes_from_the_recipe_whatever_both_know(column_order: str, column_sharing: float) -> None:
    values = {"num_blocks": 3, "warm_up_epochs": 4, "ramp_epochs": 5, "release_epochs": 6, "upper_every": 7}
    values |= {"column_sharing": column_sharing, "alpha_learning_rate": 0.25, "release_table_learning_rate": 0.125}
    values |= {"release_dense_learning_rate": 0.0625, "scope": "table", "column_order": column_order}
    values |= {"search_table_learning_rate": 0.375, "search_dense_learning_rate": 0.1875}
    values |= {"search_row_learning_rate": 0.75, "release_decay": 0.875}
    assert values.keys() == {f.name for f in fields(Recipe)} & {f.name for f in fields(SearchConfig)}
    recipe = replace(make_recipe(), **values)
    config = SearchConfig.of(recipe, Size(compression=2), {"ramp_epochs": 8})
    assert {name: getattr(config, name) for name in values} == {**values, "ramp_epochs": 8}


@given(parts=st.tuples(*[st.integers(1, 40)] * 3), max_epochs=st.integers(3, 150))
def test_a_shorter_search_keeps_its_shares(parts: tuple[int, int, int], max_epochs: int) -> None:
    warm_up, ramp, release = parts
    size = Size(compression=2)
    config = SearchConfig(size=size, warm_up_epochs=warm_up, ramp_epochs=ramp, release_epochs=release)
    short = config.within(max_epochs)
    assert (short == config) == (config.epochs <= max_epochs)
    assert short.epochs <= max_epochs
    if short != config:
        kept = (short.warm_up_epochs, short.ramp_epochs, short.release_epochs)
        shares = [part * max_epochs / config.epochs for part in parts]
        assert min(kept) >= 1
        # A whole epoch is less than the share only where a part of less than one epoch was rounded up.
        rounded_up = sum(1 for share in shares if share < 1)
        assert all(share - 1 - rounded_up < own < share + 1 for own, share in zip(kept, shares, strict=True))
        assert max(kept) - kept[shares.index(max(shares))] <= 1


def test_fewer_than_three_epochs_count_as_three() -> None:
    config = SearchConfig(size=Size(compression=2), warm_up_epochs=1, ramp_epochs=1, release_epochs=4)
    assert [config.within(most).epochs for most in (1, 2, 3, 4, 5, 6)] == [3, 3, 3, 4, 5, 6]


@pytest.mark.parametrize(("pressure", "most"), [(True, 10), (False, 30)])
def test_alpha_steps_before_columns_die(gloo, tmp_path: Path, pressure: bool, most: int) -> None:
    settings = {"pressure": pressure, "warm_up_epochs": 1, "ramp_epochs": 1, "release_epochs": 2, "upper_every": most}
    settings |= {} if pressure else {"structure": "element"}
    config = SearchConfig(size=Size(compression=2, form="csr_fp32"), **settings)
    assert search(make_recipe(), config, tmp_path / "enough", CPU).best_epoch >= 0
    with pytest.raises(
        ValueError, match=f"upper_every: expected at most {most}, the lower steps of .*, got {most + 1}"
    ):
        search(make_recipe(), replace(config, upper_every=most + 1), tmp_path / "never", CPU)


@pytest.mark.parametrize(
    "size",
    [Size(compression=2), Size(compression=3.5), Size(embedding_bytes=700), Size(compression=4, form="csr_fp32")],
    ids=lambda size: f"{size.given[0]}-{size.given[1]}-{size.form}",
)
def test_lands_on_the_requested_size(gloo, tmp_path: Path, size: Size) -> None:
    outcome = search(make_recipe(), SearchConfig(size=size, **SHORT), tmp_path, CPU)
    scheme = outcome.scheme
    got, asked, column = scheme.served_bytes(size.form), size.num_bytes(scheme.dense_parameters), 5 * LARGEST_BLOCK
    # 3 %, or one column of a block where so tiny a recipe cannot be cut finer.
    assert asked - max(0.03 * asked, column) <= got <= asked


@pytest.mark.parametrize("upper_every", [1, 3])
def test_the_history_tells_the_phases(gloo, tmp_path: Path, upper_every: int) -> None:
    seen = []
    config = SearchConfig(size=Size(compression=4), upper_every=upper_every, **SHORT)
    outcome = search(make_recipe(), config, tmp_path, CPU, SearchEvents(on_epoch=seen.append))
    assert tuple(seen) == outcome.history
    density = [record.alpha_density for record in seen]
    assert density[0] == 1.0
    settled = SHORT["warm_up_epochs"] + SHORT["ramp_epochs"] - 1
    assert all(later < earlier for earlier, later in pairwise(density[: settled + 1]))
    assert len(set(density[settled:])) == 1  # and kept
    assert density[-1] < 0.5
    assert [record.pressure > 0 for record in seen[:2]] == [True, True]
    assert outcome.best_epoch >= settled


@pytest.mark.parametrize("pressure", [True, False])
def test_no_epoch_before_the_columns_are_settled_is_the_best_one(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pressure: bool
) -> None:
    """Nor does patience run before; without pressure from the warm-up's end on, where nothing settles."""
    config = SearchConfig(
        size=Size(compression=4, form="csr_fp32"),
        pressure=pressure,
        structure="block" if pressure else "element",
        warm_up_epochs=2,
        ramp_epochs=2,
        release_epochs=3,
        patience=2,
    )
    losses = [0.1, 0.2, 0.3, 0.6, 0.5, 0.4, 0.7] if pressure else [0.1, 0.2, 0.5, 0.4, 0.3, 0.6, 0.7]
    records = []
    monkeypatch.setattr(search_loop, "evaluate", lambda *_: {"loss": losses[len(records)]})
    outcome = search(make_recipe(), config, tmp_path, CPU, SearchEvents(on_epoch=records.append))
    assert [record.selection_loss for record in outcome.history] == losses
    assert outcome.best_epoch == losses.index(0.4 if pressure else 0.3)


RELEASE_RATES = ["release_table_learning_rate", "release_dense_learning_rate"]
SEARCH_RATES = [f"search_{part}_learning_rate" for part in ("table", "dense", "row")]
RATES = [*SEARCH_RATES, *RELEASE_RATES]


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
@pytest.mark.parametrize("name", RELEASE_RATES)
def test_the_release_has_rates_of_its_own(gloo, tmp_path: Path, optimizer: str, name: str) -> None:
    losses = {}
    for rate in (None, 0.1):
        config = SearchConfig(size=Size(compression=4), **{name: rate}, **SHORT)
        outcome = search(make_recipe(optimizer=optimizer), config, tmp_path / str(rate), CPU)
        losses[rate] = [record.train_loss for record in outcome.history]
    before = SHORT["warm_up_epochs"] + SHORT["ramp_epochs"]
    same = [mine == other for mine, other in zip(*losses.values(), strict=True)]
    assert same == [True] * before + [False] * SHORT["release_epochs"]


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
@pytest.mark.parametrize("pressure", [True, False], ids=["pressure", "no pressure"])
def test_rates_fall_in_the_release_from_its_second_epoch_on(
    gloo, tmp_path: Path, monkeypatch, optimizer: str, pressure: bool
) -> None:
    recipe, rates = replace(make_recipe(optimizer=optimizer), row_weights=("over_arch.model.1.bias",)), []
    set_rates = search_module.set_learning_rates_

    def noting(*model_and_optimizer: object, **of_parts: float) -> None:
        rates.append((of_parts["tables"], of_parts["dense"], of_parts["rows"]))
        set_rates(*model_and_optimizer, **of_parts)

    monkeypatch.setattr(search_module, "set_learning_rates_", noting)
    settings = {
        "search_table_learning_rate": 0.02,
        "search_row_learning_rate": 0.04,
        "release_table_learning_rate": 0.08,
        "release_decay": 0.5,
        "pressure": pressure,
    }
    settings |= {} if pressure else {"structure": "element"}
    size = Size(compression=4, form="csr_fp32")
    config = SearchConfig(size=size, **settings, **{**SHORT, "release_epochs": 3})
    search(recipe, config, tmp_path, CPU)
    table, dense = recipe.table_learning_rate, recipe.dense_learning_rate
    if pressure:
        before = config.warm_up_epochs + config.ramp_epochs
        falling = [(0.08 * share, dense * share, 0.04 * share) for share in (1, 0.5, 0.25)]
        assert rates == [(0.02, dense, 0.04)] * before + falling[: len(rates) - before]
        assert len(rates) >= before + 2
    else:
        assert set(rates) == {(table, dense, table)}


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5, float("nan")])
def test_a_decay_is_a_share(decay: float) -> None:
    with pytest.raises(ValueError, match=f"release_decay: expected a number above 0 and at most 1, got {decay}"):
        SearchConfig(size=Size(compression=4), release_decay=decay)


@pytest.mark.parametrize("part", ["table", "dense"])
@pytest.mark.parametrize(
    ("optimizer", "unrolled"), [("adam", False), ("adam", True), ("rowwise_adagrad", False)], ids=str
)
def test_a_search_has_rates_of_its_own_until_the_release(
    gloo, tmp_path: Path, optimizer: str, unrolled: bool, part: str
) -> None:
    """From the first epoch on as if the recipe had that rate, in the release the release's."""
    histories = []
    for of_recipe, settings in ((0.02, {}), (1e-3, {f"search_{part}_learning_rate": 0.02})):
        recipe = replace(make_recipe(optimizer=optimizer), **{f"{part}_learning_rate": of_recipe})
        settings |= {f"release_{part}_learning_rate": 0.01, "unrolled": unrolled}
        config = SearchConfig(size=Size(compression=4), **settings, **SHORT)
        histories.append(search(recipe, config, tmp_path / str(of_recipe), CPU).history)
    assert histories[0] == histories[1]


def test_weights_of_rows_have_the_tables_plain_rate_in_a_search_or_their_own(gloo, tmp_path: Path) -> None:
    recipe = make_recipe()
    rows = next(name for name, _ in recipe.model.named_parameters() if name.startswith("over_arch") and "bias" in name)
    histories = []
    for plain, own in ((0.02, None), (0.001, 0.02), (0.001, None)):
        recipe = replace(make_recipe(), table_learning_rate=plain, row_weights=(rows,))
        rates = {
            "search_table_learning_rate": 0.01,
            "search_row_learning_rate": own,
            "release_table_learning_rate": 0.1,
        }
        config = SearchConfig(size=Size(compression=4), **rates, **SHORT)
        histories.append(search(recipe, config, tmp_path / f"{plain} {own}", CPU).history)
    assert histories[0] == histories[1]
    assert histories[0][0] != histories[2][0]
    assert histories[0][-1] != histories[2][-1]


def test_without_pressure_there_is_no_release(gloo, tmp_path: Path) -> None:
    histories = []
    for rate in (None, 0.1):
        settings = {"pressure": False, "structure": "element", **dict.fromkeys(RATES, rate)}
        config = SearchConfig(size=Size(compression=4, form="csr_fp32"), **settings, **SHORT)
        recipe = replace(make_recipe(), row_weights=("over_arch.model.1.bias",))
        histories.append(search(recipe, config, tmp_path / str(rate), CPU).history)
    assert histories[0] == histories[1]


@pytest.mark.parametrize("rate", [0.0, -0.1])
@pytest.mark.parametrize("name", RATES)
def test_a_rate_of_a_search_is_above_zero(name: str, rate: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a number above 0, got {rate}"):
        SearchConfig(size=Size(compression=4), **{name: rate})


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scope: expected one of \('global', 'table'\), got 'row'"):
        SearchConfig(size=Size(compression=4), scope="row")


def test_same_seed_same_outcome(gloo, tmp_path: Path) -> None:
    schemes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        config = SearchConfig(size=Size(compression=4), **SHORT)
        schemes.append(search(make_recipe(), config, tmp_path / name, CPU).scheme)
    for table, first in schemes[0].tables.items():
        assert torch.equal(first.retained, schemes[1].tables[table].retained)


def test_a_request_to_stop_saves_the_state(gloo, tmp_path: Path) -> None:
    steps = []
    events = SearchEvents(on_step=lambda loss, density: steps.append(loss), should_stop=lambda: len(steps) == 13)
    with pytest.raises(SearchInterrupted, match=r"epoch 1, lower step 13: stopped on request; .* saved in .*step-"):
        search(make_recipe(), SearchConfig(size=Size(compression=4), **SHORT), tmp_path, CPU, events)
    assert LocalCheckpointFolder(tmp_path).latest() == tmp_path / "step-00000015"


def test_divergence_keeps_the_last_good_checkpoint(gloo, tmp_path: Path) -> None:
    recipe = make_recipe()

    def poison(record) -> None:
        if record.epoch == 1:
            recipe.data.train.batches[4].dense_features[:] = float("nan")

    config = SearchConfig(size=Size(compression=4), **SHORT)
    with pytest.raises(NonFiniteError, match="lower step 24"):
        search(recipe, config, tmp_path, CPU, SearchEvents(on_epoch=poison))
    from safetensors.torch import load_file

    saved = load_file(LocalCheckpointFolder(tmp_path).latest() / "rank0.safetensors")
    assert all(bool(torch.isfinite(value.float()).all()) for value in saved.values())


def test_best_epochs_that_could_not_be_written_leave_the_last_one_that_was(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in a row, each better than all before."""
    config = SearchConfig(size=Size(compression=4), warm_up_epochs=1, ramp_epochs=1, release_epochs=4)
    is_full, epochs, save_file = threading.Event(), [], transfer.save_file

    def save_unless_full(*arguments: object) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(*arguments)

    def on_epoch(record: EpochRecord) -> None:
        epochs.append(record.epoch)
        if record.epoch == config.epochs - 2:
            is_full.set()

    monkeypatch.setattr(transfer, "save_file", save_unless_full)
    monkeypatch.setattr(search_loop, "evaluate", lambda *_: {"loss": 1.0 - 0.1 * len(epochs)})
    saving = Saving(on_save_error="continue")
    outcome = search(make_recipe(), config, tmp_path, CPU, SearchEvents(on_epoch=on_epoch), saving)
    assert epochs == list(range(config.epochs))
    assert outcome.best_epoch == config.epochs - 3


def test_ids_and_bags_of_all_splits_are_looked_at_before_training(gloo, tmp_path: Path) -> None:
    config = SearchConfig(size=Size(compression=4), **SHORT)
    table = "table 'user', feature 'user'"
    for name in ("validation", "selection", "test"):
        recipe = make_recipe()
        getattr(recipe.data, name).batches[1].sparse_features.values()[0] = 40
        with pytest.raises(ValueError, match=rf"{table}, {name} batch 1: expected ids in 0\.\.39, got 40; hash the"):
            search(recipe, config, tmp_path, CPU)
        recipe = make_recipe()
        features = getattr(recipe.data, name).batches[1].sparse_features
        longer = {key: [*jagged.to_dense()] for key, jagged in features.to_dict().items()}
        longer["user"][3] = torch.tensor([1, 2, 3])
        getattr(recipe.data, name).batches[1].sparse_features = bags_of(longer)
        counts = count_training_data(recipe.data, recipe.loss, table_configs(recipe.model))
        assert counts.max_bag_lengths["user"] == 3
        assert search(recipe, config, tmp_path / name, CPU).scheme.compression() >= 4


def test_no_rank_is_left_out_of_a_part() -> None:
    """Two samples are one part for two ranks: two parts would be too small for both to step on."""
    recipe, config = make_recipe(), SearchConfig(size=Size(compression=4), upper_batch_parts=2)
    batch = slice_of(recipe.data.validation.batches[0], 0, 2)
    for number in range(2):
        parts = _in_parts(replace(recipe.data, validation=[batch]), config, OneOf(number, 2))
        assert [part.labels.tolist() for part in parts] == [batch.labels[number : number + 1].tolist()]


def bags_of(bags: dict[str, list[torch.Tensor]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.cat([bag for of_key in bags.values() for bag in of_key]),
        lengths=torch.tensor([bag.numel() for of_key in bags.values() for bag in of_key]),
    )


def test_bad_labels_and_empty_splits_are_found_before_training(gloo, tmp_path: Path) -> None:
    config = SearchConfig(size=Size(compression=4), **SHORT)
    recipe = make_recipe()
    recipe.data.selection.batches[1].labels[3] = 5.0
    with pytest.raises(
        ValueError, match=r"selection batch 1: expected labels in \[0, 1\] for BCEWithLogitsLoss, got 5.0"
    ):
        search(recipe, config, tmp_path, CPU)
    recipe = make_recipe()
    recipe.data.train.batches[0].labels[3] = 0.75
    recipe.data.test.batches[1].labels[3] = 0.75
    with pytest.raises(ValueError, match=r"test batch 1: expected labels 0 or 1, got 0.75; smooth labels in the train"):
        search(recipe, config, tmp_path, CPU)
    recipe = make_recipe()
    recipe.data.train.batches[4].labels = recipe.data.train.batches[4].labels.unsqueeze(1)
    with pytest.raises(
        ValueError, match=r"train batch 4: expected labels of shape \(B,\), got \(64, 1\); flatten them"
    ):
        search(recipe, config, tmp_path, CPU)
    recipe = make_recipe()
    recipe.data.validation.batches.clear()
    with pytest.raises(ValueError, match=r"validation stream: expected at least one batch, got 0"):
        search(recipe, config, tmp_path, CPU)


def test_rankings_are_checked_before_training(gloo, tmp_path: Path) -> None:
    """Else a search would end with an error of its last evaluation, and could not be resumed past it."""
    config = SearchConfig(size=Size(compression=4), **SHORT)
    recipe = make_recipe()
    recipe.data.test.batches[:] = [ranked(make_batch(27, 60), 9)]
    with pytest.raises(
        ValueError, match=r"test split, query 0: expected at least k=10 candidates, got 9; add negatives"
    ):
        search(recipe, config, tmp_path, CPU)
    stars = ranked(make_batch(30, 60), 10)
    stars.labels[7] = 4.0
    recipe = replace(make_recipe(), loss=nn.MSELoss())
    recipe.data.selection.batches[:] = [stars]
    with pytest.raises(
        ValueError, match=r"selection batch 0: expected labels 0 or 1, got 4.0; mark relevant candidates"
    ):
        search(recipe, config, tmp_path, CPU)
    recipe.data.train.batches[0].labels[7] = stars.labels[7] = 1.0
    recipe.data.train.batches[1].labels[7] = 4.0  # ratings may be trained on
    assert search(recipe, config, tmp_path, CPU).best_epoch >= 0


def test_bags_that_the_plain_model_could_not_pool_are_refused_before_training(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "count_training_data", lambda *_, **__: pytest.fail("read the data"))
    recipe = replace(make_recipe(), model=make_collection(is_weighted=True))
    features = make_batch(4, 0).sparse_features
    weights = torch.ones(features.values().numel())
    with pytest.raises(NotImplementedError, match="only supported for mode='sum'"):
        recipe.model(KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths()))
    with pytest.raises(
        ValueError, match=r"table 'genre': expected SUM pooling of bags with weights, got MEAN; use SUM"
    ):
        search(recipe, SearchConfig(size=Size(compression=4), **SHORT), tmp_path, CPU)
    monkeypatch.setattr(sharding_of_training, "world_size_of", lambda: 2)
    sharding_of_training.check_pooling(recipe.model)  # stays sharded, and FBGEMM's kernels can


def test_models_of_the_tests_are_torchrecs_own() -> None:
    assert {type(make_model(kind)).__module__ for kind in ("dlrm", "dlrm_dcn", "deepfm")} == {
        "torchrec.models.dlrm",
        "torchrec.models.deepfm",
    }
