"""Checkpoints: `write_checkpoint` and `read_checkpoint` for a whole run, which may go on with other
ranks; `save_checkpoint` and `load_checkpoint` for the weights alone, within a run."""

from dnis_torchrec.training.checkpoint.folder import (
    CheckpointFolder,
    LocalCheckpointFolder,
    check_shared,
)
from dnis_torchrec.training.checkpoint.local import load_checkpoint, save_checkpoint, state_tensors
from dnis_torchrec.training.checkpoint.manifest import Manifest
from dnis_torchrec.training.checkpoint.placement import (
    Chunk,
    PlacedTensor,
    TrainingState,
    describe_tables,
    finish_load_,
    model_tensors,
    optimizer_tensors,
    rng_tensors,
    set_rng_,
)
from dnis_torchrec.training.checkpoint.saver import CheckpointSaver
from dnis_torchrec.training.checkpoint.stored import StoredCheckpointFolder, checkpoint_folder
from dnis_torchrec.training.checkpoint.transfer import (
    CheckpointWriteError,
    read_checkpoint,
    write_checkpoint,
)

__all__ = [
    "CheckpointFolder",
    "CheckpointSaver",
    "CheckpointWriteError",
    "Chunk",
    "LocalCheckpointFolder",
    "Manifest",
    "PlacedTensor",
    "StoredCheckpointFolder",
    "TrainingState",
    "check_shared",
    "checkpoint_folder",
    "describe_tables",
    "finish_load_",
    "load_checkpoint",
    "model_tensors",
    "optimizer_tensors",
    "read_checkpoint",
    "rng_tensors",
    "save_checkpoint",
    "set_rng_",
    "state_tensors",
    "write_checkpoint",
]
