"""The search in one call, on one process: no process group to make, no folder to name."""

from __future__ import annotations

import copy
import logging
import tempfile
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from torch import nn

from dnis_torchrec.allocation.bits import Allocation, sizes_as_html, sizes_as_text
from dnis_torchrec.checks import describe
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ranks import world_size_of
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme
from dnis_torchrec.search.search import COMPRESSED, SearchOutcome, search
from dnis_torchrec.search.settings import SearchSettings, check_compression
from dnis_torchrec.training.evaluate import evaluate, losses_in_words, primary_metric
from dnis_torchrec.training.loop import EpochRecord, SearchEvents
from dnis_torchrec.training.shard import process_group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SearchResult:
    """What a search has found; prints as a table of a few lines."""

    outcome: SearchOutcome
    allocation: Allocation
    metrics: dict[str, float]
    metric: str

    @property
    def model(self) -> nn.Module:
        """The plain model; its tables are float32 and hold the values that are served."""
        return self.outcome.model

    @property
    def scheme(self) -> MixedDimensionScheme:
        """Bits of every column of every block, for `dnis_torchrec.export`."""
        return self.allocation.scheme

    @property
    def compression(self) -> float:
        """Bytes of the float32 tables over the bytes served."""
        return self.allocation.compression

    def __repr__(self) -> str:
        """A headline, and a line for each table."""
        return "\n".join([*self._headlines(), *sizes_as_text(self.scheme)])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return sizes_as_html(self.scheme, self._headlines())

    def _headlines(self) -> list[str]:
        size = f"{self.compression:.2f} times smaller: {self.allocation.num_bytes:,} bytes served"
        lines = [
            f"{size}; test {self.metric} {self.metrics[self.metric]:.4f}, loss {self.metrics['loss']:.4f}"
        ]
        if self.outcome.origin == COMPRESSED:
            lines.append(
                "The search gained nothing over plain training, compressed, which is what this holds."
            )
        return lines


def search_once(
    recipe: Recipe, compression: float = 20.0, *, settings: SearchSettings | None = None
) -> SearchResult:
    """Trains a recipe's model so that its tables can be served in a fraction of the bytes:
    ``dnis.search``.

    On one process: a process group and a folder for checkpoints are made, and gone again when it
    returns; a process group of one that is there already is used. The recipe is left as it was, so
    the same call gives the same result as far as torch's random numbers do: the model is copied,
    and the splits count their epochs anew. For several ranks, progress and resuming there is ``dnis
    search``. Every epoch is logged at level INFO.

    Args:
        recipe: model, data, and loss or task.
        compression: bytes of the float32 tables over bytes served, above 1; met from below.
        settings: how to search; the defaults are for every recipe.

    Returns:
        The model, its scheme, and its metrics on the test split.

    Raises:
        ValueError: for bad data or a size that cannot be met, before training.
        NotImplementedError: on several ranks.
        NonFiniteError: if training diverges.

    Example:
        >>> import numpy as np
        >>> import pandas as pd
        >>> from dnis_torchrec.data.frames import recipe_from_frame
        >>> users = np.random.default_rng(0).integers(0, 50, 400)
        >>> frame = pd.DataFrame({"user": users, "liked": users % 2})
        >>> recipe = recipe_from_frame(frame, model="dlrm", label="liked", ids=["user"], embedding_dim=8)
        >>> found = search_once(recipe, 4, settings=SearchSettings(epochs=2, num_blocks=2))
        >>> found.compression >= 4, sorted(found.metrics)
        (True, ['auc', 'calibration', 'logloss', 'loss', 'ne'])
    """
    check_compression(compression)
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        if world_size_of() > 1:
            remedy = "run `torchrun -m dnis_torchrec search` with the recipe's name"
            raise NotImplementedError(
                describe("search", "supported is one process", f"{world_size_of()}", remedy)
            )
        own = replace(recipe, model=copy.deepcopy(recipe.model), data=_from_its_epoch(recipe.data))
        events = SearchEvents(on_epoch=partial(_log, recipe))
        outcome = search(
            own,
            compression,
            Path(folder),
            device,
            settings=settings or SearchSettings(),
            events=events,
        )
        metrics = evaluate(
            TrainTask(outcome.model, recipe.task), recipe.data.test, recipe.task, device
        )
    metric, _ = primary_metric(recipe.task, recipe.data.test)
    found = Allocation(
        scheme=outcome.scheme,
        predicted_loss_increase=outcome.predicted_loss_increase,
        num_bytes=sum(table.served_bytes(PACKED) for table in outcome.scheme.tables.values()),
    )
    return SearchResult(
        outcome=outcome,
        allocation=found,
        metrics=metrics,
        metric=metric if metric in metrics else "loss",
    )


def _from_its_epoch(data: DataSplits) -> DataSplits:
    """Streams of the search's own, which begin where those of the recipe stand."""
    return replace(
        data, **{part.name: copy.copy(getattr(data, part.name)) for part in fields(DataSplits)}
    )


def _log(recipe: Recipe, record: EpochRecord) -> None:
    losses = losses_in_words(recipe, record.train_loss, record.selection_loss)
    logger.info("epoch %d, %s: %s", record.epoch, record.phase, losses)
