"""Rotation: no prediction changes, training goes on as if it had been rotated from the start, columns come in order.

Of models that say what reads their tables, and of TorchRec's, which are known by their types.
"""

import copy
import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.deepfm import FactorizationMachine as SumOfPairs
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec import blocks_from_counts, prepare_, shard_model
from dnis_torchrec.allocation import axes
from dnis_torchrec.allocation.axes import rotation_groups
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.selection.shards import collections, table_configs
from examples.models import (
    DeepFM,
    FactorizationMachine,
    MatrixFactorization,
    MultiLayerPerceptron,
    NeuMF,
    WideDeep,
    build_neumf_tables,
    build_tables,
)
from tests.models import shard_as, shards_of, tables_of
from tests.reference import second_moment_reference

CPU = torch.device("cpu")
ROWS = {"user": 11, "movie": 7}
DIM = 8
BATCH_SIZE = 16
BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "mf": lambda: MatrixFactorization(build_tables(ROWS, DIM, init_std=0.5), global_mean=3.0),
    "mlp": lambda: MultiLayerPerceptron(build_tables(ROWS, DIM, init_std=0.5), tower=(6, 3)),
    "neumf": lambda: NeuMF(build_neumf_tables(ROWS, 4, init_std=0.5), tower=(6, 3)),
    "fm": lambda: FactorizationMachine(build_tables(ROWS, DIM, init_std=0.5)),
    "wide_deep": lambda: WideDeep(build_tables(ROWS, DIM, init_std=0.5), tower=(6, 3)),
    "deepfm": lambda: DeepFM(build_tables(ROWS, DIM, init_std=0.5), tower=(6, 3)),
}
TURNED = {name: ("user", "movie") for name in BUILDERS} | {"neumf": ("gmf_user", "gmf_movie", "mlp_user", "mlp_movie")}

pytestmark = pytest.mark.usefixtures("gloo")


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return BUILDERS[name]()


def counts_of(model: nn.Module) -> FrequencyCounts:
    """Frequencies for all tables of a model; some rows were never seen."""
    generator = torch.Generator().manual_seed(5)
    configs = table_configs(model)
    counts = {c.name: torch.randint(0, 6, (c.num_embeddings,), generator=generator) for c in configs}
    return FrequencyCounts(counts, {feature: 1 for c in configs for feature in c.feature_names}, 50)


def features_of(model: nn.Module, seed: int = 1) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    rows = {feature: config.num_embeddings for config in table_configs(model) for feature in config.feature_names}
    ids = [torch.randint(0, number, (BATCH_SIZE,), generator=generator) for number in rows.values()]
    lengths = torch.ones(BATCH_SIZE * len(rows), dtype=torch.int64)
    return KeyedJaggedTensor(keys=list(rows), values=torch.cat(ids), lengths=lengths)


def drawn_in(model: nn.Module) -> dict[str, Tensor]:
    """What each column of a table is multiplied by before the tables turn: 1, but for those of a weighted product."""
    factors = {table: torch.ones(1, dtype=torch.float64) for table in tables_of(model)}
    for group in rotation_groups(model):
        if group.product is not None:
            dim, first = tables_of(model)[group.tables[0]].shape[1], group.product.first_column
            weights = group.product.weight.detach()[0, first : first + dim].double()
            factors |= {group.tables[0]: weights.sign() * weights.abs().sqrt(), group.tables[1]: weights.abs().sqrt()}
    return factors


def optimizer_of(
    model: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), make)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum, so that there is a state to turn; a rotation commutes with it."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kjt: KeyedJaggedTensor, steps: int) -> None:
    labels = torch.linspace(-1, 1, BATCH_SIZE)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.zeros(BATCH_SIZE, 0), kjt) - labels).square().mean().backward()
        optimizer.step()


def assert_in_order(tables: dict[str, Tensor], group: Sequence[str], counts: FrequencyCounts) -> None:
    """Columns of a group are uncorrelated and carry less and less."""
    moment = second_moment_reference([tables[name] for name in group], [counts.counts[name] for name in group])
    torch.testing.assert_close(moment, moment.diag().diag(), atol=1e-3, rtol=0)
    assert (moment.diag().diff() < 1e-4).all()


@pytest.mark.parametrize("sharding_type", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("name", BUILDERS)
def test_predictions_stay_and_columns_come_in_order(name: str, sharding_type: str) -> None:
    """The second moment of what was turned is diagonal and falls."""
    model = build(name)
    counts, kjt = counts_of(model), features_of(model)
    sharded = shard_as(model, sharding_type)
    plain, predicted = tables_of(sharded), sharded(torch.zeros(BATCH_SIZE, 0), kjt).detach()
    before = {table: (weight.double() * drawn_in(sharded)[table]).float() for table, weight in plain.items()}
    groups = [group.tables for group in rotation_groups(sharded)]
    factors = axes.product_factors(
        rotation_groups(sharded), {table: weight.shape[1] for table, weight in plain.items()}
    )
    rotations = axes.rotate_(sharded, counts, optimizer_of(sharded, sgd))
    after, turns = tables_of(sharded), axes.AxesOfRows(rotation_groups(sharded), rotations, factors).turns
    for table, turn in turns.items():
        torch.testing.assert_close(after[table], (plain[table].double() @ turn).float())
    assert sorted(table for tables in groups for table in tables) == sorted(TURNED[name])
    torch.testing.assert_close(sharded(torch.zeros(BATCH_SIZE, 0), kjt), predicted, atol=1e-5, rtol=1e-5)
    for tables, rotation in zip(groups, rotations, strict=True):
        assert_in_order(after, tables, counts)
        for table in tables:
            torch.testing.assert_close(after[table], (before[table].double() @ rotation).float())


def with_adagrad(name: str) -> nn.Module:
    """Its state is a number per row, the mean of squared gradients, which no rotation changes."""
    model = build(name)
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection):
            apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    return shard_as(model, "table_wise", fused=None)


@pytest.mark.parametrize(("name", "is_fused"), [("mf", False), ("mlp", False), ("deepfm", False), ("mf", True)])
def test_training_does_not_notice(name: str, is_fused: bool) -> None:
    """Train, rotate, train equals train, train, rotate by the same matrix."""
    models = [with_adagrad(name) if is_fused else shard_as(build(name), "data_parallel") for _ in range(2)]
    counts, kjt = counts_of(build(name)), features_of(build(name))
    optimizers = [optimizer_of(model, sgd) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, kjt, 2)
    rotations = axes.rotate_(models[0], counts, optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, kjt, 3)
    near = {"atol": 1e-4, "rtol": 1e-4}
    turned, straight = (tables_of(model) for model in models)
    for group, rotation in zip(rotation_groups(models[0]), rotations, strict=True):
        for table in group.tables:
            torch.testing.assert_close(turned[table], (straight[table].double() @ rotation).float(), **near)
    zeros = torch.zeros(BATCH_SIZE, 0)
    torch.testing.assert_close(models[0](zeros, kjt), models[1](zeros, kjt), **near)


@pytest.mark.parametrize("fused", [False, True])
def test_states_turn_along(fused: bool) -> None:
    """Adam's average as the gradient does; sums of squares, Adam's and Adagrad's, by the squared matrix."""
    model = build("mf")
    counts, kjt = counts_of(model), features_of(model)
    sharded = shard_as(model, "table_wise" if fused else "data_parallel", fused=torch.optim.Adagrad)
    optimizer = optimizer_of(sharded, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    train(sharded, optimizer, kjt, 2)

    def states() -> dict[str, Tensor]:
        found = sharded.fused_optimizer.state_dict()["state"] if fused else optimizer.state_dict()["state"]
        tensors = {}
        for parameter, of_parameter in found.items():
            for key, value in of_parameter.items():
                local = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
                if isinstance(local, Tensor) and local.dim() == 2 and local.shape[1] == DIM:
                    tensors[f"{parameter}:{key}"] = local.clone()
        return tensors

    before = states()
    (rotation,) = axes.rotate_(sharded, counts, optimizer)
    assert len(before) == (2 if fused else 4)
    for name, state in states().items():
        by = rotation if name.endswith("exp_avg") else rotation.square()
        torch.testing.assert_close(state, (before[name].double() @ by).float())


@pytest.mark.parametrize(
    ("kind", "optimizer", "says"),
    [
        ("column_wise", sgd, "shards of whole rows, got 4 of its 8 columns"),  # a rank cannot turn a part of a row
        ("data_parallel", torch.optim.Rprop, "optimizer state"),  # its step sizes belong to axes that are gone
    ],
)
def test_what_cannot_be_turned_is_refused_untouched(kind: str, optimizer: Callable, says: str) -> None:
    model = build("mf")
    counts, kjt = counts_of(model), features_of(model)
    sharded = shard_as(model, kind)
    stepper = optimizer_of(sharded, optimizer)
    train(sharded, stepper, kjt, 1)
    before = tables_of(sharded)
    with pytest.raises(NotImplementedError, match=says):
        axes.rotate_(sharded, counts, stepper)
    assert all(torch.equal(table, before[name]) for name, table in tables_of(sharded).items())


def reader(**fields: int) -> dict[str, tuple[axes.LinearReader, ...]]:
    return {"user": (axes.LinearReader(weight=nn.Linear(9, 2).weight, **fields),)}


def product(num_inputs: int, num_outputs: int, **fields: int) -> axes.WeightedProduct:
    return axes.WeightedProduct(weight=nn.Linear(num_inputs, num_outputs).weight, **fields)


class Odd(nn.Module):
    """Says that a group of its tables turns, which does not fit."""

    def __init__(self, tables: Sequence[str], **parts: object) -> None:
        super().__init__()
        configs = [
            *build_tables(ROWS, DIM).embedding_bag_configs(),
            *build_tables({"wide": 3}, 4).embedding_bag_configs(),
        ]
        self.collection = EmbeddingBagCollection(tables=copy.deepcopy(configs))
        self.group = axes.RotationGroup(tables=tuple(tables), **parts)

    def rotation_groups(self) -> list[axes.RotationGroup]:
        return [self.group]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Odd(["user", "nobody"]), "nobody"),
        (Odd(["user", "user"]), "expected every table in one group at most"),
        (Odd(["user", "wide"]), "expected tables of one embedding_dim"),
        (Odd(["movie"], readers=reader()), "expected readers of its own tables"),
        (Odd(["user"], readers=reader(first_column=2)), "expected at least 10 inputs, got 9"),
        (Odd(["user"], product=product(8, 1)), "expected two tables without readers beside a product"),
        (Odd(ROWS, product=product(8, 2)), "product: expected a layer with one output, got 2"),
        (Odd(ROWS, product=product(8, 1, first_column=1)), "product: expected at least 9 inputs, got 8"),
    ],
)
def test_wrong_groups_are_named(model: nn.Module, says: str) -> None:
    """Before anything is changed."""
    with pytest.raises(ValueError, match=says):
        rotation_groups(model)


@pytest.mark.parametrize("name", ["mlp", "fm"])
@pytest.mark.parametrize("searched", [False, True])
def test_a_frozen_table_is_not_turned_nor_what_would_turn_with_it(name: str, searched: bool) -> None:
    model = build(name)
    (module,) = collections(model).values()
    frozen = module.embedding_bags["movie"].weight.requires_grad_(False)
    counts = counts_of(model)
    groups = [group.tables for group in rotation_groups(model)]
    assert all("movie" not in tables for tables in groups)
    before, features = frozen.detach().clone(), features_of(model)
    if searched:
        prepare_(model, blocks_from_counts(counts, module.embedding_bag_configs(), num_blocks=2, least_rows=1))
    expected = model(dense_features=torch.zeros(BATCH_SIZE, 1), sparse_features=features)
    sharded = shard_model(model, CPU)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), lambda p: torch.optim.Adam(p)
    )
    assert [group.tables for group in rotation_groups(sharded)] == groups
    axes.rotate_(sharded, counts, optimizer)
    assert torch.equal(torch.cat([part.weight for part in shards_of(sharded) if part.table == "movie"]), before)
    found = sharded(dense_features=torch.zeros(BATCH_SIZE, 1), sparse_features=features)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_frozen_layer_is_not_turned() -> None:
    model = build("mlp")
    whole = rotation_groups(model)
    whole[0].layers()[0].requires_grad_(False)
    assert len(rotation_groups(model)) < len(whole)


# TorchRec's models

NUM_DENSE = 3
FEATURES = {"user": ("user_id",), "movie": ("liked", "seen"), "genre": ("genre_id",)}
ROWS_OF_TORCHREC = {"user": 14, "movie": 13, "genre": 12}
"""More than D rows each that were seen: the axes are determined."""


def collection(*, is_weighted: bool = False) -> EmbeddingBagCollection:
    """Three tables, one read by two features; of unweighted bags one is pooled by MEAN."""
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=DIM,
            feature_names=list(FEATURES[name]),
            pooling=PoolingType.MEAN if name == "genre" and not is_weighted else PoolingType.SUM,
        )
        for name, rows in ROWS_OF_TORCHREC.items()
    ]
    tables = EmbeddingBagCollection(tables=configs, is_weighted=is_weighted)
    for bag in tables.embedding_bags.values():
        nn.init.normal_(bag.weight, std=0.5)
    return tables


TYPES: dict[str, Callable[[EmbeddingBagCollection], nn.Module]] = {
    "dlrm": lambda tables: DLRM(tables, NUM_DENSE, [4, DIM], [6, 1]),
    "projection": lambda tables: DLRM_Projection(tables, NUM_DENSE, [4, DIM], [6, 1], [9, 2 * DIM], [7, 3 * DIM]),
    "deepfm": lambda tables: SimpleDeepFMNN(NUM_DENSE, tables, hidden_layer_size=4, deep_fm_dimension=5),
}
"""Models that can be turned."""
GROUPS = {
    "dlrm": [tuple(ROWS_OF_TORCHREC)],
    "projection": [(name,) for name in ROWS_OF_TORCHREC],
    "deepfm": [(name,) for name in ROWS_OF_TORCHREC],
}
"""Tables that turn by one matrix."""


def build_type(name: str, *, is_weighted: bool = False) -> nn.Module:
    """One of `TYPES`, the same weights every time."""
    torch.manual_seed(7)
    return TYPES[name](collection(is_weighted=is_weighted))


def dcn() -> nn.Module:
    """A model that cannot be turned."""
    return DLRM_DCN(collection(), NUM_DENSE, [4, DIM], [4, 1], dcn_num_layers=1, dcn_low_rank_dim=2)


def logits_of(model: nn.Module, *, is_weighted: bool = False) -> Tensor:
    """What a model makes of a batch with dense features and bags of up to three ids, some of them empty."""
    generator = torch.Generator().manual_seed(3)
    lengths, values = [], []
    for name, features in FEATURES.items():
        for _ in features:
            lengths.append(torch.randint(0, 4, (BATCH_SIZE,), generator=generator))
            values.append(torch.randint(0, ROWS_OF_TORCHREC[name], (int(lengths[-1].sum()),), generator=generator))
    ids = torch.cat(values)
    features = KeyedJaggedTensor(
        keys=[feature for own in FEATURES.values() for feature in own],
        values=ids,
        weights=torch.rand(len(ids), generator=generator) if is_weighted else None,
        lengths=torch.cat(lengths),
    )
    dense = torch.randn(BATCH_SIZE, NUM_DENSE, generator=generator)
    inner = model.model if isinstance(model, DLRMTrain) else model
    return inner(dense_features=dense, sparse_features=features)


def assert_stays(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def assert_turned(
    before: dict[str, Tensor], after: dict[str, Tensor], groups: list[tuple[str, ...]], counts: FrequencyCounts
) -> None:
    """Rows keep their lengths, and in every group columns are uncorrelated and carry less and less."""
    for group in groups:
        assert_in_order(after, group, counts)
    for name, table in after.items():
        assert not torch.allclose(table, before[name], atol=0.01)
        torch.testing.assert_close(table.square().sum(1), before[name].square().sum(1))


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_plain_models_turn_and_no_logit_moves(name: str, is_weighted: bool) -> None:
    model = build_type(name, is_weighted=is_weighted)
    before, logits = tables_of(model), logits_of(model, is_weighted=is_weighted)
    axes.with_axes_(model)
    assert_stays(logits_of(model, is_weighted=is_weighted), logits)
    assert [group.tables for group in rotation_groups(model)] == GROUPS[name]
    assert len(axes.rotate_(model, counts_of(model))) == len(GROUPS[name])
    assert_stays(logits_of(model, is_weighted=is_weighted), logits)
    assert_turned(before, tables_of(model), GROUPS[name], counts_of(model))


@pytest.mark.parametrize("name", TYPES)
def test_models_with_axes_that_are_sharded_turn_like_plain_ones(name: str) -> None:
    """Where axes are added to shards: `test_ranks_turn_tables_as_one_process`, in every sharding type."""
    plain = axes.with_axes_(build_type(name))
    axes.rotate_(plain, counts_of(plain))
    model = build_type(name)
    counts, logits = counts_of(model), logits_of(model)
    sharded = axes.with_axes_(shard_as(axes.with_axes_(model), "table_wise"))
    axes.rotate_(sharded, counts)
    assert_stays(logits_of(sharded), logits)
    for table, weight in tables_of(sharded).items():
        torch.testing.assert_close(weight, tables_of(plain)[table], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_names_of_weights_stay_and_axes_are_no_parameters(name: str) -> None:
    model = build_type(name)
    state, parameters = set(model.state_dict()), list(model.parameters())
    assert not axes.has_axes(state)
    added = set(axes.with_axes_(model).state_dict()) - state
    assert state < set(model.state_dict()) or name == "projection"
    assert axes.has_axes(added) == (name != "projection")
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    again = set(axes.with_axes_(model).state_dict())
    assert again == state | added
    assert len(added) == (name != "projection")


@pytest.mark.parametrize("name", TYPES)
def test_a_model_may_turn_twice_and_a_fresh_one_takes_its_state(name: str) -> None:
    """Axes that are added again stay as they were turned."""
    model = axes.with_axes_(build_type(name))
    logits = logits_of(model)
    for factor in (1, 2):
        other = counts_of(model)
        other.counts["user"][:4] *= factor
        axes.rotate_(model, other)
    assert_stays(logits_of(axes.with_axes_(model)), logits)
    torch.manual_seed(99)
    fresh = axes.with_axes_(TYPES[name](collection()))
    fresh.load_state_dict(model.state_dict())
    assert_stays(logits_of(fresh), logits)


def test_models_inside_others_and_subclasses_without_a_forward_are_known() -> None:
    class Named(DLRM):
        """Computes as its base does."""

    model = DLRMTrain(Named(collection(), 3, [4, DIM], [6, 1]))
    logits = logits_of(model)
    assert len(axes.rotate_(axes.with_axes_(model), counts_of(model))) == 1
    assert_stays(logits_of(model), logits)


class Doubled(DLRM):
    """A forward of its own."""

    def forward(self, dense_features: Tensor, sparse_features: object) -> Tensor:
        return 2 * super().forward(dense_features, sparse_features)


class Holding(nn.Module):
    """Holds a part of its model a second time, perhaps to read its weights."""

    def __init__(self, name: str, part: Callable[[nn.Module], nn.Module | nn.Parameter]) -> None:
        super().__init__()
        self.model = build_type(name)
        self.held = part(self.model)


def first_layer(model: nn.Module) -> nn.Linear:
    return model.over_arch.model[0]._mlp[0]._linear


def with_change(name: str, change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def build_changed() -> nn.Module:
        model = build_type(name)
        change(model)
        return model

    return build_changed


def patch_(model: nn.Module) -> None:
    model.forward = model.forward  # an attribute of the object now


def hook_(model: nn.Module) -> None:
    model.dense_arch.register_forward_hook(lambda module, inputs, output: output.abs())


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "dcn": dcn,
    "own forward": lambda: Doubled(collection(), 3, [4, DIM], [6, 1]),
    "patched": with_change("dlrm", patch_),
    "hooked": with_change("dlrm", hook_),
    "parametrized": with_change("dlrm", lambda model: weight_norm(first_layer(model))),
    "other interaction": with_change("dlrm", lambda model: setattr(model, "inter_arch", nn.Identity())),
    "shared arch": lambda: Holding("dlrm", lambda model: model.over_arch),
    "tied weight": lambda: Holding("dlrm", lambda model: first_layer(model).weight),
    "patched deepfm": with_change("deepfm", patch_),
    "hooked projection": with_change("projection", hook_),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_left_alone_and_named_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = UNKNOWN[name]()
    before = copy.deepcopy(model.state_dict())
    with caplog.at_level(logging.WARNING):
        assert axes.rotate_(axes.with_axes_(model), counts_of(model)) == []
    (record,) = caplog.records
    assert "rotation: expected tables of which it is known what turns along" in record.message
    assert str(list(ROWS_OF_TORCHREC)) in record.message
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_sum_of_columns_is_no_dot_product_but_keeps_its_direction() -> None:
    """TorchRec's FactorizationMachine changes by a rotation; with the direction turned along it does not."""
    torch.manual_seed(1)
    inputs = [torch.randn(5, 4) for _ in range(3)]
    rotation = torch.linalg.qr(torch.randn(4, 4)).Q
    turned, machine = [value @ rotation for value in inputs], axes.DirectedFactorizationMachine(12, inputs[0])
    expected = SumOfPairs()(inputs)
    assert_stays(machine(inputs), expected)
    assert not torch.allclose(SumOfPairs()(turned), expected, atol=0.1)
    machine.axes.copy_((torch.ones(4) @ rotation).repeat(3))
    assert_stays(machine(turned), expected)
