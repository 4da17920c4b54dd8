"""MODEL_CARD.md: what an artifact is, for people; no reader looks at it, and its owner may write
more into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from dnis_torchrec.checks import visible
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme

CARD = "MODEL_CARD.md"
_LOAD = "`dnis_torchrec.load(path)` gives a module that takes the EmbeddingBagCollection's place."
_PREDICT = (
    "Its ids are rows, numbered anew: raw ids look other rows up without an error.\n"
    "`encoder.arrow` has the row of every id. `dnis_torchrec.load_predictor(path)` reads raw rows."
)

_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_{}[]()#+!|~$"})
_TEXT = """\
# Model card

Embedding tables that dnis_torchrec made {times:.2f} times smaller: {num_bytes:,} bytes as served
({form}), {dense:,} in float32.

## Tables

{tables}

Blocks are rows of similar frequency, the most frequent first; bits are means over all dims.

## Where it comes from

{origin}

## How to use it

{use} Nothing in
the folder is code.

## To be written by the owner

What the model is for, and what it is not for; whose data it was trained on, and from when; for whom
it was seen to be worse. Nothing of this is known to the program that wrote the tables.
"""


def write_card(folder: Path, scheme: MixedDimensionScheme, manifest: Mapping[str, Any]) -> None:
    """Writes the card of an artifact that is being written."""
    text = card_of(scheme, manifest)
    (folder / CARD).write_text(text, encoding="utf-8", newline="\n")


def card_of(scheme: MixedDimensionScheme, manifest: Mapping[str, Any]) -> str:
    """The text of the card."""
    run = manifest["run"]
    facts = {name: run.get(name) for name in ("recipe", "seed")} | dict(manifest["versions"])
    facts |= {name: f"{value:.5g}" for name, value in (run.get("metrics") or {}).items()}
    head = ("table", "features", "rows", "dims", "retained dims by block", "bits by block", "bytes")
    return _TEXT.format(
        times=scheme.compression(),
        num_bytes=scheme.served_bytes(scheme.form),
        form=scheme.form,
        dense=4 * scheme.dense_parameters,
        tables=_table(head, (_row_of(table, scheme.form) for table in scheme.tables.values())),
        use=f"{_LOAD} {_PREDICT}" if "encoder" in manifest else _LOAD,
        origin=_table(("what", "which"), ((n, str(v)) for n, v in facts.items() if v is not None)),
    )


def _row_of(table: TableScheme, form: str) -> tuple[str, ...]:
    return (
        table.name,
        ", ".join(table.feature_names),
        f"{table.num_embeddings:,}",
        str(table.embedding_dim),
        ", ".join(map(str, table.dims.tolist())),
        ", ".join(f"{bits:.1f}" for bits in table.column_bits().float().mean(dim=1).tolist()),
        f"{table.served_bytes(form):,}",
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown. What stands in it was named by others: it can neither end a cell nor be
    markup."""
    lines = [head, tuple("---" for _ in head), *(tuple(map(_plain, row)) for row in rows)]
    return "\n".join("|".join(["", *line, ""]) for line in lines)


def _plain(text: str) -> str:
    one_line = " ".join(visible(text).split())
    return escape(one_line, quote=False).translate(_MARKS)
