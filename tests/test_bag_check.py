"""Bags are checked before the lookup, compiled or not: lengths that are not those of the ids, by feature name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec import bag_check
from dnis_torchrec.bag_check import check_lengths
from dnis_torchrec.swap import prepare_
from tests.small_models import BATCH_SIZE, ROWS, blocks, collection

KEYS = [f"{name}_id" for name in ROWS]
BAD = {
    "too many": ([1] * 14 + [2], "feature 'genre_id': expected lengths that add up to the ids of the batch"),
    "too few": ([1] * 14 + [0], "in no bag"),
    "one left over": ([1] * 4 + [0] + [1] * 10, "in no bag"),
    "negative": ([1] * 5 + [2, -1, 2, 1, 1] + [1] * 5, "feature 'movie_id': expected lengths of at least 0, got -1"),
    "huge": ([2**62, 2**62, 2**62, 2**62, 1] + [1] * 10, "feature 'user_id': expected lengths that add up"),
    "all": ([15] * 15, "feature 'user_id': expected lengths that add up"),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", list(BAD))
def test_lengths_that_are_not_those_of_the_ids(
    monkeypatch: pytest.MonkeyPatch, name: str, grad: bool, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(bag_check, "are_compiled", lambda: False)
    lengths, message = BAD[name]
    features = KeyedJaggedTensor(keys=KEYS, values=torch.zeros(15, dtype=torch.int64), lengths=torch.tensor(lengths))
    model = prepare_(nn.ModuleDict({"e": collection()}), blocks())
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message):
        model["e"](features)


@given(st.lists(st.integers(-1, 3), min_size=2 * BATCH_SIZE, max_size=2 * BATCH_SIZE), st.integers(0, 20))
def test_only_lengths_of_the_ids_pass(lengths: list[int], num_ids: int) -> None:
    kjt = KeyedJaggedTensor(keys=["a", "b"], values=torch.zeros(num_ids), lengths=torch.tensor(lengths))
    if min(lengths) >= 0 and sum(lengths) == num_ids:
        check_lengths(kjt)
    else:
        with pytest.raises(ValueError, match="feature"):
            check_lengths(kjt)
