"""What the page of a comparison says of a row whose metric is missing under some seeds, and of costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dnis_torchrec.report.compare_content import ComparisonContent
from dnis_torchrec.report.compare_lines import compared_lines, cost_lines
from dnis_torchrec.report.compare_page import render_comparison
from dnis_torchrec.report.tables import TIMES
from tests.comparison.test_comparison import make_content, make_rows
from tests.report.pages import chart


def without_mse(content: ComparisonContent, method: str, seed: int) -> ComparisonContent:
    """The same where one seed of a method lacks the primary metric; it is the worst one, which flatters its mean."""
    rows = []
    for row in content.rows:
        lines = tuple(
            replace(line, metrics={"loss": line.metrics["loss"]}) if (row.method, line.seed) == (method, seed) else line
            for line in row.group.rows
        )
        rows.append(replace(row, group=replace(row.group, rows=lines)))
    return replace(content, rows=tuple(rows))


def test_a_row_that_lacks_a_metric_under_one_seed_is_not_whole() -> None:
    whole = make_content(make_rows())
    partial = without_mse(whole, "dnis", 2)
    assert [line.row.method for line in compared_lines(whole)][-2:] == ["dnis", "uniform"]
    *_, best, last = compared_lines(partial)
    assert (best.row.method, last.row.method) == ("uniform", "dnis")
    assert best.metrics[0][1]
    assert last.metrics[0] == ("0.7250 ± 0.0212 (2 seeds)", False)
    assert last.row.point("mse") is None
    assert last.row.point("loss") is not None
    page, told = render_comparison(partial), "Rows that lack mse under a seed are left out."
    assert "Best at compression 4: uniform" in page
    assert told in page
    assert told not in render_comparison(whole)


def test_a_difference_over_fewer_seeds_than_its_row_says_so() -> None:
    rows = make_rows(dense_0="E: no")
    content = make_content(rows)
    lines = {(line.row.method, line.size): line.difference for line in compared_lines(content)}
    assert lines["uniform", "4"] == "+0.1000 ± 0.0283 (2 seeds)"
    page = render_comparison(content)
    assert "+0.0250 ± 0.0071 (2 seeds) against dense; next: uniform" in page
    marks = [text for trace in chart(page, "quality")["data"] for text in trace["hovertext"]]
    assert any("+0.0250 ± 0.0071 (2 seeds) against dense" in text for text in marks)
    assert "seeds)" not in render_comparison(make_content(make_rows()))


@pytest.mark.parametrize(("seconds", "told"), [(40.0, "3.6"), (1100.0, "100"), (1096.0, "100"), (14_630.0, "1.3k")])
def test_costs_have_no_exponent(seconds: float, told: str) -> None:
    rows = tuple(replace(row, seconds_of_trials=seconds) for row in make_rows())
    costs = {line.method: line.cells for line in cost_lines(make_content(rows))}
    assert costs["uniform"][1][1] == f"4 runs, the one taken 11.0 s, {told}{TIMES} dense"
