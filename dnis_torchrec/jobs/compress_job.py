"""`dnis compress`: a trained model -> an artifact for each size, and what each costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from dnis_torchrec._dependencies import versions
from dnis_torchrec.allocation.axes import rotation_groups
from dnis_torchrec.allocation.bits import Allocation
from dnis_torchrec.allocation.compress import Measured, measure_
from dnis_torchrec.allocation.settings import CompressSettings
from dnis_torchrec.artifact.export import drop_in_, export
from dnis_torchrec.artifact.manifest import read_manifest, write_manifest
from dnis_torchrec.artifact.write import shared_folder
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.files import FolderKind, write_json
from dnis_torchrec.data.over_ranks import measured_samples, read_before_training
from dnis_torchrec.data.recipe import DataSplits, Recipe, build_recipe, build_recipe_again
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.jobs.run_folder import COMPRESSION_FILE, RunFolder, RunWriteError
from dnis_torchrec.jobs.stored_rows import CUT_AXES, ROWS, columns_within, in_rows, table_bytes
from dnis_torchrec.ranks import Ranks, on_rank_zero, together
from dnis_torchrec.report.compression_content import COMPRESS, CompressionContent, CompressionRow
from dnis_torchrec.report.compression_page import write_compression
from dnis_torchrec.report.content import UNCOMPRESSED
from dnis_torchrec.report.provenance import PROVENANCE, Step, steps_of
from dnis_torchrec.report.test_split import CountedLabels, TestSplit
from dnis_torchrec.report.verdict import doubts
from dnis_torchrec.selection.shards import collections, dense_parameters, table_configs
from dnis_torchrec.selection.swap import replace_
from dnis_torchrec.training.checkpoint import StoredTensor, check_shared
from dnis_torchrec.training.evaluate import evaluate, primary_metric
from dnis_torchrec.training.shard import process_group
from dnis_torchrec.training.weights import check_state, spread_filled, weights_for_

_FORM = "packed"
"""Of the artifacts."""
FORMAT = "dnis-torchrec-compression"
KIND = FolderKind("compression", COMPRESSION_FILE, FORMAT)


@dataclass(frozen=True, kw_only=True)
class CompressJob(CompressSettings):
    """A request to compress one model to some sizes, beside its settings."""

    run: Path | None
    recipe: str
    data: Path | None
    out: Path
    compressions: tuple[float, ...] = ()
    weights: Path | None = None
    baselines: bool = True
    overwrite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_clear = bool(self.compressions) != (self.max_loss is not None)
        received = "both" if self.compressions else "neither"
        check(
            is_clear,
            "size",
            "compressions or a largest loss",
            received,
            "say --compression 8,20,40, for example",
        )
        names = [_name(size) for size in self.compressions]
        twice = sorted({name for name in names if names.count(name) > 1})
        check(not twice, "compression", "each size once", twice)
        for size in self.compressions:
            check(1 < size < float("inf"), "compression", "finite numbers above 1", size)
        if self.run is not None:
            remedy = "give --weights to a recipe"
            check(
                self.weights is None,
                f"run folder {self.run}",
                "its own weights",
                "--weights",
                remedy,
            )
            check(
                self.seed is None,
                f"run folder {self.run}",
                "its own seed",
                f"--seed {self.seed}",
                "leave it out",
            )

    @property
    def sizes(self) -> dict[str, dict[str, float]]:
        """Name of an artifact's folder -> its size, as `Measured.allocate` takes it."""
        if self.max_loss is not None:
            return {f"loss{self.max_loss:g}": {"max_loss": self.max_loss}}
        return {_name(size): {"compression": size} for size in self.compressions}


def _name(size: float) -> str:
    return f"x{size:g}"


def run_compress(job: CompressJob) -> CompressionContent:
    """Measures a trained model once, and writes an artifact in packed form for each size, with a
    page about all."""
    with process_group() as device:
        step = Step.now("compress", job.out)
        return _compress(job, job.recipe, step, device)


def _compress(job: CompressJob, spec: str, step: Step, device: torch.device) -> CompressionContent:
    on_rank_zero(lambda: check_free(job.out, overwrite=job.overwrite))
    check_shared(job.out.parent)
    with together():
        recipe, stored, head = _trained(job, spec)
        steps = (
            *(() if job.run is None else steps_of(RunFolder(job.run).read_head(), job.run)),
            step,
        )
        dense_bytes = 4 * dense_parameters(recipe.model)
    loss, ranks = recipe.task, Ranks.everyone()
    data, counts, _ = read_before_training(recipe, table_configs(recipe.model), ranks)
    model = spread_filled(recipe.model, stored, device)
    test = CountedLabels(data.test)
    before = _evaluated(model, replace(data, test=test), loss, device)
    uncertain = _doubts(job, test.of(ranks), before[1])
    beside = (
        _beside(job, model, recipe, data, device) if job.baselines and ranks.world_size == 1 else []
    )
    started = time.monotonic()
    measured = measure_(
        model,
        measured_samples(data.train),
        loss=loss,
        counts=counts,
        held_out=measured_samples(data.validation),
        num_blocks=job.num_blocks,
        num_samples=job.num_samples,
        leave_alone=recipe.leave_alone,
    )
    if job.baselines and ranks.world_size == 1:
        beside += _cut(job, model, recipe, data, device)
    allocations = {name: measured.allocate(**size) for name, size in job.sizes.items()}  # type: ignore[arg-type]
    seconds = time.monotonic() - started
    head |= {"versions": versions(), "notes": []}
    head[PROVENANCE] = [one.to_json() for one in steps]
    rows = [_row(UNCOMPRESSED, before, head["seed"], compression=1.0, num_bytes=dense_bytes)]
    with _written(job, ranks) as folder:
        for name, allocation in allocations.items():
            writing = time.monotonic()
            described = {
                "turned": bool(rotation_groups(model, recipe.leave_alone)),
                "error_feedback": True,
                "output_shift": allocation.output_shift,
                "configuration": _configuration(job, name),
            }
            with measured.shifted(allocation):
                export(
                    model, allocation.scheme, folder / name, forms=(_FORM,), run=head | described
                )
                taken = seconds + time.monotonic() - writing
                metrics = _served(model, folder / name, data, loss, device)
            on_rank_zero(partial(_note_metrics, folder / name, metrics[1]))
            rows.append(
                _row(
                    COMPRESS, metrics, head["seed"], allocation=allocation, seconds=taken, name=name
                )
            )
        primary = primary_metric(loss, data.test)
        told = head | {"doubts": uncertain, PROVENANCE: steps}
        content = _content(job, spec, measured, [*rows, *beside], told, primary)
        with together():
            if ranks.is_first:
                write_json(
                    folder / COMPRESSION_FILE,
                    {"format": FORMAT, "format_version": 1} | content.to_json(),
                )
                write_compression(folder / "report.html", content)
    return content


def check_free(out: Path, *, overwrite: bool) -> None:
    """Refuses an `out` that something stands at, unless `dnis compress` wrote it and it may be
    replaced."""
    is_ours, remedy = (out / COMPRESSION_FILE).is_file(), "choose another --out"
    is_free = not out.exists() or (overwrite and is_ours)
    remedy += " or --overwrite it" if is_ours else ""
    check(is_free, f"folder {out}", "a folder that does not exist", "an existing one", remedy)


def _trained(
    job: CompressJob, spec: str
) -> tuple[Recipe, dict[str, StoredTensor] | None, dict[str, Any]]:
    """The recipe, the weights of its model where they are in files, and what an artifact tells of
    where it is from."""
    if job.run is None:
        seed = job.seed or 0
        recipe = build_recipe(spec, job.data, seed=seed)
        stored = None if job.weights is None else weights_for_(recipe.model, job.weights)
        return recipe, stored, {"recipe": spec, "seed": seed}
    run = RunFolder.open(job.run)
    head = run.read_head()
    recipe, stored = build_recipe_again(spec, job.data, head), run.stored()
    check_state(recipe.model, stored, str(job.run))
    kept = ("seed", "embedding_dim")
    return recipe, stored, {"recipe": spec} | {name: head[name] for name in kept if name in head}


def _note_metrics(path: Path, metrics: dict[str, float]) -> None:
    """Puts the metrics of an artifact as it is served into its manifest, for `dnis verify`."""
    manifest = read_manifest(path)
    write_manifest(path, manifest | {"run": manifest["run"] | {"metrics": metrics}})


def _served(
    model: nn.Module, artifact: Path, data: DataSplits, loss: nn.Module, device: torch.device
) -> list[dict[str, float]]:
    """Metrics on selection and test with the artifact's modules in the model, which gets its own
    back afterwards."""
    own, plain = collections(model), get_unwrapped_module(model)
    with together():
        drop_in_(plain, artifact, form=_FORM)
    served = {fqn: plain.get_submodule(fqn) for fqn in own}
    try:
        plain.to(device)
        return _evaluated(model, data, loss, device)
    finally:
        for fqn, collection in own.items():
            replace_(plain, served[fqn], collection)


def _doubts(job: CompressJob, split: TestSplit, metrics: dict[str, float]) -> tuple[str, ...]:
    """What is uncertain about results of the model; of its training only a run knows."""
    if job.run is None:
        return doubts(split, metrics)
    head = RunFolder.open(job.run).read_head()
    return doubts(split, metrics, head["history"], head["configuration"].get("max_epochs"))


def _beside(
    job: CompressJob, model: nn.Module, recipe: Recipe, data: DataSplits, device: torch.device
) -> list[CompressionRow]:
    """Rows of the same model with its tables in fewer bits a value, all alike."""
    tables, rows = table_configs(model), []
    for name, bits in ROWS.items():
        with in_rows(model, bits, leave_alone=recipe.leave_alone) as served:
            metrics = _evaluated(served, data, recipe.task, device)
        num_bytes = table_bytes(tables, bits, leave_alone=recipe.leave_alone)
        compression = 4 * dense_parameters(model) / num_bytes
        rows.append(
            _row(name, metrics, job.seed or 0, compression=compression, num_bytes=num_bytes)
        )
    return rows


def _cut(
    job: CompressJob, model: nn.Module, recipe: Recipe, data: DataSplits, device: torch.device
) -> list[CompressionRow]:
    """The first columns of tables in their principal axes, of each size the better of int8 and int4
    on the selection split."""
    groups = rotation_groups(get_unwrapped_module(model), recipe.leave_alone)
    axes = {table for group in groups for table in group.tables}
    tables, rows = table_configs(model), []
    if axes | set(recipe.leave_alone) != {table.name for table in tables}:
        return []  # first columns of a table that may not be turned say no more than its last
    for size in job.compressions:
        budget, best = int(4 * dense_parameters(model) / size), None
        for bits in ROWS.values():
            columns = columns_within(tables, bits, budget, recipe.leave_alone)
            if not columns:
                continue
            with in_rows(model, bits, columns, recipe.leave_alone) as served:
                metrics = _evaluated(served, data, recipe.task, device)
            if best is None or metrics[0]["loss"] < best[0][0]["loss"]:
                best = metrics, table_bytes(tables, bits, columns, recipe.leave_alone)
        if best is not None:
            compression = 4 * dense_parameters(model) / best[1]
            rows.append(
                _row(CUT_AXES, best[0], job.seed or 0, compression=compression, num_bytes=best[1])
            )
    return rows


def _evaluated(
    model: nn.Module, data: DataSplits, loss: nn.Module, device: torch.device
) -> list[dict[str, float]]:
    """Metrics on selection and test."""
    task = TrainTask(get_unwrapped_module(model), loss)
    return [evaluate(task, getattr(data, split), loss, device) for split in ("selection", "test")]


def _row(
    method: str,
    metrics: list[dict[str, float]],
    seed: int,
    *,
    allocation: Allocation | None = None,
    compression: float = 1.0,
    num_bytes: int = 0,
    seconds: float = 0.0,
    name: str = "",
) -> CompressionRow:
    return CompressionRow(
        method=method,
        compression=compression if allocation is None else allocation.compression,
        bytes=num_bytes if allocation is None else allocation.num_bytes,
        metrics=metrics[1],
        selection=metrics[0],
        predicted_loss_increase=0.0 if allocation is None else allocation.predicted_loss_increase,
        seed=seed,
        seconds=seconds,
        name=name,
    )


def _configuration(job: CompressJob, name: str | None = None) -> dict[str, Any]:
    size = {"sizes": job.sizes} if name is None else job.sizes[name]
    return size | {"num_blocks": job.num_blocks, "num_samples": job.num_samples}


def _content(
    job: CompressJob,
    spec: str,
    measured: Measured,
    rows: list[CompressionRow],
    head: dict[str, Any],
    primary: tuple[str, bool],
) -> CompressionContent:
    return CompressionContent(
        recipe=spec,
        rows=tuple(rows),
        primary_metric=primary[0],
        higher_is_better=primary[1],
        num_samples=measured.curvature.num_samples,
        relative_error=measured.curvature.relative_error,
        notes=tuple(head["notes"]),
        doubts=head["doubts"],
        provenance=head[PROVENANCE],
        configuration=_configuration(job),
        versions=head["versions"],
    )


@contextmanager
def _written(job: CompressJob, ranks: Ranks) -> Iterator[Path]:
    """The folder to fill; it appears at `out` when it is complete."""
    try:
        with shared_folder(job.out, overwrite=job.overwrite, kind=KIND, ranks=ranks) as folder:
            yield folder
    except OSError as error:
        requirement = "to write the compressed model"
        raise RunWriteError(
            describe(f"folder {job.out}", requirement, str(error), "make room for it")
        ) from error
