"""A merged and pruned model on disk, in a file per rank: what a rank holds is what it writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TypedDict, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dnis_torchrec.allocation.axes import has_axes, with_axes_
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.files import Positive, parse_json
from dnis_torchrec.data.urls import Address, file_names, path_in, put_file, remove_file
from dnis_torchrec.jobs.stored_tensors import Cut, StoredChunk, StoredTensor
from dnis_torchrec.ranks import Ranks, together, world_size_of
from dnis_torchrec.selection.shards import (
    TableShard,
    collections,
    dense_state,
    holders_of_tables,
    local_shards,
    num_copies,
    table_configs_of,
    tables_under,
)
from dnis_torchrec.selection.torchrec import writing_to_tables
from dnis_torchrec.training.shard import spread_tables

_HEADER = "model_part"


class _Part(TypedDict):
    world_size: Positive


def save_shards(folder: Address, model: nn.Module, ranks: Ranks) -> None:
    """Writes this rank's part of a merged model."""
    found = collections(model)
    configs = {
        config.name: (fqn, config)
        for fqn, module in found.items()
        for config in table_configs_of(module)
    }
    shards: dict[str, list[TableShard]] = {name: [] for name in configs}
    for shard in (shard for module in found.values() for shard in local_shards(module)):
        shards[shard.table].append(shard)
    copies = num_copies(
        shards, {n: (c.num_embeddings, c.embedding_dim) for n, (_, c) in configs.items()}, ranks
    )
    tensors: dict[str, Tensor] = {}
    for index, (name, held) in enumerate(shards.items()):
        if copies[name] == 1 or index % ranks.world_size == ranks.rank:
            fqn = configs[name][0]
            key = f"{fqn}.{tables_under(found[fqn])}.{name}.weight".removeprefix(".")
            tensors |= {
                f"table/{s.first_row}/{s.first_column}/{key}": s.weight.contiguous() for s in held
            }
    if ranks.is_first:
        tensors |= {
            f"dense/{name}": value.detach().clone() for name, value in dense_state(model).items()
        }
    with together(ranks.group):
        target, header = (
            path_in(folder, shard_name(ranks.rank)),
            {_HEADER: json.dumps({"world_size": ranks.world_size})},
        )
        try:
            put_file(target, lambda path: save_file(tensors, path, metadata=header))
        except SafetensorError as error:
            raise OSError(describe(str(target), "it to be written", str(error))) from error


def has_shards(folder: Path) -> bool:
    """Returns whether a model was written by several ranks."""
    return (folder / shard_name(0)).is_file()


def delete_shards(folder: Address) -> None:
    """Deletes what several ranks have written, so that nobody takes it for the model of a later
    attempt."""
    for name in file_names(folder):
        if fnmatchcase(name, shard_name("*")):
            remove_file(path_in(folder, name))


def load_shards(folder: Path) -> dict[str, Tensor]:
    """Reads the model that all ranks have written."""
    return {name: stored.whole() for name, stored in stored_shards(folder).items()}


def stored_shards(folder: Path) -> dict[str, StoredTensor]:
    """The model that all ranks have written, of which nothing but headers is read yet. Local, no
    collective."""
    chunks: dict[str, list[StoredChunk]] = {}
    for rank in range(_world_size(folder / shard_name(0))):
        file = folder / shard_name(rank)
        _world_size(file)
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                kind, _, rest = name.partition("/")
                shape = tuple(tensors.get_slice(name).get_shape())
                row, column, key = rest.split("/", 2) if kind == "table" else ("", "", rest)
                first = (int(row), int(column)) if kind == "table" else (0,) * len(shape)
                chunks.setdefault(key, []).append(
                    StoredChunk(first, shape, partial(open_tensor, file, name))
                )
    found = {}
    for key, of_tensor in chunks.items():
        shapes = [
            [at + size for at, size in zip(chunk.first, chunk.shape, strict=True)]
            for chunk in of_tensor
        ]
        shape = tuple(max(ends) for ends in zip(*shapes, strict=True))
        held = sum(torch.Size(chunk.shape).numel() for chunk in of_tensor)
        is_whole = held == torch.Size(shape).numel()
        check(is_whole, f"{folder}: {key}", f"parts of a table of shape {shape}", held)
        found[key] = StoredTensor(f"{folder}: {key}", shape, tuple(of_tensor))
    return found


def open_tensor(file: Path, name: str) -> Cut:
    """Opens a tensor of a safetensors file, mapped into memory."""
    with safe_open(file, framework="pt") as tensors:
        mapped: Tensor = tensors.get_tensor(name)
    return mapped.__getitem__


def shard_name(rank: int | str) -> str:
    """The file of a rank, or the pattern of all of them for ``"*"``."""
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


def check_shapes(
    expected: Mapping[str, Tensor], state: Mapping[str, Tensor | StoredTensor], place: str
) -> None:
    """Checks that weights have the shapes of the model that they are meant for."""
    for name, value in expected.items():
        shape = tuple(state[name].shape)
        check(
            shape == tuple(value.shape),
            f"{place}, {name}",
            f"shape {tuple(value.shape)}",
            shape,
            _REMEDY,
        )


def check_state(model: nn.Module, state: Mapping[str, Tensor | StoredTensor], place: str) -> None:
    """Checks that weights fit a model, naming what does not."""
    if has_axes(state):
        with_axes_(model)
    expected = model.state_dict()
    different = sorted(set(expected) ^ set(state))
    check(not different, place, "the model's own parameters", different[:3], _REMEDY)
    check_shapes(expected, state, place)


def load_state_(model: nn.Module, state: Mapping[str, Tensor], place: str) -> None:
    """Loads a run's or artifact's weights into a model, naming what does not fit."""
    check_state(model, state, place)
    fill_(
        model, {name: StoredTensor.of(f"{place}, {name}", value) for name, value in state.items()}
    )


@torch.no_grad()
def fill_(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Fills a model with weights that fit it; of a table no more is read than the shards that this
    rank holds."""
    for name, value in dense_state(model).items():
        if not isinstance(
            value, ShardedTensor
        ):  # a collection that the model holds under a second name
            stored[name].copy_to_(value)
    with writing_to_tables(model):
        for fqn, module in collections(model).items():
            for shard in local_shards(module):
                key = f"{fqn}.{tables_under(module)}.{shard.table}.weight".removeprefix(".")
                stored[key].copy_to_(shard.weight, (shard.first_row, shard.first_column))


def spread_filled(
    model: nn.Module, stored: Mapping[str, StoredTensor] | None, device: torch.device
) -> nn.Module:
    """Spreads the tables of a model over all ranks, each of which then reads its shards."""
    if stored is None:
        return spread_tables(model, device)
    forget_tables_(model)
    model = spread_tables(model, device)
    with together():
        fill_(model, stored)
    return model


def forget_tables_(model: nn.Module) -> None:
    """Frees the tables of a plain model that are to be sharded, so that no rank holds whole ones
    meanwhile."""
    device = "cpu" if world_size_of() == 1 else "meta"
    for module in collections(model).values():
        for holder in holders_of_tables(module).values():
            weight = cast(Tensor, holder.weight)
            if weight.is_meta or device == "meta":
                empty = torch.empty_like(weight, device=device)
                holder.weight = nn.Parameter(empty, requires_grad=weight.requires_grad)
