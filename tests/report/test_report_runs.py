"""Tests of what a report makes of runs: the paper's figures, several runs together, images while a search goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.jobs.report_job import run_report
from dnis_torchrec.jobs.search_job import run_search
from dnis_torchrec.report import (
    RunResults,
    SearchImages,
    block_summaries,
    combine,
    count_rows,
    named_alpha,
    searched_summaries,
)
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from tests.report.test_report import make_row
from tests.searched_runs import QUICK, quick_job, without_images

COUNTS = FrequencyCounts(
    {"user": torch.tensor([9, 0, 7, 2, 100, 1]), "genre": torch.tensor([50, 3, 0])}, {"user": 1, "genre": 2}, 60
)


def make_row_blocks() -> RowBlocks:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=len(counts), embedding_dim=4, feature_names=[name])
        for name, counts in COUNTS.counts.items()
    ]
    return blocks_from_counts(COUNTS, tables, num_blocks=2)


def make_scheme(blocks: RowBlocks, retained: dict[str, Tensor], num_retained: dict[str, int]) -> MixedDimensionScheme:
    return MixedDimensionScheme(
        {
            name: TableScheme(
                name=name,
                collection="ebc",
                num_embeddings=routing.num_embeddings,
                embedding_dim=4,
                pooling="sum",
                feature_names=(name,),
                is_weighted=False,
                routing=routing.without_rows(COUNTS.never_seen(name)),
                retained=retained[name],
                num_retained=num_retained[name],
            )
            for name, routing in blocks.routings.items()
        }
    )


def make_runs() -> dict[str, RunResults]:
    def run(name: str, dim: int = 8, blocks: int = 4, **changes: object) -> RunResults:
        configuration = {"compression": 4.0, "num_blocks": blocks, "patience": 3}
        rows = (make_row("dnis", 4.0, metrics={"auc": dim / 100 + blocks / 1000}), make_row("dense", 1.0))
        fields = {"configuration": configuration, "embedding_dim": dim, "rows": rows, "recipe": "a:b", "name": name}
        return RunResults(**(fields | changes))

    size = {"compression": 8.0, "num_blocks": 4, "patience": 3}
    return {
        "first": run("first"),
        "smaller": run("smaller", configuration=size, rows=(make_row("dnis", 8.0), make_row("dense", 1.0))),
        "narrow": run("narrow", dim=4),
        "coarse": run("coarse", blocks=2),
        "other recipe": run("other", recipe="a:c"),
        "other patience": run("other", configuration={"num_blocks": 4, "patience": 9}),
    }


# From a run


def test_alpha_is_named_by_table() -> None:
    by_table = make_row_blocks()
    alpha = {4: torch.rand(by_table.alpha_shapes[4])}
    named = named_alpha(alpha, by_table)
    assert torch.equal(torch.cat([named["user"], named["genre"]]), alpha[4])


def test_blocks_are_told_alike_while_searching_and_after() -> None:
    blocks = make_row_blocks()
    kept = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    alpha = {4: kept[: blocks.alpha_shapes[4][0]] * 0.5}
    retained = {name: values > 0 for name, values in named_alpha(alpha, blocks).items()}
    area = {
        name: int((routing.without_rows(COUNTS.never_seen(name)).row_counts() * retained[name].sum(1)).sum())
        for name, routing in blocks.routings.items()
    }
    scheme = make_scheme(blocks, retained, area)
    after = block_summaries(scheme, blocks)
    during = searched_summaries(alpha, blocks)
    told = {(s.table, s.block): (s.occurrences, s.retained_dims, s.embedding_dim) for s in during}
    assert {
        (s.table, s.block): (s.occurrences, s.retained_dims, s.embedding_dim) for s in after
    }.items() <= told.items()
    assert told["user", 0] == (116, 3, 4)
    assert sum(s.num_rows for s in during) == 9
    assert sum(s.num_rows for s in after) == 7, "rows that never occur are dropped"


def test_rows_of_a_run_are_counted_from_the_scheme_or_from_single_values() -> None:
    blocks = make_row_blocks()
    retained = torch.tensor([[True, True, True, False], [False, True, False, False]])
    area = {
        name: int((routing.without_rows(COUNTS.never_seen(name)).row_counts() * retained.sum(1)).sum())
        for name, routing in blocks.routings.items()
    }
    whole = make_scheme(blocks, dict.fromkeys(COUNTS.counts, retained), area)
    found = count_rows(whole, COUNTS).num_rows
    assert found[0].tolist() == [2, 0, 0, 0, 0]
    assert int(found.sum()) == 9
    assert int((found.sum(0) * torch.arange(5)).sum()) == whole.parameters
    holes = make_scheme(blocks, dict.fromkeys(COUNTS.counts, retained), area | {"user": 2})
    weights = torch.zeros(6, 4)
    weights[4, :2] = -1.0
    found = count_rows(holes, COUNTS, {"user": weights}).num_rows
    assert int((found.sum(0) * torch.arange(5)).sum()) == 2 + area["genre"]
    assert found[9].tolist() == [0, 0, 1, 0, 0]


def test_single_values_are_told_as_their_mean_over_the_rows_of_a_block() -> None:
    blocks = make_row_blocks()
    in_use = torch.tensor([[True, True, True, True], [False, True, False, False]])
    weights = {"user": torch.zeros(6, 4), "genre": torch.zeros(3, 4)}
    weights["user"][4, :3] = weights["user"][0, 3] = weights["user"][5, 1] = 0.5
    weights["genre"][0] = 1.0
    holes = make_scheme(blocks, dict.fromkeys(COUNTS.counts, in_use), {"user": 5, "genre": 4})
    told = {(s.table, s.block): s for s in block_summaries(holes, blocks, weights)}
    for (table, block), summary in told.items():
        of_block = blocks.routings[table].all_blocks() == block
        rows = [row for row in of_block.nonzero().flatten().tolist() if COUNTS.counts[table][row] > 0]
        values = sum(int(weights[table][row].count_nonzero()) for row in rows)
        assert summary.num_rows == len(rows)
        assert summary.retained_dims == pytest.approx(values / len(rows))
        assert summary.occurrences == sum(int(COUNTS.counts[table][row]) for row in rows)
    assert sum(s.num_rows * s.retained_dims for s in told.values()) == pytest.approx(holes.parameters)


# Several runs


def test_runs_are_sorted_by_what_they_differ_in() -> None:
    runs = make_runs()
    together = combine([runs[name] for name in ("first", "smaller", "narrow", "coarse")])
    assert [(row.method, row.compression) for row in together.rows] == [("dnis", 4.0), ("dense", 1.0), ("dnis", 8.0)]
    by_dim = {name: [(d, row.compression) for d, row in points] for name, points in together.by_embedding_dim.items()}
    times = "\N{MULTIPLICATION SIGN}"
    assert by_dim == {
        f"dnis at 4{times}": [(8, 4.0), (4, 4.0)],
        f"dnis at 8{times}": [(8, 8.0)],
        "dense": [(8, 1.0), (4, 1.0)],
    }
    by_blocks = {name: sorted(s for s, _ in points) for name, points in together.by_num_blocks.items()}
    assert by_blocks == {f"dnis at 4{times}": [2, 4], f"dnis at 8{times}": [4]}
    assert together.drawn_only == ("narrow", "coarse")
    alone = combine([runs["first"]])
    assert (alone.rows, alone.by_embedding_dim, alone.by_num_blocks) == (runs["first"].rows, {}, {})
    assert alone.drawn_only == ()


def test_a_line_is_of_the_seeds_that_all_of_its_points_have() -> None:
    """Means over other seeds would be those of other splits."""
    runs = make_runs()
    second = replace(runs["first"], name="second", rows=(make_row("dnis", 4.0, seed=1), make_row("dense", 1.0, seed=1)))
    lines = combine([runs["first"], second, runs["narrow"]]).by_embedding_dim
    assert all({row.seed for _, row in points} == {0} for points in lines.values())
    assert {d for d, _ in lines["dense"]} == {4, 8}
    apart = combine([second, runs["narrow"]]).by_embedding_dim
    assert sorted((d, row.seed) for d, row in apart["dense"]) == [(4, 0), (8, 1)]


def test_runs_that_cannot_be_compared_are_refused() -> None:
    runs = make_runs()
    with pytest.raises(ValueError, match=r"run other: expected recipe 'a:b', as first, got 'a:c'"):
        combine([runs["first"], runs["other recipe"]])
    with pytest.raises(ValueError, match=r"run other: expected patience = 3, as first; .* got 9; leave it out"):
        combine([runs["first"], runs["other patience"]])


# Images while searching


IMAGES = ("alpha_per_block", "retained_dims_against_frequency")


class Writer:
    """Takes figures as a SummaryWriter does."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []

    def add_figure(self, tag: str, figure: Figure, step: int) -> None:
        figure.draw_without_rendering()
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.02, "something is cut"
        labels = [label.get_text() for axis in figure.axes for label in axis.get_xticklabels()]
        assert labels
        assert not [label for label in labels if "$" in label]
        assert figure.dpi == 150
        self.written.append((tag, step))


def test_images_take_no_more_than_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 1.0, 1.5, 9.9, 10.1])
    writer = Writer()
    monkeypatch.setattr("dnis_torchrec.report.search_images.time", SimpleNamespace(monotonic=lambda: next(now)))
    images = SearchImages(writer, make_row_blocks())
    assert images.is_due()
    images.draw({4: torch.ones(4, 4)}, 7)
    assert writer.written == [(tag, 7) for tag in IMAGES]
    assert not images.is_due(), "half a second is more than a twentieth of 9.9"
    assert images.is_due()


@pytest.mark.usefixtures("gloo")
def test_a_search_leaves_images_and_a_report_of_two_runs(tmp_path: Path) -> None:
    run_search(quick_job(tmp_path / "one"))
    with without_images():
        run_search(quick_job(tmp_path / "two", settings=replace(QUICK, num_blocks=2)))
    log = EventAccumulator(str(tmp_path / "one" / "tensorboard" / "one"), size_guidance={"images": 0})
    log.Reload()
    steps = {tag: [event.step for event in log.Images(tag)] for tag in log.Tags()["images"]}
    assert set(steps) == {*IMAGES}
    assert all(found[0] == 10 and found[-2:] == [18, 28] for found in steps.values()), "the last of a phase"
    page = run_report(tmp_path / "one", [tmp_path / "two"])
    text = page.read_text()
    assert all(f'id="figure-{name}"' in text for name in ("num-blocks", "row-distribution", "alpha-distribution"))
    assert 'id="figure-embedding-dim"' not in text
    with pytest.raises(ValueError, match=r"no run\.json in it"):
        run_report(tmp_path / "one", [tmp_path])
