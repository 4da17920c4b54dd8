"""Training in the scheme of an artifact: narrow tables, filled from it or from a run, and states of
optimizers, narrowed as the tables are and widened again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.allocation import axes
from dnis_torchrec.allocation.axes import has_axes
from dnis_torchrec.allocation.compress import widened_
from dnis_torchrec.artifact.export import check_features
from dnis_torchrec.artifact.load import ArtifactFolder, chunks_of
from dnis_torchrec.checks import check, describe
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.selection.shards import collections, frozen_tables_of, whole_module_of
from dnis_torchrec.selection.swap import replace_
from dnis_torchrec.serving import trainable
from dnis_torchrec.serving.trainable import MixedDimensionEmbeddingBagCollection, block_tables

__all__ = ["narrow_for_training_", "widened_", "widened_state"]

BAGS, BLOCKS = ".embedding_bags.", ".blocks.embedding_bags."
"""Where an EmbeddingBagCollection has its tables, and one of narrow tables."""


class _Stored(Protocol):
    """A tensor of a checkpoint, which is read as far as it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, first: int, last: int) -> Tensor: ...

    def whole(self) -> Tensor: ...


@torch.no_grad()
def narrow_for_training_(
    model: nn.Module,
    artifact: Path | str,
    state: Mapping[str, _Stored] | None = None,
    *,
    is_turned: bool = False,
    prefix: str = "",
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Gives a plain model narrow tables to train on: one stock TorchRec table for each block of an
    artifact, see `TableScheme.for_training`. Local, no collective.

    `state` is a checkpoint whose names begin with `prefix`. It gives the weights, and the optimizer
    states for `fill_state_`. `is_turned` says that it is in the artifact's axes already. Without a
    checkpoint, weights are those that the artifact serves; rows of no block are drawn anew.
    """
    folder, modules = ArtifactFolder(artifact), collections(model)
    scheme = folder.scheme()
    fqns = check_features(modules, scheme, artifact)
    limit, remedy = "supported to train narrow are plain EmbeddingBagCollections", "train it whole"
    for fqn in fqns:
        whole = whole_module_of(model, fqn)
        if not isinstance(modules[fqn], EmbeddingBagCollection) or whole is not modules[fqn]:
            text = describe(f"FQN {fqn!r}", limit, type(whole).__name__, remedy)
            raise NotImplementedError(text)
    of_artifact = folder.tensors("dense_state")
    start, dense = f"model/{prefix}", of_artifact
    if state is not None:
        keys = [key for key in state if key.startswith(start)]
        dense = {key.removeprefix(start): state[key].whole() for key in keys}
    if has_axes(dense) or has_axes(of_artifact):
        axes.with_axes_(model)
    _fill_dense_(model, fqns, dense, artifact)
    states, matrices = dict[str, Tensor](), dict[str, Tensor]()
    if state is not None:
        states = _states_of_dense(state, prefix)
        if not is_turned:
            matrices = _turn_(model, scheme, states, prefix)
    narrow = scheme.for_training()
    for fqn in fqns:
        tables = {name: t for name, t in narrow.tables.items() if t.collection == fqn}
        cut = MixedDimensionEmbeddingBagCollection(MixedDimensionScheme(tables), device="meta")
        for name, table in tables.items():
            if state is None:
                rows = folder.rows(scheme.tables[name], True)
                chunks = chunks_of(table, rows, 0, table.num_embeddings)
                cut.load_table(name, trainable.draw_new_rows(scheme.tables[name], chunks))
            else:
                key, shape = f"table/{name}", (table.num_embeddings, table.embedding_dim)
                actual = state[key].shape if key in state else "no rows"
                check(actual == shape, key, f"shape {shape}", actual, "use the model of the run")
                matrix = matrices.get(name)
                cut.load_table(name, _turned_rows(table, state[key], matrix))
                states |= _states_of_table(table, state, prefix, matrix)
            if table.table_name in frozen_tables_of(modules[fqn]):
                for s in table.stored_blocks():
                    cut.table_of_block(name, s).weight.requires_grad_(False)
        model = replace_(model, modules[fqn], cut.to("cpu").train(modules[fqn].training))
    return model, states


def widened_state(
    scheme: MixedDimensionScheme, state: Mapping[str, _Stored], *, prefix: str = ""
) -> dict[str, Tensor]:
    """Turns a checkpoint of narrow tables into one of the plain model: its keys, and zeros where a
    block has no column. Local."""
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
        table = scheme.tables[name]
        tensors[key] = first if _is_step(key) else trainable.widened_table(table, blocks)
    return tensors


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


def _states_of_dense(state: Mapping[str, _Stored], prefix: str) -> dict[str, Tensor]:
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
    matrices = axes.turn_readers_(axes.rotation_groups(model), turns, by_address)
    absent = sorted(set(turns) - set(matrices))
    remedy = "build it as for the run, with its rotation_groups"
    check(not absent, "model", "tables that can be turned as then", absent, remedy)
    return matrices


def _turned_rows(table: TableScheme, stored: _Stored, matrix: Tensor | None) -> Iterator[Tensor]:
    """The rows of a table, or numbers for each of their values, a few at a time."""
    for rows in chunks_of(table, stored.rows, 0, table.num_embeddings):
        yield rows if matrix is None else (rows.double() @ matrix).to(rows)


def _states_of_table(
    table: TableScheme, state: Mapping[str, _Stored], prefix: str, matrix: Tensor | None
) -> dict[str, Tensor]:
    """States of a table's optimizer, turned as its values are, block by block."""
    places = {f"fused/{table.name}": f"fused/{table.name}/b{{}}"}
    of_block = _weight_key(table, prefix, "{}")
    places[f"optimizer/{_weight_key(table, prefix)}"] = f"optimizer/{of_block}"
    # Gradients of turned rows, where the matrix is not orthogonal.
    inverse = None if matrix is None else torch.linalg.pinv(matrix, rtol=1e-6).T
    block_of_row = table.routing.all_blocks()
    states = dict[str, Tensor]()
    for key, value in state.items():
        place, _, what = key.rpartition("/")
        if place not in places:
            continue
        rows, dim = table.num_embeddings, table.embedding_dim
        if _is_step(key):
            blocks = dict.fromkeys(table.stored_blocks(), value.whole())
        elif len(value.shape) == 1:  # as of row-wise optimizers
            of_rows = _of_rows(value, rows).float()
            blocks = {s: of_rows[block_of_row == s] for s in table.stored_blocks()}
        else:
            check(value.shape == (rows, dim), key, f"shape {(rows, dim)}", value.shape)
            of_state = inverse
            if inverse is not None and not _is_linear(what, f"{place}/momentum2" in state, key):
                # NOTE[DIFF]: sums of squares lose what columns had in common.
                of_state = inverse.square()
            blocks = block_tables(table, _turned_rows(table, value, of_state))
        states |= {f"{places[place].format(s)}/{what}": part for s, part in blocks.items()}
    return states


def _of_rows(value: _Stored, num_rows: int) -> Tensor:
    """A number for each row; of a table whose columns were sharded the mean over its shards."""
    return value.whole().view(-1, num_rows).mean(0)


def _is_linear(name: str, has_two: bool, key: str) -> bool:
    """Whether a state turns as the gradient does, or is a sum of squares. Fused kernels number
    theirs: two are those of Adam, one is that of Adagrad."""
    of_kernels = {"momentum1": "exp_avg" if has_two else "sum", "momentum2": "exp_avg_sq"}
    name = of_kernels.get(name, name)
    names = axes.LINEAR_STATES | axes.SQUARED_STATES
    if name not in names:
        requirement, remedy = f"supported to turn are {sorted(names)}", "leave its table alone"
        raise NotImplementedError(describe(key, requirement, repr(name), remedy))
    return name in axes.LINEAR_STATES


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
