"""`dnis export` and `dnis evaluate`: a finished run as an artifact, and the metrics of either."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrec.distributed.model_parallel import get_unwrapped_module

from dnis_torchrec.artifact.export import drop_in_
from dnis_torchrec.artifact.load import read_scheme
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.artifact.write import write_over_ranks
from dnis_torchrec.data.over_ranks import check_same, split_over_ranks
from dnis_torchrec.data.recipe import Recipe, build_recipe_again
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.report.provenance import PROVENANCE
from dnis_torchrec.selection.shards import TableShard
from dnis_torchrec.training.checkpoint import StoredTensor
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.shard import launched_ranks, process_group
from dnis_torchrec.training.weights import check_state, spread_filled


def run_export(
    run_path: Path, out: Path, *, forms: Sequence[str] | None = None, overwrite: bool = False
) -> Path:
    """Exports a finished run as an artifact."""
    with launched_ranks() as ranks:
        with together(ranks.group):
            run = RunFolder.open(run_path)
            head, tables, scheme = run.read_head(), run.tables(), run.scheme()
            chosen = (scheme.form,) if forms is None else tuple(forms)
            dense = run.dense_state()
        names = (
            "recipe",
            "seed",
            "embedding_dim",
            "configuration",
            "versions",
            "metrics",
            "notes",
            PROVENANCE,
        )
        described = {key: head[key] for key in names if key in head}
        with together(ranks.group):
            shards = {
                name: [_shard_of_rank(name, stored, ranks)] for name, stored in tables.items()
            }
        return write_over_ranks(
            shards,
            scheme,
            out,
            ranks,
            forms=chosen,
            dense_state=dense,
            run=described,
            overwrite=overwrite,
        )


def _shard_of_rank(table: str, stored: StoredTensor, ranks: Ranks) -> TableShard:
    """The rows of a table that this rank reads and writes: the W-th part of them."""
    first, last = ranks.share(stored.shape[0])
    return TableShard(table, stored.rows(first, last), first)


def run_evaluate(path: Path, data: Path | None, *, recipe: str) -> dict[str, Any]:
    """Evaluates a finished run, or an artifact loaded into its model, on the test split."""
    stored = None
    with process_group() as device:
        with together():
            is_artifact, head = (path / "manifest.json").is_file(), recorded_run(path)
            if is_artifact:
                scheme, built = read_scheme(path), recipe_of_artifact(path, data, recipe=recipe)
                drop_in_(built.model, path, form=head.get("form"))
            else:
                built, run = build_recipe_again(recipe, data, head), RunFolder.open(path)
                scheme, stored = run.scheme(), run.stored()
                check_state(built.model, stored, str(path))
        ranks = Ranks.everyone()
        model = (
            built.model.to(device) if stored is None else spread_filled(built.model, stored, device)
        )
        own = split_over_ranks(built.data, ranks)
        metrics = evaluate(
            TrainTask(get_unwrapped_module(model), built.task), own.test, built.task, device
        )
        check_same(own, ranks)
    return {
        "path": str(path),
        "kind": "artifact" if is_artifact else "run",
        "recipe": recipe,
        "seed": head.get("seed", 0),
        "compression": scheme.compression(),
        "parameters": scheme.parameters,
        "bytes": scheme.exact_bytes(),
        "metrics": metrics,
    }


def recorded_run(path: Path) -> Any:
    """Reads the record of a finished run, or of the run that an artifact came from. It may be JSON
    of anybody's making."""
    is_artifact = (path / "manifest.json").is_file()
    return read_manifest(path)["run"] if is_artifact else RunFolder.open(path).read_head()


def recipe_of_artifact(artifact: Path, data: Path | None, *, recipe: str) -> Recipe:
    """The recipe that an artifact's model was trained by, its fresh model of the kind that
    `drop_in_` takes."""
    run = read_manifest(artifact)["run"]
    built = build_recipe_again(recipe, data, run)
    return built
