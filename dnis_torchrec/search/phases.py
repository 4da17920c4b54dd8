"""SearchLoop: the phases of a search, saved as they go: a search that is killed goes on as if
nothing had been."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NotRequired, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.datasets.utils import Batch

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check
from dnis_torchrec.data.files import conform
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.urls import Address
from dnis_torchrec.ranks import on_rank_zero, rank_of, world_size_of
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream
from dnis_torchrec.training.checkpoint import CheckpointFolder, CheckpointSaver, Manifest
from dnis_torchrec.training.evaluate import selection_loss
from dnis_torchrec.training.pipeline import LateValues
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.shard import flushing_denormals
from dnis_torchrec.training.state import PlacedTensor, TrainingState

STOP_INTERVAL = 8
"""Steps after which several ranks ask each other whether one was told to stop."""


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Results of one epoch of a search: one line of the history."""

    epoch: int
    phase: str
    step: int
    train_loss: float
    selection_loss: float
    alpha_mean: float
    alpha_density: float


@dataclass
class SearchEvents:
    """Callbacks that follow a search; each is optional."""

    on_start: Callable[[int, FrequencyCounts, RowBlocks], None] = field(
        default=lambda steps, counts, blocks: None
    )
    on_resume: Callable[[int, Sequence[EpochRecord]], None] = field(
        default=lambda steps, history: None
    )
    on_phase: Callable[[Phase, int, int], None] = field(
        default=lambda phase, done, steps_per_epoch: None
    )
    on_step: Callable[[float, float], None] = field(default=lambda loss, density: None)
    on_epoch: Callable[[EpochRecord], None] = field(default=lambda record: None)
    on_alpha: Callable[[EpochRecord, Mapping[int, Tensor], bool], None] = field(
        default=lambda record, alpha, is_last: None
    )
    should_stop: Callable[[], bool] = field(default=lambda: False)


class SearchInterrupted(RuntimeError):
    """The search was asked to stop; its state was saved first, or the message says that it could
    not be."""

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
    """A stretch of a search in which the same things learn."""

    name: str
    steps: int
    patience: int | None = None
    starts_best: bool = False


@dataclass(frozen=True, kw_only=True)
class FinishedPhase:
    """A phase that is over."""

    name: str
    first_step: int
    last_step: int
    best: Best


class Plan(Protocol):
    """The phases of a search, and what changes at their ends. Everything is called on all ranks
    alike."""

    def phase_after(self, finished: Sequence[FinishedPhase]) -> Phase | None:
        """Returns the phase that follows those that are over; None ends the search. Depends on
        nothing else."""

    def begin(self, phase: Phase, finished: Sequence[FinishedPhase]) -> None:
        """Called before the first step of a phase, and before that of a search that goes on in the
        middle of it."""

    def after_step(self, phase: Phase, done: int) -> None:
        """Called after every lower step."""

    def end(self, phase: Phase) -> None:
        """Called once when a phase is over, with the weights that it leaves."""


class _Search(TypedDict):
    """The loop's own state in a checkpoint."""

    epoch: int
    is_over: bool
    best: Best | None
    finished: list[FinishedPhase]
    seconds: float
    steps_per_epoch: int
    data: dict[str, int]
    configuration: NotRequired[dict[str, Any]]
    history: list[EpochRecord]


class SearchValues(TypedDict):
    """State that a search resumes from, beside its tensors: the values of its checkpoints."""

    lower_steps: int
    upper_steps: int
    stream: dict[str, Any]
    search: _Search


class SearchLoop:
    """Steps, evaluates and saves a search until its plan has no further phase."""

    def __init__(
        self,
        pipeline: BilevelTrainPipeline,
        stream: BilevelStream[Batch],
        recipe: Recipe,
        plan: Plan,
        folder: Address,
        saving: Saving,
        *,
        steps_per_epoch: int,
        events: SearchEvents,
        data: Mapping[str, int] | None = None,
        configuration: Mapping[str, Any] | None = None,
    ) -> None:
        self._pipeline, self._stream, self._recipe, self._plan, self._events = (
            pipeline,
            stream,
            recipe,
            plan,
            events,
        )
        self._folder, self._saving = (
            CheckpointFolder(folder, keep_last=saving.keep_checkpoints),
            saving,
        )
        self._steps_per_epoch, self._data = steps_per_epoch, dict(data or {})
        self._configuration = json.loads(json.dumps(dict(configuration or {}), default=float))
        self.history: list[EpochRecord] = []
        self.finished: list[FinishedPhase] = []
        self._best = self._best_before = Best()
        self._epoch, self._is_over = 0, False
        self._resumed_from: Address | None = None
        self._steps_behind = 0
        self._started, self.seconds_before = time.monotonic(), 0.0
        self._late = LateValues()
        # This rank's share of the sum and the number of the epoch's losses.
        self._losses = torch.zeros(2, dtype=torch.float64, device=pipeline.device)

    @flushing_denormals()
    def run(self) -> None:
        """Runs what is left of the search, and ends with the weights and alpha of its last phase's
        best epoch."""
        latest = on_rank_zero(self._cleaned_latest) if self._saving.resume else None
        if latest is not None:
            self._restore(latest)
        with CheckpointSaver(self._folder, on_error=self._saving.on_save_error) as saver:
            while (phase := self._plan.phase_after(self.finished)) is not None:
                self._plan.begin(phase, self.finished)
                self.announce(phase, self._pipeline.lower_steps - self._first_step)
                while not self._is_over:
                    self._train_epoch(phase, saver)
                    self._end_epoch(phase, saver)
                self._end_phase(phase, saver)
        self._pipeline.detach()
        self._stream.leave()

    def announce(self, phase: Phase, done: int = 0) -> None:
        """Tells who listens that a phase begins; one behind the plan's own is not told of its
        steps."""
        self._events.on_phase(phase, done, self._steps_per_epoch)

    def stop_if_requested(self) -> None:
        """To be called after every step that is taken behind the last phase, of which nothing is
        saved, on all ranks."""
        self._steps_behind += 1
        if self._is_stop_requested():
            kept = f"its phases are saved in {self._folder.path}, --resume finishes it"
            raise SearchInterrupted(
                f"finishing, step {self._steps_behind}: stopped on request; {kept}"
            )

    def checkpoint_of(self, phase: FinishedPhase) -> Address:
        """Returns the checkpoint of a phase's best epoch."""
        return self._folder.path_of(phase.best.step)

    def _cleaned_latest(self) -> Address | None:
        self._folder.clean()
        return self._folder.latest()

    @property
    def _steps(self) -> int:
        return self._pipeline.lower_steps + self._pipeline.upper_steps

    @property
    def _first_step(self) -> int:
        """Lower steps before the phase at hand."""
        return self.finished[-1].last_step if self.finished else 0

    def _train_epoch(self, phase: Phase, saver: CheckpointSaver) -> None:
        pipeline, every, first = self._pipeline, self._saving.checkpoint_every, self._first_step
        evaluated = self.history[-1].step if self.history else 0
        until = min(evaluated + self._steps_per_epoch, first + phase.steps)
        while pipeline.lower_steps < until:
            before = pipeline.lower_steps
            loss = pipeline.progress(self._stream)[0]
            is_lower = pipeline.lower_steps > before
            if is_lower:
                # Over the ranks, so that a step counts as much on another number of them.
                share = torch.stack(
                    [loss.detach().double(), torch.ones_like(loss, dtype=torch.float64)]
                )
                self._losses += share / world_size_of(pipeline.process_group)
                self._plan.after_step(phase, pipeline.lower_steps - first)
                self._tell(loss, pipeline.alpha_optimizer.last_density)
            if self._is_stop_requested():
                self._save(saver)
                saver.wait()
                raise SearchInterrupted(self._how_stopped(saver))
            if (
                is_lower
                and every
                and pipeline.lower_steps % every == 0
                and pipeline.lower_steps < until
            ):
                self._save(saver)

    def _tell(self, loss: Tensor, density: Tensor) -> None:
        """Tells who listens of a lower step; on a GPU, where that would stop it, with the next one."""
        self._late.settle()
        of_step = torch.stack([loss.detach().double().squeeze(), density])
        self._late.read(of_step, lambda found: self._events.on_step(*found.tolist()))

    def _how_stopped(self, saver: CheckpointSaver) -> str:
        """Says where the search was stopped, and from where --resume goes on."""
        saved = (
            self._resumed_from if saver.last_step is None else self._folder.path_of(saver.last_step)
        )
        if saved is None:
            kept = "nothing could be saved"
        elif saver.last_step == self._steps:
            kept = f"everything is saved in {saved}, --resume goes on"
        else:
            kept = f"this state could not be saved, --resume goes on from {saved}"
        return f"epoch {self._epoch}, lower step {self._pipeline.lower_steps}: stopped on request; {kept}"

    def _end_epoch(self, phase: Phase, saver: CheckpointSaver) -> None:
        self._late.settle()
        self._wait(saver)  # so that the best epoch before this one is one that was written
        pipeline, epoch = self._pipeline, self._epoch
        with pipeline.detached() as model:
            found = selection_loss(model, self._recipe, pipeline.device)
        record = EpochRecord(
            epoch=epoch,
            phase=phase.name,
            step=pipeline.lower_steps,
            train_loss=self._mean_loss(),
            selection_loss=found,
            alpha_mean=pipeline.alpha_optimizer.mean(),
            alpha_density=pipeline.alpha_optimizer.density(),
        )
        self.history.append(record)
        self._epoch += 1
        self._events.on_epoch(record)
        if phase.patience is None or found < self._best.loss:
            self._best_before = self._best
            self._best = Best(epoch=epoch, step=self._steps, lower_step=record.step, loss=found)
        is_last = record.step - self._first_step >= phase.steps
        self._is_over = is_last or (
            phase.patience is not None and epoch - self._best.epoch >= phase.patience
        )
        self._save(saver)
        alpha = {dim: pipeline.alpha.of(dim) for dim in pipeline.alpha.dims}
        self._events.on_alpha(record, alpha, self._is_over)

    def _end_phase(self, phase: Phase, saver: CheckpointSaver) -> None:
        """Goes back to the best epoch. Nothing is saved before the next epoch's end: a resumed
        search does it again."""
        self._wait(saver)
        best = self._best
        if phase.patience is not None and best.step not in (-1, self._steps):
            with self._pipeline.detached():
                self._pipeline.go_back(self._folder.path_of(best.step))
        finished = FinishedPhase(
            name=phase.name,
            first_step=self._first_step,
            last_step=self._pipeline.lower_steps,
            best=best,
        )
        self._plan.end(phase)
        self.finished.append(finished)
        following = self._plan.phase_after(self.finished)
        self._best = self._best_before = (
            best if following is not None and following.starts_best else Best()
        )
        self._is_over = False

    def _wait(self, saver: CheckpointSaver) -> None:
        """An epoch whose checkpoint could not be written cannot be gone back to."""
        saver.wait()
        if self._best.step in saver.failed_steps:
            self._best = self._best_before

    def _mean_loss(self) -> float:
        if world_size_of(self._pipeline.process_group) > 1:
            dist.all_reduce(self._losses, group=self._pipeline.process_group)
        mean = float(self._losses[0] / self._losses[1])
        self._losses.zero_()
        return mean

    def _is_stop_requested(self) -> bool:
        wanted = self._events.should_stop()
        group = self._pipeline.process_group
        if world_size_of(group) == 1:
            return wanted
        if (self._steps + self._steps_behind) % STOP_INTERVAL:
            return False
        any_wants = torch.tensor(float(wanted), device=self._pipeline.device)
        dist.all_reduce(any_wants, group=group)
        return bool(any_wants > 0)

    def _save(self, saver: CheckpointSaver) -> None:
        self._wait(saver)
        state = self._pipeline.state(self._stream)
        # JSON has no infinity: a best epoch that is not there is left out.
        best = asdict(self._best) if self._best.step >= 0 else None
        entries: dict[str, Any] = {"epoch": self._epoch, "is_over": self._is_over, "best": best}
        entries["finished"] = [asdict(phase) for phase in self.finished]
        entries["seconds"] = self.seconds_before + time.monotonic() - self._started
        entries["steps_per_epoch"], entries["data"] = self._steps_per_epoch, self._data
        entries["configuration"] = self._configuration
        entries["history"] = [asdict(record) for record in self.history]
        whole = TrainingState(
            tensors={**state.tensors, f"rank{rank_of()}/losses": PlacedTensor.of(self._losses)},
            tables=state.tables,
            values={**state.values, "search": entries},
        )
        kept = [
            self._best.step,
            self._best_before.step,
            *(phase.best.step for phase in self.finished),
        ]
        saver.save(self._steps, whole, keep=tuple(kept))

    def _restore(self, path: Address) -> None:
        # Of ranks that are no more too: the epoch's mean is that of all samples, whoever has seen
        # them.
        written = on_rank_zero(lambda: self._ranks_of(path))
        resumed_ranks = range(rank_of(), written, world_size_of())
        losses = {f"rank{rank}/losses": torch.zeros_like(self._losses) for rank in resumed_ranks}
        placed = {name: PlacedTensor.of(losses_of_rank) for name, losses_of_rank in losses.items()}
        entries = self._pipeline.restore(path, self._stream, placed)["search"]
        self._resumed_from = path
        self._losses += sum(losses.values())
        self._epoch, self._is_over, self.seconds_before = (
            entries["epoch"],
            entries["is_over"],
            entries["seconds"],
        )
        self._best = self._best_before = Best(**entries["best"] or {})
        self.finished = [
            FinishedPhase(**phase | {"best": Best(**phase["best"])})
            for phase in entries["finished"]
        ]
        self.history = [EpochRecord(**record) for record in entries["history"]]
        self._events.on_resume(self._pipeline.lower_steps, tuple(self.history))

    def _ranks_of(self, path: Address) -> int:
        """Ranks that wrote a checkpoint."""
        manifest = Manifest.read(path)
        conform(
            manifest.values,
            SearchValues,
            f"checkpoint {path}, values",
            remedy="resume from another checkpoint",
        )
        saved, world_size = manifest.values["search"], manifest.world_size
        steps = saved["steps_per_epoch"]
        requirement = f"one with {self._steps_per_epoch} lower steps per epoch, as many as now"
        remedy = f"resume with the data of the run, and data that splits itself over ranks on {world_size} of them"
        check(steps == self._steps_per_epoch, f"checkpoint {path}", requirement, steps, remedy)
        other = [name for name, found in self._data.items() if saved["data"].get(name) != found]
        received, remedy = (
            f"one of other samples in: {', '.join(other)}",
            "resume with the data of the run",
        )
        check(not other, f"checkpoint {path}", "one of this data", received, remedy)
        configuration, remedy = (
            saved.get("configuration", {}),
            "resume with the configuration of the run",
        )
        for name, wanted in self._configuration.items():
            was = configuration.get(name, wanted)
            check(
                was == wanted,
                f"checkpoint {path}",
                f"one of a search with {name} {wanted}",
                was,
                remedy,
            )
        return world_size
