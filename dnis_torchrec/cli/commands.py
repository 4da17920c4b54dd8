"""What each command does, from its settings to what it leaves behind."""

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from dnis_torchrec.allocation.axes import rotation_groups
from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.artifact.delta import ServedState, read_state, write_delta
from dnis_torchrec.artifact.export import export, load_model
from dnis_torchrec.artifact.load import ArtifactFolder, Rows, read_scheme
from dnis_torchrec.artifact.manifest import ENCODER, MANIFEST, read_manifest, write_manifest
from dnis_torchrec.artifact.package import write_package
from dnis_torchrec.artifact.refresh import MOST_DRIFT, Refresh, delta_, drift, whole_
from dnis_torchrec.artifact.verify import Verification, verify
from dnis_torchrec.artifact.write import shared_folder, write_artifact
from dnis_torchrec.checks import check, describe, versions
from dnis_torchrec.cli import run as runs
from dnis_torchrec.cli import settings as options
from dnis_torchrec.cli import streams
from dnis_torchrec.cli.judge import Judge, Metrics, block_rows, encoder_of, warn_of_one_label
from dnis_torchrec.cli.progress import progress_and_stop
from dnis_torchrec.cli.run import RESULTS, RunFolder, kind_of
from dnis_torchrec.cli.settings import FINISHED, is_table
from dnis_torchrec.data import over_ranks
from dnis_torchrec.data.batches import LookupBatches
from dnis_torchrec.data.files import conform
from dnis_torchrec.data.frames import FrameEncoder, recipe_from_frame, warn
from dnis_torchrec.data.recipe import DataSplits, Recipe, build_recipe
from dnis_torchrec.data.stream import FrequencyCounts
from dnis_torchrec.data.task import TrainTask, check_batches, direction_of
from dnis_torchrec.data.urls import address_of, url_of
from dnis_torchrec.ranks import Ranks, on_rank_zero, progress_bar, rank_of, together, world_size_of
from dnis_torchrec.report import rows as report
from dnis_torchrec.report.page import write_report
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme
from dnis_torchrec.search import search as bilevel
from dnis_torchrec.search.prune import uncompressed_scheme
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.search.search import with_tables_apart
from dnis_torchrec.search.settings import USUAL_EPOCHS, SearchSettings
from dnis_torchrec.selection.shards import TableShard, collections, dense_parameters, table_configs
from dnis_torchrec.selection.swap import in_float32_, replace_, unshard_
from dnis_torchrec.training.checkpoint import CheckpointFolder, StoredTensor, check_shared
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import PLAIN, Phase, Plan, StreamPipeline, TrainLoop
from dnis_torchrec.training.progressive import WINDOW_REPORTS
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.shard import launched_ranks, process_group, shard
from dnis_torchrec.training.weights import check_state, fill_, spread_filled, weights_for_

USUAL_TRAIN_EPOCHS = 60


# train


def run_train(settings: options.TrainCommand) -> report.Results:
    """Trains the plain model of a recipe and writes a run; goes on with one if asked to."""
    with process_group() as device:
        with together():
            past = _past_of(settings)
            if settings.refit is not None:
                past = RunFolder.open(settings.refit).read_head()
                is_plain = past.get("kind") == runs.TRAIN_RUN and not past.get("refit")
                is_plain = is_plain and "stream" not in past
                check(is_plain, "--refit", "a run of `dnis train`", str(settings.refit))
                best, seed = int(past["best_epoch"]), int(past["seed"])
                settings = replace(settings, epochs=best + 1, seed=seed)
            if settings.source is not None:
                RunFolder.open(settings.source).latest_checkpoint()
            recipe, head = _recipe_and_head(settings, past)
            recipe = with_tables_apart(recipe)
            streams.check_pass(recipe, settings)
            if settings.refit is not None:
                both = over_ranks.JoinedBatches(recipe.data.train, recipe.data.validation)
                recipe = replace(recipe, data=replace(recipe.data, train=both))
                head["refit"] = True
            configuration: dict[str, Any] = {"embedding_l2": recipe.embedding_l2}
            if settings.is_pass:
                source = None if settings.source is None else str(settings.source)
                configuration |= {"steps": settings.steps, "until": settings.until, "from": source}
            else:
                configuration["epochs"] = settings.epochs or USUAL_TRAIN_EPOCHS
            if settings.scheme is not None:
                scheme_id = ArtifactFolder(settings.scheme).content_id
                configuration |= {"scheme": str(settings.scheme), "scheme_id": scheme_id}
            head |= {"kind": runs.TRAIN_RUN, "configuration": configuration}
        with _run_folder(settings, head) as run:
            if on_rank_zero(run.status) != FINISHED:
                train = _train_on_stream if recipe.is_stream else _train
                train(settings, recipe, head, run, device)
            return on_rank_zero(lambda: report.read_results(run.path / RESULTS))


def _train(
    settings: options.TrainCommand,
    recipe: Recipe,
    head: dict[str, Any],
    run: RunFolder,
    device: torch.device,
) -> None:
    """The training itself; leaves a finished run with its row."""
    tables = table_configs(recipe.model)
    data, counts, fingerprints = over_ranks.read_splits(recipe, tables, Ranks.everyone())
    recipe = replace(recipe, data=data)
    train = LookupBatches(data.train, "train")
    epoch = getattr(train, "epoch", None)
    steps = sum(1 for _ in train)
    if epoch is not None:
        train.epoch = epoch  # counting the steps is no epoch of training
    scheme, policy = uncompressed_scheme(recipe.model), Saving(resume=settings.resume)
    torch.manual_seed(head["seed"])
    begin, narrow = time.monotonic(), None
    if settings.scheme is not None:
        narrow = streams.begin_narrow_(recipe, settings.scheme, None)
    task = TrainTask(recipe.model, recipe.task, embedding_l2=recipe.embedding_l2)
    model, optimizer = shard(task, recipe, device)
    stream = BilevelStream(train, data.validation, LevelSchedule(warm_up_steps=None))
    with progress_and_stop(recipe, run.drop_replaced, counts.num_samples) as events:
        model.train()
        patience = None if settings.refit else SearchSettings().patience
        most = head["configuration"]["epochs"] * steps
        plan = Plan(Phase(name=PLAIN, steps=most, patience=patience))
        loop = TrainLoop(
            *(StreamPipeline(model, optimizer, device), stream, recipe, plan),
            *(run.checkpoints, policy),
            events=events,
            steps_per_epoch=steps,
            data=fingerprints,
        )
        loop.run()
    seconds = loop.seconds_before + time.monotonic() - begin
    judge = Judge(recipe, data, device, head["seed"], counts.counts, tables)
    metrics = judge.evaluate(model)
    row = judge.row(report.UNCOMPRESSED, metrics, 4 * scheme.parameters, seconds=seconds)
    if narrow is not None:
        plain, _ = narrow.plain_model(model, loop.checkpoint_of(loop.finished[0]))
    else:
        plain = _without_shards(model)
    head = {**head, "best_epoch": loop.finished[0].best.epoch, "metrics": metrics["test"]}
    judge.finish(run, plain, scheme, [row], head, history=loop.history)
    on_rank_zero(CheckpointFolder(run.checkpoints).remove)


def _train_on_stream(
    settings: options.TrainCommand,
    recipe: Recipe,
    head: dict[str, Any],
    run: RunFolder,
    device: torch.device,
) -> None:
    """The one pass; leaves a finished run with the row of its last window."""
    scheme, begin = uncompressed_scheme(recipe.model), time.monotonic()
    seed = head["seed"]
    model, loop, summary, narrow = streams.train_on_stream(settings, recipe, seed, run, device)
    seconds = loop.seconds_before + time.monotonic() - begin
    record, steps, counts = loop.history[-1], loop.history[-1].step, summary.counts
    judge = Judge(recipe, recipe.data, device, seed, counts.counts, ())
    metrics = {"test": record.metrics, "selection": {}}
    row = judge.row(report.UNCOMPRESSED, metrics, 4 * scheme.parameters, seconds=seconds)
    window = min(steps, WINDOW_REPORTS * loop.steps_per_epoch)
    judge.notes.append(streams.STREAM_NOTE.format(window))
    if steps < (settings.steps or 0):
        judge.notes.append(streams.SHORT_NOTE.format(steps, settings.steps))
    on_rank_zero(lambda: run.save_stream(summary))
    if narrow is not None:
        latest: Any = CheckpointFolder(run.checkpoints).latest()
        plain, state = narrow.plain_model(model, latest)
        narrow.write_widened(run, state)
    else:
        plain = _without_shards(model)
    head = {**head, "metrics": record.metrics, **streams.record_of_stream(steps, counts)}
    judge.finish(run, plain, scheme, [row], head, history=loop.history, split="window")


def _without_shards(model: DistributedModelParallel) -> nn.Module:
    """The recipe's model, plain again on one process."""
    module = get_unwrapped_module(model) if world_size_of() > 1 else unshard_(model)
    return cast(TrainTask, module).model


# compress


def run_compress(settings: options.CompressCommand) -> report.Results:
    """Measures a trained model once, and writes an artifact for each size."""
    with process_group() as device:
        out, overwrite, ranks = settings.out, settings.overwrite, Ranks.everyone()
        on_rank_zero(lambda: RunFolder.check_free(out, overwrite=overwrite))
        check_shared(out.parent)
        with together():
            recipe, head = _recipe_and_head(settings, _past_of(settings))
            weights = None
            if settings.source is not None:
                weights = _weights_of(recipe.model, settings.source)
            recipe = with_tables_apart(recipe)
        encoder, tables = encoder_of(recipe), table_configs(recipe.model)
        recipe, data, counts, held_out = data_to_measure(settings.source, recipe, head, ranks)
        is_left = held_out is None
        num_bytes = 4 * dense_parameters(recipe.model)
        model = spread_filled(recipe.model, weights, device)
        judge = Judge(recipe, data, device, head["seed"], counts.counts, tables, is_left=is_left)
        rows = judge.plain_rows(model, num_bytes)
        begin = time.monotonic()
        measurement = measure_(
            model,
            over_ranks.samples_to_measure(data.train),
            loss=recipe.task,
            counts=counts,
            held_out=held_out,
            leave_alone=recipe.leave_alone,
        )
        if ranks.world_size == 1:
            rows += judge.cut_rows(model, num_bytes, settings.compressions)
        sizes = progress_bar(settings.sizes.items(), "choosing bits", delay=1)
        allocations = {name: measurement.allocate(**size) for name, size in sizes}
        seconds = time.monotonic() - begin
        head["configuration"] = {"sizes": settings.sizes}
        is_turned = bool(rotation_groups(model, recipe.leave_alone))
        with shared_folder(out, overwrite=overwrite, kind=runs.RUN, ranks=ranks) as folder:
            for name, allocation in allocations.items():
                begin = time.monotonic()
                record = {key: head[key] for key in head if key != "commands"} | {
                    "turned": is_turned,
                    "error_feedback": True,
                    "output_shift": allocation.output_shift,
                    "configuration": settings.sizes[name],
                }
                with measurement.shifted(allocation):
                    scheme, place = allocation.scheme, folder / name
                    export(model, scheme, place, forms=(PACKED,), run=record, encoder=encoder)
                    seconds_of_size = seconds + time.monotonic() - begin
                    metrics = _evaluate_served(judge, model, place)
                if not is_left:  # who verifies has other samples of a stream
                    on_rank_zero(partial(_note_metrics, place, metrics["test"]))
                size = allocation.num_bytes, allocation.compression
                row = judge.row(report.COMPRESS, metrics, *size, seconds_of_size, name=name)
                increase = allocation.predicted_loss_increase
                rows.append(replace(row, predicted_loss_increase=increase))
            head["kind"], split = runs.COMPRESS_RUN, "recent" if is_left else "test"
            return judge.write(RunFolder(folder), rows, head, split=split)


def data_to_measure(
    source: Path | None, recipe: Recipe, head: dict[str, Any], ranks: Ranks
) -> tuple[Recipe, DataSplits, FrequencyCounts, Iterable[Batch] | None]:
    """The recipe with splits, this rank's, the counts, and samples for gains unless all were
    trained on; of a stream the head of a run learns of it."""
    if not recipe.is_stream:
        data, counts, _ = over_ranks.read_splits(recipe, table_configs(recipe.model), ranks)
        held_out = data.selection if head.get("refit") else data.validation
        return recipe, data, counts, over_ranks.samples_to_measure(held_out)
    remedy = "name what `dnis train --steps` wrote"
    is_fit = source is not None and is_run(source)
    check(is_fit, "--from", "a run, as Recipe.data is a stream", source, remedy)
    run = RunFolder.open(cast(Path, source))
    data, counts, number = streams.data_of_stream(run, ranks)
    head |= {"notes": [streams.RECENT_NOTE.format(number)]}
    head |= {
        key: value for key, value in run.read_head().items() if key in ("stream", "weights_sha256")
    }
    return replace(recipe, data=data), data, counts, None


def is_run(path: Path) -> bool:
    """Returns whether `dnis` wrote a folder as a run."""
    return (path / "run.json").is_file()


def _past_of(settings: options.ModelCommand) -> dict[str, Any]:
    """What the run of --from records, which has another folder than the new one."""
    source = settings.source
    if source is None or not is_run(source):
        return {}
    is_apart, requirement = source.resolve() != settings.out.resolve(), "another folder than --out"
    check(is_apart, "--from", requirement, str(source), "choose another --out")
    return RunFolder(source).read_head()


def _weights_of(model: nn.Module, source: Path) -> dict[str, StoredTensor]:
    """Weights of a run, or in files, that fit a model; nothing is read yet."""
    if not is_run(source):
        return weights_for_(model, source)
    weights = RunFolder.open(source).weights()
    check_state(model, weights, f"run folder {source}")
    return weights


def _recipe_and_head(
    settings: options.ModelCommand, past: Mapping[str, Any]
) -> tuple[Recipe, dict[str, Any]]:
    """The recipe as the run that a command begins with had it, if it does, and what it records."""
    seed_option = getattr(settings, "seed", None)
    seed = int(past.get("seed", seed_option or 0))
    is_same = seed_option is None or seed_option == seed
    check(is_same, "run folder of --from", f"its seed {seed}", seed_option)
    head = {"recipe": settings.recipe, "seed": seed, "embedding_dim": past.get("embedding_dim")}
    columns = past.get("columns", settings.columns)
    if columns is not None and is_table(settings.recipe):
        head["columns"] = columns
    head["commands"] = [*past.get("commands", []), shlex.join(["dnis", *sys.argv[1:]])]
    head |= {"notes": [], "versions": versions(), "refit": bool(past.get("refit"))}
    return recipe_of(settings, {**past, **head}, settings.source), head


def recipe_of(settings: Any, record: Mapping[str, Any], folder: Path | None = None) -> Recipe:
    """The recipe or table of a command, with what a run or an artifact records of it. A stream has
    the encoder in its folder, and a table in splits has to give the same one, or all its rows are
    evaluated."""
    spec, columns = str(settings.recipe), record.get("columns")
    facts: dict[str, Any] = {name: record.get(name) for name in ("seed", "embedding_dim")}
    facts["seed"] = facts["seed"] or 0
    if not is_table(spec):
        recipe = build_recipe(spec, settings.data, **facts)
        in_float32_(recipe.model)  # Adam's states round to 0 in half precision
        return recipe
    columns = settings.columns if columns is None else columns
    check(columns is not None, "--label", f"the column of {spec} to predict", "none")
    conform(columns, runs.TableColumns, "columns of the run")
    is_same = settings.columns in (None, columns)
    check(is_same, f"table {spec}", f"the columns of the run, {columns}", settings.columns)
    is_stream = "stream" in record or getattr(settings, "is_pass", False)
    encoder = None
    if folder is not None and (file := folder / ENCODER).is_file():
        encoder = FrameEncoder.from_bytes(file.read_bytes(), str(file))
    facts |= {"encoder": encoder, "is_stream": True} if is_stream else {}
    recipe = recipe_from_frame(spec, model="dlrm", **columns, **facts)
    is_same = encoder is None or recipe.data.encoder.reads_as(encoder)
    if not is_same and isinstance(settings, options.EvaluateCommand) and not settings.verify:
        text = "all its rows are evaluated, and those that training read flatter the model"
        warn(f"table {spec}: not the one that {folder} was trained on: {text}")
        facts |= {"encoder": encoder, "is_stream": True}
        return recipe_from_frame(spec, model="dlrm", **columns, **facts)
    remedy = "use the table of the training; `dnis evaluate` and dnis.load_predictor take others"
    check(is_same, f"table {spec}", f"the ids that {folder} was trained on", "others", remedy)
    return recipe


def _evaluate_served(judge: Judge, model: nn.Module, artifact: Path) -> Metrics:
    """Metrics with the artifact's modules in the model, which gets its own back afterwards."""
    modules, plain = collections(model), get_unwrapped_module(model)
    with together():
        load_model(plain, artifact, form=PACKED)
    try:
        return judge.evaluate(plain.to(judge.device))
    finally:
        for fqn, module in modules.items():
            replace_(plain, plain.get_submodule(fqn), module)


def _note_metrics(artifact: Path, metrics: Mapping[str, float]) -> None:
    """Puts the metrics of an artifact as it is served into its manifest, for --verify."""
    manifest = read_manifest(artifact)
    write_manifest(artifact, manifest | {"run": manifest["run"] | {"metrics": metrics}})


# search


def run_search(settings: options.SearchCommand) -> report.Results:
    """Searches, evaluates on the test split and writes a run; goes on with one if asked to."""
    with process_group() as device:
        with together():
            recipe, trained_epochs, head = _search_begin(settings)
        with _run_folder(settings, head) as run:
            is_finished = on_rank_zero(run.status) == FINISHED
            if not is_finished and recipe.is_stream:
                streams.search_on_stream(settings, recipe, head, run, device)
            elif not is_finished:
                _search(settings, recipe, trained_epochs, head, run, device)
            return on_rank_zero(lambda: report.read_results(run.path / RESULTS))


def _search_begin(settings: options.SearchCommand) -> tuple[Recipe, int | None, dict[str, Any]]:
    """The recipe with its model as the search begins with it, and the head of the run."""
    source, past = settings.source, _past_of(settings)
    check(not past.get("refit"), "--from", "a model that validation has not trained", "a refit")
    recipe, head = _recipe_and_head(settings, past)
    streams.check_pass(recipe, settings)
    if recipe.is_stream and world_size_of() > 1:
        place, remedy = "dnis search --steps", "`dnis train --steps` on ranks, then compress"
        text = describe(place, "supported is one process", f"{world_size_of()} ranks", remedy)
        raise NotImplementedError(text)
    configuration: dict[str, Any] = {"steps": settings.steps}
    if not recipe.is_stream:
        configuration = asdict(SearchSettings(epochs=settings.epochs or USUAL_TRAIN_EPOCHS))
    configuration |= {"compression": settings.compression, "embedding_l2": recipe.embedding_l2}
    epochs = None
    if source is not None and recipe.is_stream:
        RunFolder.open(source).latest_checkpoint()
        configuration["from"] = str(source)
    elif source is not None:
        most = min(USUAL_EPOCHS, configuration["epochs"])
        epochs = _begin_with_(recipe.model, source) or most
        configuration |= {"from": str(source), "trained_epochs": epochs}
    head["configuration"] = configuration
    return recipe, epochs, head


def _begin_with_(model: nn.Module, source: Path | RunFolder) -> int | None:
    """Fills a model with weights of a file or of plain training; returns their epochs, if known."""
    run = RunFolder(source) if isinstance(source, Path) else source
    head = run.read_head() if is_run(run.path) else {}
    if not head or kind_of(head) == runs.TRAIN_RUN:
        fill_(model, _weights_of(model, run.path))
        return int(head["best_epoch"]) + 1 if head else None
    is_fit, place = kind_of(head) == runs.SEARCH_RUN, f"run folder {run.path}"
    check(is_fit, place, "a model in it", "compressed ones")
    return runs.fill_after_plain_training_(model, run, head)


@contextmanager
def _run_folder(settings: options.TrainingCommand, head: dict[str, Any]) -> Iterator[RunFolder]:
    """The folder of a new run, or of the one to go on with; locked by rank 0 until the end."""
    run = RunFolder(settings.out, url=url_of(settings.out))
    with ExitStack() as stack:
        with together():
            if rank_of() == 0:
                if not (settings.resume and run.status()):
                    run.create(overwrite=settings.overwrite)
                stack.enter_context(run.lock())
                if run.status():
                    run.check_same(head)
                    head["commands"] = run.read_head().get("commands", [])
        try:
            if run.is_shared:
                check_shared(run.path)
            with together():
                if rank_of() == 0 and run.status() != FINISHED:
                    run.write_head(runs.TRAINING, head)
            yield run
        except BaseException:
            if rank_of() == 0:
                with suppress(OSError):  # a full disk must not hide what went wrong
                    # leaves a run to go on with, or what was there if nothing was trained
                    if CheckpointFolder(run.checkpoints).steps() and run.status() != FINISHED:
                        run.write_head(runs.INTERRUPTED, head)
                        run.drop_replaced()
                    elif run.status() != FINISHED:
                        run.give_up()
            raise


def _search(
    settings: options.SearchCommand,
    recipe: Recipe,
    trained_epochs: int | None,
    head: dict[str, Any],
    run: RunFolder,
    device: torch.device,
) -> None:
    """The search itself; leaves a finished run with its rows."""
    with progress_and_stop(recipe, run.drop_replaced) as events:
        torch.manual_seed(head["seed"])
        begin = time.monotonic()
        outcome = bilevel.search(
            *(recipe, settings.compression, run.checkpoints, device),
            settings=SearchSettings(epochs=head["configuration"]["epochs"]),
            trained_epochs=trained_epochs,
            events=events,
            policy=Saving(resume=settings.resume),
        )
        seconds = outcome.seconds_before + time.monotonic() - begin
    data = over_ranks.split_over_ranks(recipe.data, Ranks.everyone())
    rows_read = outcome.counts.counts, table_configs(outcome.model)
    judge = Judge(recipe, data, device, head["seed"], *rows_read)
    metrics, scheme = judge.evaluate(outcome.model), outcome.scheme
    size = scheme.served_bytes(PACKED), scheme.compression(PACKED)
    rows = [judge.row(report.SEARCH, metrics, *size, seconds)]
    facts = {name: getattr(outcome, name) for name in ("origin", "selection_losses", "best_epoch")}
    notes = _note_of_origin(recipe, outcome)
    head = {**head, **facts, "notes": notes, "metrics": metrics["test"]}
    if world_size_of() == 1:
        recipe = recipe_of(settings, head)
        _begin_with_(recipe.model, settings.source or run)
        recipe = with_tables_apart(recipe)
        plain = Judge(recipe, recipe.data, device, head["seed"], *rows_read)
        model, num_bytes = recipe.model.to(device), 4 * dense_parameters(recipe.model)
        rows += plain.plain_rows(model, num_bytes)
    more = {"history": outcome.history, "blocks": block_rows(scheme, outcome.blocks.occurrences)}
    judge.finish(run, outcome.model, scheme, rows, head, **more)


def _note_of_origin(recipe: Recipe, outcome: bilevel.SearchOutcome) -> list[str]:
    """Says of a search that gained nothing what is served instead."""
    if outcome.origin != bilevel.COMPRESSED:
        return []
    losses, sign = outcome.selection_losses, -1 if direction_of(recipe.task, recipe.stop_on) else 1
    first, other = (f"{sign * losses[name]:.5f}" for name in (bilevel.SEARCHED, bilevel.COMPRESSED))
    return [
        "The search gained nothing beyond chance, so this run holds the trained model, compressed. "
        f"At these bytes the selection {recipe.stop_on} of the search is {first}; that of the "
        f"compressed model is {other}."
    ]


# export, evaluate, package, report


def run_export(settings: options.ExportCommand) -> Path:
    """Exports a finished run as an artifact."""
    with launched_ranks() as ranks:
        with together(ranks.group):
            run, encoder = RunFolder.open(settings.run), settings.run / ENCODER
            head, scheme = run.read_head(), run.scheme()
            tables, dense = run.tables_and_dense()
            names = ("recipe", "columns", "seed", "embedding_dim", "configuration", "versions")
            more = "stream" if "stream" in head else "metrics"  # of a stream none can be had again
            record = {name: head[name] for name in (*names, more) if name in head}
            shards = {}
            for name, tensor in tables.items():
                first, last = ranks.share(tensor.shape[0])
                shards[name] = [TableShard(name, tensor.rows(first, last), first)]
        return write_artifact(
            *(shards, scheme, settings.out, ranks),
            forms=settings.forms or None,
            dense_state=dense,
            run=record,
            encoder=encoder.read_bytes() if encoder.is_file() else b"",
            overwrite=settings.overwrite,
        )


def run_evaluate(settings: options.EvaluateCommand) -> dict[str, Any]:
    """Evaluates a finished run, or an artifact in its model, on the test split, a stream or
    another table."""
    path, is_artifact = settings.path, (settings.path / MANIFEST).is_file()
    with process_group() as device:
        weights, ranks = None, Ranks.everyone()
        with together():
            if is_artifact:
                head, scheme = read_manifest(path)["run"], read_scheme(path)
            else:
                run = RunFolder.open(path)
                head, scheme = run.read_head(), run.scheme()
            recipe = recipe_of(settings, head, path)
            if is_artifact:
                load_model(recipe.model, path)
            else:
                weights = _weights_of(recipe.model, path)
        model = recipe.model.to(device)
        if weights is not None:
            model = spread_filled(recipe.model, weights, device)
        metrics = _test_metrics(recipe, get_unwrapped_module(model), ranks, device)
    return {
        "path": str(path),
        "kind": "artifact" if is_artifact else "run",
        "recipe": str(settings.recipe),
        "seed": head.get("seed", 0),
        "compression": scheme.compression(),
        "parameters": scheme.parameters,
        "bytes": scheme.exact_bytes(),
        "split": "all rows" if recipe.is_stream else "test",
        "metrics": metrics,
    }


def run_verify(settings: options.EvaluateCommand) -> Verification:
    """Checks an artifact, with its metrics where a recipe is named."""
    with launched_ranks() as ranks:
        measure = None
        if settings.recipe is not None:
            run = read_manifest(settings.path)["run"]
            make = partial(recipe_of, settings, run, settings.path)
            measure = partial(served_metrics, settings.path, make, ranks)
        return verify(settings.path, measure=measure, ranks=ranks)


def served_metrics(
    artifact: Path, make_recipe: Callable[[], Recipe], ranks: Ranks, form: str
) -> dict[str, float]:
    """Test metrics of a fresh model that serves a form, on the CPU; each rank has its samples."""
    with together(ranks.group):
        recipe = make_recipe()
        load_model(recipe.model, artifact, form=form)
    with torch.inference_mode():
        return _test_metrics(recipe, recipe.model, ranks, torch.device("cpu"))


def _test_metrics(
    recipe: Recipe, model: nn.Module, ranks: Ranks, device: torch.device
) -> dict[str, float]:
    """Evaluates a model on the test split, or on a whole stream. Each rank takes its samples."""
    if recipe.is_stream:
        batches = check_batches(recipe.data, recipe.task, "test")
        if ranks.world_size > 1 and not getattr(recipe.data, "is_split_over_ranks", False):
            batches = iter(over_ranks.RankBatches(batches, ranks, "test", over_ranks.JUDGE))
        metrics = evaluate(TrainTask(model, recipe.task), batches, recipe.task, device)
    else:
        data = over_ranks.split_over_ranks(recipe.data, ranks)
        metrics = evaluate(TrainTask(model, recipe.task), data.test, recipe.task, device)
        over_ranks.check_same(data, ranks)
    warn_of_one_label(metrics, "stream" if recipe.is_stream else "test split")
    return metrics


def run_package(settings: options.PackageCommand) -> None:
    """Packages the model of an artifact."""
    recipe = recipe_of(settings, read_manifest(settings.artifact)["run"], settings.artifact)
    model = load_model(recipe.model, settings.artifact, form=PACKED)
    batch = next(iter(recipe.data if recipe.is_stream else recipe.data.test))
    notes = {"recipe": settings.recipe, "form": PACKED}
    write_package(model, batch, settings.out, notes=notes, overwrite=settings.overwrite)


def run_report(folders: Sequence[Path]) -> report.Results:
    """Writes report.html into the first of some folders, about all of them."""
    results = report.join_results([report.read_results(folder / RESULTS) for folder in folders])
    write_report(folders[0] / runs.PAGE, results)
    return results


# refresh

_RECORD = (
    *("recipe", "columns", "seed", "embedding_dim", "stream", "weights_sha256", "versions"),
    "refit",
)
"""Fields of a run that its artifact has, too."""


def run_refresh(settings: options.RefreshCommand) -> Iterator[str]:
    """Writes an artifact or a delta; gives what there is to say of it, line by line."""
    with process_group() as device:
        ranks, path = Ranks.everyone(), settings.run
        check_shared(settings.out.parent)
        with together():
            head, base = RunFolder.open(path).read_head(), read_state(settings.artifact)
            recipe = recipe_of(settings, head, path)
            weights = _weights_of(recipe.model, path)
            recipe = with_tables_apart(recipe)
        encoder = encoder_of(recipe)
        _, data, counts, held_out = data_to_measure(path, recipe, head, ranks)
        batches = over_ranks.samples_to_measure(data.train)
        samples: dict[str, Any] = {"batches": batches, "counts": counts, "loss": recipe.task}
        samples["leave_alone"] = recipe.leave_alone
        model = spread_filled(recipe.model, weights, device)
        record = {key: value for key, value in base.run.items() if key != "metrics"}
        record |= {key: head[key] for key in _RECORD if key in head}
        if not settings.delta:
            size = base.run.get("configuration", {}).get("compression")
            samples |= {"compression": size, "held_out": held_out}
            measurement, allocation = whole_(model, base.scheme, base.rows, **samples)
            record["output_shift"] = allocation.output_shift
            with measurement.shifted(allocation):
                place = allocation.scheme, settings.out
                export(model, *place, forms=(PACKED,), run=record, encoder=encoder)
            yield _size_line(allocation.scheme)
            yield f"predicted increase of the loss: {allocation.predicted_loss_increase:.3g}"
            yield f"artifact: {address_of(settings.out)}"
            return
        previous = previous_tables(head, base)
        result = delta_(
            model, base.scheme, base.rows, held_out=held_out, previous=previous, **samples
        )
        with together():
            if ranks.is_first:
                of_encoder = base.encoder if encoder is None else encoder.to_bytes()
                new = result.state(base, run=record, encoder=of_encoder)
                write_delta(settings.artifact, new, settings.out)
        yield from _delta_lines(result, base, settings.out)
        yield f"delta: {address_of(settings.out)}"
        by_table = drift(model, result.scheme, result.rows, **samples)
        for name, share in by_table.items():
            yield f"drift of {name}: {share:+.2%} of the loss, beside a fresh allocation"
        total = sum(by_table.values())
        advice = "a whole refresh is due" if total > MOST_DRIFT else f"{MOST_DRIFT:.1%} is fine"
        yield f"drift of all tables: {total:+.2%}; {advice}"


def previous_tables(head: Mapping[str, Any], base: ServedState) -> dict[str, Rows]:
    """The tables that an artifact was made of, where the run of this head began with that run and
    its folder is still there."""
    source = head.get("configuration", {}).get("from")
    run = RunFolder(Path(source)) if source is not None else None
    if run is None or run.status() != FINISHED or "weights_sha256" not in base.run:
        return {}
    is_same = run.read_head().get("weights_sha256") == base.run["weights_sha256"]
    return {name: table.rows for name, table in run.tables_and_dense()[0].items() if is_same}


def _size_line(scheme: MixedDimensionScheme) -> str:
    num_bytes = scheme.served_bytes(PACKED)
    return f"tables: {num_bytes:,} bytes, {scheme.compression(PACKED):.2f} times smaller"


def _delta_lines(result: Refresh, base: ServedState, out: Path) -> Iterator[str]:
    yield _size_line(result.scheme)
    if out.is_dir():  # on the first rank
        num_bytes = sum(file.stat().st_size for file in out.iterdir())
        of_base = sum(len(rows) for rows in base.rows.values())
        yield f"written: {num_bytes:,} bytes, for {of_base:,} bytes of rows in the artifact"
    for name, table in result.scheme.tables.items():
        yield f"{name}: {result.num_changed[name]:,} of {table.num_embeddings:,} rows changed"
