"""Tables of metrics on terminals of any width: what does not fit is left out and named, never cut."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.table import Table

from dnis_torchrec.cli.app import print_metrics, print_table

METRICS = ("ndcg@10", "recall@10", "mrr@10")
METHOD = "uniform+validation"


def build(metrics: Sequence[str]) -> Table:
    """One row of 18 columns and two between them, and 15 + 2 for every metric."""
    table = Table("method", *metrics, box=None, pad_edge=False)
    table.add_row(METHOD, *["0.4000 ± 0.0021"] * len(metrics))
    return table


def printed(*, width: int, terminal: bool, metrics: Sequence[str] = METRICS) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    print_metrics(build, metrics, more="out/comparison.html", console=console)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "shown"), [(69, 3), (68, 2), (52, 2), (51, 1), (35, 1), (20, 1), (5, 1)])
def test_a_terminal_sees_the_metrics_that_fit_and_the_names_of_the_others(width: int, shown: int) -> None:
    header, row, *rest = printed(width=width, terminal=True)
    assert header.split() == ["method", *METRICS[:shown]]
    assert row == "  ".join([METHOD, *["0.4000 ± 0.0021"] * shown])
    left_out = ", ".join(METRICS[shown:])
    assert rest == ([f"Too narrow here for {left_out}: out/comparison.html"] if left_out else [])


def test_a_file_has_all_metrics_in_one_line_each() -> None:
    assert len(printed(width=20, terminal=False)) == 2
    assert printed(width=20, terminal=False)[1].count("0.4000 ± 0.0021") == 3


def test_a_name_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("auc[test]", title="runs[v2]")
    table.add_row("a:bug:")
    print_table(table, 40)
    print_metrics(lambda metrics: table, (), more="")
    out = capsys.readouterr().out
    assert [out.count(name) for name in ("auc[test]", "runs[v2]", "a:bug:")] == [2, 2, 2]


def test_without_metrics_the_rest_is_printed() -> None:
    assert printed(width=80, terminal=True, metrics=()) == ["method", METHOD]
