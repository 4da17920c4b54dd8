"""MODEL_CARD.md: what an artifact is, for people; no reader looks at it, and its owner may write
more into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from dnis_torchrec.checks import describe, visible
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, compression_of

CARD = "MODEL_CARD.md"

_TO_WRITE = """\
## To be written by the owner

What the model is for, and what it is not for; whose data it was trained on, and from when; for whom it was seen to be
worse. Nothing of this is known to the program that wrote the tables.
"""
_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_{}[]()#+!|~$"})


def write_card(folder: Path, scheme: MixedDimensionScheme, manifest: Mapping[str, Any]) -> None:
    """Writes the card of an artifact that is being written."""
    try:
        (folder / CARD).write_text(card_of(scheme, manifest), encoding="utf-8", newline="\n")
    except OSError as error:
        raise OSError(
            describe(f"artifact, file {CARD!r}", "it to be written", str(error))
        ) from error


def card_of(scheme: MixedDimensionScheme, manifest: Mapping[str, Any]) -> str:
    """The text of the card."""
    form = scheme.form
    num_bytes, dense = scheme.served_bytes(form), 4 * scheme.dense_parameters
    times = compression_of(scheme.dense_parameters, num_bytes)
    version = manifest["versions"].get("dnis-torchrec", "of an unknown version")
    lines = [
        "# Model card",
        "",
        f"Embedding tables that dnis_torchrec {version} has made {times:.2f} times smaller: {num_bytes:,} bytes as "
        f"served ({form}), {dense:,} in float32.",
        "",
        "## Tables",
        "",
        *_table(
            (
                "table",
                "features",
                "rows",
                "dims",
                "retained dims by block",
                "bits by block",
                "bytes served",
            ),
            (_row_of(table, form) for table in scheme.tables.values()),
        ),
        "",
        "Blocks are rows of similar frequency, the most frequent first. Bits are means over all dims of a row, those "
        if scheme.has_codes
        else "Blocks are rows of similar frequency.",
        "",
        *_section("Metrics", _metrics(manifest["run"].get("metrics"))),
        *_section("Where it comes from", _origin(manifest)),
        "## How to use it",
        "",
        "`dnis_torchrec.load(path)` gives a module that takes the EmbeddingBagCollection's place; `dnis verify path` "
        "checks every file. Nothing in the folder is code.",
        "",
        _TO_WRITE,
    ]
    return "\n".join(lines)


def _row_of(table: TableScheme, form: str) -> tuple[str, ...]:
    bits = (
        table.codes.bits.float().mean(dim=1)
        if table.has_codes
        else 32 * table.dims / table.embedding_dim
    )
    return (
        table.name,
        ", ".join(table.feature_names),
        f"{table.num_embeddings:,}",
        str(table.embedding_dim),
        ", ".join(map(str, table.dims.tolist())),
        ", ".join(f"{mean:.1f}" for mean in bits.tolist()),
        f"{table.served_bytes(form):,}",
    )


def _metrics(metrics: Mapping[str, float] | None) -> list[str]:
    rows = [(name, f"{value:.5g}") for name, value in (metrics or {}).items()]
    return _table(("metric", "value"), rows) if rows else []


def _origin(manifest: Mapping[str, Any]) -> list[str]:
    run = manifest["run"]
    told = {"recipe": run.get("recipe"), "seed": run.get("seed")} | dict(manifest["versions"])
    rows = [(name, str(value)) for name, value in told.items() if value is not None]
    steps = run.get("provenance", [])
    for step in steps if isinstance(steps, list) else []:
        rows.append(
            (
                str(step["job"]),
                ", ".join(filter(None, (step["date"], step["command"] or step["folder"]))),
            )
        )
    return _table(("what", "which"), rows)


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""] if lines else []


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table of Markdown. What stands in it was named by others: it can neither end a cell nor be
    markup."""
    ruled = ["|".join(["", *head, ""]), "|".join(["", *("---" for _ in head), ""])]
    return ruled + ["|".join(["", *map(_plain, row), ""]) for row in rows]


def _plain(text: str) -> str:
    one_line = " ".join(visible(text).split())
    return escape(one_line, quote=False).translate(_MARKS)
