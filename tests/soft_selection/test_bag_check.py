"""Bags are checked before the lookup, compiled or not: lengths that are not those of the ids, by feature name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.soft_selection.swap import prepare_
from tests.small_models import ROWS, blocks, collection, operators

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
