"""Progress of the face: a bar and a closing sentence on a terminal, nothing where there is none."""

from __future__ import annotations

import io
import logging
import sys

import pytest
import torch

import dnis_torchrec as dnis
from tests.tiny import QUICK, make_recipe


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]) -> tuple[str, str]:
    """What a search and a compression show on standard error."""
    texts = []
    for work in (
        lambda recipe: dnis.search(recipe, compression=4, settings=QUICK),
        lambda recipe: dnis.compress(recipe.model, recipe.data.train, loss=recipe.loss, compression=4),
    ):
        monkeypatch.setattr(sys, "stderr", kind())
        torch.manual_seed(0)
        work(make_recipe())
        texts.append(sys.stderr.getvalue())
    return texts[0], texts[1]


def test_calls_show_progress_and_end_in_a_sentence_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    search, compress = shown(monkeypatch, Terminal)
    assert "plain, epoch 1 of at most 1:" in search
    for text in (search, compress):
        sentence = text.splitlines()[-1]
        assert sentence.startswith("Tables are 4.")
        assert "bytes instead of 1,664; " in sentence
        assert "uncompressed" in sentence


def test_elsewhere_they_show_nothing_but_log_it(monkeypatch, caplog) -> None:
    with caplog.at_level(logging.INFO, "dnis_torchrec"):
        assert shown(monkeypatch, io.StringIO) == ("", "")
    messages = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith("Tables are 4.") for message in messages) == 2
    assert any(message.startswith("epoch 0, plain: train loss") for message in messages)
