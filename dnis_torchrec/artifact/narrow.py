"""Training in the scheme of an artifact: narrow tables, filled from it or from a run, and states of
optimizers, narrowed as the tables are and widened again.

    model, state = narrow_for_training_(model, "artifact", stored)  # before it is sharded
    # shard it, let its optimizers take a step, then training.weights.fill_state_(...)
    plain = widened_(model)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.allocation.axes import (
    LINEAR_STATES,
    SQUARED_STATES,
    has_axes,
    rotation_groups,
    turn_readers_,
    with_axes_,
)
from dnis_torchrec.allocation.compress import widened_
from dnis_torchrec.artifact.export import check_features
from dnis_torchrec.artifact.load import exact_rows, load_dense_state, read_scheme
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.selection.shards import collections, frozen_tables_of, whole_module_of
from dnis_torchrec.selection.swap import replace_
from dnis_torchrec.serving.trainable import (
    MixedDimensionEmbeddingBagCollection,
    block_tables,
    draw_new_rows,
    widened_table,
)

__all__ = ["narrow_for_training_", "widened_", "widened_state"]

BAGS, BLOCKS = ".embedding_bags.", ".blocks.embedding_bags."
"""Where an EmbeddingBagCollection has its tables, and one of narrow tables."""


class Stored(Protocol):
    """A tensor of a checkpoint, which is read as far as it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    def rows(self, first: int, last: int) -> Tensor:
        """Rows ``first <= i < last``."""

    def whole(self) -> Tensor:
        """All of it."""


@torch.no_grad()
def narrow_for_training_(
    model: nn.Module,
    artifact: Path | str,
    state: Mapping[str, Stored] | None = None,
    *,
    is_turned: bool = False,
    prefix: str = "",
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Gives a plain model narrow tables to train on: one stock TorchRec table for each block of an
    artifact, see `TableScheme.for_training`. Local, no collective.

    Args:
        model: built as for training, with any weights, not sharded; changed in place.
        artifact: folder of an artifact of this model.
        state: tensors of a checkpoint of the run that the artifact was made of, or of one that went
            on from it: weights come from there, turned into the axes of the artifact, and so do the
            states of optimizers. None takes the weights that the artifact serves; rows that it has
            in no block are drawn as TorchRec draws them.
        is_turned: the state stands in the axes of the artifact already, as that of a run of narrow
            tables of the same artifact does.
        prefix: what stands ahead of the model's names in the state: ``"model."`` in a run.

    Returns:
        The model; and the states of optimizers by the keys of its own checkpoints, which
        `fill_state_` of training/weights.py copies into the model once it is sharded.

    Raises:
        ValueError: for another model than the artifact's, or a state of another one.
        NotImplementedError: for tables that are not pooled, or behind a feature processor.

    Example:
        >>> model, state = narrow_for_training_(model, "artifact")  # doctest: +SKIP
    """
    scheme, modules = read_scheme(artifact), collections(model)
    fqns = sorted({table.collection for table in scheme.tables.values()})
    for fqn in fqns:
        _check_supported(model, fqn, scheme, artifact)
    of_artifact = load_dense_state(artifact)
    dense = of_artifact if state is None else _dense_of_state(state, prefix)
    if has_axes(dense) or has_axes(of_artifact):
        with_axes_(model)
    _fill_dense_(model, fqns, dense, artifact)
    states, matrices = dict[str, Tensor](), dict[str, Tensor]()
    if state is not None:
        states = _states_of_dense(state, prefix)
        if not is_turned:
            matrices = _turn_(model, scheme, states, prefix)
    narrow = scheme.for_training()
    rows = exact_rows(artifact) if state is None else {}
    for fqn in fqns:
        tables = {name: t for name, t in narrow.tables.items() if t.collection == fqn}
        cut = MixedDimensionEmbeddingBagCollection(MixedDimensionScheme(tables), device="meta")
        for name, table in tables.items():
            if state is None:
                chunks = (rows[name](*span) for span in _spans(table))
                cut.load_table(name, draw_new_rows(scheme.tables[name], chunks))
            else:
                matrix = matrices.get(name)
                cut.load_table(name, _turned_rows(table, _stored(state, table), matrix))
                states |= _states_of_table(table, state, prefix, matrix)
            if table.table_name in frozen_tables_of(modules[fqn]):
                for s in table.stored_blocks():
                    cut.table_of_block(name, s).weight.requires_grad_(False)
        model = replace_(model, modules[fqn], cut.to("cpu").train(modules[fqn].training))
    return model, states


def widened_state(
    scheme: MixedDimensionScheme, state: Mapping[str, Stored], *, prefix: str = ""
) -> dict[str, Tensor]:
    """Turns a checkpoint of narrow tables into one of the plain model: its keys, and zeros where a
    block has no column. Local.

    Args:
        scheme: of the narrow tables: ``read_scheme(artifact).for_training()``.
        state: tensors of the checkpoint, those of single ranks left out.
        prefix: see `narrow_for_training_`.
    """
    tensors = dict[str, Tensor]()
    of_tables, shapes = dict[str, tuple[str, int]](), dict[str, dict[int, tuple[int, int]]]()
    for name, table in scheme.tables.items():
        shapes[name] = table.stored_blocks()
        for s in shapes[name]:
            of_tables[_weight_key(table, prefix, s)] = of_tables[f"{name}/b{s}"] = name, s
    parts = dict[tuple[str, str], dict[int, Tensor]]()
    for key, value in state.items():
        kind, _, rest = key.partition("/")
        holder, _, what = rest.rpartition("/")
        if kind == "table":
            holder, what = rest, ""
        if holder in of_tables:
            name, s = of_tables[holder]
            place = _weight_key(scheme.tables[name], prefix) if kind == "optimizer" else name
            plain_key, rows = f"{kind}/{place}/{what}".removesuffix("/"), shapes[name][s][0]
            is_of_rows = len(value.shape) == 1 and not _is_step(key)
            block = _of_rows(value, rows) if is_of_rows else value.whole()
            parts.setdefault((name, plain_key), {})[s] = block
        elif not kind.startswith("rank") and not key.endswith("scheme_sha256"):
            tensors[key] = value.whole()
    for (name, key), blocks in parts.items():
        first = next(iter(blocks.values()))
        tensors[key] = first if _is_step(key) else widened_table(scheme.tables[name], blocks)
    return tensors


def _check_supported(
    model: nn.Module, fqn: str, scheme: MixedDimensionScheme, artifact: Path | str
) -> None:
    """Checks that a collection is the artifact's, and one whose narrow tables can be trained."""
    modules = collections(model)
    check_known("FQN", fqn, modules)
    check_features(modules[fqn], scheme, fqn, artifact)
    place, limit = f"FQN {fqn!r}", "supported to train narrow are plain EmbeddingBagCollections"
    whole, remedy = whole_module_of(model, fqn), "train the plain model instead"
    if not isinstance(modules[fqn], EmbeddingBagCollection) or whole is not modules[fqn]:
        raise NotImplementedError(describe(place, limit, type(whole).__name__, remedy))


def _dense_of_state(state: Mapping[str, Stored], prefix: str) -> dict[str, Tensor]:
    """Dense weights of a checkpoint by the model's names."""
    start = f"model/{prefix}"
    names = {key.removeprefix(start): key for key in state if key.startswith(start)}
    return {name: state[key].whole() for name, key in names.items()}


def _fill_dense_(
    model: nn.Module, fqns: Sequence[str], dense: Mapping[str, Tensor], artifact: Path | str
) -> None:
    """Fills all but the tables; axes that a state has not yet stay as they are."""
    tables = tuple(f"{fqn}{BAGS}".removeprefix(".") for fqn in fqns)
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith(tables)}
    absent = sorted(name for name in set(weights) ^ set(dense) if not has_axes([name]))
    remedy = "use the model of the run"
    check(not absent, str(artifact), "the model's own dense weights", absent[:3], remedy)
    for name, value in dense.items():
        shape = tuple(weights[name].shape)
        fits = tuple(value.shape) == shape or value.numel() == weights[name].numel() == 1
        check(fits, f"{artifact}, {name}", f"shape {shape}", tuple(value.shape), remedy)
        weights[name].copy_(value.reshape(shape))


def _states_of_dense(state: Mapping[str, Stored], prefix: str) -> dict[str, Tensor]:
    """States of optimizers of everything but tables, in memory of their own."""
    keys = [
        key for key in state if key.startswith(f"optimizer/{prefix}") or key == "fused/iterations"
    ]
    return {key: state[key].whole().clone() for key in keys if BAGS not in f".{key}"}


def _turn_(
    model: nn.Module, scheme: MixedDimensionScheme, states: Mapping[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    """Turns what reads the tables, and its states; gives what rows are to be multiplied by."""
    by_address: dict[int, dict[str, Tensor]] = {}
    weights = dict(model.named_parameters())
    for key, value in states.items():
        name, _, what = key.removeprefix(f"optimizer/{prefix}").rpartition("/")
        if name in weights:
            by_address.setdefault(weights[name].data_ptr(), {})[what] = value
    turns = {name: t.turn for name, t in scheme.tables.items() if t.turn is not None}
    matrices = turn_readers_(rotation_groups(model), turns, by_address)
    absent = sorted(set(turns) - set(matrices))
    remedy = "build it as for the run, with its rotation_groups"
    check(not absent, "model", "tables that can be turned as then", absent, remedy)
    return matrices


def _stored(state: Mapping[str, Stored], table: TableScheme) -> Stored:
    """The rows of a table in a state."""
    key, shape = f"table/{table.name}", (table.num_embeddings, table.embedding_dim)
    check(key in state, key, "rows in the state of the run", "none", "use the model of the run")
    check(state[key].shape == shape, key, f"shape {shape}", state[key].shape)
    return state[key]


def _spans(table: TableScheme) -> Iterator[tuple[int, int]]:
    """First and last rows of chunks of a table."""
    step = rows_per_chunk(table.embedding_dim)
    for first in range(0, table.num_embeddings, step):
        yield first, min(first + step, table.num_embeddings)


def _turned_rows(table: TableScheme, stored: Stored, matrix: Tensor | None) -> Iterator[Tensor]:
    """The rows of a table, or numbers for each of their values, a few at a time."""
    for span in _spans(table):
        rows = stored.rows(*span)
        yield rows if matrix is None else (rows.double() @ matrix).to(rows)


def _states_of_table(
    table: TableScheme, state: Mapping[str, Stored], prefix: str, matrix: Tensor | None
) -> dict[str, Tensor]:
    """States of a table's optimizer, turned as its values are, block by block."""
    places = {f"fused/{table.name}": f"fused/{table.name}/b{{}}"}
    places[f"optimizer/{_weight_key(table, prefix)}"] = "optimizer/" + _weight_key(
        table, prefix, "{}"
    )
    # Gradients of turned rows, where the matrix is not orthogonal.
    inverse = None if matrix is None else torch.linalg.pinv(matrix, rtol=1e-6).T
    single = replace(
        *(table,),
        embedding_dim=1,
        retained=torch.ones(table.num_blocks, 1, dtype=torch.bool),
        num_retained=0,
        turn=None,
        row_gain=None,
    )
    states = dict[str, Tensor]()
    for key, value in state.items():
        place, _, what = key.rpartition("/")
        if place not in places:
            continue
        rows, dim = table.num_embeddings, table.embedding_dim
        if _is_step(key):
            blocks = dict.fromkeys(table.stored_blocks(), value.whole())
        elif len(value.shape) == 1:  # as of row-wise optimizers
            single_column = _of_rows(value, rows).unsqueeze(1)
            chunks = (single_column[slice(*span)] for span in _spans(table))
            blocks = {s: part.squeeze(1) for s, part in block_tables(single, chunks).items()}
        else:
            check(value.shape == (rows, dim), key, f"shape {(rows, dim)}", value.shape)
            of_state = inverse
            if inverse is not None and not _is_linear(what, f"{place}/momentum2" in state, key):
                # NOTE[DIFF]: sums of squares lose what columns had in common.
                of_state = inverse.square()
            blocks = block_tables(table, _turned_rows(table, value, of_state))
        states |= {f"{places[place].format(s)}/{what}": part for s, part in blocks.items()}
    return states


def _of_rows(value: Stored, num_rows: int) -> Tensor:
    """A number for each row; of a table whose columns were sharded the mean over its shards."""
    return value.whole().view(-1, num_rows).mean(0)


def _is_linear(name: str, has_two: bool, key: str) -> bool:
    """Whether a state turns as the gradient does, or is a sum of squares. Fused kernels number
    theirs: two are those of Adam, one is that of Adagrad."""
    of_kernels = {"momentum1": "exp_avg" if has_two else "sum", "momentum2": "exp_avg_sq"}
    name = of_kernels.get(name, name)
    names = LINEAR_STATES | SQUARED_STATES
    if name not in names:
        requirement, remedy = f"supported to turn are {sorted(names)}", "leave its table alone"
        raise NotImplementedError(describe(key, requirement, repr(name), remedy))
    return name in LINEAR_STATES


def _is_step(key: str) -> bool:
    """Whether a state counts steps."""
    return key.endswith("/step")


def _weight_key(table: TableScheme, prefix: str, block: int | str | None = None) -> str:
    """The name of a table's weights in a model, or of one of its blocks."""
    if block is None:
        name = f"{table.collection}{BAGS}{table.name}.weight"
    else:
        name = f"{table.collection}{BLOCKS}{table.name}/b{block}.weight"
    return prefix + name.removeprefix(".")
