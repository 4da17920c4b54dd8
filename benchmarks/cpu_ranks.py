"""Ranks that are processes on this machine's CPU, on machines with GPUs, too."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def hidden_gpus() -> Iterator[None]:
    """Processes that are started meanwhile see no GPU: there are fewer GPUs than ranks, and gloo would not use them."""
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        yield
