"""Schedule, ramp and a loop of ones own against oracles; a search in one pass, and what its run leaves."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dnis_torchrec import BilevelTrainPipeline, SearchLoop, load_model, merge_, prepare_
from dnis_torchrec.allocation.curvature import Curvature
from dnis_torchrec.allocation.energies import blocked_tables
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.cli.commands import run_evaluate, run_export, run_search, run_train
from dnis_torchrec.cli.run import RunFolder
from dnis_torchrec.cli.settings import EvaluateCommand, ExportCommand, SearchCommand, TrainCommand
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.report.rows import SEARCH
from dnis_torchrec.scheme import packed_index_bytes
from dnis_torchrec.search import one_pass
from dnis_torchrec.search import ramp as ramp_module
from dnis_torchrec.search.pipeline import AlphaOptimizer
from dnis_torchrec.search.prune import SizeOutOfReachError
from dnis_torchrec.search.ramp import COUNTED_BITS, LEAST_STEPS, STAGES, Ramp, check_reachable, num_stages
from dnis_torchrec.search.schedule import MAX_AHEAD, QUEUE, SAMPLE_BATCHES, BilevelStream, Level, LevelSchedule, OnePass
from dnis_torchrec.selection.alpha import Alpha
from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan
from dnis_torchrec.training.checkpoint import CheckpointFolder, CheckpointSaver, tensors_under
from dnis_torchrec.training.loop import SearchInterrupted
from dnis_torchrec.training.progressive import Progressive
from tests.models import blocks_of
from tests.tiny import batches_of_day, demo, files_of, make_batch, make_recipe

schedules = st.builds(LevelSchedule, warm_up_steps=st.none() | st.integers(1, 7))


def levels_of(schedule: LevelSchedule, num_steps: int) -> list[Level]:
    """Warm up, then a lower and an upper step again and again; lower steps alone while nobody knows the warm-up."""
    warm_up = num_steps if schedule.warm_up_steps is None else schedule.warm_up_steps
    rounds = itertools.cycle([Level.LOWER, Level.UPPER])
    return list(itertools.islice(itertools.chain([Level.LOWER] * warm_up, rounds), num_steps))


def test_both_levels_step_unless_a_warm_up_is_asked_for() -> None:
    expected = ["t", "t", "v", "t", "v"]
    assert [next(stream) for stream in [BilevelStream(["t"], ["v"])] for _ in range(5)] == expected
    assert [next(stream) for stream in [BilevelStream(["t"], ["v"], LevelSchedule())] for _ in range(5)] == expected


@given(schedules, st.integers(1, 6), st.integers(1, 6))
def test_stream_cycles_both_levels_in_the_order_of_the_schedule(
    schedule: LevelSchedule, num_train: int, num_validation: int
) -> None:
    train = [("train", i) for i in range(num_train)]
    validation = [("validation", i) for i in range(num_validation)]
    stream = BilevelStream(train, validation, schedule)
    assert iter(stream) is stream
    endless = {Level.LOWER: itertools.cycle(train), Level.UPPER: itertools.cycle(validation)}
    for level in levels_of(schedule, 40):
        assert next(stream) == next(endless[level])
        assert stream.last_level is level


class Counting:
    """Batches in an order that its epoch decides, as `examples.datasets.in_memory` has them."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.epoch = name, size, 0

    def __iter__(self) -> Iterator[str]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(epoch)).tolist()
        return (f"{self.name}{epoch}.{number}" for number in order)


class Drawing:
    """Batches in an order drawn from torch's own random numbers, as a shuffling DataLoader has them."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __iter__(self) -> Iterator[str]:
        for number in torch.randperm(self.size).tolist():
            yield f"{self.name}{number}"


@pytest.mark.parametrize("kind", [Counting, Drawing])
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    warm_up=st.integers(1, 6),
    stepped=st.integers(0, 25),
    ahead=st.integers(0, MAX_AHEAD),
)
def test_a_stream_goes_on_where_the_steps_were(kind, sizes, warm_up, stepped, ahead) -> None:
    """Whatever a pipeline had read ahead of its steps."""
    schedule = LevelSchedule(warm_up_steps=warm_up)

    def stream() -> BilevelStream[str]:
        return BilevelStream(kind("t", sizes[0]), kind("v", sizes[1]), schedule)

    torch.manual_seed(1)
    interrupted = stream()
    seen = [next(interrupted) for _ in range(stepped + ahead)]
    state = json.loads(json.dumps(interrupted.state_dict(stepped)))
    torch.manual_seed(2)  # another process
    resumed, before = stream(), torch.get_rng_state()
    resumed.first_train_batch()
    resumed.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    expected = seen[stepped:] + [next(interrupted) for _ in range(5)]
    assert [next(resumed) for _ in expected] == expected


@given(stepped=st.integers(0, 12), ahead=st.integers(0, QUEUE), saved_behind=st.none() | st.integers(0, 9))
def test_upper_steps_begin_behind_the_queue_once_they_are_asked_for(
    stepped: int, ahead: int, saved_behind: int | None
) -> None:
    """None of the batches that were read ahead changes sides, and a stream that was saved before or after goes on so.

    Saved before, whoever goes on asks for upper steps anew.
    """
    stream = BilevelStream(Drawing("t", 5), Drawing("v", 3), LevelSchedule(warm_up_steps=None))
    seen = [next(stream) for _ in range(stepped + ahead)]
    state = stream.state_dict(stepped)
    stream.alternate(stepped)
    assert stream.schedule == LevelSchedule(warm_up_steps=stepped + QUEUE)
    stream.alternate(stepped + 3)  # they have begun
    assert stream.schedule == LevelSchedule(warm_up_steps=stepped + QUEUE)
    saved_at = stepped + (saved_behind or 0)
    while len(seen) < saved_at + 4:
        seen.append(next(stream))
    if saved_behind is not None:
        state = stream.state_dict(saved_at)
    seen += [next(stream) for _ in range(10)]
    is_train = [batch[0] == "t" for batch in seen]
    assert is_train == [level is Level.LOWER for level in levels_of(stream.schedule, len(seen))]
    resumed = BilevelStream(Drawing("t", 5), Drawing("v", 3), LevelSchedule(warm_up_steps=None))
    resumed.load_state_dict(json.loads(json.dumps(state)))
    resumed.alternate(saved_at)
    assert [next(resumed) for _ in seen[saved_at:]] == seen[saved_at:]


class DrawingEach(Drawing):
    """Batches that are drawn one by one, as a data set that adds noise has them."""

    def __iter__(self) -> Iterator[str]:
        left = list(range(self.size))
        while left:
            yield f"{self.name}{left.pop(int(torch.randint(len(left), ())))}"


@pytest.mark.parametrize("kind", [Counting, Drawing, DrawingEach])
def test_samples_have_orders_of_their_own_and_leave_everything_as_it_is(kind: type) -> None:
    def stream() -> BilevelStream[str]:
        return BilevelStream(kind("t", 5), kind("v", 7), LevelSchedule(warm_up_steps=1))

    torch.manual_seed(1)
    undisturbed = stream()
    expected = [next(undisturbed) for _ in range(30)]
    measured, seen, samples, before = stream(), [], [], torch.get_rng_state()
    for step in range(30):
        if step % 7 == 3:
            sample = measured.sample(step)
            samples.append([next(sample)[-1] for _ in range(3)])
            seen.append(next(measured))  # the stream goes on while somebody measures
            samples[-1] += [batch[-1] for batch in sample]
        else:
            seen.append(next(measured))
    assert seen == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert [sorted(sample) for sample in samples] == [list("0123456")] * len(samples)
    assert len({tuple(sample) for sample in samples}) == len(samples)
    assert [batch[-1] for batch in measured.sample(3)] == samples[0]


def steps_of(num_train: int, *, steps: int, warm_up: int = 9) -> BilevelStream[str]:
    """A stream of so many training batches and two of validation, so many of which were taken."""
    stream = BilevelStream(Counting("t", num_train), Counting("v", 2), LevelSchedule(warm_up_steps=warm_up))
    for _ in range(steps):
        next(stream)
    return stream


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    *((lambda steps=steps: LevelSchedule(warm_up_steps=steps), ValueError, "warm_up_steps") for steps in (0, -1)),
    (lambda: steps_of(0, steps=1), ValueError, "training stream"),
    (lambda: list(BilevelStream(["t"], [], LevelSchedule(warm_up_steps=1))), ValueError, "validation stream"),
    # it cannot start again
    (lambda: list(BilevelStream(iter("ab"), ["v"], LevelSchedule(warm_up_steps=5))), ValueError, "training stream"),
    (lambda: steps_of(3, steps=0).load_state_dict(steps_of(5, steps=4).state_dict(4)), ValueError, "training stream"),
    # only the latest steps are known
    (lambda: steps_of(5, steps=MAX_AHEAD + 5, warm_up=1).state_dict(4), RuntimeError, r"BilevelStream|.*step"),
]


@pytest.mark.parametrize(("call", "kind", "place"), REFUSED)
def test_what_is_no_stream_or_schedule_is_refused(
    call: Callable[[], object], kind: type[Exception], place: str
) -> None:
    with pytest.raises(kind, match=f"^{place}"):
        call()


SIZES = {"wide": (120, 16), "narrow": (90, 16), "first_order": (120, 1)}
"""table -> N, D."""
LONGEST = STAGES * LEAST_STEPS
"""Steps of a ramp of all stages."""
DENSE_BYTES = 4 * sum(rows * dim for rows, dim in SIZES.values())


class Ramped:
    """A ramp over three tables whose model learns nothing; `worth` says what columns are worth until they die."""

    def __init__(self, worth: dict[str, Tensor], compression: float, monkeypatch: pytest.MonkeyPatch) -> None:
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
            for name, (rows, dim) in SIZES.items()
        ]
        counts = {name: torch.arange(rows, 0, -1) for name, (rows, _) in SIZES.items()}
        frequencies = FrequencyCounts(counts, dict.fromkeys(SIZES, 1), 100)
        self.blocks: RowBlocks = blocks_from_counts(frequencies, configs, num_blocks=2, least_rows=1)
        self.model = EmbeddingBagCollection(tables=configs)
        alpha = Alpha(self.blocks.alpha_shapes)
        self.optimizer = AlphaOptimizer(alpha, self.blocks)
        self.samples: list[int] = []
        alphas = {dim: alpha.of(dim) for dim in alpha.dims}
        pipeline = SimpleNamespace(alphas=lambda: alphas, alpha_optimizer=self.optimizer, detached=self._detached)
        stream = SimpleNamespace(sample=lambda number: self.samples.append(number))
        self._worth, self._alpha, self._is_detached = worth, alpha, False
        monkeypatch.setattr(ramp_module, "curvature", self._curvature)
        self.ramp = Ramp(pipeline, stream, self.blocks, nn.MSELoss(), compression)  # type: ignore[arg-type]

    @contextmanager
    def _detached(self) -> Iterator[nn.Module]:
        self._is_detached = True
        yield self.model
        self._is_detached = False

    def _curvature(self, *_: object, **__: object) -> Curvature:
        """Of a prepared model: a column that died is worth nothing, whatever it was worth before."""
        assert self._is_detached
        worth = {name: own * self.living()[name] for name, own in self._worth.items()}
        return Curvature({}, worth, num_samples=1, relative_error=0.0)

    def living(self) -> dict[str, Tensor]:
        """table -> ``(S, D)`` bool."""
        return {
            name: self._alpha.of(dim)[self.blocks.first_alpha_row(name) :][: len(self._worth[name])] > 0
            for name, (_, dim) in SIZES.items()
        }

    def num_bytes(self) -> int:
        """Of what lives, every value in `COUNTED_BITS` bits."""
        total = 0
        for name, columns in self.living().items():
            routing = self.blocks.routings[name]
            if columns.any():
                rows = routing.row_counts().tolist()
                counts = columns.sum(1).tolist()
                own = [n * math.ceil(k * COUNTED_BITS / 8) + 4 * k for n, k in zip(rows, counts, strict=True)]
                total += sum(own) + packed_index_bytes(routing, columns)
        return total


def drawn_worth(seed: int) -> dict[str, Tensor]:
    """Of a few orders of magnitude, as curvature is."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.exp(2 * torch.randn(2, dim, generator=generator, dtype=torch.float64))
        for name, (_, dim) in SIZES.items()
    }


@settings(max_examples=6)
@given(seed=st.integers(0, 100), compression=st.floats(8.5, 20), steps=st.integers(1, 150))
def test_what_lives_fits_the_line_at_every_stage(seed: int, compression: float, steps: int) -> None:
    """Stages are as long as each other and have `LEAST_STEPS`; of every block the best columns live."""
    with pytest.MonkeyPatch.context() as patch:
        worth, start = drawn_worth(seed), 32 / COUNTED_BITS
        ramped = Ramped(worth, compression, patch)
        before, stages = ramped.living(), num_stages(steps)
        assert stages == max(1, min(STAGES, steps // LEAST_STEPS))
        for done in range(-3, steps + 4):
            stage = min(max(done, 0), steps) * stages // steps
            for _ in "ab":  # behind a lower step, and behind the upper step after it
                ramped.ramp.follow(done, steps)
            assert ramped.num_bytes() <= DENSE_BYTES / (start * (compression / start) ** (stage / stages)) or stage == 0
            for name, living in ramped.living().items():
                assert not bool((living & ~before[name]).any())
                for kept, values in zip(living, worth[name], strict=True):
                    assert min(values[kept], default=math.inf) >= max(values[~kept], default=-math.inf)
            before = ramped.living()
        assert ramped.samples == list(range(1, stages + 1))
        assert ramped.num_bytes() >= 0.75 * DENSE_BYTES / compression


@pytest.mark.parametrize("compression", [1.5, 4, 8])
def test_sizes_that_bits_alone_lead_to_leave_all_columns(compression: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ramped = Ramped(drawn_worth(0), compression, monkeypatch)
    for done in range(1, LONGEST + 1):
        ramped.ramp.follow(done, LONGEST)
    assert all(bool(living.all()) for living in ramped.living().values())
    assert not ramped.samples  # nothing was measured
    assert ramped.optimizer.density() == 1


def test_nothing_dies_once_nothing_is_worth_anything(monkeypatch, caplog) -> None:
    """As where columns are multiplied by each other, and each has lost its partner."""
    worth = drawn_worth(0)
    ramped = Ramped(worth, 16, monkeypatch)
    for done in range(1, LONGEST + 1):
        if done == 6 * LEAST_STEPS:
            before = ramped.living()
            for own in worth.values():
                own.zero_()
        ramped.ramp.follow(done, LONGEST)
    assert all(torch.equal(own, before[name]) for name, own in ramped.living().items())
    assert any(bool(own.any()) for own in before.values())
    (told,) = [record.message for record in caplog.records]
    assert told.startswith(f"stage 6 of {STAGES} of the ramp drops no column: none moves a prediction")


@pytest.mark.parametrize("worth_of_one", [5.0, 1e-6])
def test_tables_of_one_column_live_beside_wide_ones_if_they_are_worth_it(worth_of_one: float, monkeypatch) -> None:
    """What they carry for their bytes decides, not that they are few."""
    worth = {name: torch.linspace(1.0, 0.1, dim).double().repeat(2, 1) for name, (_, dim) in SIZES.items()}
    worth["first_order"] = torch.full((2, 1), worth_of_one, dtype=torch.float64)
    ramped = Ramped(worth, 16, monkeypatch)
    for done in range(1, LONGEST + 1):
        ramped.ramp.follow(done, LONGEST)
    assert ramped.living()["first_order"].flatten().tolist() == [worth_of_one > 1] * 2
    assert 0 < int(ramped.living()["wide"].sum()) < 32


def test_a_size_out_of_reach_is_refused_with_the_largest_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ramped = Ramped(drawn_worth(0), 20, monkeypatch)
    tables = blocked_tables(ramped.model, ramped.blocks)
    with pytest.raises(SizeOutOfReachError, match="compression: expected at most ") as caught:
        check_reachable(tables, ramped.blocks, 10_000)
    largest = float(str(caught.value).split("at most ")[1].split(" ")[0])
    check_reachable(tables, ramped.blocks, largest)
    with pytest.raises(SizeOutOfReachError):
        check_reachable(tables, ramped.blocks, largest + 0.02)


CPU = torch.device("cpu")


def batches_of(seeds: range) -> list[Batch]:
    return make_recipe().data.train.batches[seeds.start : seeds.stop]


def sharded_for_a_loop(*kinds: str) -> tuple[nn.Module, KeyedOptimizerWrapper, RowBlocks]:
    torch.manual_seed(0)
    recipe = make_recipe()
    blocks = blocks_of(recipe.model, batches_of(range(6)))
    task = TrainTask(prepare_(recipe.model, blocks), recipe.loss)
    limits = dict.fromkeys(blocks.routings, ParameterConstraints(sharding_types=[*kinds] or None))
    plan = make_sharding_plan(task, CPU, default_sharders(), constraints=limits)
    model = DistributedModelParallel(task, device=CPU, plan=plan, sharders=default_sharders())
    return model, KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: torch.optim.Adam(p, lr=0.01)), blocks


@pytest.mark.parametrize("lengths", [{}, {"plain_steps": 1, "ramp_steps": 9}])
def test_a_loop_takes_the_steps_of_its_parts(gloo, lengths: dict[str, int]) -> None:
    train, validation, steps = batches_of(range(6)), batches_of(range(6, 9)), 40
    plain, ramp_steps = lengths.get("plain_steps", 20), lengths.get("ramp_steps", 8)
    model, optimizer, blocks = sharded_for_a_loop()
    pipeline = BilevelTrainPipeline(model, optimizer, CPU)
    stream = BilevelStream(train, validation, LevelSchedule(warm_up_steps=plain))
    ramp = Ramp(pipeline, stream, blocks, make_recipe().loss, compression=10)
    while pipeline.lower_steps < steps:
        pipeline.progress(stream)
        ramp.follow(pipeline.lower_steps - plain, ramp_steps)
    other, optimizer, _ = sharded_for_a_loop()
    loop = SearchLoop(other, optimizer, train, validation, compression=10, steps=steps, **lengths)
    losses = []
    while loop.step():
        losses.append(float(loop.loss))
    assert len(losses) == loop.lower_steps == steps
    assert not loop.step()
    merged, expected = merge_(loop.detach()).state_dict(), merge_(pipeline.detach()).state_dict()
    assert [name for name in expected if not torch.equal(merged[name], expected[name])] == []
    assert any(bool((value == 0).any()) for value in merged.values())


def test_a_loop_goes_on_where_it_was(gloo, tmp_path: Path) -> None:
    def new() -> SearchLoop:
        model, optimizer, _ = sharded_for_a_loop()
        return SearchLoop(model, optimizer, batches_of(range(6)), batches_of(range(6, 9)), compression=10, steps=30)

    whole, folder = new(), CheckpointFolder(tmp_path)
    with CheckpointSaver(folder) as saver:
        while whole.step():
            if whole.lower_steps == 17:
                saver.save(17, whole.state())
    resumed = new()
    resumed.restore(folder.latest())
    while resumed.step():
        pass
    found, expected = merge_(resumed.detach()).state_dict(), merge_(whole.detach()).state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("wrong", [{"compression": 1}, {"compression": 5000}, {"steps": 0}, {"ramp_steps": 0}])
def test_a_loop_refuses_sizes_and_lengths_before_it_begins(gloo, wrong: dict[str, int]) -> None:
    model, optimizer, _ = sharded_for_a_loop()
    lengths = {"compression": 10, "steps": 9, **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SearchLoop(model, optimizer, batches_of(range(2)), batches_of(range(2)), **lengths)


BOTH, KINDS = "tests.tiny:two_days", ("table/", "model/", "optimizer/", "fused/")


@given(number=st.integers(0, 40), warm_up=st.integers(1, 9), upper=st.none() | st.integers(0, 9))
def test_each_batch_is_held_out_and_then_trained_on(number: int, warm_up: int, upper: int | None) -> None:
    stream = OnePass(iter(range(number)), LevelSchedule(warm_up_steps=warm_up, upper_steps=upper))
    given_ones = [(batch, stream.last_level) for batch in stream]
    assert [batch for batch, level in given_ones if level is Level.LOWER] == [*range(number)]
    pairs = list(itertools.pairwise(given_ones))
    uppers = [batch for batch, level in given_ones if level is Level.UPPER]
    assert uppers == [*range(warm_up + 1, number)][:upper]
    assert all(after == (batch, Level.LOWER) for (batch, level), after in pairs if level is Level.UPPER)
    assert [*stream.sample(3)] == [*range(number)][-SAMPLE_BATCHES:]
    assert next(stream, None) is None


@given(number=st.integers(5, 30), step=st.integers(0, 12), ahead=st.integers(0, 4))
def test_a_stream_goes_on_where_its_steps_were(number: int, step: int, ahead: int) -> None:
    torch.manual_seed(1)
    schedule = LevelSchedule(warm_up_steps=2, upper_steps=7)
    whole = OnePass(range(number), schedule)
    order = [*itertools.islice(whole, step + ahead)]
    state = json.loads(json.dumps(whole.state_dict(min(step, len(order)))))
    other = OnePass(range(number))
    other.first_train_batch()
    other.load_state_dict(state)
    assert [*other] == [*order[step:], *whole]
    assert [*other.sample(0)] == [*whole.sample(0)]


@pytest.mark.parametrize(("kind", "by_sgd"), [("data_parallel", False), ("table_wise", True)])
def test_a_loop_ends_with_its_stream(gloo, kind: str, by_sgd: bool, caplog) -> None:
    """Where a kernel trains tables, and not the optimizer that is given them, it says so."""
    model, optimizer, _ = sharded_for_a_loop(kind)
    batches = (make_batch(64, index) for index in range(25))
    loop = SearchLoop(model, optimizer, batches, compression=10, steps=100, plain_steps=8, ramp_steps=12)
    assert caplog.text.count("train by SGD at 0.01; call TorchRec's apply_optimizer_in_backward") == by_sgd
    assert sum(1 for _ in iter(loop.step, False)) == loop.lower_steps == 25
    assert loop.pipeline.upper_steps == 25 - 8 - 1
    assert not loop.step()
    weights = merge_(loop.detach()).state_dict().values()
    assert any(bool((weight == 0).any()) for weight in weights)


def test_predictions_of_an_upper_step_count() -> None:
    """The lower step on the same batch comes when alpha has learnt its labels."""
    batch, recipe = make_batch(8, 0), demo(None)
    stream: Any = SimpleNamespace(settle=lambda: batch)
    progressive = Progressive(stream, recipe.model, recipe.task, torch.device("cpu"), 3)
    early, late = torch.zeros(8), 9 * (2 * batch.labels - 1)
    progressive.note((torch.tensor(0.5), early), is_lower=False)
    progressive.note((torch.tensor(0.1), late))
    assert progressive.metrics()["auc"] == 0.5
    progressive.note((torch.tensor(0.1), late))
    assert progressive.metrics()["auc"] > 0.5


def searched(out: Path, recipe: str = BOTH, **changes: Any) -> RunFolder:
    run_search(SearchCommand(**{"recipe": recipe, "out": out, "steps": 60, "compression": 4.0} | changes))
    return RunFolder.open(out)


@pytest.fixture(scope="module")
def run(gloo, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return searched(tmp_path_factory.mktemp("searched") / "run")


def test_a_search_leaves_what_later_commands_take(run: RunFolder, tmp_path: Path) -> None:
    run_export(ExportCommand(run=run.path, out=tmp_path / "artifact"))
    results = json.loads((run.path / "results.json").read_text())
    (row,) = [row for row in results["rows"] if row["method"] == SEARCH]
    metrics = run_evaluate(EvaluateCommand(path=tmp_path / "artifact", recipe=BOTH))["metrics"]
    assert metrics == pytest.approx(row["metrics"], abs=1e-6)  # its newest samples are all
    model = load_model(demo(None).model, tmp_path / "artifact")
    assert run.scheme().compression() >= 4
    assert type(model.sparse_arch.embedding_bag_collection).__name__ == "PackedEmbeddingBagCollection"
    assert [record["step"] for record in results["history"]] == [*range(1, 61)]
    assert "Gains are not fitted" in " ".join(results["notes"])
    assert run.counts().num_samples == 60 * 64 == sum(len(batch.labels) for batch in run.recent())
    run_train(TrainCommand(recipe="tests.tiny:next_day", out=tmp_path / "next", source=run.path, steps=5))
    checkpoint = RunFolder.open(tmp_path / "next").latest_checkpoint()
    assert {int(value) for key, value in tensors_under(checkpoint, "optimizer/").items() if "step" in key} == {65}


def test_columns_die_in_the_ramp_alone(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    follow = one_pass.OnePassSearch.after_step

    def watch(self: Any, phase: Any, done: int) -> None:
        follow(self, phase, done)
        num_dead = sum(int((alpha == 0).sum()) for alpha in self._pipeline.alphas().values())
        seen.append((phase.name, num_dead, self._pipeline.upper_steps))

    narrow, stages = Ramp._narrow, list[int]()
    monkeypatch.setattr(Ramp, "_narrow", lambda self, *stage: (stages.append(len(seen)), narrow(self, *stage)))
    monkeypatch.setattr(one_pass.OnePassSearch, "after_step", watch)
    searched(tmp_path / "run", compression=16.0, steps=60)
    assert [name for name, *_ in seen] == [one_pass.search.RAMP] * 12 + [one_pass.search.RELEASE] * 18
    dead = [number for _, number, _ in seen]
    assert dead[0] == 0 < dead[11] == dead[-1]
    assert dead == sorted(dead)
    assert max(stages) < 12
    assert [number for *_, number in seen] == [0, 0, *range(1, 11)] + [10] * 18


def test_without_a_ramp_it_is_plain_training(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and states of optimizers go over bit for bit; a step with alpha = 1 adds up in another order."""
    begin, differ = BilevelTrainPipeline.begin_with, list[str]()

    def watch(self: BilevelTrainPipeline, path: Any, batch: Batch, **options: bool) -> None:
        begin(self, path, batch, **options)
        stored = {kind: tensors_under(path, kind) for kind in KINDS}
        live = self.state(SimpleNamespace(state_dict=lambda step: {})).tensors
        for kind, of_kind in stored.items():
            differ.extend(key for key in of_kind if not live[kind + key].chunks[0].tensor.equal(of_kind[key]))
        assert stored["optimizer/"]

    monkeypatch.setattr(BilevelTrainPipeline, "begin_with", watch)
    monkeypatch.setattr(Ramp, "_narrow", lambda *stage: None)
    monkeypatch.setattr(AlphaOptimizer, "step", lambda *gradients: None)
    run = searched(tmp_path / "run")
    assert differ == []
    run_train(TrainCommand(recipe=BOTH, out=tmp_path / "plain", steps=60))
    plain = RunFolder.open(tmp_path / "plain")
    for kind in KINDS:
        expected = tensors_under(plain.latest_checkpoint(), kind)
        torch.testing.assert_close(tensors_under(run.latest_checkpoint(), kind), expected, atol=1e-5, rtol=1e-3)
    for name in ("counts", "recent"):
        assert files_of(run.path)[f"{name}.safetensors"] == files_of(plain.path)[f"{name}.safetensors"]


def test_a_search_that_was_stopped_goes_on_behind_its_plain_steps(run: RunFolder, tmp_path, monkeypatch) -> None:
    note, steps = Progressive.note, list[int]()

    def stop(self: Any, *output: Any, **options: Any) -> None:
        note(self, *output, **options)
        steps.append(self.stream._num_samples // 64)
        if steps[-1] == 40 and steps[0] == 1:
            raise SearchInterrupted("stopped")

    monkeypatch.setattr(Progressive, "note", stop)
    with pytest.raises(SearchInterrupted):
        searched(tmp_path / "run")
    steps.clear()
    files = files_of(searched(tmp_path / "run", resume=True).path)
    assert min(steps) == 31
    for name in ("model", "scheme", "counts", "recent"):
        assert files[f"{name}.safetensors"] == files_of(run.path)[f"{name}.safetensors"]


def late(data: Path | None, **options: Any) -> Recipe:
    """Of user, the second half of the rows comes after half of the steps."""
    batches = [*batches_of_day(0)]
    for batch in batches[:15]:
        batch.sparse_features.values()[: len(batch.labels)] %= 20
    return dataclasses.replace(demo(data, **options), data=iter(batches))


def test_rows_that_come_late_have_columns_to_learn_in(gloo, tmp_path: Path) -> None:
    run = searched(tmp_path / "run", f"{__name__}:late", steps=30, compression=16.0)
    tables = tensors_under(run.latest_checkpoint(), "table/")
    assert bool((tables["user"][20:] != 0).all())
    assert bool((tables["genre"] == 0).all(dim=0).any())


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"epochs": 2}, "--epochs"),
        ({"steps": None}, "Recipe.data"),
        ({"recipe": "tests.tiny:demo"}, "--steps"),
        ({"steps": 500}, "training stream"),
        ({"source": Path("none")}, "none"),
    ],
)
def test_what_has_no_meaning_is_refused(gloo, fields: dict[str, Any], place: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=place):
        searched(tmp_path / "out", **fields)
