"""Names of the plain model for a model with wrappers: state_dict, parameters and optimizers know no
wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.distributed.utils import append_prefix
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from dnis_torchrec.selection.alpha import Alpha

SOFT_SELECTION = "selection"
"""The name under which a wrapper holds all that the plain model lacks."""


class PlainNames(FusedOptimizerModule, nn.Module):
    """Base of a wrapper whose child stands under the wrapper's own name."""

    child_name: ClassVar[str]
    _FORCE_STATE_DICT_LOAD = True  # DistributedModelParallel then loads wrapper and child as one
    soft_selection: Alpha

    def __init__(self) -> None:
        super().__init__()
        self._prefix = ""
        self.register_state_dict_post_hook(_shorten)
        self.register_load_state_dict_pre_hook(_lengthen)
        self.register_load_state_dict_post_hook(_shorten_differences)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; whoever replaces children by `named_children` sets the child under no
        name."""
        super().__setattr__(name or self.child_name, value)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizers fused into the child's tables, by their names in the child."""
        return CombinedOptimizer(list(_fused_in(getattr(self, self.child_name), "")))

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules in it; a sharded child has no name: DistributedModelParallel joins names by
        this."""
        for name, child in super().named_children():
            yield (
                "" if name == self.child_name and isinstance(child, ShardedModule) else name,
                child,
            )

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """All modules: the child under the wrapper's own name, after it."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                own = prefix if name == self.child_name else append_prefix(prefix, name)
                yield from module.named_modules(memo, own, remove_duplicate)


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state_dict without what soft selection adds: names, and live values, as the plain model
    has them.

    What ``torch.distributed.checkpoint.load`` fills from a checkpoint of the plain model, and what
    to save for one.

    Args:
        model: prepared, sharded or not; of another it is the state_dict.

    Example:
        >>> plain_state_dict(nn.Linear(1, 1)).keys()
        odict_keys(['weight', 'bias'])
    """
    state = model.state_dict()
    for name in [name for name in state if f".{SOFT_SELECTION}." in f".{name}"]:
        del state[name]
    return state


def _fused_in(module: nn.Module, name: str) -> Iterator[tuple[str, KeyedOptimizer]]:
    """Yields the fused optimizers of a module, found as DistributedModelParallel finds them."""
    if isinstance(module, FusedOptimizerModule):
        yield name, module.fused_optimizer
        return
    for own, child in module.named_children():
        yield from _fused_in(child, append_prefix(name, own))


def _shorten(wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Takes the child's name out of what the wrapper has just written."""
    own = f"{prefix}{cast(PlainNames, wrapper).child_name}."
    for name in [name for name in state if name.startswith(own)]:
        state[prefix + name.removeprefix(own)] = state.pop(name)


def _lengthen(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Says where the child is, and that alpha is 1 where a state of its tables has none."""
    wrapper = cast(PlainNames, wrapper)
    wrapper._prefix, added = prefix, f"{prefix}{SOFT_SELECTION}."
    of_child = [name for name in state if name.startswith(prefix) and not name.startswith(added)]
    for name in of_child:
        state[f"{prefix}{wrapper.child_name}.{name.removeprefix(prefix)}"] = state.pop(name)
    if of_child and not any(name.startswith(added) for name in state):
        ones = {
            name: torch.ones_like(alpha)
            for name, alpha in wrapper.soft_selection.state_dict().items()
        }
        state.update({added + name: value for name, value in ones.items()})


def _shorten_differences(wrapper: nn.Module, differences: Any) -> None:
    wrapper = cast(PlainNames, wrapper)
    own = f"{wrapper._prefix}{wrapper.child_name}."
    for names in differences:
        names[:] = [
            name.replace(own, wrapper._prefix, 1) if name.startswith(own) else name
            for name in names
        ]
