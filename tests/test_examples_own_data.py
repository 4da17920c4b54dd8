"""The example on a data frame of one's own: its columns, and that a search of it runs."""

from __future__ import annotations

from pathlib import Path

import torch

import dnis_torchrec as dnis
from dnis_torchrec.search.settings import SearchSettings
from examples.own_data import draw_frame, recipe


def test_it_is_searched_from_its_frame_and_from_its_file(gloo, tmp_path: Path) -> None:
    drawn = draw_frame(400)
    drawn.to_parquet(tmp_path / "clicks.parquet")
    ours = recipe(tmp_path, embedding_dim=8)
    assert ours.data.encoder.num_embeddings.keys() == {"user", "item", "colours"}
    assert ours.data.test.rows.tolist() == list(range(360, 400))  # the latest
    settings = SearchSettings(epochs=1, patience=1, num_blocks=2)
    assert dnis.search(ours, compression=4, settings=settings).compression >= 4


def test_it_is_drawn_the_same_every_time() -> None:
    assert draw_frame(50).equals(draw_frame(50))
    weights = [recipe(None, seed=3).model.state_dict() for _ in range(2)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
