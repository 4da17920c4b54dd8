"""Trainings that several cells want are done once: whoever comes first trains, all others read its
weights."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from torch import nn

from dnis_torchrec.data.files import file_lock, read_tensors, unshared, write_tensors

_SECONDS_BETWEEN_LOOKS = 0.2
_KIND = "trained_model"


class _Head(TypedDict):
    selection_loss: float
    best_epoch: int
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A model in its best state."""

    model: nn.Module
    selection_loss: float
    best_epoch: int
    seconds: float


def trained_once(folder: Path | None, key: str, fresh: nn.Module, train: Callable[[], Trained]) -> Trained:
    """Trains a model, or reads the weights that another process or an earlier call has trained."""
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
