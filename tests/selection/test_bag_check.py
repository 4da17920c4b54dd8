"""Bags are checked before the lookup, compiled or not: lengths that are not those of the ids, by feature name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.ops import batches_triton
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.wrapper import UNLIMITED, BagCheck
from tests.small_models import ROWS, blocks, collection, operators
from tests.triton_on_numpy import without_triton

KEYS = [f"{name}_id" for name in ROWS]
BAD = {
    "too many": ([1] * 14 + [2], "feature 'genre_id': expected no more ids than there are, got a bag of 2"),
    "too few": ([1] * 14 + [0], "expected as many ids as their lengths add up to, 14, got 15"),
    "one left over": ([1] * 4 + [0] + [1] * 10, "expected as many ids as their lengths add up to, 14, got 15"),
    "negative": ([1] * 5 + [2, -1, 2, 1, 1] + [1] * 5, "feature 'movie_id': expected lengths of at least 0, got -1"),
    "huge": ([2**62, 2**62, 2**62, 2**62, 1] + [1] * 10, "feature 'user_id': expected no more ids than there are"),
    "all": ([15] * 15, "feature 'user_id': expected no more ids than there are"),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", list(BAD))
def test_lengths_that_are_not_those_of_the_ids(name: str, grad: bool, compiled: bool) -> None:
    lengths, message = BAD[name]
    features = KeyedJaggedTensor(keys=KEYS, values=torch.zeros(15, dtype=torch.int64), lengths=torch.tensor(lengths))
    model = prepare_(nn.ModuleDict({"e": collection()}), blocks())
    with operators(compiled), torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message):
        model["e"](features)


def test_fewer_weights_than_ids() -> None:
    features = KeyedJaggedTensor(
        keys=KEYS, values=torch.zeros(15, dtype=torch.int64), lengths=torch.ones(15).int(), weights=torch.ones(14)
    )
    model = prepare_(nn.ModuleDict({"e": collection()}), blocks())
    with pytest.raises(ValueError, match="expected a weight for each of 15 ids, got 14 weights"):
        model["e"](features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int16])
def test_ids_of_other_types(dtype: torch.dtype) -> None:
    features = KeyedJaggedTensor(keys=KEYS, values=torch.zeros(15, dtype=dtype), lengths=torch.ones(15).int())
    model = prepare_(nn.ModuleDict({"e": collection()}), blocks())
    with pytest.raises(TypeError, match="features 'user_id', 'movie_id', 'genre_id': expected int32 or int64 ids"):
        model["e"](features)


@pytest.mark.parametrize("compiled", [True, False])
def test_of_a_key_that_occurs_twice_the_later_one_is_checked_and_read(compiled: bool) -> None:
    with operators(compiled):
        model = prepare_(nn.ModuleDict({"e": collection()}), blocks())
        ids = [ROWS["user"] + 5, ROWS["user"] - 1, ROWS["movie"] - 1, ROWS["genre"] - 1]
        features = KeyedJaggedTensor(keys=["user_id", *KEYS], values=torch.tensor(ids), lengths=torch.ones(4).int())
        expected = KeyedJaggedTensor(keys=KEYS, values=torch.tensor(ids[1:]), lengths=torch.ones(3).int())
        assert torch.equal(model["e"](features).values(), model["e"](expected).values())
        features = KeyedJaggedTensor(
            keys=["user_id", *KEYS], values=torch.tensor([*ids[:3], ROWS["genre"]]), lengths=torch.ones(4).int()
        )
        with pytest.raises(ValueError, match=f"feature 'genre_id': expected ids in 0..{ROWS['genre'] - 1}"):
            model["e"](features)


def is_refused(check: Callable[[], object]) -> bool:
    """Whether a check raises."""
    try:
        check()
    except (ValueError, RuntimeError):
        return True
    return False


def is_refused_by_the_kernel(bag_check: BagCheck, features: KeyedJaggedTensor) -> bool:
    """Whether the Triton kernel, on numpy, finds a fault."""
    bounds, longest = bag_check._limits_there(tuple(features.keys()), torch.device("cpu"))
    parts = [part.contiguous() for part in (features.values(), features.lengths(), features.offsets(), bounds, longest)]
    with pytest.MonkeyPatch.context() as patch:
        without_triton(patch, [batches_triton], {"_check_kernel": "_check_bags"}, [])
        return bool(batches_triton.bad_bags(*parts, UNLIMITED))


@given(st.data())
def test_a_gpu_refuses_what_a_cpu_refuses(data: st.DataObject) -> None:
    """The assertions of a GPU, which raise at once on a CPU, beside the checks of a CPU, feature by feature."""
    bag_check = prepare_(nn.ModuleDict({"e": collection()}), blocks(), multi_hot_features=["movie_id"])["e"].bag_check
    size = data.draw(st.integers(0, 3), label="samples")
    longest = {key: 3 if key == "movie_id" else 1 for key in KEYS}
    keys = data.draw(st.permutations([*KEYS, "of nobody"]), label="keys")
    lengths = [data.draw(st.lists(st.integers(0, longest.get(key, 2)), min_size=size, max_size=size)) for key in keys]
    rows = {f"{name}_id": number for name, number in ROWS.items()}
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


@pytest.mark.parametrize("id_of_nobody", [-1, torch.iinfo(torch.int64).max])
def test_ids_of_a_feature_that_nobody_reads_may_be_anything(id_of_nobody: int) -> None:
    """Such as a hash of 64 bits, of a model's other collection."""
    bag_check = prepare_(nn.ModuleDict({"e": collection()}), blocks())["e"].bag_check
    ids, lengths = torch.tensor([0, 0, 0, id_of_nobody]), torch.ones(4, dtype=torch.int32)
    features = KeyedJaggedTensor([*KEYS, "of nobody"], ids, lengths=lengths)
    bag_check(features)
    bag_check._assert_good(features)
    assert not is_refused_by_the_kernel(bag_check, features)


def test_limits_of_a_batch_are_copied_to_a_device_once() -> None:
    bag_check = prepare_(nn.ModuleDict({"e": collection()}), blocks())["e"].bag_check
    on_meta, again = (bag_check._limits_there(tuple(KEYS), torch.device("meta")) for _ in range(2))
    assert on_meta is again
    assert on_meta[0].device.type == "meta"
    assert bag_check._limits_there(tuple(KEYS), torch.device("cpu"))[0].tolist() == list(ROWS.values())


def test_lengths_below_0_are_refused_where_their_sum_is_right() -> None:
    bag_check = prepare_(nn.ModuleDict({"e": collection()}), blocks(), multi_hot_features=KEYS)["e"].bag_check
    features = KeyedJaggedTensor(KEYS, torch.zeros(3, dtype=torch.int64), lengths=torch.tensor([2, -1, 1, 0, 1, 0]))
    assert is_refused(lambda: bag_check(features))
    assert is_refused(lambda: bag_check._assert_good(features))
    assert is_refused_by_the_kernel(bag_check, features)


@pytest.mark.parametrize(("name", "row", "is_good"), [(key, row, row < 0) for key in KEYS for row in (-1, 0)])
def test_the_first_id_behind_a_table_is_refused_and_the_last_of_it_is_not(name: str, row: int, is_good: bool) -> None:
    bag_check = prepare_(nn.ModuleDict({"e": collection()}), blocks())["e"].bag_check
    ids = torch.tensor([ROWS[key.removesuffix("_id")] + row if key == name else 0 for key in KEYS])
    features = KeyedJaggedTensor(KEYS, ids, lengths=torch.ones(3, dtype=torch.int32))
    assert is_refused(lambda: bag_check(features)) != is_good
    assert is_refused(lambda: bag_check._assert_good(features)) != is_good
    assert is_refused_by_the_kernel(bag_check, features) != is_good


@pytest.mark.parametrize("num_ids", [0, 1])
def test_ids_of_no_bags_are_refused(num_ids: int) -> None:
    nothing, ids = torch.empty(0, dtype=torch.int64), torch.zeros(num_ids, dtype=torch.int64)
    assert bool(batches_triton.bad_bags(ids, nothing, torch.zeros(1), nothing, nothing, UNLIMITED)) == bool(num_ids)
