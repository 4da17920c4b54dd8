"""HeldBuffers: each buffer has a second owner, whatever becomes of the module."""

from __future__ import annotations

import copy
import io

import torch

from dnis_torchrec.serving.packed import HeldBuffers


def is_held(module: HeldBuffers) -> bool:
    """Whether C++ owns each buffer beside Python: one that Python alone owned would have a use count of 1."""
    return all(buffer._use_count() > 1 for buffer in module.buffers())


def make() -> HeldBuffers:
    return HeldBuffers({"a": torch.arange(3.0), "b": torch.zeros(2, dtype=torch.uint8), "none": torch.ones(0)})


def test_every_buffer_is_held() -> None:
    assert not torch.ones(1)._use_count() > 1
    assert is_held(make())
    with torch.no_grad():
        assert is_held(make())
    tensor = torch.ones(2)
    with torch.inference_mode():
        assert is_held(HeldBuffers({"a": tensor}))


def test_views_follow_buffers_that_are_replaced() -> None:
    module = make()
    module.double()
    assert is_held(module)
    module.load_state_dict({"a": torch.ones(3), "b": torch.ones(2).byte(), "none": torch.ones(0)}, assign=True)
    assert is_held(module)
    assert module.get_buffer("a").tolist() == [1.0] * 3


def test_copies_hold_their_own_and_nothing_is_stored_twice() -> None:
    module = make()
    other = copy.deepcopy(module)
    assert is_held(other)
    other.get_buffer("a").zero_()
    assert module.get_buffer("a").tolist() == [0.0, 1.0, 2.0]
    large, file = HeldBuffers({"a": torch.zeros(100_000)}), io.BytesIO()
    torch.save(large, file)
    assert file.tell() < 500_000
    assert list(large.state_dict()) == ["a"]
    assert not HeldBuffers({"a": torch.zeros(1)}, persistent=False).state_dict()
