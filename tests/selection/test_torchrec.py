"""Sharded collections read the features of every batch by name, and weights as the unsharded collection does."""

import ast
import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec import selection
from dnis_torchrec.allocation.curvature import curvature
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.selection.on_shards import select_on_shards_
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import unshard_
from dnis_torchrec.selection.torchrec import read_by_name_
from dnis_torchrec.selection.wrapper import plain_state_dict
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.shard import set_learning_rates_, shard
from tests.models import CPU, SIZE, Net, Trained, alpha_of, blocks_of, operators, prepared, weights_of
from tests.models import POSITION_BATCHES as BATCHES
from tests.models import POSITION_DIM as DIM
from tests.models import POSITION_FEATURES as FEATURES
from tests.models import POSITION_ROWS as ROWS
from tests.models import position_blocks as blocks
from tests.selection.shard_cases import SHARDERS, plan_by, shard_by

NUM_ROWS, BATCH = 20, 6
KEYS = ("a", "b", "c")
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
ORDERS = [
    *itertools.permutations(KEYS),
    *(order for order in itertools.permutations(("a", "x", "b", "c")) if order.index("a") > 0),
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def tables() -> list[EmbeddingBagConfig]:
    """One table reads two features, and one feature is read by two tables."""
    read = {"one": ["a", "b"], "two": ["c"], "three": ["a"]}
    return [
        EmbeddingBagConfig(name=n, num_embeddings=NUM_ROWS, embedding_dim=8, feature_names=f) for n, f in read.items()
    ]


def bags(keys: tuple[str, ...] = KEYS, *, longest: int = 1, weighted: bool = False) -> KeyedJaggedTensor:
    """A batch; the bags of a key are the same whatever the others."""
    values, lengths = [], []
    for key in keys:
        generator = torch.Generator().manual_seed(ord(key))
        length = torch.randint(0, longest + 1, (BATCH,), generator=generator)
        lengths.append(length)
        values.append(torch.randint(0, NUM_ROWS, (int(length.sum()),), generator=generator))
    ids = torch.cat(values)
    weights = 2 + ids.float() if weighted else None
    return KeyedJaggedTensor(keys=list(keys), values=ids, lengths=torch.cat(lengths), weights=weights)


def prepared_by_name(model: nn.Module, longest: int) -> nn.Module:
    counts = dnis.count_frequencies([bags(longest=longest)], tables())
    return dnis.prepare_(model, dnis.blocks_from_counts(counts, tables(), num_blocks=3, least_rows=1))


def collection(*, weighted: bool = False) -> nn.ModuleDict:
    return nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables(), is_weighted=weighted)})


@pytest.mark.parametrize(("searched", "longest"), [(False, 1), (True, 3)])
@every_kind
def test_any_order_and_other_keys_give_what_the_unsharded_collection_does(
    gloo: dist.ProcessGroup, kind: str, longest: int, searched: bool
) -> None:
    """Whatever keys the first batch has."""
    model = collection()
    expected = model["ebc"](bags(longest=longest)).to_dict()
    model = shard_by(prepared_by_name(model, longest) if searched else model, kind)
    for order in (KEYS if longest == 1 else ("x", "c", "b", "a"), *ORDERS):
        pooled = get_unwrapped_module(model)["ebc"](bags(order, longest=longest)).to_dict()
        assert pooled.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(pooled[name], value, atol=1e-6, rtol=0, msg=f"{name} of {order}")


def test_a_tensor_dict_is_read_by_name(gloo: dist.ProcessGroup) -> None:
    model = collection()
    expected = model["ebc"](bags()).to_dict()
    read = get_unwrapped_module(shard_by(model, "table_wise"))["ebc"]
    for order in (KEYS, ("c", "a", "b")):
        by_key = {
            key: torch.nested.nested_tensor_from_jagged(jagged.values(), jagged.offsets().long())
            for key, jagged in bags(order).to_dict().items()
        }
        pooled = read(TensorDict(by_key, batch_size=[BATCH])).to_dict()
        torch.testing.assert_close(pooled, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("was_called", [False, True])
def test_sequence_embeddings_are_read_by_name_and_keep_their_weights(gloo: dist.ProcessGroup, was_called: bool) -> None:
    configs = [EmbeddingConfig(name=n, num_embeddings=NUM_ROWS, embedding_dim=8, feature_names=[n]) for n in ("a", "b")]
    model = nn.ModuleDict({"ec": EmbeddingCollection(tables=configs)})
    expected = {name: jagged.values() for name, jagged in model["ec"](bags()).items()}
    read = get_unwrapped_module(dnis.shard_model(model, CPU, dnis.make_sharding_plan(model, CPU, SHARDERS), SHARDERS))[
        "ec"
    ]
    if was_called:
        del vars(read)["input_dist"]
        read(bags(("x", "b", "a")))
        read_by_name_(read)
    for order in (KEYS, ("b", "x", "a"), ("x", "a", "b")):
        result = {name: jagged.values() for name, jagged in read(bags(order)).items()}
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("longest", [1, 3])
@every_kind
def test_an_unweighted_collection_ignores_weights_in_a_search_and_in_training(gloo, kind: str, longest: int) -> None:
    features = bags(longest=longest, weighted=True)
    model = collection()
    expected = model["ebc"](features).values()
    trained = shard_by(copy.deepcopy(model), kind)
    read_by_name_(trained)  # as training.shard does
    for ready in (trained, shard_by(prepared_by_name(model, longest), kind)):
        pooled = get_unwrapped_module(ready)["ebc"](features).to_dict()
        torch.testing.assert_close(torch.cat(list(pooled.values()), 1), expected, atol=1e-6, rtol=0)
    assert features.weights_or_none() is not None


@pytest.mark.parametrize(
    ("weighted", "searched", "features", "place"),
    [
        (False, False, bags(("a", "c")), "feature 'b'"),
        (False, False, bags(weighted=True), r".*\['one', 'two', 'three'\]"),  # of one that is not prepared
        (True, False, bags(), ".*per-sample weights"),
        (True, True, bags(), ".*per-sample weights"),
    ],
)
def test_bags_that_do_not_fit_are_refused_whatever_came_before(
    gloo: dist.ProcessGroup, weighted: bool, searched: bool, features: KeyedJaggedTensor, place: str
) -> None:
    model = collection(weighted=weighted)
    ebc = get_unwrapped_module(shard_by(prepared_by_name(model, 1) if searched else model, "table_wise"))["ebc"]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{place}"):
            ebc(features)
        ebc(bags(weighted=weighted))


@pytest.mark.parametrize(("kind", "order"), [("row_wise", KEYS), ("table_wise", KEYS), ("data_parallel", "cab")])
def test_weights_that_learn_are_refused_where_torchrec_drops_their_gradient(gloo, kind: str, order: str) -> None:
    """Also in table_wise sharding, because a feature that two tables read is copied."""
    ebc = get_unwrapped_module(shard_by(collection(weighted=True), kind))["ebc"]
    features = bags(tuple(order), weighted=True)
    ebc(features)
    features.weights().requires_grad_()
    with pytest.raises(NotImplementedError, match="supported are per-sample weights that learn on one rank"):
        ebc(features)
    with torch.no_grad():
        ebc(features)


@every_kind
@pytest.mark.parametrize("decided", [True, False])
def test_a_collection_that_was_called_before_reads_by_name_from_then_on(gloo, kind: str, decided: bool) -> None:
    """A user's own DistributedModelParallel has noted the places of its first batch by then."""
    model = collection()
    expected = model["ebc"](bags()).to_dict()
    model = shard_by(model, kind)
    ebc = get_unwrapped_module(model)["ebc"]
    del vars(ebc)["input_dist"]
    ebc(bags(("x", *KEYS)))
    read_by_name_(model, refuse_weights=False if decided else None)
    for order in (("c", "b", "a"), KEYS):
        torch.testing.assert_close(ebc(bags(order)).to_dict(), expected, atol=1e-6, rtol=0)
    if not decided:  # its kernels may have learnt by weights
        with pytest.raises(ValueError, match="expected bags without per-sample weights"):
            ebc(bags(weighted=True))


@pytest.mark.parametrize("order", [KEYS, ("x", "c", "a", "b")])
def test_a_batch_size_per_feature_is_read_by_name_too(gloo: dist.ProcessGroup, order: tuple[str, ...]) -> None:
    """As TorchRec's sharded collections read it."""
    model = collection()
    weights = {name: bag.weight.detach().clone() for name, bag in model["ebc"].embedding_bags.items()}
    ebc = get_unwrapped_module(shard_by(model, "table_wise"))["ebc"]
    sample_of = {key: torch.tensor([ord(key) % 2, 1, 1, 0]) for key in order}
    ids = {key: torch.tensor([ord(key) % NUM_ROWS, 3]) for key in order}
    features = KeyedJaggedTensor(
        keys=list(order),
        values=torch.cat(list(ids.values())),
        lengths=torch.ones(2 * len(order), dtype=torch.int64),
        stride_per_key_per_rank=[[2]] * len(order),
        inverse_indices=(list(order), torch.stack(list(sample_of.values()))),
    )
    pooled = ebc(features).to_dict()
    for table in tables():
        for key in table.feature_names:
            name = key if key in pooled else f"{key}@{table.name}"
            torch.testing.assert_close(pooled[name], weights[table.name][ids[key][sample_of[key]]])


def test_a_prepared_model_that_was_called_is_searched_all_the_same(gloo: dist.ProcessGroup) -> None:
    """Called alone it reads a key for every block; selected on the shards, whole bags."""
    model = shard_by(prepared_by_name(collection(), 3), "table_wise")
    ebc = get_unwrapped_module(model)["ebc"]
    features = bags(longest=3)
    expected = ebc(features).values()
    select_on_shards_(model)
    torch.testing.assert_close(ebc(features).values(), expected, atol=1e-6, rtol=0)


FROZEN, LEARNING = "kept", "learnt"
TWO_TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=12, embedding_dim=8, feature_names=[f"f_{name}"])
    for name in (FROZEN, LEARNING)
]


class FrozenNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables=TWO_TABLES)
        self.ebc.embedding_bags[FROZEN].weight.requires_grad_(False)
        self.over = nn.Linear(16, 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(sparse_features).values())


def make_batches(num_batches: int, *, longest: int = 1) -> list[Batch]:
    batches = []
    for seed in range(num_batches):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, longest + 1, (16,), generator=generator)
        ids = torch.randint(0, 12, (int(lengths.sum()),), generator=generator)
        kjt = KeyedJaggedTensor(keys=[f"f_{table.name}" for table in TWO_TABLES], values=ids, lengths=lengths)
        batches.append(Batch(torch.zeros(8, 1), kjt, torch.randint(0, 2, (8,), generator=generator).float()))
    return batches


def table_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = {name: torch.full((12, 8), torch.nan) for name in (FROZEN, LEARNING)}
    for module in collections(model).values():
        for part in local_shards(module):
            whole[part.table][part.window] = part.weight
    return whole


def sharded_net(task: nn.Module, kind: str, kernel: str) -> DistributedModelParallel:
    decay = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5, "weight_decay": 0.1}
    sharders = [dnis.CpuEmbeddingBagCollectionSharder(fused_params=decay)]
    plan = plan_by(task, kind, sharders)
    for planned in plan.plan.values():
        for sharding in planned.values():
            sharding.compute_kernel = kernel
    return dnis.shard_model(task, CPU, plan, sharders)


def adam_with_decay(model: nn.Module) -> KeyedOptimizerWrapper:
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(rest, lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.1))


def prepared_net(net: FrozenNet, batches: list[Batch]) -> FrozenNet:
    return dnis.prepare_(net, blocks_of(net, batches, num_blocks=3))


def warm_up(model: nn.Module) -> WarmupOptimizer:
    """A schedule of the learning rates of all tables."""
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1)]
    return WarmupOptimizer(model.fused_optimizer, stages, lr=0.2)


KERNELS = [(kind, "fused", adam_with_decay) for kind in ("table_wise", "row_wise", "column_wise")]
KERNELS += [(kind, "dense", adam_with_decay) for kind in ("data_parallel", "table_wise", "row_wise")]
KERNELS += [("row_wise", "fused", warm_up)]


def assert_one_learnt(after: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    assert torch.equal(after[FROZEN], before[FROZEN])
    assert not torch.equal(after[LEARNING], before[LEARNING])


@pytest.mark.parametrize(("searched", "longest"), [(False, 3), (True, 1), (True, 3)])
@pytest.mark.parametrize(("kind", "kernel", "make_optimizer"), KERNELS)
def test_a_frozen_table_keeps_its_bits_and_stays_frozen(
    gloo: dist.ProcessGroup, kind: str, kernel: str, make_optimizer: Callable, searched: bool, longest: int
) -> None:
    """Under weight decay, too, inside the backward pass and outside of it, and under a schedule of all rates."""
    batches, net = make_batches(6, longest=longest), FrozenNet()
    before = table_weights(copy.deepcopy(net))
    task = dnis.TrainTask(prepared_net(net, batches) if searched else net, nn.BCEWithLogitsLoss())
    model = sharded_net(task, kind, kernel)
    optimizer = make_optimizer(model)
    if searched:
        pipeline = dnis.BilevelTrainPipeline(model, optimizer, CPU)
        stream = dnis.BilevelStream(batches, batches, dnis.LevelSchedule(warm_up_steps=100))
        for _ in range(6):
            pipeline.progress(stream)
        pipeline.detach()
    else:
        for batch in batches:
            optimizer.zero_grad()
            model(batch)[0].backward()
            optimizer.step()
    assert_one_learnt(table_weights(model), before)
    learns = {name.split(".")[-2]: weight.requires_grad for name, weight in model.named_parameters()}
    assert not learns[FROZEN]
    assert learns[LEARNING]
    plain = dnis.merge_(model) if searched else unshard_(model)
    bags = next(iter(collections(plain).values())).embedding_bags
    assert {name: bag.weight.requires_grad for name, bag in bags.items()} == {FROZEN: False, LEARNING: True}
    assert torch.equal(bags[FROZEN].weight, before[FROZEN])


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_plain_training_leaves_a_frozen_table_alone(gloo: dist.ProcessGroup, tmp_path: Path, optimizer: str) -> None:
    batches, net = make_batches(4), FrozenNet()
    before = table_weights(copy.deepcopy(net))
    splits = dnis.DataSplits(train=batches, validation=batches, selection=batches, test=batches)
    recipe = dnis.Recipe(model=net, data=splits, loss=nn.BCEWithLogitsLoss(), table_optimizer=optimizer)
    model, stepper = shard(dnis.TrainTask(net, recipe.loss), recipe, CPU)
    set_learning_rates_(model, stepper, tables=0.1, dense=0.1)
    train_plainly(model, stepper, recipe, CPU, max_epochs=2, patience=2)
    assert_one_learnt(table_weights(model), before)


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_a_frozen_table_of_sequence_embeddings(gloo: dist.ProcessGroup, kind: str) -> None:
    configs = [
        EmbeddingConfig(name=name, num_embeddings=12, embedding_dim=8, feature_names=[f"f_{name}"])
        for name in (FROZEN, LEARNING)
    ]
    model = nn.ModuleDict({"ec": EmbeddingCollection(tables=configs), "over": nn.Linear(1, 1)})
    model["ec"].embeddings[FROZEN].weight.requires_grad_(False)
    before = {name: table.weight.detach().clone() for name, table in model["ec"].embeddings.items()}
    sharders = [EmbeddingCollectionSharder(fused_params={"learning_rate": 0.5})]
    model = shard_by(model, kind, sharders)
    optimizer = adam_with_decay(model)
    for batch in make_batches(2):
        optimizer.zero_grad()
        looked_up = get_unwrapped_module(model)["ec"](batch.sparse_features)
        torch.stack([jagged.values().sum() for jagged in looked_up.values()]).sum().backward()
        optimizer.step()
    tables = unshard_(model)["ec"].embeddings
    assert_one_learnt({name: table.weight for name, table in tables.items()}, before)
    assert {name: table.weight.requires_grad for name, table in tables.items()} == {FROZEN: False, LEARNING: True}


def test_a_model_that_a_user_shards_alone_is_refused(gloo: dist.ProcessGroup) -> None:
    batches = make_batches(2)
    task = dnis.TrainTask(prepared_net(FrozenNet(), batches), nn.BCEWithLogitsLoss())
    model = DistributedModelParallel(task, device=CPU)
    with pytest.raises(NotImplementedError, match=r"FQN 'model.ebc': supported are frozen tables .*\['kept'\]"):
        dnis.BilevelTrainPipeline(model, adam_with_decay(model), CPU)


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_when_it_is_sharded_counts(gloo: dist.ProcessGroup, frozen: bool) -> None:
    """Between prepare_ and shard_model a table may be frozen, or may be let learn again."""
    batches, net = make_batches(4, longest=3), FrozenNet()
    net.ebc.embedding_bags[FROZEN].weight.requires_grad_(frozen)
    net = prepared_net(net, batches)
    net.ebc.embedding_bag_collection.embedding_bags[FROZEN].weight.requires_grad_(not frozen)
    before = table_weights(copy.deepcopy(net))
    model = sharded_net(dnis.TrainTask(net, nn.BCEWithLogitsLoss()), "table_wise", "fused")
    pipeline = dnis.BilevelTrainPipeline(model, adam_with_decay(model), CPU)
    stream = dnis.BilevelStream(batches, batches, dnis.LevelSchedule(warm_up_steps=100))
    for _ in batches:
        pipeline.progress(stream)
    after = table_weights(pipeline.detach())
    assert torch.equal(after[FROZEN], before[FROZEN]) == frozen
    assert not torch.equal(after[LEARNING], before[LEARNING])


SHARDED_AS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def by_hand(net: Net, of: KeyedJaggedTensor, alpha: Tensor, own: RowBlocks) -> Tensor:
    """Every id's row, times the weight of its place, times its block's alpha, one after the other."""
    pooled = []
    places = {name.split(".")[-2]: weight for name, weight in weights_of(net).items()}
    for feature, table in FEATURES.items():
        weight, jagged = net.e._embedding_bag_collection.embedding_bags[table].weight, of[feature]
        rows_of_alpha = own.routings[table].block_of(torch.arange(ROWS)) + own.first_alpha_row(table)
        for bag in jagged.to_dense():
            rows = [places[feature][at] * weight[row] * alpha[rows_of_alpha[row]] for at, row in enumerate(bag)]
            pooled.append(torch.stack([torch.zeros(DIM), *rows]).sum(0))
    per_sample = torch.stack(pooled).view(len(FEATURES), SIZE, DIM).transpose(0, 1).flatten(1)
    return net.over(per_sample).squeeze(1)


@pytest.mark.parametrize("compiled", [True, False])
def test_unsharded_forward_and_gradients_are_those_by_hand(compiled: bool) -> None:
    plain, own = Net(), BATCHES[0]
    with operators(compiled=compiled):
        net = prepared(copy.deepcopy(plain), alpha_from=0.1)
        found = net(own.dense_features, own.sparse_features)
        (found * torch.arange(SIZE)).sum().backward()
    expected = by_hand(plain, own.sparse_features, alpha_of(net).of(DIM), blocks())
    (expected * torch.arange(SIZE)).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for (name, weight), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("sharding_type", SHARDED_AS)
def test_weights_are_named_as_in_torchrecs_own_module(gloo: dist.ProcessGroup, sharding_type: str) -> None:
    own, plain = Trained(Net(), sharding_type, by_torchrec=True), Trained(Net(), sharding_type)
    searched = plain_state_dict(Trained(prepared(Net()), sharding_type).model)
    assert list(plain.model.state_dict()) == list(searched) == list(own.model.state_dict())


def test_curvature_is_the_loss_by_alpha() -> None:
    net, own = prepared(Net()), BATCHES[0]
    alpha = alpha_of(net).of(DIM).requires_grad_()
    loss = binary_cross_entropy_with_logits(by_hand(Net(), own.sparse_features, alpha, blocks()), own.labels)
    (expected,) = torch.autograd.grad(loss, [alpha])
    worth = curvature(Net(), [own], blocks(), loss=nn.BCEWithLogitsLoss())
    found = torch.cat([*worth.gradient.values()])
    torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-4)


# Reaches into TorchRec

REACHES = ("torchrec.py", "torchrec_inputs.py")
"""The modules that hold all of them."""
BELOW = {("data/task.py", "_embedding_configs")}
"""Reaches of rooms that lie below selection."""


def private_names(source: str) -> set[str]:
    """Names that begin with an underscore which a file defines, or sets on its own objects."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def reaches(source: str, theirs: set[str]) -> set[str]:
    """Private names of others that a file reads, sets or imports, beside what a class inherits."""
    own, names = private_names(source), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in theirs - own and ast.unparse(node.value) != "self":
            names.add(node.attr)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torchrec", "fbgemm", "torch.dist")):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            names |= {part for part in parts if part.startswith("_")}
    return names


def test_no_other_module_reaches_into_torchrec() -> None:
    theirs: set[str] = set()
    for folder in ("distributed", "modules", "optim", "sparse"):
        for path in (Path(torchrec.__file__).parent / folder).rglob("*.py"):
            if "test" not in path.as_posix():
                theirs |= private_names(path.read_text(encoding="utf-8"))
    torchs = {name for kind in (nn.Module, torch.Tensor, torch.autograd.Function) for name in dir(kind)}
    package = Path(selection.__file__).parents[1]
    found = set()
    for path in package.rglob("*.py"):
        if path.name not in REACHES:
            names = reaches(
                path.read_text(encoding="utf-8"), theirs - torchs - set(vars(nn.Module())) - {"_fields", "_replace"}
            )
            found |= {(path.relative_to(package).as_posix(), name) for name in names}
    assert found == BELOW
