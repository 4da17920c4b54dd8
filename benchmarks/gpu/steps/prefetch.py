"""Tables in host memory behind a cache on the GPU: pairs of steps with the next batch's rows fetched ahead or not.

As a stand-in, where there is no such cache, the same models with fused kernels alone.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, ShardingType

from benchmarks import step_time
from benchmarks.gpu.step import Run
from benchmarks.gpu.timing import PeakMemory, seconds_of
from dnis_torchrec import BilevelStream, BilevelTrainPipeline, LevelSchedule, TrainTask, blocks_from_counts, prepare_
from dnis_torchrec.blocks.counts import count_over_ranks
from dnis_torchrec.data.batches import BatchParts
from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training.shard import FUSED_OPTIMIZERS, rest_optimizer

SHAPE = replace(step_time.vary(step_time.SHAPES["criteo"], None, 400_000, None), batch_size=4096)
SMALL = step_time.vary(step_time.SHAPES["criteo"], 2, 50, None, batch_size=64)
LOAD_FACTOR = 0.2
"""Rows that the cache holds, of those of the table."""
PAIRS, SMALL_PAIRS = 20, 2
RATE = 1e-3


def run(run: Run) -> None:
    """Notes a pair's time on the GPU's own memory, behind a cache, and behind one that is filled ahead."""
    shape = SMALL if run.is_stand_in else SHAPE
    kernel = EmbeddingComputeKernel.FUSED if run.is_stand_in else EmbeddingComputeKernel.FUSED_UVM_CACHING
    places = {
        "GPU": (EmbeddingComputeKernel.FUSED, None),
        "cache": (kernel, CacheParams(load_factor=LOAD_FACTOR)),
        "cache, filled ahead": (kernel, CacheParams(load_factor=LOAD_FACTOR, prefetch_pipeline=True)),
    }
    for place, (own_kernel, cache) in places.items():
        of = {"tables_on": place, "batch": shape.batch_size}
        with step_time.process_group() as device, PeakMemory(device) as memory:
            pipeline, stream = make(shape, device, own_kernel, None if run.is_stand_in else cache)

            def pair(pipeline: BilevelTrainPipeline = pipeline, stream: BilevelStream = stream) -> None:
                pipeline.progress(stream)
                pipeline.progress(stream)

            for _ in range(3):
                pair()
            times = [seconds_of(pair, device) for _ in range(SMALL_PAIRS if run.is_stand_in else PAIRS)]
            del pipeline, pair
        run.figures.note("pair", 1e3 * statistics.median(times), "ms", **of)
        if memory.num_bytes is not None:
            run.figures.note("peak memory", memory.num_bytes / 1e9, "GB", **of)


def make(
    shape: step_time.Shape, device: torch.device, kernel: EmbeddingComputeKernel, cache: CacheParams | None
) -> tuple[BilevelTrainPipeline, BilevelStream]:
    """The pipeline of a prepared model whose tables are in one kind of kernel, one warm-up step on, and its stream.

    Args:
        shape: of the model.
        device: where it is.
        kernel: of all tables.
        cache: settings of the cache.
    """
    train, validation = step_time.make_batches(shape, 8, seed=0), step_time.make_batches(shape, 4, seed=1)
    recipe = step_time.make_recipe(shape, train, validation)
    tables = table_configs(recipe.model)
    counts = count_over_ranks((batch.sparse_features for batch in train[:2]), tables)
    task = TrainTask(
        prepare_(recipe.model, blocks_from_counts(counts, tables, num_blocks=shape.num_blocks)), recipe.loss
    )
    sharders = default_sharders({"optimizer": FUSED_OPTIMIZERS[shape.table_optimizer], "learning_rate": RATE})
    constraint = ParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=[kernel.value], cache_params=cache
    )
    constraints = {table.name: constraint for table in tables}
    plan = make_sharding_plan(task, device, sharders, constraints=constraints)
    model = shard_model(task, device, plan, sharders)
    pipeline = BilevelTrainPipeline(model.train(), rest_optimizer(model, recipe), device)
    stream = BilevelStream(train, BatchParts(validation, shape.upper_batch_parts), LevelSchedule(warm_up_steps=1))
    pipeline.progress(stream)
    return pipeline, stream
