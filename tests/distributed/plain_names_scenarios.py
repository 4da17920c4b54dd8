"""Checkpoints of the plain model for the prepared one and back, sharded: weights, optimizers of tables, the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.selection.on_shards import select_on_shards_
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, shard_model
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.wrapper import plain_state_dict, soft_selection_modules
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import CPU, KINDS, MORE_KINDS, Net, Stream, blocks, plan_as
from tests.distributed.scenarios import tables_of

SHARDED_AS = ("row_wise", "mixed", "column_wise")
"""Shardings that are tried: between them, tables in shards of rows, of columns, whole, and on every rank."""


class Trained:
    """A sharded model after two steps: fused row-wise Adagrad where kernels are fused, Adam for the rest."""

    def __init__(self, kind: str, at: Rank, seed: int, *, is_prepared: bool) -> None:
        torch.manual_seed(seed)
        net = Net()
        for collection in (net.first, net.second):
            for name, bag in collection.embedding_bags.items():
                of_table = (KINDS | MORE_KINDS)[kind][name]
                if of_table != "data_parallel" and "dense" not in of_table:
                    apply_optimizer_in_backward(RowWiseAdagrad, bag.parameters(), {"lr": 0.05})
        task = TrainTask(prepare_(net, blocks()) if is_prepared else net, nn.BCEWithLogitsLoss())
        sharders = [CpuEmbeddingBagCollectionSharder()]
        plan = plan_as(task, kind, at.process_group, CPU, sharders)
        self.model: DistributedModelParallel = shard_model(task, CPU, plan, sharders, process_group=at.process_group)
        select_on_shards_(self.model)
        rest = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adam(parameters, lr=0.05))
        self._batches = Stream("train", 4, (at.rank % 2,)).batches
        self.losses = [self.step(batch) for batch in self._batches[:2]]

    def step(self, batch: Any) -> float:
        """The loss of a step."""
        self.optimizer.zero_grad()
        loss = self.model(batch)[0]
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """What users save."""
        fused, rest = self.model.fused_optimizer.state_dict(), self.optimizer.state_dict()
        return {"model": plain_state_dict(self.model), "fused": fused, "rest": rest}

    def load(self, state: dict[str, Any]) -> None:
        """What users do with what they have read, every name as it is."""
        self.model.load_state_dict(state["model"])
        self.model.fused_optimizer.load_state_dict(state["fused"])
        self.optimizer.load_state_dict(state["rest"])

    def names(self) -> dict[str, list[str]]:
        """Under which names it knows its parts."""
        model, named = self.model, self.model.named_parameters()
        states = {"fused": model.fused_optimizer, "rest": self.optimizer}
        return {
            "state_dict": sorted(plain_state_dict(model)),
            "parameters": sorted(name for name, _ in named),
            "not in DistributedDataParallel": sorted(model._sharded_parameter_names(model)),
        } | {kind: sorted(optimizer.state_dict()["state"]) for kind, optimizer in states.items()}

    def alphas(self) -> list[float]:
        """The smallest and the largest alpha."""
        alpha = next(iter(soft_selection_modules(self.model).values())).alpha
        values = torch.cat([alpha.of(dim).flatten() for dim in alpha.dims])
        return [float(values.min()), float(values.max())]

    def fill_alphas_(self, value: float) -> None:
        """Sets alpha."""
        for wrapper in soft_selection_modules(self.model).values():
            for dim in wrapper.alpha.dims:
                wrapper.alpha.of(dim).fill_(value)

    def goes_on(self) -> Results:
        """Tables, and the losses of two more steps, in which all optimizers' states play a part."""
        tables = {name: table.clone() for name, table in tables_of(self.model).items()}
        return {"tables": tables, "losses": [self.step(batch) for batch in self._batches[2:]]}


def there_and_back(kind: str, at: Rank) -> Results:
    """Plain to prepared and prepared to plain, each by a folder of torch.distributed.checkpoint."""
    plain, prepared, third = (Trained(kind, at, seed, is_prepared=seed == 2) for seed in (1, 2, 3))
    results: Results = {"plain names": plain.names(), "prepared names": prepared.names()}
    results["added"] = sorted(set(prepared.model.state_dict()) - set(plain.model.state_dict()))
    folders = {name: at.folder / f"{kind}_{name}_{at.world_size}" for name in ("plain", "prepared")}
    dcp.save(plain.state(), checkpoint_id=folders["plain"], process_group=at.process_group)
    dcp.save(
        prepared.state() | {"model": prepared.model.state_dict()},  # alpha in it
        checkpoint_id=folders["prepared"],
        process_group=at.process_group,
    )
    results |= {"plain trained": plain.goes_on(), "prepared trained": prepared.goes_on()}
    prepared.fill_alphas_(0.5)
    for name, other, source in (("prepared", prepared, "plain"), ("plain", third, "prepared")):
        state = other.state()
        dcp.load(state, checkpoint_id=folders[source], process_group=at.process_group)
        other.load(state)
        results[f"{name} loaded"] = other.goes_on()
    results["alpha"] = prepared.alphas()
    merged = merge_(prepared.model)
    results["merged names"] = sorted(plain_state_dict(merged))
    dist.barrier(at.process_group)
    return results


def scenarios(kinds: tuple[str, ...]) -> dict[str, Scenario]:
    """One for each of these shardings."""
    return {kind: partial(there_and_back, kind) for kind in kinds}
