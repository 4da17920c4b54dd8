"""TorchRec's train pipeline, whose model works as before once it is taken out of it, on every
release of torchrec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.streamable import Pipelineable

from dnis_torchrec.data.lookup_batches import with_ids_counted


class DetachableTrainPipeline(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist` that puts modules of the input's way, such as bag splitters, back
    where they were."""

    def _next_batch(self, dataloader_iter: Iterator[Pipelineable]) -> Pipelineable | None:
        batch = super()._next_batch(dataloader_iter)
        return batch if batch is None or self._device.type == "cpu" else with_ids_counted(batch)

    def _pipeline_model(self, *args: Any, **named: Any) -> None:
        super()._pipeline_model(*args, **named)
        for pipelined in self._pipelined_postprocs:
            if isinstance(pipelined.postproc_module, ManagedCollisionCollection):
                vars(pipelined)["evict"] = pipelined.postproc_module.evict

    def detach(self) -> nn.Module:
        """Takes the model out of the pipeline; batches in flight stay with it."""
        model = super().detach()
        for module in self._pipelined_modules:
            module.is_pipelined = (
                False  # feature processors in front of row shards leave their input to the pipeline
            )
        plain = get_unwrapped_module(model)
        for pipelined in self._pipelined_postprocs:
            parent, _, name = pipelined.fqn.rpartition(".")
            if parent:
                plain._modules.pop(pipelined.fqn, None)
            setattr(plain.get_submodule(parent), name, pipelined.postproc_module)
        return model
