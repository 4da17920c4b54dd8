"""Outputs of a model's embedding collections, recorded during a forward pass, and the L2 penalty on
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias, cast

from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

SEQUENCES = (EmbeddingCollectionInterface, ShardedEmbeddingCollection)
"""Collections that pool nothing."""


@dataclass(frozen=True, eq=False)
class UnpooledOutput:
    """The output of an EmbeddingCollection."""

    by_key: Mapping[str, JaggedTensor]
    keys: Sequence[str]


Output: TypeAlias = KeyedTensor | UnpooledOutput

_COLLECTIONS = (
    EmbeddingBagCollectionInterface,
    ShardedEmbeddingBagCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,  # which does not call the collection that it holds
    *SEQUENCES,
)


def table_names(model: nn.Module) -> list[str]:
    """Names of the tables of a model's collections, pooled or not, which nobody has sharded yet."""
    names: list[str] = []
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollectionInterface):
            names += [table.name for table in module.embedding_bag_configs()]
        elif isinstance(module, EmbeddingCollectionInterface):
            names += [table.name for table in module.embedding_configs()]
    return list(dict.fromkeys(names))


@contextmanager
def pooled_outputs(model: nn.Module) -> Iterator[list[Output]]:
    """Collects the outputs of a model's collections in the block. Local, no collective."""
    outputs: list[Output] = []

    def note(
        module: nn.Module, bags: object, output: KeyedTensor | Mapping[str, JaggedTensor]
    ) -> None:
        outputs.append(
            UnpooledOutput(output, _keys_of(module)) if isinstance(module, SEQUENCES) else output
        )

    with ExitStack() as stack:
        for collection in _outermost_collections(model):
            hook = collection.register_forward_hook(note)
            stack.callback(hook.remove)
        yield outputs


def squared_norm(outputs: Sequence[Output]) -> Tensor | float:
    """Returns the mean squared norm of a batch's looked-up embeddings: ``1/B sum over b, f of
    |v_bf|^2``."""
    return sum((_squared_norm(output) for output in outputs), 0.0)


def _squared_norm(output: Output) -> Tensor | float:
    if isinstance(output, UnpooledOutput):
        own = [output.by_key[key] for key in output.keys]
        return sum(
            jagged.values().float().square().sum() / jagged.lengths().numel() for jagged in own
        )
    return output.values().float().square().sum(dim=1).mean()


def _keys_of(collection: nn.Module) -> list[str]:
    """The output keys of an EmbeddingCollection, sharded or not."""
    if isinstance(collection, ShardedEmbeddingCollection):
        names = get_embedding_names_by_table(collection._embedding_configs)
    else:
        names = cast(EmbeddingCollectionInterface, collection).embedding_names_by_table()
    return [name for of_table in names for name in of_table]


def _outermost_collections(model: nn.Module) -> list[nn.Module]:
    """Each once, however often the model holds it."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, _COLLECTIONS):
            found[id(module)] = module
        else:
            waiting += module.children()
    return list(found.values())
