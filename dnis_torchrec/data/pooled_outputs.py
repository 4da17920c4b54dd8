"""Pooled outputs of a model's embedding collections, recorded during a forward pass, and the L2 penalty on them.

Shapes: B batch, F (feature, table) pairs, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedTensor

_POOLED = (
    EmbeddingBagCollectionInterface,
    ShardedEmbeddingBagCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,  # which does not call the collection that it holds
)


def table_names(model: nn.Module) -> list[str]:
    """Names of the tables of a model's EmbeddingBagCollections, which nobody has sharded yet.

    Args:
        model: plain.
    """
    found = [module for module in model.modules() if isinstance(module, EmbeddingBagCollectionInterface)]
    return list(dict.fromkeys(table.name for module in found for table in module.embedding_bag_configs()))


@contextmanager
def pooled_outputs(model: nn.Module) -> Iterator[list[KeyedTensor]]:
    """Collects the outputs of a model's pooled collections in the block. Local, no collective.

    Of nested collections the outermost counts: what the model reads is what a wrapper, as soft selection is one, made
    of its child's output. Sharded collections return awaitables, which the reader of `KeyedTensor.values` waits for.

    The hooks last as long as the block: a pipeline that traces the model in between finds none.

    Args:
        model: sharded or not, prepared or not.

    Yields:
        One KeyedTensor per call of a collection, in the order of the calls.

    Example:
        >>> import torch
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"])
        >>> collection = EmbeddingBagCollection(tables=[table])
        >>> with pooled_outputs(collection) as outputs:
        ...     bags = KeyedJaggedTensor(keys=["f"], values=torch.tensor([3, 0]), lengths=torch.tensor([1, 1]))
        ...     _ = collection(bags)
        >>> [tuple(output.values().shape) for output in outputs]
        [(2, 8)]
    """
    outputs: list[KeyedTensor] = []
    with ExitStack() as stack:
        for collection in _outermost_collections(model):
            hook = collection.register_forward_hook(lambda module, bags, output: outputs.append(output))
            stack.callback(hook.remove)
        yield outputs


def squared_norm(outputs: Sequence[KeyedTensor]) -> Tensor | float:
    """Returns the mean squared norm of a batch's looked-up embeddings: ``1/B sum over b, f of |v_bf|^2``.

    v_bf is the pooled embedding of feature f of sample b. Differentiable; in float32 where embeddings are narrower.

    Args:
        outputs: ``(B, sum of D over the F keys)`` each, as `pooled_outputs` collects them.

    Returns:
        A scalar; 0 of no outputs.
    """
    return sum(output.values().float().square().sum(dim=1).mean() for output in outputs)


def _outermost_collections(model: nn.Module) -> list[nn.Module]:
    """Each once, however often the model holds it."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, _POOLED):
            found[id(module)] = module
        else:
            waiting += module.children()
    return list(found.values())
