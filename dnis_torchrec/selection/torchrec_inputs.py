"""Changes to what TorchRec does in front of its lookups, entry by entry as in `torchrec`."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import PrefetchPipelinedForward
from torchrec.distributed.train_pipeline.utils import _wait_for_batch as wait_for_batch
from torchrec.distributed.utils import modify_input_for_feature_processor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import FeatureProcessorsCollection
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    apply_feature_processors_to_kjt,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.selection.torchrec import PrefetchedTables, without_weights

# --------------------------------------------------------------------------------------------------
# Feature processors
# Reason: a FeatureProcessedEmbeddingBagCollection shows neither its collection nor its processors;
#   those in front of row shards expect places as weights, which a plain model does not give.
# Upstream:
#   https://github.com/pytorch/torchrec/blob/v1.8.0/torchrec/modules/feature_processor_.py#L70
# Ends: not planned.

FEATURE_PROCESSED = (
    FeatureProcessedEmbeddingBagCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
"""TorchRec's modules that process features in front of the collection that they hold."""
INNER = "_embedding_bag_collection"
"""The attribute by which they hold it."""


def with_processors_of(
    holder: nn.Module, collection: EmbeddingBagCollection
) -> FeatureProcessedEmbeddingBagCollection:
    """An unsharded module with the processors of another, around a collection."""
    processors: Any = holder._feature_processors
    for module in processors.modules():
        if hasattr(module, "_pre_processed"):
            module._pre_processed = False
    if not isinstance(processors, FeatureProcessorsCollection):
        processors = dict(processors.items())
    return FeatureProcessedEmbeddingBagCollection(collection, processors).train(holder.training)


def processed_bags(holder: nn.Module, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Bags with the weights that the processors of a module give them, made here. Local."""
    processors: Any = holder._feature_processors
    bags = without_weights(features)
    is_collection = isinstance(processors, FeatureProcessorsCollection)
    if any(getattr(module, "_pre_processed", False) for module in processors.modules()):
        # they now want places as weights
        modify_input_for_feature_processor(bags, processors, is_collection)
    result = (
        processors(bags) if is_collection else apply_feature_processors_to_kjt(bags, processors)
    )
    return cast(KeyedJaggedTensor, result)


# --------------------------------------------------------------------------------------------------
# Managed collisions (ZCH, MPZCH): a model that looks up, for an id, the row that the id has now
# Reason: raw ids are remapped in front of the collection. So counts, blocks and schemes are of the
#   REMAPPED rows, and remapping stands still while a model is prepared, because rows belong to
#   blocks. Where it goes on later, counts are taken anew.
# Upstream: https://github.com/pytorch/torchrec/blob/v1.8.0/torchrec/modules/mc_modules.py
# Ends: not planned; TorchRec shows neither the remapping of a table nor a way to hold it.

MANAGED = "_embedding_module"
"""The attribute by which TorchRec's managed collisions hold their collection."""
MANAGED_COLLISIONS = (ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection)
"""Modules of TorchRec that remap ids in front of a collection."""


def managed_collisions(model: nn.Module) -> dict[str, ManagedCollisionCollection]:
    """FQN of a module with managed collisions -> what remaps its ids. Local."""
    return {
        fqn: module._managed_collision_collection
        for fqn, module in get_unwrapped_module(model).named_modules()
        if type(module) in MANAGED_COLLISIONS
    }


def _remappings(
    collection: ManagedCollisionCollection,
) -> Iterator[tuple[str, ManagedCollisionModule, list[str]]]:
    """(table, what remaps its ids, its features)."""
    for table, module in collection._managed_collision_modules.items():
        yield table, cast(ManagedCollisionModule, module), collection._table_to_features[table]


def remap(model: nn.Module, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The rows that a model looks up for bags of raw ids, which it does not learn: what to count.

    Bags keep their keys and lose their weights; without managed collisions they stay as they are.
    """
    collections = managed_collisions(model)
    if not collections:
        return features
    check_remapping(model)
    bags = dict(copy.copy(features).to_dict())  # the batch itself is left as it was
    for fqn, collection in collections.items():
        with evaluating(collection):
            for table, module, names in _remappings(collection):
                for name in names:
                    check_known(f"feature of table {table!r} in FQN {fqn!r}", name, bags)
                rows = _rows_of(table, module, [bags[name] for name in names])
                bags |= dict(zip(names, rows, strict=True))
    of_keys = [bags[key] for key in features.keys()]  # noqa: SIM118
    values = torch.cat([bag.values() for bag in of_keys])
    lengths = torch.cat([bag.lengths() for bag in of_keys])
    return KeyedJaggedTensor(features.keys(), values, lengths=lengths)


def check_remapping(model: nn.Module) -> None:
    """Checks that rows stand for ids already, and for those of one table. Local."""
    readers = _readers(model)
    for fqn, collection in managed_collisions(model).items():
        for table, module, features in _remappings(collection):
            place = f"FQN {fqn!r}, table {table!r}"
            is_empty = int(module.open_slots()) >= module.output_size() - 1 > 0
            remedy = "train the model first: in training ids get their rows"
            check(not is_empty, place, "ids that have rows", "none", remedy)
            for feature in features:
                rest = sorted(readers[feature] - {table})
                if rest:
                    limit = "supported are features of one table, whose rows are its own"
                    remedy = "give the other table a feature of its own with the same ids"
                    text = f"{rest} reads it, too"
                    raise NotImplementedError(describe(place, limit, text, remedy))


def stand_still_(model: nn.Module) -> None:
    """Keeps remapping as it is, also while the model trains, until `go_on_`. Local."""
    for collection in managed_collisions(model).values():
        collection.register_forward_pre_hook(_to_eval)


def stands_still(model: nn.Module) -> bool:
    """Whether no id gets another row until `go_on_`, so that every rank maps ids alike."""
    hooks = (part._forward_pre_hooks.values() for part in managed_collisions(model).values())
    return all(_to_eval in of_collection for of_collection in hooks)


def share_remapping_(model: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Gives all ranks the remapping of the first. A broadcast of each tensor of its state."""
    first = dist.get_global_rank(process_group, 0)
    for collection in managed_collisions(model).values():
        for state in (*collection.buffers(), *collection.parameters()):
            dist.broadcast(state.detach(), src=first, group=process_group)


def go_on_(model: nn.Module) -> None:
    """Lets remapping learn ids again where the model trains. Local."""
    for fqn, collection in managed_collisions(model).items():
        hooks: dict[int, Any] = collection._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _to_eval]:
            del hooks[key]
            collection.train(get_unwrapped_module(model).get_submodule(fqn).training)


def refuse_managed_collisions(model: nn.Module, what: str, remedy: str) -> None:
    """Refuses what looks at raw ids, or shards the collection alone."""
    for fqn in managed_collisions(model):
        limit = f"supported in {what} are embedding collections that the model calls itself"
        kind = type(get_unwrapped_module(model).get_submodule(fqn)).__name__
        place, text = f"{fqn}.{MANAGED}".removeprefix("."), f"one in {kind} {fqn!r}"
        raise NotImplementedError(describe(f"FQN {place!r}", limit, text, remedy))


def _rows_of(
    table: str, module: ManagedCollisionModule, bags: list[JaggedTensor]
) -> list[JaggedTensor]:
    """The rows of one table for the bags of each of its features, asked for as TorchRec does."""
    sizes = torch.tensor([bag.values().numel() for bag in bags])
    values = torch.cat([bag.values() for bag in bags])
    lengths = torch.cat([bag.lengths() for bag in bags])
    rows = module({table: JaggedTensor(values=values, lengths=lengths, weights=sizes)})[table]
    of_features = rows.lengths().view(len(bags), -1)
    values = rows.values().split(of_features.sum(1).tolist())
    pairs = zip(values, of_features, strict=True)
    return [JaggedTensor(part, lengths=lengths) for part, lengths in pairs]


def _readers(model: nn.Module) -> dict[str, set[str]]:
    """Feature -> the tables of all collections that read it."""
    readers: dict[str, set[str]] = {}
    for module in get_unwrapped_module(model).modules():
        configs: Any = getattr(module, "embedding_bag_configs", None)
        configs = configs or getattr(module, "embedding_configs", None)
        for config in configs() if callable(configs) else ():
            for feature in cast(BaseEmbeddingConfig, config).feature_names:
                readers.setdefault(feature, set()).add(config.name)
    return readers


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def _to_eval(collection: nn.Module, _: tuple[Tensor, ...]) -> None:
    collection.eval()


# --------------------------------------------------------------------------------------------------
# Train pipelines
# Reason: detach leaves bag splitters and feature processors as the pipeline changed them, and no
#   pipeline prefetches in steps without a backward pass.
# Upstream:
#   https://github.com/pytorch/torchrec/blob/v1.8.0/torchrec/distributed/train_pipeline/train_pipelines.py
# Ends: not planned.


def _count_ids_(batch: Any) -> None:
    """Counts the ids of each feature while the batch is on the CPU: on a GPU every step would wait
    for the numbers."""
    for part in vars(batch).values() if hasattr(batch, "__dict__") else ():
        is_bags = isinstance(part, KeyedJaggedTensor) and part.keys()
        if is_bags and part.values().device.type == "cpu":
            part.sync()


class DetachableTrainPipeline(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist` that puts modules such as bag splitters back in their places."""

    def _next_batch(self, dataloader_iter: Iterator[Pipelineable]) -> Pipelineable | None:
        batch = super()._next_batch(dataloader_iter)
        if batch is not None and self._device.type != "cpu":
            _count_ids_(batch)
        return batch

    def _pipeline_model(self, *args: Any, **options: Any) -> None:
        super()._pipeline_model(*args, **options)
        for postproc in self._pipelined_postprocs:
            if isinstance(postproc.postproc_module, ManagedCollisionCollection):
                vars(postproc)["evict"] = postproc.postproc_module.evict

    def detach(self) -> nn.Module:
        """Takes the model out of the pipeline; batches in flight stay with it."""
        model = super().detach()
        for module in self._pipelined_modules:
            # else feature processors in front of row shards leave their input to the pipeline
            module.is_pipelined = False
        plain = get_unwrapped_module(model)
        for postproc in self._pipelined_postprocs:
            parent, _, name = postproc.fqn.rpartition(".")
            if parent:
                plain._modules.pop(postproc.fqn, None)
            setattr(plain.get_submodule(parent), name, postproc.postproc_module)
        return model

    @contextmanager
    def detached(self) -> Iterator[nn.Module]:
        """Lends the model in eval mode, outside the pipeline; batches in flight wait."""
        model = self.detach()
        was_training = model.training
        model.eval()
        try:
            yield model
        finally:
            model.train(was_training)
            self.attach(model, sparse_dist=False)


class PrefetchingTrainPipeline(DetachableTrainPipeline):
    """A train pipeline that fetches the next batch's rows into the GPU's cache."""

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
        """The stream on which caches fetch; None on a CPU."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def fill_pipeline(self, dataloader_iter: Iterator[Pipelineable]) -> None:
        """Puts the first batch through all but its forward pass, and begins with the second."""
        if not self._prefetched:
            super().fill_pipeline(dataloader_iter)
            return
        if self.batches or not self.enqueue_batch(dataloader_iter):
            return
        first = self.contexts[0]
        self._init_pipelined_modules(self.batches[0], first, self._pipelined_forward_type)
        self.wait_sparse_data_dist(first)
        self._prefetch(first)
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
        wait_for_batch(self.batches[0], self._prefetch_stream)
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
        """The same; its lookups leave nothing locked in a cache."""
        with super().detached() as model, self._prefetched.unlock_every_lookup():
            yield model

    def _goes_backward(self) -> bool:
        """Returns whether the step at hand has a backward pass."""
        return self._model.training

    def _prefetch(self, context: PrefetchTrainPipelineContext) -> None:
        """Waits for a batch's ids, which its input_dist has sent, and fetches their rows."""
        for module in self._pipelined_modules:
            name = module.forward.name
            with self._stream_context(self._data_dist_stream):
                request = context.input_dist_tensors_requests.pop(name)
                context.module_input_post_prefetch[name] = request.wait()
            context.module_contexts_post_prefetch[name] = context.module_contexts.pop(name)
        self._fetch(context)

    def _fetch(self, context: PrefetchTrainPipelineContext) -> None:
        """Has the caches fetch the rows of a batch's ids, beside what the current stream is at."""
        fetch, forward = self._prefetch_stream, None
        if fetch is not None:
            forward = torch.cuda.current_stream(self._device)
        with self._stream_context(fetch):
            if fetch is not None:
                fetch.wait_stream(self._data_dist_stream)
            for module in self._pipelined_modules:
                name = module.forward.name
                features = context.module_input_post_prefetch[name]
                module_context = context.module_contexts_post_prefetch[name]
                for stream in (fetch, forward):
                    if stream is not None:
                        features.record_stream(stream)
                        module_context.record_stream(stream)
                module.prefetch(ctx=module_context, dist_input=features, forward_stream=forward)
