"""Warning, before training, of a model that ends in a sigmoid, which a loss of logits applies once
more."""

from __future__ import annotations

import copy
import logging

import torch
from torch import nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.lookup_batches import for_lookup

logger = logging.getLogger(__name__)

_PASSING = frozenset(
    {
        *(
            "View",
            "UnsafeView",
            "Reshape",
            "ReshapeAlias",
            "Squeeze",
            "Unsqueeze",
            "Select",
            "Slice",
            "Expand",
            "Alias",
        ),
        *("Transpose", "T", "Permute", "Clone", "ToCopy", "Clamp", "ClampMin", "ClampMax"),
    }
)
"""Operations, by the name of their gradient, behind which probabilities still are probabilities."""
_JOINING = ("Cat", "Stack")
"""The same, where it is so of all that they join."""
_SIGMOIDS = ("Sigmoid", "Hardsigmoid")


def warn_of_sigmoid(model: nn.Module, loss: nn.Module, batch: Batch) -> None:
    """Warns of a model that ends in a sigmoid under BCEWithLogitsLoss, which takes logits."""
    if isinstance(loss, nn.BCEWithLogitsLoss) and ends_in_sigmoid(model, batch):
        logger.warning(
            "the model ends in a sigmoid, and BCEWithLogitsLoss applies another: its predictions all lie between 0.5 "
            "and 0.73; leave the model's own out"
        )


def ends_in_sigmoid(model: nn.Module, batch: Batch) -> bool:
    """Returns whether what a model returns comes out of a sigmoid, as autograd has noted it."""
    modes = [(module, module.training) for module in model.modules()]
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    batch = for_lookup(batch).to(device)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            # A KeyedJaggedTensor keeps what it has once been split into; the batch itself is left
            # as it was.
            features = copy.copy(batch.sparse_features)
            predictions = model.eval()(
                dense_features=batch.dense_features, sparse_features=features
            )
    except Exception:  # whatever it is: training says it in its own place
        return False
    finally:
        for module, mode in modes:
            module.training = mode
    return _is_probability(getattr(predictions, "grad_fn", None))


def _is_probability(node: torch.autograd.graph.Node | None) -> bool:
    while node is not None and _kind(node) in _PASSING and node.next_functions:
        node = node.next_functions[0][0]
    if node is None or _kind(node) not in _JOINING:
        return node is not None and _kind(node) in _SIGMOIDS
    return all(_is_probability(part) for part, _ in node.next_functions)


def _kind(node: torch.autograd.graph.Node) -> str:
    """``"Sigmoid"`` of ``SigmoidBackward0``."""
    return node.name().partition("Backward")[0]
