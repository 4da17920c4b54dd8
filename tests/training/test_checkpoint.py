"""Checkpoints: everything comes back bit by bit, in every sharding; a file that does not fit changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.training.checkpoint import load_checkpoint, save_checkpoint, state_tensors
from tests.small_models import (
    MODELS,
    SHARDING_TYPES,
    TwoCollections,
    alpha_of,
    blocks_for,
    predict,
    randomise_alpha_,
    shard_as,
)


def build(name: str, *, prepared: bool, sharding_type: str | None = None) -> nn.Module:
    """A model with weights and alpha of its own."""
    model = MODELS[name]()
    if prepared:
        model = prepare_(model, blocks_for(model))
        randomise_alpha_(model)
    return model if sharding_type is None else shard_as(model, sharding_type)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state_tensors(model).items()}


def assert_state(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = state_tensors(model)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("sharding_type", [None, *SHARDING_TYPES])
@pytest.mark.usefixtures("gloo")
def test_round_trip(name: str, prepared: bool, sharding_type: str | None, tmp_path: Path) -> None:
    saved, other = (build(name, prepared=prepared, sharding_type=sharding_type) for _ in range(2))
    assert not torch.allclose(predict(saved), predict(other))
    expected = snapshot(saved)
    save_checkpoint(tmp_path / "last", saved)
    assert_state(saved, expected)
    load_checkpoint(tmp_path / "last", other)
    assert_state(other, expected)
    assert torch.equal(predict(other), predict(saved))
    assert [path.name for path in tmp_path.iterdir()] == ["last.rank0.safetensors"]


def test_everything_is_saved_once() -> None:
    """Tables by name, shared alpha once, dense weights and buffers; nothing twice."""
    model = TwoCollections()
    model.register_buffer("steps", torch.tensor([3.0]))
    prepare_(model, blocks_for(model))
    names = ["table/user/0/0", "table/genre/0/0", "table/movie/0/0"]
    names += ["dense/steps", "dense/first.soft_selection.dim8", "dense/over.weight", "dense/over.bias"]
    assert sorted(state_tensors(model)) == sorted(names)
    assert list(state_tensors(MODELS["bare"]())) == ["table/user/0/0", "table/movie/0/0", "table/genre/0/0"]


@pytest.mark.usefixtures("gloo")
def test_column_shards_are_told_apart() -> None:
    sharded = shard_as(MODELS["bare"](), "column_wise")
    assert sorted(state_tensors(sharded)) == [f"table/{t}/0/{c}" for t in ("genre", "movie", "user") for c in (0, 4)]


def test_the_previous_one_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("dlrm", prepared=True)
    expected = snapshot(model)
    save_checkpoint(tmp_path / "last", model)

    def half(tensors, path):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("dnis_torchrec.training.checkpoint.local.save_file", half)
    randomise_alpha_(model)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path / "last", model)
    load_checkpoint(tmp_path / "last", model)
    assert_state(model, expected)


def refused(path: Path, model: nn.Module, message: str) -> None:
    """Loading fails with this message and changes nothing."""
    expected = snapshot(model)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path, model)
    assert_state(model, expected)


def test_no_name_is_guessed_where_all_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def guess(*args: object, **given: object) -> list[str]:
        raise AssertionError("it takes longer than all the rest where there are many tables")

    model = build("dlrm", prepared=True)
    save_checkpoint(tmp_path / "last", model)
    monkeypatch.setattr("difflib.get_close_matches", guess)
    load_checkpoint(tmp_path / "last", model)


def test_absent_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path / "last", MODELS["dlrm"](), r"last\.rank0\.safetensors: expected a checkpoint file, got none")


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_damaged_checkpoint(keep: int, tmp_path: Path) -> None:
    model = build("dlrm", prepared=True)
    save_checkpoint(tmp_path / "last", model)
    file = tmp_path / "last.rank0.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = r"last\.rank0\.safetensors: expected a whole safetensors file, got .*; use another one"
    refused(tmp_path / "last", model, message)


def test_checkpoint_of_other_tables(tmp_path: Path) -> None:
    model = build("dlrm", prepared=True)
    save_checkpoint(tmp_path / "last", model)
    file = tmp_path / "last.rank0.safetensors"
    whole = load_file(file)

    def change(**tensors: torch.Tensor | None) -> None:
        names = {name.replace("__", "/"): value for name, value in tensors.items()}
        save_file({name: value for name, value in (whole | names).items() if value is not None}, file)

    change(table__movie__0__0=None, table__movies__0__0=whole["table/movie/0/0"])
    message = "table/movie/0/0: expected in the checkpoint, got absent; did you mean 'table/mov"
    refused(tmp_path / "last", model, message)
    change(table__movie__0__0=torch.ones(4, 8))
    refused(tmp_path / "last", model, r"table/movie/0/0: expected shape \(9, 8\), got \(4, 8\)")
    change(table__more__0__0=torch.ones(4, 8))
    refused(tmp_path / "last", model, r"expected nothing that the model lacks, got \['table/more/0/0'\]")


def test_checkpoint_of_a_prepared_model_is_not_for_a_plain_one(tmp_path: Path) -> None:
    model = build("dlrm", prepared=True)
    save_checkpoint(tmp_path / "last", model)
    message = r"expected nothing that the model lacks, got \['dense/.*soft_selection\.dim8'\]"
    refused(tmp_path / "last", MODELS["dlrm"](), message)
    assert alpha_of(model).dims == (8,)


@pytest.mark.usefixtures("gloo")
def test_checkpoint_of_another_sharding(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last", shard_as(MODELS["bare"](), "column_wise"))
    other = shard_as(MODELS["bare"](), "table_wise")
    refused(tmp_path / "last", other, r"table/\w+/0/0: expected shape \(\d+, 8\), got \(\d+, 4\)")
