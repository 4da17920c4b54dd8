"""Bi-level steps over ranks: on one GPU, and on as many as there are; alpha stays the same on all of them."""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks import step_time
from benchmarks.gpu.figures import Figures
from benchmarks.gpu.step import Run

SHAPE = replace(step_time.SHAPES["criteo"], batch_size=4096)
SMALL = step_time.vary(step_time.SHAPES["criteo"], 3, 50, None, batch_size=64)
ROUNDS, SMALL_ROUNDS = 20, 2
START_METHOD = "spawn"


def run(run: Run) -> None:
    """Each number of ranks in processes of its own."""
    worlds = {1} if run.is_stand_in else {1, torch.cuda.device_count()}
    for world_size in sorted(worlds):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, folder, run.figures, run.is_stand_in)
            torch.multiprocessing.start_processes(on_rank, arguments, world_size, start_method=START_METHOD)


def on_rank(rank: int, world_size: int, folder: str, figures: Figures, is_stand_in: bool) -> None:
    """Takes steps; rank 0 notes their times, and how far alpha is from that of the other ranks.

    Args:
        rank: this one.
        world_size: of all.
        folder: where they meet.
        figures: what rank 0 adds to.
        is_stand_in: on the CPU, in small.

    Raises:
        RuntimeError: if alpha is not the same on all ranks.
    """
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    backend = "gloo" if is_stand_in else "nccl"
    shape, rounds = (SMALL, SMALL_ROUNDS) if is_stand_in else (SHAPE, ROUNDS)
    if not is_stand_in:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        train = step_time.make_batches(shape, 8, seed=2 * rank)
        validation = step_time.make_batches(shape, 4, seed=2 * rank + 1)
        with step_time.process_group() as device:
            plain, bilevel = (kind(shape, train, validation, device) for kind in (step_time.Plain, step_time.Bilevel))
            taken = [step_time.take_turns(plain, bilevel, lambda _: nullcontext()) for _ in range(2 + rounds)][2:]
            apart = largest_difference(bilevel.pipeline.alpha.of(shape.embedding_dim))
    finally:
        dist.destroy_process_group()
    if rank == 0:
        of = {"ranks": world_size, "backend": backend, "batch_of_a_rank": shape.batch_size}
        for name in step_time.STEPS:
            figures.note("step", statistics.median(times[name] for times in taken), "ms", step=name, **of)
        figures.note("alpha, largest difference between ranks", apart, **of)
    if apart:
        raise RuntimeError(f"alpha differs between ranks by {apart}")


def largest_difference(values: torch.Tensor) -> float:
    """How far values are apart on any two ranks."""
    highest, lowest = values.clone(), values.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return float((highest - lowest).max())
