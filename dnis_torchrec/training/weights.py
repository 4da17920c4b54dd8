"""Weights in files, and models filled with them: a user's, a run's, a sharded model's. Nothing is
unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dnis_torchrec.allocation.axes import has_axes, with_axes_
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.urls import Address, path_in
from dnis_torchrec.ranks import Ranks, together, world_size_of
from dnis_torchrec.selection.shards import (
    collections,
    dense_state,
    holders_of_tables,
    local_shards,
    table_configs_of,
    tables_under,
)
from dnis_torchrec.selection.torchrec import ShardedTensor, writing_to_tables
from dnis_torchrec.training.checkpoint import (
    CheckpointFolder,
    CheckpointWriteError,
    Manifest,
    StoredTensor,
    write_checkpoint,
)
from dnis_torchrec.training.shard import spread_tables
from dnis_torchrec.training.state import Chunk, PlacedTensor, TrainingState

MODEL = "model"
"""Folder of a run in which several ranks have written its model, each its shards."""
_OF_RUN = "use the recipe and data of the run"
_NAMES = 3
"""Names that an error lists."""


# The model of a run


def write_model(folder: Address, model: nn.Module, ranks: Ranks) -> None:
    """Writes a merged model by the names of the plain one: each rank what it holds."""
    tensors = {}
    for fqn, module in collections(model).items():
        for config in table_configs_of(module):
            chunks = tuple(
                Chunk((shard.first_row, shard.first_column), shard.weight)
                for shard in local_shards(module)
                if shard.table == config.name
            )
            size = (config.num_embeddings, config.embedding_dim)
            tensors[_key_of_table(fqn, module, config.name)] = PlacedTensor(size, chunks)
    for name, value in dense_state(model).items():
        whole = Chunk((0,) * value.dim(), value.detach())
        tensors[name] = PlacedTensor(tuple(value.shape), (whole,))
    state = TrainingState(tensors=tensors, tables={})
    try:
        write_checkpoint(CheckpointFolder(path_in(folder, MODEL)), 0, state, ranks.group)
    except CheckpointWriteError as error:
        raise OSError(str(error)) from error  # as by a model that one process writes


def has_written_model(folder: Path) -> bool:
    """Returns whether several ranks have written a model there."""
    return CheckpointFolder(folder / MODEL).latest() is not None


def remove_model(folder: Address) -> None:
    """Removes what several ranks have written, so that nobody takes it for the model of a later
    attempt."""
    CheckpointFolder(path_in(folder, MODEL)).remove()


def written_model(folder: Path) -> dict[str, StoredTensor]:
    """The model that several ranks have written, of which nothing is read yet."""
    latest = CheckpointFolder(folder / MODEL).latest()
    check(latest is not None, str(folder / MODEL), "a model", "none", "search again")
    path = cast(Path, latest)
    return Manifest.read(path).stored(path)


def _key_of_table(fqn: str, module: nn.Module, table: str) -> str:
    return f"{fqn}.{tables_under(module)}.{table}.weight".removeprefix(".")


# Filling a model


def check_shapes(
    weights: Mapping[str, Tensor], state: Mapping[str, Tensor | StoredTensor], place: str
) -> None:
    """Checks that weights have the shapes of the model that they are meant for."""
    for name, value in weights.items():
        shape, size = tuple(value.shape), tuple(state[name].shape)
        check(shape == size, f"{place}, {name}", f"shape {shape}", size, _OF_RUN)


def check_state(model: nn.Module, state: Mapping[str, Tensor | StoredTensor], place: str) -> None:
    """Checks that weights fit a model, naming what does not."""
    if has_axes(state):
        with_axes_(model)
    weights = model.state_dict()
    different = sorted(set(weights) ^ set(state))
    check(not different, place, "the model's own parameters", different[:_NAMES], _OF_RUN)
    check_shapes(weights, state, place)


def load_state_(model: nn.Module, state: Mapping[str, Tensor], place: str) -> None:
    """Loads a run's or artifact's weights into a model, naming what does not fit."""
    check_state(model, state, place)
    fill_(model, {name: StoredTensor.of(f"{place}, {name}", state[name]) for name in state})


@torch.no_grad()
def fill_(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Fills a model with weights that fit it; of a table no more is read than the shards that this
    rank holds."""
    for name, value in dense_state(model).items():
        if not isinstance(value, ShardedTensor):  # else a collection under a second name
            stored[name].copy_to_(value)
    with writing_to_tables(model):
        for fqn, module in collections(model).items():
            for shard in local_shards(module):
                table = stored[_key_of_table(fqn, module, shard.table)]
                table.copy_to_(shard.weight, (shard.first_row, shard.first_column))


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


# A user's weights


def weights_for_(model: nn.Module, path: Path) -> dict[str, StoredTensor]:
    """Finds the weights of a model in files, naming what does not fit; but names and shapes nothing
    is read yet."""
    state = _state(path)
    if has_axes(state):
        with_axes_(model)
    weights, place = model.state_dict(), f"weights {path}"
    tensors = _behind_prefix(weights, state)
    absent, more = sorted(set(weights) - set(tensors)), sorted(set(tensors) - set(weights))
    differences = ", ".join(
        f"{len(names)} {what}, such as {names[:_NAMES]}"
        for names, what in ((absent, "missing"), (more, "that it does not have"))
        if names
    )
    remedy = "use the weights of the recipe's model"
    check(not differences, place, "the names of the model's own parameters", differences, remedy)
    check_shapes(weights, tensors, place)
    return tensors


def _state(path: Path) -> Mapping[str, StoredTensor]:
    """All tensors of a file by name, those of dicts within dicts joined by dots."""
    place = f"weights {path}"
    is_folder = path.is_dir()
    remedy = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch makes one of it"
    received = "a folder" if is_folder else "none"
    check(path.is_file(), place, "a file", received, remedy if is_folder else "")
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            is_mapped = zipfile.is_zipfile(path)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except SafetensorError as error:
        raise ValueError(describe(place, "a whole safetensors file", str(error))) from error
    except Exception as error:  # what is wrong with a file of any kind, torch says in many ways
        requirement = "a state_dict, read with weights_only"
        remedy = "save model.state_dict(), or a .safetensors file"
        raise ValueError(describe(place, requirement, type(error).__name__, remedy)) from error
    check(isinstance(content, Mapping), place, "a state_dict", type(content).__name__)
    tensors = _flat(content)
    return {name: StoredTensor.of(f"{place}, {name}", tensors[name]) for name in tensors}


def _flat(state: Mapping[Any, object], prefix: str = "") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            tensors |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            tensors[f"{prefix}{name}"] = value
    return tensors


def _behind_prefix(
    weights: Mapping[str, Tensor], state: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Drops the prefix behind which most of the model's names stand; of several the shortest."""
    first = next(iter(weights), "")
    prefixes = [
        name.removesuffix(first) for name in state if name == first or name.endswith(f".{first}")
    ]
    prefix = min(
        prefixes,
        key=lambda prefix: (sum(prefix + name not in state for name in weights), len(prefix)),
        default="",
    )
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
