"""alpha and the pure functions on it: against the equations, row by row, and against numerical gradients."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.ops import batches_triton
from dnis_torchrec.search.prune import uncompressed_scheme
from dnis_torchrec.selection.alpha import Alpha, normalise_gradient, select_per_block, select_per_sample
from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.wrapper import UNLIMITED, BagCheck, SoftSelectionEmbeddingBagCollection
from dnis_torchrec.serving import ServedEmbeddingCollection
from dnis_torchrec.serving.tables import LogicalTables
from tests import models
from tests.models import KEYS as SEQUENCE_KEYS
from tests.models import blocks, collection
from tests.models import features as pooled_features
from tests.models import sequence_features as features
from tests.models import sequence_tables as tables
from tests.reference import ReferenceTable, pooled_reference
from tests.tiny import bag_config
from tests.triton_on_numpy import without_triton

seeds = st.integers(0, 2**31)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_alpha_stays_float32_whatever_tables_put_out(dtype: torch.dtype) -> None:
    """Its gradient is summed in its own precision, as if the output of the tables had been cast before."""
    pooled = random(50, 2, 3, seed=0).to(dtype)
    weights = random(50, 2, 3, seed=1).to(dtype)
    rows = torch.randint(4, (50, 2), generator=torch.Generator().manual_seed(2))
    alpha = random(4, 3, seed=3, dtype=torch.float32).requires_grad_()
    selected = select_per_sample(pooled, alpha, rows)
    per_block = select_per_block(pooled, alpha[:2])
    assert (selected.dtype, per_block.dtype) == (dtype, dtype)
    got = torch.autograd.grad((selected * weights).sum() + (per_block * weights[:, 0]).sum(), [alpha])[0]
    cast, of_sample = pooled.float(), weights.float()
    expected = torch.zeros(4, 3)
    for b in range(50):
        for f in range(2):
            expected[rows[b, f]] += cast[b, f] * of_sample[b, f]
            expected[f] += cast[b, f] * of_sample[b, 0]
    torch.testing.assert_close(got, expected)


def test_normalise_gradient_of_nothing_is_zero() -> None:
    assert normalise_gradient(torch.zeros(1, 3), torch.tensor([True])).tolist() == [[0, 0, 0]]
    noise = torch.tensor([[float("nan"), 1.0]])
    assert normalise_gradient(noise, torch.tensor([False])).tolist() == [[0, 0]]


def test_alpha_learns_inside_upper_level_only() -> None:
    alpha = Alpha({2: (3, 2), 4: (1, 4)})
    alpha.record_hits(2, torch.tensor([1]))  # outside: nothing to note
    for _ in range(2):  # hits of an earlier step do not stay
        with alpha.upper_level() as hits:
            assert alpha.is_upper
            assert alpha.of(2).requires_grad
            assert alpha.of(4).requires_grad
            assert hits[2].tolist() == [False] * 3
            alpha.record_hits(2, torch.tensor([[2, 0], [2, 2]]))
            alpha.record_hits(4, torch.tensor([], dtype=torch.int64))
        assert hits[2].tolist() == [True, False, True]
        assert hits[4].tolist() == [False]
    assert not alpha.is_upper
    assert not alpha.of(2).requires_grad


def test_upper_level_ends_when_the_step_fails() -> None:
    alpha = Alpha({2: (1, 2)})
    with pytest.raises(KeyError), alpha.upper_level():
        raise KeyError
    assert not alpha.is_upper
    assert not alpha.of(2).requires_grad


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=3, max_size=3), min_size=1, max_size=4), seeds)
def test_density_and_mean_weigh_rows_of_alpha_by_the_rows_they_serve(values: list[list[float]], seed: int) -> None:
    alpha = Alpha({3: (len(values), 3), 2: (1, 2)})
    alpha.of(3).copy_(torch.tensor(values))
    alpha.of(2).copy_(torch.tensor([[0.0, 0.5]]))
    rows = torch.randint(1, 9, (len(values),), generator=torch.Generator().manual_seed(seed)).double()
    served = [row[d] for row, n in zip(values, rows.int().tolist(), strict=True) for _ in range(n) for d in range(3)]
    served += [0.0, 0.5] * 7
    per_row = {3: rows, 2: torch.tensor([7.0], dtype=torch.float64)}
    assert alpha.density(per_row) == pytest.approx(sum(value > 0 for value in served) / len(served))
    assert alpha.mean(per_row) == pytest.approx(sum(served) / len(served))


KEYS = [f"{name}_id" for name in models.ROWS]
REFUSED: dict[str, tuple[type[Exception], str, dict[str, object]]] = {
    "too many": (ValueError, "feature 'genre_id'", {"lengths": [1] * 14 + [2]}),
    "too few": (ValueError, "features 'user_id', .*'genre_id'", {"lengths": [1] * 14 + [0]}),
    "one left over": (ValueError, "features 'user_id', .*'genre_id'", {"lengths": [1] * 4 + [0] + [1] * 10}),
    "negative": (ValueError, "feature 'movie_id'", {"lengths": [1] * 5 + [2, -1, 2, 1, 1] + [1] * 5}),
    "huge": (ValueError, "feature 'user_id'", {"lengths": [2**62] * 4 + [1] * 11}),
    "all": (ValueError, "feature 'user_id'", {"lengths": [15] * 15}),
    "fewer weights": (ValueError, "features 'user_id', .*'genre_id'", {"weights": [1.0] * 14}),
    "fractions": (TypeError, "features 'user_id', .*'genre_id'", {"values": [0.0] * 15}),
    "bytes": (TypeError, "features 'user_id', .*'genre_id'", {"values": torch.zeros(15, dtype=torch.uint8)}),
}
"""Batch -> kind of the error, its place, and how the batch differs from 5 bags of one id for each feature."""


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", list(REFUSED))
def test_bags_that_are_refused(name: str, grad: bool, compiled: bool) -> None:
    error, place, change = REFUSED[name]
    parts = {"values": [0] * 15, "lengths": [1] * 15} | change
    kjt = KeyedJaggedTensor(keys=KEYS, **{part: torch.as_tensor(value) for part, value in parts.items()})
    model = prepare_(nn.ModuleDict({"e": collection()}), blocks())
    with models.operators(compiled), torch.set_grad_enabled(grad), pytest.raises(error, match=f"^{place}: expected"):
        model["e"](kjt)


@pytest.mark.parametrize("compiled", [True, False])
def test_of_a_key_that_occurs_twice_the_later_one_is_checked_and_read(compiled: bool) -> None:
    with models.operators(compiled):
        model = prepare_(nn.ModuleDict({"e": collection()}), blocks())
        ids = [models.ROWS["user"] + 5, models.ROWS["user"] - 1, models.ROWS["movie"] - 1, models.ROWS["genre"] - 1]
        features = KeyedJaggedTensor(keys=["user_id", *KEYS], values=torch.tensor(ids), lengths=torch.ones(4).int())
        expected = KeyedJaggedTensor(keys=KEYS, values=torch.tensor(ids[1:]), lengths=torch.ones(3).int())
        assert torch.equal(model["e"](features).values(), model["e"](expected).values())
        features = KeyedJaggedTensor(
            keys=["user_id", *KEYS], values=torch.tensor([*ids[:3], models.ROWS["genre"]]), lengths=torch.ones(4).int()
        )
        with pytest.raises(ValueError, match=f"feature 'genre_id': expected ids in 0..{models.ROWS['genre'] - 1}"):
            model["e"](features)


def is_refused(check: Callable[[], object]) -> bool:
    try:
        check()
    except (ValueError, RuntimeError):
        return True
    return False


def is_refused_by_the_kernel(bag_check: BagCheck, features: KeyedJaggedTensor) -> bool:
    """Whether the Triton kernel, on numpy, finds a fault."""
    bounds, longest = bag_check._limits(tuple(features.keys()), torch.device("cpu"))
    parts = [part.contiguous() for part in (features.values(), features.lengths(), features.offsets(), bounds, longest)]
    with pytest.MonkeyPatch.context() as patch:
        without_triton(patch, [], [])
        return bool(batches_triton.bad_bags(*parts, UNLIMITED))


@given(st.data())
def test_a_gpu_refuses_what_a_cpu_refuses(data: st.DataObject) -> None:
    """The assertions of a GPU, which raise at once on a CPU, beside the checks of a CPU, feature by feature."""
    bag_check = prepare_(nn.ModuleDict({"e": collection()}), blocks(), multi_hot_features=["movie_id"])["e"].bag_check
    size = data.draw(st.integers(0, 3), label="samples")
    longest = {key: 3 if key == "movie_id" else 1 for key in KEYS}
    keys = data.draw(st.permutations([*KEYS, "of nobody"]), label="keys")
    lengths = [data.draw(st.lists(st.integers(0, longest.get(key, 2)), min_size=size, max_size=size)) for key in keys]
    rows = {f"{name}_id": number for name, number in models.ROWS.items()}
    ids = [
        data.draw(st.integers(0, rows.get(key, 10**6) - 1))
        for key, own in zip(keys, lengths, strict=True)
        for _ in range(sum(own))
    ]
    fault = data.draw(st.sampled_from(["none", "length", "id", "negative length"]), label="fault")
    flat = [length for own in lengths for length in own]
    if fault.endswith("length") and flat:
        place = data.draw(st.integers(0, len(flat) - 1))
        flat[place] = -1 if fault.startswith("negative") else flat[place] + data.draw(st.sampled_from([-1, 1, 2]))
    if fault == "id" and ids:
        ids[data.draw(st.integers(0, len(ids) - 1))] = data.draw(st.sampled_from([-1, max(rows.values()), 10**9]))
    features = KeyedJaggedTensor(
        keys, torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor(flat, dtype=torch.int32), stride=size
    )
    expected = is_refused(lambda: bag_check(features))
    assert is_refused(lambda: bag_check._assert_good(features)) == expected
    assert is_refused_by_the_kernel(bag_check, features) == expected


LAST = [models.ROWS[key.removesuffix("_id")] - 1 for key in KEYS]
ONE_EACH = [1] * 4


@pytest.mark.parametrize(
    ("ids", "lengths", "is_good"),
    [
        # of a feature that nobody reads they may be anything, such as a hash of 64 bits
        *(([0, 0, 0, of_nobody], ONE_EACH, True) for of_nobody in (-1, torch.iinfo(torch.int64).max)),
        ([0] * 4, [2, -1, 1, 0, 1, 0, 1, 0], False),  # their sum is right
        ([*LAST, 0], ONE_EACH, True),
        *(([last + (place == of) for of, last in enumerate([*LAST, 0])], ONE_EACH, False) for place in range(3)),
    ],
)
def test_bags_are_good_or_not_wherever_they_are_checked(ids: list[int], lengths: list[int], is_good: bool) -> None:
    multi_hot = KEYS if len(lengths) > 4 else []
    model = prepare_(nn.ModuleDict({"e": collection()}), blocks(), multi_hot_features=multi_hot)
    features = KeyedJaggedTensor([*KEYS, "of nobody"], torch.tensor(ids), lengths=torch.tensor(lengths).int())
    bag_check = model["e"].bag_check
    assert is_refused(lambda: bag_check(features)) != is_good
    assert is_refused(lambda: bag_check._assert_good(features)) != is_good
    assert is_refused_by_the_kernel(bag_check, features) != is_good


@pytest.mark.parametrize("num_ids", [0, 1])
def test_ids_of_no_bags_are_refused(num_ids: int) -> None:
    nothing, ids = torch.empty(0, dtype=torch.int64), torch.zeros(num_ids, dtype=torch.int64)
    assert bool(batches_triton.bad_bags(ids, nothing, torch.zeros(1), nothing, nothing, UNLIMITED)) == bool(num_ids)


FEATURES = ("single", "multi", "shared")


class SharedBlocks(RowBlocks):
    """Tables of one embedding_dim share rows of alpha, as in the paper."""

    def first_alpha_row(self, table: str) -> int:
        return 0


@st.composite
def cases(draw):
    """Tables of several dims and poolings, shared features, bags that may be empty, KJT keys in any order."""
    weighted = draw(st.booleans())
    batch_size = draw(st.integers(1, 5))
    poolings = st.sampled_from([PoolingType.SUM, PoolingType.MEAN])
    tables = [
        bag_config(f"t{index}", draw(st.integers(2, 9)), draw(st.sampled_from([1, 3, 4])), *of, pooling=draw(poolings))
        for index, of in enumerate([["single", "shared"], ["multi"], ["shared"]])
    ]
    smallest = min(table.num_embeddings for table in tables)
    longest = {"single": 1, "multi": 4, "shared": draw(st.sampled_from([1, 4]))}
    bags, weights = {}, {}
    for feature in FEATURES:
        bag = st.lists(st.integers(0, smallest - 1), max_size=longest[feature])
        bags[feature] = draw(st.lists(bag, min_size=batch_size, max_size=batch_size))
        weights[feature] = [[draw(st.floats(-2, 2, width=32)) for _ in b] for b in bags[feature]]
    counts = {
        table.name: torch.tensor(
            draw(st.lists(st.integers(0, 3), min_size=table.num_embeddings, max_size=table.num_embeddings))
        )
        for table in tables
    }
    blocks = blocks_from_counts(
        FrequencyCounts(counts, longest, 10), tables, num_blocks=draw(st.integers(1, 3)), least_rows=1
    )
    if draw(st.booleans()):
        blocks = SharedBlocks(**vars(blocks))
    order = draw(st.permutations(FEATURES))
    return tables, blocks, bags, weights if weighted else None, order


def make_features(bags, weights, order) -> KeyedJaggedTensor:
    values = [row for feature in order for bag in bags[feature] for row in bag]
    flat = [w for feature in order for bag in weights[feature] for w in bag] if weights else None
    return KeyedJaggedTensor(
        keys=list(order),
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor([len(bag) for feature in order for bag in bags[feature]]),
        weights=torch.tensor(flat, dtype=torch.float32) if weights else None,
    )


def make_wrapper(tables, blocks: RowBlocks, weighted: bool) -> SoftSelectionEmbeddingBagCollection:
    collection = EmbeddingBagCollection(tables=tables, is_weighted=weighted)
    wrapper = SoftSelectionEmbeddingBagCollection(collection, blocks)
    for dim in wrapper.alpha.dims:
        wrapper.alpha.of(dim).uniform_(0, 1)
    return wrapper


def reference_tables(tables, blocks: RowBlocks, wrapper) -> dict[str, ReferenceTable]:
    made = {}
    alphas = {dim: wrapper.alpha.of(dim).detach().double().requires_grad_() for dim in wrapper.alpha.dims}
    for table in tables:
        weight = wrapper.embedding_bag_collection.embedding_bags[table.name].weight
        made[table.name] = ReferenceTable(
            weight=weight.detach().double().requires_grad_(),
            alpha=alphas[table.embedding_dim],
            alpha_row_of_row=blocks.first_alpha_row(table.name) + blocks.routings[table.name].all_blocks(),
            is_mean=table.pooling == PoolingType.MEAN,
        )
    return made


@given(cases())
def test_forward_and_every_gradient_match_the_oracle(case) -> None:
    tables, blocks, bags, weights, order = case
    wrapper = make_wrapper(tables, blocks, weights is not None)
    references = reference_tables(tables, blocks, wrapper)
    outputs = [(o.feature, o.table) for o in wrapper.outputs]
    expected = torch.cat(
        [pooled_reference(references[t], bags[f], weights[f] if weights else None) for f, t in outputs], dim=1
    )
    features = make_features(bags, weights, order)
    coefficients = torch.randn_like(expected)

    got = wrapper(features)
    assert got.keys() == ["single", "shared@t0", "multi", "shared@t2"]
    torch.testing.assert_close(got.values().double(), expected, atol=1e-6, rtol=1e-5)

    (got.values() * coefficients.float()).sum().backward()
    if expected.requires_grad:  # not if every bag is empty
        (expected * coefficients).sum().backward()
    for name, reference in references.items():
        grad = wrapper.embedding_bag_collection.embedding_bags[name].weight.grad
        torch.testing.assert_close(grad.double(), _grad(reference.weight), atol=1e-6, rtol=1e-5)

    with wrapper.alpha.upper_level() as hits:
        loss = (wrapper(features).values() * coefficients.float()).sum()
        dims = wrapper.alpha.dims
        grads = torch.autograd.grad(loss, [wrapper.alpha.of(dim) for dim in dims], materialize_grads=True)
        assert not any(p.requires_grad and p.grad is None for p in wrapper.parameters())
    for dim, grad in zip(dims, grads, strict=True):
        alphas = [r.alpha for name, r in references.items() if blocks.embedding_dims[name] == dim]
        torch.testing.assert_close(grad.double(), _grad(alphas[0]), atol=2e-6, rtol=1e-5)
        touched = torch.zeros(len(grad), dtype=torch.bool)
        for feature, table in outputs:
            if blocks.embedding_dims[table] == dim:
                rows = [row for bag in bags[feature] for row in bag]
                touched[references[table].alpha_row_of_row[rows]] = True
        assert torch.equal(hits[dim], touched)


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def test_an_upper_level_backward_cannot_reach_a_table() -> None:
    wrapper = prepare_(nn.ModuleDict({"e": collection()}), blocks())["e"]
    with wrapper.alpha.upper_level():
        wrapper(pooled_features()).values().sum().backward()  # even a careless one, without torch.autograd.grad
        assert all(wrapper.alpha.of(dim).grad is not None for dim in wrapper.alpha.dims)
    assert all(weight.grad is None for weight in wrapper.embedding_bag_collection.parameters())


def reference(model: nn.Module, kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Naive embeddings, in float64; leaves for alpha and the tables that they come from."""
    wrapper, own = models.wrapper_of(model), models.sequence_blocks()
    alpha = wrapper.alpha.of(models.DIM).double().requires_grad_()
    weights = {name: table.weight.detach().double() for name, table in wrapper.lookup.embeddings.items()}
    leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
    found = []
    for key in SEQUENCE_KEYS:
        feature, _, table = key.partition("@")
        table = table or next(name for name, read in models.FEATURES.items() if feature in read)
        rows = own.first_alpha_row(table) + own.routings[table].all_blocks()
        naive = ReferenceTable(leaves[table], alpha, rows, is_mean=False)
        bags = [[row] for row in kjt[feature].values().tolist()]
        found += [pooled_reference(naive, bags)] if bags else []
    return torch.cat(found), alpha, leaves


def loss_of(values: Tensor) -> Tensor:
    coefficients = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view(values.shape)
    return (values * coefficients).sin().sum()


@given(
    lengths=st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=5),
    compiled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sequences_of_any_shape_compute_and_learn_what_the_oracle_does(
    lengths: list[tuple[int, ...]], compiled: bool, seed: int
) -> None:
    """No ids of a feature, no ids at all. In an upper step alpha alone learns."""
    generator = torch.Generator().manual_seed(seed)
    by_key = torch.tensor(lengths, dtype=torch.int64).view(len(lengths), 3).t().flatten()
    ids = torch.randint(0, 17, (int(by_key.sum()),), generator=generator)
    kjt = KeyedJaggedTensor(keys=["visits", "candidate", "history"], values=ids, lengths=by_key, stride=len(lengths))
    model, own = models.sequences(), models.sequence_blocks()
    wrapper = models.wrapper_of(model)
    alpha_of_tables, tables = wrapper.alpha.of(models.DIM), wrapper.lookup.embeddings
    with models.operators(compiled):
        wanted, leaf, leaves = reference(model, kjt) if len(ids) else (torch.zeros(0, models.DIM), None, {})
        got = wrapper(kjt)
        assert list(got) == SEQUENCE_KEYS
        for key in SEQUENCE_KEYS:
            torch.testing.assert_close(got[key].lengths(), kjt[key.partition("@")[0]].lengths())
        torch.testing.assert_close(models.values_of(got).double(), wanted.double(), atol=1e-6, rtol=0)
        loss_of(models.values_of(got)).backward()
        assert alpha_of_tables.grad is None
        learnt = {name: tables[name].weight.grad.double() for name in tables}
        wrapper.zero_grad()
        with wrapper.alpha.upper_level() as hits:
            loss_of(models.values_of(wrapper(kjt))).backward()
            gradient, alpha_of_tables.grad = alpha_of_tables.grad, None
    assert all(table.weight.grad is None for table in tables.values())
    touched = torch.zeros_like(hits[models.DIM])
    for output in wrapper.outputs:
        blocks = own.routings[output.table].all_blocks()[kjt[output.feature].values()]
        touched[own.first_alpha_row(output.table) + blocks] = True
    assert torch.equal(hits[models.DIM], touched)
    if not len(ids):
        assert not gradient.any()
        return
    expected = torch.autograd.grad(loss_of(wanted), [leaf, *leaves.values()], materialize_grads=True)
    torch.testing.assert_close(gradient.double(), expected[0], atol=1e-6, rtol=0)
    for name, of_table in zip(leaves, expected[1:], strict=True):
        torch.testing.assert_close(learnt[name], of_table, atol=1e-6, rtol=0)


def test_indices_are_passed_on_where_they_are_needed() -> None:
    kjt = features(3)
    model = models.sequences(need_indices=True)
    output = models.wrapper_of(model)(kjt)
    assert output["visits"].weights().equal(kjt["visits"].values())
    assert merge_(model)["tables"].need_indices()
    assert models.sequences()["tables"](kjt)["visits"].weights_or_none() is None


def test_an_id_outside_of_its_table() -> None:
    kjt = KeyedJaggedTensor(
        keys=["history", "candidate", "visits"], values=torch.tensor([1, 2, 17]), lengths=torch.tensor([1, 1, 1])
    )
    with pytest.raises(ValueError, match=r"table 'shop', feature 'visits': expected ids in 0\.\.16, got 17"):
        models.wrapper_of(models.sequences())(kjt)


class Doubling(EmbeddingCollection):
    """Changes what it looks up."""

    def forward(self, features: KeyedJaggedTensor) -> dict:
        return super().forward(features)


def hooked() -> EmbeddingCollection:
    collection = EmbeddingCollection(tables=tables())
    collection.register_forward_hook(lambda *_: None)
    return collection


def padded() -> EmbeddingCollection:
    collection = EmbeddingCollection(tables=tables())
    collection.embeddings["item"] = nn.Embedding(23, models.DIM, padding_idx=0)
    return collection


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Doubling(tables=tables()), "EmbeddingCollections that the model calls themselves, got Doubling with"),
        (hooked, "got one with hooks"),
        (padded, "table 'item': supported are tables as TorchRec makes them, got padding_idx=0"),
    ],
)
def test_what_it_would_not_compute_is_refused(build: object, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        prepare_(nn.ModuleDict({"tables": build()}), models.sequence_blocks())


def test_a_sharding_type_that_sequences_do_not_have(gloo: object) -> None:
    constraints = {"item": ParameterConstraints(sharding_types=["table_row_wise"])}
    message = r"table 'item': expected a sharding type that the sharder offers on cpu: .*row_wise, got \['table_row_wi"
    with pytest.raises(ValueError, match=message):
        make_sharding_plan(models.sequences(), torch.device("cpu"), default_sharders(), constraints=constraints)


def test_columns_of_several_widths(gloo: object) -> None:
    """TorchRec would put the columns of the second table together as if they were as wide as those of the first."""
    constraints = {
        name: ParameterConstraints(sharding_types=["column_wise"], min_partition=width)
        for name, width in (("item", 4), ("shop", 8))
    }
    model, sharders = models.sequences(), default_sharders()
    plan = make_sharding_plan(model, torch.device("cpu"), sharders, constraints=constraints)
    message = r"table 'shop': expected columns in shards of 4, as .* other tables, got \[8\]; give all of them one"
    with pytest.raises(ValueError, match=message):
        shard_model(model, torch.device("cpu"), plan, sharders)


def test_pooled_serving_takes_no_unpooled_table() -> None:
    scheme = uncompressed_scheme(models.sequences(prepared=False))
    with pytest.raises(ValueError, match="^table 'item'"):
        LogicalTables.of(scheme)
    pooled = uncompressed_scheme(models.bags_of_one())
    with pytest.raises(ValueError, match="table 'item': expected one that is not pooled, got sum"):
        ServedEmbeddingCollection(pooled, {})
    with pytest.raises(ValueError, match="table 'item': expected a known table"):
        ServedEmbeddingCollection(scheme, {})
