"""Jobs: what each `dnis` command does, as a function. The command line only parses; a notebook calls these.

Results are returned; progress goes to the console and TensorBoard through `dnis_torchrec.progress`.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dnis_torchrec.baselines import MagnitudePruning, train_uniform, uniform_dim
from dnis_torchrec.budget import Size
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.export import load, load_dense_state, read_manifest, read_scheme, write_artifact
from dnis_torchrec.progress import console_events
from dnis_torchrec.pruning import RetainedMask, prune
from dnis_torchrec.recipe import Recipe, TrainTask, load_recipe
from dnis_torchrec.report import (
    ReportContent,
    ReportRow,
    RunResults,
    block_summaries,
    combine,
    count_rows,
    named_alpha,
    write_report,
)
from dnis_torchrec.run_folder import RunFolder, load_state_
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search import SearchConfig, search, table_configs
from dnis_torchrec.swap import unshard_
from dnis_torchrec.table_shards import collections
from dnis_torchrec.training import evaluate, primary_metric, process_group, shard, train_plainly

BASELINES = ("dense", "uniform", "magnitude")


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """What `dnis search` is asked for.

    Attributes:
        recipe: ``module:function``.
        data: folder of the data, or None for a recipe that makes its own.
        out: run folder to make.
        size: the requested size.
        settings: fields of `SearchConfig` to set otherwise than the recipe does.
        embedding_dim: D to start from, or None for the recipe's own.
        seed: of weights, splits and batch order.
        baselines: what to train beside, at the same size: of ``"dense"``, ``"uniform"``, ``"magnitude"``.
        overwrite: replace a run that stands at `out`.
    """

    recipe: str
    data: Path | None
    out: Path
    size: Size
    settings: Mapping[str, Any] = field(default_factory=dict)
    embedding_dim: int | None = None
    seed: int = 0
    baselines: tuple[str, ...] = ()
    overwrite: bool = False

    def __post_init__(self) -> None:
        check(self.seed >= 0, "seed", "expected an integer >= 0", self.seed)
        SearchConfig(size=self.size, **self.settings)
        for name in self.baselines:
            check_known("baseline", name, BASELINES)


def build_recipe(spec: str, data: Path | None, *, seed: int, embedding_dim: int | None = None) -> Recipe:
    """Calls a recipe function.

    Raises:
        ValueError: if it cannot be found or refuses the data.
        TypeError: if it returns no Recipe.
    """
    recipe = load_recipe(spec)(data, seed=seed, embedding_dim=embedding_dim)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe {spec!r}: expected a Recipe, got {type(recipe).__name__}")
    return recipe


def run_search(job: SearchJob) -> list[ReportRow]:
    """Searches, merges, prunes, evaluates on the test split and writes the run folder; trains baselines if asked.

    Returns:
        The rows of report.json, the search's own first.

    Raises:
        ValueError: for a bad argument, data or size; before training.
        SearchInterrupted: on SIGINT, after the state was saved.
        NonFiniteError: if training diverges; the last good checkpoint stays.
    """
    recipe = build_recipe(job.recipe, job.data, seed=job.seed, embedding_dim=job.embedding_dim)
    config = SearchConfig.of(recipe, job.size, job.settings)
    run = RunFolder.create(job.out, overwrite=job.overwrite)
    dense_dim = max(table.embedding_dim for table in table_configs(recipe.model))
    head = _head(job, recipe, config)
    run.write_head("searching", head)
    with process_group() as device, console_events(run) as events:
        torch.manual_seed(job.seed)
        started = time.monotonic()
        try:
            outcome = search(recipe, config, run.checkpoints, device, events)
        except BaseException:
            if run.has_checkpoint():
                run.write_head("interrupted", head)
            else:
                run.delete()  # nothing was trained: the next try may have the same name
            raise
        seconds = time.monotonic() - started
        task = TrainTask(outcome.model, recipe.loss)
        metrics = evaluate(task, recipe.data.test, recipe.loss, device)
        rows = [scheme_row("dnis", outcome.scheme, metrics, job.seed, seconds)]
        head |= {
            "scheme": outcome.scheme.to_json(),
            "history": [asdict(record) for record in outcome.history],
            "best_epoch": outcome.best_epoch,
            "metrics": metrics,
        }
        run.save_model(outcome.model, outcome.scheme, outcome.alpha)
        run.write_rows(rows)
        run.write_head("finished", head)
        rows += _baselines(job, outcome.scheme, dense_dim, config.patience, device)
    run.write_rows(rows)
    return rows


def _baselines(
    job: SearchJob, scheme: MixedDimensionScheme, dense_dim: int, patience: int, device: torch.device
) -> list[ReportRow]:
    """Rows of the baselines at the size that the search came to."""
    rows, ratio = [], scheme.compression_ratio
    with tempfile.TemporaryDirectory() as folder:
        if {"dense", "magnitude"} & set(job.baselines):
            recipe = build_recipe(job.recipe, job.data, seed=job.seed, embedding_dim=job.embedding_dim)
            pruning = MagnitudePruning(recipe, seed=job.seed, device=device, folder=Path(folder), patience=patience)
            rows += [pruning.dense_row()] if "dense" in job.baselines else []
            rows += [pruning.pruned_row(ratio)] if "magnitude" in job.baselines else []
        if "uniform" in job.baselines:
            dim = uniform_dim(dense_dim, ratio)
            recipe = build_recipe(job.recipe, job.data, seed=job.seed, embedding_dim=dim)
            dense = scheme.dense_parameters
            rows.append(train_uniform(recipe, dense_parameters=dense, seed=job.seed, device=device, patience=patience))
    return rows


def run_prune(
    run_path: Path,
    data: Path | None,
    out: Path,
    *,
    size: Size | None = None,
    threshold: float | None = None,
    structure: str = "block",
    scope: str = "global",
    max_epochs: int = 10,
    overwrite: bool = False,
) -> ReportRow:
    """Prunes a finished run further, fine-tunes what is left with the mask held, and writes a new run folder.

    Args:
        run_path: a finished run.
        data: folder of its data.
        out: run folder to make.
        size: see `prune`.
        threshold: see `prune`.
        structure: see `prune`.
        scope: see `prune`.
        max_epochs: epochs of fine-tuning at most; 0 prunes only.
        overwrite: replace a run that stands at `out`.

    Returns:
        The row of the pruned model; the new report.json holds it in front of the source's rows.
    """
    source = RunFolder.open(run_path)
    head = source.read_head()
    recipe = build_recipe(head["recipe"], data, seed=head["seed"], embedding_dim=head.get("embedding_dim"))
    load_state_(recipe.model, source.state(), str(run_path))
    counts, blocks = source.counts(), source.blocks()
    started = time.monotonic()
    scheme = prune(recipe.model, blocks, counts, size=size, threshold=threshold, structure=structure, scope=scope)
    run = RunFolder.create(out, overwrite=overwrite)
    with process_group() as device:
        torch.manual_seed(head["seed"])
        task = TrainTask(recipe.model, recipe.loss)
        if max_epochs:
            task = _fine_tune(task, recipe, device, max_epochs, run)
        metrics = evaluate(task, recipe.data.test, recipe.loss, device)
    row = scheme_row("dnis", scheme, metrics, head["seed"], time.monotonic() - started)
    run.save_stages(counts, blocks)
    run.save_model(task.model, scheme, source.alpha())
    run.write_rows([row, *source.rows()])
    fields = {name: value for name, value in head.items() if name not in ("format", "format_version", "status")}
    run.write_head("finished", fields | {"scheme": scheme.to_json(), "metrics": metrics})
    return row


def _fine_tune(task: TrainTask, recipe: Recipe, device: torch.device, max_epochs: int, run: RunFolder) -> TrainTask:
    model, optimizer = shard(task, recipe, device)
    mask = RetainedMask(model)
    train_plainly(
        model, optimizer, recipe, device, max_epochs=max_epochs, patience=3, folder=run.checkpoints, mask=mask
    )
    return cast(TrainTask, unshard_(model))


def run_export(
    run_path: Path, out: Path, *, forms: Sequence[str], scipy_formats: Sequence[str] = (), overwrite: bool = False
) -> Path:
    """Exports a finished run as an artifact.

    Args:
        run_path: a finished run.
        out: artifact folder to write.
        forms: see `write_artifact`.
        scipy_formats: see `write_artifact`.
        overwrite: replace an artifact that stands at `out`.

    Returns:
        `out`.

    Raises:
        ValueError: if the run is none or not finished, or `out` exists.
    """
    run = RunFolder.open(run_path)
    head = run.read_head()
    described = {key: head[key] for key in ("recipe", "seed", "configuration", "versions", "metrics", "notes")}
    return write_artifact(
        run.tables(),
        run.scheme(),
        out,
        forms=tuple(forms),
        dense_state=run.dense_state(),
        run=described,
        scipy_formats=tuple(scipy_formats),
        overwrite=overwrite,
    )


def run_evaluate(path: Path, data: Path | None) -> dict[str, Any]:
    """Evaluates a finished run, or an artifact loaded into its model, on the test split.

    Args:
        path: run folder or artifact.
        data: folder of the data.

    Returns:
        ``{"path", "kind", "recipe", "seed", "compression_ratio", "parameters", "bytes", "metrics"}``.

    Raises:
        ValueError: if `path` is neither, is damaged, or does not fit the recipe's model.
    """
    is_artifact = (path / "manifest.json").is_file()
    head = read_manifest(path)["run"] if is_artifact else RunFolder.open(path).read_head()
    recipe = build_recipe(head["recipe"], data, seed=head["seed"], embedding_dim=head.get("embedding_dim"))
    if is_artifact:
        scheme = read_scheme(path)
        drop_in_(recipe.model, path)
    else:
        run = RunFolder.open(path)
        scheme = run.scheme()
        load_state_(recipe.model, run.state(), str(path))
    with process_group() as device:
        task = TrainTask(recipe.model.to(device), recipe.loss)
        metrics = evaluate(task, recipe.data.test, recipe.loss, device)
    return {
        "path": str(path),
        "kind": "artifact" if is_artifact else "run",
        "recipe": head["recipe"],
        "seed": head["seed"],
        "compression_ratio": scheme.compression_ratio,
        "parameters": scheme.parameters,
        "bytes": scheme.form_bytes(),
        "metrics": metrics,
    }


def drop_in_(model: nn.Module, artifact: Path) -> nn.Module:
    """Puts an artifact's serving modules and dense weights into a model in place of its EmbeddingBagCollections.

    Args:
        model: a model of the kind that was searched; changed in place.
        artifact: what `export` wrote.

    Returns:
        `model`, or the serving module if the model itself is a collection.

    Raises:
        ValueError: if the artifact is damaged or the model has other collections or dense weights.
    """
    names = {table.collection for table in read_scheme(artifact).tables.values()}
    own = collections(model)
    for name in sorted(names):
        check_known("FQN", name, own)
    dense = load_dense_state(artifact)
    for name in names:
        served = load(artifact, collection=name)
        parent, _, child = name.rpartition(".")
        if not name:
            return served
        setattr(model.get_submodule(parent), child, served)
    serving = {key for name in names for key in model.state_dict() if key.startswith(f"{name}.")}
    missing = sorted((set(model.state_dict()) - serving) ^ set(dense))
    check(not missing, str(artifact), "expected the model's own dense weights", missing[:3], "use the model of the run")
    model.load_state_dict(dense, strict=False)
    return model


def run_report(run_path: Path, others: Sequence[Path] = ()) -> Path:
    """Writes RUN/report.html, and its figures as PNG and SVG in RUN/figures.

    Args:
        run_path: the finished run that the report is about.
        others: further finished runs of the same recipe. Those that differ in size or seed add rows; those that differ
            in embedding_dim or in the number of blocks make the figures of the metric against D and against S.

    Returns:
        The path of the page.

    Raises:
        ValueError: if a run is none, is not finished, or differs from the first in something else.
    """
    run = RunFolder.open(run_path)
    head, scheme, blocks = run.read_head(), run.scheme(), run.blocks()
    runs = combine([_run_results(path) for path in (run_path, *others)])
    needs_tables = not all(table.is_block_structured for table in scheme.tables.values())
    content = ReportContent(
        title=f"{head['recipe']}: embedding dimensions found by search",
        recipe=head["recipe"],
        configuration=head["configuration"],
        rows=runs.rows,
        primary_metric=head["primary_metric"],
        higher_is_better=head["higher_is_better"],
        alpha=named_alpha(run.alpha(), blocks),
        blocks=block_summaries(scheme, blocks),
        history=tuple(head["history"]),
        row_distribution=count_rows(scheme, run.counts(), run.tables() if needs_tables else None),
        by_embedding_dim=runs.by_embedding_dim,
        by_num_blocks=runs.by_num_blocks,
        notes=tuple(head["notes"]),
        versions=head["versions"],
    )
    return write_report(run_path / "report.html", content, figure_folder=run_path / "figures")


def _run_results(path: Path) -> RunResults:
    run = RunFolder.open(path)
    head = run.read_head()
    # A run of an older version lacks the settings that came later: their defaults are what it did.
    settings = SearchConfig.__dataclass_fields__.values()
    defaults = {setting.name: setting.default for setting in settings if setting.default is not MISSING}
    return RunResults(
        name=str(path),
        recipe=head["recipe"],
        configuration=defaults | head["configuration"],
        embedding_dim=max(table["embedding_dim"] for table in head["scheme"].values()),
        rows=run.rows(),
    )


def scheme_row(
    method: str, scheme: MixedDimensionScheme, metrics: dict[str, float], seed: int, seconds: float
) -> ReportRow:
    """The row of a model whose tables follow a scheme."""
    return ReportRow(
        method=method,
        compression_ratio=scheme.compression_ratio,
        parameters=scheme.parameters,
        bytes=scheme.form_bytes(),
        metrics=metrics,
        seed=seed,
        seconds=seconds,
    )


def _head(job: SearchJob, recipe: Recipe, config: SearchConfig) -> dict[str, Any]:
    metric, higher = primary_metric(recipe.loss, recipe.data.test)
    return {
        "recipe": job.recipe,
        "seed": job.seed,
        "embedding_dim": job.embedding_dim,
        "configuration": asdict(config),
        "primary_metric": metric,
        "higher_is_better": higher,
        "notes": list(recipe.notes),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of what decides a result."""
    names = ("dnis-torchrec", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
