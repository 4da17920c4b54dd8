"""ONE loop of training: phases of epochs, each back to its best one; it saves itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import LookupBatches
from dnis_torchrec.data.files import conform
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import LOSS
from dnis_torchrec.data.urls import Address
from dnis_torchrec.ranks import on_rank_zero, rank_of, world_size_of
from dnis_torchrec.selection.torchrec import process_group_of
from dnis_torchrec.training.checkpoint import (
    CheckpointFolder,
    CheckpointSaver,
    Manifest,
    PlacedTensor,
    TrainingState,
    model_tensors,
    read_checkpoint,
    snapshot,
    take_,
    warm_up_,
)
from dnis_torchrec.training.evaluate import selection_loss
from dnis_torchrec.training.pipeline import FiniteGuard, LateValues, SavedTrainPipeline
from dnis_torchrec.training.progressive import Progressive
from dnis_torchrec.training.rounded import HeldTables, HoldingOptimizer
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.shard import flushing_denormals
from dnis_torchrec.training.weights import fill_state_

STREAM_CHECKPOINT_STEPS = 5_000  # steps of a stream, which has no epochs, between two checkpoints
MOST_RECORDS = 400  # records of a stream's history; then every second one goes
STOP_INTERVAL = 8  # steps after which several ranks ask each other whether one was told to stop
PLAIN = "plain"  # name of the phase of a plain training


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Results of one epoch: one line of the history. All of alpha is 1 where there is none."""

    epoch: int
    phase: str = PLAIN
    step: int
    train_loss: float
    selection_loss: float
    alpha_mean: float = 1.0
    alpha_density: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)  # of a stream: those of the window

    def line(self) -> dict[str, Any]:
        """The record as results have it."""
        line = asdict(self)
        if not line.pop("metrics"):
            return line
        return {name: line[name] for name in ("step", "phase", "train_loss")} | self.metrics


def _ignore(*values: object) -> None:
    """What a callback that nobody gave does."""


@dataclass
class SearchEvents:
    """Callbacks that follow a training; each is optional."""

    on_start: Callable[[int, FrequencyCounts, RowBlocks], None] = _ignore
    on_resume: Callable[[int, Sequence[EpochRecord]], None] = _ignore
    on_phase: Callable[[Phase, int, float], None] = _ignore
    on_step: Callable[[float, float], None] = _ignore
    on_epoch: Callable[[EpochRecord], None] = _ignore
    on_save: Callable[[EpochRecord, bool], None] = _ignore
    should_stop: Callable[[], bool] = lambda: False


class SearchInterrupted(RuntimeError):
    """The search was asked to stop; its state was saved first."""

    signal: int | None = None


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best epoch of a phase so far, by the selection loss."""

    epoch: int = -1
    step: int = -1
    lower_step: int = -1
    loss: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a training throughout which the same parameters are trained."""

    name: str
    steps: float = math.inf
    epochs: float = math.inf
    patience: int | None = None
    starts_best: bool = False


@dataclass(frozen=True, kw_only=True)
class FinishedPhase:
    """First and last step of a completed phase, and its best epoch."""

    name: str
    first_step: int
    last_step: int
    best: Best


class Plan:
    """Phases of a training, here a fixed list, and what happens around them."""

    def __init__(self, *phases: Phase) -> None:
        self._phases = phases

    def phase_after(self, results: Sequence[FinishedPhase]) -> Phase | None:
        """Returns the next phase, given the completed ones; None if training is over."""
        return (*self._phases, None)[len(results)]

    def begin(self, phase: Phase, results: Sequence[FinishedPhase]) -> None:
        """Called before the first step of a phase, and when a training resumes within it."""

    def after_step(self, phase: Phase, done: int) -> None:
        """Called after every lower step."""

    def end(self, phase: Phase) -> None:
        """Called once at the end of a phase; the model holds the weights that the phase keeps."""


class _Search(TypedDict):
    """The loop's state, as a checkpoint stores it."""

    epoch: int
    is_over: bool
    best: Best | None
    finished: list[FinishedPhase]
    seconds: float
    steps_per_epoch: int
    data: dict[str, int]
    history: list[EpochRecord]


class SearchValues(TypedDict):
    """State that a search resumes from, beside its tensors: the values of its checkpoints."""

    lower_steps: int
    upper_steps: int
    stream: dict[str, Any]
    search: _Search


class TrainLoop:
    """Trains a model, and evaluates it after every epoch, until the last phase of its plan."""

    # Without a folder for checkpoints the best epoch is kept in memory. Without a stream an epoch
    # is a pass over the training split. With `progressive` it is the steps between two reports,
    # and progressive validation takes the place of the selection split.

    def __init__(
        self,
        pipeline: Any,
        stream: Iterator[Batch] | None,
        recipe: Recipe,
        plan: Plan,
        folder: Address | None = None,
        settings: Saving | None = None,
        *,
        events: SearchEvents,
        steps_per_epoch: float = math.inf,
        data: Mapping[str, int] | None = None,
        progressive: Progressive | None = None,
    ) -> None:
        self._pipeline, self._stream, self._recipe = pipeline, stream, recipe
        self._plan, self._events, self.steps_per_epoch = plan, events, steps_per_epoch
        self.history: list[EpochRecord] = []
        self.finished: list[FinishedPhase] = []
        self._best = Best()
        self._epoch, self._is_over = 0, False
        self.progressive, self._late = progressive, LateValues()
        # This rank's share of the sum and the number of the epoch's losses.
        self._losses = torch.zeros(2, dtype=torch.float64, device=pipeline.device)
        self._best_state: TrainingState | None = None
        self._folder, self._settings = None, settings or Saving()
        if folder is not None:
            self._folder = CheckpointFolder(folder)
        self._saver: CheckpointSaver | None = None
        self._data = dict(data or {})
        self._steps_behind = 0
        self._begin, self.seconds_before = time.monotonic(), 0.0

    @flushing_denormals()
    def run(self) -> None:
        """Runs the remaining phases; the model ends with the best weights of the last one."""
        with ExitStack() as stack:
            if self._folder is not None:
                latest = on_rank_zero(self._latest) if self._settings.resume else None
                if latest is not None:
                    self._restore(latest)
                self._saver = stack.enter_context(CheckpointSaver(self._folder))
            while (phase := self._plan.phase_after(self.finished)) is not None:
                self._plan.begin(phase, self.finished)
                self.announce(phase, self._pipeline.lower_steps - self._first_step)
                while not self._is_over:
                    self._train_epoch(phase)
                    self._end_epoch(phase)
                self._end_phase(phase)
        self._pipeline.detach()
        if self._folder is not None:
            cast(Any, self._stream).leave()

    def go_on_behind(self, past: TrainLoop) -> None:
        """Takes over the phases and the history of a loop that is over."""
        self.history, self.finished, self._epoch = past.history, past.finished, past._epoch
        self._pipeline.lower_steps, self.seconds_before = past._first_step, past.seconds_before

    def announce(self, phase: Phase, done: int = 0) -> None:
        """Tells who listens that a phase begins, in the plan or behind it."""
        self._events.on_phase(phase, done, self.steps_per_epoch)

    def stop_if_requested(self) -> None:
        """To be called on all ranks after a step behind the last phase, which is not saved."""
        self._steps_behind += 1
        if self._is_stop_requested():
            place, path = f"finishing, step {self._steps_behind}", cast(Any, self._folder).path
            text = f"its phases are saved in {path}, --resume finishes it"
            raise SearchInterrupted(f"{place}: stopped on request; {text}")

    def checkpoint_of(self, phase: FinishedPhase) -> Address:
        """Returns the checkpoint of a phase's best epoch."""
        return cast(CheckpointFolder, self._folder).path_of(phase.best.step)

    @property
    def _steps(self) -> int:
        return int(self._pipeline.lower_steps + self._pipeline.upper_steps)

    @property
    def _first_step(self) -> int:
        """Lower steps before the phase at hand."""
        return self.finished[-1].last_step if self.finished else 0

    def _train_epoch(self, phase: Phase) -> None:
        pipeline, first = self._pipeline, self._first_step
        last_step = self.history[-1].step if self.history else 0
        until = min(last_step + self.steps_per_epoch, first + phase.steps)
        stream = self._stream
        if stream is None:
            stream = iter(LookupBatches(self._recipe.data.train, "train"))
        while pipeline.lower_steps < until:
            previous = pipeline.lower_steps
            try:
                if self.progressive is not None:
                    self.progressive.predict(pipeline)
                output = pipeline.progress(stream)
                loss = output[0]
            except StopIteration:  # the end of an epoch of unknown length
                has_batch, remedy = pipeline.lower_steps > last_step, "check the data splits"
                check(has_batch, "training stream", "at least one batch", "none", remedy)
                break
            is_lower = pipeline.lower_steps > previous
            if self.progressive is not None:
                self.progressive.note(output, is_lower=is_lower)
            if is_lower:
                # Over the ranks, so that a step counts as much on another number of them.
                ones = torch.ones_like(loss, dtype=torch.float64)
                share = torch.stack([loss.detach().double(), ones])
                self._losses += share / world_size_of(pipeline.process_group)
                self._plan.after_step(phase, pipeline.lower_steps - first)
                # Whoever listens hears of it; on a GPU, which that would stop, with the next step.
                self._late.settle()
                of_step = torch.stack([loss.detach().double().squeeze(), pipeline.density])
                self._late.read(of_step, lambda values: self._events.on_step(*values.tolist()))
            if self._saver is not None:
                self._save_if_due(is_lower and pipeline.lower_steps < until)
            if self.progressive is not None and self.progressive.stream.is_over:
                break

    def _save_if_due(self, is_inside: bool) -> None:
        every, steps = self._settings.checkpoint_every, self._pipeline.lower_steps
        if self._is_stop_requested():
            self._save()
            self._wait()
            path = cast(CheckpointFolder, self._folder).path_of(self._steps)
            place = f"epoch {self._epoch}, lower step {steps}: stopped on request"
            raise SearchInterrupted(f"{place}; everything is saved in {path}, --resume goes on")
        if is_inside and every and steps % every == 0:
            self._save()

    def _end_epoch(self, phase: Phase) -> None:
        self._late.settle()
        self._wait()  # so that the best epoch before this one is one that was written
        pipeline, epoch = self._pipeline, self._epoch
        loss, metrics = self._judge()
        if world_size_of(pipeline.process_group) > 1:
            dist.all_reduce(self._losses, group=pipeline.process_group)
        record = EpochRecord(
            epoch=epoch,
            phase=phase.name,
            step=pipeline.lower_steps,
            train_loss=float(self._losses[0] / self._losses[1]),
            selection_loss=loss,
            metrics=metrics,
            **pipeline.figures(),
        )
        self._losses.zero_()
        self.history.append(record)
        self._epoch += 1
        self._events.on_epoch(record)
        is_better = phase.patience is None or loss < self._best.loss
        if is_better:
            self._best = Best(epoch=epoch, step=self._steps, lower_step=record.step, loss=loss)
        is_last = record.step - self._first_step >= phase.steps or self._epoch >= phase.epochs
        patience = math.inf if phase.patience is None else phase.patience
        self._is_over = is_last or epoch - self._best.epoch >= patience
        is_due, every = True, self._settings.checkpoint_every
        if self.progressive is not None:
            self._is_over |= self.progressive.stream.is_over
            is_due = self._is_over or (every > 0 and record.step % every == 0)
            if len(self.history) > MOST_RECORDS:
                self.history = self.history[::-2][::-1]
        if self._saver is not None:
            if is_due:
                self._save()
        elif is_better and phase.patience is not None:
            self._best_state = pipeline.snapshot()
        self._events.on_save(record, self._is_over)

    def _judge(self) -> tuple[float, dict[str, float]]:
        """What choices make small, and all metrics of a stream."""
        if self.progressive is not None:
            metrics = self.progressive.metrics()
            return metrics[LOSS], metrics
        with self._pipeline.detached() as model:
            return selection_loss(model, self._recipe, self._pipeline.device), {}

    def _end_phase(self, phase: Phase) -> None:
        """Goes back to the best epoch; a resumed search does it again, for nothing is saved."""
        self._wait()
        best = self._best
        if phase.patience is not None and best.step not in (-1, self._steps):
            with self._pipeline.detached():
                folder = self._folder
                self._pipeline.go_back(folder.path_of(best.step) if folder else self._best_state)
        steps = {"first_step": self._first_step, "last_step": self._pipeline.lower_steps}
        self._plan.end(phase)
        self.finished.append(FinishedPhase(name=phase.name, **steps, best=best))
        next_phase = self._plan.phase_after(self.finished)
        self._best = best if next_phase is not None and next_phase.starts_best else Best()
        self._is_over = False

    def _wait(self) -> None:
        if self._saver is not None:
            self._saver.wait()

    def _latest(self) -> Address | None:
        folder = cast(CheckpointFolder, self._folder)
        folder.clean()
        return folder.latest()

    def _is_stop_requested(self) -> bool:
        should_stop, group = self._events.should_stop(), self._pipeline.process_group
        if world_size_of(group) == 1:
            return should_stop
        if (self._steps + self._steps_behind) % STOP_INTERVAL:
            return False
        num_ranks = torch.tensor(float(should_stop), device=self._pipeline.device)
        dist.all_reduce(num_ranks, group=group)
        return bool(num_ranks > 0)

    def _save(self) -> None:
        state = self._pipeline.state(self._stream)
        entries: _Search = {
            "epoch": self._epoch,
            "is_over": self._is_over,
            # JSON has no infinity: a best epoch that is not there is left out.
            "best": cast(Best, asdict(self._best)) if self._best.step >= 0 else None,
            "finished": [cast(FinishedPhase, asdict(phase)) for phase in self.finished],
            "seconds": self.seconds_before + time.monotonic() - self._begin,
            "steps_per_epoch": int(self.steps_per_epoch),
            "data": self._data,
            "history": [cast(EpochRecord, asdict(record)) for record in self.history],
        }
        of_rank = {f"rank{rank_of()}/losses": self._losses}
        of_rank |= {} if self.progressive is None else self.progressive.tensors()
        tensors = {**state.tensors, **{key: PlacedTensor.of(t) for key, t in of_rank.items()}}
        whole = replace(state, tensors=tensors, values={**state.values, "search": entries})
        best = [phase.best.step for phase in self.finished]
        saver = cast(CheckpointSaver, self._saver)
        saver.save(self._steps, whole, keep=(self._best.step, *best))

    def _restore(self, path: Address) -> None:
        # Of ranks that are no more too: the epoch's mean is over all samples.
        world_size = on_rank_zero(lambda: self._ranks_of(path))
        ranks = range(rank_of(), world_size, world_size_of())
        losses = {f"rank{rank}/losses": torch.zeros_like(self._losses) for rank in ranks}
        tensors = {name: PlacedTensor.of(of_rank) for name, of_rank in losses.items()}
        entries = self._pipeline.restore(path, self._stream, tensors)["search"]
        self._losses += sum(losses.values())
        if self.progressive is not None:
            self.progressive.restore(path, self._pipeline.lower_steps)
        self._epoch, self._is_over = entries["epoch"], entries["is_over"]
        self.seconds_before = entries["seconds"]
        self._best = Best(**entries["best"] or {})
        phases = [phase | {"best": Best(**phase["best"])} for phase in entries["finished"]]
        self.finished = [FinishedPhase(**phase) for phase in phases]
        self.history = [EpochRecord(**record) for record in entries["history"]]
        self._events.on_resume(self._pipeline.lower_steps, tuple(self.history))

    def _ranks_of(self, path: Address) -> int:
        """Ranks that wrote a checkpoint, which is to be one of this search."""
        manifest, place = Manifest.read(path), f"checkpoint {path}"
        conform(manifest.values, SearchValues, f"{place}, values")
        search, remedy = manifest.values["search"], "resume with the data of the run"
        steps, ranks = search["steps_per_epoch"], manifest.world_size
        requirement = f"one with {self.steps_per_epoch} lower steps per epoch, as many as now"
        split = f"{remedy}, and data that splits itself over ranks on {ranks} of them"
        check(steps == self.steps_per_epoch, place, requirement, steps, split)
        differ = [name for name, value in self._data.items() if search["data"].get(name) != value]
        content = f"one of other samples in: {', '.join(differ)}"
        check(not differ, place, "one of this data", content, remedy)
        return ranks


@dataclass(frozen=True, kw_only=True)
class PlainTraining:
    """Results of `train_plainly`."""

    selection_loss: float
    best_epoch: int
    history: tuple[EpochRecord, ...]


class StreamPipeline(SavedTrainPipeline):
    """TorchRec's own pipeline, whose state a checkpoint or this process's memory holds."""

    def __init__(
        self, model: DistributedModelParallel, optimizer: Any, device: torch.device
    ) -> None:
        super().__init__(model, optimizer, device, pipeline_postproc=True)
        self.device, self.process_group = device, process_group_of(model)
        self.density = torch.ones((), dtype=torch.float64, device=device)
        self._dense_optimizer, self._guard = optimizer, FiniteGuard(model, self.process_group)

    def progress(self, stream: Iterator[Batch]) -> Any:
        """Takes a step."""
        output = super().progress(stream)
        self.lower_steps += 1
        self._guard.check_loss(output[0], f"step {self.lower_steps}")
        return output

    def begin_with_states(self, states: Mapping[str, Tensor], stream: Any) -> None:
        """Takes states of optimizers, by the keys of a checkpoint; the weights stay."""
        values = self.snapshot()
        warm_up_(self._model, self._optimizer, stream.first_train_batch().to(self.device), 2)
        take_(self._model, values)
        fill_state_(self._model, self._optimizer, states, self.process_group)

    def snapshot(self) -> TrainingState:
        """A copy of what the model has learnt."""
        return snapshot(self._model)

    def go_back(self, source: Address | TrainingState) -> None:
        """Takes what the model had learnt, from a checkpoint of this run or a snapshot."""
        if isinstance(source, TrainingState):
            take_(self._model, source)
        else:
            tensors, kinds = model_tensors(self._model), ("table", "model")
            read_checkpoint(source, self._model, tensors, self.process_group, kinds=kinds)

    def figures(self) -> dict[str, float]:
        """Returns nothing: a plain training has no alpha."""
        return {}


@flushing_denormals()
def train_plainly(
    model: DistributedModelParallel,
    optimizer: Any,
    recipe: Recipe,
    device: torch.device,
    *,
    max_epochs: int,
    patience: int,
    rule: HeldTables | None = None,
    starts_trained: bool = False,
    events: SearchEvents | None = None,
) -> PlainTraining:
    """Trains with TorchRec's pipeline to the best epoch, as the selection loss has it."""
    stepper = optimizer if rule is None else HoldingOptimizer(optimizer, rule)
    pipeline = StreamPipeline(model, stepper, device)
    first_loss, first_state = math.inf, None
    if starts_trained:
        first_loss, first_state = selection_loss(model, recipe, device), pipeline.snapshot()
    model.train()
    plan = Plan(Phase(name=PLAIN, epochs=max_epochs, patience=patience))
    loop = TrainLoop(pipeline, None, recipe, plan, events=events or SearchEvents())
    loop.run()
    best = loop.finished[0].best
    if first_state is not None and first_loss <= best.loss:
        pipeline.go_back(first_state)
        best = Best(loss=first_loss)
    history = tuple(loop.history)
    return PlainTraining(selection_loss=best.loss, best_epoch=best.epoch, history=history)
