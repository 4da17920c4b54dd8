"""Trainings that several cells want are done once: whoever comes first trains, all others read its weights.

FOLDER/KEY.safetensors   the weights of a model in its best state, and how its training went
       KEY.lock          held by the process that trains it; the system frees it when that process ends
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from torch import nn

from dnis_torchrec.storage.foreign_folders import file_lock
from dnis_torchrec.storage.whole_files import read_tensors, unshared, write_tensors

_SECONDS_BETWEEN_LOOKS = 0.2
_KIND = "trained_model"


class _Head(TypedDict):
    selection_loss: float
    best_epoch: int
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A model in its best state.

    Attributes:
        model: plain.
        selection_loss: of that state.
        best_epoch: that ended in it, from 0.
        seconds: wall time of the training, whoever did it.
    """

    model: nn.Module
    selection_loss: float
    best_epoch: int
    seconds: float


def trained_once(folder: Path | None, key: str, fresh: nn.Module, train: Callable[[], Trained]) -> Trained:
    """Trains a model, or reads the weights that another process or an earlier call has trained.

    Args:
        folder: shared by all that may train it; None trains.
        key: what the training depends on, beside what all that share the folder have in common.
        fresh: takes the weights where they are there already; used up by `train` where they are not.
        train: trains `fresh`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> def train(model):
        ...     torch.nn.init.ones_(model.weight)
        ...     return Trained(model=model, selection_loss=0.5, best_epoch=3, seconds=9.0)
        >>> folder, models = Path(tempfile.mkdtemp()), [nn.Linear(1, 1) for _ in range(2)]
        >>> found = [trained_once(folder, "D = 1", model, lambda model=model: train(model)) for model in models]
        >>> models[1].weight.item(), found[1].seconds
        (1.0, 9.0)
    """
    if folder is None:
        return train()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors"
    while True:
        with file_lock(path.with_suffix(".lock")) as owner:
            if path.exists():
                return _read(path, fresh)
            if owner is None:
                trained = train()
                head = _Head(
                    selection_loss=trained.selection_loss, best_epoch=trained.best_epoch, seconds=trained.seconds
                )
                write_tensors(path, unshared(trained.model.state_dict()), _KIND, head)
                return trained
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _read(path: Path, fresh: nn.Module) -> Trained:
    tensors, head = read_tensors(path, _KIND, _Head)
    fresh.load_state_dict(dict(tensors))
    return Trained(model=fresh, **head)
