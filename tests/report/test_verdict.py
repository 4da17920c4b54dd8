"""The sentence that says what a run has gained, and what is uncertain about it."""

from __future__ import annotations

from typing import Any

import pytest

from dnis_torchrec.report.content import ReportRow, seed_groups
from dnis_torchrec.report.tables import MINUS
from dnis_torchrec.report.test_split import TestSplit
from dnis_torchrec.report.verdict import Rival, doubts, group_sentence, sentence

LARGE = TestSplit(num_samples=10_000)


def rival(name: str, compression: float, gain: float | None) -> Rival:
    return Rival(name=name, compression=compression, gain=gain)


def test_the_best_rival_of_the_same_bytes_is_told_and_others_are_not() -> None:
    rivals = [rival("uniform", 19.7, 0.002), rival("magnitude", 20.3, 0.001), rival("int4 rows", 7.1, -0.3)]
    told = sentence(20, "auc", 0.8, rivals, higher_is_better=True)
    assert told == "20 times smaller: test auc 0.8000, +0.0010 against magnitude of the same bytes (higher is better)."


@pytest.mark.parametrize("higher", [True, False])
def test_without_a_rival_of_the_same_bytes_the_smallest_one_is_told_with_its_size(higher: bool) -> None:
    rivals = [rival("uncompressed", 1, -0.002), rival("int8 rows", 3.8, -0.002), rival("int4 rows", 7.1, 0.004)]
    told = sentence(20, "x", 0.8, rivals, higher_is_better=higher)
    assert f"{MINUS}0.0020 against uncompressed, +0.0040 against int4 rows at 7.1 times" in told


def test_the_model_itself_goes_before_another_uncompressed_one() -> None:
    rivals = [rival("dense", 3.8, 0.5), rival("uncompressed", 1, -0.002)]
    assert f"{MINUS}0.0020 against uncompressed (" in sentence(20, "x", 0.8, rivals, higher_is_better=True)
    assert "+0.5000 against dense (" in sentence(20, "x", 0.8, rivals[:1], higher_is_better=True)


def test_two_per_cent_of_the_bytes_are_the_same_bytes_and_three_are_not() -> None:
    assert [rival("uniform", size, 0).has_the_bytes_of(20) for size in (19.4, 19.61, 20.4, 20.5)] == [
        *(False, True, True, False)
    ]


def test_what_was_not_measured_is_not_compared() -> None:
    assert sentence(8, "auc", None, [], higher_is_better=True) == (
        "8 times smaller; auc was not measured on the test split."
    )
    told = sentence(8, "auc", 0.7, [rival("uncompressed", 1, None), rival("uniform", 8, None)], higher_is_better=True)
    assert told == "8 times smaller: test auc 0.7000 (higher is better)."


def row(method: str, compression: float, seed: int, mse: float) -> ReportRow:
    fields: dict[str, Any] = {"parameters": 1, "dense_parameters": 8, "bytes": {}, "seconds": 0.0}
    return ReportRow(method=method, compression=compression, seed=seed, metrics={"mse": mse}, **fields)


def test_gains_are_means_within_the_seeds_that_both_have() -> None:
    rows = [row("dnis", 8, 0, 0.70), row("dnis", 8, 1, 0.90), row("uniform", 8, 1, 0.91), row("uniform", 8, 2, 0.1)]
    groups = seed_groups(rows)
    subject = next(group for group in groups if group.method == "dnis")
    told = group_sentence(subject, groups, "mse", higher_is_better=False)
    assert f"test mse 0.8000, {MINUS}0.0100 against uniform of the same bytes" in told


def history(*losses: float, phase: str | None = "plain") -> list[dict[str, Any]]:
    return [{"phase": phase, "selection_loss": loss} if phase else {"selection_loss": loss} for loss in losses]


@pytest.mark.parametrize(
    ("epochs", "max_epochs", "told"),
    [
        (history(0.5, 0.4, 0.45), 9, []),
        (history(0.4, 0.5, 0.6), 9, ["overfits from its second epoch on"]),
        (history(0.4, 0.5, phase=None), 9, ["overfits from its second epoch on"]),
        (history(0.5, 0.4), 2, ["still improving in its last epoch, 2"]),
        (history(0.5), 1, ["still improving in its last epoch, 1"]),
        ([*history(0.5, 0.4, 0.45), *history(0.1, 0.2, phase="ramp")], 9, []),
        (history(0.1, 0.2, phase="given"), 2, []),
    ],
)
def test_doubts_of_plain_training(epochs: list[dict[str, Any]], max_epochs: int, told: list[str]) -> None:
    found = doubts(LARGE, {}, epochs, max_epochs)
    assert len(found) == len(told)
    assert all(part in whole for part, whole in zip(told, found, strict=True))


def test_doubts_of_the_test_split() -> None:
    assert doubts(LARGE, {"mse": 3.0, "ne": 0.99}) == ()
    assert doubts(TestSplit(num_samples=9_999), {}) == ("small test split: 9,999 samples",)
    varied = TestSplit(num_samples=10_000, variance=1.5)
    assert doubts(varied, {"mse": 1.49}) == ()
    assert doubts(varied, {"mse": 1.5}) == ("no better than predicting the mean label, whose test mse is 1.5000",)
    assert doubts(LARGE, {"ne": 1.02}) == ("no better than predicting the mean label: test ne is 1.0200",)
