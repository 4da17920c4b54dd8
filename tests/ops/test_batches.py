"""Bags of a batch: malformed requests are refused by the feature's name; bags are split and taken apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dnis_torchrec import count_frequencies
from dnis_torchrec.artifact.load import serve
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.over_ranks import count_over_ranks
from dnis_torchrec.ops import batches
from dnis_torchrec.ops.packed import bag_offsets, load_operator, names_tensor, torch_bag_offsets
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.trainable import MixedDimensionEmbeddingBagCollection
from tests.models import operators
from tests.reference import keyed_jagged_tensor, lookups, routings, table_scheme

ROWS = 30
RETAINED = torch.tensor([[True, True, True, True], [False, True, False, True]])


def scheme_of(is_weighted: bool = False) -> MixedDimensionScheme:
    """Feature f of a table whose rows stand by block, g of one whose rows do not, pooled by MEAN."""
    by_block = RowRouting(ROWS, 2, boundaries=torch.tensor([0, 10, ROWS]))
    mixed = RowRouting.from_map(torch.arange(ROWS) % 3, 2)
    fields: dict[str, Any] = {"is_weighted": is_weighted}
    return MixedDimensionScheme(
        {
            "t": table_scheme("t", by_block, RETAINED, feature_names=("f",), **fields),
            "u": table_scheme("u", mixed, RETAINED, feature_names=("g",), pooling="mean", **fields),
        }
    )


def tables() -> dict[str, Tensor]:
    """Values that count for nothing here."""
    return {"t": torch.ones(ROWS, 4), "u": torch.ones(ROWS, 4)}


def uncompiled(make: Callable[[], nn.Module]) -> nn.Module:
    with lookups(compiled=False):
        return make()


FORMS: dict[str, Callable[[MixedDimensionScheme], nn.Module]] = {
    "packed": lambda s: serve(s, tables(), "packed"),
    "packed_uncompiled": lambda s: uncompiled(lambda: serve(s, tables(), "packed")),
    "mixed": lambda s: MixedDimensionEmbeddingBagCollection.from_tables(s, tables()),
}


@pytest.fixture(params=[True, False], ids=["grad", "no_grad"])
def mode(request: pytest.FixtureRequest) -> Any:
    """Everything twice: mixed dimensions take another way where a gradient may be wanted."""
    with torch.set_grad_enabled(request.param):
        yield


@pytest.fixture(scope="module", params=FORMS)
def module_of_form(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    return request.param, FORMS[request.param](scheme_of())


@pytest.fixture
def form(module_of_form: tuple[str, nn.Module], mode: None) -> tuple[str, nn.Module]:
    return module_of_form


def batch(keys: str, values: list[int], **more: Any) -> KeyedJaggedTensor:
    """Bags of two samples; numbers of `more` become tensors."""
    tensors = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in more.items()}
    return KeyedJaggedTensor(keys=list(keys), values=torch.tensor(values), **tensors)


LEAST, MOST = -(2**31), 2**31 - 1
BAD_BATCHES = {
    "too few": (batch("fg", [1, 2, 3], lengths=[1, 0, 9, 1]), "feature 'g': expected no more ids than there are"),
    "too many": (batch("fg", [1, 2, 3], lengths=[1, 0, 1, 0]), "features 'f', 'g': expected as many ids as their"),
    "negative": (batch("fg", [1, 2, 3], lengths=[1, 0, -1, 3]), "feature 'g': expected lengths of at least 0, got -1"),
    "sum of int32": (
        batch("fg", [1, 2, 3], lengths=torch.tensor([2**30] * 4, dtype=torch.int32)),
        "feature 'f': expected no more ids than there are, got a bag of 1073741824 in sample 0",
    ),
    "wrapped to the right sum": (
        batch("fg", [1, 2, 3], lengths=torch.tensor([MOST, MOST, 2, 3], dtype=torch.int32)),
        "feature 'f': expected no more ids than there are, got a bag of 2147483647",
    ),
    "wrapped to the right sum in int64": (
        batch("fgh", [1, 2, 3], lengths=[2**62, 2**62, 2**62, 2**62, 3, 0]),
        "feature 'f': expected no more ids than there are, got a bag of 4611686018427387904",
    ),
    "unread, shifting": (batch("xgf", [9, 1, 2], lengths=[2, 0, 1, 0, 1, 0]), "feature 'f': expected no more ids than"),
    "unread, negative": (
        batch("xgf", [9, 1, 2], lengths=[2, -1, 1, 0, 1, 0]),
        "feature 'x': expected lengths of at least 0, got -1 in sample 1",
    ),
    "offsets that fall": (batch("fg", [1, 2, 3], offsets=[0, 2, 1, 3, 3]), "feature 'f': expected lengths of at least"),
    "offsets beyond": (batch("fg", [1, 2, 3], offsets=[0, 2, 2, 3, 9]), "feature 'g': expected no more ids than there"),
    "offsets from 1": (batch("fg", [1, 2, 3], offsets=[1, 2, 2, 3, 3]), "features 'f', 'g': expected "),
    "offsets that wrap": (
        batch("fg", [1, 2, 3], offsets=torch.tensor([0, MOST, LEAST, 3, 3], dtype=torch.int32)),
        "feature 'f': expected ",
    ),
    "another batch size": (
        batch("fg", [1, 2, 3], lengths=[1, 0, 1, 1], stride=1),
        "features 'f', 'g': expected 2 lengths, one for each bag, got 4",
    ),
    "ids without samples": (
        KeyedJaggedTensor(["f", "g"], torch.tensor([1]), lengths=torch.empty(0, dtype=torch.int64), stride=0),
        "features 'f', 'g': expected as many ids as their lengths add up to, 0, got 1",
    ),
}


def fresh(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Without what other lookups made of it."""
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features._lengths,
        offsets=features._offsets if features._lengths is None else None,
        stride=features._stride,
    )


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bags_that_are_not_those_of_the_ids_are_refused(form: tuple[str, nn.Module], name: str) -> None:
    features, message = BAD_BATCHES[name]
    lengths = (features._lengths, features._offsets)
    with pytest.raises(ValueError, match=message):
        form[1](fresh(features))
    assert (features._lengths, features._offsets) == lengths  # cases are shared


@pytest.mark.parametrize("keys", ["fg", "gxf"])
def test_sound_bags_are_served_in_any_order(form: tuple[str, nn.Module], keys: str) -> None:
    features = batch(keys, list(range(len(keys))), lengths=[1, 0] * len(keys))
    assert form[1](features).values().shape == (2, 8)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_integers_of_other_widths_are_ids_too(form: tuple[str, nn.Module], dtype: torch.dtype) -> None:
    _, module = form
    features = batch("fg", [3, 9], lengths=[1, 0, 0, 1])
    other = KeyedJaggedTensor(keys=features.keys(), values=features.values().to(dtype), lengths=features.lengths())
    assert module(other).values().equal(module(features).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool])
def test_ids_that_are_no_integers_are_refused(form: tuple[str, nn.Module], dtype: torch.dtype) -> None:
    features = KeyedJaggedTensor(["f", "g"], torch.ones(2, dtype=dtype), lengths=torch.tensor([1, 0, 0, 1]))
    with pytest.raises(TypeError, match=r"features 'f', 'g': expected int.* ids, got torch"):
        form[1](features)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("count", [1, 3])
def test_weights_have_to_be_as_many_as_ids(name: str, count: int) -> None:
    features = batch("fg", [3, 9], lengths=[1, 0, 0, 1], weights=[0.5] * count)
    with pytest.raises(ValueError, match="^features 'f', 'g': expected a weight for each"):
        FORMS[name](scheme_of(is_weighted=True))(features)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
def test_weights_of_other_dtypes_are_converted_and_nan_is_none_of_our_business(name: str, dtype: torch.dtype) -> None:
    module, features = FORMS[name](scheme_of(is_weighted=True)), batch("fg", [3, 9], lengths=[1, 0, 0, 1])
    weights = torch.tensor([2.0, 3.0])
    pooled = [
        module(KeyedJaggedTensor(["f", "g"], features.values(), given, lengths=features.lengths())).values()
        for given in (weights, weights.to(dtype), weights * torch.nan)
    ]
    assert pooled[0].equal(pooled[1])
    assert pooled[2][0, 3].isnan()


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("name", ["packed", "packed_uncompiled"])
def test_plain_tensors_are_checked_alike(name: str) -> None:
    module: Any = FORMS[name](scheme_of())
    for offsets, message in (
        ([0, 1, 1, 9, 9], "feature 'g': expected no more ids than there are, got a bag of 8 in sample 0"),
        ([0, 1, 0, 2, 3], "feature 'f': expected lengths of at least 0, got -1 in sample 1"),
        ([0, 1, 1, 2, 2], "features 'f', 'g': expected as many ids as their lengths add up to, 2, got 3"),
        ([1, 1, 1, 2, 3], "features 'f', 'g': expected "),
        ([0.0, 1.0, 1.0, 2.0, 3.0], "offsets: expected int32 or int64, got torch.float32"),
        ([[0, 1, 1, 2, 3]], r"offsets: expected 2 times the batch size and one more, got .1, 5."),
        (0, r"offsets: expected 2 times the batch size and one more, got .."),
    ):
        with pytest.raises(ValueError, match=message):
            module.lookup(torch.tensor([1, 2, 3]), torch.tensor(offsets))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("keys", ["fg", "gxf"])
def test_numbers_need_not_lie_side_by_side(form: tuple[str, nn.Module], keys: str, dtype: torch.dtype) -> None:
    ids, lengths = torch.tensor([3, 29, 7, 1, 0], dtype=dtype), torch.tensor([2, 1, 2, 0, 0, 0][: 2 * len(keys)])
    with_gaps = [torch.stack([numbers, numbers + 99], dim=1)[:, 0] for numbers in (ids, lengths.to(dtype))]
    pooled = form[1](KeyedJaggedTensor(list(keys), ids, lengths=lengths)).values()
    for changed in ((with_gaps[0], lengths), (ids, with_gaps[1]), with_gaps):
        assert form[1](KeyedJaggedTensor(list(keys), changed[0], lengths=changed[1])).values().equal(pooled)


@pytest.mark.parametrize("number", [-1, -(2**63), ROWS, 2**62])
def test_ids_that_are_no_row_are_named(form: tuple[str, nn.Module], number: int) -> None:
    for keys in ("fg", "gxf"):
        values = [{"f": 1, "g": number, "x": -5}[key] for key in keys]
        with pytest.raises(ValueError, match=rf"feature 'g': expected ids in 0..29.*, got id {number};"):
            form[1](batch(keys, values, lengths=[1, 0] * len(keys)))


def test_what_is_missing_is_named(form: tuple[str, nn.Module]) -> None:
    with pytest.raises(ValueError, match="expected a known feature, got 'g'; known names: 'f', 'x'"):
        form[1](batch("fx", [1, 2], lengths=[1, 0, 1, 0]))
    sums = scheme_of(is_weighted=True)
    for table in sums.tables.values():
        object.__setattr__(table, "pooling", "sum")  # torch knows no weighted means
    with pytest.raises(ValueError, match="expected per-sample weights, got none"):
        FORMS[form[0]](sums)(batch("fg", [1, 2], lengths=[1, 0, 1, 0]))


def test_rows_are_known_in_one_pass() -> None:
    limits = torch.tensor([30, 5])

    def of(ids: list[int], lengths: list[int], **more: Any) -> list[int] | None:
        more = {name: torch.tensor(numbers) for name, numbers in more.items()}
        features = KeyedJaggedTensor(["f", "g"], torch.tensor(ids).long(), lengths=torch.tensor(lengths), **more)
        offsets = batches.offsets_of_rows(features, limits)
        return None if offsets is None else offsets.tolist()

    assert of([29, 4, 0], [1, 0, 2, 0]) == [0, 1, 1, 3, 3]
    assert of([], [0, 0]) == [0, 0, 0]
    assert of([29, 4], [1, 1], offsets=[0, 1, 2]) == [0, 1, 2]
    assert of([29, 4], [1, 1], offsets=[0, 2, 2]) is None
    assert of([29, 4], [1, 1], weights=[1.0]) is None
    for ids, lengths in (([30, 4], [1, 1]), ([29, -1], [1, 1]), ([1, 2], [2, -1]), ([1], [1, 1]), ([1, 2], [1, 0])):
        assert of(ids, lengths) is None


@pytest.mark.parametrize("operator", [bag_offsets, torch_bag_offsets])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bag_offsets(operator: Callable[..., Tensor], dtype: torch.dtype) -> None:
    load_operator()
    names = names_tensor(["first\none", "größe"])
    lengths = torch.tensor([[1, 0, 2], [0, 0, 1]], dtype=dtype)
    assert operator(lengths, torch.arange(4), names).tolist() == [0, 1, 1, 3, 3, 3, 4]
    assert operator(lengths[:, :0], torch.arange(0), names).tolist() == [0]
    assert operator(lengths.t().contiguous().t(), torch.arange(4), names).tolist() == [0, 1, 1, 3, 3, 3, 4]
    for other, count, message in (
        (lengths, 3, "feature 'größe': expected no more ids than there are, got a bag of 1 in sample 2, with 0 left"),
        (lengths, 5, "features 'first one', 'größe': expected as many ids as their lengths add up to, 4, got 5"),
        (-lengths, 4, "feature 'first one': expected lengths of at least 0, got -1 in sample 0"),
        (lengths[:1], 4, "features 'first one', 'größe': expected contiguous lengths of shape .F, B. on the CPU"),
        (lengths.flatten(), 4, "expected contiguous lengths of shape .F, B. on the CPU, got others"),
        (lengths.short(), 4, "features 'first one', 'größe': expected int32 or int64 lengths, got others"),
    ):
        with pytest.raises(ValueError, match=message):
            operator(other, torch.arange(count), names)


@pytest.mark.parametrize("operator", [bag_offsets, torch_bag_offsets])
def test_many_lengths_are_added_up_alike(operator: Callable[..., Tensor]) -> None:
    load_operator()
    ids, names, lengths = torch.arange(200), names_tensor(["f"]), torch.ones(1, 200, dtype=torch.int32)
    assert operator(lengths, ids, names).tolist() == list(range(201))
    others = [lengths.index_fill(1, torch.tensor([place]), n) for place, n in ((0, -1), (199, 2), (7, 2**31 - 1))]
    for other in (*others, lengths[:, 1:], torch.full((1, 256), 2**56)):  # the sum of the last is 0 in int64
        with pytest.raises(ValueError, match="'f': expected"):
            operator(other, ids if len(other[0]) < 256 else ids[:0], names)


Bags = dict[str, list[list[tuple[int, float]]]]

HALVES = RowRouting(4, 2, boundaries=torch.tensor([0, 2, 4]))


def split_bags(splits: list[batches.FeatureSplit], bags: Bags) -> Bags:
    """What BagSplitter has to give, id by id."""
    out: Bags = {}
    for split in splits:
        blocks = None if split.routing is None else split.routing.all_blocks().tolist()
        for block, key in enumerate(split.keys):
            if key is None:
                continue
            rows = None if blocks is None else [row for row, of_row in enumerate(blocks) if of_row == block]
            out[key] = [
                [(row, weight) for row, weight in bag if rows is None or row in rows] for bag in bags[split.feature]
            ]
    return out


@st.composite
def splits_and_bags(draw: st.DrawFn) -> tuple[list[batches.FeatureSplit], Bags]:
    shared = [draw(routings()) for _ in range(2)]
    batch_size = draw(st.integers(1, 4))
    splits, rows_of = [], {}
    for index in range(draw(st.integers(1, 4))):
        feature, routing = draw(st.sampled_from(["f", "g", "h"])), draw(st.sampled_from([*shared, None]))
        keys = tuple(
            f"{index}/{feature}/b{block}" if routing is None or draw(st.integers(0, 3)) else None
            for block in range(1 if routing is None else routing.num_blocks)
        )
        splits.append(batches.FeatureSplit(feature=feature, keys=keys, routing=routing))
        num_rows = 99 if routing is None else routing.num_embeddings
        rows_of[feature] = min(num_rows, rows_of.get(feature, 99))
    bags = {}
    for feature in draw(st.permutations(["f", "g", "h"])):
        entry = st.tuples(st.integers(0, rows_of.get(feature, 5) - 1), st.integers(-4, 4).map(float))
        bags[feature] = draw(st.lists(st.lists(entry, max_size=5), min_size=batch_size, max_size=batch_size))
    return splits, bags


@pytest.mark.parametrize("compiled", [True, False])
@settings(max_examples=50)
@given(splits_and_bags(), st.booleans(), *[st.sampled_from([torch.int32, torch.int64])] * 2)
def test_equals_python_lists(compiled: bool, case: Any, weighted: bool, dtype: torch.dtype, of_lengths: Any) -> None:
    splits, bags = case
    features = keyed_jagged_tensor(bags, weighted=weighted, id_dtype=dtype, length_dtype=of_lengths)
    with operators(compiled):
        out = batches.BagSplitter(splits)(features)
    expected = split_bags(splits, bags)
    assert out.keys() == list(expected)
    assert out.stride() == features.stride()
    assert out.values().dtype == dtype
    assert out.lengths().dtype == of_lengths
    if not expected:
        assert out.values().numel() == 0
        return
    other = keyed_jagged_tensor(expected, weighted=weighted, id_dtype=dtype, length_dtype=of_lengths)
    assert out.lengths().equal(other.lengths())
    assert out.values().equal(other.values())
    assert out.weights().equal(other.weights()) if weighted else out.weights_or_none() is None


def test_input_stays_as_it_was() -> None:
    features = keyed_jagged_tensor({"f": [[(3, 1.0), (0, 2.0)]]}, weighted=True)
    batches.BagSplitter([batches.FeatureSplit(feature="f", keys=("a", "b"), routing=HALVES)])(features)
    assert (features.keys(), features.values().tolist(), features.weights().tolist()) == (["f"], [3, 0], [1.0, 2.0])


@pytest.mark.parametrize("strided", [False, True])
def test_weights_that_learn_keep_their_gradient_and_any_stride_will_do(strided: bool) -> None:
    """Position weights, say, are a module's parameters: the compiled operator would drop their gradient."""
    features = keyed_jagged_tensor({"f": [[(3, 1.0), (0, 2.0)], [(1, 3.0)]]}, weighted=True)
    weights = torch.stack([features.weights(), torch.zeros(3)], dim=1)[:, 0] if strided else features.weights()
    learned = weights.detach() if strided else weights.detach().requires_grad_()
    given = KeyedJaggedTensor(
        keys=features.keys(), values=features.values(), lengths=features.lengths(), weights=learned
    )
    out = batches.BagSplitter([batches.FeatureSplit(feature="f", keys=("a", "b"), routing=HALVES)])(given)
    assert sorted(zip(out.values().tolist(), out.weights().tolist(), strict=True)) == [(0, 2.0), (1, 3.0), (3, 1.0)]
    if not strided:
        out.weights().mul(out.values() + 1).sum().backward()
        assert learned.grad.tolist() == [4.0, 1.0, 2.0]


def test_more_keys_than_a_small_integer_holds() -> None:
    """The sort runs on int16 while the keys fit; here they do not."""
    routing = RowRouting.from_map(torch.tensor([39_999, 0, 32_768]), 40_000)
    keys = tuple(f"b{block}" for block in range(40_000))
    out = batches.BagSplitter([batches.FeatureSplit(feature="f", keys=keys, routing=routing)])(
        keyed_jagged_tensor({"f": [[(0, 1.0), (1, 1.0), (2, 1.0)]]})
    )
    assert out.values().tolist() == [1, 2, 0]
    assert out.lengths().nonzero().squeeze(1).tolist() == [0, 32_768, 39_999]


def test_select_features() -> None:
    features = keyed_jagged_tensor({"a": [[(1, 0.5)], []], "b": [[(2, 1.5)], [(3, 2.5)]]}, weighted=True)
    assert batches.select_features(features, ["a", "b"]) is features
    twice = batches.select_features(features, ["b", "a", "b"])
    assert twice.keys() == ["b", "a", "b"]
    assert twice.values().tolist() == [2, 3, 1, 2, 3]
    assert twice.weights().tolist() == [1.5, 2.5, 0.5, 1.5, 2.5]
    assert twice.lengths().tolist() == [1, 1, 1, 0, 1, 1]
    with pytest.raises(ValueError, match=r"feature 'c': expected a known feature, got 'c'; known names: 'a', 'b'"):
        batches.select_features(features, ["a", "c"])


def with_strides(keys: str, lengths: list[int], strides: list[int]) -> KeyedJaggedTensor:
    """Three ids in bags of keys that differ in their number of samples."""
    parts = {"lengths": torch.tensor(lengths), "stride_per_key_per_rank": [[stride] for stride in strides]}
    return KeyedJaggedTensor(list(keys), torch.tensor([1, 2, 3]), **parts)


def other_offsets() -> KeyedJaggedTensor:
    ids, lengths = torch.tensor([1, 2]), torch.tensor([1, 1])
    batches.check_bags(KeyedJaggedTensor(["f"], ids, lengths=lengths, offsets=torch.tensor([0, 1, 2])))
    return KeyedJaggedTensor(["f"], ids, lengths=lengths, offsets=torch.tensor([0, 2, 2]))


def split_of(*keys: str, routing: RowRouting | None = HALVES) -> batches.FeatureSplit:
    return batches.FeatureSplit(feature="f", keys=keys, routing=routing)


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: batches.BagSplitter([split_of("a", "b")] * 2), ValueError, ".*output keys"),
    (lambda: split_of("a"), ValueError, "feature 'f'"),
    (lambda: split_of("a", "b", "c"), ValueError, "feature 'f'"),
    (lambda: split_of("a", "b", routing=None), ValueError, "feature 'f'"),
    (
        lambda: batches.select_features(with_strides("ab", [1, 1, 1], [2, 1]), ["a"]),
        NotImplementedError,
        ".*batch size",
    ),
    (lambda: batches.readable_bags(["f"], torch.tensor([1]), torch.tensor([0.0, 1.0]), None), ValueError, ".*offsets"),
    (lambda: batches.readable_bags(["f"], torch.tensor([1]), torch.zeros(0).int(), None), ValueError, ""),
    (lambda: batches.check_bags(other_offsets()), ValueError, "feature 'f'"),
    (lambda: batches.check_bags(with_strides("fgh", [1, 0, 1, 1, 7], [2, 1, 2])), ValueError, "feature 'h'"),
]


@pytest.mark.parametrize(("call", "kind", "place"), REFUSED)
def test_what_does_not_fit_is_refused(call: Callable[[], object], kind: type[Exception], place: str) -> None:
    with pytest.raises(kind, match=f"^{place}"):
        call()


META = torch.device("meta")
"""A device without any machine's need of one."""
TABLE = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f", "g"])


def bags() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.tensor([2, 2, 0, 3]),
        lengths=torch.tensor([2, 1, 0, 1]),
        weights=torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )


def test_bags_by_key_are_those_of_to_dict_where_the_batch_is() -> None:
    features, expected = bags(), bags().to_dict()
    features.to_dict()
    moved = features.to(META)
    assert moved.to_dict()["f"].values().device.type == "cpu"  # what torchrec does, and the reason for all this
    for of_key in batches.jagged_by_key(moved).values():
        assert {of_key.values().device, of_key.lengths().device, of_key.weights().device} == {META}
    assert batches.jagged_by_key(features) is batches.jagged_by_key(features)  # made once
    for key, of_key in batches.jagged_by_key(features).items():
        for part in (JaggedTensor.values, JaggedTensor.lengths, JaggedTensor.weights):
            assert part(of_key).equal(part(expected[key]))


@pytest.mark.parametrize("count", [count_frequencies, count_over_ranks])
def test_counting_leaves_batches_as_they_were(count: Callable[..., object]) -> None:
    features = bags()
    count([features], [TABLE])
    assert features.to(META).to_dict()["f"].values().device == META
