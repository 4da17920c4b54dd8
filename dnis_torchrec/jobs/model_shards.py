"""A merged and pruned model on disk, in a file per rank: what a rank holds is what it writes.

model.rank0.safetensors, model.rank1.safetensors, ...     table shards, named by where they belong, and in the first
                                                           file everything that is no table

Read by one process, which puts the tables together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dnis_torchrec.checks import check, describe
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.soft_selection.table_shards import (
    TableShard,
    collections,
    dense_state,
    local_shards,
    num_copies,
    table_configs_of,
)
from dnis_torchrec.storage.files import Address, file_names, inside, put_file, remove_file
from dnis_torchrec.storage.json_files import Positive, parse_json

_HEADER = "model_part"


class _Part(TypedDict):
    world_size: Positive


def save_shards(folder: Address, model: nn.Module, ranks: Ranks) -> None:
    """Writes this rank's part of a merged model.

    Distributed: every rank calls it, on storage that whoever reads sees whole; no tensor is exchanged. A table that all
    ranks hold is written by one of them.

    Args:
        folder: existing folder, or a URL: then each rank puts its part there.
        model: merged and sharded (see `merge_`).
        ranks: that hold it.

    Raises:
        OSError: on all ranks, if one of them cannot write.
        StorageError: if storage does not answer; RuntimeError on the other ranks.
    """
    found = collections(model)
    configs = {config.name: (fqn, config) for fqn, module in found.items() for config in table_configs_of(module)}
    shards: dict[str, list[TableShard]] = {name: [] for name in configs}
    for shard in (shard for module in found.values() for shard in local_shards(module)):
        shards[shard.table].append(shard)
    copies = num_copies(shards, {n: (c.num_embeddings, c.embedding_dim) for n, (_, c) in configs.items()}, ranks)
    tensors: dict[str, Tensor] = {}
    for index, (name, held) in enumerate(shards.items()):
        if copies[name] == 1 or index % ranks.world_size == ranks.rank:
            fqn = configs[name][0]
            key = f"{fqn}.embedding_bags.{name}.weight".removeprefix(".")
            tensors |= {f"table/{s.first_row}/{s.first_column}/{key}": s.weight.contiguous() for s in held}
    if ranks.is_first:
        tensors |= {f"dense/{name}": value.detach().clone() for name, value in dense_state(model).items()}
    with together(ranks.group):
        target, header = inside(folder, shard_name(ranks.rank)), {_HEADER: json.dumps({"world_size": ranks.world_size})}
        try:
            put_file(target, lambda path: save_file(tensors, path, metadata=header))
        except SafetensorError as error:
            raise OSError(describe(str(target), "it to be written", str(error))) from error


def has_shards(folder: Path) -> bool:
    """Returns whether a model was written by several ranks."""
    return (folder / shard_name(0)).is_file()


def delete_shards(folder: Address) -> None:
    """Deletes what several ranks have written, so that nobody takes it for the model of a later attempt.

    Args:
        folder: path or URL; it need not exist.

    Raises:
        StorageError: if storage does not answer.
    """
    for name in file_names(folder):
        if fnmatchcase(name, shard_name("*")):
            remove_file(inside(folder, name))


def load_shards(folder: Path) -> dict[str, Tensor]:
    """Reads the model that all ranks have written.

    Args:
        folder: given to `save_shards`.

    Returns:
        The state_dict of the plain model. Memory: that of all tables.

    Raises:
        ValueError: if a rank's file is missing or damaged, or tables have holes.
    """
    parts: dict[str, list[tuple[int, int, Tensor]]] = {}
    state: dict[str, Tensor] = {}
    for rank in range(_world_size(folder / shard_name(0))):
        file = folder / shard_name(rank)
        _world_size(file)
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                kind, _, rest = name.partition("/")
                if kind == "dense":
                    state[rest] = tensors.get_tensor(name)
                    continue
                row, column, key = rest.split("/", 2)
                parts.setdefault(key, []).append((int(row), int(column), tensors.get_tensor(name)))
    for key, found in parts.items():
        shape = max(row + part.shape[0] for row, _, part in found), max(col + part.shape[1] for _, col, part in found)
        held = sum(part.numel() for _, _, part in found)
        check(held == shape[0] * shape[1], f"{folder}: {key}", f"parts of a table of shape {shape}", held)
        state[key] = torch.empty(shape, dtype=found[0][2].dtype)
        for row, column, part in found:
            state[key][row : row + part.shape[0], column : column + part.shape[1]] = part
    return state


def shard_name(rank: int | str) -> str:
    """The file of a rank, or the pattern of all of them for ``"*"``.

    Example:
        >>> shard_name(1)
        'model.rank1.safetensors'
    """
    return f"model.rank{rank}.safetensors"


def _world_size(file: Path) -> int:
    """Returns the number of ranks that have written, as one of their files says."""
    remedy = "copy the files of all ranks into the folder, or search again"
    check(file.is_file(), str(file), "the part of a rank", "none", remedy)
    try:
        with safe_open(file, framework="pt") as tensors:
            described = (tensors.metadata() or {}).get(_HEADER, "")
    except SafetensorError as error:
        raise ValueError(describe(str(file), "a whole safetensors file", str(error))) from error
    check(bool(described), str(file), "a part of a model", "another file", remedy)
    return parse_json(described, _Part, str(file), remedy=remedy)["world_size"]


_REMEDY = "use the recipe and data of the run"


def check_shapes(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], place: str) -> None:
    """Checks that weights have the shapes of the model that they are meant for.

    Args:
        expected: the model's, by name.
        state: those to load, by the same names or more.
        place: where the weights come from, for the error.

    Raises:
        ValueError: for the first parameter of another shape, as another recipe or data set has it.
    """
    for name, value in expected.items():
        shape = tuple(state[name].shape)
        check(shape == tuple(value.shape), f"{place}, {name}", f"shape {tuple(value.shape)}", shape, _REMEDY)


def load_state_(model: nn.Module, state: Mapping[str, Tensor], place: str) -> None:
    """Loads a run's or artifact's weights into a model, naming what does not fit.

    Args:
        model: changed in place.
        state: name -> tensor; must name exactly what the model has.
        place: where the weights come from, for the error.

    Raises:
        ValueError: if names or shapes differ, as they do for another recipe, seed or data set.
    """
    expected = model.state_dict()
    different = sorted(set(expected) ^ set(state))
    check(not different, place, "the model's own parameters", different[:3], _REMEDY)
    check_shapes(expected, state, place)
    with torch.no_grad():
        for name, value in expected.items():
            value.copy_(state[name])
