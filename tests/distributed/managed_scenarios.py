"""Prepared models with managed collisions on several ranks: the search that one process would make."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dnis_torchrec.allocation.bits import Allocation
from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.torchrec_inputs import remapped
from tests import models
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import CPU
from tests.distributed.scenarios import alpha_of, run_steps, tables_of
from tests.distributed.sharding_scenarios import ALPHA_LEARNING_RATE, steps_unsharded

STEPS, SIZE, RATE = 10, 16, 0.01
TABLES = [models.USERS, models.ITEMS]
MODELS: dict[str, type[models.Model]] = {"bags": models.Model, "sequences": models.SequenceModel}
SHARDED_AS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def task(model_of: str) -> TrainTask:
    """A prepared model whose remapping has learnt ids before."""
    model = models.trained(models.zch, MODELS[model_of])
    counts = count_frequencies([remapped(model, own.sparse_features) for own in models.BATCHES], TABLES)
    prepare_(model, blocks_from_counts(counts, TABLES, num_blocks=4))
    return TrainTask(model, nn.MSELoss())


def stream(ranks: tuple[int, ...]) -> BilevelStream[Batch]:
    """Samples of some ranks, with ids that have no row among them."""
    joined = [models.joined([models.batch(10 * step + rank, SIZE, ids=40) for rank in ranks]) for step in range(6)]
    return BilevelStream(joined[:4], joined[4:], LevelSchedule(warm_up_steps=2))


def searched(model_of: str, kind: str, at: Rank) -> Results:
    """Steps of both levels on this rank's samples; ranks but the first come with another remapping."""
    whole = task(model_of).train()
    states = {name: value.clone() for name, value in _remapping(whole).state_dict().items()}
    if at.rank:
        for value in _remapping(whole).state_dict().values():
            value.zero_()
    constraint = ParameterConstraints(sharding_types=[kind], min_partition=4)
    sharders = default_sharders()
    plan = make_sharding_plan(
        whole, CPU, sharders, constraints=dict.fromkeys(("user", "item"), constraint), process_group=at.process_group
    )
    for own in plan.plan.values():
        for sharding in own.values():
            sharding.compute_kernel = "dense"
    model = shard_model(whole, CPU, plan, sharders, process_group=at.process_group).train()
    optimizer = KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda parameters: torch.optim.SGD(parameters, lr=RATE)
    )
    pipeline = BilevelTrainPipeline(model, optimizer, CPU)
    pipeline.alpha_optimizer.learning_rate = ALPHA_LEARNING_RATE
    found = run_steps(pipeline, stream((at.rank,)), STEPS)
    results = {"losses": found["losses"], "levels": found["levels"]}
    results |= {"alpha": alpha_of(pipeline), "tables": tables_of(model)}
    pipeline.detach()
    after = _remapping(get_unwrapped_module(model)).state_dict()
    assert after.keys() == states.keys()
    results["moved"] = [name for name, value in after.items() if not torch.equal(value, states[name])]
    probe = models.batch(99, SIZE)
    with torch.no_grad():
        results["before"] = model.eval()(probe)[1][1]
        results["merged"] = merge_(model)(probe)[1][1]
    samples = [models.batch(10 * step + at.rank, SIZE) for step in range(4)]
    found = measure_(get_unwrapped_module(model).model, samples, loss=nn.MSELoss()).allocate(compression=4)
    return results | {"compression": found.compression, "bits": bits_of(found)}


def bits_of(found: Allocation) -> dict[str, torch.Tensor]:
    """Table -> bits of its columns."""
    return {name: table.codes.bits for name, table in found.scheme.tables.items()}


def _remapping(whole: nn.Module) -> nn.Module:
    return whole.model.tables._managed_collision_collection


def unsharded(model_of: str) -> Results:
    """The same steps on one process, with the samples of both ranks."""
    whole = task(model_of).train()
    results = steps_unsharded(whole, stream((0, 1)), STEPS, RATE)
    merged = merge_(whole.model).eval()
    samples = [models.joined([models.batch(10 * step + rank, SIZE) for rank in (0, 1)]) for step in range(4)]
    return results | {"bits": bits_of(measure_(merged, samples, loss=nn.MSELoss()).allocate(compression=4))}


def scenarios() -> dict[str, Scenario]:
    """One for every kind of sharding, and of collection."""
    kinds = [("bags", kind) for kind in SHARDED_AS] + [("sequences", kind) for kind in SHARDED_AS[:2]]
    return {f"{model_of} {kind}": partial(searched, model_of, kind) for model_of, kind in kinds}
