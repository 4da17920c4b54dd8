"""Models judged on a recipe's data, and the rows of results that come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation.axes import rotation_groups
from dnis_torchrec.cli.narrow_rows import CUT_AXES, ROWS, columns_within, in_rows, table_bytes
from dnis_torchrec.data.over_ranks import SeenSamples
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ranks import world_size_of
from dnis_torchrec.report.rows import COMPRESS, SEARCH, UNCOMPRESSED, ResultRow, Results
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import dense_parameters, table_configs
from dnis_torchrec.training.evaluate import evaluate, primary_metric

Metrics = Mapping[str, Mapping[str, float]]
"""Split -> metric -> value."""


SEEN, NEW = "seen", "new"
BY_TIME = "Splits are by time. The loss of later samples may rise twice as much as predicted."


@dataclass(frozen=True)
class Judge:
    """Evaluates models on a recipe's data, and turns the metrics into rows of results."""

    recipe: Recipe
    data: DataSplits
    device: torch.device
    seed: int
    counts: Mapping[str, Tensor]
    tables: Sequence[EmbeddingBagConfig]
    notes: list[str] = field(default_factory=list)
    is_left: bool = False
    """Whether the data are what a stream has left."""

    def evaluate(self, model: nn.Module) -> Metrics:
        """Metrics on selection and test."""
        module, loss = get_unwrapped_module(model), self.recipe.task
        task = module if isinstance(module, TrainTask) else TrainTask(module, loss)
        if self.is_left:  # of a stream: all splits are the same samples
            return {"test": evaluate(task, self.data.test, loss, self.device), "selection": {}}
        splits: dict[str, Any] = {"selection": self.data.selection, "test": self.data.test}
        if self.data.is_by_time and world_size_of() == 1:
            parts = {
                name: SeenSamples(self.data.test, self.counts, self.tables, are_seen=name == SEEN)
                for name in (SEEN, NEW)
            }
            if all(any(True for _ in part) for part in parts.values()):
                splits |= parts
        return {name: evaluate(task, part, loss, self.device) for name, part in splits.items()}

    def row(
        self,
        method: str,
        metrics: Metrics,
        num_bytes: int,
        compression: float = 1.0,
        seconds: float = 0.0,
        **more: Any,
    ) -> ResultRow:
        """The row of a model with these metrics."""
        splits: Any = {"metrics": metrics["test"], "selection": metrics["selection"]}
        numbers: Any = {"num_bytes": num_bytes, "compression": compression, "seconds": seconds}
        if NEW in metrics and method in (UNCOMPRESSED, COMPRESS, SEARCH):
            of_seen, of_new = (metrics[name]["loss"] for name in (SEEN, NEW))
            size = f", {compression:.3g} times smaller" if compression > 1 else ""
            self.notes.append(
                f"The test loss of {method}{size} is {of_seen:.4f} where training has seen the "
                f"rows, {of_new:.4f} elsewhere."
            )
        return ResultRow(method=method, seed=self.seed, **splits, **numbers, **more)

    def plain_rows(self, model: nn.Module, num_bytes: int) -> list[ResultRow]:
        """Rows of a plain model: as it is, and on one process in few bits a value."""
        alone = self.recipe.leave_alone
        rows = [self.row(UNCOMPRESSED, self.evaluate(model), num_bytes)]
        for name, bits in ROWS.items() if world_size_of() == 1 else ():
            with in_rows(model, bits, leave_alone=alone):
                metrics = self.evaluate(model)
            narrow = table_bytes(table_configs(model), bits, leave_alone=alone)
            rows.append(self.row(name, metrics, narrow, num_bytes / narrow))
        return rows

    def cut_rows(self, model: nn.Module, compressions: Sequence[float]) -> list[ResultRow]:
        """Rows of the first columns of turned tables: of each size the better of int8 and int4."""
        tables, alone, rows = table_configs(model), self.recipe.leave_alone, []
        groups = rotation_groups(get_unwrapped_module(model), alone)
        to_turn = {table for group in groups for table in group.tables}
        if to_turn | set(alone) != {table.name for table in tables}:
            return []  # first columns of a table that may not be turned say no more than its last
        num_bytes = 4 * dense_parameters(model)
        for size in compressions:
            best: tuple[Metrics, int] | None = None
            for bits in ROWS.values():
                columns = columns_within(tables, bits, int(num_bytes / size), alone)
                if columns:
                    with in_rows(model, bits, columns, alone):
                        metrics = self.evaluate(model)
                    split = "test" if self.is_left else "selection"
                    if best is None or metrics[split]["loss"] < best[0][split]["loss"]:
                        best = metrics, table_bytes(tables, bits, columns, alone)
            if best is not None:
                rows.append(self.row(CUT_AXES, *best, num_bytes / best[1]))
        return rows

    def results(self, rows: Sequence[ResultRow], head: Mapping[str, Any], **more: Any) -> Results:
        """All that a report shows."""
        test = () if self.recipe.is_stream else self.recipe.data.test
        metric, is_higher_better = primary_metric(self.recipe.task, test)
        is_by_time = getattr(self.data, "is_by_time", False)
        return Results(
            recipe=head["recipe"],
            rows=tuple(rows),
            primary_metric=metric,
            higher_is_better=is_higher_better,
            notes=(*head["notes"], *[BY_TIME] * is_by_time, *self.notes),
            commands=tuple(head["commands"]),
            versions=head["versions"],
            **more,
        )


def block_rows(
    scheme: MixedDimensionScheme, of_blocks: Mapping[str, Tensor]
) -> tuple[dict[str, Any], ...]:
    """One line a block that has rows: how many, how often they occur, and bits of a value."""
    lines = []
    for name, table in scheme.tables.items():
        occurrences = of_blocks[name].tolist()
        bits = table.column_bits().double().mean(dim=1).tolist()
        for block, rows in enumerate(table.routing.row_counts().tolist()):
            if rows:
                line = {"table": name, "block": block, "rows": rows, "bits": bits[block]}
                lines.append(line | {"occurrences": occurrences[block] / rows})
    return tuple(lines)
