"""Style of all figures: colours, markers, type, log axes, legends; no global state of pyplot.

Colours are those of Okabe and Ito, told apart by colour-blind readers too, the light ones darkened to stand out from
white by 3 to 1; markers say the same thing a second time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from dnis_torchrec.report.content import WITH_VALIDATION, base_method

BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#222222"
PURPLE, SKY, YELLOW, GREY, BROWN = "#CC79A7", "#3A96CE", "#B98000", "#8A8A8A", "#7A4A2B"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
METHOD_STYLES = {
    "dnis": (BLUE, "o"),
    "uniform": (ORANGE, "s"),
    "uniform-grid": (ORANGE, "D"),
    "low-rank": (BROWN, "X"),
    "magnitude": (GREEN, "^"),
    "magnitude-iterative": (GREEN, "v"),
    "dense": (BLACK, "D"),
    "uncompressed": (BLACK, "D"),
    "int8 rows": (YELLOW, "s"),
    "int4 rows": (YELLOW, "^"),
    "no-embeddings": (GREY, "*"),
    "dnis-paper": (SKY, "o"),
    "dnis-unrolled": (SKY, "s"),
    "compress": (BLUE, "D"),
    "int4-qat": (ORANGE, "v"),
    "qr": (BROWN, "D"),
    "hash": (BROWN, "o"),
    "pep": (GREEN, "P"),
    "mde": (PURPLE, "v"),
    "random": (YELLOW, "P"),
    "nis-se": (GREY, "s"),
    "nis-me": (GREY, "X"),
}
"""Methods that look the same in every figure; the others take what is left, see `method_styles`."""
OTHER_COLOURS, OTHER_MARKERS = (PURPLE, SKY, YELLOW), ("<", ">", "*", "h")
FIGURE_WIDTH = 8.6
TICK_CHARACTER = 0.014
"""Room for a character of a tick and for the gap beside one, as a share of an axis."""
STYLE: Any = {  # Any: matplotlib types the key as a literal of all its parameters
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelcolor": "#333333",
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "text.parse_math": False,  # a dollar sign in a table name is a dollar sign
}

_P = ParamSpec("_P")


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Decorates a function that draws a figure: it draws in the style of the report, whatever the user's own is.

    Args:
        draw: makes and returns the figure.
    """

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def method_styles(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of every method, in the order in which a legend names them: known ones first.

    A method and its row with the validation split have the same; figures draw the latter hollow and dashed.

    Args:
        methods: names of rows, repeated or not, in any order.

    Returns:
        name -> (colour, marker), each name once.

    Example:
        >>> method_styles(["mine", "uniform+validation", "dnis"])
        {'dnis': ('#0072B2', 'o'), 'uniform+validation': ('#D55E00', 's'), 'mine': ('#CC79A7', '<')}
    """
    present = set(methods)
    others = sorted({base_method(method) for method in present} - METHOD_STYLES.keys())
    styles = dict(METHOD_STYLES)
    for index, method in enumerate(others):
        styles[method] = (OTHER_COLOURS[index % len(OTHER_COLOURS)], OTHER_MARKERS[index % len(OTHER_MARKERS)])
    both_rows = ((name, style) for method, style in styles.items() for name in (method, method + WITH_VALIDATION))
    return {name: style for name, style in both_rows if name in present}


def short(name: str, limit: int = 26) -> str:
    """A name cut to a length that fits beside a figure.

    Args:
        name: any text.
        limit: characters that fit, the ellipsis counted; 26 by default.

    Example:
        >>> len(short("x" * 40))
        26
    """
    return name if len(name) <= limit else name[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def direction(metric: str, higher_is_better: bool) -> str:
    """Label of an axis that shows a metric.

    Example:
        >>> direction("auc", True)
        'auc (higher is better)'
    """
    return f"{short(metric)} ({'higher' if higher_is_better else 'lower'} is better)"


def legend_beside(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], title: str) -> Legend:
    """A legend beside the axes; with handles and labels given, names that begin with an underscore are shown too.

    Args:
        figure: with a constrained layout, which makes room.
        handles: the artists that the legend explains.
        labels: one per handle.
        title: stands above them.
    """
    return figure.legend(
        handles, labels, loc="outside right upper", title=title, alignment="left", fontsize=8.5, title_fontsize=9
    )


def metric_axis(axis: Axes, metric: str, higher_is_better: bool) -> None:
    """Makes the y axis show a metric: round ticks, no offset, the direction in the label.

    Args:
        axis: changed in place.
        metric: name of the metric, cut where it is long.
        higher_is_better: its direction.
    """
    axis.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axis.ticklabel_format(axis="y", style="plain", useOffset=False)
    axis.grid(axis="y")
    axis.set_ylabel(direction(metric, higher_is_better))


def log_axis(axis: Axes, low: float, high: float, tick_text: Callable[[float], str], *, first: float = 0.0) -> None:
    """Makes the x axis logarithmic from `low` to `high`, with round ticks from `first` on.

    Args:
        axis: changed in place.
        low: left end, above 0.
        high: right end, above `low`.
        tick_text: value -> text at its tick.
        first: no tick stands to the left of it; 0 by default, so that ticks begin with `low`.
    """
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.xaxis.set_major_locator(FixedLocator(ticks_with_room(axis, log_ticks(max(low, first), high), tick_text)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    axis.xaxis.set_minor_formatter(NullFormatter())


def ticks_with_room(axis: Axes, values: Sequence[float], tick_text: Callable[[float], str]) -> list[float]:
    """Those of rising values whose texts have room beside each other on a logarithmic axis, the largest in any case.

    Args:
        axis: logarithmic, its limits set.
        values: above 0, at least one.
        tick_text: value -> text at its tick; the longest one decides the room.

    Returns:
        The values kept, rising.
    """
    low, high = axis.get_xlim()
    room = TICK_CHARACTER * (1 + max(len(tick_text(value)) for value in values)) * math.log(high / low)
    kept = [values[-1]]
    for value in reversed(values[:-1]):
        if math.log(kept[-1] / value) >= room:
            kept.append(value)
    return kept[::-1]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two bounds: decades for a wide range, finer steps until at least three fit.

    Args:
        low: above 0.
        high: at least `low`.

    Returns:
        Rising; where no round number lies between the bounds, their geometric mean alone.

    Example:
        >>> log_ticks(1, 1000), log_ticks(3, 30)
        ([1.0, 10.0, 100.0, 1000.0], [5.0, 10.0, 20.0])
    """
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)):
        ticks = [step * 10.0**exponent for exponent in exponents for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks
    return ticks or [math.sqrt(low * high)]
