"""`dnis train --scheme`: narrow tables in place of a recipe's, and a run of the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from dnis_torchrec.artifact.load import ArtifactFolder, read_scheme
from dnis_torchrec.artifact.narrow import narrow_for_training_, widened_, widened_state
from dnis_torchrec.cli.run import RunFolder
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.data.urls import Address
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.training.checkpoint import (
    CheckpointFolder,
    Manifest,
    PlacedTensor,
    StoredTensor,
    TableDescription,
    TrainingState,
    write_checkpoint,
)

PREFIX = "model."
"""What a `TrainTask` puts ahead of its model's names."""


@dataclass(frozen=True, kw_only=True)
class NarrowTraining:
    """Narrow tables of a run, and the states of optimizers that they begin with."""

    scheme: MixedDimensionScheme
    states: Mapping[str, Tensor]

    def plain_model(
        self, model: nn.Module, checkpoint: Address
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        """The recipe's model with whole tables, and the whole state of the run, from its
        checkpoint. Each rank holds all of it."""
        # NOTE[DIFF]: a rank's rows of blocks are no span of a table's rows, so that no rank could
        # write its own part of it.
        state = widened_state(self.scheme, _stored(checkpoint), prefix=PREFIX)
        tables = {name: state[f"table/{name}"] for name in self.scheme.tables}
        task = cast(TrainTask, get_unwrapped_module(model))
        return widened_(task.model, tables), state

    def write_widened(self, run: RunFolder, state: Mapping[str, Tensor]) -> None:
        """Makes the last checkpoint of a run one of the plain model. All ranks call it."""
        folder = CheckpointFolder(run.checkpoints)
        step, tables = folder.steps()[-1], dict[str, TableDescription]()
        for name, table in self.scheme.tables.items():
            rows, dim = table.num_embeddings, table.embedding_dim
            tables[name] = TableDescription(
                rows=rows, embedding_dim=dim, column_cuts=[0], blocks=""
            )
        values = Manifest.read(folder.path_of(step)).values
        tensors = {key: PlacedTensor.of(value) for key, value in state.items()}
        whole = TrainingState(tensors=tensors, tables=tables, values=values)
        write_checkpoint(folder, step, whole, None)


def begin_narrow_(recipe: Recipe, artifact: Path, past: RunFolder | None) -> NarrowTraining:
    """Gives a recipe's model the narrow tables of an artifact, filled from it or from a run."""
    state, is_turned = None, False
    if past is not None:
        state = _stored(past.latest_checkpoint())
        configuration = past.read_head()["configuration"]
        is_turned = configuration.get("scheme_id") == ArtifactFolder(artifact).content_id
    _, states = narrow_for_training_(
        recipe.model, artifact, state, is_turned=is_turned, prefix=PREFIX
    )
    return NarrowTraining(scheme=read_scheme(artifact).for_training(), states=states)


def _stored(checkpoint: Address) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, not read yet."""
    return Manifest.read(checkpoint).stored(checkpoint)
