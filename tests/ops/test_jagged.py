"""Bags by key: those of the device where the batch is, whatever was read of it on another one before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec import count_frequencies
from dnis_torchrec.blocks.counts import count_over_ranks
from dnis_torchrec.ops.batches import jagged_by_key

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


def test_bags_by_key_are_those_of_to_dict() -> None:
    features = bags()
    expected = bags().to_dict()
    for key, found in jagged_by_key(features).items():
        assert found.values().equal(expected[key].values())
        assert found.lengths().equal(expected[key].lengths())
        assert found.weights().equal(expected[key].weights())
    assert jagged_by_key(features) is jagged_by_key(features)  # made once


def test_a_batch_that_was_read_elsewhere_is_read_anew_where_it_is() -> None:
    features = bags()
    features.to_dict()
    moved = features.to(META)
    assert moved.to_dict()["f"].values().device.type == "cpu"  # what torchrec does, and the reason for all this
    for found in jagged_by_key(moved).values():
        assert {found.values().device, found.lengths().device, found.weights().device} == {META}
    assert jagged_by_key(features)["f"].values().tolist() == [2, 2, 0]


@pytest.mark.parametrize("count", [count_frequencies, count_over_ranks])
def test_counting_leaves_batches_as_they_were(count: Callable[..., object]) -> None:
    features = bags()
    count([features], [TABLE])
    assert features.to(META).to_dict()["f"].values().device == META
