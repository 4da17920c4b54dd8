"""The trained model that a search begins with: that of a run, or weights in files. Nothing is
unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dnis_torchrec.allocation.axes import with_axes_
from dnis_torchrec.checks import check
from dnis_torchrec.data.files import check_plain, conform
from dnis_torchrec.jobs.run_folder import TRAINED, RunFolder
from dnis_torchrec.search.settings import USUAL_EPOCHS
from dnis_torchrec.training.checkpoint import CheckpointFolder, Manifest, StoredTensor
from dnis_torchrec.training.loop import SearchValues
from dnis_torchrec.training.weights import check_state, fill_, weights_for_

TRAINED_EPOCHS = "trained_epochs"
"""Field of a run's configuration: epochs of plain training that the model had behind it with which
a search began."""


@dataclass(frozen=True, kw_only=True)
class GivenModel:
    """A trained model of a recipe; one of the two is given."""

    run: Path | None = None
    weights: Path | None = None

    @staticmethod
    def of(run: Path | None, weights: Path | None) -> GivenModel | None:
        """The model that the options of a command give; None if they give none."""
        check(run is None or weights is None, "--from", "no --weights", "both", "give one of them")
        return None if run is None and weights is None else GivenModel(run=run, weights=weights)

    def __str__(self) -> str:
        return f"weights {self.weights}" if self.run is None else f"run folder {self.run}"

    def check_apart(self, out: Path) -> None:
        """Refuses a search that would write to the run that it begins with."""
        is_apart = self.run is None or self.run.resolve() != out.resolve()
        check(
            is_apart, "--from", "another folder than --out", str(self.run), "choose another --out"
        )

    def fill_(self, model: nn.Module, identity: Mapping[str, Any], epochs: int) -> int:
        """Gives a recipe's model the trained weights. Local, no collective."""
        if self.run is None:
            assert self.weights is not None
            fill_(model, weights_for_(model, self.weights))
            return min(USUAL_EPOCHS, epochs)
        head = _head(self.run)
        for name, wanted in identity.items():
            requirement = f"a run of {name} {wanted!r}, as this search is"
            check(
                head.get(name) == wanted,
                str(self),
                requirement,
                repr(head.get(name)),
                "repeat the run's own",
            )
        if head.get("kind") == TRAINED:
            stored, trained = RunFolder.open(self.run).stored(), int(head["best_epoch"]) + 1
        else:
            stored, trained = _after_plain_training(model, self.run, head)
        check_state(model, stored, str(self))
        fill_(model, stored)
        return trained


def _head(run: Path) -> dict[str, Any]:
    place = f"run folder {run}"
    requirement = "a folder written by `dnis train` or `dnis search`"
    check(
        (run / "run.json").is_file(),
        place,
        requirement,
        "no run.json in it" if run.is_dir() else "no such folder",
    )
    check_plain(run, place)
    return RunFolder(run).read_head()


def _after_plain_training(
    model: nn.Module, run: Path, head: Mapping[str, Any]
) -> tuple[dict[str, StoredTensor], int]:
    """The best weights of the phase that a search began with, by the names that a model has, and
    epochs behind them."""
    with_axes_(model)  # as every search has them
    place, remedy = (
        f"run folder {run}",
        "let it go on with --resume, or begin with a run of `dnis train`",
    )
    folder = CheckpointFolder(run / "checkpoints")
    latest = folder.latest()
    check(latest is not None, place, "a search with checkpoints", "none", remedy)
    values = Manifest.read(str(latest)).values
    conform(values, SearchValues, f"checkpoint {latest}, values", remedy="begin with another run")
    finished, steps_per_epoch = values["search"]["finished"], values["search"]["steps_per_epoch"]
    check(
        bool(finished),
        place,
        "a search whose plain training is over",
        "one that is still in it",
        remedy,
    )
    best = finished[0]["best"]
    path = folder.path_of(best["step"])
    trained = head["configuration"].get(TRAINED_EPOCHS) or max(
        1, round(best["lower_step"] / steps_per_epoch)
    )
    return _stored_in(model, Path(path)), int(trained)


def _stored_in(model: nn.Module, checkpoint: Path) -> dict[str, StoredTensor]:
    """The weights of a model in a checkpoint of its search; nothing but names and shapes is read
    yet."""
    stored, own = Manifest.read(checkpoint).stored(checkpoint), model.state_dict()
    keys: dict[
        int, str
    ] = {}  # what several modules share stands in a checkpoint once, under one of its names
    for name, value in own.items():
        if _key(name) in stored:
            keys[value.data_ptr() or id(value)] = _key(name)
    found = {}
    for name, value in own.items():
        key = keys.get(value.data_ptr() or id(value))
        if key is not None:
            tensor = stored[key]
            if not value.dim():  # a single number stands in a checkpoint as a tensor of one
                tensor = StoredTensor.of(tensor.place, tensor.whole().view(()))
            found[name] = tensor
    return found


def _key(name: str) -> str:
    """The key in a checkpoint of a parameter of a recipe's model, which stands in a `TrainTask`
    there."""
    _, is_table, table = f".{name}".rpartition(".embedding_bags.")
    return f"table/{table.removesuffix('.weight')}" if is_table else f"model/model.{name}"
