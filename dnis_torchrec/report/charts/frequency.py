"""Retained dims against frequency: block by block, and row by row with both marginal distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plotly import graph_objects as go
from plotly.subplots import make_subplots

from dnis_torchrec.checks import check
from dnis_torchrec.report.charts.search import LOW_TO_HIGH
from dnis_torchrec.report.charts.style import (
    BLUE,
    GREY,
    ORANGE,
    framed,
    line,
    log_axis,
    series_style,
)
from dnis_torchrec.report.content import BlockSummary
from dnis_torchrec.report.row_distribution import BINS_PER_DECADE, RowDistribution
from dnis_torchrec.report.tables import format_count


def retained_dims(blocks: Sequence[BlockSummary]) -> go.Figure:
    """Retained dims of every block over how often its rows occur: one colour and mark per table,
    area by rows."""
    check(len(blocks) > 0, "blocks", "at least one block", "none", "leave the chart out")
    seen = [block.occurrences_per_row for block in blocks if block.occurrences] or [1.0, 10.0]
    never = min(seen) / 4
    most_rows = max(1, *(block.num_rows for block in blocks))
    figure = go.Figure()
    for index, table in enumerate(dict.fromkeys(block.table for block in blocks)):
        mine = sorted(
            (block for block in blocks if block.table == table),
            key=lambda block: block.occurrences_per_row,
        )
        x = [block.occurrences_per_row or never for block in mine]
        sizes = [6 + 16 * math.sqrt(block.num_rows / most_rows) for block in mine]
        told = [_facts(block) for block in mine]
        trace = line(table, x, [block.retained_dims for block in mine], series_style(index), told)
        figure.add_trace(trace.update(marker={"size": sizes, "opacity": 0.85}, line={"width": 1}))
    dims = sorted({block.embedding_dim for block in blocks})
    limit = " or ".join(map(str, dims)) if len(dims) <= 3 else f"up to {dims[-1]}"
    framed(figure, f"retained dims per row (of {limit})", height=420)
    has_never = any(not block.occurrences for block in blocks)
    title = "mean occurrences per row of the block (log scale)"
    axis = log_axis(never if has_never else min(seen), max(seen), format_count, title)
    if has_never:
        kept = [
            (at, text)
            for at, text in zip(axis["tickvals"], axis["ticktext"], strict=True)
            if at > 2 * never
        ]
        axis |= {
            "tickvals": [never, *(at for at, _ in kept)],
            "ticktext": ["never", *(text for _, text in kept)],
        }
        figure.add_vline(never * 2, line={"color": GREY, "width": 1, "dash": "dot"})
    return figure.update_xaxes(axis).update_yaxes(range=[-0.05 * dims[-1], 1.08 * dims[-1]])


def _facts(block: BlockSummary) -> list[str]:
    return [
        f"block {block.block}: {format_count(block.retained_dims)} of {block.embedding_dim} dims",
        f"{block.num_rows:,} rows",
        f"{format_count(block.occurrences_per_row)} occurrences per row",
    ]


def joint_distribution(rows: RowDistribution) -> go.Figure:
    """Joint distribution of frequency and retained dims over all rows, with both marginals: the
    paper's joint plot."""
    counts = rows.num_rows.tolist()
    bins, dims = range(1, len(counts)), list(range(rows.embedding_dim + 1))
    places = [-3, *bins]  # a gap sets apart what never occurs
    in_bin = [sum(of_bin) for of_bin in counts]
    figure = make_subplots(
        rows=2,
        cols=2,
        shared_xaxes=True,
        shared_yaxes=True,
        column_widths=[0.82, 0.18],
        row_heights=[0.2, 0.8],
        horizontal_spacing=0.02,
        vertical_spacing=0.03,
    )
    told = [
        [
            f"<b>{count:,} rows</b><br>{r} dims retained<br>{_told_bin(f)}"
            for f, count in enumerate(of_dim)
        ]
        for r, of_dim in enumerate(zip(*counts, strict=True))
    ]
    cells = [
        [math.log10(count) if count else None for count in of_dim]
        for of_dim in zip(*counts, strict=True)
    ]
    heat = go.Heatmap(
        x=places,
        y=dims,
        z=cells,
        text=told,
        hoverinfo="text",
        colorscale=LOW_TO_HIGH,
        showscale=False,
        name="rows",
    )
    figure.add_trace(heat, row=2, col=1)
    seen = [f for f in bins if in_bin[f]]
    means = [sum(r * count for r, count in enumerate(counts[f])) / in_bin[f] for f in seen]
    told_means = [[f"{mean:.2f} dims", _told_bin(f)] for f, mean in zip(seen, means, strict=True)]
    mean = line(
        "mean at a frequency", list(map(float, seen)), means, (ORANGE, "circle"), told_means
    )
    figure.add_trace(mean.update(marker={"size": 7}, showlegend=False), row=2, col=1)
    for horizontal, at, sizes in (
        (False, places, in_bin),
        (True, dims, [sum(r) for r in zip(*counts, strict=True)]),
    ):
        texts = [f"{size:,} rows" for size in sizes]
        x, y = (sizes, at) if horizontal else (at, sizes)
        bars = go.Bar(
            x=x,
            y=y,
            orientation="h" if horizontal else "v",
            hovertext=texts,
            hoverinfo="text",
            width=0.86,
        )
        bars.update(marker={"color": BLUE}, showlegend=False)
        figure.add_trace(bars, row=2 if horizontal else 1, col=2 if horizontal else 1)
    framed(figure, "retained dims of a row, and how many rows there are", height=460)
    starts = range(1, len(counts) + 1, BINS_PER_DECADE)
    ticks = {start - 0.5: format_count(10 ** ((start - 1) / BINS_PER_DECADE)) for start in starts}
    ticks |= {-3.0: "never"} if in_bin[0] else {}
    title = "occurrences of a row in training (log scale)"
    figure.update_xaxes(
        tickvals=list(ticks), ticktext=list(ticks.values()), title={"text": title}, row=2, col=1
    )
    if not in_bin[0]:
        figure.update_xaxes(range=[0.3, len(counts) - 0.3], row=2, col=1)
    figure.update_xaxes(showgrid=False, zeroline=False).update_xaxes(
        showticklabels=False, row=2, col=2
    )
    return figure.update_yaxes(nticks=3, row=1, col=1)


def _told_bin(index: int) -> str:
    """What frequencies a bin holds, in words."""
    if index == 0:
        return "never seen in training"
    low, high = (10 ** (end / BINS_PER_DECADE) for end in (index - 1, index))
    return f"seen {format_count(math.ceil(low))} to {format_count(max(math.ceil(low), math.ceil(high) - 1))} times"
