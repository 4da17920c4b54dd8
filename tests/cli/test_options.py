"""Options made from settings: names, types, defaults and help stand in the dataclass alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from dnis_torchrec.cli.options import Fields, with_options


@dataclass(frozen=True, kw_only=True)
class Oven:
    """Settings of a test."""

    degrees: Annotated[int, "How hot."] = 180
    hot_air: Annotated[bool, "Blow."] = False
    top_heat: Annotated[bool, "Grill."] = True
    shelf: Annotated[str | None, "Which one."] = None
    owner: str = "nobody"

    def __post_init__(self) -> None:
        if self.degrees < 0:
            raise ValueError(f"degrees: expected at least 0, got {self.degrees}")


def bake(cake: Annotated[str, typer.Argument()], minutes: int = 30, *, oven: Oven) -> None:
    """Bakes."""
    print(cake, minutes, oven)


def heat(*, oven: Annotated[dict[str, Any], Fields(Oven)]) -> None:
    """Heats."""
    print(oven)


def change(*, oven: Annotated[dict[str, Any], Fields(Oven, given_only=True)]) -> None:
    """Changes."""
    print(oven)


def call(function: Any, *arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(with_options(function))
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output.strip()


def test_a_command_gets_settings_whole() -> None:
    assert call(bake, "cake") == (0, f"cake 30 {Oven()}")
    changed = Oven(degrees=90, hot_air=True, top_heat=False, shelf="low")
    options = ("--degrees", "90", "--hot-air", "--no-top-heat", "--shelf", "low")
    assert call(bake, "cake", "--minutes", "5", *options) == (0, f"cake 5 {changed}")


def test_a_command_that_completes_settings_gets_their_options_by_name() -> None:
    defaults = {"degrees": 180, "hot_air": False, "top_heat": True, "shelf": None}
    assert call(heat) == (0, str(defaults))
    assert call(heat, "--degrees", "5") == (0, str(defaults | {"degrees": 5}))


def test_a_command_may_ask_for_what_was_given_alone() -> None:
    assert call(change) == (0, "{}")
    assert call(change, "--no-top-heat", "--degrees", "180") == (0, str({"degrees": 180, "top_heat": False}))


@pytest.mark.parametrize("function", [bake, change])
def test_wrong_settings_are_wrong_arguments(function: Any) -> None:
    code, said = call(function, *(["cake"] if function is bake else []), "--degrees", "-1")
    assert (code, said) == (2, "error: degrees: expected at least 0, got -1")


def test_help_is_the_text_of_the_field_and_a_field_without_one_is_no_option() -> None:
    code, said = call(bake, "--help")
    assert code == 0
    for text in ("Bakes.", "--degrees", "How hot.", "[default: 180]", "--hot-air", "--no-top-heat", "--shelf"):
        assert text in said
    assert "--no-hot-air" not in said
    assert "owner" not in said
