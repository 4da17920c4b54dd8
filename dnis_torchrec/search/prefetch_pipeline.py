"""PrefetchBilevelTrainPipeline: both levels of the search over tables in host memory, their rows fetched ahead.

    batch i        forward                             backward, or none (upper)
    batch i+1      input_dist      cached rows
    batch i+2      copy                                              input_dist

It is to `BilevelTrainPipeline` what TorchRec's PrefetchTrainPipelineSparseDist is to TrainPipelineSparseDist, in the
same order. That class itself will not do: it calls backward, which upper steps do not have, and only a backward pass
unlocks what was prefetched (see `cached_tables`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import PrefetchPipelinedForward
from torchrec.distributed.train_pipeline.utils import _wait_for_batch
from torchrec.streamable import Pipelineable

from dnis_torchrec.search.level_schedule import Level
from dnis_torchrec.search.pipeline import BilevelTrainPipeline, BilevelTrainPipelineContext


@dataclass
class PrefetchBilevelTrainPipelineContext(BilevelTrainPipelineContext, PrefetchTrainPipelineContext):
    """A batch's context in the queue, its level, and what was prefetched for it."""


class PrefetchBilevelTrainPipeline(BilevelTrainPipeline):
    """BilevelTrainPipeline that fetches the next batch's rows into the GPU's cache during the current forward pass.

    For tables sharded with the ``fused_uvm_caching`` kernel and ``CacheParams(prefetch_pipeline=True)``, as TorchRec's
    PrefetchTrainPipelineSparseDist wants them; other tables train as ever. The numbers are those of
    `BilevelTrainPipeline`. Bags of multi-hot features are split before such tables, not on their ranks (see
    `on_shards`), since FBGEMM looks up exactly the ids that it was told to prefetch: their output all-to-all is
    up to S times as large.

    Takes, is and raises what `BilevelTrainPipeline` does, except that it does not refuse such tables.
    """

    _pipelined_forward_type = PrefetchPipelinedForward
    _batch_context_type = PrefetchBilevelTrainPipelineContext
    _may_prefetch = True

    @cached_property
    def _prefetch_stream(self) -> torch.cuda.Stream | None:
        """What the caches fetch on, beside the forward and backward passes; None on a CPU."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def fill_pipeline(self, dataloader_iter: Iterator[Pipelineable]) -> None:
        """Puts the first batch through all that comes before its forward pass, and begins with the second.

        Args:
            dataloader_iter: a BilevelStream; not read where batches are queued already.

        Raises:
            TypeError: if it is to be read and is something else.
        """
        if self.batches or not self.enqueue_batch(dataloader_iter):
            return
        self._init_pipelined_modules(self.batches[0], self.contexts[0], self._pipelined_forward_type)
        self.wait_sparse_data_dist(self.contexts[0])
        self._prefetch(self.contexts[0])
        if self.enqueue_batch(dataloader_iter):
            self.start_sparse_data_dist(self.batches[1], self.contexts[1])

    def progress(self, dataloader_iter: Iterator[Pipelineable]) -> Any:
        """One step, of the level that is next.

        Args:
            dataloader_iter: a BilevelStream.

        Returns:
            The output that the model gave beside the loss.

        Raises:
            StopIteration: when the stream is over.
            TypeError: if it is something else.
            NonFiniteError: if a loss or gradient is NaN or infinite; see `FiniteGuard`.
        """
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
        if not self._model.training or self.level is Level.UPPER:
            self._prefetched.unlock()  # no backward pass has
        if self._model.training:
            self._optimizer.step()
        if len(self.batches) >= 3:
            self.start_sparse_data_dist(self.batches[2], self.contexts[2])
        self.dequeue_batch()
        return output

    def detach(self) -> nn.Module:
        """Takes the model out of the pipeline, as the base class does; what was prefetched is forgotten.

        Returns:
            The model.
        """
        self._prefetched.forget()
        return super().detach()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = False) -> None:
        """Takes the model back in, and prefetches again for the next batch.

        Args:
            model: another one than before; None for the same.
            sparse_dist: not needed: the next batch has been through its input_dist.
        """
        super().attach(model, sparse_dist=sparse_dist)
        if self.contexts:
            self._fetch(self.contexts[0])

    @contextmanager
    def detached(self) -> Iterator[nn.Module]:
        """Lends the model in eval mode, outside the pipeline; batches in flight wait.

        Yields:
            The model, callable on batches.
        """
        with super().detached() as model, self._prefetched.unlocking_every_lookup():
            yield model

    def _prefetch(self, context: PrefetchBilevelTrainPipelineContext) -> None:
        """Waits for a batch's ids, which its input_dist has sent, and fetches their rows."""
        for module in self._pipelined_modules:
            name = module.forward.name
            with self._stream_context(self._data_dist_stream):
                context.module_input_post_prefetch[name] = context.input_dist_tensors_requests.pop(name).wait()
            context.module_contexts_post_prefetch[name] = context.module_contexts.pop(name)
        self._fetch(context)

    def _fetch(self, context: PrefetchBilevelTrainPipelineContext) -> None:
        """Has the caches fetch the rows of a batch's ids, beside what the current stream is at."""
        forward_stream = None if self._prefetch_stream is None else torch.cuda.current_stream(self._device)
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
                module.prefetch(ctx=module_context, dist_input=features, forward_stream=forward_stream)
