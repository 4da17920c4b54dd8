"""Streams are counted, remembered and read on as plain Python does; recipes are found, checked and called as meant."""

import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.data import stream as streams
from dnis_torchrec.data.frames import FrameEncoder, recipe_from_frame
from dnis_torchrec.data.recipe import DataSplits, Recipe, load_recipe
from dnis_torchrec.data.stream import Stream, batches_of_tensors, batches_to_tensors
from dnis_torchrec.data.task import TrainTask
from tests.programs import SHORT, Done, dnis
from tests.tiny import batches_of_day, make_batch, make_collection, samples, to_batch, to_samples, two_sided

TABLES = [
    EmbeddingBagConfig(name="both", num_embeddings=10, embedding_dim=4, feature_names=["f", "g"]),
    EmbeddingBagConfig(name="one", num_embeddings=10, embedding_dim=4, feature_names=["g"]),
]
USERS = make_collection().embedding_bag_configs()


def recipe_of(data: Any) -> Recipe:
    return Recipe(model=nn.Linear(1, 1), data=data, loss=nn.BCEWithLogitsLoss())


def trained(stream: Stream, steps: int | None = None, *, ahead: int = 2) -> list[Batch]:
    """What steps are taken on, by somebody who reads so many batches ahead."""
    taken, given_batches = [], 0
    while steps is None or len(taken) < steps:
        while given_batches < len(taken) + 1 + ahead and next(stream, None) is not None:
            given_batches += 1
        if given_batches == len(taken):
            break
        taken.append(stream.settle())
    return taken


many = st.lists(st.lists(samples, min_size=1, max_size=6), min_size=1, max_size=6)


@given(many, st.booleans(), st.integers(0, 3), st.integers(1, 9))
def test_counts_and_newest_samples_are_those_of_what_was_trained_on(
    drawn: list[list], weighted: bool, ahead: int, limit: int
) -> None:
    batches = [to_batch(of, weighted=weighted) for of in drawn]
    steps = len(batches) // 2 + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "RECENT_SAMPLES", limit)
        stream = Stream(recipe_of(iter(batches)), TABLES)
        assert len(trained(stream, steps, ahead=ahead)) == steps
        summary = stream.summary()
    flat = [sample for of in drawn[:steps] for sample in of]
    of_features = [Counter(row for _, _, bags in flat for row in bags[index]) for index in range(2)]
    expected = {"both": of_features[0] + of_features[1], "one": of_features[1]}
    for name, counts in expected.items():
        assert {row: n for row, n in enumerate(summary.counts.counts[name].tolist()) if n} == dict(counts)
    longest = [max(len(bags[index]) for _, _, bags in flat) for index in range(2)]
    assert summary.counts.max_bag_lengths == {"f": longest[0], "g": longest[1]}
    assert summary.counts.num_samples == len(flat)
    assert [sample for batch in summary.recent for sample in to_samples(batch)] == flat[-limit:]


@given(many, st.booleans())
def test_batches_become_tensors_and_again_batches(drawn: list[list], weighted: bool) -> None:
    tensors, form = batches_to_tensors([to_batch(of, weighted=weighted) for of in drawn])
    assert [to_samples(batch) for batch in batches_of_tensors(tensors, form)] == drawn


def test_batches_of_a_users_own_come_back() -> None:
    batches = [two_sided(5, 1), two_sided(3, 2)]
    for first, second in zip(batches, batches_of_tensors(*batches_to_tensors(batches)), strict=True):
        assert type(second) is type(first)
        assert second.dense_features is None
        torch.testing.assert_close(second.labels, first.labels, equal_nan=True)
        assert second.candidates.values().equal(first.candidates.values())
        assert second.candidates.lengths().equal(first.candidates.lengths())
    tensors, form = batches_to_tensors(batches)
    for kind in ("os:system", "no.such:Batch", "tests.tiny:make_batch"):
        with pytest.raises(ValueError, match="class"):
            batches_of_tensors(tensors, form.replace("tests.tiny:TwoSidedBatch", kind))


class Numbers(IterableDataset):
    """Batches made by workers."""

    def __iter__(self) -> Iterator[Batch]:
        return (make_batch(8, seed) for seed in range(40))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_is_a_stream(workers: int) -> None:
    loader = DataLoader(Numbers(), batch_size=None, num_workers=workers)
    stream = Stream(recipe_of(loader), USERS)
    taken = trained(stream)
    assert len(taken) == 40
    for batch, expected in zip(taken, Numbers(), strict=True):
        assert batch.labels.equal(expected.labels)
    assert stream.is_over
    assert stream.summary().counts.num_samples == 320


class Stateful:
    """A source that says where it is, as torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.place, self.reads = 0, 0

    def __iter__(self) -> Iterator[Batch]:
        while self.place < 30:
            self.place += 1
            self.reads += 1
            yield make_batch(8, self.place)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "tensor": torch.tensor([self.place], dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert (state["tensor"].tolist(), state["tensor"].dtype) == ([state["place"]], torch.uint8)
        self.place = state["place"]


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("looks_first", [False, True])
def test_a_stream_is_read_on_where_it_was_left(has_state: bool, looks_first: bool) -> None:
    def source() -> Any:
        return Stateful() if has_state else iter(Stateful())

    whole, first = Stream(recipe_of(source()), USERS), Stream(recipe_of(source()), USERS)
    expected = trained(whole)
    taken, state, tensors = trained(first, 11), first.state_dict(11), first.tensors()
    data = source()
    second = Stream(recipe_of(data), USERS)
    if looks_first:
        second.first_train_batch()
    second.load_state_dict(state)
    second.load_tensors(tensors, 11)
    taken += trained(second)
    assert [batch.labels.tolist() for batch in taken] == [batch.labels.tolist() for batch in expected]
    summaries = [stream.summary() for stream in (whole, second)]
    for name, counts in summaries[0].counts.counts.items():
        assert summaries[1].counts.counts[name].equal(counts)
    labels = [torch.cat([batch.labels for batch in summary.recent]) for summary in summaries]
    assert labels[0].equal(labels[1])
    if has_state:
        assert data.reads == 30 - 11 + looks_first


def test_what_was_read_before_an_interruption_has_to_be_there() -> None:
    first = Stream(recipe_of(batches_of_day(0, 20)), USERS)
    trained(first, 15)
    second = Stream(recipe_of(batches_of_day(0, 9)), USERS)
    second.load_state_dict(first.state_dict(15))
    with pytest.raises(ValueError, match="15 batches"):
        second.load_tensors(first.tensors(), 15)


def test_a_stream_ends_by_steps_or_by_time_and_all_that_it_gave_counts() -> None:
    stream = Stream(recipe_of(batches_of_day(0)), USERS, steps=7)
    assert len(trained(stream)) == 7
    assert stream.is_over
    ticks = count()
    stream = Stream(recipe_of(batches_of_day(0)), USERS, is_time_over=lambda: next(ticks) >= 5)
    assert len(trained(stream)) == 5
    assert stream.summary().counts.num_samples == 5 * 64


def test_what_is_no_batch_to_train_on_is_refused_where_it_comes() -> None:
    good, bad = make_batch(8, 0), make_batch(8, 1)
    bad.sparse_features.values()[0] = 40
    stream = Stream(recipe_of(iter([good, bad])), USERS)
    next(stream)
    with pytest.raises(ValueError, match="batch 1.*0..39"):
        next(stream)
    halves = Batch(good.dense_features, good.sparse_features, good.labels / 2)
    with pytest.raises(ValueError, match="labels 0 or 1"):
        next(Stream(recipe_of(iter([halves])), USERS))
    with pytest.raises(ValueError, match="at least one batch"):
        next(Stream(recipe_of(iter([])), USERS))
    with pytest.raises(ValueError, match=r"Recipe\.data"):
        recipe_of(3)


def test_memory_stays_level_over_a_stream_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "RECENT_SAMPLES", 256)
    batch = make_batch(8, 0)
    stream = Stream(recipe_of(batch for _ in count()), USERS)
    trained(stream, 500)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(6000):
        next(stream)
        stream.settle()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB


def clicks(num_rows: int, seed: int, *, users: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({"when": random.permutation(num_rows), "user": random.integers(0, users, num_rows)})
    frame["tags"] = [[f"t{tag}" for tag in random.integers(0, 9, random.integers(0, 3))] for _ in range(num_rows)]
    frame["price"] = frame["when"] * 2.0
    frame["liked"] = random.integers(0, 2, num_rows)
    return frame


ROLES = {"label": "liked", "dense": ["price"], "ids": ["user"], "bags": ["tags"], "time": "when", "model": "dlrm"}


def test_a_frame_is_a_stream_in_the_order_of_time() -> None:
    frame = clicks(300, 0, users=20)
    recipe = recipe_from_frame(frame, **ROLES, is_stream=True, batch_size=64)
    (batch,) = [streams.join_batches([*recipe.data])]
    by_time = frame.sort_values("when")
    assert recipe.is_stream
    assert batch.labels.tolist() == by_time["liked"].tolist()
    rows: dict[str, int] = {}
    for user in by_time["user"]:
        rows.setdefault(str(user), len(rows) + 1)
    assert batch.sparse_features["user"].values().tolist() == [rows[str(user)] for user in by_time["user"]]
    tags: dict[str, int] = {}
    for tag in by_time["tags"].explode().dropna():
        tags.setdefault(tag, len(tags) + 1)
    expected = [tags[tag] for tag in by_time["tags"].explode().dropna()]
    assert batch.sparse_features["tags"].values().tolist() == expected
    prices = by_time["price"].to_numpy()
    first = prices[:30]
    wanted = torch.from_numpy((prices - first.mean()) / first.std()).float()
    torch.testing.assert_close(batch.dense_features[:, 0], wanted)


@pytest.mark.parametrize("is_flipped", [False, True])
def test_what_comes_later_changes_nothing_that_was_before(is_flipped: bool) -> None:
    """No label leaks into ids or scales, and no later row."""
    frame = clicks(300, 0, users=20)
    other = frame.copy()
    if is_flipped:
        other["liked"] = 1 - other["liked"]
    else:
        late = other["when"] >= 200
        other.loc[late, ["user", "price"]] = 7
    batches = [[*recipe_from_frame(of, **ROLES, is_stream=True, batch_size=50).data][:4] for of in (frame, other)]
    for first, second in zip(*batches, strict=True):
        assert first.dense_features.equal(second.dense_features)
        assert first.sparse_features.values().equal(second.sparse_features.values())


def test_the_next_days_frame_has_the_tables_of_the_first() -> None:
    first = recipe_from_frame(clicks(300, 0, users=20), **ROLES, is_stream=True)
    frame = clicks(200, 1, users=30)
    second = recipe_from_frame(frame, **ROLES, is_stream=True, encoder=first.data.encoder)
    assert second.data.encoder.num_embeddings == first.data.encoder.num_embeddings
    users = streams.join_batches([*second.data]).sparse_features["user"].values().tolist()
    by_time = frame.sort_values("when")["user"]
    assert [row == 0 for row in users] == [user >= 20 for user in by_time]
    counted = frame.assign(liked=frame["liked"] + frame.index % 2)
    encoder = FrameEncoder.from_bytes(recipe_from_frame(counted, **ROLES, is_stream=True).data.encoder.to_bytes(), "f")
    by_chance = recipe_from_frame(frame, **ROLES | {"time": None}, is_stream=True, encoder=encoder)  # without a 2
    assert isinstance(by_chance.loss, nn.MSELoss)
    for message, of, roles in (("encoder", frame, {"bags": []}), ("0 or 1, as in the training", counted, {})):
        with pytest.raises(ValueError, match=message):
            recipe_from_frame(of, **ROLES | roles, is_stream=True, encoder=first.data.encoder)
    with pytest.raises(ValueError, match="time"):
        recipe_from_frame(frame, **ROLES | {"time": None}, is_stream=True)


SPLITS = ("train", "validation", "selection", "test")
LOSSES = (nn.MSELoss, nn.BCEWithLogitsLoss)
NO_DATA = DataSplits(train=[], validation=[], selection=[], test=[])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss", nn.L1Loss(), ".* a Task, got L1Loss"),
        *(("loss", loss(reduction=of), f"reduction 'mean', got '{of}'") for loss in LOSSES for of in ("sum", "none")),
        ("table_optimizer", "sgd", ""),
        *(
            (f"{part}_learning_rate", rate, f"a finite number above 0, got {rate}$")
            for part in ("table", "dense")
            for rate in (0.0, -1e-3, float("inf"), float("nan"))
        ),
    ],
)
def test_unfit_fields_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^Recipe\.{field}.*: expected {message}"):
        Recipe(**{"model": nn.Identity(), "data": NO_DATA, "loss": nn.MSELoss()} | {field: value})


@pytest.mark.parametrize("part", SPLITS)
def test_a_part_is_there_and_can_be_iterated_again(part: str) -> None:
    parts: dict[str, Any] = {name: [] for name in SPLITS if name != part}
    message = rf"^DataSplits\.{part}: expected batches"
    for wrong, got in (
        ({}, ", got none; give a part of its own"),
        ({part: None}, ", got none; give a part of its own"),
        ({part: (batch for batch in ())}, " that can be iterated again and again, got generator"),
    ):
        with pytest.raises(ValueError, match=message + got):
            DataSplits(**parts | wrong)


class Column(nn.Module):
    """Predicts the first dense feature, as ``(B,)`` or ``(B, 1)``."""

    def __init__(self, *, keep_dim: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.keep_dim = keep_dim

    def forward(self, dense_features: torch.Tensor, sparse_features: object) -> torch.Tensor:
        column = dense_features[:, :1] * self.scale
        return column if self.keep_dim else column.squeeze(1)


@pytest.mark.parametrize("keep_dim", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_train_task(keep_dim: bool, batch_size: int, loss: nn.Module) -> None:
    dense, labels = torch.randn(batch_size, 2), torch.randint(0, 2, (batch_size,))
    task = TrainTask(Column(keep_dim=keep_dim), loss)
    value, (detached, predictions) = task(Batch(dense, None, labels))
    expected = dense[:, 0] * 2
    torch.testing.assert_close(value, loss(expected, labels.float()))
    assert value.requires_grad
    assert not detached.requires_grad
    assert torch.equal(detached, value.detach())
    assert torch.equal(predictions, expected)
    assert not predictions.requires_grad


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return tmp_path


def test_recipes_are_found_from_the_current_folder(project: Path) -> None:
    (project / "shop").mkdir()
    (project / "shop" / "recipes.py").write_text("def small(data, *, seed, embedding_dim=None):\n    return seed\n")
    assert load_recipe("shop.recipes:small")(None, seed=3) == 3
    assert load_recipe("shop.recipes:small") is load_recipe("shop.recipes:small")
    assert sys.path.count(str(project)) == 1


@pytest.mark.parametrize(
    "spec", ["", "shop", ":small", "shop:", ":", ".kiosk:small", "..kiosk:small", "kiosk.:small", "shop..kiosk:small"]
)
def test_malformed_specs(spec: str) -> None:
    with pytest.raises(ValueError, match=f"^recipe '{re.escape(spec)}': expected 'module:function'"):
        load_recipe(spec)


@pytest.mark.parametrize("spec", ["shp:small", "shop.recipe:small", "shp.recipes:small"])
def test_unknown_modules(spec: str, project: Path) -> None:
    (project / "shop").mkdir()
    (project / "shop" / "__init__.py").touch()
    module = spec.split(":")[0]
    message = rf"^recipe '{spec}': expected a module '{module}' in .*, got none$"
    with pytest.raises(ValueError, match=message):
        load_recipe(spec)


def searched(project: Path, source: str, *, spec: str = "ranker:recipe") -> Done:
    (project / "ranker.py").write_text(source)
    return dnis("search", spec, "--compression", 4, "--out", project / "run", *SHORT, folder=project)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nraise OSError('no disk')\n", "OSError: no disk\n  File {0}, line 2, in <module>\n    raise OSError"),
        ("def recipe(data:\n    pass\n", "SyntaxError: '(' was never closed\n  File {0}, line 1\n    def recipe(data:"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0\n  File {0}, line 2, in <module>\n    sys.exit(0)"),
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'\n  File {0}, line 1"),
        ("def recip(): ...\n", "expected a function in ranker, got 'recipe'; did you mean 'recip'?"),
        ("recipe = 3\n", "expected a function in ranker, got 'recipe'; known names: none"),
    ],
)
def test_what_cannot_be_imported_is_a_wrong_argument(project: Path, source: str, message: str) -> None:
    done = searched(project, source)
    assert (done.returncode, done.stdout) == (2, "")
    file = f'"{project}/ranker.py"'
    assert done.stderr.startswith(f"error: recipe 'ranker:recipe': {message.format(file)}")
    assert_no_frames_of_this_package(done)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def recipe(data, *, seed, embedding_dim):\n    return {}['ratings']\n",
            "KeyError: 'ratings'\n  File {0}, line 2, in recipe\n    return {{}}['ratings']\n",
        ),
        (
            "def recipe(data, *, seed, embedding_dim):\n    import json\n    json.loads('{')\n",
            "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n"
            "  File {0}, line 3, in recipe\n    json.loads('{{')\n",
        ),
        ("def recipe(data, seed=0): ...\n", "TypeError: recipe() got an unexpected keyword argument"),
        ("def recipe(data, *, seed, embedding_dim): ...\n", "expected a Recipe, got NoneType\n"),
        (
            "def recipe(data, *, seed, embedding_dim):\n    raise ValueError(\"recipe 'ranker:recipe': no data\")\n",
            "no data\n",
        ),
    ],
)
def test_what_cannot_be_built_fails_with_one_message(project: Path, source: str, message: str) -> None:
    done = searched(project, source)
    assert (done.returncode, done.stdout) == (1, "")
    file = f'"{project}/ranker.py"'
    assert f"error: recipe 'ranker:recipe': {message.format(file)}" in done.stderr
    assert_no_frames_of_this_package(done)
    assert not (project / "run").exists()


def assert_no_frames_of_this_package(done: Done) -> None:
    assert "Traceback" not in done.stderr
    assert "dnis_torchrec" not in done.stderr
    assert "frozen" not in done.stderr
