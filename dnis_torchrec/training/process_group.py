"""The process group and device of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dnis_torchrec.training.denormals import flushing_denormals


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The process group of a run: torchrun's if there is one, else one of world size 1 on this machine alone.

    Denormals are flushed meanwhile: torch's threads, which a run mostly starts after this, inherit that.

    Yields:
        The device to train on: this rank's GPU if CUDA is available, else the CPU.
    """
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
            if dist.is_torchelastic_launched():
                dist.init_process_group(backend)
            else:  # a file, not a port: several runs on one machine never meet
                dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
            try:
                yield device
            finally:
                dist.destroy_process_group()
