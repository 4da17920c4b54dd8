"""BagSplitter against a splitter of Python lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops.batches import BagSplitter, FeatureSplit, select_features
from tests.serving_reference import keyed_jagged_tensor, routings

Bags = dict[str, list[list[tuple[int, float]]]]

HALVES = RowRouting(4, 2, boundaries=torch.tensor([0, 2, 4]))


def split_bags(splits: list[FeatureSplit], bags: Bags) -> Bags:
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
def splits_and_bags(draw: st.DrawFn) -> tuple[list[FeatureSplit], Bags]:
    shared = [draw(routings()) for _ in range(2)]
    batch_size = draw(st.integers(1, 4))
    splits, rows_of = [], {}
    for index in range(draw(st.integers(1, 4))):
        feature, routing = draw(st.sampled_from(["f", "g", "h"])), draw(st.sampled_from([*shared, None]))
        keys = tuple(
            f"{index}/{feature}/b{block}" if routing is None or draw(st.integers(0, 3)) else None
            for block in range(1 if routing is None else routing.num_blocks)
        )
        splits.append(FeatureSplit(feature=feature, keys=keys, routing=routing))
        num_rows = 99 if routing is None else routing.num_embeddings
        rows_of[feature] = min(num_rows, rows_of.get(feature, 99))
    bags = {}
    for feature in draw(st.permutations(["f", "g", "h"])):
        entry = st.tuples(st.integers(0, rows_of.get(feature, 5) - 1), st.integers(-4, 4).map(float))
        bags[feature] = draw(st.lists(st.lists(entry, max_size=5), min_size=batch_size, max_size=batch_size))
    return splits, bags


@settings(max_examples=150)
@given(splits_and_bags(), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_equals_python_lists(case: tuple[list[FeatureSplit], Bags], weighted: bool, dtype: torch.dtype) -> None:
    splits, bags = case
    features = keyed_jagged_tensor(bags, weighted=weighted, id_dtype=dtype)
    out = BagSplitter(splits)(features)
    expected = split_bags(splits, bags)
    assert out.keys() == list(expected)
    assert out.stride() == features.stride()
    assert out.values().dtype == dtype
    assert out.lengths().dtype == features.lengths().dtype
    if not expected:
        assert out.values().numel() == 0
        return
    wanted = keyed_jagged_tensor(expected, weighted=weighted, id_dtype=dtype)
    assert out.lengths().equal(wanted.lengths())
    assert out.values().equal(wanted.values())
    if weighted:
        assert out.weights().equal(wanted.weights())
    else:
        assert out.weights_or_none() is None


def test_input_stays_as_it_was() -> None:
    features = keyed_jagged_tensor({"f": [[(3, 1.0), (0, 2.0)]]}, weighted=True)
    BagSplitter([FeatureSplit(feature="f", keys=("a", "b"), routing=HALVES)])(features)
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
    out = BagSplitter([FeatureSplit(feature="f", keys=("a", "b"), routing=HALVES)])(given)
    assert sorted(zip(out.values().tolist(), out.weights().tolist(), strict=True)) == [(0, 2.0), (1, 3.0), (3, 1.0)]
    if not strided:
        out.weights().mul(out.values() + 1).sum().backward()
        assert learned.grad.tolist() == [4.0, 1.0, 2.0]


def test_features_of_one_table_share_its_map() -> None:
    routing = RowRouting.from_map(torch.tensor([1, 0, 1]), 2)
    splits = [FeatureSplit(feature=f, keys=(f"{f}/b0", f"{f}/b1"), routing=routing) for f in ("f", "g", "h")]
    splitter = BagSplitter(splits)
    assert sum(buffer.numel() for buffer in splitter.buffers() if buffer.dtype == torch.uint8) == 3


def test_more_keys_than_a_small_integer_holds() -> None:
    """The sort runs on int16 while the keys fit; here they do not."""
    routing = RowRouting.from_map(torch.tensor([39_999, 0, 32_768]), 40_000)
    keys = tuple(f"b{block}" for block in range(40_000))
    out = BagSplitter([FeatureSplit(feature="f", keys=keys, routing=routing)])(
        keyed_jagged_tensor({"f": [[(0, 1.0), (1, 1.0), (2, 1.0)]]})
    )
    assert out.values().tolist() == [1, 2, 0]
    assert out.lengths().nonzero().squeeze(1).tolist() == [0, 32_768, 39_999]


def test_holds_no_state() -> None:
    splitter = BagSplitter([FeatureSplit(feature="f", keys=("a", "b"), routing=HALVES)])
    assert splitter.state_dict() == {}
    assert list(splitter.parameters()) == []


def test_equal_output_keys_are_refused() -> None:
    split = FeatureSplit(feature="f", keys=("a", "b"), routing=HALVES)
    with pytest.raises(ValueError, match="distinct output keys"):
        BagSplitter([split, split])


@pytest.mark.parametrize(("keys", "routing"), [(("a",), HALVES), (("a", "b", "c"), HALVES), (("a", "b"), None)])
def test_keys_have_to_match_the_blocks(keys: tuple[str, ...], routing: RowRouting | None) -> None:
    with pytest.raises(ValueError, match=r"feature 'f': expected [12] keys"):
        FeatureSplit(feature="f", keys=keys, routing=routing)


def test_select_features() -> None:
    features = keyed_jagged_tensor({"a": [[(1, 0.5)], []], "b": [[(2, 1.5)], [(3, 2.5)]]}, weighted=True)
    assert select_features(features, ["a", "b"]) is features
    twice = select_features(features, ["b", "a", "b"])
    assert twice.keys() == ["b", "a", "b"]
    assert twice.values().tolist() == [2, 3, 1, 2, 3]
    assert twice.weights().tolist() == [1.5, 2.5, 0.5, 1.5, 2.5]
    assert twice.lengths().tolist() == [1, 1, 1, 0, 1, 1]
    with pytest.raises(ValueError, match=r"feature 'c': expected a known feature, got 'c'; known names: 'a', 'b'"):
        select_features(features, ["a", "c"])


def test_variable_batch_size_is_refused() -> None:
    features = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(NotImplementedError, match="one batch size for all features"):
        select_features(features, ["a", "b"])
