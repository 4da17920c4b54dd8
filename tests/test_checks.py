"""The wording of errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec import checks
from dnis_torchrec.checks import check, check_known, describe, nearest

NAMES = st.lists(st.text(min_size=1, max_size=6), max_size=12)


def test_order_of_the_words() -> None:
    assert describe("seed", "an integer", -1) == "seed: expected an integer, got -1"
    assert describe("seed", "an integer", "x", "give 0") == "seed: expected an integer, got x; give 0"
    assert describe("ranks", "supported is one process", 2) == "ranks: supported is one process, got 2"


def test_check_raises_only_if_the_condition_fails() -> None:
    check(True, "seed", "an integer >= 0", -1)
    with pytest.raises(ValueError, match=r"^seed: expected an integer >= 0, got -1$"):
        check(False, "seed", "an integer >= 0", -1)
    with pytest.raises(ValueError, match=r"^seed: expected an integer >= 0, got -1; give 0$"):
        check(False, "seed", "an integer >= 0", -1, "give 0")


def test_nearest_names_the_close_ones_else_all() -> None:
    assert nearest("moive", ["user", "movie"]) == "did you mean 'movie'?"
    assert nearest("abc1", ["abc3", "abc2", "zzz"]) == "did you mean 'abc3' or 'abc2'?"
    assert nearest("abc", ["abc1", "abc2", "abc3", "abc4"]).count(" or ") == 2
    assert nearest("xyz", ["movie", "user", "movie"]) == "known names: 'movie', 'user'"
    assert nearest("xyz", []) == "known names: none"
    assert nearest("xyz", [f"table{i:02}" for i in range(21)]).endswith("'table19', ...")
    assert nearest("xyz", [f"table{i:02}" for i in range(20)]).endswith("'table19'")


@given(st.text(min_size=1, max_size=6), NAMES)
def test_check_known_lets_exactly_the_known_names_through(name: str, known: list[str]) -> None:
    if name in known:
        check_known("table", name, iter(known))
        return
    with pytest.raises(ValueError, match="expected a known table") as caught:
        check_known("table", name, iter(known))
    message = str(caught.value)
    assert message == f"table {name!r}: expected a known table, got {name!r}; {nearest(name, known)}"
    assert not known or any(repr(other) in message.partition("; ")[2] for other in known)


def test_near_names_are_looked_for_only_when_a_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of multi-hot features is checked at every step of training."""
    monkeypatch.setattr(checks, "nearest", lambda *_: pytest.fail("looked for"))
    check_known("table", "user", {"user": 1})
    check_known("table", "user", iter(["movie", "user"]))
