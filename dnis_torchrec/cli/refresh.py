"""What `dnis refresh` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dnis_torchrec.artifact.delta import ServedState, read_state, write_delta
from dnis_torchrec.artifact.export import export
from dnis_torchrec.artifact.load import Rows
from dnis_torchrec.artifact.refresh import MOST_DRIFT, Refresh, delta_, drift, whole_
from dnis_torchrec.cli.commands import data_to_measure, encoder_of, recipe_of
from dnis_torchrec.cli.run import RunFolder
from dnis_torchrec.cli.settings import FINISHED, RefreshCommand
from dnis_torchrec.data.over_ranks import samples_to_measure
from dnis_torchrec.data.urls import address_of
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme
from dnis_torchrec.search.search import with_tables_apart
from dnis_torchrec.training.checkpoint import check_shared
from dnis_torchrec.training.shard import process_group
from dnis_torchrec.training.weights import check_state, spread_filled

RECORD = (
    "recipe",
    "columns",
    "seed",
    "embedding_dim",
    "stream",
    "weights_sha256",
    "versions",
    "refit",
)
"""Fields of a run that its artifact has, too."""


def run_refresh(settings: RefreshCommand) -> Iterator[str]:
    """Writes an artifact or a delta; gives what there is to say of it, line by line."""
    with process_group() as device:
        ranks, path = Ranks.everyone(), settings.run
        check_shared(settings.out.parent)
        with together():
            run, base = RunFolder.open(path), read_state(settings.artifact)
            head, weights = run.read_head(), run.weights()
            recipe = recipe_of(settings, head, path)
            check_state(recipe.model, weights, f"run folder {path}")
            recipe = with_tables_apart(recipe)
        encoder = encoder_of(recipe)
        _, data, counts, held_out = data_to_measure(path, recipe, head, ranks)
        samples: dict[str, Any] = {"counts": counts, "held_out": held_out, "loss": recipe.task}
        samples["batches"] = samples_to_measure(data.train)
        samples["leave_alone"] = recipe.leave_alone
        model = spread_filled(recipe.model, weights, device)
        record = {key: value for key, value in base.run.items() if key != "metrics"}
        record |= {key: head[key] for key in RECORD if key in head}
        if not settings.delta:
            size = base.run.get("configuration", {}).get("compression")
            state = base.scheme, base.rows
            measurement, allocation = whole_(model, *state, compression=size, **samples)
            record["output_shift"] = allocation.output_shift
            with measurement.shifted(allocation):
                place = allocation.scheme, settings.out
                export(model, *place, forms=(PACKED,), run=record, encoder=encoder)
            yield _size_line(allocation.scheme)
            yield f"predicted increase of the loss: {allocation.predicted_loss_increase:.3g}"
            yield f"artifact: {address_of(settings.out)}"
            return
        previous = previous_tables(head, base)
        result = delta_(model, base.scheme, base.rows, previous=previous, **samples)
        with together():
            if ranks.is_first:
                of_encoder = base.encoder if encoder is None else encoder.to_bytes()
                new = result.state(base, run=record, encoder=of_encoder)
                write_delta(settings.artifact, new, settings.out)
        yield from _delta_lines(result, base, settings.out)
        yield f"delta: {address_of(settings.out)}"
        del samples["held_out"]
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
