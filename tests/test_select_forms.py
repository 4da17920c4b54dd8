"""Every way of writing soft selection in the benchmark computes the same. No assertion looks at a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import select_forms
from dnis_torchrec.ops.select import are_compiled


@pytest.mark.parametrize("level", ["lower", "upper"])
def test_all_ways_have_the_results_and_gradients_of_the_formula(level: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pooled, grad = (torch.randn(7, 5 * 4, generator=generator) for _ in range(2))
    alpha, rows = torch.rand(3, 4, generator=generator), torch.randint(0, 3, (7, 5), generator=generator)
    expected = torch.cat([pooled[:, 4 * f : 4 * f + 4] * alpha[rows[:, f]] for f in range(5)], dim=1)
    ways = select_forms.forms(with_inductor=False)
    assert set(ways) >= {"formula", "one_hot", "sorted", "per_sample"}
    assert ("operator" in ways) == are_compiled()
    gradients = {}
    for name, select in ways.items():
        taken = select_forms.take(select, level, pooled, alpha, rows, grad)
        torch.testing.assert_close(taken.out, expected, msg=name)
        gradients[name] = taken.gradient
    for name, gradient in gradients.items():
        assert gradient.shape == (pooled if level == "lower" else alpha).shape
        torch.testing.assert_close(gradient, gradients["formula"], msg=name)


def test_it_writes_a_row_per_level_and_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(select_forms, "QUICK_ROUNDS", 2)
    path = tmp_path / "forms.json"
    threads = torch.get_num_threads()
    try:
        select_forms.main(["--quick", "--no-inductor", "--batch-size", "32", "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(path.read_text())["rows"]
    ways = list(select_forms.forms(with_inductor=False))
    assert [(row["level"], row["form"]) for row in rows] == [
        (level, way) for level in ("lower", "upper") for way in ways
    ]
    assert all(row["cpu_ratio"] > 0 and row["reference"] == ways[-1] for row in rows)
    assert "level" in capsys.readouterr().out
