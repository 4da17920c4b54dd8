"""Pruning against naive Python: what is retained, what it costs, and that it stays so while the rest trains on."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.forms import pointer_bytes
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.budget import Budget, Size, SizeOutOfReachError, keep_within
from dnis_torchrec.search.pruning import drop_zeros_, keep_largest_, prune
from dnis_torchrec.selection import shards as shards_module
from dnis_torchrec.selection.shards import TableShard, collections, local_shards
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.training.rounded import RetainedMask
from tests import small_models
from tests.reference import elementwise_keep_reference
from tests.sizes import affordable, size_of_values
from tests.small_models import SHARDING_TYPES, shard_as

Case = tuple[nn.Module, RowBlocks, FrequencyCounts]


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    """Tables of a test are walked in several chunks, as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "ROWS_PER_CHUNK", 3)
        yield


@st.composite
def cases(draw, dims: tuple[int, ...] = (1, 2, 3)) -> Case:
    """Two collections with a table each, many equal values and zeros; whole rows zero, rows never seen."""
    tables, counts, weights = [], {}, {}
    for name in ("a", "b"):
        rows, dim = draw(st.integers(1, 8)), draw(st.sampled_from(dims))
        pooling = draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN]))
        config = EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{name}"], pooling=pooling
        )
        tables.append(config)
        of_rows = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
        counts[name] = torch.tensor(sorted(of_rows, reverse=True) if draw(st.booleans()) else of_rows)
        values = st.sampled_from([-0.75, -0.5, 0.0, 0.25, 0.5, 1.0]) if dim <= 3 else st.just(0.5)
        weights[name] = torch.tensor(draw(st.lists(values, min_size=rows * dim, max_size=rows * dim))).view(rows, dim)
    counted = FrequencyCounts(counts, {"fa": 1, "fb": 1}, 9)
    blocks = blocks_from_counts(counted, tables, num_blocks=draw(st.integers(1, 3)))
    model = nn.ModuleDict({config.name: EmbeddingBagCollection(tables=[config]) for config in tables})
    for name, weight in weights.items():
        table_of(model, name).copy_(weight)
    return model, blocks, counted


def table_of(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_submodule(f"{name}.embedding_bags.{name}").weight.detach()


def seen_tables(model: nn.Module, counts: FrequencyCounts) -> list[torch.Tensor]:
    """Copies of the tables, never-seen rows zeroed."""
    return [table_of(model, name) * (counts.counts[name] > 0).unsqueeze(1) for name in ("a", "b")]


def assert_scheme_tells_the_tables(model: nn.Module, blocks: RowBlocks, scheme: MixedDimensionScheme) -> None:
    """Every number of a scheme, counted again in the tables."""
    assert list(scheme.tables) == ["a", "b"]
    for name, table in scheme.tables.items():
        weight, config = table_of(model, name), model[name].embedding_bag_configs()[0]
        assert (table.collection, table.feature_names, table.is_weighted) == (name, (f"f{name}",), False)
        assert (table.num_embeddings, table.embedding_dim) == tuple(weight.shape)
        assert table.pooling == config.pooling.value.lower()
        assert table.num_retained == int(weight.count_nonzero())
        original, block_of_row = blocks.routings[name].all_blocks(), table.routing.all_blocks()
        for row, block in enumerate(block_of_row.tolist()):
            if block == table.routing.num_blocks:
                assert not weight[row].any()
            else:
                assert block == original[row]
                assert not weight[row][~table.retained[block]].any()
        for block, columns in enumerate(table.retained):
            stored = weight[block_of_row == block]
            assert (stored != 0).any(dim=0).tolist() == columns.tolist()
    assert scheme.parameters == sum(int(table_of(model, name).count_nonzero()) for name in scheme.tables)


def pruned(case: Case, expected: list[torch.Tensor], **options) -> MixedDimensionScheme | None:
    """Prunes to the tables that are expected; None where these hold nothing: refused, and no table has changed."""
    model, blocks, counts = case
    before = [table_of(model, name).clone() for name in ("a", "b")]
    if any(bool(table.any()) for table in expected):
        scheme = prune(model, blocks, counts, **options)
        assert_scheme_tells_the_tables(model, blocks, scheme)
        assert scheme.parameters > 0
    else:
        scheme, expected = None, before
        with pytest.raises(SizeOutOfReachError):
            prune(model, blocks, counts, **options)
    for name, table in zip(("a", "b"), expected, strict=True):
        assert torch.equal(table_of(model, name), table)
    return scheme


# Element structure


@given(cases(dims=(2, 3)), st.floats(0, 1))
def test_element_keeps_exactly_the_largest_magnitudes(case: Case, share: float) -> None:
    before = seen_tables(case[0], case[2])
    parameters, size = affordable(before, share)
    kept = elementwise_keep_reference(before, parameters)
    expected = [table * mask for table, mask in zip(before, kept, strict=True)]
    scheme = pruned(case, expected, size=size, structure="element")
    if scheme is not None:
        assert scheme.parameters == min(parameters, sum(int(table.count_nonzero()) for table in before))


@given(cases(dims=(3, 9)), st.floats(1.01, 4) | st.integers(102, 400).map(lambda percent: percent / 100))
def test_element_by_compression(case: Case, compression: float) -> None:
    before = seen_tables(case[0], case[2])
    total, nonzero = sum(table.numel() for table in before), sum(int(table.count_nonzero()) for table in before)
    pointers = sum(pointer_bytes(*table.shape) for table in before)
    num_values = int((round(4 * total / compression, 6) - pointers) // 5)  # 132 / 1.1 is 119.99999999999999
    assume(num_values >= 1)
    kept = elementwise_keep_reference(before, num_values)
    expected = [table * mask for table, mask in zip(before, kept, strict=True)]
    scheme = pruned(case, expected, size=Size(compression=compression, form="csr_fp32"), structure="element")
    if scheme is not None:
        assert scheme.parameters == min(num_values, nonzero)
        assert scheme.compression("csr_fp32") >= compression


@given(cases(dims=(2, 3)), st.floats(0, 1))
def test_element_per_table(case: Case, share: float) -> None:
    before = seen_tables(case[0], case[2])
    total = sum(table.numel() for table in before)
    parameters, size = affordable(before, share)
    expected = []
    for table in before:
        [kept] = elementwise_keep_reference([table], parameters * table.numel() // total)
        expected.append(table * kept)
    pruned(case, expected, size=size, structure="element", per_table=True)


@given(cases(dims=(2, 3)), st.integers(0, 200), st.booleans())
def test_csr_bytes_are_never_exceeded_and_met_within_a_value(case: Case, extra: int, per_table: bool) -> None:
    model, blocks, counts = case
    before = seen_tables(model, counts)
    pointers = sum(len(table) + 8 * math.ceil(len(table) / 56) for table in before)
    most = 4 * sum(table.numel() for table in before)
    assume(pointers + 5 <= most)
    size = Size(embedding_bytes=min(pointers + 5 + extra, most), form="csr_fp32")
    try:
        scheme = prune(model, blocks, counts, size=size, structure="element", per_table=per_table)
    except SizeOutOfReachError:
        assert per_table or not any(table.any() for table in before)
        return
    spent = scheme.served_bytes("csr_fp32")
    assert spent == pointers + 5 * scheme.parameters
    assert spent <= size.embedding_bytes
    if not per_table and scheme.parameters < sum(int(table.count_nonzero()) for table in before):
        assert size.embedding_bytes - spent < 5


def test_csr_of_wide_tables_takes_two_bytes_per_column() -> None:
    model, blocks, counts = simple(dim=300)
    size = Size(embedding_bytes=4 * 5 + 6 * 100 + 5, form="csr_fp32")
    scheme = prune(model, blocks, counts, size=size, structure="element")
    assert scheme.parameters == 100
    assert scheme.served_bytes("csr_fp32") == size.embedding_bytes - 5


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30), st.data())
def test_keep_largest_of_any_floats(values: list[float], data: st.DataObject) -> None:
    """Denormals, signed zeros and the largest numbers, over two shards."""
    cut, num_keep = data.draw(st.integers(0, len(values))), data.draw(st.integers(0, len(values)))
    parts = [torch.tensor(values[:cut]).view(-1, 1), torch.tensor(values[cut:]).view(-1, 1)]
    expected = [part * kept for part, kept in zip(parts, elementwise_keep_reference(parts, num_keep), strict=True)]
    keep_largest_([TableShard("t", part) for part in parts], num_keep)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


@pytest.mark.parametrize("structure", ["element", "block"])
@given(case=cases())
def test_threshold_zero_drops_zeros_only(structure: str, case: Case) -> None:
    pruned(case, seen_tables(case[0], case[2]), threshold=0.0, structure=structure)


@given(cases())
def test_zeros_are_dropped_where_nothing_else_is_left_too(case: Case) -> None:
    model, blocks, counts = case
    before = seen_tables(model, counts)
    scheme = drop_zeros_(model, blocks, counts)
    for table, name in zip(before, ("a", "b"), strict=True):
        assert torch.equal(table_of(model, name), table)
    assert_scheme_tells_the_tables(model, blocks, scheme)


@given(cases(), st.sampled_from([0.1, 0.25, 0.5, 0.6, 2.0]))
def test_element_threshold_drops_magnitudes_up_to_it(case: Case, threshold: float) -> None:
    expected = [table * (table.abs() > threshold) for table in seen_tables(case[0], case[2])]
    pruned(case, expected, threshold=threshold, structure="element")


# Block structure


def naive_scores(model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts) -> dict[str, torch.Tensor]:
    """Mean square of every column of every block over the rows that training saw."""
    scores = {}
    for name, table in zip(("a", "b"), seen_tables(model, counts), strict=True):
        of_row, num_blocks = blocks.routings[name].all_blocks().tolist(), blocks.routings[name].num_blocks
        scores[name] = torch.zeros(num_blocks, table.shape[1], dtype=torch.float64)
        for block in range(num_blocks):
            rows = [r for r, b in enumerate(of_row) if b == block and counts.counts[name][r] > 0]
            for d in range(table.shape[1]):
                scores[name][block, d] = sum(float(table[r, d]) ** 2 for r in rows) / max(1, len(rows))
    return scores


def whole_columns(case: Case, kept: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tables with these columns of blocks alone."""
    model, blocks, counts = case
    named = zip(("a", "b"), seen_tables(model, counts), strict=True)
    return [table * kept[name][blocks.routings[name].all_blocks()] for name, table in named]


KINDS, FORMS = ("compression", "embedding_bytes"), ("mixed_dimension", "csr_fp32", "csr_int8")


@given(cases(dims=(3, 9)), st.sampled_from(KINDS), st.sampled_from(FORMS), st.floats(0, 1), st.booleans())
def test_block_keeps_the_best_columns_within_the_budget(
    case: Case, kind: str, form: str, share: float, per_table: bool
) -> None:
    model, blocks, counts = case
    dense_bytes = 4 * sum(table.numel() for table in seen_tables(model, counts))
    fixed = 1 - Budget.unchecked(Size(embedding_bytes=1, form=form), blocks).amount
    assume(fixed < dense_bytes - 1)
    num_bytes = math.ceil(fixed + share * (dense_bytes - 1 - fixed))
    size = Size(**{kind: num_bytes if kind == "embedding_bytes" else dense_bytes / num_bytes}, form=form)
    try:
        budget = Budget.of(size, blocks)
    except ValueError:
        assume(False)
    scores = naive_scores(model, blocks, counts)
    total = sum(float(c.sum()) * scores[t].shape[1] for t, c in budget.column_costs.items())
    kept = {}
    for names in [["a"], ["b"]] if per_table else [["a", "b"]]:
        own = sum(float(budget.column_costs[t].sum()) * scores[t].shape[1] for t in names)
        amount = min(1.0, budget.amount / total) * own * (1 + 1e-12) if per_table else budget.amount
        costs = torch.cat([budget.column_costs[t].repeat_interleave(scores[t].shape[1]) for t in names])
        chosen = keep_within(torch.cat([scores[t].flatten() for t in names]), costs, amount)
        parts = chosen.split([scores[t].numel() for t in names])
        kept |= {t: part.view(scores[t].shape) for t, part in zip(names, parts, strict=True)}
    scheme = pruned(case, whole_columns(case, kept), size=size, per_table=per_table)
    if scheme is None:
        return
    assert scheme.served_bytes(form) <= num_bytes
    assert scheme.compression(form) >= dense_bytes / num_bytes


@given(cases(), st.sampled_from([0.25, 0.5, 0.6]))
def test_block_threshold_is_a_root_mean_square(case: Case, threshold: float) -> None:
    kept = {name: score > threshold**2 for name, score in naive_scores(*case).items()}
    pruned(case, whole_columns(case, kept), threshold=threshold)


def simple(counts: tuple[int, ...] = (4, 3, 2, 0), dim: int = 2, num_blocks: int = 2) -> Case:
    """A bare collection of one table of ones."""
    config = EmbeddingBagConfig(name="a", num_embeddings=len(counts), embedding_dim=dim, feature_names=["f"])
    model = EmbeddingBagCollection(tables=[config])
    model.embedding_bags["a"].weight.detach().fill_(1.0)
    counted = FrequencyCounts({"a": torch.tensor(counts)}, {"f": 1}, 9)
    return model, blocks_from_counts(counted, [config], num_blocks=num_blocks), counted


def test_a_bare_collection_is_named_by_the_empty_fqn() -> None:
    model, blocks, counts = simple()
    scheme = prune(model, blocks, counts, threshold=0.0)
    assert scheme.tables["a"].collection == ""
    assert scheme.tables["a"].routing.boundaries.tolist() == [0, 2, 3]
    assert scheme.tables["a"].is_block_structured


@pytest.mark.parametrize("per_table", [False, True])
def test_no_column_is_lost_to_rounding(per_table: bool) -> None:
    """A share of 1/49 of 49 columns is .9999999999999999 of one in floating point."""
    for num_rows in (3, 49, 98, 103):
        model, blocks, counts = simple(counts=(1,) * num_rows, dim=8, num_blocks=num_rows)
        size = size_of_values(1, [(num_rows, 8)])
        assert prune(model, blocks, counts, size=size, per_table=per_table).parameters == 1


@pytest.mark.parametrize("structure", ["block", "element"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_retained_keeps_its_bits(dtype: torch.dtype, structure: str) -> None:
    model, blocks, counts = simple(counts=(4, 3, 2, 1), dim=3)
    model.to(dtype)
    weight = model.embedding_bags["a"].weight.detach()
    weight.copy_(torch.arange(1, 13).view(4, 3) / 8)
    before = weight.clone()
    scheme = prune(model, blocks, counts, size=size_of_values(6, [(4, 3)]), structure=structure)
    assert scheme.parameters == 6
    assert torch.equal(weight, before * (weight != 0))


def test_a_weighted_collection_is_told() -> None:
    model, blocks, counts = simple()
    model = EmbeddingBagCollection(tables=model.embedding_bag_configs(), is_weighted=True)
    assert prune(model, blocks, counts, threshold=0.0).tables["a"].is_weighted


def test_dropping_the_most_frequent_block_needs_no_id_remap() -> None:
    """Empty rows of a table in frequency order stay in their block, which costs nothing, and boundaries still do."""
    model, blocks, counts = simple(counts=(4, 3, 2, 1))
    model.embedding_bags["a"].weight.detach()[:2] = 0.0
    table = prune(model, blocks, counts, threshold=0.0).tables["a"]
    assert table.routing.boundaries.tolist() == [0, 2, 4]
    assert table.dims.tolist() == [0, 2]
    assert table.served_bytes("mixed_dimension") == 4 * 4 + 2 * 2 + 8 * 3


def test_never_seen_rows_in_the_middle_stay_within_the_bytes() -> None:
    """The id remap that they need is paid for from the start."""
    for embedding_bytes in range(50, 97):
        model, blocks, counts = simple(counts=(3, 0, 2), dim=8, num_blocks=1)
        table = prune(model, blocks, counts, size=Size(embedding_bytes=embedding_bytes)).tables["a"]
        assert table.routing.all_blocks().tolist() == [0, 1, 0]
        assert table.served_bytes("mixed_dimension") <= embedding_bytes
        assert int(table.dims) == min(8, (embedding_bytes - 32) // 10)


def test_empty_rows_in_the_middle_are_dropped_where_that_is_smaller() -> None:
    model, blocks, counts = simple(counts=(4, 3, 2, 1), dim=8, num_blocks=1)
    model.embedding_bags["a"].weight.detach()[1] = 0.0
    table = prune(model, blocks, counts, threshold=0.0).tables["a"]
    assert table.routing.all_blocks().tolist() == [0, 1, 0, 0]
    assert table.num_retained == table.block_area == 24


# Masked fine-tuning


def pruned_for_training() -> EmbeddingBagCollection:
    model, blocks, counts = simple(counts=(5, 4, 3, 2, 1, 0), dim=4)
    model.embedding_bags["a"].weight.detach().copy_(torch.randn(6, 4))
    prune(model, blocks, counts, size=size_of_values(9, [(6, 4)]), structure="element")
    return model


EVERY_ROW = KeyedJaggedTensor(keys=["f"], values=torch.arange(6), lengths=torch.ones(6, dtype=torch.int64))


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    ],
    ids=["adam", "sgd"],
)
def test_pruned_values_stay_zero_and_retained_ones_train_on(make_optimizer) -> None:
    torch.manual_seed(0)
    model = pruned_for_training()
    weight = model.embedding_bags["a"].weight
    before, retained = weight.detach().clone(), weight.detach() != 0
    optimizer, mask = make_optimizer(model.parameters()), RetainedMask(model)
    mask.before_step_()  # no gradient yet: nothing to hold
    for _ in range(3):
        optimizer.zero_grad()
        (model(EVERY_ROW).values() - 1).square().sum().backward()
        mask.before_step_()
        optimizer.step()
        for state in optimizer.state[weight].values():  # the optimizer never hears of pruned values
            assert state.numel() == 1 or not state[~retained].any()
        mask.hold_()
        assert not weight.detach()[~retained].any()
    assert (weight.detach() != before)[retained].all()


def test_hold_mends_what_an_optimizer_did_on_its_own() -> None:
    model = pruned_for_training()
    mask, before = RetainedMask(model), model.embedding_bags["a"].weight.detach().clone()
    model.embedding_bags["a"].weight.detach().add_(1.0)
    mask.hold_()
    assert torch.equal(model.embedding_bags["a"].weight.detach(), (before + 1) * (before != 0))


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.usefixtures("gloo")
def test_pruned_values_of_a_sharded_model_stay_zero(sharding_type: str) -> None:
    """Fused tables step inside backward, data_parallel ones in an optimizer; one kernel holds several tables."""
    model = small_models.collection()
    size = size_of_values(90, [(table.num_embeddings, table.embedding_dim) for table in model.embedding_bag_configs()])
    prune(model, small_models.blocks(), small_models.counts(), size=size, structure="element")
    sharded = shard_as(model, sharding_type)
    mask, [module] = RetainedMask(sharded), collections(sharded).values()
    before = {(s.table, s.first_column): s.weight.clone() for s in local_shards(module)}
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    assert bool(dense) == (sharding_type == "data_parallel")
    optimizer = torch.optim.Adam(dense.values(), lr=0.1) if dense else None
    for seed in range(6):
        sharded.zero_grad()
        sharded(small_models.features(seed)).values().sum().backward()
        mask.before_step_()
        if optimizer is not None:
            optimizer.step()
        mask.after_step_()
    for shard in local_shards(module):
        old = before[shard.table, shard.first_column]
        assert not shard.weight[old == 0].any()
        looked_up = torch.cat([small_models.features(seed)[f"{shard.table}_id"].values() for seed in range(6)])
        assert (shard.weight != old)[looked_up][old[looked_up] != 0].all()
    for name, parameter in dense.items():
        pruned = before[name.split(".")[-2], 0] == 0
        assert not optimizer.state[parameter]["exp_avg"][pruned].any()


# Refusals


def test_the_smallest_csr_size_that_is_named_can_be_met() -> None:
    model, blocks, counts = simple()
    scheme = prune(model, blocks, counts, size=Size(embedding_bytes=17, form="csr_fp32"), structure="element")
    assert scheme.parameters == 1
    assert scheme.served_bytes("csr_fp32") == 17


def test_bytes_of_other_forms_are_for_blocks() -> None:
    model, blocks, counts = simple()
    with pytest.raises(
        NotImplementedError, match=r"form: supported for single values are \['csr_fp32', .*got 'mixed_dim"
    ):
        prune(model, blocks, counts, size=Size(embedding_bytes=30), structure="element")
    assert (model.embedding_bags["a"].weight == 1).all()


def test_unmerged_models_are_refused() -> None:
    model, blocks, counts = simple()
    prepared = prepare_(nn.ModuleDict({"ebc": model}), blocks)
    message = "FQN 'ebc': expected a merged, unsharded collection, got SoftSelectionEmbeddingBagCollection; call merge_"
    with pytest.raises(RuntimeError, match=message):
        prune(prepared, blocks, counts, threshold=0.0)


@pytest.mark.parametrize("structure", ["block", "element"])
def test_collections_that_were_not_prepared_stay_as_they_are(structure: str) -> None:
    model = small_models.TwoCollections()
    [movies] = local_shards(model.module["second"])
    blocks = blocks_from_counts(small_models.counts(), small_models.tables("user", "genre"), num_blocks=3)
    counts = small_models.counts().counts
    counted = FrequencyCounts({name: counts[name] for name in ("user", "genre")}, {}, 40)
    before = movies.weight.clone()
    merged = merge_(prepare_(model, blocks, fqns=["first"]))
    scheme = prune(merged, blocks, counted, size=Size(compression=2, form="csr_fp32"), structure=structure)
    assert list(scheme.tables) == ["user", "genre"]
    assert scheme.compression("csr_fp32") >= 2
    assert torch.equal(movies.weight, before)


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.usefixtures("gloo")
def test_sharded_collections_are_refused_only_with_tables_of_the_blocks(sharding_type: str) -> None:
    model, blocks, counts = simple()
    other = shard_as(small_models.collection(), sharding_type)
    both = nn.ModuleDict({"ebc": model, "other": other.module})
    assert list(prune(both, blocks, counts, threshold=0.0).tables) == ["a"]
    with pytest.raises(RuntimeError, match="FQN 'other': expected a merged, unsharded collection"):
        prune(both, small_models.blocks(), small_models.counts(), threshold=0.0)


def test_models_without_collections_are_refused() -> None:
    _, blocks, counts = simple()
    with pytest.raises(ValueError, match="prune: expected a model with an embedding collection, got Linear"):
        prune(nn.Linear(1, 1), blocks, counts, threshold=0.0)


def test_other_tables_are_refused() -> None:
    model, blocks, counts = simple()
    other = copy.deepcopy(model.embedding_bag_configs()[0])
    other.name = "b"
    message = "table 'b': expected a known table, got 'b'; known names: 'a'"
    with pytest.raises(ValueError, match=message):
        prune(EmbeddingBagCollection(tables=[other]), blocks, counts, threshold=0.0)
    with pytest.raises(ValueError, match="table 'a': expected a known table, got 'a'; known names: 'b'"):
        prune(model, blocks, FrequencyCounts({"b": counts.counts["a"]}, {}, 1), threshold=0.0)
