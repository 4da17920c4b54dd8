"""Progressive validation: each batch of a stream is predicted before it is trained on."""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from dnis_torchrec.data.stream import Stream
from dnis_torchrec.data.task import RANKING, Predictions, Task, check_prediction
from dnis_torchrec.data.urls import Address
from dnis_torchrec.ranks import Ranks, rank_of, together
from dnis_torchrec.training.checkpoint import tensors_under
from dnis_torchrec.training.evaluate import SampleMetrics, predict
from dnis_torchrec.training.pipeline import LateValues

REPORT_STEPS = 100  # steps between two reports at most; a run of few steps has a hundred reports
WINDOW_REPORTS = 10  # reports whose steps the window holds
MOST_IN_WINDOW = 1 << 21  # samples of a rank at most: the window has fewer steps of large batches
_PLACE = "progressive validation"
_COLUMNS = 4  # values, labels, weights and queries of each name, behind the loss


def report_steps(steps: int | None) -> int:
    """Steps between two reports of a run of so many steps, or of nobody knows how many."""
    return REPORT_STEPS if steps is None else max(1, min(REPORT_STEPS, steps // 100))


class Progressive:
    """Metrics over a sliding window of steps, of predictions that no step had learnt from."""

    # The training step's own forward pass gives them: its weights are those before the update.
    # Dropout and batch norm predict otherwise in training, so an evaluation comes first there.

    def __init__(
        self, stream: Stream, model: nn.Module, task: Task, device: torch.device, steps: int
    ) -> None:
        self.stream, self._task, self.device = stream, task, device
        kinds = (_DropoutNd, _NormBase)
        # None: it is not known, as no module tells of functional dropout; the first step shows it
        has_kinds = any(isinstance(module, kinds) for module in model.modules())
        self._differs: bool | None = has_kinds or None
        self._early: tuple[Tensor, Any] | None = None
        self._late = LateValues()
        self._window = deque[Tensor](maxlen=steps)
        self._num_samples = 0

    def predict(self, pipeline: Any) -> None:
        """Called before a step: predicts its batch where the step itself would do it otherwise."""
        may_differ = self._differs is not False and self._early is None
        batch = self.stream.peek() if may_differ else None
        if batch is not None:
            with pipeline.detached() as model, torch.no_grad():
                for _, _, loss, outputs in predict(model, [batch], self.device):
                    self._early = loss, outputs

    def note(self, output: tuple[Tensor, Any], *, is_lower: bool = True) -> None:
        """Called after a step with what its forward pass gave: loss of the data and outputs. Those
        of an upper step count: the lower one on the same batch comes when alpha has learnt it."""
        if self._differs is None and self._early is not None:
            tensors = [
                [x for x in tree_leaves(v) if isinstance(x, Tensor)] for v in (self._early, output)
            ]
            pairs = zip(*tensors, strict=False)
            is_same = all(a.shape == b.shape and torch.allclose(a, b, 1e-4) for a, b in pairs)
            self._differs = not all(Ranks.everyone().gather(is_same))
            self._early = self._early if self._differs else None
        self._early = self._early or output
        if not is_lower:
            return
        (loss, outputs), self._early = self._early, None
        batch = self.stream.settle().to(self.device)
        number = len(batch.labels)
        columns = [loss.detach().expand(number)]
        by_name = self._task.predictions(batch, outputs)
        for name in self._task.kinds:
            of_name = by_name[name]
            ones = torch.ones(number, device=self.device)
            weights = ones if of_name.weights is None else of_name.weights
            queries = ones if of_name.queries is None else of_name.queries
            columns += [of_name.values, of_name.labels, weights, queries]
        self._late.settle()
        rows = torch.stack([part.detach().flatten().double() for part in columns], dim=1)
        self._late.read(rows, self._add)

    def _add(self, rows: Tensor) -> None:
        is_full = len(self._window) == self._window.maxlen
        self._num_samples += len(rows) - (len(self._window[0]) if is_full else 0)
        self._window.append(rows)
        while self._num_samples > MOST_IN_WINDOW and len(self._window) > 1:
            self._num_samples -= len(self._window.popleft())

    def metrics(self) -> dict[str, float]:
        """Metric -> value over the window, on all ranks."""
        self._late.settle()
        kinds = self._task.kinds
        metrics = SampleMetrics(kinds, self.device, _PLACE)
        rows = torch.cat([*self._window]).to(self.device)
        predictions = {}
        for index, (name, kind) in enumerate(kinds.items()):
            first = 1 + _COLUMNS * index
            values, labels, weights, queries = rows[:, first : first + _COLUMNS].unbind(1)
            of_name = Predictions(values, labels, weights)
            if kind == RANKING:
                of_name = Predictions(values, labels, queries=queries.long())
            place = f"{_PLACE}, prediction {name!r}" if name else _PLACE
            predictions[name] = check_prediction(of_name, kind, len(rows), place)
        metrics.update(rows[:, 0], len(rows), predictions)
        return metrics.compute()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this rank's window and of the stream, by key."""
        self._late.settle()
        sizes = torch.tensor([len(rows) for rows in self._window])
        window = {"values": torch.cat([*self._window]), "sizes": sizes}
        parts = {f"{self._key(rank_of())}/window/{name}": value for name, value in window.items()}
        place = self._key(self.stream.owner)
        return parts | {f"{place}/{name}": value for name, value in self.stream.tensors().items()}

    def restore(self, path: Address, step: int) -> None:
        """Goes to where a checkpoint was taken; a rank that was not there has an empty window."""
        window = tensors_under(path, f"{self._key(rank_of())}/window/")
        if window:
            parts = window["values"].split(window["sizes"].tolist())
            self._window.extend(parts)
            self._num_samples = sum(map(len, parts))
        parts_of_stream = tensors_under(path, f"{self._key(self.stream.owner)}/")
        with together():
            self.stream.load_tensors(parts_of_stream, step)

    @staticmethod
    def _key(rank: int) -> str:
        return f"rank{rank}/stream"
