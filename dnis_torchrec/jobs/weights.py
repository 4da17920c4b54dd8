"""A user's own weights, for the model that they are of. Nothing is unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dnis_torchrec.allocation.axes import has_axes, with_axes_
from dnis_torchrec.checks import check, describe
from dnis_torchrec.jobs.sharded_checkpoint import ShardedCheckpoint
from dnis_torchrec.jobs.stored_tensors import StoredTensor

_SHOWN = 3
"""Names that an error lists."""


def weights_for_(model: nn.Module, path: Path) -> dict[str, StoredTensor]:
    """Finds the weights of a model in files, naming what does not fit. Nothing but names and shapes
    is read yet."""
    state = _state(path)
    if has_axes(state):
        with_axes_(model)
    own = model.state_dict()
    found = _behind_prefix(own, state)
    missing, others = sorted(set(own) - set(found)), sorted(set(found) - set(own))
    received = ", ".join(
        f"{len(names)} {what}, such as {names[:_SHOWN]}"
        for names, what in ((missing, "missing"), (others, "that it does not have"))
        if names
    )
    remedy = "use the weights of the recipe's model"
    check(
        not received, f"weights {path}", "the names of the model's own parameters", received, remedy
    )
    for name, value in own.items():
        shape, wanted = found[name].shape, tuple(value.shape)
        check(shape == wanted, f"weights {path}, {name}", f"shape {wanted}", shape, remedy)
    return found


def _state(path: Path) -> Mapping[str, StoredTensor]:
    """All tensors of a file by name, those of dicts within dicts joined by dots."""
    place = f"weights {path}"
    if path.is_dir():
        return ShardedCheckpoint(path)
    check(path.is_file(), place, "a file", "none")
    try:
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        else:
            loaded = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except SafetensorError as error:
        raise ValueError(describe(place, "a whole safetensors file", str(error))) from error
    except Exception as error:  # what is wrong with a file of any kind, torch says in many ways
        requirement, remedy = (
            "a state_dict, read with weights_only",
            "save model.state_dict(), or a .safetensors file",
        )
        raise ValueError(describe(place, requirement, f"{type(error).__name__}", remedy)) from error
    check(isinstance(loaded, Mapping), place, "a state_dict", type(loaded).__name__)
    return {
        name: StoredTensor.of(f"{place}, {name}", value) for name, value in _flat(loaded).items()
    }


def _flat(state: Mapping[Any, object], prefix: str = "") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            tensors |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            tensors[f"{prefix}{name}"] = value
    return tensors


def _behind_prefix(
    own: Mapping[str, Tensor], state: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Drops the prefix behind which most of the model's names stand; the shortest one of several."""
    first = next(iter(own), "")
    prefixes = [
        name.removesuffix(first) for name in state if name == first or name.endswith(f".{first}")
    ]
    prefix = min(
        prefixes,
        key=lambda prefix: (sum(prefix + name not in state for name in own), len(prefix)),
        default="",
    )
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
