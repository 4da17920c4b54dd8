"""Position weights on several ranks: learnt by TorchRec's own sharded module, by a search, and by us without one."""

from __future__ import annotations

from functools import partial

from dnis_torchrec.selection.swap import merge_
from tests.distributed.harness import Rank, Results, Scenario
from tests.models import Net, Trained, prepared, weights_of

SHARDED_AS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def learnt(sharding_type: str, at: Rank) -> Results:
    """The weights of all places, and the losses, after a few steps of each."""
    torchrecs = Trained(Net(), sharding_type, by_torchrec=True, rank=at.rank)
    searched, plain = (Trained(net, sharding_type, rank=at.rank) for net in (prepared(Net()), Net()))
    results: Results = {
        "torchrec": {"losses": torchrecs.by_itself()},
        "searched": {"losses": searched.searched(with_upper_steps=False)},
        "plain": {"losses": plain.by_itself()},
    }
    for name, trained in (("torchrec", torchrecs), ("searched", searched), ("plain", plain)):
        results[name]["places"] = {own: weight.detach().clone() for own, weight in weights_of(trained.model).items()}
    merge_(searched.model)
    results["merged"] = {own: weight.detach().clone() for own, weight in weights_of(searched.model).items()}
    return results


def scenarios() -> dict[str, Scenario]:
    """One for every kind of sharding."""
    return {kind: partial(learnt, kind) for kind in SHARDED_AS}
