"""The weights and alpha of each rank's shards in one file per rank, to go back to within a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dnis_torchrec.checks import check, describe, nearest
from dnis_torchrec.data.files import written_whole
from dnis_torchrec.selection.shards import collections, local_shards, table_weight_names
from dnis_torchrec.selection.torchrec import writing_to_tables
from dnis_torchrec.training.checkpoint.placement import PlacedTensor


def state_tensors(
    model: nn.Module, more: Mapping[str, PlacedTensor] | None = None
) -> dict[str, Tensor]:
    """Live views of everything in a model that this rank would save: local table shards, dense
    weights, alpha, buffers."""
    views: dict[str, Tensor] = {}
    for module in collections(model).values():
        for shard in local_shards(module):
            views[f"table/{shard.table}/{shard.first_row}/{shard.first_column}"] = shard.weight
    known, of_tables = (
        set(),
        table_weight_names(model),
    )  # wrappers share one alpha: it is saved once
    for name, value in model.state_dict().items():
        if (
            type(value) in (Tensor, nn.Parameter)
            and name not in of_tables
            and value.data_ptr() not in known
        ):
            known.add(value.data_ptr())
            views[f"dense/{name}"] = value.detach()
    for name, placed in (more or {}).items():
        views |= {
            "/".join(map(str, [name, *chunk.offset])): chunk.tensor for chunk in placed.chunks
        }
    return views


def save_checkpoint(
    path: Path, model: nn.Module, more: Mapping[str, PlacedTensor] | None = None
) -> None:
    """Writes this rank's part of a checkpoint; the previous one stays until the new one is whole."""
    with written_whole(_rank_file(path)) as unfinished:
        save_file(
            {name: value.contiguous() for name, value in state_tensors(model, more).items()},
            unfinished,
        )


@torch.no_grad()
def load_checkpoint(
    path: Path, model: nn.Module, more: Mapping[str, PlacedTensor] | None = None
) -> None:
    """Copies this rank's part of a checkpoint into a model of the same tables and sharding."""
    source = _rank_file(path)
    check(source.is_file(), str(source), "a checkpoint file", "none")
    try:
        saved = load_file(source)
    except SafetensorError as error:
        raise ValueError(
            describe(str(source), "a whole safetensors file", str(error), "use another one")
        ) from error
    views = state_tensors(model, more)
    for name, view in views.items():
        if name not in saved:
            raise ValueError(
                describe(f"{source}: {name}", "in the checkpoint", "absent", nearest(name, saved))
            )
        same = saved[name].shape == view.shape
        check(same, f"{source}: {name}", f"shape {tuple(view.shape)}", tuple(saved[name].shape))
    unknown = sorted(name for name in saved if name not in views)
    check(not unknown, str(source), "nothing that the model lacks", unknown)
    with writing_to_tables(model):
        for name, view in views.items():
            view.copy_(saved[name])


def _rank_file(path: Path) -> Path:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return path.with_name(f"{path.name}.rank{rank}.safetensors")
