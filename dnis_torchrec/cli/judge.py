"""Models judged on a recipe's data, and the rows of results that come of it: of the model itself,
and of its rows in int8 or int4, whole or cut to their first principal axes, as users try first."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation.axes import rotation_groups
from dnis_torchrec.checks import describe
from dnis_torchrec.cli.run import PAGE, RESULTS, RunFolder
from dnis_torchrec.cli.settings import FINISHED
from dnis_torchrec.data.frames import FrameEncoder, FrameSplits, FrameStream
from dnis_torchrec.data.over_ranks import SeenSamples
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ranks import on_rank_zero, rank_of, together, world_size_of
from dnis_torchrec.report.page import write_report
from dnis_torchrec.report.rows import UNCOMPRESSED, ResultRow, Results, write_results
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.torchrec import writing_to_tables
from dnis_torchrec.training.evaluate import evaluate, primary_metric
from dnis_torchrec.training.loop import EpochRecord

Metrics = Mapping[str, Mapping[str, float]]
"""Split -> metric -> value."""

ROWS = {"int8 rows": 8, "int4 rows": 4}
"""Bits of a value in each kind of rows, by the name in the results."""
CUT_AXES = "cut axes"
SCALE_BYTES = 4  # of a row: scale and bias, a float16 each
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
        for name in ("test", "selection"):
            is_stream = self.is_left or self.recipe.is_stream
            warn_of_one_label(metrics[name], "stream" if is_stream else f"{name} split")
        splits: Any = {"metrics": metrics["test"], "selection": metrics["selection"]}
        numbers: Any = {"num_bytes": num_bytes, "compression": compression, "seconds": seconds}
        if NEW in metrics and method not in (*ROWS, CUT_AXES):
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

    def cut_rows(
        self, model: nn.Module, num_bytes: int, compressions: Sequence[float]
    ) -> list[ResultRow]:
        """Rows of the first columns of turned tables: of each size the better of int8 and int4."""
        tables, alone, rows = table_configs(model), self.recipe.leave_alone, []
        groups = rotation_groups(get_unwrapped_module(model), alone)
        to_turn = {table for group in groups for table in group.tables}
        if to_turn | set(alone) != {table.name for table in tables}:
            return []  # first columns of a table that may not be turned say no more than its last
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

    def finish(
        self,
        run: RunFolder,
        model: nn.Module,
        scheme: MixedDimensionScheme,
        rows: Sequence[ResultRow],
        head: Mapping[str, Any],
        **more: Any,
    ) -> None:
        """Writes the model and the rows of a run that is over."""
        encoder = encoder_of(self.recipe)
        run.save_model(model, scheme, b"" if encoder is None else encoder.to_bytes())
        head = {**head, "scheme": scheme.to_json()}
        if "stream" in head:  # a later delta asks whether an artifact was made of this run
            head["weights_sha256"] = on_rank_zero(run.hash_of_weights)
        self.write(run, rows, head, **more)

    def write(
        self, run: RunFolder, rows: Sequence[ResultRow], head: Mapping[str, Any], **more: Any
    ) -> Results:
        """Writes rows, page and head of a run that is over."""
        results = self.results(rows, head, **more)
        with together():
            if rank_of() == 0:
                write_results(run.path / RESULTS, results)
                write_report(run.path / PAGE, results)
                run.write_head(FINISHED, head)
                run.drop_replaced()
        return results

    def results(
        self,
        rows: Sequence[ResultRow],
        head: Mapping[str, Any],
        history: Sequence[EpochRecord] = (),
        **more: Any,
    ) -> Results:
        """All that a report shows."""
        test = () if self.recipe.is_stream else self.recipe.data.test
        metric, is_higher_better = primary_metric(self.recipe.task, test)
        is_by_time = getattr(self.data, "is_by_time", False)
        return Results(
            recipe=head["recipe"],
            rows=tuple(rows),
            history=tuple(record.line() for record in history),
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


def warn_of_one_label(metrics: Mapping[str, float], place: str) -> None:
    """Warns of samples whose labels are all the same, which have no AUC. Local, no collective."""
    for name in metrics if rank_of() == 0 else ():
        area = name.removesuffix("logloss") + "auc"
        if name.endswith("logloss") and area not in metrics:
            remedy = f"give more rows, as there is no {area} without"
            text = describe(place, "labels that differ", "one label in all samples", remedy)
            warnings.warn(text, stacklevel=2)


def encoder_of(recipe: Recipe) -> FrameEncoder | None:
    """What turns raw rows into a recipe's batches, where it is made of a table."""
    is_table = isinstance(recipe.data, FrameSplits | FrameStream)
    return recipe.data.encoder if is_table else None


# Rows of few bits, as FBGEMM serves them


def table_bytes(
    tables: Sequence[EmbeddingBagConfig],
    bits: int,
    columns: int | None = None,
    leave_alone: Collection[str] = (),
) -> int:
    """Bytes of tables whose rows have so many bits a value, of the first columns alone if a number
    is given; tables to leave alone count in float32."""
    total = 0
    for table in tables:
        width = min(table.embedding_dim, columns or table.embedding_dim)
        row = 2 * -(-width * bits // 16) + SCALE_BYTES  # FBGEMM's rows end on two bytes
        if table.name in leave_alone:
            row = 4 * table.embedding_dim
        total += table.num_embeddings * row
    return total


def columns_within(
    tables: Sequence[EmbeddingBagConfig], bits: int, num_bytes: int, leave_alone: Collection[str]
) -> int:
    """How many columns, at most and fewer than all, fit into so many bytes; 0 if none do."""
    widest = max(table.embedding_dim for table in tables)
    widths = range(16 // bits, widest, 16 // bits)
    fit = (w for w in widths if table_bytes(tables, bits, w, leave_alone) <= num_bytes)
    return max(fit, default=0)


def rounded_rows(weight: Tensor, bits: int) -> Tensor:
    """Rows as FBGEMM's inference kernels read them: rounded to codes with a scale each."""
    rows, filler = weight.detach().float().cpu(), -weight.shape[1] % (16 // bits)
    if filler:  # the last column again, which leaves a row's range as it is
        rows = torch.cat([rows, rows[:, -1:].expand(-1, filler)], dim=1)
    codes = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows.contiguous(), bits)
    values = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(codes, bits)
    return values[:, : weight.shape[1]].to(weight.device)


@contextmanager
def in_rows(
    model: nn.Module, bits: int, columns: int | None = None, leave_alone: Collection[str] = ()
) -> Iterator[None]:
    """Rounds the tables of a model to such rows, and restores them when the block ends. Local, no
    collective."""
    shards = [s for module in collections(model).values() for s in local_shards(module)]
    weights = [shard.weight for shard in shards if shard.table not in leave_alone]
    copies = [weight.clone() for weight in weights]
    try:
        with writing_to_tables(model):
            for weight in weights:
                weight[:, :columns] = rounded_rows(weight[:, :columns], bits)
                weight[:, columns or weight.shape[1] :] = 0
        yield
    finally:
        with writing_to_tables(model):
            for weight, copy in zip(weights, copies, strict=True):
                weight.copy_(copy)
