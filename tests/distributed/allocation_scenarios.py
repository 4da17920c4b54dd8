"""What ranks do, and report, to make tables small: curvature, bits, axes, pruning, export.

Judged in test_allocation_ranks.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dnis_torchrec import prepare_
from dnis_torchrec.allocation import energies, gains
from dnis_torchrec.allocation.axes import rotate_, with_axes_
from dnis_torchrec.allocation.bits import allocate
from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.allocation.curvature import Curvature, curvature, curvature_of_read_tables
from dnis_torchrec.artifact import export as export_module
from dnis_torchrec.artifact.export import export
from dnis_torchrec.artifact.narrow import narrow_for_training_
from dnis_torchrec.artifact.refresh import delta_
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks import blocking
from dnis_torchrec.blocks import counts as counting
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data import over_ranks
from dnis_torchrec.data.over_ranks import LEARN, RankBatches, blocks_over_ranks
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.prune import Size, prune
from dnis_torchrec.training.checkpoint import StoredTensor, snapshot, take_
from dnis_torchrec.training.weights import fill_state_
from tests.allocation import test_rotation as turning
from tests.allocation.test_curvature import ROWS, Case, make_batch, make_blocks, make_model
from tests.artifact import test_refresh as refreshing
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import (
    DIMS,
    Net,
    described,
    make_half,
    outcome_of,
    shards_of,
    spread,
    tables,
    tables_of,
    to_batch,
)
from tests.distributed.model import ROWS as NET_ROWS

LOSS = nn.BCEWithLogitsLoss()
CASES = {
    "several ids": Case(),
    "mean": Case(pooling=PoolingType.MEAN, unassigned=2),
    "weighted": Case(is_weighted=True),
}
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
PAIRS = [*(("several ids", kind) for kind in KINDS), ("mean", "column_wise"), ("weighted", "row_wise")]
"""Every sharding type, and other cases where bags are cut by rows and by columns."""
COMPRESSED_AS = {"row_wise": ("row_wise",) * 3, "mixed": ("column_wise", "data_parallel", "table_wise")}
"""Sharding type of each table."""
REFRESHED_AS = ("row_wise", "column_wise")
SIZE = 8


def batches(case: Case, num_batches: int = 2) -> list[Batch]:
    return [make_batch(case, seed, SIZE) for seed in range(num_batches)]


def sliced(whole: list[Batch], at: Rank) -> RankBatches:
    return RankBatches(whole, Ranks(at.process_group), "train", LEARN)


def sharded_case(case: Case, kind: str, at: Rank, *, prepared: bool = False) -> nn.Module:
    model = make_model(case)
    kinds = dict(zip(ROWS, COMPRESSED_AS.get(kind, (kind,) * 3), strict=True))
    return spread(prepare_(model, make_blocks(case)) if prepared else model, kinds, at)


def parts_of(result: Curvature) -> Results:
    names = ("gradient", "curvature", "couplings")
    numbers = {"num_samples": result.num_samples, "relative_error": result.relative_error}
    return {name: dict(getattr(result, name)) for name in names} | numbers


def curvature_over(
    name: str, kind: str, at: Rank, *, prepared: bool = False, cut: bool = False, num_samples: int | None = None
) -> Results:
    """Curvature of a sharded model, every rank's batches its slices of all; batches may be cut into samples."""
    case = CASES[name]
    model = sharded_case(case, kind, at, prepared=prepared)
    with patch("dnis_torchrec.allocation.curvature.BYTES_AT_A_TIME", 1) if cut else patch.dict({}):
        result = curvature(model, sliced(batches(case), at), make_blocks(case), loss=LOSS, num_samples=num_samples)
    return parts_of(result)


def curvature_alone(name: str, num_batches: int = 2) -> Results:
    case = CASES[name]
    return parts_of(curvature(make_model(case), batches(case, num_batches), make_blocks(case), loss=LOSS))


def curvature_grows(at: Rank) -> Results:
    """Samples that grow until a table is read that only the second batch of rank 1 reads."""
    case, without = CASES["several ids"], Case(lengths=(1, 0, 0, 3))
    own = [make_batch(case if (at.rank, place) == (1, 1) else without, place, SIZE) for place in range(8)]
    model = sharded_case(case, "table_wise", at)
    result = curvature_of_read_tables(model, own, make_blocks(case), loss=LOSS, num_samples=1)
    return {"num_samples": result.num_samples, "unread": sorted(result.unread)}


CURVATURE: dict[str, Scenario] = {f"{name} {kind}": partial(curvature_over, name, kind) for name, kind in PAIRS}
CURVATURE["prepared"] = partial(curvature_over, "several ids", "row_wise", prepared=True)
CURVATURE["cut"] = partial(curvature_over, "several ids", "row_wise", cut=True)
CURVATURE["enough"] = partial(curvature_over, "several ids", "table_wise", num_samples=SIZE)


def held_out() -> list[Batch]:
    """What teaches scales to grow: the model is right in all, and less sure of it than it could be."""
    case = CASES["several ids"]
    model, own = make_model(case), [make_batch(case, seed, 64) for seed in range(100, 104)]
    for batch in own:
        with torch.no_grad():
            batch.labels = (model(batch.dense_features, batch.sparse_features) > 0).float()
    return own


def in_small_chunks() -> AbstractContextManager:
    """Tables of a few rows that ranks share as they share large ones."""
    with ExitStack() as stack:
        for module in (counting, energies, over_ranks):
            stack.enter_context(patch.object(module, "ROWS_AT_A_TIME", 7))
        return stack.pop_all()


def large_tables() -> dict[str, torch.Tensor]:
    """Counts with ties: in no order, of one chunk, in the order of blocks, and of more blocks than a byte numbers."""
    generator = torch.Generator().manual_seed(17)
    tables = {name: torch.randint(0, 6, (rows,), generator=generator) for name, rows in (("any", 150), ("few", 7))}
    order = torch.randint(0, 9, (99,), generator=generator).sort(descending=True).values
    return tables | {"order": order, "many": torch.randint(0, 500, (700,), generator=generator)}


def shared(group: ProcessGroup | None = None) -> Results:
    """Blocks of tables, samples of their rows and the energies; how many rows and blocks this rank has gone through."""
    ranks, of_rows, results, lengths, fits = Ranks(group), large_tables(), {}, [], []

    def note(chunk: torch.Tensor) -> torch.Tensor:
        lengths.append(len(chunk))
        return chunk

    def noted_tally(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tally(note(numbers))

    def fit(*given: object) -> object:
        fits.append(1)
        return fit_codes(*given)

    chunks, tally, fit_codes = blocking.count_chunks, energies.tally, energies.fit_codes
    with (
        in_small_chunks(),
        patch.object(blocking, "count_chunks", lambda counts: map(note, chunks(counts))),
        patch.multiple(energies, tally=noted_tally, fit_codes=fit),
    ):
        for name, counts in of_rows.items():
            config = EmbeddingBagConfig(name=name, num_embeddings=len(counts), embedding_dim=2, feature_names=[name])
            more = {"num_blocks": 300 if name == "many" else 5, "least_rows": 1, "process_group": group}
            blocks = blocks_over_ranks(FrequencyCounts({name: counts}, {name: 1}, 9), [config], **more)
            routing = blocks.routings[name]
            sample = energies.sample_rows(counts, routing, 8, ranks)
            values = torch.randn(len(sample.rows), 2, generator=torch.Generator().manual_seed(1))
            of_table = energies.table_energies(values, sample, routing.num_blocks, (0, 2, 4), ranks)
            tensors = {key: part.view(torch.uint8) for key, part in routing.to_tensors().items()}
            tensors |= {key: getattr(blocks, key)[name] for key in ("occurrences", "seen_rows")}
            results[name] = tensors | vars(sample) | vars(of_table)
    return {"tables": results, "rows": sum(lengths), "blocks": len(fits)}


def shared_over(at: Rank) -> Results:
    return shared(at.process_group)


def compressed(model: nn.Module, own: Iterable[Batch], others: Iterable[Batch]) -> Results:
    """Two sizes of one measuring, and one with scales that learn, the counts of all rows among what comes back."""
    with in_small_chunks(), patch.object(gains, "SAMPLES_FOR_STRENGTHS", 2):  # a batch of each half
        measured = measure_(model, own, loss=LOSS, num_blocks=3)
        learning = measure_(model, own, loss=LOSS, num_blocks=3, counts=measured.counts, held_out=others)
        allocations = [measured.allocate(compression=1.5), measured.allocate(compression=2.5)]
        allocations.append(learning.allocate(compression=1.5))
    return {
        "counts": {name: counts[:] for name, counts in measured.counts.counts.items()},
        "tensors": [allocation.scheme.to_tensors() for allocation in allocations],
        "bytes": [allocation.num_bytes for allocation in allocations],
        "losses": [allocation.predicted_loss_increase for allocation in allocations],
    }


def compress_over(kind: str, at: Rank) -> Results:
    case = CASES["several ids"]
    return compressed(sharded_case(case, kind, at), sliced(batches(case), at), sliced(held_out(), at))


def compress_alone() -> Results:
    return compressed(make_model(CASES["several ids"]), batches(CASES["several ids"]), held_out())


def refreshed(model: nn.Module, own: Iterable[Batch]) -> Results:
    """A day after an artifact: its state, whole and by a delta."""
    of = refreshing.base()
    counts = refreshing.counted(refreshing.YESTERDAY, refreshing.TODAY)
    result = delta_(model, of.scheme, of.rows, own, loss=LOSS, counts=counts)
    return {"rows": dict(result.rows), "tensors": result.scheme.to_tensors(), "changed": dict(result.num_changed)}


def trained_today() -> nn.Module:
    return refreshing.train_(copy.deepcopy(refreshing.base().model), refreshing.TODAY)


def refresh_over(kind: str, at: Rank) -> Results:
    model = spread(trained_today(), dict.fromkeys(refreshing.ROWS, kind), at)
    return refreshed(model, sliced(refreshing.TODAY, at))


EVERY = {kind: dict.fromkeys(NET_ROWS, kind) for kind in (*KINDS, "table_row_wise", "table_column_wise", "grid_shard")}
EVERY["grid_shard"] |= {"item": "column_wise", "genre": "column_wise"}  # MEAN
EVERY["mixed"] = {"user": "row_wise", "item": "column_wise", "genre": "data_parallel", "tag": "table_wise"}
SIZES = {"ties": Size(compression=3), "spread": Size(embedding_bytes=2000)}
"""Kind of weights -> what tables are pruned to."""
SAMPLED = 9
"""Rows of a block in the sample: fewer than there are."""
FILE_BYTES = 1600
"""Limit at which tables take several files."""
FILES_AS = ("row_wise", "mixed", "grid_shard")
"""Shardings that several files are written from."""


def counts() -> FrequencyCounts:
    """Of all four tables; `user` is in frequency order, and some rows of every table were never seen."""
    generator = torch.Generator().manual_seed(5)
    of_rows = {name: torch.randint(0, 6, (rows,), generator=generator) for name, rows in NET_ROWS.items()}
    of_rows["user"] = of_rows["user"].sort(descending=True).values
    return FrequencyCounts(of_rows, {f"{name}_id": 1 for name in NET_ROWS}, 100)


def blocks() -> RowBlocks:
    """Three over every table."""
    return blocks_from_counts(counts(), tables(), num_blocks=3, least_rows=1)


def net(drawn: str) -> nn.Module:
    """The same weights in every process: a few values with many ties and zeros, or values of very different size."""
    torch.manual_seed(7)
    generator, model = torch.Generator().manual_seed(3), Net()
    for shard in sorted(shards_of(model), key=lambda shard: shard.table):
        shape = shard.weight.shape
        if drawn == "ties":
            weight = torch.randint(-3, 4, shape, generator=generator) / 4
        else:
            weight = torch.randn(shape, generator=generator) * 10 ** (4 * torch.rand(shape, generator=generator) - 2)
        shard.weight.copy_(weight)
    return model


def pruned(model: nn.Module, drawn: str) -> Results:
    scheme = prune(model, blocks(), counts(), size=SIZES[drawn])
    return {"tables": tables_of(model), "scheme": described(scheme)}


def prune_over(kind: str, at: Rank) -> Results:
    return {drawn: pruned(sharded_net(drawn, kind, at), drawn) for drawn in SIZES}


def sharded_net(drawn: str, kind: str, at: Rank) -> nn.Module:
    """`net` over all ranks; never merged, because it was never prepared."""
    return spread(net(drawn), EVERY[kind], at)


def allocated(model: nn.Module, compression: float = 3) -> MixedDimensionScheme:
    """Bits for every column, by samples smaller than these small blocks; tables stay as they are."""
    generator, sample = torch.Generator().manual_seed(11), energies.sample_rows
    shapes = {name: (blocks().routings[name].num_blocks, DIMS[name]) for name in NET_ROWS}
    worth = {name: torch.rand(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    of_columns = Curvature(worth, worth, 100, 0.1)
    few = partial(sample, rows_per_block=SAMPLED)
    with in_small_chunks(), patch.object(energies, "sample_rows", few):
        bits = (0, 2, 3, 4, 8, 32)
        return allocate(model, blocks(), counts(), of_columns, compression=compression, bits=bits).scheme


def exported(model: nn.Module, folder: Path, *, has_files: bool = True) -> None:
    """Artifacts with one file a table, and perhaps with several."""
    export(model, allocated(model), folder / "packed")
    with patch.object(export_module, "write_artifact", partial(write_artifact, max_file_bytes=FILE_BYTES)):
        if has_files:
            export(model, allocated(model, 1.1), folder / "files")


def export_over(kind: str, at: Rank) -> Results:
    at.folder.joinpath(kind).mkdir(exist_ok=True)
    exported(sharded_net("spread", kind, at), at.folder / kind, has_files=kind in FILES_AS)
    return {}


PRUNED: dict[str, Scenario] = {kind: partial(prune_over, kind) for kind in EVERY}
EXPORTED: dict[str, Scenario] = {kind: partial(export_over, kind) for kind in EVERY}


def narrow_steps(kind: str, folder: Path, at: Rank | None = None) -> Results:
    """Steps of narrow tables whose values and sums of squared gradients come from a run."""
    export(net("ties"), allocated(net("ties")), folder, overwrite=True)
    run, generator = net("spread"), torch.Generator().manual_seed(13)
    tensors = {f"table/{shard.table}": shard.weight / 30 for shard in shards_of(run)}
    tensors |= {f"model/over.{name}": value for name, value in run.over.state_dict().items()}
    tensors |= {
        f"optimizer/over.{n}/sum": torch.rand(w.shape, generator=generator) for n, w in run.over.named_parameters()
    }
    kinds = EVERY[kind] if at is not None else {}
    fused = {name for name, of_table in kinds.items() if of_table != "data_parallel"}
    for fqn, collection in (("first", run.first), ("second", run.second)):
        for name, bag in collection.embedding_bags.items():
            key = f"fused/{name}/momentum1" if name in fused else f"optimizer/{fqn}.embedding_bags.{name}.weight/sum"
            tensors[key] = torch.rand(bag.weight.shape, generator=generator)
    stored = {key: StoredTensor.of(key, value) for key, value in tensors.items()}
    model, states = narrow_for_training_(net("ties"), folder, stored)
    blocks = {n: bag for m in (model.first, model.second) for n, bag in m.blocks.embedding_bags.items()}
    table_of = {name: name.split("/")[0] for name in blocks}
    for name, bag in blocks.items():
        if table_of[name] in fused:
            apply_optimizer_in_backward(torch.optim.Adagrad, bag.parameters(), {"lr": 0.05})
    if at is not None:
        model = spread(model, {name: kinds[table] for name, table in table_of.items()}, at)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=0.05))
    values = snapshot(model)
    for step in range(-1, 3):
        halves = (0, 1) if at is None else (at.rank,)
        batch = to_batch([sample for half in halves for sample in make_half("train", step + 1, half)])
        optimizer.zero_grad()
        model(batch.dense_features, batch.sparse_features).square().mean().backward()
        optimizer.step()
        if step < 0:
            take_(model, values)
            fill_state_(model, optimizer, states)
    dense = {name: p.detach().clone() for name, p in model.named_parameters() if "over." in name}
    return {"tables": tables_of(model), "dense": dense}


def narrow_over(kind: str, at: Rank) -> Results:
    return narrow_steps(kind, at.folder / f"{kind} {at.rank}", at)


NARROW: dict[str, Scenario] = {kind: partial(narrow_over, kind) for kind in ("mixed", "table_row_wise")}

TURNED = {
    "dlrm": ("table_wise", "row_wise", "data_parallel", "column_wise", "grid_shard", "mixed"),
    "projection": ("column_wise",),
    "deepfm": ("row_wise",),
}
"""TorchRec's models, turned after training, rows that are cut put together a chunk at a time."""
WEIGHTED = ("row_wise", "grid_shard")
"""What has weighted bags, and with them no MEAN, which TorchRec does not offer under grid_shard."""
MIXED = {"user": "column_wise", "movie": "row_wise", "genre": "table_wise"}


def fuse_(model: nn.Module, kind: str) -> None:
    """Plain SGD for all tables in fused kernels, where a sharding type has them."""
    for module in model.modules() if kind != "data_parallel" else ():
        if isinstance(module, EmbeddingBagCollection):
            apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})


def turned(model: nn.Module, rotations: list[torch.Tensor]) -> Results:
    """The shards, the matrices, and what reads the tables."""
    reads = ("axes", "0._linear.weight")
    values = [*model.named_buffers(), *model.named_parameters()]
    readers = [value.detach().clone() for name, value in values if name.endswith(reads)]
    return {"rotations": rotations, "tables": tables_of(model), "readers": readers}


def turn(name: str, kind: str, at: Rank | None) -> Results:
    """Turns one of TorchRec's models that is sharded already, or as one process does; how far its logits moved."""
    is_weighted = kind in WEIGHTED
    model = turning.build_type(name, is_weighted=is_weighted)
    counts = turning.counts_of(model)
    if at is not None:
        fuse_(model, kind)
        model = spread(model, MIXED if kind == "mixed" else dict.fromkeys(turning.ROWS_OF_TORCHREC, kind), at)
    with torch.no_grad():
        before = turning.logits_of(model, is_weighted=is_weighted)
        rotations = rotate_(with_axes_(model), counts)
        moved = float((turning.logits_of(model, is_weighted=is_weighted) - before).abs().max())
    return turned(model, rotations) | {"moved": moved}


AXES: dict[str, Scenario] = {
    f"{name} {kind}": partial(turn, name, kind) for name, kinds in TURNED.items() for kind in kinds
}


def refusals(at: Rank) -> Results:
    """How ranks end where something is wrong on rank 1 alone, or on all."""
    case, target = CASES["several ids"], at.folder / "refused"
    bad = at.rank == 1

    def measure(what: str) -> None:
        own, model = list(sliced(batches(case), at)), sharded_case(case, "row_wise", at)
        if bad and what == "batches":
            own.pop()
        if bad and what == "labels":
            own[1].labels[-1] = torch.nan
        if bad and what == "predictions":
            model.module.over[3].bias.data.fill_(torch.nan)
        curvature(model, own, make_blocks(case), loss=LOSS)

    def compress_nan() -> None:
        model = sharded_case(case, "row_wise", at)
        if bad:
            shards_of(model)[-1].weight.fill_(torch.nan)
        compressed(model, sliced(batches(case), at), sliced(held_out(), at))

    def fill(model: nn.Module, value: float) -> nn.Module:
        if bad:
            next(shard for shard in shards_of(model) if shard.table == "tag").weight.fill_(value)
        return model

    def model() -> nn.Module:
        return sharded_net("ties", "row_wise", at)

    whole, small = model(), model()
    scheme, of_small = allocated(whole), prune(small, blocks(), counts(), size=SIZES["ties"])
    export(small, of_small, at.folder / "stands")
    tries = {what: partial(measure, what) for what in ("batches", "labels", "predictions")}
    tries |= {
        "compress nan": compress_nan,
        "allocate nan": lambda: allocated(fill(model(), torch.nan)),
        "export nan": lambda: export(fill(model(), torch.nan), scheme, target),
        "export outside": lambda: export(fill(small, 1.0), of_small, target),
        "export again": lambda: export(whole, scheme, at.folder / "stands"),
        "prune infinity": lambda: prune(fill(model(), torch.inf), blocks(), counts(), size=SIZES["ties"]),
        "prune to nothing": lambda: prune(whole, blocks(), counts(), size=Size(embedding_bytes=1)),
    }
    return {name: outcome_of(attempt) for name, attempt in tries.items()}
