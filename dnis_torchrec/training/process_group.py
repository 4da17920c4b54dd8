"""The process group and device of a run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from dnis_torchrec.ranks import Ranks
from dnis_torchrec.training.denormals import flushing_denormals

LONGEST_WAIT = timedelta(days=30)
"""For which ranks that train nothing wait for each other: one of them may measure or train
something alone."""


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The process group of a run: a launcher's if there is one, else one of world size 1 on this
    machine alone."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(torch.distributed.get_node_local_rank(fallback_rank=0)))
        torch.cuda.set_device(device)
    with flushing_denormals():
        if dist.is_initialized():
            yield device
            return
        backend = "nccl" if device.type == "cuda" else "gloo"
        with tempfile.TemporaryDirectory() as folder:
            if _is_launched():
                dist.init_process_group(backend)
            else:  # a file, not a port: several runs on one machine never meet
                dist.init_process_group(
                    backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1
                )
            try:
                yield device
            finally:
                dist.destroy_process_group()


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """The ranks that a launcher such as torchrun has started, on CPUs, for work that trains
    nothing."""
    if dist.is_initialized() or not _is_launched():
        yield Ranks.everyone()
        return
    dist.init_process_group("gloo", timeout=LONGEST_WAIT)
    try:
        yield Ranks.everyone()
    finally:
        dist.destroy_process_group()


def _is_launched() -> bool:
    """Returns whether this process is a rank of several, or one that torchrun started alone."""
    return dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) > 1
