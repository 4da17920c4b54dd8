"""PrefetchingTrainPipeline: a train pipeline that fetches rows ahead for tables in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import PrefetchPipelinedForward
from torchrec.distributed.train_pipeline.utils import _wait_for_batch
from torchrec.streamable import Pipelineable

from dnis_torchrec.selection.torchrec import PrefetchedTables
from dnis_torchrec.training.detachable_pipeline import DetachableTrainPipeline


class PrefetchingTrainPipeline(DetachableTrainPipeline):
    """A train pipeline that fetches the next batch's rows into the GPU's cache during the current
    forward pass."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device,
        *,
        context_type: type[PrefetchTrainPipelineContext] = PrefetchTrainPipelineContext,
        **settings: Any,
    ) -> None:
        self._prefetched = PrefetchedTables(model)
        if self._prefetched:
            self._pipelined_forward_type = PrefetchPipelinedForward
        super().__init__(model, optimizer, device, context_type=context_type, **settings)

    @cached_property
    def _prefetch_stream(self) -> torch.cuda.Stream | None:
        """Returns the stream on which caches fetch beside the forward and backward passes; None on
        a CPU."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def fill_pipeline(self, dataloader_iter: Iterator[Pipelineable]) -> None:
        """Puts the first batch through all that comes before its forward pass, and begins with the
        second."""
        if not self._prefetched:
            super().fill_pipeline(dataloader_iter)
            return
        if self.batches or not self.enqueue_batch(dataloader_iter):
            return
        self._init_pipelined_modules(
            self.batches[0], self.contexts[0], self._pipelined_forward_type
        )
        self.wait_sparse_data_dist(self.contexts[0])
        self._prefetch(self.contexts[0])
        if self.enqueue_batch(dataloader_iter):
            self.start_sparse_data_dist(self.batches[1], self.contexts[1])

    def progress(self, dataloader_iter: Iterator[Pipelineable]) -> Any:
        """One step."""
        if not self._prefetched:
            return super().progress(dataloader_iter)
        if not self._model_attached:
            self.attach(self._model)
        self.fill_pipeline(dataloader_iter)
        if not self.batches:
            raise StopIteration
        self._set_module_context(self.contexts[0])
        if self._model.training:
            self._optimizer.zero_grad()
        _wait_for_batch(self.batches[0], self._prefetch_stream)
        self.enqueue_batch(dataloader_iter)
        if len(self.batches) >= 2:
            self.wait_sparse_data_dist(self.contexts[1])
        losses, output = self._model_fwd(self.batches[0])
        if len(self.batches) >= 2:
            self._prefetch(self.contexts[1])
        if self._model.training:
            self._backward(losses)
        if not self._goes_backward():
            self._prefetched.unlock()  # no backward pass has
        if self._model.training:
            self._optimizer.step()
        if len(self.batches) >= 3:
            self.start_sparse_data_dist(self.batches[2], self.contexts[2])
        self.dequeue_batch()
        return output

    def detach(self) -> nn.Module:
        """Takes the model out of the pipeline; what was prefetched is forgotten."""
        self._prefetched.forget()
        return super().detach()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = False) -> None:
        """Takes the model back in, and prefetches again for the next batch."""
        super().attach(model, sparse_dist=sparse_dist)
        if self._prefetched and self.contexts:
            self._fetch(self.contexts[0])

    @contextmanager
    def detached(self) -> Iterator[nn.Module]:
        """Lends the model in eval mode, outside the pipeline; batches in flight wait."""
        model = self.detach()
        was_training = model.training
        model.eval()
        try:
            with self._prefetched.unlocking_every_lookup():
                yield model
        finally:
            model.train(was_training)
            self.attach(model)

    def _goes_backward(self) -> bool:
        """Returns whether the step at hand has a backward pass."""
        return self._model.training

    def _prefetch(self, context: PrefetchTrainPipelineContext) -> None:
        """Waits for a batch's ids, which its input_dist has sent, and fetches their rows."""
        for module in self._pipelined_modules:
            name = module.forward.name
            with self._stream_context(self._data_dist_stream):
                context.module_input_post_prefetch[name] = context.input_dist_tensors_requests.pop(
                    name
                ).wait()
            context.module_contexts_post_prefetch[name] = context.module_contexts.pop(name)
        self._fetch(context)

    def _fetch(self, context: PrefetchTrainPipelineContext) -> None:
        """Has the caches fetch the rows of a batch's ids, beside what the current stream is at."""
        forward_stream = (
            None if self._prefetch_stream is None else torch.cuda.current_stream(self._device)
        )
        with self._stream_context(self._prefetch_stream):
            if self._prefetch_stream is not None:
                self._prefetch_stream.wait_stream(self._data_dist_stream)
            for module in self._pipelined_modules:
                name = module.forward.name
                features = context.module_input_post_prefetch[name]
                module_context = context.module_contexts_post_prefetch[name]
                for stream in (self._prefetch_stream, forward_stream):
                    if stream is not None:
                        features.record_stream(stream)
                        module_context.record_stream(stream)
                module.prefetch(
                    ctx=module_context, dist_input=features, forward_stream=forward_stream
                )
