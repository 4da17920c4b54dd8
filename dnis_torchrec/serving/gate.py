"""A gate in front of a model, whose tensors change while nobody is inside."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_GATES = threading.Lock()
_IGNORED = "__jit_ignored_attributes__"


class Gate:
    """The way into a model: no call is inside while its tensors change."""

    # It stands where `nn.Module.compile` puts a compiled call, which graphs, copies and pickles of
    # a module pass over, and scripts once they are told; a hook would be compiled with the module.

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._call = model._compiled_call_impl or model._call_impl
        self._change, self._depth = threading.Condition(), threading.local()
        self._num_inside, self._is_shut = 0, False
        methods = Gate.__call__, nn.Module._wrapped_call_impl, nn.Module._call_impl
        codes = [getattr(method, "__code__", None) for method in (*methods, type(model).forward)]
        self._codes = set(codes)

    @staticmethod
    def of(model: nn.Module) -> Gate:
        """The one of a model, which gets one where it has none."""
        with _GATES:
            if not isinstance(model._compiled_call_impl, Gate):
                names = [*getattr(model, _IGNORED, ()), "_compiled_call_impl"]
                setattr(model, _IGNORED, names)
                model._compiled_call_impl = Gate(model)
            return model._compiled_call_impl

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls the model."""
        with self:
            return self._call(*arguments, **options)

    def __enter__(self) -> None:
        depth = getattr(self._depth, "value", 0)
        if not depth:
            with self._change:
                self._change.wait_for(lambda: not self._is_shut)
                self._num_inside += 1
        self._depth.value = depth + 1

    def __exit__(self, *_: object) -> None:
        self._depth.value -= 1
        if not self._depth.value:
            with self._change:
                self._num_inside -= 1
                self._change.notify_all()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Waits until nobody is inside, and lets nobody in while the block runs."""
        try:
            with self._change:
                self._is_shut = True
                self._change.wait_for(lambda: not self._num_inside)
            while self._has_early_calls():
                time.sleep(1e-4)
            yield
        finally:
            with self._change:
                self._is_shut = False
                self._change.notify_all()

    def _has_early_calls(self) -> bool:
        """Whether a thread is in a call of the model that began before the gate was there."""
        for thread, innermost in sys._current_frames().items():
            if thread == threading.get_ident():
                continue
            calls = [
                frame.f_locals.get(frame.f_code.co_varnames[0])
                for frame, _ in traceback.walk_stack(innermost)
                if frame.f_code in self._codes
            ]
            is_inside = any(call is self for call in calls)
            if not is_inside and any(call is self._model for call in calls):
                return True
        return False
